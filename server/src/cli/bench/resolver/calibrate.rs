//! The machine: how many dependent cache misses a second, and how fast it sorts.

use anyhow::Result;
use common::Prng;
use serde_json::json;

use super::{cpu_ns, round};
use crate::cli::output::Output;

const STEPS: usize = 4_000_000;
const SORTED: usize = 1 << 20;

pub(super) fn run(output: Output) -> Result<()> {
    let misses = [16, 64, 256].map(|mib| (mib, chase_ns(mib << 20)));
    let sort_ns = sort_ns();
    let json = json!({
        "dependent_miss_ns": misses.iter().map(|(mib, ns)| json!({
            "mib": mib,
            "ns": round(*ns, 1),
            "misses_per_s": (1e9 / ns).round(),
        })).collect::<Vec<_>>(),
        "sort_ns_per_key": round(sort_ns, 1),
        "sort_keys_per_s": (1e9 / sort_ns).round(),
        "huge_pages": std::env::var("GLIBC_TUNABLES").is_ok_and(|t| t.contains("hugetlb=1")),
    });
    output.print(&json, || {
        let misses: Vec<_> =
            misses.iter().map(|(mib, ns)| format!("{ns:.0} ns in {mib} MiB")).collect();
        let misses = misses.join(", ");
        format!("a dependent miss: {misses}; sorting 2^20 integers: {sort_ns:.1} ns a key")
    })
}

/// One cycle through all lines of `bytes`, in random order (Sattolo's shuffle).
fn chase_ns(bytes: usize) -> f64 {
    const LINE: usize = 16;
    let lines = bytes / (LINE * 4);
    let mut prng = Prng::new(1);
    let mut order: Vec<u32> = (0..lines as u32).collect();
    for place in (1..lines).rev() {
        order.swap(place, prng.below(place as u64) as usize);
    }
    let mut memory = vec![0_u32; lines * LINE];
    for (line, next) in order.iter().enumerate() {
        memory[line * LINE] = next * LINE as u32;
    }
    let (begin, mut at) = (cpu_ns(), 0);
    for _ in 0..STEPS {
        at = memory[at] as usize;
    }
    let end = cpu_ns();
    std::hint::black_box(at);
    (end - begin) as f64 / STEPS as f64
}

fn sort_ns() -> f64 {
    let mut prng = Prng::new(2);
    let mut keys: Vec<u64> = (0..SORTED).map(|_| prng.next()).collect();
    let begin = cpu_ns();
    keys.sort_unstable();
    let end = cpu_ns();
    std::hint::black_box(&keys);
    (end - begin) as f64 / SORTED as f64
}
