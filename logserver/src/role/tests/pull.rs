//! Pulls at all their limits.

use common::message::{Announce, Message, Pull, Pulled, Trim};
use common::{Code, Event, Mark, RequestId, Role, StreamId, Version};

use crate::testing::rig::{Rig, client, endpoint, proxy, push, versions};

/// Versions 10, 20, .. with one record of stream 17 each, and of 18 in every second one; all committed.
fn filled(seed: u64, count: u64, len: usize) -> Rig {
    let mut rig = Rig::serving(seed);
    for at in 1..=count {
        let blocks = [(17, 1, len), (18, 2, len)];
        let blocks = &blocks[..1 + (at % 2) as usize];
        rig.push(1, push(10 * (at - 1), 10 * at, blocks));
        rig.settle();
    }
    rig.send(proxy(), 1, Announce { known_committed: Version(10 * count) });
    rig.sent.clear();
    rig
}

fn answers(rig: &mut Rig) -> Vec<Pulled> {
    rig.take_sent(|message| match message {
        Message::Pulled(pulled) => Some(pulled),
        _ => None,
    })
}

#[test]
fn streams_are_merged_by_version_and_cut_between_versions() {
    let mut rig = filled(1, 6, 100);
    let all = rig.pulled(&[17, 18], 0);
    assert_eq!((versions(&all), all.through), (vec![10, 20, 30, 40, 50, 60], Version(60)));
    let order: Vec<u64> = all.blocks.iter().map(|block| block.stream.0).collect();
    assert_eq!(order, [17, 18, 17, 17, 18, 17, 17, 18, 17]);
    // One byte: still one whole version.
    rig.pull(&[17, 18], 20, 1, 0);
    let one = answers(&mut rig).remove(0);
    assert_eq!((versions(&one), one.blocks.len(), one.through), (vec![30], 2, Version(30)));
    // Two versions fit, the third does not.
    rig.pull(&[17, 18], 0, 700, 0);
    let two = answers(&mut rig).remove(0);
    assert_eq!((versions(&two), two.through), (vec![10, 20], Version(20)));
    // A stream that nobody knows is empty.
    rig.pull(&[99], 0, 700, 0);
    let none = answers(&mut rig).remove(0);
    assert_eq!((versions(&none), none.through), (vec![], Version(60)));
    assert!(rig.marks.contains(&Mark::PullFromTail) && !rig.marks.contains(&Mark::PullFromDisk));
}

#[test]
fn what_left_the_tail_comes_from_the_disk_and_is_the_same() {
    let mut rig = filled(2, 60, 3000);
    let pulled = rig.pulled(&[17, 18], 0);
    assert!(rig.marks.contains(&Mark::PullFromDisk), "{:?}", rig.server.status());
    assert_eq!(pulled.versions.len(), 60);
    let mut at = 0;
    for block in &pulled.blocks {
        let body = pulled.payload.slice(at, block.bytes as usize).unwrap();
        assert_eq!(crc32c::crc32c(&body), block.checksum);
        at += block.bytes as usize;
    }
    assert_eq!(at, pulled.payload.len());
}

#[test]
fn a_pull_waits_for_its_streams_or_for_its_deadline() {
    let mut rig = filled(3, 2, 10);
    rig.pull(&[18], 20, 1000, 500);
    rig.pull(&[17], 20, 1000, 500);
    assert_eq!((answers(&mut rig), rig.server.status().pulls_waiting), (vec![], 2));
    rig.push(1, push(20, 30, &[(17, 1, 5)]));
    rig.settle();
    rig.send(proxy(), 1, Announce { known_committed: Version(30) });
    let woken = answers(&mut rig);
    assert_eq!((woken.len(), versions(&woken[0])), (1, vec![30]));
    rig.pass_ms(499);
    assert_eq!(answers(&mut rig), []);
    rig.pass_ms(1);
    let mark = answers(&mut rig).remove(0);
    assert_eq!((mark.after, mark.through, mark.blocks.len()), (Version(20), Version(30), 0));
    assert_eq!(rig.server.status().pulls_waiting, 0);
}

#[test]
fn a_pull_from_the_future_is_answered_with_its_own_version() {
    let mut rig = filled(4, 2, 10);
    rig.pull(&[17], 1000, 1000, 0);
    assert_eq!(answers(&mut rig)[0].through, Version(1000));
}

#[test]
fn limits_are_refusals_with_names() {
    let mut rig = filled(5, 1, 10);
    rig.knobs.pull_streams_max = 2;
    rig.knobs.pulls_waiting_max = 2;
    rig.pull(&[17, 18, 19], 0, 1000, 0);
    assert_eq!(rig.refusals()[0].code(), Code::LimitExceeded);
    rig.pull(&[18, 17], 0, 1000, 0);
    assert_eq!(rig.refusals()[0].code(), Code::Malformed);
    rig.pull(&[17], 10, 1000, 100);
    rig.pull(&[18], 10, 1000, 100);
    rig.pull(&[19], 10, 1000, 100);
    let refusal = rig.refusals().remove(0);
    assert_eq!(refusal.code(), Code::Overloaded);
    assert!(refusal.retry_after_ms > 0);
    rig.event(Event::PeerDown(client().peer()));
    assert_eq!(rig.server.status().pulls_waiting, 0, "nobody waits for these");
}

#[test]
fn a_pull_that_wants_a_version_gets_a_mark_and_takes_the_place_of_one_that_waits() {
    let mut rig = filled(5, 1, 10);
    let pull = |request, want| Pull {
        request: RequestId(request),
        streams: vec![StreamId(99)],
        after: Version(1),
        bytes_max: 10,
        wait_ms: 1000,
        want: Version(want),
    };
    rig.send(client(), 0, pull(1, 0));
    rig.send(client(), 0, pull(2, 11));
    assert_eq!(rig.server.status().pulls_waiting, 1, "the second one instead of the first");
    assert!(answers(&mut rig).is_empty(), "11 is not known yet");
    rig.send(client(), 0, pull(3, 9));
    let found = answers(&mut rig);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].request, RequestId(3));
    assert!(found[0].through >= Version(9) && found[0].blocks.is_empty());
}

#[test]
fn a_long_wait_is_cut_to_the_limit() {
    let mut rig = filled(6, 1, 10);
    rig.knobs.pull_wait_ms_max = 50;
    let pull = Pull {
        request: RequestId(7),
        streams: vec![StreamId(17)],
        after: Version(10),
        bytes_max: 10,
        wait_ms: u32::MAX,
        want: Version::ZERO,
    };
    rig.send(client(), 0, pull);
    rig.pass_ms(50);
    assert_eq!(answers(&mut rig)[0].request, RequestId(7));
}

#[test]
fn many_pulls_read_in_turn() {
    let mut rig = filled(7, 60, 3000);
    for _ in 0..50 {
        rig.pull(&[17], 0, 1, 0);
    }
    assert!(rig.server.status().pulls_reading > 40);
    rig.settle();
    assert_eq!((answers(&mut rig).len(), rig.server.status().pulls_reading), (50, 0));
}

/// Pulls stream 17 step by step, each answer as far as `between` lets the disk come before the next pull.
fn step_by_step(rig: &mut Rig, between: impl Fn(&mut Rig)) -> Vec<Pulled> {
    let (mut after, mut all) = (0, Vec::new());
    while after < 600 {
        rig.pull(&[17], after, 20_000, 100);
        between(rig);
        let mut answered = answers(rig);
        while answered.is_empty() {
            assert!(rig.disk_step(), "the pull after {after} waits for nothing");
            rig.server.check();
            answered = answers(rig);
        }
        let pulled = answered.remove(0);
        assert_eq!((pulled.after, answered.len()), (Version(after), 0));
        after = pulled.through.0;
        all.push(pulled);
    }
    all
}

#[test]
fn what_is_read_ahead_is_what_would_have_been_read() {
    let mut plain = filled(8, 60, 3000);
    plain.knobs.read_ahead_bytes_max = 0;
    let expected = step_by_step(&mut plain, |_| {});
    assert!(!plain.marks.contains(&Mark::PullReadAhead));
    // Everything is there when it is asked for.
    let mut ahead = filled(8, 60, 3000);
    let found = step_by_step(&mut ahead, |rig| rig.settle());
    assert!(ahead.marks.contains(&Mark::PullReadAhead), "{:?}", ahead.server.status());
    assert_eq!(found, expected);
    // Or is still being read: the pull takes the read over.
    let mut early = filled(8, 60, 3000);
    let found = step_by_step(&mut early, |_| {});
    assert_eq!(found, expected);
    early.settle();
    assert_eq!(early.server.status().pulls_reading, 0);
}

#[test]
fn what_is_kept_is_bounded_and_goes_with_its_consumer() {
    let mut rig = filled(9, 60, 3000);
    rig.knobs.read_ahead_bytes_max = 50_000;
    for request in 0..5 {
        let mut from = client();
        from.node.0 += request;
        let streams = vec![StreamId(17)];
        let (request, after, want) = (RequestId(request), Version(0), Version::ZERO);
        let pull = Pull { request, streams, after, bytes_max: 20_000, wait_ms: 100, want };
        rig.send(from, 0, pull);
    }
    rig.settle();
    assert_eq!(answers(&mut rig).len(), 5);
    let kept = rig.server.status().read_ahead_bytes;
    assert!((30_000..=50_000).contains(&kept), "two answers of some 18,000 bytes: {kept}");
    // Whoever comes later finds no room, until nobody has asked for what is kept for a while.
    let (first, late) = (kept, endpoint(77, Role::Client));
    let streams = vec![StreamId(18)];
    let (request, after, want) = (RequestId(7), Version(0), Version::ZERO);
    let pull = Pull { request, streams, after, bytes_max: 20_000, wait_ms: 100, want };
    rig.send(late, 0, pull.clone());
    rig.settle();
    assert_eq!(rig.server.status().read_ahead_bytes, first);
    rig.pass_ms(1001);
    rig.send(late, 0, pull);
    rig.settle();
    assert_ne!(rig.server.status().read_ahead_bytes, first, "the late one's instead");
    rig.event(Event::PeerDown(client().peer()));
    assert!(rig.server.status().read_ahead_bytes > 0);
    rig.event(Event::PeerDown(late.peer()));
    assert_eq!(rig.server.status().read_ahead_bytes, 0);
    // A read that is under way when its consumer goes is not kept either.
    rig.pull(&[17], 0, 20_000, 100);
    while answers(&mut rig).is_empty() {
        assert!(rig.disk_step());
    }
    rig.event(Event::PeerDown(client().peer()));
    rig.settle();
    assert_eq!(rig.server.status().read_ahead_bytes, 0);
    assert_eq!(rig.server.status().pulls_reading, 0);
}

#[test]
fn what_was_trimmed_meanwhile_is_refused_though_it_was_read_ahead() {
    let mut rig = filled(10, 60, 3000);
    rig.pull(&[17], 0, 20_000, 100);
    rig.settle();
    let through = answers(&mut rig).remove(0).through;
    assert!(rig.server.status().read_ahead_bytes > 0);
    let trim = Trim { request: RequestId(3), stream: StreamId(17), through: through.plus(100) };
    rig.send(client(), 1, trim);
    rig.settle();
    rig.sent.clear();
    rig.pull(&[17], through.0, 20_000, 100);
    assert_eq!(rig.refusals()[0].code(), Code::Trimmed);
}
