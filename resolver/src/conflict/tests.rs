//! Each rule of the header by hand on set and model, then the set against the model at random.
//!
//! Ranges are written short: `k` is a point, `b-d` is `[b, d)`, `-d` begins at the empty key, `.` is the
//! point of the empty key, and `0` in a key stands for the byte 0.

use std::collections::BTreeMap;

use common::message::Verdict;
use common::{KeyRange, Prng, RangeEnd, Ranges, Version};
use proptest::prelude::*;

use super::model::Model;
use super::run::Run;
use super::window::Seq;
use super::{Candidate, ConflictSet, Decided};

#[derive(Clone, Debug)]
struct Transaction {
    read_version: Version,
    reads: Ranges,
    writes: Ranges,
    report_conflicts: bool,
}

impl Transaction {
    fn candidate(&self) -> Candidate<'_> {
        Candidate {
            read_version: self.read_version,
            reads: &self.reads,
            writes: &self.writes,
            report_conflicts: self.report_conflicts,
        }
    }
}

fn ranges(text: &str) -> Ranges {
    let key = |text: &str| -> Vec<u8> {
        text.bytes().filter(|b| *b != b'.').map(|b| if b == b'0' { 0 } else { b }).collect()
    };
    let keys: Vec<(Vec<u8>, Option<Vec<u8>>)> = text
        .split_whitespace()
        .map(|word| match word.split_once('-') {
            Some((begin, end)) => (key(begin), Some(key(end))),
            None => (key(word), None),
        })
        .collect();
    keys.iter().map(|(begin, end)| raw(begin, end.as_deref())).collect()
}

/// A range as hostile or careless senders may spell it: not normalised, perhaps inverted.
fn raw<'a>(begin: &'a [u8], end: Option<&'a [u8]>) -> KeyRange<'a> {
    KeyRange { begin, end: end.map_or(RangeEnd::Point, RangeEnd::Before) }
}

fn txn(read_version: u64, reads: &str, writes: &str) -> Transaction {
    Transaction {
        read_version: Version(read_version),
        reads: ranges(reads),
        writes: ranges(writes),
        report_conflicts: false,
    }
}

/// The set and the model side by side.
struct Pair {
    set: ConflictSet,
    model: Model,
}

impl Pair {
    fn new(oldest: u64) -> Self {
        Self { set: ConflictSet::new(Version(oldest)), model: Model::new(Version(oldest)) }
    }

    fn advance(&mut self, oldest: u64) {
        self.set.advance_oldest(Version(oldest));
        self.model.advance_oldest(Version(oldest));
    }

    fn decide(&mut self, version: u64, batch: &[Transaction]) -> Decided {
        let candidates: Vec<_> = batch.iter().map(Transaction::candidate).collect();
        let decided = self.set.decide(Version(version), &candidates);
        let expected = self.model.decide(Version(version), &candidates);
        assert_eq!(decided, expected, "batch {version}: {batch:#?}\n{:#?}", self.set);
        self.set.check();
        decided
    }

    /// The verdicts as letters: C committed, X conflict, T too old.
    fn letters(&mut self, version: u64, batch: &[Transaction]) -> String {
        let letter = |verdict: &Verdict| match verdict {
            Verdict::Committed => 'C',
            Verdict::Conflict { .. } => 'X',
            Verdict::TooOld => 'T',
            Verdict::Yours => unreachable!("a set knows no proxies"),
        };
        self.decide(version, batch).verdicts.iter().map(letter).collect()
    }
}

#[test]
fn a_write_conflicts_strictly_above_the_read_version() {
    for (write, read) in [("k", "k"), ("k", "a-z"), ("a-z", "k"), ("b-m", "c-d"), ("c-d", "b-m")] {
        let mut pair = Pair::new(0);
        assert_eq!(pair.letters(10, &[txn(0, "", write)]), "C");
        let readers = [txn(9, read, ""), txn(10, read, ""), txn(11, read, "")];
        assert_eq!(pair.letters(20, &readers), "XCC", "write {write}, read {read}");
    }
}

#[test]
fn the_newest_write_counts_wherever_it_is_kept() {
    for (older, newer) in [("k", "a-z"), ("a-z", "k"), ("k", "k"), ("j-l", "a-z"), ("a-z", "j-l")] {
        let mut pair = Pair::new(0);
        assert_eq!(pair.letters(10, &[txn(0, "", older)]), "C");
        assert_eq!(pair.letters(20, &[txn(0, "", newer)]), "C");
        let readers = [txn(15, "k", ""), txn(15, "k-k0", ""), txn(20, "k", ""), txn(20, "-zz", "")];
        assert_eq!(pair.letters(30, &readers), "XXCC", "{older} then {newer}");
    }
}

#[test]
fn in_a_batch_only_earlier_committed_writes_conflict() {
    let mut pair = Pair::new(0);
    let chain = [txn(5, "", "a"), txn(5, "a", "c"), txn(5, "c", "")];
    assert_eq!(pair.letters(10, &chain), "CXC");
    // The reader before the writer is not touched by it.
    assert_eq!(pair.letters(20, &[txn(10, "a", ""), txn(10, "", "a")]), "CC");
    let ranges = [txn(20, "", "b-d"), txn(20, "c", "x"), txn(20, "x", ""), txn(20, "a-b d-e", "")];
    assert_eq!(pair.letters(30, &ranges), "CXCC");
}

#[test]
fn a_transaction_refused_by_history_or_age_writes_nothing() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "h")]), "C");
    assert_eq!(pair.letters(20, &[txn(5, "h", "a b-d"), txn(15, "a b-d", "")]), "XC");
    pair.advance(15);
    assert_eq!(pair.letters(30, &[txn(14, "z", "a b-d"), txn(20, "a b-d", "")]), "TC");
    assert_eq!(pair.letters(40, &[txn(20, "a b-d", "")]), "C");
}

#[test]
fn own_writes_never_meet_own_reads() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "a b-d c", "a b-d c")]), "C");
    assert_eq!(pair.letters(20, &[txn(10, "a b-d c", "-zz")]), "C");
}

#[test]
fn blind_writes_always_commit() {
    let mut pair = Pair::new(100);
    assert_eq!(pair.letters(110, &[txn(0, "", "a"), txn(0, "", "a"), txn(0, "", "-z")]), "CCC");
    pair.advance(115);
    assert_eq!(pair.letters(120, &[txn(0, "", "a-c")]), "C");
    assert_eq!(pair.letters(130, &[txn(119, "b", ""), txn(120, "b", "")]), "XC");
}

#[test]
fn too_old_needs_a_read_range_and_an_older_read_version() {
    let mut pair = Pair::new(100);
    let batch = [txn(99, "a", ""), txn(100, "a", ""), txn(99, "", "a"), txn(99, "", "")];
    assert_eq!(pair.letters(110, &batch), "TCCC");
    // An empty read range counts as a read range.
    assert_eq!(pair.letters(120, &[txn(99, "c-c", "b"), txn(99, "d-c", "b")]), "TT");
    // Too old goes before conflict.
    pair.advance(111);
    assert_eq!(pair.letters(130, &[txn(105, "a", "")]), "T");
}

#[test]
fn a_read_version_from_the_future_loses_only_to_its_own_batch() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "a"), txn(10, "a", ""), txn(999, "a", "")]), "CXX");
    assert_eq!(pair.letters(20, &[txn(20, "a", ""), txn(999, "-z", "")]), "CC");
}

#[test]
fn reads_leave_no_trace() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(5, "a-c", ""), txn(5, "b", ""), txn(5, "b", "b")]), "CCC");
    assert_eq!(pair.set.len(), 1);
}

#[test]
fn neighbours_do_not_meet() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "b-d k")]), "C");
    let beside = ["a-b", "d-e", "d", "a", "-b", "bzz-bzz", "k0-z", "j-k", "jzz", "k0", "."];
    for (version, read) in (20..).zip(beside) {
        assert_eq!(pair.letters(version, &[txn(5, read, "")]), "C", "read {read}");
    }
    let inside = ["b", "b0", "cz", "a-b0", "k-k0", "j-l", "k", "-z", "c-c0"];
    for (version, read) in (40..).zip(inside) {
        assert_eq!(pair.letters(version, &[txn(5, read, "")]), "X", "read {read}");
    }
}

#[test]
fn a_key_and_its_successor_are_different_keys() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "k k00")]), "C");
    let readers = [txn(5, "k", ""), txn(5, "k0", ""), txn(5, "k00", ""), txn(5, "k0-k00", "")];
    assert_eq!(pair.letters(20, &readers), "XCXC");
}

#[test]
fn empty_ranges_neither_conflict_nor_write() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "b-d")]), "C");
    let reads = [txn(5, "b-b", ""), txn(5, "c-c", ""), txn(5, "d-d", ""), txn(5, "d-b", "")];
    assert_eq!(pair.letters(20, &reads), "CCCC");
    assert_eq!(pair.letters(30, &[txn(20, "", "x-x z-y"), txn(20, "-zz", "")]), "CC");
    assert_eq!(pair.letters(40, &[txn(20, "-zz", "")]), "C");
}

#[test]
fn the_empty_key_is_a_key() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", ".")]), "C");
    assert_eq!(pair.letters(20, &[txn(5, ".", ""), txn(5, "-0", ""), txn(5, "0", "")]), "XXC");
    assert_eq!(pair.letters(30, &[txn(20, "", "-b")]), "C");
    assert_eq!(pair.letters(40, &[txn(25, ".", ""), txn(25, "a", ""), txn(25, "b", "")]), "XXC");
}

#[test]
fn a_conflict_names_all_its_ranges_when_asked() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "b-d k")]), "C");
    let asked = Transaction { report_conflicts: true, ..txn(5, "a c k z-z c-m q", "") };
    let silent = Transaction { report_conflicts: false, ..asked.clone() };
    let fine = Transaction { read_version: Version(10), ..asked.clone() };
    let decided = pair.decide(20, &[txn(10, "", "q"), asked, silent, fine]);
    assert_eq!(
        decided.verdicts[1..],
        [
            Verdict::Conflict { ranges: vec![1, 2, 4, 5] },
            Verdict::Conflict { ranges: vec![] },
            Verdict::Conflict { ranges: vec![5] },
        ]
    );
    assert_eq!(decided.in_batch_conflicts, 3);
}

#[test]
fn conflicts_with_history_are_not_counted_as_in_batch() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.decide(10, &[txn(0, "", "a b")]).in_batch_conflicts, 0);
    let batch = [txn(10, "", "b"), txn(5, "a", ""), txn(5, "a b", "")];
    assert_eq!(pair.decide(20, &batch).in_batch_conflicts, 1);
}

#[test]
fn the_window_moves_forward_only() {
    let mut pair = Pair::new(50);
    pair.advance(40);
    assert_eq!(pair.set.oldest(), Version(50));
    pair.advance(60);
    assert_eq!(pair.set.oldest(), Version(60));
    assert_eq!(pair.letters(61, &[txn(59, "a", ""), txn(60, "a", "")]), "TC");
}

#[test]
#[should_panic(expected = "batch v10 is not above v10")]
fn a_version_taken_twice_stops_the_process() {
    let mut set = ConflictSet::new(Version(5));
    let _ = set.decide(Version(10), &[]);
    let _ = set.decide(Version(10), &[]);
}

#[test]
fn written_ranges_of_a_batch_are_united() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.letters(10, &[txn(0, "", "a-c c-e b-d"), txn(0, "", "d-f")]), "CC");
    assert_eq!(pair.set.len(), 2, "one step from a to f: {:?}", pair.set);
}

#[test]
fn eviction_frees_everything() {
    let mut pair = Pair::new(0);
    let empty = pair.set.memory_bytes();
    let writes: Vec<String> = (0..100).map(|i| format!("p{i:03} r{i:03}-r{i:03}x")).collect();
    let batch: Vec<_> = writes.iter().map(|writes| txn(0, "", writes)).collect();
    assert_eq!(pair.letters(10, &batch).len(), 100);
    assert_eq!(pair.set.len(), 300);
    assert!(!pair.set.evict(1000), "all of it is in the window");
    assert!(pair.set.memory_bytes() > 300 * 20);
    pair.advance(10);
    let mut steps = 0;
    while !pair.set.is_empty() || pair.set.memory_bytes() > empty {
        pair.set.evict(7);
        pair.set.check();
        steps += 1;
        assert!(steps <= 1000, "{} entries are left", pair.set.len());
    }
}

#[test]
fn eviction_keeps_up_without_a_budget() {
    let (mut pair, mut version) = (Pair::new(0), 0_u64);
    for round in 0..400 {
        version += 1;
        pair.advance(version.saturating_sub(20));
        pair.model.forget();
        let write = format!("p{round} r{round}-r{round}x");
        assert_eq!(pair.letters(version, &[txn(version - 1, "", &write)]), "C");
        pair.set.evict(0);
        let (points, gaps) = (pair.set.points.len(), pair.set.gap_runs.len());
        assert!(points <= 20 && gaps <= 100, "{points} points, {gaps} in round {round}");
    }
}

#[test]
fn equality_looks_at_what_can_still_decide() {
    // A point under a newer range is outshone.
    let mut with = Pair::new(0);
    let mut without = Pair::new(0);
    assert_eq!(with.letters(10, &[txn(0, "", "k")]), "C");
    assert_eq!(without.letters(10, &[]), "");
    assert_ne!(with.set, without.set);
    for pair in [&mut with, &mut without] {
        assert_eq!(pair.letters(20, &[txn(0, "", "a-m")]), "C");
    }
    assert_ne!(with.set.len(), without.set.len());
    assert_eq!(with.set, without.set);

    // What left the window is forgotten.
    assert_eq!(with.letters(30, &[txn(0, "", "x y-z")]), "C");
    assert_eq!(without.letters(30, &[]), "");
    assert_ne!(with.set, without.set);
    with.advance(30);
    without.advance(30);
    assert_eq!(with.set, without.set);
}

/// What a set can still decide: its window, its points that no range outshines, its steps.
#[derive(PartialEq, Debug)]
struct Canonical {
    window: (Version, Version),
    points: BTreeMap<Vec<u8>, Version>,
    steps: Vec<(Vec<u8>, Version)>,
}

impl Canonical {
    fn of(set: &ConflictSet) -> Self {
        let version = |seq: Seq| set.window.version(seq).unwrap_or_default();
        let mut steps: BTreeMap<Vec<u8>, Version> = BTreeMap::new();
        for run in set.gap_runs.runs() {
            let boundaries: Vec<_> =
                run.entries().iter().map(|e| (key_of(set, run, e), version(e.seq))).collect();
            for pair in boundaries.windows(2) {
                let ((begin, at), (end, _)) = (&pair[0], &pair[1]);
                if *at == Version::ZERO {
                    continue;
                }
                let last = |range: (_, _)| steps.range::<Vec<u8>, _>(range).next_back();
                use std::ops::Bound::{Included, Unbounded};
                let behind = last((Unbounded, Included(end))).map_or(Version::ZERO, |(_, v)| *v);
                steps.retain(|key, _| key < begin || key >= end);
                steps.insert(begin.clone(), *at);
                steps.insert(end.clone(), behind);
            }
        }
        let at = |key: &[u8]| {
            steps.range(..=key.to_vec()).next_back().map_or(Version::ZERO, |(_, version)| *version)
        };
        let points = set.points.iter(&set.log);
        let points = points
            .map(|(key, seq)| (key.to_vec(), version(seq)))
            .filter(|(key, version)| *version > at(key))
            .collect();
        let mut steps: Vec<_> = steps.into_iter().collect();
        let mut before = Version::ZERO;
        steps.retain(|(_, version)| core::mem::replace(&mut before, *version) != *version);
        Self { window: (set.oldest, set.newest), points, steps }
    }
}

fn key_of(set: &ConflictSet, run: &Run, entry: &super::Entry) -> Vec<u8> {
    if entry.head.is_exact() {
        run.encoding.key(entry.head)
    } else {
        set.log.key(entry.key).to_vec()
    }
}

impl PartialEq for ConflictSet {
    fn eq(&self, other: &Self) -> bool {
        Canonical::of(self) == Canonical::of(other)
    }
}

/// One step of a random history.
#[derive(Clone, Debug)]
struct Round {
    version_step: u64,
    window: u64,
    evict_entries: Option<usize>,
    batch: Vec<RandomTransaction>,
}

/// The read version is `lag` below the batch's version, or at or above it when negative.
#[derive(Clone, Debug)]
struct RandomTransaction {
    lag: i64,
    reads: Ranges,
    writes: Ranges,
    report_conflicts: bool,
}

impl Pair {
    fn play(&mut self, version: &mut u64, round: &Round) -> Decided {
        *version += round.version_step;
        self.advance(version.saturating_sub(round.window).min(*version - 1));
        let batch: Vec<Transaction> = round
            .batch
            .iter()
            .map(|t| Transaction {
                read_version: Version(version.saturating_add_signed(-t.lag)),
                reads: t.reads.clone(),
                writes: t.writes.clone(),
                report_conflicts: t.report_conflicts,
            })
            .collect();
        let decided = self.decide(*version, &batch);
        if let Some(entries) = round.evict_entries {
            let before = self.set.clone();
            self.set.evict(entries);
            self.set.check();
            assert_eq!(before, self.set, "eviction changed what is decided");
        }
        decided
    }
}

/// Short keys over few bytes: prefixes of each other, `k` and `k\0`, the empty key, the last byte.
fn key() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(vec![0_u8, 1, b'a', 0xff]), 0..4)
}

fn owned_range() -> impl Strategy<Value = (Vec<u8>, Option<Vec<u8>>)> {
    prop_oneof![
        5 => key().prop_map(|k| (k, None)),
        4 => (key(), key()).prop_map(|(a, b)| (a.clone().min(b.clone()), Some(a.max(b)))),
        1 => key().prop_map(|k| (k.clone(), Some([&k[..], &[0]].concat()))),
        1 => key().prop_map(|k| (k.clone(), Some(k))),
        1 => (key(), key()).prop_map(|(a, b)| (a.clone().max(b.clone()), Some(a.min(b)))),
        1 => Just((vec![], Some(vec![0xff; 4]))),
    ]
}

fn owned_ranges(max: usize) -> impl Strategy<Value = Ranges> {
    prop::collection::vec(owned_range(), 0..=max)
        .prop_map(|list| list.iter().map(|(begin, end)| raw(begin, end.as_deref())).collect())
}

fn round() -> impl Strategy<Value = Round> {
    let transaction = (-2_i64..14, owned_ranges(3), owned_ranges(3), any::<bool>()).prop_map(
        |(lag, reads, writes, report_conflicts)| RandomTransaction {
            lag,
            reads,
            writes,
            report_conflicts,
        },
    );
    let batch = prop::collection::vec(transaction, 0..6);
    (1_u64..4, 0_u64..12, prop::option::of(0_usize..6), batch).prop_map(
        |(version_step, window, evict_entries, batch)| Round {
            version_step,
            window,
            evict_entries,
            batch,
        },
    )
}

proptest! {
    #[test]
    fn the_set_decides_as_the_model_does(rounds in prop::collection::vec(round(), 1..24)) {
        let (mut pair, mut version) = (Pair::new(0), 0);
        for round in &rounds {
            let _ = pair.play(&mut version, round);
        }
    }
}

/// Keys of one history: few or many letters, and perhaps a long prefix that all share.
struct KeyShape {
    prefix: Vec<u8>,
    letters: &'static [u8],
    length_max: u64,
}

impl KeyShape {
    fn draw(prng: &mut Prng) -> Self {
        let prefix_bytes = *prng.pick(&[0, 0, 1, 8, 40, 40, 10 << 10]);
        let letters: &[&'static [u8]] = &[b"\0", b"\0a", b"\0\x01a\xff", b"abcdefghijklmnop"];
        Self {
            prefix: vec![b'p'; prefix_bytes],
            letters: *prng.pick(letters),
            length_max: prng.between(1, 4),
        }
    }

    fn key(&self, prng: &mut Prng) -> Vec<u8> {
        // Now and then a key outside the prefix, the empty one among them, or behind a second prefix.
        let mut key = match prng.below(20) {
            0 => Vec::new(),
            1 => [&self.prefix[..], b"second"].concat(),
            _ => self.prefix.clone(),
        };
        let length = prng.between(0, self.length_max);
        key.extend((0..length).map(|_| *prng.pick(self.letters)));
        key
    }

    fn ranges(&self, prng: &mut Prng, max: u64) -> Ranges {
        let count = prng.between(0, max);
        let list: Vec<(Vec<u8>, Option<Vec<u8>>)> = (0..count)
            .map(|_| {
                let (a, b) = (self.key(prng), self.key(prng));
                match prng.below(16) {
                    0 => (a.clone().max(b.clone()), Some(a.min(b))),
                    1 => (a.clone(), Some([&a[..], &[0]].concat())),
                    2 => (vec![], Some(vec![0xff; 8])),
                    3..8 => (a.clone().min(b.clone()), Some(a.max(b))),
                    _ => (a, None),
                }
            })
            .collect();
        list.iter().map(|(begin, end)| raw(begin, end.as_deref())).collect()
    }
}

/// What the answers of a run were, so that it can't pass by asking nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    committed: usize,
    conflicts: usize,
    in_batch: usize,
    too_old: usize,
}

impl Tally {
    fn add(&mut self, decided: &Decided) {
        self.in_batch += decided.in_batch_conflicts;
        for verdict in &decided.verdicts {
            match verdict {
                Verdict::Committed => self.committed += 1,
                Verdict::Conflict { .. } => self.conflicts += 1,
                Verdict::TooOld => self.too_old += 1,
                Verdict::Yours => unreachable!("a set knows no proxies"),
            }
        }
    }
}

/// Longer histories than proptest makes, with windows that hold many batches. `MILLRACE_MODEL_BATCHES` sets
/// how many batches; a failure prints the seed of its history.
#[test]
fn long_histories_decide_as_the_model_does() {
    let asked: u64 = asked("MILLRACE_MODEL_BATCHES").unwrap_or(5_000);
    let (mut tally, mut left) = (Tally::default(), asked);
    for seed in 0.. {
        let batches = left.min(HISTORY_BATCHES);
        tally = play_or_name(seed, batches, tally);
        left -= batches;
        if left == 0 {
            break;
        }
    }
    println!("{asked} batches: {tally:?}");
    let Tally { committed, conflicts, in_batch, too_old } = tally;
    let rarest = committed.min(conflicts - in_batch).min(in_batch).min(too_old);
    assert!(rarest as u64 * 20 > asked, "{asked} batches gave only {tally:?}");
}

/// Histories of seeds that nobody has seen, for `MILLRACE_FUZZ_SECONDS`.
#[test]
#[ignore = "runs for a minute unless told otherwise"]
#[expect(clippy::disallowed_types, reason = "how long it runs is its caller's business")]
fn fuzzed_histories_decide_as_the_model_does() {
    let seconds = asked("MILLRACE_FUZZ_SECONDS").unwrap_or(60);
    let since_epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let (first, begin) = (since_epoch.as_nanos() as u64, std::time::Instant::now());
    let (mut tally, mut histories) = (Tally::default(), 0);
    while begin.elapsed().as_secs() < seconds {
        tally = play_or_name(first.wrapping_add(histories), HISTORY_BATCHES, tally);
        histories += 1;
    }
    println!("{histories} histories from seed {first}: {tally:?}");
    assert!(histories > 0);
}

#[expect(clippy::disallowed_methods, reason = "how long a test runs is asked by its caller")]
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn play_or_name(seed: u64, batches: u64, tally: Tally) -> Tally {
    let result = std::panic::catch_unwind(|| play_history(seed, batches, tally));
    result.unwrap_or_else(|_| panic!("history {seed} of {batches} batches differs"))
}

const HISTORY_BATCHES: u64 = 250;

fn play_history(seed: u64, batches: u64, mut tally: Tally) -> Tally {
    let mut prng = Prng::derive(seed, "conflict set", 0);
    let shape = KeyShape::draw(&mut prng);
    let window = prng.between(1, 60);
    let ranges_max = prng.between(1, 4);
    let (mut pair, mut version) = (Pair::new(0), 0);
    if prng.chance(1, 4) {
        // The numbers of the batches start again somewhere in this history.
        pair.set.start_at(u32::MAX - prng.between(2, 200) as u32);
    }
    for _ in 0..batches {
        let batch = (0..prng.below(8))
            .map(|_| RandomTransaction {
                lag: prng.between(0, window + 4).cast_signed() - 1,
                reads: shape.ranges(&mut prng, ranges_max),
                writes: shape.ranges(&mut prng, ranges_max),
                report_conflicts: prng.chance(1, 2),
            })
            .collect();
        let evict_entries = prng.chance(3, 4).then(|| prng.below(12) as usize);
        let round = Round { version_step: prng.between(1, 3), window, evict_entries, batch };
        tally.add(&pair.play(&mut version, &round));
        pair.model.forget();
    }
    tally
}
