//! Scrubbing: the log is read through from time to time, so that damage is found while others can mend it.
//!
//! ```text
//! open --a while--> read some blocks, in the order of the log --damage--> mend
//!            ^            |
//!            |            `-- as long as that takes at `scrub_bytes_per_second` --> the next ones
//!            `--------------- `scrub_rest_ms` <-- the end of the log
//! ```
//!
//! Only what is live and durable is read: bodies, by the index. Heads of frames and footers are not looked
//! at; `millrace inspect verify` does that. One read of at most `read_bytes` is under way at a time. Progress
//! is not persisted: after a restart the pass begins anew.

use core::time::Duration;

use bytes::Bytes;
use common::{Cx, Mark, Note, Plant, SegmentId, Time};

use super::mend::Finder;
use super::{LogServer, SCRUB};
use crate::log::{ReadFailure, ReadId};

/// After a start, clients come first.
const SETTLING: Duration = Duration::from_secs(60);

/// A pass over the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScrubPass {
    /// When it began.
    pub began: Time,
    /// When it ended; `None`: it has not.
    pub ended: Option<Time>,
    /// Blocks that it has read.
    pub blocks: u64,
    /// What it has read, bytes of bodies.
    pub bytes: u64,
    /// Blocks that were damaged.
    pub damaged: u64,
}

/// Where reading through is.
#[derive(Clone, Debug, Default)]
pub(super) struct Scrub {
    /// The place that the next blocks are looked for from.
    at: (SegmentId, u64),
    /// The read under way: how many blocks, and bytes from the first to the last.
    reading: Option<(ReadId, u64, u64)>,
    /// The pass under way.
    pass: Option<ScrubPass>,
    /// The last one that ended.
    last: Option<ScrubPass>,
}

/// How reading the log through stands, for status pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubStatus {
    /// The pass under way.
    pub pass: Option<ScrubPass>,
    /// The segment that it has come to.
    pub segment: Option<SegmentId>,
    /// The last pass that came to the end.
    pub last: Option<ScrubPass>,
}

impl Scrub {
    pub(super) fn is_reading(&self, id: ReadId) -> bool {
        self.reading.is_some_and(|(reading, _, _)| reading == id)
    }

    pub(super) fn status(&self) -> ScrubStatus {
        let segment = self.pass.map(|_| self.at.0);
        ScrubStatus { pass: self.pass, segment, last: self.last }
    }

    pub(super) fn check(&self) {
        assert!(self.reading.is_none() || self.pass.is_some(), "a read is part of a pass");
        for pass in self.pass.iter().chain(&self.last) {
            assert!(pass.damaged <= pass.blocks, "{} of {} are bad", pass.damaged, pass.blocks);
        }
    }
}

impl LogServer {
    /// The log is open.
    pub(super) fn begin_scrub(&mut self, cx: &mut Cx<'_>) {
        assert!(self.scrub.pass.is_none(), "the first pass comes later");
        if cx.knobs.scrub_bytes_per_second > 0 {
            cx.arm_after(SCRUB, SETTLING.min(Duration::from_millis(cx.knobs.scrub_rest_ms)));
        }
    }

    /// Reads the next blocks, or ends the pass.
    pub(super) fn handle_scrub_timer(&mut self, cx: &mut Cx<'_>) {
        assert!(self.scrub.reading.is_none(), "one read at a time");
        if !self.log.is_open() || self.log.is_stopping() {
            return;
        }
        let fresh = ScrubPass { began: cx.now, ended: None, blocks: 0, bytes: 0, damaged: 0 };
        let pass = self.scrub.pass.get_or_insert(fresh);
        let blocks = self.log.blocks_from(self.scrub.at, cx.knobs.read_bytes);
        let (Some((_, first)), Some((_, last))) = (blocks.first(), blocks.last()) else {
            let ended = ScrubPass { ended: Some(cx.now), ..*pass };
            (self.scrub.pass, self.scrub.last, self.scrub.at) = (None, Some(ended), <_>::default());
            cx.mark(Mark::ScrubEnded);
            cx.note(Note::Scrubbed { blocks: ended.blocks, damaged: ended.damaged });
            return cx.arm_after(SCRUB, Duration::from_millis(cx.knobs.scrub_rest_ms));
        };
        assert!(
            (first.segment, first.at) >= self.scrub.at && first.segment == last.segment,
            "a pass goes on from {:?}: {first:?} to {last:?}",
            self.scrub.at
        );
        let extent = last.at + u64::from(last.bytes) - first.at;
        let count = blocks.len() as u64;
        pass.bytes += blocks.iter().map(|(_, block)| u64::from(block.bytes)).sum::<u64>();
        pass.blocks += count;
        self.scrub.at = (last.segment, last.at + 1);
        let id = self.log.read(cx, blocks);
        self.scrub.reading = Some((id, count, extent));
    }

    /// The disk has answered a read of a pass.
    pub(super) fn handle_scrub_read(
        &mut self,
        cx: &mut Cx<'_>,
        result: Result<Vec<Bytes>, Vec<ReadFailure>>,
    ) {
        let (_, count, extent) = self.scrub.reading.take().expect("a pass has read");
        if let Err(failures) = result
            && !cx.planted(Plant::ScrubBlind)
        {
            let damaged = failures.len() as u64;
            assert!(damaged <= count, "{damaged} of {count} blocks are damaged");
            let pass = self.scrub.pass.as_mut().expect("a read is part of a pass");
            pass.damaged += damaged;
            if self.find_damage(cx, &failures, Finder::Scrub) > 0 {
                cx.mark(Mark::ScrubFound);
            }
        }
        // It can't be off: no timer would have been armed.
        let pace = cx.knobs.scrub_bytes_per_second.max(1);
        let pause_us = extent.saturating_mul(1_000_000) / pace;
        cx.arm_after(SCRUB, Duration::from_micros(pause_us));
    }
}
