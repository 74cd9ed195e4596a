//! What clients tell the oracles: what they asked for, and what they were told.

use common::{Code, Epoch, IdempotencyId, Offset, Position, Ranges, StreamId, Version};

/// A workload's name for one transaction. Each record of the transaction carries it in its value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TxnId(pub u64);

/// A transaction as its client meant it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Submission {
    /// Its name.
    pub txn: TxnId,
    /// The idempotency id.
    pub id: Option<IdempotencyId>,
    /// The snapshot of its reads; only looked at when there are read ranges.
    pub read_version: Version,
    /// What it read.
    pub reads: Ranges,
    /// What it writes.
    pub writes: Ranges,
    /// Its streams and their record counts.
    pub sections: Vec<(StreamId, u32)>,
    /// Whether it is one of an ordered lane.
    pub is_in_lane: bool,
}

/// One transaction's records in a block that a consumer got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeenSection {
    /// The place in the batch.
    pub index: u16,
    /// How many records.
    pub record_count: u32,
    /// Whose they are; `None` for the system's own.
    pub txn: Option<TxnId>,
}

/// A block that a consumer got.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeenBlock {
    /// The stream.
    pub stream: StreamId,
    /// The version.
    pub version: Version,
    /// The offset of its first record.
    pub base_offset: Offset,
    /// How many records.
    pub record_count: u32,
    /// crc32c of the body as it arrived.
    pub checksum: u32,
    /// Whose records they are, in order.
    pub sections: Vec<SeenSection>,
}

/// A consumer: one run of pulls over the same streams, from its own start on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConsumerId(pub u64);

/// What a client did or saw.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Observation {
    /// It gives a transaction to its session. A transaction without a later outcome is unknown.
    Submitted(Box<Submission>),
    /// The session said: committed.
    Committed {
        /// Which.
        txn: TxnId,
        /// Where.
        position: Position,
        /// The first offset of each stream.
        offsets: Vec<(StreamId, Offset)>,
    },
    /// The session said: not committed, and never will be.
    NotCommitted {
        /// Which.
        txn: TxnId,
        /// Why.
        code: Code,
        /// The version of the verdict, for conflicts and old reads.
        version: Option<Version>,
    },
    /// It asks for a read version.
    AskedReadVersion {
        /// The client's number for it.
        number: u64,
    },
    /// It got a read version.
    GotReadVersion {
        /// The client's number for it.
        number: u64,
        /// The version.
        version: Version,
    },
    /// A consumer begins (or begins again) above a version.
    Subscribed {
        /// Which.
        consumer: ConsumerId,
        /// Its streams, ascending.
        streams: Vec<StreamId>,
        /// Exclusive.
        after: Version,
    },
    /// A consumer got an answer.
    Pulled {
        /// Which.
        consumer: ConsumerId,
        /// Exclusive.
        after: Version,
        /// Inclusive.
        through: Version,
        /// The blocks, by version, then by stream.
        blocks: Vec<SeenBlock>,
    },
    /// It asks for a trim.
    AskedTrim {
        /// The stream.
        stream: StreamId,
        /// Inclusive.
        through: Version,
    },
    /// It was told that a trim is persisted.
    GotTrim {
        /// The client's epoch.
        epoch: Epoch,
        /// The stream.
        stream: StreamId,
        /// Inclusive.
        through: Version,
        /// The first offset that is left.
        first_offset: Offset,
    },
    /// It asks how streams stand.
    AskedDescription {
        /// The client's epoch.
        epoch: Epoch,
        /// The client's number for it.
        number: u64,
    },
    /// It was told how a stream stands.
    Described {
        /// The client's number for it.
        number: u64,
        /// The stream.
        stream: StreamId,
        /// The first offset that is left.
        first_offset: Offset,
        /// The offset that comes next.
        next_offset: Offset,
        /// Everything at or below is trimmed.
        trimmed_through: Version,
    },
    /// A rule of the workload itself is broken: a sum that does not hold, say.
    Broken(String),
}
