//! Routing: from envelopes and timers to roles, and from their outputs outward.

use common::message::{Message, Refused};
use common::wire::Envelope;
use common::{
    Code, Cx, Endpoint, Epoch, Event, Incarnation, Output, Peer, Refusal, RequestId, Role, Timer,
};
use logserver::LogServer;
use sequencer::leader::Leader;

use crate::{CONTINUE, LOCAL_MESSAGES_MAX, Node, NodeOutput, Surroundings, TimerKey};

impl Node {
    pub(crate) fn drain_local(&mut self, s: &mut Surroundings<'_>) {
        for _ in 0..LOCAL_MESSAGES_MAX {
            let Some(envelope) = self.local.pop_front() else { return };
            self.route(s, envelope);
        }
        if !self.local.is_empty() {
            let key = TimerKey { role: Role::Node, epoch: Epoch::ZERO, timer: CONTINUE };
            s.out.push(NodeOutput::Arm { key, at: s.now });
        }
    }

    pub(crate) fn route(&mut self, s: &mut Surroundings<'_>, envelope: Envelope) {
        let to = envelope.to;
        assert_eq!(to.node, self.peer.node, "{to:?} is not on {}", self.peer.node);
        if to.incarnation != Incarnation::ZERO && to.incarnation != self.peer.incarnation {
            return;
        }
        let Envelope { from, epoch, message, .. } = envelope;
        // The roles trust each other; a client's mistake must not lock a log or end an epoch.
        if from.role == Role::Client && !is_for_clients(&message) {
            let why = (epoch, Code::Malformed);
            return self.refuse(s, to.role, from, &message, why, "no message of a client");
        }
        match to.role {
            Role::Node => self.handle_node_message(s, from, epoch, message),
            Role::LogServer => {
                let event = Event::Message { from, epoch, message };
                self.with_log_server(s, |log_server, cx| log_server.step(cx, event));
            }
            Role::Leader if self.leader.is_some() => {
                let event = Event::Message { from, epoch, message };
                self.with_leader(s, |leader, cx| leader.step(cx, event));
            }
            Role::Sequencer | Role::Proxy(_) | Role::Resolver(_) => {
                self.route_to_epoch(s, to.role, from, epoch, message);
            }
            Role::Leader | Role::Client => {
                let why = (epoch, Code::NotHere);
                self.refuse(s, to.role, from, &message, why, "no such role here");
            }
        }
    }

    /// A role of an epoch hears only its own epoch.
    fn route_to_epoch(
        &mut self,
        s: &mut Surroundings<'_>,
        role: Role,
        from: Endpoint,
        epoch: Epoch,
        message: Message,
    ) {
        let here = self.epoch();
        let is_from_client = from.role == Role::Client;
        // A client that names no epoch has no request there that an older epoch could have decided.
        if epoch != here && !(is_from_client && epoch == Epoch::ZERO) {
            if epoch < here || is_from_client {
                let detail = format!("this is {here}, not {epoch}");
                self.refuse(s, role, from, &message, (epoch, Code::WrongEpoch), &detail);
            }
            return;
        }
        if self.hosts(role) {
            self.with_epoch_role(s, role, Event::Message { from, epoch, message });
        } else {
            self.refuse(s, role, from, &message, (epoch, Code::NotHere), "no such role here");
        }
    }

    /// Whether a role of the present epoch lives here.
    fn hosts(&self, role: Role) -> bool {
        self.hosted.as_ref().is_some_and(|hosted| match role {
            Role::Sequencer => hosted.sequencer.is_some(),
            Role::Proxy(index) => hosted.proxies.contains_key(&index),
            Role::Resolver(index) => hosted.resolvers.contains_key(&index),
            Role::Node | Role::Leader | Role::LogServer | Role::Client => false,
        })
    }

    /// Refuses a message of `epoch`, and speaks for that epoch: to a sender that has gone on it says nothing.
    pub(crate) fn refuse(
        &mut self,
        s: &mut Surroundings<'_>,
        by: Role,
        to: Endpoint,
        message: &Message,
        (epoch, code): (Epoch, Code),
        detail: &str,
    ) {
        // A refusal of a refusal would go on for ever.
        if matches!(message, Message::Refused(_)) {
            return;
        }
        let refusal = Refusal::new(code, format!("{}: {detail}", message.name()));
        let refused = Refused { request: request_of(message), refusal };
        self.send(s, self.peer.endpoint(by), to, epoch, refused.into());
    }

    pub(crate) fn send(
        &mut self,
        s: &mut Surroundings<'_>,
        from: Endpoint,
        to: Endpoint,
        epoch: Epoch,
        message: Message,
    ) {
        let envelope = Envelope { from, to, epoch, message };
        if to.node == self.peer.node {
            self.local.push_back(envelope);
        } else {
            s.out.push(NodeOutput::Send(envelope));
        }
    }

    pub(crate) fn handle_timer(&mut self, s: &mut Surroundings<'_>, key: TimerKey) {
        let event = Event::Timer(key.timer);
        match key.role {
            // The local messages go on behind every event.
            Role::Node | Role::Client => {}
            Role::LogServer => self.with_log_server(s, |log_server, cx| log_server.step(cx, event)),
            Role::Leader => self.with_leader(s, |leader, cx| leader.step(cx, event)),
            role => {
                // A timer of an epoch that has ended here means nothing any more.
                if self.hosted.as_ref().is_some_and(|hosted| hosted.plan.epoch == key.epoch) {
                    self.with_epoch_role(s, role, event);
                }
            }
        }
    }

    pub(crate) fn handle_peer_down(&mut self, s: &mut Surroundings<'_>, peer: Peer) {
        self.watchers.retain(|watcher| watcher.peer() != peer);
        let event = || Event::PeerDown(peer);
        self.with_log_server(s, |log_server, cx| log_server.step(cx, event()));
        self.with_leader(s, |leader, cx| leader.step(cx, event()));
        for role in self.epoch_roles() {
            self.with_epoch_role(s, role, event());
        }
    }

    pub(crate) fn epoch_roles(&self) -> Vec<Role> {
        let Some(hosted) = &self.hosted else { return Vec::new() };
        let sequencer = hosted.sequencer.iter().map(|_| Role::Sequencer);
        let proxies = hosted.proxies.keys().map(|index| Role::Proxy(*index));
        let resolvers = hosted.resolvers.keys().map(|index| Role::Resolver(*index));
        sequencer.chain(proxies).chain(resolvers).collect()
    }

    pub(crate) fn with_log_server(
        &mut self,
        s: &mut Surroundings<'_>,
        run: impl FnOnce(&mut LogServer, &mut Cx<'_>),
    ) {
        let mut out = core::mem::take(&mut self.outputs);
        run(&mut self.log_server, &mut role_cx(s, self.peer, Role::LogServer, &mut out));
        self.carry_out(s, Role::LogServer, Epoch::ZERO, out);
    }

    pub(crate) fn with_leader(
        &mut self,
        s: &mut Surroundings<'_>,
        run: impl FnOnce(&mut Leader, &mut Cx<'_>),
    ) {
        let Some(leader) = &mut self.leader else { return };
        let mut out = core::mem::take(&mut self.outputs);
        run(leader, &mut role_cx(s, self.peer, Role::Leader, &mut out));
        self.carry_out(s, Role::Leader, Epoch::ZERO, out);
    }

    /// Steps a role of the present epoch, if it lives here.
    pub(crate) fn with_epoch_role(&mut self, s: &mut Surroundings<'_>, role: Role, event: Event) {
        let Some(hosted) = &mut self.hosted else { return };
        let mut out = core::mem::take(&mut self.outputs);
        let mut cx = role_cx(s, self.peer, role, &mut out);
        let epoch = hosted.plan.epoch;
        match role {
            Role::Sequencer => {
                if let Some(sequencer) = &mut hosted.sequencer {
                    sequencer.step(&mut cx, event);
                }
            }
            Role::Proxy(index) => {
                if let Some(proxy) = hosted.proxies.get_mut(&index) {
                    proxy.step(&mut cx, event);
                }
            }
            Role::Resolver(index) => {
                if let Some(resolver) = hosted.resolvers.get_mut(&index) {
                    resolver.step(&mut cx, event);
                }
            }
            Role::Node | Role::Leader | Role::LogServer | Role::Client => {}
        }
        self.carry_out(s, role, epoch, out);
    }

    pub(crate) fn carry_out(
        &mut self,
        s: &mut Surroundings<'_>,
        role: Role,
        key_epoch: Epoch,
        mut out: Vec<Output>,
    ) {
        let me = self.peer.endpoint(role);
        let key = |timer: Timer| TimerKey { role, epoch: key_epoch, timer };
        for output in out.drain(..) {
            match output {
                Output::Send { to, epoch, message } => self.send(s, me, to, epoch, message),
                Output::Arm { timer, at } => s.out.push(NodeOutput::Arm { key: key(timer), at }),
                Output::Disarm(timer) => s.out.push(NodeOutput::Disarm(key(timer))),
                Output::Disk(request) => s.out.push(NodeOutput::Disk(request)),
                Output::Register(request) => s.out.push(NodeOutput::Register(request)),
                Output::Halt(halt) => s.out.push(NodeOutput::Halt(halt)),
                Output::Note(note) => s.out.push(NodeOutput::Note(me, note)),
                Output::Mark(mark) => s.out.push(NodeOutput::Mark(mark)),
            }
        }
        self.outputs = out;
    }
}

pub(crate) const fn role_cx<'a>(
    s: &'a mut Surroundings<'_>,
    peer: Peer,
    role: Role,
    out: &'a mut Vec<Output>,
) -> Cx<'a> {
    Cx { now: s.now, wall: s.wall, knobs: s.knobs, rng: s.rng, me: peer.endpoint(role), out }
}

/// Whether a client may say it.
const fn is_for_clients(message: &Message) -> bool {
    matches!(
        message,
        Message::CommitRequest(_)
            | Message::ReadVersionRequest(_)
            | Message::Pull(_)
            | Message::Trim(_)
            | Message::Describe(_)
            | Message::FindId(_)
            | Message::FindCluster(_)
            | Message::Status(_)
            | Message::ChangeMember(_)
            | Message::Refused(_)
    )
}

/// The request that a refusal of this message answers; 0 when it is no request of a client.
const fn request_of(message: &Message) -> RequestId {
    match message {
        Message::CommitRequest(request) => request.request,
        Message::ReadVersionRequest(request) => request.request,
        Message::Pull(request) => request.request,
        Message::Trim(request) => request.request,
        Message::Describe(request) => request.request,
        Message::FindId(request) => request.request,
        Message::FindCluster(request) => request.request,
        Message::Status(request) => request.request,
        Message::ChangeMember(request) => request.request,
        _ => RequestId::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use common::message::{Announce, Lock};
    use common::{Knobs, NodeId, Prng, Time, WallTime};

    use super::*;
    use crate::NodeEvent;

    #[test]
    fn what_only_roles_may_say_is_refused_to_clients_in_their_epoch() {
        let me = Peer { node: NodeId(1), incarnation: Incarnation(1) };
        let (mut node, mut out, mut rng) = (Node::new(me, None), Vec::new(), Prng::new(1));
        let knobs = Knobs::small();
        let (now, wall) = (Time(1), WallTime(1));
        let client = Peer { node: NodeId(9), incarnation: Incarnation(1) }.endpoint(Role::Client);
        let announce = Announce { known_committed: common::Version(7) };
        for message in [Message::from(Lock { generation: Epoch(1) }), announce.into()] {
            let to = me.endpoint(Role::LogServer);
            let envelope = Envelope { from: client, to, epoch: Epoch(99), message };
            let mut s = Surroundings { now, wall, knobs: &knobs, rng: &mut rng, out: &mut out };
            node.step(&mut s, NodeEvent::Message(envelope));
        }
        let refused: Vec<_> = out
            .iter()
            .map(|output| match output {
                NodeOutput::Send(Envelope {
                    to, epoch, message: Message::Refused(why), ..
                }) => (*to, *epoch, why.refusal.code()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(refused, [(client, Epoch(99), Code::Malformed); 2]);
    }
}
