//! The batches that are decided here and not in the conflict set yet, in chain order.
//!
//! ```text
//! filter   all their writes, aborted ones among them      most reads meet nothing here, at one look
//! batches  | v4 In Out In | v5 Open In Open | v6 In |     for the others: sorted when first asked
//! ```
//!
//! The filter is a conflict set of its own, small enough for the processor's caches. It may meet too much,
//! since what is aborted stays in it until its batch leaves; it never meets too little.

use std::collections::VecDeque;

use common::message::{ResolveTransaction, Settlement};
use common::{Cover, Endpoint, Ranges, Version};

use super::{Settled, Slips, Wait, Why};
use crate::conflict::{Candidate, ConflictSet, Touch};

/// What a range takes beside its keys, about.
const RANGE_BYTES: usize = 16;

/// How the writes of a transaction stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stand {
    /// It does not commit, or writes nothing.
    Out,
    /// Its proxy knows.
    Open,
    /// It commits.
    In,
}

/// A batch.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) version: Version,
    proxy: Endpoint,
    transactions: Vec<(Ranges, Stand)>,
    is_open: bool,
    bytes: usize,
    /// Made when somebody asks, and again after the settlement.
    sorted: Option<Sorted>,
}

/// The keys that commits wrote, and those that may turn out so.
#[derive(Clone, Debug, Default)]
struct Sorted {
    committed: Cover,
    open: Cover,
}

impl Batch {
    /// The writes of what commits.
    pub(super) fn committed(&self) -> impl Iterator<Item = &Ranges> {
        let committed = self.transactions.iter().filter(|(_, stand)| *stand == Stand::In);
        committed.map(|(writes, _)| writes)
    }

    fn sorted(&mut self) -> &Sorted {
        self.sorted.get_or_insert_with(|| {
            let mut sorted = Sorted::default();
            for (writes, stand) in &self.transactions {
                match stand {
                    Stand::Out => {}
                    Stand::Open => writes.iter().for_each(|range| sorted.open.insert(range)),
                    Stand::In => writes.iter().for_each(|range| sorted.committed.insert(range)),
                }
            }
            sorted
        })
    }
}

/// What the reads of a transaction meet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Met {
    /// Reads that meet a commit: all of them if they are reported, else one at most.
    pub(super) conflicts: Vec<u32>,
    /// The last batch of another proxy of which they meet a write that may commit.
    pub(super) open: Option<Wait>,
    /// They meet a write of the asker of which this resolver does not know.
    pub(super) is_own: bool,
}

/// The batches, and what most reads can be told at one look.
#[derive(Clone, Debug)]
pub(super) struct Unsettled {
    filter: ConflictSet,
    batches: VecDeque<Batch>,
    bytes: usize,
}

impl Unsettled {
    pub(super) fn new(oldest: Version) -> Self {
        Self { filter: ConflictSet::new(oldest), batches: VecDeque::new(), bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.batches.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.filter.memory_bytes() + self.bytes
    }

    /// Whether the batch of `version` is not settled.
    pub(super) fn is_open(&self, version: Version) -> bool {
        self.place(version).is_some_and(|place| self.batches[place].is_open)
    }

    /// The first batch of a proxy that is not settled.
    pub(super) fn first_open(&self, proxy: Endpoint) -> Option<Version> {
        let mut of_proxy = self.batches.iter().filter(|batch| batch.proxy == proxy);
        of_proxy.find(|batch| batch.is_open).map(|batch| batch.version)
    }

    /// The first batch, if there is too much.
    pub(super) fn front_if_over(&self, bytes_max: u64) -> Option<Wait> {
        let front = self.batches.front().filter(|_| self.bytes as u64 > bytes_max)?;
        Some(Wait { version: front.version, proxy: front.proxy, why: Why::Full })
    }

    /// What the reads of a batch meet, by the filter; its writes are in it from now on.
    pub(super) fn touch(&mut self, version: Version, batch: &[Candidate<'_>]) -> Vec<Touch> {
        self.filter.touch(version, batch)
    }

    /// What the reads of a transaction of `asker` meet among what they have not seen.
    pub(super) fn meet(&mut self, asker: Endpoint, transaction: &ResolveTransaction) -> Met {
        let mut met = Met::default();
        let seen = transaction.read_version;
        for batch in self.batches.iter_mut().rev().take_while(|batch| batch.version > seen) {
            let is_own = batch.is_open && batch.proxy == asker;
            let wait = Wait { version: batch.version, proxy: batch.proxy, why: Why::Reads };
            let sorted = batch.sorted();
            for (index, read) in (0_u32..).zip(transaction.reads.iter()) {
                if is_own {
                    met.is_own |= sorted.committed.meets(read) || sorted.open.meets(read);
                    continue;
                }
                if met.open.is_none() && sorted.open.meets(read) {
                    met.open = Some(wait);
                }
                let counts = transaction.report_conflicts || met.conflicts.is_empty();
                if counts && sorted.committed.meets(read) {
                    met.conflicts.push(index);
                }
            }
            if !met.conflicts.is_empty() && !transaction.report_conflicts {
                break;
            }
        }
        met
    }

    /// Takes a batch that was decided.
    pub(super) fn enter(
        &mut self,
        version: Version,
        proxy: Endpoint,
        transactions: Vec<(Ranges, Stand)>,
    ) {
        let last = self.batches.back().map(|batch| batch.version);
        assert!(last.is_none_or(|last| last < version), "I1: {version} is decided after {last:?}");
        let is_open = transactions.iter().any(|(_, stand)| *stand == Stand::Open);
        let bytes = |writes: &Ranges| writes.key_bytes() + writes.len() * RANGE_BYTES;
        let bytes = transactions.iter().map(|(writes, _)| bytes(writes)).sum();
        self.bytes += bytes;
        let sorted = None;
        self.batches.push_back(Batch { version, proxy, transactions, is_open, bytes, sorted });
    }

    /// What became of a batch of `proxy`.
    pub(super) fn settle(
        &mut self,
        proxy: Endpoint,
        settlement: &Settlement,
        slips: Slips,
    ) -> Settled {
        let Some(mut place) = self.place(settlement.version) else { return Settled::Again };
        if slips.settles_next {
            let mut behind = self.batches.iter().enumerate().skip(place + 1);
            let next = behind.find(|(_, batch)| batch.proxy == proxy && batch.is_open);
            place = next.map_or(place, |(next, _)| next);
        }
        let batch = &mut self.batches[place];
        assert_eq!(batch.proxy, proxy, "{} is settled by a stranger", batch.version);
        if !batch.is_open {
            return Settled::Again;
        }
        let (bytes, count) = (settlement.committed.len(), batch.transactions.len());
        assert!(
            bytes == count.div_ceil(8) || slips.settles_next,
            "{bytes} bytes for {count} transactions of {}",
            batch.version
        );
        for (index, (_, stand)) in batch.transactions.iter_mut().enumerate() {
            let commits = settlement.has(index);
            assert!(
                *stand != Stand::In || commits || slips.settles_next,
                "transaction {index} of {} was final and is aborted",
                batch.version
            );
            if *stand == Stand::Open {
                *stand = if commits || slips.keeps_aborted { Stand::In } else { Stand::Out };
            }
        }
        batch.is_open = false;
        batch.sorted = None;
        if place == 0 { Settled::Taken } else { Settled::Early }
    }

    /// The first batch, if it is settled.
    pub(super) fn pop_settled(&mut self) -> Option<Batch> {
        let batch = self.batches.pop_front_if(|batch| !batch.is_open)?;
        self.bytes -= batch.bytes;
        self.filter.advance_oldest(batch.version);
        Some(batch)
    }

    pub(super) fn evict(&mut self, entries: usize) {
        self.filter.evict(entries);
    }

    fn place(&self, version: Version) -> Option<usize> {
        self.batches.binary_search_by_key(&version, |batch| batch.version).ok()
    }

    /// Versions ascend, the first one is open, the bytes are theirs.
    pub(super) fn check(&self) {
        let mut below = Version::ZERO;
        for batch in &self.batches {
            assert!(below < batch.version, "I1: {} behind {below}", batch.version);
            below = batch.version;
        }
        let first = self.batches.front();
        assert!(first.is_none_or(|first| first.is_open), "{first:?} is settled and not in the set");
        let bytes: usize = self.batches.iter().map(|batch| batch.bytes).sum();
        assert_eq!(bytes, self.bytes, "bytes of what is unsettled");
    }
}
