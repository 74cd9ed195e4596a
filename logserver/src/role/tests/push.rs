//! Pushes, acknowledgements, known committed versions.

use common::message::{Announce, Confirm, Message};
use common::{Code, Mark, Note, Offset, Version};

use crate::testing::rig::{Rig, proxy, push, versions};

#[test]
fn a_push_is_durable_after_its_flush_and_visible_after_the_announcement() {
    let mut rig = Rig::serving(1);
    rig.push(1, push(0, 10, &[(17, 3, 100), (20, 1, 5)]));
    assert_eq!(rig.durables(), [], "I7: nothing before the flush");
    rig.settle();
    let durable = rig.durables().remove(0);
    assert_eq!(durable.durable, Version(10));
    assert_eq!(durable.acks[0].base_offsets, [Offset(0), Offset(0)]);

    let before = rig.pulled(&[17, 20], 0);
    assert_eq!((versions(&before), before.through), (vec![], Version(0)));
    rig.send(proxy(), 1, Announce { known_committed: Version(10) });
    let after = rig.pulled(&[17, 20], 0);
    assert_eq!((versions(&after), after.through), (vec![10], Version(10)));
    assert_eq!(after.payload, push(0, 10, &[(17, 3, 100), (20, 1, 5)]).payload);
}

#[test]
fn pushes_are_taken_in_chain_order_and_share_a_flush() {
    let mut rig = Rig::serving(2);
    rig.push(1, push(20, 30, &[(17, 1, 5)]));
    rig.push(1, push(10, 20, &[(17, 2, 5)]));
    rig.push(1, push(0, 10, &[(17, 4, 5)]));
    rig.push(1, push(30, 40, &[]));
    rig.settle();
    let durables = rig.durables();
    let acks: Vec<_> = durables.iter().flat_map(|d| d.acks.clone()).collect();
    let bases: Vec<_> = acks.iter().flat_map(|ack| ack.base_offsets.clone()).collect();
    assert_eq!(bases, [Offset(0), Offset(4), Offset(6)]);
    assert_eq!(acks.len(), 4, "a push without blocks is acknowledged, too");
    assert!(durables.len() < 4 && rig.marks.contains(&Mark::GroupFlush));
    assert!(rig.marks.contains(&Mark::PushEarly));
}

#[test]
fn a_repeated_push_is_acknowledged_again_until_it_is_answered_for() {
    let mut rig = Rig::serving(3);
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.durables().len(), 1, "what is not durable yet is acknowledged by its flush");
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    assert_eq!(rig.durables()[0].acks[0].version, Version(10));
    let mut next = push(10, 20, &[]);
    next.answered = Version(10);
    rig.push(1, next);
    rig.settle();
    rig.durables();
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    assert_eq!(rig.durables(), [], "I15: the proxy has that one");
    let accepted = rig.notes.iter().filter(|note| matches!(note, Note::Accepted { .. }));
    assert_eq!(accepted.count(), 2);
}

#[test]
fn pushes_wait_while_too_much_is_unflushed() {
    let mut rig = Rig::serving(4);
    rig.knobs.unflushed_bytes_max = 5500;
    let mut previous = 0;
    for version in (10..100).step_by(10) {
        rig.push(1, push(previous, version, &[(17, 1, 600)]));
        previous = version;
    }
    assert_eq!(rig.server.status().last, Version(20));
    rig.settle();
    assert_eq!(rig.server.status().durable, Version(90));
}

#[test]
fn damaged_pushes_are_refused_and_change_nothing() {
    let mut rig = Rig::serving(5);
    let mut wrong = push(0, 10, &[(17, 1, 5)]);
    wrong.blocks[0].checksum ^= 1;
    let mut short = push(0, 10, &[(17, 1, 5)]);
    short.blocks[0].bytes += 1;
    let mut unsorted = push(0, 10, &[(18, 1, 5), (17, 1, 5)]);
    unsorted.blocks[0].record_count = 1;
    for (push, code) in
        [(wrong, Code::Corrupt), (short, Code::Malformed), (unsorted, Code::Malformed)]
    {
        rig.push(1, push);
        assert_eq!(rig.refusals()[0].code(), code);
    }
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.durables()[0].durable, Version(10));
}

#[test]
fn a_confirmation_tells_the_durable_version() {
    let mut rig = Rig::serving(6);
    rig.push(1, push(0, 10, &[]));
    rig.settle();
    rig.send(proxy(), 1, Confirm { number: 4 });
    let confirmed = rig.take_sent(|message| match message {
        Message::Confirmed(confirmed) => Some((confirmed.number, confirmed.durable)),
        _ => None,
    });
    assert_eq!(confirmed, [(4, Version(10))]);
    rig.send(proxy(), 2, Confirm { number: 5 });
    assert_eq!(rig.refusals()[0].code(), Code::WrongEpoch);
}

#[test]
fn an_error_of_the_barrier_ends_it_without_another_word() {
    let mut rig = Rig::serving(7);
    rig.disk.fail_write_in(0);
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.halts[0].reason, "fsync_failed");
    rig.push(1, push(10, 20, &[]));
    rig.settle();
    assert_eq!(rig.durables(), []);
}
