//! Connections and who is at their other end.
//!
//! ```text
//! accepted --Hello both ways--> known --frames--> node
//!     `- frames before the hello, a hello that lies, a protocol that differs: closed
//! ```

use std::collections::BTreeMap;

use bytes::Bytes;
use common::message::{Hello, MessageLane, Refused};
use common::quic::{CloseCode, Connection, ConnectionId, Event, Lane, SendError};
use common::wire::{self, Envelope, PROTOCOL, PROTOCOL_MIN, WireError};
use common::{Epoch, Message, NodeId, Peer, RequestId, Role};
use node::NodeEvent;

use super::Host;

struct Known {
    connection: Connection,
    peer: Option<Peer>,
    is_client: bool,
}

/// Every open connection.
pub(super) struct Peers {
    me: Peer,
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

    /// Sends to a peer; to one that is gone, or that doesn't take what it asked for, nothing is sent.
    pub(super) fn send(&self, envelope: &Envelope) {
        let known = self.by_peer.get(&envelope.to.peer()).and_then(|id| self.connections.get(id));
        if let Some(known) = known {
            send_on(&known.connection, envelope);
        }
    }
}

fn send_on(connection: &Connection, envelope: &Envelope) {
    let Envelope { from, to, epoch, message } = envelope;
    tracing::trace!(?from, ?to, %epoch, message = message.name(), "out");
    let frame = wire::encode(envelope);
    match connection.try_send(lane(envelope.message.lane()), frame) {
        Ok(()) | Err(SendError::Closed) => {}
        // Whoever lets its answers pile up loses the connection, not the others their memory.
        Err(error) => connection.close(CloseCode::PROTOCOL, &format!("answers not taken: {error}")),
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
                let known = Known { connection, peer: None, is_client: true };
                self.peers.connections.insert(known.connection.id(), known);
            }
            Event::Frames(inbound) => {
                let id = inbound.connection;
                for frame in inbound.into_frames() {
                    self.handle_frame(id, &frame);
                }
            }
            Event::Closed { connection, reason } => {
                tracing::debug!(%connection, %reason, "closed");
                self.handle_closed(connection);
            }
            Event::Refused { remote, reason } => tracing::info!(%remote, %reason, "refused"),
            Event::Dialed { .. } => {}
        }
    }

    fn handle_closed(&mut self, id: ConnectionId) {
        let Some(known) = self.peers.connections.remove(&id) else { return };
        if let Some(peer) = known.peer
            && self.peers.by_peer.get(&peer) == Some(&id)
        {
            self.peers.by_peer.remove(&peer);
            self.step(NodeEvent::PeerDown(peer));
        }
    }

    fn handle_frame(&mut self, id: ConnectionId, frame: &Bytes) {
        let Some(known) = self.peers.connections.get(&id) else { return };
        // A peer that has not said who it is can only say that.
        let peer = known.peer.unwrap_or_else(|| NodeId::ZERO.nobody());
        match wire::decode(frame, peer, self.peers.me.node) {
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
        let Some(known) = self.peers.connections.get(&id) else { return };
        let Envelope { from, to, epoch, message } = &envelope;
        tracing::trace!(?from, ?to, %epoch, message = message.name(), "in");
        if let Message::Hello(hello) = envelope.message {
            return self.handle_hello(id, hello);
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
        let known = self.peers.connections.get_mut(&id).expect("the caller found it");
        if hello.protocol_max < PROTOCOL_MIN || hello.protocol_min > PROTOCOL {
            let (low, high) = (hello.protocol_min, hello.protocol_max);
            let why =
                format!("protocol {low} to {high}; this node speaks {PROTOCOL_MIN} to {PROTOCOL}");
            return known.connection.close(CloseCode::PROTOCOL_MISMATCH, &why);
        }
        let is_lie = hello.peer.node == self.peers.me.node || known.peer.is_some();
        if is_lie || self.peers.by_peer.contains_key(&hello.peer) {
            return known.connection.close(CloseCode::IDENTITY, "that is somebody else");
        }
        // Roles trust each other, so a node that nobody has vouched for must not be one.
        if !hello.is_client {
            return known.connection.close(CloseCode::IDENTITY, "this node knows no other nodes");
        }
        known.peer = Some(hello.peer);
        known.is_client = hello.is_client;
        let reply = Hello {
            peer: self.peers.me,
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL,
            is_client: false,
        };
        let from = self.peers.me.endpoint(Role::Node);
        let to = hello.peer.endpoint(Role::Client);
        send_on(
            &known.connection,
            &Envelope { from, to, epoch: Epoch::ZERO, message: reply.into() },
        );
        self.peers.by_peer.insert(hello.peer, id);
        self.end_earlier_lives(hello.peer);
    }

    /// A later incarnation of a peer: nothing of an earlier one is heard from here on.
    fn end_earlier_lives(&mut self, peer: Peer) {
        let earlier: Vec<(Peer, ConnectionId)> = self
            .peers
            .by_peer
            .iter()
            .filter(|(other, _)| other.node == peer.node && other.incarnation < peer.incarnation)
            .map(|(other, id)| (*other, *id))
            .collect();
        for (other, id) in earlier {
            self.peers.by_peer.remove(&other);
            if let Some(known) = self.peers.connections.remove(&id) {
                known.connection.close(CloseCode::REPLACED, "a later life of this peer is here");
            }
            self.step(NodeEvent::PeerDown(other));
        }
    }
}

/// Who has not said who it is.
trait Nobody {
    fn nobody(self) -> Peer;
}

impl Nobody for NodeId {
    fn nobody(self) -> Peer {
        Peer { node: self, incarnation: common::Incarnation::ZERO }
    }
}
