//! Checks everything in a log directory that can be checked without other nodes.
//!
//! - meta: both slots
//! - each segment: header, every frame, footer against frames
//! - across segments: the chain of hashes, epochs, versions
//! - each stream: dense offsets, as many records as counted, nothing left below its trim

use core::fmt;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use common::disk::{File, PAGE_BYTES};
use common::record::{count_records, sections};
use common::{Epoch, Offset, SegmentId, StreamId, Version};

use super::walk::{Directory, Seal, SegmentFile, Tip};
use super::{SegmentReader, meta_of};
use crate::format::Flaw;
use crate::format::meta::MetaChoice;
use crate::format::scan::{ScanEnd, ScannedFrame};
use crate::format::segment::{EpochStart, Footer, FooterEntry, SegmentError};

/// A live node changes its directory while it is read: only what every pass finds is a finding.
const PASSES_MAX: usize = 3;

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FindingKind {
    /// A meta slot is damaged.
    Meta,
    /// A file has a length that no log server gives.
    Length,
    /// A segment's header is damaged, or another node's.
    Header,
    /// A frame that had been durable is damaged.
    Rot,
    /// A segment does not follow the one before.
    Chain,
    /// Epochs or versions go backwards or skip.
    Order,
    /// A stream's offsets have a gap or overlap.
    Offsets,
    /// A block does not hold the records that it counts.
    Records,
    /// A footer or trailer is damaged, or doesn't fit the frames.
    Footer,
}

/// Something wrong, and where.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Finding {
    /// The file's name.
    pub file: String,
    /// What kind.
    pub kind: FindingKind,
    /// For people.
    pub detail: String,
}

impl FindingKind {
    /// Stable word for scripts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Meta => "meta",
            Self::Length => "length",
            Self::Header => "header",
            Self::Rot => "rot",
            Self::Chain => "chain",
            Self::Order => "order",
            Self::Offsets => "offsets",
            Self::Records => "records",
            Self::Footer => "footer",
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.file, self.kind.name(), self.detail)
    }
}

/// Reads and checks everything.
///
/// # Errors
/// When the directory or a file in it can't be opened; damage is a finding.
pub fn verify(path: &Path) -> io::Result<Vec<Finding>> {
    let mut findings = pass(path)?;
    for _ in 1..PASSES_MAX {
        if findings.is_empty() {
            break;
        }
        let again = pass(path)?;
        findings.retain(|finding| again.contains(finding));
    }
    Ok(findings)
}

fn pass(path: &Path) -> io::Result<Vec<Finding>> {
    let directory = Directory::open(path)?;
    let mut check = Check::new(&directory);
    check.meta();
    let mut tip = None;
    for (index, file) in directory.segments.iter().enumerate() {
        check.file = File::Segment(file.segment).name();
        check.length(file);
        let Some(reader) = directory.read(file, tip)? else { continue };
        let has_frames = check.segment(file, reader, &mut tip)?;
        let is_last = index + 1 == directory.segments.len();
        check.header(file, has_frames, is_last);
    }
    check.offsets();
    Ok(check.findings)
}

/// One pass over a directory.
struct Check<'a> {
    directory: &'a Directory,
    /// What is being read.
    file: String,
    findings: Vec<Finding>,
    /// Where epochs begin, by the frames and by the meta slots.
    epochs: BTreeMap<Epoch, Version>,
    blocks: BTreeMap<StreamId, Vec<Block>>,
    /// Where the log is interrupted: what follows can't be held against it.
    rotten: BTreeSet<SegmentId>,
}

/// A block in a stream.
struct Block {
    segment: SegmentId,
    epoch: Epoch,
    version: Version,
    base_offset: Offset,
    record_count: u32,
}

impl<'a> Check<'a> {
    fn new(directory: &'a Directory) -> Self {
        let epochs = meta_of(directory).map(|meta| meta.epochs.as_slice()).unwrap_or_default();
        Self {
            directory,
            file: String::new(),
            findings: vec![],
            epochs: epochs.iter().map(|start| (start.epoch, start.previous_version)).collect(),
            blocks: BTreeMap::new(),
            rotten: BTreeSet::new(),
        }
    }

    fn find(&mut self, kind: FindingKind, detail: impl Into<String>) {
        self.findings.push(Finding { file: self.file.clone(), kind, detail: detail.into() });
    }

    fn meta(&mut self) {
        let slot = |number| File::Meta(number).name();
        match &self.directory.meta {
            MetaChoice::Fresh | MetaChoice::Found { other: None, .. } => {}
            MetaChoice::Found { meta, other: Some(flaw) } => {
                self.file = slot(1 - meta.slot());
                self.find(FindingKind::Meta, format!("{flaw}; the other slot is good"));
            }
            MetaChoice::FirstTorn { flaw } => {
                self.file = slot(1);
                self.find(FindingKind::Meta, format!("{flaw}; the other slot is blank"));
            }
            MetaChoice::Corrupt { flaws } => {
                for (number, flaw) in (0..).zip(flaws) {
                    self.file = slot(number);
                    self.find(FindingKind::Meta, flaw.to_string());
                }
            }
        }
    }

    fn length(&mut self, file: &SegmentFile) {
        if !file.file_bytes.is_multiple_of(PAGE_BYTES) {
            self.find(FindingKind::Length, format!("{} bytes are no whole pages", file.file_bytes));
        }
    }

    fn header(&mut self, file: &SegmentFile, has_frames: bool, is_last: bool) {
        match &file.header {
            Err(error) if has_frames => {
                self.find(FindingKind::Header, format!("{error}; its frames are good"));
            }
            // A prepared file, or a leftover of a recycled one: nothing was ever written to this segment.
            Err(SegmentError::Flaw(Flaw::Blank) | SegmentError::OtherSegment { .. }) => {}
            Err(_) if is_last => {}
            Err(error) => self.find(FindingKind::Header, error.to_string()),
            Ok(header) => {
                if header.segment_bytes != file.file_bytes {
                    let claimed = header.segment_bytes;
                    let detail = format!("{} bytes, by its header {claimed}", file.file_bytes);
                    self.find(FindingKind::Length, detail);
                }
                if let Some(node) = self.directory.node().filter(|node| *node != header.node) {
                    let detail = format!("of node {}, the directory is {node}'s", header.node);
                    self.find(FindingKind::Header, detail);
                }
            }
        }
    }

    /// Reads a segment's frames; whether there were any.
    fn segment(
        &mut self,
        file: &SegmentFile,
        mut reader: SegmentReader,
        tip: &mut Option<Tip>,
    ) -> io::Result<bool> {
        let start = reader.tip;
        if let Some(tip) = *tip
            && file.header.is_ok()
            && (tip.sequence, tip.hash) != (start.sequence, start.hash)
        {
            let detail = format!(
                "begins with {} after {:08x}, the log ends before {} with {:08x}",
                start.sequence, start.hash, tip.sequence, tip.hash
            );
            self.find(FindingKind::Chain, detail);
        }
        let mut footer = FooterBuilder::new(start);
        while let Some(frame) = reader.next_frame() {
            self.frame(file, &frame, footer.tip);
            footer.add(&frame);
        }
        let has_frames = footer.tip != start;
        if has_frames || file.header.is_ok() {
            *tip = Some(reader.tip);
        }
        let end = reader.finish();
        match (&end, &file.seal) {
            (ScanEnd::Rot(report), _) => {
                self.rotten.insert(file.segment);
                *tip = None;
                self.find(FindingKind::Rot, report.to_string());
            }
            (_, Seal::Sealed(found)) => self.footer(found, &footer),
            _ => {}
        }
        if let Seal::Damaged(error) = &file.seal {
            self.find(FindingKind::Footer, error.to_string());
        }
        Ok(has_frames)
    }

    fn frame(&mut self, file: &SegmentFile, frame: &ScannedFrame, before: Tip) {
        let header = &frame.header;
        if header.epoch < before.epoch {
            let detail = format!("{} of {} after {}", header.sequence, header.epoch, before.epoch);
            self.find(FindingKind::Order, detail);
        } else if header.epoch == before.epoch && header.previous_version != before.version {
            let (sequence, previous) = (header.sequence, header.previous_version);
            let detail =
                format!("{sequence} follows {previous} and stands behind {}", before.version);
            self.find(FindingKind::Order, detail);
        } else if header.version <= before.version {
            let (sequence, version) = (header.sequence, header.version);
            let detail = format!("{sequence} has {version} after {}", before.version);
            self.find(FindingKind::Order, detail);
        }
        if header.epoch > before.epoch {
            let start = self.epochs.entry(header.epoch).or_insert(header.previous_version);
            if *start != header.previous_version {
                let begun = *start;
                let (epoch, previous) = (header.epoch, header.previous_version);
                let detail = format!("{epoch} begins after {previous}, by the meta slots {begun}");
                self.find(FindingKind::Order, detail);
            }
        }
        for (entry, body) in frame.entries.iter().zip(&frame.bodies) {
            if let Some(detail) = miscounted(body, entry.record_count) {
                let (stream, version) = (entry.stream, header.version);
                self.find(FindingKind::Records, format!("{version} of {stream}: {detail}"));
            }
            self.blocks.entry(entry.stream).or_default().push(Block {
                segment: file.segment,
                epoch: header.epoch,
                version: header.version,
                base_offset: entry.base_offset,
                record_count: entry.record_count,
            });
        }
    }

    fn footer(&mut self, found: &Footer, built: &FooterBuilder) {
        let last = built.tip;
        let pairs = [
            ("first sequence", found.first_sequence.0, built.first.sequence.0),
            ("last sequence", found.last_sequence.0.saturating_add(1), last.sequence.0),
            ("last hash", u64::from(found.last_hash), u64::from(last.hash)),
            ("last version", found.last_version.0, last.version.0),
            ("last epoch", found.last_epoch.0, last.epoch.0),
            ("blocks", found.entries.len() as u64, built.entries.len() as u64),
        ];
        for (what, footer, frames) in pairs {
            if footer != frames {
                let detail = format!("{what}: {footer} in the footer, {frames} in the frames");
                self.find(FindingKind::Footer, detail);
            }
        }
        if built.frames_end.is_some_and(|end| end != found.frames_end) {
            self.find(FindingKind::Footer, format!("frames do not end at {}", found.frames_end));
        }
        if found.epoch_starts != built.epoch_starts {
            self.find(FindingKind::Footer, "epoch starts differ from the frames'");
        }
        let differing = found.entries.iter().zip(&built.entries).position(|(a, b)| a != b);
        if let Some(index) = differing {
            let entry = &found.entries[index];
            let detail = format!("entry {index} ({}, {}) differs", entry.stream, entry.version);
            self.find(FindingKind::Footer, detail);
        }
    }

    /// Checks I12 for what survived: versions above a recovery version do not count.
    fn offsets(&mut self) {
        let trims = meta_of(self.directory).map(|meta| meta.trims.as_slice()).unwrap_or_default();
        let blocks = core::mem::take(&mut self.blocks);
        for (stream, blocks) in blocks {
            let trim = trims.iter().find(|trim| trim.stream == stream);
            let mut before: Option<(Epoch, u64)> = None;
            let mut segment = SegmentId::ZERO;
            for block in blocks {
                if self.rotten.range(segment..block.segment).next().is_some() {
                    before = None;
                }
                segment = block.segment;
                if self.is_lost(&block) {
                    continue;
                }
                self.file = File::Segment(block.segment).name();
                let base = block.base_offset.0;
                let Block { epoch, version, .. } = block;
                if let Some((last_epoch, next)) = before {
                    // A server that was away for an epoch, or got the stream anew, starts higher.
                    let is_dense = if epoch == last_epoch { base == next } else { base >= next };
                    if !is_dense {
                        let detail =
                            format!("{version} of {stream} starts at o{base}, not o{next}");
                        self.find(FindingKind::Offsets, detail);
                    }
                }
                if let Some(trim) = trim.filter(|trim| version > trim.through)
                    && block.base_offset < trim.first_offset
                {
                    let first = trim.first_offset;
                    let detail =
                        format!("{version} of {stream} starts at o{base}, trimmed to {first}");
                    self.find(FindingKind::Offsets, detail);
                }
                before = Some((epoch, base.saturating_add(u64::from(block.record_count))));
            }
        }
    }

    /// Whether a later epoch began below the block's version.
    fn is_lost(&self, block: &Block) -> bool {
        let mut later = self.epochs.range(Epoch(block.epoch.0.saturating_add(1))..);
        later.any(|(_, previous_version)| *previous_version < block.version)
    }
}

/// What the footer of the frames should say.
struct FooterBuilder {
    first: Tip,
    tip: Tip,
    frames_end: Option<u64>,
    epoch_starts: Vec<EpochStart>,
    entries: Vec<FooterEntry>,
}

impl FooterBuilder {
    const fn new(start: Tip) -> Self {
        Self { first: start, tip: start, frames_end: None, epoch_starts: vec![], entries: vec![] }
    }

    fn add(&mut self, frame: &ScannedFrame) {
        let header = &frame.header;
        if header.epoch > self.tip.epoch {
            let start =
                EpochStart { epoch: header.epoch, previous_version: header.previous_version };
            self.epoch_starts.push(start);
        }
        for (index, entry) in frame.entries.iter().enumerate() {
            self.entries.push(FooterEntry {
                stream: entry.stream,
                epoch: header.epoch,
                version: header.version,
                commit_time: header.commit_time,
                base_offset: entry.base_offset,
                record_count: entry.record_count,
                offset: frame.body_offset(index),
                bytes: entry.bytes,
                checksum: entry.checksum,
            });
        }
        self.frames_end = Some(frame.end());
        self.tip = Tip {
            sequence: header.sequence.plus(1),
            hash: frame.hash,
            epoch: header.epoch,
            version: header.version,
        };
    }
}

fn miscounted(body: &bytes::Bytes, record_count: u32) -> Option<String> {
    let sections = match sections(body) {
        Ok(sections) => sections,
        Err(error) => return Some(error.to_string()),
    };
    let mut total = 0_u64;
    for section in sections {
        match count_records(&section.records) {
            Ok(count) if count == section.record_count => total += u64::from(count),
            Ok(count) => {
                return Some(format!("{count} records counted as {}", section.record_count));
            }
            Err(error) => return Some(error.to_string()),
        }
    }
    let claimed = u64::from(record_count);
    (total != claimed).then(|| format!("{total} records counted as {claimed}"))
}
