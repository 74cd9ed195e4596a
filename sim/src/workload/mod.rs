//! What clients do: operations drawn from a mix, over the real client session.
//!
//! ```text
//! Actor (a process) = Session + Writer    appends, transfers, blind and ranged transactions, retries, trims
//!                             + Consumer  follows all streams from the start, slow or greedy; keeps accounts
//! Shared: what the application keeps outside the clients: stream ids, cursors, transactions to try again
//! ```
//!
//! The value of every record begins with the name of its transaction, and the rest follows from the name: so
//! the log itself tells whose records it holds, and whether they are whole.

mod actor;
mod consumer;
mod plan;
mod writer;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
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
    /// Some appends in an ordered lane, perhaps with one that fails.
    pub lane: u64,
    /// A read version from the future.
    pub future: u64,
    /// Two keys read, one of them written: write skew if both commit; or a range read and a key of it
    /// written.
    pub skew: u64,
    /// A list read and written back with one element more.
    pub list: u64,
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
            lane: share(40),
            future: share(20),
            skew: share(40),
            list: share(40),
            streams: 0,
            keys: 0,
            record_bytes_max: 0,
            calls_max: 0,
            think_us: 0,
            consumer_rest_us: 0,
        };
        mix.append = mix.append.max(u64::from(mix.transfer + mix.list == 0));
        mix.streams = prng.between(2, 6);
        mix.keys = *prng.pick(&[2, 5, 50, 500]);
        mix.record_bytes_max = *prng.pick(&[16, 16, 100, 100, 100, 1000, 1000, 12_000]);
        mix.calls_max = prng.between(1, 12);
        mix.think_us = *prng.pick(&[200, 2_000, 20_000, 50_000, 100_000]);
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
    /// Each list's elements.
    pub lists: BTreeMap<Vec<u8>, Vec<u64>>,
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
    /// The newest version that any client has seen.
    pub newest: Version,
    /// The seed: each operation has randomness of its own, so that leaving one out does not change the
    /// others.
    pub seed: u64,
    /// Something that was durable may be harmed.
    pub may_rot: bool,
    /// Operations that are left out: the client, and its how manieth.
    pub skipped: BTreeSet<(u64, u64)>,
    /// How many operations each client has begun.
    pub begun: BTreeMap<u64, u64>,
    next_txn: u64,
    unsettled: BTreeMap<NodeId, BTreeMap<TxnId, Unsettled>>,
}

/// A transaction without an outcome, and when it was first submitted: the log remembers its id for a while
/// only.
#[derive(Clone, Debug)]
struct Unsettled {
    plan: Plan,
    newest: Version,
    named: u64,
}

impl Unsettled {
    /// Whether the log is sure to remember its id still.
    const fn is_remembered(&self, shared: &Shared) -> bool {
        let passed = shared.newest.0.saturating_sub(self.newest.0);
        let named = shared.next_txn - self.named;
        // An epoch that nobody has seen yet, and ids that clients draw for themselves, must fit in as well.
        passed < shared.knobs.id_life_versions / 4 && named < shared.knobs.ids_max / 8
    }
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
            newest: Version::ZERO,
            may_rot: false,
            seed: 0,
            skipped: BTreeSet::new(),
            begun: BTreeMap::new(),
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

    /// The next operation of a client: its randomness, unless it is left out.
    fn begin_operation(&mut self, client: NodeId) -> Option<Prng> {
        let begun = self.begun.entry(client.0).or_default();
        let place = *begun;
        *begun += 1;
        let is_skipped = self.skipped.contains(&(client.0, place));
        (!is_skipped).then(|| Prng::derive(self.seed, "operation", client.0 << 32 | place))
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
            assert!(mix.append + mix.transfer + mix.list > 0, "seed {seed}");
            assert!(mix.streams >= 2 && mix.keys >= 2);
        }
    }
}
