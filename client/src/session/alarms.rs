//! One timer of the shell for everything that waits: the earliest alarm is armed, later ones wait here.

use std::collections::{BTreeMap, BTreeSet};

use common::{Cx, Time, Timer};

/// The session's only timer.
pub(super) const TICK: Timer = Timer(0);

/// Things that want to be woken, at most once each.
#[derive(Clone, Debug)]
pub(super) struct Alarms<T: Ord + Copy> {
    order: BTreeSet<(Time, T)>,
    at: BTreeMap<T, Time>,
    armed: Option<Time>,
}

impl<T: Ord + Copy> Default for Alarms<T> {
    fn default() -> Self {
        Self { order: BTreeSet::new(), at: BTreeMap::new(), armed: None }
    }
}

impl<T: Ord + Copy> Alarms<T> {
    /// Wakes `who` at `at`, and not when it was to be woken before.
    pub(super) fn set(&mut self, who: T, at: Time) {
        if let Some(before) = self.at.insert(who, at) {
            if before == at {
                return;
            }
            self.order.remove(&(before, who));
        }
        self.order.insert((at, who));
        assert_eq!(self.order.len(), self.at.len(), "each is woken once");
    }

    pub(super) fn clear(&mut self, who: T) {
        if let Some(at) = self.at.remove(&who) {
            self.order.remove(&(at, who));
        }
    }

    /// The timer has run out: nothing is armed any more.
    pub(super) const fn fired(&mut self) {
        self.armed = None;
    }

    /// The next one whose time has come.
    pub(super) fn pop(&mut self, now: Time) -> Option<T> {
        let (at, who) = *self.order.first().filter(|(at, _)| *at <= now)?;
        self.order.pop_first();
        assert_eq!(self.at.remove(&who), Some(at), "each is woken once");
        Some(who)
    }

    /// Arms the timer when the earliest alarm is earlier than what is armed. A timer that fires early only
    /// arms again, which is cheaper than moving it with each answer.
    pub(super) fn arm(&mut self, cx: &mut Cx<'_>) {
        let Some((first, _)) = self.order.first() else { return };
        if self.armed.is_none_or(|armed| *first < armed) {
            self.armed = Some(*first);
            cx.arm(TICK, *first);
        }
    }
}
