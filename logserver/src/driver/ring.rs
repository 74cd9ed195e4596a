//! io_uring: writes out of one registered buffer, reads into buffers of their own, and a poll of the
//! doorbell.
//!
//! ```text
//!  user data of an entry:   63      56 55      48 47                 0
//!                           [ kind  ] [ slot   ] [ expected bytes    ]
//! ```
//! The ring belongs to the thread that made it. Writes are waited for; reads go on meanwhile and are picked
//! up whenever the ring is entered.
//!
//! # Why the kernel's view of our memory is sound (D5)
//! * The staging area and the buffers of reads live in vectors of pages, owned by [`Ring`] and never resized:
//!   their memory stays where it is when the owner moves.
//! * The staging area is changed only by [`Ring::write`], which returns only when every write has been
//!   reaped; after an error in between, the ring is broken and never writes again.
//! * A read's buffer leaves its slot only when none of its pieces is outstanding.
//! * Dropping the ring waits for everything outstanding, and leaks the memory if it can't.
#![expect(unsafe_code, reason = "the kernel reads and writes memory behind the compiler's back")]

use std::io::{self, IoSlice};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use bytes::Bytes;
use common::disk::{DiskCompletion, DiskOpId, DiskOutput, File};
use io_uring::types::Fd;
use io_uring::{IoUring, Probe, opcode, squeue};
use rustix::event::PollFlags;
use rustix::io::{Errno, ReadWriteFlags};

use super::directory::{Handle, io_error};
use super::handoff::WakeSignal;
use super::staging::{Feed, Pages, RUN_BYTES_MAX, RUNS_MAX, Staging, Write};

/// Reads in flight.
pub(super) const READS_MAX: usize = 8;

/// Pieces of one read in flight.
const READ_PIECES_MAX: usize = 2;

/// Bytes of the registered buffer that writes go out of.
const STAGING_BYTES: usize = 8 << 20;

/// Entries of the submission queue; the completion queue has twice as many.
const ENTRIES: usize = 64;

/// Refusals of an entry to the ring in a row (no memory, queue full) before it counts as failed.
const ENTER_RETRIES_MAX: u32 = 10_000;

const _: () = assert!(
    RUNS_MAX + READS_MAX * READ_PIECES_MAX < ENTRIES,
    "a round of writes, all reads and the doorbell fit into the queue at the same time"
);

/// A ring and the memory that the kernel may touch.
pub(super) struct Ring {
    ring: IoUring,
    staging: Staging,
    registered: bool,
    writes_outstanding: usize,
    write_error: Option<io::Error>,
    broken: bool,
    reads: [Option<ReadJob>; READS_MAX],
    finished: Vec<DiskCompletion>,
    bell: Bell,
}

/// Where the poll of the doorbell's signal is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bell {
    Idle,
    Armed,
    /// The poll has ended; the signal is still to be consumed.
    Rang,
}

/// A read: pieces of it go to the kernel one after the other, at most [`READ_PIECES_MAX`] at a time.
pub(super) struct ReadJob {
    id: DiskOpId,
    file: File,
    handle: Arc<Handle>,
    offset: u64,
    wanted: usize,
    buffer: Pages,
    /// The buffer's start and length, taken once: it is not referred to while the kernel writes to it.
    memory: (*mut u8, usize),
    submitted: usize,
    outstanding: usize,
    error: Option<io::Error>,
}

impl ReadJob {
    /// `wanted` bytes of the file at `offset`; they must be there.
    pub(super) fn new(
        id: DiskOpId,
        file: File,
        handle: Arc<Handle>,
        offset: u64,
        wanted: usize,
    ) -> Self {
        let mut buffer = Pages::zeroed(wanted);
        let memory = (buffer.bytes_mut().as_mut_ptr(), buffer.bytes().len());
        Self {
            id,
            file,
            handle,
            offset,
            wanted,
            buffer,
            memory,
            submitted: 0,
            outstanding: 0,
            error: None,
        }
    }

    /// The next piece: where in the buffer, bytes to ask for, bytes to expect.
    fn next_piece(&self) -> Option<(usize, usize, usize)> {
        let (_, whole) = self.memory;
        if self.submitted == whole || self.outstanding == READ_PIECES_MAX || self.error.is_some() {
            return None;
        }
        let asked = (whole - self.submitted).min(RUN_BYTES_MAX);
        Some((self.submitted, asked, asked.min(self.wanted - self.submitted)))
    }

    fn is_finished(&self) -> bool {
        self.outstanding == 0 && (self.submitted == self.memory.1 || self.error.is_some())
    }

    fn into_completion(self) -> DiskCompletion {
        let result = match self.error {
            None => Ok(DiskOutput::Data(Bytes::from_owner(self.buffer).slice(..self.wanted))),
            Some(error) => Err(io_error("read", self.file, error)),
        };
        DiskCompletion { id: self.id, result }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Write,
    Read,
    Bell,
}

fn tag(kind: Kind, slot: usize, expected: usize) -> u64 {
    assert!(slot < READS_MAX && expected >> 48 == 0, "slot {slot}, {expected} bytes: out of range");
    (kind as u64) << 56 | (slot as u64) << 48 | expected as u64
}

fn untag(tag: u64) -> (Kind, usize, usize) {
    let kind = match tag >> 56 {
        0 => Kind::Write,
        1 => Kind::Read,
        _ => Kind::Bell,
    };
    ((kind), (tag >> 48 & 0xff) as usize, (tag & 0xffff_ffff_ffff) as usize)
}

impl Ring {
    /// Sets a ring up for the calling thread.
    pub(super) fn new() -> io::Result<Self> {
        let ring = set_up()?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Write::CODE, opcode::Read::CODE, opcode::PollAdd::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let staging = Staging::new(STAGING_BYTES);
        let registered = register(&ring, &staging);
        Ok(Self {
            ring,
            staging,
            registered,
            writes_outstanding: 0,
            write_error: None,
            broken: false,
            reads: Default::default(),
            finished: Vec::new(),
            bell: Bell::Idle,
        })
    }

    /// Writes a group and returns when all of it has been written; with `dsync` each write is its own
    /// barrier. How many writes the kernel got.
    pub(super) fn write(
        &mut self,
        handle: &Handle,
        writes: &[Write],
        dsync: bool,
    ) -> io::Result<u64> {
        assert!(!self.broken, "a write after the ring has failed");
        let fd = handle.as_fd().as_raw_fd();
        let mut feed = Feed::new(writes);
        let mut kernel_writes = 0;
        while feed.fill(&mut self.staging) {
            self.push_runs(fd, dsync);
            kernel_writes += self.writes_outstanding as u64;
            while self.writes_outstanding > 0 {
                self.enter(1).inspect_err(|_| self.broken = true)?;
                self.reap();
            }
            if let Some(error) = self.write_error.take() {
                return Err(error);
            }
        }
        Ok(kernel_writes)
    }

    /// Whether a read may be started.
    pub(super) fn has_room_for_read(&self) -> bool {
        self.reads.iter().any(Option::is_none)
    }

    pub(super) fn reads_outstanding(&self) -> bool {
        self.reads.iter().any(Option::is_some)
    }

    /// Starts a read. There must be room.
    pub(super) fn start_read(&mut self, job: ReadJob) {
        let slot =
            self.reads.iter().position(Option::is_none).expect("has_room_for_read() was asked");
        assert!(job.wanted > 0, "an empty read of {:?} has nothing to wait for", job.file);
        self.reads[slot] = Some(job);
    }

    /// Brings reads forward without waiting, and moves the finished ones out.
    pub(super) fn advance_reads(&mut self, finished: &mut Vec<DiskCompletion>) -> io::Result<()> {
        if self.reads_outstanding() {
            self.push_reads();
            self.enter(0)?;
            self.reap();
        }
        finished.append(&mut self.finished);
        Ok(())
    }

    /// Waits until the signal is raised or a read has got further. May return for no reason.
    pub(super) fn wait(&mut self, signal: &WakeSignal) -> io::Result<()> {
        if self.bell == Bell::Idle {
            let poll = opcode::PollAdd::new(
                Fd(signal.as_fd().as_raw_fd()),
                u32::from(PollFlags::IN.bits()),
            );
            self.push(&poll.build().user_data(tag(Kind::Bell, 0, 0)));
            self.bell = Bell::Armed;
        }
        if self.bell == Bell::Armed && self.finished.is_empty() {
            self.push_reads();
            self.enter(1)?;
            self.reap();
        }
        // Whoever consumes the signal must look at its queue before it waits again: the signal may have been
        // raised for something that came in after the last look.
        if self.bell == Bell::Rang {
            signal.wait();
            self.bell = Bell::Idle;
        }
        Ok(())
    }

    fn push_runs(&mut self, fd: RawFd, dsync: bool) {
        let flags = if dsync { ReadWriteFlags::DSYNC.bits() } else { 0 }.cast_signed();
        assert_eq!(self.writes_outstanding, 0, "the staging area is still being written");
        for index in 0..self.staging.runs().len() {
            let run = self.staging.runs()[index];
            let bytes = self.staging.run_bytes(run);
            let (start, len) = (bytes.as_ptr(), entry_bytes(run.bytes));
            let entry = if self.registered {
                let write = opcode::WriteFixed::new(Fd(fd), start, len, 0);
                write.offset(run.offset).rw_flags(flags).build()
            } else {
                opcode::Write::new(Fd(fd), start, len).offset(run.offset).rw_flags(flags).build()
            };
            self.push(&entry.user_data(tag(Kind::Write, 0, run.bytes)));
            self.writes_outstanding += 1;
        }
    }

    fn push_reads(&mut self) {
        for slot in 0..READS_MAX {
            while let Some(job) = &mut self.reads[slot]
                && let Some((start, asked, expected)) = job.next_piece()
            {
                assert!(
                    start + asked <= job.memory.1,
                    "{asked} bytes at {start}: out of the buffer"
                );
                let target = job.memory.0.wrapping_add(start);
                let fd = Fd(job.handle.as_fd().as_raw_fd());
                let entry = opcode::Read::new(fd, target, entry_bytes(asked))
                    .offset(job.offset + start as u64)
                    .build()
                    .user_data(tag(Kind::Read, slot, expected));
                job.submitted += asked;
                job.outstanding += 1;
                self.push(&entry);
            }
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory behind the entry belongs to `self` and outlives it (module header); the file is
        // kept open by the caller of `write`, by the job of a read, by the inbox of the bell.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("the queue holds all that can be in flight, by the assertion at ENTRIES");
    }

    /// Submits what was pushed and waits for `wanted` completions.
    fn enter(&self, wanted: usize) -> io::Result<()> {
        for _ in 0..ENTER_RETRIES_MAX {
            match self.ring.submit_and_wait(wanted) {
                Ok(_) => return Ok(()),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::INTR | Errno::AGAIN | Errno::BUSY) => std::thread::yield_now(),
                    _ => return Err(error),
                },
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn reap(&mut self) {
        while let Some(entry) = { self.ring.completion().next() } {
            let (kind, slot, expected) = untag(entry.user_data());
            let outcome = outcome(entry.result(), expected);
            match kind {
                Kind::Write => {
                    assert!(self.writes_outstanding > 0, "a completion of no write");
                    self.writes_outstanding -= 1;
                    self.write_error = self.write_error.take().or(outcome.err());
                }
                Kind::Read => self.reap_read(slot, outcome),
                Kind::Bell => self.bell = Bell::Rang,
            }
        }
    }

    fn reap_read(&mut self, slot: usize, outcome: io::Result<()>) {
        let job = self.reads[slot].as_mut().expect("a slot is kept while a piece is outstanding");
        assert!(job.outstanding > 0, "a completion of no piece of {:?}", job.file);
        job.outstanding -= 1;
        job.error = job.error.take().or(outcome.err());
        if job.is_finished() {
            let job = self.reads[slot].take().expect("it was there a line ago");
            self.finished.push(job.into_completion());
        }
    }

    fn is_memory_in_use(&self) -> bool {
        self.writes_outstanding > 0 || self.reads.iter().flatten().any(|job| job.outstanding > 0)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.is_memory_in_use() {
            if self.enter(1).is_err() {
                tracing::error!(
                    "a ring with writes or reads in flight can't be left: leaking its memory"
                );
                mem::forget(mem::replace(&mut self.staging, Staging::new(4096)));
                self.reads.iter_mut().for_each(|job| mem::forget(job.take()));
                return;
            }
            self.reap();
        }
    }
}

/// The outcome of an entry that should have moved `expected` bytes. A short write to a file of written zeros
/// and a short read inside a file must not happen.
fn outcome(result: i32, expected: usize) -> io::Result<()> {
    match usize::try_from(result) {
        Ok(moved) if moved >= expected => Ok(()),
        Ok(moved) => Err(io::Error::other(format!("{moved} of {expected} bytes"))),
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
    }
}

fn entry_bytes(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("an entry moves at most RUN_BYTES_MAX")
}

/// A ring with the best flags that the kernel takes.
fn set_up() -> io::Result<IoUring> {
    let entries = entry_bytes(ENTRIES);
    let mut best = IoUring::builder();
    best.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let mut fewer = IoUring::builder();
    fewer.setup_coop_taskrun().setup_taskrun_flag();
    for builder in [best, fewer] {
        match builder.build(entries) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {}
            answer => return answer,
        }
    }
    IoUring::new(entries)
}

/// Pins the staging area once instead of with each write. A limit on locked memory may forbid it.
fn register(ring: &IoUring, staging: &Staging) -> bool {
    let slice = IoSlice::new(staging.memory());
    // SAFETY: an `IoSlice` has the layout of an `iovec`, as its documentation promises; the slice lives to
    // the end of the call, the memory that it names as long as the ring.
    let registered = unsafe {
        let buffers = std::slice::from_raw_parts((&raw const slice).cast(), 1);
        ring.submitter().register_buffers(buffers)
    };
    match registered {
        Ok(()) => true,
        Err(error) => {
            tracing::info!(%error, "the write buffer of the ring is not registered");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_round_trip() {
        for kind in [Kind::Write, Kind::Read, Kind::Bell] {
            for (slot, expected) in [(0, 0), (READS_MAX - 1, RUN_BYTES_MAX)] {
                assert_eq!(untag(tag(kind, slot, expected)), (kind, slot, expected));
            }
        }
    }

    #[test]
    fn short_transfers_are_errors() {
        assert!(outcome(4096, 4096).is_ok());
        assert!(outcome(8192, 4096).is_ok());
        assert!(outcome(0, 0).is_ok());
        assert_eq!(outcome(512, 4096).unwrap_err().to_string(), "512 of 4096 bytes");
        assert_eq!(outcome(-5, 4096).unwrap_err().raw_os_error(), Some(5));
    }
}
