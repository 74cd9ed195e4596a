//! Catching up: how fast consumers get what is in the log.
//!
//! ```text
//!  write --bytes over --streams --> [--cold: SIGKILL, start again] --> each consumer pulls one stream whole
//! ```
//!
//! Without `--cold`, what the node still has in memory is served from there: that measures the way through
//! the node and the transport alone.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use client::Transaction;
use client::face::Client;
use common::{StreamId, Version};
use serde_json::{Value, json};

use super::accounts::{Accounts, Costs};
use super::{Target, TargetArgs, round};
use crate::cli::output::{Output, progress};
use crate::ingest::ensure_stream;

/// Records of one commit while writing.
const BATCH_RECORDS: u64 = 100;
/// Commits on their way while writing.
const WRITES_MAX: usize = 32;
/// Streams that the records are spread over, at most.
const STREAMS_MAX: u64 = 1000;

/// What to write and who reads it.
#[derive(clap::Args, Debug)]
pub(crate) struct PullArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Bytes to write first.
    #[arg(long, default_value_t = 64 << 20)]
    bytes: u64,
    /// Bytes of a record's value.
    #[arg(long, default_value_t = 512)]
    size: usize,
    /// Streams that the records are spread over, each commit over all of them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=STREAMS_MAX))]
    streams: u64,
    /// Consumers at once, each with a connection of its own; each reads one stream.
    #[arg(long, default_value_t = 1)]
    consumers: usize,
    /// Kills the node before the streams are read, so that everything comes from its disk.
    #[arg(long)]
    cold: bool,
}

pub(super) async fn run(args: &PullArgs, output: Output) -> Result<()> {
    ensure!(args.consumers > 0, "nobody reads");
    let mut target = Target::open(&args.target)?;
    let writer = target.connect.open().await?;
    let mut streams = Vec::new();
    for number in 0..args.streams {
        streams.push(ensure_stream(&writer, &format!("bench/pull/{number}")).await?);
    }
    let start = writer.read_version().await?;
    write(&writer, &streams, args).await?;
    let until = writer.read_version().await?;
    writer.close().await;
    let restart_s = match args.cold {
        true => Some(restart(&mut target)?.as_secs_f64()),
        false => None,
    };
    let handles = target.connections(args.consumers).await?;
    let before = Accounts::read(&handles[0], target.device()).await?;
    let began = Instant::now();
    let consumers: Vec<_> = handles
        .iter()
        .zip(streams.iter().cycle())
        .map(|(handle, stream)| {
            tokio::task::spawn_local(consume(handle.clone(), *stream, start, until))
        })
        .collect();
    let mut read = Read::default();
    for consumer in consumers {
        read.add(consumer.await.context("a consumer")??);
    }
    let seconds = began.elapsed().as_secs_f64();
    let costs = Accounts::read(&handles[0], target.device()).await?.since(&before)?;
    let json = json(args, &read, seconds, restart_s, &costs);
    output.print(&json, || {
        format!(
            "{} records, {} MB/s, {} records/s, {} bytes read for each",
            read.records, json["mb_per_s"], json["records_per_s"], json["read_amplification"]
        )
    })?;
    for handle in handles {
        handle.close().await;
    }
    target.close()
}

async fn write(client: &Client, streams: &[StreamId], args: &PullArgs) -> Result<()> {
    let record_count = args.bytes.div_ceil(args.size.max(1) as u64);
    let bar = progress("writing", record_count);
    let value = bytes::Bytes::from(vec![b'x'; args.size]);
    let mut in_flight = VecDeque::new();
    let mut written = 0;
    while written < record_count {
        let mut transaction = Transaction::new();
        let batch = BATCH_RECORDS.max(streams.len() as u64).min(record_count - written);
        for stream in streams.iter().cycle().take(usize::try_from(batch)?) {
            transaction.append(*stream, value.clone());
        }
        written += batch;
        in_flight.push_back(client.submit(transaction).await);
        if in_flight.len() >= WRITES_MAX
            && let Some(verdict) = in_flight.pop_front()
        {
            verdict.await?;
            bar.inc(batch);
        }
    }
    for verdict in in_flight {
        verdict.await?;
    }
    bar.finish_and_clear();
    Ok(())
}

/// How long the node takes from its start until it serves.
fn restart(target: &mut Target) -> Result<Duration> {
    let began = Instant::now();
    target.restart()?;
    Ok(began.elapsed())
}

/// What consumers got.
#[derive(Default)]
struct Read {
    records: u64,
    bytes: u64,
    answers: u64,
}

impl Read {
    fn add(&mut self, other: Self) {
        self.records += other.records;
        self.bytes += other.bytes;
        self.answers += other.answers;
    }
}

async fn consume(client: Client, stream: StreamId, start: Version, until: Version) -> Result<Read> {
    let mut pull = client.pull([stream], start).await?;
    let (mut through, mut read) = (start, Read::default());
    while through < until {
        let pulled = pull.next_until(until).await?;
        for block in pulled.batches.iter().flat_map(|batch| &batch.blocks) {
            read.records += u64::from(block.record_count);
            read.bytes +=
                block.sections().map(|(_, section)| section.records.len() as u64).sum::<u64>();
        }
        read.answers += 1;
        through = pulled.through;
    }
    Ok(read)
}

fn json(
    args: &PullArgs,
    read: &Read,
    seconds: f64,
    restart_s: Option<f64>,
    costs: &Costs,
) -> Value {
    json!({
        "streams": args.streams,
        "consumers": args.consumers,
        "cold": args.cold,
        "restart_s": restart_s.map(|seconds| round(seconds, 3)),
        "records": read.records,
        "bytes": read.bytes,
        "answers": read.answers,
        "seconds": round(seconds, 3),
        "mb_per_s": round(read.bytes as f64 / seconds / 1e6, 1),
        "records_per_s": (read.records as f64 / seconds).round(),
        "read_mb_per_s": round(costs.bytes_read as f64 / seconds / 1e6, 1),
        "read_amplification": round(costs.bytes_read as f64 / read.bytes.max(1) as f64, 3),
        "costs": costs.json(),
    })
}
