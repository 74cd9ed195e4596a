//! Offline reading of a log directory, for people: plain files, plain reads, nothing is changed.
//!
//! ```text
//! inspect  what is there: meta, segments, how much of them is still needed
//! frames   every good frame, in the order of the log
//! streams  what there is of each stream
//! records  every record of a stream, or of all
//! verify   everything that can be checked, and what is wrong
//! ```
//!
//! It may run beside a live node: a tail that moves is no finding, and a segment that goes while it is read
//! is skipped.

mod streams;
mod verify;
mod walk;

use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use common::record::{Record, RecordError, decode_records, sections};
use common::{Epoch, NodeId, Offset, Position, SegmentId, Sequence, StreamId, Version, WallTime};

use super::meta::{Meta, MetaChoice};
use super::scan::{ScanEnd, ScannedFrame};
use super::segment::{SegmentError, SegmentHeader};
pub use streams::{StreamReport, streams};
pub use verify::{Finding, FindingKind, verify};
pub use walk::Seal;
use walk::{Directory, SegmentFile, SegmentReader};

/// A log directory.
#[derive(Clone, Debug)]
pub struct Report {
    /// The node that it belongs to, where anything tells.
    pub node: Option<NodeId>,
    /// The meta slots.
    pub meta: MetaChoice,
    /// The segments in the order of the log.
    pub segments: Vec<SegmentReport>,
    /// Files that are ready to become segments: names and lengths in bytes.
    pub spares: Vec<(String, u64)>,
    /// Names that no log server gives.
    pub foreign: Vec<String>,
}

/// One segment.
#[derive(Clone, Debug)]
pub struct SegmentReport {
    /// The segment.
    pub segment: SegmentId,
    /// The length of its file.
    pub file_bytes: u64,
    /// Its header.
    pub header: Result<SegmentHeader, SegmentError>,
    /// Whether it is sealed.
    pub seal: Seal,
    /// How it ends; `None` when it can't hold a frame or has gone while it was read.
    pub end: Option<ScanEnd>,
    /// What its good frames hold.
    pub frames: FrameTotals,
}

/// What a number of frames hold together.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct FrameTotals {
    /// How many frames.
    pub frame_count: u64,
    /// How many blocks.
    pub block_count: u64,
    /// How many records.
    pub record_count: u64,
    /// The first and the last frame.
    pub sequences: Option<(Sequence, Sequence)>,
    /// The first and the last version.
    pub versions: Option<(Version, Version)>,
    /// The first and the last epoch.
    pub epochs: Option<(Epoch, Epoch)>,
    /// The commit times of the first and the last version.
    pub commit_times: Option<(WallTime, WallTime)>,
    /// Bytes of headers, tables and bodies.
    pub frame_bytes: u64,
    /// Bytes of bodies.
    pub body_bytes: u64,
    /// Bytes of bodies that no trim covers.
    pub live_bytes: u64,
}

/// A record and its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordLine {
    /// The segment.
    pub segment: SegmentId,
    /// The epoch that it was pushed in.
    pub epoch: Epoch,
    /// Its transaction.
    pub position: Position,
    /// When its version was handed out.
    pub commit_time: WallTime,
    /// The stream.
    pub stream: StreamId,
    /// Its offset in the stream.
    pub offset: Offset,
    /// What was appended.
    pub record: Record,
}

impl SegmentReport {
    /// The share of the bodies' bytes that no trim covers, 0 to 1; 0 without bodies.
    #[must_use]
    pub fn live_ratio(&self) -> f64 {
        match self.frames.body_bytes {
            0 => 0.0,
            bytes => self.frames.live_bytes as f64 / bytes as f64,
        }
    }
}

impl FrameTotals {
    fn add(&mut self, frame: &ScannedFrame, meta: Option<&Meta>) {
        let header = &frame.header;
        self.sequences = widen(self.sequences, header.sequence);
        self.versions = widen(self.versions, header.version);
        self.epochs = widen(self.epochs, header.epoch);
        self.commit_times = widen(self.commit_times, header.commit_time);
        self.frame_count += 1;
        self.frame_bytes += header.frame_bytes;
        for entry in &frame.entries {
            self.block_count += 1;
            self.record_count += u64::from(entry.record_count);
            self.body_bytes += u64::from(entry.bytes);
            if !is_trimmed(meta, entry.stream, header.version) {
                self.live_bytes += u64::from(entry.bytes);
            }
        }
    }
}

/// First and last, with one more.
fn widen<T: Copy>(span: Option<(T, T)>, last: T) -> Option<(T, T)> {
    Some((span.map_or(last, |(first, _)| first), last))
}

fn is_trimmed(meta: Option<&Meta>, stream: StreamId, version: Version) -> bool {
    let Some(meta) = meta else { return false };
    let found = meta.trims.binary_search_by_key(&stream, |trim| trim.stream);
    found.is_ok_and(|index| version <= meta.trims[index].through)
}

fn meta_of(directory: &Directory) -> Option<&Meta> {
    match &directory.meta {
        MetaChoice::Found { meta, .. } => Some(meta),
        _ => None,
    }
}

/// Reads the whole directory and sums up.
///
/// # Errors
/// When the directory or a file in it can't be opened; damage is part of the report.
pub fn inspect(path: &Path) -> io::Result<Report> {
    let directory = Directory::open(path)?;
    let mut segments = Vec::new();
    let mut tip = None;
    for file in &directory.segments {
        let mut frames = FrameTotals::default();
        let mut end = None;
        if let Some(mut reader) = directory.read(file, tip)? {
            while let Some(frame) = reader.next_frame() {
                frames.add(&frame, meta_of(&directory));
            }
            tip = Some(reader.tip);
            end = Some(reader.finish());
        }
        let SegmentFile { segment, file_bytes, header, seal, .. } = file.clone();
        segments.push(SegmentReport { segment, file_bytes, header, seal, end, frames });
    }
    Ok(Report {
        node: directory.node(),
        meta: directory.meta,
        segments,
        spares: directory.spares,
        foreign: directory.foreign,
    })
}

/// Visits every good frame in the order of the log, or those of one segment, until the visitor breaks. Damage
/// ends a segment early: [`inspect()`] and [`verify()`] say where.
///
/// # Errors
/// When the directory or a file in it can't be opened.
pub fn frames(
    path: &Path,
    only: Option<SegmentId>,
    mut visit: impl FnMut(SegmentId, &ScannedFrame) -> ControlFlow<()>,
) -> io::Result<()> {
    let directory = Directory::open(path)?;
    let mut tip = None;
    for file in &directory.segments {
        if only.is_some_and(|only| only != file.segment) {
            continue;
        }
        let Some(mut reader) = directory.read(file, tip)? else { continue };
        while let Some(frame) = reader.next_frame() {
            if visit(file.segment, &frame).is_break() {
                return Ok(());
            }
        }
        tip = Some(reader.tip);
    }
    Ok(())
}

/// Visits every record of a stream, or of all streams, in the order of the log, until the visitor breaks.
/// Records above a recovery version are in the log too: their offsets come again in the next epoch.
///
/// # Errors
/// When the directory or a file in it can't be opened, and [`io::ErrorKind::InvalidData`] for a block whose
/// checksum is right and whose records are not.
pub fn records(
    path: &Path,
    only: Option<StreamId>,
    mut visit: impl FnMut(RecordLine) -> ControlFlow<()>,
) -> io::Result<()> {
    let mut failed = None;
    frames(path, None, |segment, frame| match lines(segment, frame, only) {
        Ok(lines) => lines.into_iter().try_for_each(&mut visit),
        Err((stream, error)) => {
            let at = format!("{} of {stream} in {segment}: {error}", frame.header.version);
            failed = Some(io::Error::new(io::ErrorKind::InvalidData, at));
            ControlFlow::Break(())
        }
    })?;
    failed.map_or(Ok(()), Err)
}

fn lines(
    segment: SegmentId,
    frame: &ScannedFrame,
    only: Option<StreamId>,
) -> Result<Vec<RecordLine>, (StreamId, RecordError)> {
    let mut found = Vec::new();
    let blocks = frame.entries.iter().zip(&frame.bodies);
    for (entry, body) in blocks.filter(|(entry, _)| only.is_none_or(|only| only == entry.stream)) {
        let mut offset = entry.base_offset;
        let of_stream = |error: RecordError| (entry.stream, error);
        for section in sections(body).map_err(of_stream)? {
            for record in decode_records(&section.records).map_err(of_stream)? {
                found.push(RecordLine {
                    segment,
                    epoch: frame.header.epoch,
                    position: Position { version: frame.header.version, index: section.index },
                    commit_time: frame.header.commit_time,
                    stream: entry.stream,
                    offset,
                    record,
                });
                offset = Offset(offset.0.saturating_add(1));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
