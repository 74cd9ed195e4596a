//! The driver as its server sees it: open, submit, drain, drop.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, io};

use common::disk::{DiskCompletion, DiskOp, DiskRequest, Lane};
use thiserror::Error;

use super::background;
use super::directory::Directory;
use super::engine::{Barrier, DriverInfo, Engine, EngineKind, choose_barrier};
use super::handoff::{Inbox, Outbox};
use super::idle::IdlePoll;
use super::log::LogThread;
use super::ring::Ring;

pub use super::handoff::Waker;

/// Requests that may be submitted and not yet drained. The role keeps far fewer in flight.
pub const OUTSTANDING_MAX: usize = 1024;

/// How to open a directory.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The engine; `None` takes the ring where the system allows it, otherwise plain files.
    pub engine: Option<EngineKind>,
    /// The barrier; `None` measures both at start-up.
    pub barrier: Option<Barrier>,
    /// Go through the page cache even where the file system takes `O_DIRECT`.
    pub buffered: bool,
    /// Bytes that all files together may have; `None` leaves it to the file system.
    pub quota_bytes: Option<u64>,
    /// Bytes of the file system that are left to others.
    pub reserve_free_bytes: u64,
    /// How long the log thread looks for work before it sleeps, if it did not have to wait for much longer
    /// the last time: to be woken takes a good part of a flush. Zero: it sleeps at once.
    pub idle_poll: Duration,
}

/// Why a directory could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Another process has it open, or another driver of this one.
    #[error("the log directory {} is in use by another process", directory.display())]
    Locked {
        /// The directory.
        directory: PathBuf,
    },
    /// A system call failed.
    #[error("can't {call}: {source}")]
    Io {
        /// What was tried.
        call: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// Why a request was not taken. Both are errors of the server, not of its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SubmitError {
    /// More than [`OUTSTANDING_MAX`] requests are outstanding.
    #[error("more than {OUTSTANDING_MAX} disk requests are outstanding")]
    Full,
    /// A thread of the driver has panicked.
    #[error("a thread of the disk driver has ended")]
    Dead,
}

/// What a driver has done since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DriverStats {
    /// Barriers: flushes of the device's cache, one for each group of durable writes.
    pub flushes: u64,
    /// Requests to write that went well.
    pub writes: u64,
    /// Bytes written by them, the padding included.
    pub bytes_written: u64,
    /// Requests to read.
    pub reads: u64,
    /// Bytes that they asked for and got.
    pub bytes_read: u64,
    /// The part of the log lane: what commits cost.
    pub log: LogLaneStats,
}

/// What the log lane has done since the driver was opened. Zero-filling and whatever else is done in the
/// background is not in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogLaneStats {
    /// Barriers.
    pub flushes: u64,
    /// Writes to the kernel: a request of neighbours' bytes is one of at most 1 MiB.
    pub kernel_writes: u64,
    /// Bytes written by them, the padding included.
    pub bytes_written: u64,
}

/// [`DriverStats`] as they grow.
#[derive(Debug, Default)]
pub(super) struct Counters {
    flushes: AtomicU64,
    writes: AtomicU64,
    bytes_written: AtomicU64,
    reads: AtomicU64,
    bytes_read: AtomicU64,
    log_flushes: AtomicU64,
    log_kernel_writes: AtomicU64,
    log_bytes_written: AtomicU64,
}

impl Counters {
    pub(super) fn count_writes(&self, writes: u64, bytes: u64, durable: bool) {
        self.writes.fetch_add(writes, Ordering::Relaxed);
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
        self.flushes.fetch_add(u64::from(durable), Ordering::Relaxed);
    }

    /// A group of the log lane, beside [`Counters::count_writes`].
    pub(super) fn count_group(&self, kernel_writes: u64, bytes: u64, durable: bool) {
        self.log_kernel_writes.fetch_add(kernel_writes, Ordering::Relaxed);
        self.log_bytes_written.fetch_add(bytes, Ordering::Relaxed);
        self.log_flushes.fetch_add(u64::from(durable), Ordering::Relaxed);
    }

    pub(super) fn count_read(&self, bytes: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What the threads of a driver share with its face.
pub(super) struct Shared {
    pub(super) directory: Directory,
    pub(super) log: Inbox<DiskRequest>,
    pub(super) background: Inbox<DiskRequest>,
    pub(super) reads: Inbox<DiskRequest>,
    pub(super) outbox: Outbox<DiskCompletion>,
    pub(super) counters: Counters,
    outstanding: AtomicUsize,
    dead: AtomicBool,
}

impl Shared {
    fn new(directory: Directory, waker: Waker) -> io::Result<Self> {
        Ok(Self {
            directory,
            log: Inbox::new(OUTSTANDING_MAX)?,
            background: Inbox::new(OUTSTANDING_MAX)?,
            reads: Inbox::new(OUTSTANDING_MAX)?,
            outbox: Outbox::new(OUTSTANDING_MAX, waker),
            counters: Counters::default(),
            outstanding: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
        })
    }
}

/// A log directory, open. Requests go in by [`Driver::submit`]; the waker says when to call
/// [`Driver::drain`].
///
/// Dropping it waits until everything submitted has been carried out.
pub struct Driver {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    info: DriverInfo,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("info", &self.info).field("stats", &self.stats()).finish()
    }
}

impl Driver {
    /// Opens a log directory, which is made if it does not exist, and starts the threads of its driver.
    ///
    /// `waker` is called by those threads after each batch of completions, and once if one of them dies.
    ///
    /// # Errors
    /// When the directory is in use, or the system refuses what is needed.
    pub fn open(directory: &Path, options: &Options, waker: Waker) -> Result<Self, OpenError> {
        let opened = Directory::open(directory, options)?;
        let direct = opened.is_direct();
        let shared = Shared::new(opened, waker)
            .map_err(|source| OpenError::Io { call: "make an eventfd", source })?;
        let mut driver = Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
            info: DriverInfo {
                engine: EngineKind::Plain,
                barrier: Barrier::InlineFdatasync,
                direct,
                probe: None,
                reason: String::new(),
            },
        };
        driver.info = driver.start_log_thread(options)?;
        driver.start("disk-background", background::run)?;
        if driver.info.engine == EngineKind::Plain {
            driver.start("disk-read", background::run_reads)?;
        }
        tracing::info!(directory = %directory.display(), info = %driver.info, "the log disk is open");
        Ok(driver)
    }

    /// Hands a request to the disk; its completion will be among those of a later [`Driver::drain`].
    ///
    /// # Errors
    /// The request was not taken; see [`SubmitError`].
    pub fn submit(&self, request: DiskRequest) -> Result<(), SubmitError> {
        if !self.is_alive() {
            return Err(SubmitError::Dead);
        }
        let one_more = |count| (count < OUTSTANDING_MAX).then_some(count + 1);
        let outstanding = &self.shared.outstanding;
        if outstanding.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).is_err() {
            return Err(SubmitError::Full);
        }
        let plain = self.info.engine == EngineKind::Plain;
        let inbox = match (&request.op, request.lane) {
            (DiskOp::Read { .. }, _) if plain => &self.shared.reads,
            (DiskOp::Read { .. }, _) | (_, Lane::Log) => &self.shared.log,
            (_, Lane::Background) => &self.shared.background,
        };
        assert!(inbox.push(request).is_ok(), "an inbox of {OUTSTANDING_MAX} requests is full (D4)");
        Ok(())
    }

    /// Appends the completions that have arrived to `completions`.
    pub fn drain(&self, completions: &mut Vec<DiskCompletion>) {
        for _ in 0..OUTSTANDING_MAX {
            let Some(completion) = self.shared.outbox.pop() else { return };
            completions.push(completion);
            let before = self.shared.outstanding.fetch_sub(1, Ordering::AcqRel);
            assert!(before > 0, "a completion came for no request");
        }
    }

    /// Whether [`Driver::drain`] would find something.
    #[must_use]
    pub fn has_completions(&self) -> bool {
        !self.shared.outbox.is_empty()
    }

    /// Whether all threads still run. Once `false`, what is outstanding may never complete: the server must
    /// halt the role.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !self.shared.dead.load(Ordering::Acquire)
    }

    /// What the driver runs on.
    #[must_use]
    pub const fn info(&self) -> &DriverInfo {
        &self.info
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> DriverStats {
        let counters = &self.shared.counters;
        DriverStats {
            flushes: counters.flushes.load(Ordering::Relaxed),
            writes: counters.writes.load(Ordering::Relaxed),
            bytes_written: counters.bytes_written.load(Ordering::Relaxed),
            reads: counters.reads.load(Ordering::Relaxed),
            bytes_read: counters.bytes_read.load(Ordering::Relaxed),
            log: LogLaneStats {
                flushes: counters.log_flushes.load(Ordering::Relaxed),
                kernel_writes: counters.log_kernel_writes.load(Ordering::Relaxed),
                bytes_written: counters.log_bytes_written.load(Ordering::Relaxed),
            },
        }
    }

    /// Puts another open file in a file's place, for tests of failures.
    #[cfg(test)]
    pub(super) fn plant(&self, file: common::disk::File, fd: std::os::fd::OwnedFd) {
        self.shared.directory.plant(file, fd);
    }

    /// The ring belongs to the thread that makes it, so the log thread chooses and reports.
    fn start_log_thread(&mut self, options: &Options) -> Result<DriverInfo, OpenError> {
        let (report, reported) = sync_channel(1);
        let options = options.clone();
        self.start("disk-log", move |shared| {
            let (mut engine, engine_reason) = match Engine::choose(options.engine, Ring::new) {
                Ok(chosen) => chosen,
                Err(error) => {
                    let _ = report.send(Err(error));
                    return;
                }
            };
            let (barrier, probe, barrier_reason) =
                choose_barrier(&options, &mut engine, &shared.directory);
            let info = DriverInfo {
                engine: engine.kind(),
                barrier,
                direct: shared.directory.is_direct(),
                probe,
                reason: format!("{engine_reason}; {barrier_reason}"),
            };
            // Nobody listens when the opener has gone; then the inbox is closed too.
            let _ = report.send(Ok(info));
            LogThread::new(Arc::clone(shared), engine, barrier, IdlePoll::new(options.idle_poll))
                .run();
        })?;
        reported.recv().unwrap_or_else(|_| {
            let source = io::Error::other("the log thread died");
            Err(OpenError::Io { call: "start the log thread", source })
        })
    }

    fn start(
        &mut self,
        name: &str,
        run: impl FnOnce(&Arc<Shared>) + Send + 'static,
    ) -> Result<(), OpenError> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let _obituary = Obituary(&shared);
                run(&shared);
            })
            .map_err(|source| OpenError::Io { call: "start a thread", source })?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for inbox in [&self.shared.log, &self.shared.background, &self.shared.reads] {
            inbox.close();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the disk driver had panicked");
            }
        }
    }
}

/// Tells the server when a thread panics.
struct Obituary<'a>(&'a Shared);

impl Drop for Obituary<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.dead.store(true, Ordering::Release);
            self.0.outbox.wake();
        }
    }
}
