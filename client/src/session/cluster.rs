//! Who is there: connections, the newest view of the cluster, and request numbers.
//!
//! ```text
//!  link n1/i7 as c/i3 --- channel Proxy(0)   next 41, outstanding {38, 40}  -> answered below 38
//!  link n2/i2 as c/i4 --- channel Proxy(1)   next  7, outstanding {}        -> answered below 7
//!  view e5: proxies, log servers
//! ```
//!
//! Numbers of commit requests are dense for each connection and proxy, from 1 (I15). All other requests share
//! one space from [`QUESTION_NUMBERS`] on, so that a refusal, which names only a number, is never ambiguous.

use std::collections::BTreeMap;

use common::message::ClusterView;
use common::{Backoff, Endpoint, Epoch, NodeId, Peer, Prng, RequestId, Role, StreamId, placement};

use super::Key;

/// The first number of requests that are no commits.
pub(super) const QUESTION_NUMBERS: u64 = 1 << 62;

#[derive(Clone, Debug, Default)]
struct Channel {
    last: u64,
    /// Commit requests without an answer.
    outstanding: BTreeMap<RequestId, Key>,
}

#[derive(Clone, Debug)]
struct Link {
    peer: Peer,
    me: Endpoint,
    channels: BTreeMap<Role, Channel>,
}

impl Link {
    fn outstanding(self) -> impl Iterator<Item = Key> {
        self.channels.into_values().flat_map(|channel| channel.outstanding.into_values())
    }
}

/// What a view brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Learned {
    /// Nothing that was not known.
    Nothing,
    /// Other proxies or log servers of the same epoch.
    Change,
    /// A new epoch.
    Epoch,
}

/// The session's picture of the cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct Cluster {
    links: BTreeMap<NodeId, Link>,
    view: Option<ClusterView>,
    /// The proxy in use.
    proxy: Option<Endpoint>,
    /// A proxy that did not answer: taken again only when there is no other.
    avoid: Option<Endpoint>,
    /// Whether to ask again who serves.
    pub(super) in_doubt: bool,
    pub(super) backoff: Backoff,
}

impl Cluster {
    pub(super) const fn view(&self) -> Option<&ClusterView> {
        self.view.as_ref()
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.view.as_ref().map_or(Epoch::ZERO, |view| view.epoch)
    }

    /// Takes a fresh connection; returns the commits that were in flight on the one before.
    pub(super) fn connect(&mut self, peer: Peer, me: Endpoint) -> Vec<Key> {
        assert_eq!(me.role, Role::Client, "{me:?} is no client");
        let link = Link { peer, me, channels: BTreeMap::new() };
        let old = self.links.insert(peer.node, link);
        if let Some(old) = &old {
            assert!(old.me.incarnation != me.incarnation, "{me:?} is a connection's second life");
        }
        old.map(|old| old.outstanding().collect()).unwrap_or_default()
    }

    /// Forgets a connection; returns the commits that were in flight on it.
    pub(super) fn disconnect(&mut self, peer: Peer) -> Vec<Key> {
        if self.links.get(&peer.node).is_none_or(|link| link.peer != peer) {
            return Vec::new();
        }
        let link = self.links.remove(&peer.node);
        link.map(|link| link.outstanding().collect()).unwrap_or_default()
    }

    pub(super) fn reaches(&self, endpoint: Endpoint) -> bool {
        self.links.get(&endpoint.node).is_some_and(|link| link.peer == endpoint.peer())
    }

    /// Who this client is to that node.
    pub(super) fn me_at(&self, node: NodeId) -> Option<Endpoint> {
        self.links.get(&node).map(|link| link.me)
    }

    pub(super) fn learn(&mut self, view: ClusterView) -> Learned {
        if view.epoch < self.epoch() {
            return Learned::Nothing;
        }
        let learned = match &self.view {
            Some(old) if old.epoch == view.epoch => {
                let same = old.proxies == view.proxies && old.log_servers == view.log_servers;
                if same { Learned::Nothing } else { Learned::Change }
            }
            _ => Learned::Epoch,
        };
        if view.proxies.iter().any(|proxy| self.reaches(*proxy)) {
            self.in_doubt = false;
            self.backoff.reset();
        }
        if self.proxy.is_some_and(|proxy| !view.proxies.contains(&proxy)) {
            self.proxy = None;
        }
        self.view = Some(view);
        learned
    }

    /// The proxy to talk to: the same as long as it serves.
    pub(super) fn pick_proxy(&mut self, rng: &mut Prng) -> Option<Endpoint> {
        if let Some(proxy) = self.proxy.filter(|proxy| self.reaches(*proxy)) {
            return Some(proxy);
        }
        let view = self.view.as_ref()?;
        let all: Vec<Endpoint> =
            view.proxies.iter().copied().filter(|proxy| self.reaches(*proxy)).collect();
        let good: Vec<Endpoint> =
            all.iter().copied().filter(|proxy| self.avoid != Some(*proxy)).collect();
        let from = if good.is_empty() { &all } else { &good };
        self.proxy = if from.is_empty() { None } else { Some(*rng.pick(from)) };
        self.proxy
    }

    /// Whether the proxy serves in the newest view, and is connected.
    pub(super) fn serves(&self, proxy: Endpoint) -> bool {
        self.reaches(proxy) && self.view.as_ref().is_some_and(|view| view.proxies.contains(&proxy))
    }

    /// The proxy did not do what it should: prefer another, and ask who serves.
    pub(super) fn suspect(&mut self, proxy: Endpoint) {
        self.in_doubt = true;
        self.avoid = Some(proxy);
        if self.proxy == Some(proxy) {
            self.proxy = None;
        }
    }

    /// The connected log servers that hold a stream, best first.
    pub(super) fn holders(&self, stream: StreamId) -> Vec<Endpoint> {
        self.all_holders(stream).filter(|server| self.reaches(*server)).collect()
    }

    fn all_holders(&self, stream: StreamId) -> impl Iterator<Item = Endpoint> {
        let view = self.view.iter();
        view.flat_map(move |view| {
            let nodes: Vec<NodeId> = view.log_servers.iter().map(|server| server.node).collect();
            let places =
                placement::holders(stream, &view.seats, &nodes, &view.absent, view.replication);
            places.into_iter().map(|place| view.log_servers[place])
        })
    }

    /// How many log servers hold a stream, connected or not.
    pub(super) fn holder_count(&self, stream: StreamId) -> usize {
        self.all_holders(stream).count()
    }

    /// The connected nodes, one after the other.
    pub(super) fn nth_node(&self, place: usize) -> Option<Endpoint> {
        let at = place.checked_rem(self.links.len())?;
        self.links.values().nth(at).map(|link| link.peer.endpoint(Role::Node))
    }

    /// Any connected node.
    pub(super) fn any_node(&self, rng: &mut Prng) -> Option<Endpoint> {
        let peers: Vec<Peer> = self.links.values().map(|link| link.peer).collect();
        if peers.is_empty() { None } else { Some(rng.pick(&peers).endpoint(Role::Node)) }
    }

    /// The next number of a commit request, and the number below which all are answered.
    pub(super) fn number_commit(&mut self, proxy: Endpoint, key: Key) -> (RequestId, RequestId) {
        let link = self.links.get_mut(&proxy.node).expect("only a connected proxy is picked");
        let channel = link.channels.entry(proxy.role).or_default();
        channel.last += 1;
        assert!(channel.last < QUESTION_NUMBERS, "{} commits on one connection", channel.last);
        let number = RequestId(channel.last);
        channel.outstanding.insert(number, key);
        (number, channel.outstanding.first_key_value().map_or(number, |(first, _)| *first))
    }

    /// Commit requests without an answer.
    pub(super) fn outstanding_count(&self) -> usize {
        let channels = self.links.values().flat_map(|link| link.channels.values());
        channels.map(|channel| channel.outstanding.len()).sum()
    }

    /// Takes the answer to a commit request, or gives the request up: which commit was it?
    pub(super) fn settle_commit(&mut self, proxy: Endpoint, number: RequestId) -> Option<Key> {
        let channel = self.links.get_mut(&proxy.node)?.channels.get_mut(&proxy.role)?;
        channel.outstanding.remove(&number)
    }

    /// The `<=` chain of every channel.
    pub(super) fn check(&self) {
        for link in self.links.values() {
            for channel in link.channels.values() {
                let newest = channel.outstanding.last_key_value().map_or(0, |(last, _)| last.0);
                assert!(newest <= channel.last, "{newest} was never given, only {}", channel.last);
            }
        }
    }
}
