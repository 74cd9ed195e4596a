//! Newtypes for every id and number that crosses a seam.
//!
//! Arithmetic is checked: an overflow is a programmer's error and stops the process with the numbers.

use core::fmt;

use rkyv::{Archive, Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize,
        )]
        pub struct $name(pub u64);

        impl $name {
            /// The smallest value.
            pub const ZERO: Self = Self(0);
            /// The largest value.
            pub const MAX: Self = Self(u64::MAX);

            /// The bare number.
            #[must_use]
            pub const fn raw(self) -> u64 {
                self.0
            }

            /// `self + count`; an overflow stops the process.
            #[must_use]
            pub fn plus(self, count: u64) -> Self {
                match self.0.checked_add(count) {
                    Some(sum) => Self(sum),
                    None => panic!("{self} + {count} overflows"),
                }
            }

            /// `self - count`, or zero when that would be negative.
            #[must_use]
            pub const fn minus_saturating(self, count: u64) -> Self {
                Self(self.0.saturating_sub(count))
            }

            /// How far `self` lies above `lower`; stops the process when it lies below.
            #[must_use]
            pub fn since(self, lower: Self) -> u64 {
                match self.0.checked_sub(lower.0) {
                    Some(distance) => distance,
                    None => panic!("{self} is below {lower}"),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

number! {
    /// Commit order. Advances about 1,000,000 a second; one version is one batch of one proxy.
    /// Version 0 is before the first commit.
    Version, "v"
}
number! {
    /// One life of the write path between two recoveries. Epoch 0 never served.
    Epoch, "e"
}
number! {
    /// A stream: one table, region or topic partition. Ids below [`StreamId::FIRST_USER`] are the
    /// system's own.
    StreamId, "s"
}
number! {
    /// Dense ordinal of a record in its stream, from 0, without gaps (I12).
    Offset, "o"
}
number! {
    /// Identity of a node or of a client, kept on disk by nodes and drawn at random by clients.
    NodeId, "n"
}
number! {
    /// One life of a process; a later life of the same node has a larger number.
    Incarnation, "i"
}
number! {
    /// A requester's own number for a request; unique for one incarnation of the requester.
    RequestId, "r"
}
number! {
    /// Dense ordinal of a frame in one node's segment log, over all epochs, from 1.
    Sequence, "q"
}
number! {
    /// Ordinal of a segment in one node's log directory, from 1, never used twice.
    SegmentId, "g"
}

impl StreamId {
    /// The system stream of idempotency ids: one record for each transaction that carried one.
    pub const IDS: Self = Self(0);
    /// The system stream of stream definitions; see [`crate::catalog`].
    pub const CATALOG: Self = Self(1);
    /// The smallest id that a user's stream can have.
    pub const FIRST_USER: Self = Self(16);

    /// Whether only the system itself writes to this stream.
    #[must_use]
    pub const fn is_system(self) -> bool {
        self.0 < Self::FIRST_USER.0
    }
}

/// A transaction's place in the order of all transactions: its version, then its place in the batch.
///
/// The 10 bytes big-endian of [`Position::versionstamp`] sort as positions do.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize,
)]
pub struct Position {
    /// The version of the batch.
    pub version: Version,
    /// The place in the batch, from 0.
    pub index: u16,
}

impl Position {
    /// Ten bytes: version then index, both big-endian.
    #[must_use]
    pub fn versionstamp(self) -> [u8; 10] {
        let mut stamp = [0; 10];
        stamp[..8].copy_from_slice(&self.version.0.to_be_bytes());
        stamp[8..].copy_from_slice(&self.index.to_be_bytes());
        stamp
    }

    /// The inverse of [`Position::versionstamp`].
    #[must_use]
    pub fn from_versionstamp(stamp: [u8; 10]) -> Self {
        let (mut version, mut index) = ([0; 8], [0; 2]);
        version.copy_from_slice(&stamp[..8]);
        index.copy_from_slice(&stamp[8..]);
        Self { version: Version(u64::from_be_bytes(version)), index: u16::from_be_bytes(index) }
    }
}

impl fmt::Debug for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.version, self.index)
    }
}

/// A client's name for one transaction: it commits at most once (I16).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
pub struct IdempotencyId(pub [u8; 16]);

impl fmt::Display for IdempotencyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for IdempotencyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A machine's place in a node.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Archive, Serialize, Deserialize,
)]
pub enum Role {
    /// The node itself: membership, status, finding the cluster.
    Node,
    /// The leader: elects, locks, recovers, recruits, watches.
    Leader,
    /// Hands out versions.
    Sequencer,
    /// A commit proxy, by its place in the generation.
    Proxy(u8),
    /// A resolver, by its place in the generation.
    Resolver(u8),
    /// The log server: one a node.
    LogServer,
    /// A client session.
    Client,
}

/// One role of one life of one process: what a message is sent to and comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
pub struct Endpoint {
    /// The process.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// The machine in it.
    pub role: Role,
}

impl Endpoint {
    /// The same process, another role.
    #[must_use]
    pub const fn with_role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    /// The process without the role.
    #[must_use]
    pub const fn peer(self) -> Peer {
        Peer { node: self.node, incarnation: self.incarnation }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{:?}", self.node, self.incarnation, self.role)
    }
}

/// One life of one process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
pub struct Peer {
    /// The process.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
}

impl Peer {
    /// A role of this peer.
    #[must_use]
    pub const fn endpoint(self, role: Role) -> Endpoint {
        Endpoint { node: self.node, incarnation: self.incarnation, role }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versionstamps_sort_as_positions_do() {
        let positions = [
            Position { version: Version(1), index: 0 },
            Position { version: Version(1), index: 256 },
            Position { version: Version(255), index: 1 },
            Position { version: Version(256), index: 0 },
        ];
        for pair in positions.windows(2) {
            assert!(pair[0].versionstamp() < pair[1].versionstamp());
            assert_eq!(Position::from_versionstamp(pair[0].versionstamp()), pair[0]);
        }
    }

    #[test]
    #[should_panic(expected = "v3 is below v5")]
    fn a_negative_distance_stops_the_process() {
        let _ = Version(3).since(Version(5));
    }
}
