//! Connections: one for each address that leads to a node, dialled again when it breaks.
//!
//! ```text
//!  idle --dial--> dialling --lanes open--> greeting --Hello--> linked to n1
//!   ^                |                        |                  |
//!   '--- after a while, longer each time -----'------------------'--- closed
//!                                             '--> shadow: another address has linked n1 later
//! ```
//!
//! Each connection has an incarnation of its own. A node takes only the newest one of a client, so an address
//! whose node is linked through another stays quiet until that link breaks. Nodes tell the addresses of the
//! whole cluster with each view.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;
use common::message::{Hello, MessageLane, NodeAddress};
use common::quic::{CloseCode, Connection, ConnectionId, Lane, QuicEndpoint};
use common::wire::{self, Envelope, PROTOCOL, PROTOCOL_MIN, WireError};
use common::{Backoff, Endpoint, Epoch, Incarnation, Message, NodeId, Peer, Prng, Role};

/// Waiting between dials, ms, at most.
const DIAL_BACKOFF_MS_MAX: u64 = 2000;
/// Addresses, with those that nodes have told.
const ADDRESSES_MAX: usize = 256;

#[derive(Debug)]
enum State {
    Idle(Instant),
    Dialling,
    Greeting(Connection, Endpoint),
    Linked(Connection, Endpoint, Peer),
    /// Another address leads to the same node.
    Shadow(NodeId),
}

#[derive(Debug)]
struct Slot {
    address: String,
    state: State,
    backoff: Backoff,
    /// Why the last attempt failed.
    failure: String,
}

impl Slot {
    fn new(address: String, now: Instant) -> Self {
        let failure = "not tried yet".to_owned();
        Self { address, state: State::Idle(now), backoff: Backoff::default(), failure }
    }
}

/// What a frame or an event brought.
pub(super) enum Heard {
    Nothing,
    /// A node has said who it is; this client is `me` to it.
    Linked(Peer, Endpoint),
    Message(Envelope),
}

/// All addresses and what they lead to.
pub(super) struct Links {
    me: NodeId,
    incarnation: u64,
    slots: Vec<Slot>,
    by_connection: BTreeMap<ConnectionId, usize>,
    by_node: BTreeMap<NodeId, usize>,
}

impl Links {
    pub(super) fn new(me: NodeId, addresses: Vec<String>, now: Instant) -> Self {
        let slot = |address| Slot::new(address, now);
        Self {
            me,
            incarnation: 0,
            slots: addresses.into_iter().map(slot).collect(),
            by_connection: BTreeMap::new(),
            by_node: BTreeMap::new(),
        }
    }

    /// Adds the addresses that a node has told. One whose node is linked already waits until that breaks.
    pub(super) fn learn(&mut self, addresses: &[NodeAddress], now: Instant) {
        for NodeAddress { node, address } in addresses {
            let is_known = self.slots.iter().any(|slot| slot.address == *address);
            if is_known || self.slots.len() >= ADDRESSES_MAX {
                continue;
            }
            let mut slot = Slot::new(address.clone(), now);
            if self.by_node.contains_key(node) {
                slot.state = State::Shadow(*node);
            }
            self.slots.push(slot);
        }
    }

    /// Dials what is due; says when the next one is.
    pub(super) fn dial(&mut self, endpoint: &QuicEndpoint, now: Instant) -> Option<Instant> {
        let mut next = None;
        for (token, slot) in self.slots.iter_mut().enumerate() {
            let State::Idle(at) = slot.state else { continue };
            if at <= now {
                slot.state = State::Dialling;
                endpoint.dial(token as u64, vec![slot.address.clone()]);
            } else {
                next = Some(next.map_or(at, |next: Instant| next.min(at)));
            }
        }
        next
    }

    /// Why nothing is connected, for people.
    pub(super) fn failures(&self) -> String {
        let list = self.slots.iter().map(|slot| format!("{}: {}", slot.address, slot.failure));
        list.collect::<Vec<_>>().join("; ")
    }

    pub(super) fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.slots.iter().filter_map(|slot| match &slot.state {
            State::Linked(connection, ..) => Some(connection),
            _ => None,
        })
    }

    pub(super) fn handle_dialled(
        &mut self,
        token: u64,
        outcome: Result<Connection, String>,
        now: Instant,
        rng: &mut Prng,
    ) {
        let place = usize::try_from(token).expect("tokens are places");
        match outcome {
            Ok(connection) => {
                self.incarnation += 1;
                let peer = Peer { node: self.me, incarnation: Incarnation(self.incarnation) };
                let me = peer.endpoint(Role::Client);
                let hello = Hello {
                    peer,
                    protocol_min: PROTOCOL_MIN,
                    protocol_max: PROTOCOL,
                    is_client: true,
                };
                let nobody = Peer { node: NodeId::ZERO, incarnation: Incarnation::ZERO };
                let to = nobody.endpoint(Role::Node);
                let message = hello.into();
                send_on(&connection, &Envelope { from: me, to, epoch: Epoch::ZERO, message });
                self.by_connection.insert(connection.id(), place);
                self.slots[place].state = State::Greeting(connection, me);
            }
            Err(failure) => self.rest(place, failure, now, rng),
        }
    }

    fn rest(&mut self, place: usize, failure: String, now: Instant, rng: &mut Prng) {
        let slot = &mut self.slots[place];
        slot.failure = failure;
        slot.state = State::Idle(now + slot.backoff.next(DIAL_BACKOFF_MS_MAX, rng));
    }

    /// A connection is over; says which node went with it.
    pub(super) fn handle_closed(
        &mut self,
        id: ConnectionId,
        reason: String,
        now: Instant,
        rng: &mut Prng,
    ) -> Option<Peer> {
        let place = self.by_connection.remove(&id)?;
        let State::Linked(_, _, peer) = self.slots[place].state else {
            self.rest(place, reason, now, rng);
            return None;
        };
        self.rest(place, reason, now, rng);
        self.by_node.remove(&peer.node);
        for slot in &mut self.slots {
            if matches!(slot.state, State::Shadow(node) if node == peer.node) {
                slot.state = State::Idle(now);
            }
        }
        Some(peer)
    }

    /// Decodes one frame. One that is damaged or out of place ends its connection.
    pub(super) fn handle_frame(&mut self, id: ConnectionId, frame: &Bytes) -> Heard {
        let Some(place) = self.by_connection.get(&id).copied() else { return Heard::Nothing };
        let (connection, me, peer) = match &self.slots[place].state {
            State::Greeting(connection, me) => (connection.clone(), *me, None),
            State::Linked(connection, me, peer) => (connection.clone(), *me, Some(*peer)),
            State::Idle(_) | State::Dialling | State::Shadow(_) => return Heard::Nothing,
        };
        let nobody = Peer { node: NodeId::ZERO, incarnation: Incarnation::ZERO };
        let envelope = match wire::decode(frame, peer.unwrap_or(nobody), self.me) {
            Ok(envelope) => envelope,
            // Something newer than this client: it has not asked for it.
            Err(WireError::Unsupported { .. }) => return Heard::Nothing,
            Err(error @ WireError::Malformed(_)) => {
                connection.close(CloseCode::PROTOCOL, &error.to_string());
                return Heard::Nothing;
            }
        };
        match (envelope.message, peer) {
            (Message::Hello(hello), None) => self.link(place, connection, me, hello),
            (_, None) | (Message::Hello(_), Some(_)) => {
                connection.close(CloseCode::PROTOCOL, "a hello comes first, and once");
                Heard::Nothing
            }
            (message, Some(_)) => {
                let incarnation = envelope.to.incarnation;
                if incarnation != Incarnation::ZERO && incarnation != me.incarnation {
                    return Heard::Nothing;
                }
                Heard::Message(Envelope { message, ..envelope })
            }
        }
    }

    fn link(&mut self, place: usize, connection: Connection, me: Endpoint, hello: Hello) -> Heard {
        if hello.is_client || hello.protocol_max < PROTOCOL_MIN || hello.protocol_min > PROTOCOL {
            connection.close(CloseCode::PROTOCOL_MISMATCH, "no common protocol");
            return Heard::Nothing;
        }
        let slot = &mut self.slots[place];
        slot.backoff.reset();
        slot.failure.clear();
        slot.state = State::Linked(connection, me, hello.peer);
        if let Some(old) = self.by_node.insert(hello.peer.node, place)
            && let State::Linked(connection, ..) = &self.slots[old].state
        {
            assert!(old != place, "a connection is linked once");
            connection.close(CloseCode::REPLACED, "another address leads to the same node");
            self.by_connection.remove(&connection.id());
            self.slots[old].state = State::Shadow(hello.peer.node);
        }
        Heard::Linked(hello.peer, me)
    }

    /// Sends to a node. What finds no room is lost, like anything that a network loses: the session asks
    /// again.
    pub(super) fn send(&self, to: Endpoint, epoch: Epoch, message: Message) {
        let place = self.by_node.get(&to.node);
        if let Some(State::Linked(connection, from, peer)) =
            place.map(|place| &self.slots[*place].state)
            && *peer == to.peer()
        {
            send_on(connection, &Envelope { from: *from, to, epoch, message });
        }
    }
}

fn send_on(connection: &Connection, envelope: &Envelope) {
    let lane = match envelope.message.lane() {
        MessageLane::Control => Lane::Control,
        MessageLane::Commit => Lane::Commit,
        MessageLane::Pull => Lane::Pull,
    };
    // A full lane is a lost message; a closed one is told as an event.
    let _ = connection.try_send(lane, wire::encode(envelope));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn told_addresses_are_added_once_and_within_the_limit() {
        let now = Instant::now();
        let mut links = Links::new(NodeId(9), vec!["a:1".to_owned()], now);
        links.by_node.insert(NodeId(3), 0);
        let told = |node: u64, address: &str| NodeAddress {
            node: NodeId(node),
            address: address.to_owned(),
        };
        let all = [told(1, "a:1"), told(2, "b:1"), told(3, "c:1")];
        links.learn(&all, now);
        links.learn(&all, now);
        let slots: Vec<&str> = links.slots.iter().map(|slot| slot.address.as_str()).collect();
        assert_eq!(slots, ["a:1", "b:1", "c:1"]);
        assert!(matches!(links.slots[1].state, State::Idle(_)));
        assert!(matches!(links.slots[2].state, State::Shadow(NodeId(3))), "it is linked already");
        let many: Vec<_> = (0..1000).map(|n| told(n, &format!("d:{n}"))).collect();
        links.learn(&many, now);
        assert_eq!(links.slots.len(), ADDRESSES_MAX);
    }
}
