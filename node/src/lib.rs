//! One process' set of roles in one event loop.
//!
//! ```text
//!  shell or simulator                       Node
//!    NodeEvent ------> route --> Leader  Sequencer  Proxy*  Resolver*  LogServer  (and the node itself)
//!    NodeOutput <----- route <-----'---------'--------'--------'-----------'
//!                        `--- a message for a role of this node is moved, never encoded
//! ```
//!
//! A node is a machine like its roles: no clock, no I/O, no threads. The server and the simulator run the
//! very same one.
//!
//! # Rules of routing
//! - A message for another incarnation of this node is dropped.
//! - Sequencer, proxies and resolvers hear only messages of their own epoch. An older epoch is refused with
//!   `wrong_epoch`; a newer one is dropped, for its sender asks again.
//! - The log server outlives epochs and sees all messages; it refuses by itself.
//! - Clients learn of an epoch's proxies only after its generation is in the register (I10).
#![forbid(unsafe_code)]

mod hosting;
mod routing;
mod status;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::disk::{DiskCompletion, DiskRequest};
use common::message::{EpochPlan, NodeAddress};
use common::register::{RegisterAnswer, RegisterRequest};
use common::wire::Envelope;
use common::{
    Endpoint, Epoch, Halt, Knobs, Mark, Note, Output, Peer, Prng, Role, Time, Timer, WallTime,
};
use logserver::LogServer;
use proxy::Proxy;
use resolver::role::Resolver;
use sequencer::leader::{Leader, Topology};
use sequencer::versions::Sequencer;

/// A timer of one role of one epoch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TimerKey {
    /// Whose.
    pub role: Role,
    /// In which epoch; ZERO for roles that outlive epochs.
    pub epoch: Epoch,
    /// Which.
    pub timer: Timer,
}

/// What can happen to a node.
#[derive(Clone, Debug)]
pub enum NodeEvent {
    /// A message came from another process.
    Message(Envelope),
    /// A timer has run out.
    Timer(TimerKey),
    /// The log disk has answered.
    Disk(DiskCompletion),
    /// The register has answered.
    Register(RegisterAnswer),
    /// The connection to a peer is gone.
    PeerDown(Peer),
}

/// What a node can ask for.
#[derive(Clone, Debug)]
pub enum NodeOutput {
    /// Deliver a message to another process.
    Send(Envelope),
    /// Fire a timer.
    Arm {
        /// The key; arming it again moves it.
        key: TimerKey,
        /// When.
        at: Time,
    },
    /// Forget a timer.
    Disarm(TimerKey),
    /// Ask the log disk.
    Disk(DiskRequest),
    /// Ask the register.
    Register(RegisterRequest),
    /// End the process.
    Halt(Halt),
    /// Something happened in a role.
    Note(Endpoint, Note),
    /// A rare branch was taken.
    Mark(Mark),
}

/// What a node may look at, and where its outputs go.
#[derive(Debug)]
pub struct Surroundings<'a> {
    /// The process' monotonic clock.
    pub now: Time,
    /// The process' wall clock.
    pub wall: WallTime,
    /// Limits and intervals.
    pub knobs: &'a Knobs,
    /// The process' randomness.
    pub rng: &'a mut Prng,
    /// Where outputs go, in order.
    pub out: &'a mut Vec<NodeOutput>,
}

/// Messages between the node's own roles that one step handles at most; the rest goes on in a step of its
/// own, so that inputs and timers get their turn.
const LOCAL_MESSAGES_MAX: usize = 1024;
/// The node's own timer: go on with the local messages.
const CONTINUE: Timer = Timer(0);

/// The roles of an epoch that live here.
#[derive(Clone, Debug)]
struct Hosted {
    plan: EpochPlan,
    sequencer: Option<Sequencer>,
    proxies: BTreeMap<u8, Proxy>,
    resolvers: BTreeMap<u8, Resolver>,
    /// The generation is in the register.
    is_serving: bool,
}

/// One process' part in the cluster.
#[derive(Clone, Debug)]
pub struct Node {
    peer: Peer,
    log_server: LogServer,
    leader: Option<Leader>,
    hosted: Option<Hosted>,
    local: VecDeque<Envelope>,
    /// Empty between steps: the space that roles write their outputs to.
    outputs: Vec<Output>,
    /// Clients that asked who serves, and are told when that changes.
    watchers: BTreeSet<Endpoint>,
    /// Where clients reach the cluster's nodes.
    addresses: Vec<NodeAddress>,
    /// No leader shall count on this node any more.
    is_stopping: bool,
    started: Time,
}

impl Node {
    /// A node; one that is given a topology may lead.
    #[must_use]
    pub fn new(peer: Peer, topology: Option<Topology>) -> Self {
        Self {
            peer,
            log_server: LogServer::new(peer.node),
            leader: topology.map(Leader::new),
            hosted: None,
            local: VecDeque::new(),
            outputs: Vec::new(),
            watchers: BTreeSet::new(),
            addresses: Vec::new(),
            is_stopping: false,
            started: Time::ZERO,
        }
    }

    /// The same, that tells clients where the cluster's nodes are.
    #[must_use]
    pub fn at(self, addresses: Vec<NodeAddress>) -> Self {
        Self { addresses, ..self }
    }

    /// Who this is.
    #[must_use]
    pub const fn peer(&self) -> Peer {
        self.peer
    }

    /// Opens the log and begins to lead. Called once, first.
    pub fn start(&mut self, s: &mut Surroundings<'_>) {
        self.started = s.now;
        self.with_log_server(s, |log_server, cx| log_server.open(cx));
        self.with_leader(s, |leader, cx| leader.start(cx));
        self.drain_local(s);
    }

    /// Takes one event, and the messages between roles that follow from it.
    pub fn step(&mut self, s: &mut Surroundings<'_>, event: NodeEvent) {
        match event {
            NodeEvent::Message(envelope) => self.route(s, envelope),
            NodeEvent::Timer(key) => self.handle_timer(s, key),
            NodeEvent::Disk(completion) => {
                let event = common::Event::Disk(completion);
                self.with_log_server(s, |log_server, cx| log_server.step(cx, event));
            }
            NodeEvent::Register(answer) => {
                let event = common::Event::Register(answer);
                self.with_leader(s, |leader, cx| leader.step(cx, event));
            }
            NodeEvent::PeerDown(peer) => self.handle_peer_down(s, peer),
        }
        self.drain_local(s);
    }

    /// Ends in good order: what was accepted becomes durable and the log is marked as cleanly closed. The end
    /// shows as a halt for the reason `stopped`.
    pub fn shut_down(&mut self, s: &mut Surroundings<'_>) {
        self.is_stopping = true;
        self.with_leader(s, |leader, cx| leader.hand_over(cx));
        self.with_log_server(s, |log_server, cx| log_server.shut_down(cx));
        self.drain_local(s);
    }

    /// The log server, for oracles and status.
    #[must_use]
    pub const fn log_server(&self) -> &LogServer {
        &self.log_server
    }

    /// The epoch whose roles live here, or that this node names to clients; ZERO before the first.
    fn epoch(&self) -> Epoch {
        self.hosted.as_ref().map_or(Epoch::ZERO, |hosted| hosted.plan.epoch)
    }

    /// The epoch that serves here, as clients may know it.
    #[must_use]
    pub fn serving_epoch(&self) -> Option<Epoch> {
        self.hosted.as_ref().filter(|hosted| hosted.is_serving).map(|hosted| hosted.plan.epoch)
    }

    /// The invariants of every role.
    pub fn check(&self) {
        self.log_server.check();
        if let Some(leader) = &self.leader {
            leader.check();
        }
        if let Some(hosted) = &self.hosted {
            hosted.plan.check();
            hosted.sequencer.iter().for_each(Sequencer::check);
            hosted.proxies.values().for_each(Proxy::check);
            hosted.resolvers.values().for_each(Resolver::check);
        }
    }
}
