//! What a run has cost: the node's own counters, and the CPU time of both processes.
//!
//! A sample is one `status` answer: it is taken while the load runs, so that a group of versions that is on
//! its way to the disk at that moment may be counted on one side and not on the other.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use client::face::Client;
use serde_json::{Map, Value, json};

use super::round;
use crate::host::process;

/// The counters of the node that answers and of this process at one moment.
pub(super) struct Accounts {
    status: Value,
    client_cpu_us: u64,
    device: Option<DeviceCounters>,
}

impl Accounts {
    /// Takes a sample; `device` is where the system counts what the node's disk does, for everybody on it.
    pub(super) async fn read(client: &Client, device: Option<&Path>) -> Result<Self> {
        let status = serde_json::from_str(&client.status().await?)?;
        let device = device.and_then(DeviceCounters::read);
        Ok(Self { status, client_cpu_us: process::cpu_us(), device })
    }

    fn number(&self, path: &str) -> Result<u64> {
        let number = self.status.pointer(path).and_then(Value::as_u64);
        number.with_context(|| format!("no {path} in the node's status"))
    }

    /// What has happened since an earlier sample of the same life of the node.
    pub(super) fn since(&self, before: &Self) -> Result<Costs> {
        let grown = |path: &str| -> Result<u64> {
            let (now, then) = (self.number(path)?, before.number(path)?);
            now.checked_sub(then).with_context(|| format!("{path} went from {then} to {now}"))
        };
        Ok(Costs {
            commit_groups: grown("/disk/log/commit_groups")?,
            flushes: grown("/disk/log/flushes")?,
            kernel_writes: grown("/disk/log/kernel_writes")?,
            bytes_written: grown("/disk/log/bytes_written")?,
            all_bytes_written: grown("/disk/bytes_written")?,
            reads: grown("/disk/reads")?,
            bytes_read: grown("/disk/bytes_read")?,
            commits: grown("/counters/commits")?,
            versions: grown("/counters/versions")?,
            node_cpu_us: grown("/process/cpu_us")?,
            node_rss_bytes: self.number("/process/rss_bytes").unwrap_or(0),
            client_cpu_us: self.client_cpu_us - before.client_cpu_us,
            threads: self.threads_since(before),
            device: self.device.zip(before.device).map(|(now, then)| now.since(then)),
        })
    }

    fn threads_since(&self, before: &Self) -> Map<String, Value> {
        let threads = |status: &Value| status["process"]["threads"].as_object().cloned();
        let (now, then) = (threads(&self.status), threads(&before.status));
        let then = then.unwrap_or_default();
        let grown = |(name, now): (String, Value)| {
            let of = |field: &str| {
                let earlier = then.get(&name).and_then(|then| then[field].as_u64()).unwrap_or(0);
                now[field].as_u64().unwrap_or(0).saturating_sub(earlier)
            };
            let json = json!({"cpu_s": seconds(of("cpu_us")), "sleeps": of("sleeps")});
            (name, json)
        };
        now.unwrap_or_default().into_iter().map(grown).collect()
    }
}

/// What happened between two samples.
pub(super) struct Costs {
    pub(super) commit_groups: u64,
    pub(super) flushes: u64,
    kernel_writes: u64,
    pub(super) bytes_written: u64,
    all_bytes_written: u64,
    reads: u64,
    pub(super) bytes_read: u64,
    commits: u64,
    versions: u64,
    node_cpu_us: u64,
    node_rss_bytes: u64,
    client_cpu_us: u64,
    threads: Map<String, Value>,
    device: Option<DeviceCounters>,
}

impl Costs {
    /// As it stands in a result.
    pub(super) fn json(&self) -> Value {
        let ratio =
            |count: u64, of: u64, digits| (of > 0).then(|| round(count as f64 / of as f64, digits));
        let per_group = |count: u64| ratio(count, self.commit_groups, 3);
        let per_commit_us = |us: u64| ratio(us, self.commits, 2);
        json!({
            "commits": self.commits,
            "versions": self.versions,
            "commit_groups": self.commit_groups,
            "flushes": self.flushes,
            "kernel_writes": self.kernel_writes,
            "bytes_written": self.bytes_written,
            "background_bytes_written": self.all_bytes_written.saturating_sub(self.bytes_written),
            "reads": self.reads,
            "bytes_read": self.bytes_read,
            "flushes_per_group": per_group(self.flushes),
            "writes_per_group": per_group(self.kernel_writes),
            "bytes_per_group": ratio(self.bytes_written, self.commit_groups, 0),
            "commits_per_group": per_group(self.commits),
            "node_cpu_s": seconds(self.node_cpu_us),
            "client_cpu_s": seconds(self.client_cpu_us),
            "node_cpu_us_per_commit": per_commit_us(self.node_cpu_us),
            "client_cpu_us_per_commit": per_commit_us(self.client_cpu_us),
            "node_rss_bytes": self.node_rss_bytes,
            "node_threads": self.threads,
            "device": self.device.map(|device| json!({
                "writes": device.writes,
                "flushes": device.flushes,
            })),
        })
    }
}

fn seconds(us: u64) -> f64 {
    round(us as f64 / 1e6, 3)
}

/// What the block layer counts for a whole device, whoever uses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DeviceCounters {
    /// Without flushes.
    writes: u64,
    flushes: u64,
}

impl DeviceCounters {
    fn read(stat: &Path) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(stat).ok()?)
    }

    /// Fields 5 and 16 of the file; the kernel counts flushes among the writes, too.
    fn parse(stat: &str) -> Option<Self> {
        let field = |place: usize| stat.split_whitespace().nth(place - 1)?.parse::<u64>().ok();
        let (writes, flushes) = (field(5)?, field(16)?);
        Some(Self { writes: writes.saturating_sub(flushes), flushes })
    }

    fn since(self, before: Self) -> Self {
        Self {
            writes: self.writes.saturating_sub(before.writes),
            flushes: self.flushes.saturating_sub(before.flushes),
        }
    }
}

/// Where the system counts what the device under this directory does, if it has one of its own.
pub(super) fn device_of(directory: &Path) -> Option<PathBuf> {
    let device = std::fs::metadata(directory).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let stat = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"));
    stat.exists().then_some(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_are_taken_off_the_writes() {
        let stat = "  10 0 80 5  300 7 2400 90  0 40 95  0 0 0 0  120 11\n";
        assert_eq!(DeviceCounters::parse(stat), Some(DeviceCounters { writes: 180, flushes: 120 }));
        assert_eq!(DeviceCounters::parse("10 0 80"), None, "an old kernel");
    }

    #[test]
    fn costs_are_what_has_grown() {
        let sample = |groups: u64, flushes: u64, cpu_us: u64| Accounts {
            status: json!({
                "disk": {"bytes_written": 0, "reads": 0, "bytes_read": 0, "log": {
                    "commit_groups": groups, "flushes": flushes, "kernel_writes": flushes * 2,
                    "bytes_written": groups * 4096}},
                "counters": {"commits": groups * 4, "versions": groups * 2},
                "process": {"cpu_us": cpu_us, "rss_bytes": 7,
                    "threads": {"disk-log": {"cpu_us": cpu_us, "sleeps": 5}}},
            }),
            client_cpu_us: 0,
            device: None,
        };
        let costs = sample(12, 22, 1_500_000).since(&sample(2, 12, 500_000)).unwrap();
        let json = costs.json();
        assert_eq!((&json["commit_groups"], &json["flushes"]), (&10.into(), &10.into()));
        assert_eq!(
            (&json["flushes_per_group"], &json["writes_per_group"]),
            (&1.0.into(), &2.0.into())
        );
        assert_eq!(json["node_cpu_s"], 1.0);
        assert_eq!(json["node_cpu_us_per_commit"], 25_000.0);
        assert_eq!(json["node_threads"]["disk-log"], json!({"cpu_s": 1.0, "sleeps": 0}));
        let restarted = sample(1, 1, 1).since(&sample(2, 12, 500_000));
        assert!(restarted.is_err(), "counters that went back are of another life");
    }
}
