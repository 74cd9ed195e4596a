//! The runs of one kind, oldest first, and the merges that keep reads cheap.
//!
//! ```text
//! oldest                                              newest
//! [ 1 .......... 16 ][ 17 ... 20 ][ 21 ][ 22 ][ 23 ]         a read that has seen 21 asks the last two
//!                     `--- merge ------'                     those that have seen less pay for merges
//! ```
//!
//! A read asks the runs that are newer than what it has seen, so fresh reads ask few, however many there
//! are. Merging is bought by asking: when the questions to a pair of neighbours have cost as much as merging
//! the two would, they are merged. So merging never costs more than what it saves up to then, and what nobody
//! asks is never merged: it leaves the window as it was written. Only small runs are merged at once, so that
//! their number is bounded by what was written.
//!
//! # Invariants
//! - runs are disjoint and ascend: each one's numbers are above those of the one before
//! - a pair that is being merged stays until its merge is over; a run is in one merge at most
//! - a merged run covers a fixed part of the window at most, so that what is dead in it stays bounded
//! - a run goes when all of it has left the window

use std::collections::VecDeque;
use std::sync::Arc;

use super::head::Encoding;
use super::keylog::KeyLog;
use super::merge::Merge;
use super::run::{Kind, Query, Run};
use super::window::{Seq, Window};

// In tests all of these are small: few entries go the ways of many.

/// A merge is begun when the reads that asked its older run, times this, reach its entries: a question costs
/// about as much as merging so many entries.
const ENTRIES_PER_QUESTION: usize = 4;
/// What a merge costs besides, in entries.
const MERGE_OVERHEAD: usize = if cfg!(test) { 2 } else { 256 };
/// Two runs that together have no more entries are merged at once, if the older is not much larger.
const SMALL_ENTRIES: usize = if cfg!(test) { 6 } else { 4096 };
/// Entries merged in a batch whatever was asked, and for each entry that the batch wrote.
const BUDGET_MIN: usize = if cfg!(test) { 1 } else { 1024 };
const BUDGET_PER_ENTRY: usize = 2;
/// A merged run covers at most one in so many batches of the window.
const SPAN_SHARE: usize = 5;
const SPAN_MIN: usize = 8;

#[derive(Clone, Debug)]
struct Tier {
    run: Run,
    /// Reads that asked it and would ask the next one too.
    questions: usize,
    is_merging: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Tiers {
    kind: Kind,
    tiers: VecDeque<Tier>,
    /// Running, in no order.
    merges: Vec<Merge>,
    entries: usize,
    memory_bytes: usize,
    /// Entries that may be merged in this batch.
    budget: usize,
    /// The first tier that was asked in this batch.
    asked_from: usize,
}

impl Tiers {
    pub(super) const fn new(kind: Kind) -> Self {
        Self {
            kind,
            tiers: VecDeque::new(),
            merges: Vec::new(),
            entries: 0,
            memory_bytes: 0,
            budget: 0,
            asked_from: usize::MAX,
        }
    }

    /// Entries of all runs.
    pub(super) const fn len(&self) -> usize {
        self.entries
    }

    /// What the finished runs and those in the making take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.memory_bytes + self.merges.iter().map(Merge::memory_bytes).sum::<usize>()
    }

    pub(super) fn runs(&self) -> impl DoubleEndedIterator<Item = &Run> {
        self.tiers.iter().map(|tier| &tier.run)
    }

    /// The first batch that a run still points to.
    pub(super) fn low(&self) -> Option<Seq> {
        self.tiers.front().map(|tier| tier.run.low)
    }

    /// Whether anything is newer than `seen`.
    pub(super) fn is_newer(&self, seen: Seq) -> bool {
        self.tiers.back().is_some_and(|tier| tier.run.high > seen)
    }

    /// Asks each run what the queries meet in it, the newest first, and marks the reads that do. A read is
    /// asked until it is marked. Its heads are of `encoding`.
    pub(super) fn meet<'a>(
        &mut self,
        log: &KeyLog,
        encoding: &Arc<Encoding>,
        queries: &[Query<'a>],
        met: &mut [bool],
    ) {
        let Some(seen_min) = queries.iter().map(|query| query.seen).min() else { return };
        let mut open: Vec<Query<'a>> = Vec::with_capacity(queries.len());
        for (place, tier) in self.tiers.iter_mut().enumerate().rev() {
            let run = &tier.run;
            if run.high <= seen_min {
                break;
            }
            open.clear();
            open.extend(
                queries.iter().filter(|q| q.seen < run.high && !met[q.read as usize]).copied(),
            );
            if open.is_empty() {
                continue;
            }
            if !Arc::ptr_eq(&run.encoding, encoding) {
                re_encode(run, &mut open);
            }
            run.meet(self.kind, log, &open, |read| met[read as usize] = true);
            tier.questions += open.len();
            self.budget += open.len() * ENTRIES_PER_QUESTION;
            self.asked_from = self.asked_from.min(place);
        }
    }

    /// Takes in what a batch wrote.
    pub(super) fn push(&mut self, run: Run, log: &KeyLog, window: &Window) {
        let last = self.tiers.back().map(|tier| tier.run.high);
        assert!(last.is_none_or(|last| last < run.low), "{:?} after {last:?}", run.low);
        if run.len() == 0 {
            return;
        }
        self.budget += run.len() * BUDGET_PER_ENTRY + BUDGET_MIN;
        self.entries += run.len();
        self.memory_bytes += run.memory_bytes();
        self.tiers.push_back(Tier { run, questions: 0, is_merging: false });
        while let Some(place) = self.tiers.len().checked_sub(2)
            && self.is_small(place)
            && self.can_merge(place, window)
        {
            let merge = self.begin(place);
            self.step(merge, log, window.dead(), usize::MAX);
        }
    }

    fn is_small(&self, place: usize) -> bool {
        let (older, newer) = (self.tiers[place].run.len(), self.tiers[place + 1].run.len());
        older + newer <= SMALL_ENTRIES && older <= 2 * newer.max(MERGE_OVERHEAD)
    }

    fn can_merge(&self, place: usize, window: &Window) -> bool {
        let (older, newer) = (&self.tiers[place], &self.tiers[place + 1]);
        let span = (newer.run.high.0 - older.run.low.0) as usize;
        !older.is_merging
            && !newer.is_merging
            && Arc::ptr_eq(&older.run.encoding, &newer.run.encoding)
            && span < (window.len() / SPAN_SHARE).max(SPAN_MIN)
    }

    /// Begins the merges that are paid for, and goes on with all of them, the smallest first, as far as the
    /// budget reaches.
    pub(super) fn work(&mut self, log: &KeyLog, window: &Window) {
        let asked_from = core::mem::replace(&mut self.asked_from, usize::MAX);
        for place in asked_from..self.tiers.len().saturating_sub(1) {
            let (older, newer) = (&self.tiers[place], &self.tiers[place + 1]);
            let cost = older.run.len() + newer.run.len() + MERGE_OVERHEAD;
            if older.questions * ENTRIES_PER_QUESTION >= cost && self.can_merge(place, window) {
                let merge = self.begin(place);
                self.merges.push(merge);
            }
        }
        let mut budget = core::mem::take(&mut self.budget);
        self.merges.sort_by_key(Merge::left);
        for merge in core::mem::take(&mut self.merges) {
            let left = merge.left();
            if budget == 0 {
                self.merges.push(merge);
                continue;
            }
            let steps = left.min(budget);
            self.step(merge, log, window.dead(), steps);
            budget -= steps;
        }
    }

    fn begin(&mut self, place: usize) -> Merge {
        self.tiers[place].is_merging = true;
        self.tiers[place + 1].is_merging = true;
        Merge::new(self.kind, &self.tiers[place].run, &self.tiers[place + 1].run)
    }

    /// Goes on with a merge: to its end, or it is kept.
    fn step(&mut self, mut merge: Merge, log: &KeyLog, dead: Seq, budget: usize) {
        let place = self.tiers.partition_point(|tier| tier.run.low < merge.low());
        let (older, newer) = (&self.tiers[place], &self.tiers[place + 1]);
        assert!(older.is_merging && newer.is_merging, "a merge without its runs at {place}");
        merge.step(&older.run, &newer.run, log, dead, budget);
        if merge.left() > 0 {
            self.merges.push(merge);
            return;
        }
        let run = merge.finish();
        let gone = self.tiers.remove(place + 1).expect("the newer run is there").run;
        self.forget(&gone);
        let gone = core::mem::replace(
            &mut self.tiers[place],
            Tier { run, questions: 0, is_merging: false },
        );
        self.forget(&gone.run);
        self.entries += self.tiers[place].run.len();
        self.memory_bytes += self.tiers[place].run.memory_bytes();
    }

    fn forget(&mut self, run: &Run) {
        self.entries -= run.len();
        self.memory_bytes -= run.memory_bytes();
    }

    /// Drops runs that left the window, up to `runs_max` of them.
    pub(super) fn expire(&mut self, dead: Seq, runs_max: usize) {
        for _ in 0..runs_max {
            let Some(tier) = self.tiers.pop_front_if(|tier| tier.run.high <= dead) else { return };
            if tier.is_merging {
                self.merges.retain(|merge| merge.low() != tier.run.low);
                let newer = self.tiers.front_mut().expect("a merge has a newer run");
                newer.is_merging = false;
            }
            self.forget(&tier.run);
        }
    }

    /// Takes `by` off the numbers of the batches. What is being merged begins again.
    pub(super) fn renumber(&mut self, by: u32) {
        self.merges.clear();
        for tier in &mut self.tiers {
            tier.is_merging = false;
            tier.run.renumber(by);
        }
    }

    pub(super) fn check(&self, log: &KeyLog, window: &Window) {
        let (mut before, mut merging) = (Seq::NONE, 0);
        for tier in &self.tiers {
            assert!(before < tier.run.high, "{:?} is not above {before:?}", tier.run.high);
            before = tier.run.high;
            merging += usize::from(tier.is_merging);
            tier.run.check(self.kind, log, window.dead());
        }
        assert!(before <= window.newest(), "a run up to {before:?} of {:?}", window.newest());
        assert_eq!(merging, 2 * self.merges.len(), "runs in merges");
        let entries: usize = self.runs().map(Run::len).sum();
        assert_eq!(entries, self.entries, "entries of the runs");
        let bytes: usize = self.runs().map(Run::memory_bytes).sum();
        assert_eq!(bytes, self.memory_bytes, "bytes of the runs");
    }
}

/// Gives the queries the heads that a run of another encoding knows.
fn re_encode(run: &Run, queries: &mut [Query<'_>]) {
    for query in queries {
        query.begin = run.encoding.probe(query.begin.key);
        query.end = query.end.map(|end| run.encoding.probe(end.key));
    }
}
