//! The stream index: where each block of each stream lies.
//!
//! ```text
//! stream s17   trimmed through v40, first offset 9
//!              v52 offsets  9..12   segment g3 at 8192
//!              v57 offsets 12..13   segment g3 at 16384
//!              next offset 13
//! ```
//!
//! Offsets of a stream are dense over all epochs (I12): a block begins where the one before it ends, the
//! first one at the trim's first offset. `next_offset` runs ahead of the last block by what is accepted but
//! has no place on the disk yet.

use std::collections::{BTreeMap, VecDeque};

use common::{Offset, SegmentId, StreamId, Version, WallTime};

/// A block's place and shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockRef {
    /// The version it belongs to.
    pub(crate) version: Version,
    /// When the version was handed out.
    pub(crate) commit_time: WallTime,
    /// The offset of its first record.
    pub(crate) base_offset: Offset,
    /// How many records.
    pub(crate) record_count: u32,
    /// Bytes of its body.
    pub(crate) bytes: u32,
    /// crc32c of its body.
    pub(crate) checksum: u32,
    /// The segment that holds its body.
    pub(crate) segment: SegmentId,
    /// Where its body starts in the segment's file.
    pub(crate) at: u64,
}

impl BlockRef {
    /// The offset behind its last record.
    #[must_use]
    pub(crate) fn end_offset(&self) -> Offset {
        self.base_offset.plus(u64::from(self.record_count))
    }
}

/// Why a block can't be where it claims to be (I12).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NotDense {
    /// The stream.
    pub(crate) stream: StreamId,
    /// The block's version.
    pub(crate) version: Version,
    /// The offset it should begin with.
    pub(crate) expected: Offset,
    /// The offset it begins with.
    pub(crate) found: Offset,
}

/// One stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    blocks: VecDeque<BlockRef>,
    next_offset: Offset,
    trimmed_through: Version,
    /// The offset behind the last trimmed record.
    trimmed_offset: Offset,
    last_gone: Version,
    bytes: u64,
}

/// All streams.
#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    streams: BTreeMap<StreamId, Stream>,
    block_count: u64,
}

impl Index {
    /// Hands out the next `record_count` offsets of the stream: the first of them.
    pub(crate) fn assign(&mut self, stream: StreamId, record_count: u32) -> Offset {
        assert!(record_count > 0, "a block of {stream} has records");
        let entry = self.streams.entry(stream).or_default();
        let base = entry.next_offset;
        entry.next_offset = base.plus(u64::from(record_count));
        base
    }

    /// Enters a block whose offsets were assigned before.
    pub(crate) fn insert(&mut self, stream: StreamId, block: BlockRef) {
        let entry = self.streams.get_mut(&stream).expect("offsets were assigned before");
        let expected = entry.end_offset();
        assert_eq!(
            block.base_offset, expected,
            "I12: {stream} at {} begins where it shouldn't",
            block.version
        );
        assert!(
            block.end_offset() <= entry.next_offset,
            "I12: {stream} at {} ends at {} beyond {}",
            block.version,
            block.end_offset(),
            entry.next_offset
        );
        entry.push(block);
        self.block_count += 1;
    }

    /// Enters a block that was found on the disk. `Ok(false)`: it is trimmed, and not entered.
    ///
    /// # Errors
    /// [`NotDense`]: something between it and the block before it is missing.
    pub(crate) fn restore(&mut self, stream: StreamId, block: BlockRef) -> Result<bool, NotDense> {
        let entry = self.streams.entry(stream).or_default();
        if block.version <= entry.trimmed_through {
            return Ok(false);
        }
        let (expected, found) = (entry.end_offset(), block.base_offset);
        if expected != found {
            return Err(NotDense { stream, version: block.version, expected, found });
        }
        entry.next_offset = block.end_offset();
        entry.push(block);
        self.block_count += 1;
        Ok(true)
    }

    /// Sets a stream's trim before its blocks are restored.
    pub(crate) fn restore_trim(
        &mut self,
        stream: StreamId,
        through: Version,
        first_offset: Offset,
    ) {
        let entry = self.streams.entry(stream).or_default();
        assert!(entry.blocks.is_empty(), "{stream} has blocks before its trim is known");
        entry.trimmed_through = through;
        entry.trimmed_offset = first_offset;
        entry.next_offset = first_offset;
        entry.last_gone = through;
    }

    /// What trimming `stream` through `through` would leave as its first offset; `None` when there is
    /// nothing to trim that was not trimmed before.
    #[must_use]
    pub(crate) fn trim_offset(&self, stream: StreamId, through: Version) -> Option<Offset> {
        let entry = self.streams.get(&stream)?;
        if through <= entry.trimmed_through {
            return None;
        }
        let count = entry.blocks.partition_point(|block| block.version <= through);
        Some(match count.checked_sub(1) {
            Some(last) => entry.blocks[last].end_offset(),
            None => entry.trimmed_offset,
        })
    }

    /// Takes over what another replica trimmed, above everything that is here of the stream: the blocks go to
    /// `gone`, and the next one begins at `first_offset`.
    pub(crate) fn adopt_trim(
        &mut self,
        stream: StreamId,
        through: Version,
        first_offset: Offset,
        gone: impl FnMut(&BlockRef),
    ) {
        let entry = self.streams.entry(stream).or_default();
        let last = entry.blocks.back().map_or(Version::ZERO, |block| block.version);
        assert!(
            last <= through && entry.next_offset <= first_offset,
            "I12: {stream} is trimmed through {through} up to {first_offset}; here {last}, {}",
            entry.next_offset
        );
        self.trim(stream, through, gone);
        let entry = self.streams.get_mut(&stream).expect("it was just made");
        entry.trimmed_offset = first_offset;
        entry.next_offset = first_offset;
        entry.last_gone = through;
    }

    /// All streams that anything is known of, ascending.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.streams.iter().map(|(stream, entry)| (*stream, entry))
    }

    /// Forgets the blocks of `stream` at or below `through`; each one goes to `gone`.
    pub(crate) fn trim(
        &mut self,
        stream: StreamId,
        through: Version,
        mut gone: impl FnMut(&BlockRef),
    ) {
        let Some(entry) = self.streams.get_mut(&stream) else { return };
        entry.trimmed_through = entry.trimmed_through.max(through);
        while entry.blocks.front().is_some_and(|block| block.version <= through) {
            let block = entry.blocks.pop_front().expect("it was just looked at");
            entry.trimmed_offset = block.end_offset();
            entry.last_gone = block.version;
            entry.bytes -= u64::from(block.bytes);
            self.block_count -= 1;
            gone(&block);
        }
        assert!(
            entry.trimmed_offset <= entry.next_offset,
            "I12: {stream} is trimmed to {} of {}",
            entry.trimmed_offset,
            entry.next_offset
        );
    }

    /// Forgets all blocks above `version`, and the offsets they had; each one goes to `gone`. Nothing may be
    /// accepted without a place.
    pub(crate) fn drop_above(&mut self, version: Version, mut gone: impl FnMut(&BlockRef)) {
        for (stream, entry) in &mut self.streams {
            while entry.blocks.back().is_some_and(|block| block.version > version) {
                let block = entry.blocks.pop_back().expect("it was just looked at");
                entry.bytes -= u64::from(block.bytes);
                self.block_count -= 1;
                gone(&block);
            }
            entry.next_offset = entry.end_offset();
            assert!(
                entry.trimmed_through <= version || entry.blocks.is_empty(),
                "I13: {stream} is trimmed through {} above {version}",
                entry.trimmed_through
            );
        }
    }

    /// A stream; `None` when this log never held anything of it.
    #[must_use]
    pub(crate) fn stream(&self, stream: StreamId) -> Option<&Stream> {
        self.streams.get(&stream)
    }

    /// The block of `stream` in `version`.
    #[must_use]
    pub(crate) fn block(&self, stream: StreamId, version: Version) -> Option<&BlockRef> {
        let blocks = &self.streams.get(&stream)?.blocks;
        let place = blocks.binary_search_by_key(&version, |block| block.version).ok()?;
        blocks.get(place)
    }

    /// How many streams.
    #[must_use]
    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// How many blocks.
    #[must_use]
    pub(crate) const fn block_count(&self) -> u64 {
        self.block_count
    }

    /// The state's ordering chain.
    pub(crate) fn check(&self) {
        let mut block_count = 0;
        for (stream, entry) in &self.streams {
            block_count += entry.blocks.len() as u64;
            let mut at = entry.trimmed_offset;
            let mut after = entry.trimmed_through;
            for block in &entry.blocks {
                assert_eq!(
                    block.base_offset, at,
                    "I12: {stream} at {} is not dense",
                    block.version
                );
                assert!(block.version > after, "{stream}: {} after {after}", block.version);
                at = block.end_offset();
                after = block.version;
            }
            assert!(at <= entry.next_offset, "I12: {stream} has {at} of {}", entry.next_offset);
            let bytes: u64 = entry.blocks.iter().map(|block| u64::from(block.bytes)).sum();
            assert_eq!(bytes, entry.bytes, "{stream} counts its bytes");
        }
        assert_eq!(block_count, self.block_count, "the index counts its blocks");
    }
}

impl Stream {
    fn push(&mut self, block: BlockRef) {
        let before = self.blocks.back().map_or(self.trimmed_through, |last| last.version);
        assert!(block.version > before, "a stream's blocks ascend: {before} -> {}", block.version);
        self.bytes += u64::from(block.bytes);
        self.blocks.push_back(block);
    }

    /// The offset behind the last block that has a place.
    fn end_offset(&self) -> Offset {
        self.blocks.back().map_or(self.trimmed_offset, BlockRef::end_offset)
    }

    /// The blocks above `after` (exclusive), ascending.
    pub(crate) fn after(&self, after: Version) -> impl Iterator<Item = &BlockRef> {
        let start = self.blocks.partition_point(|block| block.version <= after);
        self.blocks.range(start..)
    }

    /// The blocks at or behind a place in the log, in its order, which is that of the versions.
    pub(crate) fn at_or_behind(
        &self,
        segment: SegmentId,
        at: u64,
    ) -> impl Iterator<Item = &BlockRef> {
        let start = self.blocks.partition_point(|block| (block.segment, block.at) < (segment, at));
        self.blocks.range(start..)
    }

    /// The last block at or below `through`.
    #[must_use]
    pub(crate) fn last_through(&self, through: Version) -> Option<&BlockRef> {
        let count = self.blocks.partition_point(|block| block.version <= through);
        self.blocks.get(count.checked_sub(1)?)
    }

    /// Everything at or below is trimmed.
    #[must_use]
    pub(crate) const fn trimmed_through(&self) -> Version {
        self.trimmed_through
    }

    /// The offset that the next record gets.
    #[must_use]
    pub(crate) const fn next_offset(&self) -> Offset {
        self.next_offset
    }

    /// The offset of the first record that is left, or that will come next.
    #[must_use]
    pub(crate) const fn first_offset(&self) -> Offset {
        self.trimmed_offset
    }

    /// The version of the last block that was trimmed; the trim's own after a restart.
    #[must_use]
    pub(crate) const fn last_gone(&self) -> Version {
        self.last_gone
    }

    /// Bytes of the blocks that are left.
    #[must_use]
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: StreamId = StreamId(17);

    fn block(version: u64, base: u64, record_count: u32) -> BlockRef {
        BlockRef {
            version: Version(version),
            commit_time: WallTime(0),
            base_offset: Offset(base),
            record_count,
            bytes: 10,
            checksum: 0,
            segment: SegmentId(1),
            at: 4096,
        }
    }

    fn three_blocks() -> Index {
        let mut index = Index::default();
        for (version, count) in [(10, 2), (20, 3), (30, 1)] {
            let base = index.assign(S, count);
            index.insert(S, block(version, base.0, count));
        }
        index
    }

    #[test]
    fn trims_keep_the_offsets_running() {
        let mut index = three_blocks();
        assert_eq!(index.trim_offset(S, Version(25)), Some(Offset(5)));
        let mut gone = 0;
        index.trim(S, Version(25), |_| gone += 1);
        index.check();
        assert_eq!((gone, index.stream(S).unwrap().first_offset()), (2, Offset(5)));
        index.trim(S, Version(100), |_| gone += 1);
        assert_eq!((gone, index.assign(S, 4)), (3, Offset(6)));
        assert_eq!(index.trim_offset(S, Version(100)), None);
    }

    #[test]
    fn what_is_dropped_gives_its_offsets_back() {
        let mut index = three_blocks();
        index.drop_above(Version(15), |_| ());
        index.check();
        assert_eq!(index.assign(S, 1), Offset(2));
    }

    #[test]
    fn a_hole_is_found_when_blocks_are_restored() {
        let mut index = Index::default();
        index.restore_trim(S, Version(5), Offset(4));
        assert_eq!(index.restore(S, block(5, 0, 4)), Ok(false));
        assert_eq!(index.restore(S, block(10, 4, 2)), Ok(true));
        let error = index.restore(S, block(20, 7, 1)).unwrap_err();
        assert_eq!((error.expected, error.found), (Offset(6), Offset(7)));
    }

    #[test]
    fn ranges_are_exclusive_below_and_inclusive_above() {
        let index = three_blocks();
        let stream = index.stream(S).unwrap();
        let after: Vec<u64> = stream.after(Version(10)).map(|block| block.version.0).collect();
        assert_eq!(after, [20, 30]);
        assert_eq!(stream.last_through(Version(20)).unwrap().version, Version(20));
        assert_eq!(stream.last_through(Version(9)), None);
        assert_eq!(index.block(S, Version(20)).unwrap().base_offset, Offset(2));
        assert_eq!(index.block(S, Version(21)), None);
    }
}
