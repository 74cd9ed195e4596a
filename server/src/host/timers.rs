//! The timers of a node: a key fires once, at the time it was last armed for.

use std::collections::{BTreeMap, BTreeSet};

use common::Time;
use node::TimerKey;

/// Armed timers, by time.
#[derive(Debug, Default)]
pub(super) struct Timers {
    by_key: BTreeMap<TimerKey, Time>,
    by_time: BTreeSet<(Time, TimerKey)>,
}

impl Timers {
    pub(super) fn arm(&mut self, key: TimerKey, at: Time) {
        self.disarm(key);
        self.by_key.insert(key, at);
        self.by_time.insert((at, key));
    }

    pub(super) fn disarm(&mut self, key: TimerKey) {
        if let Some(at) = self.by_key.remove(&key) {
            self.by_time.remove(&(at, key));
        }
    }

    /// Takes the timer that is due first, if one is due.
    pub(super) fn take_due(&mut self, now: Time) -> Option<TimerKey> {
        let (at, key) = *self.by_time.first()?;
        if at > now {
            return None;
        }
        self.disarm(key);
        Some(key)
    }

    pub(super) fn next_at(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use common::{Epoch, Role, Timer};

    use super::*;

    #[test]
    fn arming_again_moves_a_timer() {
        let key = |n| TimerKey { role: Role::Leader, epoch: Epoch(0), timer: Timer(n) };
        let mut timers = Timers::default();
        timers.arm(key(1), Time(10));
        timers.arm(key(2), Time(20));
        timers.arm(key(1), Time(30));
        assert_eq!(timers.take_due(Time(15)), None);
        assert_eq!(timers.take_due(Time(40)), Some(key(2)));
        timers.arm(key(2), Time(50));
        timers.disarm(key(2));
        assert_eq!(timers.take_due(Time(99)), Some(key(1)));
        assert_eq!(timers.next_at(), None);
    }
}
