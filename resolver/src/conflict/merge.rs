//! Two neighbouring runs become one, a bounded number of entries at a time.
//!
//! ```text
//! points   older   a3  c1      k2             gaps   older   |b--2--|e      |g--1--|k
//!          newer       c5  d4                        newer      |c--5--|f
//!          merged  a3  c5  d4  k2                    merged  |b2|c--5--|f   |g--1--|k
//! ```
//!
//! Every number in the newer run is above every one in the older, so a newer point replaces, and a gap has
//! the larger of its two numbers. What left the window is left out on the way. Both runs answer reads until
//! the merged one takes their place.

use core::cmp::Ordering;
use std::sync::Arc;

use super::keylog::KeyLog;
use super::run::{Builder, Entry, Kind, Run, compare_entries};
use super::window::Seq;

#[derive(Clone, Debug)]
pub(super) struct Merge {
    kind: Kind,
    out: Builder,
    /// Entries taken of the older and of the newer run.
    taken: [usize; 2],
    /// The numbers of the gaps that both stand in.
    gaps: [Seq; 2],
    entries: usize,
}

impl Merge {
    pub(super) fn new(kind: Kind, older: &Run, newer: &Run) -> Self {
        assert!(older.high < newer.low, "{:?} does not end before {:?}", older.high, newer.low);
        assert!(Arc::ptr_eq(&older.encoding, &newer.encoding), "runs of two encodings");
        let entries = older.len() + newer.len();
        let ((a, b), (c, d)) = (older.heads(), newer.heads());
        let out = Builder::new(
            Arc::clone(&older.encoding),
            (older.low, newer.high),
            (a.min(c), b.max(d)),
            entries,
        );
        Self { kind, out, taken: [0; 2], gaps: [Seq::NONE; 2], entries }
    }

    /// Entries to go.
    pub(super) const fn left(&self) -> usize {
        self.entries - self.taken[0] - self.taken[1]
    }

    /// The first batch of the runs.
    pub(super) const fn low(&self) -> Seq {
        self.out.low()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.out.memory_bytes()
    }

    /// Takes about `budget` entries. The runs must be those that it began with.
    pub(super) fn step(
        &mut self,
        older: &Run,
        newer: &Run,
        log: &KeyLog,
        dead: Seq,
        budget: usize,
    ) {
        let end = self.left().saturating_sub(budget);
        let (a, b) = (older.entries(), newer.entries());
        assert_eq!(a.len() + b.len(), self.entries, "other runs than before");
        match self.kind {
            Kind::Points => self.step_points(a, b, log, dead, end),
            Kind::Gaps => self.step_gaps(a, b, log, dead, end),
        }
    }

    fn step_points(&mut self, a: &[Entry], b: &[Entry], log: &KeyLog, dead: Seq, end: usize) {
        let [mut i, mut j] = self.taken;
        while a.len() - i + b.len() - j > end {
            let entry = match (a.get(i), b.get(j)) {
                (Some(x), Some(y)) => match compare_entries(log, x, y) {
                    Ordering::Less => {
                        i += 1;
                        x
                    }
                    Ordering::Greater => {
                        j += 1;
                        y
                    }
                    Ordering::Equal => {
                        i += 1;
                        j += 1;
                        y
                    }
                },
                (Some(x), None) => {
                    i += 1;
                    x
                }
                (None, Some(y)) => {
                    j += 1;
                    y
                }
                (None, None) => break,
            };
            if entry.seq > dead {
                self.out.push(*entry);
            }
        }
        self.taken = [i, j];
    }

    fn step_gaps(&mut self, a: &[Entry], b: &[Entry], log: &KeyLog, dead: Seq, end: usize) {
        let [mut i, mut j] = self.taken;
        let [mut gap_a, mut gap_b] = self.gaps;
        let mut before = self.out.last().map_or(Seq::NONE, |entry| entry.seq);
        while a.len() - i + b.len() - j > end {
            let order = match (a.get(i), b.get(j)) {
                (Some(x), Some(y)) => compare_entries(log, x, y),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => break,
            };
            let at = if order.is_le() { a[i] } else { b[j] };
            if order.is_le() {
                gap_a = if a[i].seq > dead { a[i].seq } else { Seq::NONE };
                i += 1;
            }
            if order.is_ge() {
                gap_b = if b[j].seq > dead { b[j].seq } else { Seq::NONE };
                j += 1;
            }
            let seq = gap_a.max(gap_b);
            if seq != before {
                self.out.push(Entry { seq, ..at });
                before = seq;
            }
        }
        self.taken = [i, j];
        self.gaps = [gap_a, gap_b];
    }

    pub(super) fn finish(self) -> Run {
        assert_eq!(self.left(), 0, "the merge is not over");
        self.out.finish()
    }
}
