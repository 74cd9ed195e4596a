//! Locks and recruitments.

use common::disk::{DiskOp, DiskRequest, File};
use common::message::{Announce, Confirm, Lock, Locked, Message, Recruit, Trim};
use common::{Code, Epoch, Event, Mark, Note, RequestId, Role, SegmentId, StreamId, Version};

use crate::Standing;
use crate::testing::rig::{JUMP, Rig, client, endpoint, leader, proxy, push, versions};

fn locked(rig: &mut Rig) -> Vec<Locked> {
    rig.take_sent(|message| match message {
        Message::Locked(locked) => Some(locked),
        _ => None,
    })
}

fn recruited(rig: &mut Rig) -> usize {
    let recruited = rig.take_sent(|message| match message {
        Message::Recruited(recruited) => Some(recruited),
        _ => None,
    });
    recruited.len()
}

#[test]
fn a_lock_covers_everything_accepted_and_ends_the_epoch() {
    let mut rig = Rig::serving(1);
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.push(1, push(10, 20, &[(17, 1, 5)]));
    rig.push(1, push(30, 40, &[(17, 1, 5)]));
    rig.send(leader(), 2, Lock { generation: Epoch(1) });
    assert_eq!(rig.server.status().waits.len(), 1);
    rig.push(1, push(20, 30, &[]));
    assert_eq!(rig.refusals()[0].code(), Code::Locked);
    assert!(rig.marks.contains(&Mark::PushLocked));
    rig.settle();
    let answers = core::mem::take(&mut rig.sent);
    assert!(!answers.iter().any(|(_, _, m)| matches!(m, Message::Durable(_))), "I8: {answers:?}");
    rig.sent = answers;
    let expected = Locked { durable: Version(20), known_committed: Version(0) };
    assert_eq!(locked(&mut rig), [expected]);
    // A repeat, another leader's question, an older epoch.
    rig.send(leader(), 2, Lock { generation: Epoch(1) });
    assert_eq!(locked(&mut rig), [expected]);
    rig.send(endpoint(3, Role::Leader), 1, Lock { generation: Epoch(1) });
    assert_eq!(rig.refusals()[0].code(), Code::WrongEpoch);
    assert_eq!(rig.server.status().standing, Standing::Locked);
}

#[test]
fn a_lock_survives_a_crash_right_after_its_answer() {
    for seed in 0..20 {
        let mut rig = Rig::serving(seed);
        rig.push(1, push(0, 10, &[(17, 1, 5)]));
        rig.send(leader(), 5, Lock { generation: Epoch(1) });
        while locked(&mut rig).is_empty() {
            assert!(rig.disk_step());
        }
        rig.crash();
        rig.settle();
        assert_eq!((rig.server.status().locked.0, rig.server.status().durable.0), (5, 10));
        rig.send(leader(), 4, Lock { generation: Epoch(1) });
        assert_eq!(rig.refusals()[0].code(), Code::WrongEpoch);
    }
}

#[test]
fn a_restarted_server_is_locked_for_every_epoch_it_has_seen() {
    let mut rig = Rig::serving(3);
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.settle();
    rig.crash();
    rig.settle();
    rig.push(1, push(10, 20, &[]));
    assert_eq!(rig.refusals()[0].code(), Code::Locked);
    rig.recruit(1, 10);
    assert_eq!(rig.refusals()[0].code(), Code::WrongEpoch);
    rig.recruit(2, 10);
    assert_eq!(recruited(&mut rig), 1);
    rig.push(2, push(10, 10 + JUMP, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.durables()[0].durable, Version(10 + JUMP));
}

#[test]
fn a_recruitment_drops_what_is_above_the_recovery_version() {
    let mut rig = Rig::serving(4);
    rig.push(1, push(0, 10, &[(17, 2, 5)]));
    rig.push(1, push(10, 20, &[(17, 3, 5), (18, 1, 5)]));
    rig.push(1, push(20, 30, &[(18, 1, 5)]));
    rig.settle();
    rig.recruit(2, 10);
    assert!(rig.marks.contains(&Mark::TailDropped));
    assert_eq!(recruited(&mut rig), 1);
    rig.recruit(2, 10);
    assert_eq!(recruited(&mut rig), 1, "a repeat is answered again");
    rig.push(2, push(10, 10 + JUMP, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.durables()[0].acks[0].base_offsets[0].0, 2, "I12");
    // The same after a crash, found on the disk.
    rig.crash();
    rig.settle();
    rig.recruit(3, 10 + JUMP);
    rig.serve(3, 10 + JUMP);
    let pulled = rig.pulled(&[17, 18], 0);
    assert_eq!(versions(&pulled), [10, 10 + JUMP]);
    assert_eq!(pulled.through, Version(10 + JUMP));
}

#[test]
fn a_dropped_tail_stays_dropped_though_the_epoch_left_no_frame() {
    let mut rig = Rig::serving(5);
    rig.push(1, push(0, 10, &[(17, 2, 5)]));
    rig.push(1, push(10, 20, &[(17, 3, 5)]));
    rig.settle();
    rig.recruit(2, 10);
    rig.crash();
    rig.settle();
    assert_eq!(rig.server.status().durable, Version(10));
    rig.recruit(3, 10);
    rig.push(3, push(10, 10 + JUMP, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.durables()[0].acks[0].base_offsets[0].0, 2);
}

#[test]
fn a_recovery_version_that_is_not_covered_is_refused() {
    let mut rig = Rig::serving(6);
    rig.push(1, push(0, 10, &[(17, 2, 5)]));
    rig.settle();
    rig.sent.clear();
    rig.recruit(2, 11);
    assert_eq!(rig.refusals()[0].code(), Code::NotHere);
    let mut plan = rig.plan(2, 10);
    plan.log_servers = vec![endpoint(2, Role::LogServer)];
    rig.send(leader(), 2, Recruit { role: Role::LogServer, plan });
    assert_eq!(rig.refusals()[0].code(), Code::NotHere);
    rig.send(proxy(), 1, Announce { known_committed: Version(10) });
    rig.recruit(2, 9);
    assert_eq!(rig.halts[0].reason, "forked_history");
}

#[test]
fn an_epoch_that_is_not_in_the_register_commits_nothing_for_consumers() {
    let mut rig = Rig::opened(7);
    rig.recruit(1, 0);
    rig.push(1, push(0, 10, &[(17, 2, 5)]));
    rig.settle();
    rig.send(proxy(), 1, Announce { known_committed: Version(10) });
    assert_eq!(versions(&rig.pulled(&[17], 0)), [0_u64; 0], "I10, I11");
    // Its leader dies, and the next one chooses a lower recovery version.
    rig.recruit(2, 0);
    assert_eq!(rig.halts, []);
    rig.push(2, push(0, JUMP, &[(17, 1, 7)]));
    rig.settle();
    rig.send(proxy(), 2, Announce { known_committed: Version(JUMP) });
    rig.serve(1, 0);
    assert_eq!(rig.server.status().served, Version(0));
    rig.serve(2, 0);
    assert_eq!(versions(&rig.pulled(&[17], 0)), [JUMP]);
}

#[test]
fn the_only_log_server_of_an_epoch_knows_what_is_committed() {
    let mut rig = Rig::opened(14);
    rig.other = None;
    rig.recruit(1, 0);
    rig.push(1, push(0, JUMP, &[(17, 2, 5)]));
    rig.settle();
    assert_eq!(rig.server.status().served, Version(0), "I10");
    rig.serve(1, 0);
    assert_eq!(versions(&rig.pulled(&[17], 0)), [JUMP]);
    let (next, late) = (JUMP + 10, JUMP + 20);
    rig.push(1, push(JUMP, next, &[(17, 1, 5)]));
    assert_eq!(rig.server.status().served, Version(JUMP), "I7");
    rig.settle();
    assert_eq!(versions(&rig.pulled(&[17], JUMP)), [next]);
    assert!(rig.notes.contains(&Note::KnownCommitted { version: Version(next) }));
    // What a lock has overtaken is up to the next epoch.
    rig.push(1, push(next, late, &[(17, 1, 5)]));
    rig.send(leader(), 2, Lock { generation: Epoch(1) });
    rig.settle();
    let status = rig.server.status();
    assert_eq!((status.durable, status.served), (Version(late), Version(next)), "I8");
}

#[test]
fn a_newer_takeover_supersedes_one_that_waits() {
    let mut rig = Rig::serving(8);
    rig.push(1, push(0, 10, &[(17, 2, 5)]));
    rig.send(leader(), 2, Lock { generation: Epoch(1) });
    rig.send(endpoint(3, Role::Leader), 3, Lock { generation: Epoch(1) });
    let plan = rig.plan(2, 0);
    rig.send(leader(), 2, Recruit { role: Role::LogServer, plan });
    assert_eq!(rig.refusals()[0].code(), Code::WrongEpoch);
    rig.settle();
    assert_eq!(locked(&mut rig).len(), 1);
    let notes = rig.notes.iter().filter(|note| matches!(note, Note::Locked { .. }));
    assert_eq!(notes.count(), 1);
}

#[test]
fn requests_before_the_log_is_open_are_refused_or_left_to_come_again() {
    let mut rig = Rig::new(9);
    rig.pull(&[17], 0, 100, 0);
    assert_eq!(rig.refusals()[0].code(), Code::Recovering);
    rig.send(leader(), 1, Lock { generation: Epoch(1) });
    assert_eq!((rig.sent.len(), rig.server.status().standing), (0, Standing::Opening));
}

#[test]
fn a_refusal_speaks_for_the_epoch_that_it_refuses() {
    let mut rig = Rig::serving(11);
    rig.recruit(2, 0);
    rig.serve(2, 0);
    rig.sent.clear();
    // Late messages of epoch 1: its proxy and leader have the addresses of those of epoch 2.
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.send(proxy(), 1, Confirm { number: 1 });
    rig.send(leader(), 1, Lock { generation: Epoch(1) });
    let plan = rig.plan(1, 0);
    rig.send(leader(), 1, Recruit { role: Role::LogServer, plan });
    let epochs: Vec<u64> = rig.sent.iter().map(|(_, epoch, _)| epoch.0).collect();
    assert_eq!(epochs, [1; 4], "epoch 2 is not fenced: {:?}", rig.sent);
    assert_eq!(rig.refusals().len(), 4);
}

#[test]
fn a_segment_that_comes_back_brings_no_dropped_tail() {
    let came_back = (0..16).filter(|seed| recruit_while_a_segment_goes(*seed)).count();
    assert!((1..16).contains(&came_back), "{came_back} of 16 power cuts found the old name");
}

/// Whether the segment was there again after the power cut.
fn recruit_while_a_segment_goes(seed: u64) -> bool {
    let mut rig = Rig::serving(seed);
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.push(1, push(10, 20, &[(18, 1, 5)]));
    rig.settle();
    rig.recruit(2, 10);
    rig.serve(2, 10);
    let (mut last, mut next) = (10, 10 + JUMP);
    while rig.segments().len() < 3 {
        rig.push(2, push(last, next, &[(17, 1, 50_000)]));
        rig.settle();
        (last, next) = (next, next + 10);
        rig.send(proxy(), 2, Announce { known_committed: Version(last) });
        rig.pulled(&[17], last);
    }
    assert!(rig.marks.contains(&Mark::SegmentRolled));
    // The first segment goes: its new name waits for a slow disk, while the next recruitment does not.
    let trim = Trim { request: RequestId(1), stream: StreamId(17), through: Version(last) };
    rig.send(client(), 2, trim);
    while !rig.marks.contains(&Mark::SegmentRecycled) {
        assert!(rig.disk_step());
    }
    rig.sent.clear();
    rig.begin_recruit(3, last);
    while recruited(&mut rig) == 0 {
        let completion = rig.disk.complete_log_lane().expect("the recruitment is urgent");
        rig.event(Event::Disk(completion));
    }
    rig.crash();
    let came_back = rig.segments().contains(&File::Segment(SegmentId(1)));
    rig.settle();
    assert_eq!(rig.halts, []);
    rig.recruit(4, last);
    rig.serve(4, last);
    assert_eq!(versions(&rig.pulled(&[18], 0)), [0_u64; 0], "I9: version 20 is above its RV");
    came_back
}

#[test]
fn one_write_is_one_flush() {
    let mut rig = Rig::serving(10);
    rig.push(1, push(0, 10, &[(17, 2, 5)]));
    rig.push(1, push(10, 20, &[(17, 2, 5)]));
    assert_eq!(rig.disk.log_lane_len(), 1, "the second push gathers");
    // Not copied: the pieces are the push's own.
    let _: fn(DiskRequest) -> DiskOp = |request| request.op;
}
