//! What goes wrong in a world: crashes, pauses, cuts, and the end of all that.

use std::collections::VecDeque;

use common::message::Message;
use common::wire::Envelope;
use common::{Endpoint, Epoch, NodeId, Peer, Role};

use super::{Event, Happened, Life, World};
use crate::disk::Crash;
use crate::process::{Input, Spawn};

/// How a node is cut off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub enum Isolation {
    /// Nothing reaches it.
    Deaf,
    /// It reaches nobody.
    Mute,
    /// Everything from and to it is held back.
    Clogged,
}

impl<S: Spawn> World<S> {
    /// Ends a node's process, if it has one.
    pub fn crash(&mut self, node: NodeId, crash: Crash) {
        let host = self.host_mut(node);
        let Some(Life { me, addresses, .. }) = host.life.take() else { return };
        host.disk.crash(crash);
        self.trace.event(self.now, node.0, 2);
        self.trace.line(self.now, || format!("{me:?} ends: {crash:?}"));
        self.happened.push(Happened::Crashed(me, crash));
        let mut out = Vec::new();
        for incarnation in addresses {
            self.network.leave(self.now, Peer { node, incarnation }, &mut out);
        }
        self.schedule_traffic(out);
    }

    /// A machine is gone for good, with its disk.
    pub fn lose(&mut self, node: NodeId) {
        assert!(self.lost.is_none(), "{:?} is lost, and now {node}", self.lost);
        self.crash(node, Crash::PowerCut);
        self.lost = Some(node);
    }

    /// Whose machine is gone for good.
    pub const fn lost(&self) -> Option<NodeId> {
        self.lost
    }

    /// Every host that was ever started.
    pub fn hosts(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.hosts.keys()
    }

    /// Somebody outside of the world's network tells a process something, if it lives.
    pub fn tell(&mut self, node: NodeId, from: Endpoint, message: Message) {
        let Some(me) = self.live(node) else { return };
        let (to, epoch) = (me.endpoint(Role::Leader), Epoch::ZERO);
        let envelope = Envelope { from, to, epoch, message };
        self.trace_message(me, &envelope);
        self.give(me, Input::Message(Box::new(envelope)));
    }

    /// Stops a node's process for a while: nothing is lost, everything is late.
    pub fn pause(&mut self, node: NodeId, ns: u64) {
        let Some(me) = self.live(node) else { return };
        let life = self.host_mut(node).life.as_mut().expect("it lives");
        if life.paused.is_none() {
            life.paused = Some(VecDeque::new());
            self.trace.line(self.now, || format!("{me:?} pauses"));
            self.schedule_at(self.now.plus_ns(ns), Event::Resume(me));
        }
    }

    /// Breaks the connection between two nodes.
    pub fn reset(&mut self, a: NodeId, b: NodeId) {
        self.trace.line(self.now, || format!("{a} and {b} lose their connection"));
        let mut out = Vec::new();
        self.network.reset_nodes(self.now, a, b, &mut out);
        self.schedule_traffic(out);
    }

    /// Loses what is sent from one node to the other for a while.
    pub fn cut(&mut self, from: NodeId, to: NodeId, ns: u64) {
        self.trace.line(self.now, || format!("{from} can't reach {to} for {} ms", ns / 1_000_000));
        let mut out = Vec::new();
        self.network.cut(self.now, from, to, self.now.plus_ns(ns), &mut out);
        self.schedule_traffic(out);
    }

    /// Holds back what is sent from one node to the other for a while.
    pub fn clog(&mut self, from: NodeId, to: NodeId, ns: u64) {
        self.trace.line(self.now, || format!("{from} to {to} is clogged {} ms", ns / 1_000_000));
        self.network.clog(from, to, self.now.plus_ns(ns));
    }

    /// Cuts those whose bit in `sides` is set off from those whose bit is not.
    pub fn split(&mut self, sides: u64, ns: u64) {
        let all: Vec<NodeId> = self.hosts.keys().collect();
        let (here, there): (Vec<NodeId>, Vec<NodeId>) =
            all.into_iter().partition(|node| sides >> (node.0 % 64) & 1 == 0);
        for (a, b) in here.iter().flat_map(|a| there.iter().map(|b| (*a, *b))) {
            self.cut(a, b, ns);
            self.cut(b, a, ns);
        }
    }

    /// Cuts a node off from all others for a while, in one direction or both, or holds everything back.
    pub fn isolate(&mut self, node: NodeId, how: Isolation, ns: u64) {
        let others: Vec<NodeId> = self.hosts.keys().filter(|of| *of != node).collect();
        for other in others {
            match how {
                Isolation::Deaf => self.cut(other, node, ns),
                Isolation::Mute => self.cut(node, other, ns),
                Isolation::Clogged => {
                    self.clog(other, node, ns);
                    self.clog(node, other, ns);
                }
            }
        }
    }

    /// Sets a process' wall clock forward or back.
    pub fn jump_wall_clock(&mut self, node: NodeId, us: i64) {
        let Some(me) = self.live(node) else { return };
        self.trace.line(self.now, || format!("{me:?} has its wall clock set by {us} us"));
        self.host_mut(node).life.as_mut().expect("it lives").clock.jump_wall(us);
    }

    /// From the next start on a node that is down finds a copy of another node's disk.
    pub fn lend_disk(&mut self, node: NodeId, other: NodeId) {
        let mut copy = self.disk(other).clone();
        copy.crash(Crash::PowerCut);
        // Sectors that can't be read can't be copied either.
        copy.repair();
        let host = self.host_mut(node);
        assert!(
            host.life.is_none() && host.own_disk.is_none(),
            "{node} must be down, on its own disk"
        );
        host.own_disk = Some(core::mem::replace(&mut host.disk, copy));
    }

    /// Whether a node was ever started.
    pub fn knows(&self, node: NodeId) -> bool {
        self.hosts.get(node).is_some()
    }

    /// Whether a node finds another node's disk.
    pub fn is_on_foreign_disk(&self, node: NodeId) -> bool {
        self.host(node).own_disk.is_some()
    }

    /// A node gets its own disk back.
    pub fn return_disk(&mut self, node: NodeId) {
        let host = self.host_mut(node);
        assert!(host.life.is_none(), "{node} must be down");
        host.disk = host.own_disk.take().expect("it was lent another");
    }

    /// An operator puts back what was harmed, wherever the node's own disk is.
    pub fn repair(&mut self, node: NodeId) {
        let host = self.host_mut(node);
        host.disk.repair();
        if let Some(own) = &mut host.own_disk {
            own.repair();
        }
    }

    /// Ends all faults of network, disks and register.
    pub fn calm(&mut self) {
        let own = self.hosts.values_mut().filter_map(|host| host.own_disk.as_mut());
        own.for_each(|disk| disk.calm());
        self.network.calm(self.now);
        self.register.calm(self.now);
        self.hosts.values_mut().for_each(|host| host.disk.calm());
    }
}
