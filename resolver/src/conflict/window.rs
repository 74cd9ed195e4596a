//! The batches in the window: a dense number for each one that wrote something.
//!
//! ```text
//!            dead = 41
//! versions        | v700 | v710 | v725 |            a read at v712 has seen up to number 43
//! numbers         |  42  |  43  |  44  |
//! ```
//!
//! Four bytes instead of eight wherever a version is kept, and "newer than what the reader saw" is one
//! comparison of integers.

use std::collections::VecDeque;

use common::Version;

/// The number of a batch that wrote something; 0 is none, and so is whatever is at or below
/// [`Window::dead`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(transparent)]
pub(super) struct Seq(pub(super) u32);

impl Seq {
    pub(super) const NONE: Self = Self(0);

    pub(super) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    pub(super) const fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

/// Batches that are looked at around the place where one should be, before it is searched for.
const GUESS_STEPS_MAX: usize = 4;

#[derive(Clone, Debug)]
pub(super) struct Window {
    versions: VecDeque<Version>,
    dead: Seq,
}

impl Window {
    pub(super) const fn new() -> Self {
        Self { versions: VecDeque::new(), dead: Seq::NONE }
    }

    /// Numbers at or below it can't decide anything any more.
    pub(super) const fn dead(&self) -> Seq {
        self.dead
    }

    pub(super) fn newest(&self) -> Seq {
        Seq(self.dead.0 + self.versions.len() as u32)
    }

    /// How many batches are in it.
    pub(super) fn len(&self) -> usize {
        self.versions.len()
    }

    /// The last batch that a read at `version` has seen.
    pub(super) fn seen(&self, version: Version) -> Seq {
        if self.versions.back().is_none_or(|newest| *newest <= version) {
            return self.newest();
        }
        let seen = self
            .guess(version)
            .unwrap_or_else(|| self.versions.partition_point(|at| *at <= version));
        Seq(self.dead.0 + seen as u32)
    }

    /// How many batches are at or below `version`, if they are about as far apart as they are on average.
    fn guess(&self, version: Version) -> Option<usize> {
        let (oldest, newest) = (self.versions.front()?.0, self.versions.back()?.0);
        let behind = version.0.checked_sub(oldest)?;
        let span = newest.checked_sub(oldest)?;
        let last = self.versions.len() as u64 - 1;
        let mut at = (behind.checked_mul(last)? / span.max(1)).min(last) as usize;
        for _ in 0..GUESS_STEPS_MAX {
            let is_seen = self.versions[at] <= version;
            let is_next_seen = self.versions.get(at + 1).is_some_and(|next| *next <= version);
            match (is_seen, is_next_seen) {
                (true, false) => return Some(at + 1),
                (true, true) => at += 1,
                (false, _) => at = at.checked_sub(1)?,
            }
        }
        None
    }

    /// The version of a batch in the window.
    #[cfg(test)]
    pub(super) fn version(&self, seq: Seq) -> Option<Version> {
        let place = seq.0.checked_sub(self.dead.0 + 1)?;
        self.versions.get(place as usize).copied()
    }

    /// Takes in a batch that wrote something.
    pub(super) fn push(&mut self, version: Version) -> Seq {
        let last = self.versions.back();
        assert!(last.is_none_or(|last| *last < version), "{version} after {last:?}");
        assert!(self.newest().0 < u32::MAX, "{:?}: the numbers must be moved first", self.newest());
        self.versions.push_back(version);
        self.newest()
    }

    /// Forgets the batches at or below `oldest`.
    pub(super) fn expire(&mut self, oldest: Version) {
        while self.versions.front().is_some_and(|version| *version <= oldest) {
            self.versions.pop_front();
            self.dead = self.dead.next();
        }
    }

    /// Takes `by` off the numbers of the batches.
    pub(super) fn renumber(&mut self, by: u32) {
        assert!(by <= self.dead.0, "{by} is above the dead {:?}", self.dead);
        self.dead.0 -= by;
    }

    #[cfg(test)]
    pub(super) fn start_at(&mut self, dead: u32) {
        assert!(self.versions.is_empty(), "{} batches have numbers", self.versions.len());
        self.dead = Seq(dead);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.versions.len() * size_of::<Version>()
    }

    pub(super) fn check(&self, oldest: Version, newest: Version) {
        let mut before = oldest;
        for version in &self.versions {
            assert!(before < *version, "{version} is not above {before}");
            before = *version;
        }
        assert!(before <= newest, "a batch at {before}, newest {newest}");
    }
}
