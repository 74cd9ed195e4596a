//! How long nothing is acknowledged when a node goes, and whether anything is lost or doubled.
//!
//! ```text
//!  five child processes  <--- callers in closed loops, through the client library
//!      ^                              | every acknowledgement, with its time and place
//!      | SIGKILL by role              v
//!      '---- wait until whole -- gap -+- at the end: every stream read whole and compared
//! ```
//!
//! A *gap* is the longest time between two acknowledgements, of whichever callers, that ends after the kill.

mod cluster;
mod history;
mod load;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use client::face::Client;
use common::{StreamId, Version};
use rustix::process::Signal;
use serde_json::{Value, json};

use self::cluster::{Cluster, Roles};
use self::history::{Found, Verdict, judge};
use self::load::Load;
use crate::cli::connect::block_on;
use crate::cli::exit::Exit;
use crate::cli::output::{Output, complain};
use crate::ingest::ensure_stream;
use crate::register::Secret;

pub(super) const HELP: &str = "\
Examples:
  millrace bench failover --kills 50 -o json
  millrace bench failover --kills 20 --role leader --role handover

It runs five nodes of its own on this machine: three keep the log, two copies of each stream. Roles: leader,
log-server, proxy, resolver: SIGKILL of the node that has it; handover: SIGTERM of the leader. The exit code
is 1 when anything is lost, doubled or misplaced, or a caller has seen an error.";

/// Acknowledgements that every caller has before a kill, and after it.
const ACKNOWLEDGEMENTS: usize = 5;
/// How long the cluster rests between being whole and the next kill.
const REST: Duration = Duration::from_millis(300);
/// How long callers are watched after a kill, at least.
const WATCH: Duration = Duration::from_millis(500);
/// How long they are given to go on.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(5);

/// What goes.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// The node that leads; the sequencer lives there.
    Leader,
    /// A node that keeps the log.
    LogServer,
    /// A node with a proxy.
    Proxy,
    /// The resolver's node.
    Resolver,
    /// The leader, asked to stop.
    Handover,
    /// Each of them in turn.
    All,
}

const EACH: [Role; 5] =
    [Role::Leader, Role::LogServer, Role::Proxy, Role::Resolver, Role::Handover];

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::LogServer => "log-server",
            Self::Proxy => "proxy",
            Self::Resolver => "resolver",
            Self::Handover => "handover",
            Self::All => "all",
        }
    }

    const fn signal(self) -> Signal {
        if matches!(self, Self::Handover) { Signal::TERM } else { Signal::KILL }
    }

    /// Whose turn it is: one that does not lead as well, if there is one.
    fn victim(self, roles: &Roles, turn: u64) -> Option<u64> {
        let of = match self {
            Self::Leader | Self::Handover | Self::All => return Some(roles.leader),
            Self::LogServer => &roles.log_servers,
            Self::Proxy => &roles.proxies,
            Self::Resolver => &roles.resolvers,
        };
        let others: Vec<u64> = of.iter().copied().filter(|node| *node != roles.leader).collect();
        let of = if others.is_empty() { of } else { &others };
        of.get(usize::try_from(turn).ok()? % of.len().max(1)).copied()
    }
}

/// How often, and whom.
#[derive(Args, Debug)]
pub(crate) struct FailoverArgs {
    /// Kills of each role.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    kills: u64,
    /// Which role; several are possible.
    #[arg(long, value_enum, default_values_t = [Role::All])]
    role: Vec<Role>,
    /// Callers in closed loops.
    #[arg(long, value_name = "COUNT", default_value_t = 8,
        value_parser = clap::value_parser!(u64).range(1..=256))]
    clients: u64,
    /// Connections that they share.
    #[arg(long, value_name = "COUNT", default_value_t = 2,
        value_parser = clap::value_parser!(u64).range(1..=16))]
    connections: u64,
    /// The register: postgres://... or etcd://...; a file that the nodes share when not said.
    #[arg(long, value_name = "URL")]
    register: Option<Secret>,
    /// Sets a knob of every node; see `millrace knobs`.
    #[arg(long = "knob", value_name = "NAME=VALUE")]
    knobs: Vec<String>,
    /// Where the nodes keep everything, with their logs; a temporary directory, removed at the end, when not
    /// said.
    #[arg(long, value_name = "DIR")]
    scratch: Option<std::path::PathBuf>,
    /// Tells of each kill on stderr.
    #[arg(long)]
    verbose: bool,
}

/// What one role's kills have shown.
struct Section {
    role: Role,
    load: Load,
    gaps: Vec<Duration>,
    of_callers: Vec<Duration>,
    epochs: u64,
    led: u64,
}

/// Runs `bench failover`.
///
/// # Errors
/// When the cluster can't be run, or does not come back.
pub(super) fn run(args: &FailoverArgs, output: Output) -> Result<Exit> {
    let temporary = match &args.scratch {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix("millrace-failover-").tempdir()?),
    };
    let directory = args.scratch.as_deref().or(temporary.as_ref().map(tempfile::TempDir::path));
    let directory = directory.context("one of the two")?;
    std::fs::create_dir_all(directory)?;
    let directory = directory.canonicalize()?;
    let roles: Vec<Role> =
        if args.role.contains(&Role::All) { EACH.to_vec() } else { args.role.clone() };
    block_on(async {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let mut cluster = Cluster::start(args, &directory)?;
                let ran = measure(args, &roles, &mut cluster, output).await;
                cluster.stop().await?;
                ran
            })
            .await
    })
}

async fn measure(
    args: &FailoverArgs,
    roles: &[Role],
    cluster: &mut Cluster,
    output: Output,
) -> Result<Exit> {
    cluster.whole().await?;
    let mut clients = Vec::new();
    for _ in 0..args.connections.min(args.clients) {
        clients.push(cluster.connect().open().await?);
    }
    let mut sections = Vec::new();
    for role in roles {
        sections.push(kill(args, *role, cluster, &clients).await?);
    }
    cluster.whole().await?;
    let mut is_sound = true;
    for section in &sections {
        let json = report(section, &clients[0]).await?;
        let sum =
            |names: &[&str]| names.iter().filter_map(|name| json[*name].as_u64()).sum::<u64>();
        is_sound &= sum(&["lost", "doubled", "misplaced", "errors"]) == 0;
        output.print(&json, || text(&json))?;
    }
    for client in clients {
        client.close().await;
    }
    Ok(if is_sound { Exit::Done } else { Exit::No })
}

/// All kills of one role, under load.
async fn kill(
    args: &FailoverArgs,
    role: Role,
    cluster: &mut Cluster,
    clients: &[Client],
) -> Result<Section> {
    let mut streams = Vec::new();
    for caller in 0..args.clients {
        let name = format!("bench/failover/{}/{caller}", role.name());
        streams.push(ensure_stream(&clients[0], &name).await?);
    }
    let load = Load::start(clients, streams);
    let (gaps, of_callers) = (Vec::new(), Vec::new());
    let mut section = Section { role, load, gaps, of_callers, epochs: 0, led: 0 };
    for turn in 0..args.kills {
        let before = cluster.whole().await?;
        tokio::time::sleep(REST).await;
        go_on(&section.load, Instant::now()).await?;
        let victim = role.victim(&before, turn).context("every role is somewhere")?;
        let at = Instant::now();
        cluster.signal(victim, role.signal())?;
        go_on(&section.load, at).await?;
        tokio::time::sleep(WATCH).await;
        while !cluster.has_ended(victim)? {
            ensure!(at.elapsed() < PATIENCE, "node {victim} does not end");
            tokio::time::sleep(LOOK).await;
        }
        // What follows from its end, too.
        go_on(&section.load, Instant::now()).await?;
        let (gap, of_caller) = section.load.gaps(at);
        section.gaps.push(gap);
        section.of_callers.push(of_caller);
        section.led += u64::from(victim == before.leader);
        cluster.start_node(victim)?;
        let after = cluster.whole().await?;
        section.epochs += after.epoch - before.epoch;
        if args.verbose {
            let epochs = (before.epoch, after.epoch);
            let line = format!(
                "{} {turn}: node {victim} (leader {}), gap {gap:?}, of a caller {of_caller:?}, \
                 epochs {epochs:?}",
                role.name(),
                before.leader
            );
            complain(&line);
        }
    }
    section.load.finish().await?;
    Ok(section)
}

/// Waits until every caller has had some acknowledgements since.
async fn go_on(load: &Load, since: Instant) -> Result<()> {
    while load.fewest_since(since) < ACKNOWLEDGEMENTS {
        ensure!(since.elapsed() < PATIENCE, "nothing has been acknowledged for {PATIENCE:?}");
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

async fn report(section: &Section, client: &Client) -> Result<Value> {
    let mut verdict = Verdict::default();
    let (mut acknowledged, mut errors, mut first_error) = (0, 0, None);
    for (stream, told) in section.load.streams.iter().zip(&section.load.told) {
        let found = read(client, *stream).await?;
        let told = told.borrow();
        verdict.add(judge(&told.acknowledged, &found));
        acknowledged += told.acknowledged.len();
        errors += told.errors;
        first_error = first_error.or_else(|| told.first_error.clone());
    }
    let Verdict { lost, doubled, misplaced } = verdict;
    Ok(json!({
        "role": section.role.name(),
        "kills": section.gaps.len(),
        "gap_p50_ms": quantile_ms(&section.gaps, 50),
        "gap_p99_ms": quantile_ms(&section.gaps, 99),
        "gap_max_ms": quantile_ms(&section.gaps, 100),
        "caller_p50_ms": quantile_ms(&section.of_callers, 50),
        "caller_p99_ms": quantile_ms(&section.of_callers, 99),
        "lost": lost,
        "doubled": doubled,
        "misplaced": misplaced,
        "errors": errors,
        "first_error": first_error,
        "acknowledged": acknowledged,
        "epochs": section.epochs,
        "kills_of_the_leader": section.led,
    }))
}

fn text(json: &Value) -> String {
    let first_error = json["first_error"].as_str().map(|error| format!("\n  {error}"));
    format!(
        "{:<10}  {} kills  gap p50 {} ms, p99 {} ms, max {} ms  of {}: {} lost, {} doubled, {} misplaced, \
         {} errors{}",
        json["role"].as_str().unwrap_or_default(),
        json["kills"],
        json["gap_p50_ms"],
        json["gap_p99_ms"],
        json["gap_max_ms"],
        json["acknowledged"],
        json["lost"],
        json["doubled"],
        json["misplaced"],
        json["errors"],
        first_error.unwrap_or_default()
    )
}

/// The smallest of them that so many of a hundred do not exceed.
fn quantile_ms(all: &[Duration], percent: usize) -> f64 {
    let mut sorted = all.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    let found = sorted.get(rank - 1).copied().unwrap_or_default();
    (found.as_secs_f64() * 10_000.0).round() / 10.0
}

/// A stream from its beginning through what is committed now.
async fn read(client: &Client, stream: StreamId) -> Result<Vec<Found>> {
    let until = client.read_version().await?;
    let mut pull = client.pull([stream], Version::ZERO).await?;
    let mut all = Vec::new();
    loop {
        let pulled = pull.next_until(until).await?;
        for batch in &pulled.batches {
            for delivered in batch.records()? {
                all.push(Found {
                    number: std::str::from_utf8(&delivered.record.value)?.parse()?,
                    position: (delivered.position.version.0, delivered.position.index),
                    offset: delivered.offset.0,
                });
            }
        }
        if pulled.through >= until {
            return Ok(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_what_was_measured() {
        let all: Vec<Duration> = (1..=50).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile_ms(&all, 50), 25.0);
        assert_eq!(quantile_ms(&all, 99), 50.0);
        assert_eq!(quantile_ms(&[], 50), 0.0);
    }

    #[test]
    fn who_leads_is_spared_while_somebody_else_has_the_role() {
        let roles = Roles {
            epoch: 1,
            leader: 3,
            proxies: vec![1, 2],
            resolvers: vec![3],
            log_servers: vec![3, 4, 5],
        };
        let of =
            |role: Role| (0..3).map(|turn| role.victim(&roles, turn).unwrap()).collect::<Vec<_>>();
        assert_eq!(of(Role::LogServer), [4, 5, 4]);
        assert_eq!(of(Role::Resolver), [3, 3, 3]);
        assert_eq!(of(Role::Handover), [3, 3, 3]);
    }
}
