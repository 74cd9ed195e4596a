//! What all structures of a log directory have in common: the first twelve bytes.
//!
//! ```text
//! off size field
//!   0   4  magic
//!   4   4  checksum        crc32c from byte 8 up to the end that the structure names
//!   8   2  format version
//!  10   2  zero
//! ```

use thiserror::Error;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// The first byte that the checksum covers.
pub(super) const CHECKED_FROM: usize = 8;

/// Why bytes are not the structure that should be there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
pub enum Flaw {
    /// There are too few bytes: not written yet, or cut off.
    #[error("{have} of {need} bytes")]
    Short {
        /// Bytes there are.
        have: usize,
        /// Bytes there should be.
        need: usize,
    },
    /// Nothing was ever written here.
    #[error("only zeros")]
    Blank,
    /// Something else lies here.
    #[error("the magic word is {found:08x}")]
    Magic {
        /// What was found, first byte highest.
        found: u32,
    },
    /// The bytes are damaged.
    #[error("checksum {stored:08x}, computed {computed:08x}")]
    Checksum {
        /// As written.
        stored: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// Intact, and written by another release.
    #[error("format version {found} is unknown")]
    Format {
        /// What was found.
        found: u16,
    },
}

/// The start of `bytes` as a fixed structure; `None` when there are too few.
pub(super) fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> Option<&T> {
    T::ref_from_prefix(bytes).ok().map(|(raw, _)| raw)
}

/// Checks the first twelve bytes of a structure of `need` bytes, and its checksum.
pub(super) fn check(bytes: &[u8], need: usize, magic: [u8; 4], format: u16) -> Result<(), Flaw> {
    assert!(need > CHECKED_FROM + 4, "a structure of {need} bytes has more than its start");
    let Some(bytes) = bytes.get(..need) else {
        return Err(Flaw::Short { have: bytes.len(), need });
    };
    let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    if word(0) != magic {
        let blank = bytes.iter().all(|byte| *byte == 0);
        let found = u32::from_be_bytes(word(0));
        return Err(if blank { Flaw::Blank } else { Flaw::Magic { found } });
    }
    let (stored, computed) = (u32::from_le_bytes(word(4)), crc32c::crc32c(&bytes[CHECKED_FROM..]));
    if stored != computed {
        return Err(Flaw::Checksum { stored, computed });
    }
    let found = u16::from_le_bytes([bytes[8], bytes[9]]);
    if found == format { Ok(()) } else { Err(Flaw::Format { found }) }
}

/// Puts the checksum into a structure that is otherwise complete.
pub(super) fn seal(bytes: &mut [u8]) {
    assert!(bytes.len() > CHECKED_FROM + 4, "{} bytes are no structure", bytes.len());
    let checksum = crc32c::crc32c(&bytes[CHECKED_FROM..]);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
}
