//! The bytes of written keys: a first-in, first-out log that the points and the runs point into.
//!
//! ```text
//! chunk      4 MiB                         a reference, 32 bits: | chunk mod 2^12 | word in it: 20 |
//!            +--------+---------+-----+--------+------
//!            | length | key ... | pad | length | key ...          lengths are u32, little-endian;
//!            +--------+---------+-----+--------+------            everything begins at a multiple of 4
//! ```
//!
//! A chunk goes as a whole, once nothing in it can be looked at any more: neither a live point nor a run
//! reaches back that far. A key longer than a chunk makes its chunk longer.

use std::collections::VecDeque;

use super::window::Seq;

/// Where a chunk is full.
const CHUNK_BYTES: usize = WORDS * WORD_BYTES;
const WORD_BITS: u32 = if cfg!(test) { 6 } else { 20 };
const WORDS: usize = 1 << WORD_BITS;
const WORD_BYTES: usize = 4;
/// Chunks at once, at most: 16 GiB of keys.
const CHUNKS_MAX: usize = 1 << (32 - WORD_BITS);
/// Empty chunks that are kept for the next keys.
const SPARES_MAX: usize = 1;

/// Where a key is in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub(super) struct KeyRef(u32);

#[derive(Clone, Debug)]
struct Chunk {
    bytes: Vec<u8>,
    /// The last batch that wrote into it.
    newest: Seq,
}

#[derive(Clone, Debug)]
pub(super) struct KeyLog {
    chunks: VecDeque<Chunk>,
    /// The number of the first chunk.
    first: u32,
    spares: Vec<Vec<u8>>,
    bytes: usize,
}

impl KeyLog {
    pub(super) const fn new() -> Self {
        Self { chunks: VecDeque::new(), first: 0, spares: Vec::new(), bytes: 0 }
    }

    /// Keeps a key that batch `seq` wrote.
    pub(super) fn append(&mut self, key: &[u8], seq: Seq) -> KeyRef {
        if self.chunks.back().is_none_or(|chunk| chunk.bytes.len() >= CHUNK_BYTES) {
            assert!(self.chunks.len() < CHUNKS_MAX, "{} chunks of keys", self.chunks.len());
            let size = if self.chunks.is_empty() { 0 } else { CHUNK_BYTES + CHUNK_BYTES / 32 };
            let bytes = self.spares.pop().unwrap_or_else(|| Vec::with_capacity(size));
            self.chunks.push_back(Chunk { bytes, newest: seq });
        }
        let chunk_number = self.first.wrapping_add(self.chunks.len() as u32 - 1);
        let chunk = self.chunks.back_mut().expect("one was pushed if there was none");
        assert!(chunk.newest <= seq, "batch {seq:?} after {:?}", chunk.newest);
        let begin = chunk.bytes.len();
        let length = u32::try_from(key.len()).expect("a key below 4 GiB");
        let end = (begin + WORD_BYTES + key.len()).next_multiple_of(WORD_BYTES);
        chunk.bytes.reserve(end - begin);
        chunk.bytes.extend_from_slice(&length.to_le_bytes());
        chunk.bytes.extend_from_slice(key);
        if chunk.bytes.len() < end {
            chunk.bytes.resize(end, 0);
        }
        chunk.newest = seq;
        self.bytes += end - begin;
        KeyRef(chunk_number << WORD_BITS | (begin / WORD_BYTES) as u32)
    }

    pub(super) fn key(&self, at: KeyRef) -> &[u8] {
        let (rest, length) = self.entry(at);
        &rest[..length]
    }

    /// The first line of a key, so that it is near when it is needed.
    pub(super) fn touch(&self, at: KeyRef) -> usize {
        self.entry(at).1
    }

    fn entry(&self, at: KeyRef) -> (&[u8], usize) {
        let place = (at.0 >> WORD_BITS).wrapping_sub(self.first) as usize % CHUNKS_MAX;
        let begin = (at.0 as usize % WORDS) * WORD_BYTES;
        let bytes = &self.chunks[place].bytes[begin..];
        let (length, rest) = bytes.split_first_chunk().expect("a length is never cut");
        (rest, u32::from_le_bytes(*length) as usize)
    }

    /// Drops up to `chunks_max` chunks in which nothing newer than `unused` was written.
    pub(super) fn expire(&mut self, unused: Seq, chunks_max: usize) {
        for _ in 0..chunks_max {
            let Some(chunk) = self.chunks.pop_front_if(|chunk| chunk.newest <= unused) else {
                return;
            };
            self.first = self.first.wrapping_add(1);
            let mut bytes = chunk.bytes;
            self.bytes -= bytes.len();
            if self.spares.len() < SPARES_MAX && bytes.len() < 2 * CHUNK_BYTES {
                bytes.clear();
                self.spares.push(bytes);
            }
        }
    }

    /// Takes `by` off the numbers of the batches.
    pub(super) fn renumber(&mut self, by: u32) {
        for chunk in &mut self.chunks {
            chunk.newest.0 = chunk.newest.0.saturating_sub(by);
        }
    }

    pub(super) const fn memory_bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn check(&self, newest: Seq) {
        let mut before = Seq::NONE;
        for chunk in &self.chunks {
            assert!(before <= chunk.newest, "chunks of {:?} after {before:?}", chunk.newest);
            before = chunk.newest;
        }
        assert!(before <= newest, "a chunk of {before:?}, newest {newest:?}");
        let bytes: usize = self.chunks.iter().map(|chunk| chunk.bytes.len()).sum();
        assert_eq!(bytes, self.bytes, "bytes of the chunks");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_all_lengths_are_found_until_their_chunk_goes() {
        let mut log = KeyLog::new();
        let keys: Vec<Vec<u8>> = (0..3000_usize).map(|i| vec![i as u8; i * 7 % 400]).collect();
        let mut all = Vec::new();
        for (seq, batch) in (1..).zip(keys.chunks(100)) {
            all.extend(batch.iter().map(|key| (log.append(key, Seq(seq)), key, seq)));
            let huge = vec![seq as u8; CHUNK_BYTES + 5];
            let at = log.append(&huge, Seq(seq));
            assert_eq!(log.key(at), huge);
            let unused = seq.saturating_sub(5);
            log.expire(Seq(unused), 3);
            log.check(Seq(seq));
            all.iter().filter(|(_, _, seq)| *seq > unused).for_each(|(at, key, _)| {
                assert_eq!(log.key(*at), *key);
                assert_eq!(log.touch(*at), key.len());
            });
        }
        log.expire(Seq(30), usize::MAX);
        assert_eq!(log.memory_bytes(), 0);
    }
}
