//! What the world hosts: a process, seen as events in and effects out.
//!
//! A node and a client machine are both processes. They know their own clocks, their own randomness and
//! nothing else; everything that they do comes out as an [`Effect`].

use common::disk::{DiskCompletion, DiskRequest};
use common::machine::Halt;
use common::register::{RegisterAnswer, RegisterRequest};
use common::wire::Envelope;
use common::{Endpoint, Epoch, Mark, NodeId, Note, Peer, Prng, Role, Time, Timer, WallTime};

use crate::observe::Observation;

/// A timer of one machine of a process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TimerKey {
    /// The machine.
    pub role: Role,
    /// The epoch that the machine lives in; ZERO for machines that outlive epochs.
    pub epoch: Epoch,
    /// Its timer.
    pub timer: Timer,
}

/// What can happen to a process.
#[derive(Clone, Debug)]
pub enum Input {
    /// It begins.
    Boot,
    /// A message came.
    Message(Box<Envelope>),
    /// The connection to a peer is gone.
    PeerDown(Peer),
    /// A timer has run out.
    Timer(TimerKey),
    /// The disk has answered.
    Disk(DiskCompletion),
    /// The register has answered.
    Register(RegisterAnswer),
    /// A connection that was dialled is there.
    Connected {
        /// To whom.
        node: Peer,
        /// Who the process is on this connection.
        me: Peer,
    },
    /// A node could not be reached.
    DialFailed(NodeId),
}

/// What a process can do.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send a message to another process.
    Send(Box<Envelope>),
    /// Connect to a node, as a client.
    Dial(NodeId),
    /// Fire a timer; arming again moves it.
    Arm {
        /// The timer.
        key: TimerKey,
        /// When, on the process' own clock.
        at: Time,
    },
    /// Forget a timer.
    Disarm(TimerKey),
    /// Ask the process' disk.
    Disk(DiskRequest),
    /// Ask the register.
    Register(RegisterRequest),
    /// End the process.
    Halt(Halt),
    /// A machine tells what happened.
    Note(Endpoint, Note),
    /// A rare branch was taken.
    Mark(Mark),
    /// A client tells what it did or saw.
    Observe(Observation),
}

/// What a process may look at in one step, and where its effects go.
#[derive(Debug)]
pub struct Step<'a> {
    /// Its monotonic clock.
    pub now: Time,
    /// Its wall clock.
    pub wall: WallTime,
    /// Its randomness.
    pub rng: &'a mut Prng,
    /// Who it is.
    pub me: Peer,
    /// Where its effects go, in order.
    pub out: &'a mut Vec<Effect>,
}

/// A process under simulation.
pub trait Process {
    /// Takes one event.
    fn step(&mut self, step: &mut Step<'_>, input: Input);

    /// Checks the invariants of its state; stops the run when one is broken. Called after most steps, once
    /// the oracles have judged them.
    fn check(&self) {}

    /// One line about its state, for traces.
    fn line(&self) -> String {
        String::new()
    }
}

/// Makes processes: a new one for every life of a node.
pub trait Spawn {
    /// What it makes.
    type Process: Process;

    /// A new life of a node.
    fn spawn(&mut self, me: Peer, rng: &mut Prng) -> Self::Process;
}
