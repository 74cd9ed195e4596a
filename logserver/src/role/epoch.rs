//! Epochs: locking the old one (I8), being recruited for the next.
//!
//! Both follow one path: refuse older epochs at once, wait until everything accepted is flushed, persist,
//! answer.
//!
//! ```text
//! Lock e     locked := e ... flushed ... meta {locked e}              -> Locked {durable, known committed}
//! Recruit e  locked := e ... flushed ... drop above RV, meta {e, RV}  -> Recruited
//! ```
//!
//! A newer request supersedes one that still waits. Repeats are answered again.

use std::collections::BTreeMap;

use common::message::{EpochPlan, Lock, Locked, LogState, Recruit, Recruited, Serve};
use common::{Code, Cx, Endpoint, Epoch, Mark, Note, Ordered, Plant, Role, StreamId, Version};

use super::LogServer;
use super::catch_up::Follower;
use super::push::{CheckedPush, Pusher};
use crate::log::Log;

/// An epoch that was recruited here.
#[derive(Clone, Debug)]
pub(super) struct Generation {
    plan: EpochPlan,
    /// Pushes in chain order; from the recovery version on.
    pub(super) chain: Ordered<CheckedPush>,
    /// The proxies of the epoch, and whoever pushed.
    pub(super) pushers: BTreeMap<Endpoint, Pusher>,
    /// The highest durable version that the proxies were told.
    pub(super) announced: Version,
    /// The highest version that is known to be durable on all log servers.
    claimed: Version,
    /// Whether the generation is in the register: only then do its claims count (I10).
    confirmed: bool,
}

impl Generation {
    fn new(plan: EpochPlan, pushes_waiting_max: u64) -> Self {
        let recovery_version = plan.recovery_version;
        Self {
            chain: Ordered::new(recovery_version, pushes_waiting_max as usize),
            pushers: plan.proxies.iter().map(|proxy| (*proxy, Pusher::default())).collect(),
            announced: recovery_version,
            claimed: recovery_version,
            confirmed: false,
            plan,
        }
    }

    pub(super) const fn epoch(&self) -> Epoch {
        self.plan.epoch
    }

    /// Those that hold `stream`, best first.
    pub(super) fn holders(&self, stream: StreamId) -> Vec<Endpoint> {
        let places = self.plan.holders(stream).into_iter();
        places.map(|place| self.plan.log_servers[place]).collect()
    }

    /// Whether this is the epoch's only log server.
    pub(super) fn is_alone(&self) -> bool {
        self.plan.log_servers.len() == 1
    }

    /// Lets go of what can't be taken any more.
    pub(super) fn end(&mut self) {
        self.chain = Ordered::new(self.chain.at(), 0);
        self.pushers.clear();
    }

    pub(super) fn check(&self, log: &Log, locked: Epoch) {
        self.chain.check();
        if locked > self.epoch() {
            assert!(
                self.chain.peek_next().is_none(),
                "I8: a push waits in locked {}",
                self.epoch()
            );
            return;
        }
        assert_eq!(self.chain.at(), log.last(), "I1: chain and log stand at one version");
        assert!(
            self.announced <= log.durable(),
            "I7: {} is announced of {}",
            self.announced,
            log.durable()
        );
    }
}

/// A lock or a recruitment on its way to the disk.
#[derive(Clone, Debug)]
pub(super) struct Takeover {
    epoch: Epoch,
    aim: Aim,
    askers: Vec<Endpoint>,
    /// The meta generation that must be durable before the answer.
    ticket: Option<u64>,
}

/// What a takeover comes to.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Aim {
    Lock(Lock),
    Recruit(EpochPlan),
}

impl Takeover {
    pub(super) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    const fn is_recruitment(&self) -> bool {
        matches!(self.aim, Aim::Recruit(_))
    }

    pub(super) const fn word(&self) -> &'static str {
        match self.aim {
            Aim::Lock(_) => "lock",
            Aim::Recruit(_) => "recruitment",
        }
    }
}

impl LogServer {
    /// Whether pushes of `epoch` are taken.
    pub(super) fn is_accepting(&self, epoch: Epoch) -> bool {
        self.locked <= epoch
            && self.epoch() == epoch
            && epoch != Epoch::ZERO
            && !self.log.is_stopping()
    }

    /// Whether an epoch serves here that nobody has locked.
    pub(super) fn serves(&self) -> bool {
        self.is_accepting(self.epoch())
            && self.generation.as_ref().is_some_and(|generation| generation.confirmed)
    }

    pub(super) fn handle_lock(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        lock: Lock,
    ) {
        if epoch < self.locked {
            let detail = format!("{epoch} is older than {}", self.locked);
            return self.refuse_role(cx, from, epoch, Code::WrongEpoch, detail);
        }
        // A leader that has recruited has its answers: this is an old repeat.
        if self.epoch() == epoch || self.is_being_recruited(epoch) {
            return;
        }
        let kept = cx.planted(Plant::LockedPush).then(|| self.generation.clone());
        self.begin_takeover(from, epoch, Aim::Lock(lock));
        self.generation = kept.unwrap_or_else(|| self.generation.take());
    }

    pub(super) fn handle_recruit(&mut self, cx: &mut Cx<'_>, from: Endpoint, recruit: Recruit) {
        let plan = recruit.plan;
        plan.check();
        let epoch = plan.epoch;
        if epoch < self.locked {
            let detail = format!("{epoch} is older than {}", self.locked);
            return self.refuse_role(cx, from, epoch, Code::WrongEpoch, detail);
        }
        if self.epoch() == epoch {
            return cx.send(from, epoch, Recruited { role: Role::LogServer });
        }
        if !plan.log_servers.contains(&cx.me) {
            let detail = format!("{epoch} is planned without {:?}", cx.me);
            return self.refuse_role(cx, from, epoch, Code::NotHere, detail);
        }
        if self.is_returning_to(from, epoch) {
            return;
        }
        let is_returning = plan.returning.contains(&cx.me.node);
        let is_following = self.follower.as_ref().is_some_and(Follower::is_live);
        if is_returning && !is_following && !self.is_being_recruited(epoch) {
            let detail = format!("{epoch} has this server return, which does not catch up");
            return self.refuse_role(cx, from, epoch, Code::NotHere, detail);
        }
        // I12: without everything up to RV the next offsets are unknown here.
        if !is_returning && plan.recovery_version > self.log.last() {
            let detail = format!(
                "the log ends at {}, below the recovery version {}",
                self.log.last(),
                plan.recovery_version
            );
            return self.refuse_role(cx, from, epoch, Code::NotHere, detail);
        }
        if plan.recovery_version < self.log.known_committed() {
            let detail = format!(
                "{epoch} would drop what is committed: recovery version {}, known committed {}",
                plan.recovery_version,
                self.log.known_committed()
            );
            return cx.halt("forked_history", detail);
        }
        self.begin_takeover(from, epoch, Aim::Recruit(plan));
    }

    /// The generation is in the register: what it claims to be committed is (I10, I11).
    pub(super) fn handle_serve(&mut self, serve: &Serve) {
        let Some(generation) = &mut self.generation else { return };
        if generation.epoch() != serve.plan.epoch || generation.confirmed {
            return;
        }
        generation.confirmed = true;
        let claimed = generation.claimed;
        assert!(
            claimed >= generation.plan.recovery_version,
            "I9: {claimed} is claimed below {}",
            generation.plan.recovery_version
        );
        self.log.raise_known_committed(claimed);
        self.pulls.expect_anything();
    }

    /// Everything up to `version` is durable on all log servers of the live epoch: a proxy says so, or there
    /// are no others.
    pub(super) fn raise_claim(&mut self, cx: &Cx<'_>, version: Version) {
        let generation = self.generation.as_mut().expect("it is about the live epoch");
        generation.claimed = generation.claimed.max(version);
        if generation.confirmed || cx.planted(Plant::ClaimUnwritten) {
            self.log.raise_known_committed(generation.claimed);
        }
    }

    fn is_being_recruited(&self, epoch: Epoch) -> bool {
        self.takeover.as_ref().is_some_and(|t| t.epoch == epoch && t.is_recruitment())
    }

    fn begin_takeover(&mut self, from: Endpoint, epoch: Epoch, aim: Aim) {
        assert!(epoch >= self.locked, "{epoch} is older than {}", self.locked);
        // From here on nothing older is accepted or announced, whatever becomes of the disk.
        self.locked = epoch;
        if let Some(generation) = &mut self.generation {
            generation.end();
        }
        match &mut self.takeover {
            Some(running) if running.epoch == epoch && running.aim == aim => {
                if !running.askers.contains(&from) {
                    running.askers.push(from);
                }
            }
            slot => *slot = Some(Takeover { epoch, aim, askers: vec![from], ticket: None }),
        }
    }

    /// Goes on with a lock or a recruitment as far as the disk has come.
    pub(super) fn progress_takeover(&mut self, cx: &mut Cx<'_>) {
        if !self.log.is_flushed() || !self.log.is_open() {
            return;
        }
        let Some(mut takeover) = self.takeover.take() else { return };
        let ticket = match takeover.ticket {
            Some(ticket) => ticket,
            None => self.persist_takeover(cx, &takeover),
        };
        takeover.ticket = Some(ticket);
        if self.log.persisted() < ticket {
            self.takeover = Some(takeover);
            return;
        }
        match takeover.aim {
            Aim::Lock(lock) => self.answer_lock(cx, takeover.epoch, lock, &takeover.askers),
            Aim::Recruit(plan) if plan.returning.contains(&cx.me.node) => {
                self.begin_return(cx, plan, takeover.askers);
            }
            Aim::Recruit(plan) => self.begin_generation(cx, plan, &takeover.askers),
        }
    }

    fn persist_takeover(&mut self, cx: &mut Cx<'_>, takeover: &Takeover) -> u64 {
        let Aim::Recruit(plan) = &takeover.aim else {
            return self.log.persist_lock(takeover.epoch);
        };
        // One that returns begins where it is certain, and copies the rest.
        self.follower = None;
        let is_returning = plan.returning.contains(&cx.me.node);
        let begin = if is_returning { self.log.last() } else { plan.recovery_version };
        if self.begin_own_epoch(takeover.epoch, begin) {
            cx.mark(Mark::TailDropped);
        }
        self.log.persist_lock(takeover.epoch)
    }

    fn answer_lock(&self, cx: &mut Cx<'_>, epoch: Epoch, lock: Lock, askers: &[Endpoint]) {
        let (durable, last) = (self.log.durable(), self.log.last());
        assert_eq!(durable, last, "I8: {last} was accepted and {durable} is durable");
        let all = cx.planted(Plant::LockAllThereIs);
        let durable = if all { durable } else { self.log.end_of(lock.generation) };
        let known_committed = self.served_limit();
        assert!(
            known_committed <= durable,
            "I9: {known_committed} is committed, and {durable} is the end of {}",
            lock.generation
        );
        cx.note(Note::Locked { epoch, durable });
        for asker in askers {
            cx.send(*asker, epoch, Locked { durable, known_committed });
        }
    }

    pub(super) fn begin_generation(
        &mut self,
        cx: &mut Cx<'_>,
        plan: EpochPlan,
        askers: &[Endpoint],
    ) {
        let epoch = plan.epoch;
        assert!(epoch >= self.locked, "I8: {epoch} begins under {}", self.locked);
        assert_eq!(self.log.last(), plan.recovery_version, "I1: {epoch} begins at RV");
        if cx.planted(Plant::IdsDropped) {
            self.ids.drop_above(Version::ZERO);
        }
        self.generation = Some(Generation::new(plan, cx.knobs.pushes_waiting_max));
        cx.note(Note::RoleChanged { role: Role::LogServer, epoch, began: true });
        Self::answer_recruits(cx, epoch, askers);
        if self.log.state() == LogState::Full {
            self.announce_state(cx);
        }
    }
}
