//! Latency of durable overwrites of one page: through the driver, and by `pwrite` and `fdatasync` in a loop.
//!
//! ```text
//! cargo run --release -p logserver --example flush -- DIR
//! ```
//! Both run in turns in the same minute, and only their ratio means anything.
#![expect(clippy::print_stdout, reason = "it prints a measurement")]
#![expect(clippy::disallowed_types, reason = "it measures time")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::SegmentId;
use common::disk::{DiskCompletion, DiskOp, DiskOpId, DiskRequest, File, Lane, PAGE_BYTES};
use logserver::driver::{Driver, Options};
use rustix::fs::{Mode, OFlags};

const TURNS: u64 = 10;
const WRITES_PER_TURN: u64 = 200;
const PAGES: u64 = 1024;
const SEGMENT: File = File::Segment(SegmentId(1));

#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Page([u8; PAGE_BYTES as usize]);

static PAGE: Page = Page([7; PAGE_BYTES as usize]);

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: flush DIR")?;
    let path = Path::new(&path);
    let me = thread::current();
    let driver = Driver::open(path, &Options::default(), Arc::new(move || me.unpark()))?;
    println!("driver: {}", driver.info());
    call(&driver, DiskOp::Create { file: SEGMENT, bytes: PAGES * PAGE_BYTES })?;
    let flags = OFlags::RDWR | OFlags::DIRECT;
    let plain = rustix::fs::open(path.join(SEGMENT.name()), flags, Mode::empty())
        .or_else(|_| rustix::fs::open(path.join(SEGMENT.name()), OFlags::RDWR, Mode::empty()))?;
    let (mut by_driver, mut by_loop) = (Vec::new(), Vec::new());
    for turn in 0..TURNS {
        for write in 0..WRITES_PER_TURN {
            let offset = (turn * WRITES_PER_TURN + write) % PAGES * PAGE_BYTES;
            let begin = Instant::now();
            let data = Bytes::from_static(&PAGE.0).into();
            call(&driver, DiskOp::Write { file: SEGMENT, offset, data, durable: true })?;
            by_driver.push(begin.elapsed());
        }
        for write in 0..WRITES_PER_TURN {
            let offset = (turn * WRITES_PER_TURN + write) % PAGES * PAGE_BYTES;
            let begin = Instant::now();
            rustix::io::pwrite(&plain, &PAGE.0, offset)?;
            rustix::fs::fdatasync(&plain)?;
            by_loop.push(begin.elapsed());
        }
    }
    by_driver.sort_unstable();
    by_loop.sort_unstable();
    for percent in [50, 99] {
        let (driver, plain) = (quantile(&by_driver, percent), quantile(&by_loop, percent));
        let ratio = driver.as_secs_f64() / plain.as_secs_f64();
        println!("p{percent}: driver {driver:?}, pwrite + fdatasync {plain:?}, ratio {ratio:.2}");
    }
    println!("{:?}", driver.stats());
    call(&driver, DiskOp::Remove { file: SEGMENT })?;
    Ok(())
}

fn call(driver: &Driver, op: DiskOp) -> Result<(), Box<dyn Error>> {
    driver.submit(DiskRequest { id: DiskOpId(0), lane: Lane::Log, op })?;
    let mut completions: Vec<DiskCompletion> = Vec::new();
    loop {
        driver.drain(&mut completions);
        if let Some(completion) = completions.pop() {
            completion.result?;
            return Ok(());
        }
        if !driver.is_alive() {
            return Err("the driver died".into());
        }
        thread::park();
    }
}

fn quantile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[sorted.len() * percent / 100]
}
