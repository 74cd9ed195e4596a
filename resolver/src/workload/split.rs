//! A workload's key space over several resolvers, in equal shares.
//!
//! ```text
//! key space   [ "" ........ g )[ g ........ q )[ q ........ )
//! range [e, s)        [e .. g) [g ..... q)      [q .. s)         one piece in each share that it meets
//! ```

use common::Ranges;

use super::{Batch, Transaction, Workload};

/// Where each share but the first begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Split {
    begins: Vec<Vec<u8>>,
}

/// Batches whose keys tell where the shares begin.
const SAMPLED_BATCHES: usize = 4;

impl Split {
    /// `shares` shares with about as many accesses each.
    #[must_use]
    pub fn of(workload: &Workload, shares: usize) -> Self {
        assert!(shares > 0, "{shares} shares hold no key");
        let mut keys: Vec<Vec<u8>> = Vec::new();
        for batch in workload.batches().take(SAMPLED_BATCHES) {
            for transaction in &batch.transactions {
                let accesses = transaction.reads.iter().chain(transaction.writes.iter());
                keys.extend(accesses.map(|range| range.begin.to_vec()));
            }
        }
        keys.sort();
        let mut begins: Vec<_> =
            (1..shares).map(|share| keys[keys.len() * share / shares].clone()).collect();
        begins.dedup();
        Self { begins }
    }

    /// How many shares there are: fewer than asked for if too few keys were seen.
    #[must_use]
    pub fn shares(&self) -> usize {
        self.begins.len() + 1
    }

    /// The part of a batch that the resolver of `share` sees.
    #[must_use]
    pub fn share(&self, batch: &Batch, share: usize) -> Batch {
        let part = |transaction: &Transaction| Transaction {
            read_version: transaction.read_version,
            reads: self.clip(&transaction.reads, share),
            writes: self.clip(&transaction.writes, share),
        };
        Batch { transactions: batch.transactions.iter().map(part).collect(), ..*batch }
    }

    fn clip(&self, ranges: &Ranges, share: usize) -> Ranges {
        let begin: &[u8] = if share == 0 { &[] } else { &self.begins[share - 1] };
        let end = self.begins.get(share).map(Vec::as_slice);
        ranges.iter().filter_map(|range| range.within(begin, end)).collect()
    }
}
