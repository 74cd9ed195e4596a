//! The processes of a run: real nodes and real client machines behind one face.

use common::{Knobs, Peer, Prng};
use node::{Node, NodeEvent, NodeOutput, Surroundings};
use sequencer::leader::Topology;

use crate::process::{Effect, Input, Process, Spawn, Step, TimerKey};
use crate::workload::{Actor, FIRST_CLIENT, SharedHandle};

/// A process of a run.
#[derive(Debug)]
pub enum Member {
    /// A node.
    Node(NodeProcess),
    /// A client.
    Client(Actor),
}

/// A node as a process.
#[derive(Debug)]
pub struct NodeProcess {
    node: Node,
    knobs: Knobs,
    out: Vec<NodeOutput>,
}

/// Makes the processes of a run.
#[derive(Debug)]
pub struct Cluster {
    topology: Topology,
    knobs: Knobs,
    writers: u64,
    shared: SharedHandle,
}

impl Cluster {
    /// A cluster with static roles, but for the leader's: any candidate may have that.
    #[must_use]
    pub const fn new(topology: Topology, knobs: Knobs, writers: u64, shared: SharedHandle) -> Self {
        Self { topology, knobs, writers, shared }
    }
}

impl Spawn for Cluster {
    type Process = Member;

    fn spawn(&mut self, me: Peer, rng: &mut Prng) -> Member {
        if me.node.0 >= FIRST_CLIENT {
            return Member::Client(Actor::new(me, &self.shared, self.writers, rng));
        }
        let may_lead = self.topology.candidates.contains(&me.node);
        let node = Node::new(me, may_lead.then(|| self.topology.clone()));
        Member::Node(NodeProcess { node, knobs: self.knobs.clone(), out: Vec::new() })
    }
}

impl Process for Member {
    fn step(&mut self, step: &mut Step<'_>, input: Input) {
        match self {
            Self::Node(node) => node.step(step, input),
            Self::Client(client) => client.step(step, input),
        }
    }

    fn check(&self) {
        match self {
            Self::Node(node) => node.check(),
            Self::Client(client) => client.check(),
        }
    }

    fn line(&self) -> String {
        match self {
            Self::Node(node) => node.line(),
            Self::Client(client) => client.line(),
        }
    }
}

impl Process for NodeProcess {
    fn step(&mut self, step: &mut Step<'_>, input: Input) {
        let Self { node, knobs, out } = self;
        let mut s = Surroundings { now: step.now, wall: step.wall, knobs, rng: step.rng, out };
        match input {
            Input::Boot => node.start(&mut s),
            Input::Message(envelope) => node.step(&mut s, NodeEvent::Message(*envelope)),
            Input::PeerDown(peer) => node.step(&mut s, NodeEvent::PeerDown(peer)),
            Input::Timer(TimerKey { role, epoch, timer }) => {
                node.step(&mut s, NodeEvent::Timer(node::TimerKey { role, epoch, timer }));
            }
            Input::Disk(completion) => node.step(&mut s, NodeEvent::Disk(completion)),
            Input::Register(answer) => node.step(&mut s, NodeEvent::Register(answer)),
            Input::Connected { .. } | Input::DialFailed(_) => panic!("a node dials nobody"),
        }
        step.out.extend(self.out.drain(..).map(effect));
    }

    fn check(&self) {
        self.node.check();
    }

    fn line(&self) -> String {
        format!("node {:?}: serves {:?}", self.node.peer(), self.node.serving_epoch())
    }
}

fn effect(output: NodeOutput) -> Effect {
    match output {
        NodeOutput::Send(envelope) => Effect::Send(Box::new(envelope)),
        NodeOutput::Arm { key, at } => Effect::Arm { key: own(key), at },
        NodeOutput::Disarm(key) => Effect::Disarm(own(key)),
        NodeOutput::Disk(request) => Effect::Disk(request),
        NodeOutput::Register(request) => Effect::Register(request),
        NodeOutput::Halt(halt) => Effect::Halt(halt),
        NodeOutput::Note(from, note) => Effect::Note(from, note),
        NodeOutput::Mark(mark) => Effect::Mark(mark),
    }
}

const fn own(key: node::TimerKey) -> TimerKey {
    TimerKey { role: key.role, epoch: key.epoch, timer: key.timer }
}
