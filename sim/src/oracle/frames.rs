//! Where the frames of versions lie on a disk, read off the bytes that a log server writes.
//!
//! Only this much of the log's format is known here: a frame begins with `MRFR`, has its own length at 40,
//! its epoch at 56 and its version at 72, all little-endian; frames of one write follow each other, perhaps
//! behind a page that heads the segment. The number of its blocks is at 36, and behind 128 bytes each has an
//! entry of 40: the stream at 0, the length of its body at 28. The bodies follow.

use bytes::Bytes;
use common::disk::PAGE_BYTES;
use common::{Epoch, StreamId, Version};

const MAGIC: &[u8] = b"MRFR";
const COUNT_AT: usize = 36;
const LENGTH_AT: usize = 40;
const EPOCH_AT: usize = 56;
const VERSION_AT: usize = 72;
const HEADER_BYTES: usize = 128;
const ENTRY_BYTES: usize = 40;
const BODY_LENGTH_AT: usize = 28;

/// A frame in a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) epoch: Epoch,
    pub(crate) version: Version,
    /// From the start of the write.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

pub(crate) fn frames_in(data: &Bytes) -> Vec<Found> {
    let mut at = if data.starts_with(MAGIC) { 0 } else { PAGE_BYTES as usize };
    let mut found = Vec::new();
    while data.len() >= at + HEADER_BYTES && data[at..].starts_with(MAGIC) {
        let bytes = word(data, at + LENGTH_AT);
        if bytes < HEADER_BYTES as u64 {
            break;
        }
        found.push(Found {
            epoch: Epoch(word(data, at + EPOCH_AT)),
            version: Version(word(data, at + VERSION_AT)),
            offset: at as u64,
            bytes,
        });
        match usize::try_from(bytes).ok().and_then(|bytes| at.checked_add(bytes)) {
            Some(next) => at = next,
            None => break,
        }
    }
    found
}

/// The bodies in a frame: whose, where from the frame's start, and what.
pub(crate) fn bodies_in(frame: &Bytes) -> Vec<(StreamId, u64, Bytes)> {
    if frame.len() < HEADER_BYTES {
        return Vec::new();
    }
    let count = half_word(frame, COUNT_AT) as usize;
    let mut at = HEADER_BYTES + count * ENTRY_BYTES;
    let mut bodies = Vec::new();
    for entry in (HEADER_BYTES..at).step_by(ENTRY_BYTES) {
        if frame.len() < entry + ENTRY_BYTES {
            break;
        }
        let bytes = half_word(frame, entry + BODY_LENGTH_AT) as usize;
        if frame.len() < at + bytes {
            break;
        }
        let stream = StreamId(word(frame, entry));
        bodies.push((stream, at as u64, frame.slice(at..at + bytes)));
        at += bytes;
    }
    bodies
}

fn half_word(data: &Bytes, at: usize) -> u32 {
    let bytes = data[at..at + 4].try_into().expect("four bytes");
    u32::from_le_bytes(bytes)
}

fn word(data: &Bytes, at: usize) -> u64 {
    let bytes = data[at..at + 8].try_into().expect("eight bytes");
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
pub(crate) fn frame(epoch: u64, version: u64, bytes: usize) -> Vec<u8> {
    let mut frame = vec![0; bytes];
    frame[..4].copy_from_slice(MAGIC);
    frame[LENGTH_AT..][..8].copy_from_slice(&(bytes as u64).to_le_bytes());
    frame[EPOCH_AT..][..8].copy_from_slice(&epoch.to_le_bytes());
    frame[VERSION_AT..][..8].copy_from_slice(&version.to_le_bytes());
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_found_by_the_table() {
        let mut data = frame(1, 7, 128 + 80 + 5);
        data[COUNT_AT] = 2;
        for (place, (stream, bytes)) in [(17, 2), (18, 3)].into_iter().enumerate() {
            data[128 + 40 * place] = stream;
            data[128 + 40 * place + BODY_LENGTH_AT] = bytes;
        }
        data[208..].copy_from_slice(b"abcde");
        let bodies = bodies_in(&Bytes::from(data));
        let (ab, cde) = (Bytes::from_static(b"ab"), Bytes::from_static(b"cde"));
        assert_eq!(bodies, [(StreamId(17), 208, ab), (StreamId(18), 210, cde)]);
        assert_eq!(bodies_in(&Bytes::from(frame(1, 7, 200))), []);
    }

    #[test]
    fn frames_are_found_one_behind_the_other() {
        let data = [frame(1, 7, 200), frame(1, 9, 130), vec![0; 300]].concat();
        let found = frames_in(&Bytes::from(data));
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].version, found[0].offset, found[0].bytes), (Version(7), 0, 200));
        assert_eq!((found[1].version, found[1].offset, found[1].bytes), (Version(9), 200, 130));
        let headed = [vec![1; 4096], frame(1, 7, 200)].concat();
        assert_eq!(frames_in(&Bytes::from(headed))[0].offset, 4096);
        assert!(frames_in(&Bytes::from(vec![0; 4096])).is_empty());
    }
}
