//! Several resolvers whose proxies tell them, some batches later, which transactions were refused elsewhere.
//!
//! ```text
//! batch        ... n-4        n-3   n-2   n-1   n
//! a resolver   what committed | what it said yes to itself      settle after 3
//! ```
//!
//! What is settled counts if it committed; what is not counts if this resolver said yes. So an aborted
//! transaction's writes can abort others only until they are settled. Nothing here is fast: it tells what
//! such a protocol would be worth before it is built.

use std::collections::VecDeque;

use common::message::Verdict;
use common::{Ranges, Version};

use super::{Batch, Split, Transaction, Workload};
use crate::conflict::{Candidate, ConflictSet};

/// One resolver of several.
struct Share {
    /// Writes that committed, up to the settled batch.
    settled: ConflictSet,
    /// Writes that it said yes to itself.
    own: ConflictSet,
}

/// Whether each transaction of the workload's batches commits when a batch is settled `after` batches
/// later, at least 1; the window holds all batches.
#[must_use]
pub fn settled(workload: &Workload, split: &Split, after: usize, batches: usize) -> Vec<bool> {
    assert!(after > 0, "a batch can't be settled before it is decided");
    let mut shares: Vec<_> = (0..split.shares())
        .map(|_| Share {
            settled: ConflictSet::new(Version::ZERO),
            own: ConflictSet::new(Version::ZERO),
        })
        .collect();
    let (mut open, mut verdicts) = (VecDeque::new(), Vec::new());
    // Versions twice as far apart, so that there is room for a look between two batches.
    let spread = |version: Version| Version(version.0 * 2);
    let mut settled_version = Version(1);
    for batch in workload.batches().take(batches) {
        if open.len() == after {
            let (version, parts): (Version, Vec<Batch>) = open.pop_front().expect("it is full");
            for (share, part) in shares.iter_mut().zip(&parts) {
                share.settle(spread(version), spread(batch.oldest), part);
            }
            settled_version = spread(version).plus(1);
        }
        let mut yes = vec![true; batch.transactions.len()];
        let mut parts: Vec<_> = (0..split.shares()).map(|n| split.share(&batch, n)).collect();
        for (share, part) in shares.iter_mut().zip(&parts) {
            let said = share.decide(part, settled_version, spread);
            yes.iter_mut().zip(said).for_each(|(yes, said)| *yes &= said);
        }
        for part in &mut parts {
            let refused = part.transactions.iter_mut().zip(&yes).filter(|(_, yes)| !**yes);
            refused.for_each(|(transaction, _)| transaction.writes = Ranges::default());
        }
        open.push_back((batch.version, parts));
        verdicts.extend(yes);
    }
    verdicts
}

impl Share {
    /// Takes in what committed.
    fn settle(&mut self, version: Version, oldest: Version, part: &Batch) {
        let nothing = Ranges::default();
        let blind = |t| candidate(t, version, &nothing, None);
        let writes: Vec<_> = part.transactions.iter().map(blind).collect();
        let decided = self.settled.decide(version, &writes);
        assert!(decided.verdicts.iter().all(|verdict| *verdict == Verdict::Committed));
        self.settled.advance_oldest(oldest.min(version));
        self.settled.evict(256);
    }

    /// What it says to its part of a batch.
    fn decide(
        &mut self,
        part: &Batch,
        settled: Version,
        spread: impl Fn(Version) -> Version,
    ) -> Vec<bool> {
        let nothing = Ranges::default();
        let read = |t: &Transaction| spread(t.read_version);
        let looks: Vec<_> = part
            .transactions
            .iter()
            .map(|t| Candidate { writes: &nothing, ..candidate(t, read(t), &t.reads, None) })
            .collect();
        let met = |verdict: &Verdict| matches!(verdict, Verdict::Conflict { .. });
        let look_at = settled.max(self.settled.newest().plus(1));
        let settled_says = self.settled.decide(look_at, &looks).verdicts;
        let own: Vec<_> = part
            .transactions
            .iter()
            .zip(&settled_says)
            .map(|(t, verdict)| {
                // Of its own words only those that are not settled count.
                let read_version = read(t).max(settled);
                candidate(t, read_version, &t.reads, met(verdict).then_some(&nothing))
            })
            .collect();
        self.own.advance_oldest(settled.minus_saturating(2));
        let own_says = self.own.decide(spread(part.version), &own).verdicts;
        self.own.evict(256);
        settled_says.iter().zip(&own_says).map(|(one, two)| !met(one) && !met(two)).collect()
    }
}

const fn candidate<'a>(
    transaction: &'a Transaction,
    read_version: Version,
    reads: &'a Ranges,
    writes: Option<&'a Ranges>,
) -> Candidate<'a> {
    let writes = match writes {
        Some(writes) => writes,
        None => &transaction.writes,
    };
    Candidate { read_version, reads, writes, report_conflicts: false }
}
