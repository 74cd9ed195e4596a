//! Bodies of blocks that have left the tail: read from segments, neighbours together, checked one by one.
//!
//! ```text
//! blocks      [a]  [b][c]            [d]         by place in a segment
//! runs        |---- pages ----|   |- pages -|    a run is one DiskOp::Read of at most `read_bytes`
//! ```
//!
//! A segment is not recycled while a read of it is in flight. Nothing is handed on whose checksum is wrong.
//! A run that can't be read is read again in halves: one bad sector hides no more than its blocks.

use core::fmt;
use std::collections::BTreeMap;

use bytes::Bytes;
use common::disk::{DiskError, DiskOp, DiskOutput, Lane, PAGE_BYTES, padded};
use common::{Cx, SegmentId, StreamId, Version};

use super::index::BlockRef;
use super::{Log, LogEvent, Purpose, data, segment_file};

/// Runs of one read that are in flight at once.
const RUNS_IN_FLIGHT_MAX: usize = 4;
/// Neighbours are read together when no more than this lies between them, bytes.
const GAP_BYTES_MAX: u64 = 16 << 10;

/// A read that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ReadId(u64);

/// A block that can't be had, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ReadFailure {
    pub(crate) stream: StreamId,
    pub(crate) version: Version,
    pub(crate) segment: SegmentId,
    /// For people.
    pub(crate) what: String,
}

impl fmt::Display for ReadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, version, segment, what } = self;
        write!(f, "{stream} at {version} in segment {segment}: {what}")
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Reads {
    next: u64,
    running: BTreeMap<ReadId, Running>,
}

#[derive(Clone, Debug)]
struct Running {
    wanted: Vec<(StreamId, BlockRef)>,
    bodies: Vec<Option<Bytes>>,
    runs: Vec<Run>,
    /// Runs from here on have not been asked for.
    asked: usize,
    in_flight: usize,
    failures: Vec<ReadFailure>,
}

#[derive(Clone, Debug)]
struct Run {
    segment: SegmentId,
    /// Whole pages.
    start: u64,
    end: u64,
    /// Places in `wanted`.
    members: Vec<usize>,
}

/// Puts blocks together that lie near each other.
fn plan_runs(wanted: &[(StreamId, BlockRef)], run_bytes_max: u64) -> Vec<Run> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|place| (wanted[*place].1.segment, wanted[*place].1.at));
    let mut runs: Vec<Run> = Vec::new();
    for place in order {
        let block = &wanted[place].1;
        let start = block.at / PAGE_BYTES * PAGE_BYTES;
        let end = padded(block.at + u64::from(block.bytes));
        if let Some(run) = runs.last_mut()
            && run.segment == block.segment
            && start <= run.end + GAP_BYTES_MAX
            && end.max(run.end) - run.start <= run_bytes_max
        {
            run.end = run.end.max(end);
            run.members.push(place);
            continue;
        }
        runs.push(Run { segment: block.segment, start, end, members: vec![place] });
    }
    runs
}

impl Log {
    /// Reads the bodies of `wanted`; the answer is a [`LogEvent::Read`]: all of them, or the blocks that
    /// can't be had, ascending by version.
    pub(crate) fn read(&mut self, cx: &mut Cx<'_>, wanted: Vec<(StreamId, BlockRef)>) -> ReadId {
        assert!(!wanted.is_empty(), "a read of nothing");
        let id = ReadId(self.reads.next);
        self.reads.next += 1;
        let runs = plan_runs(&wanted, cx.knobs.read_bytes);
        for run in &runs {
            let segment = self.segments.get_mut(&run.segment).expect("a block lies in a segment");
            segment.readers += 1;
        }
        let bodies = vec![None; wanted.len()];
        let running =
            Running { wanted, bodies, runs, asked: 0, in_flight: 0, failures: Vec::new() };
        self.reads.running.insert(id, running);
        self.ask_runs(cx, id);
        id
    }

    fn ask_runs(&mut self, cx: &mut Cx<'_>, id: ReadId) {
        loop {
            let running = self.reads.running.get_mut(&id).expect("the read is running");
            if running.in_flight >= RUNS_IN_FLIGHT_MAX || running.asked >= running.runs.len() {
                return;
            }
            let run = running.asked;
            running.asked += 1;
            running.in_flight += 1;
            let Run { segment, start, end, .. } = running.runs[run];
            let op =
                DiskOp::Read { file: segment_file(segment), offset: start, bytes: end - start };
            self.request(cx, Lane::Background, Purpose::Read { id, run }, op);
        }
    }

    pub(super) fn handle_run(
        &mut self,
        cx: &mut Cx<'_>,
        id: ReadId,
        run: usize,
        result: Result<DiskOutput, DiskError>,
    ) {
        let running = self.reads.running.get_mut(&id).expect("the read is running");
        running.in_flight -= 1;
        let segment = running.runs[run].segment;
        let holder = self.segments.get_mut(&segment).expect("a segment with readers stays");
        assert!(holder.readers > 0, "{segment} has no reader");
        holder.readers -= 1;
        match result {
            Err(_) if running.runs[run].members.len() > 1 => {
                let parts = running.split(run);
                holder.readers += parts;
            }
            result => running.take_run(run, result.map(data)),
        }
        let is_done = running.in_flight == 0 && running.asked == running.runs.len();
        if !is_done {
            return self.ask_runs(cx, id);
        }
        let running = self.reads.running.remove(&id).expect("it was just looked at");
        let mut failures = running.failures;
        failures.sort_by_key(|failure| (failure.version, failure.stream));
        let result = if failures.is_empty() {
            Ok(running.bodies.into_iter().map(|body| body.expect("all were read")).collect())
        } else {
            Err(failures)
        };
        self.events.push(LogEvent::Read { id, result });
    }
}

impl Running {
    /// Plans the blocks of a run as two runs: how many there are more.
    fn split(&mut self, run: usize) -> u32 {
        let members = core::mem::take(&mut self.runs[run].members);
        let (near, far) = members.split_at(members.len() / 2);
        assert!(!near.is_empty() && !far.is_empty(), "{members:?} are two halves");
        for half in [near, far] {
            let blocks = half.iter().map(|place| &self.wanted[*place].1);
            let start = blocks.clone().map(|block| block.at / PAGE_BYTES * PAGE_BYTES).min();
            let end = blocks.map(|block| padded(block.at + u64::from(block.bytes))).max();
            let (start, end) = start.zip(end).expect("a half has a block");
            let segment = self.runs[run].segment;
            self.runs.push(Run { segment, start, end, members: half.to_vec() });
        }
        2
    }

    fn take_run(&mut self, run: usize, result: Result<Bytes, DiskError>) {
        let Run { start, ref members, .. } = self.runs[run];
        for place in members {
            let (stream, block) = &self.wanted[*place];
            let found = result.as_ref().map_err(ToString::to_string).and_then(|bytes| {
                let from = (block.at - start) as usize;
                let to = from + block.bytes as usize;
                if bytes.len() < to {
                    return Err(format!("{} of {to} bytes are there", bytes.len()));
                }
                let body = bytes.slice(from..to);
                let checksum = crc32c::crc32c(&body);
                if checksum == block.checksum {
                    return Ok(body);
                }
                Err(format!("checksum {:08x}, computed {checksum:08x}", block.checksum))
            });
            match found {
                Ok(body) => self.bodies[*place] = Some(body),
                Err(what) => {
                    let (stream, version, segment) = (*stream, block.version, block.segment);
                    self.failures.push(ReadFailure { stream, version, segment, what });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use common::{Offset, WallTime};

    use super::*;

    fn block(segment: u64, at: u64, bytes: u32) -> (StreamId, BlockRef) {
        let block = BlockRef {
            version: Version(1),
            commit_time: WallTime(0),
            base_offset: Offset(0),
            record_count: 1,
            bytes,
            checksum: 0,
            segment: SegmentId(segment),
            at,
        };
        (StreamId(17), block)
    }

    #[test]
    fn neighbours_share_a_run_up_to_the_limit() {
        let wanted = [
            block(1, 4096 + 128, 100),
            block(2, 4096, 10),
            block(1, 4096 + 300, 8000),
            block(1, 400_000, 10),
        ];
        let runs = plan_runs(&wanted, 64 << 10);
        let shape: Vec<_> = runs.iter().map(|run| (run.segment.0, run.start, run.end)).collect();
        assert_eq!(shape, [(1, 4096, 16384), (1, 397_312, 401_408), (2, 4096, 8192)]);
        assert_eq!(runs[0].members, [0, 2]);
        let runs = plan_runs(&wanted[..1], 4096);
        assert_eq!(runs.len(), 1, "one block always fits");
    }
}
