//! The tail: bodies of recent blocks, so that consumers that keep up are served without a read or a copy.
//!
//! Bounded by bytes; the oldest versions go first. A version is either here whole or not at all.

use std::collections::BTreeMap;

use common::{Payload, StreamId, Version};

#[derive(Clone, Debug)]
struct TailFrame {
    /// Ascending by stream.
    blocks: Vec<(StreamId, Payload)>,
    bytes: u64,
}

/// Recent blocks in memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tail {
    frames: BTreeMap<Version, TailFrame>,
    bytes: u64,
}

impl Tail {
    /// Keeps the blocks of a version and evicts old ones down to `bytes_max`.
    pub(crate) fn insert(
        &mut self,
        version: Version,
        blocks: Vec<(StreamId, Payload)>,
        bytes_max: u64,
    ) {
        if let Some((last, _)) = self.frames.last_key_value() {
            assert!(*last < version, "the tail ascends: {last} -> {version}");
        }
        let bytes: u64 = blocks.iter().map(|(_, body)| body.len() as u64).sum();
        if !blocks.is_empty() {
            self.bytes += bytes;
            self.frames.insert(version, TailFrame { blocks, bytes });
        }
        while self.bytes > bytes_max {
            let (_, frame) = self.frames.pop_first().expect("bytes are of frames");
            self.bytes -= frame.bytes;
        }
    }

    /// A block's body, if it is still here.
    #[must_use]
    pub(crate) fn body(&self, stream: StreamId, version: Version) -> Option<&Payload> {
        let frame = self.frames.get(&version)?;
        let place = frame.blocks.binary_search_by_key(&stream, |(stream, _)| *stream).ok()?;
        Some(&frame.blocks[place].1)
    }

    /// Forgets everything above `version`.
    pub(crate) fn drop_above(&mut self, version: Version) {
        while let Some(entry) = self.frames.last_entry().filter(|entry| *entry.key() > version) {
            self.bytes -= entry.remove().bytes;
        }
    }

    /// Bytes of the bodies.
    #[must_use]
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes add up.
    pub(crate) fn check(&self) {
        let bytes: u64 = self.frames.values().map(|frame| frame.bytes).sum();
        assert_eq!(bytes, self.bytes, "the tail counts its bytes");
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const S: StreamId = StreamId(17);

    fn insert(tail: &mut Tail, version: u64, len: usize) {
        tail.insert(Version(version), vec![(S, Bytes::from(vec![7; len]).into())], 100);
        tail.check();
    }

    #[test]
    fn the_oldest_go_first_and_one_too_large_goes_at_once() {
        let mut tail = Tail::default();
        insert(&mut tail, 1, 60);
        insert(&mut tail, 2, 40);
        assert!(tail.body(S, Version(1)).is_some());
        insert(&mut tail, 3, 10);
        assert!(tail.body(S, Version(1)).is_none() && tail.body(S, Version(2)).is_some());
        insert(&mut tail, 4, 101);
        assert_eq!((tail.bytes(), tail.body(S, Version(4))), (0, None));
    }

    #[test]
    fn a_dropped_tail_is_gone() {
        let mut tail = Tail::default();
        insert(&mut tail, 1, 60);
        insert(&mut tail, 2, 40);
        tail.drop_above(Version(1));
        tail.check();
        assert_eq!((tail.bytes(), tail.body(S, Version(2))), (60, None));
        assert_eq!(tail.body(StreamId(18), Version(1)), None);
    }
}
