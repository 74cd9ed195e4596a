//! Whole pipelines in one thread: real proxies, sequencer and resolvers, plain log servers, and a network
//! that delays, doubles, reorders and loses as the seed says.

mod cases;
mod lanes;
mod log;
mod random;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::BytesMut;
use common::catalog::StreamDefinition;
use common::machine::{Halt, Output};
use common::message::{
    CommitKind, CommitOutcome, CommitRequest, EpochPlan, LaneOrder, ReadVersionRequest,
    ResolverShare, SectionEntry, Serve,
};
use common::record::Record;
use common::{
    Cx, Endpoint, Epoch, Event, FENCE_JUMP_VERSIONS, IdempotencyId, Incarnation, KeyRange, Knobs,
    Mark, Message, NodeId, Note, Peer, Prng, Ranges, RequestId, Role, StreamId, Time, Timer,
    Version, WallTime,
};
use resolver::role::Resolver;
use sequencer::versions::Sequencer;

use self::log::LogServer;
use crate::Proxy;

const EPOCH: Epoch = Epoch(3);
const RV: Version = Version(1000);
const RTV: Version = Version(1000 + FENCE_JUMP_VERSIONS);
/// A stream that every world creates.
const STREAM: StreamId = StreamId(20);

fn endpoint(node: u64, role: Role) -> Endpoint {
    Peer { node: NodeId(node), incarnation: Incarnation(1) }.endpoint(role)
}

fn client(index: u64) -> Endpoint {
    endpoint(100 + index, Role::Client)
}

fn proxy(index: u8) -> Endpoint {
    endpoint(2 + u64::from(index), Role::Proxy(index))
}

fn log_server(index: u64) -> Endpoint {
    endpoint(20 + index, Role::LogServer)
}

fn plan(proxies: u8, begins: &[&str], log_servers: u64, replication: u8) -> EpochPlan {
    let resolvers = begins.iter().zip(0_u8..).map(|(begin, index)| ResolverShare {
        resolver: endpoint(10 + u64::from(index), Role::Resolver(index)),
        begin: begin.as_bytes().to_vec(),
    });
    EpochPlan {
        epoch: EPOCH,
        recovery_version: RV,
        first_version: RTV,
        leader: endpoint(1, Role::Leader),
        sequencer: endpoint(1, Role::Sequencer),
        proxies: (0..proxies).map(proxy).collect(),
        resolvers: resolvers.collect(),
        log_servers: (0..log_servers).map(log_server).collect(),
        absent: Vec::new(),
        returning: Vec::new(),
        replication,
        seats: common::membership::Seats::new(),
    }
}

/// How the network treats messages, out of a hundred.
#[derive(Clone, Copy)]
struct Network {
    lost: u64,
    doubled: u64,
    delay_us: u64,
}

const CALM: Network = Network { lost: 0, doubled: 0, delay_us: 100 };
const ROUGH: Network = Network { lost: 15, doubled: 15, delay_us: 20_000 };

enum Item {
    Deliver { to: Endpoint, event: Event },
    Fire { to: Endpoint, timer: Timer },
}

struct World {
    plan: EpochPlan,
    sequencer: Sequencer,
    resolvers: Vec<Resolver>,
    proxies: Vec<Proxy>,
    logs: Vec<LogServer>,
    knobs: Knobs,
    prng: Prng,
    network: Network,
    now: Time,
    queue: BTreeMap<(Time, u64), Item>,
    armed: BTreeMap<(Endpoint, Timer), (Time, u64)>,
    next: u64,
    /// What never arrives: (from, to, message name).
    cut: Vec<(Option<Endpoint>, Option<Endpoint>, &'static str)>,
    marks: BTreeSet<Mark>,
    notes: Vec<(Time, Note)>,
    /// What each client was told, with the time.
    told: Vec<(Time, Endpoint, Message)>,
    halts: Vec<Halt>,
    sent: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(plan: EpochPlan, knobs: Knobs, network: Network, seed: u64) -> Self {
        let resolvers = (0..plan.resolvers.len() as u8).map(|index| Resolver::new(&plan, index));
        let proxies = (0..plan.proxies.len() as u8).map(|index| Proxy::new(&plan, index));
        let logs = plan.log_servers.iter().map(|me| LogServer::new(*me, &plan));
        let mut world = Self {
            sequencer: Sequencer::new(&plan),
            resolvers: resolvers.collect(),
            proxies: proxies.collect(),
            logs: logs.collect(),
            plan,
            knobs,
            prng: Prng::new(seed),
            network,
            now: Time::ZERO,
            queue: BTreeMap::new(),
            armed: BTreeMap::new(),
            next: 0,
            cut: Vec::new(),
            marks: BTreeSet::new(),
            notes: Vec::new(),
            told: Vec::new(),
            halts: Vec::new(),
            sent: BTreeMap::new(),
        };
        for index in 0..world.proxies.len() {
            let (me, mut out) = (world.plan.proxies[index], Vec::new());
            world.proxies[index].start(&mut cx(
                &world.knobs,
                &mut world.prng,
                world.now,
                me,
                &mut out,
            ));
            world.carry_out(me, out);
        }
        world
    }

    /// A world that serves, with [`STREAM`] in its catalog.
    fn serving(plan: EpochPlan, knobs: Knobs, network: Network, seed: u64) -> Self {
        let mut world = Self::new(plan, knobs, network, seed);
        let leader = world.plan.leader;
        let recovery = CommitRequest { kind: CommitKind::Recovery, ..request(1) };
        assert!(matches!(world.settle(leader, 0, &recovery), CommitOutcome::Committed { .. }));
        world.serve();
        let mut create = create(1, "first", STREAM);
        create.read_version = RTV;
        let outcome = world.settle(client(99), 0, &create);
        assert!(matches!(outcome, CommitOutcome::Committed { .. }), "{outcome:?}");
        world
    }

    fn serve(&mut self) {
        for index in 0..self.plan.proxies.len() {
            let serve = Serve { plan: self.plan.clone() }.into();
            let event = Event::Message { from: self.plan.leader, epoch: EPOCH, message: serve };
            self.enqueue(self.now, Item::Deliver { to: self.plan.proxies[index], event });
        }
        self.run_for(1);
    }

    fn enqueue(&mut self, at: Time, item: Item) -> (Time, u64) {
        self.next += 1;
        self.queue.insert((at, self.next), item);
        (at, self.next)
    }

    fn post(&mut self, from: Endpoint, to: Endpoint, epoch: Epoch, message: Message) {
        *self.sent.entry(message.name()).or_default() += 1;
        let is_cut = self.cut.iter().any(|(a, b, name)| {
            a.is_none_or(|a| a == from) && b.is_none_or(|b| b == to) && *name == message.name()
        });
        if is_cut {
            return;
        }
        let copies = match self.prng.below(100) {
            roll if roll < self.network.lost => 0,
            roll if roll < self.network.lost + self.network.doubled => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let delay = Duration::from_micros(self.prng.between(1, self.network.delay_us));
            let event = Event::Message { from, epoch, message: message.clone() };
            self.enqueue(self.now.plus(delay), Item::Deliver { to, event });
        }
    }

    fn carry_out(&mut self, me: Endpoint, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Send { to, epoch, message } => self.post(me, to, epoch, message),
                Output::Arm { timer, at } => {
                    if let Some(earlier) = self.armed.remove(&(me, timer)) {
                        self.queue.remove(&earlier);
                    }
                    let key = self.enqueue(at.max(self.now), Item::Fire { to: me, timer });
                    self.armed.insert((me, timer), key);
                }
                Output::Halt(halt) => self.halts.push(halt),
                Output::Note(note) => self.notes.push((self.now, note)),
                Output::Mark(mark) => drop(self.marks.insert(mark)),
                other => panic!("{other:?}"),
            }
        }
    }

    fn step_machine(&mut self, to: Endpoint, event: Event) {
        let mut out = Vec::new();
        let mut cx = cx(&self.knobs, &mut self.prng, self.now, to, &mut out);
        match to.role {
            Role::Sequencer => {
                self.sequencer.step(&mut cx, event);
                self.sequencer.check();
            }
            Role::Resolver(index) => {
                self.resolvers[usize::from(index)].step(&mut cx, event);
                self.resolvers[usize::from(index)].check();
            }
            Role::Proxy(index) => {
                self.proxies[usize::from(index)].step(&mut cx, event);
                self.proxies[usize::from(index)].check();
            }
            Role::LogServer => {
                let log = self.logs.iter_mut().find(|log| log.me == to).expect("it exists");
                log.step(&mut cx, event);
            }
            Role::Client | Role::Leader | Role::Node => {
                if let Event::Message { message, .. } = event {
                    self.told.push((self.now, to, message));
                }
            }
        }
        self.carry_out(to, out);
    }

    /// One event; `false` when there is none until `until`.
    fn step_until(&mut self, until: Time) -> bool {
        let Some(entry) = self.queue.first_entry().filter(|entry| entry.key().0 <= until) else {
            self.now = until;
            return false;
        };
        let ((at, _), item) = entry.remove_entry();
        self.now = at;
        match item {
            Item::Deliver { to, event } => self.step_machine(to, event),
            Item::Fire { to, timer } => {
                self.armed.remove(&(to, timer));
                self.step_machine(to, Event::Timer(timer));
            }
        }
        true
    }

    fn run_for(&mut self, ms: u64) {
        let until = self.now.plus(Duration::from_millis(ms));
        while self.step_until(until) {}
    }

    fn send(&mut self, from: Endpoint, to: u8, message: impl Into<Message>) {
        let epoch = if from.role == Role::Client { Epoch::ZERO } else { EPOCH };
        self.post(from, proxy(to), epoch, message.into());
    }

    fn outcome(&self, of: Endpoint, request: RequestId) -> Option<CommitOutcome> {
        let mut outcomes = self.told.iter().filter_map(|(_, to, message)| match message {
            Message::CommitReply(reply) if *to == of && reply.request == request => {
                Some(reply.outcome.clone())
            }
            _ => None,
        });
        let first = outcomes.next()?;
        for again in outcomes {
            assert_eq!(again, first, "I15: one request has one outcome");
        }
        Some(first)
    }

    /// Sends the request again and again until it has an outcome.
    fn settle(&mut self, from: Endpoint, to: u8, request: &CommitRequest) -> CommitOutcome {
        for _ in 0..200 {
            self.send(from, to, request.clone());
            for _ in 0..50 {
                self.run_for(2);
                if let Some(outcome) = self.outcome(from, request.request) {
                    return outcome;
                }
            }
        }
        panic!("no outcome of {request:?}: {:#?}", self.status(to));
    }

    fn read_version_told(&self, of: Endpoint, request: RequestId) -> Option<Version> {
        self.told.iter().find_map(|(_, to, message)| match message {
            Message::ReadVersionReply(reply) if *to == of && reply.request == request => {
                Some(reply.version)
            }
            _ => None,
        })
    }

    /// A read version of `to`; asked once, so only on a calm network.
    fn read_version(&mut self, from: Endpoint, to: u8, number: u64) -> Version {
        let request = RequestId(number);
        for _ in 0..100 {
            self.send(from, to, ReadVersionRequest { request });
            self.run_for(40);
            if let Some(version) = self.read_version_told(from, request) {
                return version;
            }
        }
        panic!("no read version: {:#?}", self.status(to));
    }

    fn status(&self, index: u8) -> crate::ProxyStatus {
        self.proxies[usize::from(index)].status()
    }

    fn refusals(&self, of: Endpoint) -> Vec<(u64, common::Code)> {
        let told = self.told.iter().filter(|(_, to, _)| *to == of);
        told.filter_map(|(_, _, message)| match message {
            Message::CommitReply(reply) => match &reply.outcome {
                CommitOutcome::Refused(refusal) => Some((reply.request.0, refusal.code())),
                _ => None,
            },
            Message::Refused(refused) => Some((refused.request.0, refused.refusal.code())),
            _ => None,
        })
        .collect()
    }
}

fn cx<'a>(
    knobs: &'a Knobs,
    rng: &'a mut Prng,
    now: Time,
    me: Endpoint,
    out: &'a mut Vec<Output>,
) -> Cx<'a> {
    Cx { now, wall: WallTime(now.0 / 1000), knobs, rng, me, out }
}

fn request(number: u64) -> CommitRequest {
    CommitRequest {
        request: RequestId(number),
        answered_below: RequestId(0),
        kind: CommitKind::User,
        read_version: RTV,
        report_conflicts: true,
        id: None,
        lane: None,
        reads: Ranges::default(),
        writes: Ranges::default(),
        sections: vec![],
        payload: bytes::Bytes::new().into(),
    }
}

fn points(keys: &[&str]) -> Ranges {
    Ranges::from_ranges(keys.iter().map(|key| KeyRange::point(key.as_bytes())))
}

fn with_records(mut request: CommitRequest, sections: &[(StreamId, Vec<Record>)]) -> CommitRequest {
    let mut payload = BytesMut::new();
    for (stream, records) in sections {
        let start = payload.len();
        records.iter().for_each(|record| record.encode(&mut payload));
        let (record_count, bytes) = (records.len() as u32, (payload.len() - start) as u32);
        request.sections.push(SectionEntry { stream: *stream, record_count, bytes });
    }
    request.payload = payload.freeze().into();
    request
}

fn append(number: u64, value: &str) -> CommitRequest {
    with_records(request(number), &[(STREAM, vec![Record::append(value.to_owned())])])
}

fn create(number: u64, name: &str, stream: StreamId) -> CommitRequest {
    let definition = StreamDefinition { name: name.to_owned(), stream };
    with_records(request(number), &[(StreamId::CATALOG, vec![definition.to_record()])])
}

fn in_lane(request: CommitRequest, lane: u64, sequence: u64) -> CommitRequest {
    CommitRequest { lane: Some(LaneOrder { lane, sequence }), ..request }
}

fn id(number: u8) -> IdempotencyId {
    IdempotencyId([number; 16])
}

fn one() -> EpochPlan {
    plan(1, &[""], 1, 1)
}
