//! Reordering by previous version: each pair of the chain is taken once, in chain order (I1, I2).
//!
//! ```text
//! chain stands at 10:   offer(10 -> 12)  Next      take it, advance to 12
//!                       offer(15 -> 17)  Early     kept until the chain reaches 15
//!                       offer( 8 -> 10)  Again     taken before
//! ```

use std::collections::BTreeMap;

use crate::Version;

/// What a pair is to the chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Offer {
    /// The next link: it waits at the head, and [`Ordered::take_next`] gives it out.
    Next,
    /// It waits for its predecessor.
    Early,
    /// It waits already, or was taken before.
    Again,
    /// Too many wait; it was dropped and must come again.
    Overflow,
}

/// Pairs that wait for their turn.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ordered<T> {
    at: Version,
    waiting: BTreeMap<Version, (Version, T)>,
    waiting_max: usize,
}

impl<T> Ordered<T> {
    /// A chain that stands at `at`; at most `waiting_max` pairs wait.
    #[must_use]
    pub const fn new(at: Version, waiting_max: usize) -> Self {
        Self { at, waiting: BTreeMap::new(), waiting_max }
    }

    /// The last version that was taken.
    #[must_use]
    pub const fn at(&self) -> Version {
        self.at
    }

    /// How many wait.
    #[must_use]
    pub fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// Offers a pair.
    pub fn offer(&mut self, previous: Version, version: Version, item: T) -> Offer {
        assert!(previous < version, "a pair ascends: {previous} -> {version}");
        if version <= self.at || self.waiting.contains_key(&previous) {
            return Offer::Again;
        }
        assert!(
            previous >= self.at,
            "I1: {previous} -> {version} forks the chain that stands at {}",
            self.at
        );
        let is_next = previous == self.at;
        // The next link always fits: it is what the others wait for.
        if self.waiting.len() >= self.waiting_max && !is_next {
            return Offer::Overflow;
        }
        self.waiting.insert(previous, (version, item));
        if is_next { Offer::Next } else { Offer::Early }
    }

    /// Takes the next link of the chain, if it is there, and advances to it: check and advance in one step.
    pub fn take_next(&mut self) -> Option<(Version, Version, T)> {
        let previous = self.at;
        let (version, item) = self.waiting.remove(&previous)?;
        assert!(version > previous, "I1: the chain ascends: {previous} -> {version}");
        self.at = version;
        Some((previous, version, item))
    }

    /// The next link, if it is there.
    #[must_use]
    pub fn peek_next(&self) -> Option<&T> {
        self.waiting.get(&self.at).map(|(_, item)| item)
    }

    /// The next link with its version, if it is there, to work on before it is taken.
    pub fn peek_next_mut(&mut self) -> Option<(Version, &mut T)> {
        self.waiting.get_mut(&self.at).map(|(version, item)| (*version, item))
    }

    /// Everything that waits is at or above the chain's end.
    pub fn check(&self) {
        for (previous, (version, _)) in &self.waiting {
            assert!(
                *previous >= self.at && version > previous,
                "I1: {previous} -> {version} waits at {}",
                self.at
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_full_buffer_still_takes_the_next_link() {
        let mut ordered = Ordered::new(Version(0), 1);
        assert_eq!(ordered.offer(Version(2), Version(3), ()), Offer::Early);
        assert_eq!(ordered.offer(Version(1), Version(2), ()), Offer::Overflow);
        assert_eq!(ordered.offer(Version(0), Version(1), ()), Offer::Next);
        assert_eq!(ordered.take_next(), Some((Version(0), Version(1), ())));
        assert_eq!(ordered.take_next(), None);
    }

    proptest! {
        #[test]
        fn any_order_with_repeats_comes_out_as_the_chain(order in prop::collection::vec(0_u64..8, 0..60)) {
            let mut ordered = Ordered::new(Version(0), 100);
            let mut out = Vec::new();
            for link in order.into_iter().chain(0..8) {
                let _ = ordered.offer(Version(link), Version(link + 1), link);
                ordered.check();
                while let Some((_, _, link)) = ordered.take_next() {
                    out.push(link);
                }
            }
            prop_assert_eq!(out, (0..8).collect::<Vec<_>>());
        }
    }
}
