//! The bytes of a log directory, as pure code: encoding, decoding and judging, never a disk operation.
//!
//! ```text
//! segment-<id>                                                              meta-0, meta-1
//! +--------+------------------+----------+- - -+---------------+---------+   +------------+
//! | header | flush group      | group    |     | footer        | trailer |   | Meta, pages|
//! | page 0 | frame frame ..0 | frame ..0 |     | when sealed   | last pg |   | alternate  |
//! +--------+------------------+----------+- - -+---------------+---------+   +------------+
//!   segment   frame                               segment         segment      meta
//! ```
//!
//! All numbers are little-endian, all checksums crc32c, every structure starts with a magic word and a format
//! version. Each submodule draws its own bytes.
//!
//! - [`frame`]: one version, the unit of the chain
//! - [`segment`]: what stands around the frames of a file
//! - [`meta`]: the little that isn't in the log
//! - [`scan`]: tells the end of a log from a torn tail and both from rot
//! - [`inspect`]: offline reading of a directory, for people; the only part that opens files
//!
//! # Invariants
//! 1. A frame's hash covers its header, the header covers the block table, the table covers each body, and
//!    the next frame holds the hash: one good frame vouches for all before it.
//! 2. No decoder trusts a length before its checksum and its bounds have been checked; none panics.

mod flaw;
pub mod frame;
pub mod inspect;
pub mod meta;
#[cfg(test)]
pub(crate) mod sample;
pub mod scan;
pub mod segment;
mod window;

pub use flaw::Flaw;
