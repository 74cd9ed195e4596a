//! The simulated disk: the contract of [`common::disk`], kept to the letter and no further.
//!
//! ```text
//! log lane         | w | w | create |  one after the other     reads: beside them, in any order
//! background lane  | create | rename | one after the other
//! ```
//!
//! - A write enters the volatile cache when it completes; one that a crash interrupts enters it sector by
//!   sector or not at all. What still waits is gone.
//! - `durable` makes the file's pages durable that were written before it began, and its own.
//! - `Create`, `Rename` and `Remove` are durable when they complete; one that a crash interrupts has happened
//!   or not, and an interrupted `Create` may leave a shorter file.
//! - A kill keeps the cache. A power cut keeps what is durable: see `platter`.
//! - A failed barrier leaves its pages readable and lost.
//! - What was durable may be harmed: a page reads with a flipped bit, as an error, or as what a misdirected
//!   write left there. `crate::atlas` says where.
//! - What breaks the contract of the seam is refused, and remembered: the world stops the run.

mod platter;

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use common::Prng;
use common::disk::{
    DiskCompletion, DiskError, DiskOp, DiskOutput, DiskRequest, File, Lane, PAGE_BYTES, padded,
};

pub use self::platter::Harm;

use self::platter::{Platter, ReadError, WriteKind};
use crate::clock::Moment;
use crate::random::delay_ns;

/// How fast and how bad a disk is.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DiskProfile {
    /// A request's base time, ns.
    pub request_ns: u64,
    /// A barrier's base time, ns.
    pub barrier_ns: u64,
    /// Each page of data adds this, ns.
    pub page_ns: u64,
    /// One request in a thousand takes up to this many times as long.
    pub tail_factor: u64,
    /// Barriers that fail, in a million.
    pub barrier_errors_ppm: u64,
    /// Bytes that files may take.
    pub quota_bytes: u64,
}

impl Default for DiskProfile {
    fn default() -> Self {
        Self {
            request_ns: 20_000,
            barrier_ns: 100_000,
            page_ns: 1_000,
            tail_factor: 50,
            barrier_errors_ppm: 0,
            quota_bytes: 1 << 40,
        }
    }
}

/// How a process ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The process is gone; what it gave to the disk's cache stays.
    Kill,
    /// The machine is gone; what no barrier has covered is old, new or garbage.
    PowerCut,
}

/// A running request's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

#[derive(Clone, Debug)]
struct Running {
    request: DiskRequest,
    queue: Option<usize>,
    /// The write that a barrier covers the earlier ones up to.
    stamp: u64,
}

/// One node's disk. It outlives the node's processes.
#[derive(Clone, Debug)]
pub struct Disk {
    platter: Platter,
    profile: DiskProfile,
    queues: [VecDeque<DiskRequest>; 2],
    busy: [bool; 2],
    running: BTreeMap<Ticket, Running>,
    next_ticket: u64,
    stalled_until: Moment,
    /// Requests take so many times as long until then.
    slowed: (u64, Moment),
    fail_next_barrier: bool,
    /// The next write of a footer goes to this page, if that still holds what it did.
    misdirected: Option<(File, u64, Option<Bytes>)>,
    misdirected_count: u64,
    /// How a request broke the contract of the seam.
    breach: Option<String>,
    prng: Prng,
}

impl Disk {
    /// An empty disk.
    #[must_use]
    pub fn new(profile: DiskProfile, prng: Prng) -> Self {
        Self {
            platter: Platter::default(),
            profile,
            queues: [VecDeque::new(), VecDeque::new()],
            busy: [false; 2],
            running: BTreeMap::new(),
            next_ticket: 0,
            stalled_until: Moment::ZERO,
            slowed: (1, Moment::ZERO),
            fail_next_barrier: false,
            misdirected: None,
            misdirected_count: 0,
            breach: None,
            prng,
        }
    }

    /// Takes a request; requests that begin with it and when they complete are appended to `started`.
    pub fn submit(
        &mut self,
        now: Moment,
        request: DiskRequest,
        started: &mut Vec<(Moment, Ticket)>,
    ) {
        if matches!(request.op, DiskOp::Read { .. } | DiskOp::List) {
            self.begin(now, request, None, started);
            return;
        }
        let queue = match request.lane {
            Lane::Log => 0,
            Lane::Background => 1,
        };
        self.queues[queue].push_back(request);
        self.begin_queued(now, queue, started);
    }

    /// A request's time has come: carries it out. `None` when a crash has taken it.
    pub fn complete(
        &mut self,
        now: Moment,
        ticket: Ticket,
        started: &mut Vec<(Moment, Ticket)>,
    ) -> Option<DiskCompletion> {
        let Running { request, queue, stamp } = self.running.remove(&ticket)?;
        let id = request.id;
        let result = self.carry_out(request, stamp);
        if let Some(queue) = queue {
            self.busy[queue] = false;
            self.begin_queued(now, queue, started);
        }
        Some(DiskCompletion { id, result })
    }

    /// Ends the process that used the disk.
    pub fn crash(&mut self, crash: Crash) {
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.busy = [false; 2];
        for (_, running) in core::mem::take(&mut self.running) {
            let kind = self.kind(&running.request);
            self.interrupt(running.request.op, kind);
        }
        if crash == Crash::PowerCut {
            self.platter.power_cut(&mut self.prng);
        }
    }

    /// Draws from another stream from now on.
    pub(crate) fn reseed(&mut self, prng: Prng) {
        self.prng = prng;
    }

    /// Gives out everything that decides what the disk will do and answer.
    pub(crate) fn fingerprint(&self, take: &mut impl FnMut(u64)) {
        self.platter.fingerprint(take);
        let queued = self.queues.iter().flatten().map(|request| (request, u64::MAX));
        let running = self.running.iter();
        let running = running.map(|(ticket, running)| (&running.request, running.stamp ^ ticket.0));
        for (request, word) in queued.chain(running) {
            take(word);
            take(request.id.0);
            if let DiskOp::Write { data, .. } = &request.op {
                data.pieces().iter().for_each(|piece| platter::words(piece, take));
            }
        }
        take(self.next_ticket);
        take(u64::from(self.fail_next_barrier));
    }

    /// Whether these bytes are sure to read back as now after a power cut at this moment (I7).
    #[must_use]
    pub fn would_survive(&self, file: File, offset: u64, bytes: u64) -> bool {
        self.platter.would_survive(file, offset, bytes)
    }

    /// What a file holds now, past all queues: for oracles.
    #[must_use]
    pub fn peek(&self, file: File, offset: u64, bytes: u64) -> Option<Bytes> {
        self.platter.peek(file, offset, bytes)
    }

    /// Whether there is such a file.
    #[must_use]
    pub fn contains(&self, file: File) -> bool {
        self.platter.contains(file)
    }

    /// A file's length in bytes.
    #[must_use]
    pub fn length(&self, file: File) -> u64 {
        self.platter.length(file)
    }

    /// A page that was durable reads otherwise from now on. `false` when there is no such page.
    pub fn harm(&mut self, file: File, page: u64, harm: Harm) -> bool {
        self.platter.harm(file, page as usize, harm)
    }

    /// The next footer is written over this page instead.
    pub fn misdirect(&mut self, file: File, page: u64) {
        let now = self.platter.peek(file, page * PAGE_BYTES, PAGE_BYTES);
        self.misdirected = Some((file, page, now));
    }

    /// Footers that went astray.
    #[must_use]
    pub const fn misdirected_count(&self) -> u64 {
        self.misdirected_count
    }

    /// Whether anything reads otherwise than it should.
    #[must_use]
    pub fn is_harmed(&self) -> bool {
        self.platter.harmed().next().is_some()
    }

    /// The pages that read otherwise than they should.
    pub fn harmed(&self) -> impl Iterator<Item = (File, u64)> {
        self.platter.harmed()
    }

    /// Whether a page was written while nobody could know all of what it held.
    #[must_use]
    pub fn is_scarred(&self, file: File, page: u64) -> bool {
        self.platter.is_scarred(file, page)
    }

    /// What a read of whole pages would bring now, past all queues; `None` for an error.
    #[must_use]
    pub fn seen(&self, file: File, offset: u64, bytes: u64) -> Option<Bytes> {
        self.platter.read(file, offset, bytes).ok()
    }

    /// The page that the next footer goes to, if it is to go astray.
    #[must_use]
    pub fn misdirection(&self) -> Option<(File, u64)> {
        self.misdirected.as_ref().map(|(file, page, _)| (*file, *page))
    }

    /// An operator puts back what was harmed.
    pub fn repair(&mut self) {
        self.platter.repair();
    }

    /// How a request broke the contract of the seam, if one has.
    pub const fn take_breach(&mut self) -> Option<String> {
        self.breach.take()
    }

    /// Every request takes `factor` times as long until a moment.
    pub const fn slow(&mut self, factor: u64, until: Moment) {
        self.slowed = (factor, until);
    }

    /// No request completes before `until`.
    pub fn stall(&mut self, until: Moment) {
        self.stalled_until = self.stalled_until.max(until);
    }

    /// The next barrier fails.
    pub const fn fail_next_barrier(&mut self) {
        self.fail_next_barrier = true;
    }

    /// Bytes that files may take from now on; those that are there stay.
    pub const fn limit(&mut self, quota_bytes: u64) {
        self.profile.quota_bytes = quota_bytes;
    }

    /// Bytes that files take now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.platter.used_bytes()
    }

    /// No fault comes by itself any more.
    pub fn calm(&mut self) {
        self.profile.barrier_errors_ppm = 0;
        self.profile.tail_factor = 1;
        self.fail_next_barrier = false;
        self.misdirected = None;
        self.slowed = (1, Moment::ZERO);
    }

    fn free_bytes(&self) -> u64 {
        self.profile.quota_bytes.saturating_sub(self.platter.used_bytes())
    }

    fn begin_queued(&mut self, now: Moment, queue: usize, started: &mut Vec<(Moment, Ticket)>) {
        if !self.busy[queue]
            && let Some(request) = self.queues[queue].pop_front()
        {
            self.busy[queue] = true;
            self.begin(now, request, Some(queue), started);
        }
    }

    fn begin(
        &mut self,
        now: Moment,
        request: DiskRequest,
        queue: Option<usize>,
        started: &mut Vec<(Moment, Ticket)>,
    ) {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let takes_ns = self.takes_ns(&request.op);
        let takes_ns = if now < self.slowed.1 { takes_ns * self.slowed.0 } else { takes_ns };
        let at = now.max(self.stalled_until).plus_ns(takes_ns);
        self.running.insert(ticket, Running { request, queue, stamp: self.platter.stamp() });
        started.push((at, ticket));
    }

    fn takes_ns(&mut self, op: &DiskOp) -> u64 {
        let profile = &self.profile;
        let (pages, barriers) = match op {
            DiskOp::List => (0, 0),
            DiskOp::Rename { .. } | DiskOp::Remove { .. } => (0, 1),
            DiskOp::Create { bytes, .. } => (bytes / PAGE_BYTES, 2),
            DiskOp::Read { bytes, .. } => (bytes / PAGE_BYTES, 0),
            DiskOp::Write { data, durable, .. } => {
                ((data.len() as u64).div_ceil(PAGE_BYTES), u64::from(*durable))
            }
        };
        let base = profile.request_ns + barriers * profile.barrier_ns + pages * profile.page_ns;
        delay_ns(&mut self.prng, base, profile.tail_factor)
    }

    fn carry_out(&mut self, request: DiskRequest, stamp: u64) -> Result<DiskOutput, DiskError> {
        if let Some(what) = self.broken_contract(&request) {
            self.breach = Some(format!("{what} in {}", crate::trace::brief(&request)));
            return Err(DiskError::Io { detail: what });
        }
        let (is_footer, kind) = (self.is_footer(&request), self.kind(&request));
        match request.op {
            DiskOp::List => Ok(DiskOutput::Listing {
                files: self.platter.list(),
                free_bytes: self.free_bytes(),
            }),
            DiskOp::Create { file, bytes } => {
                if bytes > self.free_bytes() + self.platter.length(file) {
                    return Err(DiskError::Full);
                }
                self.platter.create(file, bytes);
                Ok(DiskOutput::Done)
            }
            DiskOp::Rename { from, to } => {
                let found = self.platter.rename(from, to);
                found.then_some(DiskOutput::Done).ok_or(DiskError::NotFound(from))
            }
            DiskOp::Remove { file } => {
                let found = self.platter.remove(file);
                found.then_some(DiskOutput::Done).ok_or(DiskError::NotFound(file))
            }
            DiskOp::Read { file, offset, bytes } => match self.platter.read(file, offset, bytes) {
                Ok(data) => Ok(DiskOutput::Data(data)),
                Err(ReadError::NoFile) => Err(DiskError::NotFound(file)),
                Err(ReadError::Page(page)) => {
                    let detail = format!("read: simulated EIO at page {page} of {file:?}");
                    Err(DiskError::Io { detail })
                }
            },
            DiskOp::Write { file, .. } if !self.platter.contains(file) => {
                Err(DiskError::NotFound(file))
            }
            DiskOp::Write { file, offset, data, durable } => {
                let data = data.contiguous();
                let before =
                    is_footer.then(|| self.platter.peek(file, offset, padded(data.len() as u64)));
                self.platter.write(file, offset, &data, kind, || true);
                if let Some(before) = before.flatten() {
                    self.lead_astray(file, offset, &data, &before);
                }
                if durable { self.barrier(file, stamp) } else { Ok(DiskOutput::Done) }
            }
        }
    }

    /// A footer that goes astray: its own pages read as before, and another one as the footer.
    fn lead_astray(&mut self, file: File, offset: u64, data: &Bytes, before: &Bytes) {
        let Some((victim, page, content)) = self.misdirected.take() else { return };
        let now = self.platter.peek(victim, page * PAGE_BYTES, PAGE_BYTES);
        if now != content || victim == file {
            return;
        }
        let first = offset / PAGE_BYTES;
        for (place, old) in (first..).zip(before.chunks(PAGE_BYTES as usize)) {
            self.platter.harm(file, place as usize, Harm::Replaced(Some(before.slice_ref(old))));
        }
        let page_bytes = platter::page_of(data, 0);
        self.misdirected_count += 1;
        self.platter.harm(victim, page as usize, Harm::Replaced(Some(page_bytes)));
    }

    /// Beside the log lane a segment is written its footer, and otherwise what is there already.
    fn kind(&self, request: &DiskRequest) -> WriteKind {
        let is_again = matches!(request.op, DiskOp::Write { file: File::Segment(_), .. })
            && matches!(request.lane, Lane::Background)
            && !self.is_footer(request);
        if is_again { WriteKind::Again } else { WriteKind::New }
    }

    /// Whether a write is of what stands behind the frames of a segment: `MRFT` begins it and it has no
    /// barrier of its own, or `MRTR` begins it and it is the last page. A page where one went astray begins
    /// like that, too.
    fn is_footer(&self, request: &DiskRequest) -> bool {
        let DiskOp::Write { file, offset, data, durable } = &request.op else { return false };
        let start = data.pieces().first().map_or(&[][..], |piece| &piece[..piece.len().min(4)]);
        let is_last = offset + PAGE_BYTES == self.platter.length(*file);
        matches!((file, request.lane), (File::Segment(_), Lane::Background))
            && ((start == b"MRFT" && !durable) || (start == b"MRTR" && is_last))
    }

    fn barrier(&mut self, file: File, stamp: u64) -> Result<DiskOutput, DiskError> {
        let drawn = self.prng.chance(self.profile.barrier_errors_ppm, 1_000_000);
        if core::mem::take(&mut self.fail_next_barrier) || drawn {
            self.platter.failed_barrier(file);
            return Err(DiskError::Io { detail: "fdatasync: simulated EIO".to_owned() });
        }
        // What other lanes wrote since the barrier began is not covered; its own write is.
        let own = self.platter.stamp();
        self.platter.barrier(file, stamp, own);
        Ok(DiskOutput::Done)
    }

    /// What a request asks for that the seam does not offer; a role that does so stops the run.
    fn broken_contract(&self, request: &DiskRequest) -> Option<String> {
        let unaligned = |what: &str, bytes: u64| {
            (!bytes.is_multiple_of(PAGE_BYTES)).then(|| format!("{what} {bytes} is not aligned"))
        };
        match &request.op {
            DiskOp::Create { bytes, .. } => unaligned("length", *bytes),
            DiskOp::Read { offset, bytes, .. } => {
                unaligned("offset", *offset).or_else(|| unaligned("length", *bytes))
            }
            DiskOp::Write { file, offset, data, .. } => {
                let (end, length) =
                    (offset + padded(data.len() as u64), self.platter.length(*file));
                let is_inside =
                    end <= length || matches!(file, File::Meta(_)) || !self.platter.contains(*file);
                let outside = || format!("a write to {offset}..{end} of {length} bytes");
                unaligned("offset", *offset).or_else(|| (!is_inside).then(outside))
            }
            DiskOp::List | DiskOp::Rename { .. } | DiskOp::Remove { .. } => None,
        }
    }

    fn interrupt(&mut self, op: DiskOp, kind: WriteKind) {
        match op {
            DiskOp::List | DiskOp::Read { .. } => {}
            DiskOp::Create { file, bytes } => {
                if self.prng.chance(1, 2) && bytes <= self.free_bytes() {
                    let pages = self.prng.below(bytes / PAGE_BYTES + 1);
                    self.platter.create(file, pages * PAGE_BYTES);
                }
            }
            DiskOp::Rename { from, to } => {
                if self.prng.chance(1, 2) {
                    self.platter.rename(from, to);
                }
            }
            DiskOp::Remove { file } => {
                if self.prng.chance(1, 2) {
                    self.platter.remove(file);
                }
            }
            DiskOp::Write { file, offset, data, .. } => {
                let (prng, share) = (&mut self.prng, 4);
                let arrives = prng.below(share + 1);
                self.platter
                    .write(file, offset, &data.contiguous(), kind, || prng.chance(arrives, share));
            }
        }
    }
}

#[cfg(test)]
mod tests;
