//! Reading of the files: what there is, and the frames of one segment after the other.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use common::disk::{File, PAGE_BYTES};
use common::{Epoch, NodeId, SegmentId, Sequence, Version};

use crate::format::frame::{FRAME_HEADER_BYTES, parse_header};
use crate::format::meta::{MetaChoice, choose};
use crate::format::scan::{ScanEnd, ScanStart, ScannedFrame, Scanner};
use crate::format::segment::{
    Footer, SEGMENT_HEADER_BYTES, SegmentError, SegmentHeader, TRAILER_BYTES, Trailer,
    trailer_offset,
};

/// How much is read at once.
const READ_BYTES: u64 = 1 << 20;
/// The length of the shortest file that can hold a frame.
const FILE_BYTES_MIN: u64 = SEGMENT_HEADER_BYTES + TRAILER_BYTES + PAGE_BYTES;

/// The files of a log directory.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    path: PathBuf,
    pub(super) meta: MetaChoice,
    /// In the order of the log.
    pub(super) segments: Vec<SegmentFile>,
    /// Names and lengths.
    pub(super) spares: Vec<(String, u64)>,
    /// Names that no log server gives.
    pub(super) foreign: Vec<String>,
}

/// A segment's file without its frames.
#[derive(Clone, Debug)]
pub(super) struct SegmentFile {
    pub(super) segment: SegmentId,
    pub(super) file_bytes: u64,
    pub(super) header: Result<SegmentHeader, SegmentError>,
    pub(super) seal: Seal,
    /// Frames up to here were durable, by the footer, by the next segments or by a clean shutdown.
    pub(super) durable_at_least: Sequence,
}

/// What the last page of a segment leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seal {
    /// No trailer: frames may still come, or the node stopped before it could seal.
    Open,
    /// A good footer.
    Sealed(Footer),
    /// A trailer or a footer that is damaged or belongs elsewhere.
    Damaged(SegmentError),
}

/// What the next frame of the log follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tip {
    /// The next one's.
    pub(super) sequence: Sequence,
    pub(super) hash: u32,
    pub(super) epoch: Epoch,
    pub(super) version: Version,
}

impl Directory {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut directory = Self {
            path: path.to_owned(),
            meta: choose(&slot(path, 0)?, &slot(path, 1)?),
            segments: vec![],
            spares: vec![],
            foreign: vec![],
        };
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let bytes = match entry.metadata() {
                Ok(metadata) => metadata.len(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            match File::parse(&name) {
                Some(File::Segment(segment)) => directory.add_segment(segment, bytes)?,
                Some(File::Spare(_)) => directory.spares.push((name, bytes)),
                Some(File::Meta(_)) => {}
                None => directory.foreign.push(name),
            }
        }
        directory.segments.sort_by_key(|file| file.segment);
        directory.spares.sort();
        directory.foreign.sort();
        directory.spread_proof();
        Ok(directory)
    }

    /// The node that the log belongs to, where anything tells.
    pub(super) fn node(&self) -> Option<NodeId> {
        let by_meta = match &self.meta {
            MetaChoice::Found { meta, .. } => Some(meta.node),
            _ => None,
        };
        by_meta.or_else(|| {
            self.segments.iter().find_map(|file| file.header.as_ref().ok()).map(|h| h.node)
        })
    }

    fn add_segment(&mut self, segment: SegmentId, file_bytes: u64) -> io::Result<()> {
        let Some(file) = open(&self.path, segment)? else { return Ok(()) };
        let page = read_page(&file, 0);
        let header = SegmentHeader::decode(&page).and_then(|header| {
            header.belongs(header.node, segment)?;
            Ok(header)
        });
        let seal = read_seal(&file, segment, file_bytes);
        let durable_at_least = match &seal {
            Seal::Sealed(footer) => footer.last_sequence,
            Seal::Open | Seal::Damaged(_) => Sequence::ZERO,
        };
        self.segments.push(SegmentFile { segment, file_bytes, header, seal, durable_at_least });
        Ok(())
    }

    /// A later segment was begun after the frames of the earlier ones were durable.
    fn spread_proof(&mut self) {
        let mut later = match &self.meta {
            MetaChoice::Found { meta, .. } => meta.clean_shutdown,
            _ => None,
        };
        // Prepared segments, without a header yet.
        let mut is_behind_log = true;
        for file in self.segments.iter_mut().rev() {
            // A footer knows the last frame; a segment without it ends where the next one begins.
            if let (Seal::Open | Seal::Damaged(_), Some(last)) = (&file.seal, later) {
                file.durable_at_least = last;
            }
            let header = file.header.as_ref().ok();
            is_behind_log &= header.is_none();
            if !is_behind_log {
                later = header.map(|header| header.first_sequence.minus_saturating(1));
            }
        }
    }

    /// Starts to read a segment; `None` when it has gone meanwhile, or can't hold a frame.
    pub(super) fn read(
        &self,
        file: &SegmentFile,
        tip: Option<Tip>,
    ) -> io::Result<Option<SegmentReader>> {
        let file_bytes = file.file_bytes / PAGE_BYTES * PAGE_BYTES;
        if file_bytes < FILE_BYTES_MIN {
            return Ok(None);
        }
        let Some(opened) = open(&self.path, file.segment)? else { return Ok(None) };
        let start = self.start(file, &opened, tip, file_bytes);
        Ok(Some(SegmentReader {
            file: opened,
            file_bytes,
            tip: Tip {
                sequence: start.sequence,
                hash: start.previous_hash,
                epoch: start.epoch,
                version: start.previous_version,
            },
            scanner: Scanner::new(start),
            ready: VecDeque::new(),
        }))
    }

    /// What a segment follows: by its header, by the segments before, or by its first frame.
    fn start(
        &self,
        file: &SegmentFile,
        opened: &fs::File,
        tip: Option<Tip>,
        segment_bytes: u64,
    ) -> ScanStart {
        let follows = |sequence, hash, epoch, version| Tip { sequence, hash, epoch, version };
        let by_header = file.header.as_ref().ok();
        let by_header = by_header
            .map(|h| follows(h.first_sequence, h.previous_hash, h.epoch, h.previous_version));
        let by_frame = || {
            let page = read_page(opened, SEGMENT_HEADER_BYTES);
            let head = parse_header(page.get(..FRAME_HEADER_BYTES)?).ok()?;
            let is_own = head.segment == file.segment;
            is_own.then_some(follows(
                head.sequence,
                head.previous_hash,
                head.epoch,
                head.previous_version,
            ))
        };
        let nothing = follows(Sequence(1), 0, Epoch::ZERO, Version::ZERO);
        let tip = by_header.or(tip).or_else(by_frame).unwrap_or(nothing);
        ScanStart {
            node: self.node().unwrap_or_default(),
            segment: file.segment,
            segment_bytes,
            sequence: tip.sequence,
            previous_hash: tip.hash,
            epoch: tip.epoch,
            previous_version: tip.version,
            durable_at_least: file.durable_at_least,
        }
    }
}

/// Reads the frames of one segment.
#[derive(Debug)]
pub(super) struct SegmentReader {
    file: fs::File,
    file_bytes: u64,
    scanner: Scanner,
    ready: VecDeque<ScannedFrame>,
    /// Behind the last frame that was given out.
    pub(super) tip: Tip,
}

impl SegmentReader {
    /// The next good frame.
    pub(super) fn next_frame(&mut self) -> Option<ScannedFrame> {
        while self.ready.is_empty() && self.feed() {}
        let frame = self.ready.pop_front()?;
        self.tip = Tip {
            sequence: frame.header.sequence.plus(1),
            hash: frame.hash,
            epoch: frame.header.epoch,
            version: frame.header.version,
        };
        Some(frame)
    }

    /// How it ends, once all frames have been given out.
    pub(super) fn finish(mut self) -> ScanEnd {
        while self.feed() {}
        self.scanner.finish()
    }

    fn feed(&mut self) -> bool {
        let at = self.scanner.fed_bytes();
        let bytes = READ_BYTES.min(self.file_bytes.saturating_sub(at));
        if bytes == 0 || self.scanner.is_settled() {
            return false;
        }
        let mut buffer = vec![0; bytes as usize];
        match self.file.read_exact_at(&mut buffer, at) {
            Ok(()) => self.ready.extend(self.scanner.feed(buffer.into())),
            Err(_) => self.feed_by_page(at, bytes),
        }
        true
    }

    /// Finds out which pages can't be read.
    fn feed_by_page(&mut self, at: u64, bytes: u64) {
        for at in (at..at + bytes).step_by(PAGE_BYTES as usize) {
            let mut page = vec![0; PAGE_BYTES as usize];
            let frames = match self.file.read_exact_at(&mut page, at) {
                Ok(()) => self.scanner.feed(page.into()),
                Err(_) => self.scanner.hole(PAGE_BYTES),
            };
            self.ready.extend(frames);
        }
    }
}

fn open(directory: &Path, segment: SegmentId) -> io::Result<Option<fs::File>> {
    match fs::File::open(directory.join(File::Segment(segment).name())) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn slot(directory: &Path, number: u8) -> io::Result<Vec<u8>> {
    match fs::read(directory.join(File::Meta(number).name())) {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(vec![]),
        Err(error) => Err(error),
    }
}

/// One page; nothing when it can't be read.
fn read_page(file: &fs::File, at: u64) -> Bytes {
    read_at(file, at, PAGE_BYTES)
}

fn read_at(file: &fs::File, at: u64, bytes: u64) -> Bytes {
    let mut buffer = vec![0; bytes as usize];
    file.read_exact_at(&mut buffer, at).map(|()| buffer.into()).unwrap_or_default()
}

fn read_seal(file: &fs::File, segment: SegmentId, file_bytes: u64) -> Seal {
    if !file_bytes.is_multiple_of(PAGE_BYTES) || file_bytes < FILE_BYTES_MIN {
        return Seal::Open;
    }
    let last = read_page(file, trailer_offset(file_bytes));
    let judge = || {
        let trailer = Trailer::decode(&last, file_bytes)?;
        trailer.belongs(trailer.node, segment)?;
        let footer = Footer::decode(&read_at(file, trailer.footer_offset, trailer.footer_bytes))?;
        footer.belongs(trailer.node, segment)?;
        if footer.frames_end > trailer.footer_offset {
            return Err(SegmentError::Contradiction { what: "frames end and footer offset" });
        }
        Ok(footer)
    };
    match judge() {
        Ok(footer) => Seal::Sealed(footer),
        Err(SegmentError::OtherSegment { .. }) => Seal::Open,
        Err(_) if last.iter().all(|byte| *byte == 0) => Seal::Open,
        Err(error) => Seal::Damaged(error),
    }
}
