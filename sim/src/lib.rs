//! The simulator: a cluster of real nodes and real clients in one thread, one seed, virtual time.
#![forbid(unsafe_code)]

pub mod atlas;
mod by_node;
pub mod clock;
pub mod cluster;
pub mod damage;
pub mod disk;
pub mod edits;
pub mod explore;
pub mod faults;
pub mod layout;
mod mends;
pub mod network;
pub mod observe;
pub mod oracle;
pub mod process;
pub mod random;
pub mod register;
pub mod run;
pub mod shrink;
pub mod swarm;
pub mod trace;
pub mod workload;
pub mod world;
