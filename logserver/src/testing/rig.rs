//! Drives one log server on a disk in memory.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use common::disk::File;
use common::message::*;
use common::record::{Record, Section};
use common::{
    Cx, Endpoint, Epoch, Event, Halt, Incarnation, Knobs, Mark, NodeId, Note, Output, Payload,
    Prng, RequestId, Role, StreamId, Time, Timer, Version, WallTime,
};

use super::MemoryDisk;
use crate::LogServer;

pub(crate) const NODE: NodeId = NodeId(1);
/// Far enough between recovery version and first version for any plan.
pub(crate) const JUMP: u64 = common::FENCE_JUMP_VERSIONS;

pub(crate) fn endpoint(node: u64, role: Role) -> Endpoint {
    Endpoint { node: NodeId(node), incarnation: Incarnation(1), role }
}

pub(crate) fn proxy() -> Endpoint {
    endpoint(9, Role::Proxy(0))
}

pub(crate) fn client() -> Endpoint {
    endpoint(50, Role::Client)
}

pub(crate) fn leader() -> Endpoint {
    endpoint(8, Role::Leader)
}

pub(crate) struct Rig {
    pub(crate) server: LogServer,
    pub(crate) disk: MemoryDisk,
    pub(crate) knobs: Knobs,
    pub(crate) prng: Prng,
    pub(crate) now: Time,
    pub(crate) me: Endpoint,
    pub(crate) sent: Vec<(Endpoint, Epoch, Message)>,
    pub(crate) notes: Vec<Note>,
    pub(crate) marks: Vec<Mark>,
    pub(crate) halts: Vec<Halt>,
    /// How many log servers hold each stream.
    pub(crate) replication: u8,
    /// The other log server of the epochs, if there is one.
    pub(crate) other: Option<Endpoint>,
    timers: BTreeMap<Timer, Time>,
}

impl Rig {
    pub(crate) fn new(seed: u64) -> Self {
        Self::with(seed, Knobs::small(), MemoryDisk::new(64 << 20))
    }

    pub(crate) fn with(seed: u64, knobs: Knobs, disk: MemoryDisk) -> Self {
        let mut rig = Self {
            server: LogServer::new(NODE),
            disk,
            knobs,
            prng: Prng::new(seed),
            now: Time(0),
            me: endpoint(1, Role::LogServer),
            sent: Vec::new(),
            notes: Vec::new(),
            marks: Vec::new(),
            halts: Vec::new(),
            replication: 1,
            other: Some(endpoint(2, Role::LogServer)),
            timers: BTreeMap::new(),
        };
        rig.run(|server, cx| server.open(cx));
        rig
    }

    /// An open server.
    pub(crate) fn opened(seed: u64) -> Self {
        let mut rig = Self::new(seed);
        rig.settle();
        assert_eq!(rig.halts, []);
        rig
    }

    /// A server that serves epoch 1 from version 0.
    pub(crate) fn serving(seed: u64) -> Self {
        let mut rig = Self::opened(seed);
        rig.recruit(1, 0);
        rig.serve(1, 0);
        rig.sent.clear();
        rig
    }

    pub(crate) fn run(&mut self, act: impl FnOnce(&mut LogServer, &mut Cx<'_>)) {
        let mut out = Vec::new();
        let mut cx = Cx {
            now: self.now,
            wall: WallTime(self.now.0 / 1000),
            knobs: &self.knobs,
            rng: &mut self.prng,
            me: self.me,
            out: &mut out,
        };
        act(&mut self.server, &mut cx);
        for output in out {
            match output {
                Output::Send { to, epoch, message } => self.sent.push((to, epoch, message)),
                Output::Arm { timer, at } => {
                    self.timers.insert(timer, at);
                }
                Output::Disarm(timer) => {
                    self.timers.remove(&timer);
                }
                Output::Disk(request) => self.disk.request(request),
                Output::Halt(halt) => self.halts.push(halt),
                Output::Note(note) => self.notes.push(note),
                Output::Mark(mark) => self.marks.push(mark),
                Output::Register(request) => panic!("a log server asks no register: {request:?}"),
            }
        }
        if self.halts.is_empty() {
            self.server.check();
        }
    }

    pub(crate) fn event(&mut self, event: Event) {
        self.run(|server, cx| server.step(cx, event));
    }

    pub(crate) fn send(&mut self, from: Endpoint, epoch: u64, message: impl Into<Message>) {
        self.event(Event::Message { from, epoch: Epoch(epoch), message: message.into() });
    }

    /// Lets the disk answer one request; `false` when none waits.
    pub(crate) fn disk_step(&mut self) -> bool {
        let mut prng = self.prng.clone();
        let completion = self.disk.complete(&mut prng);
        self.prng = prng;
        let Some(completion) = completion else { return false };
        self.event(Event::Disk(completion));
        true
    }

    /// Lets the disk answer everything.
    pub(crate) fn settle(&mut self) {
        let mut steps = 0;
        while self.disk_step() {
            steps += 1;
            assert!(steps < 100_000, "the disk is never idle");
        }
        if self.halts.is_empty() {
            self.server.check_all();
        }
    }

    /// Lets time pass and the timers that are due fire.
    pub(crate) fn pass_ms(&mut self, ms: u64) {
        self.now = Time(self.now.0 + ms * 1_000_000);
        let due: Vec<Timer> = self
            .timers
            .iter()
            .filter(|(_, at)| **at <= self.now)
            .map(|(timer, _)| *timer)
            .collect();
        for timer in due {
            self.timers.remove(&timer);
            self.event(Event::Timer(timer));
        }
    }

    /// A power cut and a new life on the same disk; opening is not finished.
    pub(crate) fn crash(&mut self) {
        let mut prng = self.prng.clone();
        self.disk.crash(&mut prng);
        self.prng = prng;
        self.restart();
    }

    /// The process dies and starts again; the disk keeps its power.
    pub(crate) fn kill(&mut self) {
        let mut prng = self.prng.clone();
        self.disk.kill(&mut prng);
        self.prng = prng;
        self.restart();
    }

    /// A new life on the disk as it is.
    pub(crate) fn restart(&mut self) {
        self.me.incarnation = Incarnation(self.me.incarnation.0 + 1);
        self.server = LogServer::new(NODE);
        self.disk.forget();
        self.timers.clear();
        self.sent.clear();
        self.run(|server, cx| server.open(cx));
    }

    pub(crate) fn plan(&self, epoch: u64, recovery_version: u64) -> EpochPlan {
        EpochPlan {
            epoch: Epoch(epoch),
            recovery_version: Version(recovery_version),
            first_version: Version(recovery_version + JUMP),
            leader: leader(),
            sequencer: endpoint(8, Role::Sequencer),
            proxies: vec![proxy()],
            resolvers: vec![ResolverShare {
                resolver: endpoint(7, Role::Resolver(0)),
                begin: vec![],
            }],
            log_servers: [self.me].into_iter().chain(self.other).collect(),
            absent: Vec::new(),
            returning: Vec::new(),
            replication: self.replication,
            seats: common::membership::Seats::new(),
        }
    }

    pub(crate) fn recruit(&mut self, epoch: u64, recovery_version: u64) {
        self.begin_recruit(epoch, recovery_version);
        self.settle();
    }

    pub(crate) fn begin_recruit(&mut self, epoch: u64, recovery_version: u64) {
        let plan = self.plan(epoch, recovery_version);
        self.send(leader(), epoch, Recruit { role: Role::LogServer, plan });
    }

    pub(crate) fn serve(&mut self, epoch: u64, recovery_version: u64) {
        let plan = self.plan(epoch, recovery_version);
        self.send(leader(), epoch, Serve { plan });
    }

    pub(crate) fn push(&mut self, epoch: u64, push: Push) {
        self.send(proxy(), epoch, push);
    }

    pub(crate) fn pull(&mut self, streams: &[u64], after: u64, bytes_max: u32, wait_ms: u32) {
        let streams = streams.iter().copied().map(StreamId).collect();
        let (request, after) = (RequestId(1), Version(after));
        let want = Version::ZERO;
        self.send(client(), 0, Pull { request, streams, after, bytes_max, wait_ms, want });
    }

    /// Pulls everything of the streams above `after`, in one answer.
    pub(crate) fn pulled(&mut self, streams: &[u64], after: u64) -> Pulled {
        self.sent.clear();
        self.pull(streams, after, u32::MAX, 0);
        self.settle();
        match self.sent.pop() {
            Some((_, _, Message::Pulled(pulled))) => pulled,
            other => panic!("a pull was answered with {other:?}"),
        }
    }

    pub(crate) fn take_sent<T>(&mut self, pick: impl Fn(Message) -> Option<T>) -> Vec<T> {
        let sent = core::mem::take(&mut self.sent);
        sent.into_iter().filter_map(|(_, _, message)| pick(message)).collect()
    }

    pub(crate) fn refusals(&mut self) -> Vec<common::Refusal> {
        self.take_sent(|message| match message {
            Message::Refused(refused) => Some(refused.refusal),
            _ => None,
        })
    }

    pub(crate) fn durables(&mut self) -> Vec<Durable> {
        self.take_sent(|message| match message {
            Message::Durable(durable) => Some(durable),
            _ => None,
        })
    }

    pub(crate) fn segments(&self) -> Vec<File> {
        self.disk.files().map(|(file, _)| file).filter(|f| matches!(f, File::Segment(_))).collect()
    }
}

/// The body of a block with one section of `count` records of `len` bytes each.
pub(crate) fn body(fill: u8, count: u32, len: usize) -> Bytes {
    let mut records = BytesMut::new();
    for _ in 0..count {
        Record::append(Bytes::from(vec![fill; len])).encode(&mut records);
    }
    let mut body = BytesMut::new();
    body.put_slice(&Section::header(0, count, records.len()));
    body.put_slice(&records);
    body.freeze()
}

/// A push of blocks `(stream, records, bytes of each)`.
pub(crate) fn push(previous: u64, version: u64, blocks: &[(u64, u32, usize)]) -> Push {
    let bodies =
        blocks.iter().map(|(s, count, len)| (*s, *count, body(version as u8, *count, *len)));
    push_of(previous, version, bodies.collect())
}

/// A push of blocks `(stream, record count, body)`.
pub(crate) fn push_of(previous: u64, version: u64, bodies: Vec<(u64, u32, Bytes)>) -> Push {
    let mut payload = Payload::new();
    let mut blocks = Vec::new();
    for (stream, record_count, body) in bodies {
        let (bytes, checksum) = (body.len() as u32, crc32c::crc32c(&body));
        blocks.push(PushBlock { stream: StreamId(stream), record_count, bytes, checksum });
        payload.push(body);
    }
    Push {
        previous_version: Version(previous),
        version: Version(version),
        commit_time: WallTime(version),
        known_committed: Version::ZERO,
        answered: Version::ZERO,
        blocks,
        payload,
    }
}

/// The versions in an answer.
pub(crate) fn versions(pulled: &Pulled) -> Vec<u64> {
    pulled.versions.iter().map(|version| version.version.0).collect()
}
