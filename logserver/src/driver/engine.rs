//! Which engine and which barrier: asked for, probed, or fallen back to.
//!
//! | barrier | a durable write is | right where |
//! |---|---|---|
//! | [`Barrier::InlineFdatasync`] | write, then a blocking `fdatasync` on the log thread | the device has a volatile cache and no forced unit access |
//! | [`Barrier::Dsync`] | one write with `RWF_DSYNC` | the device writes through, or has forced unit access |
//!
//! `Dsync` serves only a group that is one run of a file without earlier unflushed writes: with forced unit
//! access such a write says nothing about the others, so everything else takes the barrier (D2).

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::Payload;
use common::disk::{DiskOpId, PAGE_BYTES};

use super::api::{OpenError, Options};
use super::directory::{Directory, Handle};
use super::handoff::WakeSignal;
use super::plain;
use super::ring::Ring;
use super::staging::{RUN_BYTES_MAX, Staging, Write};

/// Trials of each barrier at start-up.
const PROBE_TRIALS: usize = 16;

/// The probe ends early after this time: every start pays for it, and a busy machine can not be measured well
/// anyway.
const PROBE_TIME_MAX: Duration = Duration::from_millis(50);

/// Trials of each barrier below which the probe says nothing.
const PROBE_TRIALS_MIN: usize = 3;

/// Written round and round by the probe.
const PROBE_FILE_PAGES: u64 = 64;

/// `Dsync` must take less than this share of the other, in percent, to be chosen. Forced unit access saves a
/// whole round trip; less than that is noise, and `Dsync` suffers more from a busy machine.
const DSYNC_SHARE_MAX_PERCENT: u128 = 70;

/// How bytes get to the files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineKind {
    /// `io_uring`.
    Ring,
    /// `pwrite` and `pread`.
    Plain,
}

/// How written bytes become durable. See the module header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Barrier {
    /// Writes, then `fdatasync`.
    InlineFdatasync,
    /// Writes with `RWF_DSYNC`.
    Dsync,
}

/// What the start-up probe measured: the medians of durable writes of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeResult {
    /// Of [`Barrier::InlineFdatasync`].
    pub inline_fdatasync: Duration,
    /// Of [`Barrier::Dsync`].
    pub dsync: Duration,
}

/// What a driver runs on, for the log and the status page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriverInfo {
    /// The engine of the log lane.
    pub engine: EngineKind,
    /// The barrier of the log lane.
    pub barrier: Barrier,
    /// Whether reads and writes go past the page cache (`O_DIRECT`).
    pub direct: bool,
    /// The probe's numbers, when there was a probe.
    pub probe: Option<ProbeResult>,
    /// Why this engine and this barrier, for people.
    pub reason: String,
}

impl fmt::Display for DriverInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = if self.direct { "O_DIRECT" } else { "page cache" };
        write!(f, "{:?}, {:?}, {cache}: {}", self.engine, self.barrier, self.reason)
    }
}

/// The engine of the log thread.
pub(super) enum Engine {
    Ring(Box<Ring>),
    Plain(Box<Staging>),
}

impl Engine {
    /// The engine that was asked for, or the ring if the system gives one. To be called by the log thread.
    pub(super) fn choose(
        wanted: Option<EngineKind>,
        ring: impl FnOnce() -> io::Result<Ring>,
    ) -> Result<(Self, String), OpenError> {
        if wanted == Some(EngineKind::Plain) {
            return Ok((Self::plain(), "plain files were asked for".into()));
        }
        match (ring(), wanted) {
            (Ok(ring), _) => Ok((Self::Ring(Box::new(ring)), "io_uring is there".into())),
            (Err(source), Some(_)) => Err(OpenError::Io { call: "set io_uring up", source }),
            (Err(error), None) => {
                tracing::warn!(%error, "io_uring is refused: falling back to plain files");
                Ok((Self::plain(), format!("io_uring is refused: {error}")))
            }
        }
    }

    fn plain() -> Self {
        Self::Plain(Box::new(Staging::new(RUN_BYTES_MAX)))
    }

    pub(super) const fn kind(&self) -> EngineKind {
        match self {
            Self::Ring(_) => EngineKind::Ring,
            Self::Plain(_) => EngineKind::Plain,
        }
    }

    /// Writes a group; with `dsync` each write is its own barrier. How many writes the kernel got.
    pub(super) fn write(
        &mut self,
        handle: &Handle,
        writes: &[Write],
        dsync: bool,
    ) -> io::Result<u64> {
        match self {
            Self::Ring(ring) => ring.write(handle, writes, dsync),
            Self::Plain(staging) => plain::write(staging, handle, writes, dsync),
        }
    }

    /// Whether a read may be started. Plain ones end where they start.
    pub(super) fn has_room_for_read(&self) -> bool {
        match self {
            Self::Ring(ring) => ring.has_room_for_read(),
            Self::Plain(_) => true,
        }
    }

    pub(super) fn reads_outstanding(&self) -> bool {
        match self {
            Self::Ring(ring) => ring.reads_outstanding(),
            Self::Plain(_) => false,
        }
    }

    /// Sleeps until the signal is raised, or a read gets on. May return for no reason.
    pub(super) fn wait(&mut self, signal: &WakeSignal) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.wait(signal),
            Self::Plain(_) => {
                signal.wait();
                Ok(())
            }
        }
    }
}

/// The barrier that was asked for, or the faster one; with what the probe measured and why.
pub(super) fn choose_barrier(
    options: &Options,
    engine: &mut Engine,
    directory: &Directory,
) -> (Barrier, Option<ProbeResult>, String) {
    if let Some(barrier) = options.barrier {
        return (barrier, None, "the barrier was asked for".into());
    }
    match probe(engine, directory) {
        Ok(Some(result)) => {
            let barrier = faster(result);
            let (inline, dsync) = (result.inline_fdatasync, result.dsync);
            (barrier, Some(result), format!("fdatasync took {inline:?}, RWF_DSYNC {dsync:?}"))
        }
        Ok(None) => (Barrier::InlineFdatasync, None, "the probe had no time".into()),
        Err(error) => (Barrier::InlineFdatasync, None, format!("the probe failed: {error}")),
    }
}

fn faster(result: ProbeResult) -> Barrier {
    let (inline, dsync) = (result.inline_fdatasync.as_nanos(), result.dsync.as_nanos());
    if dsync * 100 < inline * DSYNC_SHARE_MAX_PERCENT {
        Barrier::Dsync
    } else {
        Barrier::InlineFdatasync
    }
}

/// Times durable writes of one page to a scratch file, both barriers in turn.
fn probe(engine: &mut Engine, directory: &Directory) -> io::Result<Option<ProbeResult>> {
    let handle = directory.scratch(PROBE_FILE_PAGES * PAGE_BYTES)?;
    handle.barrier()?;
    let start = Instant::now();
    let (mut inline, mut dsync) = (Vec::new(), Vec::new());
    for trial in 0..PROBE_TRIALS as u64 {
        if start.elapsed() > PROBE_TIME_MAX {
            break;
        }
        let write = |page: u64| Write {
            id: DiskOpId(0),
            offset: page % PROBE_FILE_PAGES * PAGE_BYTES,
            data: Payload::from(Bytes::from_static(&[0x5a; PAGE_BYTES as usize])),
        };
        let begin = Instant::now();
        engine.write(&handle, &[write(2 * trial)], false)?;
        handle.barrier()?;
        inline.push(begin.elapsed());
        let begin = Instant::now();
        engine.write(&handle, &[write(2 * trial + 1)], true)?;
        dsync.push(begin.elapsed());
    }
    if inline.len() < PROBE_TRIALS_MIN {
        return Ok(None);
    }
    Ok(Some(ProbeResult { inline_fdatasync: median(inline), dsync: median(dsync) }))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn a_refused_ring_is_replaced_unless_it_was_asked_for() {
        for errno in [Errno::NOSYS, Errno::PERM] {
            let (engine, reason) = Engine::choose(None, || Err(errno.into())).unwrap();
            assert_eq!(engine.kind(), EngineKind::Plain);
            assert!(reason.contains("refused"), "{reason}");
            let asked = Engine::choose(Some(EngineKind::Ring), || Err(errno.into()));
            assert!(matches!(asked, Err(OpenError::Io { .. })));
        }
        let unneeded = || -> io::Result<Ring> { panic!("no ring was asked for") };
        let (engine, _) = Engine::choose(Some(EngineKind::Plain), unneeded).unwrap();
        assert_eq!(engine.kind(), EngineKind::Plain);
    }

    #[test]
    fn dsync_must_be_clearly_faster() {
        let probe = |inline, dsync| ProbeResult {
            inline_fdatasync: Duration::from_micros(inline),
            dsync: Duration::from_micros(dsync),
        };
        assert_eq!(faster(probe(200, 300)), Barrier::InlineFdatasync);
        assert_eq!(faster(probe(200, 145)), Barrier::InlineFdatasync);
        assert_eq!(faster(probe(200, 60)), Barrier::Dsync);
    }
}
