//! The segment log of one node: all streams, all epochs, one frame for each version.
//!
//! ```text
//! accept --> gathering --flush--> active segment --roll--> sealed --all trimmed--> spare
//!               |                     ^                                              |
//!               `--> tail (memory)    `--- next segment, prepared ahead <------------'
//! ```
//!
//! - [`append`]: gathering and flushing; one flush is in flight, what comes meanwhile is the next
//! - [`segments`]: preparing, sealing and recycling files
//! - [`order`]: the blocks as they lie on the disk
//! - [`index`], [`tail`]: where blocks lie, on disk and in memory
//! - [`meta`]: locks, epochs and trims, persisted beside the log
//! - [`open`]: reading all of it back
//! - [`read`]: bodies of blocks that have left the tail
//! - [`mend`]: writing a damaged block again, where it lies
//!
//! # Invariants
//! ```text
//! durable sequence <= written sequence        durable version <= last version        (I7)
//! the active segment holds the newest frame, or none yet
//! ```
//! An error of a write or of a barrier ends the log: nothing is announced after it.

mod append;
pub(crate) mod index;
mod mend;
mod meta;
mod open;
mod order;
mod read;
mod segments;
mod tail;
mod trim;

pub(crate) use append::{Accepted, AcceptedBlock};
pub(crate) use mend::{MendId, MendOutcome};
pub(crate) use read::{ReadFailure, ReadId};
pub(crate) use segments::fits_segment;

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use common::disk::{
    DiskCompletion, DiskError, DiskOp, DiskOpId, DiskOutput, DiskRequest, File, Lane,
};
use common::message::LogState;
use common::{Cx, Epoch, NodeId, Plant, SegmentId, Sequence, Version, WallTime};

use append::Flight;
use index::Index;
use mend::{MendOp, MendsOnDisk};
use meta::MetaSlots;
use open::Opening;
use read::Reads;
use segments::{Files, Segment};
use tail::Tail;

/// What a disk completion led to.
#[derive(Clone, Debug)]
pub(crate) enum LogEvent {
    /// The log is open; its numbers stand.
    Opened,
    /// A block of the stream of ids was found while opening, in version order.
    IdBlock {
        /// Its version.
        version: Version,
        /// When the version was handed out.
        commit_time: WallTime,
        /// Its body.
        body: Bytes,
    },
    /// The durable version moved.
    Flushed,
    /// [`Log::state`] changed.
    StateChanged,
    /// A read is done.
    Read {
        /// Which one.
        id: ReadId,
        /// The bodies in the order asked; or the blocks that can't be had, ascending by version.
        result: Result<Vec<Bytes>, Vec<ReadFailure>>,
    },
    /// A block was looked at again, or written.
    Mend {
        /// Which one.
        id: MendId,
        /// What came of it.
        outcome: MendOutcome,
    },
}

#[derive(Clone, Debug)]
enum Phase {
    Closed,
    Opening(Box<Opening>),
    Open,
    /// Shutting down: the rest is flushed, then the meta is marked clean.
    Stopping {
        marked: Option<u64>,
    },
    /// Stopped in order, or halted.
    Ended,
}

/// What a request to the disk was for.
#[derive(Clone, Debug)]
enum Purpose {
    /// Part of opening.
    Open(open::OpenOp),
    /// The flush in flight.
    Flush,
    /// A meta slot of that generation.
    Meta(u64),
    /// A new spare.
    CreateSpare(u32),
    /// A spare becomes the next segment.
    PrepareNext(SegmentId),
    /// The first part of sealing; its barrier comes with the second.
    Footer,
    /// The second part of sealing.
    Trailer(SegmentId),
    /// A segment becomes a spare.
    Recycle(u32),
    /// A file goes.
    Remove,
    /// A run of a read.
    Read { id: ReadId, run: usize },
    /// Looking at a damaged block, or writing it.
    Mend { id: MendId, op: MendOp },
}

/// The newest frame that was given to the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Tip {
    sequence: Sequence,
    hash: u32,
    epoch: Epoch,
    version: Version,
    commit_time: WallTime,
    known_committed: Version,
}

/// The log.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    node: NodeId,
    phase: Phase,
    ops: BTreeMap<DiskOpId, Purpose>,
    next_op: u64,

    segments: BTreeMap<SegmentId, Segment>,
    active: Option<SegmentId>,
    files: Files,

    gathering: VecDeque<Accepted>,
    gathering_bytes: u64,
    flight: Option<Flight>,
    tip: Tip,
    durable_sequence: Sequence,

    /// The last version that was accepted; or, at the begin of an epoch, its recovery version.
    last: Version,
    /// The last version that is durable, with everything below it.
    durable: Version,
    /// Known committed, in an epoch that is in the register.
    known_committed: Version,

    index: Index,
    tail: Tail,
    meta: MetaSlots,
    reads: Reads,
    mends: MendsOnDisk,
    /// What this step has led to.
    events: Vec<LogEvent>,
    /// Blocks of ids that were found while opening.
    id_blocks: Vec<LogEvent>,
}

impl Log {
    pub(crate) fn new(node: NodeId) -> Self {
        Self {
            node,
            phase: Phase::Closed,
            ops: BTreeMap::new(),
            next_op: 1,
            segments: BTreeMap::new(),
            active: None,
            files: Files::default(),
            gathering: VecDeque::new(),
            gathering_bytes: 0,
            flight: None,
            tip: Tip::default(),
            durable_sequence: Sequence::ZERO,
            last: Version::ZERO,
            durable: Version::ZERO,
            known_committed: Version::ZERO,
            index: Index::default(),
            tail: Tail::default(),
            meta: MetaSlots::new(node),
            reads: Reads::default(),
            mends: MendsOnDisk::default(),
            events: Vec::new(),
            id_blocks: Vec::new(),
        }
    }

    /// Takes a completion in; what it led to, in order.
    pub(crate) fn handle_disk(
        &mut self,
        cx: &mut Cx<'_>,
        completion: DiskCompletion,
    ) -> Vec<LogEvent> {
        let Some(purpose) = self.ops.remove(&completion.id) else {
            panic!("{:?} was never asked, or is answered twice", completion.id);
        };
        if matches!(self.phase, Phase::Ended) {
            return Vec::new();
        }
        match (purpose, completion.result) {
            (Purpose::Open(op), result) => self.handle_open(cx, op, result),
            (Purpose::CreateSpare(number), result) => self.handle_created(cx, number, result),
            (Purpose::Read { id, run }, result) => self.handle_run(cx, id, run, result),
            (Purpose::Mend { id, op: MendOp::Read { offset, bytes } }, result) => {
                self.handle_look(cx, id, offset, bytes, result.map(data));
            }
            (Purpose::Mend { id, op: MendOp::Write }, Ok(_)) => self.handle_rewritten(cx, id),
            (Purpose::Flush, Err(_)) if cx.planted(Plant::IgnoreSyncError) => {
                self.handle_flushed(cx);
            }
            (purpose, Err(error)) => self.fail(cx, &purpose, &error),
            (Purpose::Flush, Ok(_)) => self.handle_flushed(cx),
            (Purpose::Meta(generation), Ok(_)) => {
                self.meta.written(generation);
                self.after_sync(cx);
            }
            (Purpose::PrepareNext(id), Ok(_)) => self.handle_prepared(id),
            (Purpose::Footer | Purpose::Remove, Ok(_)) => {}
            (Purpose::Trailer(id), Ok(_)) => {
                self.handle_sealed(id);
                self.after_sync(cx);
            }
            (Purpose::Recycle(number), Ok(_)) => self.handle_recycled(cx, number),
        }
        if matches!(self.phase, Phase::Opening(_)) {
            self.take_ids(cx);
        }
        core::mem::take(&mut self.events)
    }

    /// Starts whatever can start now.
    pub(crate) fn pump(&mut self, cx: &mut Cx<'_>) {
        if !matches!(self.phase, Phase::Open | Phase::Stopping { .. }) {
            return;
        }
        self.start_flush(cx);
        self.prepare_segments(cx);
        self.recycle(cx);
        self.write_meta(cx);
        self.stop(cx);
    }

    /// Flushes the rest, marks the meta clean, then halts with the reason `stopped`.
    pub(crate) fn shut_down(&mut self, cx: &mut Cx<'_>) {
        match self.phase {
            Phase::Open => self.phase = Phase::Stopping { marked: None },
            Phase::Closed | Phase::Opening(_) => self.end(cx, "stopped", "before the log was open"),
            Phase::Stopping { .. } | Phase::Ended => return,
        }
        self.pump(cx);
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        let Phase::Stopping { marked } = &mut self.phase else { return };
        if self.flight.is_some() {
            return;
        }
        if !self.gathering.is_empty() {
            // Without a segment to come, waiting is in vain; none of it was announced.
            if self.files.state == LogState::Full && self.ops.is_empty() {
                let count = self.gathering.len();
                self.end(cx, "stopped", format!("disk full, {count} frames not written"));
            }
            return;
        }
        match *marked {
            None => {
                *marked = Some(self.meta.mark_clean(self.tip.sequence));
                self.write_meta(cx);
            }
            // Background work is waited for, so that nothing is written after the word.
            Some(ticket) if self.meta.persisted() >= ticket && self.ops.is_empty() => {
                assert_eq!(self.durable, self.last, "everything accepted is durable");
                self.end(cx, "stopped", format!("in order at {}", self.durable));
            }
            Some(_) => {}
        }
    }

    fn end(&mut self, cx: &mut Cx<'_>, reason: &'static str, detail: impl Into<String>) {
        self.phase = Phase::Ended;
        cx.halt(reason, detail);
    }

    /// An error of a write or a barrier: what is on the disk is unknown, so nothing more is announced.
    fn fail(&mut self, cx: &mut Cx<'_>, purpose: &Purpose, error: &DiskError) {
        let reason = match purpose {
            Purpose::Flush | Purpose::Meta(_) | Purpose::Trailer(_) | Purpose::Mend { .. } => {
                "fsync_failed"
            }
            _ => "write_failed",
        };
        self.end(cx, reason, format!("{purpose:?}: {error}"));
    }

    fn request(&mut self, cx: &mut Cx<'_>, lane: Lane, purpose: Purpose, op: DiskOp) {
        let id = DiskOpId(self.next_op);
        self.next_op += 1;
        self.ops.insert(id, purpose);
        cx.disk(DiskRequest { id, lane, op });
    }

    /// Whether the log takes frames and questions.
    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Stopping { .. })
    }

    /// Whether it accepts nothing more.
    pub(crate) const fn is_stopping(&self) -> bool {
        matches!(self.phase, Phase::Stopping { .. } | Phase::Ended)
    }

    /// Whether everything accepted is durable.
    pub(crate) fn is_flushed(&self) -> bool {
        self.flight.is_none() && self.gathering.is_empty()
    }

    pub(crate) const fn last(&self) -> Version {
        self.last
    }

    pub(crate) const fn durable(&self) -> Version {
        self.durable
    }

    pub(crate) const fn known_committed(&self) -> Version {
        self.known_committed
    }

    /// The latest epoch that this log has seen, by a frame or by a recruitment.
    pub(crate) fn epoch(&self) -> Epoch {
        self.tip.epoch.max(self.meta.epoch())
    }

    /// How far the log of a generation's epoch reaches here. An epoch after it, which came to nothing, cut it
    /// where it began; the latest of them lowest.
    pub(crate) fn end_of(&self, generation: Epoch) -> Version {
        match self.meta.epochs().last() {
            Some(start) if start.epoch > generation => start.previous_version.min(self.durable),
            _ => self.durable,
        }
    }

    pub(crate) const fn index(&self) -> &Index {
        &self.index
    }

    pub(crate) const fn tail(&self) -> &Tail {
        &self.tail
    }

    pub(crate) const fn state(&self) -> LogState {
        self.files.state
    }

    /// Everything up to `version` is durable on all log servers of an epoch that is in the register.
    pub(crate) fn raise_known_committed(&mut self, version: Version) {
        self.known_committed = self.known_committed.max(version);
    }

    /// Begins an epoch: frames of older ones above `recovery_version` are dropped, here and whenever the log
    /// is opened again. Whether there were any.
    pub(crate) fn begin_epoch(&mut self, epoch: Epoch, recovery_version: Version) -> bool {
        assert!(self.is_flushed(), "I8: {epoch} begins while frames are on their way");
        assert!(
            recovery_version <= self.last && recovery_version >= self.known_committed,
            "I9: {epoch} begins at {recovery_version}; committed {}, last {}",
            self.known_committed,
            self.last
        );
        let dropped = self.last > recovery_version;
        // A segment on its way out may be there again after a crash, with frames that an old start drops.
        let is_leaving =
            |purpose: &Purpose| matches!(purpose, Purpose::Recycle(_) | Purpose::Remove);
        let oldest = if self.ops.values().any(is_leaving) {
            Some(Epoch::ZERO)
        } else {
            self.segments.values().next().map(|segment| segment.epoch_before)
        };
        self.meta.begin_epoch(epoch, recovery_version, oldest);
        self.drop_above(recovery_version);
        self.last = recovery_version;
        self.durable = recovery_version;
        dropped
    }

    /// Nothing of this server's share lies between its last version and `recovery_version`: the epoch goes on
    /// from there.
    pub(crate) fn skip_to(&mut self, recovery_version: Version) {
        assert!(self.is_flushed(), "I7: frames are on their way below {recovery_version}");
        assert!(
            self.durable == self.last && self.last <= recovery_version,
            "I1: {recovery_version} is below {}, {} of it durable",
            self.last,
            self.durable
        );
        self.last = recovery_version;
        self.durable = recovery_version;
    }

    fn drop_above(&mut self, version: Version) {
        let segments = &mut self.segments;
        self.index.drop_above(version, |block| segments::release(segments, block));
        self.tail.drop_above(version);
    }

    /// The state's ordering chain.
    pub(crate) fn check(&self) {
        self.tail.check();
        assert!(
            self.durable_sequence <= self.tip.sequence,
            "I7: {} is durable of {}",
            self.durable_sequence,
            self.tip.sequence
        );
        assert!(self.durable <= self.last, "I7: {} is durable of {}", self.durable, self.last);
        let bytes: u64 = self.gathering.iter().map(Accepted::frame_bytes).sum();
        assert_eq!(bytes, self.gathering_bytes, "the gathering counts its bytes");
        self.files.check();
        self.mends.check();
        if !self.is_open() {
            return;
        }
        let live: u64 = self.segments.values().map(|segment| segment.live_blocks).sum();
        assert_eq!(live, self.index.block_count(), "segments count the live blocks");
        if let Some(active) = self.active {
            let last = self.segments.keys().next_back();
            assert_eq!(last, Some(&active), "the active segment is the last one");
        }
    }

    /// Every block of the index.
    pub(crate) fn check_index(&self) {
        self.index.check();
    }
}

/// The data of a read that went well.
fn data(output: DiskOutput) -> Bytes {
    match output {
        DiskOutput::Data(bytes) => bytes,
        other => panic!("a read was answered with {other:?}"),
    }
}

const fn segment_file(id: SegmentId) -> File {
    File::Segment(id)
}
