//! The files of a node that does not run, and how to spoil them.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::SegmentId;
use common::disk::File;
use serde_json::Value;

use crate::millrace;

/// Bytes of a frame's header, and of an entry of the block table behind it (`docs/src/disk-format.md`).
const HEADER_BYTES: u64 = 128;

/// A frame: one version.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The segment's number.
    pub segment: u64,
    /// Where it begins in the segment's file.
    pub offset: u64,
    /// Its bytes, without what pads its flush to whole pages.
    pub bytes: u64,
    /// Its place among all frames.
    pub sequence: u64,
    /// The last place that was durable when its flush began.
    pub durable_sequence: u64,
    /// Its version.
    pub version: u64,
    /// The version before.
    pub previous_version: u64,
}

/// A part of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The header.
    Header,
    /// The table of its blocks.
    Table,
    /// The body of a block.
    Body,
}

impl Frame {
    fn of(json: &Value) -> Self {
        let number = |name: &str| json[name].as_u64().unwrap();
        Self {
            segment: number("segment"),
            offset: number("offset"),
            bytes: number("bytes"),
            sequence: number("sequence"),
            durable_sequence: number("durable_sequence"),
            version: number("version"),
            previous_version: number("previous_version"),
        }
    }

    /// Behind its last byte.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// Flips one bit of it in a node's directory.
    ///
    /// # Panics
    /// When the file is not there.
    pub fn flip_a_bit(&self, directory: &Path, place: Place) {
        let at = match place {
            Place::Header => self.offset + 70,
            Place::Table => self.offset + HEADER_BYTES + 9,
            Place::Body => self.end() - 9,
        };
        let path = segment_path(directory, self.segment);
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    }
}

/// A segment's file in a node's directory.
#[must_use]
pub fn segment_path(directory: &Path, segment: u64) -> PathBuf {
    directory.join("log").join(File::Segment(SegmentId(segment)).name())
}

/// All frames in a node's directory, in their order.
///
/// # Panics
/// When it can't be read.
#[must_use]
pub fn frames(directory: &Path) -> Vec<Frame> {
    let directory = directory.to_str().unwrap();
    let listed = millrace(&["inspect", "frames", directory, "-o", "json"]).with_code(0);
    listed.json().iter().map(Frame::of).collect()
}

/// The names and the bytes of all files in a directory.
///
/// # Panics
/// When they can't be read.
#[must_use]
pub fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    entries
        .map(|entry| {
            let bytes = fs::read(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), bytes)
        })
        .collect()
}

/// Copies a node's directory to a place that does not exist yet.
///
/// # Panics
/// When it can't be copied.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}
