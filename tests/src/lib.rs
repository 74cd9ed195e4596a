//! End-to-end tests and the rules of the tree; here is what the tests share.
//!
//! ```text
//! tests/*.rs --> Node       a real `millrace serve` in a child process, on a real directory
//!           |--> Cluster    several of them that know each other
//!           |--> millrace() any other verb, run to its end
//!           |--> Records    what a consumer finds in the log, through the client crate
//!           |--> Frame      what is on the disk, by `millrace inspect`, and how to spoil it
//!           |--> Peer       a QUIC connection that says what it likes
//!           |--> RegisterServer  a private PostgreSQL or etcd
//!           |--> Cutter     a proxy before one that cuts, holds and swallows
//!           |--> Network    a namespace for each node, and cuts between them
//!           `--> History    what clients were told and consumers saw, and whether that can be
//! ```
//!
//! Everything stops at the first surprise. Every wait has a limit far above what it needs: only a hang
//! reaches it.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a harness of tests: whatever goes wrong fails the test")]

mod binary;
mod child;
mod cluster;
mod cutter;
mod disk;
pub mod history;
mod network;
mod node;
mod peer;
mod records;
mod servers;

use std::time::Duration;

pub use binary::binary;
pub use child::{Ended, millrace, millrace_with_stdin};
pub use cluster::{Cluster, Roles, Site};
pub use cutter::{Cutter, Harm};
pub use disk::{Frame, Place, copy, files, frames, segment_path};
pub use network::{HUB, Inside, Network, inside};
pub use node::{Node, SMALL_FILES, TINY_FILES};
pub use peer::Peer;
pub use records::{Found, Records};
pub use servers::{POSTGRES_PASSWORD, RegisterServer};

/// No test needs as long as this for one step.
pub const HANG: Duration = Duration::from_secs(60);

/// Runs a test's async part on one thread; spawned local tasks run with it.
///
/// # Panics
/// When it takes longer than any test should.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    let timed = async { tokio::time::timeout(3 * HANG, test).await };
    local.block_on(&runtime, timed).expect("the test hangs")
}
