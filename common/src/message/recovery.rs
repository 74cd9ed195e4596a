//! Between the leader, the nodes and the log servers. Every message is for the leader's epoch, which its
//! frame names.

use rkyv::{Archive, Deserialize, Serialize};

use super::Body;
use crate::membership::Seats;
use crate::{Endpoint, Epoch, NodeId, Peer, Role, StreamId, Version, placement};

/// Leader to candidate: this epoch's leader lives. Who hears it leaves the register alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Beat {}

/// Leader to candidate: lead now, I am about to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct HandOver {}

/// Leader to log server: refuse every older epoch, for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Lock {
    /// The epoch of the last generation in the register: the end of what it wrote is asked for.
    pub generation: Epoch,
}

/// Log server to leader: locked, persistently; everything that was accepted is durable (I8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Locked {
    /// The highest version of the generation that this server has, inclusive, with everything below it; it
    /// will never announce more for an older epoch. What epochs after the generation left here, which came to
    /// nothing, does not count: nobody else may have cut what they cut.
    pub durable: Version,
    /// The highest version that it knows committed.
    pub known_committed: Version,
}

/// A resolver and where its share of the key space begins.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct ResolverShare {
    /// The resolver.
    pub resolver: Endpoint,
    /// The first key of its share; it ends where the next one begins.
    pub begin: Vec<u8>,
}

/// Everything about an epoch that its roles must agree on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct EpochPlan {
    /// The epoch.
    pub epoch: Epoch,
    /// RV: the last version of the old epochs that survives.
    pub recovery_version: Version,
    /// RTV: the first version of this epoch; its previous version is RV.
    pub first_version: Version,
    /// Who leads.
    pub leader: Endpoint,
    /// Who hands out versions.
    pub sequencer: Endpoint,
    /// Who commits.
    pub proxies: Vec<Endpoint>,
    /// Who resolves; the first share begins with the empty key.
    pub resolvers: Vec<ResolverShare>,
    /// Who keeps the log, in the order of placement.
    pub log_servers: Vec<Endpoint>,
    /// Log servers that are not whole up to RV: their shares have one copy less until they have caught up.
    /// Fewer than `replication`.
    pub absent: Vec<NodeId>,
    /// Those of `log_servers` that were absent from the generation before: they copy what they miss up to RV
    /// before they answer.
    pub returning: Vec<NodeId>,
    /// How many log servers hold each stream, the absent ones counted.
    pub replication: u8,
    /// Which of the log servers, absent ones among them, sit in seats that were others'.
    pub seats: Seats,
}

impl EpochPlan {
    /// The places in `log_servers` of those that hold `stream`, best first; at least one.
    #[must_use]
    pub fn holders(&self, stream: StreamId) -> Vec<usize> {
        let present: Vec<NodeId> = self.log_servers.iter().map(|server| server.node).collect();
        placement::holders(stream, &self.seats, &present, &self.absent, self.replication)
    }

    /// The ordering that every plan keeps; stops the process when it doesn't.
    pub fn check(&self) {
        assert!(
            self.first_version.since(self.recovery_version) > 2 * crate::LIFE_VERSIONS_MAX,
            "I5: {} is not far enough above {}",
            self.first_version,
            self.recovery_version
        );
        assert!(!self.proxies.is_empty() && !self.log_servers.is_empty(), "an epoch has all roles");
        assert!(
            self.resolvers.first().is_some_and(|first| first.begin.is_empty())
                && self.resolvers.windows(2).all(|pair| pair[0].begin < pair[1].begin),
            "the shares cover the key space in order"
        );
        let replication = usize::from(self.replication);
        let (present, absent) = (self.log_servers.len(), self.absent.len());
        assert!(
            (1..=present + absent).contains(&replication) && absent < replication,
            "I9: {replication} copies on {present} log servers, {absent} more are absent"
        );
        let is_whole = |server: &&Endpoint| !self.returning.contains(&server.node);
        assert!(
            self.log_servers.iter().filter(is_whole).count() + self.returning.len() == present
                && absent + self.returning.len() < replication,
            "I9: {:?} return to {:?}, {absent} are absent of {replication} copies",
            self.returning,
            self.log_servers
        );
        let is_present = |node| self.log_servers.iter().any(|server| server.node == node);
        assert!(!self.absent.iter().any(|node| is_present(*node)), "{:?} are there", self.absent);
    }
}

/// Leader to node: play this role in this epoch. A role of an older epoch ends with it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Recruit {
    /// The role.
    pub role: Role,
    /// The epoch.
    pub plan: EpochPlan,
}

/// Node to leader: the role is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Recruited {
    /// The role.
    pub role: Role,
}

/// Leader to node: the generation is in the register; clients may know of it (I10).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Serve {
    /// The epoch.
    pub plan: EpochPlan,
}

/// Node to leader: clients are being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Serving {}

/// The first message on a connection, from both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Hello {
    /// Who speaks.
    pub peer: Peer,
    /// The lowest protocol version that the speaker knows.
    pub protocol_min: u16,
    /// The highest one.
    pub protocol_max: u16,
    /// Whether the speaker is a client rather than a node.
    pub is_client: bool,
}

/// The first message on a connection between nodes, from both sides.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct NodeHello {
    /// Who speaks.
    pub peer: Peer,
    /// Drawn anew for each life: two processes that claim the same one differ in it.
    pub stamp: u64,
    /// The lowest protocol version that the speaker knows.
    pub protocol_min: u16,
    /// The highest one.
    pub protocol_max: u16,
    /// The name of the speaker's cluster.
    pub cluster: String,
    /// A checksum of what the speaker takes its cluster to be; nodes that differ in it warn.
    pub definition: u32,
}

impl Body for Beat {}
impl Body for HandOver {}
impl Body for Lock {}
impl Body for Locked {}
impl Body for Recruit {}
impl Body for Recruited {}
impl Body for Serve {}
impl Body for Serving {}
impl Body for Hello {}
impl Body for NodeHello {}
