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
//! Two halves of a decision serve those who can't decide at once: [`ConflictSet::look`] asks history and
//! leaves no trace; [`ConflictSet::touch`] takes all writes in, whatever the reads met, and says what it was.
//!
//! # How it is kept
//!
//! ```text
//!                                a batch: sorted ends of ranges, points hashed
//!                                   |                            |
//!         range reads    ask  [run][run][run] of points          |  point reads and writes ask and change
//!   range and point reads ask [run][run][run] of gaps      [ table of points ]
//!                                oldest ... newest               |
//!                                   `---- keys ---> log <--------'
//! ```
//!
//! - `window` numbers the batches that wrote something; everything keeps these numbers.
//! - `points`: key -> last batch that wrote it. One cache line decides a point read against all points.
//! - `run`: what one batch, or several in a row, wrote, in order: *points* once more, for reads of ranges,
//!   and *gaps*, the step function of written ranges. Never changed; a read asks those newer than what it
//!   has seen.
//! - `tiers` and `merge`: neighbouring runs are merged when reads have paid for it.
//! - `head`: eight bytes stand for a key in all that is ordered. `keylog` has the keys for when they tie.
//! - `batch`, `bits` and `judge`: the order of one batch and its verdicts.
//!
//! What leaves the window is not looked for: a number at or below the window's last dead one can't decide
//! anything. Runs and chunks of the log go as a whole; the table reuses the slots of the dead.
//!
//! # Invariants (asserted by [`ConflictSet::check`])
//!
//! - `oldest <= newest`; the batches of the window are above `oldest` and at or below `newest`
//! - a number above the window's dead ones is never dropped, only replaced by a higher one of the same key
//!   (I5)
//! - a key that a live slot or a run points to is in the log
//! - [`ConflictSet::evict`] and merging change memory and nothing else

mod batch;
mod bits;
mod hash;
mod head;
mod judge;
mod keylog;
mod merge;
pub mod model;
mod points;
mod run;
mod scratch;
#[cfg(test)]
mod tests;
mod tiers;
mod window;

use std::sync::Arc;

use common::message::Verdict;
use common::{Ranges, Version};

use batch::{Layout, What};
use head::Encoding;
use judge::Judge;
use keylog::{KeyLog, KeyRef};
use points::Points;
use run::{Entry, Kind, Query, Run};
use scratch::{Scratch, emptied};
use tiers::Tiers;
use window::{Seq, Window};

/// Transactions in a batch, at most, inclusive: a place in the batch is a `u16`.
pub const BATCH_TRANSACTIONS_MAX: usize = 65_535;

/// Written points for one entry of the spill that eviction looks at.
const WRITES_PER_SWEPT: usize = 4;
/// Runs and chunks that an eviction drops at least, if they have left the window.
const RUNS_PER_EVICTION: usize = 4;
const CHUNKS_PER_EVICTION: usize = 64;
/// Batches between two changes of the encoding, at least.
const ENCODING_BATCHES_MIN: u32 = 16;
/// Keys of a batch that are needed to learn from it.
const LEARN_KEYS_MIN: usize = 8;

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

/// What the reads of a transaction met in [`ConflictSet::touch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[must_use]
pub enum Touch {
    /// Nothing that is newer than they are.
    Nothing,
    /// Writes of earlier batches.
    Earlier,
    /// Writes of earlier transactions of this batch, and perhaps of earlier batches.
    Batch,
}

/// The newest write of every key, in a window of versions.
#[derive(Clone, Debug)]
pub struct ConflictSet {
    /// Read versions below it are too old.
    oldest: Version,
    /// The last batch, or `oldest` where that is higher: the next batch must be above it.
    newest: Version,
    window: Window,
    log: KeyLog,
    points: Points,
    point_runs: Tiers,
    gap_runs: Tiers,
    encoding: Arc<Encoding>,
    /// Batches since the encoding was learned.
    encoding_batches: u32,
    /// Written ranges and points since eviction last ran.
    sweep_owed: usize,
    scratch: Scratch,
}

impl ConflictSet {
    /// An empty set whose window begins at `oldest`: reads below it are too old, and the first batch must be
    /// above it. Whatever was written at or below `oldest` is forgotten.
    #[must_use]
    pub fn new(oldest: Version) -> Self {
        Self {
            oldest,
            newest: oldest,
            window: Window::new(),
            log: KeyLog::new(),
            points: Points::new(),
            point_runs: Tiers::new(Kind::Points),
            gap_runs: Tiers::new(Kind::Gaps),
            encoding: Arc::new(Encoding::default()),
            encoding_batches: ENCODING_BATCHES_MIN,
            sweep_owed: 0,
            scratch: Scratch::default(),
        }
    }

    /// The oldest read version that is not too old, inclusive. Nothing written at or below it matters.
    #[must_use]
    pub const fn oldest(&self) -> Version {
        self.oldest
    }

    /// The last batch, or [`ConflictSet::oldest`] where that is higher: the next batch must be above it.
    #[must_use]
    pub const fn newest(&self) -> Version {
        self.newest
    }

    /// Points that were written in the window, and boundaries of written ranges in memory.
    #[must_use]
    pub fn len(&self) -> usize {
        self.points.len() + self.gap_runs.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// About how much memory all of it takes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.points.memory_bytes()
            + self.point_runs.memory_bytes()
            + self.gap_runs.memory_bytes()
            + self.log.memory_bytes()
            + self.window.memory_bytes()
    }

    /// Decides a batch and takes in the writes of what commits, in one step (I2).
    ///
    /// `version` must be above every earlier batch and above [`ConflictSet::oldest`].
    pub fn decide(&mut self, version: Version, batch: &[Candidate<'_>]) -> Decided {
        self.begin(version);
        self.run(version, batch, |judge| judge.decide())
    }

    /// The verdicts that history alone would have on the reads of a batch. Nothing is taken in, and `version`
    /// needs only be above what was read.
    pub fn look(&mut self, version: Version, batch: &[Candidate<'_>]) -> Vec<Verdict> {
        let nothing = Ranges::default();
        let reads: Vec<Candidate<'_>> =
            batch.iter().map(|candidate| Candidate { writes: &nothing, ..*candidate }).collect();
        self.run(version, &reads, |judge| judge.decide()).verdicts
    }

    /// Takes in the writes of a batch, whatever its reads meet, and says what they met. No read is too old.
    pub fn touch(&mut self, version: Version, batch: &[Candidate<'_>]) -> Vec<Touch> {
        self.begin(version);
        let oldest = self.oldest;
        let raised: Vec<Candidate<'_>> = batch
            .iter()
            .map(|candidate| Candidate {
                read_version: candidate.read_version.max(oldest),
                ..*candidate
            })
            .collect();
        self.run(version, &raised, |judge| judge.touch())
    }

    /// A batch that is to be taken in.
    fn begin(&mut self, version: Version) {
        assert!(
            version > self.newest,
            "batch {version} is not above {}: not taken in chain order (I1)",
            self.newest
        );
        self.newest = version;
        self.renumber_if_due();
    }

    fn run<'a, D>(
        &mut self,
        version: Version,
        batch: &[Candidate<'a>],
        judge: impl for<'s> FnOnce(Judge<'s, 'a>) -> (D, bool),
    ) -> D {
        assert!(
            batch.len() <= BATCH_TRANSACTIONS_MAX,
            "{} transactions in batch {version}, at most {BATCH_TRANSACTIONS_MAX}",
            batch.len()
        );
        let encoding = Arc::clone(&self.encoding);
        let mut layout = self.layout(version, batch);
        if !layout.ranges.is_empty() {
            layout.add_heads(&encoding);
            layout.sort();
        }
        let met = self.meet_history(&layout);

        let dead = self.window.dead();
        self.points.grow(layout.written_points, &self.log);
        let (seq, table) = (self.window.newest().next(), (&mut self.points, &mut self.log));
        let (decided, has_written) = judge(Judge::new(&mut layout, &met, table, (dead, seq)));
        if has_written {
            let pushed = self.window.push(version);
            assert_eq!(pushed, seq, "the batch has another number than its writes");
            self.publish_gaps(&layout, seq);
            self.publish_points(&mut layout, seq);
        }
        self.sweep_owed += layout.written_points;
        self.learn(&layout);
        self.scratch.layout = layout.into_buffers();
        self.scratch.met = met;
        self.point_runs.work(&self.log, &self.window);
        self.gap_runs.work(&self.log, &self.window);
        decided
    }

    /// Moves the window: reads below `oldest` are too old from now on. A lower value than the present one
    /// changes nothing.
    pub fn advance_oldest(&mut self, oldest: Version) {
        self.oldest = self.oldest.max(oldest);
        self.newest = self.newest.max(self.oldest);
        self.window.expire(self.oldest);
        self.points.expire(self.window.dead());
    }

    /// Frees the memory of what left the window, in a bounded step: looks at about `entries` entries, and
    /// at more for what was written since the last call, so that it keeps up with any load; drops some runs
    /// and chunks of keys as a whole. Returns whether there may be more. Meant to be called after each batch.
    pub fn evict(&mut self, entries: usize) -> bool {
        let dead = self.window.dead();
        let owed = core::mem::take(&mut self.sweep_owed) / WRITES_PER_SWEPT;
        self.points.sweep(&self.log, entries.saturating_add(owed) / 8 + 1);
        let runs_max = RUNS_PER_EVICTION + entries / 64;
        self.point_runs.expire(dead, runs_max);
        self.gap_runs.expire(dead, runs_max);
        let unused = self.unused();
        self.log.expire(unused, CHUNKS_PER_EVICTION + entries / 64);
        unused < dead || !self.points.is_swept()
    }

    /// Asserts the invariants of the module header. Visits every entry.
    pub fn check(&self) {
        assert!(self.oldest <= self.newest, "oldest {} > newest {}", self.oldest, self.newest);
        let (dead, newest) = (self.window.dead(), self.window.newest());
        self.window.check(self.oldest, self.newest);
        self.encoding.check();
        self.log.check(newest);
        self.points.check((dead, newest), &self.log);
        self.point_runs.check(&self.log, &self.window);
        self.gap_runs.check(&self.log, &self.window);
    }

    /// The numbers of the batches begin behind `dead`. The set must be empty.
    #[cfg(test)]
    fn start_at(&mut self, dead: u32) {
        self.window.start_at(dead);
        self.points.start_at(Seq(dead));
    }

    fn layout<'a>(&mut self, version: Version, batch: &[Candidate<'a>]) -> Layout<'a> {
        // A read version from the future has seen all of history, and nothing of this batch.
        let before = version.minus_saturating(1);
        let buffers = core::mem::take(&mut self.scratch.layout);
        let wants_heads = self.gap_runs.is_newer(self.window.dead());
        Layout::new(buffers, batch, (&self.encoding, wants_heads), |candidate| {
            let is_too_old = !candidate.reads.is_empty() && candidate.read_version < self.oldest;
            (!is_too_old).then(|| self.window.seen(candidate.read_version.min(before)))
        })
    }

    /// For each access, whether a range of history met it; empty if nothing could.
    fn meet_history(&mut self, layout: &Layout<'_>) -> Vec<bool> {
        let seen = layout.spans.iter().filter(|span| !span.is_too_old).map(|span| span.seen);
        let asks_points =
            layout.reads_points && seen.min().is_some_and(|seen| self.gap_runs.is_newer(seen));
        if !asks_points && !layout.reads_ranges {
            return Vec::new();
        }
        let mut met = core::mem::take(&mut self.scratch.met);
        met.clear();
        met.resize(layout.accesses.len(), false);
        let mut queries: Vec<Query<'_>> = core::mem::take(&mut self.scratch.queries);
        if layout.reads_ranges {
            layout.range_queries(&mut queries);
            self.gap_runs.meet(&self.log, &self.encoding, &queries, &mut met);
            self.point_runs.meet(&self.log, &self.encoding, &queries, &mut met);
            queries.clear();
        }
        if asks_points {
            let runs = &self.gap_runs;
            layout.point_queries(|seen| runs.is_newer(seen), &mut queries);
            self.gap_runs.meet(&self.log, &self.encoding, &queries, &mut met);
        }
        self.scratch.queries = emptied(queries);
        met
    }

    /// The union of the ranges that the batch wrote, as a run of gaps.
    fn publish_gaps(&mut self, layout: &Layout<'_>, seq: Seq) {
        let committed = layout.ranges.iter().filter(|range| range.is_committed).count();
        if committed == 0 {
            return;
        }
        let mut entries: Vec<Entry> = Vec::with_capacity(committed * 2);
        let (mut depth, mut last_key): (u32, &[u8]) = (0, &[]);
        for item in &layout.items {
            let what = item.what();
            if !matches!(what, What::WriteBegin | What::WriteEnd)
                || !layout.ranges[item.id()].is_committed
            {
                continue;
            }
            if what == What::WriteBegin {
                depth += 1;
            } else {
                depth -= 1;
            }
            let boundary = match (what, depth) {
                (What::WriteBegin, 1) => seq,
                (What::WriteEnd, 0) => Seq::NONE,
                _ => continue,
            };
            let (head, key) = (item.head(), layout.key(*item));
            // Where one ends and the next begins there is no boundary.
            if entries.last().is_some_and(|last| last.head == head) && last_key == key {
                entries.pop();
                continue;
            }
            let at = if head.is_exact() { KeyRef::default() } else { self.log.append(key, seq) };
            entries.push(Entry { head, seq: boundary, key: at });
            last_key = key;
        }
        assert_eq!(depth, 0, "{depth} written ranges have no end");
        let run = Run::of_batch(Arc::clone(&self.encoding), seq, entries);
        self.gap_runs.push(run, &self.log, &self.window);
    }

    /// The points that the batch wrote, as a run.
    fn publish_points(&mut self, layout: &mut Layout<'_>, seq: Seq) {
        if layout.written_points == 0 {
            return;
        }
        if !layout.reads_ranges {
            layout.sort_written(&self.encoding);
        }
        let mut entries = Vec::with_capacity(layout.written_points);
        entries.extend(layout.items.iter().filter(|item| item.what() == What::Point).filter_map(
            |item| {
                let key = layout.accesses[item.id()].written?;
                Some(Entry { head: item.head(), seq, key })
            },
        ));
        let run = Run::of_batch(Arc::clone(&self.encoding), seq, entries);
        self.point_runs.push(run, &self.log, &self.window);
    }

    /// Looks for better prefixes when the heads of a batch did not tell its keys apart.
    fn learn(&mut self, layout: &Layout<'_>) {
        self.encoding_batches = self.encoding_batches.saturating_add(1);
        let keys = layout.items.len();
        if layout.ties * 4 <= keys
            || keys < LEARN_KEYS_MIN
            || self.encoding_batches < ENCODING_BATCHES_MIN
        {
            return;
        }
        let keys: Vec<&[u8]> = layout.items.iter().map(|item| layout.key(*item)).collect();
        let learned = Encoding::learn(&keys);
        self.encoding_batches = 0;
        if learned != *self.encoding {
            self.encoding = Arc::new(learned);
        }
    }

    /// The last batch that neither a live point nor a run points to.
    fn unused(&self) -> Seq {
        let lows = [self.point_runs.low(), self.gap_runs.low()];
        lows.into_iter().flatten().map(Seq::before).fold(self.window.dead(), Seq::min)
    }

    /// Numbers are 32 bits: after 2^32 batches that wrote something, they start again from the bottom.
    fn renumber_if_due(&mut self) {
        if self.window.newest().0 < u32::MAX - 1 {
            return;
        }
        let dead = self.window.dead();
        self.point_runs.expire(dead, usize::MAX);
        self.gap_runs.expire(dead, usize::MAX);
        let by = self.unused().0;
        self.log.expire(Seq(by), usize::MAX);
        self.window.renumber(by);
        self.points.renumber(by);
        self.log.renumber(by);
        self.point_runs.renumber(by);
        self.gap_runs.renumber(by);
        assert!(self.window.newest().0 < u32::MAX - 1, "{} batches", self.window.len());
    }
}
