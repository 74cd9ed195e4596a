//! Notes: what happened, for oracles, metrics and traces alike.

use crate::{Code, Endpoint, Epoch, Offset, Position, RequestId, Role, StreamId, Version};

/// Something that happened in a machine. The machine's endpoint comes with it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Note {
    /// The sequencer handed out a pair (I1).
    Assigned {
        /// The epoch.
        epoch: Epoch,
        /// The version directly before.
        previous: Version,
        /// The version.
        version: Version,
        /// Who got it.
        proxy: Endpoint,
    },
    /// A resolver decided a batch and moved on (I1, I2).
    Decided {
        /// The epoch.
        epoch: Epoch,
        /// The version directly before.
        previous: Version,
        /// The version.
        version: Version,
        /// How many transactions committed.
        committed: u32,
        /// How many conflicted or were too old.
        refused: u32,
    },
    /// A log server took a push in chain order (I1, I2).
    Accepted {
        /// The epoch.
        epoch: Epoch,
        /// The version directly before.
        previous: Version,
        /// The version.
        version: Version,
        /// Each block's stream, first offset and record count (I12).
        blocks: Vec<(StreamId, Offset, u32)>,
    },
    /// An absent log server begins to catch up: what it holds above `from` of older epochs is void.
    CatchingUp {
        /// The epoch that it copies under.
        epoch: Epoch,
        /// Inclusive.
        from: Version,
    },
    /// An absent log server took a version that it had missed (I12).
    Copied {
        /// The epoch that it was copied under.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// Each block's stream, first offset and record count.
        blocks: Vec<(StreamId, Offset, u32)>,
    },
    /// A log server's durable version moved (I7).
    Durable {
        /// The epoch of the last frame.
        epoch: Epoch,
        /// Inclusive.
        version: Version,
    },
    /// A log server's known committed version moved (I11).
    KnownCommitted {
        /// Inclusive.
        version: Version,
    },
    /// A proxy acknowledged a commit (I3).
    Acknowledged {
        /// The epoch.
        epoch: Epoch,
        /// Its place.
        position: Position,
        /// The client.
        client: Endpoint,
        /// The client's request.
        request: RequestId,
        /// Each section's stream and first offset.
        offsets: Vec<(StreamId, Offset)>,
    },
    /// A proxy answered a read version (I4).
    ReadVersion {
        /// The epoch.
        epoch: Epoch,
        /// The version.
        version: Version,
        /// When the question came, ns on the proxy's clock.
        asked: crate::Time,
    },
    /// A request was refused.
    Refused {
        /// The code.
        code: Code,
    },
    /// A log server answered a lock (I8).
    Locked {
        /// The epoch of the lock: older ones are refused.
        epoch: Epoch,
        /// What it said is durable.
        durable: Version,
    },
    /// The leader entered a phase of recovery.
    Phase {
        /// The epoch.
        epoch: Epoch,
        /// The phase's name.
        name: &'static str,
    },
    /// The leader fixed the recovery version (I9).
    RecoveryVersion {
        /// The new epoch.
        epoch: Epoch,
        /// RV.
        recovery_version: Version,
        /// RTV.
        first_version: Version,
    },
    /// The generation is in the register: the commit point of recovery (I10).
    GenerationWritten {
        /// The epoch.
        epoch: Epoch,
    },
    /// Clients learn of the epoch's proxies (I10).
    Serving {
        /// The epoch.
        epoch: Epoch,
    },
    /// A log server gave data to a consumer (I11).
    Delivered {
        /// The consumer.
        to: Endpoint,
        /// Exclusive.
        after: Version,
        /// Inclusive.
        through: Version,
    },
    /// A trim is persisted (I13).
    Trimmed {
        /// The stream.
        stream: StreamId,
        /// Inclusive.
        through: Version,
        /// The first offset that is left.
        first_offset: Offset,
    },
    /// A log server dropped a segment whose blocks are all trimmed (I13).
    Recycled {
        /// The last version in it.
        last_version: Version,
        /// Each stream's last version in it.
        streams: Vec<(StreamId, Version)>,
    },
    /// A log server opened its directory.
    Opened {
        /// The last version that it found whole.
        durable: Version,
        /// Frames that were cut off as torn, if any.
        torn_frames: u32,
        /// Segments in the log.
        segments: u32,
    },
    /// A log server has mended a damaged block: it was written again and read back.
    Mended {
        /// Whose block.
        stream: StreamId,
        /// Its version.
        version: Version,
        /// Where the body came from; the log server itself when it was still in its memory.
        from: crate::NodeId,
    },
    /// A log server has read all of its log through.
    Scrubbed {
        /// How many blocks it read.
        blocks: u64,
        /// How many of them were damaged.
        damaged: u64,
    },
    /// A role began (or, with `false`, ended).
    RoleChanged {
        /// The role.
        role: Role,
        /// The epoch.
        epoch: Epoch,
        /// Whether it began.
        began: bool,
    },
    /// Something that an operator should read.
    Warning {
        /// Stable word.
        code: &'static str,
        /// For people.
        detail: String,
    },
}
