//! The conflict set on named workloads, and the machine's own speed to judge the figures by.
//!
//! All times are CPU times of the thread, so that neighbours on the machine count as little as can be.
//! Generating a batch is not timed; deciding it, taking in its writes and eviction are.

mod calibrate;
mod shards;

use ::resolver::conflict::ConflictSet;
use ::resolver::workload::{Batch, Transaction, WORKLOADS, Workload};
use anyhow::{Result, bail};
use clap::Args;
use common::message::Verdict;
use common::{Knobs, Version};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::round;
use crate::cli::output::{Output, progress};

/// What to measure.
#[derive(Args, Debug)]
pub(crate) struct ResolverArgs {
    /// The workload, or `all`.
    #[arg(long, default_value = "all")]
    workload: String,
    /// How often, one result each.
    #[arg(long, default_value_t = 1)]
    repeat: usize,
    /// Over so many resolvers at once, a thread each; one result for each count.
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    shards: Vec<usize>,
    /// With `--shards`: the resolvers are told what became of a batch so many batches later.
    #[arg(long, value_name = "BATCHES", requires = "shards")]
    settle: Option<std::num::NonZeroUsize>,
    /// With `--settle`: over so many proxies, whose batches take turns.
    #[arg(long, value_name = "COUNT", default_value = "1", requires = "settle")]
    proxies: std::num::NonZeroU8,
    /// Measures the machine instead: dependent cache misses and sorting.
    #[arg(long)]
    calibrate: bool,
}

/// CPU time of this thread, ns.
pub(super) fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// What a node lets eviction look at after each batch.
fn eviction_entries() -> usize {
    usize::try_from(Knobs::default().eviction_entries).unwrap_or(usize::MAX)
}

pub(super) fn run(args: &ResolverArgs, output: Output) -> Result<()> {
    if args.calibrate {
        return calibrate::run(output);
    }
    let chosen: Vec<&Workload> = if args.workload.eq_ignore_ascii_case("all") {
        WORKLOADS.iter().collect()
    } else if let Some(workload) = Workload::named(&args.workload) {
        vec![workload]
    } else {
        let names: Vec<_> = WORKLOADS.iter().map(|workload| workload.name).collect();
        bail!("no workload {}; there are {}", args.workload, names.join(", "));
    };
    for _ in 0..args.repeat {
        for workload in &chosen {
            if !args.shards.is_empty() {
                let settle = args.settle.map(|after| (after, args.proxies));
                shards::run(workload, &args.shards, settle, output)?;
                continue;
            }
            let json = Run::new(workload).finish(workload);
            output.print(&json, || text(&json))?;
        }
    }
    Ok(())
}

fn text(json: &Value) -> String {
    format!(
        "{:4} {:>7} ns/txn {:>9} tps  batch p50 {:>6} p99 {:>6} max {:>6} us  {:>6} commit  \
         {:>6} x skip list  {} MiB",
        json["workload"].as_str().unwrap_or("?"),
        json["ns_per_txn"],
        json["tps"],
        json["batch_p50_us"],
        json["batch_p99_us"],
        json["batch_max_us"],
        json["commit_ratio"],
        json["times_skip_list"],
        json["memory_bytes"].as_u64().unwrap_or(0) >> 20
    )
}

/// What was seen of a run.
struct Run {
    set: ConflictSet,
    eviction_entries: usize,
    batch_ns: Vec<u64>,
    evict_max_ns: u64,
    ranges: usize,
    committed: usize,
    decided: usize,
    /// FNV-1a over all verdicts, those of the warm-up too: equal sets decide alike.
    fingerprint: u64,
    memory_max: usize,
}

impl Run {
    fn new(workload: &Workload) -> Self {
        let mut run = Self {
            set: ConflictSet::new(Version::ZERO),
            eviction_entries: eviction_entries(),
            batch_ns: Vec::with_capacity(workload.measured),
            evict_max_ns: 0,
            ranges: 0,
            committed: 0,
            decided: 0,
            fingerprint: 0xcbf2_9ce4_8422_2325,
            memory_max: 0,
        };
        let bar = progress(workload.name, (workload.warm_up + workload.measured) as u64);
        for (index, batch) in
            workload.batches().take(workload.warm_up + workload.measured).enumerate()
        {
            run.decide(&batch, index >= workload.warm_up);
            bar.inc(1);
        }
        bar.finish_and_clear();
        run
    }

    fn decide(&mut self, batch: &Batch, is_measured: bool) {
        let candidates: Vec<_> = batch.transactions.iter().map(Transaction::candidate).collect();
        let begin = cpu_ns();
        self.set.advance_oldest(batch.oldest);
        let decided = self.set.decide(batch.version, &candidates);
        let middle = cpu_ns();
        self.set.evict(self.eviction_entries);
        let end = cpu_ns();
        for verdict in &decided.verdicts {
            let byte = match verdict {
                Verdict::Committed => 0,
                Verdict::Conflict { .. } => 1,
                Verdict::TooOld => 2,
                Verdict::Yours => unreachable!("a set knows no proxies"),
            };
            self.fingerprint = (self.fingerprint ^ byte).wrapping_mul(0x0000_0100_0000_01b3);
        }
        if is_measured {
            self.batch_ns.push(end - begin);
            self.evict_max_ns = self.evict_max_ns.max(end - middle);
            self.ranges +=
                batch.transactions.iter().map(|t| t.reads.len() + t.writes.len()).sum::<usize>();
            self.committed += decided.verdicts.iter().filter(|v| **v == Verdict::Committed).count();
            self.decided += decided.verdicts.len();
            self.memory_max = self.memory_max.max(self.set.memory_bytes());
        }
    }

    fn finish(mut self, workload: &Workload) -> Value {
        let total_ns: u64 = self.batch_ns.iter().sum();
        self.batch_ns.sort_unstable();
        let quantile_us = |quantile: f64| {
            let place = ((self.batch_ns.len() - 1) as f64 * quantile).round() as usize;
            self.batch_ns[place] as f64 / 1000.0
        };
        let ns_per_txn = total_ns as f64 / self.decided as f64;
        let times = |skip_list_ns: u32| round(f64::from(skip_list_ns) / ns_per_txn, 1);
        json!({
            "workload": workload.name,
            "tps": (1e9 / ns_per_txn).round(),
            "ns_per_txn": round(ns_per_txn, 1),
            "ns_per_range": round(total_ns as f64 / self.ranges as f64, 1),
            "batch_p50_us": round(quantile_us(0.5), 1),
            "batch_p99_us": round(quantile_us(0.99), 1),
            "batch_max_us": round(quantile_us(1.0), 1),
            "evict_max_us": round(self.evict_max_ns as f64 / 1000.0, 1),
            "memory_bytes": self.memory_max,
            "entries": self.set.len(),
            "commit_ratio": round(self.committed as f64 / self.decided as f64, 4),
            "times_skip_list": workload.skip_list_ns.map(|(plain, _)| times(plain)),
            "times_skip_list_huge_pages":
                workload.skip_list_ns.and_then(|(_, huge)| huge).map(times),
            "fingerprint": format!("{:016x}", self.fingerprint),
        })
    }
}
