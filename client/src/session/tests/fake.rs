//! A cluster for tests: one struct that answers as proxies and log servers do, over a network that loses,
//! doubles and reorders.
//!
//! It decides against the whole history, so its verdicts are right by construction: the truth that a
//! session's results are compared with.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::{BufMut, Bytes, BytesMut};
use common::catalog::StreamDefinition;
use common::message::{
    ClusterView, CommitKind, CommitOutcome, CommitReply, CommitRequest, Described, FoundId,
    FoundSection, IdFound, Message, Pulled, PulledBlock, PulledVersion, ReadVersionReply, Refused,
    StreamState, Trimmed,
};
use common::record::{Section, decode_records};
use common::{
    Code, Cx, Endpoint, Epoch, Event, IdempotencyId, Incarnation, KeyRange, Knobs, Mark, NodeId,
    Offset, Output, Payload, Peer, Position, Prng, Refusal, RequestId, Role, StreamId, Time,
    Version, WallTime, placement,
};

use crate::session::{CallId, Completion, Session};

pub(super) const CLIENT: NodeId = NodeId(900);
const NODES: u64 = 3;
const REPLICATION: u8 = 2;
const VERSION_STEP: u64 = 10;

/// A committed transaction.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) version: Version,
    pub(super) id: Option<IdempotencyId>,
    pub(super) sections: Vec<(StreamId, Offset, u32, Bytes)>,
}

#[derive(Clone, Debug)]
struct Envelope {
    from: Endpoint,
    to: Endpoint,
    epoch: Epoch,
    message: Message,
}

#[derive(Clone, Debug, Default)]
struct Door {
    settled: BTreeMap<RequestId, Option<CommitOutcome>>,
    answered_below: RequestId,
    lanes: BTreeMap<u64, (u64, bool, BTreeMap<u64, CommitRequest>)>,
}

pub(super) struct Fake {
    pub(super) session: Session,
    pub(super) knobs: Knobs,
    pub(super) now: Time,
    pub(super) rng: Prng,
    client_rng: Prng,
    out: Vec<Output>,
    armed: Option<Time>,
    network: Vec<Envelope>,
    pub(super) epoch: Epoch,
    version: Version,
    recovery_version: Version,
    pub(super) log: Vec<Entry>,
    writes: Vec<(Vec<u8>, Vec<u8>, Version)>,
    offsets: BTreeMap<StreamId, Offset>,
    doors: BTreeMap<(Endpoint, Role), Door>,
    incarnation: u64,
    linked: BTreeMap<NodeId, Incarnation>,
    /// From the first withheld commit on nothing is known committed.
    withheld: Option<(Version, Vec<Envelope>)>,
    pub(super) trims: BTreeMap<(NodeId, StreamId), Version>,
    pub(super) marks: BTreeSet<Mark>,
    /// Out of 100: a message is lost, doubled, overtaken.
    pub(super) loss: u64,
    pub(super) doubling: u64,
    pub(super) overtaking: u64,
    /// The log servers have forgotten the ids of these versions.
    pub(super) forgotten_through: Version,
    /// Replies to commits take so much longer than everything else.
    pub(super) late_by: Duration,
    late: VecDeque<(Time, Envelope)>,
    /// The next message of each of these names is lost.
    pub(super) lose: Vec<&'static str>,
    /// Damages the next block that is pulled, or skips a version.
    pub(super) flip: u32,
    pub(super) skip: bool,
    /// So many pulls are refused, since the copy is damaged.
    pub(super) rot: u32,
    /// All pulls here are refused, since the copy is damaged.
    pub(super) rotten: Option<NodeId>,
    /// So many pulls are answered by servers that don't know yet what is committed.
    pub(super) lagging: u32,
    pub(super) done: Vec<Completion>,
    pub(super) commit_requests: u64,
    /// Seen on the wire, for scripted tests: the name of each message to the cluster.
    pub(super) seen: Vec<&'static str>,
}

impl Fake {
    pub(super) fn new(seed: u64) -> Self {
        let me = Endpoint { node: CLIENT, incarnation: Incarnation(0), role: Role::Client };
        Self {
            session: Session::new(me),
            knobs: Knobs { life_versions: 5_000, ..Knobs::small() },
            now: Time(1),
            rng: Prng::derive(seed, "fake", 0),
            client_rng: Prng::derive(seed, "client", 0),
            out: Vec::new(),
            armed: None,
            network: Vec::new(),
            epoch: Epoch(1),
            version: Version(1000),
            recovery_version: Version(0),
            log: Vec::new(),
            writes: Vec::new(),
            offsets: BTreeMap::new(),
            doors: BTreeMap::new(),
            incarnation: 0,
            linked: BTreeMap::new(),
            withheld: None,
            trims: BTreeMap::new(),
            marks: BTreeSet::new(),
            loss: 0,
            doubling: 0,
            overtaking: 0,
            forgotten_through: Version(0),
            late_by: Duration::ZERO,
            late: VecDeque::new(),
            lose: Vec::new(),
            flip: 0,
            skip: false,
            rot: 0,
            rotten: None,
            lagging: 0,
            done: Vec::new(),
            commit_requests: 0,
            seen: Vec::new(),
        }
    }

    /// A cluster with everybody connected.
    pub(super) fn connected(seed: u64) -> Self {
        let mut fake = Self::new(seed);
        (1..=NODES).for_each(|node| fake.connect(NodeId(node)));
        fake.settle();
        fake
    }

    pub(super) fn drive<R>(&mut self, act: impl FnOnce(&mut Session, &mut Cx<'_>) -> R) -> R {
        let mut cx = Cx {
            now: self.now,
            wall: WallTime(0),
            knobs: &self.knobs,
            rng: &mut self.client_rng,
            me: Endpoint { node: CLIENT, incarnation: Incarnation(0), role: Role::Client },
            out: &mut self.out,
        };
        let result = act(&mut self.session, &mut cx);
        self.session.check();
        self.carry_out();
        result
    }

    fn carry_out(&mut self) {
        for output in core::mem::take(&mut self.out) {
            match output {
                Output::Send { to, epoch, message } => {
                    let names_epoch =
                        matches!(message, Message::CommitRequest(_) | Message::Trim(_));
                    assert_eq!(epoch != Epoch::ZERO, names_epoch, "only commits and trims do");
                    let Some(incarnation) = self.linked.get(&to.node) else {
                        panic!("{} to {to:?}, which is not connected", message.name());
                    };
                    let from = self.session.me_at(to.node);
                    assert_eq!(from.incarnation, *incarnation);
                    self.seen.push(message.name());
                    self.network.push(Envelope { from, to, epoch, message });
                }
                Output::Arm { at, .. } => self.armed = Some(at),
                Output::Mark(mark) => drop(self.marks.insert(mark)),
                Output::Note(_) => {}
                other => panic!("a client does not {other:?}"),
            }
        }
        self.done.extend(self.session.drain());
    }

    pub(super) fn connect(&mut self, node: NodeId) {
        self.incarnation += 1;
        let me = Endpoint {
            node: CLIENT,
            incarnation: Incarnation(self.incarnation),
            role: Role::Client,
        };
        self.cut(node);
        self.linked.insert(node, me.incarnation);
        self.drive(|session, cx| session.connected(cx, peer(node), me));
    }

    /// Loses what is on its way to or from a node.
    fn cut(&mut self, node: NodeId) {
        self.linked.remove(&node);
        self.network.retain(|envelope| envelope.from.node != node && envelope.to.node != node);
    }

    /// Commits as another client would.
    pub(super) fn commit_directly(&mut self, request: &CommitRequest) -> CommitOutcome {
        self.verdict(request)
    }

    pub(super) fn disconnect(&mut self, node: NodeId) {
        self.cut(node);
        self.drive(|session, cx| session.step(cx, Event::PeerDown(peer(node))));
    }

    /// Begins a new epoch. What was withheld survives or is lost from some commit on.
    pub(super) fn recover(&mut self) {
        self.epoch = Epoch(self.epoch.0 + 1);
        let mut rv = self.version;
        if let Some((first, _)) = self.withheld.take() {
            let cut = Version(self.rng.between(first.0 - 1, self.version.0));
            self.log.retain(|entry| entry.version <= cut);
            rv = self.log.last().map_or(first, |last| last.version).max(Version(first.0 - 1));
        }
        self.offsets.clear();
        for (stream, base, count, _) in self.log.iter().flat_map(|entry| &entry.sections) {
            self.offsets.insert(*stream, base.plus(u64::from(*count)));
        }
        self.recovery_version = rv;
        self.version = rv.plus(common::FENCE_JUMP_VERSIONS);
        self.writes.clear();
        self.doors.clear();
        if self.rng.chance(1, 2) {
            // Some nodes tell at once, the others when they are asked.
            let told: Vec<NodeId> = self.linked.keys().copied().collect();
            for node in told {
                let view = self.view(RequestId::ZERO);
                self.reply(peer(node).endpoint(Role::Node), self.client_at(node), view);
            }
        }
    }

    fn client_at(&self, node: NodeId) -> Endpoint {
        let incarnation = self.linked[&node];
        Endpoint { node: CLIENT, incarnation, role: Role::Client }
    }

    pub(super) fn view(&self, request: RequestId) -> ClusterView {
        ClusterView {
            request,
            epoch: self.epoch,
            recovery_version: self.recovery_version,
            proxies: vec![
                peer(NodeId(1)).endpoint(Role::Proxy(0)),
                peer(NodeId(1)).endpoint(Role::Proxy(1)),
                peer(NodeId(2)).endpoint(Role::Proxy(2)),
            ],
            log_servers: (1..=NODES).map(|n| peer(NodeId(n)).endpoint(Role::LogServer)).collect(),
            absent: Vec::new(),
            replication: REPLICATION,
            seats: common::membership::Seats::new(),
            phase: "serving".to_owned(),
            addresses: Vec::new(),
        }
    }

    /// From the next commit on, proxies take and never answer, until the epoch ends.
    pub(super) fn withhold(&mut self) {
        self.withheld.get_or_insert((self.version.plus(1), Vec::new()));
    }

    /// The newest version.
    pub(super) const fn newest(&self) -> Version {
        self.version
    }

    fn known_committed(&self) -> Version {
        self.withheld.as_ref().map_or(self.version, |(first, _)| Version(first.0 - 1))
    }

    fn reply(&mut self, from: Endpoint, to: Endpoint, message: impl Into<Message>) {
        let epoch = self.epoch;
        self.network.push(Envelope { from, to, epoch, message: message.into() });
    }

    /// Delivers one message, or lets time pass; `false` when nothing can happen any more.
    pub(super) fn tick(&mut self) -> bool {
        if let Some((_, envelope)) = self.late.pop_front_if(|(at, _)| *at <= self.now) {
            self.deliver(envelope);
            return true;
        }
        if self.network.is_empty() {
            let due = self.late.front().map(|(at, _)| *at);
            if let Some(at) = due.filter(|due| self.armed.is_none_or(|armed| *due < armed)) {
                self.now = at;
                return true;
            }
            let Some(at) = self.armed.take() else { return false };
            self.now = Time(self.now.0.max(at.0));
            let timer = Event::Timer(common::Timer(0));
            self.drive(|session, cx| session.step(cx, timer));
            return true;
        }
        let place = if self.rng.chance(self.overtaking, 100) {
            self.rng.below(self.network.len() as u64) as usize
        } else {
            0
        };
        let envelope = self.network.remove(place);
        self.now = Time(self.now.0 + 100_000);
        let named = self.lose.iter().position(|name| *name == envelope.message.name());
        if named.map(|place| self.lose.remove(place)).is_some() {
            return true;
        }
        if !self.late_by.is_zero() && matches!(envelope.message, Message::CommitReply(_)) {
            self.late.push_back((self.now.plus(self.late_by), envelope));
            return true;
        }
        if self.rng.chance(self.loss, 100) {
            return true;
        }
        if self.rng.chance(self.doubling, 100) {
            self.network.push(envelope.clone());
        }
        if self.armed.is_some_and(|at| at <= self.now) {
            self.armed = None;
            let timer = Event::Timer(common::Timer(0));
            self.drive(|session, cx| session.step(cx, timer));
        }
        self.deliver(envelope);
        true
    }

    /// Runs until every call is answered and the network is empty.
    pub(super) fn settle(&mut self) {
        for _ in 0..200_000 {
            let is_quiet = self.network.is_empty() && self.session.open_calls() == 0;
            if is_quiet || !self.tick() {
                return;
            }
        }
        panic!("{} calls are never answered", self.session.open_calls());
    }

    /// Runs until the call is answered.
    pub(super) fn answer(&mut self, call: u64) -> Completion {
        for _ in 0..200_000 {
            if let Some(at) = self.done.iter().position(|done| done.call == CallId(call)) {
                return self.done.remove(at);
            }
            assert!(self.tick(), "nothing happens any more and call {call} is not answered");
        }
        panic!("call {call} is never answered");
    }

    fn deliver(&mut self, envelope: Envelope) {
        let Envelope { from, to, epoch, message } = envelope;
        if to.role == Role::Client {
            if self.linked.get(&from.node) == Some(&to.incarnation) {
                self.drive(|session, cx| {
                    session.step(cx, Event::Message { from, epoch, message });
                });
            }
            return;
        }
        match message {
            Message::CommitRequest(request) if epoch != self.epoch => {
                let refusal = Refusal::new(Code::WrongEpoch, "another epoch");
                self.reply(to, from, Refused { request: request.request, refusal });
            }
            Message::CommitRequest(request) => self.take_commit(from, to, *request),
            Message::ReadVersionRequest(request) => {
                if self.withheld.is_none() {
                    let version = self.known_committed();
                    self.reply(to, from, ReadVersionReply { request: request.request, version });
                }
            }
            Message::FindCluster(find) => {
                let view = self.view(find.request);
                self.reply(to, from, view);
            }
            Message::Pull(pull) => self.take_pull(from, to, &pull),
            Message::Trim(trim) => {
                let through = self.trims.entry((to.node, trim.stream)).or_default();
                *through = (*through).max(trim.through);
                let through = *through;
                let reply =
                    Trimmed { request: trim.request, through, first_offset: Offset(to.node.0) };
                self.reply(to, from, reply);
            }
            Message::Describe(describe) => {
                let states = describe.streams.iter().map(|stream| StreamState {
                    stream: *stream,
                    first_offset: Offset(0),
                    next_offset: self.offsets.get(stream).copied().unwrap_or_default(),
                    trimmed_through: Version(0),
                    last_version: Version(0),
                    bytes: to.node.0,
                });
                let reply = Described { request: describe.request, streams: states.collect() };
                self.reply(to, from, reply);
            }
            Message::FindId(find) => {
                let through = self.known_committed();
                if through >= find.at_least {
                    let found = self.find(find.id, to.node, through);
                    let forgotten_through = self.forgotten_through;
                    let request = find.request;
                    self.reply(to, from, IdFound { request, found, through, forgotten_through });
                }
            }
            other => panic!("a client does not say {}", other.name()),
        }
    }

    pub(super) fn holds(node: NodeId, stream: StreamId) -> bool {
        let nodes: Vec<NodeId> = (1..=NODES).map(NodeId).collect();
        placement::holders(stream, &common::membership::Seats::new(), &nodes, &[], REPLICATION)
            .iter()
            .any(|place| nodes[*place] == node)
    }

    fn find(&self, id: IdempotencyId, node: NodeId, through: Version) -> Option<FoundId> {
        assert!(Self::holds(node, StreamId::IDS), "{node} holds no ids");
        let remembered = |entry: &&Entry| entry.version > self.forgotten_through;
        let mut known = self.log.iter().filter(|entry| entry.version <= through).filter(remembered);
        let entry = known.find(|entry| entry.id == Some(id))?;
        let sections = entry.sections.iter().map(|(stream, base, ..)| FoundSection {
            stream: *stream,
            base_offset: Self::holds(node, *stream).then_some(*base),
        });
        let position = Position { version: entry.version, index: 0 };
        Some(FoundId { position, commit_time: WallTime(0), sections: sections.collect() })
    }

    fn take_commit(&mut self, client: Endpoint, proxy: Endpoint, request: CommitRequest) {
        self.commit_requests += 1;
        if proxy.node == NodeId(3) {
            let refusal = Refusal::new(Code::NotHere, "no proxy");
            return self.reply(proxy, client, Refused { request: request.request, refusal });
        }
        common::transaction::validate(&request, &self.knobs).expect("the session has checked");
        let door = self.doors.entry((client, proxy.role)).or_default();
        door.answered_below = door.answered_below.max(request.answered_below);
        door.settled = door.settled.split_off(&door.answered_below);
        if request.request < door.answered_below {
            return;
        }
        if let Some(outcome) = door.settled.get(&request.request) {
            if let Some(outcome) = outcome.clone() {
                self.reply(proxy, client, CommitReply { request: request.request, outcome });
            }
            return;
        }
        door.settled.insert(request.request, None);
        let Some(order) = request.lane else { return self.decide(client, proxy, request) };
        let (_, _, waiting) = door.lanes.entry(order.lane).or_default();
        waiting.insert(order.sequence, request);
        loop {
            let door = self.doors.get_mut(&(client, proxy.role)).expect("entered above");
            let (next, _, waiting) = door.lanes.get_mut(&order.lane).expect("entered above");
            let Some(request) = waiting.remove(next) else { break };
            *next += 1;
            self.decide(client, proxy, request);
        }
    }

    fn decide(&mut self, client: Endpoint, proxy: Endpoint, request: CommitRequest) {
        let lane = request.lane.map(|order| order.lane);
        let outcome = {
            let door = &self.doors[&(client, proxy.role)];
            let is_broken = lane.is_some_and(|lane| door.lanes[&lane].1);
            if is_broken {
                CommitOutcome::Refused(Refusal::new(Code::LaneBroken, "broken"))
            } else {
                self.verdict(&request)
            }
        };
        let door = self.doors.get_mut(&(client, proxy.role)).expect("entered by the caller");
        if let (Some(lane), false) = (lane, matches!(outcome, CommitOutcome::Committed { .. })) {
            door.lanes.get_mut(&lane).expect("entered by the caller").1 = true;
        }
        if self.withheld.is_some() {
            return;
        }
        door.settled.insert(request.request, Some(outcome.clone()));
        self.reply(proxy, client, CommitReply { request: request.request, outcome });
    }

    fn verdict(&mut self, request: &CommitRequest) -> CommitOutcome {
        self.version = self.version.plus(VERSION_STEP);
        let version = self.version;
        let mut keys: Vec<Vec<u8>> =
            request.id.map(common::transaction::id_key).into_iter().collect();
        keys.extend(catalog_keys(request));
        let mut reads: Vec<KeyRange<'_>> = request.reads.iter().collect();
        reads.extend(keys.iter().map(|key| KeyRange::point(key)));
        if !reads.is_empty() {
            let oldest = version.minus_saturating(self.knobs.life_versions);
            if request.read_version < oldest.max(self.recovery_version.plus(1)) {
                return CommitOutcome::TooOld { version };
            }
            let hit = |read: &KeyRange<'_>| {
                self.writes.iter().any(|(begin, end, at)| {
                    let write = KeyRange::new(begin, end).expect("recorded in order");
                    *at > request.read_version && read.overlaps(write)
                })
            };
            let hits = reads.iter().enumerate().filter(|(_, read)| hit(read));
            let ranges: Vec<u32> = hits.map(|(place, _)| place as u32).collect();
            if !ranges.is_empty() {
                let ranges = if request.report_conflicts { ranges } else { Vec::new() };
                return CommitOutcome::Conflict { version, ranges };
            }
        }
        for write in request.writes.iter().chain(keys.iter().map(|key| KeyRange::point(key))) {
            self.writes.push((write.begin.to_vec(), write.end_key(), version));
        }
        let (mut at, mut sections) = (0, Vec::new());
        for section in &request.sections {
            let base = self.offsets.get(&section.stream).copied().unwrap_or_default();
            let records = request.payload.slice(at, section.bytes as usize).expect("validated");
            at += section.bytes as usize;
            self.offsets.insert(section.stream, base.plus(u64::from(section.record_count)));
            sections.push((section.stream, base, section.record_count, records));
        }
        let base_offsets = sections.iter().map(|(_, base, ..)| *base).collect();
        if request.kind == CommitKind::User {
            self.log.push(Entry { version, id: request.id, sections });
        }
        let position = Position { version, index: 0 };
        CommitOutcome::Committed { position, commit_time: WallTime(0), base_offsets }
    }

    fn take_pull(&mut self, from: Endpoint, to: Endpoint, pull: &common::message::Pull) {
        for stream in &pull.streams {
            assert!(Self::holds(to.node, *stream), "{} does not hold {stream}", to.node);
        }
        if self.rot > 0 || self.rotten == Some(to.node) {
            self.rot = self.rot.saturating_sub(1);
            let refusal = Refusal::new(Code::Corrupt, "rot");
            return self.reply(to, from, Refused { request: pull.request, refusal });
        }
        let (mut versions, mut blocks, mut payload) = (Vec::new(), Vec::new(), Payload::new());
        let is_lagging = self.lagging > 0;
        self.lagging = self.lagging.saturating_sub(1);
        let known = if is_lagging { Version::ZERO } else { self.known_committed() };
        let mut through = known.max(pull.after);
        for entry in &self.log {
            if entry.version <= pull.after || entry.version > through {
                continue;
            }
            let before = blocks.len();
            if payload.len() as u64 >= u64::from(pull.bytes_max) {
                through = Version(entry.version.0 - 1);
                break;
            }
            for (stream, base, count, records) in &entry.sections {
                if pull.streams.contains(stream) {
                    let mut body = BytesMut::new();
                    body.put_slice(&Section::header(0, *count, records.len()));
                    body.put_slice(records);
                    let checksum = crc32c::crc32c(&body) ^ u32::from(self.flip > 0);
                    self.flip = self.flip.saturating_sub(1);
                    blocks.push(PulledBlock {
                        stream: *stream,
                        base_offset: *base,
                        record_count: *count,
                        bytes: body.len() as u32,
                        checksum,
                    });
                    payload.push(body.freeze());
                }
            }
            if self.skip && blocks.len() > before {
                self.skip = false;
                let kept: usize = blocks[..before].iter().map(|b| b.bytes as usize).sum();
                payload = payload.slice(0, kept).expect("a prefix").into();
                blocks.truncate(before);
            }
            if blocks.len() > before {
                versions.push(PulledVersion {
                    version: entry.version,
                    commit_time: WallTime(0),
                    block_count: (blocks.len() - before) as u32,
                });
            }
        }
        let (request, after) = (pull.request, pull.after);
        let reply = Pulled { request, after, through, versions, blocks, payload };
        self.reply(to, from, reply);
    }
}

/// What the proxy adds for streams that are defined.
fn catalog_keys(request: &CommitRequest) -> Vec<Vec<u8>> {
    let mut at = 0;
    let mut keys = Vec::new();
    for section in &request.sections {
        let records = request.payload.slice(at, section.bytes as usize).expect("validated");
        at += section.bytes as usize;
        if section.stream == StreamId::CATALOG {
            for record in decode_records(&records).expect("validated") {
                let definition = StreamDefinition::from_record(&record).expect("well-formed");
                keys.push(common::transaction::stream_name_key(&definition.name));
                keys.push(common::transaction::stream_id_key(definition.stream));
            }
        }
    }
    keys
}

pub(super) fn peer(node: NodeId) -> Peer {
    Peer { node, incarnation: Incarnation(1) }
}
