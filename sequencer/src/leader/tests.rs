//! The leader against a scripted cluster of one node: every phase, every lost answer.

use std::collections::VecDeque;

use bytes::Bytes;
use common::message::{ClusterView, CommitOutcome, CommitReply, Recruited, Refused, Serving};
use common::register::{RegisterAnswer, RegisterOp, RegisterOutcome};
use common::{
    FENCE_JUMP_VERSIONS, Incarnation, Knobs, Output, Position, Prng, Refusal, Role, WallTime,
};

use super::watch::SILENT_TICKS_MAX;
use super::*;

mod absent;
mod members;

const NODE: NodeId = NodeId(7);

/// What the scripted cluster does with the next answer of a kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Answer,
    Lose,
    /// The register writes, but the answer says that it doesn't know.
    Unsure,
    /// The register doesn't write, and the answer says that it doesn't know.
    UnsureAndLost,
}

struct World {
    leader: Leader,
    now: Time,
    rng: Prng,
    incarnation: u64,
    register: (Revision, Bytes),
    durable: Version,
    notes: Vec<Note>,
    halts: Vec<&'static str>,
    serves_before_publish: usize,
    fates: Vec<(&'static str, Fate)>,
    /// What was sent to other nodes, which never answer.
    elsewhere: Vec<(NodeId, &'static str)>,
}

impl World {
    fn new(fates: &[(&'static str, Fate)]) -> Self {
        Self {
            leader: Leader::new(Topology::single(NODE)),
            now: Time(1),
            rng: Prng::new(1),
            incarnation: 1,
            register: (Revision(0), Bytes::new()),
            durable: Version(0),
            notes: vec![],
            halts: vec![],
            serves_before_publish: 0,
            fates: fates.to_vec(),
            elsewhere: vec![],
        }
    }

    fn fate(&mut self, kind: &'static str) -> Fate {
        match self.fates.iter().position(|(name, _)| *name == kind) {
            Some(place) => self.fates.remove(place).1,
            None => Fate::Answer,
        }
    }

    fn run(&mut self, first: Option<Event>) {
        let mut waiting = VecDeque::from([first]);
        while let Some(event) = waiting.pop_front() {
            for output in self.step(event) {
                self.now = self.now.plus(Duration::from_millis(1));
                waiting.extend(self.answer(output).map(Some));
            }
        }
    }

    fn step(&mut self, event: Option<Event>) -> Vec<Output> {
        let me = self.peer().endpoint(Role::Leader);
        let (mut out, knobs) = (vec![], Knobs::small());
        let mut cx = Cx {
            now: self.now,
            wall: WallTime(0),
            knobs: &knobs,
            rng: &mut self.rng,
            me,
            out: &mut out,
        };
        match event {
            None => self.leader.start(&mut cx),
            Some(event) => self.leader.step(&mut cx, event),
        }
        out
    }

    fn peer(&self) -> Peer {
        Peer { node: NODE, incarnation: Incarnation(self.incarnation) }
    }

    fn answer(&mut self, output: Output) -> Option<Event> {
        match output {
            Output::Note(note) => {
                self.notes.push(note);
                None
            }
            Output::Register(request) => {
                let kind = match request.op {
                    RegisterOp::Read => "read",
                    RegisterOp::Cas { .. } => "cas",
                };
                let fate = self.fate(kind);
                let outcome = self.register(request.op, fate);
                (fate != Fate::Lose)
                    .then_some(Event::Register(RegisterAnswer { id: request.id, outcome }))
            }
            Output::Halt(halt) => {
                self.halts.push(halt.reason);
                None
            }
            Output::Send { to, message, .. } if to.node != NODE => {
                self.elsewhere.push((to.node, message.name()));
                None
            }
            // A node drops what is meant for another life of it.
            Output::Send { to, .. } if ![0, self.incarnation].contains(&to.incarnation.raw()) => {
                None
            }
            Output::Send { to, epoch, message } => {
                let name = message.name();
                let answer = self.reply(&message)?;
                let from = self.peer().endpoint(to.role);
                (self.fate(name) != Fate::Lose).then_some(Event::Message {
                    from,
                    epoch,
                    message: answer,
                })
            }
            _ => None,
        }
    }

    fn register(&mut self, op: RegisterOp, fate: Fate) -> RegisterOutcome {
        match op {
            RegisterOp::Read => RegisterOutcome::Value(self.register.0, self.register.1.clone()),
            RegisterOp::Cas { expect, value } => {
                if expect == self.register.0 && fate != Fate::UnsureAndLost {
                    self.register = (Revision(expect.0 + 1), value);
                }
                match fate {
                    Fate::Answer if self.register.0 == Revision(expect.0 + 1) => {
                        RegisterOutcome::Written(self.register.0)
                    }
                    Fate::Answer => RegisterOutcome::Lost,
                    _ => RegisterOutcome::Indeterminate("the line was cut".to_owned()),
                }
            }
        }
    }

    fn reply(&mut self, message: &Message) -> Option<Message> {
        Some(match message {
            Message::FindCluster(find) => ClusterView {
                request: find.request,
                epoch: Epoch::ZERO,
                recovery_version: Version::ZERO,
                proxies: vec![],
                log_servers: vec![],
                absent: Vec::new(),
                replication: 1,
                seats: common::membership::Seats::new(),
                phase: String::new(),
                addresses: Vec::new(),
            }
            .into(),
            Message::Lock(_) => {
                Locked { durable: self.durable, known_committed: self.durable }.into()
            }
            Message::Recruit(recruit) => Recruited { role: recruit.role }.into(),
            Message::CommitRequest(request) => {
                self.durable = self.leader.plan.as_ref().unwrap().first_version;
                let position = Position { version: self.durable, index: 0 };
                let outcome = CommitOutcome::Committed {
                    position,
                    commit_time: WallTime(0),
                    base_offsets: vec![],
                };
                CommitReply { request: request.request, outcome }.into()
            }
            Message::Serve(serve) => {
                let held = RegisterState::decode(&self.register.1).unwrap();
                if held.generations.last().map(|last| last.epoch) != Some(serve.plan.epoch) {
                    self.serves_before_publish += 1;
                }
                Serving {}.into()
            }
            _ => return None,
        })
    }

    fn phases(&self) -> Vec<&'static str> {
        self.notes
            .iter()
            .filter_map(|note| match note {
                Note::Phase { name, .. } => Some(*name),
                _ => None,
            })
            .collect()
    }

    fn run_until_serving(&mut self) {
        for _ in 0..50 {
            if self.leader.status().phase == "serving" {
                return;
            }
            self.run(Some(Event::Timer(RETRY)));
        }
        panic!("stuck: {:?}", self.leader.status());
    }
}

#[test]
fn the_first_epoch_goes_through_the_phases_without_locking() {
    let mut world = World::new(&[]);
    world.run(None);
    let expect = [
        "reading_register",
        "claiming_epoch",
        "finding_nodes",
        "recruiting",
        "recovery_transaction",
        "writing_register",
        "announcing",
        "serving",
    ];
    assert_eq!(world.phases(), expect);
    let state = RegisterState::decode(&world.register.1).unwrap();
    assert_eq!(state.epoch, Epoch(1));
    assert_eq!(state.generations.len(), 1);
}

#[test]
fn a_restart_locks_the_old_log_and_jumps_the_version() {
    let mut world = World::new(&[]);
    world.run(None);
    world.durable = Version(123_456_789);
    world.incarnation = 2;
    world.leader = Leader::new(Topology::single(NODE));
    world.notes.clear();
    world.run(None);
    assert!(world.phases().contains(&"locking_logs"));
    let fixed = world.notes.iter().find_map(|note| match note {
        Note::RecoveryVersion { recovery_version, first_version, .. } => {
            Some((*recovery_version, *first_version))
        }
        _ => None,
    });
    let rv = Version(123_456_789);
    assert_eq!(fixed, Some((rv, rv.plus(FENCE_JUMP_VERSIONS))));
    let state = RegisterState::decode(&world.register.1).unwrap();
    assert_eq!(state.generations[0].end, Some(rv));
    assert_eq!(state.generations[1].begin, rv);
}

#[test]
fn every_answer_can_be_lost_once_or_be_unsure() {
    let kinds = ["read", "FindCluster", "Lock", "Recruit", "CommitRequest", "Serve"];
    let lost = kinds.iter().map(|kind| vec![(*kind, Fate::Lose)]);
    let unsure = [
        vec![("cas", Fate::Unsure)],
        vec![("cas", Fate::Answer), ("cas", Fate::Unsure)],
        vec![("cas", Fate::UnsureAndLost)],
        vec![("cas", Fate::Answer), ("cas", Fate::UnsureAndLost)],
        vec![("cas", Fate::Lose)],
        vec![("cas", Fate::Unsure), ("read", Fate::Lose), ("cas", Fate::Unsure)],
    ];
    for fates in lost.chain(unsure) {
        let mut world = World::new(&[]);
        world.run(None);
        world.incarnation = 2;
        world.leader = Leader::new(Topology::single(NODE));
        world.fates = fates.clone();
        world.run(None);
        world.run_until_serving();
        assert_eq!(world.serves_before_publish, 0, "I10 {fates:?}");
        let state = RegisterState::decode(&world.register.1).unwrap();
        assert_eq!(state.generations.last().unwrap().epoch, world.leader.epoch, "{fates:?}");
    }
}

#[test]
fn a_fenced_leader_starts_over_at_a_newer_epoch() {
    let mut world = World::new(&[]);
    world.run(None);
    let other = RegisterState {
        epoch: Epoch(5),
        leader: NodeId(9),
        stamp: 1,
        ..RegisterState::decode(&world.register.1).unwrap()
    };
    world.register = (Revision(world.register.0.0 + 1), other.encode());
    let from = world.peer().endpoint(Role::LogServer);
    let refusal = Refusal::new(Code::WrongEpoch, "epoch 5");
    let message = Refused { request: RequestId(0), refusal }.into();
    world.run(Some(Event::Message { from, epoch: Epoch(1), message }));
    world.run_until_serving();
    assert_eq!(world.leader.epoch, Epoch(6));
}

#[test]
fn a_node_that_lives_anew_ends_the_epoch() {
    let mut world = World::new(&[]);
    world.run(None);
    assert_eq!(world.leader.epoch, Epoch(1));
    world.incarnation = 2;
    world.run(Some(Event::Timer(RETRY)));
    world.run_until_serving();
    assert_eq!(world.leader.epoch, Epoch(2));
    assert_eq!(world.leader.status().cause, "node_restarted");
}

#[test]
fn a_node_that_lived_anew_while_others_were_being_found_is_noticed() {
    for lost in ["Lock", "Recruit", "CommitRequest", "Serve"] {
        let mut world = World::new(&[]);
        world.run(None);
        world.leader = Leader::new(Topology::single(NODE));
        world.fates = vec![(lost, Fate::Lose); 3];
        world.run(None);
        // The connection was seen to break during Finding, so that no PeerDown comes any more.
        world.incarnation = 2;
        world.run_until_serving();
        assert_eq!(world.leader.lives[&NODE].incarnation, Incarnation(2), "{lost}");
        assert_eq!(world.leader.status().cause, "node_restarted");
    }
}

#[test]
fn a_connection_that_breaks_ends_no_epoch_and_no_recovery() {
    // Serving, and in each phase that waits for the node.
    for lost in ["", "Lock", "Recruit", "CommitRequest", "Serve"] {
        let mut world = World::new(&[]);
        world.run(None);
        world.leader = Leader::new(Topology::single(NODE));
        world.fates = vec![(lost, Fate::Lose)];
        world.run(None);
        let (down, phase) = (Event::PeerDown(world.peer()), world.leader.status().phase);
        assert_eq!(phase == "serving", lost.is_empty(), "{phase}");
        for _ in 0..3 * SILENT_TICKS_MAX {
            world.run(Some(down.clone()));
        }
        assert_eq!((world.leader.epoch, world.leader.status().phase), (Epoch(2), phase));
        world.run_until_serving();
        assert_eq!(world.leader.epoch, Epoch(2), "{lost}");
    }
}

#[test]
fn a_connection_that_breaks_for_good_ends_the_epoch_soon() {
    let longest = Duration::from_millis(Knobs::small().recovery_retry_ms);
    let mut world = World::new(&[]);
    world.run(None);
    world.fates = vec![("FindCluster", Fate::Lose); 50];
    let (begin, mut tick) = (world.now, world.now);
    let mut event = Event::PeerDown(world.peer());
    loop {
        for output in world.step(Some(event)) {
            match output {
                Output::Arm { timer: RETRY, at } => tick = at,
                other => drop(world.answer(other)),
            }
        }
        if world.leader.status().phase != "serving" {
            break;
        }
        (world.now, event) = (tick, Event::Timer(RETRY));
    }
    assert_eq!(world.leader.status().cause, "node_silent");
    let (took, plain) = (world.now.since(begin), longest * SILENT_TICKS_MAX);
    assert!(took < plain, "{took:?}, no sooner than without a PeerDown");
}

#[test]
fn a_refusal_of_an_earlier_epoch_ends_nothing() {
    let mut world = World::new(&[]);
    world.run(None);
    world.incarnation = 2;
    world.run(Some(Event::Timer(RETRY)));
    world.run_until_serving();
    assert_eq!(world.leader.epoch, Epoch(2));
    let from = world.peer().endpoint(Role::Node);
    let refusal = Refusal::new(Code::WrongEpoch, "Recruit: this is e2");
    let message = Refused { request: RequestId(0), refusal }.into();
    world.run(Some(Event::Message { from, epoch: Epoch(1), message }));
    assert_eq!((world.leader.epoch, world.leader.status().phase), (Epoch(2), "serving"));
}

#[test]
fn a_log_that_was_emptied_is_not_taken_for_a_short_one() {
    let mut world = World::new(&[]);
    world.run(None);
    world.leader = Leader::new(Topology::single(NODE));
    world.durable = Version::ZERO;
    world.run(None);
    assert_eq!(world.halts, ["log_lost"], "I9: everything acknowledged would be dropped");
    assert_eq!(world.leader.status().phase, "locking_logs");
}

const RIVAL: NodeId = NodeId(9);

fn with_rival() -> World {
    let mut world = World::new(&[]);
    let topology = Topology { candidates: vec![NODE, RIVAL], ..Topology::single(NODE) };
    world.leader = Leader::new(topology);
    world
}

fn from_rival(role: Role, epoch: u64, message: impl Into<Message>) -> Event {
    let from = Peer { node: RIVAL, incarnation: Incarnation(1) }.endpoint(role);
    Event::Message { from, epoch: Epoch(epoch), message: message.into() }
}

fn beat(epoch: u64) -> Event {
    from_rival(Role::Leader, epoch, common::message::Beat {})
}

/// What a node answers that knows of no epoch.
fn sign_of_life(world: &mut World) -> Message {
    let find = common::message::FindCluster { request: RequestId(0) };
    world.reply(&find.into()).expect("a node answers")
}

/// The rival takes the register to `epoch`.
fn rival_claims(world: &mut World, epoch: u64) {
    let state = RegisterState::decode(&world.register.1).unwrap();
    let state = RegisterState { epoch: Epoch(epoch), leader: RIVAL, stamp: 77, ..state };
    world.register = (Revision(world.register.0.0 + 1), state.encode());
}

/// Lets the watch of `finding_ms` for the rival, who is not there, run out.
fn serve_alone(world: &mut World) {
    world.now = world.now.plus(Duration::from_secs(5));
    world.run_until_serving();
}

#[test]
fn a_recovery_goes_on_without_a_node_that_only_leads_and_tells_it_later() {
    let mut world = with_rival();
    world.run(None);
    assert_eq!(world.leader.status().phase, "finding_nodes");
    assert_eq!(world.leader.status().waiting_for, "nodes n9");
    serve_alone(&mut world);
    assert!(!world.leader.lives.contains_key(&RIVAL));
    world.elsewhere.clear();
    let view = sign_of_life(&mut world);
    world.run(Some(from_rival(Role::Node, 1, view)));
    assert_eq!(world.elsewhere, [(RIVAL, "Serve")]);
    assert_eq!(world.leader.epoch, Epoch(1));
}

#[test]
fn who_hears_a_leader_leaves_the_register_alone() {
    let mut world = with_rival();
    rival_claims(&mut world, 5);
    world.run(None);
    assert_eq!(
        world.leader.status().phase,
        "following",
        "the register shows an epoch that is news"
    );
    let before = world.register.clone();
    for _ in 0..100 {
        world.run(Some(beat(5)));
    }
    assert_eq!((world.leader.status().phase, &world.register), ("following", &before));
    // Silence: the timer fires without a beat.
    world.run(Some(Event::Timer(RETRY)));
    assert_eq!(world.leader.epoch, Epoch(6));
    assert_eq!(world.leader.status().cause, "leader_silent");
}

#[test]
fn a_leader_gives_way_to_a_newer_one_and_falls_silent() {
    let mut world = with_rival();
    world.run(None);
    serve_alone(&mut world);
    world.run(Some(Event::Timer(BEAT)));
    assert!(world.elsewhere.contains(&(RIVAL, "Beat")));
    world.run(Some(beat(1)));
    assert_eq!(world.leader.status().phase, "serving", "nobody else can have claimed epoch 1");
    world.run(Some(beat(2)));
    assert_eq!(world.leader.status().phase, "following");
    world.elsewhere.clear();
    world.run(Some(Event::Timer(BEAT)));
    assert_eq!(world.elsewhere, []);
}

#[test]
fn a_claim_that_is_lost_is_not_repeated_at_once() {
    let mut world = with_rival();
    world.fates = vec![("cas", Fate::Lose)];
    world.run(None);
    rival_claims(&mut world, 9);
    world.run(Some(Event::Timer(RETRY)));
    let status = world.leader.status();
    assert_eq!((status.phase, status.cause), ("following", "newer_leader"));
}

#[test]
fn a_recovery_that_does_not_end_stops_the_beats() {
    let mut world = with_rival();
    world.run(None);
    world.elsewhere.clear();
    world.run(Some(Event::Timer(BEAT)));
    assert_eq!(world.elsewhere, [(RIVAL, "Beat")]);
    let patience = Duration::from_millis(Knobs::small().recovery_patience_ms);
    world.now = world.now.plus(patience + Duration::from_millis(1));
    world.elsewhere.clear();
    world.run(Some(Event::Timer(BEAT)));
    assert_eq!(world.elsewhere, []);
}

#[test]
fn a_leader_that_stops_hands_over_and_the_heir_claims_at_once() {
    let mut world = with_rival();
    rival_claims(&mut world, 5);
    world.run(None);
    world.run(Some(beat(5)));
    world.run(Some(from_rival(Role::Leader, 5, common::message::HandOver {})));
    assert_eq!(world.leader.epoch, Epoch(6));
    let status = world.leader.status();
    assert_eq!(
        (status.cause, status.phase),
        ("handed_over", "serving"),
        "who left is not waited for"
    );
}

#[test]
fn a_leader_that_fell_silent_is_not_waited_for() {
    let mut world = with_rival();
    rival_claims(&mut world, 5);
    world.run(None);
    world.run(Some(beat(5)));
    let begin = world.now;
    world.run(Some(Event::Timer(RETRY)));
    let status = world.leader.status();
    assert_eq!((status.cause, status.phase), ("leader_silent", "serving"));
    let took = world.now.since(begin);
    assert!(took < Duration::from_millis(Knobs::small().finding_ms), "{took:?}");
}

#[test]
fn a_log_that_ends_below_what_another_knows_committed_is_lost() {
    let mut world = World::new(&[]);
    let topology = Topology { log_servers: vec![NODE, RIVAL], ..Topology::single(NODE) };
    world.leader = Leader::new(topology);
    let generation = common::register::Generation {
        epoch: Epoch(1),
        first_epoch: Epoch(1),
        begin: Version(0),
        end: None,
        log_servers: vec![NODE, RIVAL],
        absent: Vec::new(),
        replication: 1,
    };
    let (epoch, leader, stamp, generations) = (Epoch(1), NODE, 3, vec![generation]);
    let state = RegisterState { epoch, leader, stamp, generations, ..RegisterState::empty() };
    world.register = (Revision(1), state.encode());
    world.durable = Version(FENCE_JUMP_VERSIONS + 100);
    world.run(None);
    let view = sign_of_life(&mut world);
    world.run(Some(from_rival(Role::Node, 2, view)));
    assert_eq!((world.leader.status().phase, &world.halts[..]), ("locking_logs", &[][..]));
    let durable = Version(FENCE_JUMP_VERSIONS + 99);
    let locked = Locked { durable, known_committed: Version(5) };
    world.run(Some(from_rival(Role::LogServer, 2, locked)));
    assert_eq!(world.halts, ["log_lost"], "I3: what was acknowledged would go");
}
