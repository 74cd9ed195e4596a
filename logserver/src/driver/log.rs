//! The log thread: takes what is queued, writes it group by group, and lets reads run in between.
//!
//! ```text
//!  inbox:   W a0  W a1  R b  W a2  W c0  rename  W d0
//!           \_______________/   |      |        |
//!  group 1: a0 a1 a2, a barrier |      |        |      neighbours, same file, in order: D1
//!  group 2:                    c0, a barrier    |
//!  alone:                           rename      |
//!  group 3:                                    d0, a barrier
//!  reads:   b goes to the ring after group 1
//! ```
//! While a group is on its way to the disk, the next one gathers in the inbox: no lingering, one flush at a
//! time.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use common::disk::{DiskCompletion, DiskError, DiskOp, DiskOutput, DiskRequest, File};

use super::api::Shared;
use super::directory::Handle;
use super::engine::{Barrier, Engine};
use super::idle::IdlePoll;
use super::plain;
use super::ring::ReadJob;
use super::staging::{RUN_BYTES_MAX, Write};

/// Writes that share a barrier.
const GROUP_WRITES_MAX: usize = 64;

/// Bytes that share a barrier, unless the first write alone has more.
const GROUP_BYTES_MAX: u64 = 8 << 20;

/// Looks between two looks at the clock.
const POLL_LOOKS: u32 = 32;

/// The state of the log thread.
pub(super) struct LogThread {
    shared: Arc<Shared>,
    engine: Engine,
    barrier: Barrier,
    /// Writes and changes of names, in order.
    waiting: VecDeque<DiskRequest>,
    reads: VecDeque<DiskRequest>,
    done: Vec<DiskCompletion>,
    idle: IdlePoll,
}

/// Neighbours in the queue that go to one file and share a barrier.
#[derive(Debug)]
struct Group {
    writes: Vec<Write>,
    durable: bool,
    end: u64,
}

impl LogThread {
    pub(super) fn new(
        shared: Arc<Shared>,
        engine: Engine,
        barrier: Barrier,
        idle: IdlePoll,
    ) -> Self {
        Self {
            shared,
            engine,
            barrier,
            waiting: VecDeque::new(),
            reads: VecDeque::new(),
            done: Vec::new(),
            idle,
        }
    }

    /// Runs until the inbox is closed and everything has been answered.
    pub(super) fn run(mut self) {
        loop {
            let closed = self.shared.log.is_closed();
            self.take();
            let mut busy = self.carry_out_next();
            self.shared.outbox.publish(&mut self.done);
            self.advance_reads();
            busy |= !self.done.is_empty();
            self.shared.outbox.publish(&mut self.done);
            if busy || !self.shared.log.is_empty() {
                continue;
            }
            if closed && self.reads.is_empty() && !self.engine.reads_outstanding() {
                return;
            }
            self.rest();
        }
    }

    /// Empties the inbox, which is bounded. Reads leave the order here.
    fn take(&mut self) {
        while let Some(request) = self.shared.log.pop() {
            match request.op {
                DiskOp::Read { .. } => self.reads.push_back(request),
                _ => self.waiting.push_back(request),
            }
        }
    }

    /// One group, or one change of names. Whether there was anything to do.
    fn carry_out_next(&mut self) -> bool {
        let Some(DiskRequest { id, op, .. }) = self.waiting.pop_front() else { return false };
        match op {
            DiskOp::Write { file, offset, data, durable } => {
                self.write_group(file, Write { id, offset, data }, durable);
            }
            op => {
                let result = self.shared.directory.carry_out(&op);
                self.done.push(DiskCompletion { id, result });
            }
        }
        true
    }

    fn write_group(&mut self, file: File, first: Write, durable: bool) {
        let admitted = self.shared.directory.check_sound().and_then(|()| {
            let handle = self.shared.directory.handle(file)?;
            handle.admit_write(file, first.offset, first.padded_bytes())?;
            Ok(handle)
        });
        let handle = match admitted {
            Ok(handle) => handle,
            Err(error) => {
                return self.done.push(DiskCompletion { id: first.id, result: Err(error) });
            }
        };
        let group = gather(&mut self.waiting, file, &handle, first, durable);
        let result = self.write(file, &handle, &group).map(|()| DiskOutput::Done);
        for write in group.writes {
            self.done.push(DiskCompletion { id: write.id, result: result.clone() });
        }
    }

    fn write(&mut self, file: File, handle: &Handle, group: &Group) -> Result<(), DiskError> {
        let directory = &self.shared.directory;
        let alone = self.barrier == Barrier::Dsync && group.is_one_run() && !handle.is_dirty();
        let dsync = group.durable && alone;
        let kernel_writes = self
            .engine
            .write(handle, &group.writes, dsync)
            .map_err(|error| directory.fail("write", file, error))?;
        if dsync {
            handle.note_written_durably(group.end);
        } else {
            handle.note_written(group.end);
        }
        if group.durable && !dsync {
            handle.barrier().map_err(|error| directory.fail("fdatasync", file, error))?;
        }
        let bytes = group.writes.iter().map(Write::padded_bytes).sum();
        self.shared.counters.count_writes(group.writes.len() as u64, bytes, group.durable);
        self.shared.counters.count_group(kernel_writes, bytes, group.durable);
        Ok(())
    }

    /// Starts what reads there is room for and picks up what has finished.
    fn advance_reads(&mut self) {
        while self.engine.has_room_for_read()
            && let Some(request) = self.reads.pop_front()
        {
            self.start_read(request);
        }
        if let Engine::Ring(ring) = &mut self.engine {
            let advanced = ring.advance_reads(&mut self.done);
            stay_alive(advanced, "advance the reads of");
        }
    }

    fn start_read(&mut self, request: DiskRequest) {
        let DiskRequest { id, op: DiskOp::Read { file, offset, bytes }, .. } = request else {
            unreachable!("only reads are queued as reads")
        };
        let Engine::Ring(ring) = &mut self.engine else {
            let result = plain::read(&self.shared.directory, file, offset, bytes);
            self.shared.counters.count_read(result.as_ref().map_or(0, Bytes::len) as u64);
            return self.done.push(DiskCompletion { id, result: result.map(DiskOutput::Data) });
        };
        let admitted = self.shared.directory.handle(file).and_then(|handle| {
            let wanted = handle.admit_read(file, offset, bytes)?;
            Ok((handle, wanted))
        });
        let result = match admitted {
            Ok((handle, wanted)) if wanted > 0 => {
                self.shared.counters.count_read(wanted as u64);
                return ring.start_read(ReadJob::new(id, file, handle, offset, wanted));
            }
            Ok(_) => Ok(DiskOutput::Data(Bytes::new())),
            Err(error) => Err(error),
        };
        self.done.push(DiskCompletion { id, result });
    }

    /// Waits for work: awake for a moment if that has paid off, then asleep (D6).
    fn rest(&mut self) {
        let since = Instant::now();
        if !self.poll(since) {
            let mut waited = Ok(());
            self.shared.log.sleep(|signal| waited = self.engine.wait(signal));
            stay_alive(waited, "wait with");
        }
        self.idle.waited(since);
    }

    /// Whether work came while the thread was looking for it. Whoever else wants the core gets it.
    fn poll(&self, since: Instant) -> bool {
        while self.idle.looks_on(since) {
            for _ in 0..POLL_LOOKS {
                if !self.shared.log.is_empty() {
                    return true;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        false
    }
}

/// A ring that can't be entered any more: nothing can be answered, so the thread ends loudly. The driver then
/// refuses everything (see `Driver::is_alive`).
fn stay_alive(outcome: io::Result<()>, what: &str) {
    if let Err(error) = outcome {
        panic!("can't {what} the ring: {error}");
    }
}

impl Group {
    /// Whether the group is one write to the kernel.
    fn is_one_run(&self) -> bool {
        let bytes = self.end - self.writes[0].offset;
        let together = self.writes.windows(2).all(|pair| pair[0].end() == pair[1].offset);
        bytes > 0 && bytes <= RUN_BYTES_MAX as u64 && together
    }
}

/// Takes the writes behind `first` that may share its barrier: of the same file, admitted, each behind the
/// one before (D1).
fn gather(
    waiting: &mut VecDeque<DiskRequest>,
    file: File,
    handle: &Handle,
    first: Write,
    durable: bool,
) -> Group {
    let mut bytes = first.padded_bytes();
    let mut group = Group { end: first.end(), writes: vec![first], durable };
    while group.writes.len() < GROUP_WRITES_MAX
        && let Some(next) = waiting.pop_front()
    {
        let DiskRequest { id, op: DiskOp::Write { file: its_file, offset, data, durable }, lane } =
            next
        else {
            waiting.push_front(next);
            break;
        };
        let write = Write { id, offset, data };
        let joins = its_file == file
            && offset >= group.end
            && bytes + write.padded_bytes() <= GROUP_BYTES_MAX
            && handle.admit_write(file, offset, write.padded_bytes()).is_ok();
        if !joins {
            let op = DiskOp::Write { file: its_file, offset, data: write.data, durable };
            waiting.push_front(DiskRequest { id, lane, op });
            break;
        }
        bytes += write.padded_bytes();
        group.end = write.end();
        group.durable |= durable;
        group.writes.push(write);
    }
    group
}

#[cfg(test)]
mod tests {
    use super::super::api::Options;
    use super::super::directory::Directory;
    use super::*;
    use common::disk::{DiskOpId, Lane, PAGE_BYTES};

    fn write(id: u64, file: File, page: u64, pages: u64, durable: bool) -> DiskRequest {
        let data = Bytes::from(vec![1; usize::try_from(pages * PAGE_BYTES).unwrap()]).into();
        DiskRequest {
            id: DiskOpId(id),
            lane: Lane::Log,
            op: DiskOp::Write { file, offset: page * PAGE_BYTES, data, durable },
        }
    }

    /// The ids of the groups that a queue falls into.
    fn groups(requests: impl IntoIterator<Item = DiskRequest>) -> Vec<Vec<u64>> {
        let path = tempfile::tempdir().unwrap();
        let directory = Directory::open(path.path(), &Options::default()).unwrap();
        let create = DiskOp::Create { file: File::Spare(0), bytes: 64 * PAGE_BYTES };
        directory.carry_out(&create).unwrap();
        let handle = directory.handle(File::Spare(0)).unwrap();
        let mut waiting: VecDeque<_> = requests.into_iter().collect();
        let mut groups = Vec::new();
        while let Some(request) = waiting.pop_front() {
            let DiskOp::Write { file, offset, data, durable } = request.op else {
                groups.push(vec![request.id.0]);
                continue;
            };
            let first = Write { id: request.id, offset, data };
            let group = gather(&mut waiting, file, &handle, first, durable);
            assert!(group.writes.windows(2).all(|pair| pair[0].end() <= pair[1].offset));
            groups.push(group.writes.iter().map(|write| write.id.0).collect());
        }
        groups
    }

    #[test]
    fn neighbours_in_order_share_a_barrier() {
        let (a, b) = (File::Spare(0), File::Spare(1));
        let list = DiskRequest { id: DiskOpId(5), lane: Lane::Log, op: DiskOp::List };
        let queue = [
            write(0, a, 0, 1, true),
            write(1, a, 1, 2, false),
            write(2, a, 9, 1, true),
            write(3, a, 9, 1, true), // the same place again
            write(4, b, 10, 1, true),
            list,
            write(6, a, 11, 1, true),
            write(7, a, 63, 2, true), // out of the file
            write(8, a, 12, 1, true),
        ];
        assert_eq!(
            groups(queue),
            [vec![0, 1, 2], vec![3], vec![4], vec![5], vec![6], vec![7], vec![8]]
        );
    }

    #[test]
    fn groups_are_bounded() {
        let many = (0..64).map(|page| write(page, File::Meta(0), page, 1, true));
        let more = (0..6).map(|page| write(page + 64, File::Meta(0), 64 + page, 1, true));
        let sizes: Vec<_> = groups(many.chain(more)).iter().map(Vec::len).collect();
        assert_eq!(sizes, [GROUP_WRITES_MAX, 6]);
        let pages = GROUP_BYTES_MAX / PAGE_BYTES;
        let big = [(0, 2 * pages), (2 * pages, pages / 2), (5 * pages / 2, pages)];
        let big =
            (0..).zip(big).map(|(id, (page, count))| write(id, File::Meta(0), page, count, true));
        assert_eq!(groups(big), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn only_one_run_may_be_its_own_barrier() {
        let write = |page: u64, pages: u64| Write {
            id: DiskOpId(0),
            offset: page * PAGE_BYTES,
            data: Bytes::from(vec![1; (pages * PAGE_BYTES) as usize]).into(),
        };
        let group =
            |writes: Vec<Write>| Group { end: writes.last().unwrap().end(), writes, durable: true };
        assert!(group(vec![write(3, 1), write(4, 255)]).is_one_run());
        assert!(!group(vec![write(3, 1), write(4, 256)]).is_one_run());
        assert!(!group(vec![write(3, 1), write(5, 1)]).is_one_run());
        assert!(!group(vec![write(3, 0)]).is_one_run());
    }
}
