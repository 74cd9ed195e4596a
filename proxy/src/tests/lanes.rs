//! Ordered lanes: decided in order, and broken for all that follows.

use common::Code;
use common::message::CommitReply;

use super::*;

fn codes(world: &World, numbers: impl IntoIterator<Item = u64>) -> Vec<Option<Code>> {
    let outcomes = numbers.into_iter().map(|number| world.outcome(client(0), RequestId(number)));
    outcomes
        .map(|outcome| match outcome.expect("an outcome") {
            CommitOutcome::Committed { .. } => None,
            CommitOutcome::Refused(refusal) => Some(refusal.code()),
            CommitOutcome::Conflict { .. } => Some(Code::Conflict),
            CommitOutcome::TooOld { .. } => Some(Code::TooOld),
        })
        .collect()
}

#[test]
fn early_ones_wait_and_positions_follow_the_sequence() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    for sequence in [3, 1, 2] {
        world.send(client(0), 0, in_lane(append(10 + sequence, "x"), 1, sequence));
    }
    world.run_for(50);
    assert!(world.refusals(client(0)).is_empty());
    assert_eq!(world.status(0).pending_count, 3);
    world.send(client(0), 0, in_lane(append(10, "x"), 1, 0));
    world.run_for(50);
    let positions: Vec<_> = (10..14)
        .map(|number| match world.outcome(client(0), RequestId(number)) {
            Some(CommitOutcome::Committed { position, .. }) => position,
            other => panic!("{number}: {other:?}"),
        })
        .collect();
    assert!(positions.is_sorted());
}

#[test]
fn one_that_fails_takes_down_those_behind_it_in_every_phase() {
    let knobs = Knobs {
        batch_transactions_max: 1,
        batches_in_flight_max: 3,
        heartbeat_ms: 10_000,
        ..Knobs::small()
    };
    let mut world = World::serving(one(), knobs, CALM, 1);
    let write = CommitRequest { writes: points(&["k"]), ..request(1) };
    assert!(matches!(world.settle(client(0), 0, &write), CommitOutcome::Committed { .. }));
    world.cut.push((None, None, "Resolved"));
    let asked = world.sent["VersionRequest"];
    // 2 commits; 3 conflicts; 4 is in a later batch, 5 gathers, 7 waits for 6.
    for (number, sequence) in [(2, 0), (3, 1), (4, 2), (5, 3), (7, 5)] {
        let mut next = in_lane(append(number, "x"), 1, sequence);
        if number == 3 {
            next.reads = points(&["k"]);
        }
        world.send(client(0), 0, next);
        world.run_for(1);
    }
    assert_eq!(world.status(0).batches.len(), 3);
    let other = in_lane(append(8, "another lane"), 2, 0);
    world.send(client(0), 0, other);
    world.cut.clear();
    world.run_for(500);
    let broken = Some(Code::LaneBroken);
    assert_eq!(
        codes(&world, [2, 3, 4, 5, 7, 8]),
        [None, Some(Code::Conflict), broken, broken, broken, None]
    );
    assert_eq!(
        world.sent["VersionRequest"],
        asked + 4,
        "what gathered was refused before it closed"
    );
    world.send(client(0), 0, in_lane(append(9, "after all"), 1, 4));
    world.run_for(50);
    assert_eq!(codes(&world, [9]), [broken]);
    assert!(world.marks.contains(&Mark::LaneBroken));
}

#[test]
fn a_refusal_at_the_door_breaks_the_lane_as_well() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    let bad = CommitRequest { reads: points(&["\u{ff}"]), ..append(2, "x") };
    let bad = CommitRequest { writes: Ranges::from_ranges([KeyRange::point(&[0xff])]), ..bad };
    world.send(client(0), 0, in_lane(bad, 1, 1));
    world.run_for(20);
    world.send(client(0), 0, in_lane(append(3, "behind"), 1, 2));
    world.send(client(0), 0, in_lane(append(1, "in front"), 1, 0));
    world.run_for(50);
    assert_eq!(codes(&world, 1..=3), [None, Some(Code::SystemKey), Some(Code::LaneBroken)]);
}

#[test]
fn a_place_is_taken_once() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    for (number, sequence) in [(1, 0), (2, 2), (3, 0), (4, 2)] {
        world.send(client(0), 0, in_lane(append(number, "x"), number % 2, sequence));
        // 1 is still in flight when 3 wants its place.
        world.run_for(if number == 3 { 20 } else { 0 });
        world.step_until(world.now.plus(Duration::from_micros(100)));
    }
    world.run_for(20);
    // 2 waits for its predecessors in lane 0 and is not refused; 4 wanted its place.
    assert_eq!(codes(&world, [1, 3, 4]), [None, Some(Code::Malformed), Some(Code::Malformed)]);
    assert_eq!(world.status(0).pending_count, 1);
}

#[test]
fn a_lane_waits_at_the_gate_and_holds_up_nobody_else() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    world.cut.push((None, None, "Pulled"));
    let _ = world.settle(client(1), 0, &append(1, "the view falls behind"));
    let mut creation = create(1, "second", StreamId(30));
    creation.read_version = world.read_version(client(0), 0, 100);
    world.send(client(0), 0, in_lane(creation, 1, 0));
    world.run_for(5);
    let used = with_records(request(2), &[(STREAM, vec![Record::append("x")])]);
    world.send(client(0), 0, in_lane(used, 1, 1));
    world.send(client(0), 0, append(3, "nobody else"));
    world.run_for(50);
    assert_eq!(world.outcome(client(0), RequestId(2)), None);
    assert_eq!(codes(&world, [3]), [None]);
    assert_eq!(world.status(0).catalog_waiting_count, 1);
    world.cut.clear();
    world.run_for(500);
    assert_eq!(codes(&world, [1, 2]), [None, None]);
}

#[test]
fn a_broken_lane_is_forgotten_when_nothing_of_it_can_come() {
    let knobs = Knobs { client_requests_max: 16, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    let mut number = 0;
    // Many more lanes than a client may have at a time, each broken after its first commit.
    for lane in 0..64 {
        for (sequence, read_version) in [(0, RTV), (1, RV)] {
            number += 1;
            let reads = points(&["k"]);
            let answered_below = RequestId(number);
            let next = CommitRequest { reads, answered_below, read_version, ..append(number, "x") };
            let outcome = world.settle(client(0), 0, &in_lane(next, lane, sequence));
            let is_limit = matches!(
                &outcome,
                CommitOutcome::Refused(refusal) if refusal.code() == Code::LimitExceeded
            );
            assert!(!is_limit, "lane {lane}: {outcome:?}");
        }
    }
    let replies = world.told.iter().filter(|(_, _, message)| {
        matches!(
            message,
            Message::CommitReply(CommitReply { outcome: CommitOutcome::TooOld { .. }, .. })
        )
    });
    assert!(replies.count() >= 64);
}

#[test]
fn a_new_lane_takes_the_place_of_the_one_quiet_for_longest() {
    let knobs = Knobs { client_requests_max: 16, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    let mut number = 0;
    let mut settle = |world: &mut World, lane, sequence| {
        number += 1;
        let next = CommitRequest { answered_below: RequestId(number), ..append(number, "x") };
        world.settle(client(0), 0, &in_lane(next, lane, sequence))
    };
    let is_committed = |outcome| matches!(outcome, CommitOutcome::Committed { .. });
    // The client drops all lanes but one without a word.
    for lane in 1..64 {
        assert!(is_committed(settle(&mut world, lane, 0)), "lane {lane}");
        assert!(is_committed(settle(&mut world, 0, lane - 1)), "place {} of lane 0", lane - 1);
    }
}

#[test]
fn no_lane_is_dropped_while_its_client_may_want_its_answers() {
    let knobs = Knobs { client_requests_max: 4, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    for lane in 0..4 {
        let _ = world.settle(client(0), 0, &in_lane(append(lane + 1, "x"), lane, 0));
    }
    world.send(client(0), 0, in_lane(append(5, "x"), 4, 0));
    world.run_for(50);
    assert_eq!(codes(&world, [5]), [Some(Code::Overloaded)], "nothing is answered");
    let late = CommitRequest { answered_below: RequestId(5), ..append(6, "x") };
    assert!(matches!(
        world.settle(client(0), 0, &in_lane(late, 5, 0)),
        CommitOutcome::Committed { .. }
    ));
}

#[test]
fn a_broken_lane_is_remembered_while_one_given_up_is_on_its_way() {
    let knobs = Knobs { batch_transactions_max: 1, heartbeat_ms: 10_000, ..Knobs::small() };
    let mut world = World::serving(plan(1, &["", "m"], 1, 1), knobs, CALM, 1);
    world.run_for(50);
    let bad = CommitRequest { reads: points(&["k"]), read_version: RV, ..append(1, "too old") };
    let asked = world.sent["Resolve"];
    world.send(client(0), 0, in_lane(bad, 1, 0));
    while world.status(0).batches.is_empty() {
        assert!(world.step_until(world.now.plus(Duration::from_millis(10))));
    }
    world.send(client(0), 0, in_lane(append(2, "behind it"), 1, 1));
    while world.sent["Resolve"] == asked {
        assert!(world.step_until(world.now.plus(Duration::from_millis(10))));
    }
    // The first one is on its way to the resolvers; the second one gets no verdict for a long time.
    assert_eq!((world.sent["Resolve"], world.status(0).batches.len()), (asked + 2, 2));
    let slow = world.plan.resolvers[1].resolver;
    world.cut.push((None, Some(slow), "Resolve"));
    world.run_for(100);
    assert_eq!(codes(&world, [1]), [Some(Code::TooOld)]);
    assert_eq!(world.outcome(client(0), RequestId(2)), None);
    // The client gives it up and goes on.
    for number in 3..6 {
        let next = CommitRequest { answered_below: RequestId(number), ..append(number, "x") };
        world.send(client(0), 0, next);
        world.run_for(10);
    }
    world.cut.clear();
    world.run_for(500);
    let blocks = world.logs[0].versions.values().flat_map(|(_, blocks)| blocks);
    let count = blocks.filter(|block| block.stream == STREAM).count();
    assert_eq!(count, 3, "nothing behind the first of the lane commits");
    assert_eq!(world.status(0).pending_count, 0);
}

#[test]
fn what_waits_in_a_lane_and_was_given_up_is_given_back() {
    let mut world = World::serving(one(), Knobs::small(), CALM, 1);
    // Request 1, the first of the lane, never comes.
    world.send(client(0), 0, in_lane(append(2, "x"), 1, 1));
    world.send(client(0), 0, in_lane(append(3, "x"), 1, 2));
    world.run_for(50);
    assert_eq!(world.status(0).pending_count, 2);
    let next = CommitRequest { answered_below: RequestId(4), ..append(4, "x") };
    assert!(matches!(world.settle(client(0), 0, &next), CommitOutcome::Committed { .. }));
    let status = world.status(0);
    assert_eq!((status.pending_count, status.bytes), (0, 0));
}

#[test]
fn a_lane_breaks_even_when_its_client_has_gone() {
    let knobs = Knobs { batch_transactions_max: 1, ..Knobs::small() };
    let mut world = World::serving(one(), knobs, CALM, 1);
    let write = CommitRequest { writes: points(&["k"]), ..request(1) };
    assert!(matches!(world.settle(client(1), 0, &write), CommitOutcome::Committed { .. }));
    world.cut.push((None, None, "Resolved"));
    let conflict = CommitRequest { reads: points(&["k"]), ..append(2, "x") };
    world.send(client(0), 0, in_lane(conflict, 1, 0));
    world.run_for(2);
    world.send(client(0), 0, in_lane(append(3, "behind it"), 1, 1));
    world.run_for(2);
    assert_eq!(world.status(0).batches.len(), 2);
    world.step_machine(proxy(0), Event::PeerDown(client(0).peer()));
    world.cut.clear();
    world.run_for(500);
    assert_eq!(world.status(0).pending_count, 0);
    let blocks = world.logs[0].versions.values().flat_map(|(_, blocks)| blocks);
    assert_eq!(blocks.filter(|block| block.stream == STREAM).count(), 0);
}
