//! A run: what some batches in a row wrote, in key order, and never changed again.
//!
//! ```text
//! entries     | a v42 | c v44 | d v43 | k v42 | m v44 | ...        16 bytes each: head, number, key
//! directory   |   0       |    3      | ...                        by the head's upper bits: first entry
//! maxima      |         44            | ...                        of 32 entries, and of 1024
//!
//! a run of points:    an entry is a key and the last batch that wrote it
//! a run of gaps:      an entry is a boundary: the batch that wrote from here to the next one, or none
//! ```
//!
//! A look-up goes by the directory to the entry, two cache lines, whatever the size. The maxima let wide
//! reads pass over what they have seen.
//!
//! # Invariants
//! - entries ascend strictly; heads are of the run's encoding; the key of an exact head is not kept
//! - numbers are in `low..=high`, or none in a run of gaps, whose last entry is none and whose neighbours
//!   differ

use core::cmp::Ordering;
use std::sync::Arc;

use super::head::{Encoding, Head, Probe};
use super::keylog::{KeyLog, KeyRef};
use super::window::Seq;

/// Entries that one maximum covers, and maxima that one of the level above covers.
const BLOCK: usize = if cfg!(test) { 2 } else { 32 };
/// Entries that a read looks at before it turns to the maxima.
const STEPS_MAX: usize = if cfg!(test) { 2 } else { 24 };
/// Entries that one place of the directory stands for, about.
const ENTRIES_PER_PLACE: usize = 2;
/// Runs of more entries than this are taken to be far from the processor.
const FAR_ENTRIES: usize = if cfg!(test) { 4 } else { 1 << 13 };
/// Look-ups in a far run that go side by side.
const GROUP: usize = 16;

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) head: Head,
    pub(super) seq: Seq,
    /// Where the key is, unless the head is exact.
    pub(super) key: KeyRef,
}

/// A read range that looks for something newer than `seen`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query<'a> {
    pub(super) begin: Probe<'a>,
    /// `None`: the one key `begin`.
    pub(super) end: Option<Probe<'a>>,
    pub(super) seen: Seq,
    /// The read, for the caller.
    pub(super) read: u32,
}

/// What the entries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Points,
    Gaps,
}

#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) encoding: Arc<Encoding>,
    pub(super) low: Seq,
    pub(super) high: Seq,
    entries: Vec<Entry>,
    directory: Directory,
    maxima: [Vec<Seq>; 2],
}

/// From the upper bits of a head to the first entry at or above them.
#[derive(Clone, Debug)]
struct Directory {
    places: Vec<u32>,
    first: u64,
    last: u64,
    shift: u32,
}

impl Directory {
    fn new(first: Head, last: Head, entries: usize) -> Self {
        let span = last.0 - first.0;
        let wanted = (entries / ENTRIES_PER_PLACE).max(1) as u64;
        let bits = (64 - span.leading_zeros()).saturating_sub(wanted.ilog2());
        let places = (span >> bits.min(63)) as usize + 2;
        Self { places: vec![0; places], first: first.0, last: last.0, shift: bits.min(63) }
    }

    /// The place of a head in `first..=last`.
    fn place(&self, head: Head) -> usize {
        ((head.0 - self.first) >> self.shift) as usize
    }

    /// The place of any head: the nearest one.
    fn place_near(&self, head: Head) -> usize {
        self.place(Head(head.0.clamp(self.first, self.last)))
    }
}

/// Makes a run out of entries in order.
#[derive(Clone, Debug)]
pub(super) struct Builder {
    run: Run,
    /// Places of the directory that are known.
    placed: usize,
}

impl Builder {
    /// For at most `entries_max` entries with heads in `first..=last`.
    pub(super) fn new(
        encoding: Arc<Encoding>,
        (low, high): (Seq, Seq),
        (first, last): (Head, Head),
        entries_max: usize,
    ) -> Self {
        assert!(low <= high && first <= last, "{low:?}..={high:?}, {first:?}..={last:?}");
        let blocks = |size: usize| Vec::with_capacity(entries_max.div_ceil(size));
        Self {
            run: Run {
                encoding,
                low,
                high,
                entries: Vec::with_capacity(entries_max),
                directory: Directory::new(first, last, entries_max),
                maxima: [blocks(BLOCK), blocks(BLOCK * BLOCK)],
            },
            placed: 0,
        }
    }

    pub(super) const fn low(&self) -> Seq {
        self.run.low
    }

    pub(super) fn push(&mut self, entry: Entry) {
        let run = &mut self.run;
        let index = run.entries.len();
        let place = run.directory.place(entry.head);
        if self.placed <= place {
            run.directory.places[self.placed..=place].fill(index as u32);
            self.placed = place + 1;
        }
        for (maxima, size) in run.maxima.iter_mut().zip([BLOCK, BLOCK * BLOCK]) {
            match maxima.last_mut() {
                Some(last) if !index.is_multiple_of(size) => *last = (*last).max(entry.seq),
                _ => maxima.push(entry.seq),
            }
        }
        run.entries.push(entry);
    }

    pub(super) fn last(&self) -> Option<&Entry> {
        self.run.entries.last()
    }

    pub(super) fn finish(mut self) -> Run {
        let len = self.run.entries.len();
        assert!(u32::try_from(len).is_ok(), "{len} entries in a run");
        self.run.directory.places[self.placed..].fill(len as u32);
        self.run
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.run.memory_bytes()
    }
}

impl Run {
    /// What batch `seq` wrote.
    pub(super) fn of_batch(encoding: Arc<Encoding>, seq: Seq, entries: Vec<Entry>) -> Self {
        let head = |entry: Option<&Entry>| entry.map_or_else(Head::default, |entry| entry.head);
        let heads = (head(entries.first()), head(entries.last()));
        let mut builder = Builder::new(encoding, (seq, seq), heads, entries.len());
        entries.into_iter().for_each(|entry| builder.push(entry));
        builder.finish()
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The heads that the entries are within.
    pub(super) fn heads(&self) -> (Head, Head) {
        (Head(self.directory.first), Head(self.directory.last))
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let maxima = self.maxima[0].len() + self.maxima[1].len();
        size_of_val(&self.entries[..])
            + size_of_val(&self.directory.places[..])
            + maxima * size_of::<Seq>()
            + size_of::<Self>()
    }

    /// Calls `met` for each query that meets something newer than it has seen, in the order of the queries.
    /// Probes must be of the run's encoding.
    pub(super) fn meet(
        &self,
        kind: Kind,
        log: &KeyLog,
        queries: &[Query<'_>],
        mut met: impl FnMut(u32),
    ) {
        if self.entries.is_empty() {
            return;
        }
        for group in queries.chunks(GROUP) {
            if self.entries.len() > FAR_ENTRIES {
                self.touch(group);
            }
            for query in group {
                if self.is_newer(kind, log, query) {
                    met(query.read);
                }
            }
        }
    }

    /// Asks for the lines of a group before any of them is needed, so that their misses overlap.
    fn touch(&self, group: &[Query<'_>]) {
        let mut at = [0_usize; GROUP];
        for (at, query) in at.iter_mut().zip(group) {
            let place = self.directory.place_near(query.begin.head);
            *at = self.directory.places[place] as usize;
        }
        let last = self.entries.len() - 1;
        let sum: u32 = at.iter().map(|at| self.entries[(*at).min(last)].seq.0 & 1).sum();
        core::hint::black_box(sum);
    }

    fn is_newer(&self, kind: Kind, log: &KeyLog, query: &Query<'_>) -> bool {
        let mut at = self.lower_bound(log, query.begin);
        match (kind, query.end) {
            (Kind::Points, None) => {
                let entry = self.entries.get(at);
                entry.is_some_and(|entry| {
                    self.compare(log, entry, query.begin).is_eq() && entry.seq > query.seen
                })
            }
            (Kind::Gaps, None) => {
                self.gap(log, at, query.begin).is_some_and(|gap| gap.seq > query.seen)
            }
            (Kind::Points, Some(end)) => self.any_newer(log, at, end, query.seen),
            (Kind::Gaps, Some(end)) => {
                // The gap that `begin` is in, unless a boundary is right there.
                let is_boundary = self
                    .entries
                    .get(at)
                    .is_some_and(|entry| self.compare(log, entry, query.begin).is_eq());
                at -= usize::from(at > 0 && !is_boundary);
                self.any_newer(log, at, end, query.seen)
            }
        }
    }

    /// The gap that holds `key`, whose lower bound is `at`.
    fn gap(&self, log: &KeyLog, at: usize, key: Probe<'_>) -> Option<&Entry> {
        let boundary = self.entries.get(at);
        if boundary.is_some_and(|entry| self.compare(log, entry, key).is_eq()) {
            return boundary;
        }
        self.entries.get(at.checked_sub(1)?)
    }

    /// Whether an entry from `from` on and before `end` is newer than `seen`.
    fn any_newer(&self, log: &KeyLog, from: usize, end: Probe<'_>, seen: Seq) -> bool {
        let steps = self.entries.len().min(from + STEPS_MAX);
        for entry in &self.entries[from..steps] {
            if self.compare(log, entry, end).is_ge() {
                return false;
            }
            if entry.seq > seen {
                return true;
            }
        }
        let to = self.lower_bound(log, end);
        steps < to && self.any_newer_between(steps, to, seen)
    }

    fn any_newer_between(&self, from: usize, to: usize, seen: Seq) -> bool {
        let (mut at, newer) = (from, |seq: &Seq| *seq > seen);
        while at < to {
            let size = [BLOCK * BLOCK, BLOCK]
                .into_iter()
                .find(|size| at.is_multiple_of(*size) && at + size <= to)
                .unwrap_or(1);
            let found = match size {
                1 => newer(&self.entries[at].seq),
                BLOCK => newer(&self.maxima[0][at / BLOCK]),
                _ => newer(&self.maxima[1][at / (BLOCK * BLOCK)]),
            };
            if found {
                return true;
            }
            at += size;
        }
        false
    }

    /// The first entry at or above `probe`.
    fn lower_bound(&self, log: &KeyLog, probe: Probe<'_>) -> usize {
        if probe.head.0 < self.directory.first {
            return 0;
        }
        if probe.head.0 > self.directory.last {
            return self.entries.len();
        }
        let place = self.directory.place(probe.head);
        let from = self.directory.places[place] as usize;
        let to = self.directory.places[place + 1] as usize;
        let entries = &self.entries[from..to];
        let below = if entries.len() <= 8 {
            entries.iter().take_while(|entry| entry.head < probe.head).count()
        } else {
            entries.partition_point(|entry| entry.head < probe.head)
        };
        let at = from + below;
        match self.entries.get(at) {
            Some(entry) if entry.head == probe.head && !probe.head.is_exact() => {
                self.lower_bound_of_ties(log, at, to, probe)
            }
            _ => at,
        }
    }

    fn lower_bound_of_ties(&self, log: &KeyLog, from: usize, to: usize, probe: Probe<'_>) -> usize {
        let ties = &self.entries[from..to];
        let ties = &ties[..ties.partition_point(|entry| entry.head == probe.head)];
        from + ties.partition_point(|entry| log.key(entry.key) < probe.key)
    }

    fn compare(&self, log: &KeyLog, entry: &Entry, probe: Probe<'_>) -> Ordering {
        entry.head.cmp(&probe.head).then_with(|| {
            if probe.head.is_exact() { Ordering::Equal } else { log.key(entry.key).cmp(probe.key) }
        })
    }

    /// Takes `by` off the numbers of the batches; the run must be above it.
    pub(super) fn renumber(&mut self, by: u32) {
        assert!(by < self.low.0, "{by} is not below {:?}", self.low);
        let seqs = self.entries.iter_mut().map(|entry| &mut entry.seq);
        let bounds = [&mut self.low, &mut self.high];
        for seq in seqs.chain(self.maxima.iter_mut().flatten()).chain(bounds) {
            seq.0 = seq.0.saturating_sub(by);
        }
    }

    pub(super) fn check(&self, kind: Kind, log: &KeyLog, dead: Seq) {
        assert!(self.low <= self.high, "a run of {:?}..={:?}", self.low, self.high);
        for pair in self.entries.windows(2) {
            assert!(compare_entries(log, &pair[0], &pair[1]).is_lt(), "{pair:?} do not ascend");
        }
        for (index, entry) in self.entries.iter().enumerate() {
            let is_none = entry.seq == Seq::NONE;
            let is_within = self.low <= entry.seq && entry.seq <= self.high;
            assert!(is_within || is_none || entry.seq <= dead, "{entry:?} of {self:?}");
            for (maxima, size) in self.maxima.iter().zip([BLOCK, BLOCK * BLOCK]) {
                assert!(entry.seq <= maxima[index / size], "{entry:?} above its maximum");
            }
            let place = self.directory.place(entry.head);
            let places = &self.directory.places[place..place + 2];
            assert!(
                (places[0]..places[1]).contains(&(index as u32)),
                "{index} is not in {places:?}"
            );
        }
        if kind == Kind::Gaps {
            assert!(self.entries.last().is_none_or(|last| last.seq <= dead), "no end: {self:?}");
        }
    }
}

/// Entries of one encoding.
pub(super) fn compare_entries(log: &KeyLog, one: &Entry, two: &Entry) -> Ordering {
    one.head.cmp(&two.head).then_with(|| {
        if one.head.is_exact() { Ordering::Equal } else { log.key(one.key).cmp(log.key(two.key)) }
    })
}
