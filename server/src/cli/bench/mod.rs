//! `millrace bench`: closed and open loops against a node in another process.
//!
//! A *client* is one caller that has one request on its way at a time. Callers share connections, as the
//! tasks of a service do. Figures depend on the machine: compare them only within one run.

mod accounts;
mod append;
mod failover;
mod pull;
mod resolver;
mod tail;
mod txn;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use client::face::Client;
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::child::ChildNode;
use super::connect::{ConnectArgs, block_on};
use super::exit::{Exit, Failure};
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

    /// As it stands in a result.
    #[must_use]
    pub(crate) fn json(&self) -> Value {
        json!({
            "p50_us": self.quantile_us(0.5),
            "p90_us": self.quantile_us(0.9),
            "p99_us": self.quantile_us(0.99),
            "p999_us": self.quantile_us(0.999),
            "max_us": self.histogram.max(),
        })
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
    /// Durable appends, many records a commit.
    #[command(after_help = "Example:\n  millrace bench batch --records 100 --clients 1,16 -o json")]
    Batch {
        #[command(flatten)]
        load: LoadArgs,
        /// Records of a commit.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=100_000))]
        records: u64,
        /// Bytes of a record's value.
        #[arg(long, default_value_t = 512)]
        size: usize,
    },
    /// How late records are durable, and how late a consumer has them, at a fixed rate: an open loop.
    #[command(
        after_help = "Example:\n  millrace bench tail --rate 1000,5000 --duration 10 -o json"
    )]
    Tail(tail::TailArgs),
    /// Transactions that read two of many keys and write both if nobody else has.
    #[command(after_help = "Example:\n  millrace bench txn --clients 64 --keys 100000")]
    Txn {
        #[command(flatten)]
        load: LoadArgs,
        /// How many keys there are.
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(2..))]
        keys: u64,
    },
    /// Catching up: reads streams from their beginning.
    #[command(
        visible_alias = "catch-up",
        after_help = "Example:\n  \
        millrace bench pull --bytes 1073741824 --size 512 --cold -o json"
    )]
    Pull(pull::PullArgs),
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
    /// Sets a knob of the bench's own node (see `millrace knobs`).
    #[arg(long = "knob", value_name = "NAME=VALUE")]
    knobs: Vec<String>,
    /// How long the bench's own node looks for work before it sleeps: see `millrace serve --help`.
    #[arg(long, value_name = "MICROSECONDS")]
    idle_poll_us: Option<u64>,
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
    #[arg(long, visible_alias = "duration", default_value_t = 5)]
    seconds: u64,
    /// How long each run goes on before it is measured, seconds.
    #[arg(long, default_value_t = 1)]
    warm_up_seconds: u64,
}

/// The node under measurement; one of our own ends with it.
struct Target {
    connect: ConnectArgs,
    child: Option<ChildNode>,
    /// Where the system counts what its disk does.
    device: Option<PathBuf>,
    _temporary: Option<tempfile::TempDir>,
}

impl Target {
    fn open(args: &TargetArgs) -> Result<Self> {
        let connect = args.connect.clone();
        if !connect.connect.is_empty() || connect.dir.is_some() {
            if !args.knobs.is_empty() || args.idle_poll_us.is_some() {
                let what = "--knob and --idle-poll-us are for a node of the bench's own";
                return Err(Failure::usage(what).into());
            }
            let device = connect.dir.as_deref().and_then(accounts::device_of);
            return Ok(Self { connect, child: None, device, _temporary: None });
        }
        let temporary = match args.scratch {
            Some(_) => None,
            None => Some(tempfile::Builder::new().prefix("millrace-bench-").tempdir()?),
        };
        let directory =
            args.scratch.clone().or_else(|| Some(temporary.as_ref()?.path().to_owned()));
        let directory = directory.context("one of the two is there")?;
        let knobs = args.knobs.iter().flat_map(|knob| ["--knob".to_owned(), knob.clone()]);
        let poll = args.idle_poll_us.into_iter();
        let poll = poll.flat_map(|us| ["--idle-poll-us".to_owned(), us.to_string()]);
        let child = Some(ChildNode::start_with(&directory, knobs.chain(poll).collect())?);
        let device = accounts::device_of(&directory);
        Ok(Self { connect: ConnectArgs::local(&directory), child, device, _temporary: temporary })
    }

    fn device(&self) -> Option<&Path> {
        self.device.as_deref()
    }

    /// Kills the bench's own node and starts it again: its memory is empty then.
    fn restart(&mut self) -> Result<()> {
        let what = "only a node of the bench's own can be killed: leave --dir and --connect out";
        self.child.as_mut().ok_or_else(|| Failure::usage(what))?.kill_and_restart()
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

/// Adds the fields of one JSON object to another.
fn extend(json: &mut Value, rest: Value) {
    if let (Value::Object(json), Value::Object(rest)) = (json, rest) {
        json.extend(rest);
    }
}

/// A number with so many digits behind the point.
fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
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
                    BenchVerb::Append { load, size } => append::run(load, 1, *size, output).await,
                    BenchVerb::Batch { load, records, size } => {
                        append::run(load, *records, *size, output).await
                    }
                    BenchVerb::Tail(args) => tail::run(args, output).await,
                    BenchVerb::Txn { load, keys } => txn::run(load, *keys, output).await,
                    BenchVerb::Pull(args) => pull::run(args, output).await,
                    // They have nodes of their own, or none, and were run above.
                    BenchVerb::Failover(_) | BenchVerb::Resolver(_) => Ok(()),
                }
            })
            .await
    })?;
    Ok(Exit::Done)
}
