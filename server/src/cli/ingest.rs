//! `millrace ingest`: an upstream's capture into streams, exactly once.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use client::face::Client;
use serde_json::json;

use super::bench::Latencies;
use super::connect::{ConnectArgs, block_on};
use super::exit::Exit;
use super::output::{Output, progress};
use crate::ingest::wal2json::Transactions;
use crate::ingest::{Ingester, Source, input};

/// Where the changes come from.
#[derive(Subcommand, Debug)]
pub(crate) enum IngestVerb {
    /// A capture of wal2json, format version 2, plain or zstd.
    Wal2json(Wal2jsonArgs),
}

/// Ingests a capture; a second run goes on where the log stands.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  millrace ingest wal2json changes.jsonl.zst --source shop --dir ./data\n\n\
    Each table becomes a stream `schema.table`; the position is kept in the stream `ingest/SOURCE`."
)]
pub(crate) struct Wal2jsonArgs {
    /// The capture.
    file: PathBuf,
    /// The upstream's name: one ingester at a time owns it.
    #[arg(long, default_value = "default")]
    source: String,
    /// What stands in front of table names in stream names.
    #[arg(long, default_value = "")]
    prefix: String,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs `ingest`.
///
/// # Errors
/// When the capture is damaged or the cluster is out of reach.
pub(crate) fn run(verb: &IngestVerb, output: Output) -> Result<Exit> {
    let IngestVerb::Wal2json(args) = verb;
    block_on(async {
        let client = args.connect.open().await?;
        let (name, prefix) = (args.source.clone(), args.prefix.clone());
        let source = Source { name, prefix, trims_positions: true };
        let mut latencies = Latencies::default();
        let report = ingest(&client, &source, args, &mut latencies).await?;
        client.close().await;
        let json = json!({
            "committed": latencies.count(),
            "resumed_at": report.0,
            "position": report.1,
            "commit_p50_us": latencies.quantile_us(0.5),
            "commit_p99_us": latencies.quantile_us(0.99),
        });
        output.print(&json, || {
            let (from, to) = report;
            format!("{} transactions committed, position {from} to {to}", latencies.count())
        })?;
        Ok(Exit::Done)
    })
}

async fn ingest(
    client: &Client,
    source: &Source,
    args: &Wal2jsonArgs,
    latencies: &mut Latencies,
) -> Result<(u64, u64)> {
    let bar = progress("ingesting", 0);
    let mut resumed_at = None;
    loop {
        let mut ingester = Ingester::claim(client, source).await?;
        resumed_at.get_or_insert(ingester.position());
        let mut acknowledged = |latency| {
            latencies.record(latency);
            bar.inc(1);
        };
        match pour(&mut ingester, args, &mut acknowledged).await {
            Ok(()) => {
                bar.finish_and_clear();
                return Ok((resumed_at.unwrap_or(0), ingester.position()));
            }
            // The log knows where to go on.
            Err(error) if super::is_interruption(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

async fn pour(
    ingester: &mut Ingester<'_>,
    args: &Wal2jsonArgs,
    acknowledged: &mut impl FnMut(std::time::Duration),
) -> Result<()> {
    for transaction in Transactions::new(input::open(&args.file)?) {
        ingester.take(&transaction?, acknowledged).await?;
    }
    ingester.finish(acknowledged).await
}
