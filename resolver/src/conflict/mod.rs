//! The conflict set: for every key, the newest version that wrote it, as far back as the window reaches.
//!
//! Place: the resolver's role feeds it every batch of the chain once, in chain order (I1, I2), and moves the
//! window. It has no messages and no time of its own.
//!
//! # What it decides
//!
//! A batch has one version; its transactions are decided one after the other. For each, in this order:
//!
//! 1. **Too old** iff it has at least one read range and its read version is below [`ConflictSet::oldest`]
//!    (equal is fine). The window is the one that holds when the batch is decided. An *empty* read range
//!    counts as a read range here: whoever sends one claims to have read at that version.
//! 2. **Conflict** iff one of its read ranges shares a key with a write range
//!    - of an earlier batch whose version is above the read version (equal is fine), or
//!    - of an earlier transaction of this batch that was decided *committed*, whatever the read version,
//!      even one at or above the batch's version.
//! 3. **Committed** otherwise, and only then do its writes count for those behind it.
//!
//! So its own writes never conflict with its own reads; two blind writers of one key both commit; a blind
//! write is never too old and never conflicts; what only reads leaves no trace.
//!
//! Ranges are half-open, so neighbours don't meet. A range with `begin >= end` holds no key: as a read it
//! never conflicts, as a write it writes nothing. The empty key is a key like any other. A point counts the
//! same as `[k, k ++ 0x00)` spelt out.
//!
//! With `report_conflicts` a conflict names *all* read ranges that conflict, ascending; without it none.
//!
//! # How it is kept
//!
//! ```text
//!             ""        b         d         f                  q       t
//! gaps        |  none   |   v7    |   v9    |       none       |  v4   |  none ...   general write ranges
//! points               a\0=v3          e=v8        k=v12                             single keys
//!
//! newest write of a key = max(version of the step that holds it, version of the point at it)
//!                    e -> max(v9, v8) = v9        k -> max(none, v12) = v12
//! ```
//!
//! A single key costs one entry and one look-up; only general ranges pay for order. A point under a newer
//! step is left where it is: it is outshone until it leaves. Reads consult both maps.
//!
//! # Invariants (asserted by [`ConflictSet::check`])
//!
//! - `oldest <= newest`, and every stored version is at or below `newest`
//! - a step's version differs from the one before it; the first step is not "none"; the last one is
//! - no point is at version 0, which means "none"
//! - a version above `oldest` is never dropped, only outshone (I5); one at or below `oldest` can't decide
//!   anything any more, since a read must be older than it to conflict. So [`ConflictSet::evict`] changes
//!   memory and nothing else.

mod gaps;
pub mod model;
mod points;
#[cfg(test)]
mod tests;

use core::hash::{Hash, Hasher};

use common::message::Verdict;
use common::{KeyRange, RangeEnd, Ranges, Version};

use gaps::Gaps;
use points::Points;

/// Transactions in a batch, at most, inclusive: a place in the batch is a `u16`.
pub const BATCH_TRANSACTIONS_MAX: usize = 65_535;

/// Entries that [`ConflictSet::evict`] looks at for each one written, on top of its caller's budget.
///
/// One lap over n entries takes n/4 writes, so what left the window is at most a third of what is in it.
pub const EVICT_ENTRIES_PER_WRITE: usize = 4;

/// What an entry costs besides its key: 24 bytes of a B-tree node that is two thirds full, and what the
/// allocator adds to a short key.
const ENTRY_OVERHEAD_BYTES: usize = 56;

/// "Nobody wrote this in the window": no read version is below it.
const NONE: Version = Version::ZERO;

/// What the conflict set needs to know of a transaction.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The snapshot of its reads, inclusive: it saw writes at this version.
    pub read_version: Version,
    /// What it read.
    pub reads: &'a Ranges,
    /// What it writes.
    pub writes: &'a Ranges,
    /// Whether a conflict names the read ranges.
    pub report_conflicts: bool,
}

/// The word on a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Decided {
    /// One for each transaction, in order.
    pub verdicts: Vec<Verdict>,
    /// Conflicts in which a read met a write of this very batch, whatever else it met.
    pub in_batch_conflicts: usize,
}

/// Which map eviction is in.
#[derive(Clone, Copy, Debug)]
enum Lap {
    Points,
    Gaps,
}

/// The newest write of every key, in a window of versions.
///
/// `Eq` and `Hash` look at what can still decide something: neither eviction nor its progress shows. Equal
/// sets decide alike for ever.
#[derive(Clone, Debug)]
pub struct ConflictSet {
    /// Read versions below it are too old.
    oldest: Version,
    /// The last batch, or `oldest` where that is higher: the next batch must be above it.
    newest: Version,
    points: Points,
    gaps: Gaps,
    lap: Lap,
    /// Entries that eviction owes for writes since it last ran.
    evict_owed: usize,
}

impl ConflictSet {
    /// An empty set whose window begins at `oldest`: reads below it are too old, and the first batch must be
    /// above it. Whatever was written at or below `oldest` is forgotten.
    #[must_use]
    pub const fn new(oldest: Version) -> Self {
        Self {
            oldest,
            newest: oldest,
            points: Points::new(),
            gaps: Gaps::new(),
            lap: Lap::Points,
            evict_owed: 0,
        }
    }

    /// The oldest read version that is not too old, inclusive. Nothing written at or below it matters.
    #[must_use]
    pub const fn oldest(&self) -> Version {
        self.oldest
    }

    /// Entries in memory, those that wait for eviction included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.points.len() + self.gaps.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// About how much memory the entries take.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.points.key_bytes() + self.gaps.key_bytes() + self.len() * ENTRY_OVERHEAD_BYTES
    }

    /// Decides a batch and takes in the writes of what commits, in one step (I2).
    ///
    /// `version` must be above every earlier batch and above [`ConflictSet::oldest`].
    pub fn decide(&mut self, version: Version, batch: &[Candidate<'_>]) -> Decided {
        assert!(
            version > self.newest,
            "batch {version} is not above {}: not taken in chain order (I1)",
            self.newest
        );
        assert!(
            batch.len() <= BATCH_TRANSACTIONS_MAX,
            "{} transactions in batch {version}, at most {BATCH_TRANSACTIONS_MAX}",
            batch.len()
        );
        self.newest = version;
        let mut decided =
            Decided { verdicts: Vec::with_capacity(batch.len()), ..Decided::default() };
        for &candidate in batch {
            let verdict = self.decide_one(version, candidate);
            match &verdict {
                Verdict::Committed => self.write(version, candidate.writes),
                Verdict::Conflict { .. } => {
                    let before = version.minus_saturating(1);
                    let met_batch = candidate.reads.iter().any(|read| self.is_newer(read, before));
                    decided.in_batch_conflicts += usize::from(met_batch);
                }
                Verdict::TooOld => {}
            }
            decided.verdicts.push(verdict);
        }
        decided
    }

    /// Moves the window: reads below `oldest` are too old from now on. A lower value than the present one
    /// changes nothing.
    pub fn advance_oldest(&mut self, oldest: Version) {
        self.oldest = self.oldest.max(oldest);
        self.newest = self.newest.max(self.oldest);
    }

    /// Frees what left the window, in a bounded step: looks at `entries` entries, and at
    /// [`EVICT_ENTRIES_PER_WRITE`] more for each entry written since the last call, so that it keeps up
    /// with any load. Returns how many went. Meant to be called after each batch.
    pub fn evict(&mut self, entries: usize) -> usize {
        let mut left = entries.saturating_add(core::mem::take(&mut self.evict_owed));
        let len_before = self.len();
        // Both maps once, at most: more would look at the same entries again.
        for _ in 0..2 {
            if left == 0 {
                break;
            }
            let seen = match self.lap {
                Lap::Points => self.points.sweep(self.oldest, left),
                Lap::Gaps => self.gaps.sweep(self.oldest, left),
            };
            assert!(seen <= left, "eviction looked at {seen} entries of {left}");
            if seen == left {
                break;
            }
            left -= seen;
            self.lap = match self.lap {
                Lap::Points => Lap::Gaps,
                Lap::Gaps => Lap::Points,
            };
        }
        len_before - self.len()
    }

    /// Asserts the invariants of the module header. Visits every entry.
    pub fn check(&self) {
        assert!(self.oldest <= self.newest, "oldest {} > newest {}", self.oldest, self.newest);
        self.points.check(self.newest);
        self.gaps.check(self.newest);
    }

    fn decide_one(&self, version: Version, candidate: Candidate<'_>) -> Verdict {
        let Candidate { read_version, reads, report_conflicts, .. } = candidate;
        if !reads.is_empty() && read_version < self.oldest {
            return Verdict::TooOld;
        }
        // The writes of this batch's committed transactions are in the maps already, at `version`. A read
        // version from the future must lose to them, and there is no history at or above `version`.
        let seen_up_to = read_version.min(version.minus_saturating(1));
        if !report_conflicts {
            return if reads.iter().any(|read| self.is_newer(read, seen_up_to)) {
                Verdict::Conflict { ranges: Vec::new() }
            } else {
                Verdict::Committed
            };
        }
        let ranges: Vec<u32> = (0_u32..)
            .zip(reads.iter())
            .filter(|&(_, read)| self.is_newer(read, seen_up_to))
            .map(|(index, _)| index)
            .collect();
        if ranges.is_empty() { Verdict::Committed } else { Verdict::Conflict { ranges } }
    }

    /// Whether a key of `read` was written above `version`.
    fn is_newer(&self, read: KeyRange<'_>, version: Version) -> bool {
        match read.end {
            RangeEnd::Point => {
                self.points.version_at(read.begin) > version
                    || self.gaps.version_at(read.begin) > version
            }
            RangeEnd::Before(end) if read.begin < end => {
                self.gaps.is_newer(read.begin, end, version)
                    || self.points.is_newer(read.begin, end, version)
            }
            RangeEnd::Before(_) => false,
        }
    }

    fn write(&mut self, version: Version, writes: &Ranges) {
        let mut entries = 0;
        for write in writes.iter() {
            match write.end {
                RangeEnd::Point => {
                    self.points.write(write.begin, version);
                    entries += 1;
                }
                RangeEnd::Before(end) if write.begin < end => {
                    self.gaps.write(write.begin, end, version);
                    entries += 2;
                }
                RangeEnd::Before(_) => {}
            }
        }
        self.evict_owed += entries * EVICT_ENTRIES_PER_WRITE;
    }

    /// The points that can still decide something.
    fn live_points(&self) -> impl Iterator<Item = (&[u8], Version)> {
        self.points
            .iter()
            .filter(|&(key, version)| version > self.oldest.max(self.gaps.version_at(key)))
    }
}

impl PartialEq for ConflictSet {
    fn eq(&self, other: &Self) -> bool {
        self.oldest == other.oldest
            && self.newest == other.newest
            && self.live_points().eq(other.live_points())
            && self.gaps.live(self.oldest).eq(other.gaps.live(other.oldest))
    }
}

impl Eq for ConflictSet {}

impl Hash for ConflictSet {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.oldest, self.newest).hash(state);
        self.live_points().for_each(|entry| entry.hash(state));
        NONE.hash(state); // Parts the points from the steps.
        self.gaps.live(self.oldest).for_each(|entry| entry.hash(state));
    }
}
