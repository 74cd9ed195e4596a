//! Between clients and the cluster.

use rkyv::{Archive, Deserialize, Serialize};

use super::Body;
use crate::membership::{MemberChange, Seats};
use crate::{
    Endpoint, Epoch, IdempotencyId, NodeId, Offset, Payload, Position, Ranges, Refusal, RequestId,
    StreamId, Version, WallTime,
};

/// What a commit request is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub enum CommitKind {
    /// A client's transaction.
    User,
    /// A client's question whether an earlier request with the same idempotency id can still commit: it
    /// conflicts on the id like the original but leaves no record.
    Fence,
    /// The leader's first commit of an epoch.
    Recovery,
}

/// A place in an ordered lane: the commits of one lane are decided in the order of their sequence, and
/// after one that failed none of the lane commits any more.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub struct LaneOrder {
    /// The client's number for the lane; a broken lane is never used again.
    pub lane: u64,
    /// The commit's place, dense from 0.
    pub sequence: u64,
}

/// One stream's records in a commit request. Their bytes follow each other in the payload.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub struct SectionEntry {
    /// The stream.
    pub stream: StreamId,
    /// How many records.
    pub record_count: u32,
    /// Bytes of the encoded records.
    pub bytes: u32,
}

/// Client to proxy: commit this. The payload holds the encoded records of all sections.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct CommitRequest {
    /// The client's number, growing by one with each request to one proxy.
    pub request: RequestId,
    /// The client has the answers to all requests below this one and will never ask for them again (I15).
    pub answered_below: RequestId,
    /// What it is for.
    pub kind: CommitKind,
    /// The snapshot that the reads were made at; only looked at when there are read ranges.
    pub read_version: Version,
    /// Whether a refusal for conflict shall name the read ranges.
    pub report_conflicts: bool,
    /// Commits at most once under this name (I16).
    pub id: Option<IdempotencyId>,
    /// The place in an ordered lane.
    pub lane: Option<LaneOrder>,
    /// What was read.
    pub reads: Ranges,
    /// What is written.
    pub writes: Ranges,
    /// The records by stream; a stream occurs once at most.
    pub sections: Vec<SectionEntry>,
    /// The records' bytes.
    #[rkyv(with = rkyv::with::Skip)]
    pub payload: Payload,
}

impl CommitRequest {
    /// A transaction that reads nothing, writes nothing and has no id: the ground for others.
    #[must_use]
    pub fn empty(kind: CommitKind, request: RequestId) -> Self {
        Self {
            request,
            answered_below: request,
            kind,
            read_version: Version::ZERO,
            report_conflicts: false,
            id: None,
            lane: None,
            reads: Ranges::default(),
            writes: Ranges::default(),
            sections: Vec::new(),
            payload: Payload::new(),
        }
    }
}

impl Body for CommitRequest {
    fn payload(&self) -> Option<&Payload> {
        Some(&self.payload)
    }

    fn set_payload(&mut self, payload: Payload) {
        self.payload = payload;
    }
}

/// Proxy to client: what became of a commit request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct CommitReply {
    /// The request.
    pub request: RequestId,
    /// What became of it.
    pub outcome: CommitOutcome,
}

/// What became of a commit request. Everything but `Committed` means: not committed, and never will be.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
#[must_use]
pub enum CommitOutcome {
    /// Durable on every log server of the epoch, with everything before it (I3).
    Committed {
        /// Its place in the order of all transactions.
        position: Position,
        /// When its version was handed out.
        commit_time: WallTime,
        /// The offset of the first record of each section, in the order of the request.
        base_offsets: Vec<Offset>,
    },
    /// A read range was written after the read version.
    Conflict {
        /// The version at which that was decided.
        version: Version,
        /// Indexes into the request's read ranges, when asked for. An index behind the last stands for
        /// the idempotency id: it has been used.
        ranges: Vec<u32>,
    },
    /// The read version left the conflict window.
    TooOld {
        /// The version at which that was decided.
        version: Version,
    },
    /// Not even tried.
    Refused(Refusal),
}

impl Body for CommitReply {}

/// Client to proxy: the newest version that every acknowledged commit is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct ReadVersionRequest {
    /// The client's number.
    pub request: RequestId,
}

/// Proxy to client: reads at `version` see every commit that was acknowledged before the question (I4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct ReadVersionReply {
    /// The request.
    pub request: RequestId,
    /// The read version.
    pub version: Version,
}

/// Client or proxy to log server: whole versions, please.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Pull {
    /// The asker's number.
    pub request: RequestId,
    /// The streams; sorted, without repetition.
    pub streams: Vec<StreamId>,
    /// Versions above this one (exclusive).
    pub after: Version,
    /// Stop before the version that would make the answer larger than this; one version always fits.
    pub bytes_max: u32,
    /// Wait up to this long for a block of the streams; 0 answers at once.
    pub wait_ms: u32,
    /// Don't wait once everything up to this version is known (inclusive): a progress mark is what the
    /// consumer needs then. 0 waits for blocks. A later pull of the same streams from the same place takes
    /// the place of one that waits.
    pub want: Version,
}

/// Log server to consumer: all blocks of the streams in `after < version <= through`. The payload holds the
/// blocks' bodies.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Pulled {
    /// The request.
    pub request: RequestId,
    /// The request's `after`.
    pub after: Version,
    /// The progress mark (inclusive): nothing else of these streams is at or below it (I11).
    pub through: Version,
    /// The versions that have blocks, ascending.
    pub versions: Vec<PulledVersion>,
    /// The blocks, by version, then by stream.
    pub blocks: Vec<PulledBlock>,
    /// The blocks' bodies.
    #[rkyv(with = rkyv::with::Skip)]
    pub payload: Payload,
}

impl Body for Pulled {
    fn payload(&self) -> Option<&Payload> {
        Some(&self.payload)
    }

    fn set_payload(&mut self, payload: Payload) {
        self.payload = payload;
    }
}

/// A version in an answer to a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct PulledVersion {
    /// The version.
    pub version: Version,
    /// When it was handed out.
    pub commit_time: WallTime,
    /// How many of the blocks are its.
    pub block_count: u32,
}

/// A block in an answer to a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct PulledBlock {
    /// The stream.
    pub stream: StreamId,
    /// The offset of its first record.
    pub base_offset: Offset,
    /// How many records.
    pub record_count: u32,
    /// Bytes of its body.
    pub bytes: u32,
    /// crc32c of its body, as the proxy computed it.
    pub checksum: u32,
}

/// Client to log server: everything of the stream at or below `through` may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Trim {
    /// The client's number.
    pub request: RequestId,
    /// The stream.
    pub stream: StreamId,
    /// Inclusive.
    pub through: Version,
}

/// Log server to client: the trim is persisted (I13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Trimmed {
    /// The request.
    pub request: RequestId,
    /// The stream's trim position now (inclusive): perhaps above what was asked for, or below, when less is
    /// committed; 0 when this log server has never had a block of the stream.
    pub through: Version,
    /// The offset of the first record that is left, or that will come next.
    pub first_offset: Offset,
}

/// Client to log server: how do these streams stand?
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Describe {
    /// The client's number.
    pub request: RequestId,
    /// The streams.
    pub streams: Vec<StreamId>,
}

/// How a stream stands on one log server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct StreamState {
    /// The stream.
    pub stream: StreamId,
    /// The offset of the first record that is left.
    pub first_offset: Offset,
    /// The offset that the next committed record will get.
    pub next_offset: Offset,
    /// Everything at or below is trimmed.
    pub trimmed_through: Version,
    /// The last committed version that has a block of it; 0 when there was none.
    pub last_version: Version,
    /// Bytes of the blocks that are left.
    pub bytes: u64,
}

/// Log server to client: how the streams stand, in the order asked.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Described {
    /// The request.
    pub request: RequestId,
    /// One entry for each stream asked for.
    pub streams: Vec<StreamState>,
}

/// Client to log server: did a transaction with this id commit? Answered once everything up to `at_least`
/// is known committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct FindId {
    /// The client's number.
    pub request: RequestId,
    /// The id.
    pub id: IdempotencyId,
    /// The version of the fence: what the original could have committed at is at or below.
    pub at_least: Version,
}

/// A section of a transaction that was found by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct FoundSection {
    /// The stream.
    pub stream: StreamId,
    /// The offset of its first record; `None` when this log server does not hold the stream, or its block
    /// has been trimmed.
    pub base_offset: Option<Offset>,
}

/// A transaction that was found by its id.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct FoundId {
    /// Where it committed.
    pub position: Position,
    /// When its version was handed out.
    pub commit_time: WallTime,
    /// Its sections, in the order of the request.
    pub sections: Vec<FoundSection>,
}

/// Log server to client: the transaction of that id, or that there is none at or below `through`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct IdFound {
    /// The request.
    pub request: RequestId,
    /// The transaction.
    pub found: Option<FoundId>,
    /// The known committed version that the answer holds for.
    pub through: Version,
    /// What committed at or below this version may have been forgotten: there, no transaction found proves
    /// nothing.
    pub forgotten_through: Version,
}

/// Client to node: who serves?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct FindCluster {
    /// The client's number.
    pub request: RequestId,
}

/// Node to client: who serves, as far as this node knows. Also sent unasked when that changes, with request
/// 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct ClusterView {
    /// The request, or 0.
    pub request: RequestId,
    /// The epoch; only an epoch whose generation is in the register is ever named (I10).
    pub epoch: Epoch,
    /// The recovery version of the epoch.
    pub recovery_version: Version,
    /// Where to commit; empty while no epoch serves.
    pub proxies: Vec<Endpoint>,
    /// Where to pull, in the order of placement.
    pub log_servers: Vec<Endpoint>,
    /// Log servers that have to catch up: what they hold is not whole.
    pub absent: Vec<NodeId>,
    /// How many log servers hold each stream, the absent ones counted.
    pub replication: u8,
    /// Which log servers sit in seats that were others'.
    pub seats: Seats,
    /// The name of the leader's phase, for people.
    pub phase: String,
    /// Where clients reach the cluster's nodes; empty for a node that is alone.
    pub addresses: Vec<NodeAddress>,
}

/// Where a node takes connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct NodeAddress {
    /// The node.
    pub node: NodeId,
    /// `host:port`.
    pub address: String,
}

/// Client to node: a report for people and scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Status {
    /// The client's number.
    pub request: RequestId,
}

/// Node to client: the report.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct StatusReply {
    /// The request.
    pub request: RequestId,
    /// One JSON object.
    pub json: String,
}

/// Client to node: decide about a node. Only the leader's node takes it, and answers once the register holds
/// it; asked again, it says so again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct ChangeMember {
    /// The client's number.
    pub request: RequestId,
    /// About whom.
    pub node: NodeId,
    /// What.
    pub change: MemberChange,
}

/// Node to client: it is decided, for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct MemberChanged {
    /// The request.
    pub request: RequestId,
}

/// Any to any: no, and why.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Refused {
    /// The request, or 0 when there was none.
    pub request: RequestId,
    /// Why.
    pub refusal: Refusal,
}

impl Body for ReadVersionRequest {}
impl Body for ReadVersionReply {}
impl Body for Pull {}
impl Body for Trim {}
impl Body for Trimmed {}
impl Body for Describe {}
impl Body for Described {}
impl Body for FindId {}
impl Body for IdFound {}
impl Body for FindCluster {}
impl Body for ClusterView {}
impl Body for Status {}
impl Body for StatusReply {}
impl Body for ChangeMember {}
impl Body for MemberChanged {}
impl Body for Refused {}
