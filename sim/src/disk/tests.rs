//! The simulated disk against the contract of the seam.

use common::SegmentId;
use common::disk::DiskOpId;

use super::*;

const FILE: File = File::Segment(SegmentId(1));

/// Runs a disk to its end, one request after the other, without a world.
struct Bench {
    disk: Disk,
    now: Moment,
    next_id: u64,
}

impl Bench {
    fn new(seed: u64) -> Self {
        let disk = Disk::new(DiskProfile::default(), Prng::new(seed));
        Self { disk, now: Moment::ZERO, next_id: 0 }
    }

    fn submit(&mut self, lane: Lane, op: DiskOp) -> Vec<(Moment, Ticket)> {
        self.next_id += 1;
        let mut started = Vec::new();
        let request = DiskRequest { id: DiskOpId(self.next_id), lane, op };
        self.disk.submit(self.now, request, &mut started);
        started
    }

    fn run(&mut self, op: DiskOp) -> Result<DiskOutput, DiskError> {
        let started = self.submit(Lane::Log, op);
        let [(at, ticket)] = started[..] else { panic!("an idle lane starts one: {started:?}") };
        self.now = at;
        self.disk.complete(at, ticket, &mut Vec::new()).expect("nothing crashed").result
    }

    fn write(&mut self, offset: u64, fill: u8, durable: bool) {
        let data = Bytes::from(vec![fill; PAGE_BYTES as usize]).into();
        self.run(DiskOp::Write { file: FILE, offset, data, durable }).unwrap();
    }

    fn page(&mut self, offset: u64) -> Bytes {
        match self.run(DiskOp::Read { file: FILE, offset, bytes: PAGE_BYTES }).unwrap() {
            DiskOutput::Data(data) => data,
            other => panic!("{other:?}"),
        }
    }

    fn is_all(&mut self, offset: u64, fill: u8) -> bool {
        self.page(offset).iter().all(|byte| *byte == fill)
    }
}

fn ready(seed: u64) -> Bench {
    let mut bench = Bench::new(seed);
    bench.run(DiskOp::Create { file: FILE, bytes: 4 * PAGE_BYTES }).unwrap();
    bench
}

#[test]
fn what_a_barrier_covered_survives_every_power_cut() {
    for seed in 0..200 {
        let mut bench = ready(seed);
        bench.write(0, 1, false);
        bench.write(PAGE_BYTES, 2, true);
        assert!(bench.disk.would_survive(FILE, 0, 2 * PAGE_BYTES));
        bench.write(2 * PAGE_BYTES, 3, false);
        assert!(!bench.disk.would_survive(FILE, 2 * PAGE_BYTES, 1));
        bench.disk.crash(Crash::PowerCut);
        assert!(bench.is_all(0, 1) && bench.is_all(PAGE_BYTES, 2), "seed {seed}");
    }
}

#[test]
fn an_unsynced_page_meets_every_fate() {
    let (mut old, mut new, mut torn) = (0, 0, 0);
    for seed in 0..400 {
        let mut bench = ready(seed);
        bench.write(0, 1, true);
        bench.write(0, 2, false);
        bench.disk.crash(Crash::PowerCut);
        match (bench.is_all(0, 1), bench.is_all(0, 2)) {
            (true, _) => old += 1,
            (_, true) => new += 1,
            _ => torn += 1,
        }
        assert!(bench.disk.would_survive(FILE, 0, PAGE_BYTES), "what a cut left stays");
    }
    assert!(old > 50 && new > 50 && torn > 50, "{old} {new} {torn}");
}

#[test]
fn what_is_written_again_as_it_was_survives_without_another_barrier() {
    for seed in 0..50 {
        let mut bench = ready(seed);
        bench.write(0, 1, true);
        bench.write(0, 1, false);
        assert!(bench.disk.would_survive(FILE, 0, PAGE_BYTES), "it holds what it held");
        bench.disk.crash(Crash::PowerCut);
        assert!(bench.is_all(0, 1), "seed {seed}");
        bench.write(0, 2, false);
        bench.write(0, 1, false);
        assert!(!bench.disk.would_survive(FILE, 0, PAGE_BYTES), "the other content may come last");
    }
}

#[test]
fn a_kill_keeps_the_cache_but_makes_nothing_durable() {
    let mut bench = ready(1);
    bench.write(0, 7, false);
    bench.disk.crash(Crash::Kill);
    assert!(bench.is_all(0, 7));
    assert!(!bench.disk.would_survive(FILE, 0, PAGE_BYTES));
}

#[test]
fn an_interrupted_write_arrives_in_parts_and_a_queued_one_not_at_all() {
    let mut torn = 0;
    for seed in 0..200 {
        let mut bench = ready(seed);
        for (offset, fill) in [(0, 1), (PAGE_BYTES, 2)] {
            let data = Bytes::from(vec![fill; PAGE_BYTES as usize]).into();
            let op = DiskOp::Write { file: FILE, offset, data, durable: true };
            let _ = bench.submit(Lane::Log, op);
        }
        bench.disk.crash(Crash::Kill);
        torn += u32::from(!bench.is_all(0, 0) && !bench.is_all(0, 1));
        assert!(bench.is_all(PAGE_BYTES, 0), "the second had not begun");
    }
    assert!(torn > 50, "{torn}");
}

#[test]
fn the_log_lane_is_first_in_first_out_beside_the_background() {
    let mut bench = ready(2);
    let create = |number| DiskOp::Create { file: File::Spare(number), bytes: 64 * PAGE_BYTES };
    let mut events = bench.submit(Lane::Background, create(1));
    for number in 2..6 {
        events.extend(bench.submit(Lane::Log, create(number)));
    }
    assert_eq!(events.len(), 2, "one a lane runs");
    let mut order = Vec::new();
    while let Some(next) = events.iter().copied().min_by_key(|(at, _)| *at) {
        events.retain(|event| *event != next);
        let done = bench.disk.complete(next.0, next.1, &mut events).unwrap();
        order.push(done.id.0);
    }
    let log: Vec<u64> = order.iter().copied().filter(|id| *id > 2).collect();
    assert_eq!(log, [3, 4, 5, 6]);
}

#[test]
fn a_barrier_covers_only_what_was_written_before_it_began() {
    let mut bench = ready(3);
    let data = |fill: u8| Bytes::from(vec![fill; PAGE_BYTES as usize]).into();
    let barrier = bench
        .submit(Lane::Log, DiskOp::Write { file: FILE, offset: 0, data: data(1), durable: true });
    let beside = bench.submit(
        Lane::Background,
        DiskOp::Write { file: FILE, offset: PAGE_BYTES, data: data(2), durable: false },
    );
    bench.disk.complete(bench.now, beside[0].1, &mut Vec::new()).unwrap().result.unwrap();
    bench.disk.complete(bench.now, barrier[0].1, &mut Vec::new()).unwrap().result.unwrap();
    assert!(bench.disk.would_survive(FILE, 0, PAGE_BYTES));
    assert!(!bench.disk.would_survive(FILE, PAGE_BYTES, PAGE_BYTES));
}

#[test]
fn a_failed_barrier_loses_its_pages_for_good_though_they_read_back() {
    let mut bench = ready(4);
    bench.disk.fail_next_barrier();
    let data = Bytes::from(vec![1; PAGE_BYTES as usize]).into();
    let op = DiskOp::Write { file: FILE, offset: 0, data, durable: true };
    assert!(matches!(bench.run(op), Err(DiskError::Io { .. })));
    bench.write(PAGE_BYTES, 2, true);
    assert!(bench.is_all(0, 1));
    assert!(!bench.disk.would_survive(FILE, 0, PAGE_BYTES));
    assert!(bench.disk.would_survive(FILE, PAGE_BYTES, PAGE_BYTES));
}

#[test]
fn names_are_durable_when_they_complete_and_either_or_before() {
    let (mut happened, mut not) = (0, 0);
    for seed in 0..50 {
        let mut bench = ready(seed);
        let to = File::Segment(SegmentId(2));
        let _ = bench.submit(Lane::Log, DiskOp::Rename { from: FILE, to });
        bench.disk.crash(Crash::PowerCut);
        match (bench.disk.platter.contains(FILE), bench.disk.platter.contains(to)) {
            (true, false) => not += 1,
            (false, true) => happened += 1,
            both => panic!("{both:?}"),
        }
    }
    assert!(happened > 5 && not > 5);
}

#[test]
fn a_full_disk_refuses_only_new_files() {
    let mut bench = ready(5);
    bench.disk.limit(6 * PAGE_BYTES);
    let create = |bytes| DiskOp::Create { file: File::Spare(1), bytes };
    assert_eq!(bench.run(create(3 * PAGE_BYTES)), Err(DiskError::Full));
    bench.write(0, 1, true);
    bench.run(create(2 * PAGE_BYTES)).unwrap();
    match bench.run(DiskOp::List).unwrap() {
        DiskOutput::Listing { files, free_bytes } => {
            assert_eq!(free_bytes, 0);
            assert_eq!(files, [(FILE, 4 * PAGE_BYTES), (File::Spare(1), 2 * PAGE_BYTES)]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_meta_file_grows_and_the_growth_is_torn_until_the_barrier() {
    let mut bench = Bench::new(6);
    let meta = File::Meta(0);
    bench.run(DiskOp::Create { file: meta, bytes: PAGE_BYTES }).unwrap();
    let grow = |durable| DiskOp::Write {
        file: meta,
        offset: 0,
        data: Bytes::from(vec![1; 2 * PAGE_BYTES as usize]).into(),
        durable,
    };
    bench.run(grow(false)).unwrap();
    assert!(!bench.disk.would_survive(meta, 0, 2 * PAGE_BYTES));
    bench.run(grow(true)).unwrap();
    assert!(bench.disk.would_survive(meta, 0, 2 * PAGE_BYTES));
}

/// The disk of a case: time goes to the next completion.
struct Waited {
    bench: Bench,
    started: Vec<(Moment, Ticket)>,
}

impl logserver::driver::testing::Disk for Waited {
    fn submit(&mut self, request: DiskRequest) {
        self.bench.disk.submit(self.bench.now, request, &mut self.started);
    }

    fn wait(&mut self) -> DiskCompletion {
        let next = self.started.iter().copied().min_by_key(|(at, _)| *at).expect("something runs");
        self.started.retain(|other| *other != next);
        self.bench.now = next.0;
        self.bench.disk.complete(next.0, next.1, &mut self.started).expect("nothing crashed")
    }
}

#[test]
fn the_contract_that_the_real_driver_keeps() {
    for seed in 0..4 {
        for case in logserver::driver::testing::cases() {
            let mut bench = Bench::new(seed);
            bench.disk.limit(logserver::driver::testing::QUOTA_BYTES);
            (case.run)(&mut Waited { bench, started: Vec::new() });
        }
    }
}

#[test]
fn what_breaks_the_contract_is_refused_and_remembered() {
    let mut bench = ready(1);
    let data = Bytes::from(vec![1; 2 * PAGE_BYTES as usize]);
    let unaligned = DiskOp::Read { file: FILE, offset: 512, bytes: PAGE_BYTES };
    let outside =
        DiskOp::Write { file: FILE, offset: 3 * PAGE_BYTES, data: data.into(), durable: true };
    for op in [unaligned, outside] {
        assert!(matches!(bench.run(op), Err(DiskError::Io { .. })));
        assert!(bench.disk.take_breach().is_some());
    }
    bench.write(0, 1, true);
    assert_eq!(bench.disk.take_breach(), None);
}

#[test]
fn harm_shows_in_reads_until_the_page_is_written_or_repaired() {
    let mut bench = ready(1);
    bench.write(0, 1, true);
    bench.write(PAGE_BYTES, 2, true);
    assert!(bench.disk.harm(FILE, 0, Harm::Flipped(8 * 100 + 3)));
    assert!(bench.disk.harm(FILE, 1, Harm::Unreadable));
    assert!(!bench.disk.harm(FILE, 4, Harm::Unreadable), "there is no such page");
    let page = bench.page(0);
    let odd: Vec<usize> = (0..PAGE_BYTES as usize).filter(|at| page[*at] != 1).collect();
    assert_eq!((odd, page[100]), (vec![100], 1 ^ 8));
    let read = DiskOp::Read { file: FILE, offset: 0, bytes: 2 * PAGE_BYTES };
    assert!(matches!(bench.run(read), Err(DiskError::Io { .. })));
    assert!(bench.disk.would_survive(FILE, 0, PAGE_BYTES), "the true content is there");
    bench.disk.crash(Crash::PowerCut);
    assert!(!bench.is_all(0, 1), "a power cut heals nothing");
    bench.write(PAGE_BYTES, 3, true);
    assert!(bench.is_all(PAGE_BYTES, 3));
    bench.disk.repair();
    assert!(bench.is_all(0, 1) && !bench.disk.is_harmed());
}

#[test]
fn a_footer_that_goes_astray_is_missing_here_and_wrong_there() {
    let mut bench = ready(1);
    let other = File::Segment(SegmentId(2));
    bench.run(DiskOp::Create { file: other, bytes: PAGE_BYTES }).unwrap();
    bench.write(0, 1, true);
    let mut bytes = vec![9; PAGE_BYTES as usize];
    bytes[..4].copy_from_slice(b"MRTR");
    let bytes = Bytes::from(bytes);
    let footer = || {
        let data = bytes.clone().into();
        DiskOp::Write { file: other, offset: 0, data, durable: true }
    };
    bench.disk.misdirect(FILE, 0);
    bench.run(footer()).unwrap();
    assert!(bench.is_all(0, 1), "the log lane's writes find their place");
    let started = bench.submit(Lane::Background, footer());
    bench.disk.complete(started[0].0, started[0].1, &mut Vec::new()).unwrap().result.unwrap();
    assert!(bench.page(0) == bytes && bench.disk.misdirected_count() == 1);
    let read = DiskOp::Read { file: other, offset: 0, bytes: PAGE_BYTES };
    assert_eq!(bench.run(read), Ok(DiskOutput::Data(bytes.clone())));
    bench.disk.repair();
    assert!(bench.is_all(0, 1));
}

/// A write beside the log lane of what was read before, or of what should be there.
fn write_again(bench: &mut Bench, offset: u64, data: Bytes, durable: bool) {
    let data = data.into();
    let op = DiskOp::Write { file: FILE, offset, data, durable };
    let started = bench.submit(Lane::Background, op);
    bench.now = started[0].0;
    let done = bench.disk.complete(started[0].0, started[0].1, &mut Vec::new());
    done.unwrap().result.unwrap();
}

#[test]
fn harm_comes_back_with_a_power_cut_unless_what_was_written_again_is_durable() {
    let whole = || Bytes::from(vec![1; PAGE_BYTES as usize]);
    let mut back = 0;
    for seed in 0..40 {
        let mut bench = ready(seed);
        bench.write(0, 1, true);
        bench.disk.harm(FILE, 0, Harm::Flipped(77));
        write_again(&mut bench, 0, whole(), false);
        assert!(bench.is_all(0, 1));
        bench.disk.crash(Crash::PowerCut);
        back += u32::from(bench.disk.is_harmed());
        write_again(&mut bench, 0, whole(), true);
        bench.disk.crash(Crash::PowerCut);
        assert!(bench.is_all(0, 1) && !bench.disk.is_harmed());
    }
    assert!((5..35).contains(&back), "{back} of 40");
}

#[test]
fn who_writes_what_was_read_brings_a_flipped_bit_along() {
    let mut bench = ready(1);
    bench.write(0, 1, true);
    bench.disk.harm(FILE, 0, Harm::Flipped(8 * 100 + 3));
    let rotten = bench.page(0);
    write_again(&mut bench, 0, rotten.clone(), true);
    assert!(bench.page(0) == rotten && bench.disk.is_harmed());
    bench.disk.repair();
    assert!(bench.is_all(0, 1), "nobody has forgotten what was there");
}

#[test]
fn who_makes_up_what_cant_be_read_leaves_a_scar_until_all_of_it_is_there_again() {
    let mut bench = ready(1);
    bench.write(0, 1, true);
    bench.disk.harm(FILE, 0, Harm::Unreadable);
    let mut half = vec![1; PAGE_BYTES as usize];
    half[..100].fill(0);
    write_again(&mut bench, 0, half.clone().into(), true);
    assert_eq!(bench.page(0), half);
    assert!(bench.disk.is_harmed() && bench.disk.is_scarred(FILE, 0));
    let mut copy = bench.disk.clone();
    copy.repair();
    assert_eq!(copy.peek(FILE, 0, PAGE_BYTES).unwrap()[0], 1);
    write_again(&mut bench, 0, vec![1; PAGE_BYTES as usize].into(), true);
    assert!(!bench.disk.is_harmed() && bench.is_all(0, 1));
}
