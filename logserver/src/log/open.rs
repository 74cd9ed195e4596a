//! Opening: everything that the directory holds, read back and judged.
//!
//! ```text
//! List -> meta slots -> first and last page of each segment -> each segment in order: footer, or scan
//!      -> blocks of the stream of ids -> footers and meta written, all of it durable -> open
//! ```
//!
//! - A segment goes on from the one before: by sequence and hash, unless segments between were recycled.
//! - A torn tail is cut where the next segment, or nothing, goes on; the log always continues in a new segment,
//!   so that what was cut can't become valid again.
//! - Anything else that is damaged ends the process with a report; nothing is changed on the disk (`corrupt_log`).
//! - Blocks that a later epoch dropped, by its start in the meta, are passed over.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use common::disk::{DiskError, DiskOp, DiskOutput, File, Lane, PAGE_BYTES, padded};
use common::{Cx, Epoch, Mark, Note, SegmentId, Sequence, StreamId, Version};

use super::index::{BlockRef, NotDense};
use super::meta::MetaSlots;
use super::segments::{Seal, Segment};
use super::{Log, LogEvent, Phase, Purpose, Tip, append, data, segment_file};
use crate::format::meta::{MetaChoice, choose};
use crate::format::scan::{ScanEnd, ScanStart, ScannedFrame, Scanner};
use crate::format::segment::{
    EpochStart, Footer, SegmentError, SegmentHeader, Trailer, trailer_offset,
};

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
    ReadChunk { id: SegmentId, offset: u64, bytes: u64 },
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

    // --- files and meta ------------------------------------------------------------------------------------

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

    // --- edges ---------------------------------------------------------------------------------------------

    fn read_edges(&mut self, cx: &mut Cx<'_>) -> Judged<()> {
        let in_flight_max = 2 * cx.knobs.scan_reads_max as usize;
        while self.opening().in_flight < in_flight_max {
            let opening = self.opening();
            let Some(id) = opening.edges.pop_front() else { break };
            let bytes = opening.found[&id].file_bytes;
            if bytes < 3 * PAGE_BYTES || !bytes.is_multiple_of(PAGE_BYTES) {
                return corrupt(format!("segment {id} is {bytes} bytes long"));
            }
            self.read_page(cx, OpenOp::ReadHeader(id), id, 0, PAGE_BYTES);
            let offset = trailer_offset(bytes);
            self.read_page(cx, OpenOp::ReadTrailer(id), id, offset, PAGE_BYTES);
        }
        if self.opening().in_flight == 0 { self.next_segment(cx) } else { Ok(()) }
    }

    /// `None` for a damaged or old page; damage where one is another node's.
    fn own<T>(
        &self,
        result: Result<T, SegmentError>,
        belongs: impl FnOnce(&T) -> Result<(), SegmentError>,
    ) -> Judged<Option<T>> {
        match result.and_then(|found| belongs(&found).map(|()| found)) {
            Ok(found) => Ok(Some(found)),
            Err(SegmentError::OtherNode { found }) => {
                let detail = format!("a segment is {found}'s, this is {}", self.node);
                Err(Damage { reason: "foreign_log", detail })
            }
            Err(_) => Ok(None),
        }
    }

    fn take_header(
        &mut self,
        cx: &mut Cx<'_>,
        id: SegmentId,
        page: Result<Bytes, DiskError>,
    ) -> Judged<()> {
        let node = self.node;
        let header = match page {
            Ok(page) => self.own(SegmentHeader::decode(&page), |found| found.belongs(node, id))?,
            Err(_) => None,
        };
        self.opening().found.get_mut(&id).expect("it was listed").header = header;
        self.read_edges(cx)
    }

    fn take_trailer(
        &mut self,
        cx: &mut Cx<'_>,
        id: SegmentId,
        page: Result<Bytes, DiskError>,
    ) -> Judged<()> {
        let node = self.node;
        let file_bytes = self.opening().found[&id].file_bytes;
        let trailer = match page {
            Ok(page) => {
                self.own(Trailer::decode(&page, file_bytes), |found| found.belongs(node, id))?
            }
            Err(_) => None,
        };
        self.opening().found.get_mut(&id).expect("it was listed").trailer = trailer;
        self.read_edges(cx)
    }

    // --- one segment after the other -----------------------------------------------------------------------

    fn next_segment(&mut self, cx: &mut Cx<'_>) -> Judged<()> {
        let opening = self.opening();
        let after = opening.current.map_or(SegmentId::ZERO, |id| id);
        let next = opening.found.range(after.plus(1)..).next();
        let Some((id, found)) = next.map(|(id, found)| (*id, found.clone())) else {
            return self.after_segments(cx);
        };
        opening.current = Some(id);
        if let Some(header) = &found.header {
            self.judge_follows(id, header.first_sequence, Some(header.previous_hash))?;
        }
        match found.trailer {
            Some(trailer) => {
                let bytes = padded(trailer.footer_bytes);
                self.read_page(cx, OpenOp::ReadFooter(id), id, trailer.footer_offset, bytes);
                Ok(())
            }
            None => self.begin_scan(cx, id, &found),
        }
    }

    /// Whether a segment that starts with `sequence` can follow what was read so far.
    fn judge_follows(
        &mut self,
        id: SegmentId,
        sequence: Sequence,
        hash: Option<u32>,
    ) -> Judged<()> {
        let tip = self.tip;
        if self.segments.is_empty() {
            return Ok(());
        }
        let expected = tip.sequence.plus(1);
        let torn = self.opening().torn.take();
        if sequence < expected {
            return corrupt(format!(
                "segment {id} starts with {sequence}, {expected} was expected"
            ));
        }
        if sequence == expected {
            return match hash {
                Some(hash) if hash != tip.hash => corrupt(format!(
                    "segment {id} follows {hash:08x}, frame {} is {:08x}",
                    tip.sequence, tip.hash
                )),
                _ => Ok(()),
            };
        }
        // Segments between were recycled; what they held of streams that are not trimmed would be missed by
        // the density of offsets (I12). But then the end of the one before can't be a torn tail.
        if let Some((torn, what)) = torn {
            return corrupt(format!(
                "segment {torn} is damaged, and {id} goes on at {sequence}: {what}"
            ));
        }
        let before = self.opening().found.contains_key(&id.minus_saturating(1));
        if before && self.segments.contains_key(&id.minus_saturating(1)) {
            return corrupt(format!(
                "segment {id} starts with {sequence}, {expected} was expected"
            ));
        }
        Ok(())
    }

    fn take_footer(
        &mut self,
        cx: &mut Cx<'_>,
        id: SegmentId,
        bytes: Result<Bytes, DiskError>,
    ) -> Judged<()> {
        let found = self.opening().found[&id].clone();
        let trailer = found.trailer.expect("it named the footer");
        let node = self.node;
        let footer = match bytes {
            Ok(bytes) => self.own(Footer::decode(&bytes), |footer| footer.belongs(node, id))?,
            Err(_) => None,
        };
        let is_own = |footer: &Footer| {
            footer.trailer(trailer.footer_offset, &footer.encode()) == trailer
                && footer.last_sequence >= footer.first_sequence
        };
        match footer.filter(is_own) {
            Some(footer) => {
                cx.mark(Mark::FooterUsed);
                self.judge_follows(id, footer.first_sequence, None)?;
                self.restore_footer(id, &found, &footer)?;
                self.next_segment(cx)
            }
            None => self.begin_scan(cx, id, &found),
        }
    }

    fn restore_footer(&mut self, id: SegmentId, found: &Found, footer: &Footer) -> Judged<()> {
        let mut segment = Segment::new(found.file_bytes, &self.tip);
        if let Some(header) = &found.header {
            segment.hash_before = header.previous_hash;
            segment.epoch_before = header.epoch;
            segment.version_before = header.previous_version;
        }
        segment.first_sequence = footer.first_sequence;
        segment.frame_count = footer.last_sequence.since(footer.first_sequence) + 1;
        segment.has_header = true;
        segment.frames_end = footer.frames_end;
        segment.at = padded(footer.frames_end);
        segment.seal = Seal::Sealed;
        segment.last = Tip {
            sequence: footer.last_sequence,
            hash: footer.last_hash,
            epoch: footer.last_epoch,
            version: footer.last_version,
            commit_time: footer.last_commit_time,
            known_committed: footer.last_known_committed,
        };
        let last = segment.last;
        self.segments.insert(id, segment);
        for entry in &footer.entries {
            let block = BlockRef {
                version: entry.version,
                commit_time: entry.commit_time,
                base_offset: entry.base_offset,
                record_count: entry.record_count,
                bytes: entry.bytes,
                checksum: entry.checksum,
                segment: id,
                at: entry.offset,
            };
            self.restore_block(id, entry.stream, entry.epoch, block)?;
        }
        self.enter_tip(id, last)
    }

    fn enter_tip(&mut self, id: SegmentId, tip: Tip) -> Judged<()> {
        // A recruitment is persisted before its epoch's first frame is accepted.
        let known = self.meta.epoch();
        if tip.epoch > known {
            let epoch = tip.epoch;
            return corrupt(format!("segment {id} has frames of {epoch}, the meta knows {known}"));
        }
        self.tip = tip;
        self.last = tip.version;
        self.known_committed = self.known_committed.max(tip.known_committed);
        Ok(())
    }

    /// Enters a block of a frame of `epoch`, unless a later epoch dropped it: then its neighbours may be gone.
    fn restore_block(
        &mut self,
        id: SegmentId,
        stream: StreamId,
        epoch: Epoch,
        block: BlockRef,
    ) -> Judged<()> {
        let starts = self.meta.epochs().iter();
        let is_dropped =
            |start: &EpochStart| start.epoch > epoch && start.previous_version < block.version;
        if starts.copied().any(|start| is_dropped(&start)) {
            return Ok(());
        }
        match self.index.restore(stream, block) {
            Ok(is_live) => {
                let segment = self.segments.get_mut(&id).expect("it was just entered");
                segment.live_blocks += u64::from(is_live);
                segment.streams.insert(stream, block.version);
                Ok(())
            }
            Err(NotDense { stream, version, expected, found }) => corrupt(format!(
                "records {expected} to {found} of {stream} are missing before {version} in segment {id}"
            )),
        }
    }

    // --- scanning ------------------------------------------------------------------------------------------

    fn begin_scan(&mut self, cx: &mut Cx<'_>, id: SegmentId, found: &Found) -> Judged<()> {
        let durable_at_least = self.durable_at_least(id);
        let tip = self.tip;
        let expected = ScanStart {
            node: self.node,
            segment: id,
            segment_bytes: found.file_bytes,
            sequence: tip.sequence.plus(1),
            previous_hash: tip.hash,
            epoch: tip.epoch,
            previous_version: tip.version,
            durable_at_least,
        };
        let start = match &found.header {
            Some(header) => ScanStart { durable_at_least, ..ScanStart::from(header) },
            None => expected,
        };
        if start.segment_bytes != found.file_bytes {
            return corrupt(format!(
                "segment {id} is {} bytes long and should be {}",
                found.file_bytes, start.segment_bytes
            ));
        }
        self.opening().scan = Some(Scan {
            scanner: Scanner::new(start),
            next_offset: 0,
            fed: 0,
            early: BTreeMap::new(),
        });
        self.read_chunks(cx, id)
    }

    /// What is known to have been durable of a segment, by what comes after it.
    fn durable_at_least(&mut self, id: SegmentId) -> Sequence {
        let clean = self.meta.clean_shutdown();
        let opening = self.opening();
        let next = opening.found.get(&id.plus(1)).and_then(|found| found.header);
        match next {
            Some(next) => next.first_sequence.minus_saturating(1),
            // The mark of a clean shutdown speaks of the log's last frame; later files may be unused ones.
            None if opening.found.range(id.plus(1)..).all(|(_, found)| found.header.is_none()) => {
                clean.unwrap_or_default()
            }
            None => Sequence::ZERO,
        }
    }

    fn read_chunks(&mut self, cx: &mut Cx<'_>, id: SegmentId) -> Judged<()> {
        let file_bytes = self.opening().found[&id].file_bytes;
        loop {
            let opening = self.opening();
            let in_flight = opening.in_flight;
            let scan = opening.scan.as_mut().expect("a segment is being scanned");
            let is_read = scan.next_offset >= file_bytes || scan.scanner.is_settled();
            if is_read && in_flight == 0 {
                return self.finish_scan(cx, id);
            }
            let ahead = in_flight + scan.early.len();
            if is_read || ahead as u64 >= cx.knobs.scan_reads_max {
                return Ok(());
            }
            let offset = scan.next_offset;
            let bytes = cx.knobs.read_bytes.min(file_bytes - offset);
            scan.next_offset += bytes;
            self.read_page(cx, OpenOp::ReadChunk { id, offset, bytes }, id, offset, bytes);
        }
    }

    fn take_chunk(
        &mut self,
        cx: &mut Cx<'_>,
        id: SegmentId,
        offset: u64,
        bytes: u64,
        result: Result<Bytes, DiskError>,
    ) -> Judged<()> {
        let data = result.ok().filter(|data| data.len() as u64 == bytes);
        let scan = self.opening().scan.as_mut().expect("a segment is being scanned");
        scan.early.insert(offset, (bytes, data));
        loop {
            let scan = self.opening().scan.as_mut().expect("a segment is being scanned");
            let fed = scan.fed;
            let Some((bytes, data)) = scan.early.remove(&fed) else { break };
            scan.fed += bytes;
            let frames = match data {
                Some(data) => scan.scanner.feed(data),
                None => scan.scanner.hole(bytes),
            };
            for frame in frames {
                self.restore_frame(id, &frame)?;
            }
        }
        self.read_chunks(cx, id)
    }

    fn restore_frame(&mut self, id: SegmentId, frame: &ScannedFrame) -> Judged<()> {
        let header = &frame.header;
        let before = self.tip;
        if !self.segments.contains_key(&id) {
            let found = &self.opening().found[&id];
            let mut segment = Segment::new(found.file_bytes, &before);
            if let Some(header) = found.header {
                segment.hash_before = header.previous_hash;
                segment.epoch_before = header.epoch;
                segment.version_before = header.previous_version;
                segment.last.epoch = header.epoch;
            }
            segment.has_header = true;
            segment.first_sequence = header.sequence;
            self.segments.insert(id, segment);
        }
        let epoch_before = self.segments[&id].last_epoch();
        let segment = self.segments.get_mut(&id).expect("it was just entered");
        segment.enter_frame(header, epoch_before, frame.offset);
        let tip = Tip {
            sequence: header.sequence,
            hash: frame.hash,
            epoch: header.epoch,
            version: header.version,
            commit_time: header.commit_time,
            known_committed: header.known_committed,
        };
        segment.last = tip;
        for (place, entry) in frame.entries.iter().enumerate() {
            let block = append::place(header, entry, frame.body_offset(place));
            let segment = self.segments.get_mut(&id).expect("it was just entered");
            segment.enter_block(header, entry.stream, &block);
            // Counted again by `restore_block`, which knows whether it is trimmed.
            segment.live_blocks -= 1;
            self.restore_block(id, entry.stream, header.epoch, block)?;
        }
        self.enter_tip(id, tip)
    }

    fn finish_scan(&mut self, cx: &mut Cx<'_>, id: SegmentId) -> Judged<()> {
        let scan = self.opening().scan.take().expect("a segment is being scanned");
        let has_frames = self.segments.contains_key(&id);
        if has_frames {
            cx.mark(Mark::FooterMissing);
        }
        match scan.scanner.finish() {
            ScanEnd::Whole { .. } => {}
            ScanEnd::Torn { offset, sequence, frames_cut } => {
                cx.mark(Mark::TornTail);
                let detail =
                    format!("{frames_cut} frames from {sequence} at byte {offset} of {id}");
                cx.note(Note::Warning { code: "torn_tail", detail: detail.clone() });
                let opening = self.opening();
                opening.torn_frames += frames_cut;
                // A file without a whole frame is no part of the log.
                if has_frames {
                    opening.torn = Some((id, detail));
                }
            }
            ScanEnd::Rot(report) => return corrupt(report.to_string()),
        }
        self.next_segment(cx)
    }

    // --- the end -------------------------------------------------------------------------------------------

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

    /// What was read may have been written by a process that died before its barrier, and may not be durable yet.
    /// Before anything is promised on it, each file that matters gets a barrier: unsealed segments by their
    /// footer, the meta by its next generation, which also says that the log may change.
    fn sync_what_was_found(&mut self, cx: &mut Cx<'_>) {
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
                Err(failure) => {
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
            if !self.segments.contains_key(id) {
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

impl Segment {
    fn last_epoch(&self) -> Epoch {
        self.last.epoch
    }
}
