//! What clients do: operations drawn from a mix, over the real client session.
//!
//! ```text
//! Actor (a process) = Session + Writer    appends, transfers, blind and ranged transactions, retries, trims
//!                             + Consumer  follows all streams from the start, slow or greedy; folds the accounts
//! Shared: what the application keeps outside the clients: stream ids, cursors, transactions to try again
//! ```
//!
//! The value of every record begins with the name of its transaction, and the rest follows from the name: so the log
//! itself tells whose records it holds, and whether they are whole.

mod actor;
mod consumer;
mod plan;
mod writer;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use common::{Knobs, NodeId, Prng, StreamId, Version};
use serde::Serialize;

pub use actor::Actor;

use crate::observe::{ConsumerId, TxnId};
use plan::Plan;

/// The first client's node id.
pub const FIRST_CLIENT: u64 = 100;

/// The shares of operations in a run; 0 is never.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mix {
    /// Events appended to some streams, without conflicts.
    pub append: u64,
    /// Reads of two balances, writes of both.
    pub transfer: u64,
    /// Point reads and writes of conflict keys.
    pub points: u64,
    /// Ranges of conflict keys.
    pub ranges: u64,
    /// An append under an id, submitted twice at once.
    pub twice: u64,
    /// An append without an id.
    pub at_most_once: u64,
    /// Reads at an ancient version.
    pub ancient: u64,
    /// A read version and nothing more.
    pub read_version: u64,
    /// A description of all streams.
    pub describe: u64,
    /// A trim of a stream to the slowest consumer's place.
    pub trim: u64,
    /// User streams, the accounts among them.
    pub streams: u64,
    /// Conflict keys and accounts.
    pub keys: u64,
    /// Bytes of a record, at most.
    pub record_bytes_max: u64,
    /// Open calls of a writer, at most.
    pub calls_max: u64,
    /// Time between two operations of a writer, us, on average.
    pub think_us: u64,
    /// Time between two pulls of a slow consumer, us, at most; 0 is greedy.
    pub consumer_rest_us: u64,
}

impl Mix {
    /// Draws a mix.
    #[must_use]
    pub fn draw(prng: &mut Prng) -> Self {
        let mut share = |percent: u64| {
            let (on, share) = (prng.chance(percent, 100), prng.between(1, 10));
            if on { share } else { 0 }
        };
        let mut mix = Self {
            append: share(80),
            transfer: share(60),
            points: share(60),
            ranges: share(40),
            twice: share(40),
            at_most_once: share(30),
            ancient: share(30),
            read_version: share(50),
            describe: share(30),
            trim: share(40),
            streams: 0,
            keys: 0,
            record_bytes_max: 0,
            calls_max: 0,
            think_us: 0,
            consumer_rest_us: 0,
        };
        mix.append = mix.append.max(u64::from(mix.transfer == 0));
        mix.streams = prng.between(2, 6);
        mix.keys = *prng.pick(&[2, 5, 50, 500]);
        mix.record_bytes_max = *prng.pick(&[16, 100, 1000, 12_000]);
        mix.calls_max = prng.between(1, 12);
        mix.think_us = *prng.pick(&[100, 1_000, 5_000, 30_000]);
        mix.consumer_rest_us = *prng.pick(&[0, 0, 1_000, 100_000]);
        mix
    }
}

/// A consumer's durable place, kept with what it has folded.
#[derive(Clone, Debug, Default)]
pub struct Cursor {
    /// Inclusive.
    pub through: Version,
    /// Each account's balance.
    pub balances: BTreeMap<Vec<u8>, i64>,
}

/// What the application keeps outside its clients: it survives their crashes.
#[derive(Debug)]
pub struct Shared {
    /// What clients do.
    pub mix: Mix,
    /// Limits and intervals.
    pub knobs: Knobs,
    /// The nodes that clients can dial.
    pub nodes: Vec<NodeId>,
    /// No new operations.
    pub is_stopping: bool,
    /// Each stream's id, once somebody has created it. The first holds the accounts.
    pub streams: Vec<Option<StreamId>>,
    /// Consumers and their places.
    pub cursors: BTreeMap<ConsumerId, Cursor>,
    /// Consumers ask for everything through here at once.
    pub want: Version,
    /// Calls of writers that are open.
    pub open_calls: BTreeMap<NodeId, usize>,
    /// Commits that were seen.
    pub committed_count: u64,
    next_txn: u64,
    unsettled: BTreeMap<NodeId, BTreeMap<TxnId, Plan>>,
}

/// The handle that actors share; a run is one thread.
pub type SharedHandle = Rc<RefCell<Shared>>;

impl Shared {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(
        mix: Mix,
        knobs: Knobs,
        nodes: Vec<NodeId>,
        consumers: impl Iterator<Item = ConsumerId>,
    ) -> SharedHandle {
        let streams = vec![None; mix.streams as usize];
        Rc::new(RefCell::new(Self {
            mix,
            knobs,
            nodes,
            is_stopping: false,
            streams,
            // All from the start: nobody trims what one of them has not read.
            cursors: consumers.map(|consumer| (consumer, Cursor::default())).collect(),
            want: Version::ZERO,
            open_calls: BTreeMap::new(),
            committed_count: 0,
            next_txn: 1,
            unsettled: BTreeMap::new(),
        }))
    }

    /// Whether every stream has its id.
    #[must_use]
    pub fn has_streams(&self) -> bool {
        self.streams.iter().all(Option::is_some)
    }

    /// Everything at or below has been read by every consumer.
    #[must_use]
    pub fn consumed(&self) -> Version {
        self.cursors.values().map(|cursor| cursor.through).min().unwrap_or_default()
    }

    const fn name_txn(&mut self) -> TxnId {
        self.next_txn += 1;
        TxnId(self.next_txn)
    }
}

/// The name of a user stream.
#[must_use]
pub fn stream_name(place: usize) -> String {
    format!("stream-{place}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mix_writes_something() {
        for seed in 0..200 {
            let mix = Mix::draw(&mut Prng::new(seed));
            assert!(mix.append + mix.transfer > 0, "seed {seed}");
            assert!(mix.streams >= 2 && mix.keys >= 2);
        }
    }
}
