//! The log server: a segment log for all streams and epochs of a node, the stream index, the role around it,
//! and the driver of its disk.
//!
//! ```text
//! proxies, leader, clients --messages--> role --accept, lock, trim--> log --DiskRequest--> driver or
//!                                             <--durable, persisted--     <-DiskCompletion-- simulator
//! ```
//!
//! - [`LogServer`]: the machine. Sync, without clock, threads or I/O of its own
//! - [`mod@format`]: the bytes on the disk, pure
//! - [`driver`]: the real disk, the only `unsafe` code of Millrace
//! - `testing` (feature of that name): a disk in memory that forgets what was not synced
#![deny(unsafe_code)]

pub mod driver;
pub mod format;
mod log;
mod role;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use role::{LogServer, LogStatus, MendStatus, ScrubPass, ScrubStatus, Standing};
