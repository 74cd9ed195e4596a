//! That the workloads are what they are said to be.

use common::message::Verdict;

use super::*;
use crate::conflict::ConflictSet;

/// Commits and transactions of the batches from `skip` on, and whether any was too old.
fn commits(name: &str, skip: usize, batches: usize) -> (usize, usize) {
    let workload = Workload::named(name).expect("a workload of this name");
    let mut batches = workload.batches().take(skip + batches).enumerate();
    let mut set = ConflictSet::new(Version::ZERO);
    let (mut committed, mut total) = (0, 0);
    for (index, batch) in &mut batches {
        set.advance_oldest(batch.oldest);
        let candidates: Vec<_> = batch.transactions.iter().map(Transaction::candidate).collect();
        let decided = set.decide(batch.version, &candidates);
        assert!(!decided.verdicts.contains(&Verdict::TooOld), "{name} has reads that are too old");
        set.evict(256);
        if index >= skip {
            committed += decided.verdicts.iter().filter(|v| **v == Verdict::Committed).count();
            total += decided.verdicts.len();
        }
    }
    set.check();
    (committed, total)
}

#[test]
fn every_workload_runs_and_commits_something() {
    for workload in WORKLOADS {
        let (committed, total) = commits(workload.name, 0, 3);
        assert_eq!(total, 3 * workload.transactions);
        assert!(committed > 0, "{} commits nothing", workload.name);
    }
}

#[test]
fn the_first_batches_of_s0_are_those_of_the_skip_list() {
    // 94.57 % commit over all 500 batches; before the window of 50 is full, a few more do.
    let (committed, total) = commits("S0", 50, 10);
    let percent = committed as f64 / total as f64 * 100.0;
    assert!((94.0..95.0).contains(&percent), "{percent} % commit");
}

#[test]
fn a_generator_repeats_itself() {
    for workload in WORKLOADS {
        let first = |_: ()| format!("{:?}", workload.batches().next());
        assert_eq!(first(()), first(()));
    }
}

#[test]
fn shares_hold_every_access_once() {
    let workload = Workload::named("M1").expect("it is there");
    let batch = workload.batches().next().expect("batches never end");
    for shares in [1, 2, 4, 8] {
        let split = Split::of(workload, shares);
        assert_eq!(split.shares(), shares);
        let parts: Vec<_> = (0..shares).map(|share| split.share(&batch, share)).collect();
        for (index, whole) in batch.transactions.iter().enumerate() {
            let reads = whole.reads.iter().flat_map(|range| {
                let pieces = parts.iter().flat_map(|part| part.transactions[index].reads.iter());
                pieces.filter(move |piece| piece.overlaps(range)).map(move |_| range)
            });
            let pieces = parts.iter().map(|part| part.transactions[index].reads.len());
            assert!(reads.count() >= whole.reads.len());
            assert!(pieces.sum::<usize>() >= whole.reads.len());
            let points = |ranges: &Ranges| {
                ranges.iter().filter(|range| range.end == RangeEnd::Point).count()
            };
            let of_parts = parts.iter().map(|part| points(&part.transactions[index].writes));
            assert_eq!(of_parts.sum::<usize>(), points(&whole.writes), "transaction {index}");
        }
    }
}

/// Recorded batches, decided by 1, 2, 4 and 8 resolvers for 1 and 3 proxies that settle 1 to 4 batches later.
#[test]
fn any_number_of_resolvers_commits_the_same() {
    for name in ["P1", "P2", "M1"] {
        let workload =
            Workload { transactions: 100, ..*Workload::named(name).expect("it is there") };
        let batches = 40;
        let mut set = ConflictSet::new(Version::ZERO);
        let mut alone = Vec::new();
        for batch in workload.batches().take(batches) {
            let candidates: Vec<_> =
                batch.transactions.iter().map(Transaction::candidate).collect();
            set.advance_oldest(batch.oldest);
            let decided = set.decide(batch.version, &candidates);
            alone.extend(decided.verdicts.iter().map(|v| *v == Verdict::Committed));
        }
        assert!(alone.contains(&false), "{name} has no conflicts");
        let (mut held, mut left) = (0, 0);
        for (shares, proxies, after) in
            [(1, 1, 1), (1, 3, 4), (2, 1, 2), (2, 3, 2), (4, 1, 4), (4, 3, 1), (8, 1, 1), (8, 3, 4)]
        {
            let telling = Telling { proxies, after, batches, eviction_entries: 256 };
            let told = settled(&workload, &Split::of(&workload, shares), telling, || 0);
            assert!(told.yes == alone, "{name}: {shares} resolvers, {proxies} proxies, {after}");
            let waits = told.held + told.left;
            assert!(shares > 1 || waits == 0, "a single resolver waits for nobody: {waits}");
            assert!(proxies > 1 || told.held == 0, "a single proxy waits for nobody");
            held += told.held;
            left += told.left;
        }
        assert!(left > 0 && (held > 0 || name == "P1"), "{name}: {held} held, {left} left");
    }
}
