//! `millrace bench`: closed loops against a node in another process.
//!
//! A *client* is one caller that has one request on its way at a time. Callers share connections, as the
//! tasks of a service do. Figures depend on the machine: compare them only within one run.

mod append;
mod failover;
mod pull;
mod resolver;
mod txn;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use client::face::Client;
use hdrhistogram::Histogram;
use serde_json::Value;

use super::child::ChildNode;
use super::connect::{ConnectArgs, block_on};
use super::exit::Exit;
use super::output::Output;

/// Latencies in microseconds.
#[derive(Debug)]
pub(crate) struct Latencies {
    histogram: Histogram<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new(3).expect("3 digits are allowed");
        Self { histogram }
    }
}

impl Latencies {
    /// Counts one.
    pub(crate) fn record(&mut self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        // A histogram that resizes takes any value.
        let _ = self.histogram.record(us.max(1));
    }

    /// How many were counted.
    #[must_use]
    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// A quantile in microseconds; 0 when nothing was counted.
    #[must_use]
    pub(crate) fn quantile_us(&self, quantile: f64) -> u64 {
        self.histogram.value_at_quantile(quantile)
    }
}

/// What to measure.
#[derive(Subcommand, Debug)]
pub(crate) enum BenchVerb {
    /// Durable appends, one record a commit.
    #[command(
        after_help = "Example:\n  millrace bench append --clients 1,16,64,256 --size 512 -o json"
    )]
    Append {
        #[command(flatten)]
        load: LoadArgs,
        /// Bytes of a record's value.
        #[arg(long, default_value_t = 512)]
        size: usize,
    },
    /// Transactions that read two of many keys and write both if nobody else has.
    #[command(after_help = "Example:\n  millrace bench txn --clients 64 --keys 100000")]
    Txn {
        #[command(flatten)]
        load: LoadArgs,
        /// How many keys there are.
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(2..))]
        keys: u64,
    },
    /// Catching up: reads a stream from its beginning.
    #[command(after_help = "Example:\n  millrace bench pull --bytes 268435456 --size 512")]
    Pull {
        #[command(flatten)]
        target: TargetArgs,
        /// Bytes to write first.
        #[arg(long, default_value_t = 64 << 20)]
        bytes: u64,
        /// Bytes of a record's value.
        #[arg(long, default_value_t = 512)]
        size: usize,
    },
    /// Kills nodes of a cluster of its own, by role: how long nothing is acknowledged, and whether anything
    /// is lost or doubled.
    #[command(after_help = failover::HELP)]
    Failover(failover::FailoverArgs),
    /// The conflict set alone: no node, one thread, CPU time.
    #[command(after_help = "Example:\n  millrace bench resolver --workload P1 -o json")]
    Resolver(resolver::ResolverArgs),
}

/// Which node to measure.
#[derive(Args, Debug)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Where a node of the bench's own keeps its data, when none is named; a temporary directory by default.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
}

/// How hard.
#[derive(Args, Debug)]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Callers at once; one run for each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256])]
    clients: Vec<usize>,
    /// Connections that they share; at most one each.
    #[arg(long, default_value_t = 4)]
    connections: usize,
    /// How long each run is measured, seconds.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// How long each run goes on before it is measured, seconds.
    #[arg(long, default_value_t = 1)]
    warm_up_seconds: u64,
}

/// The node under measurement; one of our own ends with it.
struct Target {
    connect: ConnectArgs,
    child: Option<ChildNode>,
    _temporary: Option<tempfile::TempDir>,
}

impl Target {
    fn open(args: &TargetArgs) -> Result<Self> {
        if !args.connect.connect.is_empty() || args.connect.dir.is_some() {
            return Ok(Self { connect: args.connect.clone(), child: None, _temporary: None });
        }
        let temporary = match args.scratch {
            Some(_) => None,
            None => Some(tempfile::Builder::new().prefix("millrace-bench-").tempdir()?),
        };
        let directory =
            args.scratch.clone().or_else(|| Some(temporary.as_ref()?.path().to_owned()));
        let directory = directory.context("one of the two is there")?;
        let child = Some(ChildNode::start(&directory)?);
        Ok(Self { connect: ConnectArgs::local(&directory), child, _temporary: temporary })
    }

    async fn connections(&self, count: usize) -> Result<Vec<Client>> {
        let mut clients = Vec::new();
        for _ in 0..count {
            clients.push(self.connect.open().await?);
        }
        Ok(clients)
    }

    fn close(self) -> Result<()> {
        self.child.map_or(Ok(()), ChildNode::stop)
    }
}

/// Counters of the node's disk.
#[derive(Clone, Copy, Debug)]
struct DiskCounters {
    flushes: u64,
    bytes: u64,
}

impl DiskCounters {
    async fn read(client: &Client) -> Result<Self> {
        let report: Value = serde_json::from_str(&client.status().await?)?;
        let number = |name: &str| report["disk"][name].as_u64().context("a counter in the status");
        Ok(Self { flushes: number("flushes")?, bytes: number("bytes_written")? })
    }
}

/// Runs `bench`.
///
/// # Errors
/// When the node can't be reached or a request fails.
pub(crate) fn run(verb: &BenchVerb, output: Output) -> Result<Exit> {
    if let BenchVerb::Resolver(args) = verb {
        resolver::run(args, output)?;
        return Ok(Exit::Done);
    }
    if let BenchVerb::Failover(args) = verb {
        return failover::run(args, output);
    }
    block_on(async {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                match verb {
                    BenchVerb::Append { load, size } => append::run(load, *size, output).await,
                    BenchVerb::Txn { load, keys } => txn::run(load, *keys, output).await,
                    BenchVerb::Pull { target, bytes, size } => {
                        pull::run(target, *bytes, *size, output).await
                    }
                    // They have nodes of their own, or none, and were run above.
                    BenchVerb::Failover(_) | BenchVerb::Resolver(_) => Ok(()),
                }
            })
            .await
    })?;
    Ok(Exit::Done)
}
