//! Reading, Claiming and Publishing: the leader's three uses of the register.

use std::collections::BTreeSet;

use bytes::Bytes;
use common::register::{
    Generation, RegisterAnswer, RegisterOp, RegisterOutcome, RegisterRequest, RegisterState,
    Revision,
};
use common::{Cx, Mark, Note, Plant};

use super::absent::last_with;
use super::{Checking, Leader, Phase, RETRY};

impl Leader {
    pub(super) fn read_register(&mut self, cx: &mut Cx<'_>, checking: Option<Checking>) {
        self.ask_register(cx, RegisterOp::Read);
        self.enter(cx, Phase::Reading { checking });
    }

    fn ask_register(&mut self, cx: &mut Cx<'_>, op: RegisterOp) {
        // Only the answer to the newest question counts: an older write is settled by reading.
        self.register_question += 1;
        cx.register(RegisterRequest { id: self.register_question, op });
    }

    pub(super) fn handle_register(&mut self, cx: &mut Cx<'_>, answer: RegisterAnswer) {
        if answer.id != self.register_question {
            return;
        }
        self.register_patience = 0;
        match answer.outcome {
            RegisterOutcome::Value(revision, bytes) => {
                self.backoff.reset();
                self.handle_register_value(cx, revision, &bytes);
            }
            RegisterOutcome::Written(revision) => self.handle_register_written(cx, revision),
            RegisterOutcome::Lost => {
                cx.mark(Mark::RegisterLost);
                if cx.planted(Plant::LostIsWritten)
                    && matches!(self.phase, Phase::Publishing { .. })
                {
                    return self.announce(cx);
                }
                self.give_way(cx, "register_lost");
            }
            RegisterOutcome::Indeterminate(_) => {
                cx.mark(Mark::RegisterIndeterminate);
                if cx.planted(Plant::TrustIndeterminate) {
                    return self.handle_register_written(cx, Revision(self.revision.0 + 1));
                }
                match self.phase.clone() {
                    Phase::Claiming { wanted } => {
                        self.read_register(cx, Some(Checking::Claim(wanted)))
                    }
                    Phase::Publishing { wanted } => {
                        self.read_register(cx, Some(Checking::Publish(wanted)));
                    }
                    _ => self.wait_for_register(cx),
                }
            }
            RegisterOutcome::Unavailable(_) => self.wait_for_register(cx),
        }
    }

    /// Nothing was written; the phase's timer asks again after a longer and longer wait.
    fn wait_for_register(&mut self, cx: &mut Cx<'_>) {
        let wait = self.backoff.next(cx.knobs.register_backoff_ms_max, cx.rng);
        cx.arm_after(RETRY, wait);
    }

    fn handle_register_value(&mut self, cx: &mut Cx<'_>, revision: Revision, bytes: &Bytes) {
        let Phase::Reading { checking } = &self.phase else { return };
        let checking = checking.clone();
        let state = match RegisterState::decode(bytes) {
            Ok(state) => state,
            Err(what) => return cx.halt("corrupt_register", what),
        };
        assert!(
            revision >= self.revision && state.epoch >= self.state.epoch,
            "the register went back from {:?} {} to {revision:?} {}",
            self.revision,
            self.state.epoch,
            state.epoch
        );
        self.revision = revision;
        self.state = state;
        match checking {
            Some(Checking::Claim(wanted)) if self.state == wanted => self.claimed(cx),
            Some(Checking::Publish(wanted)) if self.state == wanted => self.published(cx),
            // Somebody has taken it since: its turn. With a new epoch of this leader's own that it never
            // heard of, a claim of an earlier life, it is the same.
            _ if self.has_rivals() && self.state.epoch > self.known_epoch() => {
                self.heard = self.state.epoch;
                self.follow(cx, "newer_leader");
            }
            _ if self.should_yield(cx.me.node) => self.follow(cx, "leaving"),
            // Not written, though it may still be on its way: the next write expects this revision, so that
            // at most one of the two succeeds.
            _ => self.claim(cx),
        }
    }

    fn handle_register_written(&mut self, cx: &mut Cx<'_>, revision: Revision) {
        assert!(revision > self.revision, "a write moves {:?}, not to {revision:?}", self.revision);
        match self.phase.clone() {
            Phase::Claiming { wanted } => {
                (self.revision, self.state) = (revision, wanted);
                self.claimed(cx);
            }
            Phase::Publishing { wanted } => {
                (self.revision, self.state) = (revision, wanted);
                self.published(cx);
            }
            _ => {}
        }
    }

    /// Takes the register to the next epoch: fences every earlier leader from writing.
    fn claim(&mut self, cx: &mut Cx<'_>) {
        self.plan = None;
        let wanted = RegisterState {
            epoch: self.state.epoch.plus(1),
            leader: cx.me.node,
            stamp: cx.rng.next(),
            generations: self.state.generations.clone(),
            membership: self.membership_to_claim(),
        };
        let value = wanted.encode();
        self.ask_register(cx, RegisterOp::Cas { expect: self.revision, value });
        self.enter(cx, Phase::Claiming { wanted });
    }

    fn claimed(&mut self, cx: &mut Cx<'_>) {
        assert!(self.state.epoch > self.epoch, "{} is not above {}", self.state.epoch, self.epoch);
        assert_eq!(self.state.leader, cx.me.node, "the claim is this leader's own");
        self.epoch = self.state.epoch;
        self.yields = 0;
        // Persisted: they are in the register.
        self.changes.clear();
        if !self.is_leading && self.has_rivals() {
            self.is_leading = true;
            self.handle_beat_timer(cx);
        }
        self.find_nodes(cx);
    }

    /// Writes the new generation and the old one's end: the commit point of recovery (I10).
    pub(super) fn publish(&mut self, cx: &mut Cx<'_>) {
        let plan = self.plan.as_ref().expect("a plan was proven");
        let generations = close_and_open(
            &self.state.generations,
            Generation {
                epoch: plan.epoch,
                first_epoch: plan.epoch,
                begin: plan.recovery_version,
                end: None,
                log_servers: plan.log_servers.iter().map(|server| server.node).collect(),
                absent: plan.absent.clone(),
                replication: plan.replication,
            },
        );
        let wanted = RegisterState { stamp: cx.rng.next(), generations, ..self.state.clone() };
        wanted.check().expect("the generations stay in order");
        let value = wanted.encode();
        self.ask_register(cx, RegisterOp::Cas { expect: self.revision, value });
        self.enter(cx, Phase::Publishing { wanted });
    }

    fn published(&mut self, cx: &mut Cx<'_>) {
        assert_eq!(self.state.epoch, self.epoch, "I10: no newer epoch was claimed meanwhile");
        cx.note(Note::GenerationWritten { epoch: self.epoch });
        self.note_returned(cx);
        self.announce(cx);
    }
}

/// Closes the last generation at the new one's begin. Closed neighbours on the same log servers become one,
/// so that restarts don't make the register grow.
fn close_and_open(old: &[Generation], new: Generation) -> Vec<Generation> {
    let mut generations: Vec<Generation> = Vec::with_capacity(old.len() + 1);
    for generation in old {
        let end = generation.end.unwrap_or(new.begin);
        assert!(end >= generation.begin, "{} ends at {end} before it began", generation.epoch);
        match generations.last_mut() {
            Some(last)
                if last.log_servers == generation.log_servers
                    && last.absent == generation.absent
                    && last.replication == generation.replication
                    && last.end == Some(generation.begin) =>
            {
                (last.epoch, last.end) = (generation.epoch, Some(end));
            }
            _ => generations.push(Generation { end: Some(end), ..generation.clone() }),
        }
    }
    generations.push(new);
    retire(generations)
}

/// Lets go of the generations that nobody needs. Where one ended is asked for by its successor, and by the
/// absent log servers that it was the last to have: what they have above is void. So however often log
/// servers come and go, the register holds two generations, and two more for each absent one.
fn retire(generations: Vec<Generation>) -> Vec<Generation> {
    let newest = generations.last().expect("one was just opened");
    let count = generations.len();
    let mut needed = BTreeSet::from([count - 1, count.saturating_sub(2)]);
    for node in &newest.absent {
        if let Some(place) = last_with(&generations, *node) {
            needed.extend([place, place + 1]);
        }
    }
    assert!(needed.len() <= 2 + 2 * newest.absent.len(), "{needed:?} of {count} are needed");
    let all = generations.into_iter().enumerate();
    all.filter(|(place, _)| needed.contains(place)).map(|(_, generation)| generation).collect()
}

#[cfg(test)]
mod tests {
    use common::{Epoch, NodeId, Version};

    use super::*;

    fn generation(epoch: u64, begin: u64, end: Option<u64>, node: u64) -> Generation {
        Generation {
            epoch: Epoch(epoch),
            first_epoch: Epoch(epoch),
            begin: Version(begin),
            end: end.map(Version),
            log_servers: vec![NodeId(node)],
            absent: Vec::new(),
            replication: 1,
        }
    }

    #[test]
    fn restarts_on_the_same_servers_leave_two_generations() {
        let mut generations = vec![generation(1, 0, None, 7)];
        for restart in 2..50 {
            generations = close_and_open(&generations, generation(restart, restart * 10, None, 7));
        }
        let closed = Generation { first_epoch: Epoch(1), ..generation(48, 0, Some(490), 7) };
        assert_eq!(generations, [closed, generation(49, 490, None, 7)]);
    }

    #[test]
    fn generations_on_other_servers_stay_apart() {
        let old = [generation(1, 0, Some(5), 7), generation(2, 5, None, 8)];
        let all = close_and_open(&old, generation(3, 9, None, 8));
        assert_eq!(all[..], [generation(2, 5, Some(9), 8), generation(3, 9, None, 8)]);
    }

    /// Servers 7, 8 and 9, of which some are absent.
    fn without(epoch: u64, begin: u64, absent: &[u64]) -> Generation {
        let all = [7, 8, 9].into_iter();
        let (absent, present): (Vec<u64>, Vec<u64>) = all.partition(|node| absent.contains(node));
        Generation {
            log_servers: present.into_iter().map(NodeId).collect(),
            absent: absent.into_iter().map(NodeId).collect(),
            replication: 3,
            ..generation(epoch, begin, None, 0)
        }
    }

    #[test]
    fn coming_and_going_does_not_make_the_register_grow() {
        let mut generations = vec![without(1, 0, &[])];
        generations = close_and_open(&generations, without(2, 20, &[9]));
        for epoch in (3..99).step_by(2) {
            generations = close_and_open(&generations, without(epoch, epoch * 10, &[8, 9]));
            generations = close_and_open(&generations, without(epoch + 1, epoch * 10 + 10, &[9]));
            assert!(generations.len() <= 4, "{generations:?}");
            assert_eq!(generations[0].end, Some(Version(20)), "9 was last written to before 20");
            assert_eq!(generations[1].first_epoch, Epoch(2), "and is absent since");
        }
        generations = close_and_open(&generations, without(99, 2000, &[]));
        assert_eq!(generations.len(), 2, "all are whole");
    }
}
