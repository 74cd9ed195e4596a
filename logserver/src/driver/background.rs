//! The background thread: what may take long. And, without a ring, the thread that reads.
//!
//! Both take one request after the other, and sleep while there is none.

use std::sync::Arc;

use common::disk::{DiskCompletion, DiskError, DiskOp, DiskOutput, DiskRequest, File};

use super::api::Shared;
use super::handoff::{Inbox, WakeSignal};
use super::plain;
use super::staging::{RUN_BYTES_MAX, Staging, Write};

/// Carries the background lane out, in order.
pub(super) fn run(shared: &Arc<Shared>) {
    let mut staging = Staging::new(RUN_BYTES_MAX);
    serve(shared, &shared.background, |request| match request.op {
        DiskOp::Write { file, offset, data, durable } => {
            let write = Write { id: request.id, offset, data };
            write_one(shared, &mut staging, file, write, durable).map(|()| DiskOutput::Done)
        }
        DiskOp::Read { .. } => read_one(shared, &request),
        op => shared.directory.carry_out(&op),
    });
}

/// Carries reads out, for an engine that can't do so beside its writes.
pub(super) fn run_reads(shared: &Arc<Shared>) {
    serve(shared, &shared.reads, |request| read_one(shared, &request));
}

fn serve(
    shared: &Shared,
    inbox: &Inbox<DiskRequest>,
    mut carry_out: impl FnMut(DiskRequest) -> Result<DiskOutput, DiskError>,
) {
    let mut done = Vec::new();
    loop {
        let closed = inbox.is_closed();
        while let Some(request) = inbox.pop() {
            let id = request.id;
            done.push(DiskCompletion { id, result: carry_out(request) });
            shared.outbox.publish(&mut done);
        }
        if closed {
            return;
        }
        inbox.sleep(WakeSignal::wait);
    }
}

fn read_one(shared: &Shared, request: &DiskRequest) -> Result<DiskOutput, DiskError> {
    let DiskOp::Read { file, offset, bytes } = request.op else {
        unreachable!("only reads are queued as reads")
    };
    let data = plain::read(&shared.directory, file, offset, bytes)?;
    shared.counters.count_read(data.len() as u64);
    Ok(DiskOutput::Data(data))
}

fn write_one(
    shared: &Shared,
    staging: &mut Staging,
    file: File,
    write: Write,
    durable: bool,
) -> Result<(), DiskError> {
    let directory = &shared.directory;
    directory.check_sound()?;
    let handle = directory.handle(file)?;
    let bytes = write.padded_bytes();
    let end = handle.admit_write(file, write.offset, bytes)?;
    plain::write(staging, &handle, &[write], false)
        .map_err(|error| directory.fail("write", file, error))?;
    handle.note_written(end);
    if durable {
        handle.barrier().map_err(|error| directory.fail("fdatasync", file, error))?;
    }
    shared.counters.count_writes(1, bytes, durable);
    Ok(())
}
