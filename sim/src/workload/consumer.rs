//! A consumer: follows all streams from its durable cursor, and folds the accounts at every version.

use client::session::{Answer, PullFrom, Pulled, PullerId, Session};
use client::{Batch, Block, Error};
use common::record::{Op, Record};
use common::{Code, Cx, StreamId};

use super::actor::{Caller, Io};
use super::plan::{balance_of, goes_on, is_whole, list_of, txn_of};
use super::writer::LIST_PREFIX;
use super::{Cursor, FIRST_CLIENT};
use crate::observe::{ConsumerId, Observation, SeenBlock, SeenSection};

/// How long a consumer waits for streams and after errors, us.
const RETRY_US: u64 = 5_000;

#[derive(Debug, Default)]
pub(super) struct Consumer {
    puller: Option<PullerId>,
    is_waiting: bool,
}

impl Consumer {
    pub(super) fn work(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        if self.is_waiting {
            return;
        }
        let Some(puller) = self.puller.or_else(|| self.subscribe(cx, session, io)) else {
            return rest(cx, io, RETRY_US);
        };
        self.puller = Some(puller);
        self.is_waiting = true;
        let call = io.call(Caller::Consumer);
        // At the end of a run only what is committed matters, not what is written next.
        let want = io.shared.borrow().want;
        session.pull(cx, call, puller, want);
    }

    fn subscribe(&self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) -> Option<PullerId> {
        let (streams, after) = {
            let mut shared = io.shared.borrow_mut();
            let mut streams: Vec<StreamId> =
                shared.streams.iter().copied().collect::<Option<_>>()?;
            streams.sort_unstable();
            (streams, shared.cursors.entry(id(io)).or_default().through)
        };
        let from = PullFrom::after(streams.clone(), after);
        match session.open_puller(cx, from) {
            Ok(puller) => {
                io.observe(Observation::Subscribed { consumer: id(io), streams, after });
                Some(puller)
            }
            Err(error) => {
                io.broken(format!("{:?} can't subscribe: {error}", id(io)));
                None
            }
        }
    }

    pub(super) fn answered(
        &mut self,
        cx: &mut Cx<'_>,
        session: &mut Session,
        io: &mut Io,
        result: Result<Answer, Error>,
    ) {
        self.is_waiting = false;
        match result {
            Ok(Answer::Pulled(pulled)) => self.pulled(io, &pulled),
            Ok(other) => io.broken(format!("a pull was answered with {other:?}")),
            Err(error) => {
                let fine = [Code::TimedOut, Code::Recovering, Code::Overloaded];
                // Where something is harmed, damage is only a matter of time.
                let is_rot = error.code() == Code::Corrupt && io.shared.borrow().may_rot;
                if !fine.contains(&error.code()) && !error.is_retryable() && !is_rot {
                    io.broken(format!("{:?}: {error}", id(io)));
                }
                if let Some(puller) = self.puller.take() {
                    session.close_puller(cx, puller);
                }
                return rest(cx, io, RETRY_US);
            }
        }
        let rest_us = {
            let shared = io.shared.borrow();
            if shared.is_stopping { 0 } else { shared.mix.consumer_rest_us }
        };
        match rest_us {
            0 => self.work(cx, session, io),
            rest_us => {
                let wait = io.rng.below(rest_us) + 1;
                rest(cx, io, wait);
            }
        }
    }

    fn pulled(&self, io: &mut Io, pulled: &Pulled) {
        let (mut blocks, mut flaws) = (Vec::new(), Vec::new());
        for block in pulled.batches.iter().flat_map(|batch| &batch.blocks) {
            blocks.push(seen(block, &mut flaws));
        }
        let (after, through) = (pulled.after, pulled.through);
        io.observe(Observation::Pulled { consumer: id(io), after, through, blocks });
        {
            let mut shared = io.shared.borrow_mut();
            let accounts = shared.streams[0].expect("the consumer subscribed to it");
            let cursor = shared.cursors.entry(id(io)).or_default();
            for batch in &pulled.batches {
                flaws.extend(fold(cursor, batch, accounts));
            }
            cursor.through = cursor.through.max(through);
        }
        flaws.into_iter().for_each(|flaw| io.broken(flaw));
    }
}

const fn id(io: &Io) -> ConsumerId {
    ConsumerId(io.me.node.0 - FIRST_CLIENT)
}

fn rest(cx: &Cx<'_>, io: &mut Io, wait_us: u64) {
    io.wake(Caller::Consumer, cx.now.plus(core::time::Duration::from_micros(wait_us)));
}

/// Takes a version's balances in; the sum over all accounts is 0 at every version.
fn fold(cursor: &mut Cursor, batch: &Batch, accounts: StreamId) -> Option<String> {
    for block in batch.blocks.iter().filter(|block| block.stream == accounts) {
        for delivered in block.records().ok()? {
            let Record { op: Op::Put, key, value, .. } = delivered.record else { continue };
            if key.starts_with(LIST_PREFIX) {
                let list = list_of(&value).unwrap_or_default();
                let before = cursor.lists.insert(key.to_vec(), list.clone()).unwrap_or_default();
                if !goes_on(&before, &list) {
                    return Some(format!(
                        "a list was {before:?} and is {list:?} at {}",
                        batch.version
                    ));
                }
                continue;
            }
            cursor.balances.insert(key.to_vec(), balance_of(&value).unwrap_or(i64::MIN / 2));
        }
    }
    let sum: i128 = cursor.balances.values().map(|balance| i128::from(*balance)).sum();
    (sum != 0).then(|| format!("the accounts sum to {sum} at {}", batch.version))
}

fn seen(block: &Block, flaws: &mut Vec<String>) -> SeenBlock {
    let mut sections = Vec::new();
    let mut checksum = 0x811c_9dc5_u32;
    for (_, section) in block.sections() {
        let (words, rest) = section.records.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for word in words.iter().chain((!rest.is_empty()).then_some(&last)) {
            let mixed = (u64::from(checksum) ^ u64::from_le_bytes(*word))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            checksum = (mixed >> 32) as u32 ^ mixed as u32;
        }
        sections.push(SeenSection {
            index: section.index,
            record_count: section.record_count,
            txn: None,
        });
    }
    match block.records() {
        Err(error) => flaws.push(format!("{} {}: {error}", block.stream, block.version)),
        Ok(records) => {
            for delivered in &records {
                let txn = txn_of(&delivered.record.value);
                let index = delivered.position.index;
                let section = sections.iter_mut().find(|section| section.index == index);
                let section = section.expect("every record is of a section");
                let same = section.txn.is_none() || section.txn == txn;
                let whole = delivered.record.op != Op::Append || is_whole(&delivered.record.value);
                if txn.is_none() || !same || !whole {
                    flaws.push(format!("a damaged record at {:?}", delivered.position));
                }
                section.txn = txn;
            }
        }
    }
    SeenBlock {
        stream: block.stream,
        version: block.version,
        base_offset: block.base_offset,
        record_count: block.record_count,
        checksum,
        sections,
    }
}
