//! Between the roles of the commit pipeline. Every message is for one epoch, which its frame names.

use rkyv::{Archive, Deserialize, Serialize};

use super::Body;
use crate::{Offset, Payload, Ranges, StreamId, Version, WallTime};

/// Proxy to sequencer: a version for my next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct VersionRequest {
    /// The proxy's number for it, dense from 1; requests of one proxy are served in this order.
    pub number: u64,
    /// The proxy has the replies up to this number and will not ask for them again (I15).
    pub answered: u64,
}

/// Sequencer to proxy: the pair. The pairs of all proxies form one chain (I1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct VersionReply {
    /// The request's number.
    pub number: u64,
    /// The version directly before in the chain.
    pub previous_version: Version,
    /// The batch's version.
    pub version: Version,
    /// The sequencer's wall clock.
    pub commit_time: WallTime,
}

/// What a resolver needs to know of a transaction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct ResolveTransaction {
    /// The snapshot of its reads.
    pub read_version: Version,
    /// The resolver's share of what it read.
    pub reads: Ranges,
    /// The resolver's share of what it writes.
    pub writes: Ranges,
    /// Whether to name the conflicting read ranges.
    pub report_conflicts: bool,
    /// This resolver has the last word: no other one is asked for it, and it is in no lane. So it needs no
    /// settlement.
    pub is_final: bool,
}

/// What became of a batch: the word of the proxy, which alone has heard all resolvers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Settlement {
    /// The batch's version.
    pub version: Version,
    /// A bit for each transaction, the lowest of each byte first: whether it commits.
    pub committed: Vec<u8>,
}

impl Settlement {
    /// What became of the transactions of a batch, in its order.
    pub fn new(version: Version, committed: impl IntoIterator<Item = bool>) -> Self {
        let mut bits = Vec::new();
        for (index, committed) in committed.into_iter().enumerate() {
            if index % 8 == 0 {
                bits.push(0);
            }
            bits[index / 8] |= u8::from(committed) << (index % 8);
        }
        Self { version, committed: bits }
    }

    /// Whether a transaction commits; one that is not in the batch does not.
    #[must_use]
    pub fn has(&self, index: usize) -> bool {
        self.committed.get(index / 8).is_some_and(|bits| bits & (1 << (index % 8)) != 0)
    }
}

/// Proxy to resolver: decide this batch. Sent to every resolver for every version.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Resolve {
    /// The version directly before in the chain.
    pub previous_version: Version,
    /// The batch's version.
    pub version: Version,
    /// The proxy has this resolver's replies up to this version of its own (I15).
    pub answered: Version,
    /// What became of earlier batches of this proxy, as far as it has not been sent yet; versions ascend.
    pub settlements: Vec<Settlement>,
    /// The batch in its order.
    pub transactions: Vec<ResolveTransaction>,
}

/// A resolver's word on one transaction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
#[must_use]
pub enum Verdict {
    /// No conflict in this resolver's share.
    Committed,
    /// A read range was written after the read version.
    Conflict {
        /// Indexes into the transaction's read ranges as sent to this resolver, when asked for.
        ranges: Vec<u32>,
    },
    /// The read version left the window.
    TooOld,
    /// No conflict with what is known here to have committed; but a read met a write of the asking proxy that
    /// is not settled here, of this batch or an earlier one. The proxy knows what became of that.
    Yours,
}

/// Resolver to proxy: the verdicts, in the order of the batch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Resolved {
    /// The batch's version.
    pub version: Version,
    /// When this was decided, the resolver knew what had become of all batches of this proxy up to here,
    /// inclusive, so it needs no settlement of them, and left nothing of them to the proxy. This batch's own
    /// version if it needs none either.
    pub settled: Version,
    /// One for each transaction.
    pub verdicts: Vec<Verdict>,
}

/// Proxy to resolver: what became of these batches. One way; what [`Resolved::settled`] does not confirm is
/// sent again.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Settle {
    /// In the order of their versions.
    pub settlements: Vec<Settlement>,
}

/// A block in a push. Bodies follow each other in the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct PushBlock {
    /// The stream; ascending in a push, each once.
    pub stream: StreamId,
    /// How many records.
    pub record_count: u32,
    /// Bytes of its body.
    pub bytes: u32,
    /// crc32c of its body; travels with it to the consumer.
    pub checksum: u32,
}

/// Proxy to log server: make this version durable. Sent to every log server for every version.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Push {
    /// The version directly before in the chain.
    pub previous_version: Version,
    /// The batch's version.
    pub version: Version,
    /// When it was handed out.
    pub commit_time: WallTime,
    /// The highest version that the proxy knows durable on all log servers.
    pub known_committed: Version,
    /// The proxy has this server's acknowledgements of its own pushes up to this version (I15).
    pub answered: Version,
    /// The blocks of the streams that this server holds.
    pub blocks: Vec<PushBlock>,
    /// The blocks' bodies.
    #[rkyv(with = rkyv::with::Skip)]
    pub payload: Payload,
}

impl Body for Push {
    fn payload(&self) -> Option<&Payload> {
        Some(&self.payload)
    }

    fn set_payload(&mut self, payload: Payload) {
        self.payload = payload;
    }
}

/// Where the blocks of a push of this proxy came to lie.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct PushAck {
    /// The push's version.
    pub version: Version,
    /// The first offset of each block, in the order of the push.
    pub base_offsets: Vec<Offset>,
}

/// Whether a log server takes more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub enum LogState {
    /// Yes.
    Open,
    /// Its disk is full: proxies refuse new commits with a reason; what is in flight still fits.
    Full,
}

/// Log server to every proxy of the epoch: everything up to `durable` has been fsynced here (I7).
/// Cumulative: a later one says all that an earlier one did, but for the acknowledgements.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Durable {
    /// Inclusive.
    pub durable: Version,
    /// The receiver's own pushes that have become durable and have not been answered yet.
    pub acks: Vec<PushAck>,
    /// Whether the server takes more.
    pub state: LogState,
}

/// Proxy to log server: this much is known committed, though I have nothing to push now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Announce {
    /// The highest version that the proxy knows durable on all log servers.
    pub known_committed: Version,
}

/// Proxy to log server: are you still unlocked, and how far are you durable?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Confirm {
    /// The proxy's number for the round.
    pub number: u64,
}

/// Log server to proxy: the answer to [`Confirm`]. A locked server refuses instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Archive, Serialize, Deserialize)]
pub struct Confirmed {
    /// The round.
    pub number: u64,
    /// This server's durable version now.
    pub durable: Version,
}

impl Body for VersionRequest {}
impl Body for VersionReply {}
impl Body for Resolve {}
impl Body for Resolved {}
impl Body for Settle {}
impl Body for Durable {}
impl Body for Announce {}
impl Body for Confirm {}
impl Body for Confirmed {}
