//! A workload over several resolvers that know nothing of each other, as the proxies use them today.
//!
//! A transaction commits iff all its resolvers say so. One that is refused by one of them is remembered by
//! the others as if it had committed: what that costs is told by the commit ratios side by side. With
//! `--settle` they are told of it some batches later, and nothing is timed.

use std::num::NonZeroUsize;
use std::time::Instant;

use ::resolver::conflict::ConflictSet;
use ::resolver::workload::{Split, Transaction, Workload, settled};
use anyhow::{Result, anyhow};
use common::Version;
use common::message::Verdict;
use serde_json::json;

use super::{cpu_ns, eviction_entries, round};
use crate::cli::output::Output;

/// What one resolver did.
struct Share {
    /// For each transaction, those of the warm-up included, whether it may commit.
    yes: Vec<bool>,
    cpu_ns: u64,
}

/// What the verdicts come to.
struct Tally {
    /// Transactions behind the warm-up.
    measured: usize,
    commit_ratio: f64,
    /// Verdicts, those of the warm-up included, that are not those of the first count.
    differ: Option<usize>,
}

impl Tally {
    fn of(workload: &Workload, yes: &[bool], alone: Option<&[bool]>) -> Self {
        let measured = &yes[workload.warm_up * workload.transactions..];
        let committed = measured.iter().filter(|yes| **yes).count();
        let differ = |alone: &[bool]| alone.iter().zip(yes).filter(|(one, all)| one != all).count();
        Self {
            measured: measured.len(),
            commit_ratio: round(committed as f64 / measured.len() as f64, 4),
            differ: alone.map(differ),
        }
    }
}

pub(super) fn run(
    workload: &'static Workload,
    counts: &[usize],
    settle: Option<NonZeroUsize>,
    output: Output,
) -> Result<()> {
    if let Some(after) = settle {
        return settle_after(workload, counts, after.get(), output);
    }
    let mut alone: Option<Vec<bool>> = None;
    for &count in counts {
        let begin = Instant::now();
        let split = Split::of(workload, count);
        let threads: Vec<_> = (0..split.shares())
            .map(|share| {
                let split = split.clone();
                std::thread::spawn(move || decide(workload, &split, share))
            })
            .collect();
        let shares = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a resolver's thread panicked")))
            .collect::<Result<Vec<Share>>>()?;
        let yes: Vec<bool> = (0..shares[0].yes.len())
            .map(|index| shares.iter().all(|share| share.yes[index]))
            .collect();
        let tally = Tally::of(workload, &yes, alone.as_deref());
        let measured = tally.measured as f64;
        let slowest_ns = shares.iter().map(|share| share.cpu_ns).max().unwrap_or(1);
        let total_ns: u64 = shares.iter().map(|share| share.cpu_ns).sum();
        let json = json!({
            "workload": workload.name,
            "shards": split.shares(),
            "commit_ratio": tally.commit_ratio,
            "verdicts_that_differ": tally.differ,
            "ns_per_txn_of_slowest_shard": round(slowest_ns as f64 / measured, 1),
            "ns_per_txn_of_all": round(total_ns as f64 / measured, 1),
            "tps": (1e9 * measured / slowest_ns as f64).round(),
            "wall_seconds_with_generating": round(begin.elapsed().as_secs_f64(), 1),
        });
        output.print(&json, || {
            format!(
                "{:4} {} shards  {} commit  {} verdicts differ  {} tps by CPU time of the slowest shard",
                workload.name,
                json["shards"],
                json["commit_ratio"],
                json["verdicts_that_differ"],
                json["tps"]
            )
        })?;
        alone = alone.or(Some(yes));
    }
    Ok(())
}

fn settle_after(workload: &Workload, counts: &[usize], after: usize, output: Output) -> Result<()> {
    let batches = workload.warm_up + workload.measured;
    let mut alone: Option<Vec<bool>> = None;
    for &count in counts {
        let split = Split::of(workload, count);
        let yes = settled(workload, &split, after, batches);
        let tally = Tally::of(workload, &yes, alone.as_deref());
        let json = json!({
            "workload": workload.name,
            "shards": split.shares(),
            "settled_after_batches": after,
            "commit_ratio": tally.commit_ratio,
            "verdicts_that_differ": tally.differ,
        });
        output.print(&json, || {
            format!(
                "{:4} {} shards, settled after {after} batches  {} commit  {} verdicts differ",
                workload.name, json["shards"], json["commit_ratio"], json["verdicts_that_differ"]
            )
        })?;
        alone = alone.or(Some(yes));
    }
    Ok(())
}

fn decide(workload: &Workload, split: &Split, share: usize) -> Share {
    let mut set = ConflictSet::new(Version::ZERO);
    let mut result = Share { yes: Vec::new(), cpu_ns: 0 };
    for (index, batch) in workload.batches().take(workload.warm_up + workload.measured).enumerate()
    {
        let batch = split.share(&batch, share);
        let candidates: Vec<_> = batch.transactions.iter().map(Transaction::candidate).collect();
        let begin = cpu_ns();
        set.advance_oldest(batch.oldest);
        let decided = set.decide(batch.version, &candidates);
        set.evict(eviction_entries());
        if index >= workload.warm_up {
            result.cpu_ns += cpu_ns() - begin;
        }
        result.yes.extend(decided.verdicts.iter().map(|verdict| *verdict == Verdict::Committed));
    }
    result
}
