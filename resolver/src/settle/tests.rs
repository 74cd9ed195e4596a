//! Several resolvers and proxies that settle, at any pace and with settlements lost, late and repeated,
//! against the brute-force model of one resolver that knows everything at once.

use std::collections::BTreeSet;

use common::{Incarnation, KeyRange, NodeId, OwnWrites, Peer, Prng, Role};

use super::*;
use crate::conflict::model::Model;

const PLENTY: u64 = 1 << 30;
const LIFE: u64 = 300;
const KEYS: [&str; 8] = ["", "a", "c", "d", "f", "k", "m", "x"];

fn proxy(index: usize) -> Endpoint {
    let index = index as u8;
    let node = NodeId(2 + u64::from(index));
    Peer { node, incarnation: Incarnation(1) }.endpoint(Role::Proxy(index))
}

fn points(keys: &[&str]) -> Ranges {
    keys.iter().map(|key| KeyRange::point(key.as_bytes())).collect()
}

fn one(read_version: u64, reads: &[&str], writes: &[&str]) -> ResolveTransaction {
    ResolveTransaction {
        read_version: Version(read_version),
        reads: points(reads),
        writes: points(writes),
        report_conflicts: true,
        is_final: false,
    }
}

fn decide(
    settling: &mut Settling,
    version: u64,
    by: usize,
    batch: &[ResolveTransaction],
) -> Ruling {
    let mut batch = batch.to_vec();
    let ruling = settling.decide(Version(version), proxy(by), &mut batch, PLENTY, Slips::default());
    settling.check();
    ruling
}

fn verdicts(ruling: Ruling) -> Vec<Verdict> {
    match ruling {
        Ruling::Decided(decided) => decided.verdicts,
        Ruling::Held(wait) => panic!("waits for {wait}"),
    }
}

fn settle(settling: &mut Settling, version: u64, by: usize, committed: &[bool]) -> Settled {
    let settlement = Settlement::new(Version(version), committed.iter().copied());
    let settled = settling.settle(proxy(by), &settlement, Slips::default());
    settling.check();
    settled
}

#[test]
fn an_aborted_write_aborts_nobody() {
    let mut settling = Settling::new(Version::ZERO);
    let writes = [one(0, &[], &["k"]), one(0, &[], &["m"])];
    assert_eq!(verdicts(decide(&mut settling, 10, 0, &writes)), vec![Verdict::Committed; 2]);
    assert_eq!(settling.settled(proxy(0), Version(10)), Version(9));
    let reads = [one(0, &["k"], &[]), one(0, &["m"], &[]), one(0, &["x"], &[])];
    let wait = Wait { version: Version(10), proxy: proxy(0), why: Why::Reads };
    assert_eq!(decide(&mut settling, 20, 1, &reads), Ruling::Held(wait));
    assert_eq!(settling.held(), Some((Version(20), wait)));
    // Offered again with nothing new, it still waits.
    assert_eq!(decide(&mut settling, 20, 1, &reads), Ruling::Held(wait));
    assert_eq!(settle(&mut settling, 10, 0, &[false, true]), Settled::Taken);
    let conflict = Verdict::Conflict { ranges: vec![0] };
    assert_eq!(
        verdicts(decide(&mut settling, 20, 1, &reads)),
        [Verdict::Committed, conflict, Verdict::Committed]
    );
    assert_eq!(settling.settled(proxy(1), Version(20)), Version(20), "it has written nothing");
    assert_eq!(settle(&mut settling, 10, 0, &[false, true]), Settled::Again);
    assert_eq!((settling.unsettled_count(), settling.unsettled_bytes()), (0, 0));
}

#[test]
fn what_nobody_else_has_open_waits_for_nothing() {
    let mut settling = Settling::new(Version::ZERO);
    assert_eq!(verdicts(decide(&mut settling, 10, 0, &[one(0, &[], &["k"])])).len(), 1);
    let seen = one(10, &["k"], &["m"]);
    assert_eq!(verdicts(decide(&mut settling, 20, 1, &[seen])), [Verdict::Committed]);
    // The first one's own write, and one of the very batch.
    let batch = [one(0, &["k"], &["x"]), one(20, &["x"], &[]), one(20, &["y"], &[])];
    assert_eq!(
        verdicts(decide(&mut settling, 30, 0, &batch)),
        [Verdict::Yours, Verdict::Yours, Verdict::Committed]
    );
    assert_eq!(settling.settled(proxy(0), Version(30)), Version(9));
    assert_eq!(settle(&mut settling, 30, 0, &[false, true, true]), Settled::Early);
    assert_eq!(settling.unsettled_count(), 3, "the first one is open");
    assert_eq!(settle(&mut settling, 10, 0, &[true]), Settled::Taken);
    assert_eq!(settling.settled(proxy(0), Version(30)), Version(30));
    assert_eq!(settle(&mut settling, 20, 1, &[true]), Settled::Taken);
    assert_eq!(settling.unsettled_count(), 0);
}

#[test]
fn what_is_final_is_decided_at_once_and_is_never_open() {
    let mut settling = Settling::new(Version::ZERO);
    let last_word = |reads: &[&str], writes: &[&str]| ResolveTransaction {
        is_final: true,
        ..one(0, reads, writes)
    };
    let batch = [last_word(&[], &["k"]), last_word(&["k"], &["m"])];
    let conflict = Verdict::Conflict { ranges: vec![0] };
    let told = verdicts(decide(&mut settling, 10, 0, &batch));
    assert_eq!(told, [Verdict::Committed, conflict.clone()]);
    assert_eq!(settling.unsettled_count(), 0);
    // Behind what is open it is known all the same, also to others.
    assert_eq!(verdicts(decide(&mut settling, 20, 0, &[one(0, &[], &["a"])])).len(), 1);
    assert_eq!(verdicts(decide(&mut settling, 30, 0, &[last_word(&[], &["b"])])).len(), 1);
    assert_eq!(settling.unsettled_count(), 2);
    assert_eq!(verdicts(decide(&mut settling, 40, 1, &[one(0, &["b"], &[])])), [conflict]);
}

#[test]
fn too_much_that_is_unsettled_holds_the_next_batch() {
    let mut settling = Settling::new(Version::ZERO);
    let bytes_max = 8;
    let next = |settling: &mut Settling, version, by| {
        let mut batch = [one(0, &[], &["k"])];
        settling.decide(Version(version), proxy(by), &mut batch, bytes_max, Slips::default())
    };
    assert_eq!(verdicts(next(&mut settling, 10, 0)), [Verdict::Committed]);
    let wait = Wait { version: Version(10), proxy: proxy(0), why: Why::Full };
    // Even its own proxy waits: what it waits for needs nothing of it.
    assert_eq!(next(&mut settling, 20, 0), Ruling::Held(wait));
    assert_eq!(settle(&mut settling, 10, 0, &[true]), Settled::Taken);
    assert_eq!(verdicts(next(&mut settling, 20, 0)), [Verdict::Committed]);
}

/// A transaction as its proxy has it.
#[derive(Clone, Debug)]
struct Whole {
    read_version: Version,
    reads: Ranges,
    writes: Ranges,
    is_reported: bool,
    /// Its lane is broken: it does not commit, whatever the resolvers say, who can't know it.
    is_broken: bool,
}

#[derive(Clone, Debug)]
struct Batch {
    version: Version,
    proxy: usize,
    transactions: Vec<Whole>,
    /// For each resolver: the verdicts, and through where it had settled.
    answers: Vec<Option<(Vec<Verdict>, Version)>>,
    settlement: Option<Settlement>,
}

fn random_ranges(prng: &mut Prng, most: u64) -> Ranges {
    let mut pick = |_| (*prng.pick(&KEYS), *prng.pick(&KEYS), prng.chance(2, 3));
    let picked: Vec<_> = (0..most).map(&mut pick).collect();
    let count = prng.below(most + 1) as usize;
    let range = |(one, two, is_point): &(&'static str, &'static str, bool)| match is_point {
        true => KeyRange::point(one.as_bytes()),
        false => KeyRange::new(one.min(two).as_bytes(), one.max(two).as_bytes()).unwrap(),
    };
    picked[..count].iter().map(range).collect()
}

fn random_batches(prng: &mut Prng, proxies: u64, resolvers: usize) -> Vec<Batch> {
    let (mut version, mut batches) = (Version(1000), Vec::new());
    for _ in 0..40 {
        let read_version = |prng: &mut Prng| version.minus_saturating(prng.below(LIFE * 5 / 4));
        let transactions = (0..prng.below(5))
            .map(|_| Whole {
                read_version: read_version(prng),
                reads: random_ranges(prng, 3),
                writes: random_ranges(prng, 2),
                is_reported: prng.chance(1, 2),
                is_broken: prng.chance(1, 8),
            })
            .collect();
        version = version.plus(1 + prng.below(30));
        let (proxy, answers) = (prng.below(proxies) as usize, vec![None; resolvers]);
        batches.push(Batch { version, proxy, transactions, answers, settlement: None });
    }
    batches
}

/// What one that knows everything says: yes or no, and the ranges if they are named.
fn truth(batches: &[Batch]) -> Vec<Vec<Option<Verdict>>> {
    let (mut model, nothing) = (Model::new(Version::ZERO), Ranges::default());
    let mut truth = Vec::new();
    for batch in batches {
        model.advance_oldest(batch.version.minus_saturating(LIFE));
        let candidates: Vec<Candidate<'_>> = batch
            .transactions
            .iter()
            .map(|one| Candidate {
                read_version: one.read_version,
                reads: &one.reads,
                writes: if one.is_broken { &nothing } else { &one.writes },
                report_conflicts: one.is_reported,
            })
            .collect();
        let verdicts = model.decide(batch.version, &candidates).verdicts;
        let whole = batch.transactions.iter().zip(verdicts);
        truth.push(whole.map(|(one, verdict)| (!one.is_broken).then_some(verdict)).collect());
    }
    truth
}

struct World {
    begins: Vec<&'static str>,
    resolvers: Vec<Settling>,
    /// For each resolver, the batch that is next.
    next: Vec<usize>,
    own: Vec<OwnWrites>,
    batches: Vec<Batch>,
    held: usize,
    left: usize,
}

impl World {
    fn new(prng: &mut Prng) -> Self {
        let begins = ["", "c", "f", "m"][..1 + prng.below(4) as usize].to_vec();
        let (count, proxies) = (begins.len(), 1 + prng.below(3));
        Self {
            resolvers: vec![Settling::new(Version::ZERO); count],
            next: vec![0; count],
            own: vec![OwnWrites::default(); proxies as usize],
            batches: random_batches(prng, proxies, count),
            begins,
            held: 0,
            left: 0,
        }
    }

    /// The pieces of a resolver, and which ranges they are of.
    fn clip(&self, ranges: &Ranges, resolver: usize) -> (Ranges, Vec<u32>) {
        let end = self.begins.get(resolver + 1).map(|end| end.as_bytes());
        let begin = self.begins[resolver].as_bytes();
        let pieces = (0..).zip(ranges.iter());
        let pieces = pieces.filter_map(|(index, range)| Some((range.within(begin, end)?, index)));
        let (pieces, indexes): (Vec<_>, Vec<_>) = pieces.unzip();
        (Ranges::from_ranges(pieces), indexes)
    }

    fn offer(&mut self, resolver: usize, bytes_max: u64) {
        let Some(batch) = self.batches.get(self.next[resolver]) else { return };
        let whole = &batch.transactions;
        let mut part: Vec<_> = whole
            .iter()
            .map(|one| {
                let reads = self.clip(&one.reads, resolver).0;
                let writes = self.clip(&one.writes, resolver).0;
                let is_alone = self.begins.len() == 1;
                let is_here = reads == one.reads && writes == one.writes;
                let is_final = !one.is_broken && (is_alone || is_here);
                let report_conflicts = one.is_reported;
                let read_version = one.read_version;
                ResolveTransaction { read_version, reads, writes, report_conflicts, is_final }
            })
            .collect();
        let settling = &mut self.resolvers[resolver];
        let (version, asker) = (batch.version, proxy(batch.proxy));
        settling.advance_oldest(version.minus_saturating(LIFE));
        let slips = Slips::default();
        match settling.decide(version, asker, &mut part, bytes_max, slips) {
            Ruling::Held(_) => self.held += 1,
            Ruling::Decided(decided) => {
                self.left += decided.verdicts.iter().filter(|one| **one == Verdict::Yours).count();
                let answer = (decided.verdicts, settling.settled(asker, version));
                self.batches[self.next[resolver]].answers[resolver] = Some(answer);
                self.next[resolver] += 1;
            }
        }
        self.resolvers[resolver].check();
    }

    /// Judges the next batch of a proxy, if all its verdicts are there.
    fn judge(&mut self, proxy: usize, truth: &[Vec<Option<Verdict>>]) {
        let mut of_proxy = (0..).zip(&self.batches).filter(|(_, batch)| batch.proxy == proxy);
        let next = of_proxy.find(|(_, batch)| batch.settlement.is_none());
        let Some((at, batch)) = next else { return };
        if batch.answers.iter().any(Option::is_none) {
            return;
        }
        let (batch, mut own) = (batch.clone(), core::mem::take(&mut self.own[proxy]));
        own.begin(batch.version);
        let mut commits = Vec::new();
        for (index, one) in batch.transactions.iter().enumerate() {
            let verdict = self.combine(&batch, (one, index), &mut own);
            if let Some(expect) = &truth[at][index] {
                assert_eq!(verdict, *expect, "transaction {index} of {}: {one:?}", batch.version);
            }
            let is_commit = verdict == Verdict::Committed && !one.is_broken;
            if is_commit {
                own.commit(one.writes.clone());
            }
            commits.push(is_commit);
        }
        let settled = batch.answers.iter().flatten().map(|(_, settled)| *settled).min().unwrap();
        own.forget(settled);
        self.own[proxy] = own;
        self.batches[at].settlement = Some(Settlement::new(batch.version, commits));
    }

    fn combine(&self, batch: &Batch, whole: (&Whole, usize), own: &mut OwnWrites) -> Verdict {
        let ((one, index), mut ranges) = (whole, BTreeSet::new());
        let (mut is_conflict, mut is_left) = (false, false);
        for (resolver, answer) in batch.answers.iter().enumerate() {
            match &answer.as_ref().unwrap().0[index] {
                Verdict::Committed => {}
                Verdict::TooOld => return Verdict::TooOld,
                Verdict::Yours => is_left = true,
                Verdict::Conflict { ranges: named } => {
                    let indexes = self.clip(&one.reads, resolver).1;
                    is_conflict = true;
                    ranges.extend(named.iter().map(|read| indexes[*read as usize]));
                }
            }
        }
        if is_left || (is_conflict && one.is_reported) {
            let reads = (0..).zip(one.reads.iter());
            let met: Vec<u32> = reads
                .filter(|(_, read)| own.meets(*read, one.read_version))
                .map(|(read, _)| read)
                .collect();
            is_conflict |= !met.is_empty();
            ranges.extend(met);
        }
        if !is_conflict {
            return Verdict::Committed;
        }
        let named = if one.is_reported { ranges } else { BTreeSet::new() };
        Verdict::Conflict { ranges: named.into_iter().collect() }
    }
}

#[test]
fn any_number_of_resolvers_says_what_one_says() {
    let (mut held, mut left, mut early) = (0, 0, 0);
    for seed in 0..300 {
        let mut prng = Prng::new(seed);
        let mut world = World::new(&mut prng);
        let truth = truth(&world.batches);
        let resolvers = world.begins.len() as u64;
        let proxies = world.own.len() as u64;
        let bytes_max = if prng.chance(1, 3) { 1 + prng.below(200) } else { PLENTY };
        let mut tries = 0;
        while world.batches.iter().any(|batch| batch.settlement.is_none()) {
            tries += 1;
            assert!(tries < 100_000, "seed {seed}: they wait for each other");
            let resolver = prng.below(resolvers) as usize;
            match prng.below(3) {
                0 => world.offer(resolver, bytes_max),
                1 => world.judge(prng.below(proxies) as usize, &truth),
                // In any order, as often as it comes, and never at some resolvers for long.
                _ => {
                    let batch = prng.pick(&world.batches);
                    if let Some(settlement) = &batch.settlement {
                        let by = proxy(batch.proxy);
                        let settling = &mut world.resolvers[resolver];
                        let settled = settling.settle(by, settlement, Slips::default());
                        early += u32::from(settled == Settled::Early);
                        settling.check();
                    }
                }
            }
        }
        for (resolver, settling) in world.resolvers.iter_mut().enumerate() {
            for batch in &world.batches {
                let settlement = batch.settlement.as_ref().unwrap();
                let _ = settling.settle(proxy(batch.proxy), settlement, Slips::default());
            }
            assert_eq!(settling.unsettled_count(), 0, "seed {seed}, resolver {resolver}");
            settling.set().check();
        }
        held += world.held;
        left += world.left;
    }
    assert!(held > 1000 && left > 200 && early > 100, "{held} held, {left} left, {early} early");
}
