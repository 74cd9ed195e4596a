//! The register in a file of two alternating checksummed slots: of a single node, or of all on one machine.
//!
//! ```text
//! off        size   field                                slot n of revision r: n = r mod 2
//!   0           8   magic  "MRREGST1"
//!   8           8   revision, from 1
//!  16           4   value length
//!  20           4   crc32c over bytes 8..20 and the value
//!  24           -   value
//! ```
//!
//! A write goes to the slot that does not hold the newest value, then fdatasync: a torn write leaves the
//! other slot, and the writer never gets an answer. The directory's lock (held by the log's driver) keeps a
//! second process out, so a compare-and-set is a compare and a write.
//!
//! A shared file has no such lock around it: each operation takes one on the file itself, reads both slots
//! anew, and only then compares and writes. It works for processes of one machine, on a local file system.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use common::register::{REGISTER_BYTES_MAX, RegisterOp, RegisterOutcome, Revision};
use thiserror::Error;

const MAGIC: &[u8; 8] = b"MRREGST1";
const HEADER_BYTES: usize = 24;
/// Bytes of a slot; a value is smaller by the header.
const SLOT_BYTES: usize = 256 << 10;
const _: () = assert!(HEADER_BYTES + REGISTER_BYTES_MAX <= SLOT_BYTES, "every value fits a slot");

/// Why a register file can't be used.
#[derive(Debug, Error)]
pub enum RegisterError {
    /// A call failed.
    #[error("register {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Neither slot is whole though the file was written before.
    #[error("register {}: neither slot is whole", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
    },
}

/// An open register file.
#[derive(Debug)]
pub struct FileRegister {
    file: File,
    newest: (Revision, Bytes),
}

enum Slot {
    Empty,
    Broken,
    Whole(Revision, Bytes),
}

impl FileRegister {
    /// Opens the file; makes it when it does not exist.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn open(path: &Path) -> Result<Self, RegisterError> {
        let file = open_or_make(path)?;
        let newest = newest(&file, path)?;
        Ok(Self { file, newest })
    }

    /// Carries out one operation.
    pub fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        carry_out(&self.file, &mut self.newest, op)
    }
}

/// How long an operation waits for others that have the file.
const LOCK_PATIENCE: Duration = super::ANSWER_TIMEOUT;
/// How soon it looks again.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// A register file that the processes of one machine share.
#[derive(Debug)]
pub struct SharedFileRegister {
    file: File,
    path: PathBuf,
}

impl SharedFileRegister {
    /// Opens the file; makes it when it does not exist.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn open(path: &Path) -> Result<Self, RegisterError> {
        Ok(Self { file: open_or_make(path)?, path: path.to_owned() })
    }

    /// Carries out one operation, under a lock that ends with it or with the process.
    pub async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        let waited = tokio::time::timeout(LOCK_PATIENCE, self.lock()).await;
        let locked = waited.unwrap_or_else(|_| Err("another process holds its lock".to_owned()));
        if let Err(what) = locked {
            return RegisterOutcome::Unavailable(what);
        }
        let outcome = self.apply_locked(op);
        // A lock that can't be given back goes with the process.
        let _ = self.file.unlock();
        outcome
    }

    async fn lock(&self) -> Result<(), String> {
        loop {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) => tokio::time::sleep(LOCK_PAUSE).await,
                Err(TryLockError::Error(error)) => return Err(error.to_string()),
            }
        }
    }

    fn apply_locked(&self, op: RegisterOp) -> RegisterOutcome {
        // What a writer left that was killed before its own sync must be durable before anybody acts on it.
        let synced = self.file.sync_data().map_err(|error| error.to_string());
        let newest =
            synced.and_then(|()| newest(&self.file, &self.path).map_err(|error| error.to_string()));
        match newest {
            Ok(mut newest) => carry_out(&self.file, &mut newest, op),
            Err(what) => RegisterOutcome::Unavailable(what),
        }
    }
}

/// Answers out of the newest value, or replaces it: in the file first.
fn carry_out(file: &File, newest: &mut (Revision, Bytes), op: RegisterOp) -> RegisterOutcome {
    match op {
        RegisterOp::Read => RegisterOutcome::Value(newest.0, newest.1.clone()),
        RegisterOp::Cas { expect, .. } if expect != newest.0 => RegisterOutcome::Lost,
        RegisterOp::Cas { expect, value } => {
            let revision = Revision(expect.0 + 1);
            match write(file, revision, &value) {
                Ok(()) => {
                    *newest = (revision, value);
                    RegisterOutcome::Written(revision)
                }
                Err(error) => RegisterOutcome::Indeterminate(error.to_string()),
            }
        }
    }
}

fn open_or_make(path: &Path) -> Result<File, RegisterError> {
    let io = |source| RegisterError::Io { path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(path).map_err(io)?;
    let bytes = 2 * SLOT_BYTES as u64;
    if file.metadata().map_err(io)?.len() < bytes {
        // Two processes that make it at once do the same.
        file.set_len(bytes).map_err(io)?;
        file.sync_all().map_err(io)?;
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        File::open(directory).and_then(|opened| opened.sync_all()).map_err(io)?;
    }
    Ok(file)
}

fn newest(file: &File, path: &Path) -> Result<(Revision, Bytes), RegisterError> {
    let io = |source| RegisterError::Io { path: path.to_owned(), source };
    let mut newest = (Revision(0), Bytes::new());
    let mut broken = 0;
    for place in 0..2 {
        match read_slot(file, place).map_err(io)? {
            Slot::Whole(revision, value) if revision > newest.0 => newest = (revision, value),
            Slot::Broken => broken += 1,
            Slot::Empty | Slot::Whole(..) => {}
        }
    }
    // One broken slot is a write that was cut off, and was never answered.
    if broken == 2 || (broken == 1 && newest.0 == Revision(0) && !is_first_write_torn(file)) {
        return Err(RegisterError::Corrupt { path: path.to_owned() });
    }
    Ok(newest)
}

fn write(file: &File, revision: Revision, value: &[u8]) -> std::io::Result<()> {
    assert!(
        value.len() + HEADER_BYTES <= SLOT_BYTES,
        "{} bytes are too many for a register",
        value.len()
    );
    let mut slot = Vec::with_capacity(HEADER_BYTES + value.len());
    slot.extend_from_slice(MAGIC);
    slot.extend_from_slice(&revision.0.to_le_bytes());
    slot.extend_from_slice(&u32::try_from(value.len()).expect("below a slot").to_le_bytes());
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&slot[8..20]), value);
    slot.extend_from_slice(&checksum.to_le_bytes());
    slot.extend_from_slice(value);
    file.write_all_at(&slot, slot_offset(revision.0 % 2))?;
    // Persist before anybody hears of it.
    file.sync_data()
}

const fn slot_offset(place: u64) -> u64 {
    place * SLOT_BYTES as u64
}

/// Revision 1 goes to slot 1: when slot 0 is untouched and slot 1 is broken, nothing was ever answered.
fn is_first_write_torn(file: &File) -> bool {
    matches!(read_slot(file, 0), Ok(Slot::Empty))
}

fn read_slot(file: &File, place: u64) -> std::io::Result<Slot> {
    let mut slot = vec![0; SLOT_BYTES];
    let mut filled = 0;
    while filled < SLOT_BYTES {
        match file.read_at(&mut slot[filled..], slot_offset(place) + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    if slot.iter().all(|byte| *byte == 0) {
        return Ok(Slot::Empty);
    }
    let number = |range: core::ops::Range<usize>| {
        slot[range].iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let (revision, length, stored) = (number(8..16), number(16..20) as usize, number(20..24));
    if slot[..8] != MAGIC[..] || length > SLOT_BYTES - HEADER_BYTES {
        return Ok(Slot::Broken);
    }
    let value = &slot[HEADER_BYTES..HEADER_BYTES + length];
    let computed = crc32c::crc32c_append(crc32c::crc32c(&slot[8..20]), value);
    if u64::from(computed) != stored || revision % 2 != place {
        return Ok(Slot::Broken);
    }
    Ok(Slot::Whole(Revision(revision), Bytes::copy_from_slice(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cas(register: &mut FileRegister, expect: u64, value: &'static [u8]) -> RegisterOutcome {
        let value = Bytes::from_static(value);
        register.apply(RegisterOp::Cas { expect: Revision(expect), value })
    }

    fn value(register: &mut FileRegister) -> (u64, Bytes) {
        match register.apply(RegisterOp::Read) {
            RegisterOutcome::Value(revision, value) => (revision.0, value),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn values_survive_and_a_stale_write_loses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("register");
        let mut register = FileRegister::open(&path).unwrap();
        assert_eq!(value(&mut register), (0, Bytes::new()));
        assert_eq!(cas(&mut register, 0, b"one"), RegisterOutcome::Written(Revision(1)));
        assert_eq!(cas(&mut register, 0, b"other"), RegisterOutcome::Lost);
        assert_eq!(cas(&mut register, 1, b"two"), RegisterOutcome::Written(Revision(2)));
        drop(register);
        assert_eq!(value(&mut FileRegister::open(&path).unwrap()), (2, Bytes::from_static(b"two")));
    }

    #[test]
    fn a_torn_write_leaves_the_value_before_and_two_broken_slots_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("register");
        let mut register = FileRegister::open(&path).unwrap();
        let _ = cas(&mut register, 0, b"one");
        let _ = cas(&mut register, 1, b"two");
        let break_slot = |place: u64| {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(b"garbage", slot_offset(place) + 20).unwrap();
        };
        break_slot(0);
        assert_eq!(value(&mut FileRegister::open(&path).unwrap()), (1, Bytes::from_static(b"one")));
        break_slot(1);
        assert!(matches!(FileRegister::open(&path), Err(RegisterError::Corrupt { .. })));
    }

    #[test]
    fn a_shared_file_shows_everybody_the_same_and_waits_for_its_lock_only_so_long() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("register");
            let mut one = SharedFileRegister::open(&path).unwrap();
            let mut two = SharedFileRegister::open(&path).unwrap();
            let cas = |expect, value: &'static [u8]| RegisterOp::Cas {
                expect: Revision(expect),
                value: Bytes::from_static(value),
            };
            assert_eq!(one.apply(cas(0, b"one")).await, RegisterOutcome::Written(Revision(1)));
            assert_eq!(two.apply(cas(0, b"two")).await, RegisterOutcome::Lost);
            assert_eq!(two.apply(cas(1, b"two")).await, RegisterOutcome::Written(Revision(2)));
            let read = one.apply(RegisterOp::Read).await;
            assert_eq!(read, RegisterOutcome::Value(Revision(2), Bytes::from_static(b"two")));

            let holder = File::open(&path).unwrap();
            holder.lock().unwrap();
            assert!(matches!(one.apply(RegisterOp::Read).await, RegisterOutcome::Unavailable(_)));
            drop(holder);
            assert!(matches!(one.apply(RegisterOp::Read).await, RegisterOutcome::Value(..)));
        });
    }
}
