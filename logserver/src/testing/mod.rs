//! For tests: a disk in memory that keeps the letter of the contract in [`common::disk`] and nothing more,
//! and a rig that drives one log server on it.

mod disk;
#[cfg(test)]
pub(crate) mod rig;

pub use disk::MemoryDisk;
