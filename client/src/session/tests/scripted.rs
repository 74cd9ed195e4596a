//! One case at a time: what is said on the wire, and what the caller hears.

use core::time::Duration;

use common::message::{CommitKind, CommitOutcome, CommitRequest};
use common::{
    Code, IdempotencyId, KeyRange, Mark, NodeId, Offset, Ranges, RequestId, StreamId, Version,
};

use super::fake::Fake;
use crate::session::{Answer, CallId, Committed, PullFrom};
use crate::{Error, Transaction};

const A: StreamId = StreamId(16);
const B: StreamId = StreamId(17);
const ID: IdempotencyId = IdempotencyId([7; 16]);

fn line() -> Transaction {
    let mut transaction = Transaction::new();
    transaction.append(A, "x").append(B, "y");
    transaction
}

fn reading(fake: &mut Fake, key: &[u8]) -> Transaction {
    let mut transaction = line();
    transaction.read_version(read_version(fake)).read_point(key);
    transaction
}

fn commit(fake: &mut Fake, call: u64, transaction: Transaction) {
    fake.drive(|session, cx| session.commit(cx, CallId(call), transaction));
}

fn committed(fake: &mut Fake, call: u64) -> Committed {
    match fake.answer(call).result {
        Ok(Answer::Committed(committed)) => committed,
        other => panic!("{other:?}"),
    }
}

fn error(fake: &mut Fake, call: u64) -> Error {
    fake.answer(call).result.unwrap_err()
}

fn read_version(fake: &mut Fake) -> Version {
    fake.drive(|session, cx| session.read_version(cx, CallId(9999)));
    match fake.answer(9999).result {
        Ok(Answer::ReadVersion(version)) => version,
        other => panic!("{other:?}"),
    }
}

/// Somebody else writes a key, or uses an id.
fn elsewhere(fake: &mut Fake, key: &[u8], id: Option<IdempotencyId>) -> Version {
    read_version(fake);
    elsewhere_now(fake, key, id)
}

/// The same while nothing that is on its way gets on.
fn elsewhere_now(fake: &mut Fake, key: &[u8], id: Option<IdempotencyId>) -> Version {
    let read_version = fake.newest();
    let outcome = fake.commit_directly(&CommitRequest {
        read_version,
        id,
        writes: Ranges::from_ranges([KeyRange::point(key)]),
        ..CommitRequest::empty(CommitKind::User, RequestId(1))
    });
    match outcome {
        CommitOutcome::Committed { position, .. } => position.version,
        other => panic!("{other:?}"),
    }
}

fn count(fake: &Fake, name: &str) -> usize {
    fake.seen.iter().filter(|seen| **seen == name).count()
}

/// Loses the connections after the proxies have taken what was sent.
fn break_connections(fake: &mut Fake) {
    for node in 1..=3 {
        fake.disconnect(NodeId(node));
    }
    for node in 1..=3 {
        fake.connect(NodeId(node));
    }
}

#[test]
fn a_lost_reply_is_asked_for_again_on_the_same_connection() {
    let mut fake = Fake::connected(1);
    fake.lose = vec!["CommitReply"];
    commit(&mut fake, 1, line());
    let found = committed(&mut fake, 1);
    assert_eq!(found.offsets, [(A, Some(Offset(0))), (B, Some(Offset(0)))]);
    assert_eq!((fake.log.len(), fake.commit_requests, count(&fake, "FindId")), (1, 2, 0));
}

#[test]
fn a_commit_that_was_taken_is_found_after_the_connection_broke() {
    let mut fake = Fake::connected(2);
    read_version(&mut fake);
    commit(&mut fake, 1, line());
    fake.tick();
    assert_eq!(fake.log.len(), 1, "taken");
    break_connections(&mut fake);
    let found = committed(&mut fake, 1);
    assert_eq!(found.position.version, fake.log[0].version);
    assert_eq!(found.offsets, [(A, Some(Offset(0))), (B, Some(Offset(0)))]);
    assert_eq!(fake.log.len(), 1);
    assert!(fake.marks.contains(&Mark::UnknownCommitted));
}

#[test]
fn offsets_that_a_log_server_does_not_know_yet_are_not_taken_for_trimmed() {
    let mut fake = Fake::connected(2);
    read_version(&mut fake);
    let mut transaction = Transaction::new();
    // More than one log server can hold.
    let streams: Vec<StreamId> = (16..24).map(StreamId).collect();
    for stream in &streams {
        transaction.append(*stream, "x");
    }
    commit(&mut fake, 1, transaction);
    fake.tick();
    break_connections(&mut fake);
    fake.lagging = 2;
    let found = committed(&mut fake, 1);
    assert_eq!(fake.lagging, 0, "somebody was asked for offsets");
    let expected: Vec<_> = streams.into_iter().map(|stream| (stream, Some(Offset(0)))).collect();
    assert_eq!(found.offsets, expected);
}

#[test]
fn an_offset_is_taken_from_the_block_that_was_asked_for_when_time_ran_out_meanwhile() {
    let mut fake = Fake::connected(2);
    let streams: Vec<StreamId> = (16..40).map(StreamId).collect();
    // No two streams have the same next offset.
    for (earlier, stream) in streams.iter().enumerate() {
        let mut filling = Transaction::new();
        for _ in 0..earlier {
            filling.append(*stream, "filling");
        }
        commit(&mut fake, 100 + earlier as u64, filling);
        committed(&mut fake, 100 + earlier as u64);
    }
    let mut transaction = Transaction::new();
    transaction.idempotency_id(ID);
    for stream in &streams {
        transaction.append(*stream, "x");
    }
    commit(&mut fake, 1, transaction.clone());
    let first = committed(&mut fake, 1);
    // The log says late that the id is used, and later still at which offsets: the deadline lies between.
    fake.lose = vec!["IdFound", "IdFound", "Pulled", "Pulled", "Pulled"];
    commit(&mut fake, 2, transaction);
    let second = committed(&mut fake, 2);
    assert_eq!(fake.lose, Vec::<&str>::new(), "everything that was to be lost was lost");
    assert_eq!((second.position, second.offsets), (first.position, first.offsets));
}

#[test]
fn a_commit_that_never_arrived_is_fenced_and_sent_again() {
    let mut fake = Fake::connected(3);
    read_version(&mut fake);
    commit(&mut fake, 1, line());
    break_connections(&mut fake);
    assert!(fake.log.is_empty(), "lost on its way");
    let found = committed(&mut fake, 1);
    assert_eq!(fake.log.len(), 1);
    assert_eq!(found.position.version, fake.log[0].version);
    assert!(fake.marks.contains(&Mark::UnknownAbsent));
    assert_eq!(fake.commit_requests, 2, "a fence, then the transaction");
}

#[test]
fn a_verdict_that_takes_longer_than_the_timeout_is_waited_for_in_the_end() {
    let mut fake = Fake::connected(3);
    read_version(&mut fake);
    fake.late_by = Duration::from_millis(5 * fake.knobs.client_timeout_ms);
    commit(&mut fake, 1, line());
    let found = committed(&mut fake, 1);
    assert_eq!(found.position.version, fake.log[0].version);
    assert_eq!(fake.log.iter().filter(|entry| !entry.sections.is_empty()).count(), 1);
    // The transaction for 1, fences for 2, 4 and 8 times the timeout: the last one is heard.
    assert!(fake.marks.contains(&Mark::UnknownCommitted));
}

#[test]
fn what_was_read_must_still_hold_after_a_fence() {
    for (touched, survives) in [(&b"other"[..], true), (b"key", false)] {
        let mut fake = Fake::connected(4);
        let transaction = reading(&mut fake, b"key");
        commit(&mut fake, 1, transaction);
        break_connections(&mut fake);
        elsewhere(&mut fake, touched, None);
        if survives {
            committed(&mut fake, 1);
        } else {
            assert_eq!(error(&mut fake, 1).code(), Code::Conflict);
        }
        assert_eq!(
            fake.log.iter().filter(|e| !e.sections.is_empty()).count(),
            usize::from(survives)
        );
    }
}

#[test]
fn after_a_recovery_reads_are_too_old_and_blind_writes_go_again() {
    let mut fake = Fake::connected(5);
    let transaction = reading(&mut fake, b"key");
    fake.withhold();
    commit(&mut fake, 1, transaction);
    commit(&mut fake, 2, line());
    (0..2).for_each(|_| assert!(fake.tick()));
    assert_eq!(fake.log.len(), 2, "taken, not answered");
    fake.log.clear();
    fake.recover();
    assert_eq!(error(&mut fake, 1).code(), Code::TooOld);
    committed(&mut fake, 2);
    assert_eq!(fake.log.len(), 1);
}

#[test]
fn a_blind_commit_is_never_too_old() {
    let mut fake = Fake::connected(6);
    commit(&mut fake, 1, line());
    committed(&mut fake, 1);
    for _ in 0..fake.knobs.life_versions / 10 + 1 {
        let empty = CommitRequest::empty(CommitKind::User, RequestId(1));
        let _ = fake.commit_directly(&empty);
    }
    commit(&mut fake, 2, line());
    let second = committed(&mut fake, 2);
    assert_eq!(second.offsets, [(A, Some(Offset(1))), (B, Some(Offset(1)))]);
}

#[test]
fn an_id_commits_once_whoever_asks() {
    let mut fake = Fake::connected(7);
    let mut transaction = line();
    transaction.idempotency_id(ID);
    commit(&mut fake, 1, transaction.clone());
    let first = committed(&mut fake, 1);
    commit(&mut fake, 2, transaction);
    assert_eq!(committed(&mut fake, 2), first, "looked up");
    // Claimed to be fresh, and used since: the conflict leads to the lookup.
    let mut claimed = line();
    claimed.fresh_idempotency_id(IdempotencyId([8; 16]));
    commit(&mut fake, 3, claimed.clone());
    let third = committed(&mut fake, 3);
    assert_ne!(third, first);
    let mut late = reading(&mut fake, b"key");
    late.fresh_idempotency_id(IdempotencyId([9; 16]));
    commit(&mut fake, 4, claimed);
    // Its read version is that of the newest commit, so the index has to tell.
    let _ = fake.answer(4);
    let used = elsewhere(&mut fake, b"z", Some(IdempotencyId([9; 16])));
    commit(&mut fake, 5, late);
    assert_eq!(committed(&mut fake, 5).position.version, used);
}

#[test]
fn without_an_id_an_unknown_outcome_stays_unknown() {
    let mut fake = Fake::connected(8);
    let mut transaction = line();
    transaction.at_most_once();
    commit(&mut fake, 1, transaction);
    fake.tick();
    break_connections(&mut fake);
    let error = error(&mut fake, 1);
    assert!(matches!(error, Error::Unknown(_)) && !error.is_retryable());
    assert_eq!((fake.log.len(), fake.commit_requests), (1, 1));
}

#[test]
fn conflicts_are_reported_when_asked_for() {
    let mut fake = Fake::connected(9);
    let mut transaction = reading(&mut fake, b"a");
    transaction.read(b"b", b"c").report_conflicts();
    elsewhere(&mut fake, b"bb", None);
    commit(&mut fake, 1, transaction);
    match error(&mut fake, 1) {
        Error::Retry { refusal, conflicts } => {
            assert_eq!((refusal.code(), conflicts), (Code::Conflict, vec![1]));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lane_keeps_its_order_and_breaks_at_the_first_failure() {
    let mut fake = Fake::connected(10);
    let lane = fake.session.open_lane().unwrap();
    let stale = reading(&mut fake, b"key");
    elsewhere(&mut fake, b"key", None);
    for call in 1..=4 {
        let transaction = if call == 3 { stale.clone() } else { line() };
        fake.drive(|session, cx| session.commit_ordered(cx, CallId(call), lane, transaction));
    }
    let (first, second) = (committed(&mut fake, 1), committed(&mut fake, 2));
    assert!(first.position < second.position);
    assert_eq!(error(&mut fake, 3).code(), Code::Conflict);
    assert_eq!(error(&mut fake, 4).code(), Code::LaneBroken);
    fake.drive(|session, cx| session.commit_ordered(cx, CallId(5), lane, line()));
    assert_eq!(error(&mut fake, 5).code(), Code::LaneBroken);
    assert_eq!(fake.log.iter().filter(|entry| !entry.sections.is_empty()).count(), 2);
}

#[test]
fn what_a_lane_need_not_send_holds_up_nothing_behind_it() {
    let mut fake = Fake::connected(10);
    let mut known = line();
    known.idempotency_id(ID);
    commit(&mut fake, 1, known.clone());
    let first = committed(&mut fake, 1);
    let lane = fake.session.open_lane().unwrap();
    for (call, transaction) in [(2, line()), (3, known), (4, line())] {
        fake.drive(|session, cx| session.commit_ordered(cx, CallId(call), lane, transaction));
    }
    committed(&mut fake, 2);
    assert_eq!(committed(&mut fake, 3), first, "looked up");
    committed(&mut fake, 4);
}

#[test]
fn a_call_of_a_lane_that_is_not_even_begun_is_answered_in_its_turn() {
    let mut fake = Fake::connected(10);
    let lane = fake.session.open_lane().unwrap();
    read_version(&mut fake);
    let mut large = Transaction::new();
    large.append(A, vec![0; fake.knobs.transaction_bytes_max as usize]);
    for (call, transaction) in [(1, line()), (2, large), (3, line())] {
        fake.drive(|session, cx| session.commit_ordered(cx, CallId(call), lane, transaction));
    }
    fake.settle();
    let calls: Vec<u64> = fake.done.iter().map(|done| done.call.0).collect();
    assert_eq!(calls, [1, 2, 3]);
    committed(&mut fake, 1);
    assert_eq!(error(&mut fake, 2).code(), Code::TransactionTooLarge);
    assert_eq!(error(&mut fake, 3).code(), Code::LaneBroken);
}

#[test]
fn a_lane_sends_nothing_behind_a_conflict_that_is_being_looked_into() {
    let mut fake = Fake::connected(10);
    let lane = fake.session.open_lane().unwrap();
    read_version(&mut fake);
    let mut used = line();
    used.fresh_idempotency_id(ID);
    fake.drive(|session, cx| session.commit_ordered(cx, CallId(1), lane, used));
    let version = elsewhere_now(&mut fake, b"z", Some(ID));
    fake.lose = vec!["IdFound"];
    while count(&fake, "FindId") == 0 {
        assert!(fake.tick());
    }
    let sent = fake.commit_requests;
    fake.drive(|session, cx| session.commit_ordered(cx, CallId(2), lane, line()));
    assert_eq!(error(&mut fake, 2).code(), Code::LaneBroken);
    assert_eq!(committed(&mut fake, 1).position.version, version);
    assert_eq!(fake.commit_requests, sent, "the proxy has ended the lane");
}

#[test]
fn a_lane_whose_connection_breaks_tells_the_truth_about_each() {
    let mut fake = Fake::connected(11);
    read_version(&mut fake);
    let lane = fake.session.open_lane().unwrap();
    for call in 1..=4 {
        fake.drive(|session, cx| session.commit_ordered(cx, CallId(call), lane, line()));
    }
    (0..2).for_each(|_| assert!(fake.tick()));
    assert_eq!(fake.log.len(), 2, "two of four were taken");
    break_connections(&mut fake);
    fake.settle();
    let calls: Vec<u64> = fake.done.iter().map(|done| done.call.0).collect();
    assert_eq!(calls[calls.len() - 4..], [1, 2, 3, 4], "answered in order");
    assert!(committed(&mut fake, 1).position < committed(&mut fake, 2).position);
    assert_eq!(error(&mut fake, 3).code(), Code::LaneBroken);
    assert_eq!(error(&mut fake, 4).code(), Code::LaneBroken);
    assert_eq!(fake.log.len(), 2);
}

#[test]
fn a_closed_lane_is_used_again_while_it_is_whole() {
    let mut fake = Fake::connected(12);
    let lane = fake.session.open_lane().unwrap();
    fake.drive(|session, cx| session.commit_ordered(cx, CallId(1), lane, line()));
    fake.session.close_lane(lane);
    committed(&mut fake, 1);
    assert_eq!(fake.session.open_lane().unwrap(), lane);
    fake.drive(|session, cx| session.commit_ordered(cx, CallId(2), lane, line()));
    committed(&mut fake, 2);
    fake.session.close_lane(lane);
    break_connections(&mut fake);
    assert_ne!(fake.session.open_lane().unwrap(), lane, "its connection is gone");
}

#[test]
fn calls_beyond_the_limits_are_refused_at_once() {
    let mut fake = Fake::connected(13);
    fake.knobs.client_in_flight_max = 2;
    read_version(&mut fake);
    (1..=20).for_each(|call| commit(&mut fake, call, line()));
    assert_eq!(count(&fake, "CommitRequest"), 2, "two in flight");
    assert_eq!(fake.session.open_calls(), 2 + 2 * 8);
    assert_eq!(error(&mut fake, 19).code(), Code::Overloaded);
    (1..=18).for_each(|call| drop(committed(&mut fake, call)));
    assert_eq!(fake.log.len(), 18);
}

#[test]
fn nobody_there_is_a_definite_no() {
    let mut fake = Fake::new(14);
    commit(&mut fake, 1, line());
    fake.drive(|session, cx| session.read_version(cx, CallId(2)));
    for call in [1, 2] {
        let error = error(&mut fake, call);
        assert_eq!(error.code(), Code::TimedOut);
        assert!(error.is_retryable());
    }
}

#[test]
fn a_gap_ends_a_pull_and_one_damaged_answer_does_not() {
    let mut fake = Fake::connected(15);
    (1..=6).for_each(|call| commit(&mut fake, call, line()));
    fake.settle();
    let pull = |fake: &mut Fake, call, puller| {
        fake.drive(|session, cx| session.pull(cx, CallId(call), puller, Version::ZERO));
        fake.answer(call).result
    };
    let open =
        |fake: &mut Fake, from| fake.drive(|session, cx| session.open_puller(cx, from)).unwrap();
    let all = || PullFrom::after(vec![A, B], Version::ZERO);

    fake.flip = 1;
    let puller = open(&mut fake, all());
    let Ok(Answer::Pulled(pulled)) = pull(&mut fake, 100, puller) else { panic!("pulled") };
    assert_eq!(pulled.batches.len(), 6, "the other replica has it");
    assert_eq!(fake.session.pull_position(puller), Some(pulled.through));

    fake.flip = 1000;
    let puller = open(&mut fake, all());
    let error = pull(&mut fake, 101, puller).unwrap_err();
    assert_eq!(error.code(), Code::Corrupt);
    fake.flip = 0;
    assert_eq!(pull(&mut fake, 102, puller).unwrap_err(), error, "it stays where it is");

    fake.rot = 1;
    let puller = open(&mut fake, all());
    assert!(pull(&mut fake, 106, puller).is_ok(), "the other replica has it");
    fake.rot = 1000;
    let puller = open(&mut fake, all());
    assert_eq!(pull(&mut fake, 107, puller).unwrap_err().code(), Code::Corrupt);
    fake.rot = 0;

    // One log server holds all that is pulled, the others a part each: they will do when that one is damaged.
    let widest = |node: &NodeId| [A, B].iter().all(|stream| Fake::holds(*node, *stream));
    fake.rotten = (1..=3).map(NodeId).find(widest);
    assert!(fake.rotten.is_some());
    let puller = open(&mut fake, all());
    assert!(pull(&mut fake, 108, puller).is_ok(), "the other replicas have it");
    fake.rotten = None;

    let third = fake.log[2].version;
    fake.skip = true;
    let puller = open(&mut fake, PullFrom::after(vec![A], third).expect(A, Offset(3)));
    let error = pull(&mut fake, 103, puller).unwrap_err();
    assert!(matches!(error, Error::Corrupt(_)), "{error}");

    let puller = open(&mut fake, PullFrom::after(vec![A], third).expect(A, Offset(3)));
    assert!(pull(&mut fake, 104, puller).is_ok());
    fake.skip = true;
    let puller = open(&mut fake, all());
    assert_eq!(pull(&mut fake, 105, puller).unwrap_err().code(), Code::Trimmed);
}

#[test]
fn trims_reach_every_holder_and_descriptions_come_in_the_order_asked() {
    let mut fake = Fake::connected(16);
    fake.disconnect(NodeId(1));
    fake.drive(|session, cx| session.trim(cx, CallId(1), A, Version(5)));
    fake.drive(|session, cx| session.trim(cx, CallId(2), B, Version(6)));
    fake.connect(NodeId(1));
    for (call, stream, through) in [(1, A, 5), (2, B, 6)] {
        let Ok(Answer::Trimmed(state)) = fake.answer(call).result else { panic!("trimmed") };
        let holders: Vec<NodeId> =
            fake.trims.keys().filter(|(_, s)| *s == stream).map(|(node, _)| *node).collect();
        assert_eq!(holders.len(), 2, "two copies");
        assert_eq!(state.through, Version(through));
        assert_eq!(state.first_offset.0, holders[0].0, "the lowest answer");
    }
    let streams: Vec<StreamId> = (16..40).rev().map(StreamId).collect();
    fake.drive(|session, cx| session.describe(cx, CallId(3), streams.clone()));
    let Ok(Answer::Described(states)) = fake.answer(3).result else { panic!("described") };
    assert_eq!(states.iter().map(|state| state.stream).collect::<Vec<_>>(), streams);
    assert!(count(&fake, "Describe") <= 3, "as few questions as there are servers");
}

#[test]
fn streams_are_created_once_and_found() {
    let mut fake = Fake::connected(17);
    for (call, name) in [(1, "one"), (2, "two"), (3, "two")] {
        fake.drive(|session, cx| session.create_stream(cx, CallId(call), name));
    }
    let mut created = Vec::new();
    for call in 1..=3 {
        created.push(fake.answer(call).result);
    }
    let ids: Vec<StreamId> = created
        .iter()
        .filter_map(|result| match result {
            Ok(Answer::Created(stream)) => Some(*stream),
            _ => None,
        })
        .collect();
    assert_eq!(ids.len(), 2, "{created:?}");
    let refused = created.iter().find_map(|result| result.as_ref().err()).unwrap();
    assert_eq!(refused.code(), Code::StreamExists);

    fake.drive(|session, cx| session.list_streams(cx, CallId(4)));
    fake.drive(|session, cx| session.resolve_stream(cx, CallId(5), "two"));
    fake.drive(|session, cx| session.resolve_stream(cx, CallId(6), "three"));
    fake.drive(|session, cx| session.create_stream(cx, CallId(7), "no spaces"));
    let Ok(Answer::Streams(listed)) = fake.answer(4).result else { panic!("listed") };
    assert_eq!(listed.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    assert_eq!(fake.answer(5).result, Ok(Answer::Resolved(Some(listed[1].1))));
    assert_eq!(fake.answer(6).result, Ok(Answer::Resolved(None)));
    assert_eq!(error(&mut fake, 7).code(), Code::BadName);
}

#[test]
fn a_read_version_is_asked_for_anew_in_a_new_epoch() {
    let mut fake = Fake::connected(18);
    fake.withhold();
    fake.drive(|session, cx| session.read_version(cx, CallId(1)));
    (0..3).for_each(|_| assert!(fake.tick()));
    fake.recover();
    let Ok(Answer::ReadVersion(version)) = fake.answer(1).result else { panic!("read version") };
    assert!(version.0 > common::FENCE_JUMP_VERSIONS, "{version} is of the old epoch");
}

#[test]
fn ids_that_were_forgotten_while_another_call_may_have_used_them_prove_nothing() {
    let mut fake = Fake::connected(23);
    fake.recover();
    fake.drive(|session, cx| session.read_version(cx, CallId(1)));
    let Ok(Answer::ReadVersion(version)) = fake.answer(1).result else { panic!("read version") };
    fake.forgotten_through = version;
    let mut transaction = line();
    transaction.idempotency_id(ID);
    commit(&mut fake, 2, transaction);
    let error = error(&mut fake, 2);
    assert!(matches!(error, Error::Unknown(_)), "{error}");
    assert!(fake.log.is_empty(), "{:?}", fake.log);
}

/// A recovery jumps far: what was forgotten since the call began may be the other call's.
#[test]
fn ids_that_were_forgotten_while_the_call_waited_for_a_recovery_prove_nothing() {
    let mut fake = Fake::connected(24);
    fake.recover();
    let began = read_version(&mut fake);
    // It is too old to be used.
    fake.now = fake.now.plus(Duration::from_secs(10));
    fake.lose = vec!["ReadVersionRequest"];
    let mut transaction = line();
    transaction.idempotency_id(ID);
    commit(&mut fake, 2, transaction);
    while !fake.lose.is_empty() {
        assert!(fake.tick());
    }
    fake.recover();
    fake.forgotten_through = began;
    let error = error(&mut fake, 2);
    assert!(matches!(error, Error::Unknown(_)), "{error}");
    assert!(fake.log.is_empty(), "{:?}", fake.log);
}

#[test]
fn what_the_log_has_forgotten_is_not_taken_for_absent() {
    let forgets = |call_id: bool| {
        let mut fake = Fake::connected(19);
        read_version(&mut fake);
        let mut transaction = line();
        if call_id {
            transaction.idempotency_id(ID);
        }
        commit(&mut fake, 1, transaction);
        while count(&fake, "CommitRequest") == 0 {
            assert!(fake.tick());
        }
        fake.lose = vec!["CommitRequest"];
        assert!(fake.tick());
        fake.recover();
        fake.forgotten_through = Version(common::FENCE_JUMP_VERSIONS);
        let error = error(&mut fake, 1);
        assert!(matches!(error, Error::Unknown(_)), "{error}");
        assert!(fake.log.is_empty());
    };
    forgets(true);
    forgets(false);
}
