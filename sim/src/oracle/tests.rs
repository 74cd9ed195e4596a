//! A good history that every oracle accepts, and for each rule a hand-made bad one.

use bytes::Bytes;
use common::disk::{DiskOp, DiskOpId, DiskRequest, Lane};
use common::register::Generation;
use common::{
    Code, Epoch, Incarnation, KeyRange, Offset, Position, Ranges, RequestId, Role, SegmentId,
    StreamId,
};

use super::*;
use crate::observe::{ConsumerId, SeenBlock, SeenSection, Submission, TxnId};

const NODE: NodeId = NodeId(1);
const RV1: u64 = 0;
const RTV1: u64 = 20_000_000;
const STREAM: StreamId = StreamId(16);
const OTHER: StreamId = StreamId(17);
const CONSUMER: ConsumerId = ConsumerId(1);

struct Stub {
    register: RegisterState,
    survives: bool,
}

impl Probe for Stub {
    fn would_survive(&self, _: NodeId, _: File, _: u64, _: u64) -> bool {
        self.survives
    }

    fn register(&self) -> RegisterState {
        self.register.clone()
    }
}

struct Bench {
    oracles: Oracles,
    stub: Stub,
    previous: u64,
    epoch: u64,
    next_request: u64,
}

const fn node(role: Role) -> Endpoint {
    Endpoint { node: NODE, incarnation: Incarnation(1), role }
}

const fn client() -> Endpoint {
    Endpoint { node: NodeId(100), incarnation: Incarnation(1), role: Role::Client }
}

fn generation(epoch: u64, begin: u64) -> Generation {
    Generation {
        epoch: Epoch(epoch),
        first_epoch: Epoch(epoch),
        begin: Version(begin),
        end: None,
        log_servers: vec![NODE],
        absent: Vec::new(),
        replication: 1,
    }
}

impl Bench {
    /// Epoch 1 serves.
    fn new() -> Self {
        let stub = Stub { register: RegisterState::empty(), survives: true };
        let mut bench =
            Self { oracles: Oracles::default(), stub, previous: RV1, epoch: 1, next_request: 1 };
        bench.begin_epoch(1, RV1, RTV1);
        bench
    }

    fn note(&mut self, role: Role, note: Note) -> Judged {
        self.oracles.judge(&Happened::Note(node(role), note), &self.stub)
    }

    fn see(&mut self, observation: Observation) -> Judged {
        self.oracles.judge(&Happened::Observation(client().peer(), observation), &self.stub)
    }

    fn recovery(&mut self, epoch: u64, rv: u64, rtv: u64) -> Judged {
        let (recovery_version, first_version) = (Version(rv), Version(rtv));
        let note = Note::RecoveryVersion { epoch: Epoch(epoch), recovery_version, first_version };
        self.note(Role::Leader, note)
    }

    fn begin_epoch(&mut self, epoch: u64, rv: u64, rtv: u64) {
        self.recovery(epoch, rv, rtv).unwrap();
        (self.epoch, self.previous) = (epoch, rv);
        self.commit(rtv, &[]);
        if let Some(last) = self.stub.register.generations.last_mut() {
            last.end = Some(Version(rv));
        }
        self.stub.register.epoch = Epoch(epoch);
        self.stub.register.generations.push(generation(epoch, rv));
        self.note(Role::Leader, Note::GenerationWritten { epoch: Epoch(epoch) }).unwrap();
        self.note(Role::Leader, Note::Serving { epoch: Epoch(epoch) }).unwrap();
    }

    fn assign(&mut self, previous: u64, version: u64) -> Judged {
        let (epoch, proxy) = (Epoch(self.epoch), node(Role::Proxy(0)));
        let (previous, version) = (Version(previous), Version(version));
        self.note(Role::Sequencer, Note::Assigned { epoch, previous, version, proxy })
    }

    fn accept(&mut self, version: u64, blocks: &[(StreamId, u64, u32)]) -> Judged {
        let (epoch, previous) = (Epoch(self.epoch), Version(self.previous));
        let blocks = blocks.iter().map(|(s, o, n)| (*s, Offset(*o), *n)).collect();
        let version = Version(version);
        let data = Bytes::from(frame(self.epoch, version.0, 200)).into();
        let file = File::Segment(SegmentId(1));
        let op = DiskOp::Write { file, offset: 0, data, durable: true };
        let request = DiskRequest { id: DiskOpId(1), lane: Lane::Log, op };
        self.note(Role::LogServer, Note::Accepted { epoch, previous, version, blocks })?;
        self.oracles.judge(&Happened::Wrote(NODE, request), &self.stub)
    }

    fn durable(&mut self, version: u64) -> Judged {
        let note = Note::Durable { epoch: Epoch(self.epoch), version: Version(version) };
        self.note(Role::LogServer, note)
    }

    fn acknowledge(&mut self, version: u64, offsets: &[(StreamId, u64)]) -> Judged {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let offsets = offsets.iter().map(|(s, o)| (*s, Offset(*o))).collect();
        let (epoch, position) = (Epoch(self.epoch), position(version));
        let note = Note::Acknowledged { epoch, position, client: client(), request, offsets };
        self.note(Role::Proxy(0), note)
    }

    /// A version on its whole way, without an acknowledgement.
    fn commit(&mut self, version: u64, blocks: &[(StreamId, u64, u32)]) {
        let previous = self.previous;
        self.assign(previous, version).unwrap();
        self.accept(version, blocks).unwrap();
        self.previous = version;
        self.durable(version).unwrap();
    }

    fn submit(&mut self, txn: u64, read: u64, reads: &[&[u8]], writes: &[&[u8]]) {
        let points =
            |keys: &[&[u8]]| Ranges::from_ranges(keys.iter().map(|key| KeyRange::point(key)));
        let submission = Submission {
            txn: TxnId(txn),
            id: None,
            read_version: Version(read),
            reads: points(reads),
            writes: points(writes),
            sections: vec![(STREAM, 1)],
            is_in_lane: false,
        };
        self.see(Observation::Submitted(Box::new(submission))).unwrap();
    }

    fn committed(&mut self, txn: u64, version: u64, offset: u64) -> Judged {
        let offsets = vec![(STREAM, Offset(offset))];
        self.see(Observation::Committed { txn: TxnId(txn), position: position(version), offsets })
    }

    fn subscribe(&mut self) {
        let streams = vec![STREAM, OTHER];
        let (consumer, after) = (CONSUMER, Version::ZERO);
        self.see(Observation::Subscribed { consumer, streams, after }).unwrap();
    }

    fn pull(&mut self, after: u64, through: u64, blocks: Vec<SeenBlock>) -> Judged {
        let (after, through) = (Version(after), Version(through));
        self.see(Observation::Pulled { consumer: CONSUMER, after, through, blocks })
    }

    /// A transaction on its whole way to client and consumer's log; offsets are dense by themselves.
    fn whole(&mut self, txn: u64, version: u64, offset: u64) {
        self.commit(version, &[(STREAM, offset, 1)]);
        self.acknowledge(version, &[(STREAM, offset)]).unwrap();
        self.committed(txn, version, offset).unwrap();
    }
}

const fn position(version: u64) -> Position {
    Position { version: Version(version), index: 0 }
}

fn seen(stream: StreamId, version: u64, offset: u64, txn: u64) -> SeenBlock {
    SeenBlock {
        stream,
        version: Version(version),
        base_offset: Offset(offset),
        record_count: 1,
        checksum: 7,
        sections: vec![SeenSection { index: 0, record_count: 1, txn: Some(TxnId(txn)) }],
    }
}

#[track_caller]
fn breaks(rule: &str, judged: Judged) {
    assert_eq!(judged.expect_err("this history is bad").rule, rule);
}

const V1: u64 = RTV1 + 10;
const V2: u64 = RTV1 + 20;

#[test]
fn a_good_history_over_two_epochs_passes() {
    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, 0, &[], &[b"k"]);
    bench.whole(1, V1, 0);
    bench.submit(2, V1, &[b"k"], &[b"k"]);
    bench.whole(2, V2, 1);
    bench.pull(0, V2, vec![seen(STREAM, V1, 0, 1), seen(STREAM, V2, 1, 2)]).unwrap();
    bench.begin_epoch(2, V2, V2 + 20_000_000);
    let v3 = V2 + 20_000_100;
    bench.submit(3, V2, &[b"other"], &[]);
    bench.whole(3, v3, 2);
    bench.pull(V2, v3, vec![seen(STREAM, v3, 2, 3)]).unwrap();
    bench.oracles.finish().unwrap();
    assert_eq!(bench.oracles.acknowledged_count(), 3);
}

#[test]
fn i1_a_fork_a_gap_and_a_pair_that_nobody_handed_out() {
    let mut bench = Bench::new();
    bench.assign(RTV1, V1).unwrap();
    breaks("I1.chain", bench.assign(RTV1, V2));
    let mut bench = Bench::new();
    bench.assign(RTV1, V1).unwrap();
    bench.assign(V1, V2).unwrap();
    bench.previous = V1;
    breaks("I1.log_server", bench.accept(V2, &[]));
    let mut bench = Bench::new();
    breaks("I1.log_server_pair", bench.accept(V1, &[]));
    let mut bench = Bench::new();
    let decided = Note::Decided {
        epoch: Epoch(1),
        previous: Version(RTV1),
        version: Version(V1),
        committed: 0,
        refused: 0,
    };
    breaks("I1.resolver", bench.note(Role::Resolver(0), decided));
}

#[test]
fn o9_a_version_of_an_earlier_epoch_is_handed_out_again() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    bench.assign(V1, V1 + 30_000_000).unwrap();
    bench.recovery(2, V1, V1 + 20_000_000).unwrap();
    bench.epoch = 2;
    breaks("O9.reused", bench.assign(V1, V1 + 20_000_000));
}

#[test]
fn i3_acknowledged_and_not_durable() {
    let mut bench = Bench::new();
    bench.assign(RTV1, V1).unwrap();
    bench.accept(V1, &[]).unwrap();
    breaks("I3.durable", bench.acknowledge(V1, &[]));
    bench.durable(V1).unwrap();
    bench.stub.survives = false;
    breaks("I3.survives", bench.acknowledge(V1, &[]));
}

#[test]
fn i5_a_jump_that_is_too_short() {
    breaks("I5.jump", Bench::new().recovery(2, V1, V1 + 9_000_000));
}

#[test]
fn i7_announced_and_not_durable_or_backwards() {
    let mut bench = Bench::new();
    bench.assign(RTV1, V1).unwrap();
    bench.accept(V1, &[]).unwrap();
    bench.stub.survives = false;
    breaks("I7.durable", bench.durable(V1));
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    breaks("I7.backwards", bench.durable(RTV1));
}

#[test]
fn i8_after_a_lock_nothing_more_of_the_epoch() {
    let lock = Note::Locked { epoch: Epoch(2), durable: Version(RTV1) };
    let mut bench = Bench::new();
    bench.note(Role::LogServer, lock.clone()).unwrap();
    bench.assign(RTV1, V1).unwrap();
    breaks("I8.locked", bench.accept(V1, &[]));
    let mut bench = Bench::new();
    bench.assign(RTV1, V1).unwrap();
    bench.accept(V1, &[]).unwrap();
    bench.note(Role::LogServer, lock).unwrap();
    breaks("I8.announced", bench.durable(V1));
    let mut bench = Bench::new();
    bench.assign(RTV1, V1).unwrap();
    bench.accept(V1, &[]).unwrap();
    bench.stub.survives = false;
    let lock = Note::Locked { epoch: Epoch(2), durable: Version(V1) };
    breaks("I8.durable", bench.note(Role::LogServer, lock));
}

#[test]
fn i9_a_recovery_version_below_an_acknowledgement() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    bench.acknowledge(V1, &[]).unwrap();
    breaks("I9.recovery_version", bench.recovery(2, RTV1, RTV1 + 20_000_000));
}

#[test]
fn o9_an_acknowledgement_of_a_fenced_epoch_above_the_recovery_version() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    bench.begin_epoch(2, RTV1, RTV1 + 20_000_000);
    bench.epoch = 1;
    breaks("O9.fenced", bench.acknowledge(V1, &[]));
}

#[test]
fn i10_clients_before_the_register() {
    let mut bench = Bench::new();
    let second = Epoch(2);
    breaks("I10.serving", bench.note(Role::Leader, Note::Serving { epoch: second }));
    let written = Note::GenerationWritten { epoch: second };
    breaks("I10.register", bench.note(Role::Leader, written));
    bench.recovery(2, RTV1, RTV1 + 20_000_000).unwrap();
    bench.epoch = 2;
    breaks("I10.acknowledged", bench.acknowledge(V1, &[]));
}

#[test]
fn i11_more_than_is_committed() {
    let mut bench = Bench::new();
    let known = Note::KnownCommitted { version: Version(V1) };
    breaks("I11.known", bench.note(Role::LogServer, known));
    let delivered = Note::Delivered { to: client(), after: Version(0), through: Version(V1) };
    breaks("I11.committed", bench.note(Role::LogServer, delivered));
    bench.subscribe();
    breaks("I11.seen", bench.pull(0, V1, vec![]));
}

#[test]
fn i11_delivered_and_rolled_back() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    let delivered = Note::Delivered { to: client(), after: Version(0), through: Version(V1) };
    bench.note(Role::LogServer, delivered).unwrap();
    breaks("I11.rolled_back", bench.recovery(2, RTV1, RTV1 + 20_000_000));
}

#[test]
fn i12_offsets_with_a_gap_also_over_an_epoch() {
    let mut bench = Bench::new();
    bench.commit(V1, &[(STREAM, 0, 3)]);
    bench.assign(V1, V2).unwrap();
    breaks("I12.dense", bench.accept(V2, &[(STREAM, 4, 1)]));
    let mut bench = Bench::new();
    bench.commit(V1, &[(STREAM, 0, 3)]);
    bench.commit(V2, &[(STREAM, 3, 1)]);
    let rtv = V1 + 20_000_000;
    bench.begin_epoch(2, V1, rtv);
    bench.assign(rtv, rtv + 1).unwrap();
    breaks("I12.dense", bench.accept(rtv + 1, &[(STREAM, 4, 1)]));
}

#[test]
fn i12_an_acknowledged_offset_outside_its_block() {
    let mut bench = Bench::new();
    bench.commit(V1, &[(STREAM, 0, 3)]);
    breaks("I12.acknowledged", bench.acknowledge(V1, &[(STREAM, 3)]));
}

#[test]
fn i13_trims_that_nobody_asked_for_or_that_come_late() {
    let trimmed = |through: u64, first: u64| Note::Trimmed {
        stream: STREAM,
        through: Version(through),
        first_offset: Offset(first),
    };
    let mut bench = Bench::new();
    breaks("I13.asked", bench.note(Role::LogServer, trimmed(V1, 1)));
    bench.see(Observation::AskedTrim { stream: STREAM, through: Version(V2) }).unwrap();
    bench.note(Role::LogServer, trimmed(V1, 1)).unwrap();
    breaks("I13.backwards", bench.note(Role::LogServer, trimmed(RTV1, 1)));
    let mut bench = Bench::new();
    let streams = vec![(STREAM, Version(V1))];
    let recycled = Note::Recycled { last_version: Version(V1), streams };
    breaks("I13.recycled", bench.note(Role::LogServer, recycled));
    let told = Observation::GotTrim {
        epoch: Epoch(1),
        stream: STREAM,
        through: Version(V1),
        first_offset: Offset(1),
    };
    bench.see(told).unwrap();
    let asked = |epoch| Observation::AskedDescription { epoch: Epoch(epoch), number: 1 };
    bench.see(asked(1)).unwrap();
    let described = Observation::Described {
        number: 1,
        stream: STREAM,
        first_offset: Offset(0),
        next_offset: Offset(1),
        trimmed_through: Version(0),
    };
    breaks("I13.forgotten", bench.see(described.clone()));
    // Who knows an older epoch only may be answered by a log server that was left behind with it.
    bench.see(asked(0)).unwrap();
    bench.see(described).unwrap();
}

#[test]
fn i4_a_stale_read_version_and_a_commit_before_a_read() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    bench.acknowledge(V1, &[]).unwrap();
    bench.see(Observation::AskedReadVersion { number: 1 }).unwrap();
    let got = |version: u64| Observation::GotReadVersion { number: 1, version: Version(version) };
    breaks("I4.stale", bench.see(got(RTV1)));
    bench.see(Observation::AskedReadVersion { number: 1 }).unwrap();
    bench.see(got(V1)).unwrap();
    bench.submit(1, 0, &[], &[]);
    breaks("O4.order", bench.committed(1, V1, 0));
}

#[test]
fn i15_one_request_with_two_answers() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    bench.commit(V2, &[]);
    bench.acknowledge(V1, &[]).unwrap();
    bench.next_request -= 1;
    breaks("I15.one_answer", bench.acknowledge(V2, &[]));
}

#[test]
fn i16_one_transaction_in_two_places() {
    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, 0, &[], &[]);
    bench.whole(1, V1, 0);
    bench.commit(V2, &[(STREAM, 1, 1)]);
    bench.pull(0, V2, vec![seen(STREAM, V1, 0, 1), seen(STREAM, V2, 1, 1)]).unwrap();
    breaks("I16.twice", bench.oracles.finish());
    breaks("I16.twice", bench.committed(1, V2, 1));
}

#[test]
fn o1_a_read_that_was_overwritten() {
    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, 0, &[], &[b"k"]);
    bench.submit(2, RTV1, &[b"k"], &[]);
    bench.whole(1, V1, 0);
    bench.whole(2, V2, 1);
    bench.pull(0, V2, vec![seen(STREAM, V1, 0, 1), seen(STREAM, V2, 1, 2)]).unwrap();
    breaks("O1.serializable", bench.oracles.finish());
}

#[test]
fn o2_a_conflict_with_nobody() {
    let conflict = |bench: &mut Bench| {
        let (code, version) = (Code::Conflict, Some(Version(V1)));
        bench.see(Observation::NotCommitted { txn: TxnId(1), code, version }).unwrap();
    };
    let mut bench = Bench::new();
    bench.submit(1, RTV1, &[b"a"], &[b"a"]);
    bench.submit(2, RTV1, &[], &[b"b"]);
    conflict(&mut bench);
    breaks("O2.unexplained", bench.oracles.finish());

    // Somebody wrote it, and did not commit.
    let mut bench = Bench::new();
    bench.submit(1, RTV1, &[b"a"], &[]);
    bench.submit(2, RTV1, &[], &[b"a"]);
    conflict(&mut bench);
    let (code, version) = (Code::TooOld, None);
    bench.see(Observation::NotCommitted { txn: TxnId(2), code, version }).unwrap();
    breaks("O2.unexplained", bench.oracles.finish());

    // Somebody wrote it behind the verdict, or before it was read.
    for (read, committed) in [(RTV1, V2), (V1, V1)] {
        let mut bench = Bench::new();
        bench.subscribe();
        bench.submit(1, read, &[b"a"], &[]);
        bench.submit(2, RTV1, &[], &[b"a"]);
        bench.whole(2, committed, 0);
        bench.pull(0, committed, vec![seen(STREAM, committed, 0, 2)]).unwrap();
        conflict(&mut bench);
        breaks("O2.unexplained", bench.oracles.finish());
    }
}

#[test]
fn o2_conflicts_with_what_committed_and_with_a_lane_at_a_single_resolver() {
    let (code, version) = (Code::Conflict, Some(Version(V1)));
    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, RTV1, &[b"a"], &[]);
    bench.submit(2, RTV1, &[], &[b"a"]);
    bench.whole(2, V1, 0);
    bench.pull(0, V1, vec![seen(STREAM, V1, 0, 2)]).unwrap();
    bench.see(Observation::NotCommitted { txn: TxnId(1), code, version }).unwrap();
    bench.oracles.finish().unwrap();

    for resolvers in [1, 2] {
        let mut bench = Bench { oracles: Oracles::new(resolvers), ..Bench::new() };
        bench.submit(1, RTV1, &[b"a"], &[]);
        let lane = Submission {
            txn: TxnId(2),
            id: None,
            read_version: Version(RTV1),
            reads: Ranges::default(),
            writes: Ranges::from_ranges([KeyRange::point(b"a")]),
            sections: vec![(STREAM, 1)],
            is_in_lane: true,
        };
        bench.see(Observation::Submitted(Box::new(lane))).unwrap();
        bench.see(Observation::NotCommitted { txn: TxnId(1), code, version }).unwrap();
        match resolvers {
            1 => bench.oracles.finish().unwrap(),
            _ => breaks("O2.unexplained", bench.oracles.finish()),
        }
    }
}

#[test]
fn o5_lost_moved_and_refused_but_there() {
    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, 0, &[], &[]);
    bench.whole(1, V1, 0);
    breaks("O16.unread", bench.oracles.finish());
    bench.pull(0, V1, vec![]).unwrap();
    breaks("O5.lost", bench.oracles.finish());

    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, 0, &[], &[]);
    bench.commit(V1, &[(STREAM, 0, 1)]);
    bench.commit(V2, &[]);
    bench.committed(1, V2, 0).unwrap();
    bench.pull(0, V2, vec![seen(STREAM, V1, 0, 1)]).unwrap();
    breaks("O5.moved", bench.oracles.finish());

    let mut bench = Bench::new();
    bench.subscribe();
    bench.submit(1, 0, &[], &[]);
    bench.commit(V1, &[(STREAM, 0, 1)]);
    let (code, version) = (Code::Overloaded, None);
    bench.see(Observation::NotCommitted { txn: TxnId(1), code, version }).unwrap();
    bench.pull(0, V1, vec![seen(STREAM, V1, 0, 1)]).unwrap();
    breaks("O5.refused", bench.oracles.finish());
}

#[test]
fn o5_a_log_that_opens_with_less_than_it_announced() {
    let mut bench = Bench::new();
    bench.commit(V1, &[]);
    let opened = Note::Opened { durable: Version(RTV1), torn_frames: 1, segments: 1 };
    breaks("O5.lost", bench.note(Role::LogServer, opened));
}

#[test]
fn o7_what_nobody_wrote_or_sent() {
    let mut bench = Bench::new();
    bench.subscribe();
    bench.commit(V1, &[(STREAM, 0, 1)]);
    breaks("O7.phantom", bench.pull(0, V1, vec![seen(OTHER, V1, 0, 1)]));
    let mut bench = Bench::new();
    bench.subscribe();
    bench.commit(V1, &[(STREAM, 0, 1)]);
    bench.pull(0, V1, vec![seen(STREAM, V1, 0, 9)]).unwrap();
    breaks("O7.phantom", bench.oracles.finish());
}

#[test]
fn o8_half_a_transaction() {
    let mut bench = Bench::new();
    bench.subscribe();
    let submission = Submission {
        txn: TxnId(1),
        id: None,
        read_version: Version(0),
        reads: Ranges::default(),
        writes: Ranges::default(),
        sections: vec![(STREAM, 1), (OTHER, 1)],
        is_in_lane: false,
    };
    bench.see(Observation::Submitted(Box::new(submission))).unwrap();
    bench.commit(V1, &[(STREAM, 0, 1)]);
    bench.pull(0, V1, vec![seen(STREAM, V1, 0, 1)]).unwrap();
    breaks("O8.atomic", bench.oracles.finish());
}

#[test]
fn o10_o11_consumers_that_differ_skip_or_go_back() {
    let mut bench = Bench::new();
    bench.subscribe();
    bench.commit(V1, &[(STREAM, 0, 1)]);
    bench.commit(V2, &[(STREAM, 1, 1)]);
    bench.pull(0, V1, vec![seen(STREAM, V1, 0, 1)]).unwrap();
    breaks("O11.prefix", bench.pull(0, V1, vec![]));
    bench.subscribe();
    breaks("O11.gap", bench.pull(0, V1, vec![]));
    bench.subscribe();
    breaks("O10.differs", bench.pull(0, V1, vec![seen(STREAM, V1, 0, 2)]));
    bench.subscribe();
    breaks("I12.consumer", bench.pull(0, V2, vec![seen(STREAM, V2, 1, 2)]));
    bench.subscribe();
    let unordered = vec![seen(STREAM, V2, 1, 2), seen(STREAM, V1, 0, 1)];
    assert!(bench.pull(0, V2, unordered).is_err());
}

#[test]
fn the_workloads_own_rules_count() {
    breaks("workload", Bench::new().see(Observation::Broken("the sum is 3".to_owned())));
}
