//! The simulated register: linearizable, slow, and silent when it hurts.
//!
//! ```text
//! leader --request--> (delay) --> carried out, or not --> (delay) --> answer, indeterminate or unavailable
//! ```
//!
//! A write whose answer was lost may have happened, may not have, or may still happen after the leader was
//! told that nobody knows.

use bytes::Bytes;
use common::register::{
    REGISTER_BYTES_MAX, RegisterAnswer, RegisterOp, RegisterOutcome, RegisterRequest, Revision,
};
use common::{Peer, Prng};

use crate::clock::Moment;
use crate::random::delay_ns;

/// How bad a register is.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RegisterProfile {
    /// One way's base time, ns.
    pub latency_ns: u64,
    /// Answers that are lost, in a million.
    pub lost_ppm: u64,
    /// Requests that do not reach it, in a million.
    pub unavailable_ppm: u64,
}

impl Default for RegisterProfile {
    fn default() -> Self {
        Self { latency_ns: 500_000, lost_ppm: 0, unavailable_ppm: 0 }
    }
}

/// What the register puts into the event queue.
#[derive(Clone, Debug)]
pub enum Consultation {
    /// A request reaches the register.
    Reach {
        /// Who asked.
        from: Peer,
        /// What.
        request: RegisterRequest,
        /// Whether the asker still gets the answer.
        answered: bool,
    },
    /// An answer reaches who asked.
    Answer {
        /// Who asked.
        to: Peer,
        /// The answer.
        answer: RegisterAnswer,
    },
}

/// The one register of a run.
#[derive(Clone, Debug)]
pub struct Register {
    profile: RegisterProfile,
    revision: Revision,
    value: Bytes,
    down_until: Moment,
    prng: Prng,
}

impl Register {
    /// A register that was never written.
    #[must_use]
    pub const fn new(profile: RegisterProfile, prng: Prng) -> Self {
        Self { profile, revision: Revision(0), value: Bytes::new(), down_until: Moment::ZERO, prng }
    }

    /// Somebody asks.
    pub fn ask(
        &mut self,
        now: Moment,
        from: Peer,
        request: RegisterRequest,
        out: &mut Vec<(Moment, Consultation)>,
    ) {
        let there = now.plus_ns(self.latency_ns());
        let is_write = matches!(request.op, RegisterOp::Cas { .. });
        let unavailable =
            now < self.down_until || self.prng.chance(self.profile.unavailable_ppm, 1_000_000);
        if unavailable && !(is_write && self.prng.chance(1, 4)) {
            let outcome = RegisterOutcome::Unavailable("simulated outage".to_owned());
            let answer = RegisterAnswer { id: request.id, outcome };
            out.push((there, Consultation::Answer { to: from, answer }));
            return;
        }
        let lost = unavailable || self.prng.chance(self.profile.lost_ppm, 1_000_000);
        if lost && is_write {
            let outcome = RegisterOutcome::Indeterminate("simulated silence".to_owned());
            let answer = RegisterAnswer { id: request.id, outcome };
            let told = now.plus_ns(self.latency_ns());
            out.push((told, Consultation::Answer { to: from, answer }));
            if self.prng.chance(1, 2) {
                // Perhaps long after the asker was told.
                let late = now.plus_ns(self.latency_ns() * self.prng.between(1, 20));
                out.push((late, Consultation::Reach { from, request, answered: false }));
            }
            return;
        }
        out.push((there, Consultation::Reach { from, request, answered: true }));
    }

    /// A request has reached the register: carries it out. The answer, if any gets through, is appended.
    pub fn reach(
        &mut self,
        now: Moment,
        from: Peer,
        request: RegisterRequest,
        answered: bool,
        out: &mut Vec<(Moment, Consultation)>,
    ) {
        let outcome = match request.op {
            RegisterOp::Read => RegisterOutcome::Value(self.revision, self.value.clone()),
            RegisterOp::Cas { expect, value } if expect == self.revision => {
                let bytes = value.len();
                assert!(bytes <= REGISTER_BYTES_MAX, "{bytes} bytes are over {REGISTER_BYTES_MAX}");
                self.revision = Revision(self.revision.0 + 1);
                self.value = value;
                RegisterOutcome::Written(self.revision)
            }
            RegisterOp::Cas { .. } => RegisterOutcome::Lost,
        };
        if answered {
            let back = now.plus_ns(self.latency_ns());
            let answer = RegisterAnswer { id: request.id, outcome };
            out.push((back, Consultation::Answer { to: from, answer }));
        }
    }

    /// Nobody reaches the register before `until`.
    pub fn outage(&mut self, until: Moment) {
        self.down_until = self.down_until.max(until);
    }

    /// Ends all faults.
    pub fn calm(&mut self, now: Moment) {
        self.down_until = self.down_until.min(now);
        self.profile.lost_ppm = 0;
        self.profile.unavailable_ppm = 0;
    }

    /// What it holds, for oracles.
    #[must_use]
    pub const fn peek(&self) -> (Revision, &Bytes) {
        (self.revision, &self.value)
    }

    fn latency_ns(&mut self) -> u64 {
        delay_ns(&mut self.prng, self.profile.latency_ns, 20)
    }
}

#[cfg(test)]
mod tests {
    use common::{Incarnation, NodeId};

    use super::*;

    const LEADER: Peer = Peer { node: NodeId(1), incarnation: Incarnation(1) };

    fn ask(register: &mut Register, id: u64, op: RegisterOp) -> Vec<RegisterAnswer> {
        let (mut queue, mut answers) = (Vec::new(), Vec::new());
        register.ask(Moment::ZERO, LEADER, RegisterRequest { id, op }, &mut queue);
        while !queue.is_empty() {
            let place = (0..queue.len()).min_by_key(|place| queue[*place].0).unwrap();
            match queue.remove(place) {
                (_, Consultation::Answer { answer, .. }) => answers.push(answer),
                (at, Consultation::Reach { from, request, answered }) => {
                    register.reach(at, from, request, answered, &mut queue);
                }
            }
        }
        answers
    }

    fn cas(expect: u64) -> RegisterOp {
        RegisterOp::Cas { expect: Revision(expect), value: Bytes::from_static(b"x") }
    }

    #[test]
    fn a_compare_and_set_wins_once() {
        let mut register = Register::new(RegisterProfile::default(), Prng::new(1));
        let won = ask(&mut register, 1, cas(0));
        assert_eq!(won[0].outcome, RegisterOutcome::Written(Revision(1)));
        assert_eq!(ask(&mut register, 2, cas(0))[0].outcome, RegisterOutcome::Lost);
        let read = ask(&mut register, 3, RegisterOp::Read);
        let expect = RegisterOutcome::Value(Revision(1), Bytes::from_static(b"x"));
        assert_eq!(read[0].outcome, expect);
    }

    #[test]
    fn every_question_has_one_answer_and_an_indeterminate_write_may_have_happened() {
        let profile = RegisterProfile { lost_ppm: 500_000, ..RegisterProfile::default() };
        let (mut happened, mut not) = (0, 0);
        for seed in 0..200 {
            let mut register = Register::new(profile.clone(), Prng::new(seed));
            let answers = ask(&mut register, 1, cas(0));
            let [answer] = &answers[..] else { panic!("{answers:?}") };
            if let RegisterOutcome::Indeterminate(_) = answer.outcome {
                match register.peek().0 {
                    Revision(0) => not += 1,
                    _ => happened += 1,
                }
            }
        }
        assert!(happened > 20 && not > 20, "{happened} {not}");
    }

    #[test]
    fn an_outage_ends() {
        let mut register = Register::new(RegisterProfile::default(), Prng::new(1));
        register.outage(Moment(1000));
        let answers = ask(&mut register, 1, RegisterOp::Read);
        assert!(matches!(answers[0].outcome, RegisterOutcome::Unavailable(_)));
        register.calm(Moment::ZERO);
        let answers = ask(&mut register, 1, RegisterOp::Read);
        assert!(matches!(answers[0].outcome, RegisterOutcome::Value(..)));
    }
}
