//! From Locking on: a peer of the plan that is gone, or lives anew, ends the epoch.
//!
//! ```text
//!  Serving: tick ----- tick ----- tick       answer of the same life -> silent ticks = 0
//!                  ^ PeerDown: doubted                 of another life -> recover
//!                    tick - tick -- tick ---- tick     SILENT_TICKS_MAX without one -> recover
//! ```
//!
//! A connection can break between two that live on, and what was lost with it is sent again anyway. So it is
//! no reason to end an epoch, or to interrupt a recovery: where connections break faster than a recovery
//! takes, none would ever end. It is a reason to ask at once, and soon again.

use std::collections::BTreeSet;

use common::message::{EpochPlan, FindCluster, Serve};
use common::{Cx, Endpoint, Epoch, Mark, NodeId, Peer, Plant, Role};

use super::lock::whoever;
use super::recruit::all_roles;
use super::{Leader, Phase, doubled};

/// Ticks without an answer after which a peer counts as gone.
pub(super) const SILENT_TICKS_MAX: u32 = 5;
/// A phase that needs answers of roles takes so many times as long as Finding, at first.
const LATE_FINDINGS: u64 = 10;

impl Leader {
    /// Asks every node for a sign of life, and gives up those that have been silent too long.
    pub(super) fn watch(&mut self, cx: &mut Cx<'_>) {
        let only_doubted = !self.doubted.is_empty();
        self.lives.retain(|node, _| {
            // Without a role it can be gone for as long as it likes.
            self.silent_ticks.get(node).is_none_or(|ticks| *ticks <= SILENT_TICKS_MAX)
                || has_role(self.plan.as_ref(), *node)
        });
        for node in self.lives.keys() {
            // While somebody is in doubt ticks are short: too short for the others.
            let counts = !only_doubted || self.doubted.contains(node);
            *self.silent_ticks.entry(*node).or_insert(0) += u32::from(counts);
        }
        self.ask_after_lives(cx);
        self.ask_to_catch_up(cx);
        self.tend_members(cx);
        if !matches!(self.phase, Phase::Serving) {
            return;
        }
        if cx.planted(Plant::DeadRoleIgnored) {
            return;
        }
        let silent = self.silent_ticks.iter().filter(|(_, ticks)| **ticks > SILENT_TICKS_MAX);
        let silent: BTreeSet<NodeId> = silent.map(|(node, _)| *node).collect();
        if silent.iter().any(|node| has_role(self.plan.as_ref(), *node)) {
            self.gone = silent;
            self.recover(cx, "node_silent");
        }
    }

    /// Somebody who was found does not play its part: the next attempt may find that it can do without. Each
    /// attempt gets more time, since a slow one that is needed must get through.
    pub(super) fn start_over_when_late(&mut self, cx: &mut Cx<'_>) {
        let patience = doubled(LATE_FINDINGS * cx.knobs.finding_ms, self.late_count);
        if cx.now.since(self.since) < patience {
            return;
        }
        match self.phase {
            Phase::Recruiting { .. } | Phase::Proving => {
                self.late_count += 1;
                cx.mark(Mark::RecoveryLate);
                self.recover(cx, "phase_late");
            }
            // The generation is in the register; whoever hears of it later is told when it answers.
            Phase::Announcing { .. } => self.begin_to_watch(cx),
            _ => {}
        }
    }

    /// Asks every node for a sign of life. A node that ended between its answer to Finding and the end of
    /// that phase hears nothing that is meant for the life that is gone: only its new life's answer tells.
    pub(super) fn ask_after_lives(&self, cx: &mut Cx<'_>) {
        let mut nodes: BTreeSet<NodeId> = self.lives.keys().copied().collect();
        if matches!(self.phase, Phase::Serving) {
            nodes.extend(self.topology.nodes());
        }
        for node in nodes {
            let find = FindCluster { request: self.request };
            cx.send(whoever(node, Role::Node), self.epoch, find);
        }
    }

    /// An answer to a watch question, or to a question of Finding, by a node that names `epoch` to clients.
    pub(super) fn note_alive(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch) {
        self.silent_ticks.insert(from.node, 0);
        self.heard_at.insert(from.node, cx.now);
        let known = self.lives.get(&from.node).copied();
        if self.doubted.remove(&from.node) && known == Some(from.peer()) {
            cx.mark(Mark::PeerLivesOn);
        }
        let is_ignored = cx.planted(Plant::DeadRoleIgnored);
        let is_new = known.is_some_and(|peer| peer != from.peer());
        let is_needed = has_role(self.plan.as_ref(), from.node);
        if self.is_past_finding() && is_new && is_needed && !is_ignored {
            return self.recover(cx, "node_restarted");
        }
        // One that came late, or anew and had no role, serves by naming those that have one.
        if let (Phase::Serving, Some(plan)) = (&self.phase, &self.plan)
            && epoch < self.epoch
            && !is_ignored
        {
            self.lives.insert(from.node, from.peer());
            cx.send(from, self.epoch, Serve { plan: plan.clone() });
        }
    }

    pub(super) fn handle_peer_down(&mut self, cx: &mut Cx<'_>, peer: Peer) {
        let is_ignored = cx.planted(Plant::DeadRoleIgnored);
        if !self.is_past_finding() || self.lives.get(&peer.node) != Some(&peer) || is_ignored {
            return;
        }
        self.doubted.insert(peer.node);
        self.ask_after_lives(cx);
        if matches!(self.phase, Phase::Serving) {
            self.pacing.reset();
            self.arm_retry(cx);
        }
    }

    pub(super) const fn is_past_finding(&self) -> bool {
        !matches!(
            self.phase,
            Phase::Idle
                | Phase::Following
                | Phase::Reading { .. }
                | Phase::Claiming { .. }
                | Phase::Finding { .. }
        )
    }
}

/// Whether the epoch can't do without the node. Before there is a plan, it may be any.
fn has_role(plan: Option<&EpochPlan>, node: NodeId) -> bool {
    plan.is_none_or(|plan| {
        plan.leader.node == node || all_roles(plan).iter().any(|role| role.node == node)
    })
}
