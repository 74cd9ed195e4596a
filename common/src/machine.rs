//! The seam between a machine and its shell: events in, outputs out, nothing else.
//!
//! ```text
//!            Event                         Output
//!  message, timer, disk --> step(cx, ..) --> send, arm, disk, register, halt, note, mark
//!  register, peer down         |
//!                              `-- cx: now, wall, knobs, rng
//! ```
//!
//! # Contract
//! 1. The shell carries out the outputs of one step in their order, and never reorders or merges them.
//! 2. A message may be lost, delayed, doubled or reordered; a machine relies on none of that not happening.
//! 3. An effect that must be durable before a message is sent waits for its completion inside the machine.
//! 4. Timers: arming a key again moves it. An event of a timer that was disarmed meanwhile never comes.
//! 5. Events of a peer's earlier incarnation never come once a later one has been seen.

use crate::disk::{DiskCompletion, DiskRequest};
use crate::mark::Mark;
use crate::message::Message;
use crate::note::Note;
use crate::register::{RegisterAnswer, RegisterRequest};
use crate::{Endpoint, Epoch, Knobs, Peer, Plant, Prng, Time, WallTime};

/// A timer of a machine; each machine numbers its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Timer(pub u32);

/// What can happen to a machine.
#[derive(Clone, Debug)]
pub enum Event {
    /// A message came.
    Message {
        /// Who sent it; answers go there.
        from: Endpoint,
        /// The epoch that the sender spoke for; [`Epoch::ZERO`] for clients.
        epoch: Epoch,
        /// What it says.
        message: Message,
    },
    /// A timer has run out.
    Timer(Timer),
    /// The disk has answered.
    Disk(DiskCompletion),
    /// The register has answered.
    Register(RegisterAnswer),
    /// The connection to a peer is gone; any suffix of what was sent may be lost.
    PeerDown(Peer),
}

/// Why a machine ends its process' part in the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Halt {
    /// Stable word for operators: `fsync_failed`, `corrupt_log`, ...
    pub reason: &'static str,
    /// For people.
    pub detail: String,
}

/// What a machine can ask for.
#[derive(Clone, Debug)]
pub enum Output {
    /// Deliver `message` to `to`.
    Send {
        /// The receiver.
        to: Endpoint,
        /// The epoch that the sender speaks for.
        epoch: Epoch,
        /// What to say.
        message: Message,
    },
    /// Fire `timer` at `at`, or as soon as possible when that is past: after all events that already wait.
    Arm {
        /// The key.
        timer: Timer,
        /// When.
        at: Time,
    },
    /// Forget `timer`.
    Disarm(Timer),
    /// Ask the disk.
    Disk(DiskRequest),
    /// Ask the register.
    Register(RegisterRequest),
    /// Stop: nothing that this process says from here on could be trusted.
    Halt(Halt),
    /// Something happened that oracles, metrics and traces want to know.
    Note(Note),
    /// A rare branch was taken.
    Mark(Mark),
}

/// What a machine may look at, and where its outputs go.
#[derive(Debug)]
pub struct Cx<'a> {
    /// This process' monotonic clock.
    pub now: Time,
    /// This process' wall clock.
    pub wall: WallTime,
    /// Limits and intervals.
    pub knobs: &'a Knobs,
    /// This process' randomness.
    pub rng: &'a mut Prng,
    /// The machine's own address.
    pub me: Endpoint,
    /// Where outputs go, in order.
    pub out: &'a mut Vec<Output>,
}

impl Cx<'_> {
    /// Sends a message that speaks for `epoch`.
    pub fn send(&mut self, to: Endpoint, epoch: Epoch, message: impl Into<Message>) {
        self.out.push(Output::Send { to, epoch, message: message.into() });
    }

    /// Fires `timer` at `at`.
    pub fn arm(&mut self, timer: Timer, at: Time) {
        self.out.push(Output::Arm { timer, at });
    }

    /// Fires `timer` after `delay`.
    pub fn arm_after(&mut self, timer: Timer, delay: core::time::Duration) {
        self.arm(timer, self.now.plus(delay));
    }

    /// Forgets `timer`.
    pub fn disarm(&mut self, timer: Timer) {
        self.out.push(Output::Disarm(timer));
    }

    /// Asks the disk.
    pub fn disk(&mut self, request: DiskRequest) {
        self.out.push(Output::Disk(request));
    }

    /// Asks the register.
    pub fn register(&mut self, request: RegisterRequest) {
        self.out.push(Output::Register(request));
    }

    /// Stops the process' part in the cluster.
    pub fn halt(&mut self, reason: &'static str, detail: impl Into<String>) {
        self.out.push(Output::Halt(Halt { reason, detail: detail.into() }));
    }

    /// Tells what happened.
    pub fn note(&mut self, note: Note) {
        self.out.push(Output::Note(note));
    }

    /// Whether a planted bug is on: never, but in the simulator.
    #[must_use]
    pub const fn planted(&self, plant: Plant) -> bool {
        cfg!(feature = "plants") && self.knobs.plants.has(plant)
    }

    /// Says that a rare branch was taken.
    pub fn mark(&mut self, mark: Mark) {
        self.out.push(Output::Mark(mark));
    }
}
