//! Act 1: one ingester replays the upstream; the node dies in the middle; a stream engine keeps the tables.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use client::face::Client;
use common::{StreamId, Version};
use serde_json::{Map, Value, json};

use super::tpcb::{BALANCES, Capture, HISTORY, integer};
use crate::cli::bench::Latencies;
use crate::cli::child::ChildNode;
use crate::cli::connect::ConnectArgs;
use crate::cli::output::progress;
use crate::ingest::{Ingester, Source, Table, ensure_stream, parse_position, position_stream};

const SOURCE: &str = "pgbench";

/// What came of it.
pub(super) struct Ingested {
    committed: u64,
    versions: u64,
    resumed_after_kill: bool,
    rows_checked: u64,
    rows_wrong: u64,
    is_complete: bool,
    latencies: Latencies,
}

impl Ingested {
    pub(super) const fn is_right(&self) -> bool {
        self.rows_wrong == 0 && self.is_complete
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "committed": self.committed,
            "versions": self.versions,
            "resumed_after_kill": self.resumed_after_kill,
            "rows_checked": self.rows_checked,
            "rows_wrong": self.rows_wrong,
            "commit_p50_us": self.latencies.quantile_us(0.5),
            "commit_p99_us": self.latencies.quantile_us(0.99),
        })
    }

    pub(super) fn text(&self) -> String {
        format!(
            "ingest     {} commits in {} versions, p50 {} us, p99 {} us; {}; {} rows checked, {} wrong",
            self.committed,
            self.versions,
            self.latencies.quantile_us(0.5),
            self.latencies.quantile_us(0.99),
            if self.resumed_after_kill { "resumed after SIGKILL" } else { "never resumed" },
            self.rows_checked,
            self.rows_wrong
        )
    }
}

pub(super) async fn run(
    capture: &Capture,
    node: &mut ChildNode,
    connect: &ConnectArgs,
) -> Result<Ingested> {
    let client = connect.open().await?;
    // Every position is kept, for the engine to check that none is missing or doubled.
    let source = Source { name: SOURCE.to_owned(), prefix: String::new(), trims_positions: false };
    let mut latencies = Latencies::default();
    let resumed_after_kill = ingest(capture, node, &client, &source, &mut latencies).await?;

    // The engine is somebody else: it knows nothing but the log.
    let engine = connect.open().await?;
    let fold = Fold::of_the_log(&engine, &source).await?;
    let (rows_checked, rows_wrong) = fold.compare(capture)?;
    let expected: Vec<u64> = capture.transactions.iter().map(|source| source.ordinal).collect();
    engine.close().await;
    client.close().await;
    Ok(Ingested {
        committed: fold.ordinals.len() as u64,
        versions: fold.versions,
        resumed_after_kill,
        rows_checked,
        rows_wrong,
        is_complete: fold.ordinals == expected,
        latencies,
    })
}

/// Replays everything; whether it was resumed in the middle.
async fn ingest(
    capture: &Capture,
    node: &mut ChildNode,
    client: &Client,
    source: &Source,
    latencies: &mut Latencies,
) -> Result<bool> {
    let bar = progress("ingesting", capture.transactions.len() as u64);
    let middle = capture.transactions[capture.transactions.len() / 2].ordinal;
    let (mut killed, mut resumed) = (false, false);
    loop {
        let mut ingester = Ingester::claim(client, source).await?;
        resumed |= killed && ingester.position() > 0;
        let mut acknowledged = |latency| {
            latencies.record(latency);
            bar.inc(1);
        };
        let mut poured = Ok(());
        for transaction in &capture.transactions {
            poured = ingester.take(transaction, &mut acknowledged).await;
            if poured.is_err() {
                break;
            }
            if !killed && transaction.ordinal == middle {
                killed = true;
                // With commits on their way.
                node.kill_and_restart()?;
            }
        }
        if poured.is_ok() {
            poured = ingester.finish(&mut acknowledged).await;
        }
        match poured {
            Ok(()) => {
                bar.finish_and_clear();
                return Ok(resumed);
            }
            Err(error) if killed && crate::cli::is_interruption(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The tables as the log tells them.
struct Fold {
    tables: BTreeMap<String, Table>,
    /// The ordinals of the source transactions, in the log's order.
    ordinals: Vec<u64>,
    versions: u64,
}

impl Fold {
    async fn of_the_log(client: &Client, source: &Source) -> Result<Self> {
        let names: Vec<&str> = BALANCES.iter().map(|balance| balance.1).chain([HISTORY]).collect();
        let mut streams: BTreeMap<StreamId, &str> = BTreeMap::new();
        for name in &names {
            streams.insert(ensure_stream(client, name).await?, name);
        }
        let positions = ensure_stream(client, &position_stream(&source.name)).await?;
        let mut fold = Self { tables: BTreeMap::new(), ordinals: Vec::new(), versions: 0 };
        let until = client.read_version().await?;
        let mut pull = client.pull(streams.keys().copied(), Version::ZERO).await?;
        let mut through = Version::ZERO;
        while through < until {
            let pulled = pull.next_until(until).await?;
            for batch in &pulled.batches {
                fold.versions += 1;
                for delivered in batch.records()? {
                    let record = &delivered.record;
                    let name =
                        streams.get(&delivered.stream).context("a stream that was asked for")?;
                    let table = fold.tables.entry((*name).to_owned()).or_default();
                    table.fold(record.op, &record.key, &record.value)?;
                }
            }
            through = pulled.through;
        }
        fold.read_ordinals(client, positions, until).await?;
        Ok(fold)
    }

    /// Each source transaction has left one position record.
    async fn read_ordinals(
        &mut self,
        client: &Client,
        stream: StreamId,
        until: Version,
    ) -> Result<()> {
        let mut pull = client.pull([stream], Version::ZERO).await?;
        let mut through = Version::ZERO;
        while through < until {
            let pulled = pull.next_until(until).await?;
            for batch in &pulled.batches {
                for delivered in batch.records()? {
                    self.ordinals.push(parse_position(&delivered.record.value)?);
                }
            }
            through = pulled.through;
        }
        Ok(())
    }

    /// Rows checked and rows wrong. Every row began with 0; one that no transaction touched is not in the
    /// log.
    fn compare(&self, capture: &Capture) -> Result<(u64, u64)> {
        let found = self.balances()?;
        let differs =
            |(row, balance): &(&(String, u64), &i64)| found.get(*row).unwrap_or(&0) != *balance;
        let wrong = capture.expected.iter().filter(differs).count();
        let foreign = found.keys().filter(|row| !capture.expected.contains_key(*row)).count();
        Ok((capture.expected.len() as u64, (wrong + foreign) as u64))
    }

    /// Short table name and key, to balance.
    fn balances(&self) -> Result<BTreeMap<(String, u64), i64>> {
        let mut found = BTreeMap::new();
        for (short, table, key_column, column) in BALANCES {
            let rows = self.tables.get(table).map(|table| &table.rows);
            for value in rows.into_iter().flat_map(BTreeMap::values) {
                let row: Map<String, Value> = serde_json::from_slice(value)?;
                let key = u64::try_from(integer(&row, key_column)?)?;
                found.insert((short.to_owned(), key), integer(&row, column)?);
            }
        }
        Ok(found)
    }
}
