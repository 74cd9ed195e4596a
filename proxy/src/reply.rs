//! Replying: in version order, each client hears what became of its request, and what it took is given back.

use common::message::{CommitOutcome, CommitReply, CommitRequest};
use common::{Cx, Endpoint, Note, Plant, Position};

use crate::Proxy;
use crate::batch::{Batch, Phase, Transaction};
use crate::push::is_committed;

impl Proxy {
    /// Replies to the batches that are durable everywhere, the oldest first (I3). A conflict waits as well:
    /// the version that it lost to must not be lost itself.
    pub(crate) fn reply_ready(&mut self, cx: &mut Cx<'_>) {
        let mut has_replied = false;
        while self.is_oldest_durable()
            || (cx.planted(Plant::OneLogMissing) && self.is_oldest_almost_durable())
        {
            let mut batch = self.batches.pop_front().expect("just seen");
            batch.enter(Phase::Replying, cx.now);
            self.reply(cx, batch);
            has_replied = true;
        }
        let is_burst_over = self.batches.is_empty() && self.gathering.transactions.is_empty();
        if has_replied && is_burst_over {
            self.announce(cx);
        }
    }

    fn reply(&mut self, cx: &mut Cx<'_>, batch: Batch) {
        let (Some(pair), Some(pushed)) = (batch.pair, batch.pushed) else {
            unreachable!("batch {} has been pushed", batch.number)
        };
        assert!(
            self.replied < pair.version
                && (pair.version <= self.known_committed || cx.planted(Plant::OneLogMissing)),
            "I3: {} after {}, known committed {}",
            pair.version,
            self.replied,
            self.known_committed
        );
        self.replied = pair.version;
        for (mut transaction, index) in batch.transactions.into_iter().zip(0_u16..) {
            let outcome = transaction.failed.take().unwrap_or_else(|| {
                let sections = transaction.request.sections.iter();
                CommitOutcome::Committed {
                    position: Position { version: pair.version, index },
                    commit_time: pair.commit_time,
                    base_offsets: sections
                        .zip(&transaction.ordinals)
                        .map(|(section, ordinal)| pushed.offset(section.stream, *ordinal))
                        .collect(),
                }
            });
            self.finish(cx, transaction, outcome);
        }
    }

    /// The end of every request: gives back what it took, breaks its lane if it failed, and answers its
    /// client.
    pub(crate) fn finish(
        &mut self,
        cx: &mut Cx<'_>,
        transaction: Transaction,
        outcome: CommitOutcome,
    ) {
        let Transaction { client, request, charge, .. } = transaction;
        self.door.give_back(charge);
        if !self.door.settle(client, request.request, &outcome) {
            return self.break_lane_of(cx, client, &request, &outcome);
        }
        match &outcome {
            CommitOutcome::Committed { position, base_offsets, .. } => {
                let streams = request.sections.iter().map(|section| section.stream);
                cx.note(Note::Acknowledged {
                    epoch: self.plan.epoch,
                    position: *position,
                    client,
                    request: request.request,
                    offsets: streams.zip(base_offsets.iter().copied()).collect(),
                });
            }
            CommitOutcome::Refused(refusal) => cx.note(Note::Refused { code: refusal.code() }),
            CommitOutcome::Conflict { .. } | CommitOutcome::TooOld { .. } => {}
        }
        let reply = CommitReply { request: request.request, outcome: outcome.clone() };
        cx.send(client, self.plan.epoch, reply);
        self.break_lane_of(cx, client, &request, &outcome);
    }

    fn break_lane_of(
        &mut self,
        cx: &mut Cx<'_>,
        client: Endpoint,
        request: &CommitRequest,
        outcome: &CommitOutcome,
    ) {
        if let (Some(order), false) = (request.lane, is_committed(outcome)) {
            self.break_lane(cx, client, order, request.request);
        }
    }
}
