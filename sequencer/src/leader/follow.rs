//! Following: who hears a leader leaves the register alone; who hears none for a time takes it over.
//!
//! ```text
//!  Following --no beat for silence + jitter, or HandOver--> Reading -> Claiming -> ...  leads from here,
//!     ^  ^                                                     |          |             Beat every beat_ms
//!     |  `--- the register shows an epoch never heard of ------'          |
//!     `------ a claim or a publication is lost, a newer leader's Beat ----'
//! ```
//!
//! Nothing here is needed for safety: two that lead at once are kept apart by the register's compare-and-set
//! and the locks (I8, I10). It keeps them from fencing each other for ever. A leader whose recovery does not
//! come to an end falls silent after a time, so that one who can reach what it can't gets its turn.

use std::time::Duration;

use common::message::{Beat, HandOver};
use common::{Cx, Endpoint, Epoch, Mark, NodeId, Role};

use super::lock::whoever;
use super::{BEAT, Leader, Phase};

impl Leader {
    /// Whether another node could lead.
    pub(super) const fn has_rivals(&self) -> bool {
        self.topology.candidates.len() > 1
    }

    fn rivals(&self, me: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.topology.candidates.iter().copied().filter(move |node| *node != me)
    }

    /// Somebody else has the register: lets it lead. Alone, tries again.
    pub(super) fn give_way(&mut self, cx: &mut Cx<'_>, cause: &'static str) {
        if self.has_rivals() { self.follow(cx, cause) } else { self.recover(cx, cause) }
    }

    pub(super) fn follow(&mut self, cx: &mut Cx<'_>, cause: &'static str) {
        assert!(self.has_rivals(), "who is alone follows nobody");
        if self.is_leading {
            cx.mark(Mark::LeaderGaveWay);
        }
        self.last_cause = cause;
        (self.is_leading, self.plan) = (false, None);
        self.lives.clear();
        self.changes.clear();
        self.heard_at.clear();
        self.doubted.clear();
        self.gone.clear();
        cx.disarm(BEAT);
        self.enter(cx, Phase::Following);
    }

    /// How long a candidate listens before it takes over. Jitter keeps two from trying at once.
    pub(super) fn patience(&self, cx: &mut Cx<'_>) -> Duration {
        let silence_us = cx.knobs.leader_silence_ms * 1000;
        Duration::from_micros(silence_us + cx.rng.below(silence_us / 2 + 1))
    }

    /// The epoch that this leader knows to be somebody's: what is newer in the register is news.
    pub(super) fn known_epoch(&self) -> Epoch {
        self.epoch.max(self.heard)
    }

    pub(super) fn handle_beat(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch) {
        if epoch < self.known_epoch() || (self.is_leading && epoch == self.epoch) {
            return;
        }
        self.heard = epoch;
        self.yields = 0;
        self.heard_from = Some(from.peer());
        match self.phase {
            // The answer of a claim that is on its way comes to nobody: its epoch is skipped.
            Phase::Idle => {}
            Phase::Following => self.arm_retry(cx),
            _ => self.follow(cx, "newer_leader"),
        }
    }

    /// The leader has been silent for too long.
    pub(super) fn take_over(&mut self, cx: &mut Cx<'_>) {
        let leader = self.heard_from.map(|leader| leader.node);
        self.gone.extend(leader.filter(|node| *node != cx.me.node));
        self.recover(cx, "leader_silent");
    }

    /// The leader stops and says so: no need to wait for its silence.
    pub(super) fn handle_hand_over(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch) {
        if matches!(self.phase, Phase::Following) && epoch >= self.known_epoch() {
            self.heard = epoch;
            self.gone.insert(from.node);
            cx.mark(Mark::LeaderHandedOver);
            self.recover(cx, "handed_over");
        }
    }

    /// Lets another candidate lead, if one is known to live. Called before a stop in good order.
    pub fn hand_over(&mut self, cx: &mut Cx<'_>) {
        let stays = |node: &NodeId| !self.state.membership.is_leaving(*node);
        let can_lead = |node: &NodeId| stays(node) && self.lives.contains_key(node);
        let heir = self.rivals(cx.me.node).find(can_lead);
        if let Some(heir) = heir.filter(|_| matches!(self.phase, Phase::Serving)) {
            cx.send(whoever(heir, Role::Leader), self.epoch, HandOver {});
            self.follow(cx, "handed_over");
        }
    }

    pub(super) fn handle_beat_timer(&mut self, cx: &mut Cx<'_>) {
        if !self.is_leading {
            return;
        }
        let patience = Duration::from_millis(cx.knobs.recovery_patience_ms);
        let is_stuck =
            !matches!(self.phase, Phase::Serving) && cx.now.since(self.recovering_since) > patience;
        if !is_stuck {
            for node in self.rivals(cx.me.node) {
                cx.send(whoever(node, Role::Leader), self.epoch, Beat {});
            }
        }
        cx.arm_after(BEAT, Duration::from_millis(cx.knobs.leader_beat_ms));
    }
}
