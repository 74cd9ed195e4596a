//! O7: what log servers have mended is what was written, and in the end everything is mended that can be.
//!
//! ```text
//! Note::Mended --> read back at once: the block as it was written first; around it nothing has changed
//! the end      --> no block that anybody wants reads otherwise, where another log server has it whole
//! ```
//!
//! The atlas knows what was written where; the disk says what reads how. A page that could not be read at all
//! was made up by who mended it: there only the block counts.

use common::disk::{File, PAGE_BYTES, padded};
use common::{NodeId, StreamId, Version};

use crate::atlas::{Atlas, Block};
use crate::disk::Disk;
use crate::oracle::{Oracles, Violation};

/// Judges a mend.
///
/// # Errors
/// `O7.mended`: the block reads otherwise than it was written. `O7.around`: something else in its pages is
/// not what it was.
pub(crate) fn judge(
    node: NodeId,
    stream: StreamId,
    version: Version,
    (atlas, disk, oracles): (&Atlas, &Disk, &Oracles),
) -> Result<(), Violation> {
    let name = || format!("{stream} at {version} on {node}");
    let mut blocks = atlas.blocks(node, version).into_iter();
    let is_it = |block: &Block| block.stream == stream && reads_well(disk, block);
    let Some(block) = blocks.find(is_it) else {
        let detail = format!("{} was mended and does not read as it was written", name());
        return Err(Violation { rule: "O7.mended", detail });
    };
    let (first, end) = pages(&block);
    for page in first..end {
        if disk.is_scarred(block.file, page) {
            continue;
        }
        // What was torn when it was written was never kept.
        let pieces = atlas.pieces_in(node, block.file, page).into_iter();
        for (_, at, piece) in pieces.filter(|(version, ..)| oracles.is_kept(node, *version)) {
            let held = disk.peek(block.file, page * PAGE_BYTES, PAGE_BYTES);
            let from = (at - page * PAGE_BYTES) as usize;
            let held = held.and_then(|held| held.get(from..from + piece.len()).map(<[u8]>::to_vec));
            if held.as_deref() != Some(&piece[..]) {
                let file = block.file;
                let detail = format!("{} was mended, and {file:?} is not the same at {at}", name());
                return Err(Violation { rule: "O7.around", detail });
            }
        }
    }
    Ok(())
}

/// The blocks that read otherwise than they were written, by the harm that a disk has.
pub(crate) fn damaged(node: NodeId, atlas: &Atlas, disk: &Disk) -> Vec<Block> {
    let pages = disk.harmed().filter(|(file, _)| matches!(file, File::Segment(_)));
    let blocks = pages.flat_map(|(file, page)| atlas.blocks_in(node, file, page));
    blocks.filter(|block| !reads_well(disk, block)).collect()
}

/// Whether a node has a block that reads as it was written.
pub(crate) fn has_whole(
    node: NodeId,
    stream: StreamId,
    version: Version,
    atlas: &Atlas,
    disk: &Disk,
) -> bool {
    let mut blocks = atlas.blocks(node, version).into_iter();
    blocks.any(|block| block.stream == stream && reads_well(disk, &block))
}

fn pages(block: &Block) -> (u64, u64) {
    let end = block.at + block.bytes.len() as u64;
    (block.at / PAGE_BYTES, end.div_ceil(PAGE_BYTES))
}

fn reads_well(disk: &Disk, block: &Block) -> bool {
    if !disk.contains(block.file) {
        return false;
    }
    let begin = block.at - block.at % PAGE_BYTES;
    let bytes = padded(block.at - begin + block.bytes.len() as u64);
    let from = (block.at - begin) as usize;
    let seen = disk.seen(block.file, begin, bytes);
    seen.is_some_and(|seen| seen.get(from..from + block.bytes.len()) == Some(&block.bytes[..]))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use common::disk::{DiskOp, DiskOpId, DiskRequest, Lane};
    use common::{Prng, SegmentId};

    use super::*;
    use crate::clock::Moment;
    use crate::disk::{DiskProfile, Harm};

    const NODE: NodeId = NodeId(1);
    const FILE: File = File::Segment(SegmentId(1));
    const STREAM: StreamId = StreamId(17);

    /// A frame of one block, whose body are 5,000 bytes from 168 on, at the second page.
    fn bench() -> (Atlas, Disk) {
        let mut frame = crate::oracle::frame(1, 7, 168 + 5000);
        frame[36] = 1;
        frame[128] = 17;
        frame[128 + 28..][..4].copy_from_slice(&5000_u32.to_le_bytes());
        frame[168..].fill(3);
        let (mut atlas, mut disk) =
            (Atlas::new(2), Disk::new(DiskProfile::default(), Prng::new(1)));
        write(&mut disk, DiskOp::Create { file: FILE, bytes: 8 * PAGE_BYTES });
        let data = Bytes::from(frame).into();
        let op = DiskOp::Write { file: FILE, offset: PAGE_BYTES, data, durable: true };
        atlas.wrote(NODE, &DiskRequest { id: DiskOpId(1), lane: Lane::Log, op: op.clone() });
        write(&mut disk, op);
        (atlas, disk)
    }

    fn write(disk: &mut Disk, op: DiskOp) {
        let mut started = Vec::new();
        disk.submit(
            Moment::ZERO,
            DiskRequest { id: DiskOpId(1), lane: Lane::Log, op },
            &mut started,
        );
        disk.complete(Moment::ZERO, started[0].1, &mut Vec::new()).unwrap().result.unwrap();
    }

    fn judged(atlas: &Atlas, disk: &Disk) -> Result<(), &'static str> {
        let eyes = (atlas, disk, &Oracles::default());
        judge(NODE, STREAM, Version(7), eyes).map_err(|violation| violation.rule)
    }

    #[test]
    fn a_mended_block_reads_as_it_was_written() {
        let (atlas, mut disk) = bench();
        assert_eq!(judged(&atlas, &disk), Ok(()));
        assert!(has_whole(NODE, STREAM, Version(7), &atlas, &disk));
        assert!(!has_whole(NODE, StreamId(18), Version(7), &atlas, &disk));
        // In the head: nothing of the block.
        disk.harm(FILE, 1, Harm::Flipped(8 * 100));
        assert!(damaged(NODE, &atlas, &disk).is_empty() && judged(&atlas, &disk).is_ok());
        disk.harm(FILE, 2, Harm::Flipped(8 * 100));
        assert_eq!(judged(&atlas, &disk), Err("O7.mended"));
        let found = damaged(NODE, &atlas, &disk);
        assert_eq!(
            (found[0].stream, found[0].version, found[0].at),
            (STREAM, Version(7), 4096 + 168)
        );
        assert!(!has_whole(NODE, STREAM, Version(7), &atlas, &disk));
    }
}
