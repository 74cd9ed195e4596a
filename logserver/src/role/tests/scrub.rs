//! Reading the log through: all of it, in order, at its pace, and whatever is damaged.

use common::disk::{File, PAGE_BYTES};
use common::message::{Announce, Message};
use common::{Knobs, Mark, Note, SegmentId, Version};

use crate::testing::MemoryDisk;
use crate::testing::rig::{Rig, proxy, push};

fn rig(seed: u64, scrub_bytes_per_second: u64) -> Rig {
    let knobs = Knobs {
        scrub_bytes_per_second,
        scrub_rest_ms: 1000,
        read_bytes: 8192,
        tail_bytes_max: 1,
        ..Knobs::small()
    };
    let mut rig = Rig::with(seed, knobs, MemoryDisk::new(64 << 20));
    rig.replication = 2;
    rig.settle();
    rig.recruit(1, 0);
    rig.serve(1, 0);
    for at in 1..=40 {
        rig.push(1, push(10 * (at - 1), 10 * at, &[(17, 1, 3000), (18, 1, 20_000), (19, 1, 10)]));
        rig.settle();
    }
    rig.send(proxy(), 1, Announce { known_committed: Version(400) });
    rig
}

fn passes(rig: &Rig) -> Vec<(u64, u64)> {
    let pass = |note: &Note| match note {
        Note::Scrubbed { blocks, damaged } => Some((*blocks, *damaged)),
        _ => None,
    };
    rig.notes.iter().filter_map(pass).collect()
}

/// Lets so much time pass in small steps.
fn run_ms(rig: &mut Rig, ms: u64) {
    for _ in 0..ms {
        rig.pass_ms(1);
        rig.settle();
    }
}

#[test]
fn every_live_block_is_read_once_a_pass_at_the_pace_that_is_set() {
    // 40 versions of 23 KB: about a second's worth.
    let mut rig = rig(1, 1 << 20);
    assert!(rig.segments().len() > 3);
    run_ms(&mut rig, 1400);
    let pass = rig.server.status().scrub.pass.expect("it began after its rest");
    assert!(pass.blocks > 20 && pass.blocks < 80, "{pass:?}");
    run_ms(&mut rig, 1000);
    assert_eq!(passes(&rig), [(120, 0)]);
    let last = rig.server.status().scrub.last.expect("it has come to the end");
    let took = last.ended.unwrap().since(last.began).as_millis();
    assert!((700..1200).contains(&took), "{took} ms");
    run_ms(&mut rig, 2000);
    assert_eq!(passes(&rig).len(), 2, "and once more after the rest");
}

#[test]
fn damage_is_found_with_nobody_reading_and_asked_for() {
    let mut rig = rig(2, 8 << 20);
    let file = File::Segment(SegmentId(1));
    // The second block of the first frame, and a page of the third frame's.
    rig.disk.flip(file, PAGE_BYTES + 128 + 120 + 5000);
    rig.disk.spoil(file, 1 + 2 * 6 + 3);
    rig.notes.clear();
    run_ms(&mut rig, 1500);
    assert!(rig.marks.contains(&Mark::ScrubFound));
    assert_eq!(passes(&rig)[0], (120, 2));
    let found = rig.server.status().mends;
    assert_eq!(found.damaged, 2);
    assert!(found.blocks.iter().all(|(_, what)| what.contains("s18") && what.contains("scrub")));
    let asked = rig.take_sent(|message| match message {
        Message::FetchBlock(fetch) => Some(fetch.version),
        _ => None,
    });
    assert!(asked.contains(&Version(10)) && asked.contains(&Version(30)), "{asked:?}");
}

#[test]
fn it_can_be_switched_off() {
    let mut rig = rig(3, 0);
    run_ms(&mut rig, 3000);
    assert_eq!(passes(&rig), []);
    assert_eq!(rig.server.status().scrub, crate::ScrubStatus::default());
}
