//! A rope of byte pieces: what a message carries behind its columns.
//!
//! A message that is built from pieces (blocks of the log's tail, sections of a batch) doesn't copy them;
//! the transport writes them one after the other. A payload off the wire is one piece.

use bytes::{Bytes, BytesMut};

/// Bytes in pieces, never copied by passing them on.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    pieces: Vec<Bytes>,
    len: usize,
}

impl Payload {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { pieces: Vec::new(), len: 0 }
    }

    /// Appends a piece.
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.pieces.push(piece);
        }
    }

    /// Bytes in all pieces.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces in order.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        &self.pieces
    }

    /// The bytes `start..start + len`, without a copy when they lie in one piece. `None` when they lie
    /// outside.
    #[must_use]
    pub fn slice(&self, start: usize, len: usize) -> Option<Bytes> {
        let end = start.checked_add(len)?;
        if end > self.len {
            return None;
        }
        let (mut skip, mut want) = (start, len);
        let mut copied: Option<BytesMut> = None;
        for piece in &self.pieces {
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let take = want.min(piece.len() - skip);
            if take == len {
                return Some(piece.slice(skip..skip + take));
            }
            let copied = copied.get_or_insert_with(|| BytesMut::with_capacity(len));
            copied.extend_from_slice(&piece[skip..skip + take]);
            want -= take;
            skip = 0;
            if want == 0 {
                break;
            }
        }
        Some(copied.map(BytesMut::freeze).unwrap_or_default())
    }

    /// All bytes as one piece; copies only when there are several.
    #[must_use]
    pub fn contiguous(&self) -> Bytes {
        self.slice(0, self.len).expect("the whole lies inside")
    }
}

impl From<Bytes> for Payload {
    fn from(piece: Bytes) -> Self {
        let mut payload = Self::new();
        payload.push(piece);
        payload
    }
}

impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        if let ([one], [two]) = (&self.pieces[..], &other.pieces[..]) {
            return one == two;
        }
        if self.len != other.len {
            return false;
        }
        let (mut ours, mut theirs) = (self.pieces.iter(), other.pieces.iter());
        let (mut one, mut two): (&[u8], &[u8]) = (&[], &[]);
        for _ in 0..self.pieces.len() + other.pieces.len() {
            if one.is_empty() {
                one = ours.next().map_or(&[], |piece| piece);
            }
            if two.is_empty() {
                two = theirs.next().map_or(&[], |piece| piece);
            }
            let common = one.len().min(two.len());
            if one[..common] != two[..common] {
                return false;
            }
            (one, two) = (&one[common..], &two[common..]);
        }
        true
    }
}

impl Eq for Payload {}

impl core::hash::Hash for Payload {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.contiguous().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cross_pieces() {
        let mut payload = Payload::new();
        for piece in [&b"abc"[..], b"", b"de", b"f"] {
            payload.push(Bytes::copy_from_slice(piece));
        }
        assert_eq!(payload.len(), 6);
        for start in 0..=6 {
            for len in 0..=6 - start {
                assert_eq!(payload.slice(start, len).unwrap(), &b"abcdef"[start..start + len]);
            }
            assert_eq!(payload.slice(start, 7 - start), None);
        }
        assert_eq!(payload.slice(usize::MAX, 2), None);
    }

    #[test]
    fn pieces_change_nothing_in_what_is_equal() {
        let cut = |cuts: &[usize], bytes: &[u8]| {
            let (mut payload, mut rest) = (Payload::new(), bytes);
            for cut in cuts {
                let (piece, behind) = rest.split_at(*cut);
                payload.push(Bytes::copy_from_slice(piece));
                rest = behind;
            }
            payload.push(Bytes::copy_from_slice(rest));
            payload
        };
        let all: [&[usize]; 6] = [&[], &[1], &[5], &[2, 2], &[1, 1, 1, 1, 1], &[3, 2]];
        for one in all {
            for two in all {
                assert_eq!(cut(one, b"abcdef"), cut(two, b"abcdef"), "{one:?} {two:?}");
                for at in 0..6 {
                    let mut other = *b"abcdef";
                    other[at] = b'x';
                    assert_ne!(cut(one, b"abcdef"), cut(two, &other), "{one:?} {two:?} at {at}");
                }
                assert_ne!(cut(one, b"abcdef"), cut(two, b"abcdefg"), "{one:?} {two:?}");
            }
        }
        assert_eq!(Payload::new(), Payload::default());
    }
}
