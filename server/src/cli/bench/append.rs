//! Durable appends in closed loops: one record a commit, or many.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use client::Transaction;
use client::face::Client;
use common::StreamId;
use serde_json::json;

use super::accounts::{Accounts, Costs};
use super::{Latencies, LoadArgs, Target, extend, round};
use crate::cli::output::{Output, progress};
use crate::ingest::ensure_stream;

/// Runs `append`, or `batch` with many records.
pub(super) async fn run(load: &LoadArgs, records: u64, size: usize, output: Output) -> Result<()> {
    let target = Target::open(&load.target)?;
    for clients in &load.clients {
        let connections = load.connections.clamp(1, *clients);
        let handles = target.connections(connections).await?;
        let stream = ensure_stream(&handles[0], "bench/append").await?;
        let measured = measure(&target, &handles, *clients, (stream, records, size), load).await?;
        let acks_per_s = measured.latencies.count() as f64 / measured.seconds;
        let mb_per_s = measured.costs.bytes_written as f64 / measured.seconds / 1e6;
        let mut json = measured.latencies.json();
        let rest = json!({
            "clients": clients,
            "connections": connections,
            "records": records,
            "size": size,
            "seconds": measured.seconds,
            "acks_per_s": acks_per_s.round(),
            "records_per_s": (acks_per_s * records as f64).round(),
            "flushes": measured.costs.flushes,
            "bytes": measured.costs.bytes_written,
            "mb_per_s": round(mb_per_s, 1),
            "costs": measured.costs.json(),
        });
        extend(&mut json, rest);
        output.print(&json, || {
            format!(
                "{clients:5} clients  {:>8} acks/s  p50 {:>6} us  p99 {:>6} us  {} flushes  {} MB/s to disk",
                json["acks_per_s"], json["p50_us"], json["p99_us"], json["flushes"], json["mb_per_s"]
            )
        })?;
        for handle in handles {
            handle.close().await;
        }
    }
    target.close()
}

struct Measured {
    latencies: Latencies,
    seconds: f64,
    costs: Costs,
}

async fn measure(
    target: &Target,
    handles: &[Client],
    clients: usize,
    (stream, records, size): (StreamId, u64, usize),
    load: &LoadArgs,
) -> Result<Measured> {
    let bar = progress("appending", 0);
    let value = Bytes::from(vec![b'x'; size]);
    let begin = Instant::now() + Duration::from_secs(load.warm_up_seconds);
    let end = begin + Duration::from_secs(load.seconds);
    let latencies = Rc::new(RefCell::new(Latencies::default()));
    let callers: Vec<_> = (0..clients)
        .map(|caller| {
            let client = handles[caller % handles.len()].clone();
            let (value, latencies, bar) = (value.clone(), Rc::clone(&latencies), bar.clone());
            tokio::task::spawn_local(async move {
                loop {
                    let sent = Instant::now();
                    if sent >= end {
                        return anyhow::Ok(());
                    }
                    let mut transaction = Transaction::new();
                    for _ in 0..records {
                        transaction.append(stream, value.clone());
                    }
                    client.commit(transaction).await?;
                    let now = Instant::now();
                    if sent >= begin && now <= end {
                        latencies.borrow_mut().record(now - sent);
                        bar.inc(1);
                    }
                }
            })
        })
        .collect();
    tokio::time::sleep_until(begin.into()).await;
    let before = Accounts::read(&handles[0], target.device()).await?;
    tokio::time::sleep_until(end.into()).await;
    let costs = Accounts::read(&handles[0], target.device()).await?.since(&before)?;
    for caller in callers {
        caller.await.context("a caller")??;
    }
    bar.finish_and_clear();
    Ok(Measured {
        latencies: latencies.replace(Latencies::default()),
        seconds: (end - begin).as_secs_f64(),
        costs,
    })
}
