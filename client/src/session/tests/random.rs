//! Seeds: calls of all kinds over a network that loses, doubles and reorders, with broken connections, stalls
//! and new epochs. At the end everything heals, and each result must be what the log says.

use std::collections::BTreeMap;

use common::record::decode_records;
use common::{Code, IdempotencyId, Mark, NodeId, Offset, StreamId, Version};

use super::fake::Fake;
use crate::session::{Answer, CallId, LaneId, PullFrom, PullerId};
use crate::{Error, Transaction};

const STREAMS: [StreamId; 4] = [StreamId(16), StreamId(17), StreamId(18), StreamId(19)];

struct Run {
    fake: Fake,
    calls: u64,
    commits: BTreeMap<u64, Kind>,
    lanes: Vec<(LaneId, Vec<u64>)>,
    puller: PullerId,
    pulled: Vec<(Version, StreamId, Offset, Vec<u8>)>,
    last_pull: u64,
    read_version: Version,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Ordered,
    AtMostOnce,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut fake = Fake::connected(seed);
        let from = PullFrom::after(STREAMS.to_vec(), Version::ZERO);
        let puller = fake.drive(|session, cx| session.open_puller(cx, from)).unwrap();
        let mut run = Self {
            fake,
            calls: 0,
            commits: BTreeMap::new(),
            lanes: Vec::new(),
            puller,
            pulled: Vec::new(),
            last_pull: 0,
            read_version: Version::ZERO,
        };
        run.pull();
        run
    }

    fn call(&mut self) -> CallId {
        self.calls += 1;
        CallId(self.calls)
    }

    fn pull(&mut self) {
        let (call, puller) = (self.call(), self.puller);
        self.last_pull = call.0;
        self.fake.drive(|session, cx| session.pull(cx, call, puller, Version::ZERO));
    }

    fn transaction(&mut self, call: CallId) -> (Transaction, Kind) {
        let rng = &mut self.fake.rng;
        let (mut transaction, mut kind) = (Transaction::new(), Kind::Plain);
        for stream in STREAMS {
            if rng.chance(1, 2) {
                transaction.append(stream, call.0.to_be_bytes().to_vec());
            }
        }
        transaction.append(*rng.pick(&STREAMS), call.0.to_be_bytes().to_vec());
        let key = [rng.below(3) as u8];
        if rng.chance(1, 3) && self.read_version > Version::ZERO {
            transaction.read_version(self.read_version).read_point(&key);
        }
        if rng.chance(1, 2) {
            transaction.write_point(&key);
        }
        match rng.below(10) {
            0 => _ = transaction.idempotency_id(IdempotencyId(rng.bytes16())),
            1 => _ = transaction.fresh_idempotency_id(IdempotencyId(rng.bytes16())),
            2 => {
                transaction.at_most_once();
                kind = Kind::AtMostOnce;
            }
            3 => _ = transaction.report_conflicts(),
            _ => {}
        }
        (transaction, kind)
    }

    fn act(&mut self) {
        match self.fake.rng.below(100) {
            0..30 => {
                let call = self.call();
                let (transaction, kind) = self.transaction(call);
                self.commits.insert(call.0, kind);
                self.fake.drive(|session, cx| session.commit(cx, call, transaction));
            }
            30..50 => self.ordered(),
            50..60 => {
                let call = self.call();
                self.fake.drive(|session, cx| session.read_version(cx, call));
            }
            60..62 => {
                let node = NodeId(self.fake.rng.between(1, 3));
                self.fake.disconnect(node);
                self.fake.connect(node);
            }
            62 => self.fake.recover(),
            63 => self.fake.withhold(),
            64 => {
                self.fake.withhold();
                (0..20).for_each(|_| _ = self.fake.tick());
                self.fake.recover();
            }
            _ => _ = self.fake.tick(),
        }
        self.collect_pulls();
    }

    fn ordered(&mut self) {
        if self.lanes.is_empty() || self.fake.rng.chance(1, 20) {
            let lane = self.fake.session.open_lane().unwrap();
            self.lanes.push((lane, Vec::new()));
        }
        let call = self.call();
        let (transaction, kind) = self.transaction(call);
        let kind = if kind == Kind::Plain { Kind::Ordered } else { kind };
        self.commits.insert(call.0, kind);
        let place = self.lanes.len() - 1;
        self.lanes[place].1.push(call.0);
        let lane = self.lanes[place].0;
        self.fake.drive(|session, cx| session.commit_ordered(cx, call, lane, transaction));
    }

    fn collect_pulls(&mut self) {
        while let Some(at) =
            self.fake.done.iter().position(|done| done.call == CallId(self.last_pull))
        {
            match self.fake.done.remove(at).result.unwrap() {
                Answer::Pulled(pulled) => {
                    for batch in &pulled.batches {
                        assert!(batch.version > pulled.after && batch.version <= pulled.through);
                        self.pulled.extend(batch.records().unwrap().into_iter().map(|delivered| {
                            let value = delivered.record.value.to_vec();
                            (batch.version, delivered.stream, delivered.offset, value)
                        }));
                    }
                }
                other => panic!("{other:?}"),
            }
            self.pull();
        }
        for done in &self.fake.done {
            if let Ok(Answer::ReadVersion(version)) = &done.result {
                self.read_version = self.read_version.max(*version);
            }
        }
    }

    fn heal(&mut self) {
        (self.fake.loss, self.fake.doubling, self.fake.overtaking) = (0, 0, 0);
        self.fake.recover();
        for node in 1..=3 {
            self.fake.disconnect(NodeId(node));
            self.fake.connect(NodeId(node));
        }
        self.fake.settle();
        for _ in 0..300 {
            self.fake.tick();
            self.collect_pulls();
        }
    }

    fn verify(&self) {
        let mut logged: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (place, entry) in self.fake.log.iter().enumerate() {
            let records = decode_records(&entry.sections[0].3).unwrap();
            let call = u64::from_be_bytes(records[0].value[..].try_into().unwrap());
            logged.entry(call).or_default().push(place);
        }
        let mut answered = BTreeMap::new();
        for done in &self.fake.done {
            if self.commits.contains_key(&done.call.0) {
                assert!(answered.insert(done.call.0, &done.result).is_none(), "answered twice");
            }
        }
        for (call, kind) in &self.commits {
            let result = answered.get(call).unwrap_or_else(|| panic!("{call} has no answer"));
            let places = logged.get(call).map_or(&[][..], Vec::as_slice);
            match result {
                Ok(Answer::Committed(committed)) => {
                    assert_eq!(places.len(), 1, "{call} is in the log {places:?}");
                    let entry = &self.fake.log[places[0]];
                    assert_eq!(entry.version, committed.position.version);
                    let offsets: Vec<_> =
                        entry.sections.iter().map(|(s, base, ..)| (*s, Some(*base))).collect();
                    assert_eq!(offsets, committed.offsets, "offsets of {call}");
                }
                Err(Error::Unknown(_)) => {
                    assert!(*kind == Kind::AtMostOnce && places.len() <= 1, "{call} {places:?}");
                }
                Err(error) => assert!(places.is_empty(), "{call} is in the log: {error}"),
                other => panic!("{other:?} is no answer to a commit"),
            }
        }
        self.verify_lanes(&answered);
        self.verify_pulls();
    }

    fn verify_lanes(&self, answered: &BTreeMap<u64, &Result<Answer, Error>>) {
        for (_, calls) in &self.lanes {
            let mut last = Version::ZERO;
            let mut broken = false;
            for call in calls {
                match answered[call] {
                    Ok(Answer::Committed(committed)) => {
                        assert!(!broken, "{call} committed behind one that failed");
                        assert!(committed.position.version > last, "{call} overtook");
                        last = committed.position.version;
                    }
                    Err(Error::Unknown(_)) => {}
                    _ => broken = true,
                }
            }
        }
    }

    /// What was pulled is the log: nothing twice, nothing missing, in order.
    fn verify_pulls(&self) {
        let mut expect = Vec::new();
        for entry in &self.fake.log {
            for (stream, base, _, records) in &entry.sections {
                for (place, record) in decode_records(records).unwrap().into_iter().enumerate() {
                    let offset = base.plus(place as u64);
                    expect.push((entry.version, *stream, offset, record.value.to_vec()));
                }
            }
        }
        assert_eq!(self.pulled.len(), expect.len());
        assert_eq!(self.pulled, expect);
    }
}

fn run(seed: u64) -> Run {
    let mut run = Run::new(seed);
    let is_rough = seed.is_multiple_of(2);
    (run.fake.loss, run.fake.doubling, run.fake.overtaking) =
        if is_rough { (3, 5, 20) } else { (0, 0, 0) };
    run.fake.knobs.client_in_flight_max = run.fake.rng.between(1, 20);
    run.fake.knobs.pull_bytes_max = run.fake.rng.between(1, 300);
    (0..600).for_each(|_| run.act());
    run.heal();
    run.verify();
    run
}

#[test]
fn results_are_what_the_log_says() {
    let (mut committed, mut broken, mut unknown) = (0, 0, 0);
    let mut marks = std::collections::BTreeSet::new();
    for seed in 0..300 {
        let run = run(seed);
        marks.extend(run.fake.marks.iter().copied());
        for done in &run.fake.done {
            match &done.result {
                Ok(Answer::Committed(_)) => committed += 1,
                Err(error) if error.code() == Code::LaneBroken => broken += 1,
                Err(Error::Unknown(_)) => unknown += 1,
                _ => {}
            }
        }
    }
    assert!(committed > 5_000 && broken > 100 && unknown > 0, "{committed} {broken} {unknown}");
    assert!(marks.contains(&Mark::UnknownCommitted) && marks.contains(&Mark::UnknownAbsent));
}

#[test]
fn one_seed_is_one_run() {
    for seed in [4, 5] {
        let (a, b) = (run(seed), run(seed));
        assert_eq!(a.fake.done, b.fake.done);
        assert_eq!(a.pulled, b.pulled);
    }
}
