//! Writes of general ranges: a step function from keys to versions.
//!
//! ```text
//!         b      d      f          boundary -> version from there to the next boundary
//! --none--|--v7--|--v9--|--none--
//!
//! write [c, e) at v12:
//!         b    c          e   f
//! --none--|-v7-|---v12----|v9-|--none--
//! ```
//!
//! Below the first boundary is "none". A boundary whose step equals the one before it is not kept, so the
//! first step is never "none" and, ranges being finite, the last one always is.

use core::ops::Bound;
use std::collections::BTreeMap;

use common::Version;

use super::NONE;

#[derive(Clone, Debug)]
pub(super) struct Gaps {
    steps: BTreeMap<Box<[u8]>, Version>,
    key_bytes: usize,
    /// The last boundary that eviction looked at in this lap.
    resume: Option<Box<[u8]>>,
}

impl Gaps {
    pub(super) const fn new() -> Self {
        Self { steps: BTreeMap::new(), key_bytes: 0, resume: None }
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) const fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// The version of the step that holds `key`.
    pub(super) fn version_at(&self, key: &[u8]) -> Version {
        self.last_version((Bound::Unbounded, Bound::Included(key)))
    }

    /// Whether a step that meets `[begin, end)` was written above `version`. `begin` must be below `end`.
    pub(super) fn is_newer(&self, begin: &[u8], end: &[u8], version: Version) -> bool {
        self.version_at(begin) > version
            || self
                .steps
                .range::<[u8], _>((Bound::Excluded(begin), Bound::Excluded(end)))
                .any(|(_, written)| *written > version)
    }

    /// Sets `[begin, end)` to `version`, which must be at or above every version there.
    pub(super) fn write(&mut self, begin: &[u8], end: &[u8], version: Version) {
        assert!(begin < end, "an empty range is written at {version}");
        let before = self.last_version((Bound::Unbounded, Bound::Excluded(begin)));
        let behind = self.version_at(end);
        assert!(
            before.max(behind) <= version,
            "a write at {version} next to steps at {before} and {behind}"
        );
        let (begin, end): (Box<[u8]>, Box<[u8]>) = (begin.into(), end.into());
        for (key, written) in self.steps.extract_if(&begin..=&end, |_, _| true) {
            assert!(written <= version, "a step at {written} is overwritten at {version}");
            self.key_bytes -= key.len();
        }
        if before != version {
            self.insert(begin, version);
        }
        if behind != version {
            self.insert(end, behind);
        }
    }

    /// Looks at up to `entries` boundaries behind the last one looked at (and the one behind those), turns
    /// steps at or below `oldest` into "none" and merges what became equal. Returns how many it looked at;
    /// fewer than `entries` means that the lap is over.
    pub(super) fn sweep(&mut self, oldest: Version, entries: usize) -> usize {
        assert!(entries > 0, "a sweep over {entries} entries makes no progress");
        let resume = self.resume.take();
        let mut before = resume.as_deref().map_or(NONE, |key| self.version_at(key));
        let from = resume.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let (mut seen, mut merged, mut last) = (0, Vec::new(), None);
        let mut steps = self.steps.range_mut::<[u8], _>((from, Bound::Unbounded));
        for (key, version) in steps.by_ref().take(entries) {
            seen += 1;
            last = Some(key);
            if *version <= oldest {
                *version = NONE;
            }
            if *version == before {
                merged.push(key.clone());
            }
            before = *version;
        }
        // The last step may have become equal to the one behind it, which is not looked at until later.
        if let Some((key, version)) = steps.next()
            && *version == before
        {
            merged.push(key.clone());
        }
        self.resume = last.filter(|_| seen == entries).cloned();
        for key in merged {
            self.key_bytes -= key.len();
            self.steps.remove(&key);
        }
        seen
    }

    /// The steps as they are when everything at or below `oldest` is forgotten.
    pub(super) fn live(&self, oldest: Version) -> impl Iterator<Item = (&[u8], Version)> {
        let mut before = NONE;
        self.steps.iter().filter_map(move |(key, version)| {
            let version = if *version <= oldest { NONE } else { *version };
            let changed = version != before;
            before = version;
            changed.then_some((&**key, version))
        })
    }

    pub(super) fn check(&self, newest: Version) {
        let (mut before, mut key_bytes) = (NONE, 0);
        for (key, version) in &self.steps {
            assert!(*version <= newest, "a step at {version}, newest {newest}");
            assert_ne!(*version, before, "two equal steps meet at {key:?}");
            before = *version;
            key_bytes += key.len();
        }
        assert_eq!(before, NONE, "the last step has no end");
        assert_eq!(key_bytes, self.key_bytes, "the boundaries' key bytes");
    }

    fn last_version(&self, range: (Bound<&[u8]>, Bound<&[u8]>)) -> Version {
        self.steps.range::<[u8], _>(range).next_back().map_or(NONE, |(_, version)| *version)
    }

    fn insert(&mut self, key: Box<[u8]>, version: Version) {
        self.key_bytes += key.len();
        let replaced = self.steps.insert(key, version);
        assert_eq!(replaced, None, "a boundary at {version} replaced another");
    }
}
