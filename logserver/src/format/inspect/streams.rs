//! What there is of each stream, over all segments.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use common::catalog::StreamDefinition;
use common::record::{decode_records, sections};
use common::{Offset, SegmentId, StreamId, Version, WallTime};

use super::walk::Directory;
use super::{frames, is_trimmed, meta_of, widen};
use crate::format::scan::ScannedFrame;

/// One stream.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct StreamReport {
    /// The name, if its definition is in the log.
    pub name: Option<String>,
    /// How many segments hold blocks of it.
    pub segment_count: u64,
    /// How many blocks.
    pub block_count: u64,
    /// How many records.
    pub record_count: u64,
    /// Bytes of bodies.
    pub body_bytes: u64,
    /// Bytes of bodies that no trim covers.
    pub live_bytes: u64,
    /// The first record that is here and the one behind the last.
    pub offsets: Option<(Offset, Offset)>,
    /// The first and the last version with a block of it.
    pub versions: Option<(Version, Version)>,
    /// Their commit times.
    pub commit_times: Option<(WallTime, WallTime)>,
    /// Trimmed through this version.
    pub trimmed_through: Option<Version>,
    last_segment: Option<SegmentId>,
}

impl StreamReport {
    /// The share of the bodies' bytes that no trim covers, 0 to 1; 0 without bodies.
    #[must_use]
    pub fn live_ratio(&self) -> f64 {
        match self.body_bytes {
            0 => 0.0,
            bytes => self.live_bytes as f64 / bytes as f64,
        }
    }
}

/// Sums every stream up. Records above a recovery version count, too: they are in the log.
///
/// # Errors
/// When the directory or a file in it can't be opened.
pub fn streams(path: &Path) -> io::Result<BTreeMap<StreamId, StreamReport>> {
    let directory = Directory::open(path)?;
    let meta = meta_of(&directory);
    let mut reports: BTreeMap<StreamId, StreamReport> = BTreeMap::new();
    for trim in meta.iter().flat_map(|meta| &meta.trims) {
        reports.entry(trim.stream).or_default().trimmed_through = Some(trim.through);
    }
    let mut names = BTreeMap::new();
    frames(path, None, |segment, frame| {
        let header = &frame.header;
        for entry in &frame.entries {
            let report = reports.entry(entry.stream).or_default();
            let bytes = u64::from(entry.bytes);
            report.segment_count +=
                u64::from(report.last_segment.replace(segment) != Some(segment));
            report.block_count += 1;
            report.record_count += u64::from(entry.record_count);
            report.body_bytes += bytes;
            if !is_trimmed(meta, entry.stream, header.version) {
                report.live_bytes += bytes;
            }
            let end = Offset(entry.base_offset.0.saturating_add(u64::from(entry.record_count)));
            let first = report.offsets.map_or(entry.base_offset, |(first, _)| first);
            report.offsets = Some((first, end));
            report.versions = widen(report.versions, header.version);
            report.commit_times = widen(report.commit_times, header.commit_time);
        }
        names.extend(definitions(frame));
        ControlFlow::Continue(())
    })?;
    for (stream, name) in names {
        reports.entry(stream).or_default().name = Some(name);
    }
    Ok(reports)
}

/// The names that a frame gives. What is no definition is for `verify` to find.
fn definitions(frame: &ScannedFrame) -> Vec<(StreamId, String)> {
    let blocks = frame.entries.iter().zip(&frame.bodies);
    let of_catalog = blocks.filter(|(entry, _)| entry.stream == StreamId::CATALOG);
    let all = of_catalog.flat_map(|(_, body)| sections(body).unwrap_or_default());
    let records = all.flat_map(|section| decode_records(&section.records).unwrap_or_default());
    let defined = records.filter_map(|record| StreamDefinition::from_record(&record).ok());
    defined.map(|definition| (definition.stream, definition.name)).collect()
}
