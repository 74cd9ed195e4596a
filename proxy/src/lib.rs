//! The commit proxy: gathers transactions into batches, carries each batch through the commit pipeline, and
//! proves read versions.
//!
//! ```text
//!            door          gate             batch                 one batch = one version
//! client --> limits,  --> catalog --> Batching -> Versioning -> Resolving -> Pushing -> Replying --> client
//!            lanes,       view                    |  ^          |  ^         |  ^
//!            repeats                         sequencer      resolvers     log servers
//!
//! client --> read version: a round of Confirm to the log servers --> the minimum of the answers
//! ```
//!
//! | file | what |
//! |---|---|
//! | `door` | admission, limits, repeated requests, ordered lanes |
//! | `catalog` | the view of the stream names, and the gate that waits for it |
//! | `batch` | Batching: what is gathered and when it closes; the batch and its phases |
//! | `version` | Versioning: the pair of the sequencer |
//! | `resolve` | Resolving: shares of the key space, verdicts, the judgement |
//! | `settle` | what the resolvers are told of it |
//! | `blocks`, `push` | Pushing: the bytes of the blocks; the log servers' durable versions |
//! | `reply` | Replying: what each client hears, and what is given back |
//! | `read_version` | rounds of proof |
//! | `heartbeat` | the empty batch of an idle proxy; what goes unanswered is sent again |
//!
//! # Invariants
//! - I1: batches keep the order of their numbers in every phase, so each is pushed in chain order.
//! - I3: a client is answered when every log server's durable version has reached the batch's.
//! - I4: a round of proof begins after the questions it answers, and ends with answers of `replication`
//!   unlocked servers.
//! - I12: the servers that hold a stream agree on a block's first offset, or the process stops.
//! - I15: what went unanswered is sent again with what has been received; outcomes are kept for repeated
//!   requests until the client has them.
//! - I16: an idempotency id is a key that its transaction reads and writes.
//!
//! The pipeline is pumped after every event: a batch moves as far as it can, the oldest first.
#![forbid(unsafe_code)]

mod batch;
mod blocks;
mod catalog;
mod door;
mod heartbeat;
mod push;
mod read_version;
mod reply;
mod resolve;
mod settle;
mod status;
#[cfg(test)]
mod tests;
mod version;

use std::collections::VecDeque;

use common::message::EpochPlan;
use common::{Code, Cx, Endpoint, Epoch, Event, Message, Role, Timer, Version};

pub use batch::Phase;
pub use status::{BatchStatus, LogServerStatus, ProxyStatus};

use batch::{Batch, Gathering};
use catalog::CatalogView;
use door::Door;
use push::LogServer;
use read_version::ReadVersions;
use settle::Settlements;

/// Closes the batch that gathers, once everything that came in the same burst has been seen.
const BATCH: Timer = Timer(0);
/// Looks for what went unanswered.
const TICK: Timer = Timer(1);
/// Looks whether the proxy is idle.
const HEARTBEAT: Timer = Timer(2);

/// When a client that was refused for overload shall come again, ms.
const RETRY_AFTER_MS: u32 = 100;

/// A commit proxy of one epoch.
#[derive(Clone, Debug)]
pub struct Proxy {
    plan: EpochPlan,
    index: u8,
    /// The generation is in the register: clients are served (I10).
    is_serving: bool,
    /// A log server is locked: the epoch is over, nothing of it will commit any more.
    is_fenced: bool,
    door: Door,
    gathering: Gathering,
    /// Between version and reply, the oldest first; their numbers are dense.
    batches: VecDeque<Batch>,
    next_number: u64,
    /// The version of the last batch that was judged; zero before the first.
    judged: Version,
    settlements: Settlements,
    /// The version of the last batch that was replied to; zero before the first.
    replied: Version,
    log_servers: Vec<LogServer>,
    /// The minimum of the log servers' durable versions.
    known_committed: Version,
    reads: ReadVersions,
    catalog: CatalogView,
}

impl Proxy {
    /// Proxy `index` of `plan`.
    #[must_use]
    pub fn new(plan: &EpochPlan, index: u8) -> Self {
        plan.check();
        let count = plan.proxies.len();
        assert!(usize::from(index) < count, "proxy {index} of {count}");
        Self {
            plan: plan.clone(),
            index,
            is_serving: false,
            is_fenced: false,
            door: Door::default(),
            gathering: Gathering::default(),
            batches: VecDeque::new(),
            next_number: 1,
            judged: Version::ZERO,
            settlements: Settlements::new(plan.resolvers.len()),
            replied: Version::ZERO,
            log_servers: plan
                .log_servers
                .iter()
                .map(|server| LogServer::new(*server, plan.recovery_version))
                .collect(),
            known_committed: plan.recovery_version,
            reads: ReadVersions::default(),
            catalog: CatalogView::new(plan),
        }
    }

    /// Arms the timers and begins to follow the catalog.
    pub fn start(&mut self, cx: &mut Cx<'_>) {
        let me = self.plan.proxies[usize::from(self.index)];
        assert_eq!(cx.me, me, "{:?} begins another's role", cx.me);
        self.gathering.closed_at = cx.now;
        self.arm_tick(cx);
        self.arm_heartbeat(cx);
        self.pull_catalog(cx);
    }

    /// Takes one event, then moves everything as far as it can.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        match event {
            Event::Message { from, epoch, message } => {
                self.handle_message(cx, from, epoch, message)
            }
            Event::Timer(BATCH) => self.handle_burst_over(),
            Event::Timer(TICK) => self.handle_tick(cx),
            Event::Timer(HEARTBEAT) => self.handle_heartbeat(cx),
            Event::PeerDown(peer) => self.handle_peer_down(cx, peer),
            Event::Timer(_) | Event::Disk(_) | Event::Register(_) => {}
        }
        self.pump(cx);
    }

    /// Clients speak for no epoch; everybody else must speak for this one.
    fn handle_message(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch, message: Message) {
        let is_client = from.role == Role::Client && epoch == Epoch::ZERO;
        if !is_client && epoch != self.plan.epoch {
            return;
        }
        match message {
            Message::CommitRequest(request) => self.handle_commit(cx, from, *request),
            Message::ReadVersionRequest(request) => self.handle_read_version(cx, from, request),
            _ if is_client => {}
            Message::VersionReply(reply) => self.handle_version_reply(cx, from, reply),
            Message::Resolved(resolved) => self.handle_resolved(from, resolved),
            Message::Durable(durable) => self.handle_durable(cx, from, durable),
            Message::Confirmed(confirmed) => self.handle_confirmed(cx, from, confirmed),
            Message::Pulled(pulled) => self.handle_pulled(cx, from, pulled),
            Message::Refused(refused) => self.handle_refused(cx, from, refused.refusal.code()),
            Message::Serve(serve) if from == self.plan.leader => {
                assert_eq!(serve.plan, self.plan, "an epoch has one plan");
                self.is_serving = true;
            }
            _ => {}
        }
    }

    /// A locked log server ends the epoch for its proxies: what has no version yet is refused, what has one
    /// stays without an answer, since the next epoch decides.
    fn handle_refused(&mut self, cx: &mut Cx<'_>, from: Endpoint, code: Code) {
        if code == Code::Locked && self.log_server_place(from).is_some() && !self.is_fenced {
            self.is_fenced = true;
            self.refuse_waiting_reads(cx);
            self.refuse_unversioned(cx);
        }
    }

    /// Every step finds its work by itself and stops at the first batch that can't move.
    fn pump(&mut self, cx: &mut Cx<'_>) {
        self.release_gate(cx);
        self.judge_ready(cx);
        self.resolve_ready(cx);
        self.push_ready(cx);
        self.reply_ready(cx);
        self.close_ready(cx);
        self.settle_alone(cx);
        self.begin_round(cx);
    }

    fn log_server_place(&self, server: Endpoint) -> Option<usize> {
        self.log_servers.iter().position(|known| known.endpoint == server)
    }

    /// The place of the batch of `version` among those in flight.
    fn batch_place(&self, version: Version) -> Option<usize> {
        self.batches.iter().position(|batch| batch.version() == Some(version))
    }

    /// The version up to which every batch of this proxy satisfies `is_answered`: what the next message may
    /// say that has been received (I15).
    fn answered_through(&self, is_answered: impl Fn(&Batch) -> bool) -> Version {
        let answered = self.batches.iter().take_while(|batch| is_answered(batch));
        answered.last().and_then(Batch::version).unwrap_or(self.replied)
    }

    /// Asserts what holds between events.
    pub fn check(&self) {
        let durable = self.log_servers.iter().map(|server| server.durable).min();
        let rv = self.plan.recovery_version;
        assert!(
            durable.is_some_and(
                |durable| rv <= self.known_committed && self.known_committed <= durable
            ),
            "RV {rv} <= KCV {} <= durable everywhere {durable:?}",
            self.known_committed
        );
        assert!(self.replied <= self.known_committed, "I3: replied to {}", self.replied);
        assert!(self.replied <= self.judged, "{} <= judged {}", self.replied, self.judged);
        self.settlements.check(self.judged);
        self.check_batches();
        self.check_door();
        self.check_reads();
        self.check_catalog();
    }
}
