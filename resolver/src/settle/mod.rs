//! Settlements: an aborted transaction's writes must not abort others.
//!
//! Place: between the role, which has the chain and the messages, and the conflict set. A transaction
//! commits iff every resolver that was asked says yes and its lane holds; its proxy alone hears all that. So
//! a resolver that says yes does not know whether the writes count. It takes them as *open* until the proxy
//! says what became of the batch: the *settlement*, a bit for each transaction.
//!
//! ```text
//!             proxy P                       resolver                                proxy Q
//!  v10        --Resolve 10----------------> yes; writes k: open
//!             <-Resolved 10, settled 8----                        <----Resolve 11-- v11 reads j
//!                                           j meets nothing open  --Resolved 11-->
//!  all say                                  k meets P's open v10  <----Resolve 12-- v12 reads k
//!  yes or no  --Resolve 13 {10: no}-------> v10 settled: k is free --Resolved 12-->
//!             <-Resolved 13, settled 10---                                          P forgets v10
//! ```
//!
//! | message | what it tells |
//! |---|---|
//! | `Resolve.settlements` | what became of the proxy's batches since its last message |
//! | `Settle {settlements}` | the same, when no batch is near or when it went unconfirmed |
//! | `Resolved.settled` | through which of the proxy's versions nothing is open here: need not be sent again |
//! | `Verdict::Yours` | no conflict that is known here, but a read met an open write of the asker itself |
//! | `ResolveTransaction.is_final` | this resolver has the last word: asked alone, and in no lane |
//!
//! What a read that has not seen it meets here, and what follows:
//!
//! ```text
//!  chain     v1 .. v3      | v4 settled | v5 of P, open | v6 settled | v7 of P comes, v8 of Q comes
//!            conflict set  | `------------ unsettled ---------------'
//!
//!  a write that commits, in the set or unsettled     conflict
//!  an aborted one                                    nothing
//!  an open one of the asker (v7 meets v5 or v7)      Yours: the proxy judges its batches by version, so it
//!                                                    knows what became of v5 before it judges v7
//!  an open one of another proxy (v8 meets v5)        the batch, and with it the chain, waits for settlement
//! ```
//!
//! # No round trip is added
//! A settlement goes one way, and travels with the proxy's next batch if one is on its way. A read of what
//! nobody has open waits for nothing; nor does one of what the asker has open. A transaction that one
//! resolver decides alone is final and never open. With a single resolver everything is: a batch takes the
//! old way straight into the conflict set, no settlement is sent, and nothing is kept. (What falls with its
//! lane then leaves its writes behind: the one false conflict that is left, see the proxy's `door`.) Only a
//! read that meets what another proxy has open waits, for the rest of that batch's verdicts and one way.
//!
//! # Early, late, twice, lost
//! A settlement is taken when it comes, whatever waits for its turn. It is about a batch that was decided
//! here, for the proxy sends it once it has all verdicts. One that comes again finds nothing open and
//! changes nothing. One of a later batch than the first open one settles its batch in place; it goes into
//! the set when all in front of it has. A lost one is sent again until `settled` confirms it.
//!
//! # Invariants
//! - I1, I2: a batch is decided in one step, along the chain, once none of its verdicts hangs on an open
//!   write.
//! - The set holds what commits, in chain order: what is settled in front of all that is open. So the first
//!   batch of the unsettled is open.
//! - Every conflict is with a write that commits, and every write that commits meets every read that has not
//!   seen it: the verdicts of any number of resolvers are those of a single one.
//! - No deadlock. A wait at version v, for a settlement or for room, names an open version below v:
//!   asserted. Let v be the lowest version that its proxy has not judged. All below it are judged, and their
//!   settlements arrive, being sent until they are confirmed. So nothing below v stays open anywhere, v
//!   waits nowhere, its proxy hears all its verdicts, has judged its own batches below it, and judges v.
//! - Bounded: while more than `unsettled_bytes_max` bytes are unsettled the next batch waits for the first
//!   open one.

#[cfg(test)]
mod tests;
mod unsettled;

use common::message::{ResolveTransaction, Settlement, Verdict};
use common::{Endpoint, Ranges, Version};

use crate::conflict::{Candidate, ConflictSet, Decided, Touch};
use unsettled::{Stand, Unsettled};

/// Entries that eviction looks at in the set of what is unsettled.
const EVICTION_ENTRIES: usize = 256;

/// Why a batch waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// It reads what the other one has open.
    Reads,
    /// Too much is unsettled.
    Full,
}

/// What a batch waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// The batch whose settlement has to come.
    pub version: Version,
    /// Its proxy.
    pub proxy: Endpoint,
    /// Why it is waited for.
    pub why: Why,
}

impl core::fmt::Display for Wait {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { version, proxy, why } = self;
        let why = match why {
            Why::Reads => "it reads what that may have written",
            Why::Full => "too much is unsettled",
        };
        write!(f, "the settlement of {version} by {proxy:?}: {why}")
    }
}

/// What became of a batch that was offered for decision.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum Ruling {
    /// It is decided, and its writes are taken.
    Decided(Decided),
    /// It can't be decided yet, and must be offered again after a settlement.
    Held(Wait),
}

/// What a settlement was to the resolver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Settled {
    /// News.
    Taken,
    /// News, while an earlier batch is still open.
    Early,
    /// Known, or nothing that had been waited for.
    Again,
}

/// Mistakes that can be planted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Slips {
    /// Does not wait.
    pub decides_unsettled: bool,
    /// Takes what was aborted for committed.
    pub keeps_aborted: bool,
    /// Takes a settlement for that of the proxy's next batch.
    pub settles_next: bool,
}

/// A batch that was offered and waits.
#[derive(Clone, Debug)]
struct HeldBatch {
    version: Version,
    wait: Wait,
    /// What its reads met of what was unsettled then. Nothing is added while it waits.
    touches: Vec<Touch>,
}

/// The conflict set, and what is not settled yet.
#[derive(Clone, Debug)]
pub struct Settling {
    set: ConflictSet,
    unsettled: Unsettled,
    held: Option<HeldBatch>,
}

impl Settling {
    /// Nothing is written above `oldest`.
    #[must_use]
    pub fn new(oldest: Version) -> Self {
        let (set, unsettled) = (ConflictSet::new(oldest), Unsettled::new(oldest));
        Self { set, unsettled, held: None }
    }

    /// The set of what commits and has nothing open in front of it.
    #[must_use]
    pub const fn set(&self) -> &ConflictSet {
        &self.set
    }

    /// Batches that are not in the set yet.
    #[must_use]
    pub fn unsettled_count(&self) -> usize {
        self.unsettled.len()
    }

    /// About what their writes take, bytes.
    #[must_use]
    pub const fn unsettled_bytes(&self) -> usize {
        self.unsettled.bytes()
    }

    /// About how much memory all of it takes, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.set.memory_bytes() + self.unsettled.memory_bytes()
    }

    /// The batch that was offered and waits, and what it waits for.
    #[must_use]
    pub fn held(&self) -> Option<(Version, Wait)> {
        self.held.as_ref().map(|held| (held.version, held.wait))
    }

    /// See [`ConflictSet::advance_oldest`].
    pub fn advance_oldest(&mut self, oldest: Version) {
        self.set.advance_oldest(oldest);
    }

    /// See [`ConflictSet::evict`].
    pub fn evict(&mut self, entries: usize) {
        self.set.evict(entries);
    }

    /// The last version through which nothing of `proxy` is open, when `decided` is its last batch so far.
    #[must_use]
    pub fn settled(&self, proxy: Endpoint, decided: Version) -> Version {
        self.unsettled
            .first_open(proxy)
            .map_or(decided, |open| open.minus_saturating(1).min(decided))
    }

    /// Decides the next batch of the chain, and takes its transactions' writes; or says what it waits for.
    /// One that waits must be offered again, unchanged, before any other.
    pub fn decide(
        &mut self,
        version: Version,
        asker: Endpoint,
        transactions: &mut [ResolveTransaction],
        bytes_max: u64,
        slips: Slips,
    ) -> Ruling {
        if let Some(HeldBatch { version: held, wait, .. }) = &self.held {
            assert_eq!(*held, version, "I2: another batch waits for its verdicts");
            if self.unsettled.is_open(wait.version) {
                return Ruling::Held(*wait);
            }
        } else if self.unsettled.is_empty() && transactions.iter().all(is_last_word) {
            let candidates: Vec<Candidate<'_>> = transactions.iter().map(candidate).collect();
            return Ruling::Decided(self.set.decide(version, &candidates));
        }
        let nothing = Ranges::default();
        let candidates: Vec<Candidate<'_>> = transactions.iter().map(candidate).collect();
        let known = self.set.look(version, &candidates);
        let touches = match self.held.take() {
            Some(held) => held.touches,
            None => self.touch(version, candidates, (&known, &nothing)),
        };
        let ruled = match self.unsettled.front_if_over(bytes_max) {
            Some(full) => Err(full),
            None => self.rule(asker, transactions, (known, &touches), slips),
        };
        match ruled {
            Ok(verdicts) => {
                self.enter(version, asker, transactions, &verdicts);
                Ruling::Decided(Decided { verdicts, in_batch_conflicts: 0 })
            }
            Err(wait) => {
                assert!(wait.version < version, "{version} waits for {}", wait.version);
                self.held = Some(HeldBatch { version, wait, touches });
                Ruling::Held(wait)
            }
        }
    }

    /// What the reads meet beside the set. From here on the writes of all that the set does not refuse are
    /// among what reads can meet.
    fn touch<'a>(
        &mut self,
        version: Version,
        mut candidates: Vec<Candidate<'a>>,
        (known, nothing): (&[Verdict], &'a Ranges),
    ) -> Vec<Touch> {
        for (one, verdict) in candidates.iter_mut().zip(known) {
            if is_enough(verdict, one.report_conflicts) {
                one.reads = nothing;
            }
            if *verdict != Verdict::Committed {
                one.writes = nothing;
            }
        }
        self.unsettled.touch(version, &candidates)
    }

    /// The verdicts, or the last of what they hang on. `known` is what the set alone says.
    fn rule(
        &mut self,
        asker: Endpoint,
        transactions: &[ResolveTransaction],
        (known, touches): (Vec<Verdict>, &[Touch]),
        slips: Slips,
    ) -> Result<Vec<Verdict>, Wait> {
        let mut hangs_on: Option<Wait> = None;
        let mut verdicts = Vec::with_capacity(known.len());
        for ((transaction, known), touch) in transactions.iter().zip(known).zip(touches) {
            let is_reported = transaction.report_conflicts;
            if *touch == Touch::Nothing || is_enough(&known, is_reported) {
                verdicts.push(known);
                continue;
            }
            let met = self.unsettled.meet(asker, transaction);
            let mut ranges = met.conflicts;
            let is_conflict = !ranges.is_empty() || known != Verdict::Committed;
            if let Some(open) = met.open
                && (is_reported || !is_conflict)
                && !slips.decides_unsettled
                && hangs_on.is_none_or(|wait| wait.version < open.version)
            {
                hangs_on = Some(open);
            }
            verdicts.push(if is_conflict {
                if let Verdict::Conflict { ranges: known } = known {
                    ranges.extend(known);
                }
                if !is_reported {
                    ranges.clear();
                }
                ranges.sort_unstable();
                ranges.dedup();
                Verdict::Conflict { ranges }
            } else if met.is_own || *touch == Touch::Batch {
                Verdict::Yours
            } else {
                Verdict::Committed
            });
        }
        hangs_on.map_or(Ok(verdicts), Err)
    }

    /// Takes the writes of a batch that was decided.
    fn enter(
        &mut self,
        version: Version,
        asker: Endpoint,
        transactions: &mut [ResolveTransaction],
        verdicts: &[Verdict],
    ) {
        assert_eq!(transactions.len(), verdicts.len(), "a verdict for each of {version}");
        let stands = transactions.iter_mut().zip(verdicts).map(|(one, verdict)| {
            let writes = core::mem::take(&mut one.writes);
            let stand = match verdict {
                Verdict::Conflict { .. } | Verdict::TooOld => Stand::Out,
                _ if writes.is_empty() => Stand::Out,
                Verdict::Committed if one.is_final => Stand::In,
                Verdict::Committed | Verdict::Yours => Stand::Open,
            };
            (writes, stand)
        });
        self.unsettled.enter(version, asker, stands.collect());
        self.drain();
    }

    /// Takes in what became of a batch.
    pub fn settle(&mut self, proxy: Endpoint, settlement: &Settlement, slips: Slips) -> Settled {
        let settled = self.unsettled.settle(proxy, settlement, slips);
        self.drain();
        settled
    }

    /// What has nothing open in front of it goes into the set, in chain order.
    fn drain(&mut self) {
        let nothing = Ranges::default();
        while let Some(batch) = self.unsettled.pop_settled() {
            let write = |writes| Candidate {
                read_version: batch.version,
                reads: &nothing,
                writes,
                report_conflicts: false,
            };
            let writes: Vec<Candidate<'_>> = batch.committed().map(write).collect();
            // What the window has left behind meanwhile can't decide anything.
            if !writes.is_empty() && batch.version > self.set.oldest() {
                let decided = self.set.decide(batch.version, &writes);
                let is_taken = decided.verdicts.iter().all(|one| *one == Verdict::Committed);
                assert!(is_taken, "{} was settled and is refused", batch.version);
            }
        }
        self.unsettled.evict(EVICTION_ENTRIES);
    }

    /// The order of what is unsettled, and that a wait names something open in front of it.
    pub fn check(&self) {
        self.unsettled.check();
        if let Some((version, wait)) = self.held() {
            assert!(wait.version < version, "{version} waits for {}, not below it", wait.version);
        }
    }
}

/// Nobody else decides about its writes.
fn is_last_word(transaction: &ResolveTransaction) -> bool {
    transaction.is_final || transaction.writes.is_empty()
}

/// Whether nothing that is met besides can change a verdict.
const fn is_enough(verdict: &Verdict, is_reported: bool) -> bool {
    match verdict {
        Verdict::TooOld => true,
        Verdict::Conflict { .. } => !is_reported,
        Verdict::Committed | Verdict::Yours => false,
    }
}

const fn candidate(transaction: &ResolveTransaction) -> Candidate<'_> {
    Candidate {
        read_version: transaction.read_version,
        reads: &transaction.reads,
        writes: &transaction.writes,
        report_conflicts: transaction.report_conflicts,
    }
}
