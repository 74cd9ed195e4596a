//! The workloads under criterion: one batch at a time, after a warm-up that fills part of the window.
//!
//! `millrace bench resolver` is the measure to quote: it fills the whole window and takes CPU time. This one
//! tells quickly whether a change helps.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use resolver::conflict::ConflictSet;
use resolver::workload::{Batch, Transaction, WORKLOADS};

/// Batches before the measured ones, at most.
const WARM_UP_MAX: usize = 400;

fn workloads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("conflict set");
    group.sample_size(20);
    for workload in WORKLOADS {
        group.throughput(Throughput::Elements(workload.transactions as u64));
        group.bench_function(workload.name, |bencher| {
            let mut batches = workload.batches();
            let mut set = ConflictSet::new(common::Version::ZERO);
            for batch in batches.by_ref().take(workload.warm_up.min(WARM_UP_MAX)) {
                decide(&mut set, &batch);
            }
            let next = || batches.next().expect("batches never end");
            bencher.iter_batched(next, |batch| decide(&mut set, &batch), BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn decide(set: &mut ConflictSet, batch: &Batch) {
    let candidates: Vec<_> = batch.transactions.iter().map(Transaction::candidate).collect();
    set.advance_oldest(batch.oldest);
    let decided = set.decide(batch.version, &candidates);
    set.evict(256);
    std::hint::black_box(decided.verdicts.len());
}

criterion_group!(benches, workloads);
criterion_main!(benches);
