//! The directory of a disk: its lock, its open files, and what changes names or space.
//!
//! ```text
//!  dir/                      flock on the directory itself
//!  |- segment-<id>  --+
//!  |- spare-<number> -+----> handles: File -> Arc<Handle>   opened once, shared by all threads
//!  |- meta-<slot>   --+
//!  `- creating-<name>        half made; swept at open
//! ```
//! A file is made under another name and gets its own when its zeros are durable, so neither a crash nor a
//! full disk leaves half a file behind, nor harms the file that it was to replace.
//!
//! The table of handles is locked for a lookup, an open, a rename or an unlink: never for a barrier, and
//! never for the last close of a removed file, which is where a disk that discards takes its time.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use common::disk::{DiskError, DiskOp, DiskOutput, File, PAGE_BYTES};
use rustix::fs::{AtFlags, Dir, FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::api::{OpenError, Options};
use super::staging::Pages;

/// Open files at a time; an unused one makes room.
const HANDLES_MAX: usize = 256;

/// Bytes of zeros in one write: small enough that a flush of the log lane does not wait long behind it.
const ZEROS_BYTES: usize = 256 << 10;

/// The start of the name of a file that is being made.
const CREATING: &str = "creating-";

/// A file that is removed as soon as it is open: to try things out on.
const SCRATCH: &str = "scratch";

/// An open file.
#[derive(Debug)]
pub(super) struct Handle {
    fd: OwnedFd,
    /// Length in bytes. Only a meta file's grows.
    length: AtomicU64,
    /// Counts the writes that ended without a barrier of their own.
    written: AtomicU64,
    /// How many of them a barrier has covered.
    flushed: AtomicU64,
}

impl Handle {
    /// `unknown`: somebody before us may have written to it without a barrier.
    fn new(fd: OwnedFd, unknown: bool) -> io::Result<Self> {
        let length = rustix::fs::fstat(&fd)?.st_size;
        Ok(Self {
            fd,
            length: AtomicU64::new(u64::try_from(length).expect("a length is not negative")),
            written: AtomicU64::new(u64::from(unknown)),
            flushed: AtomicU64::new(0),
        })
    }

    pub(super) fn length(&self) -> u64 {
        self.length.load(Ordering::Acquire)
    }

    /// Takes note of a write that has ended, before anybody is told.
    pub(super) fn note_written(&self, end: u64) {
        self.length.fetch_max(end, Ordering::AcqRel);
        self.written.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes note of a write that was its own barrier.
    pub(super) fn note_written_durably(&self, end: u64) {
        self.length.fetch_max(end, Ordering::AcqRel);
    }

    /// Whether a write has ended that no barrier covers.
    pub(super) fn is_dirty(&self) -> bool {
        self.written.load(Ordering::Acquire) != self.flushed.load(Ordering::Acquire)
    }

    /// Makes everything durable that has been written so far (D2).
    pub(super) fn barrier(&self) -> io::Result<()> {
        let covered = self.written.load(Ordering::Acquire);
        rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.fd))?;
        self.flushed.fetch_max(covered, Ordering::AcqRel);
        Ok(())
    }

    /// Where a write of `bytes` at `offset` ends, if it may be done.
    pub(super) fn admit_write(
        &self,
        file: File,
        offset: u64,
        bytes: u64,
    ) -> Result<u64, DiskError> {
        let end = offset.checked_add(bytes).filter(|_| is_aligned(offset) && is_aligned(bytes));
        let grows = matches!(file, File::Meta(_));
        match end {
            Some(end) if end <= self.length() || grows => Ok(end),
            _ => Err(DiskError::Io {
                detail: format!(
                    "write to {} of {bytes} bytes at {offset}: outside of its {} bytes",
                    file.name(),
                    self.length()
                ),
            }),
        }
    }

    /// How many of `bytes` at `offset` there are to read.
    pub(super) fn admit_read(
        &self,
        file: File,
        offset: u64,
        bytes: u64,
    ) -> Result<usize, DiskError> {
        let wanted = bytes.min(self.length().saturating_sub(offset));
        if is_aligned(offset) && is_aligned(bytes) && wanted <= READ_BYTES_MAX {
            return Ok(usize::try_from(wanted).expect("at most READ_BYTES_MAX"));
        }
        Err(DiskError::Io {
            detail: format!(
                "read of {} of {bytes} bytes at {offset}: unaligned or above {READ_BYTES_MAX} bytes",
                file.name()
            ),
        })
    }
}

/// Bytes of one read.
const READ_BYTES_MAX: u64 = 256 << 20;

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const fn is_aligned(bytes: u64) -> bool {
    bytes.is_multiple_of(PAGE_BYTES)
}

/// [`DiskError::Io`] out of a call's name, its file and its error.
pub(super) fn io_error(call: &str, file: File, error: impl Into<io::Error>) -> DiskError {
    DiskError::Io { detail: format!("{call} of {}: {}", file.name(), error.into()) }
}

/// The directory. Shared by all threads of the driver.
#[derive(Debug)]
pub(super) struct Directory {
    fd: OwnedFd,
    direct: bool,
    quota_bytes: Option<u64>,
    reserve_free_bytes: u64,
    handles: Mutex<BTreeMap<File, Arc<Handle>>>,
    failure: OnceLock<String>,
}

impl Directory {
    /// Makes the directory if need be, locks it, sweeps what a crash left, and makes its names durable.
    pub(super) fn open(path: &Path, options: &Options) -> Result<Self, OpenError> {
        let failed = |call| move |error: io::Error| OpenError::Io { call, source: error };
        std::fs::create_dir_all(path).map_err(failed("create the directory"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| failed("open the directory")(errno.into()))?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(OpenError::Locked { directory: path.into() }),
            Err(errno) => return Err(failed("lock the directory")(errno.into())),
        }
        let mut directory = Self {
            fd,
            direct: false,
            quota_bytes: options.quota_bytes,
            reserve_free_bytes: options.reserve_free_bytes,
            handles: Mutex::default(),
            failure: OnceLock::new(),
        };
        directory.sweep().map_err(failed("sweep the directory"))?;
        rustix::fs::fsync(&directory.fd)
            .map_err(|errno| failed("fsync the directory")(errno.into()))?;
        directory.direct = !options.buffered && directory.takes_direct();
        Ok(directory)
    }

    /// Whether reads and writes go past the page cache.
    pub(super) const fn is_direct(&self) -> bool {
        self.direct
    }

    /// Carries out what is neither a read nor a write.
    pub(super) fn carry_out(&self, op: &DiskOp) -> Result<DiskOutput, DiskError> {
        match *op {
            DiskOp::List => self.list(),
            DiskOp::Create { file, bytes } => self.create(file, bytes),
            DiskOp::Rename { from, to } => self.rename(from, to),
            DiskOp::Remove { file } => self.remove(file),
            DiskOp::Read { .. } | DiskOp::Write { .. } => {
                unreachable!("reads and writes have engines of their own")
            }
        }
    }

    /// The open file.
    pub(super) fn handle(&self, file: File) -> Result<Arc<Handle>, DiskError> {
        self.handle_in(&mut self.lock(), file)
    }

    /// Latches the first failure of a write or of a barrier (D3) and makes it an answer.
    pub(super) fn fail(&self, call: &str, file: File, error: io::Error) -> DiskError {
        let error = io_error(call, file, error);
        if self.failure.set(error.to_string()).is_ok() {
            tracing::error!(%error, "the disk has failed: nothing is written any more");
        }
        error
    }

    /// An error once a write or a barrier has failed (D3).
    pub(super) fn check_sound(&self) -> Result<(), DiskError> {
        self.failure.get().map_or(Ok(()), |first| {
            Err(DiskError::Io { detail: format!("refused after an earlier failure: {first}") })
        })
    }

    /// A nameless file of written zeros that vanishes with its handle.
    pub(super) fn scratch(&self, bytes: u64) -> io::Result<Handle> {
        let fd = self.open_file(SCRATCH, OFlags::CREATE | OFlags::TRUNC, self.direct)?;
        rustix::fs::unlinkat(&self.fd, SCRATCH, AtFlags::empty())?;
        write_zeros(&fd, bytes)?;
        Handle::new(fd, false)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<File, Arc<Handle>>> {
        self.handles.lock().expect("no panic under this lock")
    }

    fn handle_in(
        &self,
        handles: &mut BTreeMap<File, Arc<Handle>>,
        file: File,
    ) -> Result<Arc<Handle>, DiskError> {
        if let Some(handle) = handles.get(&file) {
            return Ok(Arc::clone(handle));
        }
        let opened = self
            .open_file(&file.name(), OFlags::empty(), self.direct)
            .and_then(|fd| Handle::new(fd, true));
        let handle = match opened {
            Ok(handle) => Arc::new(handle),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DiskError::NotFound(file));
            }
            Err(error) => return Err(io_error("open", file, error)),
        };
        make_room(handles);
        handles.insert(file, Arc::clone(&handle));
        Ok(handle)
    }

    fn open_file(&self, name: &str, flags: OFlags, direct: bool) -> io::Result<OwnedFd> {
        let direct = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = flags | direct | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP)?)
    }

    /// Whether the file system takes a file and a write with O_DIRECT.
    fn takes_direct(&self) -> bool {
        let Ok(fd) = self.open_file(SCRATCH, OFlags::CREATE | OFlags::TRUNC, true) else {
            return false;
        };
        // A scratch file that stays is truncated and used again.
        let _ = rustix::fs::unlinkat(&self.fd, SCRATCH, AtFlags::empty());
        write_zeros(&fd, PAGE_BYTES).is_ok()
    }

    /// The names in the directory with their lengths, foreign ones included.
    fn entries(&self) -> io::Result<Vec<(String, u64)>> {
        let mut entries = Vec::new();
        for entry in Dir::read_from(&self.fd)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name == "." || name == ".." {
                continue;
            }
            match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => {
                    let bytes = u64::try_from(stat.st_size).expect("a length is not negative");
                    entries.push((name.to_owned(), bytes));
                }
                // Removed meanwhile by the other lane.
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(entries)
    }

    /// Removes what a crash left half made.
    fn sweep(&self) -> io::Result<()> {
        for (name, bytes) in self.entries()? {
            if name.strip_prefix(CREATING).and_then(File::parse).is_some() || name == SCRATCH {
                tracing::info!(
                    name,
                    bytes,
                    "removing a file that was being made in an earlier life"
                );
                rustix::fs::unlinkat(&self.fd, &*name, AtFlags::empty())?;
            }
        }
        Ok(())
    }

    fn list(&self) -> Result<DiskOutput, DiskError> {
        let failed = |error: io::Error| DiskError::Io { detail: format!("list: {error}") };
        let entries = self.entries().map_err(failed)?;
        let free_bytes = self.free_bytes(&entries, 0).map_err(failed)?;
        let mut files: Vec<_> = entries
            .into_iter()
            .filter_map(|(name, bytes)| Some((File::parse(&name)?, bytes)))
            .collect();
        files.sort_unstable();
        Ok(DiskOutput::Listing { files, free_bytes })
    }

    /// What may still be created, in whole pages, when `replaced_bytes` go in exchange.
    fn free_bytes(&self, entries: &[(String, u64)], replaced_bytes: u64) -> io::Result<u64> {
        let stat = rustix::fs::fstatvfs(&self.fd)?;
        let space = (stat.f_bavail * stat.f_frsize).saturating_sub(self.reserve_free_bytes);
        let used: u64 = entries
            .iter()
            .filter(|(name, _)| File::parse(name).is_some())
            .map(|(_, bytes)| bytes)
            .sum();
        let quota = self
            .quota_bytes
            .map_or(u64::MAX, |quota| quota.saturating_sub(used.saturating_sub(replaced_bytes)));
        let free = space.min(quota);
        Ok(free - free % PAGE_BYTES)
    }

    fn create(&self, file: File, bytes: u64) -> Result<DiskOutput, DiskError> {
        let failed = |call: &'static str| {
            move |error: io::Error| match Errno::from_io_error(&error) {
                Some(Errno::NOSPC | Errno::DQUOT) => DiskError::Full,
                _ => io_error(call, file, error),
            }
        };
        if !is_aligned(bytes) {
            return Err(failed("create")(io::ErrorKind::InvalidInput.into()));
        }
        let name = file.name();
        let entries = self.entries().map_err(failed("create"))?;
        let replaced_bytes =
            entries.iter().find(|(old, _)| *old == name).map_or(0, |(_, bytes)| *bytes);
        if bytes > self.free_bytes(&entries, replaced_bytes).map_err(failed("create"))? {
            return Err(DiskError::Full);
        }
        let half_made = format!("{CREATING}{name}");
        let made = self.make(&half_made, bytes).and_then(|handle| {
            let mut handles = self.lock();
            rustix::fs::renameat(&self.fd, &*half_made, &self.fd, &*name)?;
            make_room(&mut handles);
            Ok(handles.insert(file, Arc::new(handle)))
        });
        let replaced = made.map_err(|error| {
            let _ = rustix::fs::unlinkat(&self.fd, &*half_made, AtFlags::empty());
            failed("create")(error)
        })?;
        drop(replaced);
        self.names_are_durable("fsync of the directory after the creation", file)
    }

    /// A file of durable zeros.
    fn make(&self, name: &str, bytes: u64) -> io::Result<Handle> {
        let fd = self.open_file(name, OFlags::CREATE | OFlags::TRUNC, self.direct)?;
        if bytes > 0 {
            match rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes) {
                // Some file systems know nothing of it; the zeros allocate as well.
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        write_zeros(&fd, bytes)?;
        rustix::fs::fsync(&fd)?;
        let handle = Handle::new(fd, false)?;
        assert_eq!(handle.length(), bytes, "a new file has another length than was written");
        Ok(handle)
    }

    fn rename(&self, from: File, to: File) -> Result<DiskOutput, DiskError> {
        let replaced = {
            let mut handles = self.lock();
            let handle = self.handle_in(&mut handles, from)?;
            rustix::fs::renameat(&self.fd, from.name(), &self.fd, to.name())
                .map_err(|errno| io_error("rename", from, errno))?;
            handles.remove(&from);
            handles.insert(to, handle)
        };
        drop(replaced);
        self.names_are_durable("fsync of the directory after the rename", to)
    }

    fn remove(&self, file: File) -> Result<DiskOutput, DiskError> {
        let removed = {
            let mut handles = self.lock();
            // Held open over the unlink, which is then only a change of names.
            let handle = self.handle_in(&mut handles, file)?;
            rustix::fs::unlinkat(&self.fd, file.name(), AtFlags::empty())
                .map_err(|errno| io_error("unlink", file, errno))?;
            handles.remove(&file);
            handle
        };
        drop(removed);
        self.names_are_durable("fsync of the directory after the removal", file)
    }

    fn names_are_durable(&self, call: &str, file: File) -> Result<DiskOutput, DiskError> {
        match rustix::io::retry_on_intr(|| rustix::fs::fsync(&self.fd)) {
            Ok(()) => Ok(DiskOutput::Done),
            Err(errno) => Err(self.fail(call, file, errno.into())),
        }
    }

    /// Puts another open file in a file's place, for tests of failures.
    #[cfg(test)]
    pub(super) fn plant(&self, file: File, fd: OwnedFd) {
        let handle = Handle::new(fd, false).expect("an open file has a length");
        self.lock().insert(file, Arc::new(handle));
    }
}

/// Closes an open file that nobody uses, when there are too many. A dirty one stays: its count would be lost.
fn make_room(handles: &mut BTreeMap<File, Arc<Handle>>) {
    if handles.len() < HANDLES_MAX {
        return;
    }
    let unused = handles
        .iter()
        .find(|(_, handle)| Arc::strong_count(handle) == 1 && !handle.is_dirty())
        .map(|(&file, _)| file);
    if let Some(file) = unused {
        handles.remove(&file);
    }
}

fn write_zeros(fd: &OwnedFd, bytes: u64) -> io::Result<()> {
    let zeros = Pages::zeroed(ZEROS_BYTES.min(usize::try_from(bytes).unwrap_or(ZEROS_BYTES)));
    let mut offset = 0;
    while offset < bytes {
        let rest = usize::try_from(bytes - offset).unwrap_or(ZEROS_BYTES);
        let piece = &zeros.bytes()[..rest.min(ZEROS_BYTES)];
        match rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, piece, offset))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => offset += written as u64,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::SegmentId;

    fn open(path: &Path) -> Result<Directory, OpenError> {
        Directory::open(path, &Options::default())
    }

    #[test]
    fn a_second_opener_is_refused() {
        let path = tempfile::tempdir().unwrap();
        let first = open(path.path()).unwrap();
        assert!(matches!(open(path.path()), Err(OpenError::Locked { .. })));
        drop(first);
        open(path.path()).unwrap();
    }

    #[test]
    fn what_a_crash_left_half_made_is_swept_and_foreign_files_are_left_alone() {
        let path = tempfile::tempdir().unwrap();
        let half_made = format!("{CREATING}{}", File::Spare(1).name());
        for name in [&*half_made, "creating-havoc", "lost+found"] {
            std::fs::write(path.path().join(name), [1; 4096]).unwrap();
        }
        let directory = open(path.path()).unwrap();
        let mut names: Vec<_> =
            directory.entries().unwrap().into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(names, ["creating-havoc", "lost+found"]);
        let Ok(DiskOutput::Listing { files, .. }) = directory.list() else { panic!("a listing") };
        assert_eq!(files, []);
    }

    #[test]
    fn a_reserve_beyond_the_disk_makes_it_full() {
        let path = tempfile::tempdir().unwrap();
        let options = Options { reserve_free_bytes: u64::MAX, ..Options::default() };
        let directory = Directory::open(path.path(), &options).unwrap();
        assert_eq!(directory.create(File::Spare(0), PAGE_BYTES), Err(DiskError::Full));
        assert_eq!(directory.entries().unwrap(), []);
    }

    #[test]
    fn a_barrier_covers_only_what_was_written_before_it() {
        let path = tempfile::tempdir().unwrap();
        let directory = open(path.path()).unwrap();
        directory.create(File::Meta(0), PAGE_BYTES).unwrap();
        let handle = directory.handle(File::Meta(0)).unwrap();
        assert!(!handle.is_dirty(), "a new file is durable");
        handle.note_written(2 * PAGE_BYTES);
        assert!(handle.is_dirty());
        handle.barrier().unwrap();
        assert!(!handle.is_dirty());
        handle.note_written_durably(3 * PAGE_BYTES);
        assert!(!handle.is_dirty());
        assert_eq!(handle.length(), 3 * PAGE_BYTES);
        drop(directory);
        let directory = open(path.path()).unwrap();
        assert!(directory.handle(File::Meta(0)).unwrap().is_dirty(), "nobody knows");
    }

    #[test]
    fn open_files_are_bounded_and_dirty_ones_stay() {
        let path = tempfile::tempdir().unwrap();
        let directory = open(path.path()).unwrap();
        let segment = |id| File::Segment(SegmentId(id));
        directory.create(segment(0), PAGE_BYTES).unwrap();
        let dirty = directory.handle(segment(0)).unwrap();
        dirty.note_written(PAGE_BYTES);
        let dirty = Arc::downgrade(&dirty);
        for id in 1..HANDLES_MAX as u64 + 10 {
            std::fs::write(path.path().join(segment(id).name()), []).unwrap();
            let handle = directory.handle(segment(id)).unwrap();
            handle.barrier().unwrap();
        }
        assert_eq!(directory.lock().len(), HANDLES_MAX);
        assert!(dirty.upgrade().is_some(), "an open file that no barrier has covered was closed");
    }
}
