//! Sets of keys as disjoint ranges, and what a proxy knows of its own writes before its resolvers do.
//!
//! ```text
//! insert [b, d), [c, f), k     [b ......... f)     [k, k\0)         meets [e, g)? the last one that begins
//!                                                                   below g ends behind e: yes
//! ```

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included, Unbounded};

use crate::{KeyRange, RangeEnd, Ranges, Version};

/// A set of keys: disjoint ranges, none of them empty, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cover {
    /// Begin, inclusive, to end, exclusive.
    ranges: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Cover {
    /// Takes the keys of a range in.
    pub fn insert(&mut self, range: KeyRange<'_>) {
        if range.is_empty() {
            return;
        }
        let (mut begin, mut end) = (range.begin.to_vec(), range.end_key());
        // Whatever begins at or below its end and ends at or above its begin becomes one with it.
        while let Some((first, last)) = self.ranges.range::<[u8], _>(up_to(&end)).next_back()
            && *last >= begin
        {
            let (first, last) = (first.clone(), last.clone());
            self.ranges.remove(&first);
            begin = begin.min(first);
            end = end.max(last);
        }
        self.ranges.insert(begin, end);
    }

    /// Whether a key of the range is in it.
    #[must_use]
    pub fn meets(&self, range: KeyRange<'_>) -> bool {
        if range.is_empty() {
            return false;
        }
        let below: (std::ops::Bound<&[u8]>, std::ops::Bound<&[u8]>) = match range.end {
            RangeEnd::Point => up_to(range.begin),
            RangeEnd::Before(end) => (Unbounded, Excluded(end)),
        };
        let last = self.ranges.range::<[u8], _>(below).next_back();
        last.is_some_and(|(_, end)| &end[..] > range.begin)
    }
}

const fn up_to(key: &[u8]) -> (std::ops::Bound<&[u8]>, std::ops::Bound<&[u8]>) {
    (Unbounded, Included(key))
}

/// The writes of what commits in one batch.
#[derive(Clone, Debug, Default)]
struct OwnBatch {
    version: Version,
    writes: Vec<Ranges>,
    /// The keys of the first so many of them.
    cover: Cover,
    covered: usize,
}

impl OwnBatch {
    /// Whether they meet a range. Most batches are never asked, so what is asked first puts them in order.
    fn meets(&mut self, range: KeyRange<'_>) -> bool {
        for writes in &self.writes[self.covered..] {
            writes.iter().for_each(|range| self.cover.insert(range));
        }
        self.covered = self.writes.len();
        self.cover.meets(range)
    }
}

/// What a proxy's own batches have written, for as long as a resolver may not know that it committed.
///
/// A resolver leaves conflicts with what it does not know to its asker, who always knows it first: it judges
/// its batches in the order of their versions.
#[derive(Clone, Debug, Default)]
pub struct OwnWrites {
    /// By version; the last one may be the batch that is being judged.
    batches: Vec<OwnBatch>,
}

impl OwnWrites {
    /// Begins with the batch of `version`, the highest one so far.
    pub fn begin(&mut self, version: Version) {
        let last = self.batches.last().map(|batch| batch.version);
        assert!(last.is_none_or(|last| last < version), "{version} is judged after {last:?}");
        self.batches.push(OwnBatch { version, ..OwnBatch::default() });
    }

    /// A transaction of the batch that was begun last commits.
    pub fn commit(&mut self, writes: Ranges) {
        let batch = self.batches.last_mut().expect("a batch was begun");
        batch.writes.push(writes);
    }

    /// Whether a read meets a write above `read_version`.
    #[must_use]
    pub fn meets(&mut self, read: KeyRange<'_>, read_version: Version) -> bool {
        let newest_first = self.batches.iter_mut().rev();
        let mut unseen = newest_first.take_while(|batch| batch.version > read_version);
        unseen.any(|batch| batch.meets(read))
    }

    /// Forgets the batches up to `through`, inclusive: no resolver will leave anything of them to the proxy.
    pub fn forget(&mut self, through: Version) {
        self.batches.retain(|batch| batch.version > through);
    }

    /// How many batches are remembered.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.batches.len()
    }

    /// Whether none is.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(begin: u8, end: u8, is_point: bool) -> (Vec<u8>, Vec<u8>) {
        let key = |at: u8| if at == 0 { vec![] } else { vec![at / 2; usize::from(at % 2) + 1] };
        let (one, two) = (key(begin), key(end));
        if is_point {
            (one.clone(), [&one[..], &[0]].concat())
        } else {
            (one.clone().min(two.clone()), one.max(two))
        }
    }

    proptest! {
        #[test]
        fn it_meets_what_one_of_its_ranges_meets(
            inserted in prop::collection::vec((0_u8..12, 0_u8..12, any::<bool>()), 0..12),
            asked in prop::collection::vec((0_u8..12, 0_u8..12, any::<bool>()), 1..8),
        ) {
            let inserted: Vec<_> = inserted.into_iter().map(|(a, b, p)| range(a, b, p)).collect();
            let mut cover = Cover::default();
            for (begin, end) in &inserted {
                cover.insert(KeyRange::new(begin, end).unwrap());
            }
            let ranges: Vec<_> = cover.ranges.iter().collect();
            prop_assert!(ranges.iter().all(|(begin, end)| begin < end));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0), "{ranges:?}");
            for (a, b, is_point) in asked {
                let (begin, end) = range(a, b, is_point);
                let asked = KeyRange::new(&begin, &end).unwrap();
                let expect = inserted.iter().any(|(b, e)| KeyRange::new(b, e).unwrap().overlaps(asked));
                prop_assert_eq!(cover.meets(asked), expect, "{:?} in {:?}", asked, ranges);
            }
        }
    }

    #[test]
    fn own_writes_are_met_by_reads_that_have_not_seen_them() {
        let point = |key: &'static str| Ranges::from_ranges([KeyRange::point(key.as_bytes())]);
        let mut own = OwnWrites::default();
        for (version, key) in [(10, "a"), (20, "b"), (30, "c")] {
            own.begin(Version(version));
            own.commit(point(key));
        }
        let mut meets = |key: &str, at| own.meets(KeyRange::point(key.as_bytes()), Version(at));
        assert!(meets("a", 9) && !meets("a", 10));
        assert!(meets("b", 19) && !meets("b", 20));
        assert!(meets("c", 29) && !meets("d", 0));
        own.commit(point("d"));
        assert!(own.meets(KeyRange::point(b"d"), Version(29)), "it was asked before, and goes on");
        own.forget(Version(20));
        assert_eq!(own.len(), 1);
        assert!(!own.meets(KeyRange::point(b"b"), Version(0)));
        own.forget(Version(30));
        assert!(own.is_empty());
    }
}
