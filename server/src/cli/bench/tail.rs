//! An open loop at a fixed rate: how late a record is durable, and how late a consumer has it.
//!
//! ```text
//!  begin + k * interval --> append call --> commit's verdict      commit latency of record k
//!                               '--> log --> consumer's pull      consumer latency of record k
//! ```
//!
//! Both are counted from the time at which the record was due, not from when the call was made: calls that
//! come late, since those before them were slow, count as late (no coordinated omission). The consumer has
//! a connection of its own and finds the time that a record was due by its number.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use client::Transaction;
use client::face::{Client, Pull};
use common::StreamId;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use serde_json::{Value, json};
use tokio::io::unix::AsyncFd;

use super::accounts::{Accounts, Costs};
use super::{Latencies, Target, TargetArgs};
use crate::cli::output::{Output, progress};
use crate::ingest::ensure_stream;

/// Commits that may be open; an open loop that has more does not keep up.
const OPEN_MAX: u64 = 65_536;
/// How long the consumer may take for the last records.
const PATIENCE: Duration = Duration::from_secs(20);
/// A record's run and number: what its value begins with.
const STAMP_BYTES: usize = 16;

/// How fast, and for how long.
#[derive(clap::Args, Debug)]
pub(crate) struct TailArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Records a second; one run for each.
    #[arg(long, value_delimiter = ',', default_values_t = [1000],
        value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rate: Vec<u64>,
    /// Bytes of a record's value; at least 16.
    #[arg(long, default_value_t = 512)]
    size: usize,
    /// How long each run is measured, seconds.
    #[arg(long, visible_alias = "duration", default_value_t = 5)]
    seconds: u64,
    /// How long each run goes on before it is measured, seconds.
    #[arg(long, default_value_t = 1)]
    warm_up_seconds: u64,
}

pub(super) async fn run(args: &TailArgs, output: Output) -> Result<()> {
    ensure!(args.seconds > 0, "a run of no seconds measures nothing");
    let target = Target::open(&args.target)?;
    for (number, rate) in (1_u64..).zip(&args.rate) {
        let handles = target.connections(2).await?;
        let stream = ensure_stream(&handles[0], "bench/tail").await?;
        let start = handles[1].read_version().await?;
        let pull = handles[1].pull([stream], start).await?;
        let schedule = Schedule::new(*rate, args.warm_up_seconds, args.seconds);
        let run = Run { stream, number, size: args.size.max(STAMP_BYTES), schedule };
        let measured = run.measure(&handles[0], pull, &target).await?;
        let json = measured.json(*rate, &run);
        output.print(&json, || {
            format!(
                "{rate:6}/s  commit p50 {:>6} p99 {:>6} us  consumer p50 {:>6} p99 {:>6} us",
                json["commit"]["p50_us"],
                json["commit"]["p99_us"],
                json["consumer"]["p50_us"],
                json["consumer"]["p99_us"]
            )
        })?;
        for handle in handles {
            handle.close().await;
        }
    }
    target.close()
}

/// When which record is due.
#[derive(Clone, Copy)]
struct Schedule {
    begin: Instant,
    interval: Duration,
    total: u64,
    /// Records before this one only warm up.
    first_measured: u64,
}

impl Schedule {
    fn new(rate: u64, warm_up_seconds: u64, seconds: u64) -> Self {
        Self {
            begin: Instant::now(),
            interval: Duration::from_secs(1) / u32::try_from(rate).expect("its range is limited"),
            total: rate * (warm_up_seconds + seconds),
            first_measured: rate * warm_up_seconds,
        }
    }

    fn due(&self, record: u64) -> Instant {
        self.begin + Duration::from_nanos(self.interval.as_nanos() as u64 * record)
    }

    /// How many records are due by then.
    fn due_by(&self, now: Instant) -> u64 {
        let Some(since) = now.checked_duration_since(self.begin) else { return 0 };
        let count = since.as_nanos() / self.interval.as_nanos() + 1;
        u64::try_from(count).unwrap_or(u64::MAX).min(self.total)
    }
}

/// A timer of the kernel's: those of the runtime come on whole milliseconds.
struct Pacer(AsyncFd<OwnedFd>);

impl Pacer {
    fn start(interval: Duration) -> Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let each = Timespec {
            tv_sec: interval.as_secs().try_into()?,
            tv_nsec: interval.subsec_nanos().into(),
        };
        let times = Itimerspec { it_interval: each, it_value: each };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &times)?;
        #[expect(deprecated, reason = "sound for a descriptor that is owned, as this one is")]
        let timer = AsyncFd::new(timer)?;
        Ok(Self(timer))
    }

    /// Waits for the next time that something is due.
    async fn tick(&self) -> Result<()> {
        let mut ready = self.0.readable().await?;
        let mut expirations = [0; 8];
        // Read or not: whoever asks looks at the clock, which counts for more.
        let _ = rustix::io::read(self.0.get_ref(), &mut expirations);
        ready.clear_ready();
        Ok(())
    }
}

struct Run {
    stream: StreamId,
    number: u64,
    size: usize,
    schedule: Schedule,
}

#[derive(Default)]
struct Seen {
    commit: Latencies,
    consumer: Latencies,
    /// How late the append was called.
    call: Latencies,
    open: u64,
    failure: Option<anyhow::Error>,
}

struct Measured {
    seen: Seen,
    costs: Costs,
}

impl Run {
    async fn measure(&self, client: &Client, pull: Pull, target: &Target) -> Result<Measured> {
        let bar = progress("appending", self.schedule.total);
        let seen = Rc::new(RefCell::new(Seen::default()));
        let schedule = Schedule { begin: Instant::now() + self.schedule.interval, ..self.schedule };
        let consumer =
            tokio::task::spawn_local(consume(pull, schedule, self.number, Rc::clone(&seen)));
        let sampler = sample(client.clone(), schedule, target.device().map(Path::to_owned));
        let sampler = tokio::task::spawn_local(sampler);
        let pacer = Pacer::start(schedule.interval)?;
        let mut issued = 0;
        while issued < schedule.total {
            pacer.tick().await?;
            while issued < schedule.due_by(Instant::now()) {
                self.append(client, issued, schedule, &seen).await;
                issued += 1;
                if seen.borrow().open > OPEN_MAX {
                    bail!("{OPEN_MAX} commits are open: the node does not keep up with this rate");
                }
            }
            bar.set_position(issued);
        }
        let consumed = tokio::time::timeout(PATIENCE, consumer).await;
        consumed.context("the consumer has not got every record in time")???;
        let costs = sampler.await??;
        while seen.borrow().open > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bar.finish_and_clear();
        let mut seen = seen.take();
        match seen.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(Measured { seen, costs }),
        }
    }

    /// Calls, and leaves the verdict to a task of its own.
    async fn append(
        &self,
        client: &Client,
        record: u64,
        schedule: Schedule,
        seen: &Rc<RefCell<Seen>>,
    ) {
        let mut value = vec![b'x'; self.size];
        value[..8].copy_from_slice(&self.number.to_le_bytes());
        value[8..STAMP_BYTES].copy_from_slice(&record.to_le_bytes());
        let mut transaction = Transaction::new();
        transaction.append(self.stream, value);
        let (due, is_measured) = (schedule.due(record), record >= schedule.first_measured);
        if is_measured {
            seen.borrow_mut().call.record(due.elapsed());
        }
        seen.borrow_mut().open += 1;
        let verdict = client.submit(transaction).await;
        let seen = Rc::clone(seen);
        tokio::task::spawn_local(async move {
            let outcome = verdict.await;
            let mut seen = seen.borrow_mut();
            seen.open -= 1;
            match outcome {
                Ok(_) if is_measured => seen.commit.record(due.elapsed()),
                Ok(_) => {}
                Err(error) => drop(seen.failure.get_or_insert(error.into())),
            }
        });
    }
}

/// Reads every record of the run, each exactly once.
async fn consume(
    mut pull: Pull,
    schedule: Schedule,
    number: u64,
    seen: Rc<RefCell<Seen>>,
) -> Result<()> {
    let mut is_there = vec![false; usize::try_from(schedule.total)?];
    let mut missing = schedule.total;
    while missing > 0 {
        let pulled = pull.next().await?;
        let now = Instant::now();
        for block in pulled.batches.iter().flat_map(|batch| &batch.blocks) {
            for delivered in block.records()? {
                let Some((run, record)) = stamp(&delivered.record.value) else { continue };
                if run != number || record >= schedule.total {
                    continue;
                }
                let place = &mut is_there[usize::try_from(record)?];
                ensure!(!std::mem::replace(place, true), "record {record} was delivered twice");
                missing -= 1;
                if record >= schedule.first_measured {
                    seen.borrow_mut().consumer.record(now - schedule.due(record));
                }
            }
        }
    }
    Ok(())
}

/// The run and the number that a value begins with.
fn stamp(value: &[u8]) -> Option<(u64, u64)> {
    let number = |at: usize| value.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    Some((number(0)?, number(8)?))
}

async fn sample(client: Client, schedule: Schedule, device: Option<PathBuf>) -> Result<Costs> {
    tokio::time::sleep_until(schedule.due(schedule.first_measured).into()).await;
    let before = Accounts::read(&client, device.as_deref()).await?;
    tokio::time::sleep_until(schedule.due(schedule.total).into()).await;
    Accounts::read(&client, device.as_deref()).await?.since(&before)
}

impl Measured {
    fn json(&self, rate: u64, run: &Run) -> Value {
        let Seen { commit, consumer, call, .. } = &self.seen;
        let behind =
            consumer.quantile_us(0.5).cast_signed() - commit.quantile_us(0.5).cast_signed();
        json!({
            "rate": rate,
            "size": run.size,
            "records": commit.count(),
            "commit": commit.json(),
            "consumer": consumer.json(),
            "consumer_behind_commit_p50_us": behind,
            "call_late": call.json(),
            "costs": self.costs.json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_due_at_their_times_and_no_more_than_all_of_them() {
        let schedule = Schedule::new(1000, 1, 2);
        assert_eq!((schedule.total, schedule.first_measured), (3000, 1000));
        let at = |us: u64| schedule.begin + Duration::from_micros(us);
        assert_eq!(schedule.due(7), at(7000));
        assert_eq!(schedule.due_by(schedule.begin - Duration::from_secs(1)), 0);
        assert_eq!((schedule.due_by(at(999)), schedule.due_by(at(1000))), (1, 2));
        assert_eq!(schedule.due_by(at(10_000_000)), 3000);
    }

    #[test]
    fn a_stamp_is_read_back_and_a_short_value_has_none() {
        let mut value = vec![b'x'; 20];
        value[..8].copy_from_slice(&3_u64.to_le_bytes());
        value[8..16].copy_from_slice(&9_u64.to_le_bytes());
        assert_eq!(stamp(&value), Some((3, 9)));
        assert_eq!(stamp(&value[..15]), None);
    }
}
