//! Catching up: an absent log server becomes whole again.
//!
//! ```text
//! leader --CatchUp e--> cut off what is void, persist {e, certain} --.
//!   .----------------------------------------------------------------'
//!   v
//! round: Copy to every whole server --Copied from all--> trims, persisted --> frames of e, flushed --> round
//!                                                                               CaughtUp --> leader
//! leader --Recruit e', this server returning--> persist {e', certain}, rounds up to RV --> Recruited
//! ```
//!
//! # What is certain
//! A version that was copied while its epoch was live was committed: it is certain for good. What was copied
//! for a recovery, up to its RV, is certain only once that epoch is in the register: until then the next
//! leader may choose another RV. So the start of an epoch that is persisted here names the last *certain*
//! version; when the epoch comes to nothing, this is where catching up goes on. What an absent server had
//! before it was absent is certain up to where the first generation without it began, and up to where an
//! epoch cut it that came to nothing.
//!
//! # Invariants
//! - Frames are written under the epoch that copies, in version order: the log's own chain, with the versions
//!   in between that hold nothing of this share left out.
//! - I12: a copied block has the offset that comes next here; else this log is no copy, and the server stops.
//! - I13: an adopted trim is persisted before a frame that lies behind it. Of the trims that were answered
//!   without this server none is missing when it is recruited: others take none from their lock on, until
//!   the epoch serves, and from then on only from those who know its log servers.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use common::membership::Seats;
use common::message::{CatchUp, CaughtUp, Copied, Copy, EpochPlan, PushBlock, Recruited};
use common::{
    Code, Cx, Endpoint, Epoch, Mark, NodeId, Note, Offset, Payload, Plant, Role, StreamId, Time,
    Version, WallTime, placement,
};

use super::{COPIES, LogServer};
use crate::log::{Accepted, AcceptedBlock};

/// An unanswered round is asked again after so many times `copy_ms`.
const PATIENCE_ROUNDS: u32 = 10;

/// What catching up is for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Aim {
    /// To follow the live epoch.
    Live,
    /// To be whole up to the recovery version, and then to answer the leader.
    Return(Box<EpochPlan>, Vec<Endpoint>),
}

/// A server that catches up.
#[derive(Clone, Debug)]
pub(super) struct Follower {
    /// The epoch that frames are written under.
    epoch: Epoch,
    /// What was locked when it began: a later lock ends it.
    began_under: Epoch,
    aim: Aim,
    whole: Vec<Endpoint>,
    others: Vec<NodeId>,
    replication: u8,
    seats: Seats,
    /// Everything of the share is here up to this version, inclusive.
    at: Version,
    round: u64,
    /// Of this round.
    answers: BTreeMap<NodeId, Copied>,
    /// Is asked for nothing in the next round: it could not read a block.
    avoided: Option<NodeId>,
    /// The meta generation that holds the trims of this round, and what comes after it.
    trims: Option<(u64, Vec<Copied>)>,
    is_asking: bool,
    is_near: bool,
    /// While it follows: the next round begins no sooner, so that copying leaves others their bandwidth.
    not_before: Time,
}

impl Follower {
    pub(super) fn new(plan: &EpochPlan, me: NodeId, aim: Aim, at: Version, locked: Epoch) -> Self {
        let is_whole = |server: &Endpoint| !plan.returning.contains(&server.node);
        let whole: Vec<Endpoint> = plan.log_servers.iter().copied().filter(is_whole).collect();
        let others: Vec<NodeId> = plan.absent.iter().chain(&plan.returning).copied().collect();
        assert!(
            others.contains(&me) && others.len() < usize::from(plan.replication),
            "{me} catches up among {others:?}"
        );
        Self {
            epoch: plan.epoch,
            began_under: locked,
            aim,
            whole,
            others,
            replication: plan.replication,
            seats: plan.seats.clone(),
            at,
            round: 0,
            answers: BTreeMap::new(),
            avoided: None,
            trims: None,
            is_asking: false,
            is_near: false,
            not_before: Time::ZERO,
        }
    }

    /// Follows the live epoch: what it has is certain.
    pub(super) fn is_live(&self) -> bool {
        self.aim == Aim::Live
    }

    /// Whether something newer was locked since it began: whoever locked has another plan.
    fn is_over(&self, locked: Epoch) -> bool {
        self.began_under < locked
    }

    fn through(&self) -> Version {
        match &self.aim {
            Aim::Live => Version::ZERO,
            Aim::Return(plan, _) => plan.recovery_version,
        }
    }

    /// Trims that others took while this server was away may lie below what it has. Those of a return are
    /// final: from their lock to the epoch's begin log servers take none.
    fn wants_all_trims(&self) -> bool {
        self.round <= 1 || !self.is_live()
    }

    /// Who is asked in this round: one that could not read is passed over if the others have everything.
    fn sources(&self) -> (Vec<Endpoint>, Vec<NodeId>) {
        let mut others = self.others.clone();
        let can_avoid = others.len() + 1 < usize::from(self.replication);
        let avoided = self.avoided.filter(|_| can_avoid);
        others.extend(avoided);
        let whole = self.whole.iter().copied().filter(|server| Some(server.node) != avoided);
        (whole.collect(), others)
    }

    /// The whole log servers that hold `stream`, best first.
    pub(super) fn holders(&self, stream: StreamId) -> Vec<Endpoint> {
        let whole: Vec<NodeId> = self.whole.iter().map(|server| server.node).collect();
        let places =
            placement::holders(stream, &self.seats, &whole, &self.others, self.replication);
        places.into_iter().map(|place| self.whole[place]).collect()
    }

    pub(super) fn waits(&self) -> String {
        let (whole, _) = self.sources();
        let silent = whole.iter().filter(|server| !self.answers.contains_key(&server.node));
        let silent: Vec<String> = silent.map(|server| server.node.to_string()).collect();
        format!(
            "catching up under {} at {}: {}",
            self.epoch,
            self.at,
            if self.is_asking {
                format!("copies of {}", silent.join(", "))
            } else {
                "the disk".to_owned()
            }
        )
    }
}

impl LogServer {
    pub(super) fn handle_catch_up(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        catch_up: &CatchUp,
    ) {
        catch_up.plan.check();
        let plan = &catch_up.plan;
        let newest = self.log.epoch().max(self.log.locked());
        let newest = newest.max(self.takeover.as_ref().map_or(Epoch::ZERO, |t| t.epoch()));
        if epoch != plan.epoch || epoch < newest || !plan.absent.contains(&cx.me.node) {
            let detail = format!("{epoch} is older than {newest}, or has this log server");
            return self.refuse_role(cx, from, epoch, Code::WrongEpoch, detail);
        }
        if let Some(follower) = self.follower.as_ref().filter(|follower| follower.epoch == epoch) {
            let (through, is_near) = (self.log.durable().min(follower.at), follower.is_near);
            return cx.send(from, epoch, CaughtUp { through, is_near });
        }
        // From here on nothing older is accepted. What was must be on the disk before it is judged; the
        // leader asks again.
        self.locked = self.locked.max(epoch);
        if let Some(generation) = &mut self.generation {
            generation.end();
        }
        // A leader that was overtaken waits for this.
        self.takeover.take_if(|takeover| takeover.epoch() < epoch);
        if !self.log.is_flushed() || self.takeover.is_some() {
            return;
        }
        self.generation = None;
        let certain = self.certain(cx, catch_up);
        let is_resumed = self.log.epoch() == epoch;
        if !is_resumed {
            let is_cut = self.begin_own_epoch(epoch, certain);
            if is_cut {
                cx.mark(Mark::CatchUpCut);
            }
        }
        cx.mark(if is_resumed { Mark::CatchUpResumed } else { Mark::CatchUpBegan });
        cx.note(Note::CatchingUp { epoch, from: certain });
        let follower = Follower::new(plan, cx.me.node, Aim::Live, certain, self.locked);
        // Persisted before a frame of the epoch is written: the log writes meta and frames in order.
        let ticket = self.log.persist_lock(epoch);
        self.follower = Some(Follower { trims: Some((ticket, Vec::new())), ..follower });
    }

    /// The last version up to which this log is what the generations in the register say.
    fn certain(&self, cx: &Cx<'_>, catch_up: &CatchUp) -> Version {
        let (started, start) = self.log.latest_start();
        let was_live = self
            .follower
            .as_ref()
            .is_some_and(|follower| follower.is_live() && follower.epoch == self.log.epoch());
        let certain = if was_live || started == catch_up.plan.epoch {
            self.log.last()
        } else if started >= catch_up.absent_since {
            let start = if cx.planted(Plant::KeepVoidCopies) { self.log.last() } else { start };
            start.max(self.log.known_committed()).min(self.log.last())
        } else if cx.planted(Plant::KeepVoid) {
            self.log.last()
        } else {
            self.log.end_of(catch_up.present_in).min(catch_up.absent_from)
        };
        assert!(
            certain >= self.log.known_committed() && certain <= self.log.last(),
            "I9: {certain} is certain; committed {}, last {}",
            self.log.known_committed(),
            self.log.last()
        );
        certain
    }

    /// Cuts off what is not certain and begins an epoch there. Whether there was anything.
    pub(super) fn begin_own_epoch(&mut self, epoch: Epoch, certain: Version) -> bool {
        let is_cut = self.log.begin_epoch(epoch, certain);
        self.ids.drop_above(certain);
        self.pulls.drop_above(certain);
        is_cut
    }

    /// Goes on as far as the disk and the answers allow.
    pub(super) fn progress_follower(&mut self, cx: &mut Cx<'_>) {
        let Some(follower) = &mut self.follower else { return };
        if follower.is_over(self.locked) || !self.log.is_open() || self.log.is_stopping() {
            return;
        }
        if let Some((ticket, answers)) = &mut follower.trims {
            if self.log.persisted() < *ticket {
                return;
            }
            let answers = core::mem::take(answers);
            follower.trims = None;
            if !answers.is_empty() {
                self.take_copies(cx, answers);
            }
        }
        if !self.log.is_flushed() {
            return;
        }
        let Some(follower) = &mut self.follower else { return };
        if follower.is_asking {
            return;
        }
        let (last, at) = (self.log.last(), follower.at);
        assert!(last <= at && self.log.durable() == last, "{last} is here, {at} was copied");
        let has_asked = follower.round > 0 || cx.planted(Plant::ReturnUnasked);
        match &follower.aim {
            // Certain and durable: so it is committed, as far as anybody may ask here.
            Aim::Live => self.log.raise_known_committed(last),
            // Not before a round of its own: only a source that is locked gives the last trims.
            Aim::Return(plan, _) if at >= plan.recovery_version && has_asked => {
                return self.end_return(cx);
            }
            Aim::Return(..) if cx.planted(Plant::ReturnServes) => {
                self.log.raise_known_committed(last)
            }
            Aim::Return(..) => {}
        }
        let Some(follower) = &self.follower else { return };
        if follower.is_near && follower.is_live() {
            // News is fetched by the timer.
            return;
        }
        if follower.is_live() && cx.now < follower.not_before {
            // The timer goes on.
            return;
        }
        self.begin_round(cx);
    }

    pub(super) fn handle_copies_timer(&mut self, cx: &mut Cx<'_>) {
        let Some(follower) = &mut self.follower else { return };
        if follower.is_over(self.locked) {
            return;
        }
        if follower.trims.is_some() || !self.log.is_open() || self.log.is_stopping() {
            return cx.arm_after(COPIES, Duration::from_millis(cx.knobs.copy_ms));
        }
        if follower.is_asking {
            return self.ask_for_copies(cx);
        }
        if !self.log.is_flushed() {
            return cx.arm_after(COPIES, Duration::from_millis(cx.knobs.copy_ms));
        }
        self.begin_round(cx);
    }

    fn begin_round(&mut self, cx: &mut Cx<'_>) {
        let follower = self.follower.as_mut().expect("it catches up");
        assert!(follower.trims.is_none() && !follower.is_asking, "one round at a time");
        follower.round += 1;
        follower.answers.clear();
        follower.is_asking = true;
        self.ask_for_copies(cx);
    }

    fn ask_for_copies(&self, cx: &mut Cx<'_>) {
        let follower = self.follower.as_ref().expect("it catches up");
        let (whole, others) = follower.sources();
        let nodes: Vec<NodeId> = whole.iter().map(|server| server.node).collect();
        for server in whole.iter().filter(|server| !follower.answers.contains_key(&server.node)) {
            let copy = Copy {
                round: follower.round,
                node: cx.me.node,
                whole: nodes.clone(),
                others: others.clone(),
                replication: follower.replication,
                seats: follower.seats.clone(),
                wants_all_trims: follower.wants_all_trims(),
                after: follower.at,
                through: follower.through(),
            };
            cx.send(*server, follower.epoch, copy);
        }
        let patience = Duration::from_millis(cx.knobs.copy_ms) * PATIENCE_ROUNDS;
        cx.arm_after(COPIES, patience);
    }

    pub(super) fn handle_copied(&mut self, cx: &mut Cx<'_>, from: Endpoint, copied: Copied) {
        let Some(follower) = &mut self.follower else { return };
        let (whole, _) = follower.sources();
        let is_asked = !follower.is_over(self.locked)
            && follower.is_asking
            && copied.round == follower.round
            && copied.after == follower.at
            && whole.contains(&from);
        if !is_asked || cut(&copied).is_none() {
            return;
        }
        follower.answers.insert(from.node, copied);
        if follower.answers.len() < whole.len() && !cx.planted(Plant::FirstCopyOnly) {
            return;
        }
        let answers = core::mem::take(&mut follower.answers);
        follower.is_asking = false;
        let damaged = answers.iter().find(|(_, copied)| copied.is_damaged);
        let damaged = damaged.map(|(node, _)| *node);
        if follower.avoided.is_some() && damaged.is_none() {
            cx.mark(Mark::CatchUpElsewhere);
        }
        follower.avoided = damaged;
        follower.is_near = answers.values().all(|copied| copied.is_all);
        let answers: Vec<Copied> = answers.into_values().collect();
        let ticket = self.adopt_trims(cx, &answers);
        let follower = self.follower.as_mut().expect("it catches up");
        let soon = cx.now.plus(Duration::from_millis(cx.knobs.copy_ms));
        follower.not_before = cx.now.plus(time_for(&answers, cx.knobs.copy_bytes_per_second));
        if follower.is_live() && follower.not_before > soon {
            cx.mark(Mark::CatchUpThrottled);
        }
        follower.trims = Some((ticket, answers));
        cx.arm(COPIES, soon.max(follower.not_before));
    }

    /// Asks for the trims that the answers bring to be persisted: the ticket.
    fn adopt_trims(&mut self, cx: &mut Cx<'_>, answers: &[Copied]) -> u64 {
        let mut ticket = self.log.persisted();
        if cx.planted(Plant::TrimsNotAdopted) {
            return ticket;
        }
        for trim in answers.iter().flat_map(|copied| &copied.trims) {
            let here = self.log.index().stream(trim.stream);
            if here.is_some_and(|entry| entry.trimmed_through() >= trim.through) {
                continue;
            }
            cx.mark(Mark::CatchUpTrim);
            let (stream, through, first_offset) = (trim.stream, trim.through, trim.first_offset);
            ticket = ticket.max(self.log.persist_adopted_trim(stream, through, first_offset));
        }
        ticket
    }

    /// Takes over what every source has sent: its trims are persisted.
    fn take_copies(&mut self, cx: &mut Cx<'_>, answers: Vec<Copied>) {
        let follower = self.follower.as_mut().expect("it catches up");
        let epoch = follower.epoch;
        let through = answers.iter().map(|copied| copied.through).min().expect("somebody answered");
        let through = match &follower.aim {
            Aim::Live => through,
            Aim::Return(plan, _) => through.min(plan.recovery_version),
        };
        assert!(through >= follower.at, "{through} was copied after {}", follower.at);
        follower.at = through;
        let is_none = cx.planted(Plant::TrimsNotAdopted);
        let trims = answers.iter().flat_map(|copied| &copied.trims).filter(|_| !is_none);
        for trim in trims {
            let here = self.log.index().stream(trim.stream);
            if here.is_none_or(|entry| entry.trimmed_through() < trim.through) {
                let (stream, through) = (trim.stream, trim.through);
                self.log.adopt_trim(stream, through, trim.first_offset);
                cx.note(Note::Trimmed { stream, through, first_offset: trim.first_offset });
            }
        }
        for (version, (commit_time, blocks)) in merge(answers, through) {
            if !self.take_version(cx, epoch, version, commit_time, blocks) {
                return;
            }
        }
    }

    fn take_version(
        &mut self,
        cx: &mut Cx<'_>,
        epoch: Epoch,
        version: Version,
        commit_time: WallTime,
        blocks: Vec<(Offset, AcceptedBlock)>,
    ) -> bool {
        let wrong = blocks.iter().find(|(base, entry)| {
            let here = self.log.index().stream(entry.block.stream);
            here.map_or(Offset::ZERO, |stream| stream.next_offset()) != *base
        });
        if let Some((base, entry)) = wrong {
            let detail = format!(
                "{} at {version} begins with {base} elsewhere, and would not here (I12)",
                entry.block.stream
            );
            cx.halt("forked_history", detail);
            return false;
        }
        let accepted = Accepted {
            epoch,
            previous_version: self.log.last(),
            version,
            commit_time,
            blocks: blocks.into_iter().map(|(_, entry)| entry).collect(),
            bases: Vec::new(),
        };
        let id_body = accepted.body(StreamId::IDS);
        let taken: Vec<_> =
            accepted.blocks.iter().map(|e| (e.block.stream, e.block.record_count)).collect();
        let bases = self.log.accept(accepted);
        assert_eq!(bases.len(), taken.len(), "{version}: each block has an offset");
        let blocks =
            taken.iter().zip(&bases).map(|((stream, count), base)| (*stream, *base, *count));
        cx.note(Note::Copied { epoch, version, blocks: blocks.collect() });
        self.pulls.expect(version, taken.iter().map(|(stream, _)| *stream));
        if let Some(body) = id_body.filter(|_| !cx.planted(Plant::IdsNotCopied)) {
            self.ids.enter(cx, version, commit_time, &body);
        }
        true
    }

    /// This server is whole up to the recovery version: it is recruited.
    fn end_return(&mut self, cx: &mut Cx<'_>) {
        let follower = self.follower.take().expect("it catches up");
        let Aim::Return(plan, askers) = follower.aim else { panic!("it follows the live epoch") };
        assert_eq!(follower.at, plan.recovery_version, "I9: whole up to RV");
        cx.disarm(COPIES);
        self.log.skip_to(plan.recovery_version);
        self.begin_generation(cx, *plan, &askers);
    }

    /// One more asker of a return that goes on.
    pub(super) fn is_returning_to(&mut self, from: Endpoint, epoch: Epoch) -> bool {
        let Some(follower) = &mut self.follower else { return false };
        let Aim::Return(plan, askers) = &mut follower.aim else { return false };
        if plan.epoch != epoch {
            return false;
        }
        if !askers.contains(&from) {
            askers.push(from);
        }
        true
    }

    /// Begins to return to `plan`'s epoch, whose start is persisted.
    pub(super) fn begin_return(&mut self, cx: &Cx<'_>, plan: EpochPlan, askers: Vec<Endpoint>) {
        let at = self.log.last();
        assert!(at <= plan.recovery_version, "I9: {at} is certain, RV {}", plan.recovery_version);
        let aim = Aim::Return(Box::new(plan.clone()), askers);
        self.follower = Some(Follower::new(&plan, cx.me.node, aim, at, self.locked));
    }

    /// Tells an askers' leader that it is recruited.
    pub(super) fn answer_recruits(cx: &mut Cx<'_>, epoch: Epoch, askers: &[Endpoint]) {
        for asker in askers {
            cx.send(*asker, epoch, Recruited { role: Role::LogServer });
        }
    }
}

/// How long copying so much may take.
fn time_for(answers: &[Copied], bytes_per_second: u64) -> Duration {
    let bytes: u64 = answers.iter().map(|copied| copied.payload.len() as u64).sum();
    Duration::from_micros(bytes.saturating_mul(1_000_000) / bytes_per_second.max(1))
}

type Versions = BTreeMap<Version, (WallTime, Vec<(Offset, AcceptedBlock)>)>;

/// The versions up to `through`, with the blocks of all answers, ascending by stream.
fn merge(answers: Vec<Copied>, through: Version) -> Versions {
    let mut versions = Versions::new();
    for copied in answers {
        let bodies = cut(&copied).expect("it was cut when it came");
        let mut blocks = copied.blocks.iter().zip(bodies);
        for version in &copied.versions {
            let own = blocks.by_ref().take(version.block_count as usize);
            let own: Vec<_> = own
                .map(|(block, body)| {
                    let push = PushBlock {
                        stream: block.stream,
                        record_count: block.record_count,
                        bytes: block.bytes,
                        checksum: block.checksum,
                    };
                    (block.base_offset, AcceptedBlock { block: push, body })
                })
                .collect();
            if version.version <= through {
                let entry = versions.entry(version.version);
                entry.or_insert((version.commit_time, Vec::new())).1.extend(own);
            }
        }
    }
    for (_, blocks) in versions.values_mut() {
        blocks.sort_by_key(|(_, entry)| entry.block.stream);
        let streams: BTreeSet<StreamId> = blocks.iter().map(|(_, e)| e.block.stream).collect();
        assert_eq!(streams.len(), blocks.len(), "each stream has one first holder");
    }
    versions
}

/// The bodies of an answer; `None` when it isn't what it claims to be.
fn cut(copied: &Copied) -> Option<Vec<Payload>> {
    let counts: u64 = copied.versions.iter().map(|version| u64::from(version.block_count)).sum();
    let claimed: u64 = copied.blocks.iter().map(|block| u64::from(block.bytes)).sum();
    if counts != copied.blocks.len() as u64 || claimed != copied.payload.len() as u64 {
        return None;
    }
    let mut rest: Bytes = copied.payload.contiguous();
    let mut bodies = Vec::with_capacity(copied.blocks.len());
    for block in &copied.blocks {
        let body = rest.split_to(block.bytes as usize);
        if crc32c::crc32c(&body) != block.checksum || block.record_count == 0 {
            return None;
        }
        bodies.push(Payload::from(body));
    }
    Some(bodies)
}
