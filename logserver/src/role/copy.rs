//! Serving copies: what an absent log server has missed of its share.
//!
//! ```text
//! Copy { after, through } --> streams of the asker's share that this server is the first whole holder of
//!                             whole versions above `after` --> Copied, from the tail or read
//! ```
//!
//! What is served is committed (I11), or lies at or below the recovery version of the asker's plan: a leader
//! has fixed it, and this server has everything up to it. Should the plan come to nothing, so does the copy.

use std::collections::BTreeMap;

use bytes::Bytes;
use common::message::{Copied, CopiedTrim, Copy};
use common::{Code, Cx, Endpoint, Epoch, Plant, RequestId, StreamId, Version, placement};

use super::LogServer;
use super::mend::Finder;
use super::pull::{Gathered, gather};
use crate::log::{ReadFailure, ReadId};

/// Copies that read at once; who asks beyond that asks again.
const COPIES_READING_MAX: usize = 8;

/// An answer that waits for bodies off the disk.
#[derive(Clone, Debug)]
struct Reading {
    from: Endpoint,
    epoch: Epoch,
    copied: Copied,
    answer: Gathered,
}

/// Copies that are being read.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    reading: BTreeMap<ReadId, Reading>,
}

impl Copies {
    pub(super) fn is_reading(&self, id: ReadId) -> bool {
        self.reading.contains_key(&id)
    }

    pub(super) fn reading_count(&self) -> usize {
        self.reading.len()
    }

    pub(super) fn check(&self) {
        assert!(self.reading.len() <= COPIES_READING_MAX, "{} copies read", self.reading.len());
    }
}

impl LogServer {
    pub(super) fn handle_copy(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        copy: &Copy,
    ) {
        let is_sound = copy.whole.contains(&cx.me.node)
            && copy.others.contains(&copy.node)
            && copy.others.len() < usize::from(copy.replication);
        if !is_sound {
            let detail = format!("{copy:?} is not for {}", cx.me.node);
            return self.refuse(cx, from, RequestId::ZERO, Code::Malformed, detail);
        }
        // A locked server takes no more trims; once these are done a returning one learns of all there were.
        let may_miss_a_trim = copy.wants_all_trims && self.trims.waiting_count() > 0;
        if self.copies.reading.len() >= COPIES_READING_MAX || may_miss_a_trim {
            return;
        }
        let streams = self.share(cx, copy);
        let all = cx.planted(Plant::CopyUncommitted);
        let through = if all { self.log.durable() } else { copy.through };
        let limit = self.served_limit().max(through.min(self.log.durable()));
        let answer = gather(&self.log, &streams, copy.after, limit, cx.knobs.pull_bytes_max);
        assert!(
            answer.through >= copy.after && answer.blocks.iter().all(|(_, b)| b.version <= limit),
            "I11: {} to {} is copied below {limit}",
            copy.after,
            answer.through
        );
        let copied = Copied {
            round: copy.round,
            after: copy.after,
            through: answer.through,
            is_all: answer.through >= limit,
            is_damaged: false,
            trims: self.trims_of(&streams, copy),
            versions: Vec::new(),
            blocks: Vec::new(),
            payload: common::Payload::new(),
        };
        if self.has_in_tail(&answer) {
            return self.answer_copy(cx, from, epoch, copied, answer, &BTreeMap::new());
        }
        let id = self.log.read(cx, answer.blocks.clone());
        self.copies.reading.insert(id, Reading { from, epoch, copied, answer });
    }

    /// The streams of the asker's share that this server is the first whole holder of, ascending.
    fn share(&self, cx: &Cx<'_>, copy: &Copy) -> Vec<StreamId> {
        let all: Vec<_> = copy.whole.iter().chain(&copy.others).copied().collect();
        let is_asked = |stream: StreamId| {
            let holders = placement::holders(stream, &copy.seats, &all, &[], copy.replication);
            let Copy { seats, whole, others, replication, .. } = copy;
            let first = placement::holders(stream, seats, whole, others, *replication);
            let count = if cx.planted(Plant::CopyLess) { 1 } else { holders.len() };
            holders.iter().take(count).any(|place| all[*place] == copy.node)
                && first.first().is_some_and(|place| copy.whole[*place] == cx.me.node)
        };
        let streams = self.log.index().streams().map(|(stream, _)| stream);
        streams.filter(|stream| is_asked(*stream)).collect()
    }

    fn trims_of(&self, streams: &[StreamId], copy: &Copy) -> Vec<CopiedTrim> {
        let after = if copy.wants_all_trims { Version::ZERO } else { copy.after };
        let entries = streams.iter().filter_map(|stream| {
            let entry = self.log.index().stream(*stream)?;
            let (through, first_offset) = (entry.trimmed_through(), entry.first_offset());
            (through > after).then_some(CopiedTrim { stream: *stream, through, first_offset })
        });
        entries.collect()
    }

    fn answer_copy(
        &self,
        cx: &mut Cx<'_>,
        to: Endpoint,
        epoch: Epoch,
        copied: Copied,
        answer: Gathered,
        bodies: &BTreeMap<(StreamId, Version), Bytes>,
    ) {
        let (blocks, payload) = self.join(&answer, bodies);
        let Gathered { through, versions, .. } = answer;
        cx.send(to, epoch, Copied { through, versions, blocks, payload, ..copied });
    }

    /// The disk has answered a copy's read. Damage ends the answer before it: somebody else may have it.
    pub(super) fn handle_copy_read(
        &mut self,
        cx: &mut Cx<'_>,
        id: ReadId,
        result: Result<Vec<Bytes>, Vec<ReadFailure>>,
    ) {
        let Reading { from, epoch, copied, answer } =
            self.copies.reading.remove(&id).expect("it was looked at");
        match result {
            Ok(bodies) => {
                let bodies = answer.bodies(bodies);
                self.answer_copy(cx, from, epoch, copied, answer, &bodies);
            }
            Err(failures) => {
                self.find_damage(cx, &failures, Finder::Copy);
                let failure = &failures[0];
                let copied = Copied { is_all: false, is_damaged: true, ..copied };
                match answer.before(failure.version) {
                    Some(answer) => {
                        let id = self.log.read(cx, answer.blocks.clone());
                        let reading = Reading { from, epoch, copied, answer };
                        self.copies.reading.insert(id, reading);
                    }
                    None => {
                        let through = failure.version.minus_saturating(1).max(copied.after);
                        cx.send(from, epoch, Copied { through, ..copied });
                    }
                }
            }
        }
    }
}
