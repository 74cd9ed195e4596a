//! Whole runs: the same seed gives the same trace.

use std::collections::BTreeMap;

use common::disk::{DiskOpId, Lane, PAGE_BYTES};
use common::message::{Confirm, Confirmed, Message};
use common::register::{RegisterOp, RegisterRequest};
use common::{Epoch, Role, Time, Timer};

use super::*;

/// A process that uses every seam: it talks to its neighbour in a ring, writes each number it gets, and
/// answers when the number is durable.
struct Toy {
    me: Peer,
    neighbour: NodeId,
    pending: BTreeMap<u64, Endpoint>,
    last_seen: BTreeMap<NodeId, Incarnation>,
    last_time: Time,
}

const TICK: TimerKey = TimerKey { role: Role::Node, epoch: Epoch::ZERO, timer: Timer(1) };
const NEVER: TimerKey = TimerKey { role: Role::Node, epoch: Epoch::ZERO, timer: Timer(2) };

impl Toy {
    fn say(&self, step: &mut Step<'_>, to: Endpoint, message: impl Into<Message>) {
        let from = self.me.endpoint(Role::Node);
        let envelope = Envelope { from, to, epoch: Epoch::ZERO, message: message.into() };
        step.out.push(Effect::Send(Box::new(envelope)));
    }

    fn write(&self, step: &mut Step<'_>, number: u64) {
        let data = bytes::Bytes::copy_from_slice(&number.to_le_bytes()).into();
        let op = DiskOp::Write { file: File::Meta(0), offset: 0, data, durable: true };
        step.out.push(Effect::Disk(DiskRequest { id: DiskOpId(number), lane: Lane::Log, op }));
    }
}

impl Process for Toy {
    fn step(&mut self, step: &mut Step<'_>, input: Input) {
        assert!(step.now >= self.last_time, "the clock runs forward");
        self.last_time = step.now;
        match input {
            Input::Boot => {
                let create = DiskOp::Create { file: File::Meta(0), bytes: PAGE_BYTES };
                let request = DiskRequest { id: DiskOpId(0), lane: Lane::Log, op: create };
                step.out.push(Effect::Disk(request));
                step.out.push(Effect::Register(RegisterRequest { id: 1, op: RegisterOp::Read }));
                step.out.push(Effect::Arm { key: TICK, at: step.now });
                step.out.push(Effect::Arm { key: NEVER, at: Time(step.now.0 + 1_000_000) });
                step.out.push(Effect::Disarm(NEVER));
            }
            Input::Timer(key) => {
                assert_eq!(key, TICK, "a disarmed timer never comes");
                let to = Peer { node: self.neighbour, incarnation: Incarnation::ZERO };
                let number = step.rng.next() >> 1;
                self.say(step, to.endpoint(Role::Node), Confirm { number });
                let wait = 1_000_000 + step.rng.below(2_000_000);
                step.out.push(Effect::Arm { key: TICK, at: Time(step.now.0 + wait) });
            }
            Input::Message(envelope) => {
                let from = envelope.from;
                let last = self.last_seen.insert(from.node, from.incarnation);
                assert!(last.is_none_or(|last| last <= from.incarnation), "no zombies");
                if let Message::Confirm(Confirm { number }) = envelope.message {
                    self.pending.insert(number, from);
                    self.write(step, number);
                }
            }
            Input::Disk(done) => {
                let Some(to) = self.pending.remove(&done.id.0) else { return };
                self.say(step, to, Confirmed { number: done.id.0, durable: common::Version(1) });
                let note = Note::Durable { epoch: Epoch(1), version: common::Version(done.id.0) };
                step.out.push(Effect::Note(self.me.endpoint(Role::LogServer), note));
            }
            Input::Register(_)
            | Input::PeerDown(_)
            | Input::Connected { .. }
            | Input::DialFailed(_) => {}
        }
    }
}

struct Toys;

impl Spawn for Toys {
    type Process = Toy;

    fn spawn(&mut self, me: Peer, _: &mut Prng) -> Toy {
        Toy {
            me,
            neighbour: NodeId(me.node.0 % 3 + 1),
            pending: BTreeMap::new(),
            last_seen: BTreeMap::new(),
            last_time: Time::ZERO,
        }
    }
}

fn run(seed: u64, with_text: bool) -> (u128, u64, usize) {
    let network = NetworkProfile {
        loss_ppm: 10_000,
        duplicate_ppm: 50_000,
        reorder_ppm: 50_000,
        reset_ppm: 2_000,
        through_codec: true,
        bit_flip_ppm: 1_000,
        ..NetworkProfile::default()
    };
    let profile = Profile { network, drift_ppm_max: 10_000, ..Profile::default() };
    let mut world = World::new(profile, Randomness::new(seed), Toys, with_text);
    (1..=3).for_each(|node| world.start(NodeId(node)));
    let mut faults = Prng::derive(seed, "test faults", 0);
    let mut notes = 0;
    for turn in 1..=200_u64 {
        let until = Moment(turn * 10_000_000);
        while world.step(until) {
            notes += world.take_happened().len();
        }
        let node = NodeId(faults.between(1, 3));
        match faults.below(8) {
            0 => world.crash(node, Crash::PowerCut),
            1 => world.pause(node, 30_000_000),
            2 => world.cut(node, NodeId(node.0 % 3 + 1), 20_000_000),
            3 => world.clog(node, NodeId(node.0 % 3 + 1), 20_000_000),
            _ => {}
        }
        if world.live(node).is_none() {
            world.start(node);
        }
    }
    (world.trace().hash(), world.trace().event_count(), notes)
}

#[test]
fn one_seed_is_one_run_and_another_seed_another() {
    let first = run(1, false);
    assert_eq!(first, run(1, true), "the text changes nothing");
    assert_ne!(first.0, run(2, false).0);
    assert!(first.1 > 2000, "{} events", first.1);
}

#[test]
fn toys_see_no_zombies_and_no_clock_that_runs_backward() {
    (0..40).for_each(|seed| {
        let (_, _, notes) = run(seed, false);
        assert!(notes > 100, "seed {seed}: {notes}");
    });
}

#[test]
fn a_paused_process_gets_everything_later() {
    let mut world = World::new(Profile::default(), Randomness::new(1), Toys, false);
    (1..=3).for_each(|node| world.start(NodeId(node)));
    world.pause(NodeId(1), 1_000_000_000);
    while world.step(Moment(999_000_000)) {}
    let busy = world.take_happened();
    let from_paused =
        busy.iter().filter(|what| matches!(what, Happened::Note(from, _) if from.node.0 == 1));
    assert_eq!(from_paused.count(), 0);
    while world.step(Moment(1_100_000_000)) {}
    let after = world.take_happened();
    let from_resumed =
        after.iter().filter(|what| matches!(what, Happened::Note(from, _) if from.node.0 == 1));
    assert!(from_resumed.count() > 10);
}
