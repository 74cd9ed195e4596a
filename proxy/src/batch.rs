//! Batching: what gathers, when it closes, and what a batch is from then on.
//!
//! ```text
//!  burst:   t1 t2 t3 | zero-delay timer      an idle proxy closes when the burst is over
//!  busy:    t4 t5 t6 t7 ...                  a full pipeline gathers until a batch has left it
//!  full:    batch_transactions_max, batch_bytes_max: closes at once
//! ```

use std::collections::VecDeque;

use common::catalog::StreamDefinition;
use common::message::{CommitOutcome, CommitRequest};
use common::{Cx, Endpoint, Mark, Time, Version, WallTime};

use crate::door::{Charge, lane_broken};
use crate::push::Pushed;
use crate::resolve::Resolution;
use crate::{BATCH, Proxy};

/// Where a batch is. The names are those of spans, metrics and time-outs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Phase {
    /// It gathers.
    Batching,
    /// It waits for its version.
    Versioning,
    /// It waits for the resolvers' verdicts.
    Resolving,
    /// It waits for its turn to be pushed, or for the log servers.
    Pushing,
    /// It is durable everywhere.
    Replying,
}

impl Phase {
    /// The name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Batching => "Batching",
            Self::Versioning => "Versioning",
            Self::Resolving => "Resolving",
            Self::Pushing => "Pushing",
            Self::Replying => "Replying",
        }
    }
}

/// A request on its way.
#[derive(Clone, Debug)]
pub(crate) struct Transaction {
    pub(crate) client: Endpoint,
    pub(crate) request: CommitRequest,
    /// What it takes of the proxy's bytes.
    pub(crate) charge: Charge,
    /// The streams that it creates.
    pub(crate) definitions: Vec<StreamDefinition>,
    /// Why it does not commit, as soon as that is known.
    pub(crate) failed: Option<CommitOutcome>,
    /// For each section: the records of its stream in earlier sections of the batch.
    pub(crate) ordinals: Vec<u32>,
}

/// The sequencer's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pair {
    pub(crate) previous: Version,
    pub(crate) version: Version,
    pub(crate) commit_time: WallTime,
}

/// What goes through the phases together.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) number: u64,
    pub(crate) phase: Phase,
    /// When the phase began.
    pub(crate) since: Time,
    /// When something was last asked for it.
    pub(crate) sent_at: Time,
    pub(crate) transactions: Vec<Transaction>,
    /// From Versioning's end on.
    pub(crate) pair: Option<Pair>,
    /// In Resolving and after.
    pub(crate) resolution: Option<Resolution>,
    /// Its push would be too far ahead of what is known committed.
    pub(crate) is_held: bool,
    /// In Pushing, once its turn has come.
    pub(crate) pushed: Option<Pushed>,
}

impl Batch {
    pub(crate) fn version(&self) -> Option<Version> {
        self.pair.map(|pair| pair.version)
    }

    pub(crate) fn enter(&mut self, phase: Phase, now: Time) {
        assert!(phase > self.phase, "batch {}: {:?} -> {phase:?}", self.number, self.phase);
        self.phase = phase;
        self.since = now;
        self.sent_at = now;
    }
}

/// What waits for the next batch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gathering {
    pub(crate) transactions: VecDeque<Transaction>,
    pub(crate) bytes: u64,
    /// The timer that ends the burst runs.
    is_armed: bool,
    /// The burst of what gathers is over.
    is_due: bool,
    /// It would have closed if the pipeline had had room.
    is_held: bool,
    pub(crate) closed_at: Time,
}

impl Proxy {
    /// Takes a transaction that has passed the door and the gate.
    pub(crate) fn gather(&mut self, cx: &mut Cx<'_>, transaction: Transaction) {
        let gathering = &mut self.gathering;
        gathering.bytes += transaction.charge.bytes();
        gathering.transactions.push_back(transaction);
        if !gathering.is_armed && !gathering.is_due {
            gathering.is_armed = true;
            cx.arm(BATCH, cx.now);
        }
    }

    pub(crate) fn handle_burst_over(&mut self) {
        self.gathering.is_armed = false;
        self.gathering.is_due = !self.gathering.transactions.is_empty();
    }

    /// Closes batches while something is due or full and the pipeline has room.
    pub(crate) fn close_ready(&mut self, cx: &mut Cx<'_>) {
        loop {
            let Gathering { transactions, bytes, is_due, .. } = &self.gathering;
            let is_full = transactions.len() as u64 >= cx.knobs.batch_transactions_max
                || *bytes >= cx.knobs.batch_bytes_max;
            if transactions.is_empty() || !(*is_due || is_full) {
                return;
            }
            let is_unsettled = self.settlements.len() as u64 >= cx.knobs.settlements_max;
            // One batch at least: only resolvers' answers to it confirm settlements.
            if is_unsettled && !self.batches.is_empty() {
                return cx.mark(Mark::SettlementsFull);
            }
            if self.batches.len() as u64 >= cx.knobs.batches_in_flight_max {
                if !core::mem::replace(&mut self.gathering.is_held, true) {
                    cx.mark(Mark::PipelineFull);
                }
                return;
            }
            self.gathering.is_held = false;
            if is_full {
                cx.mark(Mark::BatchFull);
            }
            let transactions = self.take_gathered(cx);
            if !transactions.is_empty() {
                self.open_batch(cx, transactions);
            }
        }
    }

    /// The next batch's transactions. Those of a lane that broke meanwhile are refused.
    fn take_gathered(&mut self, cx: &mut Cx<'_>) -> Vec<Transaction> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while (taken.len() as u64) < cx.knobs.batch_transactions_max
            && bytes < cx.knobs.batch_bytes_max
            && let Some(transaction) = self.gathering.transactions.pop_front()
        {
            let charged = transaction.charge.bytes();
            self.gathering.bytes -= charged;
            if self.is_lane_broken(&transaction) {
                self.finish(cx, transaction, lane_broken());
                continue;
            }
            bytes += charged;
            taken.push(transaction);
        }
        if self.gathering.transactions.is_empty() {
            self.gathering.is_due = false;
            assert_eq!(self.gathering.bytes, 0, "bytes of an empty gathering");
        }
        taken
    }

    /// Begins a commit: from here on it goes through the phases, in the order of its number.
    pub(crate) fn open_batch(&mut self, cx: &mut Cx<'_>, transactions: Vec<Transaction>) {
        assert!(transactions.len() <= 65_535, "{} in a batch", transactions.len());
        let number = self.next_number;
        self.next_number += 1;
        self.gathering.closed_at = cx.now;
        self.batches.push_back(Batch {
            number,
            phase: Phase::Versioning,
            since: cx.now,
            sent_at: cx.now,
            transactions,
            pair: None,
            resolution: None,
            is_held: false,
            pushed: None,
        });
        self.ask_version(cx, number);
    }

    /// Numbers are dense, batches don't overtake, versions form ascending pairs.
    pub(crate) fn check_batches(&self) {
        let mut below = self.replied;
        for (batch, number) in self.batches.iter().rev().zip((1..self.next_number).rev()) {
            assert_eq!(batch.number, number, "numbers of batches are dense");
        }
        for (one, next) in self.batches.iter().zip(self.batches.iter().skip(1)) {
            assert!(
                one.phase >= next.phase && (one.pushed.is_some() || next.pushed.is_none()),
                "batch {} in {:?} is overtaken by {} in {:?}",
                one.number,
                one.phase,
                next.number,
                next.phase
            );
        }
        for pair in self.batches.iter().filter_map(|batch| batch.pair) {
            let Pair { previous, version, .. } = pair;
            assert!(
                below <= previous && previous < version,
                "I1: {below}, {previous} -> {version}"
            );
            below = version;
        }
    }
}
