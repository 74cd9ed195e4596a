//! The leader: takes the register to a new epoch, locks the old log, fixes RV, recruits, proves, publishes.
//!
//! ```text
//!  Following: hears a leader, or waits for one; see `follow`
//!     |  silence
//!  Reading -> Claiming -> Finding -> Locking -> Recruiting -> Proving -> Publishing -> Announcing -> Serving
//!  register   CAS e+1     nodes'     log         roles of     recovery   CAS: commit   Serve to      watch
//!                         lives      servers     the plan     transaction point (I10)  nodes
//!     ^______________________________________________________________________________________________|
//!                     a newer epoch, a peer of the plan gone, a phase that can't go on
//! ```
//!
//! | message in | from | message out | to |
//! |---|---|---|---|
//! | Beat, HandOver | leader | Beat, HandOver | the other candidates |
//! | ClusterView | node | FindCluster | every configured node: it answers from its present life |
//! | Locked | log server | Lock | the log servers of the last generation (I8) |
//! | Recruited | node | Recruit | the nodes of the plan |
//! | CommitReply | proxy | CommitRequest | the first proxy, through the normal path |
//! | CaughtUp | log server | CatchUp | log servers that the epoch is written without, and heirs |
//! | ChangeMember | operator | MemberChanged | the operator, once the register holds it |
//! | Serving | node | Serve | every live node, only after the register holds the generation (I10) |
//! | Refused | any | | a newer epoch exists: follow its leader, or start over where nobody else can lead |
//!
//! # Invariants
//! - I9: RV is the minimum durable version over the locked log servers. Those of the generation that stay
//!   silent, and those that it was written without, are fewer than its copies. A silent one is *absent* from
//!   the next generation: it keeps its share, with a copy less, until it is whole again. A log that ends
//!   below its generation's first version has lost what it had: its answer would drop everybody else's data,
//!   so the leader halts.
//! - I5: RTV - RV = FENCE_JUMP.
//! - I10: `Serve` is sent only after the compare-and-set of Publishing is known to have succeeded.

mod absent;
mod follow;
mod history;
mod lock;
mod members;
mod prove;
mod recruit;
mod register;
mod watch;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use absent::Returns;
use common::membership::Membership;
use common::message::{EpochPlan, Locked};
use common::register::{RegisterState, Revision};
use common::{
    Backoff, Code, Cx, Endpoint, Epoch, Event, Gather, Mark, Message, NodeId, Note, Peer, Plant,
    RequestId, Time, Timer, Version,
};
use history::History;
pub use history::Recovery;
use members::Change;

/// What the leader must know before it starts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// Who may lead. The sequencer lives with the leader.
    pub candidates: Vec<NodeId>,
    /// Where the proxies live; one proxy for each entry.
    pub proxies: Vec<NodeId>,
    /// Where the resolvers live and where their shares begin; the first begins with the empty key.
    pub resolvers: Vec<(NodeId, Vec<u8>)>,
    /// Where the log servers live, in the order of placement; a node at most once.
    pub log_servers: Vec<NodeId>,
    /// How many log servers hold each stream.
    pub replication: u8,
    /// Nodes that have no role of their own: they serve by naming those that have one, and stand in for one
    /// that is not there.
    pub spares: Vec<NodeId>,
    /// What fails together has one name: a rack, a zone. Nodes without an entry share with nobody.
    pub domains: BTreeMap<NodeId, String>,
}

impl Topology {
    /// One of each on one node.
    #[must_use]
    pub fn single(node: NodeId) -> Self {
        Self {
            candidates: vec![node],
            proxies: vec![node],
            resolvers: vec![(node, Vec::new())],
            log_servers: vec![node],
            replication: 1,
            spares: Vec::new(),
            domains: BTreeMap::new(),
        }
    }

    /// Every node of the cluster, once, in order.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeId> {
        let resolvers = self.resolvers.iter().map(|(node, _)| *node);
        let all = self.proxies.iter().chain(&self.log_servers).chain(&self.spares).copied();
        let mut nodes: Vec<NodeId> =
            all.chain(resolvers).chain(self.candidates.iter().copied()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }
}

/// Where a recovery stands. Names are stable: they appear in `status`, notes and metrics.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Not started.
    Idle,
    /// Somebody else leads, or nobody does yet.
    Following,
    /// Waiting for the register's value. With `then`, to learn what became of an indeterminate write.
    Reading { checking: Option<Checking> },
    /// Waiting for the compare-and-set that takes the register to the new epoch.
    Claiming { wanted: RegisterState },
    /// Waiting for a sign of life from every node of the topology.
    Finding { lives: Gather<NodeId, Endpoint> },
    /// Waiting for the old log servers to lock.
    Locking { locks: Gather<NodeId, Locked> },
    /// Waiting for the roles of the plan.
    Recruiting { roles: Gather<Endpoint, ()> },
    /// Waiting for the recovery transaction.
    Proving,
    /// Waiting for the compare-and-set that publishes the generation.
    Publishing { wanted: RegisterState },
    /// Waiting for the nodes to serve.
    Announcing { nodes: Gather<NodeId, ()> },
    /// The epoch serves; watching.
    Serving,
}

/// What an indeterminate register write wanted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Checking {
    Claim(RegisterState),
    Publish(RegisterState),
}

impl Phase {
    const fn name(&self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Following => "following",
            Self::Reading { .. } => "reading_register",
            Self::Claiming { .. } => "claiming_epoch",
            Self::Finding { .. } => "finding_nodes",
            Self::Locking { .. } => "locking_logs",
            Self::Recruiting { .. } => "recruiting",
            Self::Proving => "recovery_transaction",
            Self::Publishing { .. } => "writing_register",
            Self::Announcing { .. } => "announcing",
            Self::Serving => "serving",
        }
    }
}

/// Tries the phase again, or looks after the peers.
const RETRY: Timer = Timer(0);
/// Says to the other candidates that this leader lives.
const BEAT: Timer = Timer(1);
/// A time that grows with each failure is doubled this often at most.
const DOUBLINGS_MAX: u32 = 6;

/// The leader machine.
#[derive(Clone, Debug)]
pub struct Leader {
    topology: Topology,
    phase: Phase,
    since: Time,
    /// When the present recovery began.
    recovering_since: Time,
    /// The epoch that this leader has claimed; ZERO before the first claim.
    epoch: Epoch,
    /// Whether the newest epoch that this node knows of is its own.
    is_leading: bool,
    /// The newest epoch that somebody else is known to have claimed.
    heard: Epoch,
    /// Whose beat came last.
    heard_from: Option<Peer>,
    /// Who has been silent for long or is about to stop: the next recovery does not wait for them.
    gone: BTreeSet<NodeId>,
    /// The register as last read or written.
    state: RegisterState,
    revision: Revision,
    register_question: u64,
    backoff: Backoff,
    /// Questions in a row that the register has not answered in time.
    register_patience: u32,
    /// How soon the present phase asks again: at first quickly, for a peer may just be opening its log.
    pacing: Backoff,
    /// The present life of every node, from Finding on.
    lives: BTreeMap<NodeId, Peer>,
    plan: Option<EpochPlan>,
    /// The leader's own number for requests to proxies and nodes.
    request: RequestId,
    /// Watching: who has answered since the last tick.
    silent_ticks: BTreeMap<NodeId, u32>,
    /// Attempts in a row that a phase was too late for.
    late_count: u32,
    returns: Returns,
    /// Decided, and to be written by the next claim.
    changes: Vec<Change>,
    /// Since this leader began to lead: when each node was last heard of.
    heard_at: BTreeMap<NodeId, Time>,
    /// How often in a row this node, which is on its way out, has let others lead.
    yields: u32,
    /// Whose connection broke and who has not been heard since.
    doubted: BTreeSet<NodeId>,
    last_cause: &'static str,
    history: History,
}

/// What `status` shows of a leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderStatus {
    /// The phase's stable name.
    pub phase: &'static str,
    /// When it was entered.
    pub since: Time,
    /// The epoch that is being made or serves.
    pub epoch: Epoch,
    /// What the phase waits for, for people; empty when for nothing.
    pub waiting_for: String,
    /// Why the recovery began.
    pub cause: &'static str,
    /// How many generations the register holds.
    pub generations: usize,
    /// The last recoveries that this node led, oldest first.
    pub recoveries: Vec<Recovery>,
    /// Who sits where, and who is on its way out.
    pub membership: Membership,
    /// What seats that pass on wait for.
    pub seats_waiting: Vec<String>,
}

impl Leader {
    /// A leader that makes epochs of this topology.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        assert!(!topology.log_servers.is_empty(), "a log needs a log server");
        Self {
            topology,
            phase: Phase::Idle,
            since: Time::ZERO,
            recovering_since: Time::ZERO,
            epoch: Epoch::ZERO,
            is_leading: false,
            heard: Epoch::ZERO,
            heard_from: None,
            gone: BTreeSet::new(),
            state: RegisterState::empty(),
            revision: Revision(0),
            register_question: 0,
            backoff: Backoff::default(),
            register_patience: 0,
            pacing: Backoff::default(),
            lives: BTreeMap::new(),
            plan: None,
            request: RequestId::ZERO,
            silent_ticks: BTreeMap::new(),
            late_count: 0,
            returns: Returns::default(),
            changes: Vec::new(),
            heard_at: BTreeMap::new(),
            yields: 0,
            doubted: BTreeSet::new(),
            last_cause: "start",
            history: History::default(),
        }
    }

    /// Begins the first recovery.
    pub fn start(&mut self, cx: &mut Cx<'_>) {
        self.recover(cx, "start");
    }

    /// Takes one event.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        match event {
            Event::Register(answer) => self.handle_register(cx, answer),
            Event::Timer(RETRY) => self.handle_retry(cx),
            Event::Timer(BEAT) => self.handle_beat_timer(cx),
            Event::Message { from, epoch, message } => {
                self.handle_message(cx, from, epoch, message)
            }
            Event::PeerDown(peer) => self.handle_peer_down(cx, peer),
            Event::Timer(_) | Event::Disk(_) => {}
        }
        if !cx.planted(Plant::ServeUnwritten) && !cx.planted(Plant::LostIsWritten) {
            self.check();
        }
    }

    fn handle_message(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch, message: Message) {
        match message {
            Message::ClusterView(view) => self.handle_sign_of_life(cx, from, &view),
            Message::Beat(_) => self.handle_beat(cx, from, epoch),
            Message::HandOver(_) => self.handle_hand_over(cx, from, epoch),
            Message::ChangeMember(asked) => self.handle_change_member(cx, from, epoch, asked),
            // Answers to an older epoch's questions say nothing about this one; nor do its refusals, which
            // would make each recovery the cause of the next.
            _ if epoch != self.epoch => {}
            Message::Refused(refused) => self.handle_refused(cx, from, refused.refusal.code()),
            Message::Locked(locked) => self.handle_locked(cx, from, locked),
            Message::Recruited(recruited) => self.handle_recruited(cx, from, recruited.role),
            Message::CommitReply(reply) => self.handle_proof(cx, reply),
            Message::CaughtUp(caught_up) => self.handle_caught_up(cx, from, caught_up),
            Message::Serving(_) => self.handle_serving(cx, from),
            _ => {}
        }
    }

    /// Somebody refuses this epoch: a newer leader exists, or the receiver has lost its role.
    fn handle_refused(&mut self, cx: &mut Cx<'_>, from: Endpoint, code: Code) {
        if code == Code::NotHere && self.is_returning(from) {
            return self.recover(cx, "return_refused");
        }
        let is_fenced = matches!(code, Code::WrongEpoch | Code::Locked);
        if is_fenced && self.is_past_finding() && self.lives.contains_key(&from.node) {
            self.give_way(cx, "fenced");
        }
    }

    /// Starts over, because of `cause`.
    fn recover(&mut self, cx: &mut Cx<'_>, cause: &'static str) {
        if matches!(self.phase, Phase::Idle | Phase::Following | Phase::Serving) {
            self.recovering_since = cx.now;
            self.history.begin(cx.now, cause);
        } else {
            self.history.start_over();
            cx.mark(Mark::RecoveryInterrupted);
        }
        self.note_failed_return_if_unwritten(cx);
        self.last_cause = cause;
        self.returns.take_ready();
        self.plan = None;
        self.read_register(cx, None);
    }

    fn enter(&mut self, cx: &mut Cx<'_>, phase: Phase) {
        self.phase = phase;
        self.since = cx.now;
        cx.note(Note::Phase { epoch: self.epoch, name: self.phase.name() });
        let serves = matches!(self.phase, Phase::Serving);
        self.history.enter(cx.now, self.epoch, self.phase.name(), serves);
        self.pacing.reset();
        self.arm_retry(cx);
    }

    /// Nodes are asked again soon. A register is given more and more time: a new question makes the answer to
    /// the one before worthless, so a slow register asked in haste would never be heard.
    fn arm_retry(&mut self, cx: &mut Cx<'_>) {
        let longest_ms = cx.knobs.recovery_retry_ms;
        let wait = match self.phase {
            Phase::Reading { .. } | Phase::Claiming { .. } | Phase::Publishing { .. } => {
                let patience = doubled(longest_ms, self.register_patience);
                self.register_patience += 1;
                patience
            }
            Phase::Following => self.patience(cx),
            Phase::Serving if self.doubted.is_empty() => Duration::from_millis(cx.knobs.watch_ms),
            Phase::Serving => self.pacing.next(cx.knobs.watch_ms, cx.rng),
            // Not past the moment from which the phase may do without those that are silent.
            Phase::Finding { .. } | Phase::Locking { .. } if !self.is_late(cx) => {
                let rest = self.late_at(cx).since(cx.now);
                self.pacing.next(longest_ms, cx.rng).min(rest)
            }
            _ => self.pacing.next(longest_ms, cx.rng),
        };
        cx.arm_after(RETRY, wait);
    }

    /// A phase has taken too long: its questions are asked again.
    fn handle_retry(&mut self, cx: &mut Cx<'_>) {
        match &self.phase {
            Phase::Idle => {}
            Phase::Following if cx.planted(Plant::NobodyFollows) => {}
            Phase::Following => return self.take_over(cx),
            // An answer of the register is lost with its connection: ask what it holds.
            Phase::Reading { checking } => {
                let checking = checking.clone();
                self.read_register(cx, checking);
            }
            Phase::Claiming { wanted } => {
                let checking = Checking::Claim(wanted.clone());
                self.read_register(cx, Some(checking));
            }
            Phase::Publishing { wanted } => {
                let checking = Checking::Publish(wanted.clone());
                self.read_register(cx, Some(checking));
            }
            Phase::Finding { .. } => {
                self.ask_for_signs_of_life(cx);
                self.find_no_longer(cx);
            }
            Phase::Locking { .. } => {
                self.ask_for_locks(cx);
                self.lock_no_longer(cx);
            }
            Phase::Recruiting { .. } => self.ask_for_roles(cx),
            Phase::Proving => self.ask_for_proof(cx),
            Phase::Announcing { .. } => self.ask_to_serve(cx),
            Phase::Serving => self.watch(cx),
        }
        if self.is_past_finding() && !matches!(self.phase, Phase::Serving) {
            self.ask_after_lives(cx);
            self.start_over_when_late(cx);
        }
        if !matches!(self.phase, Phase::Idle) {
            self.arm_retry(cx);
        }
    }

    /// The phase's name.
    #[must_use]
    pub const fn phase(&self) -> &'static str {
        self.phase.name()
    }

    /// What `status` shows.
    #[must_use]
    pub fn status(&self) -> LeaderStatus {
        let waiting_for = match &self.phase {
            Phase::Idle | Phase::Serving => String::new(),
            Phase::Following => match self.heard_from {
                Some(leader) => format!("the leader of {}, {leader:?}", self.heard),
                None => "a leader".to_owned(),
            },
            Phase::Reading { .. } | Phase::Claiming { .. } | Phase::Publishing { .. } => {
                "the register".to_owned()
            }
            Phase::Finding { lives } => list("nodes", lives.silent()),
            Phase::Locking { locks } => list("log servers", locks.silent()),
            Phase::Recruiting { roles } => {
                format!("roles {:?}", roles.silent().collect::<Vec<_>>())
            }
            Phase::Proving => "the recovery transaction".to_owned(),
            Phase::Announcing { nodes } => list("nodes", nodes.silent()),
        };
        LeaderStatus {
            phase: self.phase(),
            since: self.since,
            epoch: self.epoch,
            waiting_for,
            cause: self.last_cause,
            generations: self.state.generations.len(),
            recoveries: self.history.recoveries(),
            membership: self.state.membership.clone(),
            seats_waiting: self.seats_waiting(),
        }
    }

    /// The order that every state keeps.
    pub fn check(&self) {
        self.history.check();
        assert!(
            !self.is_leading || self.epoch >= self.heard,
            "{} is led here and {} elsewhere",
            self.epoch,
            self.heard
        );
        assert!(
            self.epoch <= self.state.epoch || matches!(self.phase, Phase::Reading { .. }),
            "{} was claimed but the register stands at {}",
            self.epoch,
            self.state.epoch
        );
        if let Some(plan) = &self.plan {
            assert_eq!(plan.epoch, self.epoch, "the plan is for the claimed epoch");
            plan.check();
        }
        assert!(
            self.changes.is_empty() || !matches!(self.phase, Phase::Serving | Phase::Following),
            "{:?} are decided, and nobody writes them in {}",
            self.changes,
            self.phase.name()
        );
        if matches!(self.phase, Phase::Serving | Phase::Announcing { .. }) {
            let live = self.state.generations.last().map(|generation| generation.epoch);
            assert_eq!(live, Some(self.epoch), "I10: the register holds what serves");
        }
    }
}

/// A time after so many failures in a row.
fn doubled(first_ms: u64, failures: u32) -> Duration {
    Duration::from_millis(first_ms << failures.min(DOUBLINGS_MAX))
}

fn list(what: &str, nodes: impl Iterator<Item = NodeId>) -> String {
    let names: Vec<String> = nodes.map(|node| node.to_string()).collect();
    format!("{what} {}", names.join(", "))
}

/// RV of answers: everything acknowledged is at or below it, since an acknowledgement needs all log
/// servers (I9).
fn recovery_version<'a>(answers: impl Iterator<Item = &'a Locked>) -> Version {
    answers.map(|locked| locked.durable).min().expect("at least one log server was locked")
}

#[cfg(test)]
mod tests;
