//! What the atlas never allows.

use bytes::Bytes;
use common::SegmentId;
use common::disk::{DiskOpId, Lane};

use super::*;
use crate::clock::Moment;
use crate::disk::{DiskProfile, Harm};
use crate::oracle::frame;

const NODES: [NodeId; 2] = [NodeId(1), NodeId(2)];
const FIRST: File = File::Segment(SegmentId(1));

struct Bench {
    atlas: Atlas,
    disks: BTreeMap<NodeId, Disk>,
    prng: Prng,
}

impl Bench {
    fn new(copies: u8) -> Self {
        let disk = |node: &NodeId| (*node, Disk::new(DiskProfile::default(), Prng::new(node.0)));
        let disks = NODES.iter().map(disk).collect();
        let mut bench = Self { atlas: Atlas::new(copies), disks, prng: Prng::new(7) };
        for node in NODES {
            bench.run(node, DiskOp::Create { file: FIRST, bytes: 64 * PAGE_BYTES });
        }
        bench
    }

    fn run(&mut self, node: NodeId, op: DiskOp) {
        let request = DiskRequest { id: DiskOpId(1), lane: Lane::Log, op };
        self.atlas.wrote(node, &request);
        let (disk, mut started) = (self.disks.get_mut(&node).unwrap(), Vec::new());
        disk.submit(Moment::ZERO, request, &mut started);
        disk.complete(Moment::ZERO, started[0].1, &mut Vec::new()).unwrap().result.unwrap();
    }

    /// A group of one frame of two pages, at its place.
    fn group(&mut self, node: NodeId, place: u64, version: u64, durable: bool) {
        let data = Bytes::from(frame(1, version, 8000)).into();
        let offset = (1 + 2 * place) * PAGE_BYTES;
        self.run(node, DiskOp::Write { file: FIRST, offset, data, durable });
    }

    fn victims(&mut self, node: NodeId) -> BTreeSet<u64> {
        let disk = &self.disks[&node];
        let drawn = (0..500).filter_map(|_| self.atlas.choose(node, disk, &mut self.prng));
        drawn.map(|victim| victim.page).collect()
    }
}

#[test]
fn the_last_durable_group_is_never_harmed() {
    let mut bench = Bench::new(1);
    bench.group(NODES[0], 0, 5, true);
    assert!(bench.victims(NODES[0]).is_empty(), "it may be a torn flush");
    bench.group(NODES[0], 1, 6, true);
    bench.group(NODES[0], 2, 7, false);
    assert_eq!(bench.victims(NODES[0]), BTreeSet::from([1, 2]));
}

#[test]
fn the_rest_of_a_torn_group_proves_nothing() {
    let mut bench = Bench::new(1);
    bench.group(NODES[0], 0, 5, true);
    let (first, second) = (frame(1, 6, 200), frame(1, 7, 200));
    let write = |data: Vec<u8>| {
        let data = Bytes::from(data).into();
        DiskOp::Write { file: FIRST, offset: 3 * PAGE_BYTES, data, durable: true }
    };
    let whole = [&first[..], &second[..]].concat();
    bench.run(NODES[0], write(whole));
    assert_eq!(bench.victims(NODES[0]), BTreeSet::from([1, 2]));
    let torn = [&vec![0; first.len()][..], &second[..]].concat();
    bench.run(NODES[0], write(torn));
    assert!(bench.victims(NODES[0]).is_empty(), "nobody finds the second frame");
}

#[test]
fn what_is_not_on_the_disk_proves_nothing() {
    let mut bench = Bench::new(1);
    bench.group(NODES[0], 0, 5, true);
    bench.group(NODES[0], 1, 6, true);
    assert_eq!(bench.victims(NODES[0]), BTreeSet::from([1, 2]));
    // The last group was cut, and a footer lies there now.
    let (offset, data) = (3 * PAGE_BYTES, Bytes::from(vec![7; PAGE_BYTES as usize]).into());
    bench.run(NODES[0], DiskOp::Write { file: FIRST, offset, data, durable: true });
    assert!(bench.victims(NODES[0]).is_empty(), "the first group is the last one now");
}

#[test]
fn of_each_window_one_copy_stays_whole() {
    let mut bench = Bench::new(2);
    for node in NODES {
        for (place, version) in
            [5, 6, 5 + 3 * WINDOW_VERSIONS, 6 + 3 * WINDOW_VERSIONS].iter().enumerate()
        {
            bench.group(node, place as u64, *version, true);
        }
    }
    let first = bench.victims(NODES[0]);
    assert_eq!(first, BTreeSet::from([1, 2, 3, 4, 5, 6]));
    assert!(bench.victims(NODES[1]).is_empty(), "the other copies are harmed");
}

#[test]
fn of_the_meta_slots_the_older_one_is_harmed() {
    let mut bench = Bench::new(1);
    let node = NODES[0];
    for (slot, generation) in [(0, 6_u64), (1, 7)] {
        let file = File::Meta(slot);
        bench.run(node, DiskOp::Create { file, bytes: PAGE_BYTES });
        let mut page = vec![0; PAGE_BYTES as usize];
        page[GENERATION_AT..][..8].copy_from_slice(&generation.to_le_bytes());
        let data = Bytes::from(page).into();
        bench.run(node, DiskOp::Write { file, offset: 0, data, durable: true });
    }
    let disk = &bench.disks[&node];
    let chosen = (0..200).filter_map(|_| bench.atlas.choose(node, disk, &mut bench.prng));
    let files: BTreeSet<File> = chosen.map(|victim| victim.file).collect();
    assert_eq!(files, BTreeSet::from([File::Meta(0)]));
}

#[test]
fn who_has_mended_all_of_a_window_leaves_it_to_others() {
    let mut bench = Bench::new(2);
    for node in NODES {
        for (place, version) in [5, 6, 7].iter().enumerate() {
            bench.group(node, place as u64, *version, true);
        }
    }
    let (one, other) = (NODES[0], NODES[1]);
    assert!(!bench.victims(one).is_empty());
    let harm = |bench: &mut Bench, page| {
        bench.disks.get_mut(&one).unwrap().harm(FIRST, page, Harm::Unreadable);
    };
    harm(&mut bench, 1);
    harm(&mut bench, 2);
    assert!(bench.victims(other).is_empty());
    // One of the two pages is written again; the other is still harmed.
    let heal = |bench: &mut Bench, page: u64| {
        let content = bench.disks[&one].peek(FIRST, page * PAGE_BYTES, PAGE_BYTES).unwrap();
        let (offset, data) = (page * PAGE_BYTES, content.into());
        bench.run(one, DiskOp::Write { file: FIRST, offset, data, durable: true });
        bench.atlas.mended(one, &bench.disks[&one]);
    };
    heal(&mut bench, 2);
    assert!(bench.victims(other).is_empty());
    heal(&mut bench, 1);
    assert!(!bench.victims(other).is_empty());
}
