//! A full disk, and files on their way through their lives.

use common::message::{Announce, LogState, Trim};
use common::{Knobs, Mark, RequestId, StreamId, Version};

use crate::testing::MemoryDisk;
use crate::testing::rig::{Rig, client, proxy, push};

/// Room for `segments` files of a segment's length, and the meta files.
fn rig(segments: u64) -> Rig {
    let knobs = Knobs { spare_segments: 1, ..Knobs::small() };
    let disk = MemoryDisk::new(segments * knobs.segment_bytes + (64 << 10));
    let mut rig = Rig::with(1, knobs, disk);
    rig.settle();
    rig.recruit(1, 0);
    rig.serve(1, 0);
    rig.sent.clear();
    rig
}

#[test]
fn a_full_disk_is_announced_and_opens_again_after_trims() {
    let mut rig = rig(4);
    let (mut version, mut full_at) = (0, None);
    while version < 2000 {
        rig.push(1, push(version, version + 10, &[(17, 1, 20_000)]));
        version += 10;
        rig.settle();
        if full_at.is_none() && rig.durables().iter().any(|d| d.state == LogState::Full) {
            full_at = Some(version);
        }
        if rig.server.status().durable.0 < version {
            break;
        }
    }
    let full_at = full_at.expect("the disk is small");
    let durable = rig.server.status().durable.0;
    assert!(full_at + 20 < durable, "full at {full_at}, and room for more up to {durable}");
    assert_eq!(rig.halts, []);
    assert!(rig.marks.contains(&Mark::DiskFull) && rig.marks.contains(&Mark::SegmentLate));
    assert!(rig.server.status().waits.iter().any(|wait| wait.contains("segment")));

    rig.send(proxy(), 1, Announce { known_committed: Version(durable) });
    let trim = Trim { request: RequestId(1), stream: StreamId(17), through: Version(durable) };
    rig.send(client(), 1, trim);
    rig.settle();
    let durables = rig.durables();
    assert!(durables.iter().any(|durable| durable.state == LogState::Open));
    assert_eq!(rig.server.status().durable.0, version, "what waited went on by itself");
    assert!(rig.marks.contains(&Mark::DiskFreed) && rig.marks.contains(&Mark::SegmentRecycled));
}

#[test]
fn a_full_disk_opens_again_by_itself_when_there_is_room() {
    let mut rig = rig(1);
    rig.push(1, push(0, 10, &[]));
    rig.settle();
    assert_eq!(rig.server.status().state, LogState::Full);
    rig.disk.set_capacity(64 << 20);
    rig.pass_ms(1000);
    rig.settle();
    assert_eq!(rig.server.status().state, LogState::Open);
}

#[test]
fn frames_fill_segments_that_are_prepared_sealed_and_recycled() {
    let mut rig = rig(64);
    for at in 0..200 {
        rig.push(1, push(10 * at, 10 * (at + 1), &[(17, 1, 20_000)]));
        rig.settle();
        if at % 10 == 9 {
            let through = Version(10 * at);
            rig.send(proxy(), 1, Announce { known_committed: through });
            rig.send(client(), 1, Trim { request: RequestId(1), stream: StreamId(17), through });
            rig.settle();
        }
    }
    assert!(rig.marks.contains(&Mark::SegmentRolled));
    assert!(!rig.marks.contains(&Mark::SegmentLate), "the next segment was always ready");
    assert!(rig.disk.files().count() < 10, "{:?}", rig.disk.files().collect::<Vec<_>>());
}

#[test]
fn the_largest_batch_fits_a_segment() {
    let mut rig = rig(64);
    let largest = rig.knobs.transaction_bytes_max + rig.knobs.batch_bytes_max;
    for at in 0..5 {
        rig.push(1, push(10 * at, 10 * (at + 1), &[(17, 1, largest as usize)]));
        rig.settle();
    }
    assert_eq!(rig.server.status().durable, Version(50));
}

#[test]
fn spares_of_another_length_are_replaced() {
    let mut rig = rig(64);
    rig.push(1, push(0, 10, &[(17, 1, 10)]));
    rig.settle();
    rig.knobs.segment_bytes *= 2;
    rig.crash();
    rig.settle();
    rig.recruit(2, 10);
    rig.push(2, push(10, 20, &[(17, 1, 400_000)]));
    rig.settle();
    assert_eq!(rig.server.status().durable, Version(20));
    assert_eq!(rig.halts, []);
}
