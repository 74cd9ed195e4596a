//! The role on a disk in memory.

mod push;
