//! One case at a time.

use common::message::{LogState, Resolve};
use common::record::{decode_records, sections};
use common::{Code, Offset};

use super::*;
use crate::Phase;

fn is_committed(outcome: &CommitOutcome) -> bool {
    matches!(outcome, CommitOutcome::Committed { .. })
}

fn code(outcome: &CommitOutcome) -> Option<Code> {
    match outcome {
        CommitOutcome::Refused(refusal) => Some(refusal.code()),
        _ => None,
    }
}

#[test]
fn the_recovery_transaction_comes_first_and_users_wait_for_service() {
    let mut world = World::new(one(), Knobs::small(), CALM, 1);
    let serve = Message::from(Serve { plan: world.plan.clone() });
    let event = Event::Message { from: client(0), epoch: EPOCH, message: serve };
    world.step_machine(proxy(0), event);
    world.run_for(500);
    assert_eq!(world.sequencer.status().last_version, RV, "no heartbeat before the service");
    let early = world.settle(client(0), 0, &request(1));
    assert_eq!(code(&early), Some(Code::Recovering));
    let usurper = CommitRequest { kind: CommitKind::Recovery, ..request(2) };
    assert_eq!(code(&world.settle(client(0), 0, &usurper)), Some(Code::Malformed));
    let recovery = CommitRequest { kind: CommitKind::Recovery, ..request(1) };
    match world.settle(world.plan.leader, 0, &recovery) {
        CommitOutcome::Committed { position, .. } => assert_eq!(position.version, RTV),
        other => panic!("{other:?}"),
    }
    world.serve();
    assert!(is_committed(&world.settle(client(0), 0, &request(3))));
    world.run_for(500);
    assert!(world.marks.contains(&Mark::Heartbeat));
    assert!(world.halts.is_empty());
}

#[test]
fn a_burst_is_one_batch_and_offsets_are_dense() {
    let mut world = World::serving(plan(1, &[""], 3, 2), Knobs::small(), CALM, 1);
    let before = world.sent["VersionRequest"];
    world.network.delay_us = 1;
    for number in 1..=3 {
        world.send(client(0), 0, append(number, "v"));
    }
    world.network.delay_us = 100;
    world.run_for(50);
    assert_eq!(world.sent["VersionRequest"], before + 1);
    let mut positions = Vec::new();
    for number in 1..=3 {
        let Some(CommitOutcome::Committed { position, base_offsets, .. }) =
            world.outcome(client(0), RequestId(number))
        else {
            panic!("{number} has committed")
        };
        assert_eq!(base_offsets, [Offset(u64::from(position.index))]);
        positions.push(position);
    }
    positions.sort_unstable();
    assert_eq!(positions.iter().map(|position| position.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(positions[0].version, positions[2].version);
    let holders: Vec<&LogServer> = world.logs.iter().filter(|log| holds(log, STREAM)).collect();
    assert_eq!(holders.len(), 2);
    assert!(world.sent["Announce"] >= 3, "the burst's last batch is announced at once");
}

#[test]
fn a_batch_is_no_larger_than_it_may_be() {
    let limits = [(2, 1 << 20), (100, 1 << 10)];
    for (batch_transactions_max, batch_bytes_max) in limits {
        let knobs = Knobs { batch_transactions_max, batch_bytes_max, ..Knobs::small() };
        let mut world = World::serving(one(), knobs, CALM, 1);
        world.network.delay_us = 1;
        world.cut.push((None, None, "VersionReply"));
        for number in 1..=40 {
            world.send(client(0), 0, append(number, &"x".repeat(600)));
        }
        world.run_for(5);
        world.cut.clear();
        world.run_for(1000);
        let mut largest = 0;
        for number in 1..=40 {
            match world.outcome(client(0), RequestId(number)) {
                Some(CommitOutcome::Committed { position, .. }) => {
                    largest = largest.max(position.index)
                }
                other => panic!("{number}: {other:?}"),
            }
        }
        assert_eq!(largest, 1, "two of them fill a batch");
    }
}

fn holds(log: &LogServer, stream: StreamId) -> bool {
    log.versions.values().any(|(_, blocks)| blocks.iter().any(|block| block.stream == stream))
}

#[test]
fn an_id_leaves_a_record_that_leads_to_the_sections() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    assert!(is_committed(&world.settle(client(0), 0, &append(1, "in front"))));
    let base = with_records(
        CommitRequest { id: Some(id(7)), ..request(2) },
        &[(STREAM, vec![Record::append("a"), Record::append("b")])],
    );
    let CommitOutcome::Committed { position, base_offsets, .. } = world.settle(client(0), 0, &base)
    else {
        panic!("committed")
    };
    assert_eq!(base_offsets, [Offset(1)]);
    let (_, blocks) = &world.logs[0].versions[&position.version];
    assert_eq!(blocks[0].stream, StreamId::IDS);
    let section = &sections(&blocks[0].body).unwrap()[0];
    assert_eq!(section.index, position.index);
    let record = &decode_records(&section.records).unwrap()[0];
    assert_eq!(record.key[..], [7; 16]);
    let expect = [&20_u64.to_le_bytes()[..], &0_u32.to_le_bytes(), &2_u32.to_le_bytes()].concat();
    assert_eq!(record.value, expect);

    // The fence: it conflicts on the id, and names it by the index behind the last range.
    let fence = CommitRequest { kind: CommitKind::Fence, id: Some(id(7)), ..request(3) };
    let fence = CommitRequest { reads: points(&["x", "y"]), ..fence };
    match world.settle(client(0), 0, &fence) {
        CommitOutcome::Conflict { ranges, .. } => assert_eq!(ranges, [2]),
        other => panic!("{other:?}"),
    }
    // A fence that commits keeps the original out and leaves no record.
    let fence = CommitRequest { kind: CommitKind::Fence, id: Some(id(8)), ..request(4) };
    assert!(is_committed(&world.settle(client(0), 0, &fence)));
    let late = CommitRequest { id: Some(id(8)), ..append(5, "too late") };
    assert!(matches!(world.settle(client(0), 0, &late), CommitOutcome::Conflict { .. }));
    let ids = world.logs[0].versions.values().flat_map(|(_, blocks)| blocks);
    assert_eq!(ids.filter(|block| block.stream == StreamId::IDS).count(), 1);
}

#[test]
fn conflicts_are_named_in_the_clients_numbers_across_resolvers() {
    let mut world = World::serving(plan(1, &["", "g", "t"], 1, 1), Knobs::small(), CALM, 1);
    let write = CommitRequest { writes: points(&["b", "m", "z"]), ..request(1) };
    assert!(is_committed(&world.settle(client(0), 0, &write)));
    let reads = Ranges::from_ranges([
        KeyRange::point(b"a"),
        KeyRange::new(b"a", b"zz").unwrap(),
        KeyRange::point(b"h"),
        KeyRange::point(b"m"),
        KeyRange::point(b"z"),
    ]);
    let read = CommitRequest { reads, ..request(2) };
    match world.settle(client(0), 0, &read) {
        CommitOutcome::Conflict { ranges, .. } => assert_eq!(ranges, [1, 3, 4]),
        other => panic!("{other:?}"),
    }
    let quiet = CommitRequest { request: RequestId(3), report_conflicts: false, ..read.clone() };
    match world.settle(client(0), 0, &quiet) {
        CommitOutcome::Conflict { ranges, .. } => assert!(ranges.is_empty()),
        other => panic!("{other:?}"),
    }
    let old = CommitRequest { request: RequestId(4), read_version: RV, ..read.clone() };
    assert!(matches!(world.settle(client(0), 0, &old), CommitOutcome::TooOld { .. }));
    let future = CommitRequest { request: RequestId(5), read_version: Version::MAX, ..read };
    let future = CommitRequest { writes: points(&["q"]), ..future };
    assert_eq!(code(&world.settle(client(0), 0, &future)), Some(Code::FutureVersion));
    let unhurt = CommitRequest { reads: points(&["q"]), ..request(7) };
    assert!(is_committed(&world.settle(client(0), 0, &unhurt)), "what was refused wrote nothing");
    // Without reads the read version is not looked at.
    let blind = CommitRequest { request: RequestId(6), read_version: Version::MAX, ..write };
    assert!(is_committed(&world.settle(client(0), 0, &blind)));
    assert!(world.marks.contains(&Mark::FutureVersion));
}

#[test]
fn a_repeated_request_gets_the_same_answer_until_it_is_answered() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    let first = world.settle(client(0), 0, &append(1, "once"));
    assert_eq!(world.settle(client(0), 0, &append(1, "once")), first);
    let refused = CommitRequest { kind: CommitKind::Fence, ..append(2, "no fence has records") };
    assert_eq!(code(&world.settle(client(0), 0, &refused)), Some(Code::Malformed));
    world.send(client(0), 0, append(2, "a late copy, as it were"));
    world.run_for(50);
    assert!(world.outcome(client(0), RequestId(2)).is_some(), "outcomes agree");
    assert!(world.marks.contains(&Mark::CommitAgain));
    let next = CommitRequest { answered_below: RequestId(3), ..append(3, "next") };
    assert!(is_committed(&world.settle(client(0), 0, &next)));
    let told = world.told.len();
    world.send(client(0), 0, append(1, "once"));
    world.run_for(50);
    assert_eq!(world.told.len(), told, "it has said that it has the answer");
    let records: u32 = world.logs[0]
        .versions
        .values()
        .flat_map(|(_, blocks)| blocks)
        .filter(|block| block.stream == STREAM)
        .map(|block| block.record_count)
        .sum();
    assert_eq!(records, 2);
}

#[test]
fn limits_are_refused_with_a_reason_and_given_back() {
    let knobs = Knobs {
        client_requests_max: 16,
        proxy_bytes_max: 128 << 10,
        batches_in_flight_max: 1,
        proxy_clients_max: 3,
        ..Knobs::small()
    };
    let mut world = World::serving(one(), knobs, CALM, 1);
    // Nothing gets through, so everything waits at the proxy.
    world.cut.push((None, None, "Push"));
    let big = |number| {
        with_records(request(number), &[(STREAM, vec![Record::append(vec![0; 50 << 10])])])
    };
    for number in 1..=3 {
        world.send(client(0), 0, big(number));
    }
    world.run_for(20);
    let overloaded: Vec<Code> =
        world.refusals(client(0)).into_iter().map(|(_, code)| code).collect();
    assert_eq!(overloaded, [Code::Overloaded]);
    for number in 4..=40 {
        world.send(client(0), 0, request(number));
    }
    world.run_for(20);
    let refused = world.refusals(client(0)).len();
    assert_eq!(refused, 17, "as many again as are served are refused, the rest is not answered");
    let bytes = world.status(0).bytes;
    assert!(bytes > 100 << 10, "{bytes}");
    let reason = &world.status(0).batches[0];
    assert_eq!(reason.phase, Phase::Pushing);
    assert!(reason.waits_for.contains("log servers"), "{reason:?}");
    // There is room for clients 99 (who made the stream), the leader, and one more.
    world.send(client(1), 0, request(1));
    world.run_for(20);
    assert_eq!(world.refusals(client(1)), [(1, Code::Overloaded)]);

    world.cut.clear();
    world.run_for(500);
    let status = world.status(0);
    assert_eq!((status.bytes, status.pending_count), (0, 0));
    assert!(world.marks.contains(&Mark::PipelineFull) && world.marks.contains(&Mark::Retransmit));
}

#[test]
fn a_full_disk_refuses_what_would_leave_a_record() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    world.logs[0].state = LogState::Full;
    assert!(is_committed(&world.settle(client(0), 0, &append(1, "in flight it still fits"))));
    assert_eq!(code(&world.settle(client(0), 0, &append(2, "full"))), Some(Code::DiskFull));
    let with_id = CommitRequest { id: Some(id(1)), ..request(3) };
    assert_eq!(code(&world.settle(client(0), 0, &with_id)), Some(Code::DiskFull));
    let bare = CommitRequest { writes: points(&["k"]), ..request(4) };
    assert!(is_committed(&world.settle(client(0), 0, &bare)));
    world.logs[0].state = LogState::Open;
    world.run_for(300);
    assert!(is_committed(&world.settle(client(0), 0, &append(5, "room again"))));
}

#[test]
fn a_read_version_is_proven_after_the_question() {
    let mut world = World::serving(plan(1, &[""], 3, 2), Knobs::small(), CALM, 1);
    let before = world.read_version(client(0), 0, 1);
    let CommitOutcome::Committed { position, .. } = world.settle(client(1), 0, &append(1, "x"))
    else {
        panic!("committed")
    };
    assert!(before < position.version);
    assert!(world.read_version(client(0), 0, 2) >= position.version);

    // A round that goes on does not answer what was asked after it began.
    world.cut.push((Some(log_server(0)), None, "Confirmed"));
    world.cut.push((Some(log_server(1)), None, "Confirmed"));
    world.send(client(0), 0, ReadVersionRequest { request: RequestId(3) });
    world.run_for(5);
    let CommitOutcome::Committed { position, .. } = world.settle(client(1), 0, &append(2, "y"))
    else {
        panic!("committed")
    };
    world.send(client(0), 0, ReadVersionRequest { request: RequestId(4) });
    world.run_for(20);
    assert_eq!(world.read_version_told(client(0), RequestId(3)), None, "one answer is not enough");
    assert_eq!(world.status(0).read_versions_waiting, 1);
    world.cut.clear();
    world.run_for(200);
    assert!(world.read_version_told(client(0), RequestId(3)).is_some(), "asked again");
    let version = world.read_version_told(client(0), RequestId(4)).unwrap();
    assert!(version >= position.version);
}

#[test]
fn questions_are_bounded() {
    let knobs = Knobs { read_versions_waiting_max: 4, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    world.cut.push((None, None, "Confirmed"));
    for number in 1..=8 {
        world.send(client(0), 0, ReadVersionRequest { request: RequestId(number) });
        world.run_for(1);
    }
    // One is in the round, four wait.
    assert_eq!(world.refusals(client(0)).len(), 3);
    world.cut.clear();
    world.run_for(200);
    let told = (1..=8).filter(|n| world.read_version_told(client(0), RequestId(*n)).is_some());
    assert_eq!(told.count(), 5);
}

#[test]
fn a_locked_log_server_ends_the_epoch_for_its_proxies() {
    let mut world = World::serving(plan(1, &[""], 2, 1), Knobs::small(), CALM, 1);
    world.logs[0].is_locked = true;
    world.send(client(0), 0, append(1, "in flight"));
    world.run_for(50);
    assert_eq!(world.outcome(client(0), RequestId(1)), None, "the next epoch decides");
    assert!(world.status(0).is_fenced);
    assert_eq!(code(&world.settle(client(0), 0, &append(2, "late"))), Some(Code::Recovering));
    world.send(client(0), 0, ReadVersionRequest { request: RequestId(3) });
    world.run_for(50);
    assert!(world.refusals(client(0)).contains(&(3, Code::Recovering)));
}

#[test]
fn when_the_epoch_ends_everything_without_a_version_hears_of_it() {
    let knobs = Knobs { batches_in_flight_max: 1, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    world.cut.push((None, None, "Push"));
    world.cut.push((None, None, "Confirmed"));
    world.send(client(0), 0, append(1, "in flight"));
    world.run_for(2);
    world.send(client(0), 0, append(2, "gathers"));
    let unknown = with_records(request(3), &[(StreamId(77), vec![Record::append("x")])]);
    world.send(client(0), 0, unknown);
    world.send(client(0), 0, in_lane(append(4, "early"), 1, 7));
    world.send(client(0), 0, ReadVersionRequest { request: RequestId(5) });
    world.run_for(2);
    world.send(client(0), 0, ReadVersionRequest { request: RequestId(6) });
    world.run_for(2);
    assert!(world.refusals(client(0)).is_empty());
    world.cut.clear();
    world.logs[0].is_locked = true;
    world.run_for(100);
    let mut refused = world.refusals(client(0));
    refused.sort_unstable();
    assert_eq!(refused, (2..=6).map(|number| (number, Code::Recovering)).collect::<Vec<_>>());
    assert_eq!(world.status(0).pending_count, 1);
}

#[test]
fn unknown_streams_wait_for_the_catalog_and_are_refused() {
    let mut world = World::serving(plan(2, &[""], 3, 2), Knobs::small(), CALM, 1);
    let unknown = with_records(request(1), &[(StreamId(77), vec![Record::append("x")])]);
    assert_eq!(code(&world.settle(client(0), 0, &unknown)), Some(Code::UnknownStream));
    assert!(world.marks.contains(&Mark::CatalogWait));

    // Created through one proxy, used at once through the other.
    let read_version = world.read_version(client(0), 0, 100);
    let create_77 = CommitRequest { read_version, ..create(2, "late", StreamId(77)) };
    assert!(is_committed(&world.settle(client(0), 0, &create_77)));
    let used = with_records(request(3), &[(StreamId(77), vec![Record::append("x")])]);
    world.send(client(1), 1, used);
    world.run_for(5);
    let used = world.outcome(client(1), RequestId(3)).expect("the view is asked for at once");
    assert!(is_committed(&used));

    // Neither the name nor the id can be given again, through whichever proxy.
    let read_version = world.read_version(client(0), 1, 101);
    for (number, name, stream) in [(4, "late", 78), (5, "later", 77)] {
        let again = CommitRequest { read_version, ..create(number, name, StreamId(stream)) };
        assert_eq!(code(&world.settle(client(0), 1, &again)), Some(Code::StreamExists));
    }
    // Two streams and records for one of them in one transaction.
    let definition =
        |name: &str, stream| StreamDefinition { name: name.into(), stream }.to_record();
    let both = vec![definition("a", StreamId(90)), definition("b", StreamId(91))];
    let records = vec![Record::append("first")];
    let sections = [(StreamId::CATALOG, both.clone()), (StreamId(91), records)];
    let several = with_records(CommitRequest { read_version, ..request(6) }, &sections);
    assert!(is_committed(&world.settle(client(0), 1, &several)));
    let twice = vec![both[0].clone(), both[0].clone()];
    let twice = with_records(request(7), &[(StreamId::CATALOG, twice)]);
    assert_eq!(code(&world.settle(client(0), 1, &twice)), Some(Code::Malformed));
    let bad = create(8, "no blanks", StreamId(92));
    assert_eq!(code(&world.settle(client(0), 1, &bad)), Some(Code::BadName));
    let future = CommitRequest { read_version: Version::MAX, ..create(9, "c", StreamId(93)) };
    assert_eq!(code(&world.settle(client(0), 1, &future)), Some(Code::FutureVersion));
}

#[test]
fn two_proxies_that_create_one_name_or_one_id_at_once_conflict() {
    let mut world = World::serving(plan(2, &["", "g"], 2, 2), Knobs::small(), CALM, 1);
    let pairs = [(1, ["same", "same"], [30, 31]), (2, ["one", "other"], [40, 40])];
    for (number, names, ids) in pairs {
        let read_version = world.read_version(client(0), 0, 100 + number);
        for index in 0..2 {
            let place = usize::from(index);
            let create = create(number, names[place], StreamId(ids[place]));
            let create = CommitRequest { read_version, ..create };
            world.send(client(u64::from(index)), index, create);
        }
        world.run_for(500);
        let outcomes: Vec<CommitOutcome> =
            (0..2).map(|index| world.outcome(client(index), RequestId(number)).unwrap()).collect();
        let committed = outcomes.iter().filter(|outcome| is_committed(outcome)).count();
        assert_eq!(committed, 1, "{outcomes:?}");
        let names_none = |outcome: &CommitOutcome| match outcome {
            CommitOutcome::Conflict { ranges, .. } => ranges.is_empty(),
            CommitOutcome::Refused(refusal) => refusal.code() == Code::StreamExists,
            _ => false,
        };
        assert!(outcomes.iter().any(names_none), "{outcomes:?}");
    }
}

#[test]
fn a_creation_waits_until_the_view_has_passed_its_read_version() {
    let mut world = World::serving(plan(2, &[""], 2, 1), Knobs::small(), CALM, 1);
    // The first creation is durable on one log server only.
    world.cut.push((None, Some(log_server(1)), "Push"));
    let read_version = world.read_version(client(0), 0, 100);
    let first = CommitRequest { read_version, ..create(1, "same", StreamId(30)) };
    world.send(client(0), 0, first);
    world.run_for(100);
    assert_eq!(world.outcome(client(0), RequestId(1)), None);
    // The read version comes from that server, the round at the gate from the other one.
    world.cut.push((Some(log_server(1)), None, "Confirmed"));
    let read_version = world.read_version(client(1), 1, 100);
    world.cut.pop();
    world.cut.push((Some(log_server(0)), None, "Confirmed"));
    let second = CommitRequest { read_version, ..create(1, "same", StreamId(31)) };
    world.send(client(1), 1, second);
    world.run_for(200);
    assert_eq!(world.outcome(client(1), RequestId(1)), None, "it could not know");
    assert_eq!(world.status(1).catalog_waiting_count, 1);
    world.cut.clear();
    world.run_for(1000);
    assert!(is_committed(&world.outcome(client(0), RequestId(1)).unwrap()));
    let second = world.outcome(client(1), RequestId(1)).unwrap();
    assert_eq!(code(&second), Some(Code::StreamExists));
}

#[test]
fn a_read_version_is_the_minimum_of_the_answers() {
    let mut world = World::serving(plan(1, &[""], 2, 2), Knobs::small(), CALM, 1);
    world.run_for(5);
    let known = world.status(0).known_committed;
    world.cut.push((None, Some(log_server(1)), "Push"));
    world.send(client(0), 0, append(1, "on one server"));
    world.run_for(10);
    assert!(world.logs[0].versions.keys().next_back() > Some(&known));
    assert_eq!(world.read_version(client(1), 0, 2), known);
}

#[test]
fn a_proxy_that_missed_the_news_asks_for_it() {
    let knobs = Knobs { life_versions: 50_000, ..Knobs::small() };
    let mut world = World::serving(plan(2, &[""], 1, 1), knobs, CALM, 1);
    world.cut.push((None, Some(proxy(0)), "Durable"));
    for number in 1..=5 {
        assert!(is_committed(&world.settle(client(1), 1, &request(number))));
        world.run_for(20);
    }
    world.send(client(0), 0, append(1, "x"));
    world.run_for(10);
    let status = world.status(0);
    assert!(status.batches[0].waits_for.contains("LIFE"), "{status:#?}");
    world.run_for(200);
    let version = world.status(0).batches[0].version.unwrap();
    assert!(world.logs[0].versions.contains_key(&version), "it has been pushed");
    world.cut.clear();
    world.run_for(200);
    assert!(is_committed(&world.outcome(client(0), RequestId(1)).unwrap()));
}

#[test]
fn pushes_stay_within_life_of_what_is_known_committed() {
    let knobs = Knobs { life_versions: 50_000, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    world.cut.push((None, None, "Durable"));
    for number in 1..=8 {
        world.send(client(0), 0, request(number));
        world.run_for(20);
    }
    let status = world.status(0);
    let pushed = world.logs[0].versions.keys().max().unwrap();
    assert!(*pushed <= status.known_committed.plus(50_000));
    let stalled: Vec<&String> = status
        .batches
        .iter()
        .map(|batch| &batch.waits_for)
        .filter(|w| w.contains("LIFE"))
        .collect();
    assert!(!stalled.is_empty(), "{status:#?}");
    world.cut.clear();
    world.run_for(1000);
    for number in 1..=8 {
        assert!(is_committed(&world.outcome(client(0), RequestId(number)).unwrap()));
    }
}

#[test]
fn replicas_that_disagree_about_an_offset_stop_the_process() {
    let mut world = World::serving(plan(1, &[""], 2, 2), Knobs::small(), CALM, 1);
    world.logs[1].offset_error = 1;
    world.send(client(0), 0, append(1, "x"));
    world.run_for(20);
    assert_eq!(world.halts[0].reason, "offset_divergence");
}

#[test]
fn a_client_that_goes_leaves_nothing_behind() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    world.cut.push((None, None, "Durable"));
    world.cut.push((None, None, "Confirmed"));
    world.send(client(0), 0, in_lane(append(1, "in flight"), 1, 0));
    world.run_for(5);
    world.send(client(0), 0, in_lane(append(2, "early"), 1, 5));
    let unknown = with_records(request(3), &[(StreamId(77), vec![Record::append("x")])]);
    world.send(client(0), 0, unknown);
    world.send(client(0), 0, ReadVersionRequest { request: RequestId(4) });
    world.run_for(1);
    let clients = world.status(0).client_count;
    world.step_machine(proxy(0), Event::PeerDown(client(0).peer()));
    assert_eq!(world.status(0).pending_count, 1, "what has its version goes on");
    world.cut.clear();
    let told = world.told.iter().filter(|(_, to, _)| *to == client(0)).count();
    world.run_for(500);
    assert_eq!(world.told.iter().filter(|(_, to, _)| *to == client(0)).count(), told);
    let status = world.status(0);
    assert_eq!((status.bytes, status.pending_count), (0, 0));
    assert_eq!(status.client_count, clients - 1);
}

#[test]
fn the_catalog_is_followed_over_links_that_are_longer_than_the_patience() {
    let knobs = Knobs { retransmit_ms: 5, heartbeat_ms: 50, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, Network { delay_us: 200_000, ..CALM }, 1);
    let mut creation = create(1, "far-away", StreamId(30));
    creation.read_version = world.read_version(client(0), 0, 100);
    world.send(client(0), 0, creation);
    world.run_for(3000);
    let outcome = world.outcome(client(0), RequestId(1));
    assert!(outcome.as_ref().is_some_and(is_committed), "{outcome:?}");
}

#[test]
fn other_epochs_and_strangers_are_ignored() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    let before = format!("{:?}", world.status(0));
    let resolve = Resolve {
        previous_version: RV,
        version: RTV,
        answered: Version::ZERO,
        settlements: vec![],
        transactions: vec![],
    };
    let reply = common::message::VersionReply {
        number: 99,
        previous_version: RTV,
        version: RTV.plus(1),
        commit_time: WallTime(0),
    };
    for (epoch, message) in [(Epoch(2), reply.into()), (EPOCH, Message::from(resolve))] {
        let event = Event::Message { from: world.plan.sequencer, epoch, message };
        world.step_machine(proxy(0), event);
    }
    let event = Event::Message { from: log_server(9), epoch: EPOCH, message: reply.into() };
    world.step_machine(proxy(0), event);
    assert_eq!(format!("{:?}", world.status(0)), before);
}

#[test]
fn the_oldest_request_is_answered_however_many_newer_ones_are_kept() {
    let knobs = Knobs { client_requests_max: 16, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    world.cut.push((None, None, "Push"));
    // Request 1 is lost on its way; the newer ones fill all that is kept for a client.
    for number in 2..=40 {
        let answered_below = RequestId(1);
        world.send(client(0), 0, CommitRequest { answered_below, ..request(number) });
    }
    world.run_for(20);
    let before = world.refusals(client(0));
    assert!(before.iter().all(|(number, _)| *number != 1));
    world.send(client(0), 0, CommitRequest { answered_below: RequestId(1), ..request(1) });
    world.run_for(20);
    let refused = world.refusals(client(0));
    assert!(refused.contains(&(1, Code::Overloaded)), "{refused:?}");
}
