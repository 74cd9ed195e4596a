//! Asking several and waiting for enough of them.

use std::collections::BTreeMap;

/// What an answer made of a gathering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Gathered {
    /// It counted; more are needed.
    Waiting,
    /// It counted, and now there are enough. Said once.
    Enough,
    /// It counted, though there were enough before.
    More,
    /// Nobody asked, or it has answered before.
    Ignored,
}

/// Targets, their answers, and how many are enough.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gather<K: Ord, R> {
    answers: BTreeMap<K, Option<R>>,
    enough: usize,
}

impl<K: Ord + Copy, R> Gather<K, R> {
    /// Asks `targets`; `enough` answers suffice.
    pub fn new(targets: impl IntoIterator<Item = K>, enough: usize) -> Self {
        let answers: BTreeMap<K, Option<R>> =
            targets.into_iter().map(|target| (target, None)).collect();
        assert!(enough <= answers.len(), "{enough} of {} can never answer", answers.len());
        Self { answers, enough }
    }

    /// Takes an answer in.
    pub fn answer(&mut self, from: K, answer: R) -> Gathered {
        let before = self.answered_count();
        match self.answers.get_mut(&from) {
            Some(slot @ None) => *slot = Some(answer),
            _ => return Gathered::Ignored,
        }
        match (before + 1).cmp(&self.enough) {
            core::cmp::Ordering::Less => Gathered::Waiting,
            core::cmp::Ordering::Equal => Gathered::Enough,
            core::cmp::Ordering::Greater => Gathered::More,
        }
    }

    /// Who has not answered.
    pub fn silent(&self) -> impl Iterator<Item = K> + '_ {
        self.answers.iter().filter(|(_, answer)| answer.is_none()).map(|(target, _)| *target)
    }

    /// Who has answered what.
    pub fn answered(&self) -> impl Iterator<Item = (K, &R)> + '_ {
        self.answers.iter().filter_map(|(target, answer)| Some((*target, answer.as_ref()?)))
    }

    /// How many have answered.
    #[must_use]
    pub fn answered_count(&self) -> usize {
        self.answers.values().filter(|answer| answer.is_some()).count()
    }

    /// Whether enough have.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.answered_count() >= self.enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_is_said_once_and_repeats_do_not_count() {
        let mut gather = Gather::new([1, 2, 3], 2);
        assert_eq!(gather.answer(1, 'a'), Gathered::Waiting);
        assert_eq!(gather.answer(1, 'a'), Gathered::Ignored);
        assert_eq!(gather.answer(9, 'a'), Gathered::Ignored);
        assert!(!gather.is_enough());
        assert_eq!(gather.answer(3, 'c'), Gathered::Enough);
        assert_eq!(gather.silent().collect::<Vec<_>>(), [2]);
        assert_eq!(gather.answer(2, 'b'), Gathered::More);
        assert_eq!(gather.answered().map(|(_, r)| *r).collect::<String>(), "abc");
    }
}
