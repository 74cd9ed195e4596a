//! Trims and descriptions.

use common::message::{Announce, Describe, Message, StreamState, Trim, Trimmed};
use common::{Code, Note, Offset, RequestId, StreamId, Version};

use crate::testing::rig::{JUMP, Rig, client, proxy, push, versions};

fn filled(seed: u64, count: u64, len: usize) -> Rig {
    let mut rig = Rig::serving(seed);
    for at in 1..=count {
        rig.push(1, push(10 * (at - 1), 10 * at, &[(17, 2, len)]));
        rig.settle();
    }
    rig.send(proxy(), 1, Announce { known_committed: Version(10 * count) });
    rig.sent.clear();
    rig
}

fn trim(rig: &mut Rig, stream: u64, through: u64) {
    let (stream, through) = (StreamId(stream), Version(through));
    rig.send(client(), 1, Trim { request: RequestId(3), stream, through });
}

fn trimmed(rig: &mut Rig) -> Vec<Trimmed> {
    rig.take_sent(|message| match message {
        Message::Trimmed(trimmed) => Some(trimmed),
        _ => None,
    })
}

fn described(rig: &mut Rig, stream: u64) -> StreamState {
    let describe = Describe { request: RequestId(4), streams: vec![StreamId(stream)] };
    rig.send(client(), 0, describe);
    match rig.sent.pop() {
        Some((_, _, Message::Described(described))) => described.streams[0],
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_trim_counts_once_it_is_persisted() {
    let mut rig = filled(1, 5, 10);
    trim(&mut rig, 17, 25);
    assert_eq!(trimmed(&mut rig), [], "I13");
    assert_eq!(described(&mut rig, 17).trimmed_through, Version(0));
    rig.settle();
    let request = RequestId(3);
    let answer = Trimmed { request, through: Version(25), first_offset: Offset(4) };
    assert_eq!(trimmed(&mut rig), [answer]);
    rig.pull(&[17], 20, 1000, 0);
    let refusal = rig.refusals().remove(0);
    assert_eq!(
        (refusal.code(), refusal.detail),
        (Code::Trimmed, "s17 is trimmed through v25".into())
    );
    assert_eq!(versions(&rig.pulled(&[17], 25)), [30, 40, 50]);
    // Less than before, more than is committed, a stream that nobody knows.
    for (stream, through, expected) in [(17, 5, 25), (17, 999, 50), (99, 30, 0)] {
        rig.sent.clear();
        trim(&mut rig, stream, through);
        rig.settle();
        assert_eq!(trimmed(&mut rig)[0].through, Version(expected));
    }
    // A catalog that has lost its beginning would leave every proxy of the next epoch without streams.
    for stream in [StreamId::IDS, StreamId::CATALOG] {
        trim(&mut rig, stream.0, 10);
        assert_eq!(rig.refusals()[0].code(), Code::SystemStream);
    }
    rig.crash();
    rig.settle();
    for (stream, told) in [(17, 50), (99, 0)] {
        assert_eq!(described(&mut rig, stream).trimmed_through, Version(told), "I13");
    }
}

#[test]
fn trims_that_come_together_share_a_write_and_survive() {
    let mut rig = filled(2, 5, 10);
    let before = rig.notes.len();
    for through in [10, 20, 15, 30] {
        trim(&mut rig, 17, through);
    }
    rig.settle();
    let answers: Vec<u64> = trimmed(&mut rig).iter().map(|answer| answer.through.0).collect();
    assert_eq!(answers.len(), 4);
    assert!(answers.iter().zip([10, 20, 15, 30]).all(|(got, asked)| *got >= asked));
    let notes = rig.notes[before..].iter().filter(|note| matches!(note, Note::Trimmed { .. }));
    assert!((1..=3).contains(&notes.count()));
    rig.crash();
    rig.settle();
    let state = described(&mut rig, 17);
    assert_eq!((state.trimmed_through, state.first_offset), (Version(30), Offset(6)));
}

#[test]
fn a_stream_whose_blocks_are_all_gone_continues_its_offsets() {
    let mut rig = filled(3, 40, 8000);
    let segments = rig.segments().len();
    trim(&mut rig, 17, 400);
    rig.settle();
    assert!(rig.segments().len() < segments, "segments were recycled");
    assert!(rig.notes.iter().any(|note| matches!(note, Note::Recycled { .. })));
    rig.crash();
    rig.settle();
    rig.recruit(2, 400);
    rig.serve(2, 400);
    let state = described(&mut rig, 17);
    assert_eq!((state.next_offset, state.last_version, state.bytes), (Offset(80), Version(400), 0));
    rig.push(2, push(400, 400 + JUMP, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.durables()[0].acks[0].base_offsets, [Offset(80)]);
}

#[test]
fn a_description_shows_only_what_is_committed() {
    let mut rig = filled(4, 3, 10);
    rig.push(1, push(30, 40, &[(17, 5, 10)]));
    rig.settle();
    let state = described(&mut rig, 17);
    assert_eq!((state.next_offset, state.last_version), (Offset(6), Version(30)));
    let bytes = state.bytes;
    rig.send(proxy(), 1, Announce { known_committed: Version(40) });
    let state = described(&mut rig, 17);
    assert_eq!((state.next_offset, state.last_version), (Offset(11), Version(40)));
    assert!(state.bytes > bytes);
    assert_eq!(described(&mut rig, 99).next_offset, Offset(0));
}
