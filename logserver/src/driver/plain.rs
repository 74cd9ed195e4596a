//! Reads and writes by system calls: the engine of machines that refuse io_uring, and of the background lane.

use std::io::{self, IoSlice};

use bytes::Bytes;
use common::disk::{DiskError, File};
use rustix::io::ReadWriteFlags;

use super::directory::{Directory, Handle, io_error};
use super::staging::{Feed, Pages, RUN_BYTES_MAX, Staging, Write};

/// Writes a group, one run after the other; with `dsync` each is its own barrier. How many writes it took.
pub(super) fn write(
    staging: &mut Staging,
    handle: &Handle,
    writes: &[Write],
    dsync: bool,
) -> io::Result<u64> {
    let flags = if dsync { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
    let mut feed = Feed::new(writes);
    let mut kernel_writes = 0;
    while feed.fill(staging) {
        for &run in staging.runs() {
            let (mut bytes, mut offset) = (staging.run_bytes(run), run.offset);
            while !bytes.is_empty() {
                let slices = [IoSlice::new(bytes)];
                kernel_writes += 1;
                match rustix::io::retry_on_intr(|| {
                    rustix::io::pwritev2(handle, &slices, offset, flags)
                })? {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    written => (bytes, offset) = (&bytes[written..], offset + written as u64),
                }
            }
        }
    }
    Ok(kernel_writes)
}

/// Reads what there is of `bytes` at `offset`.
pub(super) fn read(
    directory: &Directory,
    file: File,
    offset: u64,
    bytes: u64,
) -> Result<Bytes, DiskError> {
    let handle = directory.handle(file)?;
    let wanted = handle.admit_read(file, offset, bytes)?;
    let mut buffer = Pages::zeroed(wanted);
    let mut filled = 0;
    while filled < wanted {
        let end = buffer.bytes().len().min(filled + RUN_BYTES_MAX);
        let target = &mut buffer.bytes_mut()[filled..end];
        let count = rustix::io::pread(&*handle, target, offset + filled as u64)
            .map_err(|errno| io_error("read", file, errno))?;
        if count == 0 {
            return Err(io_error("read", file, io::Error::from(io::ErrorKind::UnexpectedEof)));
        }
        filled += count;
    }
    Ok(Bytes::from_owner(buffer).slice(..wanted))
}
