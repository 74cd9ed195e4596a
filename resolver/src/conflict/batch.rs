//! A batch laid out flat, and the order of its keys.
//!
//! ```text
//! transactions   | T0: reads 0..3, writes 3..5 | T1: ...
//! accesses       | point k | range 0 | point m | point k | range 1 | ...
//! ranges         | 0: [b, e) | 1: [c, d) | ...
//!
//! places         r0(    w1(    k     w1)    r0)             all ends of ranges in key order, and the written
//!                0      1      2      3      4              points if a range is read
//! ```
//!
//! A written range fills the places from its begin up to its end, a written point fills its own. A range that
//! is read meets them iff one of the places from its begin up to its end is filled. At equal keys the order
//! is read's end, write's end, write's begin, read's begin, written point: so neighbours don't meet.

use common::{KeyRange, RangeEnd};

use super::Candidate;
use super::hash::hash;
use super::head::{Encoding, Head, Probe};
use super::keylog::KeyRef;
use super::points::Place;
use super::run::Query;
use super::scratch::emptied;
use super::window::Seq;

/// What an access is if it is no general range.
const POINT: u32 = u32::MAX;
const NOTHING: u32 = u32::MAX - 1;

/// One read or write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access<'a> {
    pub(super) key: &'a [u8],
    pub(super) hash: u64,
    /// Of a point, once [`Layout::has_heads`].
    pub(super) head: Head,
    /// [`POINT`], [`NOTHING`] or a range.
    link: u32,
    pub(super) place: Place,
    /// A written point: its place among the sorted keys, if it has one.
    pub(super) at: u32,
    /// A written point that its batch's first writer put into the log.
    pub(super) written: Option<KeyRef>,
}

/// What an access touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    Nothing,
    Point,
    /// A place in [`Layout::ranges`].
    Range(usize),
}

impl<'a> Access<'a> {
    pub(super) const fn target(&self) -> Target {
        match self.link {
            POINT => Target::Point,
            NOTHING => Target::Nothing,
            range => Target::Range(range as usize),
        }
    }

    pub(super) const fn probe(&self) -> Probe<'a> {
        Probe { head: self.head, key: self.key }
    }

    pub(super) const fn is_point(&self) -> bool {
        self.link == POINT
    }
}

/// A general range, not empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct RangeAccess<'a> {
    pub(super) begin: Probe<'a>,
    pub(super) end: Probe<'a>,
    /// The places of its ends.
    pub(super) begin_at: u32,
    pub(super) end_at: u32,
    pub(super) access: u32,
    pub(super) transaction: u32,
    pub(super) is_write: bool,
    /// Written by a transaction that committed.
    pub(super) is_committed: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// Accesses from `reads` up to `writes` read, those up to `end` write.
    pub(super) reads: u32,
    pub(super) writes: u32,
    pub(super) end: u32,
    /// The last batch that the reads have seen.
    pub(super) seen: Seq,
    pub(super) is_too_old: bool,
    pub(super) report_conflicts: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub(super) enum What {
    ReadEnd,
    WriteEnd,
    WriteBegin,
    ReadBegin,
    Point,
}

/// A key in the order of the batch: `head << 64 | what << 32 | range or access`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Item(u128);

impl Item {
    fn new(head: Head, what: What, id: usize) -> Self {
        Self(u128::from(head.0) << 64 | (what as u128) << 32 | id as u128)
    }

    pub(super) const fn head(self) -> Head {
        Head((self.0 >> 64) as u64)
    }

    pub(super) const fn id(self) -> usize {
        self.0 as u32 as usize
    }

    pub(super) const fn what(self) -> What {
        match (self.0 >> 32) as u8 {
            0 => What::ReadEnd,
            1 => What::WriteEnd,
            2 => What::WriteBegin,
            3 => What::ReadBegin,
            _ => What::Point,
        }
    }
}

/// The flat form of a batch.
#[derive(Default)]
pub(super) struct Layout<'a> {
    pub(super) spans: Vec<Span>,
    pub(super) accesses: Vec<Access<'a>>,
    pub(super) ranges: Vec<RangeAccess<'a>>,
    pub(super) items: Vec<Item>,
    pub(super) reads_points: bool,
    pub(super) reads_ranges: bool,
    pub(super) writes_ranges: bool,
    pub(super) written_points: usize,
    /// Neighbours in the order whose heads didn't tell them apart.
    pub(super) ties: usize,
    has_heads: bool,
}

impl<'a> Layout<'a> {
    /// Lays out the transactions; `seen` says what a transaction's reads have seen, nothing if too old.
    pub(super) fn new(
        buffers: Layout<'static>,
        batch: &[Candidate<'a>],
        (encoding, wants_heads): (&Encoding, bool),
        mut seen: impl FnMut(&Candidate<'a>) -> Option<Seq>,
    ) -> Self {
        let count: usize = batch.iter().map(|c| c.reads.len() + c.writes.len()).sum();
        assert!(u32::try_from(count * 2).is_ok_and(|c| c < NOTHING), "{count} ranges in a batch");
        let mut layout: Self = buffers;
        assert!(layout.spans.is_empty(), "{} spans of another batch", layout.spans.len());
        layout.spans.reserve(batch.len());
        layout.accesses.reserve(count);
        layout.has_heads = wants_heads;
        for candidate in batch {
            let reads = layout.accesses.len() as u32;
            let seen_up_to = seen(candidate);
            if seen_up_to.is_some() {
                candidate.reads.iter().for_each(|read| layout.access(read, encoding, false));
            }
            let writes = layout.accesses.len() as u32;
            if seen_up_to.is_some() {
                candidate.writes.iter().for_each(|write| layout.access(write, encoding, true));
            }
            layout.spans.push(Span {
                reads,
                writes,
                end: layout.accesses.len() as u32,
                seen: seen_up_to.unwrap_or_default(),
                is_too_old: seen_up_to.is_none(),
                report_conflicts: candidate.report_conflicts,
            });
        }
        layout
    }

    /// Its buffers, for the next batch.
    pub(super) fn into_buffers(mut self) -> Layout<'static> {
        self.spans.clear();
        self.items.clear();
        Layout {
            spans: self.spans,
            accesses: emptied(self.accesses),
            ranges: emptied(self.ranges),
            items: self.items,
            ..Layout::default()
        }
    }

    fn access(&mut self, range: KeyRange<'a>, encoding: &Encoding, is_write: bool) {
        let key = range.begin;
        let (link, hash) = match range.end {
            RangeEnd::Point => (POINT, hash(key)),
            RangeEnd::Before(end) if is_successor(key, end) => (POINT, hash(key)),
            RangeEnd::Before(end) if key < end => {
                self.ranges.push(RangeAccess {
                    begin: encoding.probe(key),
                    end: encoding.probe(end),
                    begin_at: 0,
                    end_at: 0,
                    access: self.accesses.len() as u32,
                    transaction: self.spans.len() as u32,
                    is_write,
                    is_committed: false,
                });
                (self.ranges.len() as u32 - 1, 0)
            }
            RangeEnd::Before(_) => (NOTHING, 0),
        };
        self.reads_points |= link == POINT && !is_write;
        self.reads_ranges |= link < NOTHING && !is_write;
        self.writes_ranges |= link < NOTHING && is_write;
        self.written_points += usize::from(link == POINT && is_write);
        let place = Place::default();
        let head =
            if self.has_heads && link == POINT { encoding.head(key) } else { Head::default() };
        self.accesses.push(Access { key, hash, head, link, place, at: 0, written: None });
    }

    /// Gives all points their heads.
    pub(super) fn add_heads(&mut self, encoding: &Encoding) {
        if !self.has_heads {
            for access in self.accesses.iter_mut().filter(|access| access.is_point()) {
                access.head = encoding.head(access.key);
            }
            self.has_heads = true;
        }
    }

    /// Puts the ends of ranges in order, with the written points if a range is read.
    pub(super) fn sort(&mut self) {
        assert!(self.has_heads, "points without heads");
        assert!(self.items.is_empty(), "{} items are sorted already", self.items.len());
        let points = if self.reads_ranges { self.written_points } else { 0 };
        self.items.reserve_exact(self.ranges.len() * 2 + points);
        for (id, range) in self.ranges.iter().enumerate() {
            let (begin, end) = if range.is_write {
                (What::WriteBegin, What::WriteEnd)
            } else {
                (What::ReadBegin, What::ReadEnd)
            };
            self.items.push(Item::new(range.begin.head, begin, id));
            self.items.push(Item::new(range.end.head, end, id));
        }
        if points > 0 {
            for span in &self.spans {
                for id in span.writes as usize..span.end as usize {
                    if self.accesses[id].is_point() {
                        self.items.push(Item::new(self.accesses[id].head, What::Point, id));
                    }
                }
            }
        }
        self.order();
        for (place, item) in self.items.iter().enumerate() {
            let (id, place) = (item.id(), place as u32);
            match item.what() {
                What::ReadEnd | What::WriteEnd => self.ranges[id].end_at = place,
                What::WriteBegin | What::ReadBegin => self.ranges[id].begin_at = place,
                What::Point => self.accesses[id].at = place,
            }
        }
    }

    /// The points that were taken into the log, in order, instead of the items.
    pub(super) fn sort_written(&mut self, encoding: &Encoding) {
        self.items.clear();
        self.items.reserve(self.written_points);
        for (id, access) in self.accesses.iter().enumerate() {
            if access.written.is_some() {
                let head = if self.has_heads { access.head } else { encoding.head(access.key) };
                self.items.push(Item::new(head, What::Point, id));
            }
        }
        self.order();
    }

    fn order(&mut self) {
        let mut items = core::mem::take(&mut self.items);
        items.sort_unstable();
        let mut from = 0;
        while from < items.len() {
            let head = items[from].head();
            let mut to = from + 1;
            while to < items.len() && items[to].head() == head {
                to += 1;
            }
            if to - from > 1 && !head.is_exact() {
                let ties = &mut items[from..to];
                ties.sort_unstable_by(|a, b| {
                    self.key(*a).cmp(self.key(*b)).then_with(|| (a.0 as u64).cmp(&(b.0 as u64)))
                });
                self.ties +=
                    ties.windows(2).filter(|pair| self.key(pair[0]) != self.key(pair[1])).count();
            }
            from = to;
        }
        self.items = items;
    }

    /// The ranges that are read, in the order of their begins.
    pub(super) fn range_queries(&self, queries: &mut Vec<Query<'a>>) {
        let reads = self.items.iter().filter(|item| item.what() == What::ReadBegin);
        let query = |item: &Item| {
            let range = &self.ranges[item.id()];
            let seen = self.spans[range.transaction as usize].seen;
            Query { begin: range.begin, end: Some(range.end), seen, read: range.access }
        };
        queries.extend(reads.map(query));
    }

    /// The points that are read by whom `asks` says yes to.
    pub(super) fn point_queries(&self, asks: impl Fn(Seq) -> bool, queries: &mut Vec<Query<'a>>) {
        assert!(self.has_heads, "points without heads");
        for span in self.spans.iter().filter(|span| !span.is_too_old && asks(span.seen)) {
            for read in span.reads..span.writes {
                let access = &self.accesses[read as usize];
                if access.is_point() {
                    queries.push(Query { begin: access.probe(), end: None, seen: span.seen, read });
                }
            }
        }
    }

    pub(super) fn key(&self, item: Item) -> &'a [u8] {
        match item.what() {
            What::ReadEnd | What::WriteEnd => self.ranges[item.id()].end.key,
            What::WriteBegin | What::ReadBegin => self.ranges[item.id()].begin.key,
            What::Point => self.accesses[item.id()].key,
        }
    }
}

/// Whether `[key, end)` holds just `key`.
fn is_successor(key: &[u8], end: &[u8]) -> bool {
    end.len() == key.len() + 1 && end[key.len()] == 0 && end.starts_with(key)
}
