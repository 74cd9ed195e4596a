//! Reads the frames of one segment in order and judges its end.
//!
//! ```text
//!  feed, hole --> | page 0 | chain of frames ......... | X  ?  probe  probe  probe ... |
//!                                                        ^ first bad frame
//! ```
//!
//! A crash tears only what no flush had covered, so whether a bad frame *X* is a torn tail or rot is decided
//! by whether X had ever been durable. Three things prove that it had been:
//! - a later frame of the same segment whose header is good and says `durable_sequence >= X`
//! - the caller's `durable_at_least >= X`: from a clean shutdown, a footer, or a later segment
//!
//! Therefore the scanner never stops at the first bad place: it probes all pages behind it, and wherever a
//! later good header leads. Leftovers of a recycled file carry another segment's id and prove nothing. A
//! single node can't tell the last frame torn from the last frame rotten when nothing proves it durable; that
//! end is [`ScanEnd::Torn`], and other replicas know better.
//!
//! A frame is yielded only when all of it is good: header, chain, table, bodies. A damaged segment header
//! alone loses nothing, as the caller knows the chain: see [`Scanner::header`].
//!
//! # Invariants
//! 1. The yielded frames are a gapless chain from the start that was given.
//! 2. What is yielded, and the end, depend on the bytes alone, not on how they were cut into pieces.

use core::fmt;

use bytes::Bytes;
use common::disk::{PAGE_BYTES, padded};
use common::{Epoch, NodeId, SegmentId, Sequence, StreamId, Version};

use super::flaw::Flaw;
use super::frame::{
    self, BLOCK_ENTRY_BYTES, BlockEntry, FRAME_HEADER_BYTES, FrameError, FrameHeader,
};
use super::segment::{SEGMENT_HEADER_BYTES, SegmentError, SegmentHeader, trailer_offset};
use super::window::{Peek, Piece, Window};

/// Bad entries in a row after which a damaged table has surely ended: more than a page holds.
const ENTRY_MISSES_MAX: u32 = 128;
/// Streams that a report for people lists.
const LISTED_STREAMS_MAX: usize = 16;

const _: () = assert!(ENTRY_MISSES_MAX as u64 * BLOCK_ENTRY_BYTES as u64 > PAGE_BYTES);

/// What is known before a segment is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanStart {
    /// Whose log it is.
    pub node: NodeId,
    /// The segment.
    pub segment: SegmentId,
    /// The length of the file.
    pub segment_bytes: u64,
    /// The sequence of its first frame.
    pub sequence: Sequence,
    /// The hash of the frame before that; 0 for the first frame of a log.
    pub previous_hash: u32,
    /// The epoch of the frame before that.
    pub epoch: Epoch,
    /// The version of the frame before that.
    pub previous_version: Version,
    /// Frames of this segment up to this sequence are known to have been durable; [`Sequence::ZERO`] when
    /// nothing is known. From a footer, the first sequence of a later segment less one, or the mark of a
    /// clean shutdown.
    pub durable_at_least: Sequence,
}

impl From<&SegmentHeader> for ScanStart {
    /// For the first segment of a directory, which nothing but its header tells about.
    fn from(header: &SegmentHeader) -> Self {
        Self {
            node: header.node,
            segment: header.segment,
            segment_bytes: header.segment_bytes,
            sequence: header.first_sequence,
            previous_hash: header.previous_hash,
            epoch: header.epoch,
            previous_version: header.previous_version,
            durable_at_least: Sequence::ZERO,
        }
    }
}

/// A good frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScannedFrame {
    /// Where it starts in the file.
    pub offset: u64,
    /// Its header's checksum, which the next frame holds.
    pub hash: u32,
    /// Its header.
    pub header: FrameHeader,
    /// Its block table.
    pub entries: Vec<BlockEntry>,
    /// The bodies, one for each entry; they share the bytes that were fed, unless they lie across two pieces.
    pub bodies: Vec<Bytes>,
}

impl ScannedFrame {
    /// Where the body of entry `index` starts in the file.
    #[must_use]
    pub fn body_offset(&self, index: usize) -> u64 {
        let before = &self.entries[..index];
        let bodies: u64 = before.iter().map(|entry| u64::from(entry.bytes)).sum();
        self.offset + frame::head_bytes(self.entries.len()) as u64 + bodies
    }

    /// Behind its last byte, in the file.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.header.frame_bytes
    }
}

/// The segment header as found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HeaderState {
    /// Not fed yet.
    Unread,
    /// As expected.
    Good(SegmentHeader),
    /// Damaged, never written, or another one's. With frames behind it, that is rot which costs no data.
    Bad(SegmentError),
    /// Its page can't be read.
    Unreadable,
}

/// How a segment ends.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum ScanEnd {
    /// Behind the last good frame there is no sign of another one of this segment.
    Whole {
        /// Where the next flush group would go: whole pages; 0 when the segment's header isn't written
        /// either.
        next_offset: u64,
    },
    /// Frames that were never durable, as far as this file can tell, are damaged: the log ends before them.
    Torn {
        /// Where the first of them starts in the file.
        offset: u64,
        /// Its sequence.
        sequence: Sequence,
        /// How many there were, as far as can be seen; at least 1.
        frames_cut: u64,
    },
    /// A frame that had been durable is damaged: repair it from a replica, never go on without it.
    Rot(RotReport),
}

/// A durable frame that can't be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RotReport {
    /// The segment.
    pub segment: SegmentId,
    /// Where the frame starts in the file.
    pub offset: u64,
    /// The frame.
    pub sequence: Sequence,
    /// The next good frame, when there is one: all before it, from `sequence` on, are lost or unchecked.
    pub next_good: Option<Sequence>,
    /// The last version before the damage.
    pub after: Version,
    /// The last damaged version, inclusive, when a neighbour or the frame itself tells.
    pub through: Option<Version>,
    /// The frame's epoch by itself, or by its next good neighbour, or by the frame before.
    pub epoch: Epoch,
    /// The streams with a block in the frame, as far as its table can be read; ascending.
    pub streams: Vec<StreamId>,
    /// What is wrong.
    pub what: FrameError,
}

impl fmt::Display for RotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, offset, sequence, .. } = self;
        write!(
            f,
            "frame {sequence} of segment {segment} at byte {offset} was durable and is damaged"
        )?;
        write!(f, ": {}; {}, versions above {}", self.what, self.epoch, self.after)?;
        match self.through {
            Some(through) => write!(f, " up to {through}")?,
            None => write!(f, " up to an unknown one")?,
        }
        if let Some(next) = self.next_good {
            write!(f, "; the next good frame is {next}")?;
        }
        if self.streams.is_empty() {
            return write!(f, "; streams unknown");
        }
        write!(f, "; streams")?;
        for stream in self.streams.iter().take(LISTED_STREAMS_MAX) {
            write!(f, " {stream}")?;
        }
        match self.streams.len().saturating_sub(LISTED_STREAMS_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Reads one segment; sans I/O.
#[derive(Clone, Debug)]
pub struct Scanner {
    start: ScanStart,
    window: Window,
    header: HeaderState,
    /// The next frame's sequence, and what it follows.
    sequence: Sequence,
    previous_hash: u32,
    epoch: Epoch,
    version: Version,
    state: State,
    /// Nothing more will be fed.
    finished: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// The next good frame starts here, or at the next page.
    Chain { at: u64 },
    /// The chain is broken: looking for proof that it once went on.
    Broken(Broken),
}

#[derive(Clone, Debug)]
struct Broken {
    /// Where the bad frame should start.
    at: u64,
    what: FrameError,
    /// The bad frame's header, when it is good.
    header: Option<FrameHeader>,
    /// Something of the bad frame is there.
    sign: bool,
    salvage: Salvage,
    /// Where to look for later frames next.
    probe: u64,
    /// Only padding may be damaged: the next frame may still start here.
    resume_at: Option<u64>,
    /// The first later frame whose header is good.
    next_good: Option<FrameHeader>,
    /// The highest sequence of a later frame.
    last_seen: Sequence,
    /// A later frame says that the bad one had been durable.
    proven: bool,
}

/// Reads the streams out of a table whose header, or part of it, is bad.
#[derive(Clone, Debug)]
struct Salvage {
    streams: Vec<StreamId>,
    /// The next entry's place; `None` when done.
    at: Option<u64>,
    /// Entries left, by the header; unknown without one.
    left: Option<u32>,
    misses: u32,
}

enum Attempt {
    Wait,
    Good(ScannedFrame),
    Bad(FrameError, Option<FrameHeader>),
}

impl Scanner {
    /// A scanner that wants the file from its first byte on.
    #[must_use]
    pub fn new(start: ScanStart) -> Self {
        assert!(start.sequence > Sequence::ZERO, "sequences count from 1");
        let _ = trailer_offset(start.segment_bytes);
        Self {
            start,
            window: Window::default(),
            header: HeaderState::Unread,
            sequence: start.sequence,
            previous_hash: start.previous_hash,
            epoch: start.epoch,
            version: start.previous_version,
            state: State::Chain { at: SEGMENT_HEADER_BYTES },
            finished: false,
        }
    }

    /// The next bytes of the file, in whole pages; yields the frames that they complete.
    pub fn feed(&mut self, data: Bytes) -> Vec<ScannedFrame> {
        assert!((data.len() as u64).is_multiple_of(PAGE_BYTES), "{} bytes fed", data.len());
        self.window.push(Piece { bytes: data.len() as u64, data: Some(data) });
        self.advance()
    }

    /// The next bytes of the file can't be read; whole pages.
    pub fn hole(&mut self, bytes: u64) -> Vec<ScannedFrame> {
        assert!(bytes.is_multiple_of(PAGE_BYTES), "a hole of {bytes} bytes");
        self.window.push(Piece { bytes, data: None });
        self.advance()
    }

    /// How many bytes were fed, holes included.
    #[must_use]
    pub const fn fed_bytes(&self) -> u64 {
        self.window.end
    }

    /// The segment's header, as found.
    #[must_use]
    pub const fn header(&self) -> &HeaderState {
        &self.header
    }

    /// The next frame's sequence and the hash that it must follow.
    #[must_use]
    pub const fn chain(&self) -> (Sequence, u32) {
        (self.sequence, self.previous_hash)
    }

    /// Whether the end is known, so that the rest of the file need not be fed: only after proven rot.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        match &self.state {
            State::Chain { .. } => false,
            State::Broken(broken) => {
                broken.proven && broken.salvage.at.is_none() && broken.resume_at.is_none()
            }
        }
    }

    /// Judges. What was not fed counts as missing.
    pub fn finish(mut self) -> ScanEnd {
        self.finished = true;
        let late = self.advance();
        assert!(late.is_empty(), "{} frames were complete before and not yielded", late.len());
        let State::Broken(broken) = self.state else { unreachable!("a file ends the chain") };
        if broken.proven || self.start.durable_at_least >= self.sequence {
            let next = broken.next_good.as_ref();
            let own = broken.header.as_ref();
            return ScanEnd::Rot(RotReport {
                segment: self.start.segment,
                offset: broken.at,
                sequence: self.sequence,
                next_good: next.map(|next| next.sequence),
                after: self.version,
                through: own.map(|own| own.version).or_else(|| {
                    next.map(|next| next.previous_version).filter(|last| *last > self.version)
                }),
                epoch: own.or(next).map_or(self.epoch, |frame| frame.epoch),
                streams: broken.salvage.streams,
                what: broken.what,
            });
        }
        let is_torn =
            broken.sign || broken.next_good.is_some() || !broken.salvage.streams.is_empty();
        if is_torn {
            let last = broken.last_seen.max(self.sequence);
            let frames_cut = last.since(self.sequence) + 1;
            return ScanEnd::Torn { offset: broken.at, sequence: self.sequence, frames_cut };
        }
        let is_unwritten =
            self.sequence == self.start.sequence && !matches!(self.header, HeaderState::Good(_));
        ScanEnd::Whole { next_offset: if is_unwritten { 0 } else { padded(broken.at) } }
    }

    fn advance(&mut self) -> Vec<ScannedFrame> {
        let mut frames = Vec::new();
        if matches!(self.header, HeaderState::Unread) {
            match self.window.peek(0, SEGMENT_HEADER_BYTES) {
                Peek::Wait if !self.finished => return frames,
                Peek::Wait => {
                    let short = Flaw::Short { have: 0, need: SEGMENT_HEADER_BYTES as usize };
                    self.header = HeaderState::Bad(short.into());
                }
                Peek::Unreadable => self.header = HeaderState::Unreadable,
                Peek::Data(page) => self.header = self.judge_header(&page),
            }
        }
        while self.step(&mut frames) {}
        self.window.forget_below(match &self.state {
            State::Chain { at } => *at,
            State::Broken(broken) => broken.salvage.at.unwrap_or(broken.probe).min(broken.probe),
        });
        frames
    }

    fn judge_header(&self, page: &[u8]) -> HeaderState {
        let start = &self.start;
        let judge = || {
            let header = SegmentHeader::decode(page)?;
            header.belongs(start.node, start.segment)?;
            let follows = (header.first_sequence, header.previous_hash);
            if follows != (start.sequence, start.previous_hash) {
                return Err(SegmentError::Chain {
                    found: header.first_sequence.minus_saturating(1),
                    previous_hash: header.previous_hash,
                });
            }
            if header.segment_bytes != start.segment_bytes {
                return Err(SegmentError::Contradiction { what: "the length of the file" });
            }
            Ok(header)
        };
        judge().map_or_else(HeaderState::Bad, HeaderState::Good)
    }

    /// One step; `false` when more bytes are needed.
    fn step(&mut self, frames: &mut Vec<ScannedFrame>) -> bool {
        match &self.state {
            State::Chain { at } => self.step_chain(*at, frames),
            State::Broken(_) => self.step_broken(frames),
        }
    }

    fn step_chain(&mut self, at: u64, frames: &mut Vec<ScannedFrame>) -> bool {
        if !at.is_multiple_of(PAGE_BYTES) {
            match self.window.peek(at, padded(at) - at) {
                Peek::Data(rest) if rest.iter().all(|byte| *byte == 0) => {
                    self.state = State::Chain { at: padded(at) };
                    return true;
                }
                Peek::Wait if !self.finished => return false,
                _ => {}
            }
        }
        match self.attempt(at) {
            Attempt::Wait => return false,
            Attempt::Good(frame) => self.accept(frame, frames),
            Attempt::Bad(what, header) => self.break_chain(at, what, header),
        }
        true
    }

    fn accept(&mut self, frame: ScannedFrame, frames: &mut Vec<ScannedFrame>) {
        assert_eq!(frame.header.sequence, self.sequence, "frames come without gaps");
        self.sequence = frame.header.sequence.plus(1);
        self.previous_hash = frame.hash;
        self.epoch = frame.header.epoch;
        self.version = frame.header.version;
        self.state = State::Chain { at: frame.end() };
        frames.push(frame);
    }

    /// Tries to read the next frame of the chain at `at`.
    fn attempt(&self, at: u64) -> Attempt {
        let limit = trailer_offset(self.start.segment_bytes);
        let head = match self.window.peek(at, FRAME_HEADER_BYTES as u64) {
            Peek::Data(head) => head,
            Peek::Unreadable => return Attempt::Bad(FrameError::Unreadable, None),
            Peek::Wait if self.finished || at + FRAME_HEADER_BYTES as u64 > limit => {
                let have = self.window.end.saturating_sub(at) as usize;
                return Attempt::Bad(Flaw::Short { have, need: FRAME_HEADER_BYTES }.into(), None);
            }
            Peek::Wait => return Attempt::Wait,
        };
        let header = match self.judge_frame_header(&head, at, limit) {
            Ok(header) => header,
            Err(what) => return Attempt::Bad(what, None),
        };
        let follows = (header.sequence, header.previous_hash);
        if follows != (self.sequence, self.previous_hash) {
            let what = FrameError::Chain { found: follows.0, previous_hash: follows.1 };
            let is_own = header.sequence == self.sequence;
            return Attempt::Bad(what, is_own.then_some(header));
        }
        if self.window.end < at + header.frame_bytes && !self.finished {
            return Attempt::Wait;
        }
        match self.read_frame(at, &header) {
            Ok(frame) => Attempt::Good(frame),
            Err(what) => Attempt::Bad(what, Some(header)),
        }
    }

    fn judge_frame_header(
        &self,
        head: &[u8],
        at: u64,
        limit: u64,
    ) -> Result<FrameHeader, FrameError> {
        let header = frame::parse_header(head)?;
        if header.segment != self.start.segment {
            return Err(FrameError::OtherSegment { found: header.segment });
        }
        match at.checked_add(header.frame_bytes) {
            Some(end) if end <= limit => Ok(header),
            _ => Err(FrameError::TooLong { frame_bytes: header.frame_bytes }),
        }
    }

    fn read_frame(&self, offset: u64, header: &FrameHeader) -> Result<ScannedFrame, FrameError> {
        let need = frame::head_bytes(header.block_count as usize);
        let head = match self.window.peek(offset, need as u64) {
            Peek::Data(head) => head,
            Peek::Unreadable => return Err(FrameError::Unreadable),
            Peek::Wait => {
                let have = self.window.end.saturating_sub(offset) as usize;
                return Err(Flaw::Short { have, need }.into());
            }
        };
        let (header, entries) = frame::parse_head(&head)?;
        let (mut at, mut bodies) = (offset + need as u64, Vec::with_capacity(entries.len()));
        for entry in &entries {
            let body = match self.window.peek(at, u64::from(entry.bytes)) {
                Peek::Data(body) => body,
                Peek::Unreadable => return Err(FrameError::Unreadable),
                Peek::Wait => self.window.rest(at),
            };
            frame::verify_body(entry, &body)?;
            at += u64::from(entry.bytes);
            bodies.push(body);
        }
        let hash = frame::header_hash(&head);
        Ok(ScannedFrame { offset, hash, header, entries, bodies })
    }

    fn break_chain(&mut self, at: u64, what: FrameError, header: Option<FrameHeader>) {
        let is_foreign = matches!(what, FrameError::OtherSegment { .. });
        let resembles = match self.window.peek(at, FRAME_HEADER_BYTES as u64) {
            _ if is_foreign => false,
            Peek::Data(head) => frame::resembles(&head, self.start.segment, self.sequence),
            Peek::Unreadable => true,
            Peek::Wait => false,
        };
        let is_aligned = at.is_multiple_of(PAGE_BYTES);
        let salvage = Salvage {
            streams: vec![],
            at: (!is_foreign).then_some(at + FRAME_HEADER_BYTES as u64),
            left: header.as_ref().map(|header| header.block_count),
            misses: 0,
        };
        self.state = State::Broken(Broken {
            at,
            what,
            sign: header.is_some() || resembles,
            salvage,
            probe: header.as_ref().map_or(at, |header| at + header.frame_bytes),
            resume_at: (header.is_none() && !is_aligned).then_some(padded(at)),
            header,
            next_good: None,
            last_seen: self.sequence,
            proven: false,
        });
    }

    fn step_broken(&mut self, frames: &mut Vec<ScannedFrame>) -> bool {
        let limit = trailer_offset(self.start.segment_bytes);
        let State::Broken(broken) = &mut self.state else { unreachable!("asked for by step") };
        broken.salvage.advance(&self.window, self.sequence, limit, self.finished);
        let probe = broken.probe;
        if probe + FRAME_HEADER_BYTES as u64 > limit {
            return false;
        }
        if broken.resume_at == Some(probe) {
            match self.attempt(probe) {
                Attempt::Wait => return false,
                Attempt::Good(frame) => {
                    self.accept(frame, frames);
                    return true;
                }
                Attempt::Bad(..) => {}
            }
        }
        let later = match self.window.peek(probe, FRAME_HEADER_BYTES as u64) {
            Peek::Wait => return false,
            Peek::Unreadable => None,
            Peek::Data(head) => self
                .judge_frame_header(&head, probe, limit)
                .ok()
                .filter(|header| header.sequence > self.sequence),
        };
        let sequence = self.sequence;
        let State::Broken(broken) = &mut self.state else { unreachable!("matched above") };
        if broken.resume_at.is_some_and(|resume_at| resume_at <= probe) {
            broken.resume_at = None;
        }
        match later {
            None => broken.probe = padded(probe + 1),
            Some(header) => {
                broken.probe = probe + header.frame_bytes;
                broken.proven |= header.durable_sequence >= sequence;
                broken.last_seen = broken.last_seen.max(header.sequence);
                broken.next_good.get_or_insert(header);
            }
        }
        true
    }
}

impl Salvage {
    fn advance(&mut self, window: &Window, sequence: Sequence, limit: u64, finished: bool) {
        while let Some(at) = self.at {
            let end = at + BLOCK_ENTRY_BYTES as u64;
            if self.left == Some(0) || self.misses >= ENTRY_MISSES_MAX || end > limit {
                self.at = None;
                return;
            }
            let entry = match window.peek(at, BLOCK_ENTRY_BYTES as u64) {
                Peek::Wait if finished => {
                    self.at = None;
                    return;
                }
                Peek::Wait => return,
                Peek::Unreadable => None,
                Peek::Data(bytes) => frame::parse_entry(&bytes, sequence),
            };
            match entry {
                Some(entry) => {
                    self.misses = 0;
                    if self.streams.last().is_none_or(|last| *last < entry.stream) {
                        self.streams.push(entry.stream);
                    }
                }
                None => self.misses += 1,
            }
            self.left = self.left.map(|left| left - 1);
            self.at = Some(end);
        }
    }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
