//! The simulator: a cluster of real nodes and real clients in one thread, one seed, virtual time.
#![forbid(unsafe_code)]

pub mod clock;
pub mod disk;
pub mod random;
pub mod trace;
