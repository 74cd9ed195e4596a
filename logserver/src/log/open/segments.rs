//! Segments, read one after the other: by their footer, or frame by frame.
//!
//! ```text
//! edges: first and last page of every file, several at once
//! then in order:  trailer good --> footer good --> its entries
//!                       `---------------`--------> scan, and judge the end
//! ```

use std::collections::BTreeMap;

use bytes::Bytes;
use common::disk::{DiskError, PAGE_BYTES, padded};
use common::{Cx, Epoch, Mark, Note, SegmentId, Sequence, StreamId};

use super::{Damage, Found, Judged, Log, OpenOp, Scan, corrupt};
use crate::format::scan::{ScanEnd, ScanStart, ScannedFrame, Scanner};
use crate::format::segment::{
    EpochStart, Footer, SegmentError, SegmentHeader, Trailer, trailer_offset,
};
use crate::log::index::{BlockRef, NotDense};
use crate::log::segments::{Seal, Segment};
use crate::log::{Tip, append};

impl Log {
    pub(super) fn read_edges(&mut self, cx: &mut Cx<'_>) -> Judged<()> {
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

    pub(super) fn take_header(
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

    pub(super) fn take_trailer(
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

    pub(super) fn next_segment(&mut self, cx: &mut Cx<'_>) -> Judged<()> {
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

    pub(super) fn take_footer(
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
                self.warn_of_header(cx, id);
                self.next_segment(cx)
            }
            None => self.begin_scan(cx, id, &found),
        }
    }

    /// A damaged header of a segment that is used otherwise costs no data, but somebody should look at the
    /// disk.
    fn warn_of_header(&mut self, cx: &mut Cx<'_>, id: SegmentId) {
        if self.opening().found[&id].header.is_none() {
            let detail = format!("the header of segment {id} is damaged; its frames are whole");
            cx.note(Note::Warning { code: "damaged_header", detail });
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
        self.opening().in_doubt.clear();
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

    /// Enters a block of a frame of `epoch`, unless a later epoch dropped it: then its neighbours may be
    /// gone.
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
        let own = opening.found.get(&id).and_then(|found| found.header);
        let mut later = opening.found.range(id.plus(1)..);
        let later = later.find_map(|(later, found)| Some((*later, found.header?)));
        match (own, later) {
            (_, Some((later, header))) if later == id.plus(1) => {
                header.first_sequence.minus_saturating(1)
            }
            // Segments between were recycled. This one had a frame, or the later one would begin where it
            // does.
            (Some(own), Some((_, header))) if header.first_sequence > own.first_sequence => {
                own.first_sequence
            }
            (_, Some(_)) => Sequence::ZERO,
            // The mark of a clean shutdown speaks of the log's last frame; later files may be unused ones.
            (_, None) => clean.unwrap_or_default(),
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

    pub(super) fn take_chunk(
        &mut self,
        cx: &mut Cx<'_>,
        id: SegmentId,
        offset: u64,
        bytes: u64,
        result: Result<Bytes, DiskError>,
    ) -> Judged<()> {
        // One bad sector must hide no more than its page: what lies behind it may prove that it was durable.
        if result.is_err() && bytes > PAGE_BYTES {
            for at in (offset..offset + bytes).step_by(PAGE_BYTES as usize) {
                let op = OpenOp::ReadChunk { id, offset: at, bytes: PAGE_BYTES };
                self.read_page(cx, op, id, at, PAGE_BYTES);
            }
            return Ok(());
        }
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
            self.opening().in_doubt.clear();
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
        self.enter_tip(id, tip)?;
        let known_committed = self.known_committed;
        let in_doubt = &mut self.opening().in_doubt;
        in_doubt.enter(tip.version, frame.offset);
        in_doubt.vouch(known_committed);
        Ok(())
    }

    fn finish_scan(&mut self, cx: &mut Cx<'_>, id: SegmentId) -> Judged<()> {
        let scan = self.opening().scan.take().expect("a segment is being scanned");
        let has_frames = self.segments.contains_key(&id);
        if has_frames {
            cx.mark(Mark::FooterMissing);
            self.warn_of_header(cx, id);
        }
        let end = scan.scanner.finish();
        let opening = self.opening();
        let is_used = opening.found[&id].header.is_some() || matches!(end, ScanEnd::Torn { .. });
        if !has_frames && is_used {
            opening.used.insert(id);
        }
        match end {
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
}

impl Segment {
    fn last_epoch(&self) -> Epoch {
        self.last.epoch
    }
}
