//! The conflict set by brute force: every committed write is kept and every pair is compared.
//!
//! The oracle of the simulator and of this crate's tests. It follows the rules in [`super`] word by word and
//! shares no code with the set, only the types of question and answer; so a slip in one shows against the
//! other.

use common::message::Verdict;
use common::{Ranges, Version};

use super::{Candidate, Decided};

/// `[begin, end)`; holds no key unless `begin < end`.
#[derive(Clone, Debug)]
struct Span {
    begin: Vec<u8>,
    end: Vec<u8>,
}

impl Span {
    fn list(ranges: &Ranges) -> Vec<Self> {
        ranges.iter().map(|r| Self { begin: r.begin.to_vec(), end: r.end_key() }).collect()
    }

    /// Whether some key is in both. If any is, the larger of the two begins is.
    fn meets(&self, other: &Self) -> bool {
        let key = (&self.begin).max(&other.begin);
        [self, other].iter().all(|span| span.begin <= *key && *key < span.end)
    }
}

/// All committed writes, and how far back reads may go.
#[derive(Clone, Debug)]
pub struct Model {
    oldest: Version,
    committed: Vec<(Version, Span)>,
}

impl Model {
    /// Nothing is written yet.
    #[must_use]
    pub const fn new(oldest: Version) -> Self {
        Self { oldest, committed: Vec::new() }
    }

    /// How many write ranges it remembers.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.committed.len()
    }

    /// Whether it remembers none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.committed.is_empty()
    }

    /// Reads below `oldest` are too old from now on. A lower value than the present one changes nothing.
    pub fn advance_oldest(&mut self, oldest: Version) {
        if oldest > self.oldest {
            self.oldest = oldest;
        }
    }

    /// Drops writes that no read in the window can conflict with. For long runs; verdicts stay the same.
    pub fn forget(&mut self) {
        self.committed.retain(|(version, _)| *version > self.oldest);
    }

    /// Decides a batch as [`super::ConflictSet::decide`] should.
    pub fn decide(&mut self, version: Version, batch: &[Candidate<'_>]) -> Decided {
        let mut decided = Decided::default();
        let mut batch_writes: Vec<Span> = Vec::new();
        for candidate in batch {
            let reads = Span::list(candidate.reads);
            let met_history = |read: &Span| {
                let newer = |at: Version| at > candidate.read_version;
                self.committed.iter().any(|(at, write)| newer(*at) && read.meets(write))
            };
            let met_batch = |read: &Span| batch_writes.iter().any(|write| read.meets(write));
            let conflicting: Vec<u32> = (0..)
                .zip(&reads)
                .filter(|(_, read)| met_history(read) || met_batch(read))
                .map(|(index, _)| index)
                .collect();
            if !reads.is_empty() && candidate.read_version < self.oldest {
                decided.verdicts.push(Verdict::TooOld);
            } else if !conflicting.is_empty() {
                decided.in_batch_conflicts += usize::from(reads.iter().any(met_batch));
                let ranges = if candidate.report_conflicts { conflicting } else { Vec::new() };
                decided.verdicts.push(Verdict::Conflict { ranges });
            } else {
                decided.verdicts.push(Verdict::Committed);
                batch_writes.extend(Span::list(candidate.writes));
            }
        }
        self.committed.extend(batch_writes.into_iter().map(|write| (version, write)));
        decided
    }
}
