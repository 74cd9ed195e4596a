//! The contract of [`common::disk`] as tests, for every implementation of it.
//!
//! ```text
//! for case in cases() {
//!     let mut disk = <an empty disk with a quota of QUOTA_BYTES>;
//!     (case.run)(&mut disk);
//! }
//! ```
//! A case panics where the disk breaks the contract. It knows nothing of time, and gives the disk no more
//! than [`IN_FLIGHT_MAX`] requests at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use common::disk::{
    DiskCompletion, DiskError, DiskOp, DiskOpId, DiskOutput, DiskRequest, File, Lane, PAGE_BYTES,
    padded,
};
use common::{Payload, Prng, SegmentId};

use super::api::{Driver, Waker};

/// The quota that the disk of a case must have; it must be empty.
pub const QUOTA_BYTES: u64 = 16 << 20;

/// Requests that a case leaves unanswered at a time.
const IN_FLIGHT_MAX: usize = 32;

/// A disk under test.
pub trait Disk {
    /// Takes a request.
    fn submit(&mut self, request: DiskRequest);
    /// The next completion; there is a request to come from.
    fn wait(&mut self) -> DiskCompletion;
}

/// A part of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// What it says.
    pub name: &'static str,
    /// Panics where the disk does otherwise.
    pub run: fn(&mut dyn Disk),
}

/// The whole contract.
#[must_use]
pub fn cases() -> Vec<Case> {
    fn case(name: &'static str, run: fn(&mut dyn Disk)) -> Case {
        Case { name, run }
    }
    vec![
        case("a created file is zeros of its length", created_is_zeros),
        case("creating again starts anew", create_replaces),
        case("what was written is read, padded with zeros", write_reads_back),
        case("an empty durable write is a barrier", empty_write),
        case("writes of a lane happen in order", writes_in_order),
        case("a write far above one MiB arrives whole", big_write),
        case("a read stops at the end of the file", read_past_the_end),
        case("a meta file grows, others refuse", growth),
        case("a rename replaces and keeps the bytes", rename_replaces),
        case("a removed file is gone", remove_forgets),
        case("a listing is sorted and knows what is free", listing),
        case("what is not there is not found", not_found),
        case("a full disk refuses and goes on after a removal", full_then_free),
        case("unaligned requests are refused and harm nothing", unaligned),
        case("many interleaved requests agree with a model", interleaved),
    ]
}

/// Gives requests numbers and waits for single answers.
struct Probe<'a> {
    disk: &'a mut dyn Disk,
    next: u64,
}

impl<'a> Probe<'a> {
    fn new(disk: &'a mut dyn Disk) -> Self {
        Self { disk, next: 0 }
    }

    fn submit(&mut self, lane: Lane, op: DiskOp) -> DiskOpId {
        let id = DiskOpId(self.next);
        self.next += 1;
        self.disk.submit(DiskRequest { id, lane, op });
        id
    }

    fn call(&mut self, lane: Lane, op: DiskOp) -> Result<DiskOutput, DiskError> {
        let id = self.submit(lane, op);
        let completion = self.disk.wait();
        assert_eq!(completion.id, id, "the only request's completion has another number");
        completion.result
    }

    fn done(&mut self, lane: Lane, op: DiskOp) {
        let what = format!("{op:?}").chars().take(120).collect::<String>();
        assert_eq!(self.call(lane, op), Ok(DiskOutput::Done), "{what}");
    }

    fn create(&mut self, file: File, bytes: u64) {
        self.done(Lane::Background, DiskOp::Create { file, bytes });
    }

    fn write(&mut self, file: File, offset: u64, bytes: &[u8]) {
        self.done(Lane::Log, write_op(file, offset, bytes, true));
    }

    fn read(&mut self, file: File, offset: u64, bytes: u64) -> Bytes {
        match self.call(Lane::Log, DiskOp::Read { file, offset, bytes }) {
            Ok(DiskOutput::Data(data)) => data,
            other => panic!("a read of {file:?} brought {other:?}"),
        }
    }

    fn list(&mut self) -> (Vec<(File, u64)>, u64) {
        match self.call(Lane::Background, DiskOp::List) {
            Ok(DiskOutput::Listing { files, free_bytes }) => (files, free_bytes),
            other => panic!("a list brought {other:?}"),
        }
    }
}

fn write_op(file: File, offset: u64, bytes: &[u8], durable: bool) -> DiskOp {
    let mut data = Payload::new();
    // Pieces of odd sizes, so that copying must put them together.
    for piece in bytes.chunks(100_003) {
        data.push(Bytes::copy_from_slice(piece));
    }
    DiskOp::Write { file, offset, data, durable }
}

const fn segment(id: u64) -> File {
    File::Segment(SegmentId(id))
}

/// Bytes that tell their place.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at / 509 + at + seed * 37) as u8 | 1).collect()
}

fn created_is_zeros(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    for (file, pages) in [(File::Spare(0), 300), (File::Meta(0), 1), (segment(9), 0)] {
        probe.create(file, pages * PAGE_BYTES);
        let data = probe.read(file, 0, 400 * PAGE_BYTES);
        assert_eq!(data.len() as u64, pages * PAGE_BYTES, "the length of {file:?}");
        assert!(data.iter().all(|&byte| byte == 0), "{file:?} is not zeros");
    }
}

fn create_replaces(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    probe.create(File::Spare(0), 4 * PAGE_BYTES);
    probe.write(File::Spare(0), 0, &pattern(1, 16384));
    probe.create(File::Spare(0), 2 * PAGE_BYTES);
    assert_eq!(probe.read(File::Spare(0), 0, 4 * PAGE_BYTES), vec![0; 8192]);
    let room = QUOTA_BYTES - 2 * PAGE_BYTES;
    assert_eq!(probe.list(), (vec![(File::Spare(0), 2 * PAGE_BYTES)], room));
}

fn write_reads_back(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    let file = segment(1);
    probe.create(file, 16 * PAGE_BYTES);
    probe.write(file, 0, &pattern(0, 65536));
    for (lane, durable) in [(Lane::Log, true), (Lane::Log, false), (Lane::Background, true)] {
        let bytes = pattern(2, 5000);
        probe.done(lane, write_op(file, 2 * PAGE_BYTES, &bytes, durable));
        let data = probe.read(file, 0, 16 * PAGE_BYTES);
        assert_eq!(data[..8192], pattern(0, 65536)[..8192], "before the write");
        assert_eq!(data[8192..13192], bytes, "the write");
        assert!(data[13192..16384].iter().all(|&byte| byte == 0), "the padding is not zeros");
        assert_eq!(data[16384..], pattern(0, 65536)[16384..], "behind the write");
        assert_eq!(probe.read(file, 3 * PAGE_BYTES, PAGE_BYTES), data[12288..16384]);
        probe.write(file, 0, &pattern(0, 65536));
    }
}

fn empty_write(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    probe.create(segment(1), PAGE_BYTES);
    probe.done(Lane::Log, write_op(segment(1), 0, &pattern(1, 4096), false));
    probe.done(Lane::Log, write_op(segment(1), PAGE_BYTES, &[], true));
    assert_eq!(probe.read(segment(1), 0, PAGE_BYTES), pattern(1, 4096));
}

fn writes_in_order(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    probe.create(segment(1), 8 * PAGE_BYTES);
    probe.create(segment(2), 8 * PAGE_BYTES);
    for lane in [Lane::Log, Lane::Background] {
        let mut ids = Vec::new();
        for round in 0..IN_FLIGHT_MAX as u64 {
            let file = segment(1 + u64::from(round % 5 == 4));
            let op = write_op(file, round % 3 * PAGE_BYTES, &pattern(round, 8192), round % 2 == 0);
            ids.push(probe.submit(lane, op));
        }
        for id in ids {
            let completion = probe.disk.wait();
            assert_eq!(completion, DiskCompletion { id, result: Ok(DiskOutput::Done) });
        }
        let mut expected = BTreeMap::from([(1, vec![0; 16384]), (2, vec![0; 16384])]);
        for round in 0..IN_FLIGHT_MAX as u64 {
            let file = expected.get_mut(&(1 + u64::from(round % 5 == 4))).expect("one of two");
            let start = usize::try_from(round % 3 * PAGE_BYTES).expect("small");
            file[start..start + 8192].copy_from_slice(&pattern(round, 8192));
        }
        for (id, expected) in expected {
            assert_eq!(probe.read(segment(id), 0, 4 * PAGE_BYTES), expected, "segment {id}");
        }
    }
}

fn big_write(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    let file = segment(1);
    probe.create(file, 12 << 20);
    for (lane, offset, bytes) in [
        (Lane::Log, PAGE_BYTES, (11 << 20) + 1),
        (Lane::Log, 0, 1 << 20),
        (Lane::Background, 3 * PAGE_BYTES, (2 << 20) + 4095),
    ] {
        let written = pattern(offset, bytes);
        probe.done(lane, write_op(file, offset, &written, true));
        let data = probe.read(file, offset, padded(bytes as u64));
        assert!(data[..bytes] == written, "{bytes} bytes at {offset} came back otherwise");
        assert!(data[bytes..].iter().all(|&byte| byte == 0), "the padding is not zeros");
    }
}

fn read_past_the_end(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    let file = segment(1);
    probe.create(file, 3 * PAGE_BYTES);
    probe.write(file, 0, &pattern(7, 12288));
    assert_eq!(probe.read(file, 2 * PAGE_BYTES, 4 * PAGE_BYTES), pattern(7, 12288)[8192..]);
    assert_eq!(probe.read(file, 3 * PAGE_BYTES, PAGE_BYTES), Bytes::new());
    assert_eq!(probe.read(file, 300 * PAGE_BYTES, PAGE_BYTES), Bytes::new());
    assert_eq!(probe.read(file, 0, 0), Bytes::new());
}

fn growth(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    probe.create(File::Meta(1), 0);
    probe.write(File::Meta(1), 0, &pattern(1, 4096));
    probe.write(File::Meta(1), PAGE_BYTES, &pattern(2, 5000));
    let data = probe.read(File::Meta(1), 0, 64 * PAGE_BYTES);
    assert_eq!(data.len(), 12288);
    assert_eq!(data[..4096], pattern(1, 4096));
    assert_eq!(data[4096..9096], pattern(2, 5000));
    probe.create(segment(1), PAGE_BYTES);
    for (lane, offset, bytes) in [(Lane::Log, 0, 4097), (Lane::Background, PAGE_BYTES, 1)] {
        let refused = probe.call(lane, write_op(segment(1), offset, &pattern(3, bytes), true));
        assert!(matches!(refused, Err(DiskError::Io { .. })), "{refused:?}");
    }
    assert_eq!(probe.read(segment(1), 0, 8 * PAGE_BYTES), vec![0; 4096]);
    let (files, _) = probe.list();
    assert_eq!(files, [(segment(1), PAGE_BYTES), (File::Meta(1), 3 * PAGE_BYTES)]);
}

fn rename_replaces(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    for lane in [Lane::Log, Lane::Background] {
        for (file, seed) in [(File::Spare(1), 1), (segment(1), 2)] {
            probe.create(file, 2 * PAGE_BYTES);
            probe.write(file, 0, &pattern(seed, 8192));
        }
        probe.done(lane, DiskOp::Rename { from: File::Spare(1), to: segment(1) });
        assert_eq!(probe.read(segment(1), 0, 2 * PAGE_BYTES), pattern(1, 8192));
        assert_eq!(probe.list().0, [(segment(1), 2 * PAGE_BYTES)]);
        probe.write(segment(1), PAGE_BYTES, &pattern(3, 4096));
        probe.done(lane, DiskOp::Rename { from: segment(1), to: segment(2) });
        assert_eq!(probe.read(segment(2), PAGE_BYTES, PAGE_BYTES), pattern(3, 4096));
        let gone = probe.call(Lane::Log, DiskOp::Read { file: segment(1), offset: 0, bytes: 0 });
        assert_eq!(gone, Err(DiskError::NotFound(segment(1))));
        probe.done(lane, DiskOp::Remove { file: segment(2) });
    }
}

fn remove_forgets(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    probe.create(segment(1), PAGE_BYTES);
    probe.write(segment(1), 0, &pattern(1, 4096));
    probe.done(Lane::Background, DiskOp::Remove { file: segment(1) });
    let read = DiskOp::Read { file: segment(1), offset: 0, bytes: PAGE_BYTES };
    assert_eq!(probe.call(Lane::Log, read), Err(DiskError::NotFound(segment(1))));
    let write = write_op(segment(1), 0, &[1], true);
    assert_eq!(probe.call(Lane::Log, write), Err(DiskError::NotFound(segment(1))));
    assert_eq!(probe.list(), (vec![], QUOTA_BYTES));
    probe.create(segment(1), PAGE_BYTES);
    assert_eq!(probe.read(segment(1), 0, PAGE_BYTES), vec![0; 4096]);
}

fn listing(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    assert_eq!(probe.list(), (vec![], QUOTA_BYTES));
    let mut files = [File::Spare(2), segment(0x100), File::Meta(1), segment(0xff), File::Spare(1)];
    for (file, pages) in files.into_iter().zip(1..) {
        probe.create(file, pages * PAGE_BYTES);
    }
    let (listed, free_bytes) = probe.list();
    files.sort_unstable();
    assert_eq!(listed.iter().map(|&(file, _)| file).collect::<Vec<_>>(), files);
    assert_eq!(listed.iter().map(|(_, bytes)| bytes).sum::<u64>(), 15 * PAGE_BYTES);
    assert_eq!(free_bytes, QUOTA_BYTES - 15 * PAGE_BYTES);
}

fn not_found(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    let file = segment(5);
    for op in [
        DiskOp::Read { file, offset: 0, bytes: PAGE_BYTES },
        write_op(file, 0, &[1], true),
        DiskOp::Rename { from: file, to: segment(6) },
        DiskOp::Remove { file },
    ] {
        for lane in [Lane::Log, Lane::Background] {
            assert_eq!(probe.call(lane, op.clone()), Err(DiskError::NotFound(file)), "{op:?}");
        }
    }
    let meta = write_op(File::Meta(0), 0, &[1], true);
    assert_eq!(probe.call(Lane::Log, meta), Err(DiskError::NotFound(File::Meta(0))));
}

fn full_then_free(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    let (half, page) = (QUOTA_BYTES / 2, PAGE_BYTES);
    probe.create(segment(1), half);
    probe.create(segment(2), half - page);
    let create = |bytes| DiskOp::Create { file: File::Spare(0), bytes };
    assert_eq!(probe.call(Lane::Background, create(2 * page)), Err(DiskError::Full));
    let full = (vec![(segment(1), half), (segment(2), half - page)], page);
    assert_eq!(probe.list(), full, "a refused creation changes nothing");
    let again = DiskOp::Create { file: segment(2), bytes: half + page };
    assert_eq!(probe.call(Lane::Background, again), Err(DiskError::Full));
    assert_eq!(probe.list(), full, "a refused replacement changes nothing");
    probe.write(segment(2), 0, &pattern(1, 4096));
    probe.done(Lane::Background, DiskOp::Remove { file: segment(1) });
    probe.create(File::Spare(0), half + page);
    assert_eq!(probe.list().1, 0);
    assert_eq!(probe.read(segment(2), 0, page), pattern(1, 4096));
}

fn unaligned(disk: &mut dyn Disk) {
    let mut probe = Probe::new(disk);
    let file = segment(1);
    probe.create(file, 2 * PAGE_BYTES);
    for op in [
        DiskOp::Read { file, offset: 512, bytes: PAGE_BYTES },
        DiskOp::Read { file, offset: 0, bytes: 100 },
        write_op(file, 1, &[1], true),
        DiskOp::Create { file: File::Spare(0), bytes: 1 },
    ] {
        let refused = probe.call(Lane::Log, op.clone());
        assert!(matches!(refused, Err(DiskError::Io { .. })), "{op:?} brought {refused:?}");
    }
    assert_eq!(probe.read(file, 0, 2 * PAGE_BYTES), vec![0; 8192]);
    assert_eq!(probe.list().0, [(file, 2 * PAGE_BYTES)]);
    probe.write(file, 0, &pattern(1, 100));
}

/// Four files, each kept to one lane so that the order of its writes is known. Reads of one file run beside
/// writes of the others.
fn interleaved(disk: &mut dyn Disk) {
    const REQUESTS: u64 = 600;
    let mut model = Model::new(disk);
    let mut prng = Prng::new(0x6d69_6c6c);
    for round in 0..REQUESTS {
        let file = prng.below(Model::FILES);
        let page = prng.below(Model::PAGES);
        let pages = 1 + prng.below(9);
        if prng.below(3) == 0 {
            model.read(file, page, pages);
        } else {
            let pages = pages.min(Model::PAGES - page);
            let len = pages * PAGE_BYTES - prng.below(PAGE_BYTES);
            model.write(file, page, &pattern(round, len as usize), prng.below(2) == 0);
        }
        model.settle(IN_FLIGHT_MAX - 1);
    }
    for file in 0..Model::FILES {
        model.read(file, 0, Model::PAGES);
    }
    model.settle(0);
}

/// Files in memory beside those of the disk, and what the answers to come must be.
struct Model<'a> {
    probe: Probe<'a>,
    files: Vec<Vec<u8>>,
    /// For each request its file, and for a read what it must bring.
    pending: BTreeMap<DiskOpId, (u64, Option<Bytes>)>,
}

impl<'a> Model<'a> {
    const FILES: u64 = 4;
    const PAGES: u64 = 64;

    fn new(disk: &'a mut dyn Disk) -> Self {
        let mut probe = Probe::new(disk);
        let bytes = Self::PAGES * PAGE_BYTES;
        (0..Self::FILES).for_each(|file| probe.create(segment(file), bytes));
        let files = vec![vec![0; bytes as usize]; Self::FILES as usize];
        Self { probe, files, pending: BTreeMap::new() }
    }

    fn write(&mut self, file: u64, page: u64, bytes: &[u8], durable: bool) {
        // A read may or may not see a later write.
        if self.pending.values().any(|(other, read)| *other == file && read.is_some()) {
            self.settle(0);
        }
        let lane = if file < Self::FILES / 2 { Lane::Log } else { Lane::Background };
        let op = write_op(segment(file), page * PAGE_BYTES, bytes, durable);
        let start = (page * PAGE_BYTES) as usize;
        let place =
            &mut self.files[file as usize][start..start + padded(bytes.len() as u64) as usize];
        place[..bytes.len()].copy_from_slice(bytes);
        place[bytes.len()..].fill(0);
        let id = self.probe.submit(lane, op);
        self.pending.insert(id, (file, None));
    }

    fn read(&mut self, file: u64, page: u64, pages: u64) {
        // A read may overtake an earlier write.
        if self.pending.values().any(|(other, read)| *other == file && read.is_none()) {
            self.settle(0);
        }
        let (offset, bytes) = (page * PAGE_BYTES, pages * PAGE_BYTES);
        let content = &self.files[file as usize][offset as usize..];
        let expected = Bytes::copy_from_slice(&content[..content.len().min(bytes as usize)]);
        let op = DiskOp::Read { file: segment(file), offset, bytes };
        let id = self.probe.submit(Lane::Log, op);
        self.pending.insert(id, (file, Some(expected)));
    }

    fn settle(&mut self, down_to: usize) {
        while self.pending.len() > down_to {
            let DiskCompletion { id, result } = self.probe.disk.wait();
            let (file, expected) = self.pending.remove(&id).expect("one answer for each request");
            match (result, expected) {
                (Ok(DiskOutput::Done), None) => {}
                (Ok(DiskOutput::Data(data)), Some(expected)) => {
                    assert!(data == expected, "a read of file {file} saw other bytes");
                }
                (other, _) => panic!("{id:?} on file {file} brought {other:?}"),
            }
        }
    }
}

/// A driver as a disk under test: the calling thread waits for completions.
#[derive(Debug)]
pub struct DriverDisk {
    driver: Driver,
    completions: Vec<DiskCompletion>,
}

impl DriverDisk {
    /// The waker of the calling thread, which must be the one that waits.
    #[must_use]
    pub fn waker() -> Waker {
        let thread = thread::current();
        Arc::new(move || thread.unpark())
    }

    /// A driver that was opened with [`DriverDisk::waker`].
    #[must_use]
    pub const fn new(driver: Driver) -> Self {
        Self { driver, completions: Vec::new() }
    }

    /// The driver.
    #[must_use]
    pub const fn driver(&self) -> &Driver {
        &self.driver
    }
}

impl Disk for DriverDisk {
    fn submit(&mut self, request: DiskRequest) {
        self.driver.submit(request).expect("a case keeps few requests in flight");
    }

    fn wait(&mut self) -> DiskCompletion {
        while self.completions.is_empty() {
            assert!(self.driver.is_alive(), "a thread of the driver died");
            self.driver.drain(&mut self.completions);
            if self.completions.is_empty() {
                thread::park();
            }
        }
        self.completions.remove(0)
    }
}
