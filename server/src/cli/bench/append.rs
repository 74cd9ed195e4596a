//! Durable appends in closed loops.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use client::Transaction;
use client::face::Client;
use common::StreamId;
use serde_json::json;

use super::{DiskCounters, Latencies, LoadArgs, Target};
use crate::cli::output::{Output, progress};
use crate::ingest::ensure_stream;

pub(super) async fn run(load: &LoadArgs, size: usize, output: Output) -> Result<()> {
    let target = Target::open(&load.target)?;
    for clients in &load.clients {
        let connections = load.connections.clamp(1, *clients);
        let handles = target.connections(connections).await?;
        let stream = ensure_stream(&handles[0], "bench/append").await?;
        let measured = measure(&handles, *clients, stream, size, load).await?;
        let json = json!({
            "clients": clients,
            "connections": connections,
            "size": size,
            "seconds": measured.seconds,
            "acks_per_s": (measured.latencies.count() as f64 / measured.seconds).round(),
            "p50_us": measured.latencies.quantile_us(0.5),
            "p99_us": measured.latencies.quantile_us(0.99),
            "p999_us": measured.latencies.quantile_us(0.999),
            "flushes": measured.flushes,
            "bytes": measured.bytes,
        });
        output.print(&json, || {
            format!(
                "{clients:5} clients  {:>8} acks/s  p50 {:>6} us  p99 {:>6} us  {} flushes  {} bytes",
                json["acks_per_s"], json["p50_us"], json["p99_us"], json["flushes"], json["bytes"]
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
    flushes: u64,
    bytes: u64,
}

async fn measure(
    handles: &[Client],
    clients: usize,
    stream: StreamId,
    size: usize,
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
                    transaction.append(stream, value.clone());
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
    let before = DiskCounters::read(&handles[0]).await?;
    tokio::time::sleep_until(end.into()).await;
    let after = DiskCounters::read(&handles[0]).await?;
    for caller in callers {
        caller.await.context("a caller")??;
    }
    bar.finish_and_clear();
    Ok(Measured {
        latencies: latencies.replace(Latencies::default()),
        seconds: (end - begin).as_secs_f64(),
        flushes: after.flushes - before.flushes,
        bytes: after.bytes - before.bytes,
    })
}
