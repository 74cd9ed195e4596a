//! Idempotency ids.

use bytes::{BufMut, Bytes, BytesMut};
use common::message::{Announce, FindId, FoundSection, IdFound, Message};
use common::record::{Record, Section};
use common::{Code, IdempotencyId, Offset, Position, RequestId, StreamId, Version};

use crate::testing::rig::{Rig, body, client, proxy, push, push_of};

/// Place in the batch, id, sections (stream, ordinal, count).
type Transaction<'a> = (u16, u8, &'a [(u64, u32, u32)]);

fn ids_block(transactions: &[Transaction<'_>]) -> (u64, u32, Bytes) {
    let mut block = BytesMut::new();
    for (index, id, parts) in transactions {
        let mut value = BytesMut::new();
        for (stream, ordinal, count) in *parts {
            value.put_u64_le(*stream);
            value.put_u32_le(*ordinal);
            value.put_u32_le(*count);
        }
        let mut record = BytesMut::new();
        Record::put(vec![*id; 16], value.freeze()).encode(&mut record);
        block.put_slice(&Section::header(*index, 1, record.len()));
        block.put_slice(&record);
    }
    (StreamId::IDS.0, transactions.len() as u32, block.freeze())
}

fn with_ids(seed: u64) -> Rig {
    let mut rig = Rig::serving(seed);
    rig.push(1, push(0, 10, &[(17, 5, 10)]));
    let ids = ids_block(&[(0, 1, &[(17, 0, 2)]), (3, 2, &[(17, 2, 1), (99, 0, 4)])]);
    rig.push(1, push_of(10, 20, vec![ids, (17, 3, body(1, 3, 10))]));
    rig.settle();
    rig
}

fn find(rig: &mut Rig, id: u8, at_least: u64) {
    let (id, at_least) = (IdempotencyId([id; 16]), Version(at_least));
    rig.sent.clear();
    rig.send(client(), 0, FindId { request: RequestId(5), id, at_least });
}

fn found(rig: &mut Rig) -> Vec<IdFound> {
    rig.take_sent(|message| match message {
        Message::IdFound(found) => Some(found),
        _ => None,
    })
}

fn forgotten_through(rig: &mut Rig) -> Version {
    find(rig, 9, 0);
    found(rig)[0].forgotten_through
}

#[test]
fn a_block_of_ids_that_makes_no_sense_proves_no_absence() {
    let mut rig = with_ids(6);
    rig.push(1, push_of(20, 30, vec![(StreamId::IDS.0, 1, body(1, 1, 10))]));
    rig.settle();
    assert_eq!(forgotten_through(&mut rig), Version(30));
    rig.crash();
    rig.settle();
    assert_eq!((forgotten_through(&mut rig), rig.server.status().ids), (Version(30), 2));
}

#[test]
fn an_id_is_found_once_it_is_committed() {
    let mut rig = with_ids(1);
    find(&mut rig, 2, 0);
    assert_eq!(found(&mut rig)[0].found, None, "what is not committed may still be replaced");
    find(&mut rig, 2, 20);
    assert_eq!(found(&mut rig), []);
    rig.send(proxy(), 1, Announce { known_committed: Version(20) });
    let answer = found(&mut rig).remove(0);
    assert_eq!(answer.through, Version(20));
    let transaction = answer.found.unwrap();
    assert_eq!(transaction.position, Position { version: Version(20), index: 3 });
    let sections = [
        FoundSection { stream: StreamId(17), base_offset: Some(Offset(7)) },
        FoundSection { stream: StreamId(99), base_offset: None },
    ];
    assert_eq!(transaction.sections, sections);
    find(&mut rig, 9, 20);
    assert_eq!(found(&mut rig)[0].found, None);
}

#[test]
fn a_question_does_not_wait_for_ever() {
    let mut rig = with_ids(2);
    rig.knobs.pull_wait_ms_max = 100;
    find(&mut rig, 2, 20);
    rig.pass_ms(100);
    assert_eq!(rig.refusals()[0].code(), Code::Recovering);
    assert_eq!(rig.server.status().waits, [] as [String; 0]);
}

#[test]
fn ids_are_read_back_when_the_log_is_opened() {
    for clean in [false, true] {
        let mut rig = with_ids(3);
        if clean {
            rig.run(|server, cx| server.shut_down(cx));
            rig.settle();
            assert_eq!(rig.halts.remove(0).reason, "stopped");
            rig.restart();
        } else {
            rig.crash();
        }
        rig.settle();
        assert_eq!(rig.server.status().ids, 2);
        rig.recruit(2, 20);
        rig.serve(2, 20);
        find(&mut rig, 1, 20);
        assert_eq!(found(&mut rig)[0].found.as_ref().unwrap().position.index, 0);
    }
}

#[test]
fn a_dropped_tail_takes_its_ids_along() {
    let mut rig = with_ids(4);
    rig.recruit(2, 10);
    rig.serve(2, 10);
    find(&mut rig, 1, 10);
    assert_eq!(found(&mut rig)[0].found, None);
    assert_eq!(rig.server.status().ids, 0);
}

#[test]
fn ids_leave_after_their_life_and_beyond_their_number() {
    let mut rig = with_ids(5);
    rig.knobs.ids_max = 2;
    rig.push(1, push_of(20, 30, vec![ids_block(&[(0, 7, &[])])]));
    rig.settle();
    assert_eq!(rig.server.status().ids, 1, "the oldest version went whole");
    assert_eq!(forgotten_through(&mut rig), Version(20));
    let life = rig.knobs.id_life_versions;
    rig.push(1, push(30, 2 * life, &[(17, 1, 5)]));
    rig.settle();
    rig.send(proxy(), 1, Announce { known_committed: Version(2 * life) });
    rig.settle();
    assert_eq!(rig.server.status().ids, 0);
    let blocks = rig.server.status().blocks;
    assert_eq!(blocks, 3, "the blocks of ids are trimmed, the others stay");
    assert_eq!(forgotten_through(&mut rig), Version(life));
    rig.crash();
    rig.settle();
    assert_eq!(forgotten_through(&mut rig), Version(life), "a new life knows what is trimmed");
}
