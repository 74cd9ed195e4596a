//! From Locking on: a peer of the plan that is gone, or lives anew, ends the epoch.

use common::message::FindCluster;
use common::{Cx, Endpoint, Peer, Plant, Role};

use super::lock::whoever;
use super::{Leader, Phase};

/// Ticks of the retry interval without an answer after which a peer counts as gone.
const SILENT_TICKS_MAX: u32 = 5;

impl Leader {
    /// Asks every node for a sign of life, and gives up those that have been silent too long.
    pub(super) fn watch(&mut self, cx: &mut Cx<'_>) {
        for node in self.lives.keys() {
            *self.silent_ticks.entry(*node).or_insert(0) += 1;
        }
        self.ask_after_lives(cx);
        if cx.planted(Plant::DeadRoleIgnored) {
            return;
        }
        if self.silent_ticks.values().any(|ticks| *ticks > SILENT_TICKS_MAX) {
            self.recover(cx, "node_silent");
        }
    }

    /// Asks every node for a sign of life. A node that ended between its answer to Finding and the end of
    /// that phase hears nothing that is meant for the life that is gone: only its new life's answer tells.
    pub(super) fn ask_after_lives(&self, cx: &mut Cx<'_>) {
        for node in self.lives.keys() {
            let find = FindCluster { request: self.request };
            cx.send(whoever(*node, Role::Node), self.epoch, find);
        }
    }

    /// An answer to a watch question, or to a question of Finding.
    pub(super) fn note_alive(&mut self, cx: &mut Cx<'_>, from: Endpoint) {
        self.silent_ticks.insert(from.node, 0);
        let known = self.lives.get(&from.node).copied();
        let is_ignored = cx.planted(Plant::DeadRoleIgnored);
        if self.is_past_finding() && known.is_some_and(|peer| peer != from.peer()) && !is_ignored {
            self.recover(cx, "node_restarted");
        }
    }

    pub(super) fn handle_peer_down(&mut self, cx: &mut Cx<'_>, peer: Peer) {
        let is_ignored = cx.planted(Plant::DeadRoleIgnored);
        if self.is_past_finding() && self.lives.get(&peer.node) == Some(&peer) && !is_ignored {
            self.recover(cx, "node_down");
        }
    }

    pub(super) const fn is_past_finding(&self) -> bool {
        !matches!(
            self.phase,
            Phase::Idle | Phase::Reading { .. } | Phase::Claiming { .. } | Phase::Finding { .. }
        )
    }
}
