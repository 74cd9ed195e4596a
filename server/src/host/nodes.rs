//! Connections to other nodes: dialed or accepted, and believed before anything else is heard.

use std::time::Instant;

use bytes::Bytes;
use common::message::NodeHello;
use common::quic::{CloseCode, CloseReason, ConnectError, Connection, ConnectionId};
use common::wire::Envelope;
use common::{Code, Epoch, Halt, NodeId, Peer, Refusal, Role};
use node::NodeEvent;

use super::Host;
use super::mesh::{Believed, Dialed};
use super::peers::{Known, send_on};

/// Marks the token of a knock; ids of nodes are below.
const KNOCK: u64 = 1 << 63;
/// Frames that overtake the answer to a hello, at most.
const HELD_FRAMES_MAX: usize = 1024;

impl Host {
    /// Dials the nodes that are due.
    pub(super) fn dial_nodes(&mut self) {
        let Some(mesh) = &mut self.mesh else { return };
        for dial in mesh.take_due(Instant::now()) {
            assert!(dial.node.0 < KNOCK, "{} is beyond the ids of nodes", dial.node);
            let token = dial.node.0 | if dial.is_knock { KNOCK } else { 0 };
            self.endpoint.dial_as(token, vec![dial.address], Some(dial.tls_name));
        }
    }

    pub(super) fn handle_dialed(&mut self, token: u64, outcome: Result<Connection, ConnectError>) {
        let (node, is_knock) = (NodeId(token & !KNOCK), token & KNOCK != 0);
        let mesh = self.mesh.as_mut().expect("only nodes of a cluster are dialed");
        let connection = match outcome {
            Ok(connection) => connection,
            Err(error) if is_knock => return mesh.fail_to_knock(node, &error),
            Err(error) => return mesh.fail(node, &error, &mut self.rng),
        };
        if !is_knock && mesh.greet(node) == Dialed::Superfluous {
            return connection.close(CloseCode::REPLACED, "a faster one is there");
        }
        self.say_hello(&connection);
        self.peers.insert(Known { dialed: Some(node), is_knock, ..Known::new(connection) });
    }

    fn say_hello(&self, connection: &Connection) {
        let mesh = self.mesh.as_ref().expect("a node of a cluster");
        let me = self.peers.me.endpoint(Role::Node);
        let to = super::peers::nobody().endpoint(Role::Node);
        let message = mesh.hello().into();
        send_on(connection, &Envelope { from: me, to, epoch: Epoch::ZERO, message });
    }

    /// Holds back a frame that came before the answer to this node's hello.
    pub(super) fn hold_back(&mut self, id: ConnectionId, frame: &Bytes) {
        let Some(known) = self.peers.get_mut(id) else { return };
        if known.held.len() < HELD_FRAMES_MAX {
            known.held.push(frame.clone());
        } else {
            known.connection.close(CloseCode::PROTOCOL, "a hello comes first");
        }
    }

    pub(super) fn handle_node_hello(&mut self, id: ConnectionId, hello: &NodeHello) {
        let Some(known) = self.peers.get(id) else { return };
        let (connection, dialed) = (known.connection.clone(), known.dialed);
        if known.peer.is_some() {
            return connection.close(CloseCode::PROTOCOL, "a hello comes once");
        }
        let believed = match &mut self.mesh {
            Some(mesh) => mesh.believe(hello, dialed, &connection.peer_certificates()),
            None => Err(Refusal::new(Code::NotVouched, "this node is alone and knows no others")),
        };
        match believed {
            Ok(Believed::Linked) => {}
            Ok(Believed::Knocked) => {
                return connection.close(CloseCode::REPLACED, "the lower id dials");
            }
            Err(refusal) => {
                let code = CloseCode::refusal(refusal.code());
                return connection.close(code, &refusal.detail);
            }
        }
        tracing::info!(peer = ?hello.peer, "a node is linked");
        if let Some(mesh) = &self.mesh {
            connection.limit_queues(mesh.link_queue_bytes_max(&self.knobs));
        }
        self.end_lives_before(hello.peer);
        if dialed.is_none() {
            self.say_hello(&connection);
        }
        let held = self.peers.name(id, hello.peer, false);
        for frame in held {
            self.handle_frame(id, &frame);
        }
    }

    /// Earlier lives of a peer, and an earlier connection of this one: nothing of them is heard from here on.
    pub(super) fn end_lives_before(&mut self, peer: Peer) {
        for (other, connection) in self.peers.take_lives_until(peer) {
            connection.close(CloseCode::REPLACED, "a later connection of this peer is here");
            self.step(NodeEvent::PeerDown(other));
        }
    }

    /// A connection to a node, or one that was meant to become one, is over.
    pub(super) fn handle_node_closed(&mut self, known: &Known, reason: &CloseReason) {
        let Some(mesh) = &mut self.mesh else { return };
        let accepted = known.peer.filter(|_| !known.is_client).map(|peer| peer.node);
        let Some(node) = known.dialed.or(accepted) else { return };
        let refusal = match reason {
            CloseReason::PeerClosed { code, reason } => {
                code.code().map(|code| Refusal::new(code, reason.clone()))
            }
            _ => None,
        };
        match &refusal {
            _ if !known.is_knock => mesh.close(node, reason, &mut self.rng),
            Some(refusal) => mesh.knock_in_vain(node, refusal.clone()),
            None => {}
        }
        // That node was asked for by its name and has proven it: it knows another life of this one.
        let clash = refusal.filter(|refusal| refusal.code() == Code::IdentityClash);
        if let (Some(refusal), Some(_)) = (clash, known.dialed) {
            let detail = format!("{node} says: {}", refusal.detail);
            self.halt.get_or_insert(Halt { reason: "identity_clash", detail });
        }
    }
}
