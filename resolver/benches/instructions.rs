//! Instructions a transaction, counted by valgrind: the same on a busy machine as on a quiet one.
//!
//! ```text
//! cargo bench -p resolver --bench instructions [-- NAME ...]
//! ```
//!
//! The program runs itself under `valgrind --tool=callgrind`, which counts inside `counted` only. Without
//! valgrind it says so and counts nothing.

#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "a program for people")]

use std::process::Command;

use resolver::conflict::{Candidate, ConflictSet};
use resolver::workload::{Batch, Transaction, WORKLOADS, Workload};

/// Batches that are counted, and before them some that are not; valgrind is fifty times slower than the
/// processor.
const BATCHES: usize = 20;
const WARM_UP_MAX: usize = 300;

fn main() {
    if let Ok(name) = std::env::var("MILLRACE_COUNT_WORKLOAD") {
        return run(Workload::named(&name).expect("the parent knows it"));
    }
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_asked = |w: &&Workload| asked.is_empty() || asked.iter().any(|name| name == w.name);
    for workload in WORKLOADS.iter().filter(is_asked) {
        match count(workload.name) {
            Some(instructions) => {
                let transactions = (BATCHES * workload.transactions) as u64;
                println!(
                    "{:4} {:>8} instructions a transaction",
                    workload.name,
                    instructions / transactions
                );
            }
            None => println!("{:4} not counted: valgrind does not run here", workload.name),
        }
    }
}

fn run(workload: &Workload) {
    let mut set = ConflictSet::new(common::Version::ZERO);
    let warm_up = workload.warm_up.clamp(1, WARM_UP_MAX);
    for (index, batch) in workload.batches().take(warm_up + BATCHES).enumerate() {
        let candidates: Vec<_> = batch.transactions.iter().map(Transaction::candidate).collect();
        if index < warm_up {
            decide(&mut set, &batch, &candidates);
        } else {
            counted(&mut set, &batch, &candidates);
        }
    }
}

#[inline(never)]
fn counted(set: &mut ConflictSet, batch: &Batch, candidates: &[Candidate<'_>]) {
    decide(set, batch, candidates);
}

fn decide(set: &mut ConflictSet, batch: &Batch, candidates: &[Candidate<'_>]) {
    set.advance_oldest(batch.oldest);
    let decided = set.decide(batch.version, candidates);
    set.evict(256);
    std::hint::black_box(decided.verdicts.len());
}

fn count(name: &str) -> Option<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"])
        .arg("--toggle-collect=*counted*")
        .arg(std::env::current_exe().ok()?)
        .env("MILLRACE_COUNT_WORKLOAD", name)
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let collected = text.lines().find_map(|line| line.split_once("Collected : "))?.1;
    collected.trim().parse().ok()
}
