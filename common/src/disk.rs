//! The disk seam: what a log server asks of its directory, and what comes back.
//!
//! ```text
//! log server --DiskRequest--> driver thread (io_uring or plain files)   or   simulated disk
//!            <--DiskCompletion--
//! ```
//!
//! # Contract
//! 1. Offsets, lengths of reads and lengths of files are multiples of [`PAGE_BYTES`]. A write shorter than a
//!    multiple is padded with zeros by the disk.
//! 2. Requests of [`Lane::Log`] that write are carried out one after the other, in the order in which they
//!    were given. Requests of [`Lane::Background`] are too, but may take long and run beside the log lane.
//!    Reads may overtake anything.
//! 3. `durable: true` completes only after the data, and what is needed to find it again, would survive a
//!    power cut. Everything that the same file was given before is then durable too (I7).
//! 4. `Create`, `Rename` and `Remove` are durable when they complete, the directory included. `Create`
//!    leaves a file of zeros that were really written, so that an overwrite needs no metadata.
//! 5. An error of a write or of a barrier says nothing about what is on the disk: the role must halt.
//!    [`DiskError::Full`] is the exception: only `Create` answers it, and then nothing has changed.

use bytes::Bytes;
use thiserror::Error;

use crate::{Payload, SegmentId};

/// The unit of alignment and of tearing, in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// `bytes` rounded up to whole pages.
#[must_use]
pub const fn padded(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES
}

/// A file in a log directory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum File {
    /// `segment-<id, 16 hex digits>`: a part of the log.
    Segment(SegmentId),
    /// `spare-<number, 8 hex digits>`: zero-written or recycled, ready to become a segment.
    Spare(u32),
    /// `meta-<0 or 1>`: one of the two alternating slots of what is not in the log.
    Meta(u8),
}

impl File {
    /// The name in the directory.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Segment(id) => format!("segment-{:016x}", id.0),
            Self::Spare(number) => format!("spare-{number:08x}"),
            Self::Meta(slot) => format!("meta-{slot}"),
        }
    }

    /// The inverse of [`File::name`]; `None` for a foreign file.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let file = if let Some(id) = name.strip_prefix("segment-") {
            Self::Segment(SegmentId(u64::from_str_radix(id, 16).ok()?))
        } else if let Some(number) = name.strip_prefix("spare-") {
            Self::Spare(u32::from_str_radix(number, 16).ok()?)
        } else {
            Self::Meta(name.strip_prefix("meta-")?.parse().ok()?)
        };
        (file.name() == name).then_some(file)
    }
}

/// A log server's own number for a request to its disk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DiskOpId(pub u64);

/// Which queue a request waits in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lane {
    /// On the commit path.
    Log,
    /// Beside it: preparing, sealing and recycling of segments.
    Background,
}

/// A request to the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskRequest {
    /// Comes back in the completion.
    pub id: DiskOpId,
    /// The queue.
    pub lane: Lane,
    /// What to do.
    pub op: DiskOp,
}

/// What a disk can do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DiskOp {
    /// All files of the directory and the space left. Answer: [`DiskOutput::Listing`].
    List,
    /// Makes a file of `bytes` written zeros, replacing a file of that name. Answer: [`DiskOutput::Done`].
    Create {
        /// The file.
        file: File,
        /// Its length.
        bytes: u64,
    },
    /// Gives a file another name, replacing a file of that name. Answer: [`DiskOutput::Done`].
    Rename {
        /// The old name.
        from: File,
        /// The new name.
        to: File,
    },
    /// Removes a file. Slow on disks that discard: never on the log lane. Answer: [`DiskOutput::Done`].
    Remove {
        /// The file.
        file: File,
    },
    /// Reads; shorter at the end of the file. Answer: [`DiskOutput::Data`].
    Read {
        /// The file.
        file: File,
        /// Where to start, a multiple of [`PAGE_BYTES`].
        offset: u64,
        /// How much, a multiple of [`PAGE_BYTES`].
        bytes: u64,
    },
    /// Overwrites part of an existing file; a meta file may grow by it. Answer: [`DiskOutput::Done`].
    Write {
        /// The file.
        file: File,
        /// Where to start, a multiple of [`PAGE_BYTES`].
        offset: u64,
        /// What; padded with zeros to whole pages.
        data: Payload,
        /// Whether to complete only after a barrier.
        durable: bool,
    },
}

/// A disk's answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskCompletion {
    /// The request's number.
    pub id: DiskOpId,
    /// What came of it.
    pub result: Result<DiskOutput, DiskError>,
}

/// What a request that went well brings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DiskOutput {
    /// The files and their lengths in bytes, in the order of [`File`], and how many bytes may still be
    /// created.
    Listing {
        /// The files.
        files: Vec<(File, u64)>,
        /// Bytes that `Create` may still use.
        free_bytes: u64,
    },
    /// What was read.
    Data(Bytes),
    /// Nothing but that it is done.
    Done,
}

/// What went wrong on a disk.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum DiskError {
    /// No space for a new file; nothing has changed.
    #[error("the disk is full")]
    Full,
    /// No such file.
    #[error("no file {0:?}")]
    NotFound(File),
    /// Anything else. `detail` names the call and the operating system's error.
    #[error("disk error: {detail}")]
    Io {
        /// For people.
        detail: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_foreign_names_are_refused() {
        for file in [File::Segment(SegmentId(0x1f)), File::Spare(3), File::Meta(1)] {
            assert_eq!(File::parse(&file.name()), Some(file));
        }
        for name in ["segment-1f", "spare-", "meta-x", "lost+found", "segment-000000000000001F"] {
            assert_eq!(File::parse(name), None, "{name}");
        }
    }
}
