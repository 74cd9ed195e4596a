//! While an epoch serves: log servers that it is written without are told to catch up, and taken back.
//!
//! ```text
//!  Serving: tick --CatchUp--> absent log server --CaughtUp, near--> a new epoch that has it return
//! ```
//!
//! Returning costs an epoch, so one whose return failed waits longer each time. A server that returns copies
//! the rest, up to the new RV, while it is being recruited. If it can't, the recovery starts over without it.

use std::collections::BTreeMap;

use common::message::{CatchUp, CaughtUp};
use common::register::Generation;
use common::{Cx, Endpoint, Mark, NodeId, Peer, Role, Time};

use super::lock::whoever;
use super::{Leader, Phase, doubled};

/// After a failed return the next one waits so many times as long as Finding, at first.
const RETURN_FINDINGS: u64 = 4;

/// Log servers on their way back.
#[derive(Clone, Debug, Default)]
pub(super) struct Returns {
    /// Those that the next plan takes back, with the life that has caught up.
    ready: BTreeMap<NodeId, Peer>,
    /// Returns in a row that failed.
    failed: u32,
    /// None before.
    not_before: Time,
}

impl Returns {
    /// Whether the next plan takes a node back.
    pub(super) fn is_ready(&self, node: NodeId) -> bool {
        self.ready.contains_key(&node)
    }

    /// What was ready is planned, or too old.
    pub(super) fn take_ready(&mut self) -> BTreeMap<NodeId, Peer> {
        core::mem::take(&mut self.ready)
    }
}

impl Leader {
    /// Tells the absent log servers to catch up.
    pub(super) fn ask_to_catch_up(&self, cx: &mut Cx<'_>) {
        let Some(plan) = &self.plan else { return };
        assert!(matches!(self.phase, Phase::Serving), "nobody catches up in {}", self.phase.name());
        for node in &plan.absent {
            // Without an entry that has it, nothing is known of what it has.
            let Some((present, absent)) = boundary(&self.state.generations, *node) else {
                continue;
            };
            let catch_up = CatchUp {
                plan: plan.clone(),
                present_in: present.epoch,
                absent_since: absent.first_epoch,
                absent_from: absent.begin,
            };
            cx.send(whoever(*node, Role::LogServer), self.epoch, catch_up);
        }
    }

    pub(super) fn handle_caught_up(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        caught_up: CaughtUp,
    ) {
        let is_absent = self.plan.as_ref().is_some_and(|plan| plan.absent.contains(&from.node));
        let inherits = self.inherits_from(from.node).is_some();
        if !matches!(self.phase, Phase::Serving) || !(is_absent || inherits) || !caught_up.is_near {
            return;
        }
        if cx.now < self.returns.not_before {
            return;
        }
        self.recover(cx, if inherits { "seat_inherited" } else { "log_server_returns" });
        self.returns.ready.insert(from.node, from.peer());
    }

    /// Whether a log server of the plan is on its way back.
    pub(super) fn is_returning(&self, from: Endpoint) -> bool {
        matches!(self.phase, Phase::Recruiting { .. })
            && self.plan.as_ref().is_some_and(|plan| plan.returning.contains(&from.node))
    }

    /// A recovery begins anew: if the plan had somebody return and is not in the register, that failed.
    pub(super) fn note_failed_return_if_unwritten(&mut self, cx: &mut Cx<'_>) {
        let is_written = matches!(self.phase, Phase::Announcing { .. } | Phase::Serving);
        if is_written || self.plan.as_ref().is_none_or(|plan| plan.returning.is_empty()) {
            return;
        }
        self.note_failed_return(cx);
    }

    /// The next return waits longer, so that one that never succeeds does not end epoch after epoch.
    pub(super) fn note_failed_return(&mut self, cx: &mut Cx<'_>) {
        cx.mark(Mark::ReturnFailed);
        let rest = doubled(RETURN_FINDINGS * cx.knobs.finding_ms, self.returns.failed);
        self.returns.failed += 1;
        self.returns.not_before = cx.now.plus(rest);
    }

    /// The generation is in the register.
    pub(super) fn note_returned(&mut self, cx: &mut Cx<'_>) {
        if self.plan.as_ref().is_some_and(|plan| !plan.returning.is_empty()) {
            cx.mark(Mark::LogServerReturned);
            let returned = self.plan.iter().flat_map(|plan| &plan.returning);
            if returned
                .into_iter()
                .any(|node| self.state.membership.seats.seat_of(*node).0 != node.0)
            {
                cx.mark(Mark::SeatInherited);
            }
            self.returns = Returns::default();
        }
    }
}

/// The last generation that has `node`, and the first one after it.
fn boundary(generations: &[Generation], node: NodeId) -> Option<(&Generation, &Generation)> {
    let place = last_with(generations, node)?;
    Some((&generations[place], generations.get(place + 1)?))
}

/// The place of the last generation that has `node`.
pub(super) fn last_with(generations: &[Generation], node: NodeId) -> Option<usize> {
    generations.iter().rposition(|generation| generation.log_servers.contains(&node))
}
