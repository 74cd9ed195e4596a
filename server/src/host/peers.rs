//! Connections and who is at their other end.
//!
//! ```text
//! accepted --Hello both ways-------> a client --frames--> node
//!     |----NodeHello, believed-----> a node ----frames--> node      see `mesh`
//!     `- frames before the hello, a hello that lies, a protocol that differs: closed
//! ```
//!
//! What a peer does not take breaks its connection: the queue of a lane has a limit of frames and one of
//! bytes, a client's the transport's, a node's [`Mesh::link_queue_bytes_max`](super::mesh::Mesh). The loop
//! never waits for one.

use std::collections::BTreeMap;

use bytes::Bytes;
use common::message::{Hello, MessageLane, Refused};
use common::quic::{CloseCode, CloseReason, Connection, ConnectionId, Event, Lane, SendError};
use common::wire::{self, Envelope, PROTOCOL, PROTOCOL_MIN, WireError};
use common::{Endpoint, Epoch, Incarnation, Message, NodeId, Peer, RequestId, Role, Version};
use node::NodeEvent;

use super::Host;

/// An open connection.
pub(super) struct Known {
    pub(super) connection: Connection,
    /// Whom this node has dialed.
    pub(super) dialed: Option<NodeId>,
    /// Only so that it dials back.
    pub(super) is_knock: bool,
    /// Who is there, once it has said so.
    pub(super) peer: Option<Peer>,
    pub(super) is_client: bool,
    /// Frames that wait until it has.
    pub(super) held: Vec<Bytes>,
    /// The newest version that each proxy of this node has pushed on it.
    pub(super) pushed: BTreeMap<Role, (Epoch, Version)>,
}

impl Known {
    pub(super) const fn new(connection: Connection) -> Self {
        Self {
            connection,
            dialed: None,
            is_knock: false,
            peer: None,
            is_client: true,
            held: Vec::new(),
            pushed: BTreeMap::new(),
        }
    }

    /// Whether this is pushed a second time while the first may still wait in the queue. The connection keeps
    /// the order and loses nothing, so that the copy would only make a slow link slower.
    fn is_pushed_in_vain(&mut self, envelope: &Envelope) -> bool {
        let Message::Push(push) = &envelope.message else { return false };
        let new = (envelope.epoch, push.version);
        let newest = self.pushed.get(&envelope.from.role).copied();
        let is_again = newest.is_some_and(|newest| newest >= new)
            && self.connection.queued_bytes(Lane::Commit) > 0;
        self.pushed.insert(envelope.from.role, newest.map_or(new, |newest| newest.max(new)));
        is_again
    }
}

/// Every open connection.
pub(super) struct Peers {
    pub(super) me: Peer,
    connections: BTreeMap<ConnectionId, Known>,
    by_peer: BTreeMap<Peer, ConnectionId>,
}

impl Peers {
    pub(super) const fn new(me: Peer) -> Self {
        Self { me, connections: BTreeMap::new(), by_peer: BTreeMap::new() }
    }

    pub(super) fn count(&self) -> usize {
        self.by_peer.len()
    }

    /// Connections of nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &Connection> {
        let named = self.connections.values().filter(|known| known.peer.is_some());
        named.filter(|known| !known.is_client).map(|known| &known.connection)
    }

    pub(super) fn insert(&mut self, known: Known) {
        let twin = self.connections.insert(known.connection.id(), known);
        assert!(twin.is_none(), "connections have names of their own");
    }

    pub(super) fn get(&self, id: ConnectionId) -> Option<&Known> {
        self.connections.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Known> {
        self.connections.get_mut(&id)
    }

    /// A connection has turned out to lead to this peer; returns the frames that waited for that.
    pub(super) fn name(&mut self, id: ConnectionId, peer: Peer, is_client: bool) -> Vec<Bytes> {
        let known = self.connections.get_mut(&id).expect("the caller found it");
        assert!(known.peer.is_none(), "{id} led to {:?}, now to {peer:?}", known.peer);
        (known.peer, known.is_client) = (Some(peer), is_client);
        let twin = self.by_peer.insert(peer, id);
        assert!(twin.is_none(), "{peer:?} has two connections, {twin:?} and {id}");
        std::mem::take(&mut known.held)
    }

    /// Forgets the connections of a peer's lives up to and including this one.
    pub(super) fn take_lives_until(&mut self, peer: Peer) -> Vec<(Peer, Connection)> {
        let first = Peer { node: peer.node, incarnation: Incarnation::ZERO };
        let lives: Vec<_> = self.by_peer.range(first..=peer).map(|(of, id)| (*of, *id)).collect();
        let taken = lives.into_iter().filter_map(|(of, id)| {
            self.by_peer.remove(&of);
            self.connections.remove(&id).map(|known| (of, known.connection))
        });
        taken.collect()
    }

    /// Forgets a connection; says whether it was the one of its peer.
    fn remove(&mut self, id: ConnectionId) -> Option<(Known, Option<Peer>)> {
        let known = self.connections.remove(&id)?;
        let gone = known.peer.filter(|peer| self.by_peer.get(peer) == Some(&id));
        if let Some(peer) = gone {
            self.by_peer.remove(&peer);
        }
        Some((known, gone))
    }

    /// Sends to a peer; to one that is gone, or that doesn't take what it asked for, nothing is sent.
    pub(super) fn send(&mut self, envelope: &Envelope) {
        let known = self.find(envelope.to).and_then(|id| self.connections.get_mut(&id));
        if let Some(known) = known
            && !known.is_pushed_in_vain(envelope)
        {
            send_on(&known.connection, envelope);
        }
    }

    /// The connection of that life; without one, of the newest.
    fn find(&self, to: Endpoint) -> Option<ConnectionId> {
        let peer = to.peer();
        if peer.incarnation != Incarnation::ZERO {
            return self.by_peer.get(&peer).copied();
        }
        let last = Peer { node: peer.node, incarnation: Incarnation::MAX };
        self.by_peer.range(peer..=last).next_back().map(|(_, id)| *id)
    }
}

/// Queues a frame, or ends the connection of who takes too little.
pub(super) fn send_on(connection: &Connection, envelope: &Envelope) {
    let Envelope { from, to, epoch, message } = envelope;
    tracing::trace!(?from, ?to, %epoch, message = message.name(), "out");
    let frame = wire::encode(envelope);
    match connection.try_send(lane(envelope.message.lane()), frame) {
        Ok(()) | Err(SendError::Closed) => {}
        // Whoever lets what it is sent pile up loses the connection, not the others their memory.
        Err(error) => {
            tracing::warn!(?to, %error, "what was sent was not taken: the connection ends");
            connection.close(CloseCode::PROTOCOL, &format!("answers not taken: {error}"));
        }
    }
}

const fn lane(lane: MessageLane) -> Lane {
    match lane {
        MessageLane::Control => Lane::Control,
        MessageLane::Commit => Lane::Commit,
        MessageLane::Pull => Lane::Pull,
    }
}

impl Host {
    pub(super) fn handle_event(&mut self, event: Event) {
        match event {
            Event::Opened(connection) => {
                self.peers.insert(Known::new(connection));
            }
            Event::Frames(inbound) => {
                let id = inbound.connection;
                for frame in inbound.into_frames() {
                    self.handle_frame(id, &frame);
                }
            }
            Event::Closed { connection, reason } => {
                tracing::debug!(%connection, %reason, "closed");
                self.handle_closed(connection, &reason);
            }
            Event::Refused { remote, reason } => {
                tracing::info!(%remote, %reason, "refused");
                if let (Some(mesh), CloseReason::Tls(_)) = (&mut self.mesh, &reason) {
                    mesh.count_refused();
                }
            }
            Event::Dialed { token, outcome } => self.handle_dialed(token, outcome),
        }
    }

    fn handle_closed(&mut self, id: ConnectionId, reason: &CloseReason) {
        let Some((known, gone)) = self.peers.remove(id) else { return };
        self.handle_node_closed(&known, reason);
        if let Some(peer) = gone {
            self.step(NodeEvent::PeerDown(peer));
        }
    }

    pub(super) fn handle_frame(&mut self, id: ConnectionId, frame: &Bytes) {
        let Some(known) = self.peers.get(id) else { return };
        // A peer that has not said who it is can only say that.
        let peer = known.peer.unwrap_or_else(nobody);
        let waits_for_hello = known.dialed.is_some() && known.peer.is_none();
        match wire::decode(frame, peer, self.peers.me.node) {
            Ok(envelope)
                if waits_for_hello && !matches!(envelope.message, Message::NodeHello(_)) =>
            {
                self.hold_back(id, frame);
            }
            Ok(envelope) => self.handle_envelope(id, envelope),
            Err(error @ WireError::Malformed(_)) => {
                tracing::info!(connection = %id, %error, "closing");
                known.connection.close(CloseCode::PROTOCOL, &error.to_string());
            }
            Err(error @ WireError::Unsupported { from, .. }) => {
                let to = peer.endpoint(from);
                let refused = Refused { request: RequestId::ZERO, refusal: error.refusal() };
                let from = self.peers.me.endpoint(Role::Node);
                let message = refused.into();
                send_on(&known.connection, &Envelope { from, to, epoch: Epoch::ZERO, message });
            }
        }
    }

    fn handle_envelope(&mut self, id: ConnectionId, envelope: Envelope) {
        let Some(known) = self.peers.get(id) else { return };
        let Envelope { from, to, epoch, message } = &envelope;
        tracing::trace!(?from, ?to, %epoch, message = message.name(), "in");
        match &envelope.message {
            Message::Hello(hello) => return self.handle_hello(id, *hello),
            Message::NodeHello(hello) => return self.handle_node_hello(id, hello),
            _ => {}
        }
        if known.peer.is_none() {
            return known.connection.close(CloseCode::PROTOCOL, "the first message is a hello");
        }
        if known.is_client && envelope.from.role != Role::Client {
            let role = envelope.from.role;
            return known
                .connection
                .close(CloseCode::IDENTITY, &format!("a client can't speak as {role:?}"));
        }
        if let (Message::Status(status), Role::Node) = (&envelope.message, envelope.to.role) {
            return self.handle_status(envelope.from, status.request);
        }
        self.step(NodeEvent::Message(envelope));
    }

    fn handle_hello(&mut self, id: ConnectionId, hello: Hello) {
        let Some(known) = self.peers.get(id) else { return };
        let connection = known.connection.clone();
        if hello.protocol_max < PROTOCOL_MIN || hello.protocol_min > PROTOCOL {
            let (low, high) = (hello.protocol_min, hello.protocol_max);
            let why =
                format!("protocol {low} to {high}; this node speaks {PROTOCOL_MIN} to {PROTOCOL}");
            return connection.close(CloseCode::PROTOCOL_MISMATCH, &why);
        }
        let node = hello.peer.node;
        let is_node = self.mesh.as_ref().is_some_and(|mesh| mesh.is_node(node));
        let is_lie = node == self.peers.me.node || is_node || known.peer.is_some();
        if is_lie || known.dialed.is_some() || self.peers.by_peer.contains_key(&hello.peer) {
            return connection.close(CloseCode::IDENTITY, "that is somebody else");
        }
        // Roles trust each other: a node says so by another hello, and proves it.
        if !hello.is_client {
            return connection.close(CloseCode::IDENTITY, "a node says a node's hello");
        }
        let reply = Hello {
            peer: self.peers.me,
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL,
            is_client: false,
        };
        let from = self.peers.me.endpoint(Role::Node);
        let to = hello.peer.endpoint(Role::Client);
        send_on(&connection, &Envelope { from, to, epoch: Epoch::ZERO, message: reply.into() });
        // Nothing of an earlier life is heard from here on.
        self.end_lives_before(hello.peer);
        self.peers.name(id, hello.peer, true);
    }
}

/// Who has not said who it is.
pub(super) const fn nobody() -> Peer {
    Peer { node: NodeId::ZERO, incarnation: Incarnation::ZERO }
}
