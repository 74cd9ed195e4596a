//! The simulator: a cluster of real nodes and real clients in one thread, one seed, virtual time.
#![forbid(unsafe_code)]

pub mod clock;
pub mod disk;
pub mod network;
pub mod observe;
pub mod oracle;
pub mod process;
pub mod random;
pub mod register;
pub mod trace;
pub mod world;
