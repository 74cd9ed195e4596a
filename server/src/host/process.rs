//! What this process has used of the machine: CPU by thread, sleeps, memory.
//!
//! Read from `/proc` when somebody asks. A field that the system does not tell is null.

use std::collections::BTreeMap;
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// CPU time that this process has used, in microseconds.
#[must_use]
pub fn cpu_us() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1_000
}

/// The report of this process, as `status` shows it.
#[must_use]
pub fn report() -> Value {
    json!({
        "pid": std::process::id(),
        "cpu_us": cpu_us(),
        "rss_bytes": rss_bytes(),
        "threads": threads(),
    })
}

fn rss_bytes() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// CPU time and sleeps by the threads' name; those of one name together.
fn threads() -> BTreeMap<String, Value> {
    let mut by_name: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    for task in tasks {
        // It may have ended since it was listed.
        if let Some((name, cpu_us, sleeps)) = thread(&task.path()) {
            let sum = by_name.entry(name).or_default();
            *sum = (sum.0 + cpu_us, sum.1 + sleeps);
        }
    }
    let json = |(cpu_us, sleeps)| json!({"cpu_us": cpu_us, "sleeps": sleeps});
    by_name.into_iter().map(|(name, sums)| (name, json(sums))).collect()
}

fn thread(task: &Path) -> Option<(String, u64, u64)> {
    let name = std::fs::read_to_string(task.join("comm")).ok()?.trim().to_owned();
    let schedule = std::fs::read_to_string(task.join("schedstat")).ok()?;
    let cpu_ns: u64 = schedule.split(' ').next()?.parse().ok()?;
    let status = std::fs::read_to_string(task.join("status")).ok()?;
    let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    Some((name, cpu_ns / 1_000, sleeps.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_finds_itself() {
        let spin = std::time::Instant::now();
        while cpu_us() < 1_000 {
            assert!(spin.elapsed().as_secs() < 60, "the CPU clock stands still");
        }
        let report = report();
        assert!(report["cpu_us"].as_u64() >= Some(1_000), "{report}");
        assert!(report["rss_bytes"].as_u64() > Some(100_000), "{report}");
        assert!(report["threads"].as_object().is_some_and(|all| !all.is_empty()), "{report}");
    }
}
