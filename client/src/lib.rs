//! The client: transactions, exactly-once retries, pulls, views.
//!
//! ```text
//!  application --> Transaction, ReadTransaction --.            .--> View <-- Batch --.
//!                                                 v            |                     |
//!  shell (async face, simulator) --calls--> [ session::Session ] --> Completion -----'
//!                                 --events-->   |  one sync machine: finds the cluster, sends,
//!                                 <-outputs--   |  retries, resolves unknown outcomes, pulls
//! ```
//!
//! [`session::Session`] is a machine like the roles: no clock, no sockets, no threads. The simulator runs
//! it as it is; the feature `face` puts it on a tokio runtime behind an async API.
//!
//! What a caller may rely on:
//!
//! 1. `commit` says committed or not committed, exactly once (I16), whatever breaks in between; only
//!    [`Transaction::at_most_once`] can end in [`Error::Unknown`].
//! 2. A pull yields whole versions in order, without gap or duplicate over reconnects and epochs; offsets are
//!    dense for each stream (I12), and what is not is an [`Error::Corrupt`].
//! 3. Every error says what to do about it ([`Error`]).
#![forbid(unsafe_code)]

mod batch;
mod error;
#[cfg(feature = "face")]
pub mod face;
mod interactive;
pub mod session;
mod transaction;
mod view;

pub use batch::{Batch, Block, Delivered};
pub use error::Error;
#[cfg(feature = "face")]
pub use face::{
    Client, CommitFuture, ConnectError, ConnectOptions, Lane, LiveView, PendingTransaction, Pull,
};
pub use interactive::ReadTransaction;
pub use session::{Committed, PullFrom, Pulled, TrimState};
pub use transaction::{Transaction, conflict_key, conflict_key_end};
pub use view::View;
