//! Pushes: taken once each, in chain order (I1, I2), acknowledged when durable (I7).
//!
//! ```text
//! Push --> Ordered --take--> Log::accept --flush--> Durable { durable, acks } --> every proxy
//!            | early: waits      | offsets assigned, Note::Accepted
//!            | again: acknowledged again
//! ```

use std::collections::BTreeMap;

use bytes::Bytes;
use common::message::{Announce, Confirm, Confirmed, Durable, Push, PushAck};
use common::{
    Code, Cx, Endpoint, Epoch, Mark, Note, Offer, Offset, Payload, Plant, RequestId, StreamId,
    Version,
};

use super::LogServer;
use crate::log::{Accepted, AcceptedBlock, fits_segment};

/// A push that passed its checks: its blocks with their bodies.
#[derive(Clone, Debug)]
pub(super) struct CheckedPush {
    from: Endpoint,
    push: Push,
    bodies: Vec<Payload>,
}

/// What a proxy's pushes came to.
#[derive(Clone, Debug, Default)]
pub(super) struct Pusher {
    /// The proxy has the acknowledgements up to here.
    answered: Version,
    /// First offsets of its pushes above that, acknowledged or not (I15).
    bases: BTreeMap<Version, Vec<Offset>>,
}

impl LogServer {
    pub(super) fn handle_push(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        push: Push,
    ) {
        let goes_on = cx.planted(Plant::LockedPush) && self.epoch() == epoch;
        if !self.is_accepting(epoch) && !goes_on {
            return self.refuse_epoch(cx, from, epoch);
        }
        let generation = self.generation.as_ref().expect("is_accepting looked at it");
        if !generation.pushers.contains_key(&from) {
            let detail = format!("{from:?} is no proxy of {epoch}");
            return self.refuse(cx, from, RequestId::ZERO, Code::NotHere, detail);
        }
        let bodies = match check_blocks(&push, cx.knobs.segment_bytes) {
            Ok(bodies) => bodies,
            Err((code, detail)) => {
                let detail = format!("push of {}: {detail}", push.version);
                cx.note(Note::Warning { code: code.name(), detail: detail.clone() });
                return self.refuse(cx, from, RequestId::ZERO, code, detail);
            }
        };
        self.raise_claim(cx, push.known_committed);
        let (version, mut previous) = (push.version, push.previous_version);
        let generation = self.generation.as_mut().expect("is_accepting looked at it");
        if cx.planted(Plant::HoleCounts) && version > generation.chain.at() {
            previous = generation.chain.at();
        }
        let pusher = generation.pushers.get_mut(&from).expect("it was looked at");
        pusher.answered = pusher.answered.max(push.answered);
        let answered = pusher.answered;
        pusher.bases.retain(|version, _| *version > answered);
        match generation.chain.offer(previous, version, CheckedPush { from, push, bodies }) {
            Offer::Next => {}
            Offer::Early => cx.mark(Mark::PushEarly),
            Offer::Again => {
                cx.mark(Mark::PushAgain);
                self.acknowledge_again(cx, from, version);
            }
            Offer::Overflow => {
                let detail = format!("{version} is too far ahead of its predecessor");
                self.refuse(cx, from, RequestId::ZERO, Code::Overloaded, detail);
            }
        }
    }

    /// Takes the pushes whose turn it is, as far as there is room.
    pub(super) fn take_pushes(&mut self, cx: &mut Cx<'_>) {
        let Some(generation) = &mut self.generation else { return };
        if !self.log.is_open() || self.log.is_stopping() {
            return;
        }
        let epoch = generation.epoch();
        // Check and advance in one step (I2): nothing between here and `accept` can refuse.
        while self.log.unflushed_bytes() < cx.knobs.unflushed_bytes_max {
            let Some((previous, version, checked)) = generation.chain.take_next() else { break };
            assert!(
                self.locked <= epoch || cx.planted(Plant::LockedPush),
                "I8: {version} of {epoch} is taken under {}",
                self.locked
            );
            let CheckedPush { from, push, bodies } = checked;
            let blocks = push.blocks.iter().zip(bodies);
            let accepted = Accepted {
                epoch,
                previous_version: previous,
                version,
                commit_time: push.commit_time,
                blocks: blocks.map(|(block, body)| AcceptedBlock { block: *block, body }).collect(),
                bases: Vec::new(),
            };
            let id_body = accepted.body(StreamId::IDS);
            let bases = self.log.accept(accepted);
            let pairs = push.blocks.iter().zip(&bases);
            cx.note(Note::Accepted {
                epoch,
                previous,
                version,
                blocks: pairs
                    .map(|(block, base)| (block.stream, *base, block.record_count))
                    .collect(),
            });
            self.pulls.expect(version, push.blocks.iter().map(|block| block.stream));
            if cx.planted(Plant::ReplyBeforeLogs) {
                let acks = vec![PushAck { version, base_offsets: bases.clone() }];
                let state = self.log.state();
                cx.send(from, epoch, Durable { durable: version, acks, state });
            }
            generation.pushers.entry(from).or_default().bases.insert(version, bases);
            if let Some(body) = id_body {
                self.ids.enter(cx, version, push.commit_time, &body);
            }
        }
    }

    /// Tells every proxy of the epoch how far this server is durable, with the acknowledgements of what the
    /// last flush brought.
    pub(super) fn announce_durable(&mut self, cx: &mut Cx<'_>) {
        let (durable, state) = (self.log.durable(), self.log.state());
        let Some(generation) = &mut self.generation else { return };
        let epoch = generation.epoch();
        // I8: what a lock may already have answered for is never announced.
        if self.locked > epoch || generation.announced >= durable {
            return;
        }
        let before = core::mem::replace(&mut generation.announced, durable);
        for (proxy, pusher) in &generation.pushers {
            let fresh = (core::ops::Bound::Excluded(before), core::ops::Bound::Included(durable));
            let acks = pusher
                .bases
                .range(fresh)
                .map(|(version, bases)| PushAck { version: *version, base_offsets: bases.clone() });
            cx.send(*proxy, epoch, Durable { durable, acks: acks.collect(), state });
        }
        // All log servers of the epoch have it: consumers need not wait for a proxy to say so (I11).
        if generation.is_alone() || cx.planted(Plant::ClaimOwnDurable) {
            self.raise_claim(cx, durable);
        }
    }

    /// Tells every proxy of the epoch that the log's state has changed.
    pub(super) fn announce_state(&self, cx: &mut Cx<'_>) {
        let Some(generation) = &self.generation else { return };
        let epoch = generation.epoch();
        if self.locked > epoch {
            return;
        }
        let durable = generation.announced;
        for proxy in generation.pushers.keys() {
            cx.send(*proxy, epoch, Durable { durable, acks: vec![], state: self.log.state() });
        }
    }

    fn acknowledge_again(&self, cx: &mut Cx<'_>, to: Endpoint, version: Version) {
        let generation = self.generation.as_ref().expect("a push was offered to it");
        let durable = generation.announced;
        // What is not durable yet is acknowledged by its flush; what the proxy has answered for, never again.
        if version > durable {
            return;
        }
        let Some(bases) = generation.pushers.get(&to).and_then(|p| p.bases.get(&version)) else {
            return;
        };
        let ack = PushAck { version, base_offsets: bases.clone() };
        let durable = Durable { durable, acks: vec![ack], state: self.log.state() };
        cx.send(to, generation.epoch(), durable);
    }

    pub(super) fn handle_announce(&mut self, cx: &Cx<'_>, epoch: Epoch, announce: Announce) {
        if self.is_accepting(epoch) {
            self.raise_claim(cx, announce.known_committed);
        }
    }

    pub(super) fn handle_confirm(
        &self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        confirm: Confirm,
    ) {
        if !self.is_accepting(epoch) {
            return self.refuse_epoch(cx, from, epoch);
        }
        let generation = self.generation.as_ref().expect("is_accepting looked at it");
        let (number, durable) = (confirm.number, generation.announced);
        cx.send(from, epoch, Confirmed { number, durable });
    }

    fn refuse_epoch(&self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch) {
        if epoch < self.locked {
            cx.mark(Mark::PushLocked);
            let detail = format!("{epoch} is locked by {}", self.locked);
            self.refuse_role(cx, from, epoch, Code::Locked, detail);
        } else if self.takeover.as_ref().is_none_or(|takeover| takeover.epoch() != epoch) {
            let detail = format!("{epoch} has not recruited this server");
            self.refuse_role(cx, from, epoch, Code::WrongEpoch, detail);
        }
        // Else the recruitment is on its way to the disk, and the sender will try again.
    }
}

/// Cuts the bodies out of a push, and checks that they are what the blocks say.
fn check_blocks(push: &Push, segment_bytes: u64) -> Result<Vec<Payload>, (Code, String)> {
    if let Some(pair) = push.blocks.windows(2).find(|pair| pair[0].stream >= pair[1].stream) {
        let detail = format!("{} after {}", pair[1].stream, pair[0].stream);
        return Err((Code::Malformed, detail));
    }
    let claimed: u64 = push.blocks.iter().map(|block| u64::from(block.bytes)).sum();
    if claimed != push.payload.len() as u64 {
        let detail = format!("{} bytes, {claimed} claimed", push.payload.len());
        return Err((Code::Malformed, detail));
    }
    if !fits_segment(segment_bytes, push.blocks.len(), claimed) {
        let detail = format!("{} blocks of {claimed} bytes fit no segment", push.blocks.len());
        return Err((Code::TransactionTooLarge, detail));
    }
    let mut rest = push.payload.pieces().iter().cloned();
    let mut piece = Bytes::new();
    let mut bodies = Vec::with_capacity(push.blocks.len());
    for block in &push.blocks {
        let (mut body, mut checksum, mut want) = (Payload::new(), 0, block.bytes as usize);
        while want > 0 {
            if piece.is_empty() {
                piece = rest.next().expect("the lengths add up");
            }
            let part = piece.split_to(want.min(piece.len()));
            checksum = crc32c::crc32c_append(checksum, &part);
            want -= part.len();
            body.push(part);
        }
        if block.record_count == 0 || checksum != block.checksum {
            let detail = format!(
                "{} has {} records and checksum {checksum:08x}, {:08x} claimed",
                block.stream, block.record_count, block.checksum
            );
            return Err((Code::Corrupt, detail));
        }
        bodies.push(body);
    }
    Ok(bodies)
}
