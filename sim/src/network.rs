//! The simulated network: connections that break, links that delay, lose, double and reorder.
//!
//! ```text
//! sender --Flight{session}--> link (latency, clog, loss, cut) --> arrive? --> receiver
//!                              connection between two incarnations, session n
//!                              reset: session n + 1; each side learns of it later, with PeerDown
//! ```
//!
//! # Contract (the one of `common::machine`, and worse is not allowed)
//! 1. Within one session and lane messages are in order, unless the run reorders.
//! 2. A reset loses any suffix, in each direction on its own. Each side that used the session gets one
//!    PeerDown, and nothing of the session after it.
//! 3. A side that meets the next session or incarnation first gets the PeerDown of the former before it.
//! 4. Nothing of an earlier incarnation comes once a later one has been seen.
//! 5. A client's connection is an incarnation of its own: when it breaks, the client has to dial again.

use std::collections::BTreeSet;

use common::message::MessageLane;
use common::wire::{self, Envelope};
use common::{Endpoint, Incarnation, NodeId, Peer, Prng};

use crate::by_node::ByNode;
use crate::clock::Moment;
use crate::random::{Randomness, delay_ns};

/// How bad a network is.
#[derive(Clone, Debug, serde::Serialize)]
pub struct NetworkProfile {
    /// One-way latency's base, ns.
    pub latency_ns: u64,
    /// One message in a thousand takes up to this many times as long.
    pub tail_factor: u64,
    /// A pair's constant extra latency is drawn up to this, ns.
    pub pair_extra_ns: u64,
    /// Messages that are lost without a trace, in a million.
    pub loss_ppm: u64,
    /// Messages that arrive twice, in a million.
    pub duplicate_ppm: u64,
    /// Messages that leave the order of their lane, in a million.
    pub reorder_ppm: u64,
    /// Connections that break, in a million sends.
    pub reset_ppm: u64,
    /// Messages whose bytes get a flipped bit, in a million; only with `through_codec`.
    pub bit_flip_ppm: u64,
    /// Whether each message passes the real codec.
    pub through_codec: bool,
    /// A silent peer is noticed after this, ns.
    pub idle_ns: u64,
}

impl Default for NetworkProfile {
    fn default() -> Self {
        Self {
            latency_ns: 100_000,
            tail_factor: 20,
            pair_extra_ns: 0,
            loss_ppm: 0,
            duplicate_ppm: 0,
            reorder_ppm: 0,
            reset_ppm: 0,
            bit_flip_ppm: 0,
            through_codec: false,
            idle_ns: 2_000_000_000,
        }
    }
}

/// A message on its way.
#[derive(Clone, Debug)]
pub struct Flight {
    /// The message and its addresses as the sender wrote them.
    pub envelope: Box<Envelope>,
    /// The incarnation that it reaches, if it does.
    pub to: Peer,
    session: u64,
    corrupt: bool,
}

/// What the network puts into the event queue.
#[derive(Clone, Debug)]
pub enum Traffic {
    /// A message arrives.
    Arrive(Flight),
    /// One side of a connection learns that it broke.
    Down {
        /// Who learns it.
        to: Peer,
        /// Of whom.
        peer: Peer,
        /// Which session it was.
        session: u64,
    },
}

/// What becomes of a flight at its end.
#[derive(Debug)]
#[must_use]
pub enum Arrival {
    /// It reaches its receiver, after the PeerDown of the former session when there is one.
    Deliver {
        /// The peer whose connection the receiver must first learn to be gone.
        down_first: Option<Peer>,
    },
    /// It is lost.
    Lost,
    /// Its bytes are damaged: the receiver closes the connection.
    Damaged,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Contact {
    incarnation: Incarnation,
    session: u64,
    open: bool,
}

#[derive(Clone, Debug, Default)]
struct Connection {
    session: u64,
    /// Flights of earlier sessions that would arrive later than this are lost, by receiver.
    lost_after: [Moment; 2],
}

#[derive(Clone, Debug)]
struct Link {
    prng: Prng,
    extra_ns: u64,
    clogged_until: Moment,
    cut_until: Moment,
    last_arrival: [Moment; 3],
}

/// All connections that two nodes ever had, by their incarnations. The last one is the one in use, as a rule.
type Connections = Vec<((Incarnation, Incarnation), Connection)>;

/// All links and connections of a run.
#[derive(Clone, Debug)]
pub struct Network {
    profile: NetworkProfile,
    randomness: Randomness,
    /// By sender and receiver.
    links: ByNode<ByNode<Link>>,
    /// By the lower node and the higher one.
    connections: ByNode<ByNode<Connections>>,
    /// What each process knows of each node that it has exchanged messages with: by the process' node and
    /// that node, an entry for each incarnation that lives.
    contacts: ByNode<ByNode<Vec<(Incarnation, Contact)>>>,
    /// In ascending order.
    live: ByNode<Vec<Incarnation>>,
    /// Ends of connections that clients dialled.
    dialled: BTreeSet<Peer>,
}

impl Network {
    /// A network without links; they come with the first message.
    #[must_use]
    pub const fn new(profile: NetworkProfile, randomness: Randomness) -> Self {
        Self {
            profile,
            randomness,
            links: ByNode::new(),
            connections: ByNode::new(),
            contacts: ByNode::new(),
            live: ByNode::new(),
            dialled: BTreeSet::new(),
        }
    }

    /// A process is there and can be reached.
    pub fn join(&mut self, peer: Peer) {
        let live = self.live.entry(peer.node, Vec::new);
        let place = live.binary_search(&peer.incarnation);
        let place = place.expect_err("no incarnation joins a second time");
        live.insert(place, peer.incarnation);
    }

    /// A client's fresh connection: `client` is an incarnation that was never used before. `false` when the
    /// node can't be reached.
    pub fn connect(&mut self, now: Moment, client: Peer, node: Peer) -> bool {
        let cut = self
            .link(client.node, node.node)
            .cut_until
            .max(self.link(node.node, client.node).cut_until);
        if now < cut || !self.is_live(node) {
            return false;
        }
        self.join(client);
        self.dialled.insert(client);
        for (local, remote) in [(client, node), (node, client)] {
            let incarnation = remote.incarnation;
            let contact = Contact { incarnation, session: 0, open: true };
            self.meet(local, remote.node, contact);
        }
        *self.connection(pair(client, node).0) = Connection::default();
        true
    }

    /// A process, or a client's end of a connection, is gone; those who talked to it learn it now or later.
    pub fn leave(&mut self, now: Moment, peer: Peer, out: &mut Vec<(Moment, Traffic)>) {
        let live = self.live.entry(peer.node, Vec::new);
        let place = live.binary_search(&peer.incarnation);
        live.remove(place.unwrap_or_else(|_| panic!("{peer:?} leaves and was not there")));
        for (a, b) in self.pairs_of(peer) {
            self.reset(now, a, b, out);
        }
        if let Some(contacts) = self.contacts.get_mut(peer.node) {
            contacts
                .values_mut()
                .for_each(|known| known.retain(|(local, _)| *local != peer.incarnation));
        }
    }

    /// All connections that a process ever had, in their order.
    fn pairs_of(&self, peer: Peer) -> Vec<(Peer, Peer)> {
        let mut found = Vec::new();
        for node in self.live.keys().filter(|node| *node != peer.node) {
            let (low, high) = (node.min(peer.node), node.max(peer.node));
            let all = self.connections.get(low).and_then(|of| of.get(high));
            for ((one, two), _) in all.into_iter().flatten() {
                let low = Peer { node: low, incarnation: *one };
                let high = Peer { node: high, incarnation: *two };
                if low == peer || high == peer {
                    found.push((low, high));
                }
            }
        }
        found
    }

    /// Sends a message from a live process.
    pub fn send(&mut self, now: Moment, envelope: Box<Envelope>, out: &mut Vec<(Moment, Traffic)>) {
        let from = envelope.from.peer();
        let Some(to) = self.route(now, from, envelope.to, out) else { return };
        let Some(session) = self.open(from, to) else { return };
        let Self { profile, randomness, links, .. } = self;
        let link = link_in(links, (from.node, to.node), *randomness, profile);
        if link.prng.chance(profile.loss_ppm, 1_000_000) || now < link.cut_until {
            return;
        }
        let corrupt = profile.through_codec && link.prng.chance(profile.bit_flip_ppm, 1_000_000);
        let twice = link.prng.chance(profile.duplicate_ppm, 1_000_000);
        let breaks = link.prng.chance(profile.reset_ppm, 1_000_000);
        let lane = envelope.message.lane();
        if twice && !corrupt {
            let at = link.arrival(now, lane, profile, true);
            let flight = Flight { envelope: envelope.clone(), to, session, corrupt: false };
            out.push((at, Traffic::Arrive(flight)));
        }
        let leaves_order = link.prng.chance(profile.reorder_ppm, 1_000_000);
        let at = link.arrival(now, lane, profile, leaves_order);
        out.push((at, Traffic::Arrive(Flight { envelope, to, session, corrupt })));
        if breaks {
            self.reset(now, from, to, out);
        }
    }

    /// A flight is at its end. The envelope may be changed to what the codec makes of it.
    pub fn arrive(&mut self, now: Moment, flight: &mut Flight) -> Arrival {
        let (from, to) = (flight.envelope.from.peer(), flight.to);
        if !self.is_live(to) {
            return Arrival::Lost;
        }
        let (key, side) = pair(from, to);
        let connection = self.connection(key);
        let (is_broken, lost_after) =
            (flight.session < connection.session, connection.lost_after[side]);
        let contact = self.contact(to, from.node).copied();
        // Who never used a session is not told that it broke, so nothing of it may come afterwards.
        let uses = contact.is_some_and(|contact| {
            contact.open
                && contact.incarnation == from.incarnation
                && contact.session == flight.session
        });
        if is_broken && (now > lost_after || !uses) {
            return Arrival::Lost;
        }
        if contact.is_some_and(|contact| is_past(contact, from.incarnation, flight.session)) {
            return Arrival::Lost;
        }
        if self.profile.through_codec && !pass_codec(flight, from, to, self.randomness) {
            return Arrival::Damaged;
        }
        let new = Contact { incarnation: from.incarnation, session: flight.session, open: true };
        if contact != Some(new) {
            self.meet(to, from.node, new);
        }
        let down_first = contact
            .filter(|old| old.open)
            .filter(|old| (old.incarnation, old.session) != (new.incarnation, new.session))
            .map(|old| Peer { node: from.node, incarnation: old.incarnation });
        Arrival::Deliver { down_first }
    }

    /// Whether `to` still has to be told that its session with `peer` broke; after this it has been.
    pub fn learn_down(&mut self, to: Peer, peer: Peer, session: u64) -> bool {
        match self.contact_mut(to, peer.node) {
            Some(contact)
                if contact.open
                    && contact.incarnation == peer.incarnation
                    && contact.session == session =>
            {
                contact.open = false;
                true
            }
            _ => false,
        }
    }

    /// Breaks the connection between two processes.
    pub fn reset(&mut self, now: Moment, a: Peer, b: Peer, out: &mut Vec<(Moment, Traffic)>) {
        let (key, _) = pair(a, b);
        let Self { profile, randomness, links, connections, .. } = self;
        let prng = &mut link_in(links, (a.node, b.node), *randomness, profile).prng;
        let connection = connection_in(connections, key);
        let session = connection.session;
        connection.session += 1;
        for (side, (to, peer)) in [(key.1, key.0), (key.0, key.1)].into_iter().enumerate() {
            connection.lost_after[side] = now.plus_ns(prng.below(4 * profile.latency_ns));
            let noticed_ns = match prng.below(4) {
                0 => profile.idle_ns,
                1 => 0,
                _ => delay_ns(prng, profile.latency_ns, profile.tail_factor),
            };
            out.push((now.plus_ns(noticed_ns), Traffic::Down { to, peer, session }));
        }
    }

    /// Breaks the connections between two nodes, if there are any.
    pub fn reset_nodes(
        &mut self,
        now: Moment,
        a: NodeId,
        b: NodeId,
        out: &mut Vec<(Moment, Traffic)>,
    ) {
        for (one, two) in self.pairs_between(a, b) {
            self.reset(now, one, two, out);
        }
    }

    /// Holds everything from `from` to `to` back until a moment.
    pub fn clog(&mut self, from: NodeId, to: NodeId, until: Moment) {
        let link = self.link(from, to);
        link.clogged_until = link.clogged_until.max(until);
    }

    /// Loses everything that is sent from `from` to `to` until a moment. A cut longer than the idle time also
    /// breaks the connection.
    pub fn cut(
        &mut self,
        now: Moment,
        from: NodeId,
        to: NodeId,
        until: Moment,
        out: &mut Vec<(Moment, Traffic)>,
    ) {
        let link = self.link(from, to);
        link.cut_until = link.cut_until.max(until);
        let idle = now.plus_ns(self.profile.idle_ns);
        if idle < until {
            for (one, two) in self.pairs_between(from, to) {
                self.reset(idle, one, two, out);
            }
        }
    }

    /// Ends all faults: what is sent from now on arrives, in order, soon.
    pub fn calm(&mut self, now: Moment) {
        let profile = &mut self.profile;
        (profile.loss_ppm, profile.duplicate_ppm, profile.reorder_ppm) = (0, 0, 0);
        (profile.reset_ppm, profile.bit_flip_ppm) = (0, 0);
        for link in self.links.values_mut().flat_map(ByNode::values_mut) {
            link.clogged_until = link.clogged_until.min(now);
            link.cut_until = link.cut_until.min(now);
        }
    }

    fn is_live(&self, peer: Peer) -> bool {
        self.live.get(peer.node).is_some_and(|all| all.contains(&peer.incarnation))
    }

    /// The connections between live processes of two nodes.
    fn pairs_between(&self, a: NodeId, b: NodeId) -> Vec<(Peer, Peer)> {
        let (low, high) = (a.min(b), a.max(b));
        let all = self.connections.get(low).and_then(|of| of.get(high));
        let pairs = all.into_iter().flatten().map(|((one, two), _)| {
            (Peer { node: low, incarnation: *one }, Peer { node: high, incarnation: *two })
        });
        pairs.filter(|(one, two)| self.is_live(*one) && self.is_live(*two)).collect()
    }

    /// The incarnation that a message reaches. A former one is unreachable: whoever still holds a session
    /// with it learns so.
    fn route(
        &mut self,
        now: Moment,
        from: Peer,
        to: Endpoint,
        out: &mut Vec<(Moment, Traffic)>,
    ) -> Option<Peer> {
        if to.incarnation == Incarnation::ZERO {
            let newest = *self.live.get(to.node)?.last()?;
            return Some(Peer { node: to.node, incarnation: newest });
        }
        if self.is_live(to.peer()) {
            return Some(to.peer());
        }
        if let Some(contact) = self.contact(from, to.node)
            && contact.open
            && contact.incarnation == to.incarnation
        {
            let session = contact.session;
            let refused = now.plus_ns(2 * self.profile.latency_ns);
            out.push((refused, Traffic::Down { to: from, peer: to.peer(), session }));
        }
        None
    }

    /// The session that a message travels on; the sender knows of it from now on. `None` when there is none:
    /// a connection that was dialled has one session.
    fn open(&mut self, from: Peer, to: Peer) -> Option<u64> {
        let session = self.connection(pair(from, to).0).session;
        let fresh = Contact { incarnation: to.incarnation, session, open: true };
        let Some(contact) = self.contact(from, to.node).copied() else {
            self.meet(from, to.node, fresh);
            return Some(session);
        };
        if contact.open && contact.incarnation == to.incarnation {
            // A session that broke without the sender's knowledge swallows what it sends.
            return Some(contact.session);
        }
        if session > 0 && (self.dialled.contains(&from) || self.dialled.contains(&to)) {
            return None;
        }
        if contact.incarnation <= to.incarnation {
            self.meet(from, to.node, fresh);
        }
        Some(session)
    }

    fn link(&mut self, from: NodeId, to: NodeId) -> &mut Link {
        link_in(&mut self.links, (from, to), self.randomness, &self.profile)
    }

    fn connection(&mut self, key: (Peer, Peer)) -> &mut Connection {
        connection_in(&mut self.connections, key)
    }

    fn contact(&self, local: Peer, remote: NodeId) -> Option<&Contact> {
        let known = self.contacts.get(local.node)?.get(remote)?;
        known.iter().find(|(of, _)| *of == local.incarnation).map(|(_, contact)| contact)
    }

    fn contact_mut(&mut self, local: Peer, remote: NodeId) -> Option<&mut Contact> {
        let known = self.contacts.get_mut(local.node)?.get_mut(remote)?;
        known.iter_mut().find(|(of, _)| *of == local.incarnation).map(|(_, contact)| contact)
    }

    /// A process knows this of a node from now on.
    fn meet(&mut self, local: Peer, remote: NodeId, contact: Contact) {
        let known = self.contacts.entry(local.node, ByNode::new).entry(remote, Vec::new);
        match known.iter_mut().find(|(of, _)| *of == local.incarnation) {
            Some((_, old)) => *old = contact,
            None => known.push((local.incarnation, contact)),
        }
    }
}

fn link_in<'a>(
    links: &'a mut ByNode<ByNode<Link>>,
    (from, to): (NodeId, NodeId),
    randomness: Randomness,
    profile: &NetworkProfile,
) -> &'a mut Link {
    links.entry(from, ByNode::new).entry(to, || {
        let mut prng = randomness.stream("link", from.0 << 32 | to.0);
        let extra_ns = prng.below(profile.pair_extra_ns + 1);
        Link {
            prng,
            extra_ns,
            clogged_until: Moment::ZERO,
            cut_until: Moment::ZERO,
            last_arrival: [Moment::ZERO; 3],
        }
    })
}

fn connection_in(
    connections: &mut ByNode<ByNode<Connections>>,
    (low, high): (Peer, Peer),
) -> &mut Connection {
    let all = connections.entry(low.node, ByNode::new).entry(high.node, Vec::new);
    let key = (low.incarnation, high.incarnation);
    let place = match all.last() {
        Some((last, _)) if *last == key => all.len() - 1,
        _ => all.binary_search_by_key(&key, |(key, _)| *key).unwrap_or_else(|place| {
            all.insert(place, (key, Connection::default()));
            place
        }),
    };
    &mut all[place].1
}

impl Link {
    fn arrival(
        &mut self,
        now: Moment,
        lane: MessageLane,
        profile: &NetworkProfile,
        leaves_order: bool,
    ) -> Moment {
        let latency = delay_ns(&mut self.prng, profile.latency_ns, profile.tail_factor);
        let at = now.max(self.clogged_until).plus_ns(latency + self.extra_ns);
        if leaves_order {
            return at.plus_ns(self.prng.below(20 * profile.latency_ns));
        }
        let last = &mut self.last_arrival[match lane {
            MessageLane::Control => 0,
            MessageLane::Commit => 1,
            MessageLane::Pull => 2,
        }];
        *last = at.max(last.plus_ns(1));
        *last
    }
}

/// The pair in order, and which side of it the second is.
fn pair(from: Peer, to: Peer) -> ((Peer, Peer), usize) {
    assert_ne!(from.node, to.node, "a node talks to itself without the network");
    if from < to { ((from, to), 0) } else { ((to, from), 1) }
}

fn is_past(contact: Contact, incarnation: Incarnation, session: u64) -> bool {
    let (known, new) = ((contact.incarnation, contact.session), (incarnation, session));
    new < known || (new == known && !contact.open)
}

/// Passes the message through its bytes; `false` when they are damaged and the receiver noticed.
fn pass_codec(flight: &mut Flight, from: Peer, to: Peer, randomness: Randomness) -> bool {
    let bytes = wire::encode(&flight.envelope).to_bytes();
    if flight.corrupt {
        let mut damaged = bytes.to_vec();
        let at = randomness.stream("flip", damaged.len() as u64).below(bytes.len() as u64 * 8);
        damaged[(at / 8) as usize] ^= 1 << (at % 8);
        let result = wire::decode(&damaged.into(), from, to.node);
        assert!(result.is_err(), "bit {at} of {} was flipped and nobody noticed", bytes.len());
        return false;
    }
    let decoded = wire::decode(&bytes, from, to.node).expect("our own bytes decode");
    assert_eq!(decoded, *flight.envelope, "the codec gives back what it got");
    *flight.envelope = decoded;
    true
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
