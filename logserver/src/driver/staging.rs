//! Aligned memory, and the one copy from a payload into it.
//!
//! ```text
//!  writes (same file, in order)      staging                        file
//!  [offset 0, 5000 bytes]  ------>   [5000 | zeros to 8192]  run 0: offset 0, 12288 bytes
//!  [offset 8192, 100 bytes] ----->   [100 | zeros to 4096 ]
//!  [offset 65536, 4096 bytes] --->   [4096                ]  run 1: offset 65536, 4096 bytes
//! ```
//! Neighbours in the file become one run, up to [`RUN_BYTES_MAX`]. What does not fit is written in a later
//! round of the same feed.

use bytes::Buf as _;
use common::Payload;
use common::disk::{DiskOpId, PAGE_BYTES, padded};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes of one write to the kernel: beyond it the device splits the request anyway.
pub(super) const RUN_BYTES_MAX: usize = 1 << 20;

/// Runs in one round: the ring has that many entries to spare.
pub(super) const RUNS_MAX: usize = 32;

const PAGE: usize = PAGE_BYTES as usize;

const _: () = assert!(RUN_BYTES_MAX.is_multiple_of(PAGE), "runs end on a page");

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

const _: () = assert!(align_of::<Page>() == PAGE, "O_DIRECT wants memory aligned to pages");

/// Whole pages of memory, aligned to pages.
pub(super) struct Pages(Vec<Page>);

impl Pages {
    /// At least `bytes` zeros.
    pub(super) fn zeroed(bytes: usize) -> Self {
        Self(vec![Page([0; PAGE]); bytes.div_ceil(PAGE)])
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_bytes()
    }
}

impl AsRef<[u8]> for Pages {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// A write that waits for its turn.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) id: DiskOpId,
    pub(super) offset: u64,
    pub(super) data: Payload,
}

impl Write {
    /// Bytes in the file, the padding included.
    pub(super) const fn padded_bytes(&self) -> u64 {
        padded(self.data.len() as u64)
    }

    /// First offset behind it.
    pub(super) const fn end(&self) -> u64 {
        self.offset + self.padded_bytes()
    }
}

/// Consecutive bytes of the staging area that go to consecutive bytes of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Where in the staging area.
    pub(super) start: usize,
    /// How much; whole pages.
    pub(super) bytes: usize,
    /// Where in the file.
    pub(super) offset: u64,
}

/// The aligned memory that writes go out of.
pub(super) struct Staging {
    pages: Pages,
    used: usize,
    runs: Vec<Run>,
}

impl Staging {
    pub(super) fn new(bytes: usize) -> Self {
        assert!(
            bytes >= PAGE && bytes.is_multiple_of(PAGE),
            "a staging area of {bytes} bytes is not whole pages"
        );
        Self { pages: Pages::zeroed(bytes), used: 0, runs: Vec::with_capacity(RUNS_MAX) }
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub(super) fn memory(&self) -> &[u8] {
        self.pages.bytes()
    }

    /// The bytes of a run.
    pub(super) fn run_bytes(&self, run: Run) -> &[u8] {
        &self.pages.bytes()[run.start..run.start + run.bytes]
    }

    /// The run to put bytes for `offset` into and the room that it has: the last one when `offset` continues
    /// it, otherwise a new one.
    fn room(&mut self, offset: u64) -> usize {
        let left = self.memory().len() - self.used;
        if let Some(last) = self.runs.last()
            && last.offset + last.bytes as u64 == offset
            && last.bytes < RUN_BYTES_MAX
        {
            return left.min(RUN_BYTES_MAX - last.bytes);
        }
        if self.runs.len() == RUNS_MAX || left == 0 {
            return 0;
        }
        self.runs.push(Run { start: self.used, bytes: 0, offset });
        left.min(RUN_BYTES_MAX)
    }

    /// Copies what fits from the cursor and returns how many bytes of the file that covers.
    fn add(&mut self, offset: u64, cursor: &mut Cursor<'_>) -> u64 {
        let room = self.room(offset);
        if room == 0 {
            return 0;
        }
        let target = &mut self.pages.bytes_mut()[self.used..self.used + room];
        let copied = cursor.copy_to(target);
        let covered = copied.next_multiple_of(PAGE);
        target[copied..covered].fill(0);
        self.used += covered;
        let run = self.runs.last_mut().expect("room() left a run");
        run.bytes += covered;
        assert!(
            run.start + run.bytes == self.used && run.bytes <= RUN_BYTES_MAX,
            "a run of {} bytes at {} does not end at {}",
            run.bytes,
            run.start,
            self.used
        );
        covered as u64
    }
}

/// A place in a payload.
struct Cursor<'a> {
    payload: &'a Payload,
    piece: usize,
    at: usize,
}

impl Cursor<'_> {
    fn is_at_end(&self) -> bool {
        self.piece == self.payload.pieces().len()
    }

    /// Fills `target` as far as there is something, and returns how far that was.
    fn copy_to(&mut self, target: &mut [u8]) -> usize {
        let mut copied = 0;
        while copied < target.len() && !self.is_at_end() {
            let piece = &self.payload.pieces()[self.piece];
            let mut rest = &piece[self.at..];
            let count = rest.len().min(target.len() - copied);
            rest.copy_to_slice(&mut target[copied..copied + count]);
            copied += count;
            self.at += count;
            if self.at == piece.len() {
                (self.piece, self.at) = (self.piece + 1, 0);
            }
        }
        copied
    }
}

/// Brings writes into a staging area, round by round.
pub(super) struct Feed<'a> {
    writes: &'a [Write],
    current: usize,
    covered: u64,
    cursor: Option<Cursor<'a>>,
}

impl<'a> Feed<'a> {
    pub(super) const fn new(writes: &'a [Write]) -> Self {
        Self { writes, current: 0, covered: 0, cursor: None }
    }

    /// Fills the staging area anew. `false` when there is nothing left to write.
    pub(super) fn fill(&mut self, staging: &mut Staging) -> bool {
        staging.used = 0;
        staging.runs.clear();
        while let Some(write) = self.writes.get(self.current) {
            let cursor =
                self.cursor.get_or_insert(Cursor { payload: &write.data, piece: 0, at: 0 });
            while !cursor.is_at_end() {
                let covered = staging.add(write.offset + self.covered, cursor);
                self.covered += covered;
                if covered == 0 {
                    return true;
                }
            }
            assert_eq!(self.covered, write.padded_bytes(), "a write was staged in part");
            (self.current, self.covered, self.cursor) = (self.current + 1, 0, None);
        }
        !staging.runs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn payload(bytes: &[u8], piece_bytes: usize) -> Payload {
        let mut payload = Payload::new();
        for piece in bytes.chunks(piece_bytes) {
            payload.push(Bytes::copy_from_slice(piece));
        }
        payload
    }

    #[test]
    fn neighbours_share_a_run_and_are_padded() {
        let writes = [(0, 5000), (8192, 100), (65536, 4096)].map(|(offset, bytes)| Write {
            id: DiskOpId(0),
            offset,
            data: payload(&vec![9; bytes], 1000),
        });
        let mut staging = Staging::new(RUN_BYTES_MAX);
        let mut feed = Feed::new(&writes);
        assert!(feed.fill(&mut staging));
        assert_eq!(
            staging.runs(),
            [
                Run { start: 0, bytes: 12288, offset: 0 },
                Run { start: 12288, bytes: 4096, offset: 65536 }
            ]
        );
        assert!(staging.memory()[5000..8192].iter().all(|&byte| byte == 0));
        assert!(!feed.fill(&mut staging));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever the sizes and however small the staging area: the file ends up the same as by writing
        /// one after the other.
        #[test]
        fn rounds_of_runs_write_the_same_file(
            sizes in prop::collection::vec((0u64..3, 0usize..40_000), 1..40),
            piece_bytes in 1usize..9_000,
            staging_pages in 1usize..12,
        ) {
            let mut expected = Vec::new();
            let mut writes = Vec::new();
            for (index, (gap, bytes)) in sizes.into_iter().enumerate() {
                let offset = expected.len() as u64 + gap * PAGE_BYTES;
                let data = vec![index as u8 + 1; bytes];
                expected.resize(offset as usize, 0);
                expected.extend_from_slice(&data);
                expected.resize(expected.len().next_multiple_of(PAGE), 0);
                writes.push(Write { id: DiskOpId(0), offset, data: payload(&data, piece_bytes) });
            }
            let mut file = vec![0; expected.len()];
            let mut staging = Staging::new(staging_pages * PAGE);
            let mut feed = Feed::new(&writes);
            while feed.fill(&mut staging) {
                prop_assert!(staging.runs().len() <= RUNS_MAX);
                for &run in staging.runs() {
                    let start = run.offset as usize;
                    file[start..start + run.bytes].copy_from_slice(staging.run_bytes(run));
                }
            }
            prop_assert!(file == expected);
        }
    }
}
