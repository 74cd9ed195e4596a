//! Writes of single keys: key -> newest version.
//!
//! ```text
//! a=v3   b=v12   b\0=v7   q=v5            resume: the last key that eviction looked at in this lap
//!                 ^resume
//! ```

use core::ops::Bound;
use std::collections::BTreeMap;

use common::Version;

use super::NONE;

#[derive(Clone, Debug)]
pub(super) struct Points {
    map: BTreeMap<Box<[u8]>, Version>,
    key_bytes: usize,
    resume: Option<Box<[u8]>>,
}

impl Points {
    pub(super) const fn new() -> Self {
        Self { map: BTreeMap::new(), key_bytes: 0, resume: None }
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) const fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], Version)> {
        self.map.iter().map(|(key, version)| (&**key, *version))
    }

    pub(super) fn version_at(&self, key: &[u8]) -> Version {
        self.map.get(key).copied().unwrap_or(NONE)
    }

    /// Whether a point in `[begin, end)` was written above `version`. `begin` must be below `end`.
    pub(super) fn is_newer(&self, begin: &[u8], end: &[u8], version: Version) -> bool {
        self.map
            .range::<[u8], _>((Bound::Included(begin), Bound::Excluded(end)))
            .any(|(_, written)| *written > version)
    }

    pub(super) fn write(&mut self, key: &[u8], version: Version) {
        assert!(version > NONE, "a point at {version}");
        // A key that is written again is not copied again.
        if let Some(written) = self.map.get_mut(key) {
            assert!(*written <= version, "a point at {written} is overwritten at {version}");
            *written = version;
        } else {
            self.key_bytes += key.len();
            self.map.insert(key.into(), version);
        }
    }

    /// Looks at up to `entries` points behind the last one looked at, and drops those at or below `oldest`.
    /// Returns how many it looked at; fewer than `entries` means that the lap is over.
    pub(super) fn sweep(&mut self, oldest: Version, entries: usize) -> usize {
        assert!(entries > 0, "a sweep over {entries} entries makes no progress");
        let resume = self.resume.take();
        let from = resume.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let (mut seen, mut dead, mut last) = (0, Vec::new(), None);
        for (key, version) in self.map.range::<[u8], _>((from, Bound::Unbounded)).take(entries) {
            seen += 1;
            last = Some(key);
            if *version <= oldest {
                dead.push(key.clone());
            }
        }
        self.resume = last.filter(|_| seen == entries).cloned();
        for key in dead {
            self.key_bytes -= key.len();
            self.map.remove(&key);
        }
        seen
    }

    pub(super) fn check(&self, newest: Version) {
        let mut key_bytes = 0;
        for (key, version) in &self.map {
            assert!(*version > NONE && *version <= newest, "a point at {version}, newest {newest}");
            key_bytes += key.len();
        }
        assert_eq!(key_bytes, self.key_bytes, "the points' key bytes");
    }
}
