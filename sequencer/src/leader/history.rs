//! Why epochs ended: the last recoveries of this leader, with cause, phases and how long each took.
//!
//! ```text
//! recover(cause) --begin--> enter(phase) --.. note --> Serving: served
//!                               ^    |
//!                               '----'  a phase that is entered again adds to what it took before
//! ```

use core::time::Duration;
use std::collections::VecDeque;

use common::{Epoch, Time};

/// Recoveries that are remembered, at most.
const RECOVERIES_MAX: usize = 16;

/// One recovery.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovery {
    /// The epoch that it made; the one before, as long as none is claimed.
    pub epoch: Epoch,
    /// Why the one before ended: a stable name.
    pub cause: &'static str,
    /// When it began.
    pub began: Time,
    /// How long it took until the epoch served; `None` while it goes on, or when it was given up.
    pub took: Option<Duration>,
    /// How long each phase took, in the order in which they were first entered.
    pub phases: Vec<(&'static str, Duration)>,
    /// How often it started over.
    pub attempts: u32,
}

/// The last recoveries, oldest first.
#[derive(Clone, Default, Debug)]
pub(super) struct History {
    recoveries: VecDeque<Recovery>,
    /// The phase that goes on and when it was entered.
    phase: Option<(&'static str, Time)>,
}

impl History {
    /// A recovery begins, from an epoch that served or from none.
    pub(super) fn begin(&mut self, now: Time, cause: &'static str) {
        if self.recoveries.len() == RECOVERIES_MAX {
            self.recoveries.pop_front();
        }
        let recovery = Recovery {
            epoch: Epoch::ZERO,
            cause,
            began: now,
            took: None,
            phases: Vec::new(),
            attempts: 1,
        };
        self.recoveries.push_back(recovery);
        self.phase = None;
    }

    /// It starts over: the first cause is the one that counts.
    pub(super) fn start_over(&mut self) {
        if let Some(recovery) = self.recoveries.back_mut() {
            recovery.attempts = recovery.attempts.saturating_add(1);
        }
    }

    /// A phase is entered. `serves`: the recovery is done.
    pub(super) fn enter(&mut self, now: Time, epoch: Epoch, phase: &'static str, serves: bool) {
        let Some(recovery) = self.recoveries.back_mut().filter(|of| of.took.is_none()) else {
            return;
        };
        assert!(epoch >= recovery.epoch, "{epoch} is recovered after {}", recovery.epoch);
        recovery.epoch = epoch;
        if let Some((ended, since)) = self.phase.replace((phase, now)) {
            let lasted = now.since(since);
            match recovery.phases.iter_mut().find(|(name, _)| *name == ended) {
                Some((_, took)) => *took += lasted,
                // There are as many as the leader has phases.
                None => recovery.phases.push((ended, lasted)),
            }
        }
        if serves {
            recovery.took = Some(now.since(recovery.began));
            self.phase = None;
        }
    }

    pub(super) fn recoveries(&self) -> Vec<Recovery> {
        self.recoveries.iter().cloned().collect()
    }

    pub(super) fn check(&self) {
        assert!(self.recoveries.len() <= RECOVERIES_MAX, "{} recoveries", self.recoveries.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO.plus(Duration::from_millis(ms))
    }

    #[test]
    fn phases_that_repeat_are_summed_and_old_recoveries_go() {
        let mut history = History::default();
        history.begin(at(0), "start");
        history.enter(at(0), Epoch(0), "reading_register", false);
        history.enter(at(5), Epoch(1), "finding_nodes", false);
        history.start_over();
        history.enter(at(7), Epoch(1), "reading_register", false);
        history.enter(at(10), Epoch(2), "finding_nodes", false);
        history.enter(at(14), Epoch(2), "serving", true);
        // What the epoch does from here on is no recovery.
        history.enter(at(99), Epoch(2), "following", false);
        let phases = [("reading_register", 8), ("finding_nodes", 6)];
        let phases = phases.map(|(name, ms)| (name, Duration::from_millis(ms)));
        let expected = Recovery {
            epoch: Epoch(2),
            cause: "start",
            began: at(0),
            took: Some(Duration::from_millis(14)),
            phases: phases.to_vec(),
            attempts: 2,
        };
        assert_eq!(history.recoveries(), [expected]);
        for recovery in 0..40 {
            history.begin(at(100 + recovery), "peer_down");
            history.check();
        }
        assert_eq!(history.recoveries().len(), RECOVERIES_MAX);
        assert_eq!(history.recoveries()[0].began, at(124));
    }
}
