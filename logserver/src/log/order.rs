//! The blocks of the log in the order in which they lie on the disk.

use common::{SegmentId, StreamId};

use super::Log;
use super::index::BlockRef;

impl Log {
    /// The first live blocks at or behind a place that are durable: of one segment, in order, and, unless it
    /// is one alone, within `bytes_max` from the first. Empty at the end of the log.
    ///
    /// Costs two look-ups for each stream of a segment.
    pub(crate) fn blocks_from(
        &self,
        (from, at): (SegmentId, u64),
        bytes_max: u64,
    ) -> Vec<(StreamId, BlockRef)> {
        for (id, segment) in self.segments.range(from..) {
            if segment.live_blocks == 0 {
                continue;
            }
            let at = if *id == from { at } else { 0 };
            let streams = segment.streams.keys();
            let firsts = streams.filter_map(|stream| {
                let mut blocks = self.index.stream(*stream)?.at_or_behind(*id, at);
                blocks.next().filter(|block| block.segment == *id && self.is_on_disk(block))
            });
            let Some(first) = firsts.map(|block| block.at).min() else { continue };
            let is_near = |block: &BlockRef| {
                let end = block.at + u64::from(block.bytes);
                block.segment == *id && (block.at == first || end <= first + bytes_max)
            };
            let mut found = Vec::new();
            for stream in segment.streams.keys() {
                let blocks = self.index.stream(*stream).into_iter();
                let blocks = blocks.flat_map(|entry| entry.at_or_behind(*id, first));
                let blocks = blocks.take_while(|block| is_near(block) && self.is_on_disk(block));
                found.extend(blocks.map(|block| (*stream, *block)));
            }
            found.sort_unstable_by_key(|(_, block)| block.at);
            assert!(!found.is_empty(), "{id} has a block at {first}");
            return found;
        }
        Vec::new()
    }

    fn is_on_disk(&self, block: &BlockRef) -> bool {
        block.version <= self.durable
    }
}
