//! The resolver role: takes each pair of the chain once, in order, and decides its batch.
//!
//! ```text
//!  proxy 0 --12 -> 15--.     chain stands at 10
//!  proxy 1 --10 -> 12---+--> Ordered --12--> window, verdicts --Resolved--> proxy 1
//!                            15 waits for 12 --15--> ...      --Resolved--> proxy 0
//! ```
//!
//! | in | out |
//! |---|---|
//! | `Resolve {previous, version, answered, transactions}` | `Resolved {version, verdicts}` to the asker |
//!
//! # Invariants
//! - I1, I2: the chain begins at RV; a batch is decided and the chain is moved in one step.
//! - I5: a read version below `max(RV, version - LIFE)` is too old, so what left the set can't be missed. The
//!   set begins empty, which is safe since RTV - RV > 2 LIFE.
//! - I15: verdicts are kept for their proxy until it says that it has them; the same batch gets the same
//!   verdicts. A batch that is unknown and behind the chain has been answered: it is never answered again.
//!
//! What is too much to wait is dropped; the proxy sends it again. When the set outgrows its memory, the
//! window becomes shorter than LIFE: old reads are refused as too old, nothing is decided wrongly.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use common::message::{EpochPlan, Resolve, ResolveTransaction, Resolved, Verdict};
use common::{
    Cx, Endpoint, Epoch, Event, Mark, Message, Note, Offer, Ordered, Plant, Ranges, Role, Version,
};

use crate::conflict::{Candidate, ConflictSet, Decided};

/// Batches that wait, at most, whatever the knob `resolves_waiting_max` says.
const WAITING_MAX: usize = 1 << 16;
/// Entries that eviction looks at after a batch while the set is over its memory.
const EVICTION_ENTRIES_UNDER_PRESSURE: usize = 1 << 16;

/// A batch that waits for its turn.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Waiting {
    from: Endpoint,
    transactions: Vec<ResolveTransaction>,
}

/// The resolver of one share of the key space in one epoch.
#[derive(Clone, Debug)]
pub struct Resolver {
    epoch: Epoch,
    index: u8,
    recovery_version: Version,
    chain: Ordered<Waiting>,
    set: ConflictSet,
    /// Verdicts that a proxy may ask for again, by version (I15).
    replies: BTreeMap<Endpoint, BTreeMap<Version, Resolved>>,
    is_under_pressure: bool,
    overflow_count: u64,
}

/// How the resolver stands, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResolverStatus {
    /// The epoch.
    pub epoch: Epoch,
    /// The last version that was decided; what waits, waits for its successor.
    pub version: Version,
    /// Batches that wait for their predecessor.
    pub waiting_count: usize,
    /// Batches that were dropped because too many waited.
    pub overflow_count: u64,
    /// Read versions below it are too old.
    pub oldest: Version,
    /// Entries of the conflict set.
    pub entry_count: usize,
    /// About what they take.
    pub memory_bytes: usize,
    /// Whether the window is cut short for want of memory.
    pub is_under_pressure: bool,
    /// Verdicts that are kept for retransmissions.
    pub reply_count: usize,
}

impl Resolver {
    /// The resolver of share `index` of `plan`, with an empty set.
    #[must_use]
    pub fn new(plan: &EpochPlan, index: u8) -> Self {
        plan.check();
        let shares = plan.resolvers.len();
        assert!(usize::from(index) < shares, "resolver {index} of {shares}");
        Self {
            epoch: plan.epoch,
            index,
            recovery_version: plan.recovery_version,
            chain: Ordered::new(plan.recovery_version, WAITING_MAX),
            set: ConflictSet::new(plan.recovery_version),
            replies: plan.proxies.iter().map(|proxy| (*proxy, BTreeMap::new())).collect(),
            is_under_pressure: false,
            overflow_count: 0,
        }
    }

    /// Nothing to arm: a resolver only answers.
    pub fn start(&self, cx: &mut Cx<'_>) {
        assert_eq!(cx.me.role, Role::Resolver(self.index), "{:?} begins another's role", cx.me);
    }

    /// Takes one event. Everything but a batch of this epoch is ignored.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        if let Event::Message { from, epoch, message: Message::Resolve(resolve) } = event
            && epoch == self.epoch
        {
            self.handle_resolve(cx, from, resolve);
        }
    }

    fn handle_resolve(&mut self, cx: &mut Cx<'_>, from: Endpoint, resolve: Resolve) {
        let Resolve { previous_version, version, answered, transactions } = resolve;
        assert!(
            answered < version,
            "{from:?} has verdicts up to {answered} and asks for {version}"
        );
        // A proxy of another incarnation has no place in this chain.
        let Some(replies) = self.replies.get_mut(&from) else { return };
        *replies = replies.split_off(&answered.plus(1));

        let mut previous_version = previous_version;
        if cx.planted(Plant::ResolveOutOfOrder) && version > self.chain.at() {
            previous_version = self.chain.at();
        }
        let is_next = previous_version == self.chain.at();
        let is_behind = version <= self.chain.at();
        if self.chain.waiting_count() as u64 >= cx.knobs.resolves_waiting_max
            && !is_next
            && !is_behind
        {
            self.overflow_count += 1;
            return;
        }
        match self.chain.offer(previous_version, version, Waiting { from, transactions }) {
            Offer::Next => self.decide_ready(cx),
            Offer::Early => cx.mark(Mark::ResolveEarly),
            Offer::Again => self.answer_again(cx, from, version),
            Offer::Overflow => self.overflow_count += 1,
        }
    }

    fn answer_again(&self, cx: &mut Cx<'_>, to: Endpoint, version: Version) {
        // Not there: it still waits for its turn, or its proxy has said that it has the verdicts.
        if let Some(reply) = self.replies.get(&to).and_then(|replies| replies.get(&version)) {
            assert!(version <= self.chain.at(), "{version} was decided before its turn");
            cx.mark(Mark::ResolveAgain);
            cx.send(to, self.epoch, reply.clone());
        }
    }

    /// Decides what has its turn: as much as waits, at most.
    fn decide_ready(&mut self, cx: &mut Cx<'_>) {
        while let Some((previous, version, waiting)) = self.chain.take_next() {
            let decided = self.decide(cx, version, &waiting.transactions);
            let count = |of: fn(&Verdict) -> bool| {
                u32::try_from(decided.verdicts.iter().filter(|verdict| of(verdict)).count())
                    .expect("a batch has at most 65,535 transactions")
            };
            let committed = count(|verdict| *verdict == Verdict::Committed);
            let refused = count(|verdict| *verdict != Verdict::Committed);
            cx.note(Note::Decided { epoch: self.epoch, previous, version, committed, refused });
            if decided.verdicts.contains(&Verdict::TooOld) {
                cx.mark(Mark::ResolveTooOld);
            }
            if decided.in_batch_conflicts > 0 {
                cx.mark(Mark::ConflictInBatch);
            }
            let reply = Resolved { version, verdicts: decided.verdicts };
            let replies = self.replies.get_mut(&waiting.from).expect("only proxies' batches wait");
            replies.insert(version, reply.clone());
            cx.send(waiting.from, self.epoch, reply);
        }
    }

    /// The window that holds at `version`, then the verdicts, then a bounded step of eviction.
    fn decide(
        &mut self,
        cx: &mut Cx<'_>,
        version: Version,
        transactions: &[ResolveTransaction],
    ) -> Decided {
        let oldest = version.minus_saturating(cx.knobs.life_versions).max(self.recovery_version);
        self.set.advance_oldest(oldest);
        let memory_max = usize::try_from(cx.knobs.conflict_set_bytes_max).unwrap_or(usize::MAX);
        self.is_under_pressure = self.set.memory_bytes() > memory_max;
        if self.is_under_pressure {
            let window = version.since(self.set.oldest());
            self.set.advance_oldest(self.set.oldest().plus(window / 2));
        }
        assert!(self.set.oldest() < version, "I5: oldest {} at {version}", self.set.oldest());

        let (nothing, oldest) = (Ranges::default(), self.set.oldest());
        let mut slips = |plant| cx.planted(plant) && cx.rng.chance(1, 20);
        let slips: Vec<[bool; 2]> = transactions
            .iter()
            .map(|_| [slips(Plant::SkipReads), slips(Plant::ForgetWrites)])
            .collect();
        let ignores_too_old = cx.planted(Plant::IgnoreTooOld);
        let candidates: Vec<Candidate<'_>> = transactions
            .iter()
            .zip(&slips)
            .map(|(transaction, [skips_reads, forgets_writes])| Candidate {
                read_version: if ignores_too_old {
                    transaction.read_version.max(oldest)
                } else {
                    transaction.read_version
                },
                reads: if *skips_reads { &nothing } else { &transaction.reads },
                writes: if *forgets_writes { &nothing } else { &transaction.writes },
                report_conflicts: transaction.report_conflicts,
            })
            .collect();
        let decided = self.set.decide(version, &candidates);
        let entries = if self.is_under_pressure {
            EVICTION_ENTRIES_UNDER_PRESSURE
        } else {
            cx.knobs.eviction_entries as usize
        };
        self.set.evict(entries);
        decided
    }

    /// RV <= the chain's end; RV <= oldest <= the chain's end; what is kept was decided; what waits is ahead.
    pub fn check(&self) {
        self.chain.check();
        let (rv, oldest, at) = (self.recovery_version, self.set.oldest(), self.chain.at());
        assert!(rv <= oldest && oldest <= at, "I5: RV {rv}, oldest {oldest}, chain at {at}");
        for (proxy, replies) in &self.replies {
            let last = replies.last_key_value().map(|(last, _)| *last);
            assert!(last.is_none_or(|last| last <= at), "{proxy:?} was told {last:?} at {at}");
        }
    }

    /// How it stands.
    #[must_use]
    pub fn status(&self) -> ResolverStatus {
        ResolverStatus {
            epoch: self.epoch,
            version: self.chain.at(),
            waiting_count: self.chain.waiting_count(),
            overflow_count: self.overflow_count,
            oldest: self.set.oldest(),
            entry_count: self.set.len(),
            memory_bytes: self.set.memory_bytes(),
            is_under_pressure: self.is_under_pressure,
            reply_count: self.replies.values().map(BTreeMap::len).sum(),
        }
    }
}
