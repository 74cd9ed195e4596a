//! Read versions: rounds of proof that the epoch still lives, shared by all that ask.
//!
//! ```text
//!  q1 q2 | round 7: Confirm 7 --> all log servers        q3 q4 came after it began:
//!        |          `replication` answers 20 25 --> 20   they wait for round 8
//! ```
//!
//! I4: a round begins after its questions. An acknowledged commit is durable on every log server, so it is at
//! or below each answer, hence the minimum. `replication` servers that answer are not locked, and recovery
//! would have had to lock one of them first: no later epoch had begun when the first of them answered. A
//! locked server refuses and does not count.

use std::collections::VecDeque;

use common::message::{Confirm, Confirmed, ReadVersionReply, ReadVersionRequest, Refused};
use common::{
    Code, Cx, Endpoint, Gather, Gathered, Note, Peer, Plant, Refusal, RequestId, Role, Time,
    Version,
};

use crate::{Proxy, RETRY_AFTER_MS};

/// Who wants a proof.
#[derive(Clone, Debug)]
pub(crate) enum Asker {
    /// A client.
    Client {
        /// Who.
        client: Endpoint,
        /// Its request.
        request: RequestId,
        /// When the question came.
        asked: Time,
    },
    /// A transaction at the gate.
    Gate {
        /// Its ticket.
        ticket: u64,
    },
    /// A batch that waits until more is known committed: the answers say how far the servers are.
    Stalled,
}

/// Questions, and the round that answers some of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadVersions {
    waiting: VecDeque<Asker>,
    round: Option<Round>,
    number: u64,
}

#[derive(Clone, Debug)]
struct Round {
    number: u64,
    sent_at: Time,
    /// What was known committed when it began: every acknowledgement of this proxy before it.
    floor: Version,
    askers: VecDeque<Asker>,
    answers: Gather<usize, Version>,
}

impl ReadVersions {
    pub(crate) fn ask(&mut self, asker: Asker) {
        self.waiting.push_back(asker);
    }

    pub(crate) fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// The round that goes on: its number, its questions, its answers.
    pub(crate) fn round(&self) -> Option<(u64, usize, usize)> {
        let round = self.round.as_ref()?;
        Some((round.number, round.askers.len(), round.answers.answered_count()))
    }

    pub(crate) fn asks_for(&self, wanted: u64) -> bool {
        let in_round = self.round.iter().flat_map(|round| &round.askers);
        let is_wanted =
            |asker: &Asker| matches!(asker, Asker::Gate { ticket } if *ticket == wanted);
        self.waiting.iter().chain(in_round).any(is_wanted)
    }

    pub(crate) fn forget(&mut self, peer: Peer) {
        let stays =
            |asker: &Asker| !matches!(asker, Asker::Client { client, .. } if client.peer() == peer);
        self.waiting.retain(stays);
        if let Some(round) = &mut self.round {
            round.askers.retain(stays);
        }
    }
}

impl Proxy {
    pub(crate) fn handle_read_version(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        request: ReadVersionRequest,
    ) {
        if from.role != Role::Client {
            return;
        }
        let waiting = self.reads.waiting.len();
        let refusal = if self.is_fenced || !self.is_serving {
            self.recovering()
        } else if waiting as u64 >= cx.knobs.read_versions_waiting_max {
            let detail = format!("{waiting} questions wait");
            Refusal::later(Code::Overloaded, detail, RETRY_AFTER_MS)
        } else {
            let (client, request) = (from, request.request);
            if cx.planted(Plant::ReadUnproven) {
                let version = self.known_committed;
                return cx.send(client, self.plan.epoch, ReadVersionReply { request, version });
            }
            if let (true, Some(round)) = (cx.planted(Plant::StaleRound), &mut self.reads.round) {
                return round.askers.push_back(Asker::Client { client, request, asked: cx.now });
            }
            return self.reads.ask(Asker::Client { client, request, asked: cx.now });
        };
        self.refuse_read(cx, from, request.request, refusal);
    }

    fn refuse_read(&self, cx: &mut Cx<'_>, to: Endpoint, request: RequestId, refusal: Refusal) {
        cx.note(Note::Refused { code: refusal.code() });
        cx.send(to, self.plan.epoch, Refused { request, refusal });
    }

    /// The epoch is over: no round will ever end.
    pub(crate) fn refuse_waiting_reads(&mut self, cx: &mut Cx<'_>) {
        let round = self.reads.round.take();
        let waiting = core::mem::take(&mut self.reads.waiting);
        for asker in round.into_iter().flat_map(|round| round.askers).chain(waiting) {
            if let Asker::Client { client, request, .. } = asker {
                self.refuse_read(cx, client, request, self.recovering());
            }
        }
    }

    /// Begins a round for everything that has been asked so far, when none goes on.
    pub(crate) fn begin_round(&mut self, cx: &mut Cx<'_>) {
        if self.reads.round.is_some() || self.reads.waiting.is_empty() || self.is_fenced {
            return;
        }
        let server_count = self.log_servers.len();
        // The next recovery locks all but fewer than this of them.
        let enough = usize::from(self.plan.replication) - self.plan.absent.len();
        let enough = if cx.planted(Plant::ConfirmedByOne) { 1 } else { enough };
        self.reads.number += 1;
        self.reads.round = Some(Round {
            number: self.reads.number,
            sent_at: cx.now,
            floor: self.known_committed,
            askers: core::mem::take(&mut self.reads.waiting),
            answers: Gather::new(0..server_count, enough),
        });
        for server in &self.log_servers {
            let confirm = Confirm { number: self.reads.number };
            cx.send(server.endpoint, self.plan.epoch, confirm);
        }
    }

    pub(crate) fn handle_confirmed(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        confirmed: Confirmed,
    ) {
        let Some(server) = self.log_server_place(from) else { return };
        self.raise_durable(cx, server, confirmed.durable);
        assert!(
            confirmed.number <= self.reads.number,
            "{confirmed:?}, asked {}",
            self.reads.number
        );
        let Some(round) = &mut self.reads.round else { return };
        if round.number != confirmed.number {
            return;
        }
        match round.answers.answer(server, confirmed.durable) {
            Gathered::Enough => self.end_round(cx),
            Gathered::Waiting | Gathered::More | Gathered::Ignored => {}
        }
    }

    fn end_round(&mut self, cx: &mut Cx<'_>) {
        let round = self.reads.round.take().expect("a round goes on");
        let version = round.answers.answered().map(|(_, durable)| *durable).min();
        let version = version.expect("replication is at least one");
        assert!(version >= round.floor, "I4: {version} is below {}", round.floor);
        for asker in round.askers {
            match asker {
                Asker::Client { client, request, asked } => {
                    cx.note(Note::ReadVersion { epoch: self.plan.epoch, version, asked });
                    cx.send(client, self.plan.epoch, ReadVersionReply { request, version });
                }
                Asker::Gate { ticket } => self.gate_proven(cx, ticket, version),
                Asker::Stalled => {}
            }
        }
    }

    /// Asks those again that have not answered the round.
    pub(crate) fn retry_round(&mut self, cx: &mut Cx<'_>) {
        let Some(round) = &mut self.reads.round else { return };
        if cx.now.since(round.sent_at).as_millis() < u128::from(cx.knobs.retransmit_ms) {
            return;
        }
        round.sent_at = cx.now;
        cx.mark(common::Mark::Retransmit);
        for server in round.answers.silent() {
            let confirm = Confirm { number: round.number };
            cx.send(self.log_servers[server].endpoint, self.plan.epoch, confirm);
        }
    }

    pub(crate) fn check_reads(&self) {
        let Some(round) = &self.reads.round else {
            assert!(self.reads.waiting.is_empty(), "questions wait and no round goes on");
            return;
        };
        assert!(!round.answers.is_enough(), "round {} has all it needs", round.number);
        assert_eq!(round.number, self.reads.number, "the last round goes on");
    }
}
