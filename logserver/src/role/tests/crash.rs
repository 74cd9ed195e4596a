//! Crashes at every disk operation and at random, against a model of what must survive.

use std::collections::BTreeMap;

use bytes::Bytes;
use common::disk::{File, PAGE_BYTES};
use common::message::{Announce, Message, Trim};
use common::{Mark, Note, Offset, Prng, RequestId, SegmentId, StreamId, Version};

use crate::Standing;
use crate::format::segment::SegmentHeader;
use crate::testing::rig::{JUMP, Rig, body, client, proxy, push, push_of};

const STREAMS: [u64; 3] = [17, 18, 40];

/// What was pushed and what was promised.
#[derive(Default)]
struct Model {
    epoch: u64,
    last: u64,
    /// By version: stream, record count, body.
    pushed: BTreeMap<u64, Vec<(u64, u32, Bytes)>>,
    announced: u64,
    committed: u64,
    /// Acknowledged trims.
    trims: BTreeMap<u64, u64>,
    /// Trims that were asked for.
    asked: BTreeMap<u64, u64>,
    request: u64,
}

struct Run {
    rig: Rig,
    model: Model,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut run = Self { rig: Rig::new(seed), model: Model::default() };
        run.rig.knobs.read_bytes = 16 << 10;
        run.rig.knobs.scan_reads_max = 1 + seed % 4;
        run.rig.knobs.spare_segments = 1 + seed % 2;
        run
    }

    /// Opens, checks what survived, and goes on in a new epoch.
    fn reopen(&mut self, choose: &mut Prng) {
        self.rig.settle();
        assert_eq!(self.rig.halts, [], "the log opens after a crash");
        let found = self.rig.server.status();
        let durable = found.durable.0;
        let model = &mut self.model;
        assert!(
            (model.announced..=model.last).contains(&durable),
            "I7: {} was announced of {}, {durable} is there",
            model.announced,
            model.last
        );
        assert!(found.known_committed.0 <= model.committed);
        let recovery_version = choose.between(model.committed, durable);
        self.begin_epoch(recovery_version);
        self.compare();
    }

    fn begin_epoch(&mut self, recovery_version: u64) {
        let model = &mut self.model;
        model.epoch += 1;
        model.pushed.retain(|version, _| *version <= recovery_version);
        (model.last, model.announced) = (recovery_version, recovery_version);
        model.committed = recovery_version;
        let epoch = model.epoch;
        self.rig.recruit(epoch, recovery_version);
        self.rig.serve(epoch, recovery_version);
        assert_eq!(self.rig.halts, []);
        assert_eq!(self.rig.server.status().served.0, recovery_version);
        self.rig.sent.clear();
    }

    /// Everything up to the served limit, byte by byte, and offsets dense from 0 (I12).
    fn compare(&mut self) {
        let limit = self.rig.server.status().served.0;
        for stream in STREAMS {
            let trimmed = self.model.trims.get(&stream).copied().unwrap_or(0);
            let asked = self.model.asked.get(&stream).copied().unwrap_or(0);
            let start = self.trim_found(stream).clamp(trimmed, asked.max(trimmed));
            let mut offset: u64 = 0;
            let mut expected = Vec::new();
            for (version, blocks) in self.model.pushed.range(..=limit) {
                for (of, count, body) in blocks.iter().filter(|block| block.0 == stream) {
                    if *version > start {
                        expected.push((*version, *of, offset, body.clone()));
                    }
                    offset += u64::from(*count);
                }
            }
            let found = self.pull_all(stream, start, limit);
            assert_eq!(found, expected, "{stream} above {start} up to {limit}");
        }
    }

    fn trim_found(&mut self, stream: u64) -> u64 {
        let streams = vec![StreamId(stream)];
        self.rig.sent.clear();
        let describe = common::message::Describe { request: RequestId(1), streams };
        self.rig.send(client(), 0, describe);
        match self.rig.sent.pop() {
            Some((_, _, Message::Described(described))) => described.streams[0].trimmed_through.0,
            other => panic!("{other:?}"),
        }
    }

    fn pull_all(&mut self, stream: u64, after: u64, limit: u64) -> Vec<(u64, u64, u64, Bytes)> {
        let (mut after, mut found) = (after, Vec::new());
        while after < limit {
            let pulled = self.rig.pulled(&[stream], after);
            assert!(pulled.through.0 > after, "a pull makes progress");
            let mut at = 0;
            for (version, block) in pulled.versions.iter().zip(&pulled.blocks) {
                let bytes = pulled.payload.slice(at, block.bytes as usize).unwrap();
                at += block.bytes as usize;
                found.push((version.version.0, block.stream.0, block.base_offset.0, bytes));
            }
            after = pulled.through.0;
        }
        found
    }

    /// One step of a random workload.
    fn act(&mut self, choose: &mut Prng) {
        match choose.below(10) {
            0..=3 => self.push(choose),
            4 => self.commit(choose),
            5 => self.trim(choose),
            _ => {
                self.rig.disk_step();
                self.hear();
            }
        }
    }

    fn push(&mut self, choose: &mut Prng) {
        let model = &mut self.model;
        let previous = model.last;
        let is_first = model.pushed.last_key_value().is_none_or(|(last, _)| *last < previous)
            || model.pushed.is_empty();
        let jump = if is_first { JUMP } else { 0 };
        let version = previous + jump + choose.between(1, 1000);
        let mut blocks = Vec::new();
        for stream in STREAMS {
            if choose.chance(1, 2) {
                let (count, len) = (choose.between(1, 3) as u32, choose.between(0, 9000));
                blocks.push((stream, count, body(version as u8, count, len as usize)));
            }
        }
        model.pushed.insert(version, blocks.clone());
        model.last = version;
        let mut push = push_of(previous, version, blocks);
        push.known_committed = Version(model.committed);
        self.rig.push(self.model.epoch, push);
        self.hear();
    }

    fn commit(&mut self, choose: &mut Prng) {
        let model = &mut self.model;
        model.committed = choose.between(model.committed, model.announced);
        let known_committed = Version(model.committed);
        self.rig.send(proxy(), model.epoch, Announce { known_committed });
    }

    fn trim(&mut self, choose: &mut Prng) {
        let stream = *choose.pick(&STREAMS);
        let through = choose.between(0, self.rig.server.status().served.0);
        let asked = self.model.asked.entry(stream).or_default();
        *asked = through.max(*asked);
        self.model.request += 1;
        let request = RequestId(self.model.request * 100 + stream);
        let (stream, through) = (StreamId(stream), Version(through));
        self.rig.send(client(), self.model.epoch, Trim { request, stream, through });
        self.hear();
    }

    fn hear(&mut self) {
        for (_, _, message) in core::mem::take(&mut self.rig.sent) {
            match message {
                Message::Durable(durable) => {
                    assert!(durable.durable.0 >= self.model.announced);
                    self.model.announced = durable.durable.0;
                }
                Message::Trimmed(trimmed) => {
                    let stream = trimmed.request.0 % 100;
                    let trim = self.model.trims.entry(stream).or_default();
                    *trim = trimmed.through.0.max(*trim);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(self.rig.halts, []);
    }

    fn crash(&mut self) {
        self.rig.crash();
    }
}

#[test]
fn what_was_announced_survives_a_crash_at_every_disk_operation() {
    let mut crashes = 0;
    for at in 0.. {
        let mut run = Run::new(at);
        let mut choose = Prng::new(77);
        run.rig.settle();
        run.begin_epoch(0);
        let mut done = false;
        let mut left = at;
        for step in 0..150 {
            run.push(&mut choose);
            if step % 3 == 0 {
                run.commit(&mut choose);
            }
            if step % 8 == 7 {
                run.trim(&mut choose);
            }
            for _ in 0..choose.below(4) {
                if left == 0 {
                    done = true;
                    break;
                }
                left -= 1;
                run.rig.disk_step();
                run.hear();
            }
            if done {
                break;
            }
        }
        if !done {
            break;
        }
        crashes += 1;
        run.crash();
        run.reopen(&mut Prng::new(at));
    }
    assert!(crashes > 150, "{crashes} crashes");
}

#[test]
fn lives_of_random_length_end_in_crashes_and_recoveries() {
    let (mut torn, mut recycled) = (0, 0);
    for seed in 0..80 {
        let mut run = Run::new(seed);
        let mut choose = Prng::derive(seed, "lives", 0);
        run.reopen(&mut choose);
        for _ in 0..6 {
            for _ in 0..choose.between(5, 150) {
                run.act(&mut choose);
            }
            match choose.below(6) {
                0 => {
                    // A recovery without a restart.
                    run.rig.settle();
                    run.hear();
                    let durable = run.rig.server.status().durable.0;
                    assert_eq!(durable, run.model.last);
                    run.begin_epoch(choose.between(run.model.committed, durable));
                }
                1 => {
                    // A crash while opening.
                    run.crash();
                    for _ in 0..choose.below(12) {
                        run.rig.disk_step();
                    }
                    run.crash();
                    run.reopen(&mut choose);
                }
                2 => {
                    run.rig.run(|server, cx| server.shut_down(cx));
                    run.rig.settle();
                    let halts = core::mem::take(&mut run.rig.halts);
                    assert_eq!(halts[0].reason, "stopped");
                    run.hear();
                    run.rig.restart();
                    run.rig.settle();
                    assert_eq!(run.rig.server.status().durable.0, run.model.last);
                    run.reopen(&mut choose);
                }
                3 => {
                    // The process dies, the power stays: what it sees next may not be durable yet.
                    run.rig.kill();
                    while run.rig.server.status().standing == Standing::Opening {
                        assert!(run.rig.disk_step(), "it opens: {:?}", run.rig.halts);
                    }
                    run.model.announced = run.rig.server.status().durable.0;
                    run.crash();
                    run.reopen(&mut choose);
                }
                4 => {
                    // A crash while a recruitment is on its way.
                    run.rig.settle();
                    run.hear();
                    let recovery_version = choose.between(run.model.committed, run.model.last);
                    run.model.epoch += 1;
                    run.rig.begin_recruit(run.model.epoch, recovery_version);
                    for _ in 0..choose.below(8) {
                        run.rig.disk_step();
                    }
                    run.model.announced = recovery_version;
                    run.crash();
                    run.reopen(&mut choose);
                }
                _ => {
                    run.crash();
                    run.reopen(&mut choose);
                }
            }
            run.compare();
        }
        torn += count_notes(&run, |note| matches!(note, Note::Opened { torn_frames: 1.., .. }));
        recycled += count_notes(&run, |note| matches!(note, Note::Recycled { .. }));
    }
    assert!(torn > 10 && recycled > 10, "{torn} torn tails were cut, {recycled} segments recycled");
}

fn count_notes(run: &Run, is_wanted: impl Fn(&Note) -> bool) -> usize {
    run.rig.notes.iter().filter(|note| is_wanted(note)).count()
}

#[test]
fn a_new_log_survives_crashes_before_its_first_frame() {
    for seed in 0..40 {
        let mut run = Run::new(seed);
        for _ in 0..seed % 8 {
            run.rig.disk_step();
        }
        run.crash();
        for _ in 0..seed / 8 {
            run.rig.disk_step();
        }
        run.crash();
        run.reopen(&mut Prng::new(seed));
        assert_eq!(run.rig.server.status().durable, Version(0));
        let offset = run.rig.pulled(&[17], 0).blocks.first().map_or(Offset(0), |b| b.base_offset);
        assert_eq!(offset, Offset(0));
    }
}

/// At every disk operation of an opening: two kills in a row, and what the third life finds was never synced.
#[test]
fn what_kills_left_in_the_cache_is_synced_before_anything_is_promised_on_it() {
    let metas = [File::Meta(0), File::Meta(1)];
    let (mut sealed, mut metas_left) = (0, 0);
    for seed in 0..16 {
        for at in 0.. {
            let mut rig = Rig::serving(seed);
            rig.push(1, push(0, 10, &[(17, 1, 100)]));
            rig.kill();
            for _ in 0..at {
                rig.disk_step();
            }
            let was_open = rig.server.status().standing != Standing::Opening;
            rig.kill();
            metas_left += metas.iter().filter(|slot| rig.disk.is_unsynced(**slot)).count();
            while rig.server.status().standing == Standing::Opening {
                assert!(rig.disk_step(), "it opens: {:?}", rig.halts);
                let mut then = rig.disk.clone();
                then.kill(&mut rig.prng);
                let unsynced = metas.iter().filter(|slot| then.is_unsynced(**slot)).count();
                assert!(unsynced < 2, "a power cut takes both slots after {at} steps of {seed}");
            }
            for file in rig.segments() {
                assert!(!rig.disk.is_unsynced(file), "{file:?} after {at} steps of {seed}");
            }
            sealed += rig.marks.iter().filter(|mark| **mark == Mark::FooterUsed).count();
            if was_open {
                break;
            }
        }
    }
    assert!(sealed > 10 && metas_left > 10, "{sealed} footers found, {metas_left} slots unsynced");
}

/// What a killed process left in the cache is read, and a footer is written behind it. A power cut at any
/// step of that must not leave the footer without the frames, since nobody reads them again.
#[test]
fn a_footer_never_outlives_the_frames_before_it() {
    let mut from_cache = 0;
    for seed in 0..40 {
        let mut rig = Rig::serving(seed);
        rig.push(1, push(0, 10, &[(17, 1, 9000)]));
        rig.kill();
        while rig.server.status().standing == Standing::Opening {
            assert!(rig.disk_step(), "it opens: {:?}", rig.halts);
            for cut in 0..4 {
                let mut disk = rig.disk.clone();
                from_cache += u32::from(rig.segments().iter().any(|file| disk.is_unsynced(*file)));
                disk.crash(&mut Prng::derive(seed, "cut", cut));
                let mut then = Rig::with(seed, rig.knobs.clone(), disk);
                then.settle();
                assert_eq!(then.halts, [], "seed {seed}, cut {cut}");
                let durable = then.server.status().durable.0;
                then.recruit(2, durable);
                then.serve(2, durable);
                let pulled = then.pulled(&[17], 0);
                assert_eq!(pulled.blocks.len() as u64, durable / 10, "seed {seed}, cut {cut}");
            }
        }
    }
    assert!(from_cache > 100, "{from_cache} cuts found frames that only a cache held");
}

/// A process dies before it hears that its barrier failed. What it wrote reads back and no later barrier
/// makes it durable: what the next process promises must survive a power cut all the same.
#[test]
fn what_a_failed_barrier_gave_up_is_written_again_before_it_counts() {
    let (mut found, mut lost) = (0, 0);
    for (seed, pushed) in (0..20).flat_map(|seed| (0..4).map(move |pushed| (seed, pushed))) {
        let mut rig = Rig::serving(seed);
        for version in 0..pushed {
            rig.push(1, push(10 * version, 10 * version + 10, &[(17, 1, 9000)]));
            rig.settle();
        }
        rig.push(1, push(10 * pushed, 10 * pushed + 10, &[(17, 1, 9000)]));
        rig.disk.fail_barrier_unheard();
        rig.restart();
        while rig.server.status().standing == Standing::Opening {
            assert!(rig.disk_step(), "it opens: {:?}", rig.halts);
            let mut disk = rig.disk.clone();
            disk.crash(&mut Prng::derive(seed, "cut", pushed));
            let mut then = Rig::with(seed, rig.knobs.clone(), disk);
            then.settle();
            assert_eq!(then.halts, [], "seed {seed} after {pushed}");
            let durable = then.server.status().durable;
            lost += u32::from(durable == Version(10 * pushed));
            assert!(durable >= Version(10 * pushed), "seed {seed} after {pushed}: {durable}");
        }
        let promised = rig.server.status().durable;
        found += u32::from(promised == Version(10 * pushed + 10));
        rig.crash();
        rig.settle();
        assert_eq!((rig.halts.as_slice(), rig.server.status().durable), (&[][..], promised));
        rig.recruit(2, promised.0);
        rig.serve(2, promised.0);
        let blocks = rig.pulled(&[17], 0).blocks.len() as u64;
        assert_eq!(blocks, pushed + 1, "seed {seed} after {pushed}");
    }
    assert!(found == 80 && lost > 80, "found {found} times, lost by {lost} cuts before");
}

/// The first group of a segment is torn, and the segment is no part of the log: its id is used again, its
/// file must not be as it is.
#[test]
fn no_spare_holds_anything_under_an_id_that_may_come_again() {
    let header = |rig: &Rig, file| {
        let page = rig.disk.peek(file, 0, PAGE_BYTES);
        SegmentHeader::decode(&page).ok().map(|header| header.segment)
    };
    let mut used = 0;
    for seed in 0..60 {
        let mut rig = Rig::serving(seed);
        rig.push(1, push(0, 10, &[(17, 1, 9000)]));
        rig.crash();
        used += usize::from(header(&rig, File::Segment(SegmentId(1))).is_some());
        rig.settle();
        let is_empty = rig.server.status().durable == Version(0);
        for (file, _) in rig.disk.files().filter(|(file, _)| matches!(file, File::Spare(_))) {
            assert!(!is_empty || header(&rig, file).is_none(), "{file:?} in {seed}");
        }
    }
    assert!(used > 10, "{used} segments were begun");
}
