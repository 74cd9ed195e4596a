//! The contract over all engines and barriers, and what only the driver promises.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use common::SegmentId;
use common::disk::{
    DiskCompletion, DiskError, DiskOp, DiskOpId, DiskOutput, DiskRequest, File, Lane, PAGE_BYTES,
};

use super::testing::{Disk as _, DriverDisk, QUOTA_BYTES, cases};
use super::*;

const SEGMENT: File = File::Segment(SegmentId(1));

fn options(engine: EngineKind, barrier: Barrier) -> Options {
    Options {
        engine: Some(engine),
        barrier: Some(barrier),
        quota_bytes: Some(QUOTA_BYTES),
        ..Options::default()
    }
}

fn both_engines() -> [Options; 2] {
    [EngineKind::Ring, EngineKind::Plain].map(|kind| options(kind, Barrier::InlineFdatasync))
}

fn open(path: &Path, options: &Options) -> DriverDisk {
    let driver = Driver::open(path, options, DriverDisk::waker());
    DriverDisk::new(driver.expect("the directory is free"))
}

fn request(id: u64, lane: Lane, op: DiskOp) -> DiskRequest {
    DiskRequest { id: DiskOpId(id), lane, op }
}

fn page_write(page: u64, durable: bool) -> DiskOp {
    let data = Bytes::from(vec![page as u8 + 1; PAGE_BYTES as usize]).into();
    DiskOp::Write { file: SEGMENT, offset: page * PAGE_BYTES, data, durable }
}

fn call(disk: &mut DriverDisk, op: DiskOp) -> Result<DiskOutput, DiskError> {
    disk.submit(request(0, Lane::Log, op));
    disk.wait().result
}

fn contract(options: &Options) {
    for case in cases() {
        let path = tempfile::tempdir().expect("a directory");
        let mut disk = open(path.path(), options);
        assert_eq!(Some(disk.driver().info().engine), options.engine, "{}", case.name);
        (case.run)(&mut disk);
    }
}

#[test]
fn contract_of_the_ring() {
    contract(&options(EngineKind::Ring, Barrier::InlineFdatasync));
}

#[test]
fn contract_of_the_ring_with_dsync() {
    contract(&options(EngineKind::Ring, Barrier::Dsync));
}

#[test]
fn contract_of_the_ring_through_the_page_cache() {
    let options = options(EngineKind::Ring, Barrier::InlineFdatasync);
    contract(&Options { buffered: true, ..options });
}

#[test]
fn contract_of_plain_files() {
    contract(&options(EngineKind::Plain, Barrier::InlineFdatasync));
}

#[test]
fn contract_of_plain_files_with_dsync_through_the_page_cache() {
    contract(&Options { buffered: true, ..options(EngineKind::Plain, Barrier::Dsync) });
}

#[test]
fn the_probe_chooses_and_leaves_nothing_behind() {
    for engine in [EngineKind::Ring, EngineKind::Plain] {
        let path = tempfile::tempdir().unwrap();
        let options = Options { engine: Some(engine), ..Options::default() };
        let disk = open(path.path(), &options);
        let info = disk.driver().info();
        assert_eq!(info.engine, engine);
        assert!(!info.reason.contains("failed"), "{info}");
        assert_eq!(std::fs::read_dir(path.path()).unwrap().count(), 0);
        assert_eq!(disk.driver().stats(), DriverStats::default());
    }
}

#[test]
fn a_second_driver_is_refused_until_the_first_is_dropped() {
    let path = tempfile::tempdir().unwrap();
    let [options, _] = both_engines();
    let first = open(path.path(), &options);
    let second = Driver::open(path.path(), &options, DriverDisk::waker());
    let refusal = second.expect_err("the directory is in use").to_string();
    assert!(refusal.contains("in use by another process"), "{refusal}");
    drop(first);
    open(path.path(), &options);
}

#[test]
fn dropping_completes_what_was_submitted_and_it_is_there_after_reopening() {
    for options in both_engines() {
        let path = tempfile::tempdir().unwrap();
        let mut disk = open(path.path(), &options);
        call(&mut disk, DiskOp::Create { file: SEGMENT, bytes: 64 * PAGE_BYTES }).unwrap();
        for page in 0..64 {
            disk.submit(request(page, Lane::Log, page_write(page, page % 2 == 0)));
            let read = DiskOp::Read { file: SEGMENT, offset: 0, bytes: 64 * PAGE_BYTES };
            disk.submit(request(100 + page, Lane::Log, read));
        }
        disk.submit(request(
            999,
            Lane::Background,
            DiskOp::Create { file: File::Spare(1), bytes: 4 << 20 },
        ));
        drop(disk);
        let mut disk = open(path.path(), &options);
        let read = DiskOp::Read { file: SEGMENT, offset: 0, bytes: 64 * PAGE_BYTES };
        let Ok(DiskOutput::Data(data)) = call(&mut disk, read) else { panic!("data") };
        for (page, bytes) in data.chunks(PAGE_BYTES as usize).enumerate() {
            assert!(bytes.iter().all(|&byte| byte == page as u8 + 1), "page {page}");
        }
        let Ok(DiskOutput::Listing { files, .. }) = call(&mut disk, DiskOp::List) else {
            panic!("a listing")
        };
        assert_eq!(files, [(SEGMENT, 64 * PAGE_BYTES), (File::Spare(1), 4 << 20)]);
    }
}

#[test]
fn too_many_outstanding_requests_are_refused_and_draining_makes_room() {
    let path = tempfile::tempdir().unwrap();
    let [options, _] = both_engines();
    let disk = open(path.path(), &options);
    let driver = disk.driver();
    for id in 0..OUTSTANDING_MAX as u64 {
        driver.submit(request(id, Lane::Log, page_write(0, false))).unwrap();
    }
    let one_more = request(0, Lane::Background, DiskOp::List);
    assert_eq!(driver.submit(one_more.clone()), Err(SubmitError::Full));
    let mut completions = Vec::new();
    while completions.is_empty() {
        driver.drain(&mut completions);
        std::thread::yield_now();
    }
    driver.submit(one_more).unwrap();
}

#[test]
fn statistics_count_requests_bytes_and_barriers() {
    for options in both_engines() {
        let path = tempfile::tempdir().unwrap();
        let mut disk = open(path.path(), &options);
        call(&mut disk, DiskOp::Create { file: SEGMENT, bytes: 64 * PAGE_BYTES }).unwrap();
        for page in 0..4 {
            call(&mut disk, page_write(page, page != 3)).unwrap();
        }
        call(&mut disk, DiskOp::Read { file: SEGMENT, offset: 0, bytes: PAGE_BYTES }).unwrap();
        let bytes_written = 4 * PAGE_BYTES;
        let log = LogLaneStats { flushes: 3, kernel_writes: 4, bytes_written };
        let expected = DriverStats {
            flushes: 3,
            writes: 4,
            bytes_written,
            reads: 1,
            bytes_read: PAGE_BYTES,
            log,
        };
        assert_eq!(disk.driver().stats(), expected);
        let background = page_write(9, true);
        disk.submit(request(99, Lane::Background, background));
        assert_eq!(disk.wait().result, Ok(DiskOutput::Done));
        assert_eq!(disk.driver().stats().log, log, "zero-filling is no part of the log lane");
        for page in 0..32 {
            disk.submit(request(page, Lane::Log, page_write(page, true)));
        }
        (0..32).for_each(|_| assert_eq!(disk.wait().result, Ok(DiskOutput::Done)));
        let flushes = disk.driver().stats().log.flushes - log.flushes;
        assert!((1..=32).contains(&flushes), "{flushes} flushes for 32 durable writes");
        let kernel_writes = disk.driver().stats().log.kernel_writes - log.kernel_writes;
        assert_eq!(kernel_writes, flushes, "neighbours are one write");
    }
}

/// D3: after a failed write, nothing is written any more, on no lane; what is there can still be read.
#[test]
fn a_failed_write_ends_all_writing() {
    for options in both_engines() {
        let path = tempfile::tempdir().unwrap();
        let mut disk = open(path.path(), &options);
        for file in [SEGMENT, File::Spare(0)] {
            call(&mut disk, DiskOp::Create { file, bytes: 64 * PAGE_BYTES }).unwrap();
        }
        let read_only = std::fs::File::open(path.path().join(SEGMENT.name())).unwrap();
        disk.driver().plant(SEGMENT, read_only.into());
        let Err(DiskError::Io { detail }) = call(&mut disk, page_write(0, true)) else {
            panic!("a write to a file that is open for reading went well")
        };
        assert!(detail.starts_with("write of segment-"), "{detail}");
        let write = DiskOp::Write {
            file: File::Spare(0),
            offset: 0,
            data: Bytes::from("x").into(),
            durable: true,
        };
        for lane in [Lane::Log, Lane::Background] {
            disk.submit(request(1, lane, write.clone()));
            let Err(DiskError::Io { detail }) = disk.wait().result else {
                panic!("{lane:?} wrote")
            };
            assert!(detail.contains("earlier failure"), "{detail}");
        }
        let read = DiskOp::Read { file: SEGMENT, offset: 0, bytes: PAGE_BYTES };
        assert_eq!(call(&mut disk, read), Ok(DiskOutput::Data(vec![0; 4096].into())));
    }
}

/// Reads far above what is in flight at a time, beside writes.
#[test]
fn many_big_reads_run_beside_writes() {
    for options in both_engines() {
        let path = tempfile::tempdir().unwrap();
        let mut disk = open(path.path(), &options);
        call(&mut disk, DiskOp::Create { file: SEGMENT, bytes: 4 << 20 }).unwrap();
        for id in 0..40 {
            let bytes = (1 + id % 4) << 20;
            disk.submit(request(id, Lane::Log, DiskOp::Read { file: SEGMENT, offset: 0, bytes }));
            disk.submit(request(100 + id, Lane::Log, page_write(id, id % 4 == 0)));
        }
        let mut completions: Vec<DiskCompletion> = (0..80).map(|_| disk.wait()).collect();
        let writes: Vec<_> =
            completions.iter().map(|done| done.id.0).filter(|&id| id >= 100).collect();
        assert_eq!(writes, (100..140).collect::<Vec<_>>(), "writes complete in order");
        completions.retain(|done| done.id.0 < 100);
        completions.sort_by_key(|done| done.id);
        for (id, done) in (0..).zip(completions) {
            let Ok(DiskOutput::Data(data)) = done.result else { panic!("read {id}") };
            assert_eq!((done.id.0, data.len() as u64), (id, (1 + id % 4) << 20));
            for (page, bytes) in data.chunks(PAGE_BYTES as usize).enumerate() {
                let old = bytes.iter().all(|&byte| byte == 0);
                let new = page < 40 && bytes.iter().all(|&byte| byte == page as u8 + 1);
                assert!(old || new, "page {page} of read {id} is neither old nor new");
            }
        }
    }
}

#[test]
fn the_waker_is_called_for_completions_and_only_for_them() {
    let path = tempfile::tempdir().unwrap();
    let [options, _] = both_engines();
    let calls = std::sync::Arc::new(AtomicU64::new(0));
    let waker: Waker = {
        let (calls, inner) = (std::sync::Arc::clone(&calls), DriverDisk::waker());
        std::sync::Arc::new(move || {
            calls.fetch_add(1, Ordering::Relaxed);
            inner();
        })
    };
    let mut disk = DriverDisk::new(Driver::open(path.path(), &options, waker).unwrap());
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    for _ in 0..3 {
        call(&mut disk, DiskOp::List).unwrap();
    }
    drop(disk);
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}
