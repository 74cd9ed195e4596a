//! What a state is known by: 128 bits over everything that decides its future.
//!
//! Machines are taken in by their `Debug` text: it is derived, so that no field can be forgotten.

use core::fmt;

use crate::clock::Moment;
use crate::trace::Trace;

/// A running digest.
#[derive(Debug)]
pub(super) struct Digest(Trace);

impl Digest {
    pub(super) fn new() -> Self {
        Self(Trace::new(false))
    }

    pub(super) fn word(&mut self, word: u64) -> &mut Self {
        self.0.word(word);
        self
    }

    pub(super) fn wide(&mut self, wide: u128) -> &mut Self {
        self.word((wide >> 64) as u64).word(wide as u64)
    }

    pub(super) fn debug(&mut self, what: &impl fmt::Debug) -> &mut Self {
        self.0.debug(what);
        // So that two texts in a row are not one.
        self.0.event(Moment::ZERO, 0, 0);
        self
    }

    pub(super) fn end(&self) -> u128 {
        self.0.hash()
    }
}

/// The digest of one thing.
pub(super) fn digest_of(what: &impl fmt::Debug) -> u128 {
    Digest::new().debug(what).end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_borders_count() {
        let pair = |one: &str, two: &str| Digest::new().debug(&one).debug(&two).end();
        assert_eq!(pair("a", "b"), pair("a", "b"));
        assert_ne!(pair("a", "b"), pair("b", "a"));
        assert_ne!(pair("ab", ""), pair("a", "b"));
        assert_ne!(Digest::new().wide(1).end(), Digest::new().wide(1 << 64).end());
    }
}
