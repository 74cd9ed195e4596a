//! A workload over several resolvers: alone with what each of them knows, or told of the others as proxies
//! do.
//!
//! A transaction commits iff all its resolvers say so. Told of nothing, one that refuses nothing remembers
//! the writes of what another one refused as if it had committed: what that costs is told by the commit
//! ratios side by side. With `--settle` they are told what became of each batch, some batches later, and
//! decide by the protocol that the roles use.

use std::num::{NonZeroU8, NonZeroUsize};
use std::time::Instant;

use ::resolver::conflict::ConflictSet;
use ::resolver::workload::{Split, Telling, Transaction, Workload, settled};
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
    settle: Option<(NonZeroUsize, NonZeroU8)>,
    output: Output,
) -> Result<()> {
    if let Some((after, proxies)) = settle {
        let telling = Telling {
            proxies: usize::from(proxies.get()),
            after: after.get(),
            batches: workload.warm_up + workload.measured,
            eviction_entries: eviction_entries(),
        };
        return settle_after(workload, counts, telling, output);
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

fn settle_after(
    workload: &Workload,
    counts: &[usize],
    telling: Telling,
    output: Output,
) -> Result<()> {
    let mut alone: Option<Vec<bool>> = None;
    for &count in counts {
        let split = Split::of(workload, count);
        let told = settled(workload, &split, telling, cpu_ns);
        let tally = Tally::of(workload, &told.yes, alone.as_deref());
        let all = told.yes.len() as f64;
        let slowest_ns = told.spent.iter().max().copied().unwrap_or(0) as f64;
        let json = json!({
            "workload": workload.name,
            "shards": split.shares(),
            "proxies": telling.proxies,
            "settled_after_batches": telling.after,
            "commit_ratio": tally.commit_ratio,
            "verdicts_that_differ": tally.differ,
            "times_a_batch_waited": told.held,
            "verdicts_left_to_proxies": told.left,
            "ns_per_txn_of_slowest_shard": round(slowest_ns / all, 1),
        });
        output.print(&json, || {
            format!(
                "{:4} {} shards, {} proxies, settled after {}  {} commit  {} verdicts differ  {} waits  \
                 {} left to proxies  {} ns/txn of the slowest shard",
                workload.name,
                json["shards"],
                telling.proxies,
                telling.after,
                json["commit_ratio"],
                json["verdicts_that_differ"],
                told.held,
                told.left,
                json["ns_per_txn_of_slowest_shard"]
            )
        })?;
        alone = alone.or(Some(told.yes));
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
