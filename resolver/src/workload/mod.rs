//! Workloads of the conflict set: what benchmarks run and what tests fingerprint.
//!
//! Each is a stream of batches that depends on nothing but its name: the same on every machine and in every
//! version. A generator makes one batch at a time, so that whoever measures can keep it off the clock.
//!
//! ```text
//! version(b) = first + b * versions_per_batch      oldest(b) = version(b) - window
//! read version = version(b) - versions_per_batch - uniform(lag)
//! ```
//!
//! | name | a transaction |
//! |---|---|
//! | S0, S1, S1o | reads one range of up to 10 neighbours and writes another |
//! | P1, P1s, P2, P3, P4 | reads 5 points and writes 2: uniform, small batches, zipfian, never repeated, prefixed |
//! | M1, M2 | 5 reads and 2 writes; one in five reads a range, one in a hundred writes one; M2 has 62 tenants |
//! | HOT | as P1, but each also reads and writes the one hot key |
//! | LONG | as P1 with keys of 10 KiB that share all but 16 bytes |
//! | WIDE | reads a tenth of the key space, writes one point; one in ten writes a tenth too |
//! | HUGE | one transaction of 5,000 read and 5,000 write ranges, half of them points |

mod draw;
mod keys;
mod settle;
mod split;
#[cfg(test)]
mod tests;

use common::{KeyRange, RangeEnd, Ranges, Version};

use crate::conflict::Candidate;

pub use draw::SplitMix;
use draw::Zipf;
use keys::{Keys, Span};
pub use settle::{Telling, Told, settled};
pub use split::Split;

/// How many batches of what, and the figures of the skip list on them.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    /// Transactions in a batch.
    pub transactions: usize,
    /// Versions from batch to batch.
    pub versions_per_batch: u64,
    /// Versions that the conflict set reaches back.
    pub window: u64,
    /// Read versions are this much older than the batch before, at most, exclusive; 0: always the oldest.
    pub lag: u64,
    /// Batches before the measured ones: they fill the window.
    pub warm_up: usize,
    /// Batches to measure.
    pub measured: usize,
    /// CPU time of FoundationDB's skip list, ns a transaction: with 4 KiB pages and with huge ones, as
    /// recorded on the machine that `docs/src/resolver.md` describes.
    pub skip_list_ns: Option<(u32, Option<u32>)>,
    first_version: u64,
    keys: Keys,
    shape: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// One range each.
    Ranges,
    /// 5 reads, 2 writes.
    Points,
    /// 5 reads, 2 writes, and ranges among them.
    Mixed,
    Hot,
    Wide,
    Huge,
}

const WINDOW: u64 = 5_000_000;
const FIRST_VERSION: u64 = 10_000_000;

const POINTS: Workload = Workload {
    name: "P1",
    transactions: 1000,
    versions_per_batch: 2500,
    window: WINDOW,
    lag: 50_000,
    warm_up: 2200,
    measured: 800,
    skip_list_ns: Some((24_205, Some(16_837))),
    first_version: FIRST_VERSION,
    keys: Keys::Scattered { ids: 1_000_000 },
    shape: Shape::Points,
};

const RANGES: Workload = Workload {
    name: "S1",
    transactions: 2500,
    versions_per_batch: 6250,
    warm_up: 1000,
    measured: 400,
    skip_list_ns: Some((8259, Some(6718))),
    keys: Keys::Dots { ids: 2_000_000_000 },
    shape: Shape::Ranges,
    ..POINTS
};

const PREFIXED: Keys = Keys::Prefixed { ids: 4_000_000 };

/// All of them.
pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "S0",
        versions_per_batch: 1,
        window: 50,
        lag: 0,
        warm_up: 0,
        measured: 500,
        skip_list_ns: Some((6035, Some(4805))),
        first_version: 50,
        keys: Keys::Dots { ids: 20_000_000 },
        ..RANGES
    },
    RANGES,
    Workload { name: "S1o", lag: 4_900_000, skip_list_ns: Some((11_489, Some(8465))), ..RANGES },
    POINTS,
    Workload {
        name: "P1s",
        transactions: 100,
        versions_per_batch: 250,
        warm_up: 22_000,
        measured: 8000,
        skip_list_ns: Some((23_798, None)),
        ..POINTS
    },
    Workload {
        name: "P2",
        keys: Keys::Zipfian { ids: 1_000_000 },
        skip_list_ns: Some((8790, None)),
        ..POINTS
    },
    Workload {
        name: "P3",
        keys: Keys::Scattered { ids: 1 << 62 },
        skip_list_ns: Some((31_174, Some(24_009))),
        ..POINTS
    },
    Workload { name: "P4", keys: PREFIXED, skip_list_ns: Some((28_128, None)), ..POINTS },
    Workload {
        name: "M1",
        keys: PREFIXED,
        shape: Shape::Mixed,
        skip_list_ns: Some((27_809, Some(21_855))),
        ..POINTS
    },
    Workload {
        name: "M2",
        keys: Keys::Tenants { tenants: 62, ids: 1 << 16 },
        shape: Shape::Mixed,
        measured: 400,
        skip_list_ns: Some((31_400, None)),
        ..POINTS
    },
    Workload { name: "HOT", shape: Shape::Hot, skip_list_ns: None, ..POINTS },
    Workload {
        name: "LONG",
        transactions: 20,
        keys: Keys::Long { ids: 1_000_000 },
        warm_up: 400,
        measured: 400,
        skip_list_ns: None,
        ..POINTS
    },
    Workload {
        name: "WIDE",
        transactions: 100,
        lag: 1,
        keys: PREFIXED,
        shape: Shape::Wide,
        skip_list_ns: None,
        ..POINTS
    },
    Workload {
        name: "HUGE",
        transactions: 1,
        keys: PREFIXED,
        shape: Shape::Huge,
        skip_list_ns: None,
        ..POINTS
    },
];

/// A transaction as a resolver sees it.
#[derive(Clone, Debug)]
pub struct Transaction {
    /// Its read version.
    pub read_version: Version,
    /// What it read.
    pub reads: Ranges,
    /// What it writes.
    pub writes: Ranges,
}

impl Transaction {
    /// As the conflict set takes it.
    #[must_use]
    pub const fn candidate(&self) -> Candidate<'_> {
        Candidate {
            read_version: self.read_version,
            reads: &self.reads,
            writes: &self.writes,
            report_conflicts: false,
        }
    }
}

/// A batch of one version.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Where the window begins when it is decided.
    pub oldest: Version,
    /// Its version.
    pub version: Version,
    /// The transactions in order.
    pub transactions: Vec<Transaction>,
}

impl Workload {
    /// The one of this name, however it is capitalised.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        WORKLOADS.iter().find(|workload| workload.name.eq_ignore_ascii_case(name))
    }

    /// Its batches from the first.
    #[must_use]
    pub fn batches(&self) -> Batches {
        Batches { workload: *self, rng: SplitMix::new(0x123_4567), zipf: self.keys.zipf(), next: 0 }
    }
}

/// The batches of a workload, without end.
#[derive(Clone, Debug)]
pub struct Batches {
    workload: Workload,
    rng: SplitMix,
    zipf: Option<Zipf>,
    next: u64,
}

impl Iterator for Batches {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let Workload { first_version, versions_per_batch, window, transactions, .. } =
            self.workload;
        let version = first_version + self.next * versions_per_batch;
        let oldest = version - window;
        self.next += 1;
        let transactions = (0..transactions).map(|_| self.transaction(version, oldest)).collect();
        Some(Batch { oldest: Version(oldest), version: Version(version), transactions })
    }
}

impl Batches {
    fn transaction(&mut self, version: u64, oldest: u64) -> Transaction {
        let Workload { lag, versions_per_batch, .. } = self.workload;
        let read_version =
            if lag == 0 { oldest } else { version - versions_per_batch - self.rng.below(lag) };
        let (reads, writes) = match self.workload.shape {
            Shape::Ranges => (vec![self.span(1, 10)], vec![self.span(1, 10)]),
            Shape::Points => (self.points(5), self.points(2)),
            Shape::Mixed => self.mixed(),
            Shape::Hot => {
                let (mut reads, mut writes) = (self.points(5), self.points(2));
                reads.push(Span::point(b"hot".to_vec()));
                writes.push(Span::point(b"hot".to_vec()));
                (reads, writes)
            }
            Shape::Wide => {
                let mut writes = self.points(1);
                let tenth = self.workload.keys.ids() / 10;
                if self.rng.below(10) == 0 {
                    writes.push(self.span(tenth, 1));
                }
                (vec![self.span(tenth, 1)], writes)
            }
            Shape::Huge => (self.points_and_spans(2500), self.points_and_spans(2500)),
        };
        Transaction {
            read_version: Version(read_version),
            reads: flat(&reads),
            writes: flat(&writes),
        }
    }

    fn mixed(&mut self) -> (Vec<Span>, Vec<Span>) {
        let reads = if self.rng.below(5) == 0 {
            let mut reads = vec![self.span(1, 100)];
            reads.extend(self.points(3));
            reads
        } else {
            self.points(5)
        };
        let mut writes = self.points(2);
        if self.rng.below(100) == 0 {
            writes.push(self.span(1, 100));
        }
        (reads, writes)
    }

    fn points(&mut self, count: usize) -> Vec<Span> {
        (0..count)
            .map(|_| self.workload.keys.point(&mut self.rng, self.zipf.as_ref()))
            .map(Span::point)
            .collect()
    }

    fn points_and_spans(&mut self, each: usize) -> Vec<Span> {
        (0..each).flat_map(|_| [self.points(1).remove(0), self.span(1, 100)]).collect()
    }

    /// A range of at least `least` ids and of fewer than `least + more`.
    fn span(&mut self, least: u64, more: u64) -> Span {
        self.workload.keys.span(&mut self.rng, least, more)
    }
}

fn flat(spans: &[Span]) -> Ranges {
    Ranges::from_ranges(spans.iter().map(|span| KeyRange {
        begin: &span.begin,
        end: span.end.as_deref().map_or(RangeEnd::Point, RangeEnd::Before),
    }))
}
