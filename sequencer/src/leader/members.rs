//! Members: nodes that are drained or removed, and seats of the log that pass to an heir.
//!
//! ```text
//!  operator --ChangeMember--> Serving --changes--> recover: the claim's CAS holds what was decided
//!  absent for replace_after_ms ---'                   |
//!                                                     v
//!  Serving: tick --CatchUp, planned as if the heir were the absent one--> heir
//!                <--CaughtUp, near-- recover: the heir returns, in the seat of the one before
//! ```
//!
//! The one before keeps its seat, and if it lives its part in the log, until its heir has everything: copies
//! are never fewer than without the change. One that was absent may even return before that. A seat whose log
//! server holds the only copies can't pass on.
//!
//! # Invariants
//! - I9: an heir counts as a copy only from the epoch on that it was recruited for as one that returns.
//! - What is decided is in the register before it is answered, and before an heir copies anything: so two
//!   leaders never name different heirs, and a node copies for one seat only.

use core::time::Duration;

use common::membership::{MemberChange, Membership};
use common::message::{CatchUp, ChangeMember, EpochPlan, HandOver, MemberChanged, Refused};
use common::{Code, Cx, Endpoint, Epoch, Mark, NodeId, Refusal, Role, Time, Version};

use super::lock::whoever;
use super::{Leader, Phase};

/// Decisions that one recovery writes, at most.
const CHANGES_MAX: usize = 16;
/// A candidate that is drained lets others lead so many silences long, and then leads for want of a better.
const YIELDS_MAX: u32 = 4;

/// What the next claim writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    Member(NodeId, MemberChange),
    Heir { of: NodeId, heir: NodeId },
}

/// What is to be done about a request.
enum Judgement {
    Decided,
    New,
    No(Code, String),
}

impl Leader {
    pub(super) fn handle_change_member(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        asked: ChangeMember,
    ) {
        let ChangeMember { request, node, change } = asked;
        let refusal = match self.judge(node, change) {
            Judgement::Decided => {
                // The register holds it: that is where `state` comes from.
                return cx.send(from, epoch, MemberChanged { request });
            }
            Judgement::No(code, detail) => Refusal::new(code, detail),
            Judgement::New => {
                self.changes.push(Change::Member(node, change));
                let cause = match change {
                    MemberChange::Drain => "node_drained",
                    MemberChange::Restore => "node_restored",
                    MemberChange::Remove => "node_removed",
                };
                self.recover(cx, cause);
                let detail = format!("{node} is about to be {}", cause.trim_start_matches("node_"));
                Refusal::new(Code::Recovering, detail)
            }
        };
        cx.send(from, epoch, Refused { request, refusal });
    }

    fn judge(&self, node: NodeId, change: MemberChange) -> Judgement {
        let membership = &self.state.membership;
        if !self.is_leading && self.has_rivals() {
            let leader = self.heard_from.map(|leader| leader.node.to_string());
            let detail =
                format!("the leader is {}", leader.unwrap_or_else(|| "unknown".to_owned()));
            return Judgement::No(Code::NotHere, detail);
        }
        if !matches!(self.phase, Phase::Serving) {
            return Judgement::No(Code::Recovering, self.phase().to_owned());
        }
        if !self.topology.nodes().contains(&node) && !self.placed().contains(&node) {
            return Judgement::No(Code::UnknownNode, format!("{node} is not in the definition"));
        }
        if membership.is_decided(node, change) {
            return Judgement::Decided;
        }
        if membership.removed.contains(&node) {
            return Judgement::No(Code::NodeRemoved, format!("{node} was removed"));
        }
        if change == MemberChange::Restore {
            return Judgement::New;
        }
        self.judge_leaving(node)
    }

    /// Whether the cluster can do without a node.
    fn judge_leaving(&self, node: NodeId) -> Judgement {
        let membership = &self.state.membership;
        let stays = |other: &NodeId| *other != node && !membership.is_leaving(*other);
        let replication = self.state.generations.last().map_or(1, |last| last.replication);
        if membership.is_full() {
            return Judgement::No(Code::LimitExceeded, "the register is full of nodes".to_owned());
        }
        let can_lead = |other: &NodeId| stays(other) && self.lives.contains_key(other);
        if !self.topology.candidates.iter().any(can_lead) {
            let detail = format!("nobody who lives could lead without {node}");
            return Judgement::No(Code::NodeNeeded, detail);
        }
        if replication < 2 && self.placed().contains(&node) {
            let detail =
                format!("{node} holds the only copy of its share: there is 1 copy of each");
            return Judgement::No(Code::NodeNeeded, detail);
        }
        Judgement::New
    }

    /// Those that sit in a seat, present or absent.
    fn placed(&self) -> Vec<NodeId> {
        let last = self.state.generations.last();
        last.map_or_else(Vec::new, |last| [&last.log_servers[..], &last.absent].concat())
    }

    /// What the claim writes: what was decided, as far as it still can be.
    pub(super) fn membership_to_claim(&self) -> Membership {
        let mut membership = self.state.membership.clone();
        let placed = self.placed();
        for change in &self.changes {
            match *change {
                _ if membership.is_full() => {}
                Change::Member(node, change) => membership.decide(node, change),
                Change::Heir { of, heir } => {
                    let is_free = !membership.seats.has_moved(heir) && !placed.contains(&heir);
                    if is_free && !membership.is_leaving(heir) && placed.contains(&of) {
                        membership.give_seat(of, heir);
                    }
                }
            }
        }
        membership.check().expect("decisions keep the order");
        membership
    }

    /// Whether this node leaves the register to others, being on its way out. A removed one never leads.
    pub(super) fn should_yield(&mut self, me: NodeId) -> bool {
        let membership = &self.state.membership;
        if !self.has_rivals() || !membership.is_leaving(me) {
            return false;
        }
        self.yields += 1;
        membership.removed.contains(&me) || self.yields <= YIELDS_MAX
    }

    /// While the epoch serves: names heirs, has them copy, and makes another one lead if this node leaves.
    pub(super) fn tend_members(&mut self, cx: &mut Cx<'_>) {
        assert!(matches!(self.phase, Phase::Serving), "members wait in {}", self.phase.name());
        self.name_heirs(cx);
        if !self.changes.is_empty() {
            return self.recover(cx, "seat_given");
        }
        self.ask_heirs_to_catch_up(cx);
        let membership = &self.state.membership;
        let can_lead =
            |node: &NodeId| self.lives.contains_key(node) && !membership.is_leaving(*node);
        let heir = self.topology.candidates.iter().copied().find(can_lead);
        if let Some(heir) = heir.filter(|_| membership.is_leaving(cx.me.node)) {
            cx.send(whoever(heir, Role::Leader), self.epoch, HandOver {});
            self.follow(cx, "leader_leaves");
        }
    }

    /// When a node was last heard of.
    fn silence(&self, now: Time, node: NodeId) -> Duration {
        now.since(self.heard_at.get(&node).copied().unwrap_or(self.since))
    }

    fn is_overdue(&self, cx: &Cx<'_>, node: NodeId) -> bool {
        let limit_ms = cx.knobs.replace_after_ms;
        limit_ms > 0 && self.silence(cx.now, node) > Duration::from_millis(limit_ms)
    }

    /// Seats that pass on: their log server is leaving, or was silent for too long, or has an heir already.
    fn passing_seats(&self, cx: &Cx<'_>) -> Vec<NodeId> {
        let Some(plan) = &self.plan else { return Vec::new() };
        let membership = &self.state.membership;
        let passes = |node: &NodeId| {
            membership.is_leaving(*node)
                || membership.seats.heir(*node).is_some()
                || (plan.absent.contains(node) && self.is_overdue(cx, *node))
        };
        // With one copy there is nobody to copy from.
        self.placed().into_iter().filter(|node| plan.replication > 1 && passes(node)).collect()
    }

    fn name_heirs(&mut self, cx: &mut Cx<'_>) {
        for of in self.passing_seats(cx) {
            let heir = self.state.membership.seats.heir(of);
            let is_lost = heir.is_some_and(|heir| {
                self.state.membership.is_leaving(heir) || self.is_overdue(cx, heir)
            });
            if (heir.is_some() && !is_lost) || self.changes.len() >= CHANGES_MAX {
                continue;
            }
            if let Some(heir) = self.spare() {
                if is_lost {
                    cx.mark(Mark::HeirReplaced);
                }
                if !self.state.membership.is_leaving(of) {
                    cx.mark(Mark::SeatOverdue);
                }
                self.changes.push(Change::Heir { of, heir });
            }
        }
    }

    /// A node that lives and never sat; one whose failure domain no log server shares, if there is one.
    fn spare(&self) -> Option<NodeId> {
        let membership = &self.state.membership;
        let placed = self.placed();
        if membership.is_full() {
            return None;
        }
        let is_named = |node: NodeId| {
            self.changes.iter().any(|c| matches!(c, Change::Heir { heir, .. } if *heir == node))
        };
        let is_free = |node: &NodeId| {
            let is_alive = self.lives.contains_key(node)
                && self.silent_ticks.get(node).is_some_and(|ticks| *ticks <= 1);
            let has_sat = placed.contains(node) || membership.seats.has_moved(*node);
            is_alive && !has_sat && !membership.is_leaving(*node) && !is_named(*node)
        };
        let free: Vec<NodeId> = self.topology.nodes().into_iter().filter(is_free).collect();
        let domain = |node: &NodeId| self.topology.domains.get(node);
        let is_apart = |node: &&NodeId| {
            domain(node).is_some() && !placed.iter().any(|other| domain(other) == domain(node))
        };
        free.iter().find(is_apart).or(free.first()).copied()
    }

    fn ask_heirs_to_catch_up(&self, cx: &mut Cx<'_>) {
        for of in self.passing_seats(cx) {
            let Some(heir) = self.state.membership.seats.heir(of) else { continue };
            if let Some(plan) = self.plan_with_heir(of) {
                let catch_up = CatchUp {
                    plan,
                    present_in: Epoch::ZERO,
                    absent_since: Epoch(1),
                    absent_from: Version::ZERO,
                };
                cx.send(whoever(heir, Role::LogServer), self.epoch, catch_up);
            }
        }
    }

    /// The plan as if the heir of `of` sat there and were absent; `None` while too many copies are missing.
    fn plan_with_heir(&self, of: NodeId) -> Option<EpochPlan> {
        let seats = &self.state.membership.seats;
        let mut plan = self.plan.clone()?;
        // The epoch serves, so they are whole.
        plan.returning.clear();
        for absent in &mut plan.absent {
            *absent = seats.heir(*absent).unwrap_or(*absent);
        }
        if let Some(place) = plan.log_servers.iter().position(|server| server.node == of) {
            plan.log_servers.remove(place);
            plan.absent.extend(seats.heir(of));
        }
        let present = plan.log_servers.iter().map(|server| server.node);
        plan.seats = seats.among(&present.chain(plan.absent.iter().copied()).collect::<Vec<_>>());
        let can_copy = plan.absent.len() < usize::from(plan.replication);
        can_copy.then_some(plan)
    }

    /// Who gives its seat to `node`.
    pub(super) fn inherits_from(&self, node: NodeId) -> Option<NodeId> {
        self.placed().into_iter().find(|of| self.state.membership.seats.heir(*of) == Some(node))
    }

    /// Those that sit in the seats of the next generation, in the order of placement: heirs that are ready
    /// sit down. Those that are ready and may return with it.
    pub(super) fn seat_heirs(
        &self,
        placed: &[NodeId],
        replication: u8,
        whole: &[NodeId],
        ready: Vec<NodeId>,
    ) -> (Vec<NodeId>, Vec<NodeId>) {
        let seat = |ready: &[NodeId]| -> Vec<NodeId> {
            let heir = |node: NodeId| self.state.membership.seats.heir(node);
            let sits =
                |node: NodeId| heir(node).filter(|heir| ready.contains(heir)).unwrap_or(node);
            placed.iter().map(|node| sits(*node)).collect()
        };
        let seated = seat(&ready);
        // One that is back just as its heir is ready has lost its seat.
        let is_seated = |node: &NodeId| seated.contains(node);
        let ready: Vec<NodeId> = ready.into_iter().filter(is_seated).collect();
        let incomplete = seated.iter().filter(|node| !whole.contains(node)).count();
        if incomplete < usize::from(replication) {
            return (seated, ready);
        }
        // Somebody else is missing: an heir of one that is whole would be one copy too few (I9).
        let is_needed =
            |node: &NodeId| self.inherits_from(*node).is_none_or(|before| !whole.contains(&before));
        let ready: Vec<NodeId> = ready.into_iter().filter(is_needed).collect();
        (seat(&ready), ready)
    }

    /// Why seats that should pass on don't, for `status`.
    pub(super) fn seats_waiting(&self) -> Vec<String> {
        let membership = &self.state.membership;
        let is_passing =
            |node: &NodeId| membership.is_leaving(*node) || membership.seats.heir(*node).is_some();
        let waits = |of: NodeId| match membership.seats.heir(of) {
            None => format!("the seat of {of} waits for a spare node that lives"),
            Some(heir) if self.plan_with_heir(of).is_none() => {
                format!("{heir} waits to copy the share of {of}: too many copies are missing")
            }
            Some(heir) => format!("{heir} copies the share of {of}"),
        };
        self.placed().into_iter().filter(is_passing).map(waits).collect()
    }
}
