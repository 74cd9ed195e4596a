//! What was read may not be durable: it is written again before anything is promised on it.
//!
//! A process may die between its write and its barrier, and it may die after a barrier that *failed*, before
//! it hears so. A disk then reads back what it will lose, and no barrier of ours brings that back: after a
//! failed one only a new write counts. So a barrier alone proves nothing here. What a later fact vouches for,
//! one that was only written after a barrier had succeeded, needs no more:
//!
//! ```text
//! frames of a segment that another one follows      the first group of that one
//! frames of the last segment,
//!        known committed                            this server announced them durable (I7)
//!        sealed                                     the footer; if only a cache has it, they are read again
//!        anything else                              nobody: written again, then a barrier, then the footer
//! the footer of a segment that another one follows  nobody; without it the frames are read again
//! the newest meta slot                              nobody: written again, before the other is overwritten
//! what else the meta slots held                     was vouched for when the newest was written
//! ```
//!
//! A trailer says that the frames before it are durable: the next opening reads none of them. Footer and
//! frames under one barrier would not do, since of what a failed barrier loses the trailer may be what is
//! left. The same bytes at the same place can't harm what was durable, whenever the power goes: a device
//! writes a sector whole or not at all (an NVMe device promises at least one block).

use std::collections::VecDeque;

use bytes::Bytes;
use common::disk::{DiskOp, File, PAGE_BYTES, padded};
use common::{Cx, Mark, Payload, SegmentId, Version};

use super::{Log, OpenOp};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::log::segment_file;
use crate::log::segments::Seal;

/// The frames of the segment that was read last, in order, that nothing vouches for yet. Bounded by the
/// segment's size: a frame takes at least its header.
#[derive(Clone, Debug, Default)]
pub(super) struct InDoubt {
    frames: VecDeque<(Version, u64)>,
}

impl InDoubt {
    /// Another segment begins, or this one has a footer.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
    }

    pub(super) fn enter(&mut self, version: Version, offset: u64) {
        let last = self.frames.back().map_or(0, |(_, offset)| *offset);
        assert!(self.frames.is_empty() || offset > last, "a frame at {offset} behind {last}");
        self.frames.push_back((version, offset));
    }

    /// Everything through `version` is known committed.
    pub(super) fn vouch(&mut self, known_committed: Version) {
        while self.frames.pop_front_if(|(version, _)| *version <= known_committed).is_some() {}
    }

    /// The page that the first frame in doubt begins on.
    fn begin(&self) -> Option<u64> {
        self.frames.front().map(|(_, offset)| offset - offset % PAGE_BYTES)
    }
}

impl Log {
    pub(super) fn sync_what_was_found(&mut self, cx: &mut Cx<'_>) {
        if let Some(slot) = self.meta.newest_slot() {
            let found = self.opening().meta_slots[usize::from(slot)].clone();
            self.write_again(cx, File::Meta(slot), 0, found, OpenOp::Barrier);
        }
        if let Some((id, segment)) = self.segments.last_key_value() {
            let (id, end) = (*id, padded(segment.frames_end));
            let is_unsealed = segment.seal == Seal::Unsealed;
            let header = segment.header(self.node, id).encode();
            match self.opening().in_doubt.begin().filter(|_| is_unsealed) {
                // A segment's header came with its first group.
                Some(begin) if begin <= SEGMENT_HEADER_BYTES => {
                    let op = OpenOp::WriteAgain { id, next: begin, end };
                    self.write_again(cx, segment_file(id), 0, header, op);
                }
                Some(begin) => self.read_again(cx, id, begin, end),
                None => self.barrier(cx, id),
            }
        }
        self.after_barriers(cx);
    }

    fn read_again(&mut self, cx: &mut Cx<'_>, id: SegmentId, offset: u64, end: u64) {
        assert!(offset < end, "{id} is in doubt from {offset} to {end}");
        let bytes = cx.knobs.read_bytes.min(end - offset);
        self.read_page(cx, OpenOp::ReadAgain { id, offset, end }, id, offset, bytes);
    }

    /// Takes a piece of what is in doubt.
    pub(super) fn take_again(
        &mut self,
        cx: &mut Cx<'_>,
        id: SegmentId,
        offset: u64,
        end: u64,
        bytes: Bytes,
    ) {
        cx.mark(Mark::WrittenAgain);
        let next = offset + bytes.len() as u64;
        assert!(next > offset && next <= end, "{id}: {offset} to {next} of {end}");
        self.write_again(cx, segment_file(id), offset, bytes, OpenOp::WriteAgain { id, next, end });
    }

    /// A piece is written: the next one, or the barrier.
    pub(super) fn after_again(&mut self, cx: &mut Cx<'_>, id: SegmentId, next: u64, end: u64) {
        if next < end { self.read_again(cx, id, next, end) } else { self.barrier(cx, id) }
    }

    fn barrier(&mut self, cx: &mut Cx<'_>, id: SegmentId) {
        self.write_again(cx, segment_file(id), 0, Bytes::new(), OpenOp::Barrier);
    }

    fn write_again(&mut self, cx: &mut Cx<'_>, file: File, offset: u64, bytes: Bytes, op: OpenOp) {
        let durable = matches!(op, OpenOp::Barrier);
        let data = Payload::from(bytes);
        self.ask(cx, op, DiskOp::Write { file, offset, data, durable });
    }
}
