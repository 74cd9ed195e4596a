//! Builds segments byte by byte, for the tests of this folder.

use bytes::{Bytes, BytesMut};
use common::disk::padded;
use common::record::{Record, Section, sections};
use common::{Epoch, NodeId, Offset, SegmentId, Sequence, StreamId, Version, WallTime};

use super::frame::{self, BlockEntry, FrameHeader};
use super::segment::{EpochStart, Footer, FooterEntry, SegmentHeader, trailer_offset};

pub(crate) const NODE: NodeId = NodeId(7);

/// One block to be: a stream and a body.
pub(crate) type Block = (u64, Vec<u8>);

/// A frame that was built, and where.
#[derive(Clone, Debug)]
pub(crate) struct Built {
    pub(crate) offset: u64,
    pub(crate) hash: u32,
    pub(crate) header: FrameHeader,
    pub(crate) entries: Vec<BlockEntry>,
    pub(crate) group: usize,
}

impl Built {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.header.frame_bytes
    }
}

/// A segment in the making.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) header: SegmentHeader,
    pub(crate) bytes: Vec<u8>,
    pub(crate) built: Vec<Built>,
    /// Where the next group goes.
    pub(crate) end: u64,
    pub(crate) epoch: Epoch,
    recovery_version: Option<Version>,
    durable: Sequence,
    offsets: std::collections::BTreeMap<u64, u64>,
}

impl Image {
    pub(crate) fn new(segment: u64, segment_bytes: u64) -> Self {
        let header = SegmentHeader {
            node: NODE,
            segment: SegmentId(segment),
            segment_bytes,
            first_sequence: Sequence(1),
            previous_hash: 0,
            epoch: Epoch(1),
            previous_version: Version(100),
        };
        Self::with_header(header)
    }

    pub(crate) fn with_header(header: SegmentHeader) -> Self {
        let mut bytes = vec![0; header.segment_bytes as usize];
        let page = header.encode();
        bytes[..page.len()].copy_from_slice(&page);
        Self {
            header,
            bytes,
            built: vec![],
            end: page.len() as u64,
            epoch: header.epoch,
            recovery_version: None,
            durable: header.first_sequence.minus_saturating(1),
            offsets: Default::default(),
        }
    }

    /// The segment that goes on where this one stops.
    pub(crate) fn next(&self, segment: u64) -> Self {
        let header = SegmentHeader {
            segment: SegmentId(segment),
            first_sequence: self.next_sequence(),
            previous_hash: self.last_hash(),
            epoch: self.epoch,
            previous_version: self.last_version(),
            ..self.header
        };
        Self { offsets: self.offsets.clone(), ..Self::with_header(header) }
    }

    pub(crate) fn next_sequence(&self) -> Sequence {
        self.built.last().map_or(self.header.first_sequence, |last| last.header.sequence.plus(1))
    }

    pub(crate) fn last_hash(&self) -> u32 {
        self.built.last().map_or(self.header.previous_hash, |last| last.hash)
    }

    pub(crate) fn last_version(&self) -> Version {
        self.built.last().map_or(self.header.previous_version, |last| last.header.version)
    }

    /// A flush group that is issued after all before it have been flushed.
    pub(crate) fn group(&mut self, frames: &[Vec<Block>]) {
        self.durable = self.next_sequence().minus_saturating(1);
        self.group_in_flight(frames);
    }

    /// A flush group that is issued while the one before is still in flight.
    pub(crate) fn group_in_flight(&mut self, frames: &[Vec<Block>]) {
        let group = self.built.last().map_or(0, |last| last.group + 1);
        let mut at = self.end as usize;
        for blocks in frames {
            let entries: Vec<_> = blocks.iter().map(|block| self.entry(block)).collect();
            let version = self.last_version().plus(10);
            let header = FrameHeader {
                segment: self.header.segment,
                sequence: self.next_sequence(),
                previous_hash: self.last_hash(),
                durable_sequence: self.durable,
                epoch: self.epoch,
                previous_version: self.recovery_version.take().unwrap_or(self.last_version()),
                version,
                commit_time: WallTime(version.0 * 1000),
                known_committed: self.last_version().minus_saturating(10),
                block_count: entries.len() as u32,
                frame_bytes: frame::frame_bytes(&entries),
            };
            let head = frame::encode_head(&header, &entries);
            let offset = at as u64;
            for piece in core::iter::once(&head[..]).chain(blocks.iter().map(|(_, body)| &body[..]))
            {
                self.bytes[at..at + piece.len()].copy_from_slice(piece);
                at += piece.len();
            }
            let hash = frame::header_hash(&head);
            self.built.push(Built { offset, hash, header, entries, group });
        }
        let end = padded(at as u64);
        self.bytes[at..end as usize].fill(0);
        assert!(end <= trailer_offset(self.header.segment_bytes), "the sample fits");
        self.end = end;
    }

    fn entry(&mut self, (stream, body): &Block) -> BlockEntry {
        let next = self.offsets.entry(*stream).or_default();
        let entry = BlockEntry {
            stream: StreamId(*stream),
            base_offset: Offset(*next),
            record_count: record_count(body),
            bytes: body.len() as u32,
            checksum: crc32c::crc32c(body),
        };
        *next += u64::from(entry.record_count);
        entry
    }

    /// The next frame follows `recovery_version`, and these streams go on at these offsets.
    pub(crate) fn begin_epoch(
        &mut self,
        epoch: u64,
        recovery_version: Version,
        offsets: &[(u64, u64)],
    ) {
        self.epoch = Epoch(epoch);
        self.recovery_version = Some(recovery_version);
        self.offsets.extend(offsets.iter().copied());
    }

    pub(crate) fn set_offset(&mut self, stream: u64, next: u64) {
        self.offsets.insert(stream, next);
    }

    pub(crate) fn footer(&self) -> Footer {
        let last = self.built.last();
        let mut epoch_starts = vec![];
        let mut epoch = self.header.epoch;
        for built in &self.built {
            if built.header.epoch > epoch {
                epoch = built.header.epoch;
                let previous_version = built.header.previous_version;
                epoch_starts.push(EpochStart { epoch, previous_version });
            }
        }
        Footer {
            node: NODE,
            segment: self.header.segment,
            frames_end: last.map_or(self.end, Built::end),
            first_sequence: self.header.first_sequence,
            last_sequence: self.next_sequence().minus_saturating(1),
            last_hash: self.last_hash(),
            last_version: self.last_version(),
            last_epoch: epoch,
            last_known_committed: last.map_or(Version(0), |last| last.header.known_committed),
            last_commit_time: last.map_or(WallTime(0), |last| last.header.commit_time),
            epoch_starts,
            entries: self.built.iter().flat_map(footer_entries).collect(),
        }
    }

    pub(crate) fn seal(&mut self) {
        let footer = self.footer();
        let encoded = footer.encode();
        let at = self.end as usize;
        self.bytes[at..at + encoded.len()].copy_from_slice(&encoded);
        let trailer = footer.trailer(self.end, &encoded).encode();
        let at = trailer_offset(self.header.segment_bytes) as usize;
        self.bytes[at..].copy_from_slice(&trailer);
    }
}

fn footer_entries(built: &Built) -> Vec<FooterEntry> {
    let mut offset = built.offset + frame::head_bytes(built.entries.len()) as u64;
    let mut entries = vec![];
    for entry in &built.entries {
        entries.push(FooterEntry {
            stream: entry.stream,
            epoch: built.header.epoch,
            version: built.header.version,
            commit_time: built.header.commit_time,
            base_offset: entry.base_offset,
            record_count: entry.record_count,
            offset,
            bytes: entry.bytes,
            checksum: entry.checksum,
        });
        offset += u64::from(entry.bytes);
    }
    entries
}

/// A body that is one transaction's section of `values.len()` appended records.
pub(crate) fn section(index: u16, values: &[&'static str]) -> Vec<u8> {
    section_of(index, &values.iter().map(|value| Record::append(*value)).collect::<Vec<_>>())
}

/// A section of these records.
pub(crate) fn section_of(index: u16, records: &[Record]) -> Vec<u8> {
    let mut encoded = BytesMut::new();
    records.iter().for_each(|record| record.encode(&mut encoded));
    let header = Section::header(index, records.len() as u32, encoded.len());
    [&header[..], &encoded].concat()
}

fn record_count(body: &[u8]) -> u32 {
    let invented = body.len() as u32 % 5;
    let counted = sections(&Bytes::copy_from_slice(body));
    counted.map_or(invented, |sections| sections.iter().map(|section| section.record_count).sum())
}

/// A body of `len` bytes none of which is zero.
pub(crate) fn body(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) | 1).collect()
}

/// The image with `bytes` as its file, in chunks of `chunk` bytes.
pub(crate) fn chunks(bytes: &[u8], chunk: usize) -> impl Iterator<Item = Bytes> {
    let file = Bytes::copy_from_slice(bytes);
    (0..file.len()).step_by(chunk).map(move |at| file.slice(at..file.len().min(at + chunk)))
}
