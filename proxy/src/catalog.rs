//! The view of the catalog, and the gate in front of the batches.
//!
//! ```text
//!  log server --CATALOG, v..through--> view
//!                                       |
//!  transaction --> all streams known? --yes--> gather
//!                   | no, or it creates one
//!                   v
//!                  a round of proof that begins now: R  --> waits until through >= R --> known now?
//! ```
//!
//! A stream that somebody created before this transaction came is at or below R, so it is in the view by
//! then: what is unknown then is refused. A transaction that creates streams waits, moreover, until the view
//! has passed its read version: what was created up to there is seen here, what was created later is a
//! conflict on the keys of the name and the id, which the proxy adds to its reads and writes.
//!
//! Waiting holds up nobody but the rest of the same lane.

use std::collections::BTreeMap;

use common::catalog::{Catalog, StreamDefinition};
use common::message::{CommitOutcome, EpochPlan, Pull, Pulled};
use common::record::{decode_records, sections};
use common::{Code, Cx, Endpoint, Mark, Note, Refusal, RequestId, StreamId, Time, Version};

use crate::Proxy;
use crate::batch::Transaction;
use crate::read_version::Asker;

/// How a transaction fares at the gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Gate {
    /// It is through, or refused.
    Open,
    /// It waits for the view.
    Waits,
}

/// A transaction that waits for the view.
#[derive(Clone, Debug)]
struct Waiter {
    transaction: Transaction,
    /// The view must have got there; unknown while the round of proof goes on.
    needs: Option<Version>,
}

/// All stream names up to a version.
#[derive(Clone, Debug)]
pub(crate) struct CatalogView {
    catalog: Catalog,
    /// Inclusive.
    pub(crate) through: Version,
    /// Those that hold the catalog, best first.
    holders: Vec<Endpoint>,
    /// Which of them is asked.
    holder: usize,
    /// The number of the last pull. An older answer that goes on behind the view is as good: links may be
    /// longer than the patience.
    request: RequestId,
    is_pulling: bool,
    /// Somebody has begun to wait for what is behind the view: the pull that waits for news is of no use.
    is_urgent: bool,
    sent_at: Time,
    waits_for_ms: u64,
    waiters: BTreeMap<u64, Waiter>,
    next_ticket: u64,
}

/// An epoch's pulls are numbered from its own range: room for 2^40 of them, and for 2^24 epochs.
const PULLS_OF_EPOCH_BITS: u32 = 40;

impl CatalogView {
    pub(crate) fn new(plan: &EpochPlan) -> Self {
        let places = plan.holders(StreamId::CATALOG);
        Self {
            catalog: Catalog::default(),
            through: Version::ZERO,
            holders: places.into_iter().map(|place| plan.log_servers[place]).collect(),
            holder: 0,
            request: RequestId(plan.epoch.0 << PULLS_OF_EPOCH_BITS),
            is_pulling: false,
            is_urgent: false,
            sent_at: Time::ZERO,
            waits_for_ms: 0,
            waiters: BTreeMap::new(),
            next_ticket: 0,
        }
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Transaction> {
        self.waiters.values().map(|waiter| &waiter.transaction)
    }

    /// The lowest version above the view that somebody waits for.
    fn wanted(&self) -> Option<Version> {
        self.waiters.values().filter_map(|waiter| waiter.needs).min()
    }

    fn knows(&self, transaction: &Transaction, stream: StreamId) -> bool {
        let creates = |definition: &StreamDefinition| definition.stream == stream;
        self.catalog.contains(stream) || transaction.definitions.iter().any(creates)
    }

    /// A stream or name that the transaction creates and that exists.
    fn existing(&self, transaction: &Transaction) -> Option<Refusal> {
        transaction.definitions.iter().find_map(|StreamDefinition { name, stream }| {
            let by_name = self.catalog.find(name).map(|id| format!("{name} is {id}"));
            let by_id = || self.catalog.name(*stream).map(|name| format!("{stream} is {name}"));
            by_name.or_else(by_id).map(|detail| Refusal::new(Code::StreamExists, detail))
        })
    }

    fn unknown(&self, transaction: &Transaction) -> Option<StreamId> {
        let mut sections = transaction.request.sections.iter().map(|section| section.stream);
        sections.find(|stream| !self.knows(transaction, *stream))
    }
}

impl Proxy {
    /// Lets the transaction through, refuses it, or lets it wait.
    pub(crate) fn approach_gate(&mut self, cx: &mut Cx<'_>, mut transaction: Transaction) -> Gate {
        match definitions(&transaction) {
            Ok(definitions) => transaction.definitions = definitions,
            Err(refusal) => {
                self.refuse_at_gate(cx, transaction, refusal);
                return Gate::Open;
            }
        }
        if let Some(refusal) = self.catalog.existing(&transaction) {
            self.refuse_at_gate(cx, transaction, refusal);
            return Gate::Open;
        }
        if transaction.definitions.is_empty() && self.catalog.unknown(&transaction).is_none() {
            self.pass_gate(cx, transaction);
            return Gate::Open;
        }
        cx.mark(Mark::CatalogWait);
        let ticket = self.catalog.next_ticket;
        self.catalog.next_ticket += 1;
        self.catalog.waiters.insert(ticket, Waiter { transaction, needs: None });
        self.reads.ask(Asker::Gate { ticket });
        Gate::Waits
    }

    fn pass_gate(&mut self, cx: &mut Cx<'_>, transaction: Transaction) {
        if let Some(order) = transaction.request.lane {
            self.leave_gate(transaction.client, order);
        }
        self.gather(cx, transaction);
    }

    fn refuse_at_gate(&mut self, cx: &mut Cx<'_>, transaction: Transaction, refusal: Refusal) {
        if let Some(order) = transaction.request.lane {
            self.leave_gate(transaction.client, order);
        }
        self.finish(cx, transaction, CommitOutcome::Refused(refusal));
    }

    /// A round of proof that began after the transaction came has ended at `version`.
    pub(crate) fn gate_proven(&mut self, cx: &mut Cx<'_>, ticket: u64, version: Version) {
        let Some(waiter) = self.catalog.waiters.get_mut(&ticket) else { return };
        let mut needs = version;
        if !waiter.transaction.definitions.is_empty() {
            let read_version = waiter.transaction.request.read_version;
            if read_version > version.plus(cx.knobs.life_versions) {
                let waiter = self.catalog.waiters.remove(&ticket).expect("just seen");
                cx.mark(Mark::FutureVersion);
                let detail = format!("read version {read_version}, known {version}");
                let refusal = Refusal::new(Code::FutureVersion, detail);
                return self.late(cx, waiter.transaction, Err(refusal));
            }
            needs = needs.max(read_version);
        }
        waiter.needs = Some(needs);
        self.catalog.is_urgent |= needs > self.catalog.through;
    }

    /// Ends the waiting of those for whom the view is far enough.
    pub(crate) fn release_gate(&mut self, cx: &mut Cx<'_>) {
        let through = self.catalog.through;
        let is_ready = |waiter: &Waiter| waiter.needs.is_some_and(|needs| needs <= through);
        let ready: Vec<u64> = self
            .catalog
            .waiters
            .iter()
            .filter(|(_, waiter)| is_ready(waiter))
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in ready {
            // One that was released before may have broken this one's lane; the lane itself waits at the
            // gate.
            let Some(waiter) = self.catalog.waiters.remove(&ticket) else { continue };
            let transaction = waiter.transaction;
            let verdict =
                match (self.catalog.existing(&transaction), self.catalog.unknown(&transaction)) {
                    (Some(refusal), _) => Err(refusal),
                    (None, Some(stream)) => {
                        let detail = format!("no {stream} at {through}");
                        Err(Refusal::new(Code::UnknownStream, detail))
                    }
                    (None, None) => Ok(()),
                };
            self.late(cx, transaction, verdict);
        }
        if core::mem::take(&mut self.catalog.is_urgent) {
            self.pull(cx, 0);
        }
    }

    /// What waited goes on or is refused; then the rest of its lane comes.
    fn late(&mut self, cx: &mut Cx<'_>, transaction: Transaction, verdict: Result<(), Refusal>) {
        let (client, lane) = (transaction.client, transaction.request.lane);
        match verdict {
            Ok(()) => self.pass_gate(cx, transaction),
            Err(refusal) => self.refuse_at_gate(cx, transaction, refusal),
        }
        if let Some(order) = lane {
            self.drain_lane_of(cx, client, order);
        }
    }

    /// Takes out what waits of the clients that `of` names; their lanes are taken down by the caller.
    pub(crate) fn take_from_gate(&mut self, of: &impl Fn(Endpoint) -> bool) -> Vec<Transaction> {
        let waiters = core::mem::take(&mut self.catalog.waiters);
        let (leaving, staying): (BTreeMap<_, _>, _) =
            waiters.into_iter().partition(|(_, waiter)| of(waiter.transaction.client));
        self.catalog.waiters = staying;
        let leaving: Vec<Transaction> =
            leaving.into_values().map(|waiter| waiter.transaction).collect();
        for transaction in &leaving {
            if let Some(order) = transaction.request.lane {
                self.leave_gate(transaction.client, order);
            }
        }
        leaving
    }

    /// Asks for what comes behind the view. While somebody waits for it, the answer shall not wait long for
    /// news of the catalog: how far the view reaches is what counts.
    pub(crate) fn pull_catalog(&mut self, cx: &mut Cx<'_>) {
        let patience = match self.catalog.wanted() {
            Some(_) => cx.knobs.retransmit_ms / 4,
            None => u64::MAX,
        };
        self.pull(cx, cx.knobs.catalog_wait_ms.min(patience).max(1));
    }

    fn pull(&mut self, cx: &mut Cx<'_>, wait_ms: u64) {
        let view = &mut self.catalog;
        view.waits_for_ms = wait_ms;
        view.request = view.request.plus(1);
        view.is_pulling = true;
        view.sent_at = cx.now;
        let pull = Pull {
            request: view.request,
            streams: vec![StreamId::CATALOG],
            after: view.through,
            bytes_max: u32::try_from(cx.knobs.pull_bytes_max).unwrap_or(u32::MAX),
            wait_ms: u32::try_from(view.waits_for_ms).unwrap_or(u32::MAX),
            want: Version::ZERO,
        };
        cx.send(view.holders[view.holder], self.plan.epoch, pull);
    }

    pub(crate) fn handle_pulled(&mut self, cx: &mut Cx<'_>, from: Endpoint, pulled: Pulled) {
        let view = &mut self.catalog;
        // The proxy of the epoch before had the same address: its answers must not pass for ours.
        let is_ours = (self.plan.epoch.0 << PULLS_OF_EPOCH_BITS..=view.request.0)
            .contains(&pulled.request.0)
            && view.holders.contains(&from);
        let is_last = view.is_pulling && pulled.request == view.request;
        let is_news = pulled.through > pulled.after;
        if !is_ours || pulled.after != view.through || !(is_last || is_news) {
            return;
        }
        assert!(pulled.through >= pulled.after, "{} after {}", pulled.through, pulled.after);
        view.is_pulling = false;
        match read_definitions(&pulled) {
            Ok(definitions) => definitions.into_iter().for_each(|new| view.catalog.define(new)),
            Err(detail) => {
                // Another holder may have it whole; the next look asks it.
                return cx.note(Note::Warning { code: "corrupt_catalog", detail });
            }
        }
        view.through = pulled.through;
        // A server that neither has news nor waits for them must not be asked in a loop: the next tick asks
        // it.
        let waited = cx.now.since(view.sent_at).as_millis() >= u128::from(view.waits_for_ms);
        if pulled.through > pulled.after || waited {
            self.pull_catalog(cx);
        }
    }

    /// Asks again when an answer is overdue, the next holder in turn.
    pub(crate) fn retry_catalog(&mut self, cx: &mut Cx<'_>) {
        let view = &mut self.catalog;
        let patience_ms = view.waits_for_ms + cx.knobs.retransmit_ms;
        let waited = cx.now.since(view.sent_at);
        if !view.is_pulling {
            self.pull_catalog(cx);
        } else if waited.as_millis() >= u128::from(patience_ms) {
            cx.mark(Mark::Retransmit);
            view.holder = (view.holder + 1) % view.holders.len();
            self.pull_catalog(cx);
        }
    }

    pub(crate) fn check_catalog(&self) {
        let view = &self.catalog;
        assert!(view.waiters.keys().all(|ticket| *ticket < view.next_ticket));
        let ready = |waiter: &Waiter| waiter.needs.is_some_and(|needs| needs <= view.through);
        assert!(!view.waiters.values().any(ready), "somebody waits for {} in vain", view.through);
        for (ticket, waiter) in &view.waiters {
            let is_asked = self.reads.asks_for(*ticket);
            assert!(waiter.needs.is_some() || is_asked, "{ticket} waits and nobody asks");
        }
    }
}

/// The streams that a transaction creates.
fn definitions(transaction: &Transaction) -> Result<Vec<StreamDefinition>, Refusal> {
    let (mut start, mut found) = (0, Vec::<StreamDefinition>::new());
    for section in &transaction.request.sections {
        let bytes = section.bytes as usize;
        if section.stream == StreamId::CATALOG {
            let records = transaction.request.payload.slice(start, bytes);
            let records = decode_records(&records.expect("the door has checked the sections"));
            for record in records.expect("the door has checked the records") {
                let new = StreamDefinition::from_record(&record)?;
                if found.iter().any(|old| old.name == new.name || old.stream == new.stream) {
                    let detail = format!("{} or {} twice", new.name, new.stream);
                    return Err(Refusal::new(Code::Malformed, detail));
                }
                found.push(new);
            }
        }
        start += bytes;
    }
    Ok(found)
}

/// The definitions in an answer, checked against the blocks' checksums.
fn read_definitions(pulled: &Pulled) -> Result<Vec<StreamDefinition>, String> {
    let (mut start, mut found) = (0, Vec::new());
    for block in &pulled.blocks {
        let bytes = block.bytes as usize;
        let body = pulled.payload.slice(start, bytes).ok_or("a block is cut off")?;
        start += bytes;
        if block.stream != StreamId::CATALOG {
            return Err(format!("{} was not asked for", block.stream));
        }
        if crc32c::crc32c(&body) != block.checksum {
            return Err(format!("a wrong checksum at {}", block.base_offset));
        }
        for section in sections(&body).map_err(|error| error.to_string())? {
            let records = decode_records(&section.records).map_err(|error| error.to_string())?;
            for record in records {
                let definition = StreamDefinition::from_record(&record);
                found.push(definition.map_err(|refusal| refusal.to_string())?);
            }
        }
    }
    Ok(found)
}
