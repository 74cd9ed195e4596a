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
//! | `Resolve {previous, version, answered, settlements, transactions}` | `Resolved {version, settled, verdicts}` to the asker |
//! | `Settle {settlements}` | nothing |
//!
//! What becomes of a batch at other resolvers, and what waits for it, is told in [`crate::settle`].
//!
//! # Invariants
//! - I1, I2: the chain begins at RV; a batch is decided and the chain is moved in one step.
//! - I5: a read version below `max(RV, version - LIFE)` is too old, so what left the set can't be missed. The
//!   set begins empty, which is safe since RTV - RV > 2 LIFE.
//! - I15: verdicts are kept for their proxy until it says that it has them; the same batch gets the same
//!   verdicts. A batch that is unknown and behind the chain has been answered: it is never answered again.
//! - Settlements are taken when they come, also those of a batch that is dropped or was decided before.
//!
//! What is too much to wait is dropped; the proxy sends it again. When the set outgrows its memory, the
//! window becomes shorter than LIFE: old reads are refused as too old, nothing is decided wrongly.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use common::message::{
    EpochPlan, Resolve, ResolveTransaction, Resolved, Settle, Settlement, Verdict,
};
use common::{
    Cx, Endpoint, Epoch, Event, Mark, Message, Note, Offer, Ordered, Plant, Ranges, Role, Version,
};

use crate::conflict::Decided;
use crate::settle::{Ruling, Settled, Settling, Slips, Wait, Why};

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
    settling: Settling,
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
    /// Batches that wait for their predecessor, and the one that is held.
    pub waiting_count: usize,
    /// The batch that has its turn, and what it waits for.
    pub held: Option<(Version, Wait)>,
    /// Batches that have an open one among them or in front of them.
    pub unsettled_count: usize,
    /// About what their writes take.
    pub unsettled_bytes: usize,
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
            settling: Settling::new(plan.recovery_version),
            replies: plan.proxies.iter().map(|proxy| (*proxy, BTreeMap::new())).collect(),
            is_under_pressure: false,
            overflow_count: 0,
        }
    }

    /// Nothing to arm: a resolver only answers.
    pub fn start(&self, cx: &mut Cx<'_>) {
        assert_eq!(cx.me.role, Role::Resolver(self.index), "{:?} begins another's role", cx.me);
    }

    /// Takes one event. Everything but a batch or settlements of this epoch is ignored.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        match event {
            Event::Message { from, epoch, message } if epoch == self.epoch => match message {
                Message::Resolve(resolve) => self.handle_resolve(cx, from, resolve),
                Message::Settle(settle) => self.handle_settle(cx, from, &settle),
                _ => {}
            },
            _ => {}
        }
    }

    fn handle_resolve(&mut self, cx: &mut Cx<'_>, from: Endpoint, resolve: Resolve) {
        let Resolve { previous_version, version, answered, settlements, transactions } = resolve;
        assert!(
            answered < version,
            "{from:?} has verdicts up to {answered} and asks for {version}"
        );
        // A proxy of another incarnation has no place in this chain.
        let Some(replies) = self.replies.get_mut(&from) else { return };
        *replies = replies.split_off(&answered.plus(1));
        self.settle(cx, from, &settlements);
        self.offer(cx, (previous_version, version), Waiting { from, transactions });
        self.decide_ready(cx);
    }

    fn handle_settle(&mut self, cx: &mut Cx<'_>, from: Endpoint, settle: &Settle) {
        if self.replies.contains_key(&from) {
            self.settle(cx, from, &settle.settlements);
            self.decide_ready(cx);
        }
    }

    /// Takes what became of batches of `from`; what waits for that can be decided next.
    fn settle(&mut self, cx: &mut Cx<'_>, from: Endpoint, settlements: &[Settlement]) {
        let slips = slips(cx);
        for settlement in settlements {
            let (version, at) = (settlement.version, self.chain.at());
            assert!(version <= at, "{from:?} settles {version}, decided is {at}");
            match self.settling.settle(from, settlement, slips) {
                Settled::Taken => {}
                Settled::Early => cx.mark(Mark::SettledEarly),
                Settled::Again => cx.mark(Mark::SettlementAgain),
            }
        }
    }

    fn offer(&mut self, cx: &mut Cx<'_>, pair: (Version, Version), waiting: Waiting) {
        let (mut previous_version, version) = pair;
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
        let from = waiting.from;
        match self.chain.offer(previous_version, version, waiting) {
            Offer::Next => {}
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

    /// Decides what has its turn, until one must wait for a settlement: as much as waits, at most.
    fn decide_ready(&mut self, cx: &mut Cx<'_>) {
        while let Some((asker, decided)) = self.decide_next(cx) {
            let (previous, version, _) = self.chain.take_next().expect("it has just been decided");
            let count = |of: fn(&Verdict) -> bool| {
                u32::try_from(decided.verdicts.iter().filter(|verdict| of(verdict)).count())
                    .expect("a batch has at most 65,535 transactions")
            };
            let committed = count(|one| matches!(one, Verdict::Committed | Verdict::Yours));
            let refused = count(|one| matches!(one, Verdict::Conflict { .. } | Verdict::TooOld));
            cx.note(Note::Decided { epoch: self.epoch, previous, version, committed, refused });
            if decided.verdicts.contains(&Verdict::TooOld) {
                cx.mark(Mark::ResolveTooOld);
            }
            if decided.verdicts.contains(&Verdict::Yours) {
                cx.mark(Mark::LeftToProxy);
            }
            if decided.in_batch_conflicts > 0 {
                cx.mark(Mark::ConflictInBatch);
            }
            let settled = self.settling.settled(asker, version);
            let reply = Resolved { version, settled, verdicts: decided.verdicts };
            let replies = self.replies.get_mut(&asker).expect("only proxies' batches wait");
            replies.insert(version, reply.clone());
            cx.send(asker, self.epoch, reply);
        }
    }

    /// The window that holds at the next version, then the verdicts, then a bounded step of eviction.
    /// Nothing if the next batch is not there or must wait.
    fn decide_next(&mut self, cx: &mut Cx<'_>) -> Option<(Endpoint, Decided)> {
        let (version, waiting) = self.chain.peek_next_mut()?;
        let transactions = &mut waiting.transactions;
        let was_held = self.settling.held();
        if was_held.is_none() {
            // Once for each batch, however often it is offered.
            let oldest = version.minus_saturating(cx.knobs.life_versions);
            self.settling.advance_oldest(oldest.max(self.recovery_version));
            let memory_max = usize::try_from(cx.knobs.conflict_set_bytes_max).unwrap_or(usize::MAX);
            self.is_under_pressure = self.settling.memory_bytes() > memory_max;
            let oldest = self.settling.set().oldest();
            if self.is_under_pressure {
                self.settling.advance_oldest(oldest.plus(version.since(oldest) / 2));
            }
            slip(cx, transactions, oldest);
        }
        let oldest = self.settling.set().oldest();
        assert!(oldest < version, "I5: oldest {oldest} at {version}");
        let bytes_max = cx.knobs.unsettled_bytes_max;
        let asker = waiting.from;
        let decided = match self.settling.decide(version, asker, transactions, bytes_max, slips(cx))
        {
            Ruling::Decided(decided) => decided,
            Ruling::Held(wait) => {
                if was_held.is_none_or(|(_, before)| before != wait) {
                    cx.mark(match wait.why {
                        Why::Reads => Mark::ResolveHeld,
                        Why::Full => Mark::UnsettledFull,
                    });
                }
                return None;
            }
        };
        let entries = if self.is_under_pressure {
            EVICTION_ENTRIES_UNDER_PRESSURE
        } else {
            cx.knobs.eviction_entries as usize
        };
        self.settling.evict(entries);
        Some((asker, decided))
    }

    /// RV <= the chain's end; RV <= oldest <= the version that was decided last, or is held; what is kept was
    /// decided; what waits is ahead, and waits for what is behind.
    pub fn check(&self) {
        self.chain.check();
        self.settling.check();
        let (rv, oldest, at) =
            (self.recovery_version, self.settling.set().oldest(), self.chain.at());
        let held = self.settling.held();
        let offered = held.map_or(at, |(version, _)| version);
        assert!(
            rv <= at && rv <= oldest && oldest <= offered,
            "I5: RV {rv}, oldest {oldest}, chain at {at}, offered {offered}"
        );
        assert!(at <= offered, "{offered} is held behind the chain at {at}");
        if let Some((version, wait)) = held {
            assert!(wait.version <= at, "{version} waits for {}, chain at {at}", wait.version);
        }
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
            held: self.settling.held(),
            unsettled_count: self.settling.unsettled_count(),
            unsettled_bytes: self.settling.unsettled_bytes(),
            oldest: self.settling.set().oldest(),
            entry_count: self.settling.set().len(),
            memory_bytes: self.settling.memory_bytes(),
            is_under_pressure: self.is_under_pressure,
            reply_count: self.replies.values().map(BTreeMap::len).sum(),
        }
    }
}

/// The mistakes of settling that are planted.
fn slips(cx: &mut Cx<'_>) -> Slips {
    Slips {
        decides_unsettled: cx.planted(Plant::DecideUnsettled),
        keeps_aborted: cx.planted(Plant::KeepAborted),
        settles_next: cx.planted(Plant::SettleWrongBatch) && cx.rng.chance(1, 4),
    }
}

/// The planted mistakes with what a batch reads and writes.
fn slip(cx: &mut Cx<'_>, transactions: &mut [ResolveTransaction], oldest: Version) {
    for transaction in transactions {
        if cx.planted(Plant::SkipReads) && cx.rng.chance(1, 20) {
            transaction.reads = Ranges::default();
        }
        if cx.planted(Plant::ForgetWrites) && cx.rng.chance(1, 20) {
            transaction.writes = Ranges::default();
        }
        if cx.planted(Plant::IgnoreTooOld) {
            transaction.read_version = transaction.read_version.max(oldest);
        }
    }
}
