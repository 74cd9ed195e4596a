//! Key ranges: half-open over byte strings.
//!
//! A point `[k, k ++ 0x00)` is the common case and is kept as the bare key. [`Ranges`] is the flat form in
//! transactions and messages: one arena of key bytes and one column of lengths.
//!
//! ```text
//! arena    a p p l e | a | b | ...
//! bounds   {5, POINT} {1, 1}   ...      begin length, end length
//! ```

use bytes::{Bytes, BytesMut};
use rkyv::{Archive, Deserialize, Serialize};
use thiserror::Error;

/// What is wrong with a range.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RangeError {
    /// The range ends before it begins.
    #[error("the range begins after its end (begin {begin:?}, end {end:?})")]
    Inverted {
        /// First bytes of the begin key.
        begin: Vec<u8>,
        /// First bytes of the end key.
        end: Vec<u8>,
    },
    /// A key is longer than the limit.
    #[error("a key of {length} bytes is over the limit of {limit}")]
    KeyTooLong {
        /// The key's length in bytes.
        length: usize,
        /// The limit in bytes, inclusive.
        limit: usize,
    },
    /// The columns don't describe the arena. Only hostile input is like that.
    #[error("the columns of a range set do not fit its arena")]
    Malformed,
}

/// A half-open range of keys, borrowed: `begin` is inside, the end is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyRange<'a> {
    /// The first key of the range.
    pub begin: &'a [u8],
    /// Where it ends.
    pub end: RangeEnd<'a>,
}

/// Where a range ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RangeEnd<'a> {
    /// Just behind `begin`: the range holds that one key.
    Point,
    /// Before this key.
    Before(&'a [u8]),
}

impl<'a> KeyRange<'a> {
    /// The range of one key.
    #[must_use]
    pub const fn point(key: &'a [u8]) -> Self {
        Self { begin: key, end: RangeEnd::Point }
    }

    /// `[begin, end)`; a range of exactly one key becomes a point. Empty when `begin == end`.
    ///
    /// # Errors
    /// [`RangeError::Inverted`] when `begin > end`.
    pub fn new(begin: &'a [u8], end: &'a [u8]) -> Result<Self, RangeError> {
        if begin > end {
            let head = |key: &[u8]| key[..key.len().min(32)].to_vec();
            return Err(RangeError::Inverted { begin: head(begin), end: head(end) });
        }
        if end.len() == begin.len() + 1 && end[begin.len()] == 0 && end.starts_with(begin) {
            return Ok(Self::point(begin));
        }
        Ok(Self { begin, end: RangeEnd::Before(end) })
    }

    /// Whether the range holds no key.
    #[must_use]
    pub fn is_empty(self) -> bool {
        match self.end {
            RangeEnd::Point => false,
            RangeEnd::Before(end) => self.begin >= end,
        }
    }

    /// Whether `key` lies below the end.
    #[must_use]
    pub fn ends_after(self, key: &[u8]) -> bool {
        match self.end {
            RangeEnd::Point => key <= self.begin,
            RangeEnd::Before(end) => key < end,
        }
    }

    /// Whether the two ranges share a key. An empty range shares none.
    #[must_use]
    pub fn overlaps(self, other: KeyRange<'_>) -> bool {
        !self.is_empty()
            && !other.is_empty()
            && self.ends_after(other.begin)
            && other.ends_after(self.begin)
    }

    /// The part of it in `begin..end`, where `None` is behind every key. An empty range holds no key, but
    /// is a range all the same: it lies where it begins.
    #[must_use]
    pub fn within(self, begin: &'a [u8], end: Option<&'a [u8]>) -> Option<Self> {
        match self.end {
            RangeEnd::Before(last) if !self.is_empty() => {
                let first = self.begin.max(begin);
                let last = end.map_or(last, |end| last.min(end));
                (first < last).then(|| Self::new(first, last).expect("just compared"))
            }
            RangeEnd::Point | RangeEnd::Before(_) => {
                let is_inside = begin <= self.begin && end.is_none_or(|end| self.begin < end);
                is_inside.then_some(self)
            }
        }
    }

    /// The end as an owned key.
    #[must_use]
    pub fn end_key(self) -> Vec<u8> {
        match self.end {
            RangeEnd::Point => [self.begin, &[0]].concat(),
            RangeEnd::Before(end) => end.to_vec(),
        }
    }
}

const POINT: u32 = u32::MAX;
/// What the keys of a range take, as a rule.
const KEY_BYTES_USUAL: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
struct Bounds {
    begin_bytes: u32,
    /// [`POINT`] for a point.
    end_bytes: u32,
}

/// A list of ranges in flat columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Ranges {
    arena: Bytes,
    bounds: Vec<Bounds>,
}

impl Ranges {
    /// Builds a list from ranges; the order is kept.
    pub fn from_ranges<'a>(ranges: impl IntoIterator<Item = KeyRange<'a>>) -> Self {
        let ranges = ranges.into_iter();
        let mut arena = BytesMut::with_capacity(ranges.size_hint().0 * KEY_BYTES_USUAL);
        Self::in_arena(&mut arena, ranges)
    }

    /// Builds a list whose keys lie in `arena`: many lists share its memory, which goes with the last one.
    pub fn in_arena<'a>(
        arena: &mut BytesMut,
        ranges: impl IntoIterator<Item = KeyRange<'a>>,
    ) -> Self {
        assert!(arena.is_empty(), "{} bytes of another list are in the arena", arena.len());
        let ranges = ranges.into_iter();
        let mut bounds = Vec::with_capacity(ranges.size_hint().0);
        for range in ranges {
            arena.extend_from_slice(range.begin);
            let end_bytes = match range.end {
                RangeEnd::Point => POINT,
                RangeEnd::Before(end) => {
                    arena.extend_from_slice(end);
                    u32::try_from(end.len()).expect("a key below 4 GiB")
                }
            };
            let begin_bytes = u32::try_from(range.begin.len()).expect("a key below 4 GiB");
            bounds.push(Bounds { begin_bytes, end_bytes });
        }
        // To share nothing costs memory, too.
        let arena = if arena.is_empty() { Bytes::new() } else { arena.split().freeze() };
        Self { arena, bounds }
    }

    /// How many ranges there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bounds.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bounds.is_empty()
    }

    /// Bytes of all keys.
    #[must_use]
    pub fn key_bytes(&self) -> usize {
        self.arena.len()
    }

    /// The ranges in order. Columns from the wire must have passed [`Ranges::validate`].
    pub fn iter(&self) -> impl Iterator<Item = KeyRange<'_>> + '_ {
        let mut rest: &[u8] = &self.arena;
        self.bounds.iter().map(move |bounds| {
            let (begin, tail) = rest.split_at(bounds.begin_bytes as usize);
            rest = tail;
            let end = if bounds.end_bytes == POINT {
                RangeEnd::Point
            } else {
                let (end, tail) = rest.split_at(bounds.end_bytes as usize);
                rest = tail;
                RangeEnd::Before(end)
            };
            KeyRange { begin, end }
        })
    }

    /// Checks columns that came from outside.
    ///
    /// # Errors
    /// [`RangeError`] when the columns don't fit the arena, a key is longer than `key_bytes_max`, or a
    /// range begins after its end.
    pub fn validate(&self, key_bytes_max: usize) -> Result<(), RangeError> {
        let mut total = 0_u64;
        for bounds in &self.bounds {
            total += u64::from(bounds.begin_bytes);
            if bounds.end_bytes != POINT {
                total += u64::from(bounds.end_bytes);
            }
        }
        if total != self.arena.len() as u64 {
            return Err(RangeError::Malformed);
        }
        for range in self.iter() {
            let end_bytes = match range.end {
                RangeEnd::Point => 0,
                RangeEnd::Before(end) => end.len(),
            };
            let length = range.begin.len().max(end_bytes);
            if length > key_bytes_max {
                return Err(RangeError::KeyTooLong { length, limit: key_bytes_max });
            }
            if let RangeEnd::Before(end) = range.end {
                KeyRange::new(range.begin, end)?;
            }
        }
        Ok(())
    }
}

impl<'a> FromIterator<KeyRange<'a>> for Ranges {
    fn from_iter<I: IntoIterator<Item = KeyRange<'a>>>(ranges: I) -> Self {
        Self::from_ranges(ranges)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn adjacent_and_empty_ranges_do_not_overlap() {
        let ab = KeyRange::new(b"a", b"b").unwrap();
        let bc = KeyRange::new(b"b", b"c").unwrap();
        assert!(!ab.overlaps(bc) && !bc.overlaps(ab));
        assert!(ab.overlaps(KeyRange::point(b"a")));
        assert!(!ab.overlaps(KeyRange::point(b"b")));
        let empty = KeyRange::new(b"aa", b"aa").unwrap();
        assert!(empty.is_empty() && !empty.overlaps(ab) && !ab.overlaps(empty));
        assert!(KeyRange::point(b"").overlaps(KeyRange::new(b"", b"a").unwrap()));
    }

    #[test]
    fn one_key_is_a_point_however_it_is_written() {
        assert_eq!(KeyRange::new(b"k", b"k\0").unwrap(), KeyRange::point(b"k"));
        assert!(matches!(KeyRange::new(b"b", b"a"), Err(RangeError::Inverted { .. })));
    }

    #[test]
    fn lists_in_one_arena_are_like_lists_of_their_own() {
        let (a, b, c) =
            (KeyRange::point(b"a"), KeyRange::new(b"b", b"bcd").unwrap(), KeyRange::point(b""));
        let mut arena = BytesMut::with_capacity(4);
        for ranges in [&[a, b][..], &[], &[b, c, a], &[c]] {
            let ranges = ranges.iter().copied();
            let shared = Ranges::in_arena(&mut arena, ranges.clone());
            assert_eq!(shared, Ranges::from_ranges(ranges.clone()));
            assert!(shared.iter().eq(ranges) && arena.is_empty());
        }
    }

    fn key() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(0_u8..3, 0..4)
    }

    proptest! {
        #[test]
        fn overlap_is_what_membership_says(a in key(), b in key(), c in key(), d in key()) {
            let one = KeyRange::new(a.as_slice().min(&b), a.as_slice().max(&b)).unwrap();
            let two = KeyRange::new(c.as_slice().min(&d), c.as_slice().max(&d)).unwrap();
            let holds = |range: KeyRange<'_>, key: &[u8]| range.begin <= key && key < &range.end_key()[..];
            // Two ranges overlap iff the later of their begins lies in both.
            let later = one.begin.max(two.begin);
            prop_assert_eq!(one.overlaps(two), holds(one, later) && holds(two, later));
        }

        #[test]
        fn columns_round_trip(pairs in prop::collection::vec((key(), key()), 0..9)) {
            let ranges: Vec<KeyRange<'_>> = pairs
                .iter()
                .map(|(a, b)| KeyRange::new(a.min(b), a.max(b)).unwrap())
                .collect();
            let columns = Ranges::from_ranges(ranges.iter().copied());
            prop_assert!(columns.validate(3).is_ok());
            prop_assert_eq!(columns.iter().collect::<Vec<_>>(), ranges);
        }
    }
}
