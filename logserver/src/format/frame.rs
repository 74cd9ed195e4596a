//! A frame: the bytes of one version.
//!
//! ```text
//! frame = header (128) | block table (block count * 40) | bodies, one after the other
//! flush group = frame frame ... zeros up to whole pages; its first frame starts on a page
//!
//! header                                          block table entry
//! off size field                                  off size field
//!   0   4  magic            "MRFR"                  0   8  stream          ascending, each once
//!   4   4  header checksum  over 8..128             8   8  base offset     of the first record
//!   8   2  format version   FORMAT                 16   8  sequence        of the frame
//!  10   2  zero                                    24   4  record count
//!  12   4  body checksum    over the block table   28   4  bytes           of the body
//!  16   8  segment          recycling guard        32   4  body checksum   as the proxy computed it
//!  24   8  sequence         dense over the log     36   4  entry checksum  over 0..36
//!  32   4  previous hash    header checksum of
//!                           the frame before
//!  36   4  block count
//!  40   8  frame bytes      header, table and bodies; no padding
//!  48   8  durable sequence flushed when this frame's flush was issued
//!  56   8  epoch
//!  64   8  previous version
//!  72   8  version
//!  80   8  commit time      microseconds since 1970
//!  88   8  known committed  version, inclusive
//!  96  32  zero             readers ignore it; a new meaning takes a new format version
//! ```
//!
//! The header checksum covers the body checksum, that covers the table, the table covers each body: so the
//! header checksum stands for the whole frame and is its *hash* in the chain. An entry names its frame and
//! has a checksum of its own, so that a frame with a rotten header can still say which streams it held.

use bytes::Bytes;
use common::{Epoch, Offset, SegmentId, Sequence, StreamId, Version, WallTime};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::flaw::{Flaw, check, read, seal};

/// The format version that this build writes, and the only one that it reads.
pub const FORMAT: u16 = 1;
/// Bytes of a frame header.
pub const FRAME_HEADER_BYTES: usize = size_of::<RawHeader>();
/// Bytes of an entry of the block table.
pub const BLOCK_ENTRY_BYTES: usize = size_of::<RawEntry>();

const MAGIC: [u8; 4] = *b"MRFR";
const ENTRY_CHECKED_BYTES: usize = 36;

const _: () = assert!(FRAME_HEADER_BYTES == 128, "as drawn above");
const _: () = assert!(BLOCK_ENTRY_BYTES == 40, "as drawn above");

/// What a frame says of itself.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FrameHeader {
    /// The segment that it was written for; another one's is a leftover of a recycled file.
    pub segment: SegmentId,
    /// Its place in the node's log.
    pub sequence: Sequence,
    /// [`header_hash`] of the frame before; 0 for the first frame of a log.
    pub previous_hash: u32,
    /// The highest sequence whose flush had completed when this frame's flush was issued: below `sequence`.
    pub durable_sequence: Sequence,
    /// The epoch that it was pushed in.
    pub epoch: Epoch,
    /// The version directly before in the chain (I1).
    pub previous_version: Version,
    /// Its version.
    pub version: Version,
    /// When the version was handed out.
    pub commit_time: WallTime,
    /// Known durable on all log servers of the epoch, inclusive; by the push's account.
    pub known_committed: Version,
    /// Entries of its block table.
    pub block_count: u32,
    /// Header, table and bodies, without padding: [`frame_bytes`].
    pub frame_bytes: u64,
}

/// A block's place in a frame: an entry of the block table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockEntry {
    /// The stream.
    pub stream: StreamId,
    /// The offset of its first record.
    pub base_offset: Offset,
    /// How many records.
    pub record_count: u32,
    /// Bytes of its body.
    pub bytes: u32,
    /// crc32c of its body.
    pub checksum: u32,
}

/// Why bytes are no good frame.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// The header isn't there, or is damaged.
    #[error("header: {0}")]
    Flaw(#[from] Flaw),
    /// A sector can't be read.
    #[error("a sector is unreadable")]
    Unreadable,
    /// The frame ends behind the place where frames must end.
    #[error("{frame_bytes} bytes do not fit")]
    TooLong {
        /// By its header.
        frame_bytes: u64,
    },
    /// A good header whose fields contradict each other.
    #[error("the header contradicts itself: {what}")]
    Header {
        /// Which fields.
        what: &'static str,
    },
    /// The table doesn't fit the header's checksum.
    #[error("table checksum {stored:08x}, computed {computed:08x}")]
    TableChecksum {
        /// As written.
        stored: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// A good table with an entry that is wrong.
    #[error("table entry {index}: {what}")]
    Entry {
        /// Its place in the table.
        index: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// A body is cut off.
    #[error("body of {stream}: {have} of {need} bytes")]
    ShortBody {
        /// Whose body.
        stream: StreamId,
        /// Bytes there are.
        have: usize,
        /// Bytes there should be.
        need: usize,
    },
    /// A body doesn't fit its checksum.
    #[error("body of {stream}: checksum {stored:08x}, computed {computed:08x}")]
    Body {
        /// Whose body.
        stream: StreamId,
        /// As written.
        stored: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// A good frame of another segment: a leftover, or a misdirected write.
    #[error("a frame of segment {found}")]
    OtherSegment {
        /// Whose.
        found: SegmentId,
    },
    /// A good frame that isn't the next one.
    #[error("frame {found} after {previous_hash:08x} is not the next of the chain")]
    Chain {
        /// Its sequence.
        found: Sequence,
        /// The hash that it follows.
        previous_hash: u32,
    },
}

/// Bytes of header and table.
#[must_use]
pub const fn head_bytes(block_count: usize) -> usize {
    FRAME_HEADER_BYTES + block_count * BLOCK_ENTRY_BYTES
}

/// Bytes of a frame with these blocks: what [`FrameHeader::frame_bytes`] has to be.
#[must_use]
pub fn frame_bytes(entries: &[BlockEntry]) -> u64 {
    let bodies: u64 = entries.iter().map(|entry| u64::from(entry.bytes)).sum();
    head_bytes(entries.len()) as u64 + bodies
}

/// The frame's place in the chain: the header checksum of encoded bytes that start with a header.
#[must_use]
pub fn header_hash(head: &[u8]) -> u32 {
    let raw: &RawHeader = read(head).expect("a whole frame header");
    raw.header_checksum.get()
}

/// Header and table; the bodies follow as they are, in the entries' order.
///
/// A header that contradicts itself or its table stops the process: nobody could read the frame.
#[must_use]
pub fn encode_head(header: &FrameHeader, entries: &[BlockEntry]) -> Bytes {
    assert_eq!(header.block_count as usize, entries.len(), "{} counts its blocks", header.sequence);
    assert_eq!(header.frame_bytes, frame_bytes(entries), "{} knows its length", header.sequence);
    assert_eq!(header.contradiction(), None, "{header:?}");
    if let Some((index, what)) = misplaced(entries) {
        panic!("entry {index} of {}: {what}", header.sequence);
    }

    let mut head = Vec::with_capacity(head_bytes(entries.len()));
    head.resize(FRAME_HEADER_BYTES, 0);
    for entry in entries {
        head.extend_from_slice(RawEntry::new(entry, header.sequence).as_bytes());
    }
    let body_checksum = crc32c::crc32c(&head[FRAME_HEADER_BYTES..]);
    head[..FRAME_HEADER_BYTES].copy_from_slice(RawHeader::new(header, body_checksum).as_bytes());
    seal(&mut head[..FRAME_HEADER_BYTES]);
    assert_eq!(head.len(), head_bytes(entries.len()), "a head has the length it claims");
    head.into()
}

/// Reads a header alone. `head` starts with it and may be longer.
///
/// # Errors
/// [`FrameError`] when the bytes are too few, damaged, foreign, or contradict themselves.
pub fn parse_header(head: &[u8]) -> Result<FrameHeader, FrameError> {
    RawHeader::checked(head).map(|(_, header)| header)
}

/// Reads header and table. `head` starts with them and may be longer; the bodies are not looked at.
///
/// # Errors
/// [`FrameError`]; [`Flaw::Short`] says how many bytes are needed.
pub fn parse_head(head: &[u8]) -> Result<(FrameHeader, Vec<BlockEntry>), FrameError> {
    let (raw, header) = RawHeader::checked(head)?;
    let need = head_bytes(header.block_count as usize);
    let Some(table) = head.get(FRAME_HEADER_BYTES..need) else {
        return Err(Flaw::Short { have: head.len(), need }.into());
    };
    let (stored, computed) = (raw.body_checksum.get(), crc32c::crc32c(table));
    if stored != computed {
        return Err(FrameError::TableChecksum { stored, computed });
    }
    let mut entries = Vec::with_capacity(header.block_count as usize);
    for (index, bytes) in table.chunks_exact(BLOCK_ENTRY_BYTES).enumerate() {
        match parse_entry(bytes, header.sequence) {
            Some(entry) => entries.push(entry),
            None => return Err(FrameError::Entry { index, what: "of another frame" }),
        }
    }
    if let Some((index, what)) = misplaced(&entries) {
        return Err(FrameError::Entry { index, what });
    }
    if header.frame_bytes != frame_bytes(&entries) {
        return Err(FrameError::Header { what: "frame bytes and table" });
    }
    Ok((header, entries))
}

/// Reads one entry of the table of frame `sequence`, header or not; `None` unless it is good.
#[must_use]
pub fn parse_entry(entry: &[u8], sequence: Sequence) -> Option<BlockEntry> {
    let raw: &RawEntry = read(entry)?;
    let good = crc32c::crc32c(entry.get(..ENTRY_CHECKED_BYTES)?) == raw.entry_checksum.get();
    (good && raw.sequence.get() == sequence.0).then(|| BlockEntry {
        stream: StreamId(raw.stream.get()),
        base_offset: Offset(raw.base_offset.get()),
        record_count: raw.record_count.get(),
        bytes: raw.bytes.get(),
        checksum: raw.body_checksum.get(),
    })
}

/// Checks one body against its entry.
///
/// # Errors
/// [`FrameError::ShortBody`] or [`FrameError::Body`].
pub fn verify_body(entry: &BlockEntry, body: &[u8]) -> Result<(), FrameError> {
    if body.len() != entry.bytes as usize {
        return Err(short(entry, body.len()));
    }
    let computed = crc32c::crc32c(body);
    if computed == entry.checksum {
        return Ok(());
    }
    Err(FrameError::Body { stream: entry.stream, stored: entry.checksum, computed })
}

/// Checks all bodies of a frame; `bodies` are its bytes behind the table.
///
/// # Errors
/// [`FrameError::ShortBody`] or [`FrameError::Body`] for the first one that is wrong.
pub fn verify_bodies(entries: &[BlockEntry], bodies: &[u8]) -> Result<(), FrameError> {
    let mut rest = bodies;
    for entry in entries {
        let Some((body, behind)) = rest.split_at_checked(entry.bytes as usize) else {
            return Err(short(entry, rest.len()));
        };
        verify_body(entry, body)?;
        rest = behind;
    }
    Ok(())
}

/// Whether bad bytes were once the header of frame `sequence` in `segment`: two of three marks are left.
pub(super) fn resembles(head: &[u8], segment: SegmentId, sequence: Sequence) -> bool {
    let Some(raw) = read::<RawHeader>(head) else { return false };
    let marks =
        [raw.magic == MAGIC, raw.segment.get() == segment.0, raw.sequence.get() == sequence.0];
    marks.iter().filter(|left| **left).count() >= 2
}

const fn short(entry: &BlockEntry, have: usize) -> FrameError {
    FrameError::ShortBody { stream: entry.stream, have, need: entry.bytes as usize }
}

fn misplaced(entries: &[BlockEntry]) -> Option<(usize, &'static str)> {
    let descends = |pair: &[BlockEntry]| pair[0].stream >= pair[1].stream;
    if let Some(index) = entries.windows(2).position(descends) {
        return Some((index + 1, "streams do not ascend"));
    }
    let overflows =
        |e: &BlockEntry| e.base_offset.0.checked_add(u64::from(e.record_count)).is_none();
    entries.iter().position(overflows).map(|index| (index, "offsets overflow"))
}

impl FrameHeader {
    /// What no header may say, whatever its table.
    fn contradiction(&self) -> Option<&'static str> {
        if self.sequence == Sequence::MAX {
            Some("no sequence can follow")
        } else if self.durable_sequence >= self.sequence {
            Some("durable sequence and sequence")
        } else if self.previous_version >= self.version {
            Some("previous version and version")
        } else if self.frame_bytes < head_bytes(self.block_count as usize) as u64 {
            Some("block count and frame bytes")
        } else {
            None
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    header_checksum: U32,
    format: U16,
    zero: U16,
    body_checksum: U32,
    segment: U64,
    sequence: U64,
    previous_hash: U32,
    block_count: U32,
    frame_bytes: U64,
    durable_sequence: U64,
    epoch: U64,
    previous_version: U64,
    version: U64,
    commit_time: U64,
    known_committed: U64,
    reserved: [u8; 32],
}

impl RawHeader {
    fn new(header: &FrameHeader, body_checksum: u32) -> Self {
        Self {
            magic: MAGIC,
            header_checksum: U32::ZERO,
            format: FORMAT.into(),
            zero: U16::ZERO,
            body_checksum: body_checksum.into(),
            segment: header.segment.0.into(),
            sequence: header.sequence.0.into(),
            previous_hash: header.previous_hash.into(),
            block_count: header.block_count.into(),
            frame_bytes: header.frame_bytes.into(),
            durable_sequence: header.durable_sequence.0.into(),
            epoch: header.epoch.0.into(),
            previous_version: header.previous_version.0.into(),
            version: header.version.0.into(),
            commit_time: header.commit_time.0.into(),
            known_committed: header.known_committed.0.into(),
            reserved: [0; 32],
        }
    }

    fn checked(head: &[u8]) -> Result<(&Self, FrameHeader), FrameError> {
        check(head, FRAME_HEADER_BYTES, MAGIC, FORMAT)?;
        let raw: &Self = read(head).expect("the check has seen a whole header");
        let header = FrameHeader {
            segment: SegmentId(raw.segment.get()),
            sequence: Sequence(raw.sequence.get()),
            previous_hash: raw.previous_hash.get(),
            durable_sequence: Sequence(raw.durable_sequence.get()),
            epoch: Epoch(raw.epoch.get()),
            previous_version: Version(raw.previous_version.get()),
            version: Version(raw.version.get()),
            commit_time: WallTime(raw.commit_time.get()),
            known_committed: Version(raw.known_committed.get()),
            block_count: raw.block_count.get(),
            frame_bytes: raw.frame_bytes.get(),
        };
        match header.contradiction() {
            Some(what) => Err(FrameError::Header { what }),
            None => Ok((raw, header)),
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntry {
    stream: U64,
    base_offset: U64,
    sequence: U64,
    record_count: U32,
    bytes: U32,
    body_checksum: U32,
    entry_checksum: U32,
}

impl RawEntry {
    fn new(entry: &BlockEntry, sequence: Sequence) -> Self {
        let mut raw = Self {
            stream: entry.stream.0.into(),
            base_offset: entry.base_offset.0.into(),
            sequence: sequence.0.into(),
            record_count: entry.record_count.into(),
            bytes: entry.bytes.into(),
            body_checksum: entry.checksum.into(),
            entry_checksum: U32::ZERO,
        };
        raw.entry_checksum = crc32c::crc32c(&raw.as_bytes()[..ENTRY_CHECKED_BYTES]).into();
        raw
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(stream: u64, body: &[u8]) -> BlockEntry {
        BlockEntry {
            stream: StreamId(stream),
            base_offset: Offset(0x0a0b),
            record_count: 2,
            bytes: body.len() as u32,
            checksum: crc32c::crc32c(body),
        }
    }

    fn header(entries: &[BlockEntry]) -> FrameHeader {
        FrameHeader {
            segment: SegmentId(0x0102),
            sequence: Sequence(0x0304),
            previous_hash: 0x0506_0708,
            durable_sequence: Sequence(0x0303),
            epoch: Epoch(9),
            previous_version: Version(0x1112),
            version: Version(0x1314),
            commit_time: WallTime(0x1516),
            known_committed: Version(0x1011),
            block_count: entries.len() as u32,
            frame_bytes: frame_bytes(entries),
        }
    }

    #[test]
    fn the_bytes_of_a_head_are_frozen() {
        let entries = [entry(20, b"123456789")];
        let head = encode_head(&header(&entries), &entries);
        let golden: &[&[u8]] = &[
            b"MRFR\0\0\0\0",
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
            &[8, 7, 6, 5, 1, 0, 0, 0, 177, 0, 0, 0, 0, 0, 0, 0],
            &[3, 3, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0],
            &[0x12, 0x11, 0, 0, 0, 0, 0, 0, 0x14, 0x13, 0, 0, 0, 0, 0, 0],
            &[0x16, 0x15, 0, 0, 0, 0, 0, 0, 0x11, 0x10, 0, 0, 0, 0, 0, 0],
            &[0; 32],
            &[20, 0, 0, 0, 0, 0, 0, 0, 0x0b, 0x0a, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
            &[2, 0, 0, 0, 9, 0, 0, 0],
            // The check value of crc32c.
            &0xe306_9283_u32.to_le_bytes(),
            &[0; 4],
        ];
        let mut golden = golden.concat();
        golden[4..8].copy_from_slice(&GOLDEN_CHECKSUMS[0].to_le_bytes());
        golden[12..16].copy_from_slice(&GOLDEN_CHECKSUMS[1].to_le_bytes());
        golden[164..].copy_from_slice(&GOLDEN_CHECKSUMS[2].to_le_bytes());
        assert_eq!(head, golden);
        assert_eq!(header_hash(&head), crc32c::crc32c(&head[8..128]));
    }

    /// Header, table, entry.
    const GOLDEN_CHECKSUMS: [u32; 3] = [0x669d_418e, 0x4867_4bc7, 0xc714_14c4];

    #[test]
    fn every_flipped_bit_of_a_frame_is_noticed() {
        let bodies = [&b"one"[..], b"", b"three"];
        let entries: Vec<_> =
            bodies.iter().zip(20..).map(|(body, stream)| entry(stream, body)).collect();
        let head = encode_head(&header(&entries), &entries);
        let frame = [&head[..], &bodies.concat()].concat();
        let judge = |frame: &[u8]| -> Result<(), FrameError> {
            let (header, found) = parse_head(frame)?;
            assert_eq!(header.frame_bytes as usize, frame.len());
            verify_bodies(&found, &frame[head_bytes(found.len())..])
        };
        assert_eq!(judge(&frame), Ok(()));
        for bit in 0..frame.len() * 8 {
            let mut bad = frame.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = judge(&bad).expect_err("a flipped bit");
            let expected = match bit / 8 {
                0..128 => matches!(error, FrameError::Flaw(_)),
                128..248 => matches!(error, FrameError::TableChecksum { .. }),
                _ => matches!(error, FrameError::Body { .. }),
            };
            assert!(expected, "bit {bit}: {error}");
        }
        for cut in 0..head.len() {
            let need = if cut < 128 { 128 } else { 248 };
            let short = Flaw::Short { have: cut, need };
            assert_eq!(parse_head(&frame[..cut]), Err(short.into()));
        }
    }

    #[test]
    fn an_entry_is_read_without_its_header_and_for_its_frame_only() {
        let entries = [entry(20, b"a"), entry(21, b"b")];
        let head = encode_head(&header(&entries), &entries);
        for (index, entry) in entries.iter().enumerate() {
            let bytes = &head[head_bytes(index)..head_bytes(index + 1)];
            assert_eq!(parse_entry(bytes, Sequence(0x0304)), Some(*entry));
            assert_eq!(parse_entry(bytes, Sequence(0x0305)), None);
            assert_eq!(parse_entry(&bytes[1..], Sequence(0x0304)), None);
        }
    }

    #[test]
    fn an_unknown_format_is_told_from_damage() {
        let mut head = encode_head(&header(&[]), &[]).to_vec();
        head[8] = 2;
        seal(&mut head);
        assert_eq!(parse_header(&head), Err(Flaw::Format { found: 2 }.into()));
        assert_eq!(parse_header(&[0; 128]), Err(Flaw::Blank.into()));
    }

    #[test]
    #[should_panic(expected = "streams do not ascend")]
    fn a_table_out_of_order_stops_the_process() {
        let entries = [entry(21, b"a"), entry(20, b"b")];
        let _ = encode_head(&header(&entries), &entries);
    }

    proptest! {
        #[test]
        fn heads_round_trip(
            numbers in prop::array::uniform8(1..u64::MAX),
            previous_hash in any::<u32>(),
            blocks in prop::collection::btree_map(
                any::<u64>(),
                (any::<u32>(), any::<u32>(), any::<u32>(), 0..u64::MAX >> 1),
                0..5,
            ),
        ) {
            let entries: Vec<_> = blocks
                .iter()
                .map(|(stream, (record_count, bytes, checksum, base))| BlockEntry {
                    stream: StreamId(*stream),
                    base_offset: Offset(*base),
                    record_count: *record_count,
                    bytes: *bytes,
                    checksum: *checksum,
                })
                .collect();
            let [segment, sequence, durable, epoch, version, previous, time, committed] = numbers;
            let written = FrameHeader {
                segment: SegmentId(segment),
                sequence: Sequence(sequence),
                previous_hash,
                durable_sequence: Sequence(durable % sequence),
                epoch: Epoch(epoch),
                previous_version: Version(previous % version),
                version: Version(version),
                commit_time: WallTime(time),
                known_committed: Version(committed),
                ..header(&entries)
            };
            let head = encode_head(&written, &entries);
            prop_assert_eq!(parse_header(&head), Ok(written.clone()));
            prop_assert_eq!(parse_head(&head), Ok((written, entries)));
        }

        #[test]
        fn hostile_bytes_never_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..400),
            seals in any::<bool>(),
        ) {
            if seals && bytes.len() >= 128 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[8..12].copy_from_slice(&[1, 0, 0, 0]);
                seal(&mut bytes[..128]);
            }
            let _ = parse_head(&bytes);
            let _ = parse_entry(&bytes, Sequence(1));
            let _ = resembles(&bytes, SegmentId(1), Sequence(1));
        }
    }
}
