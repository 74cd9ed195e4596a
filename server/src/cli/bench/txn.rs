//! Optimistic transactions in closed loops: read two keys, write both if nobody else has.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use client::Transaction;
use client::face::Client;
use common::{Code, Prng, StreamId};
use serde_json::json;

use super::accounts::Accounts;
use super::{Latencies, LoadArgs, Target, extend};
use crate::cli::output::Output;
use crate::ingest::ensure_stream;

struct Counts {
    latencies: RefCell<Latencies>,
    conflicts: Cell<u64>,
}

pub(super) async fn run(load: &LoadArgs, keys: u64, output: Output) -> Result<()> {
    let target = Target::open(&load.target)?;
    for clients in &load.clients {
        let connections = load.connections.clamp(1, *clients);
        let handles = target.connections(connections).await?;
        let stream = ensure_stream(&handles[0], "bench/txn").await?;
        let begin = Instant::now() + Duration::from_secs(load.warm_up_seconds);
        let end = begin + Duration::from_secs(load.seconds);
        let latencies = RefCell::new(Latencies::default());
        let counts = Rc::new(Counts { latencies, conflicts: Cell::new(0) });
        let callers: Vec<_> = (0..*clients)
            .map(|caller| {
                let client = handles[caller % handles.len()].clone();
                let counts = Rc::clone(&counts);
                let prng = Prng::derive(1, "bench.txn", caller as u64);
                tokio::task::spawn_local(call(client, stream, keys, prng, (begin, end), counts))
            })
            .collect();
        tokio::time::sleep_until(begin.into()).await;
        let before = Accounts::read(&handles[0], target.device()).await?;
        tokio::time::sleep_until(end.into()).await;
        let costs = Accounts::read(&handles[0], target.device()).await?.since(&before)?;
        for caller in callers {
            caller.await.context("a caller")??;
        }
        let latencies = counts.latencies.replace(Latencies::default());
        let (commits, conflicts) = (latencies.count(), counts.conflicts.get());
        let mut json = latencies.json();
        let rest = json!({
            "clients": clients,
            "connections": connections,
            "keys": keys,
            "commits_per_s": (commits as f64 / load.seconds as f64).round(),
            "conflict_ratio": conflicts as f64 / (commits + conflicts).max(1) as f64,
            "costs": costs.json(),
        });
        extend(&mut json, rest);
        output.print(&json, || {
            format!(
                "{clients:5} clients  {:>8} commits/s  p50 {:>6} us  p99 {:>6} us  conflicts {:.4}",
                json["commits_per_s"], json["p50_us"], json["p99_us"], json["conflict_ratio"]
            )
        })?;
        for handle in handles {
            handle.close().await;
        }
    }
    target.close()
}

async fn call(
    client: Client,
    stream: StreamId,
    keys: u64,
    mut prng: Prng,
    (begin, end): (Instant, Instant),
    counts: Rc<Counts>,
) -> Result<()> {
    loop {
        let sent = Instant::now();
        if sent >= end {
            return Ok(());
        }
        let first = prng.below(keys);
        let second = (first + 1 + prng.below(keys - 1)) % keys;
        let mut transaction = Transaction::new();
        transaction.conflict_on_keys().read_version(client.read_version().await?);
        for key in [first, second] {
            let key = key.to_be_bytes();
            transaction.read_point(&client::conflict_key(stream, &key));
            transaction.put(stream, key.to_vec(), sent.elapsed().as_nanos().to_le_bytes().to_vec());
        }
        let is_measured = sent >= begin;
        match client.commit(transaction).await {
            Ok(_) if is_measured => counts.latencies.borrow_mut().record(sent.elapsed()),
            Ok(_) => {}
            Err(error) if matches!(error.code(), Code::Conflict | Code::TooOld) => {
                counts.conflicts.set(counts.conflicts.get() + u64::from(is_measured));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
