//! Act 2: concurrent frontends execute the same transactions anew, as SQL frontends would, on fresh streams.
//!
//! Each frontend has a connection and a view of its own. A transaction reads three balances at a read
//! version, adds the delta, and commits with those reads and writes; whoever was overtaken does it again. The
//! order is whatever it is: the four sums agree.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result};
use client::face::{Client, LiveView};
use client::{Error, View};
use common::{Code, StreamId, Version};
use serde_json::{Value, json};

use super::tpcb::{BALANCES, Capture, Transfer};
use crate::cli::bench::Latencies;
use crate::cli::connect::ConnectArgs;
use crate::cli::output::progress;
use crate::ingest::ensure_stream;

const STREAMS: [&str; 4] =
    ["frontends/accounts", "frontends/tellers", "frontends/branches", "frontends/history"];
const HISTORY: usize = 3;

/// What came of it.
pub(super) struct Executed {
    committed: u64,
    versions: u64,
    conflicts_retried: u64,
    sums: [i64; 4],
    expected_sum: i64,
    expected_count: u64,
    latencies: Latencies,
}

impl Executed {
    pub(super) fn is_right(&self) -> bool {
        self.committed == self.expected_count
            && self.sums.iter().all(|sum| *sum == self.expected_sum)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "committed": self.committed,
            "versions": self.versions,
            "conflicts_retried": self.conflicts_retried,
            "sums": {
                "accounts": self.sums[0],
                "tellers": self.sums[1],
                "branches": self.sums[2],
                "history": self.sums[3],
            },
            "commit_p50_us": self.latencies.quantile_us(0.5),
            "commit_p99_us": self.latencies.quantile_us(0.99),
        })
    }

    pub(super) fn text(&self) -> String {
        format!(
            "frontends  {} commits in {} versions, p50 {} us, p99 {} us; {} conflicts retried; sums {:?}",
            self.committed,
            self.versions,
            self.latencies.quantile_us(0.5),
            self.latencies.quantile_us(0.99),
            self.conflicts_retried,
            self.sums
        )
    }
}

/// What the frontends share: the work, and the counts.
struct Desk {
    transfers: Vec<Transfer>,
    next: Cell<usize>,
    conflicts: Cell<u64>,
    latencies: RefCell<Latencies>,
    bar: indicatif::ProgressBar,
}

pub(super) async fn run(
    capture: &Capture,
    connect: &ConnectArgs,
    frontend_count: u32,
) -> Result<Executed> {
    let transfers: Vec<Transfer> =
        capture.transactions.iter().map(Transfer::of).collect::<Result<_>>()?;
    let expected_sum = transfers.iter().map(|transfer| transfer.delta).sum();
    let expected_count = transfers.len() as u64;
    let client = connect.open().await?;
    let mut streams = [StreamId::ZERO; 4];
    for (stream, name) in streams.iter_mut().zip(STREAMS) {
        *stream = ensure_stream(&client, name).await?;
    }
    let desk = Rc::new(Desk {
        bar: progress("executing", expected_count),
        transfers,
        next: Cell::new(0),
        conflicts: Cell::new(0),
        latencies: RefCell::new(Latencies::default()),
    });
    let local = tokio::task::LocalSet::new();
    let mut frontends = Vec::new();
    for _ in 0..frontend_count {
        let (connect, desk) = (connect.clone(), Rc::clone(&desk));
        frontends.push(local.spawn_local(async move {
            let client = connect.open().await?;
            let done = work(&client, &streams, &desk).await;
            client.close().await;
            done
        }));
    }
    local
        .run_until(async {
            for frontend in frontends {
                frontend.await.context("a frontend")??;
            }
            anyhow::Ok(())
        })
        .await?;
    desk.bar.finish_and_clear();
    let (sums, committed, versions) = sums(&client, &streams).await?;
    client.close().await;
    Ok(Executed {
        committed,
        versions,
        conflicts_retried: desk.conflicts.get(),
        sums,
        expected_sum,
        expected_count,
        latencies: desk.latencies.replace(Latencies::default()),
    })
}

async fn work(client: &Client, streams: &[StreamId; 4], desk: &Desk) -> Result<()> {
    let mut view = client.live_view(streams[..HISTORY].iter().copied()).await?;
    while let Some(transfer) = desk.transfers.get(desk.next.replace(desk.next.get() + 1)) {
        while !execute(client, &mut view, streams, transfer, desk).await? {
            desk.conflicts.set(desk.conflicts.get() + 1);
        }
        desk.bar.inc(1);
    }
    Ok(())
}

/// One attempt; `false` when somebody else was faster.
async fn execute(
    client: &Client,
    view: &mut LiveView,
    streams: &[StreamId; 4],
    transfer: &Transfer,
    desk: &Desk,
) -> Result<bool> {
    let mut transaction = view.begin().await?;
    view.prune(transaction.read_version());
    let keys = [transfer.account, transfer.teller, transfer.branch];
    for (stream, key) in streams.iter().zip(keys) {
        let key = key.to_be_bytes().to_vec();
        let balance = match transaction.value(view.view(), *stream, &key)? {
            Some(value) => i64::from_be_bytes(value[..].try_into().context("a balance")?),
            None => 0,
        };
        let balance = (balance + transfer.delta).to_be_bytes().to_vec();
        transaction.put(*stream, key, balance);
    }
    transaction.transaction().append(streams[HISTORY], transfer.delta.to_be_bytes().to_vec());
    let sent = Instant::now();
    match client.commit(transaction.finish()).await {
        Ok(_) => {
            desk.latencies.borrow_mut().record(sent.elapsed());
            Ok(true)
        }
        Err(Error::Retry { refusal, .. })
            if matches!(refusal.code(), Code::Conflict | Code::TooOld) =>
        {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// The sums over the three tables and the history, as a consumer finds them in the log.
async fn sums(client: &Client, streams: &[StreamId; 4]) -> Result<([i64; 4], u64, u64)> {
    let until = client.read_version().await?;
    let mut pull = client.pull(streams.iter().copied(), Version::ZERO).await?;
    let (mut view, mut through) = (View::new(), Version::ZERO);
    let (mut history, mut commits, mut versions) = (0, 0, 0);
    while through < until {
        let pulled = pull.next_until(until).await?;
        for batch in &pulled.batches {
            versions += 1;
            for delivered in
                batch.records()?.iter().filter(|found| found.stream == streams[HISTORY])
            {
                let delta = delivered.record.value[..].try_into().context("a delta")?;
                history += i64::from_be_bytes(delta);
                commits += 1;
            }
        }
        view.follow(&pulled.batches, pulled.through)?;
        view.prune(pulled.through);
        through = pulled.through;
    }
    let mut sums = [0; 4];
    for (place, _) in BALANCES.iter().enumerate() {
        let rows: BTreeMap<_, _> = view.scan(streams[place], b"", None, view.through())?.collect();
        for value in rows.values() {
            sums[place] += i64::from_be_bytes(value[..].try_into().context("a balance")?);
        }
    }
    sums[HISTORY] = history;
    Ok((sums, commits, versions))
}
