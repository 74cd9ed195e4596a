//! The disk of a log server: one directory of files behind [`common::disk`], driven by io_uring.
//!
//! ```text
//!            submit                         drain
//!  server loop -----+                  +-------------> server loop
//!                   |                  |   waker, once a batch
//!    writes, reads  v                  |
//!      log inbox -----> log thread ----+---> outbox (bounded)
//!                       ring, barrier  |
//!      background ----> background ----+
//!      inbox            thread         |
//!      read inbox ----> read thread ---+     only without a ring
//!
//!  log thread: take -> write group -> barrier -> publish -> reads -> reap -> publish -> sleep
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | `api` | [`Driver`]: opens, submits, drains, shuts down |
//! | `handoff` | the queues, and the doorbell of a sleeping thread (loom-tested) |
//! | `log` | the log thread: order, groups, barriers |
//! | `background` | the background thread and the read thread |
//! | `idle` | whether it pays to look for work before sleeping |
//! | `engine` | which engine and which barrier: choice, fallback, start-up probe |
//! | `ring` | io_uring; the only `unsafe` of the crate |
//! | `plain` | pread, pwrite, fdatasync |
//! | `directory` | lock, open files, creation, quota |
//! | `staging` | aligned memory, and the copy from a payload into it |
//!
//! # Invariants
//! * D1: the writes of the log lane reach the kernel in the order of submission; a group that shares a
//!   barrier holds neighbours in that order, of one file, which do not overlap.
//! * D2: a durable write completes after a barrier that began after its last byte had been written, and so
//!   after a barrier over everything that the file was given before (I7).
//! * D3: after a failed write or barrier no write of any lane is answered with success again.
//! * D4: what is outstanding (submitted, and not yet drained) never exceeds [`OUTSTANDING_MAX`]; therefore no
//!   queue inside is ever full.
//! * D5: a buffer that the kernel may touch belongs to the ring until its completion has been reaped.
//! * D6: a thread sleeps only when nothing waits for it; whoever adds work later wakes it.
#![cfg_attr(
    not(loom),
    expect(
        clippy::disallowed_types,
        reason = "a shell: the probe and the spinning need a clock, a failure is latched once"
    )
)]

mod handoff;

#[cfg(not(loom))]
mod api;
#[cfg(not(loom))]
mod background;
#[cfg(all(not(loom), any(test, feature = "testing")))]
mod contract;
#[cfg(not(loom))]
mod directory;
#[cfg(not(loom))]
mod engine;
#[cfg(not(loom))]
mod idle;
#[cfg(not(loom))]
mod log;
#[cfg(not(loom))]
mod plain;
#[cfg(not(loom))]
mod ring;
#[cfg(not(loom))]
mod staging;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub use api::{
    Driver, DriverStats, LogLaneStats, OUTSTANDING_MAX, OpenError, Options, SubmitError, Waker,
};
#[cfg(not(loom))]
pub use engine::{Barrier, DriverInfo, EngineKind, ProbeResult};
#[cfg(not(loom))]
pub use idle::IdlePoll;

/// The contract suite of the disk seam: for the driver, and for every other implementation.
#[cfg(all(not(loom), any(test, feature = "testing")))]
pub mod testing {
    pub use super::contract::{Case, Disk, DriverDisk, QUOTA_BYTES, cases};
}
