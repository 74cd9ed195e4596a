//! Damaged blocks: asked of another holder, compared, written where they lie, and nothing else touched.

use bytes::Bytes;
use common::disk::{File, PAGE_BYTES};
use common::message::{Announce, FetchBlock, FetchedBlock, Message, PulledBlock};
use common::{
    Code, Endpoint, Epoch, Knobs, Mark, Note, Offset, Payload, RequestId, Role, SegmentId,
    StreamId, Version,
};

use crate::testing::MemoryDisk;
use crate::testing::rig::{Rig, body, endpoint, proxy, push, versions};

const SEGMENT: File = File::Segment(SegmentId(1));

fn other() -> Endpoint {
    endpoint(2, Role::LogServer)
}

/// Serves, with a second holder of every stream; what is pushed leaves the tail at once.
fn serving(seed: u64) -> Rig {
    let knobs = Knobs { tail_bytes_max: 1, scrub_bytes_per_second: 0, ..Knobs::small() };
    let mut rig = Rig::with(seed, knobs, MemoryDisk::new(64 << 20));
    rig.replication = 2;
    rig.settle();
    rig.recruit(1, 0);
    rig.serve(1, 0);
    rig
}

/// With `count` versions: 10 of s17 and s18 in one frame, whose header begins the second page, 20, and so on.
fn filled(seed: u64, count: u64, len: usize) -> Rig {
    let mut rig = serving(seed);
    for at in 1..=count {
        rig.push(1, push(10 * (at - 1), 10 * at, &[(17, 2, len), (18, 1, len)]));
        rig.settle();
    }
    rig.send(proxy(), 1, Announce { known_committed: Version(10 * count) });
    rig.sent.clear();
    rig.notes.clear();
    rig
}

/// Where the body of s17 in version 10 begins.
const FIRST_BODY: u64 = PAGE_BYTES + 128 + 2 * 40;

fn asked(rig: &mut Rig) -> Vec<(Endpoint, FetchBlock)> {
    let sent = core::mem::take(&mut rig.sent);
    let (fetches, rest): (Vec<_>, Vec<_>) =
        sent.into_iter().partition(|(_, _, message)| matches!(message, Message::FetchBlock(_)));
    rig.sent = rest;
    let fetches = fetches.into_iter().map(|(to, _, message)| match message {
        Message::FetchBlock(fetch) => (to, fetch),
        _ => unreachable!("they were picked"),
    });
    fetches.collect()
}

/// What the other holder has of s17 in the version.
fn fetched(fetch: &FetchBlock, base: u64, bytes: &Bytes) -> FetchedBlock {
    FetchedBlock {
        number: fetch.number,
        version: fetch.version,
        block: Some(PulledBlock {
            stream: fetch.stream,
            base_offset: Offset(base),
            record_count: 2,
            bytes: bytes.len() as u32,
            checksum: crc32c::crc32c(bytes),
        }),
        payload: Payload::from(bytes.clone()),
    }
}

fn pulls_17(rig: &mut Rig) {
    rig.pull(&[17], 0, 1, 0);
    rig.settle();
}

fn is_mended(rig: &Rig) -> bool {
    let mended = |note: &Note| matches!(note, Note::Mended { version: Version(10), .. });
    rig.notes.iter().any(mended)
}

fn whole_file(rig: &Rig) -> Bytes {
    rig.disk.peek(SEGMENT, 0, rig.knobs.segment_bytes)
}

#[test]
fn a_pull_waits_until_its_block_is_mended_and_every_byte_is_as_before() {
    for len in [50, 20_000] {
        let mut rig = filled(1, 3, len);
        let before = whole_file(&rig);
        rig.disk.flip(SEGMENT, FIRST_BODY + 20);
        pulls_17(&mut rig);
        let (to, fetch) = asked(&mut rig).remove(0);
        assert_eq!((to, fetch.stream, fetch.version), (other(), StreamId(17), Version(10)));
        assert_eq!(rig.server.status().mends.pulls_waiting, 1, "it waits");
        rig.send(other(), 1, fetched(&fetch, 0, &body(10, 2, len)));
        rig.settle();
        assert!(is_mended(&rig) && rig.marks.contains(&Mark::MendAwaited));
        let Some((_, _, Message::Pulled(pulled))) = rig.sent.pop() else { panic!("it was served") };
        assert_eq!(versions(&pulled), [10]);
        assert_eq!(pulled.payload.contiguous(), body(10, 2, len));
        assert_eq!(whole_file(&rig), before, "and durable: nothing else was touched");
        assert!(!rig.disk.is_unsynced(SEGMENT));
        let status = rig.server.status().mends;
        assert_eq!((status.damaged, status.mended, status.pulls_waiting), (0, 1, 0));
    }
}

#[test]
fn another_block_is_not_taken() {
    let mut rig = filled(2, 3, 50);
    rig.disk.flip(SEGMENT, FIRST_BODY + 20);
    let rotten = whole_file(&rig);
    let good = body(10, 2, 50);
    let wrong: [fn(&mut FetchedBlock); 5] = [
        |answer| answer.block.as_mut().unwrap().base_offset = Offset(1),
        |answer| answer.block.as_mut().unwrap().record_count = 1,
        |answer| answer.block.as_mut().unwrap().stream = StreamId(18),
        |answer| answer.payload = Payload::from(body(11, 2, 50)),
        |answer| answer.version = Version(20),
    ];
    pulls_17(&mut rig);
    for spoil in wrong {
        let (_, fetch) = asked(&mut rig).remove(0);
        let mut answer = fetched(&fetch, 0, &good);
        spoil(&mut answer);
        rig.notes.clear();
        rig.send(other(), 1, answer);
        rig.settle();
        let refused = |note: &Note| matches!(note, Note::Warning { code: "mend_refused", .. });
        assert!(rig.notes.iter().any(refused), "{:?}", rig.notes);
        rig.pass_ms(rig.knobs.mend_retry_ms);
        rig.settle();
    }
    assert_eq!(whole_file(&rig), rotten);
    // From somebody who was not asked, and of an old question: not even looked at.
    let (_, fetch) = asked(&mut rig).remove(0);
    rig.send(endpoint(3, Role::LogServer), 1, fetched(&fetch, 0, &good));
    let old = FetchBlock { number: fetch.number - 1, ..fetch };
    rig.send(other(), 1, fetched(&old, 0, &good));
    rig.settle();
    assert!(!is_mended(&rig));
    rig.send(other(), 1, fetched(&fetch, 0, &good));
    rig.settle();
    assert!(is_mended(&rig));
}

#[test]
fn a_pull_is_refused_when_nobody_answers_in_time_and_the_mend_goes_on() {
    let mut rig = filled(3, 3, 50);
    rig.disk.flip(SEGMENT, FIRST_BODY + 20);
    pulls_17(&mut rig);
    assert_eq!(asked(&mut rig).len(), 1);
    rig.pass_ms(rig.knobs.mend_wait_ms);
    rig.settle();
    assert_eq!(rig.refusals().remove(0).code(), Code::Corrupt);
    assert_eq!(rig.server.status().mends.damaged, 1);
    rig.pass_ms(rig.knobs.retransmit_ms + rig.knobs.mend_retry_ms);
    rig.pass_ms(rig.knobs.mend_retry_ms);
    rig.settle();
    let (_, fetch) = asked(&mut rig).pop().expect("it is asked again");
    rig.send(other(), 1, fetched(&fetch, 0, &body(10, 2, 50)));
    rig.settle();
    assert!(is_mended(&rig));
}

#[test]
fn alone_a_pull_is_refused_at_once() {
    let mut rig = filled(4, 3, 50);
    rig.other = None;
    rig.replication = 1;
    rig.recruit(2, 30);
    rig.serve(2, 30);
    rig.sent.clear();
    rig.disk.flip(SEGMENT, FIRST_BODY + 20);
    pulls_17(&mut rig);
    assert_eq!(rig.refusals().remove(0).code(), Code::Corrupt);
    let status = rig.server.status().mends;
    assert!(status.damaged == 1 && status.blocks[0].1.contains("somebody"), "{status:?}");
}

#[test]
fn a_block_that_is_still_in_memory_needs_nobody() {
    let mut rig = filled(5, 3, 50);
    rig.knobs.tail_bytes_max = 1 << 20;
    rig.knobs.scrub_bytes_per_second = 1 << 20;
    rig.push(1, push(30, 40, &[(17, 2, 50)]));
    rig.settle();
    rig.send(proxy(), 1, Announce { known_committed: Version(40) });
    // Frames of 10, 20 and 30 take a page each.
    rig.disk.flip(SEGMENT, 4 * PAGE_BYTES + 128 + 40 + 20);
    rig.run(|server, cx| server.handle_scrub_timer(cx));
    rig.settle();
    assert!(asked(&mut rig).is_empty() && rig.marks.contains(&Mark::MendedFromTail));
    assert_eq!(rig.server.status().mends.mended, 1);
}

#[test]
fn a_page_that_cant_be_read_is_written_once_its_segment_has_a_footer() {
    let mut rig = filled(6, 3, 50);
    rig.disk.spoil(SEGMENT, 1);
    rig.pull(&[17, 18], 0, 1, 0);
    rig.settle();
    assert!(asked(&mut rig).is_empty() && rig.marks.contains(&Mark::MendRolled));
    // The next flush goes to the next segment, and the first one is sealed.
    rig.push(1, push(30, 40, &[(17, 1, 50)]));
    rig.settle();
    assert_eq!(rig.server.status().segments, 2);
    rig.pass_ms(rig.knobs.mend_retry_ms);
    rig.settle();
    // One after the other: they share the page.
    for count in [2, 1] {
        let fetches = asked(&mut rig);
        assert_eq!(fetches.len(), 1, "{fetches:?}");
        let mut answer = fetched(&fetches[0].1, 0, &body(10, count, 50));
        answer.block.as_mut().unwrap().record_count = count;
        rig.send(other(), 1, answer);
        rig.settle();
    }
    assert_eq!(rig.server.status().mends.damaged, 0);
    // The head of the frame is lost, and nobody needs it.
    rig.crash();
    rig.settle();
    assert_eq!(rig.halts, []);
    rig.recruit(2, 40);
    rig.serve(2, 40);
    assert_eq!(versions(&rig.pulled(&[17, 18], 0)), [10, 20, 30, 40]);
}

#[test]
fn a_crash_at_any_moment_of_a_mend_loses_nothing_else() {
    let mut ends = [0; 2];
    for seed in 0..200 {
        let mut rig = filled(seed, 3, 900);
        rig.disk.flip(SEGMENT, FIRST_BODY + 1000);
        pulls_17(&mut rig);
        let (_, fetch) = asked(&mut rig).remove(0);
        rig.send(other(), 1, fetched(&fetch, 0, &body(10, 2, 900)));
        for _ in 0..seed % 7 {
            rig.disk_step();
        }
        if seed % 2 == 0 {
            rig.crash()
        } else {
            rig.kill()
        }
        rig.settle();
        // A frame of the last segment is read when it has no footer, and this one had been durable.
        if let Some(halt) = rig.halts.first() {
            assert!(halt.reason == "corrupt_log" && halt.detail.contains("q1 "), "{halt:?}");
            ends[0] += 1;
            continue;
        }
        assert_eq!(rig.server.status().durable, Version(30));
        rig.recruit(2, 30);
        rig.serve(2, 30);
        assert_eq!(versions(&rig.pulled(&[17, 18], 0)), [10, 20, 30]);
        ends[1] += 1;
    }
    assert!(ends[0] > 20 && ends[1] > 20, "{ends:?}");
}

#[test]
fn a_trimmed_block_is_not_mended() {
    let mut rig = filled(7, 3, 50);
    rig.disk.flip(SEGMENT, FIRST_BODY + 20);
    pulls_17(&mut rig);
    rig.pass_ms(rig.knobs.retransmit_ms);
    rig.settle();
    let trim =
        common::message::Trim { request: RequestId(5), stream: StreamId(17), through: Version(10) };
    rig.send(endpoint(50, Role::Client), 1, trim);
    rig.settle();
    rig.sent.clear();
    rig.pass_ms(rig.knobs.mend_retry_ms);
    rig.settle();
    assert!(asked(&mut rig).is_empty());
    assert_eq!(rig.server.status().mends.damaged, 0);
}

#[test]
fn only_what_is_committed_and_whole_is_given_to_others() {
    let mut rig = filled(8, 3, 50);
    rig.push(1, push(30, 40, &[(17, 2, 50)]));
    rig.settle();
    rig.disk.flip(SEGMENT, FIRST_BODY + 20);
    rig.sent.clear();
    let ask = |rig: &mut Rig, from: Endpoint, version: u64| {
        let stream = StreamId(17);
        rig.send(from, 1, FetchBlock { number: 9, stream, version: Version(version) });
        rig.settle();
        rig.take_sent(|message| match message {
            Message::FetchedBlock(fetched) => Some(*fetched),
            _ => None,
        })
    };
    let twenty = ask(&mut rig, other(), 20).remove(0);
    let found = twenty.block.expect("it is there");
    assert_eq!((twenty.number, twenty.version, found.base_offset), (9, Version(20), Offset(2)));
    assert_eq!(twenty.payload.contiguous(), body(20, 2, 50));
    assert_eq!(ask(&mut rig, other(), 40)[0].block, None, "I11");
    assert_eq!(ask(&mut rig, other(), 15)[0].block, None, "never heard of");
    assert_eq!(ask(&mut rig, endpoint(50, Role::Client), 20), []);
    assert_eq!(ask(&mut rig, other(), 10)[0].block, None, "it is rotten here, too");
    assert_eq!(rig.server.status().mends.damaged, 1);
    assert_eq!(rig.server.status().epoch, Epoch(1));
}
