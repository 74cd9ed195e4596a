//! One transaction until its verdict, exactly once (I16).
//!
//! ```text
//!              version        (check)       send --> sent --verdict--> done
//!  start --> of the id ----> id unused? -----^         | outcome unknown
//!                 ^  ^                                  v
//!                 |  '-- too old, blind              fence --> fence sent
//!                 |                                     ^          | any verdict, at v
//!                 |                                     '--lost----|
//!                 '-- absent, safe to send again <--- find id, at least v
//!                                                       | found
//!                                                       v
//!                                          locate missing offsets --> done
//! ```
//!
//! A transaction carries an idempotency id, which the proxy adds to its reads and writes. An outcome is
//! unknown when a copy was sent and no verdict came: the connection broke, the epoch changed, time ran out.
//! Then a *fence*, an empty transaction of the same id at the same read version, is committed until it has a
//! verdict at some version v. From v on the original can't commit any more:
//!
//! - the fence committed: the original's read of the id conflicts with the fence's write
//! - it conflicted: something wrote the id after the read version, and the original conflicts with that too
//! - it is too old: so is the original, at every version after v
//!
//! So the id index, once it is known through v, tells the truth: found, or absent for good. Absent, and the
//! transaction goes again when that is safe: a blind one reads its id at the index' version from then on (at
//! or below it the id is known unused, above it the resolvers look), one that has read something gets another
//! id, if the id was the session's own.
//!
//! Requests name the epoch that they were first sent in. A refusal of another epoch, and a negative verdict
//! of a later one, prove nothing about an earlier copy: proxies of two epochs can have one address, and the
//! first may have taken the original.

use core::time::Duration;

use common::message::{
    CommitKind, CommitOutcome, CommitReply, CommitRequest, FoundId, FoundSection, IdFound, Message,
};
use common::{
    Backoff, Class, Code, Cx, Endpoint, Epoch, IdempotencyId, LIFE_VERSIONS_MAX, Mark, Offset,
    Payload, Plant, Position, Ranges, Refusal, RequestId, Time, Version,
};

use super::lane::{self, LaneId, Turn};
use super::question::{Ask, Reply, unexpected};
use super::{Answer, Committed, Item, Key, Owner, Session, patience_ms};
use crate::transaction::{IdChoice, Sealed};
use crate::{Block, Error};

/// A transaction is sent again after a definite refusal or a proven absence, at most so often.
const ATTEMPTS_MAX: u32 = 16;
/// A commit that another call began so long before a read version lies below it, or will be too old: it is
/// read, waits, and is pushed within a LIFE each.
const OTHER_CALL_VERSIONS: u64 = 2 * LIFE_VERSIONS_MAX;
/// Larger requests are not sent again on the same connection: only a simulated network loses messages.
const RESEND_BYTES_MAX: u64 = 256 << 10;
/// A request gets this much more time for each second that its bytes take.
const BYTES_PER_SECOND_MIN: u64 = 4 << 20;
/// Enough for one block's entry when its offsets are looked up; one version always fits.
const LOCATE_BYTES: u64 = 1;

/// A transaction and how far it is.
#[derive(Clone, Debug)]
pub(super) struct Commit {
    owner: Owner,
    pub(super) lane: Option<LaneId>,
    /// Without numbers; with the id and the read version of the current attempt.
    request: CommitRequest,
    id: IdChoice,
    pinned: bool,
    bytes: u64,
    deadline: Time,
    phase: Phase,
    backoff: Backoff,
    attempts: u32,
    /// How often time ran out on a copy that had been sent.
    timeouts: u32,
    /// Whether a fence of the current id has been sent.
    fenced: bool,
    /// Whether the caller's id is known unused at the read version.
    is_checked: bool,
    /// The question to a log server that is on its way: one at a time, so an answer fits the phase.
    asked: Option<Key>,
    /// The id counts as unused at or below this version, whatever the log forgets later. A caller's id counts
    /// so at the beginning: who uses one again must do so while the log remembers it.
    absent_through: Version,
    /// The highest version that was known when the call began: recoveries jump far while it waits.
    began: Option<Version>,
}

#[derive(Clone, Debug)]
enum Phase {
    /// A read version for the id is on its way.
    Version,
    /// The log is asked whether the caller's id has been used.
    Check,
    /// To be sent.
    Send,
    Sent(Sent),
    /// To be fenced.
    Fence,
    FenceSent(Sent),
    /// The log is asked what became of the id at or below a version.
    Find(Version),
    /// It committed; the log is asked for offsets.
    Locate(FoundId, usize),
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    proxy: Endpoint,
    number: RequestId,
    /// As it was first sent: a copy that said more would make the proxy forget lanes of which something is
    /// still on its way.
    answered_below: RequestId,
    /// The newest epoch that was known when the request was first sent.
    epoch: Epoch,
    since: Time,
    /// Until it is sent again.
    wait: Duration,
}

impl Commit {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    const fn sent(&self) -> Option<&Sent> {
        match &self.phase {
            Phase::Sent(sent) | Phase::FenceSent(sent) => Some(sent),
            _ => None,
        }
    }

    /// Whether nothing of it can have committed.
    const fn is_harmless(&self) -> bool {
        matches!(self.phase, Phase::Version | Phase::Check | Phase::Send)
    }

    /// What is sent: the transaction, or its fence.
    fn request(&self, number: RequestId, answered_below: RequestId) -> CommitRequest {
        let is_fence = matches!(self.phase, Phase::Fence | Phase::FenceSent(_));
        let request = CommitRequest { request: number, answered_below, ..self.request.clone() };
        if !is_fence {
            // A conflict on the id must be told from one on what was read.
            let report_conflicts = request.report_conflicts || self.has_callers_id() || self.fenced;
            return CommitRequest { report_conflicts, ..request };
        }
        CommitRequest {
            kind: CommitKind::Fence,
            report_conflicts: false,
            lane: None,
            reads: Ranges::default(),
            writes: Ranges::default(),
            sections: Vec::new(),
            payload: Payload::new(),
            ..request
        }
    }

    /// Takes in that the log knows no use of the id. It remembers ids for a time only: what lies between the
    /// last proof and what it has forgotten is not proven, and makes the error.
    fn prove_absent(&mut self, reply: &IdFound) -> Result<(), Error> {
        let IdFound { through, forgotten_through, .. } = *reply;
        if through < self.absent_through || forgotten_through > self.absent_through {
            let detail = format!(
                "ids through {forgotten_through} are forgotten; this one is unused only through {}",
                self.absent_through
            );
            return Err(Error::Unknown(Refusal::new(Code::TimedOut, detail)));
        }
        self.absent_through = through;
        Ok(())
    }

    const fn has_callers_id(&self) -> bool {
        matches!(self.id, IdChoice::Caller(_) | IdChoice::CallerFresh(_))
    }
}

impl Session {
    pub(super) fn start_commit(
        &mut self,
        cx: &mut Cx<'_>,
        owner: Owner,
        lane: Option<LaneId>,
        sealed: Sealed,
        deadline: Time,
    ) {
        let Sealed { mut request, id, pinned, bytes } = sealed;
        request.id = match id {
            IdChoice::Session => Some(IdempotencyId(cx.rng.bytes16())),
            IdChoice::Caller(id) | IdChoice::CallerFresh(id) => Some(id),
            IdChoice::None => None,
        };
        let key = self.key();
        let phase = Phase::Send;
        let backoff = Backoff::default();
        let commit = Commit {
            owner,
            lane,
            request,
            id,
            pinned,
            bytes,
            deadline,
            phase,
            backoff,
            attempts: 0,
            timeouts: 0,
            fenced: false,
            is_checked: false,
            asked: None,
            absent_through: Version::ZERO,
            began: self.seen.map(|(_, highest)| highest),
        };
        self.commits.insert(key, commit);
        if let Some(lane) = lane
            && !self.enter_lane(cx, lane, key, owner)
        {
            return;
        }
        self.alarms.set(Item::Commit(key), deadline);
        self.begin_attempt(cx, key);
    }

    /// Gives the attempt a read version; then checks the caller's id; then it can be sent.
    fn begin_attempt(&mut self, cx: &mut Cx<'_>, key: Key) {
        let life_ms = cx.knobs.life_versions * 1000 / cx.knobs.versions_per_second.max(1);
        let fresh = self.newest.filter(|(_, since)| {
            cx.now.since(*since) < Duration::from_millis((life_ms / 2).max(1))
        });
        let commit = self.commits.get_mut(&key).expect("an attempt of a commit that is there");
        assert!(commit.is_harmless(), "{key:?} begins again in {:?}", commit.phase);
        if commit.request.id.is_some() && !commit.pinned {
            let Some((version, _)) = fresh else {
                commit.phase = Phase::Version;
                return self.ask_floor(cx);
            };
            commit.request.read_version = version;
        }
        self.check_id(cx, key);
    }

    fn ask_floor(&mut self, cx: &mut Cx<'_>) {
        if self.floor.is_none() {
            self.floor = Some(self.ask(cx, Owner::Floor, Ask::ReadVersion, None));
        }
    }

    pub(super) fn handle_floor(&mut self, cx: &mut Cx<'_>, reply: Reply) {
        self.floor = None;
        let waiting: Vec<Key> = self
            .commits
            .iter()
            .filter(|(_, commit)| matches!(commit.phase, Phase::Version))
            .map(|(key, _)| *key)
            .collect();
        if let Reply::Message(Message::ReadVersionReply(reply)) = reply {
            for key in waiting {
                let Some(commit) = self.commits.get_mut(&key) else { continue };
                commit.request.read_version = reply.version;
                self.check_id(cx, key);
            }
            return;
        }
        for key in waiting {
            self.finish_commit(cx, key, Err(unexpected(reply.clone())));
        }
    }

    fn check_id(&mut self, cx: &mut Cx<'_>, key: Key) {
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        let read_version = commit.request.read_version;
        let unused_through = match commit.id {
            // A new id is unused at every version that has been handed out, and earlier copies were refused.
            IdChoice::Session | IdChoice::CallerFresh(_) | IdChoice::None => read_version,
            // Another call may be using a caller's at this time. What log servers had to forget that soon
            // makes the error; of what is older the caller knows how long ids are remembered.
            IdChoice::Caller(_) if commit.attempts == 0 => {
                let first = self.seen.map(|(first, _)| first);
                let began = commit.began.or(first).unwrap_or(read_version).min(read_version);
                began.minus_saturating(OTHER_CALL_VERSIONS)
            }
            IdChoice::Caller(_) => commit.absent_through,
        };
        commit.absent_through = commit.absent_through.max(unused_through);
        if let (IdChoice::Caller(id), false) = (commit.id, commit.is_checked) {
            commit.phase = Phase::Check;
            let at_least = commit.request.read_version;
            let deadline = Some(commit.deadline);
            self.ask_log(cx, key, Ask::FindId { id, at_least }, deadline);
        } else {
            commit.phase = Phase::Send;
            self.ready.insert(Item::Commit(key));
        }
    }

    pub(super) fn place_commit(&mut self, cx: &mut Cx<'_>, key: Key) -> bool {
        let Some(commit) = self.commits.get(&key) else { return true };
        let is_open = || self.window.is_open(self.cluster.outstanding_count());
        match commit.phase {
            Phase::Send | Phase::Fence if !is_open() => false,
            Phase::Send => {
                let proxy = match commit.lane {
                    Some(lane) => match self.lane_proxy(cx, lane, key) {
                        Turn::Now(proxy) => Some(proxy),
                        Turn::Later => None,
                        Turn::Broken => return true,
                    },
                    None => self.cluster.pick_proxy(cx.rng),
                };
                proxy.map(|proxy| self.send_commit(cx, key, proxy)).is_some()
            }
            Phase::Fence => {
                let proxy = self.cluster.pick_proxy(cx.rng);
                proxy.map(|proxy| self.send_commit(cx, key, proxy)).is_some()
            }
            _ => true,
        }
    }

    fn send_commit(&mut self, cx: &mut Cx<'_>, key: Key, proxy: Endpoint) {
        let (number, answered_below) = self.cluster.number_commit(proxy, key);
        let epoch = self.cluster.epoch();
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        let is_fence = matches!(commit.phase, Phase::Fence);
        if let (Some(lane), false) = (commit.lane, is_fence) {
            let found = self.lanes.get_mut(&lane).expect("a commit's lane is there");
            commit.request.lane = Some(found.send(key, lane));
        }
        let request = commit.request(number, answered_below);
        let wait = Duration::from_millis(cx.knobs.retransmit_ms);
        let sent = Sent { proxy, number, answered_below, epoch, since: cx.now, wait };
        commit.phase = if is_fence { Phase::FenceSent(sent) } else { Phase::Sent(sent) };
        commit.fenced |= is_fence;
        cx.send(proxy, epoch, request);
        self.wake_sent(cx, key);
    }

    /// Sets the alarm for the next copy, or for giving up.
    fn wake_sent(&mut self, cx: &Cx<'_>, key: Key) {
        let commit = &self.commits[&key];
        let sent = commit.sent().expect("a request that was sent");
        let given_up = sent.since.plus(patience(cx, commit));
        let resends = commit.request.id.is_some() && commit.bytes <= RESEND_BYTES_MAX;
        let at = if resends { cx.now.plus(sent.wait).min(given_up) } else { given_up };
        self.alarms.set(Item::Commit(key), at);
    }

    pub(super) fn handle_commit_alarm(&mut self, cx: &mut Cx<'_>, key: Key) {
        let Some(commit) = self.commits.get_mut(&key) else { return };
        if commit.is_harmless() {
            if commit.deadline <= cx.now {
                let detail = "no proxy took the transaction within client_timeout_ms";
                return self.finish_commit(cx, key, Err(Error::new(Code::TimedOut, detail)));
            }
            self.alarms.set(Item::Commit(key), commit.deadline);
        }
        let Some(sent) = commit.sent().copied() else {
            match commit.phase.clone() {
                Phase::Send | Phase::Fence => {
                    self.ready.insert(Item::Commit(key));
                }
                Phase::Find(at_least) => self.find_id(cx, key, at_least),
                Phase::Locate(found, place) => self.locate(cx, key, found, place),
                Phase::Version | Phase::Check | Phase::Sent(_) | Phase::FenceSent(_) => {}
            }
            return;
        };
        if cx.now.since(sent.since) >= patience(cx, commit) {
            let settled = self.cluster.settle_commit(sent.proxy, sent.number);
            assert_eq!(settled, Some(key), "{} of {:?} was outstanding", sent.number, sent.proxy);
            commit.timeouts += 1;
            self.window.shrink(self.cluster.outstanding_count());
            self.suspect(sent.proxy);
            return self.handle_lost(cx, vec![key]);
        }
        let request = commit.request(sent.number, sent.answered_below);
        if let Phase::Sent(sent) | Phase::FenceSent(sent) = &mut commit.phase {
            sent.wait *= 2;
        }
        cx.send(sent.proxy, sent.epoch, request);
        self.wake_sent(cx, key);
    }

    /// Commits that were sent in an epoch before `epoch`, with their numbers.
    pub(super) fn commits_before(&self, epoch: Epoch) -> Vec<(Endpoint, RequestId)> {
        let sent = self.commits.values().filter_map(Commit::sent);
        sent.filter(|sent| sent.epoch < epoch).map(|sent| (sent.proxy, sent.number)).collect()
    }

    /// No verdict will come for what was sent of these commits.
    pub(super) fn handle_lost(&mut self, cx: &mut Cx<'_>, keys: Vec<Key>) {
        for key in keys {
            let Some(commit) = self.commits.get_mut(&key) else { continue };
            assert!(commit.sent().is_some(), "{key:?} was not sent: {:?}", commit.phase);
            if commit.request.id.is_none() {
                let refusal = Refusal::new(Code::TimedOut, "no verdict, and no idempotency id");
                self.finish_commit(cx, key, Err(Error::Unknown(refusal)));
                continue;
            }
            if cx.planted(Plant::NewIdOnRetry) && matches!(commit.phase, Phase::Sent(_)) {
                commit.request.id = Some(IdempotencyId(cx.rng.bytes16()));
                commit.phase = Phase::Send;
                self.alarms.clear(Item::Commit(key));
                self.ready.insert(Item::Commit(key));
                continue;
            }
            commit.phase = Phase::Fence;
            let lane = commit.lane;
            self.alarms.clear(Item::Commit(key));
            self.ready.insert(Item::Commit(key));
            if let Some(lane) = lane {
                self.break_lane(cx, lane);
            }
        }
    }

    pub(super) fn handle_commit_reply(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        reply: CommitReply,
    ) {
        let Some(key) = self.cluster.settle_commit(from, reply.request) else { return };
        match &reply.outcome {
            CommitOutcome::Refused(refusal) if refusal.code() == Code::Overloaded => {
                self.window.shrink(self.cluster.outstanding_count());
            }
            _ => self.window.grow(cx.knobs.client_in_flight_max),
        }
        let commit = &self.commits[&key];
        let sent = *commit.sent().expect("outstanding requests belong to sent commits");
        assert_eq!(sent.number, reply.request, "{key:?} has one request outstanding");
        if let CommitOutcome::Committed { position, .. } = &reply.outcome {
            self.saw(position.version, cx.now);
        }
        let is_fence = matches!(self.commits[&key].phase, Phase::FenceSent(_));
        match (is_fence, reply.outcome) {
            (true, outcome) => self.settle_fence(cx, key, sent, outcome),
            (false, CommitOutcome::Committed { position, commit_time, base_offsets }) => {
                let sections = &self.commits[&key].request.sections;
                let offsets = sections
                    .iter()
                    .zip(base_offsets)
                    .map(|(section, offset)| (section.stream, Some(offset)))
                    .collect();
                let committed = Committed { position, commit_time, offsets };
                self.finish_commit(cx, key, Ok(committed));
            }
            (false, _) if epoch > sent.epoch && self.commits[&key].request.id.is_some() => {
                self.handle_lost(cx, vec![key]);
            }
            (false, outcome) => self.settle(cx, key, sent, outcome),
        }
    }

    /// A definite verdict that is not `Committed`.
    fn settle(&mut self, cx: &mut Cx<'_>, key: Key, sent: Sent, outcome: CommitOutcome) {
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        match outcome {
            CommitOutcome::Committed { .. } => panic!("the caller takes what committed"),
            CommitOutcome::Conflict { version, ranges } => {
                let read_count = commit.request.reads.len() as u32;
                let on_id = ranges.iter().any(|range| *range >= read_count);
                let may_be_id = commit.has_callers_id() || commit.fenced;
                let is_id = !commit.pinned || (on_id && may_be_id);
                if commit.request.id.is_some() && is_id {
                    // The proxy has ended the lane, whatever the log says of this one.
                    if let Some(lane) = commit.lane {
                        self.break_lane(cx, lane);
                    }
                    return self.find_id(cx, key, version);
                }
                let reports = commit.request.report_conflicts;
                let conflicts =
                    ranges.into_iter().filter(|range| reports && *range < read_count).collect();
                let read_version = commit.request.read_version;
                let detail = format!("read at {read_version}, written since; decided at {version}");
                let refusal = Refusal::new(Code::Conflict, detail);
                self.finish_commit(cx, key, Err(Error::Retry { refusal, conflicts }));
            }
            CommitOutcome::TooOld { version } => {
                let detail = format!("{} is too old at {version}", commit.request.read_version);
                if commit.pinned {
                    let error = Error::new(Code::TooOld, detail);
                    return self.finish_commit(cx, key, Err(error));
                }
                // Only the id was read, so any newer version will do.
                self.newest = None;
                self.again(cx, key, Refusal::new(Code::TooOld, detail));
            }
            CommitOutcome::Refused(refusal) => {
                if refusal.code().class() == Class::Fenced || refusal.code() == Code::Recovering {
                    self.suspect(sent.proxy);
                }
                self.again(cx, key, refusal);
            }
        }
    }

    /// Not committed, for a reason that may pass: again after a while, or the reason to the caller.
    fn again(&mut self, cx: &mut Cx<'_>, key: Key, refusal: Refusal) {
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        commit.attempts += 1;
        let passes = refusal.code().class() == Class::Fenced
            || matches!(refusal.code(), Code::Overloaded | Code::Recovering | Code::TooOld);
        let wait = commit.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        let wait = wait.max(Duration::from_millis(u64::from(refusal.retry_after_ms)));
        let is_last = commit.attempts >= ATTEMPTS_MAX || cx.now.plus(wait) >= commit.deadline;
        // The proxy ends a lane with its first failure.
        if !passes || is_last || commit.lane.is_some() {
            return self.finish_commit(cx, key, Err(refusal.into()));
        }
        commit.phase = Phase::Send;
        if refusal.code() == Code::TooOld {
            // The id has been looked up at a version that is too old now.
            commit.is_checked = false;
            self.alarms.set(Item::Commit(key), commit.deadline);
            return self.begin_attempt(cx, key);
        }
        self.alarms.set(Item::Commit(key), cx.now.plus(wait));
    }

    /// A node, not a proxy, has refused a commit request: nothing is known of an earlier copy.
    pub(super) fn handle_commit_refused(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        number: RequestId,
        refusal: Refusal,
    ) {
        let Some(key) = self.outstanding(from, number) else { return };
        let commit = &self.commits[&key];
        let sent = *commit.sent().expect("outstanding requests belong to sent commits");
        let settled = self.cluster.settle_commit(sent.proxy, number);
        assert_eq!(settled, Some(key), "{number} of {:?} was outstanding", sent.proxy);
        self.suspect(sent.proxy);
        let is_fence = matches!(self.commits[&key].phase, Phase::FenceSent(_));
        // Refused for what it is, every copy is. Any other refusal is of this copy only.
        let is_definite = refusal.code().class() == Class::FixRequest;
        if is_fence {
            self.settle_fence(cx, key, sent, CommitOutcome::Refused(refusal));
        } else if is_definite {
            self.again(cx, key, refusal);
        } else {
            self.handle_lost(cx, vec![key]);
        }
    }

    /// The commit whose request has that number on the connection to `from`, whichever role answers.
    fn outstanding(&self, from: Endpoint, number: RequestId) -> Option<Key> {
        let is_it = |sent: &Sent| {
            sent.number == number
                && sent.proxy.peer() == from.peer()
                && (sent.proxy.role == from.role || from.role == common::Role::Node)
        };
        let mut found = self.commits.iter().filter(|(_, c)| c.sent().is_some_and(is_it));
        // Two proxies of one node can have the same number outstanding: then time will tell.
        let first = found.next().map(|(key, _)| *key);
        first.filter(|_| found.next().is_none())
    }

    fn settle_fence(&mut self, cx: &mut Cx<'_>, key: Key, sent: Sent, outcome: CommitOutcome) {
        match outcome {
            CommitOutcome::Committed { position, .. } => self.find_id(cx, key, position.version),
            CommitOutcome::Conflict { version, .. } | CommitOutcome::TooOld { version } => {
                self.find_id(cx, key, version);
            }
            CommitOutcome::Refused(refusal) if refusal.code().class() == Class::FixRequest => {
                self.finish_commit(cx, key, Err(Error::Unknown(refusal)));
            }
            CommitOutcome::Refused(refusal) => {
                if refusal.code() != Code::Overloaded {
                    self.suspect(sent.proxy);
                }
                let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
                commit.phase = Phase::Fence;
                let wait = commit.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
                let wait = wait.max(Duration::from_millis(u64::from(refusal.retry_after_ms)));
                self.alarms.set(Item::Commit(key), cx.now.plus(wait));
            }
        }
    }

    /// From `at_least` on nothing more can commit under the id: what has?
    fn find_id(&mut self, cx: &mut Cx<'_>, key: Key, at_least: Version) {
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        let id = commit.request.id.expect("only a transaction with an id is looked for");
        commit.phase = Phase::Find(at_least);
        self.alarms.clear(Item::Commit(key));
        self.ask_log(cx, key, Ask::FindId { id, at_least }, None);
    }

    fn ask_log(&mut self, cx: &mut Cx<'_>, key: Key, ask: Ask, deadline: Option<Time>) {
        let asked = self.ask(cx, Owner::Commit(key), ask, deadline);
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        let earlier = commit.asked.replace(asked);
        assert_eq!(earlier, None, "{key:?} asks {asked:?} in {:?}", commit.phase);
    }

    /// An answer of a log server for a commit.
    pub(super) fn handle_commit_told(&mut self, cx: &mut Cx<'_>, key: Key, reply: Reply) {
        let Some(commit) = self.commits.get_mut(&key) else { return };
        assert!(commit.asked.take().is_some(), "{key:?} is told in {:?}", commit.phase);
        match (commit.phase.clone(), reply) {
            (Phase::Check, Reply::Message(Message::IdFound(reply))) => match reply.found {
                Some(found) => self.locate(cx, key, found, 0),
                None => {
                    let commit = self.commits.get_mut(&key).expect("looked up above");
                    if let Err(error) = commit.prove_absent(&reply) {
                        return self.finish_commit(cx, key, Err(error));
                    }
                    commit.is_checked = true;
                    commit.phase = Phase::Send;
                    self.ready.insert(Item::Commit(key));
                }
            },
            (Phase::Check, reply) => self.finish_commit(cx, key, Err(unexpected(reply))),
            (Phase::Find(_), Reply::Message(Message::IdFound(reply))) => {
                let was_unknown = commit.fenced;
                match reply.found {
                    Some(found) => {
                        if was_unknown {
                            cx.mark(Mark::UnknownCommitted);
                        }
                        self.locate(cx, key, found, 0);
                    }
                    None => {
                        if was_unknown {
                            cx.mark(Mark::UnknownAbsent);
                        }
                        self.saw(reply.through, cx.now);
                        self.handle_absent(cx, key, &reply);
                    }
                }
            }
            (Phase::Locate(found, place), reply) => {
                self.handle_located(cx, key, found, place, reply);
            }
            // Another holder of the ids may know; without any, the question goes on.
            (_, Reply::Refused(refusal)) if refusal.code().class() != Class::FixRequest => {
                let commit = self.commits.get_mut(&key).expect("looked up above");
                let wait = commit.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
                self.alarms.set(Item::Commit(key), cx.now.plus(wait));
            }
            (_, reply) => {
                let error = unexpected(reply);
                self.finish_commit(cx, key, Err(Error::Unknown(error.refusal().clone())));
            }
        }
    }

    /// The id is not used at or below `through`, and nothing of the past can commit any more.
    fn handle_absent(&mut self, cx: &mut Cx<'_>, key: Key, reply: &IdFound) {
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        if let Err(error) = commit.prove_absent(reply) {
            return self.finish_commit(cx, key, Err(error));
        }
        commit.attempts += 1;
        if let Some(lane) = commit.lane {
            return self.finish_commit(cx, key, Err(lane::broken(lane)));
        }
        if commit.attempts >= ATTEMPTS_MAX || (commit.pinned && commit.has_callers_id()) {
            let detail = "the outcome was unknown and has been settled: not committed";
            return self.finish_commit(cx, key, Err(Error::new(Code::Conflict, detail)));
        }
        if commit.pinned {
            // The fences have written the old id above the read version; nobody else knows the new one.
            commit.request.id = Some(IdempotencyId(cx.rng.bytes16()));
            commit.fenced = false;
            commit.absent_through = commit.request.read_version;
        } else {
            commit.request.read_version = reply.through;
        }
        let wait = Duration::from_millis(cx.knobs.client_timeout_ms);
        commit.deadline = commit.deadline.max(cx.now.plus(wait));
        commit.phase = Phase::Send;
        let pause = commit.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        self.alarms.set(Item::Commit(key), cx.now.plus(pause));
    }

    /// It committed: offsets that the answering log server does not hold are looked up in their blocks.
    fn locate(&mut self, cx: &mut Cx<'_>, key: Key, found: FoundId, from: usize) {
        let missing = |section: &FoundSection| section.base_offset.is_none();
        let place = found.sections.iter().skip(from).position(missing).map(|place| from + place);
        let Some(place) = place else {
            let offsets = found.sections.iter().map(|s| (s.stream, s.base_offset)).collect();
            let FoundId { position, commit_time, .. } = found;
            let committed = Committed { position, commit_time, offsets };
            return self.finish_commit(cx, key, Ok(committed));
        };
        let holders = self.cluster.holders(found.sections[place].stream);
        if holders.is_empty() {
            return self.locate_later(cx, key, found, place);
        }
        let ask = Ask::Pull {
            at: *cx.rng.pick(&holders),
            streams: vec![found.sections[place].stream],
            after: found.position.version.minus_saturating(1),
            bytes_max: LOCATE_BYTES,
            wait_ms: 0,
            want: Version::ZERO,
        };
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        commit.phase = Phase::Locate(found, place);
        // The time for a verdict is over: there is one. The question has a time of its own.
        self.alarms.clear(Item::Commit(key));
        let deadline = cx.now.plus(Duration::from_millis(cx.knobs.client_timeout_ms));
        self.ask_log(cx, key, ask, Some(deadline));
    }

    fn handle_located(
        &mut self,
        cx: &mut Cx<'_>,
        key: Key,
        mut found: FoundId,
        place: usize,
        reply: Reply,
    ) {
        let passes = match &reply {
            // It does not know yet that the version is committed: nothing has been trimmed for that.
            Reply::Message(Message::Pulled(pulled)) => pulled.through < found.position.version,
            Reply::Message(_) => false,
            Reply::Refused(refusal) => refusal.code().class() == Class::Wait,
            Reply::Lost => true,
        };
        if passes {
            return self.locate_later(cx, key, found, place);
        }
        if let Reply::Message(Message::Pulled(pulled)) = reply
            && pulled.versions.first().is_some_and(|first| first.version == found.position.version)
            && let Some([entry]) = pulled.blocks.get(..pulled.versions[0].block_count as usize)
            && entry.stream == found.sections[place].stream
            && let Some(body) = pulled.payload.slice(0, entry.bytes as usize)
        {
            found.sections[place].base_offset = offset_in(found.position, entry, &body);
        }
        self.locate(cx, key, found, place + 1);
    }

    /// Nobody could be asked for an offset: once more after a while, at last without it.
    fn locate_later(&mut self, cx: &mut Cx<'_>, key: Key, found: FoundId, place: usize) {
        let commit = self.commits.get_mut(&key).expect("the caller has looked it up");
        commit.attempts += 1;
        if commit.attempts >= ATTEMPTS_MAX {
            return self.locate(cx, key, found, place + 1);
        }
        let wait = commit.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        commit.phase = Phase::Locate(found, place);
        self.alarms.set(Item::Commit(key), cx.now.plus(wait));
    }

    fn finish_commit(&mut self, cx: &mut Cx<'_>, key: Key, result: Result<Committed, Error>) {
        let commit = self.commits.remove(&key).expect("a commit ends once");
        self.ready.remove(&Item::Commit(key));
        self.alarms.clear(Item::Commit(key));
        self.bytes = self.bytes.checked_sub(commit.bytes).expect("bytes were counted once");
        let result = result.map(Answer::Committed);
        match commit.lane {
            Some(lane) => self.finish_in_lane(cx, lane, key, commit.owner, result),
            None => self.complete_owner(cx, commit.owner, result),
        }
    }

    /// Ends a commit of a broken lane that was never sent.
    pub(super) fn finish_unsent(&mut self, cx: &mut Cx<'_>, key: Key, error: Error) {
        self.finish_commit(cx, key, Err(error));
    }
}

/// How long a sent copy is waited for. What is given up stays in the proxy's queue: without more and more
/// patience a queue that takes longer would hold only what is given up.
fn patience(cx: &Cx<'_>, commit: &Commit) -> Duration {
    let bytes_ms = commit.bytes * 1000 / BYTES_PER_SECOND_MIN;
    Duration::from_millis(patience_ms(cx, commit.timeouts) + bytes_ms)
}

/// The first offset of the transaction's section in a block.
fn offset_in(
    position: Position,
    entry: &common::message::PulledBlock,
    body: &bytes::Bytes,
) -> Option<Offset> {
    let block = Block::check(position.version, entry, body).ok()?;
    let found = block.sections().find(|(_, section)| section.index == position.index);
    found.map(|(offset, _)| offset)
}
