//! What stands around the frames of a segment: header, footer, trailer.
//!
//! ```text
//! 0        4096                        frames end, padded        last page
//! | header | flush group | flush group | footer ... | unused     | trailer |
//!                                        ^ at whole pages          | points back
//!                                        `-------------------------'
//! ```
//!
//! The header goes out in the write of the segment's first flush group. A segment is *sealed* by a footer and
//! then a trailer; one without a trailer is read by scanning. Every structure is followed by zeros up to
//! whole pages.
//!
//! ```text
//! header                                    trailer
//! off size field                            off size field
//!   0   4  magic            "MRSG"            0   4  magic           "MRTR"
//!   4   4  checksum         over 8..80        4   4  checksum        over 8..48
//!   8   2  format version   FORMAT            8   2  format version  FORMAT
//!  10   2  zero                              10   2  zero
//!  12   4  previous hash    of the last      12   4  footer checksum as the footer has it
//!                           frame before     16   8  node
//!  16   8  node                              24   8  segment
//!  24   8  segment                           32   8  footer offset   in the file
//!  32   8  segment bytes    of the file      40   8  footer bytes    without padding
//!  40   8  first sequence
//!  48   8  epoch            at the start     epoch start
//!  56   8  previous version                   0   8  epoch
//!  64  16  zero                               8   8  previous version: its recovery version
//!
//! footer = head (128) | epoch starts (16 each) | entries (64 each)
//! off size field                            entry: one block of a frame
//!   0   4  magic            "MRFT"          off size field
//!   4   4  checksum         over 8..end       0   8  stream
//!   8   2  format version   FORMAT            8   8  epoch
//!  10   2  zero                              16   8  version
//!  12   4  last hash                         24   8  commit time
//!  16   8  node                              32   8  base offset     of the first record
//!  24   8  segment                           40   8  offset          of the body in the file
//!  32   8  footer bytes     without padding  48   4  record count
//!  40   8  frames end       in the file      52   4  bytes           of the body
//!  48   8  first sequence                    56   4  checksum        of the body
//!  56   8  last sequence                     60   4  zero
//!  64   8  last version
//!  72   8  last epoch
//!  80   8  last known committed
//!  88   8  last commit time
//!  96   4  epoch starts     count
//! 100   4  entries          count
//! 104  24  zero
//! ```

use bytes::Bytes;
use common::disk::{PAGE_BYTES, padded};
use common::{Epoch, NodeId, Offset, SegmentId, Sequence, StreamId, Version, WallTime};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::flaw::{Flaw, check, read, seal};

/// The format version that this build writes, and the only one that it reads.
pub const FORMAT: u16 = 1;
/// Bytes in front of the first frame.
pub const SEGMENT_HEADER_BYTES: u64 = PAGE_BYTES;
/// Bytes of the trailer, at the end of the file.
pub const TRAILER_BYTES: u64 = PAGE_BYTES;

const HEADER_MAGIC: [u8; 4] = *b"MRSG";
const FOOTER_MAGIC: [u8; 4] = *b"MRFT";
const TRAILER_MAGIC: [u8; 4] = *b"MRTR";
const HEADER_BYTES: usize = size_of::<RawSegmentHeader>();
const FOOTER_HEAD_BYTES: usize = size_of::<RawFooter>();
const EPOCH_START_BYTES: usize = size_of::<RawEpochStart>();
const FOOTER_ENTRY_BYTES: usize = size_of::<RawFooterEntry>();
const TRAILER_FIELD_BYTES: usize = size_of::<RawTrailer>();

const _: () = assert!(HEADER_BYTES == 80 && TRAILER_FIELD_BYTES == 48, "as drawn above");
const _: () = assert!(FOOTER_HEAD_BYTES == 128 && FOOTER_ENTRY_BYTES == 64, "as drawn above");
const _: () = assert!(EPOCH_START_BYTES == 16, "as drawn above");

/// The first page of a segment: what its first frame follows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentHeader {
    /// Whose log this is.
    pub node: NodeId,
    /// Its id.
    pub segment: SegmentId,
    /// The length of the file.
    pub segment_bytes: u64,
    /// The sequence of its first frame.
    pub first_sequence: Sequence,
    /// The hash of the frame before that; 0 for the first segment of a log.
    pub previous_hash: u32,
    /// The epoch of the frame before that.
    pub epoch: Epoch,
    /// The version of the frame before that.
    pub previous_version: Version,
}

/// Where an epoch begins in a log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EpochStart {
    /// The epoch.
    pub epoch: Epoch,
    /// What its first version follows: the recovery version of the epoch before.
    pub previous_version: Version,
}

/// A block of a sealed segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FooterEntry {
    /// The stream.
    pub stream: StreamId,
    /// The frame's epoch.
    pub epoch: Epoch,
    /// The frame's version.
    pub version: Version,
    /// When the version was handed out.
    pub commit_time: WallTime,
    /// The offset of its first record.
    pub base_offset: Offset,
    /// How many records.
    pub record_count: u32,
    /// Where the body lies in the file, in bytes.
    pub offset: u64,
    /// Bytes of the body.
    pub bytes: u32,
    /// crc32c of the body.
    pub checksum: u32,
}

/// The index of a sealed segment.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Footer {
    /// Whose log this is.
    pub node: NodeId,
    /// The segment's id.
    pub segment: SegmentId,
    /// Behind the last frame, without padding; [`SEGMENT_HEADER_BYTES`] when there are no frames.
    pub frames_end: u64,
    /// The sequence of the first frame.
    pub first_sequence: Sequence,
    /// The sequence of the last frame; one below `first_sequence` when there are no frames.
    pub last_sequence: Sequence,
    /// The hash of the last frame: what the next segment's first frame follows.
    pub last_hash: u32,
    /// The last frame's version.
    pub last_version: Version,
    /// The last frame's epoch.
    pub last_epoch: Epoch,
    /// The last frame's word on what is known committed, inclusive.
    pub last_known_committed: Version,
    /// The last frame's commit time.
    pub last_commit_time: WallTime,
    /// The epochs whose first frame lies in this segment, ascending.
    pub epoch_starts: Vec<EpochStart>,
    /// All blocks, in the order of the file.
    pub entries: Vec<FooterEntry>,
}

/// The last page of a sealed segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Trailer {
    /// Whose log this is.
    pub node: NodeId,
    /// The segment's id.
    pub segment: SegmentId,
    /// Where the footer lies in the file; whole pages.
    pub footer_offset: u64,
    /// Bytes of the footer, without padding.
    pub footer_bytes: u64,
    /// The footer's checksum.
    pub footer_checksum: u32,
}

/// Why a structure around the frames is unusable.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SegmentError {
    /// It isn't there, or is damaged.
    #[error("{0}")]
    Flaw(#[from] Flaw),
    /// A good one whose fields contradict each other.
    #[error("contradicts itself: {what}")]
    Contradiction {
        /// Which fields.
        what: &'static str,
    },
    /// A good one of another segment: a leftover of a recycled file, or a misdirected write.
    #[error("of segment {found}")]
    OtherSegment {
        /// Whose.
        found: SegmentId,
    },
    /// A good one of another node: a foreign file.
    #[error("of node {found}")]
    OtherNode {
        /// Whose.
        found: NodeId,
    },
    /// A good one that follows another frame than the log's last.
    #[error("follows frame {found} with hash {previous_hash:08x}, not the log's last")]
    Chain {
        /// The sequence before its first.
        found: Sequence,
        /// Its hash.
        previous_hash: u32,
    },
}

/// Room to keep for a footer: bytes, in whole pages.
#[must_use]
pub const fn footer_bytes(entry_count: usize, epoch_start_count: usize) -> u64 {
    padded(bare_footer_bytes(entry_count, epoch_start_count) as u64)
}

const fn bare_footer_bytes(entry_count: usize, epoch_start_count: usize) -> usize {
    FOOTER_HEAD_BYTES + epoch_start_count * EPOCH_START_BYTES + entry_count * FOOTER_ENTRY_BYTES
}

/// Where the trailer lies in a file of `segment_bytes`; frames and footer end there at the latest.
#[must_use]
pub fn trailer_offset(segment_bytes: u64) -> u64 {
    assert!(segment_bytes.is_multiple_of(PAGE_BYTES), "{segment_bytes} bytes are no whole pages");
    assert!(
        segment_bytes > SEGMENT_HEADER_BYTES + TRAILER_BYTES,
        "{segment_bytes} bytes hold no frame"
    );
    segment_bytes - TRAILER_BYTES
}

impl SegmentHeader {
    /// The page, complete.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let raw = RawSegmentHeader {
            magic: HEADER_MAGIC,
            checksum: U32::ZERO,
            format: FORMAT.into(),
            zero: U16::ZERO,
            previous_hash: self.previous_hash.into(),
            node: self.node.0.into(),
            segment: self.segment.0.into(),
            segment_bytes: self.segment_bytes.into(),
            first_sequence: self.first_sequence.0.into(),
            epoch: self.epoch.0.into(),
            previous_version: self.previous_version.0.into(),
            reserved: [0; 16],
        };
        sealed_pages(raw.as_bytes().to_vec())
    }

    /// Reads the page.
    ///
    /// # Errors
    /// [`SegmentError::Flaw`] or [`SegmentError::Contradiction`]; whether it is the expected one is not
    /// asked.
    pub fn decode(page: &[u8]) -> Result<Self, SegmentError> {
        check(page, HEADER_BYTES, HEADER_MAGIC, FORMAT)?;
        let raw: &RawSegmentHeader = read(page).expect("the check has seen a whole header");
        let header = Self {
            node: NodeId(raw.node.get()),
            segment: SegmentId(raw.segment.get()),
            segment_bytes: raw.segment_bytes.get(),
            first_sequence: Sequence(raw.first_sequence.get()),
            previous_hash: raw.previous_hash.get(),
            epoch: Epoch(raw.epoch.get()),
            previous_version: Version(raw.previous_version.get()),
        };
        if header.first_sequence == Sequence::ZERO {
            return Err(SegmentError::Contradiction { what: "the first sequence is 0" });
        }
        let bytes = header.segment_bytes;
        if !bytes.is_multiple_of(PAGE_BYTES) || bytes <= SEGMENT_HEADER_BYTES + TRAILER_BYTES {
            return Err(SegmentError::Contradiction { what: "the length of the file" });
        }
        Ok(header)
    }

    /// Whether this is the header of `segment` on `node`.
    ///
    /// # Errors
    /// [`SegmentError::OtherSegment`] or [`SegmentError::OtherNode`].
    pub fn belongs(&self, node: NodeId, segment: SegmentId) -> Result<(), SegmentError> {
        belongs((self.node, self.segment), node, segment)
    }
}

impl Footer {
    /// The footer in whole pages.
    ///
    /// Entries out of order or outside the frames stop the process: nobody could use them.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        assert_eq!(self.contradiction(), None, "footer of {}", self.segment);
        let bare = bare_footer_bytes(self.entries.len(), self.epoch_starts.len());
        let count = |len: usize| U32::from(u32::try_from(len).expect("below the segment's bytes"));
        let raw = RawFooter {
            magic: FOOTER_MAGIC,
            checksum: U32::ZERO,
            format: FORMAT.into(),
            zero: U16::ZERO,
            last_hash: self.last_hash.into(),
            node: self.node.0.into(),
            segment: self.segment.0.into(),
            footer_bytes: (bare as u64).into(),
            frames_end: self.frames_end.into(),
            first_sequence: self.first_sequence.0.into(),
            last_sequence: self.last_sequence.0.into(),
            last_version: self.last_version.0.into(),
            last_epoch: self.last_epoch.0.into(),
            last_known_committed: self.last_known_committed.0.into(),
            last_commit_time: self.last_commit_time.0.into(),
            epoch_start_count: count(self.epoch_starts.len()),
            entry_count: count(self.entries.len()),
            reserved: [0; 24],
        };
        let mut bytes = Vec::with_capacity(footer_bytes(self.entries.len(), 0) as usize);
        bytes.extend_from_slice(raw.as_bytes());
        for start in &self.epoch_starts {
            bytes.extend_from_slice(RawEpochStart::from(start).as_bytes());
        }
        for entry in &self.entries {
            bytes.extend_from_slice(RawFooterEntry::from(entry).as_bytes());
        }
        assert_eq!(bytes.len(), bare, "the footer of {} has the length it claims", self.segment);
        sealed_pages(bytes)
    }

    /// Reads a footer; `bytes` start with it and may be longer.
    ///
    /// # Errors
    /// [`SegmentError::Flaw`] or [`SegmentError::Contradiction`]; whether it is the expected one is not
    /// asked.
    pub fn decode(bytes: &[u8]) -> Result<Self, SegmentError> {
        let Some(raw) = read::<RawFooter>(bytes) else {
            return Err(Flaw::Short { have: bytes.len(), need: FOOTER_HEAD_BYTES }.into());
        };
        let (starts, entries) =
            (raw.epoch_start_count.get() as usize, raw.entry_count.get() as usize);
        let counted = bare_footer_bytes(entries, starts);
        // Not the magic word: what the counts say means nothing then.
        let bare = if raw.magic == FOOTER_MAGIC { counted } else { FOOTER_HEAD_BYTES };
        check(bytes, bare, FOOTER_MAGIC, FORMAT)?;
        let (start_bytes, entry_bytes) =
            bytes[FOOTER_HEAD_BYTES..bare].split_at(starts * EPOCH_START_BYTES);
        let footer = Self {
            node: NodeId(raw.node.get()),
            segment: SegmentId(raw.segment.get()),
            frames_end: raw.frames_end.get(),
            first_sequence: Sequence(raw.first_sequence.get()),
            last_sequence: Sequence(raw.last_sequence.get()),
            last_hash: raw.last_hash.get(),
            last_version: Version(raw.last_version.get()),
            last_epoch: Epoch(raw.last_epoch.get()),
            last_known_committed: Version(raw.last_known_committed.get()),
            last_commit_time: WallTime(raw.last_commit_time.get()),
            epoch_starts: start_bytes
                .chunks_exact(EPOCH_START_BYTES)
                .filter_map(read::<RawEpochStart>)
                .map(EpochStart::from)
                .collect(),
            entries: entry_bytes
                .chunks_exact(FOOTER_ENTRY_BYTES)
                .filter_map(read::<RawFooterEntry>)
                .map(FooterEntry::from)
                .collect(),
        };
        match footer.contradiction() {
            Some(what) => Err(SegmentError::Contradiction { what }),
            None if raw.footer_bytes.get() != bare as u64 => {
                Err(SegmentError::Contradiction { what: "length and counts" })
            }
            None => Ok(footer),
        }
    }

    /// The trailer of a segment whose footer is written at `footer_offset`; `encoded` is [`Footer::encode`].
    #[must_use]
    pub fn trailer(&self, footer_offset: u64, encoded: &[u8]) -> Trailer {
        assert!(footer_offset.is_multiple_of(PAGE_BYTES), "a footer at {footer_offset}");
        assert!(footer_offset >= self.frames_end, "{footer_offset} in {} bytes", self.frames_end);
        let raw: &RawFooter = read(encoded).expect("an encoded footer");
        Trailer {
            node: self.node,
            segment: self.segment,
            footer_offset,
            footer_bytes: raw.footer_bytes.get(),
            footer_checksum: raw.checksum.get(),
        }
    }

    /// Whether this is the footer of `segment` on `node`.
    ///
    /// # Errors
    /// [`SegmentError::OtherSegment`] or [`SegmentError::OtherNode`].
    pub fn belongs(&self, node: NodeId, segment: SegmentId) -> Result<(), SegmentError> {
        belongs((self.node, self.segment), node, segment)
    }

    fn contradiction(&self) -> Option<&'static str> {
        let outside = |entry: &FooterEntry| {
            let end = entry.offset.checked_add(u64::from(entry.bytes));
            entry.offset < SEGMENT_HEADER_BYTES || end.is_none_or(|end| end > self.frames_end)
        };
        if self.frames_end < SEGMENT_HEADER_BYTES {
            Some("the end of the frames")
        } else if self.first_sequence.0 > self.last_sequence.0.saturating_add(1) {
            Some("first and last sequence")
        } else if self.entries.iter().any(outside) {
            Some("an entry outside the frames")
        } else if self.entries.windows(2).any(|pair| pair[0].offset > pair[1].offset) {
            Some("entries out of order")
        } else if self.epoch_starts.windows(2).any(|pair| pair[0].epoch >= pair[1].epoch) {
            Some("epochs out of order")
        } else {
            None
        }
    }
}

impl Trailer {
    /// The page, complete.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let raw = RawTrailer {
            magic: TRAILER_MAGIC,
            checksum: U32::ZERO,
            format: FORMAT.into(),
            zero: U16::ZERO,
            footer_checksum: self.footer_checksum.into(),
            node: self.node.0.into(),
            segment: self.segment.0.into(),
            footer_offset: self.footer_offset.into(),
            footer_bytes: self.footer_bytes.into(),
        };
        sealed_pages(raw.as_bytes().to_vec())
    }

    /// Reads the last page of a segment of `segment_bytes`.
    ///
    /// # Errors
    /// [`SegmentError::Flaw`] (a segment that isn't sealed) or [`SegmentError::Contradiction`]; whether it is
    /// the expected one is not asked.
    pub fn decode(page: &[u8], segment_bytes: u64) -> Result<Self, SegmentError> {
        check(page, TRAILER_FIELD_BYTES, TRAILER_MAGIC, FORMAT)?;
        let raw: &RawTrailer = read(page).expect("the check has seen a whole trailer");
        let trailer = Self {
            node: NodeId(raw.node.get()),
            segment: SegmentId(raw.segment.get()),
            footer_offset: raw.footer_offset.get(),
            footer_bytes: raw.footer_bytes.get(),
            footer_checksum: raw.footer_checksum.get(),
        };
        let end = trailer.footer_offset.checked_add(trailer.footer_bytes);
        let inside = trailer.footer_offset >= SEGMENT_HEADER_BYTES
            && trailer.footer_offset.is_multiple_of(PAGE_BYTES)
            && trailer.footer_bytes >= FOOTER_HEAD_BYTES as u64
            && end.is_some_and(|end| end <= trailer_offset(segment_bytes));
        if inside {
            Ok(trailer)
        } else {
            Err(SegmentError::Contradiction { what: "the footer lies outside" })
        }
    }

    /// Whether this is the trailer of `segment` on `node`.
    ///
    /// # Errors
    /// [`SegmentError::OtherSegment`] or [`SegmentError::OtherNode`].
    pub fn belongs(&self, node: NodeId, segment: SegmentId) -> Result<(), SegmentError> {
        belongs((self.node, self.segment), node, segment)
    }
}

fn belongs(
    found: (NodeId, SegmentId),
    node: NodeId,
    segment: SegmentId,
) -> Result<(), SegmentError> {
    if found.0 != node {
        Err(SegmentError::OtherNode { found: found.0 })
    } else if found.1 != segment {
        Err(SegmentError::OtherSegment { found: found.1 })
    } else {
        Ok(())
    }
}

fn sealed_pages(mut bytes: Vec<u8>) -> Bytes {
    seal(&mut bytes);
    bytes.resize(padded(bytes.len() as u64) as usize, 0);
    bytes.into()
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawSegmentHeader {
    magic: [u8; 4],
    checksum: U32,
    format: U16,
    zero: U16,
    previous_hash: U32,
    node: U64,
    segment: U64,
    segment_bytes: U64,
    first_sequence: U64,
    epoch: U64,
    previous_version: U64,
    reserved: [u8; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawFooter {
    magic: [u8; 4],
    checksum: U32,
    format: U16,
    zero: U16,
    last_hash: U32,
    node: U64,
    segment: U64,
    footer_bytes: U64,
    frames_end: U64,
    first_sequence: U64,
    last_sequence: U64,
    last_version: U64,
    last_epoch: U64,
    last_known_committed: U64,
    last_commit_time: U64,
    epoch_start_count: U32,
    entry_count: U32,
    reserved: [u8; 24],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawTrailer {
    magic: [u8; 4],
    checksum: U32,
    format: U16,
    zero: U16,
    footer_checksum: U32,
    node: U64,
    segment: U64,
    footer_offset: U64,
    footer_bytes: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawEpochStart {
    epoch: U64,
    previous_version: U64,
}

impl From<&EpochStart> for RawEpochStart {
    fn from(start: &EpochStart) -> Self {
        Self { epoch: start.epoch.0.into(), previous_version: start.previous_version.0.into() }
    }
}

impl From<&RawEpochStart> for EpochStart {
    fn from(raw: &RawEpochStart) -> Self {
        Self {
            epoch: Epoch(raw.epoch.get()),
            previous_version: Version(raw.previous_version.get()),
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawFooterEntry {
    stream: U64,
    epoch: U64,
    version: U64,
    commit_time: U64,
    base_offset: U64,
    offset: U64,
    record_count: U32,
    bytes: U32,
    checksum: U32,
    zero: U32,
}

impl From<&FooterEntry> for RawFooterEntry {
    fn from(entry: &FooterEntry) -> Self {
        Self {
            stream: entry.stream.0.into(),
            epoch: entry.epoch.0.into(),
            version: entry.version.0.into(),
            commit_time: entry.commit_time.0.into(),
            base_offset: entry.base_offset.0.into(),
            offset: entry.offset.into(),
            record_count: entry.record_count.into(),
            bytes: entry.bytes.into(),
            checksum: entry.checksum.into(),
            zero: U32::ZERO,
        }
    }
}

impl From<&RawFooterEntry> for FooterEntry {
    fn from(raw: &RawFooterEntry) -> Self {
        Self {
            stream: StreamId(raw.stream.get()),
            epoch: Epoch(raw.epoch.get()),
            version: Version(raw.version.get()),
            commit_time: WallTime(raw.commit_time.get()),
            base_offset: Offset(raw.base_offset.get()),
            record_count: raw.record_count.get(),
            offset: raw.offset.get(),
            bytes: raw.bytes.get(),
            checksum: raw.checksum.get(),
        }
    }
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
