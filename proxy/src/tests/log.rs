//! A log server that keeps everything in memory: chain, offsets, acknowledgements, pulls up to the known
//! committed version. Durable as soon as it is accepted.

use std::collections::BTreeMap;

use bytes::Bytes;
use common::message::{
    Confirmed, Durable, EpochPlan, LogState, Pull, Pulled, PulledBlock, PulledVersion, Push,
    PushAck, Refused,
};
use common::{
    Code, Cx, Endpoint, Event, Message, Offer, Offset, Ordered, Payload, Refusal, RequestId,
    StreamId, Time, Timer, Version, WallTime,
};

/// A pull has waited long enough.
const PULLS: Timer = Timer(0);

pub(super) struct Block {
    pub(super) stream: StreamId,
    pub(super) base: Offset,
    pub(super) record_count: u32,
    pub(super) checksum: u32,
    pub(super) body: Bytes,
}

struct Waiting {
    to: Endpoint,
    pull: Pull,
    until: Time,
}

pub(super) struct LogServer {
    pub(super) me: Endpoint,
    proxies: Vec<Endpoint>,
    chain: Ordered<(Endpoint, Push)>,
    pub(super) versions: BTreeMap<Version, (WallTime, Vec<Block>)>,
    next: BTreeMap<StreamId, Offset>,
    acks: BTreeMap<Endpoint, BTreeMap<Version, PushAck>>,
    pub(super) known_committed: Version,
    pub(super) state: LogState,
    pub(super) is_locked: bool,
    /// Adds to every offset that it tells: a replica that has gone astray.
    pub(super) offset_error: u64,
    pulls: Vec<Waiting>,
}

impl LogServer {
    pub(super) fn new(me: Endpoint, plan: &EpochPlan) -> Self {
        Self {
            me,
            proxies: plan.proxies.clone(),
            chain: Ordered::new(plan.recovery_version, 64),
            versions: BTreeMap::new(),
            next: BTreeMap::new(),
            acks: plan.proxies.iter().map(|proxy| (*proxy, BTreeMap::new())).collect(),
            known_committed: plan.recovery_version,
            state: LogState::Open,
            is_locked: false,
            offset_error: 0,
            pulls: Vec::new(),
        }
    }

    pub(super) fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        let Event::Message { from, epoch, message } = event else {
            assert!(matches!(event, Event::Timer(PULLS)), "{event:?}");
            return self.answer_pulls(cx);
        };
        if self.is_locked {
            let refusal = Refusal::new(Code::Locked, "locked");
            return cx.send(from, epoch, Refused { request: RequestId::ZERO, refusal });
        }
        match message {
            Message::Push(push) => self.handle_push(cx, from, push),
            Message::Confirm(confirm) => {
                let confirmed = Confirmed { number: confirm.number, durable: self.chain.at() };
                cx.send(from, epoch, confirmed);
            }
            Message::Announce(announce) => self.learn(announce.known_committed),
            Message::Pull(pull) => {
                let until = Time(cx.now.0 + u64::from(pull.wait_ms) * 1_000_000);
                self.pulls.retain(|waiting| waiting.to != from);
                self.pulls.push(Waiting { to: from, pull, until });
            }
            other => panic!("{other:?}"),
        }
        self.answer_pulls(cx);
    }

    fn learn(&mut self, known_committed: Version) {
        self.known_committed = self.known_committed.max(known_committed.min(self.chain.at()));
    }

    fn handle_push(&mut self, cx: &mut Cx<'_>, from: Endpoint, push: Push) {
        let kept = self.acks.get_mut(&from).expect("a proxy of the plan");
        *kept = kept.split_off(&push.answered.plus(1));
        let known_committed = push.known_committed;
        match self.chain.offer(push.previous_version, push.version, (from, push)) {
            Offer::Again => self.tell(cx, from),
            Offer::Next | Offer::Early | Offer::Overflow => {}
        }
        let before = self.chain.at();
        while let Some((_, version, (from, push))) = self.chain.take_next() {
            self.accept(from, version, &push);
        }
        self.learn(known_committed);
        if self.chain.at() > before {
            for proxy in self.proxies.clone() {
                self.tell(cx, proxy);
            }
        }
    }

    fn accept(&mut self, from: Endpoint, version: Version, push: &Push) {
        assert!(push.blocks.is_sorted_by_key(|block| block.stream));
        let (mut start, mut blocks, mut base_offsets) = (0, Vec::new(), Vec::new());
        for entry in &push.blocks {
            let body = push.payload.slice(start, entry.bytes as usize).unwrap();
            start += body.len();
            assert_eq!(crc32c::crc32c(&body), entry.checksum);
            let next = self.next.entry(entry.stream).or_default();
            base_offsets.push(next.plus(self.offset_error));
            let (stream, record_count) = (entry.stream, entry.record_count);
            blocks.push(Block {
                stream,
                base: *next,
                record_count,
                checksum: entry.checksum,
                body,
            });
            *next = next.plus(u64::from(record_count));
        }
        assert_eq!(start, push.payload.len());
        self.versions.insert(version, (push.commit_time, blocks));
        let acks = self.acks.get_mut(&from).unwrap();
        acks.insert(version, PushAck { version, base_offsets });
    }

    pub(super) fn tell(&self, cx: &mut Cx<'_>, proxy: Endpoint) {
        let acks = self.acks[&proxy].values().cloned().collect();
        let durable = Durable { durable: self.chain.at(), acks, state: self.state };
        cx.send(proxy, super::EPOCH, durable);
    }

    fn answer_pulls(&mut self, cx: &mut Cx<'_>) {
        for waiting in core::mem::take(&mut self.pulls) {
            let Pull { request, after, ref streams, .. } = waiting.pull;
            let through = self.known_committed.max(after);
            let news = self.versions.range(after.plus(1)..through.plus(1).max(after.plus(1)));
            let mut news = news.flat_map(|(_, (_, blocks))| blocks);
            let is_news = news.any(|block| streams.contains(&block.stream));
            if !is_news && cx.now < waiting.until {
                self.pulls.push(waiting);
                continue;
            }
            let (mut versions, mut blocks, mut payload) = (vec![], vec![], Payload::new());
            for (version, (commit_time, held)) in
                self.versions.range(after.plus(1)..through.plus(1).max(after.plus(1)))
            {
                let wanted: Vec<&Block> =
                    held.iter().filter(|block| streams.contains(&block.stream)).collect();
                if wanted.is_empty() {
                    continue;
                }
                let block_count = wanted.len() as u32;
                let (version, commit_time) = (*version, *commit_time);
                versions.push(PulledVersion { version, commit_time, block_count });
                for block in wanted {
                    payload.push(block.body.clone());
                    blocks.push(PulledBlock {
                        stream: block.stream,
                        base_offset: block.base,
                        record_count: block.record_count,
                        bytes: block.body.len() as u32,
                        checksum: block.checksum,
                    });
                }
            }
            let pulled = Pulled { request, after, through, versions, blocks, payload };
            cx.send(waiting.to, super::EPOCH, pulled);
        }
        if let Some(until) = self.pulls.iter().map(|waiting| waiting.until).min() {
            cx.arm(PULLS, until);
        }
    }
}
