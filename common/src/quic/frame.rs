//! Frames out and frames in, without I/O: gathering many small pieces into few chunks, and cutting
//! whole frames out of whatever chunks arrive.
//!
//! ```text
//!  out  head | payload | payload     small pieces are copied together, large ones pass as they are
//!       [h..h..h..h..............] [ large payload, shared ] [h..h..]      chunks of one write
//!
//!  in   chunk          chunk          chunk
//!       |f1|f2|f3 fi..  ..rst part..   ..f3 end|f4|          f1, f2, f4: slices; f3: one copy
//! ```

use bytes::{Buf, Bytes, BytesMut};

use crate::Payload;
use crate::wire::{FRAME_HEADER_BYTES, Frame};

/// No frame is shorter than its header.
pub const FRAME_BYTES_MIN: usize = FRAME_HEADER_BYTES;

/// Bytes of the length prefix, at the start of the header.
const LENGTH_BYTES: usize = 4;
const _: () = assert!(LENGTH_BYTES <= FRAME_BYTES_MIN);

/// A piece up to this size is copied into its neighbours' chunk: the copy is cheaper than one more
/// chunk, which quinn walks over for each packet.
const COPY_BYTES_MAX: usize = 16 << 10;
/// A chunk of copied pieces; its memory is freed once the peer has acknowledged all of it.
const CHUNK_BYTES: usize = 64 << 10;
/// What a frame that comes in parts gets at first. A peer must send bytes to make it grow.
const PARTIAL_BYTES: usize = 256 << 10;

impl From<Bytes> for Frame {
    /// A frame that lies in one piece already.
    fn from(head: Bytes) -> Self {
        Self { head, payload: Payload::new() }
    }
}

/// The length that a frame's header claims; `None` when its head is too short to have one.
pub(super) fn claimed_bytes(frame: &Frame) -> Option<usize> {
    frame.head.first_chunk().map(|&length| u32::from_le_bytes(length) as usize)
}

/// Puts frames into as few chunks as is cheap. Returns the bytes of all of them.
pub(super) fn gather(frames: impl Iterator<Item = Frame>, chunks: &mut Vec<Bytes>) -> usize {
    let mut copied = BytesMut::new();
    let mut total_bytes = 0;
    for frame in frames {
        total_bytes += frame.len();
        for piece in core::iter::once(&frame.head).chain(frame.payload.pieces()) {
            if piece.len() > COPY_BYTES_MAX {
                flush(&mut copied, chunks);
                chunks.push(piece.clone());
                continue;
            }
            if copied.len() + piece.len() > CHUNK_BYTES {
                flush(&mut copied, chunks);
            }
            copied.extend_from_slice(piece);
        }
    }
    flush(&mut copied, chunks);
    let gathered: usize = chunks.iter().map(Bytes::len).sum();
    assert_eq!(gathered, total_bytes, "gathered {gathered} bytes of {total_bytes}");
    total_bytes
}

fn flush(copied: &mut BytesMut, chunks: &mut Vec<Bytes>) {
    if !copied.is_empty() {
        chunks.push(copied.split().freeze());
    }
}

/// Cuts frames out of the chunks of one lane.
#[derive(Debug)]
pub(super) struct Cutter {
    frame_bytes_max: usize,
    /// The start of a frame whose end has not come yet.
    partial: BytesMut,
}

/// A length that no frame has. Nothing behind it can be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a frame of {frame_bytes} bytes; from {FRAME_BYTES_MIN} to {frame_bytes_max} are allowed")]
pub(super) struct BadLength {
    pub(super) frame_bytes: usize,
    pub(super) frame_bytes_max: usize,
}

impl Cutter {
    pub(super) fn new(frame_bytes_max: usize) -> Self {
        assert!(
            frame_bytes_max >= FRAME_BYTES_MIN,
            "frames of at most {frame_bytes_max} bytes leave no room for a header"
        );
        Self { frame_bytes_max, partial: BytesMut::new() }
    }

    /// Takes the next bytes of the lane; whole frames go to `frames`.
    pub(super) fn push(
        &mut self,
        mut chunk: Bytes,
        frames: &mut Vec<Bytes>,
    ) -> Result<(), BadLength> {
        if !self.partial.is_empty() && !self.complete_partial(&mut chunk, frames)? {
            assert!(chunk.is_empty(), "{} bytes were left behind a part", chunk.len());
            return Ok(());
        }
        while let Some(frame_bytes) = self.frame_bytes(&chunk)? {
            if chunk.len() < frame_bytes {
                break;
            }
            frames.push(chunk.split_to(frame_bytes));
        }
        if !chunk.is_empty() {
            let wanted = self.frame_bytes(&chunk)?.unwrap_or(FRAME_BYTES_MIN);
            self.partial.reserve(wanted.min(PARTIAL_BYTES));
            self.partial.extend_from_slice(&chunk);
        }
        Ok(())
    }

    /// Whether a frame has begun and not ended.
    pub(super) fn is_inside_frame(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Moves bytes from the chunk to the partial frame until it is whole. False: it is not yet.
    fn complete_partial(
        &mut self,
        chunk: &mut Bytes,
        frames: &mut Vec<Bytes>,
    ) -> Result<bool, BadLength> {
        let prefix_missing = LENGTH_BYTES.saturating_sub(self.partial.len());
        self.take(chunk, prefix_missing);
        let Some(frame_bytes) = self.frame_bytes(&self.partial)? else { return Ok(false) };
        self.take(chunk, frame_bytes - self.partial.len());
        assert!(
            self.partial.len() <= frame_bytes,
            "{} bytes were taken for a frame of {frame_bytes}",
            self.partial.len()
        );
        if self.partial.len() < frame_bytes {
            return Ok(false);
        }
        frames.push(core::mem::take(&mut self.partial).freeze());
        Ok(true)
    }

    fn take(&mut self, chunk: &mut Bytes, wanted_bytes: usize) {
        let bytes = wanted_bytes.min(chunk.len());
        self.partial.extend_from_slice(&chunk[..bytes]);
        chunk.advance(bytes);
    }

    /// The checked length of the frame that starts here; `None` while the prefix is not whole.
    fn frame_bytes(&self, start: &[u8]) -> Result<Option<usize>, BadLength> {
        let Some(&length) = start.first_chunk() else { return Ok(None) };
        let frame_bytes = u32::from_le_bytes(length) as usize;
        if !(FRAME_BYTES_MIN..=self.frame_bytes_max).contains(&frame_bytes) {
            return Err(BadLength { frame_bytes, frame_bytes_max: self.frame_bytes_max });
        }
        Ok(Some(frame_bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(bytes: usize, fill: u8) -> Vec<u8> {
        let mut frame = vec![fill; bytes];
        frame[..4].copy_from_slice(&(bytes as u32).to_le_bytes());
        frame
    }

    fn with_payload(head: Bytes, pieces: impl IntoIterator<Item = Bytes>) -> Frame {
        let mut payload = Payload::new();
        pieces.into_iter().for_each(|piece| payload.push(piece));
        Frame { head, payload }
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_frames(
            sizes in prop::collection::vec(FRAME_BYTES_MIN..700, 0..20),
            cuts in prop::collection::vec(1usize..300, 1..40),
        ) {
            let sent: Vec<Vec<u8>> =
                sizes.iter().enumerate().map(|(i, &bytes)| frame(bytes, i as u8)).collect();
            let mut wire = Bytes::from(sent.concat());
            let mut cutter = Cutter::new(700);
            let mut got = Vec::new();
            for cut in cuts.iter().cycle() {
                if wire.is_empty() {
                    break;
                }
                cutter.push(wire.split_to((*cut).min(wire.len())), &mut got).unwrap();
            }
            prop_assert_eq!(got, sent);
            prop_assert!(!cutter.is_inside_frame());
        }

        #[test]
        fn gathered_chunks_are_the_frames(
            sizes in prop::collection::vec(
                (FRAME_BYTES_MIN..200, prop::collection::vec(0usize..40_000, 0..4)), 0..12),
        ) {
            let frames: Vec<Frame> = sizes
                .iter()
                .enumerate()
                .map(|(i, (head, payload))| with_payload(
                    frame(*head, i as u8).into(),
                    payload.iter().map(|&bytes| vec![i as u8; bytes].into()),
                ))
                .collect();
            let expected: Vec<u8> = frames
                .iter()
                .flat_map(|f| f.head.iter().chain(f.payload.pieces().iter().flatten()).copied())
                .collect();
            let mut chunks = Vec::new();
            let total_bytes = gather(frames.into_iter(), &mut chunks);
            prop_assert_eq!(total_bytes, expected.len());
            prop_assert_eq!(chunks.concat(), expected);
        }
    }

    #[test]
    fn small_frames_share_a_chunk_and_large_pieces_are_not_copied() {
        let large = Bytes::from(vec![7; COPY_BYTES_MAX + 1]);
        let small = || Frame::from(Bytes::from(frame(64, 1)));
        let with_large = with_payload(frame(64, 2).into(), [large.clone()]);
        let mut chunks = Vec::new();
        let frames = (0..100).map(|_| small()).chain([with_large]).chain((0..100).map(|_| small()));
        gather(frames, &mut chunks);
        assert_eq!(chunks.len(), 3, "copied, large, copied");
        assert_eq!(chunks[1].as_ptr(), large.as_ptr());
    }

    #[test]
    fn a_frame_inside_one_chunk_is_not_copied() {
        let chunk = Bytes::from([frame(64, 1), frame(80, 2)].concat());
        let mut got = Vec::new();
        Cutter::new(100).push(chunk.clone(), &mut got).unwrap();
        assert_eq!(got.len(), 2);
        assert_eq!(got[1].as_ptr(), chunk[64..].as_ptr());
    }

    #[test]
    fn lengths_outside_the_limits_are_refused() {
        for bytes in [0usize, FRAME_BYTES_MIN - 1, 101, u32::MAX as usize] {
            let chunk = Bytes::copy_from_slice(&(bytes as u32).to_le_bytes());
            let refused = Cutter::new(100).push(chunk.clone(), &mut Vec::new());
            assert_eq!(refused, Err(BadLength { frame_bytes: bytes, frame_bytes_max: 100 }));

            let mut byte_by_byte = Cutter::new(100);
            let refused: Vec<_> = (0..4)
                .map(|i| byte_by_byte.push(chunk.slice(i..=i), &mut Vec::new()).is_err())
                .collect();
            assert_eq!(refused, [false, false, false, true], "length {bytes}");
        }
    }
}
