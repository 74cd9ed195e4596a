//! The world: virtual time, the event queue, and the hosts that processes live and die on.
//!
//! ```text
//!            +--------------- queue of (moment, tiebreak, event) <--------------+
//!            v                                                                  |
//!   host {clock, disk, timers, process} --effects--> network, disk, register ---+
//!            `--notes, observations--> happened --> oracles
//! ```
//!
//! Events of one moment come in an order that the schedule's randomness draws, so that equal times are
//! explored. Nothing here decides what goes wrong: faults are calls from outside ([`World::crash`],
//! [`World::pause`], ...), so that a run's faults are a list that can be printed and made shorter.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use common::disk::{DiskOp, DiskRequest, File, Lane};
use common::machine::Halt;
use common::register::RegisterState;
use common::wire::Envelope;
use common::{Endpoint, Incarnation, Mark, NodeId, Note, Peer, Prng};

use crate::by_node::ByNode;
use crate::clock::{Clock, Moment};
use crate::disk::{Crash, Disk, DiskProfile, Ticket};
use crate::network::{Arrival, Network, NetworkProfile, Traffic};
use crate::observe::Observation;
use crate::process::{Effect, Input, Process, Spawn, Step, TimerKey};
use crate::random::Randomness;
use crate::register::{Consultation, Register, RegisterProfile};
use crate::trace::{Trace, brief, verdict};

mod harm;

pub use self::harm::Isolation;

/// The first steps of a run are all checked, then one in [`CHECK_STRIDE`]: a broken state stays broken.
const CHECKED_ALWAYS: u64 = 5_000;
const CHECK_STRIDE: u64 = 7;

/// What a world is made of.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Profile {
    /// The network.
    pub network: NetworkProfile,
    /// Every disk.
    pub disk: DiskProfile,
    /// The register.
    pub register: RegisterProfile,
    /// Clocks run off by up to this many parts in a million.
    pub drift_ppm_max: u64,
}

/// Something that oracles want to know, with what they need to judge it at once.
#[derive(Clone, Debug)]
pub enum Happened {
    /// A machine told something.
    Note(Endpoint, Note),
    /// A client told something.
    Observation(Peer, Observation),
    /// A rare branch was taken.
    Mark(Mark),
    /// A process ended itself.
    Halted(Peer, Halt),
    /// A process asked its disk for a write: where frames come to lie.
    Wrote(NodeId, DiskRequest),
    /// A process began.
    Began(Peer),
    /// A process was ended.
    Crashed(Peer, Crash),
}

enum Event {
    Traffic(Traffic),
    Timer(Peer, TimerKey, u64),
    Disk(Peer, Ticket),
    Register(Consultation),
    Resume(Peer),
    Dial(Peer, NodeId),
    Wake(u64),
}

/// When an event comes: its moment, then drawn bits, then the slot that it waits in. One number, so that the
/// queue compares and moves little.
///
/// ```text
/// bit 127       64 63    24 23   0
///     [  moment   | drawn  | slot ]
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Turn(u128);

const SLOT_BITS: u32 = 24;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;

impl Turn {
    fn new(at: Moment, drawn: u64, slot: u32) -> Self {
        assert!(u64::from(slot) <= SLOT_MASK, "{slot} events wait");
        Self(u128::from(at.0) << 64 | u128::from(drawn & !SLOT_MASK | u64::from(slot)))
    }

    const fn at(self) -> Moment {
        Moment((self.0 >> 64) as u64)
    }

    const fn slot(self) -> u32 {
        (self.0 as u64 & SLOT_MASK) as u32
    }
}

struct Host<P> {
    lives: u64,
    disk: Disk,
    /// The node's own disk, while `disk` is a copy of another node's.
    own_disk: Option<Disk>,
    life: Option<Life<P>>,
}

struct Life<P> {
    process: P,
    me: Peer,
    /// Who the process is to others, ascending: itself, and for a client each end of a connection.
    addresses: Vec<Incarnation>,
    clock: Clock,
    rng: Prng,
    /// The armed timers, each with the number of its last arming. A process has a handful.
    timers: Vec<(TimerKey, u64)>,
    /// Events that wait while the process is paused.
    paused: Option<VecDeque<Input>>,
}

/// Everything that a run consists of, but for what it is judged by.
pub struct World<S: Spawn> {
    now: Moment,
    queue: BinaryHeap<Reverse<Turn>>,
    slots: Vec<Option<Event>>,
    free: Vec<u32>,
    gives: u64,
    unchecked: Vec<NodeId>,
    next_arming: u64,
    hosts: ByNode<Host<S::Process>>,
    network: Network,
    register: Register,
    spawn: S,
    profile: Profile,
    randomness: Randomness,
    schedule: Prng,
    trace: Trace,
    happened: Vec<Happened>,
    woken: Vec<u64>,
    /// Whose machine is gone for good, with its disk.
    lost: Option<NodeId>,
    effects: Vec<Effect>,
    /// Empty between sends.
    traffic: Vec<(Moment, Traffic)>,
}

impl<S: Spawn> World<S> {
    /// A world without hosts.
    pub fn new(profile: Profile, randomness: Randomness, spawn: S, with_text: bool) -> Self {
        Self {
            now: Moment::ZERO,
            queue: BinaryHeap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            gives: 0,
            unchecked: Vec::new(),
            next_arming: 0,
            hosts: ByNode::new(),
            network: Network::new(profile.network.clone(), randomness),
            register: Register::new(profile.register.clone(), randomness.stream("register", 0)),
            spawn,
            profile,
            randomness,
            schedule: randomness.stream("schedule", 0),
            trace: Trace::new(with_text),
            happened: Vec::new(),
            woken: Vec::new(),
            lost: None,
            effects: Vec::new(),
            traffic: Vec::new(),
        }
    }

    /// Virtual time.
    pub const fn now(&self) -> Moment {
        self.now
    }

    /// The trace so far.
    pub const fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Adds a line to the trace's text.
    pub fn say(&mut self, line: impl FnOnce() -> String) {
        self.trace.line(self.now, line);
    }

    /// What the register holds.
    pub const fn register(&self) -> &Register {
        &self.register
    }

    /// Whether the newest generation is written without one of its log servers.
    pub fn is_someone_absent(&self) -> bool {
        let state = self.register_state();
        state.generations.last().is_some_and(|generation| !generation.absent.is_empty())
    }

    /// What the register holds.
    pub fn register_state(&self) -> RegisterState {
        let (_, bytes) = self.register.peek();
        RegisterState::decode(bytes).expect("the register holds what a leader wrote")
    }

    /// The register, to harm it.
    pub const fn register_mut(&mut self) -> &mut Register {
        &mut self.register
    }

    /// A node's own disk, for oracles.
    pub fn disk(&self, node: NodeId) -> &Disk {
        let host = self.host(node);
        host.own_disk.as_ref().unwrap_or(&host.disk)
    }

    /// A node's disk, to harm it.
    pub fn disk_mut(&mut self, node: NodeId) -> &mut Disk {
        &mut self.host_mut(node).disk
    }

    /// A live process.
    pub fn process(&self, node: NodeId) -> Option<&S::Process> {
        self.host(node).life.as_ref().map(|life| &life.process)
    }

    /// A node's live incarnation.
    pub fn live(&self, node: NodeId) -> Option<Peer> {
        self.host(node).life.as_ref().map(|life| life.me)
    }

    /// What has happened since the last call, in order.
    pub fn take_happened(&mut self) -> Vec<Happened> {
        core::mem::take(&mut self.happened)
    }

    /// What has happened since the last call, in exchange for an empty list to write on.
    pub fn swap_happened(&mut self, happened: &mut Vec<Happened>) {
        assert!(happened.is_empty(), "{} things were not looked at", happened.len());
        core::mem::swap(&mut self.happened, happened);
    }

    /// Whether anything has.
    pub const fn has_happened(&self) -> bool {
        !self.happened.is_empty()
    }

    /// Checks the states that the last events have changed. Oracles come first: they say more.
    pub fn check_states(&mut self) {
        while let Some(node) = self.unchecked.pop() {
            if let Some(process) = self.process(node) {
                process.check();
            }
        }
    }

    /// The wake-ups that have come since the last call.
    pub fn take_woken(&mut self) -> Vec<u64> {
        core::mem::take(&mut self.woken)
    }

    /// Brings a wake-up number at a moment: how faults and phases get their turn.
    pub fn wake(&mut self, at: Moment, number: u64) {
        self.schedule_at(at, Event::Wake(number));
    }

    /// Starts the next life of a node; one that is lost has none.
    pub fn start(&mut self, node: NodeId) {
        if self.lost == Some(node) {
            return;
        }
        let (profile, randomness) = (&self.profile, self.randomness);
        let host = self.hosts.entry(node, || Host {
            lives: 0,
            disk: Disk::new(profile.disk.clone(), randomness.stream("disk", node.0)),
            own_disk: None,
            life: None,
        });
        assert!(host.life.is_none(), "{node} starts while it lives");
        host.lives += 1;
        let me = peer(node, host.lives);
        let index = node.0 << 20 | host.lives;
        let mut clock_prng = randomness.stream("clock", index);
        let mut rng = randomness.stream("process", index);
        host.life = Some(Life {
            me,
            addresses: vec![me.incarnation],
            process: self.spawn.spawn(me, &mut rng),
            clock: Clock::new(self.now, self.profile.drift_ppm_max, &mut clock_prng),
            rng,
            timers: Vec::new(),
            paused: None,
        });
        self.network.join(me);
        self.trace.event(self.now, node.0, 1);
        self.trace.line(self.now, || format!("{me:?} begins"));
        self.happened.push(Happened::Began(me));
        self.give(me, Input::Boot);
    }

    /// Carries out the next event, if there is one at or before `until`.
    pub fn step(&mut self, until: Moment) -> bool {
        let Some(Reverse(turn)) = self.queue.peek().copied() else {
            return false;
        };
        let at = turn.at();
        if at > until {
            return false;
        }
        self.queue.pop();
        assert!(at >= self.now, "time runs forward: {at:?} after {:?}", self.now);
        self.now = at;
        self.trace.word(turn.0 as u64);
        let slot = turn.slot();
        let event = self.slots[slot as usize].take().expect("every queued event has its slot");
        self.free.push(slot);
        self.carry_out(event);
        true
    }

    fn carry_out(&mut self, event: Event) {
        match event {
            Event::Traffic(traffic) => self.take_traffic(traffic),
            Event::Timer(to, key, arming) => {
                let timers = self.life_mut(to).map(|life| &mut life.timers);
                let place =
                    timers.as_ref().and_then(|all| all.iter().position(|of| *of == (key, arming)));
                if let Some((timers, place)) = timers.zip(place) {
                    timers.swap_remove(place);
                    self.trace.event(self.now, to.node.0, 3);
                    self.trace.word(u64::from(key.timer.0));
                    self.give(to, Input::Timer(key));
                }
            }
            Event::Disk(to, ticket) => {
                let (now, mut started) = (self.now, Vec::new());
                let disk = &mut self.host_mut(to.node).disk;
                let done = disk.complete(now, ticket, &mut started);
                let breach = disk.take_breach();
                assert!(breach.is_none(), "{to:?} breaks the contract of the disk: {breach:?}");
                self.schedule_disk(to, started);
                if let Some(completion) = done {
                    self.trace.event(self.now, to.node.0, 4);
                    self.trace.word(completion.id.0 << 1 | u64::from(completion.result.is_ok()));
                    self.trace.line(self.now, || {
                        format!("{to:?} disk {:?} is {}", completion.id, verdict(&completion))
                    });
                    self.give(to, Input::Disk(completion));
                }
            }
            Event::Register(consultation) => self.consult(consultation),
            Event::Resume(to) => {
                let backlog = self.life_mut(to).and_then(|life| life.paused.take());
                self.trace.event(self.now, to.node.0, 6);
                backlog.into_iter().flatten().for_each(|input| self.give(to, input));
            }
            Event::Dial(from, node) => self.dial(from, node),
            Event::Wake(number) => self.woken.push(number),
        }
    }

    fn dial(&mut self, from: Peer, node: NodeId) {
        self.trace.event(self.now, from.node.0, 12);
        if self.life_mut(from).is_none() {
            return;
        }
        let host = self.host_mut(from.node);
        let me = peer(from.node, host.lives + 1);
        match self.live(node).filter(|to| self.network.connect(self.now, me, *to)) {
            None => self.give(from, Input::DialFailed(node)),
            Some(to) => {
                self.host_mut(from.node).lives += 1;
                let life = self.life_mut(from).expect("it lives");
                life.addresses.push(me.incarnation);
                self.trace.line(self.now, || format!("{me:?} is connected to {to:?}"));
                self.give(from, Input::Connected { node: to, me });
            }
        }
    }

    fn take_traffic(&mut self, traffic: Traffic) {
        match traffic {
            Traffic::Down { to, peer, session } => {
                if self.network.learn_down(to, peer, session) {
                    self.give_down(to, peer);
                }
            }
            Traffic::Arrive(mut flight) => match self.network.arrive(self.now, &mut flight) {
                Arrival::Lost => {}
                Arrival::Damaged => {
                    let (from, mut out) = (flight.envelope.from.peer(), Vec::new());
                    self.network.reset(self.now, from, flight.to, &mut out);
                    self.schedule_traffic(out);
                }
                Arrival::Deliver { down_first } => {
                    if let Some(peer) = down_first {
                        self.give_down(flight.to, peer);
                    }
                    self.trace_message(flight.to, &flight.envelope);
                    self.give(flight.to, Input::Message(flight.envelope));
                }
            },
        }
    }

    fn give_down(&mut self, to: Peer, peer: Peer) {
        self.trace.event(self.now, to.node.0, 5);
        self.trace.line(self.now, || format!("{to:?} <- PeerDown({peer:?})"));
        self.give(to, Input::PeerDown(peer));
        // The end of a dialled connection is used once.
        if let Some(life) = self.life_mut(to).filter(|life| life.me != to) {
            life.addresses.retain(|of| *of != to.incarnation);
            let mut out = Vec::new();
            self.network.leave(self.now, to, &mut out);
            self.schedule_traffic(out);
        }
    }

    fn trace_message(&mut self, to: Peer, envelope: &Envelope) {
        self.trace.event(self.now, to.node.0, 0x100 | u64::from(envelope.message.number()));
        self.trace.word(envelope.from.node.0);
        self.trace.word(envelope.from.incarnation.0);
        self.trace.word(envelope.epoch.0);
        self.trace.line(self.now, || {
            let text = format!("{:?}", envelope.message);
            let text: String = text.chars().take(400).collect();
            format!("{:?} <- {:?} {} {text}", envelope.to, envelope.from, envelope.epoch)
        });
    }

    fn consult(&mut self, consultation: Consultation) {
        let mut out = Vec::new();
        match consultation {
            Consultation::Reach { from, request, answered } => {
                self.trace.event(self.now, from.node.0, 7);
                self.register.reach(self.now, from, request, answered, &mut out);
            }
            Consultation::Answer { to, answer } => {
                self.trace.event(self.now, to.node.0, 8);
                self.trace.line(self.now, || format!("{to:?} <- register {:?}", answer.outcome));
                self.give(to, Input::Register(answer));
            }
        }
        self.schedule_register(out);
    }

    /// Gives an event to a process, if that life of it is not over, and carries out what it does.
    fn give(&mut self, to: Peer, input: Input) {
        let (now, mut out) = (self.now, core::mem::take(&mut self.effects));
        self.gives += 1;
        let is_check_due = self.gives < CHECKED_ALWAYS || self.gives.is_multiple_of(CHECK_STRIDE);
        let Some(life) = self.life_mut(to) else {
            self.effects = out;
            return;
        };
        if let Some(backlog) = &mut life.paused {
            backlog.push_back(input);
            self.effects = out;
            return;
        }
        let mut step = Step {
            now: life.clock.time(now),
            wall: life.clock.wall(now),
            rng: &mut life.rng,
            me: life.me,
            out: &mut out,
        };
        let me = life.me;
        life.process.step(&mut step, input);
        if is_check_due {
            self.unchecked.push(me.node);
        }
        for effect in out.drain(..) {
            self.effect(me, effect);
        }
        self.effects = out;
    }

    fn effect(&mut self, me: Peer, effect: Effect) {
        // A halt ends the process: what stands behind it in the list never happens.
        let Some(life) = self.life_mut(me) else { return };
        match effect {
            Effect::Send(envelope) => {
                let mut out = core::mem::take(&mut self.traffic);
                self.network.send(self.now, envelope, &mut out);
                self.schedule_traffic(out.drain(..));
                self.traffic = out;
            }
            Effect::Dial(node) => {
                let at = self.now.plus_ns(4 * self.profile.network.latency_ns);
                self.schedule_at(at, Event::Dial(me, node));
            }
            Effect::Arm { key, at } => {
                let moment = life.clock.moment(at);
                // As soon as possible is after everything that waits already.
                let moment = moment.max(self.now.plus_ns(1));
                self.next_arming += 1;
                let arming = self.next_arming;
                let timers = &mut self.life_mut(me).expect("it lives").timers;
                match timers.iter_mut().find(|(armed, _)| *armed == key) {
                    Some((_, last)) => *last = arming,
                    None => timers.push((key, arming)),
                }
                self.schedule_at(moment, Event::Timer(me, key, arming));
            }
            Effect::Disarm(key) => {
                life.timers.retain(|(armed, _)| *armed != key);
            }
            Effect::Disk(mut request) => {
                // Once for all that look at the bytes.
                if let DiskOp::Write { data, .. } = &mut request.op
                    && data.pieces().len() > 1
                {
                    *data = data.contiguous().into();
                }
                self.trace.event(self.now, me.node.0, 9);
                self.trace.line(self.now, || format!("{me:?} disk {}", brief(&request)));
                // Frames are written on the log lane once; what is written again beside it says nothing new.
                if matches!(request.op, DiskOp::Write { file: File::Segment(_), .. })
                    && request.lane == Lane::Log
                {
                    self.happened.push(Happened::Wrote(me.node, request.clone()));
                }
                let (now, mut started) = (self.now, Vec::new());
                self.host_mut(me.node).disk.submit(now, request, &mut started);
                self.schedule_disk(me, started);
            }
            Effect::Register(request) => {
                let mut out = Vec::new();
                self.register.ask(self.now, me, request, &mut out);
                self.schedule_register(out);
            }
            Effect::Halt(halt) => {
                self.trace.line(self.now, || format!("{me:?} halts: {halt:?}"));
                self.happened.push(Happened::Halted(me, halt));
                self.crash(me.node, Crash::Kill);
            }
            Effect::Note(endpoint, note) => {
                self.trace.event(self.now, me.node.0, 10);
                self.trace.value(&note);
                self.trace.line(self.now, || format!("{endpoint:?} notes {note:?}"));
                self.happened.push(Happened::Note(endpoint, note));
            }
            Effect::Mark(mark) => self.happened.push(Happened::Mark(mark)),
            Effect::Observe(observation) => {
                self.trace.event(self.now, me.node.0, 11);
                self.trace.line(self.now, || format!("{me:?} observes {observation:?}"));
                self.happened.push(Happened::Observation(me, observation));
            }
        }
    }

    fn schedule_at(&mut self, at: Moment, event: Event) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("fewer events wait than fit into memory")
        });
        self.slots[slot as usize] = Some(event);
        self.queue.push(Reverse(Turn::new(at, self.schedule.next(), slot)));
    }

    fn schedule_traffic(&mut self, traffic: impl IntoIterator<Item = (Moment, Traffic)>) {
        for (at, traffic) in traffic {
            self.schedule_at(at, Event::Traffic(traffic));
        }
    }

    fn schedule_disk(&mut self, owner: Peer, started: Vec<(Moment, Ticket)>) {
        for (at, ticket) in started {
            self.schedule_at(at, Event::Disk(owner, ticket));
        }
    }

    fn schedule_register(&mut self, consultations: Vec<(Moment, Consultation)>) {
        for (at, consultation) in consultations {
            self.schedule_at(at, Event::Register(consultation));
        }
    }

    fn host(&self, node: NodeId) -> &Host<S::Process> {
        self.hosts.get(node).unwrap_or_else(|| panic!("no host {node}"))
    }

    fn host_mut(&mut self, node: NodeId) -> &mut Host<S::Process> {
        self.hosts.get_mut(node).unwrap_or_else(|| panic!("no host {node}"))
    }

    fn life_mut(&mut self, of: Peer) -> Option<&mut Life<S::Process>> {
        let host = self.hosts.get_mut(of.node)?;
        host.life.as_mut().filter(|life| life.addresses.contains(&of.incarnation))
    }
}

const fn peer(node: NodeId, lives: u64) -> Peer {
    Peer { node, incarnation: Incarnation(lives) }
}

#[cfg(test)]
#[path = "world_tests.rs"]
mod tests;
