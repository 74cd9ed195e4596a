//! Opening: everything that the directory holds, read back and judged.
//!
//! ```text
//! List -> meta slots -> first and last page of each segment -> each segment in order: footer, or scan
//!      -> blocks of the stream of ids -> what is in doubt, again -> barriers -> footers and meta, durable
//!      -> open
//! ```
//!
//! - A segment goes on from the one before: by sequence and hash, unless segments between were recycled.
//! - A torn tail is cut where the next segment, or nothing, goes on; the log always continues in a new
//!   segment, so that what was cut can't become valid again.
//! - Anything else that is damaged ends the process with a report; nothing is changed on the disk
//!   (`corrupt_log`).
//! - Blocks that a later epoch dropped, by its start in the meta, are passed over.

mod doubt;
mod segments;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use common::disk::{DiskError, DiskOp, DiskOutput, File, Lane, PAGE_BYTES, padded};
use common::{Cx, Note, SegmentId, StreamId, Version};

use self::doubt::InDoubt;
use super::{Log, LogEvent, Phase, Purpose, data, segment_file};
use crate::format::meta::{MetaChoice, choose};
use crate::format::scan::Scanner;
use crate::format::segment::{SegmentHeader, Trailer};
use crate::log::index::BlockRef;
use crate::log::meta::MetaSlots;
use crate::log::segments::{Seal, Segment};

/// Blocks of ids that are read at once.
const ID_BLOCKS_MAX: usize = 256;

/// A request to the disk while opening.
#[derive(Clone, Copy, Debug)]
pub(super) enum OpenOp {
    List,
    CreateMeta,
    ReadMeta(u8),
    ReadHeader(SegmentId),
    ReadTrailer(SegmentId),
    ReadFooter(SegmentId),
    ReadChunk {
        id: SegmentId,
        offset: u64,
        bytes: u64,
    },
    /// What is in doubt of a segment, through `end`.
    ReadAgain {
        id: SegmentId,
        offset: u64,
        end: u64,
    },
    /// The same, written through `next`.
    WriteAgain {
        id: SegmentId,
        next: u64,
        end: u64,
    },
    Barrier,
}

/// How far opening has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Opening {
    in_flight: usize,
    meta_bytes: [Option<u64>; 2],
    meta_slots: [Bytes; 2],
    /// Segments whose edges are to be read.
    edges: VecDeque<SegmentId>,
    found: BTreeMap<SegmentId, Found>,
    /// The segment that is being read: those below are done.
    current: Option<SegmentId>,
    scan: Option<Scan>,
    torn_frames: u64,
    /// Files that are no part of the log and yet hold something under their own id.
    used: BTreeSet<SegmentId>,
    in_doubt: InDoubt,
    /// A torn end that the next segment must agree with.
    torn: Option<(SegmentId, String)>,
    /// Blocks of ids that are still to be read.
    ids: VecDeque<BlockRef>,
    reading_ids: Vec<BlockRef>,
    /// The meta generation that must be durable before the log is open.
    ticket: Option<u64>,
}

/// What the edges of a segment's file say.
#[derive(Clone, Debug, Default)]
struct Found {
    file_bytes: u64,
    header: Option<SegmentHeader>,
    trailer: Option<Trailer>,
}

#[derive(Clone, Debug)]
struct Scan {
    scanner: Scanner,
    next_offset: u64,
    fed: u64,
    /// Chunks that came early; `None`: unreadable.
    early: BTreeMap<u64, (u64, Option<Bytes>)>,
}

/// Why the log can't be opened.
struct Damage {
    reason: &'static str,
    detail: String,
}

type Judged<T> = Result<T, Damage>;

fn corrupt<T>(detail: impl Into<String>) -> Judged<T> {
    Err(Damage { reason: "corrupt_log", detail: detail.into() })
}

impl Log {
    /// Begins to read the directory.
    pub(crate) fn open(&mut self, cx: &mut Cx<'_>) {
        assert!(matches!(self.phase, Phase::Closed), "a log is opened once");
        self.phase = Phase::Opening(Box::default());
        self.ask(cx, OpenOp::List, DiskOp::List);
    }

    fn opening(&mut self) -> &mut Opening {
        match &mut self.phase {
            Phase::Opening(opening) => opening,
            other => panic!("the log is not being opened but {other:?}"),
        }
    }

    fn ask(&mut self, cx: &mut Cx<'_>, op: OpenOp, request: DiskOp) {
        self.opening().in_flight += 1;
        self.request(cx, Lane::Background, Purpose::Open(op), request);
    }

    fn read_page(&mut self, cx: &mut Cx<'_>, op: OpenOp, id: SegmentId, offset: u64, bytes: u64) {
        self.ask(cx, op, DiskOp::Read { file: segment_file(id), offset, bytes });
    }

    pub(super) fn handle_open(
        &mut self,
        cx: &mut Cx<'_>,
        op: OpenOp,
        result: Result<DiskOutput, DiskError>,
    ) {
        self.opening().in_flight -= 1;
        if let Err(damage) = self.take_answer(cx, op, result) {
            self.end(cx, damage.reason, damage.detail);
        }
    }

    fn take_answer(
        &mut self,
        cx: &mut Cx<'_>,
        op: OpenOp,
        result: Result<DiskOutput, DiskError>,
    ) -> Judged<()> {
        match (op, result) {
            (OpenOp::List, Ok(DiskOutput::Listing { files, .. })) => self.take_listing(cx, &files),
            (OpenOp::CreateMeta, Ok(_)) => self.after_meta_files(cx),
            (OpenOp::Barrier, Ok(_)) => {
                self.after_barriers(cx);
                Ok(())
            }
            (OpenOp::ReadAgain { id, offset, end }, Ok(output)) => {
                self.take_again(cx, id, offset, end, data(output));
                Ok(())
            }
            (OpenOp::WriteAgain { id, next, end }, Ok(_)) => {
                self.after_again(cx, id, next, end);
                Ok(())
            }
            (op @ OpenOp::Barrier, Err(error)) => {
                Err(Damage { reason: "fsync_failed", detail: format!("{op:?}: {error}") })
            }
            (OpenOp::ReadMeta(slot), Ok(output)) => {
                self.opening().meta_slots[usize::from(slot)] = data(output);
                self.after_meta_files(cx)
            }
            (OpenOp::ReadHeader(id), result) => self.take_header(cx, id, result.map(data)),
            (OpenOp::ReadTrailer(id), result) => self.take_trailer(cx, id, result.map(data)),
            (OpenOp::ReadFooter(id), result) => self.take_footer(cx, id, result.map(data)),
            (OpenOp::ReadChunk { id, offset, bytes }, result) => {
                self.take_chunk(cx, id, offset, bytes, result.map(data))
            }
            (op, Ok(output)) => panic!("{op:?} was answered with {output:?}"),
            (op, Err(DiskError::Full)) => Err(Damage {
                reason: "disk_full",
                detail: format!("{op:?}: no space for the first files of a log"),
            }),
            (op, Err(error)) => {
                Err(Damage { reason: "open_failed", detail: format!("{op:?}: {error}") })
            }
        }
    }

    fn take_listing(&mut self, cx: &mut Cx<'_>, files: &[(File, u64)]) -> Judged<()> {
        for (file, bytes) in files {
            match *file {
                File::Meta(slot) if slot < 2 => {
                    self.opening().meta_bytes[usize::from(slot)] = Some(*bytes);
                }
                File::Meta(_) => {}
                File::Spare(number) => {
                    let is_fit = *bytes == cx.knobs.segment_bytes;
                    self.files.found_spare(number, is_fit);
                    if !is_fit {
                        let op = DiskOp::Remove { file: *file };
                        self.request(cx, Lane::Background, Purpose::Remove, op);
                    }
                }
                File::Segment(id) => {
                    self.files.found_id(id);
                    let found = Found { file_bytes: *bytes, ..Found::default() };
                    self.opening().found.insert(id, found);
                }
            }
        }
        let opening = self.opening();
        if opening.meta_bytes == [None, None] && !opening.found.is_empty() {
            return corrupt("there are segments but no meta files");
        }
        for slot in 0..2_u8 {
            let bytes = self.opening().meta_bytes[usize::from(slot)];
            let file = File::Meta(slot);
            match bytes {
                Some(bytes) => {
                    let op = DiskOp::Read { file, offset: 0, bytes: padded(bytes.max(1)) };
                    self.ask(cx, OpenOp::ReadMeta(slot), op);
                }
                None => {
                    let op = DiskOp::Create { file, bytes: PAGE_BYTES };
                    self.ask(cx, OpenOp::CreateMeta, op);
                }
            }
        }
        Ok(())
    }

    fn after_meta_files(&mut self, cx: &mut Cx<'_>) -> Judged<()> {
        let opening = self.opening();
        if opening.in_flight > 0 {
            return Ok(());
        }
        let [zero, one] = &opening.meta_slots;
        let has_segments = !opening.found.is_empty();
        match choose(zero, one) {
            MetaChoice::Found { meta, .. } if meta.node != self.node => {
                let detail = format!("the directory is {}'s, this is {}", meta.node, self.node);
                return Err(Damage { reason: "foreign_log", detail });
            }
            MetaChoice::Found { meta, .. } => self.meta = MetaSlots::restore(&meta),
            MetaChoice::Fresh if has_segments => {
                return corrupt("there are segments but the meta files are empty");
            }
            MetaChoice::FirstTorn { flaw } if has_segments => {
                return corrupt(format!(
                    "there are segments but the only meta slot is damaged: {flaw}"
                ));
            }
            MetaChoice::Fresh | MetaChoice::FirstTorn { .. } => {}
            MetaChoice::Corrupt { flaws: [zero, one] } => {
                return corrupt(format!("both meta slots are damaged: {zero}; {one}"));
            }
        }
        for (stream, through, first_offset) in self.meta.trims() {
            self.index.restore_trim(stream, through, first_offset);
        }
        let opening = self.opening();
        opening.edges = opening.found.keys().copied().collect();
        self.read_edges(cx)
    }

    fn after_segments(&mut self, cx: &mut Cx<'_>) -> Judged<()> {
        if let Some(last) = self.meta.clean_shutdown()
            && last != self.tip.sequence
        {
            let found = self.tip.sequence;
            return corrupt(format!("the log was closed in order at {last} and ends at {found}"));
        }
        // An epoch that recruited this server and left no frame.
        let latest = self.meta.epochs().last().copied();
        if let Some(start) = latest.filter(|start| start.epoch > self.tip.epoch) {
            self.last = start.previous_version;
        }
        self.durable_sequence = self.tip.sequence;
        self.durable = self.last;
        if self.known_committed > self.last {
            let (committed, last) = (self.known_committed, self.last);
            return corrupt(format!("{committed} was committed and the log ends at {last}"));
        }
        let ids = self.index.stream(StreamId::IDS);
        let ids: VecDeque<BlockRef> =
            ids.into_iter().flat_map(|stream| stream.after(Version::ZERO)).copied().collect();
        self.opening().ids = ids;
        self.read_ids(cx);
        Ok(())
    }

    /// Reads the next blocks of ids, then opens.
    fn read_ids(&mut self, cx: &mut Cx<'_>) {
        let opening = self.opening();
        let count = opening.ids.len().min(ID_BLOCKS_MAX);
        if count > 0 {
            opening.reading_ids = opening.ids.drain(..count).collect();
            let wanted = opening.reading_ids.iter().map(|block| (StreamId::IDS, *block)).collect();
            let _ = self.read(cx, wanted);
            return;
        }
        self.sync_what_was_found(cx);
    }

    /// Writes the footers that are missing, and the next meta generation, which also says that the log may
    /// change.
    fn after_barriers(&mut self, cx: &mut Cx<'_>) {
        if self.opening().in_flight > 0 {
            return;
        }
        let is_unsealed = |segment: &Segment| segment.seal == Seal::Unsealed;
        let unsealed: Vec<SegmentId> =
            self.segments.iter().filter(|(_, s)| is_unsealed(s)).map(|(id, _)| *id).collect();
        for id in unsealed {
            self.seal(cx, id);
        }
        self.meta.mark_unclean();
        let ticket = self.meta.touch(true);
        self.opening().ticket = Some(ticket);
        self.write_meta(cx);
    }

    /// Takes an answer to [`Log::read_ids`].
    pub(super) fn take_ids(&mut self, cx: &mut Cx<'_>) {
        for event in core::mem::take(&mut self.events) {
            let LogEvent::Read { result, .. } = event else { continue };
            let blocks = core::mem::take(&mut self.opening().reading_ids);
            match result {
                Ok(bodies) => {
                    for (block, body) in blocks.iter().zip(bodies) {
                        let (version, commit_time) = (block.version, block.commit_time);
                        self.id_blocks.push(LogEvent::IdBlock { version, commit_time, body });
                    }
                }
                Err(failures) => {
                    let failure = &failures[0];
                    let detail = format!(
                        "ids of {} in segment {}: {}",
                        failure.version, failure.segment, failure.what
                    );
                    return self.end(cx, "corrupt_log", detail);
                }
            }
            self.read_ids(cx);
        }
    }

    /// Opens once everything that was found is durable.
    pub(super) fn after_sync(&mut self, cx: &mut Cx<'_>) {
        let Phase::Opening(opening) = &self.phase else { return };
        let is_persisted = opening.ticket.is_some_and(|ticket| self.meta.persisted() >= ticket);
        let is_sealed = self.segments.values().all(|segment| segment.seal == Seal::Sealed);
        if is_persisted && is_sealed {
            self.finish_open(cx);
        }
    }

    fn finish_open(&mut self, cx: &mut Cx<'_>) {
        let opening = core::mem::take(self.opening());
        self.phase = Phase::Open;
        assert_eq!(self.durable, self.last, "what was found is durable");
        for (id, found) in &opening.found {
            if self.segments.contains_key(id) {
                continue;
            }
            // The id will be given out again when no higher one is left. What the file holds under it would
            // then count, if the file became that very segment.
            if opening.used.contains(id) {
                self.remove_segment(cx, *id);
            } else {
                self.retire(cx, *id, found.file_bytes);
            }
        }
        self.remove_spares_above(cx, cx.knobs.spare_segments + cx.knobs.spare_segments_max);
        cx.note(Note::Opened {
            durable: self.durable,
            torn_frames: u32::try_from(opening.torn_frames).unwrap_or(u32::MAX),
            segments: u32::try_from(self.segments.len()).unwrap_or(u32::MAX),
        });
        self.events.append(&mut self.id_blocks);
        self.events.push(LogEvent::Opened);
    }
}
