//! Rot is named and never cut; a torn tail is cut and nothing else.
//!
//! ```text
//! segments   [ sealed ][ sealed ][ not sealed: frame frame frame | last flush ]
//!              rot: found when it is read, and by `inspect verify`
//!                                  rot: the node does not start
//!                                                                  torn by SIGKILL: cut, silently
//! ```
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use client::Transaction;
use common::disk::{DiskOp, DiskOpId, DiskRequest, File, Lane, PAGE_BYTES};
use common::{
    Cx, Endpoint, Event, Incarnation, Knobs, NodeId, Note, Output, Prng, Role, StreamId, Time,
    Version, WallTime,
};
use logserver::LogServer;
use logserver::testing::MemoryDisk;
use tests::{
    Frame, Node, Place, Records, TINY_FILES, copy, files, frames, millrace, run, segment_path,
};

const PLACES: [Place; 3] = [Place::Header, Place::Table, Place::Body];

/// A directory that a node has filled and left.
struct Filled {
    place: tempfile::TempDir,
    directory: PathBuf,
    stream: StreamId,
    frames: Vec<Frame>,
}

impl Filled {
    /// Three segments of one commit after the other, and a stop in good order.
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("node");
        let node = Node::start(&directory, TINY_FILES);
        let stream = run(async {
            let client = node.client().await;
            let stream = client.create_stream("rows").await.unwrap();
            for number in 0..30 {
                let mut transaction = Transaction::new();
                transaction.append(stream, value(number));
                client.commit(transaction).await.unwrap();
            }
            client.close().await;
            stream
        });
        node.stop();
        let frames = frames(&directory);
        assert!(frames.last().unwrap().segment >= 3, "{frames:?}");
        Self { place, directory, stream, frames }
    }

    /// The frames of a segment but the first and the last one.
    fn inner_frames(&self, segment: u64) -> &[Frame] {
        let begin = self.frames.partition_point(|frame| frame.segment < segment);
        let end = self.frames.partition_point(|frame| frame.segment <= segment);
        &self.frames[begin + 1..end - 1]
    }

    /// A copy in which one bit of a frame is wrong.
    fn spoiled(&self, frame: &Frame, place: Place) -> PathBuf {
        let name = format!("g{} q{} {place:?}", frame.segment, frame.sequence);
        let directory = self.place.path().join(name);
        copy(&self.directory, &directory);
        frame.flip_a_bit(&directory, place);
        directory
    }
}

fn value(number: usize) -> String {
    format!("{number} {}", "x".repeat(20_000))
}

/// Whether a report says which frame of which segment is damaged, and what it takes along.
fn check_names(report: &str, frame: &Frame, stream: StreamId) {
    let words = [
        format!("q{}", frame.sequence),
        format!("g{}", frame.segment),
        format!("v{}", frame.version),
        format!("v{}", frame.previous_version),
        stream.to_string(),
    ];
    for word in words {
        assert!(report.contains(&word), "{word} is not in {report}");
    }
}

fn check_verify(directory: &Path, frame: &Frame, stream: StreamId) {
    let directory = directory.to_str().unwrap();
    let verified = millrace(&["inspect", "verify", directory, "-o", "json"]).with_code(5);
    let finding = &verified.json()[0];
    assert_eq!(finding["kind"], "rot");
    check_names(finding["detail"].as_str().unwrap(), frame, stream);
}

#[test]
fn a_node_does_not_start_on_rot_and_leaves_its_log_as_it_is() {
    let filled = Filled::new();
    let last = filled.frames.last().unwrap();
    let inner = &filled.inner_frames(last.segment)[1];
    for (frame, place) in PLACES.map(|place| (inner, place)).into_iter().chain([(last, PLACES[2])])
    {
        let directory = filled.spoiled(frame, place);
        let before = files(&directory.join("log"));
        check_verify(&directory, frame, filled.stream);
        // Once more: the first refusal must not have made it startable.
        for _ in 0..2 {
            let ended = Node::try_start(&directory, TINY_FILES).expect_err("a node on rot");
            let ended = ended.with_code(5);
            assert!(ended.stderr.contains("corrupt_log"), "{}", ended.stderr);
            check_names(&ended.stderr, frame, filled.stream);
        }
        assert!(
            before == files(&directory.join("log")),
            "{frame:?} {place:?}: the log was changed"
        );
        fs::remove_dir_all(directory).unwrap();
    }
}

#[test]
fn rot_in_a_sealed_segment_ends_a_pull_at_its_place_and_nothing_else() {
    let filled = Filled::new();
    let frame = filled.inner_frames(2)[3].clone();
    let directory = filled.spoiled(&frame, Place::Body);
    check_verify(&directory, &frame, filled.stream);
    let spoiled_segment = fs::read(segment_path(&directory, 2)).unwrap();

    let node = Node::start(&directory, TINY_FILES);
    let pull = node.try_cli(&["pull", "rows"]).with_code(5);
    let place = format!("{} at v{}", filled.stream, frame.version);
    assert!(pull.stderr.contains("500 corrupt"), "{}", pull.stderr);
    assert!(pull.stderr.contains(&place), "{place} is not in {}", pull.stderr);
    let before = filled.frames.iter().filter(|other| other.version < frame.version);
    // Two frames without a row: the epoch's first one, and the stream's creation.
    assert_eq!(pull.json().len(), before.count() - 2, "everything before it is there");
    let behind = node.cli(&["pull", "rows", "--from", &frame.version.to_string()]);
    assert_eq!(behind.json().last().unwrap()["offset"], 29, "everything behind it is there");
    assert_eq!(node.cli(&["append", "rows", "x"]).one_json()["offset"], 30);
    assert_eq!(node.cli(&["status"]).one_json()["serving"], true);
    node.stop();
    assert!(spoiled_segment == fs::read(segment_path(&directory, 2)).unwrap());
}

#[test]
fn a_start_that_verifies_finds_rot_in_sealed_segments_too() {
    let filled = Filled::new();
    let verifying = [TINY_FILES, &["--verify"]].concat();
    let frame = &filled.inner_frames(1)[2];
    for place in PLACES {
        let directory = filled.spoiled(frame, place);
        let before = files(&directory.join("log"));
        check_verify(&directory, frame, filled.stream);
        let ended = Node::try_start(&directory, &verifying).expect_err("a node on rot");
        check_names(&ended.with_code(5).stderr, frame, filled.stream);
        assert!(before == files(&directory.join("log")), "{place:?}: the log was changed");
    }
    Node::start(&filled.directory, &verifying).stop();
}

/// A directory of a node that was killed with commits on their way.
struct Killed {
    place: tempfile::TempDir,
    directory: PathBuf,
    stream: StreamId,
    /// The frames of the last flush.
    last_flush: Vec<Frame>,
    /// The last version that was durable before the last flush began.
    durable_before: u64,
}

/// One version a transaction, so that a flush holds many.
const ONE_BY_ONE: [&str; 2] = ["--knob", "batch_transactions_max=1"];

impl Killed {
    /// Until the last flush before the kill was a large one.
    fn new() -> Self {
        for _ in 0..20 {
            let killed = Self::once();
            if killed.last_flush.len() >= 3 {
                return killed;
            }
        }
        panic!("no flush before a kill was large");
    }

    fn once() -> Self {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("node");
        let mut node = Node::start(&directory, &[TINY_FILES, &ONE_BY_ONE].concat());
        let stream = run(async {
            let client = node.client().await;
            let stream = client.create_stream("rows").await.unwrap();
            let mut verdicts = Vec::new();
            for number in 0..200 {
                let mut transaction = Transaction::new();
                transaction.append(stream, format!("{number} {}", "x".repeat(number % 90)));
                verdicts.push(client.submit(transaction).await);
            }
            for verdict in verdicts.drain(..60) {
                verdict.await.unwrap();
            }
            node.kill();
            stream
        });
        let frames = frames(&directory);
        let durable_sequence = frames.last().unwrap().durable_sequence;
        let at = frames.partition_point(|frame| frame.sequence <= durable_sequence);
        let (before, last_flush) = frames.split_at(at);
        let durable_before = before.last().unwrap().version;
        let last_flush = last_flush.to_vec();
        Self { place, directory, stream, last_flush, durable_before }
    }

    /// Where the last flush begins and ends in its segment.
    fn range(&self) -> (u64, u64) {
        let (first, last) = (self.last_flush.first().unwrap(), self.last_flush.last().unwrap());
        assert_eq!(first.segment, last.segment, "a flush lies in one segment");
        assert!(first.offset.is_multiple_of(PAGE_BYTES), "a flush begins with a page");
        (first.offset, last.end())
    }

    /// What must be there when everything from `cut` on is gone.
    fn durable_at(&self, cut: u64) -> u64 {
        let whole = self.last_flush.iter().take_while(|frame| frame.end() <= cut);
        whole.last().map_or(self.durable_before, |frame| frame.version)
    }
}

#[test]
fn a_tail_that_is_cut_at_any_byte_opens_with_what_was_whole() {
    let killed = Killed::new();
    let (begin, end) = killed.range();
    let file = File::Segment(common::SegmentId(killed.last_flush[0].segment));
    let on_disk = files(&killed.directory.join("log"));
    let segment = &on_disk[&file.name()];
    let mut clean = MemoryDisk::new(64 << 20);
    for (name, bytes) in &on_disk {
        let file = File::parse(name).unwrap();
        carry_out(&mut clean, DiskOp::Create { file, bytes: bytes.len() as u64 });
        write(&mut clean, file, 0, bytes);
    }
    let node = node_id(&killed.directory);
    assert_eq!(opened(&clean, node), killed.durable_at(end));
    let mut seen = std::collections::BTreeSet::new();
    for cut in begin..=end {
        let mut disk = clean.clone();
        let page = cut / PAGE_BYTES * PAGE_BYTES;
        let mut tail = segment[page as usize..end.next_multiple_of(PAGE_BYTES) as usize].to_vec();
        tail[(cut - page) as usize..].fill(0);
        write(&mut disk, file, page, &tail);
        let durable = opened(&disk, node);
        assert_eq!(durable, killed.durable_at(cut), "cut at {cut} of {begin} to {end}");
        seen.insert(durable);
    }
    assert_eq!(seen.len(), killed.last_flush.len() + 1, "each frame was once the last one");
}

fn carry_out(disk: &mut MemoryDisk, op: DiskOp) {
    disk.request(DiskRequest { id: DiskOpId(0), lane: Lane::Background, op });
    disk.complete(&mut Prng::new(0)).unwrap().result.unwrap();
}

fn write(disk: &mut MemoryDisk, file: File, offset: u64, bytes: &[u8]) {
    let data = bytes::Bytes::copy_from_slice(bytes).into();
    carry_out(disk, DiskOp::Write { file, offset, data, durable: true });
}

fn node_id(directory: &Path) -> NodeId {
    let identity = fs::read_to_string(directory.join("identity")).unwrap();
    let hex = identity.lines().find_map(|line| line.strip_prefix("node ")).unwrap();
    NodeId(u64::from_str_radix(hex, 16).unwrap())
}

/// Opens a log server on the disk; the version that it finds durable.
fn opened(disk: &MemoryDisk, node: NodeId) -> u64 {
    let (mut disk, mut server, mut rng) = (disk.clone(), LogServer::new(node), Prng::new(1));
    let mut knobs = Knobs::default();
    for pair in TINY_FILES.iter().filter_map(|option| option.split_once('=')) {
        assert!(knobs.set(pair.0, pair.1.replace('_', "").parse().unwrap()), "{pair:?}");
    }
    let me = Endpoint { node, incarnation: Incarnation(9), role: Role::LogServer };
    let mut step = |disk: &mut MemoryDisk, event: Option<Event>| {
        let mut out = Vec::new();
        let (now, wall) = (Time(1), WallTime(1));
        let mut cx = Cx { now, wall, knobs: &knobs, rng: &mut rng, me, out: &mut out };
        match event {
            None => server.open(&mut cx),
            Some(event) => server.step(&mut cx, event),
        }
        let mut durable = None;
        for output in out {
            match output {
                Output::Disk(request) => disk.request(request),
                Output::Halt(halt) => panic!("{halt:?}"),
                Output::Note(Note::Opened { durable: version, .. }) => durable = Some(version),
                _ => {}
            }
        }
        durable
    };
    let mut found: Option<Version> = step(&mut disk, None);
    let mut order = Prng::new(2);
    while found.is_none() {
        let completion = disk.complete(&mut order).expect("an open log, before nothing goes on");
        found = step(&mut disk, Some(Event::Disk(completion)));
    }
    found.unwrap().0
}

#[test]
fn a_node_serves_what_a_torn_tail_has_left() {
    let killed = Killed::new();
    let (begin, end) = killed.range();
    let middle = killed.last_flush[1].offset + killed.last_flush[1].bytes / 2;
    let whole = killed.place.path().join("whole");
    copy(&killed.directory, &whole);
    let everything = served(&whole, killed.stream);
    assert!(everything.all().len() >= 60, "what was acknowledged is there");
    for cut in [begin, begin + 1, middle, killed.last_flush[1].end(), end - 1] {
        let directory = killed.place.path().join(format!("cut at {cut}"));
        copy(&killed.directory, &directory);
        let path = segment_path(&directory, killed.last_flush[0].segment);
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&vec![0; (end - cut) as usize], cut).unwrap();
        let left = served(&directory, killed.stream);
        let durable = Version(killed.durable_at(cut));
        let expected = everything.all().iter().filter(|found| found.position.version <= durable);
        assert!(left.all().iter().eq(expected), "cut at {cut}, expected through {durable}");
        left.check_offsets();
    }
}

fn served(directory: &Path, stream: StreamId) -> Records {
    let node = Node::start(directory, TINY_FILES);
    let records = run(async {
        let client = node.client().await;
        let records = Records::of(&client, &[stream]).await;
        client.close().await;
        records
    });
    node.stop();
    records
}
