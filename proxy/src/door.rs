//! The door: what is let in, what a repeated request gets, and the order of lanes.
//!
//! ```text
//!  request --> known? --pending: nothing, settled: the same answer again (I15)
//!     | new
//!     v
//!  serving? limits? disk? well-formed? --no--> Refused, remembered like every outcome
//!     | yes
//!     v
//!  lane:  0 1 2 . 4     early ones wait for their place; one at a time goes to the gate
//!               ^ next
//! ```
//!
//! Every outcome is kept until the client's `answered_below` says that it has it: a late copy of a refused
//! request must not commit after all. So a client's table bounds what it can have open: up to
//! `client_requests_max` requests are served, as many again are refused, what comes on top is not answered,
//! but for the oldest one.
//!
//! # Lanes
//! The commits of a lane are decided in the order of their sequence. One that fails breaks the lane:
//! everything behind it is refused, wherever it is by then. What has its version already is left out when its
//! batch is judged. Several resolvers are told of that; a single one, which is told of nothing, remembers the
//! writes: the one false conflict that is left.
//!
//! A lane that broke is forgotten once nothing of it can come any more: when the client first says that it
//! has the answer of the one that failed, in a request numbered N, all of the lane was sent below N. So it
//! goes when all below N are answered, and none of them is on its way: a client may have given up on one that
//! still would commit.
//!
//! A client may drop a lane that is whole without a word. So when there are too many, a new one takes the
//! place of the one that has been quiet for longest, with nothing of it on its way. If that one was not
//! dropped after all, what comes of it waits for a first place that is never taken, and the client gives the
//! lane up: late, but in order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::message::{
    CommitKind, CommitOutcome, CommitReply, CommitRequest, LaneOrder, LogState, Refused,
};
use common::transaction::{request_bytes, validate};
use common::{Code, Cx, Endpoint, Mark, Peer, Plant, Refusal, RequestId, Role};

use crate::batch::Transaction;
use crate::catalog::Gate;
use crate::{Proxy, RETRY_AFTER_MS};

/// Bytes of the proxy that a request has taken. It can only be got at the door and given back there.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) struct Charge(u64);

impl Charge {
    pub(crate) const fn bytes(&self) -> u64 {
        self.0
    }
}

/// All clients, and what their requests have taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Door {
    clients: BTreeMap<Endpoint, Client>,
    bytes: u64,
}

/// What the proxy knows of a client.
#[derive(Clone, Debug, Default)]
struct Client {
    /// The connection is lost: it stays only while something of it is in flight.
    is_gone: bool,
    answered_below: RequestId,
    pending: BTreeSet<RequestId>,
    settled: BTreeMap<RequestId, CommitOutcome>,
    lanes: BTreeMap<u64, Lane>,
    /// How many of the lanes are broken.
    broken_count: usize,
}

#[derive(Clone, Debug, Default)]
struct Lane {
    /// The sequence that goes to the gate next, or is there.
    next: u64,
    is_at_gate: bool,
    waiting: BTreeMap<u64, Transaction>,
    broken: Option<Broken>,
    /// The highest request of it so far.
    last_request: RequestId,
}

#[derive(Clone, Debug)]
struct Broken {
    /// The lowest sequence that failed.
    sequence: u64,
    request: RequestId,
    /// The first request that the client sent in the knowledge of it.
    closed_by: Option<RequestId>,
}

impl Client {
    fn hear(&mut self, request: RequestId, answered_below: RequestId) {
        self.is_gone = false;
        self.answered_below = self.answered_below.max(answered_below);
        self.settled = self.settled.split_off(&self.answered_below);
        if self.broken_count > 0 {
            self.forget_lanes(request);
        }
    }

    /// Every request below has been answered, and none of them is on its way.
    fn over_below(&self) -> RequestId {
        let first = self.pending.first().copied().unwrap_or(self.answered_below);
        self.answered_below.min(first)
    }

    /// The lane that has been quiet for longest, if its client may have dropped it.
    fn quiet_lane(&self) -> Option<u64> {
        let over_below = self.over_below();
        let is_quiet = |lane: &Lane| lane.broken.is_none() && lane.last_request < over_below;
        let quiet = self.lanes.iter().filter(|(_, lane)| is_quiet(lane));
        let (number, lane) = quiet.min_by_key(|(_, lane)| lane.last_request)?;
        let waiting_count = lane.waiting.len();
        assert!(
            waiting_count == 0 && !lane.is_at_gate,
            "lane {number} has {waiting_count} waiting and nothing pending below {over_below}"
        );
        Some(*number)
    }

    /// Forgets the broken lanes of which nothing can come any more, at `request`.
    fn forget_lanes(&mut self, request: RequestId) {
        let (answered_below, over_below) = (self.answered_below, self.over_below());
        let before = self.lanes.len();
        self.lanes.retain(|_, lane| match &mut lane.broken {
            Some(broken) if answered_below > broken.request => {
                let closed_by = *broken.closed_by.get_or_insert(request);
                over_below < closed_by
            }
            _ => true,
        });
        self.broken_count -= before - self.lanes.len();
    }
}

impl Door {
    pub(crate) fn client_count(&self) -> usize {
        self.clients.len()
    }

    pub(crate) fn pending_count(&self) -> usize {
        self.clients.values().map(|client| client.pending.len()).sum()
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    fn take(&mut self, bytes: u64) -> Charge {
        self.bytes += bytes;
        Charge(bytes)
    }

    pub(crate) fn give_back(&mut self, charge: Charge) {
        let Charge(bytes) = charge;
        assert!(bytes <= self.bytes, "{bytes} of {} bytes are given back", self.bytes);
        self.bytes -= bytes;
    }

    /// Keeps the outcome for a repeated request; `false` when there is nobody to tell.
    pub(crate) fn settle(
        &mut self,
        client: Endpoint,
        request: RequestId,
        outcome: &CommitOutcome,
    ) -> bool {
        let state = self.clients.get_mut(&client).expect("a client stays while it has requests");
        assert!(state.pending.remove(&request), "{client:?} has no pending {request}");
        if state.is_gone {
            if state.pending.is_empty() {
                self.clients.remove(&client);
            }
            return false;
        }
        if request >= state.answered_below {
            state.settled.insert(request, outcome.clone());
        }
        true
    }

    fn lane(&mut self, client: Endpoint, lane: u64) -> Option<&mut Lane> {
        self.clients.get_mut(&client)?.lanes.get_mut(&lane)
    }
}

impl Proxy {
    pub(crate) fn handle_commit(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        request: CommitRequest,
    ) {
        if !matches!(from.role, Role::Client | Role::Leader) {
            return;
        }
        let clients = &mut self.door.clients;
        if !clients.contains_key(&from) && clients.len() as u64 >= cx.knobs.proxy_clients_max {
            // Nothing of this client can be remembered, so this is no outcome of its request.
            let detail = format!("{} clients", clients.len());
            let refusal = Refusal::later(Code::Overloaded, detail, RETRY_AFTER_MS);
            cx.note(common::Note::Refused { code: Code::Overloaded });
            return cx.send(from, self.plan.epoch, Refused { request: request.request, refusal });
        }
        let client = clients.entry(from).or_default();
        client.hear(request.request, request.answered_below);
        self.drop_given_up(cx, from);
        let client = self.door.clients.get_mut(&from).expect("it has just been heard");
        if let Some(outcome) = client.settled.get(&request.request)
            && !cx.planted(Plant::ForgetOutcomes)
        {
            cx.mark(Mark::CommitAgain);
            let reply = CommitReply { request: request.request, outcome: outcome.clone() };
            return cx.send(from, self.plan.epoch, reply);
        }
        if client.pending.contains(&request.request) {
            return cx.mark(Mark::CommitAgain);
        }
        let open = (client.pending.len() + client.settled.len()) as u64;
        // The oldest one is never left without an answer: all that is kept for the client waits for it.
        let is_oldest = request.request == client.answered_below;
        let is_full = open >= 2 * cx.knobs.client_requests_max && !is_oldest;
        if request.request < client.answered_below || is_full {
            return;
        }
        client.pending.insert(request.request);
        self.admit(cx, from, request, open);
    }

    fn admit(&mut self, cx: &mut Cx<'_>, client: Endpoint, request: CommitRequest, open: u64) {
        let refusal = self.refuse_at_door(cx, client, &request, open);
        let bytes = if refusal.is_none() { request_bytes(&request) } else { 0 };
        let transaction = Transaction {
            client,
            request,
            charge: self.door.take(bytes),
            definitions: Vec::new(),
            failed: None,
            ordinals: Vec::new(),
        };
        if let Some(refusal) = refusal {
            return self.finish(cx, transaction, CommitOutcome::Refused(refusal));
        }
        match transaction.request.lane {
            Some(order) => self.enter_lane(cx, transaction, order),
            None => match self.approach_gate(cx, transaction) {
                Gate::Open | Gate::Waits => {}
            },
        }
    }

    /// Why a request is not even tried, the cheapest reasons first.
    fn refuse_at_door(
        &self,
        cx: &Cx<'_>,
        client: Endpoint,
        request: &CommitRequest,
        open: u64,
    ) -> Option<Refusal> {
        let knobs = cx.knobs;
        let overloaded = |detail| Some(Refusal::later(Code::Overloaded, detail, RETRY_AFTER_MS));
        let is_recovery = request.kind == CommitKind::Recovery;
        if is_recovery && client != self.plan.leader {
            return Some(Refusal::new(Code::Malformed, "only the leader recovers"));
        }
        if self.is_fenced || !(self.is_serving || is_recovery) {
            return Some(self.recovering());
        }
        if open >= knobs.client_requests_max {
            return overloaded(format!("{open} requests of this client are not answered"));
        }
        let taken = self.door.bytes + request_bytes(request);
        if taken > knobs.proxy_bytes_max {
            return overloaded(format!("{taken} bytes; the limit is {}", knobs.proxy_bytes_max));
        }
        let leaves_record = !request.sections.is_empty() || request.id.is_some();
        let full = self.log_servers.iter().find(|server| server.state == LogState::Full);
        if let (Some(full), true, CommitKind::User) = (full, leaves_record, request.kind) {
            let detail = format!("log server {}", full.endpoint.node);
            return Some(Refusal::later(Code::DiskFull, detail, RETRY_AFTER_MS));
        }
        let state = self.door.clients.get(&client)?;
        if let Some(order) = request.lane
            && !state.lanes.contains_key(&order.lane)
            && state.lanes.len() as u64 >= knobs.client_requests_max
            && state.quiet_lane().is_none()
        {
            let detail = format!("{} lanes of this client", state.lanes.len());
            return Some(Refusal::new(Code::LimitExceeded, detail));
        }
        validate(request, knobs).err()
    }

    pub(crate) fn recovering(&self) -> Refusal {
        let why = if self.is_fenced { "is over" } else { "does not serve yet" };
        let detail = format!("epoch {} {why}", self.plan.epoch);
        Refusal::later(Code::Recovering, detail, RETRY_AFTER_MS)
    }

    fn enter_lane(&mut self, cx: &mut Cx<'_>, transaction: Transaction, order: LaneOrder) {
        let client = transaction.client;
        let state = self.door.clients.get_mut(&client).expect("its request is pending");
        let lane_count_max = cx.knobs.client_requests_max as usize;
        if !state.lanes.contains_key(&order.lane) && state.lanes.len() >= lane_count_max {
            let quiet = state.quiet_lane().expect("refused at the door without one");
            cx.mark(Mark::LaneDropped);
            state.lanes.remove(&quiet);
        }
        let lane = state.lanes.entry(order.lane).or_default();
        lane.last_request = lane.last_request.max(transaction.request.request);
        if lane.broken.as_ref().is_some_and(|broken| order.sequence > broken.sequence) {
            return self.finish(cx, transaction, lane_broken());
        }
        let is_taken = order.sequence < lane.next
            || (order.sequence == lane.next && lane.is_at_gate)
            || lane.waiting.contains_key(&order.sequence);
        if is_taken {
            let detail = format!("place {} of lane {} is taken", order.sequence, order.lane);
            let refusal = Refusal::new(Code::Malformed, detail);
            return self.finish(cx, transaction, CommitOutcome::Refused(refusal));
        }
        lane.waiting.insert(order.sequence, transaction);
        self.drain_lane(cx, client, order.lane);
    }

    /// What waits in a lane for a place that was never taken, and that its client has given up, would wait
    /// for ever.
    fn drop_given_up(&mut self, cx: &mut Cx<'_>, client: Endpoint) {
        let state = self.door.clients.get_mut(&client).expect("the caller has just heard it");
        let answered_below = state.answered_below;
        if state.pending.first().is_none_or(|first| *first >= answered_below) {
            return;
        }
        let mut given_up = Vec::new();
        for lane in state.lanes.values_mut() {
            let gone = lane.waiting.extract_if(.., |_, one| one.request.request < answered_below);
            given_up.extend(gone.map(|(_, transaction)| transaction));
        }
        for transaction in given_up {
            self.finish(cx, transaction, lane_broken());
        }
    }

    /// Sends what has its turn to the gate, until one has to wait there.
    fn drain_lane(&mut self, cx: &mut Cx<'_>, client: Endpoint, lane: u64) {
        while let Some(state) = self.door.lane(client, lane)
            && !state.is_at_gate
            && let Some(transaction) = state.waiting.remove(&state.next)
        {
            state.is_at_gate = true;
            match self.approach_gate(cx, transaction) {
                Gate::Open => {}
                Gate::Waits => return,
            }
        }
    }

    /// The one of the lane that was at the gate is through, or was refused there.
    pub(crate) fn leave_gate(&mut self, client: Endpoint, order: LaneOrder) {
        let Some(lane) = self.door.lane(client, order.lane) else { return };
        assert!(
            lane.is_at_gate && lane.next == order.sequence,
            "{order:?} leaves the gate, {} is there",
            lane.next
        );
        lane.is_at_gate = false;
        lane.next += 1;
    }

    /// After one of a lane has left the gate late, the next one may come.
    pub(crate) fn drain_lane_of(&mut self, cx: &mut Cx<'_>, client: Endpoint, order: LaneOrder) {
        self.drain_lane(cx, client, order.lane);
    }

    /// Something of the lane failed: what waits behind it is refused now, the rest where it is.
    pub(crate) fn break_lane(
        &mut self,
        cx: &mut Cx<'_>,
        client: Endpoint,
        order: LaneOrder,
        request: RequestId,
    ) {
        if cx.planted(Plant::LaneGoesOn) {
            return;
        }
        let Some(state) = self.door.clients.get_mut(&client) else { return };
        let lane = state.lanes.entry(order.lane).or_default();
        let is_lower = lane.broken.as_ref().is_none_or(|broken| order.sequence < broken.sequence);
        if !is_lower {
            return;
        }
        cx.mark(Mark::LaneBroken);
        state.broken_count += usize::from(lane.broken.is_none());
        lane.broken = Some(Broken { sequence: order.sequence, request, closed_by: None });
        let behind = order.sequence.saturating_add(1);
        for transaction in lane.waiting.split_off(&behind).into_values() {
            self.finish(cx, transaction, lane_broken());
        }
    }

    pub(crate) fn is_lane_broken(&self, transaction: &Transaction) -> bool {
        let Some(order) = transaction.request.lane else { return false };
        let client = self.door.clients.get(&transaction.client);
        let lane = client.and_then(|client| client.lanes.get(&order.lane));
        let broken = lane.and_then(|lane| lane.broken.as_ref());
        broken.is_some_and(|broken| order.sequence > broken.sequence)
    }

    /// Nobody is there to answer: what has no version yet is dropped, what has one goes on unheard.
    pub(crate) fn handle_peer_down(&mut self, cx: &mut Cx<'_>, peer: Peer) {
        self.reads.forget(peer);
        let gone = self.door.clients.iter_mut().filter(|(client, _)| client.peer() == peer);
        for (_, state) in gone {
            state.is_gone = true;
            state.settled.clear();
        }
        self.drop_unversioned(cx, |client| client.peer() == peer);
        self.door.clients.retain(|_, state| !(state.is_gone && state.pending.is_empty()));
    }

    /// Refuses everything that has no version yet.
    pub(crate) fn refuse_unversioned(&mut self, cx: &mut Cx<'_>) {
        self.drop_unversioned(cx, |_| true);
    }

    fn drop_unversioned(&mut self, cx: &mut Cx<'_>, of: impl Fn(Endpoint) -> bool) {
        let mut dropped = self.take_from_gate(&of);
        let gathered = core::mem::take(&mut self.gathering.transactions);
        let (leaving, staying): (VecDeque<Transaction>, VecDeque<Transaction>) =
            gathered.into_iter().partition(|transaction| of(transaction.client));
        self.gathering.transactions = staying;
        self.gathering.bytes -= leaving.iter().map(|gone| gone.charge.bytes()).sum::<u64>();
        dropped.extend(leaving);
        for (client, state) in &mut self.door.clients {
            if of(*client) {
                for lane in state.lanes.values_mut() {
                    dropped.extend(core::mem::take(&mut lane.waiting).into_values());
                }
            }
        }
        for transaction in dropped {
            let refusal = self.recovering();
            self.finish(cx, transaction, CommitOutcome::Refused(refusal));
        }
    }

    /// What is taken is what the requests on their way have taken, and each is pending at its client.
    pub(crate) fn check_door(&self) {
        let waiting = self.door.clients.values().flat_map(|client| client.lanes.values());
        let waiting = waiting.flat_map(|lane| lane.waiting.values());
        let in_flight = self.batches.iter().flat_map(|batch| &batch.transactions);
        let gathered = &self.gathering.transactions;
        let all = waiting.chain(self.catalog.waiting()).chain(gathered).chain(in_flight);
        let (mut count, mut bytes) = (0, 0);
        for transaction in all {
            let client = &self.door.clients[&transaction.client];
            let request = transaction.request.request;
            assert!(client.pending.contains(&request), "{request} is on its way and not pending");
            count += 1;
            bytes += transaction.charge.bytes();
        }
        assert_eq!(count, self.door.pending_count(), "pending requests are on their way");
        assert_eq!(bytes, self.door.bytes, "bytes of all requests on their way");
        let gathered: u64 = gathered.iter().map(|transaction| transaction.charge.bytes()).sum();
        assert_eq!(gathered, self.gathering.bytes, "bytes of what gathers");
        for (client, state) in &self.door.clients {
            let is_old = |settled: &RequestId| *settled < state.answered_below;
            assert!(!state.settled.keys().any(is_old), "I15: {client:?} keeps what is answered");
            let broken = state.lanes.values().filter(|lane| lane.broken.is_some()).count();
            assert_eq!(broken, state.broken_count, "broken lanes of {client:?}");
        }
    }
}

/// The refusal of everything behind one that failed.
pub(crate) fn lane_broken() -> CommitOutcome {
    let detail = "an earlier commit of the lane failed";
    CommitOutcome::Refused(Refusal::new(Code::LaneBroken, detail))
}
