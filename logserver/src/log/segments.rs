//! Segment files: prepared ahead, sealed behind, recycled.
//!
//! ```text
//! Create (zeros) --> spare --Rename--> next --> active --> sealed --Rename--> spare
//!                     ^                          roll  footer, trailer          |
//!                     `---------------------------------------------------------'
//! ```
//!
//! All of it goes through the background lane: a flush waits for a file only when none was ready
//! ([`Mark::SegmentLate`]). A full disk shows when a spare can't be made. The server then says so at once,
//! while the files that exist still take what is in flight, and says that it is open again when all spares
//! are there.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::disk::{DiskError, DiskOp, DiskOutput, File, Lane, PAGE_BYTES, padded};
use common::message::LogState;
use common::{
    Cx, Epoch, Mark, NodeId, Note, Payload, Plant, SegmentId, Sequence, StreamId, Version,
};

use super::index::BlockRef;
use super::{Log, LogEvent, Phase, Purpose, Tip, segment_file};
use crate::format::frame::head_bytes;
use crate::format::segment::{
    EpochStart, Footer, FooterEntry, SEGMENT_HEADER_BYTES, SegmentHeader, footer_bytes,
    trailer_offset,
};
use crate::role::SPARES;

/// How long a full disk is left alone, unless something is recycled.
const FULL_RETRY: Duration = Duration::from_millis(500);

/// A segment that holds frames, or the active one.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// Length of the file.
    pub(super) file_bytes: u64,
    pub(super) first_sequence: Sequence,
    pub(super) frame_count: u64,
    /// What the first frame follows.
    pub(super) hash_before: u32,
    pub(super) epoch_before: Epoch,
    pub(super) version_before: Version,
    /// Whether the header page has been given to the disk.
    pub(super) has_header: bool,
    /// Behind the last frame.
    pub(super) frames_end: u64,
    /// Where the next group starts: whole pages.
    pub(super) at: u64,
    /// Its last frame; before there is one, the frame that it follows.
    pub(super) last: Tip,
    /// Blocks of the index that lie here.
    pub(super) live_blocks: u64,
    /// Reads in flight.
    pub(super) readers: u32,
    pub(super) seal: Seal,
    /// Is closed as soon as there is a next one, however much room there is.
    pub(super) is_closing: bool,
    /// Each stream's last version here.
    pub(super) streams: BTreeMap<StreamId, Version>,
    /// For the footer; given up when that is durable.
    pub(super) entries: Vec<FooterEntry>,
    pub(super) epoch_starts: Vec<EpochStart>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seal {
    /// Takes frames, or waits for its footer.
    Unsealed,
    /// The footer is on its way.
    Sealing,
    /// The footer is durable.
    Sealed,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Next {
    #[default]
    Missing,
    Preparing(SegmentId),
    Ready(SegmentId),
}

/// The files that are no part of the log yet, or no more.
#[derive(Clone, Debug)]
pub(super) struct Files {
    next: Next,
    spares: BTreeSet<u32>,
    /// The spare that is being made.
    creating: Option<u32>,
    /// Spares that are becoming ready by recycling.
    recycling: BTreeSet<u32>,
    spare_number: u32,
    /// The next id for a segment. No file holds anything under it or a higher one: the newest segment of the
    /// log stays, and what is newer and no part of the log is not made a spare (`Opening::used`).
    next_id: SegmentId,
    pub(super) state: LogState,
    /// Creating waits for the timer.
    is_waiting: bool,
    /// The lack of a next segment was marked.
    is_late: bool,
}

impl Default for Files {
    fn default() -> Self {
        Self {
            next: Next::Missing,
            spares: BTreeSet::new(),
            creating: None,
            recycling: BTreeSet::new(),
            spare_number: 0,
            next_id: SegmentId(1),
            state: LogState::Open,
            is_waiting: false,
            is_late: false,
        }
    }
}

impl Files {
    pub(super) fn check(&self) {
        for number in self.spares.iter().chain(&self.recycling).chain(&self.creating) {
            assert!(*number < self.spare_number, "spare {number} of {}", self.spare_number);
        }
        if let Next::Preparing(id) | Next::Ready(id) = self.next {
            assert!(id < self.next_id, "{id} is prepared below {}", self.next_id);
        }
    }

    /// A spare that was found when the log was opened.
    pub(super) fn found_spare(&mut self, number: u32, is_fit: bool) {
        if is_fit {
            self.spares.insert(number);
        }
        self.spare_number = self.spare_number.max(number + 1);
    }

    /// A segment id that was found when the log was opened.
    pub(super) fn found_id(&mut self, id: SegmentId) {
        self.next_id = self.next_id.max(id.plus(1));
    }

    fn take_number(&mut self) -> u32 {
        let number = self.spare_number;
        self.spare_number += 1;
        number
    }

    pub(super) fn spare_count(&self) -> usize {
        self.spares.len()
    }

    pub(super) const fn next_is_ready(&self) -> bool {
        matches!(self.next, Next::Ready(_))
    }
}

impl Segment {
    /// An empty segment whose first frame will follow `tip`.
    pub(super) fn new(file_bytes: u64, tip: &Tip) -> Self {
        Self {
            file_bytes,
            first_sequence: tip.sequence.plus(1),
            frame_count: 0,
            hash_before: tip.hash,
            epoch_before: tip.epoch,
            version_before: tip.version,
            has_header: false,
            frames_end: SEGMENT_HEADER_BYTES,
            at: SEGMENT_HEADER_BYTES,
            last: *tip,
            live_blocks: 0,
            readers: 0,
            seal: Seal::Unsealed,
            is_closing: false,
            streams: BTreeMap::new(),
            entries: Vec::new(),
            epoch_starts: Vec::new(),
        }
    }

    /// The header page's content.
    pub(super) const fn header(&self, node: NodeId, segment: SegmentId) -> SegmentHeader {
        SegmentHeader {
            node,
            segment,
            segment_bytes: self.file_bytes,
            first_sequence: self.first_sequence,
            previous_hash: self.hash_before,
            epoch: self.epoch_before,
            previous_version: self.version_before,
        }
    }

    /// Whether `group_bytes` (whole pages) with `blocks` more blocks leave room for footer and trailer.
    pub(super) fn has_room(&self, group_bytes: u64, blocks: usize) -> bool {
        // A group could begin an epoch with every frame, though it never does.
        const EPOCH_STARTS_SPARE: usize = 16;
        let starts = self.epoch_starts.len() + EPOCH_STARTS_SPARE;
        let footer = footer_bytes(self.entries.len() + blocks, starts);
        self.at + group_bytes + footer <= trailer_offset(self.file_bytes)
    }
}

/// Whether an empty segment of `file_bytes` has room for a frame of `blocks` whose bodies are `bytes`
/// together.
pub(crate) fn fits_segment(file_bytes: u64, blocks: usize, bytes: u64) -> bool {
    let frame = head_bytes(blocks) as u64 + bytes;
    Segment::new(file_bytes, &Tip::default()).has_room(padded(frame), blocks)
}

/// One block of a segment is not needed any more.
pub(super) fn release(segments: &mut BTreeMap<SegmentId, Segment>, block: &BlockRef) {
    let segment = segments.get_mut(&block.segment).expect("a block lies in a segment");
    assert!(segment.live_blocks > 0, "{} has no block to release", block.segment);
    segment.live_blocks -= 1;
}

impl Log {
    /// Goes on in the next segment. `false` when there is none yet.
    pub(super) fn roll(&mut self, cx: &mut Cx<'_>) -> bool {
        let Next::Ready(id) = self.files.next else {
            if !self.files.is_late && self.active.is_some() {
                self.files.is_late = true;
                cx.mark(Mark::SegmentLate);
            }
            return false;
        };
        assert!(self.flight.is_none(), "I7: {id} begins while a flush is in flight");
        if let Some(old) = self.active {
            cx.mark(Mark::SegmentRolled);
            self.seal(cx, old);
        }
        self.files.next = Next::Missing;
        self.files.is_late = false;
        self.segments.insert(id, Segment::new(cx.knobs.segment_bytes, &self.tip));
        self.active = Some(id);
        true
    }

    /// Writes the footer of a segment whose frames are all durable.
    pub(super) fn seal(&mut self, cx: &mut Cx<'_>, id: SegmentId) {
        let node = self.node;
        let segment = self.segments.get_mut(&id).expect("a segment that is sealed exists");
        assert_eq!(segment.seal, Seal::Unsealed, "{id} is sealed once");
        assert!(segment.frame_count > 0, "{id} is sealed without a frame");
        segment.seal = Seal::Sealing;
        let last = segment.last;
        let footer = Footer {
            node,
            segment: id,
            frames_end: segment.frames_end,
            first_sequence: segment.first_sequence,
            last_sequence: last.sequence,
            last_hash: last.hash,
            last_version: last.version,
            last_epoch: last.epoch,
            last_known_committed: last.known_committed,
            last_commit_time: last.commit_time,
            epoch_starts: core::mem::take(&mut segment.epoch_starts),
            entries: core::mem::take(&mut segment.entries),
        };
        let offset = padded(segment.frames_end);
        let trailer_at = trailer_offset(segment.file_bytes);
        let encoded = footer.encode();
        assert!(
            offset + encoded.len() as u64 <= trailer_at,
            "the footer of {id} at {offset} reaches {trailer_at}"
        );
        let trailer = footer.trailer(offset, &encoded).encode();
        let write = |offset, data: bytes::Bytes, durable| DiskOp::Write {
            file: segment_file(id),
            offset,
            data: Payload::from(data),
            durable,
        };
        let footer_write = write(offset, encoded, false);
        self.request(cx, Lane::Background, Purpose::Footer, footer_write);
        let trailer_write = write(trailer_at, trailer, true);
        self.request(cx, Lane::Background, Purpose::Trailer(id), trailer_write);
    }

    pub(super) fn handle_sealed(&mut self, id: SegmentId) {
        let segment = self.segments.get_mut(&id).expect("a segment goes only when it is sealed");
        assert_eq!(segment.seal, Seal::Sealing, "{id} is sealed once");
        segment.seal = Seal::Sealed;
    }

    /// Makes spares, and the next segment out of one.
    pub(super) fn prepare_segments(&mut self, cx: &mut Cx<'_>) {
        if self.is_stopping() && self.gathering.is_empty() {
            return;
        }
        if self.files.next == Next::Missing
            && let Some(number) = self.files.spares.pop_first()
        {
            let id = self.files.next_id;
            self.files.next_id = id.plus(1);
            self.files.next = Next::Preparing(id);
            let op = DiskOp::Rename { from: File::Spare(number), to: segment_file(id) };
            self.request(cx, Lane::Background, Purpose::PrepareNext(id), op);
        }
        let coming = self.files.spares.len() + self.files.recycling.len();
        let is_short = (coming as u64) < cx.knobs.spare_segments;
        if is_short && self.files.creating.is_none() && !self.files.is_waiting {
            let number = self.files.take_number();
            self.files.creating = Some(number);
            let bytes = cx.knobs.segment_bytes;
            assert!(bytes.is_multiple_of(PAGE_BYTES), "{bytes} bytes are no whole pages");
            let op = DiskOp::Create { file: File::Spare(number), bytes };
            self.request(cx, Lane::Background, Purpose::CreateSpare(number), op);
        }
    }

    pub(super) fn handle_prepared(&mut self, id: SegmentId) {
        assert_eq!(self.files.next, Next::Preparing(id), "one segment is prepared at a time");
        self.files.next = Next::Ready(id);
    }

    pub(super) fn handle_created(
        &mut self,
        cx: &mut Cx<'_>,
        number: u32,
        result: Result<DiskOutput, DiskError>,
    ) {
        assert_eq!(self.files.creating, Some(number), "one spare is made at a time");
        self.files.creating = None;
        match result {
            Ok(_) => {
                self.files.spares.insert(number);
                self.has_space(cx);
            }
            Err(DiskError::Full) => {
                self.files.is_waiting = true;
                cx.arm_after(SPARES, FULL_RETRY);
                if self.files.state == LogState::Open {
                    self.files.state = LogState::Full;
                    cx.mark(Mark::DiskFull);
                    self.events.push(LogEvent::StateChanged);
                }
            }
            Err(error) => self.fail(cx, &Purpose::CreateSpare(number), &error),
        }
    }

    /// Tries to make spares again.
    pub(crate) fn handle_spares_timer(&mut self, _cx: &mut Cx<'_>) {
        self.files.is_waiting = false;
    }

    /// A spare has come; a full log opens again when all of them are there.
    fn has_space(&mut self, cx: &mut Cx<'_>) {
        let is_stocked = self.files.spares.len() as u64 >= cx.knobs.spare_segments;
        if self.files.state == LogState::Full && is_stocked {
            self.files.state = LogState::Open;
            cx.mark(Mark::DiskFreed);
            self.events.push(LogEvent::StateChanged);
        }
    }

    /// Lets segments go whose blocks are all trimmed or dropped.
    pub(super) fn recycle(&mut self, cx: &mut Cx<'_>) {
        // I13: trims, and epoch starts that dropped blocks, are persisted before segments go.
        if !matches!(self.phase, Phase::Open) || !self.meta.is_settled() {
            return;
        }
        // The segment of the newest durable frame stays: the chain goes on from there after a restart. A
        // flush in flight may have begun the one after it, and may be torn.
        let durable = self.durable_sequence;
        let mut from_last = self.segments.iter().rev();
        let newest = from_last.find(|(_, segment)| segment.first_sequence <= durable);
        let Some((newest, _)) = newest else { return };
        let newest = *newest;
        let goes = |segment: &Segment| {
            (segment.live_blocks == 0 || cx.planted(Plant::RecycleLive))
                && segment.readers == 0
                && segment.seal == Seal::Sealed
        };
        let gone: Vec<SegmentId> = self
            .segments
            .iter()
            .filter(|(id, segment)| **id < newest && goes(segment))
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            let segment = self.segments.remove(&id).expect("it was just found");
            cx.mark(Mark::SegmentRecycled);
            cx.note(Note::Recycled {
                last_version: segment.last.version,
                streams: segment.streams.into_iter().collect(),
            });
            self.retire(cx, id, segment.file_bytes);
        }
    }

    /// Makes a file that no frame is needed of a spare, or removes it when there are enough.
    pub(super) fn retire(&mut self, cx: &mut Cx<'_>, id: SegmentId, file_bytes: u64) {
        let kept = self.files.spares.len() + self.files.recycling.len();
        let is_wanted = (kept as u64) < cx.knobs.spare_segments + cx.knobs.spare_segments_max;
        if is_wanted && file_bytes == cx.knobs.segment_bytes {
            let number = self.files.take_number();
            self.files.recycling.insert(number);
            let op = DiskOp::Rename { from: segment_file(id), to: File::Spare(number) };
            self.request(cx, Lane::Background, Purpose::Recycle(number), op);
        } else {
            self.remove_segment(cx, id);
        }
    }

    /// Removes a file that no frame is needed of.
    pub(super) fn remove_segment(&mut self, cx: &mut Cx<'_>, id: SegmentId) {
        let op = DiskOp::Remove { file: segment_file(id) };
        self.request(cx, Lane::Background, Purpose::Remove, op);
        // Its space may be what a spare was missing.
        self.files.is_waiting = false;
    }

    /// Removes spares that are more than were ever wanted.
    pub(super) fn remove_spares_above(&mut self, cx: &mut Cx<'_>, count_max: u64) {
        while self.files.spares.len() as u64 > count_max {
            let number = self.files.spares.pop_last().expect("there is more than one");
            let op = DiskOp::Remove { file: File::Spare(number) };
            self.request(cx, Lane::Background, Purpose::Remove, op);
        }
    }

    pub(super) fn handle_recycled(&mut self, cx: &mut Cx<'_>, number: u32) {
        assert!(self.files.recycling.remove(&number), "spare {number} was on its way");
        self.files.spares.insert(number);
        self.has_space(cx);
    }
}
