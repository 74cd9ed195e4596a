//! O1: replay in version order against a step function of last writes.
//!
//! ```text
//! keys      ""     b      d      f
//!           |--v0--|--v7--|--v3--|--v0-->     last version that wrote the keys from here to the next step
//! ```

use std::collections::BTreeMap;
use std::ops::Bound::{Included, Unbounded};

use common::{KeyRange, Version};

/// For every key the last version that wrote it.
#[derive(Clone, Debug)]
pub(super) struct LastWrites {
    steps: BTreeMap<Vec<u8>, Version>,
}

impl LastWrites {
    pub(super) fn new() -> Self {
        Self { steps: BTreeMap::from([(Vec::new(), Version::ZERO)]) }
    }

    /// The newest version that wrote a key of the range.
    pub(super) fn newest(&self, range: KeyRange<'_>) -> Version {
        if range.is_empty() {
            return Version::ZERO;
        }
        let at = self.at(range.begin);
        let inside = self.steps.range(range.begin.to_vec()..range.end_key());
        inside.map(|(_, version)| *version).fold(at, Version::max)
    }

    /// `version` writes the range.
    pub(super) fn write(&mut self, range: KeyRange<'_>, version: Version) {
        if range.is_empty() {
            return;
        }
        let (begin, end) = (range.begin.to_vec(), range.end_key());
        let behind = self.at(&end);
        let covered: Vec<Vec<u8>> =
            self.steps.range(begin.clone()..end.clone()).map(|(key, _)| key.clone()).collect();
        for key in covered {
            self.steps.remove(&key);
        }
        self.steps.insert(begin, version);
        self.steps.entry(end).or_insert(behind);
    }

    fn at(&self, key: &[u8]) -> Version {
        let below = self.steps.range::<[u8], _>((Unbounded, Included(key))).next_back();
        *below.expect("the empty key has a step").1
    }
}

#[cfg(test)]
mod tests {
    use common::Prng;

    use super::*;

    #[test]
    fn steps_agree_with_a_table_of_all_keys() {
        let mut prng = Prng::new(5);
        let keys: Vec<[u8; 1]> = (0..16).map(|key| [key]).collect();
        for _ in 0..50 {
            let (mut steps, mut table) = (LastWrites::new(), [Version::ZERO; 16]);
            for version in 1..60 {
                let (a, b) = (prng.below(16) as usize, prng.below(16) as usize);
                let (low, high) = (a.min(b), a.max(b));
                let range = match prng.chance(1, 3) {
                    true => KeyRange::point(&keys[low]),
                    false => KeyRange::new(&keys[low], &keys[high]).unwrap(),
                };
                let members: Vec<usize> = (0..16)
                    .filter(|key| range.begin <= &keys[*key][..] && range.ends_after(&keys[*key]))
                    .collect();
                let expect = members.iter().map(|key| table[*key]).max().unwrap_or_default();
                assert_eq!(steps.newest(range), expect);
                steps.write(range, Version(version));
                members.iter().for_each(|key| table[*key] = Version(version));
            }
        }
    }
}
