//! Catching up: a log server that the live generation is written without copies what it has missed.

use rkyv::{Archive, Deserialize, Serialize};

use super::client::{PulledBlock, PulledVersion};
use super::{Body, EpochPlan};
use crate::membership::Seats;
use crate::{Epoch, NodeId, Offset, Payload, StreamId, Version};

/// Leader to a log server that is absent from the live generation: catch up, so that the next one has you.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct CatchUp {
    /// The live epoch's plan.
    pub plan: EpochPlan,
    /// The last generation that the receiver was in; ZERO for the heir of a seat, who was in none.
    pub present_in: Epoch,
    /// The first one that was written without it; the first one of all for an heir.
    pub absent_since: Epoch,
    /// Where that one began, exclusive: what the receiver has above it of older epochs was never committed.
    /// ZERO for an heir.
    pub absent_from: Version,
}

/// Log server to leader: how far it has caught up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct CaughtUp {
    /// Everything of its share up to here is durable there, inclusive.
    pub through: Version,
    /// The last round brought everything that was committed.
    pub is_near: bool,
}

/// Log server to log server: what of the asker's share the receiver is the first to hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Copy {
    /// The asker's number of the round.
    pub round: u64,
    /// Whose share.
    pub node: NodeId,
    /// The log servers that are whole and are asked, in the order of placement.
    pub whole: Vec<NodeId>,
    /// All others that have a share, the asker among them.
    pub others: Vec<NodeId>,
    /// How many log servers hold each stream.
    pub replication: u8,
    /// Which of them sit in seats that were others'.
    pub seats: Seats,
    /// Whether all trims are wanted, or only those above `after`.
    pub wants_all_trims: bool,
    /// Exclusive.
    pub after: Version,
    /// What is wanted whether it is known to be committed or not, inclusive: a recovery version.
    pub through: Version,
}

/// Log server to log server: whole versions of the share.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Copied {
    /// The round.
    pub round: u64,
    /// The question's `after`.
    pub after: Version,
    /// Nothing else of the share is at or below it, inclusive.
    pub through: Version,
    /// The sender has no more that is committed or was asked for.
    pub is_all: bool,
    /// A block can't be read; it is the first one above `through`.
    pub is_damaged: bool,
    /// Streams of the share that are trimmed, as far as that was asked for.
    pub trims: Vec<CopiedTrim>,
    /// The versions that have blocks, ascending.
    pub versions: Vec<PulledVersion>,
    /// The blocks, by version, then by stream.
    pub blocks: Vec<PulledBlock>,
    /// The blocks' bodies.
    #[rkyv(with = rkyv::with::Skip)]
    pub payload: Payload,
}

/// How far a stream is trimmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct CopiedTrim {
    /// The stream.
    pub stream: StreamId,
    /// Inclusive.
    pub through: Version,
    /// The offset of the first record that is left, or that will come next.
    pub first_offset: Offset,
}

impl Body for CatchUp {}
impl Body for CaughtUp {}
impl Body for Copy {}

impl Body for Copied {
    fn payload(&self) -> Option<&Payload> {
        Some(&self.payload)
    }

    fn set_payload(&mut self, payload: Payload) {
        self.payload = payload;
    }
}
