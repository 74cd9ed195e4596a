//! Heads: eight bytes that order keys like the keys themselves, nearly always.
//!
//! ```text
//!   63   60 59                                4 3      0
//!  | region | the 7 bytes behind the prefix    | length |       length: 0..7 bytes behind the prefix; 8: more
//!
//! prefixes     "accounts/"              "ids/"
//! regions   0       1             2        3        4           odd: keys with a prefix; even: between them
//! ```
//!
//! A key in a region between prefixes is encoded as if its prefix were empty. Bytes that a short key lacks
//! are 0; `k` and `k\0` differ in the length.
//!
//! # Invariants
//! - heads of one encoding order like their keys: `head(a) < head(b)` implies `a < b`
//! - equal heads with a length below 8 belong to equal keys: nobody has to look at the keys
//! - so an encoding is never wrong, only bad: when heads tie and the keys must decide. Then
//!   [`Encoding::learn`] finds better prefixes in the keys of a batch.

use core::cmp::Ordering;

/// Prefixes at most: their regions and those between them fill four bits.
const PREFIXES_MAX: usize = 7;
const PREFIX_BYTES_MAX: usize = 16 << 10;
const REGION_SHIFT: u32 = 60;
const LENGTH_BITS: u32 = 4;
const LONG: u64 = 8;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub(super) struct Head(pub(super) u64);

impl Head {
    /// Whether equal heads mean equal keys.
    pub(super) const fn is_exact(self) -> bool {
        self.0 & ((1 << LENGTH_BITS) - 1) < LONG
    }
}

/// A key and its head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe<'a> {
    pub(super) head: Head,
    pub(super) key: &'a [u8],
}

impl Probe<'_> {
    /// Like the keys; both heads are of one encoding.
    pub(super) fn cmp(&self, other: &Probe<'_>) -> Ordering {
        self.head.cmp(&other.head).then_with(|| {
            if self.head.is_exact() { Ordering::Equal } else { self.key.cmp(other.key) }
        })
    }
}

/// How heads are made: the prefixes, ascending, none of them a prefix of another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Encoding {
    prefixes: Vec<Box<[u8]>>,
}

impl Encoding {
    pub(super) fn probe<'a>(&self, key: &'a [u8]) -> Probe<'a> {
        Probe { head: self.head(key), key }
    }

    pub(super) fn head(&self, key: &[u8]) -> Head {
        let mut region = 0;
        for prefix in &self.prefixes {
            if starts_with(key, prefix) {
                return pack(region + 1, key, prefix.len());
            }
            if *key < **prefix {
                break;
            }
            region += 2;
        }
        pack(region, key, 0)
    }

    /// Prefixes that tell the keys apart, out of keys in order.
    pub(super) fn learn(keys: &[&[u8]]) -> Self {
        let mut groups = vec![Group::new(keys)];
        // Each round splits a group or says that it can't be: the number of keys bounds both.
        while let Some(place) = worst(&groups) {
            let children = groups[place].split();
            if groups.len() - 1 + children.len() > PREFIXES_MAX || children.is_empty() {
                groups[place].is_final = true;
            } else {
                groups.splice(place..=place, children);
            }
        }
        let prefixes =
            groups.iter().filter(|g| g.prefix_bytes > 0).map(|g| g.prefix().into()).collect();
        let encoding = Self { prefixes };
        encoding.check();
        encoding
    }

    pub(super) fn check(&self) {
        assert!(self.prefixes.len() <= PREFIXES_MAX, "{} prefixes", self.prefixes.len());
        for pair in self.prefixes.windows(2) {
            assert!(pair[0] < pair[1] && !pair[1].starts_with(&pair[0]), "prefixes {pair:?}");
        }
    }

    /// The key of an exact head.
    #[cfg(test)]
    pub(super) fn key(&self, head: Head) -> Vec<u8> {
        assert!(head.is_exact(), "{head:?}");
        let region = (head.0 >> REGION_SHIFT) as usize;
        let length = (head.0 & 15) as usize;
        let bytes = ((head.0 << 4) & !0xff).to_be_bytes();
        let prefix = if region % 2 == 1 { &self.prefixes[region / 2][..] } else { &[] };
        [prefix, &bytes[..length]].concat()
    }
}

/// By words: most prefixes are a few of them, and a call to compare memory costs more.
fn starts_with(key: &[u8], prefix: &[u8]) -> bool {
    let word = |bytes: &[u8], at: usize| bytes[at..].first_chunk::<8>().copied();
    if prefix.len() < 8 || prefix.len() > 64 || key.len() < prefix.len() {
        return key.starts_with(prefix);
    }
    let last = prefix.len() - 8;
    let mut at = 0;
    while at < last {
        if word(key, at) != word(prefix, at) {
            return false;
        }
        at += 8;
    }
    word(key, last) == word(prefix, last)
}

fn pack(region: u64, key: &[u8], prefix_bytes: usize) -> Head {
    let length = key.len() - prefix_bytes;
    let word = |at: usize| u64::from_be_bytes(*key[at..].first_chunk().expect("8 bytes are there"));
    let bytes = if length >= 8 {
        word(prefix_bytes)
    } else if length == 0 {
        0
    } else if key.len() >= 8 {
        word(key.len() - 8) << (64 - 8 * length)
    } else {
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(&key[prefix_bytes..]);
        u64::from_be_bytes(bytes)
    };
    Head(region << REGION_SHIFT | (bytes >> 8) << LENGTH_BITS | (length as u64).min(LONG))
}

/// Keys in order with a common prefix.
struct Group<'a, 'k> {
    keys: &'a [&'k [u8]],
    prefix_bytes: usize,
    is_final: bool,
}

impl<'a, 'k> Group<'a, 'k> {
    fn new(keys: &'a [&'k [u8]]) -> Self {
        let (first, last) = (keys.first().copied(), keys.last().copied());
        let (first, last) = (first.unwrap_or_default(), last.unwrap_or_default());
        let common = first.iter().zip(last).take_while(|(a, b)| a == b).count();
        Self { keys, prefix_bytes: common.min(PREFIX_BYTES_MAX), is_final: false }
    }

    fn prefix(&self) -> &'k [u8] {
        &self.keys[0][..self.prefix_bytes]
    }

    /// How many neighbours have equal heads and different keys.
    fn ties(&self) -> usize {
        let tie = |pair: &&[&[u8]]| {
            let head = |key| pack(0, key, self.prefix_bytes);
            head(pair[0]) == head(pair[1]) && pair[0] != pair[1]
        };
        self.keys.windows(2).filter(tie).count()
    }

    /// By the byte behind the prefix. What is left alone is between the prefixes, and needs none.
    fn split(&self) -> Vec<Self> {
        let same = |a: &&[u8], b: &&[u8]| a.get(self.prefix_bytes) == b.get(self.prefix_bytes);
        let few = self.keys.len() / 32;
        let children = self.keys.chunk_by(same).filter(|keys| keys.len() > few.max(1));
        children.map(Group::new).filter(|child| child.prefix_bytes > self.prefix_bytes).collect()
    }
}

/// The group with most ties, if any has many.
fn worst(groups: &[Group<'_, '_>]) -> Option<usize> {
    let total: usize = groups.iter().map(|group| group.keys.len()).sum();
    let ties = groups.iter().map(|group| if group.is_final { 0 } else { group.ties() });
    let (place, ties) = ties.enumerate().max_by_key(|(_, ties)| *ties)?;
    (ties * 16 > total).then_some(place)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn learns_what_keys_share() {
        let of = |words: &[&str]| -> Vec<String> {
            let mut keys: Vec<String> = words
                .iter()
                .flat_map(|word| (0..40).map(move |i| format!("{word}{}", i * 7919 % 1000 + 1000)))
                .collect();
            keys.sort();
            keys
        };
        for words in [&["accounts/by-number/"][..], &["accounts/by-number/", "ids/of-all-things/"]]
        {
            let keys = of(words);
            let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
            let encoding = Encoding::learn(&keys);
            assert_eq!(encoding.prefixes.len(), words.len());
            for key in &keys {
                let head = encoding.head(key);
                assert!(head.is_exact(), "{head:?} of {key:?} with {encoding:?}");
                assert_eq!(encoding.key(head), *key);
            }
        }
    }

    fn key() -> impl Strategy<Value = Vec<u8>> {
        let byte = || prop::sample::select(vec![0_u8, 1, b'a', 0xff]);
        (0_usize..3, prop::collection::vec(byte(), 0..11)).prop_map(|(prefix, tail)| {
            [&b"aaaaaaaaaaaaaaa\0"[..[0, 2, 16][prefix]], &tail].concat()
        })
    }

    proptest! {
        #[test]
        fn heads_order_like_keys(mut keys in prop::collection::vec(key(), 0..40), a in key(), b in key()) {
            keys.sort();
            let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            for encoding in [Encoding::default(), Encoding::learn(&keys)] {
                for (a, b) in [(&a, &b), (&a, &a)] {
                    let (one, two) = (encoding.probe(a), encoding.probe(b));
                    prop_assert_eq!(one.cmp(&two), a.cmp(b), "{:?}", encoding);
                    prop_assert!(one.head <= two.head || a > b);
                    prop_assert!(!one.head.is_exact() || encoding.key(one.head) == **a);
                }
            }
        }
    }
}
