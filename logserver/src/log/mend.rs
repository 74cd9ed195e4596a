//! Writing a damaged block again, in the very place where it lies.
//!
//! ```text
//! look --> read the block's pages --> sound: the disk has it after all
//!                                `--> damaged ... mend(body) --> read them again: the same around it?
//!                                                                    | one durable write of whole pages
//!                                                                    v
//!                                                               read them again --> mended
//!
//! pages    | frame head, other blocks | the block ..  | ...  .. the block | other blocks, padding |
//!            written as they were read, twice the same                      likewise
//! ```
//!
//! # Why a crash harms nothing
//! A page holds frames of one flush group only, and that group is durable: nobody else writes these pages,
//! for a segment has one mend at a time. The block is damaged, so there is nothing in it to lose. What lies
//! around it is overwritten with what it holds, and a device writes a sector whole or not at all (as
//! `open::doubt` relies on, too). An interrupted mend leaves the block damaged, and somebody finds it again.
//!
//! # What can't be read
//! A page that is an error may hold more than the block: frame heads, and other blocks. They are lost
//! already and become zeros, so that the page can be written at all; other blocks are mended for themselves.
//! Heads are not brought back. A *sealed* segment needs none, since its footer says what they said. The
//! active segment is closed first ([`MendOutcome::Unsealed`]).

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use common::disk::{DiskError, DiskOp, Lane, PAGE_BYTES, padded};
use common::{Cx, Mark, Payload, Plant, SegmentId, StreamId};

use super::index::BlockRef;
use super::segments::Seal;
use super::{Log, LogEvent, Phase, Purpose, segment_file};

/// A block that is being looked at or written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct MendId(u64);

/// What came of a look, or of a mend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum MendOutcome {
    /// Looked at: it reads well. The mend is over.
    Sound,
    /// Looked at: it is damaged. [`Log::mend`] or [`Log::drop_mend`] is expected.
    Damaged,
    /// Something around it can't be read, and the segment has no footer yet: it gets one soon. The mend is
    /// over for now.
    Unsealed,
    /// Written, and read back. The mend is over.
    Mended,
    /// What lies around it read differently each time, or it still does not read well. The mend is over for
    /// now.
    Failed,
}

/// A request to the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MendOp {
    Read { offset: u64, bytes: u64 },
    Write,
}

#[derive(Clone, Debug, Default)]
pub(super) struct MendsOnDisk {
    next: u64,
    running: BTreeMap<MendId, Running>,
}

/// What a pass over the block's pages is for.
#[derive(Clone, Debug)]
enum Pass {
    Look,
    /// Waits for a body.
    Idle,
    Again(Bytes),
    Writing,
    Verify,
}

#[derive(Clone, Debug)]
struct Running {
    stream: StreamId,
    block: BlockRef,
    pass: Pass,
    /// The block's pages as far as they were read in this pass; zeros where that was not possible.
    content: BytesMut,
    /// Reads of this pass in flight.
    in_flight: u64,
    /// Where the next read of this pass begins.
    next: u64,
    /// Whether an edge of it, with something else in it, can't be read.
    is_edge_lost: bool,
    /// What lies before and behind the block in its pages, as the first look found it.
    around: Option<(Bytes, Bytes)>,
}

impl MendsOnDisk {
    pub(super) fn check(&self) {
        for (id, mend) in &self.running {
            let is_idle = matches!(mend.pass, Pass::Idle);
            assert!(is_idle != (mend.in_flight > 0), "{id:?} has {} requests", mend.in_flight);
            assert!(mend.next <= mend.end(), "{id:?} reads {} of {}", mend.next, mend.end());
        }
    }

    pub(super) fn count(&self) -> usize {
        self.running.len()
    }
}

impl Running {
    const fn start(&self) -> u64 {
        self.block.at / PAGE_BYTES * PAGE_BYTES
    }

    const fn block_end(&self) -> u64 {
        self.block.at + self.block.bytes as u64
    }

    const fn end(&self) -> u64 {
        padded(self.block_end())
    }

    /// Whether something else than the block lies in the page at `offset`.
    const fn is_shared(&self, offset: u64) -> bool {
        offset < self.block.at || offset + PAGE_BYTES > self.block_end()
    }

    const fn body_range(&self) -> core::ops::Range<usize> {
        let from = (self.block.at - self.start()) as usize;
        from..from + self.block.bytes as usize
    }

    fn is_sound(&self) -> bool {
        crc32c::crc32c(&self.content[self.body_range()]) == self.block.checksum
    }

    fn around(&self) -> (Bytes, Bytes) {
        let range = self.body_range();
        let (before, behind) = (&self.content[..range.start], &self.content[range.end..]);
        (Bytes::copy_from_slice(before), Bytes::copy_from_slice(behind))
    }
}

impl Log {
    /// Looks at a block that could not be read. The answers are [`LogEvent::Mend`]; the segment stays until
    /// the mend is over.
    pub(crate) fn look(&mut self, cx: &mut Cx<'_>, stream: StreamId, block: BlockRef) -> MendId {
        assert!(block.version <= self.durable, "I7: {} is being written", block.version);
        let segment = self.segments.get_mut(&block.segment).expect("a block lies in a segment");
        segment.readers += 1;
        let id = MendId(self.mends.next);
        self.mends.next += 1;
        let running = Running {
            stream,
            block,
            pass: Pass::Look,
            content: BytesMut::new(),
            in_flight: 0,
            next: 0,
            is_edge_lost: false,
            around: None,
        };
        self.mends.running.insert(id, running);
        self.begin_pass(cx, id, Pass::Look);
        id
    }

    /// Writes the block, whose body this is.
    pub(crate) fn mend(&mut self, cx: &mut Cx<'_>, id: MendId, body: Bytes) {
        let mend = &self.mends.running[&id];
        assert!(matches!(mend.pass, Pass::Idle), "{id:?} is mended once");
        let is_compared = crc32c::crc32c(&body) == mend.block.checksum;
        assert!(
            body.len() == mend.block.bytes as usize
                && (is_compared || cx.planted(Plant::MendUncompared)),
            "{} at {} is mended with another block",
            mend.stream,
            mend.block.version
        );
        self.begin_pass(cx, id, Pass::Again(body));
    }

    /// Nobody has its body: the mend is over for now.
    pub(crate) fn drop_mend(&mut self, id: MendId) {
        let mend = self.mends.running.remove(&id).expect("a mend is dropped once");
        assert_eq!(mend.in_flight, 0, "{id:?} is under way");
        self.let_go(mend.block.segment);
    }

    /// Mends that hold a segment.
    pub(crate) fn mend_count(&self) -> usize {
        self.mends.count()
    }

    fn begin_pass(&mut self, cx: &mut Cx<'_>, id: MendId, pass: Pass) {
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        mend.pass = pass;
        mend.next = mend.start();
        mend.content = BytesMut::zeroed((mend.end() - mend.start()) as usize);
        mend.is_edge_lost = false;
        self.read_on(cx, id);
    }

    /// One read at a time; a run that can't be read, page by page.
    fn read_on(&mut self, cx: &mut Cx<'_>, id: MendId) {
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        assert!(mend.in_flight == 0 && mend.next < mend.end(), "{id:?} reads at {}", mend.next);
        let (offset, bytes) = (mend.next, cx.knobs.read_bytes.min(mend.end() - mend.next));
        mend.next += bytes;
        self.read_part(cx, id, offset, bytes);
    }

    fn read_part(&mut self, cx: &mut Cx<'_>, id: MendId, offset: u64, bytes: u64) {
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        mend.in_flight += 1;
        let op = DiskOp::Read { file: segment_file(mend.block.segment), offset, bytes };
        let purpose = Purpose::Mend { id, op: MendOp::Read { offset, bytes } };
        self.request(cx, Lane::Background, purpose, op);
    }

    pub(super) fn handle_look(
        &mut self,
        cx: &mut Cx<'_>,
        id: MendId,
        offset: u64,
        bytes: u64,
        result: Result<Bytes, DiskError>,
    ) {
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        mend.in_flight -= 1;
        match result {
            Ok(data) => {
                let from = (offset - mend.start()) as usize;
                let count = data.len().min(bytes as usize);
                mend.content[from..from + count].copy_from_slice(&data[..count]);
            }
            Err(_) if bytes > PAGE_BYTES => {
                for at in (offset..offset + bytes).step_by(PAGE_BYTES as usize) {
                    self.read_part(cx, id, at, PAGE_BYTES);
                }
                return;
            }
            Err(_) => mend.is_edge_lost |= mend.is_shared(offset),
        }
        if mend.in_flight > 0 {
            return;
        }
        if mend.next < mend.end() {
            return self.read_on(cx, id);
        }
        self.end_pass(cx, id);
    }

    fn end_pass(&mut self, cx: &mut Cx<'_>, id: MendId) {
        let is_open = matches!(self.phase, Phase::Open);
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        let is_sound = mend.is_sound();
        match core::mem::replace(&mut mend.pass, Pass::Idle) {
            Pass::Look | Pass::Again(_) if !is_open => self.end_mend(id, MendOutcome::Failed),
            Pass::Look | Pass::Again(_) if is_sound => self.end_mend(id, MendOutcome::Sound),
            Pass::Look if mend.is_edge_lost && !self.is_sealed(id) => {
                self.close_early(cx, id);
                self.end_mend(id, MendOutcome::Unsealed);
            }
            Pass::Look => {
                let mend = self.mends.running.get_mut(&id).expect("the mend is running");
                mend.around = Some(mend.around());
                mend.content = BytesMut::new();
                self.events.push(LogEvent::Mend { id, outcome: MendOutcome::Damaged });
            }
            Pass::Again(body) => self.rewrite(cx, id, &body),
            Pass::Verify if is_sound || cx.planted(Plant::MendUncompared) => {
                self.end_mend(id, MendOutcome::Mended);
            }
            Pass::Verify => self.end_mend(id, MendOutcome::Failed),
            pass @ (Pass::Idle | Pass::Writing) => panic!("{id:?} reads nothing in {pass:?}"),
        }
    }

    fn rewrite(&mut self, cx: &mut Cx<'_>, id: MendId, body: &Bytes) {
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        let around = mend.around();
        if mend.around.as_ref() != Some(&around) {
            return self.end_mend(id, MendOutcome::Failed);
        }
        let mut content = core::mem::take(&mut mend.content);
        assert_eq!(content.len() as u64, mend.end() - mend.start(), "whole pages are written");
        if cx.planted(Plant::MendAlone) {
            content.fill(0);
        }
        content[mend.body_range()].copy_from_slice(body);
        mend.pass = Pass::Writing;
        mend.in_flight += 1;
        let op = DiskOp::Write {
            file: segment_file(mend.block.segment),
            offset: mend.start(),
            data: Payload::from(content.freeze()),
            durable: true,
        };
        self.request(cx, Lane::Background, Purpose::Mend { id, op: MendOp::Write }, op);
    }

    pub(super) fn handle_rewritten(&mut self, cx: &mut Cx<'_>, id: MendId) {
        let mend = self.mends.running.get_mut(&id).expect("the mend is running");
        assert!(matches!(mend.pass, Pass::Writing), "{id:?} was not written");
        mend.in_flight -= 1;
        self.begin_pass(cx, id, Pass::Verify);
    }

    fn end_mend(&mut self, id: MendId, outcome: MendOutcome) {
        self.drop_mend(id);
        self.events.push(LogEvent::Mend { id, outcome });
    }

    fn let_go(&mut self, segment: SegmentId) {
        let holder = self.segments.get_mut(&segment).expect("a segment with readers stays");
        assert!(holder.readers > 0, "{segment} has no reader");
        holder.readers -= 1;
    }

    fn is_sealed(&self, id: MendId) -> bool {
        self.segments[&self.mends.running[&id].block.segment].seal == Seal::Sealed
    }

    /// The log goes on in the next segment with its next flush.
    fn close_early(&mut self, cx: &mut Cx<'_>, id: MendId) {
        let segment = self.mends.running[&id].block.segment;
        if self.active == Some(segment) {
            let active = self.segments.get_mut(&segment).expect("the active segment is one");
            if !core::mem::replace(&mut active.is_closing, true) {
                cx.mark(Mark::MendRolled);
            }
        }
    }
}
