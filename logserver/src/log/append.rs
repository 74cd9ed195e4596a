//! Appending: natural batching, one write a flush.
//!
//! ```text
//! accept ...  | flush 1 in flight |           one DiskOp::Write { durable: true }:
//! accept         gathers                      [segment header] head bodies head bodies ... pad
//! accept         gathers         -> flush 2
//! ```
//!
//! A flush takes what has gathered, up to `flush_bytes_max` and to what the active segment has room for; one
//! frame always goes. There is no linger: waiting for more only made commits slower (`reference/disk.md`
//! 4.5).

use bytes::Bytes;
use common::disk::{DiskOp, Lane, padded};
use common::message::PushBlock;
use common::{
    Cx, Epoch, Mark, Note, Offset, Payload, Plant, Sequence, StreamId, Version, WallTime,
};

use super::index::BlockRef;
use super::segments::Segment;
use super::{Log, LogEvent, Purpose, segment_file};
use crate::format::frame::{
    BlockEntry, FrameHeader, encode_head, frame_bytes, head_bytes, header_hash,
};
use crate::format::segment::{EpochStart, FooterEntry};

/// A block of a version that is to be appended.
#[derive(Clone, Debug)]
pub(crate) struct AcceptedBlock {
    pub(crate) block: PushBlock,
    pub(crate) body: Payload,
}

/// A version that is to be appended.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    pub(crate) epoch: Epoch,
    pub(crate) previous_version: Version,
    pub(crate) version: Version,
    pub(crate) commit_time: WallTime,
    /// Ascending by stream.
    pub(crate) blocks: Vec<AcceptedBlock>,
    /// The blocks' first offsets; empty until it is accepted.
    pub(crate) bases: Vec<Offset>,
}

/// A flush on its way to the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    last_sequence: Sequence,
    last_version: Version,
    last_epoch: Epoch,
    bytes: u64,
}

impl Accepted {
    /// The body of a stream's block, in one piece.
    pub(crate) fn body(&self, stream: StreamId) -> Option<Bytes> {
        let block = self.blocks.iter().find(|entry| entry.block.stream == stream)?;
        Some(block.body.contiguous())
    }

    pub(super) fn frame_bytes(&self) -> u64 {
        let bodies: u64 = self.blocks.iter().map(|entry| u64::from(entry.block.bytes)).sum();
        head_bytes(self.blocks.len()) as u64 + bodies
    }

    fn entries(&self) -> Vec<BlockEntry> {
        let pairs = self.blocks.iter().zip(&self.bases);
        pairs
            .map(|(AcceptedBlock { block, .. }, base)| BlockEntry {
                stream: block.stream,
                base_offset: *base,
                record_count: block.record_count,
                bytes: block.bytes,
                checksum: block.checksum,
            })
            .collect()
    }
}

impl Log {
    /// Takes the next version of the chain: its blocks' first offsets. It is durable after a flush.
    pub(crate) fn accept(&mut self, mut frame: Accepted) -> Vec<Offset> {
        assert!(self.is_open(), "{} is accepted by a closed log", frame.version);
        assert_eq!(
            frame.previous_version, self.last,
            "I1: {} follows {}, the log ends at {}",
            frame.version, frame.previous_version, self.last
        );
        assert!(frame.version > self.last, "I1: {} after {}", frame.version, self.last);
        assert!(
            frame.epoch >= self.epoch(),
            "I8: {} of {} in a log of {}",
            frame.version,
            frame.epoch,
            self.epoch()
        );
        let blocks = frame.blocks.iter();
        let bases: Vec<Offset> = blocks
            .map(|entry| self.index.assign(entry.block.stream, entry.block.record_count))
            .collect();
        frame.bases.clone_from(&bases);
        self.last = frame.version;
        self.gathering_bytes += frame.frame_bytes();
        self.gathering.push_back(frame);
        bases
    }

    /// Accepted but not yet flushed, bytes.
    pub(crate) fn unflushed_bytes(&self) -> u64 {
        self.gathering_bytes + self.flight.map_or(0, |flight| flight.bytes)
    }

    pub(super) fn start_flush(&mut self, cx: &mut Cx<'_>) {
        if self.flight.is_some() || self.gathering.is_empty() {
            return;
        }
        let is_closing =
            self.active.is_some_and(|id| self.segments.get(&id).is_some_and(|of| of.is_closing));
        if is_closing && self.files.next_is_ready() {
            let _ = self.roll(cx);
        }
        let mut count = self.fitting_frames(cx.knobs.flush_bytes_max);
        if count == 0 {
            if !self.roll(cx) {
                return;
            }
            count = self.fitting_frames(cx.knobs.flush_bytes_max);
            assert!(
                count > 0,
                "a frame of {} bytes fits no segment",
                self.gathering[0].frame_bytes()
            );
        }
        if count > 1 {
            cx.mark(Mark::GroupFlush);
        }
        self.write_group(cx, count);
    }

    /// How many of the gathered frames go into the next flush: 0 when the segment has no room for one.
    fn fitting_frames(&self, bytes_max: u64) -> usize {
        let Some(active) = self.active.and_then(|id| self.segments.get(&id)) else { return 0 };
        let (mut count, mut bytes, mut blocks) = (0, 0, 0);
        for frame in &self.gathering {
            bytes += frame.frame_bytes();
            blocks += frame.blocks.len();
            let over = count > 0 && bytes > bytes_max;
            if over || !active.has_room(padded(bytes), blocks) {
                break;
            }
            count += 1;
        }
        count
    }

    fn write_group(&mut self, cx: &mut Cx<'_>, count: usize) {
        let id = self.active.expect("frames fit into it");
        let mut data = Payload::new();
        let segment = self.segments.get_mut(&id).expect("the active segment is one");
        let offset = if segment.has_header { segment.at } else { 0 };
        if !segment.has_header {
            data.push(segment.header(self.node, id).encode());
            segment.has_header = true;
        }
        for _ in 0..count {
            let frame = self.gathering.pop_front().expect("it was counted");
            self.gathering_bytes -= frame.frame_bytes();
            self.write_frame(&mut data, id, frame, cx.knobs.tail_bytes_max);
        }
        let segment = self.segments.get_mut(&id).expect("the active segment is one");
        assert_eq!(offset + data.len() as u64, segment.frames_end, "{id} is written without a gap");
        segment.at = padded(segment.frames_end);
        self.flight = Some(Flight {
            last_sequence: self.tip.sequence,
            last_version: self.tip.version,
            last_epoch: self.tip.epoch,
            bytes: data.len() as u64,
        });
        let durable = !cx.planted(Plant::AckBeforeSync);
        let op = DiskOp::Write { file: segment_file(id), offset, data, durable };
        self.request(cx, Lane::Log, Purpose::Flush, op);
    }

    /// Appends one frame to the group and enters its blocks.
    fn write_frame(
        &mut self,
        data: &mut Payload,
        id: common::SegmentId,
        frame: Accepted,
        tail_bytes_max: u64,
    ) {
        let segment = self.segments.get_mut(&id).expect("the active segment is one");
        let entries = frame.entries();
        let header = FrameHeader {
            segment: id,
            sequence: self.tip.sequence.plus(1),
            previous_hash: self.tip.hash,
            durable_sequence: self.durable_sequence,
            epoch: frame.epoch,
            previous_version: frame.previous_version,
            version: frame.version,
            commit_time: frame.commit_time,
            known_committed: self.known_committed,
            block_count: u32::try_from(entries.len()).expect("below the limit of a batch"),
            frame_bytes: frame_bytes(&entries),
        };
        let head = encode_head(&header, &entries);
        let start = segment.frames_end.max(segment.at);
        segment.enter_frame(&header, self.tip.epoch, start);
        self.tip = super::Tip {
            sequence: header.sequence,
            hash: header_hash(&head),
            epoch: header.epoch,
            version: header.version,
            commit_time: header.commit_time,
            known_committed: header.known_committed,
        };
        segment.last = self.tip;
        let mut at = start + head.len() as u64;
        data.push(head);
        for (entry, block) in entries.iter().zip(&frame.blocks) {
            let place = place(&header, entry, at);
            segment.enter_block(&header, entry.stream, &place);
            self.index.insert(entry.stream, place);
            block.body.pieces().iter().for_each(|piece| data.push(piece.clone()));
            at += u64::from(entry.bytes);
        }
        assert_eq!(at, start + header.frame_bytes, "{} has the length it claims", header.sequence);
        let bodies = frame.blocks.into_iter().map(|entry| (entry.block.stream, entry.body));
        self.tail.insert(frame.version, bodies.collect(), tail_bytes_max);
    }

    /// I7: only now, after the barrier, is the flush's last version durable.
    pub(super) fn handle_flushed(&mut self, cx: &mut Cx<'_>) {
        let flight = self.flight.take().expect("one flush was in flight");
        assert!(
            flight.last_sequence > self.durable_sequence && flight.last_version > self.durable,
            "I7: {} after {}, {} after {}",
            flight.last_sequence,
            self.durable_sequence,
            flight.last_version,
            self.durable
        );
        self.durable_sequence = flight.last_sequence;
        self.durable = flight.last_version;
        cx.note(Note::Durable { epoch: flight.last_epoch, version: self.durable });
        self.events.push(LogEvent::Flushed);
    }
}

/// Where a block came to lie.
pub(super) const fn place(header: &FrameHeader, entry: &BlockEntry, at: u64) -> BlockRef {
    BlockRef {
        version: header.version,
        commit_time: header.commit_time,
        base_offset: entry.base_offset,
        record_count: entry.record_count,
        bytes: entry.bytes,
        checksum: entry.checksum,
        segment: header.segment,
        at,
    }
}

impl Segment {
    /// Counts a frame in that starts at `start`; `epoch_before` is that of the frame before it.
    pub(super) fn enter_frame(&mut self, header: &FrameHeader, epoch_before: Epoch, start: u64) {
        assert!(
            header.sequence == self.first_sequence.plus(self.frame_count),
            "{} is frame {} from {}",
            header.sequence,
            self.frame_count,
            self.first_sequence
        );
        self.frame_count += 1;
        self.frames_end = start + header.frame_bytes;
        if header.epoch != epoch_before {
            let (epoch, previous_version) = (header.epoch, header.previous_version);
            self.epoch_starts.push(EpochStart { epoch, previous_version });
        }
    }

    /// Counts a live block in.
    pub(super) fn enter_block(&mut self, header: &FrameHeader, stream: StreamId, block: &BlockRef) {
        self.live_blocks += 1;
        self.streams.insert(stream, header.version);
        self.entries.push(FooterEntry {
            stream,
            epoch: header.epoch,
            version: header.version,
            commit_time: header.commit_time,
            base_offset: block.base_offset,
            record_count: block.record_count,
            offset: block.at,
            bytes: block.bytes,
            checksum: block.checksum,
        });
    }
}
