//! The verdicts on a batch, one transaction after the other.
//!
//! What ranges met in history is known when this begins; what remains is the table of points, which this very
//! batch writes into, and the places that its committed ranges fill. Transactions are taken in groups: the
//! lines of a whole group are asked for before the first is needed, so that their misses overlap.
//!
//! ```text
//! group of transactions   places of keys -> their buckets -> the keys to compare with -> verdicts, writes
//! ```

use core::ops::Range;

use common::message::Verdict;

use super::batch::{Layout, Span, Target, What};
use super::bits::Bits;
use super::head::Probe;
use super::keylog::{KeyLog, KeyRef};
use super::points::Points;
use super::window::Seq;
use super::{Decided, Touch};

/// Accesses whose lines are asked for together.
const GROUP: usize = 64;

/// Everything that the verdicts depend on.
pub(super) struct Judge<'s, 'a> {
    pub(super) layout: &'s mut Layout<'a>,
    /// For each access, whether a range of history met it; empty if there is none.
    pub(super) met: &'s [bool],
    pub(super) points: &'s mut Points,
    pub(super) log: &'s mut KeyLog,
    pub(super) dead: Seq,
    /// The number that the batch will have.
    pub(super) seq: Seq,
    filled: Bits,
    own_gaps: OwnGaps<'a>,
    has_written: bool,
    /// Accesses before it are near, and the transaction that it is in.
    near: usize,
    near_span: usize,
}

/// The ranges that the batch writes, for its point reads.
#[derive(Default)]
struct OwnGaps<'a> {
    /// All their ends in order.
    ends: Vec<Probe<'a>>,
    /// For each range of the layout, its places among them.
    places: Vec<(u32, u32)>,
    filled: Bits,
    is_filled: bool,
}

impl<'s, 'a> Judge<'s, 'a> {
    pub(super) fn new(
        layout: &'s mut Layout<'a>,
        met: &'s [bool],
        (points, log): (&'s mut Points, &'s mut KeyLog),
        (dead, seq): (Seq, Seq),
    ) -> Self {
        let mut filled = Bits::default();
        if layout.reads_ranges {
            filled.reset(layout.items.len());
        }
        let own_gaps = OwnGaps::new(layout);
        Self {
            layout,
            met,
            points,
            log,
            dead,
            seq,
            filled,
            own_gaps,
            has_written: false,
            near: 0,
            near_span: 0,
        }
    }

    /// The verdicts, and whether anything was written.
    pub(super) fn decide(mut self) -> (Decided, bool) {
        let count = self.layout.spans.len();
        let mut decided = Decided { verdicts: Vec::with_capacity(count), ..Decided::default() };
        for index in 0..count {
            let (verdict, met_batch) = self.decide_one(self.layout.spans[index]);
            decided.in_batch_conflicts += usize::from(met_batch);
            decided.verdicts.push(verdict);
        }
        (decided, self.has_written)
    }

    /// What the reads of each met; whatever that is, its writes are taken in. And whether there were any.
    pub(super) fn touch(mut self) -> (Vec<Touch>, bool) {
        let count = self.layout.spans.len();
        let touches = (0..count).map(|index| self.touch_one(self.layout.spans[index])).collect();
        (touches, self.has_written)
    }

    fn touch_one(&mut self, span: Span) -> Touch {
        assert!(!span.is_too_old, "nothing that is touched is too old");
        let mut touch = Touch::Nothing;
        for id in span.reads..span.writes {
            let (newer, of_batch) = self.read(id as usize, span.seen);
            touch = touch.max(match (newer, of_batch) {
                (_, true) => Touch::Batch,
                (true, false) => Touch::Earlier,
                (false, false) => Touch::Nothing,
            });
            if touch == Touch::Batch {
                break;
            }
        }
        (span.writes..span.end).for_each(|id| self.write(id as usize));
        touch
    }

    /// Asks for the lines of the accesses from `from` on, a group of them. Loops of few instructions each:
    /// the processor looks further ahead in them.
    fn bring_near(&mut self, from: usize) {
        let to = self.layout.accesses.len().min(from + GROUP);
        for access in &mut self.layout.accesses[from..to] {
            access.place = self.points.place(access.hash);
        }
        let accesses = &self.layout.accesses[from..to];
        let sum = accesses.iter().fold(0, |sum, access| sum ^ self.points.touch(access.place));
        core::hint::black_box(sum);
        let (mut keys, mut count) = ([KeyRef::default(); GROUP], 0);
        while let Some(span) = self.layout.spans.get(self.near_span)
            && (span.reads as usize) < to
        {
            count += self.keys_to_compare(span, from..to, &mut keys[count..]);
            if span.end as usize > to {
                break;
            }
            self.near_span += 1;
        }
        let sum = keys[..count].iter().fold(0, |sum, key| sum ^ self.log.touch(*key));
        core::hint::black_box(sum);
        self.near = to;
    }

    /// The keys that the accesses of a transaction within a group will be compared with: one that it
    /// conflicts with, as it seems, or those that it writes again. Returns how many.
    fn keys_to_compare(&self, span: &Span, group: Range<usize>, keys: &mut [KeyRef]) -> usize {
        let within =
            |from: u32, to: u32| group.start.max(from as usize)..group.end.min(to as usize);
        let key = |id: usize, seen| {
            let access = &self.layout.accesses[id];
            access
                .is_point()
                .then(|| self.points.key_to_compare(access.place, access.hash, seen))?
        };
        if let Some(met) = within(span.reads, span.writes).find_map(|id| key(id, span.seen)) {
            keys[0] = met;
            return 1;
        }
        let mut count = 0;
        for met in within(span.writes, span.end).filter_map(|id| key(id, self.dead)) {
            keys[count] = met;
            count += 1;
        }
        count
    }

    /// The verdict, and whether it is a conflict with this very batch.
    fn decide_one(&mut self, span: Span) -> (Verdict, bool) {
        if span.is_too_old {
            return (Verdict::TooOld, false);
        }
        let (mut is_conflict, mut met_batch, mut ranges) = (false, false, Vec::new());
        let mut seen = span.seen;
        for (index, id) in (0_u32..).zip(span.reads..span.writes) {
            let (newer, of_batch) = self.read(id as usize, seen);
            is_conflict |= newer;
            met_batch |= of_batch;
            if !newer {
                continue;
            }
            if span.report_conflicts {
                ranges.push(index);
            } else if met_batch {
                break;
            }
            if !span.report_conflicts {
                // All that remains to be known is whether it met this batch too.
                seen = self.seq.before();
            }
        }
        if is_conflict {
            return (Verdict::Conflict { ranges }, met_batch);
        }
        (span.writes..span.end).for_each(|id| self.write(id as usize));
        (Verdict::Committed, false)
    }

    /// Whether a read meets anything newer than `seen`, and whether this batch wrote it.
    fn read(&mut self, id: usize, seen: Seq) -> (bool, bool) {
        if id >= self.near {
            self.bring_near(id);
        }
        let access = &self.layout.accesses[id];
        let met_history = self.met.get(id).copied().unwrap_or(false);
        match access.target() {
            Target::Nothing => (false, false),
            Target::Range(range) => {
                let range = &self.layout.ranges[range];
                let of_batch = self.filled.any(range.begin_at as usize, range.end_at as usize);
                (met_history || of_batch, of_batch)
            }
            Target::Point => {
                let newest =
                    self.points.newer(access.place, access.hash, access.key, seen, self.log);
                let of_batch = newest == self.seq || self.own_gaps.holds(access.probe());
                (met_history || newest != Seq::NONE || of_batch, of_batch)
            }
        }
    }

    fn write(&mut self, id: usize) {
        if id >= self.near {
            self.bring_near(id);
        }
        let access = &mut self.layout.accesses[id];
        match access.target() {
            Target::Nothing => return,
            Target::Point => {
                let (place, hash, key) = (access.place, access.hash, access.key);
                access.written = self.points.write((place, hash, key), self.seq, self.log);
                if self.layout.reads_ranges {
                    self.filled.set(access.at as usize, access.at as usize + 1);
                }
            }
            Target::Range(range) => {
                self.own_gaps.fill(range);
                let range = &mut self.layout.ranges[range];
                range.is_committed = true;
                if self.layout.reads_ranges {
                    self.filled.set(range.begin_at as usize, range.end_at as usize);
                }
            }
        }
        self.has_written = true;
    }
}

impl<'a> OwnGaps<'a> {
    /// Nothing unless the batch writes ranges and reads points.
    fn new(layout: &Layout<'a>) -> Self {
        let mut gaps = Self::default();
        if !layout.writes_ranges || !layout.reads_points {
            return gaps;
        }
        gaps.places = vec![(0, 0); layout.ranges.len()];
        for item in &layout.items {
            let place = gaps.ends.len() as u32;
            let range = &layout.ranges[if item.what() == What::Point { 0 } else { item.id() }];
            match item.what() {
                What::WriteBegin => {
                    gaps.places[item.id()].0 = place;
                    gaps.ends.push(range.begin);
                }
                What::WriteEnd => {
                    gaps.places[item.id()].1 = place;
                    gaps.ends.push(range.end);
                }
                What::ReadBegin | What::ReadEnd | What::Point => {}
            }
        }
        gaps.filled.reset(gaps.ends.len());
        gaps
    }

    fn fill(&mut self, range: usize) {
        if let Some(&(begin, end)) = self.places.get(range) {
            self.filled.set(begin as usize, end as usize);
            self.is_filled = true;
        }
    }

    /// Whether a range that was filled holds `key`.
    fn holds(&self, key: Probe<'_>) -> bool {
        if !self.is_filled {
            return false;
        }
        let behind = self.ends.partition_point(|end| end.cmp(&key).is_le());
        behind > 0 && self.filled.any(behind - 1, behind)
    }
}
