//! A file that is seen piece by piece, with pieces that can't be read: the scanner's view of it.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

/// The part of the file that was fed and is still needed.
#[derive(Clone, Default, Debug)]
pub(super) struct Window {
    /// Where the first piece starts in the file.
    start: u64,
    /// Behind the last piece.
    pub(super) end: u64,
    pieces: VecDeque<Piece>,
}

#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) bytes: u64,
    /// `None`: unreadable.
    pub(super) data: Option<Bytes>,
}

pub(super) enum Peek {
    Data(Bytes),
    Unreadable,
    /// Not fed yet.
    Wait,
}

impl Window {
    pub(super) fn push(&mut self, piece: Piece) {
        if piece.bytes > 0 {
            self.end = self.end.checked_add(piece.bytes).expect("a file below 16 EiB");
            self.pieces.push_back(piece);
        }
    }

    /// The bytes `at..at + bytes`; copied only when they lie in several pieces.
    pub(super) fn peek(&self, at: u64, bytes: u64) -> Peek {
        assert!(at >= self.start, "byte {at} was forgotten up to {}", self.start);
        let end = at + bytes;
        if end > self.end {
            return Peek::Wait;
        }
        let (mut piece_start, mut copied) = (self.start, BytesMut::new());
        for piece in &self.pieces {
            let piece_end = piece_start + piece.bytes;
            if piece_end > at && piece_start < end {
                let Some(data) = &piece.data else { return Peek::Unreadable };
                let from = at.max(piece_start) - piece_start;
                let to = end.min(piece_end) - piece_start;
                if to - from == bytes {
                    return Peek::Data(data.slice(from as usize..to as usize));
                }
                copied.extend_from_slice(&data[from as usize..to as usize]);
            }
            if piece_end >= end {
                break;
            }
            piece_start = piece_end;
        }
        Peek::Data(copied.freeze())
    }

    /// What there is from `at` on.
    pub(super) fn rest(&self, at: u64) -> Bytes {
        match self.peek(at.min(self.end), self.end.saturating_sub(at)) {
            Peek::Data(rest) => rest,
            Peek::Unreadable | Peek::Wait => Bytes::new(),
        }
    }

    pub(super) fn forget_below(&mut self, at: u64) {
        while let Some(first) = self.pieces.front()
            && self.start + first.bytes <= at
        {
            self.start += first.bytes;
            self.pieces.pop_front();
        }
    }
}
