//! Catching up: how fast a consumer gets what is in the log.

use std::time::Instant;

use anyhow::Result;
use client::Transaction;
use common::Version;
use serde_json::json;

use super::{Target, TargetArgs};
use crate::cli::output::{Output, progress};
use crate::ingest::ensure_stream;

/// Records of one commit while writing.
const BATCH_RECORDS: u64 = 100;
/// Commits on their way while writing.
const WRITES_MAX: usize = 32;

pub(super) async fn run(args: &TargetArgs, bytes: u64, size: usize, output: Output) -> Result<()> {
    let target = Target::open(args)?;
    let client = target.connect.open().await?;
    let stream = ensure_stream(&client, "bench/pull").await?;
    let start = client.read_version().await?;
    let record_count = bytes.div_ceil(size.max(1) as u64);
    let bar = progress("writing", record_count);
    let value = bytes::Bytes::from(vec![b'x'; size]);
    let mut in_flight = std::collections::VecDeque::new();
    let mut written = 0;
    while written < record_count {
        let mut transaction = Transaction::new();
        let batch = BATCH_RECORDS.min(record_count - written);
        for _ in 0..batch {
            transaction.append(stream, value.clone());
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

    let until = client.read_version().await?;
    let began = Instant::now();
    let mut pull = client.pull([stream], start).await?;
    let (mut through, mut records, mut pulled_bytes) = (Version::ZERO, 0_u64, 0_u64);
    while through < until {
        let pulled = pull.next_until(until).await?;
        for block in pulled.batches.iter().flat_map(|batch| &batch.blocks) {
            records += u64::from(block.record_count);
            pulled_bytes +=
                block.sections().map(|(_, section)| section.records.len() as u64).sum::<u64>();
        }
        through = pulled.through;
    }
    let seconds = began.elapsed().as_secs_f64();
    let json = json!({
        "records": records,
        "bytes": pulled_bytes,
        "seconds": seconds,
        "mb_per_s": (pulled_bytes as f64 / seconds / 1e6).round(),
        "records_per_s": (records as f64 / seconds).round(),
    });
    output.print(&json, || {
        format!("{records} records, {} MB/s, {} records/s", json["mb_per_s"], json["records_per_s"])
    })?;
    client.close().await;
    target.close()
}
