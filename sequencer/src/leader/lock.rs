//! Finding and Locking: who lives, and how far the old log reaches.

use core::time::Duration;

use common::message::{ClusterView, FindCluster, Lock, Locked};
use common::{
    Cx, Endpoint, FENCE_JUMP_VERSIONS, Gather, Gathered, Mark, NodeId, Plant, Role, Time,
};

use super::{Leader, Phase, recovery_version};
use common::Version;

impl Leader {
    /// Asks every node of the topology and of the old generation for its present life.
    pub(super) fn find_nodes(&mut self, cx: &mut Cx<'_>) {
        self.lives.clear();
        self.doubted.clear();
        // Removed ones are asked, for one that lives keeps its seat until its heir is ready; nobody waits for
        // them.
        let removed = self.state.membership.removed.iter().copied();
        self.gone.extend(removed.filter(|node| !self.returns.is_ready(*node)));
        let mut nodes = self.topology.nodes();
        nodes.extend(self.old_log_servers());
        let count = nodes.iter().collect::<std::collections::BTreeSet<_>>().len();
        self.enter(cx, Phase::Finding { lives: Gather::new(nodes, count) });
        self.ask_for_signs_of_life(cx);
    }

    /// The log servers that the last generation was written to.
    pub(super) fn old_log_servers(&self) -> Vec<NodeId> {
        self.state.generations.last().map(|last| last.log_servers.clone()).unwrap_or_default()
    }

    /// What the silent ones of the old log servers may do to the recovery (I9).
    fn judge_silence(&self, cx: &Cx<'_>, silent: impl Iterator<Item = NodeId>) -> Silence {
        let Some(last) = self.state.generations.last() else {
            // The very first epoch needs all that there will be.
            let mut silent = silent.filter(|node| self.topology.log_servers.contains(node));
            return if silent.next().is_none() { Silence::Bearable } else { Silence::Fatal };
        };
        let silent_count = silent.filter(|node| last.log_servers.contains(node)).count();
        let mut bearable_count = last.spare_copies();
        if cx.planted(Plant::TooFewLocked) {
            bearable_count += 1;
        }
        if cx.planted(Plant::AbsentNotCounted) {
            bearable_count += last.absent.len();
        }
        if silent_count <= bearable_count { Silence::Bearable } else { Silence::Fatal }
    }

    /// From when on the phase may do without those that are silent.
    pub(super) fn late_at(&self, cx: &Cx<'_>) -> Time {
        self.since.plus(Duration::from_millis(cx.knobs.finding_ms))
    }

    pub(super) fn is_late(&self, cx: &Cx<'_>) -> bool {
        cx.now >= self.late_at(cx)
    }

    /// Whether those that are not waited for, because they are gone, are all that is missing.
    fn lacks_only_gone(&self, cx: &Cx<'_>, lives: &Gather<NodeId, Endpoint>) -> bool {
        lives.answered_count() > 0
            && lives.silent().all(|node| self.gone.contains(&node))
            && self.judge_silence(cx, lives.silent()) == Silence::Bearable
    }

    pub(super) fn ask_for_signs_of_life(&mut self, cx: &mut Cx<'_>) {
        let Phase::Finding { lives } = &self.phase else { return };
        let request = self.request;
        for node in lives.silent() {
            cx.send(whoever(node, Role::Node), self.epoch, FindCluster { request });
        }
    }

    pub(super) fn handle_sign_of_life(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        view: &ClusterView,
    ) {
        self.note_alive(cx, from, view.epoch);
        let Phase::Finding { lives } = &mut self.phase else { return };
        if lives.answer(from.node, from) == Gathered::Enough {
            return self.lock_logs(cx);
        }
        let Phase::Finding { lives } = &self.phase else { return };
        if self.lacks_only_gone(cx, lives) {
            cx.mark(Mark::RecoveredWithoutNode);
            self.lock_logs(cx);
        }
    }

    /// After a while a recovery goes on without those that only lead, resolve or commit: others can do that.
    /// Of the old log servers it can do without as many as can't hold all copies of anything.
    pub(super) fn find_no_longer(&mut self, cx: &mut Cx<'_>) {
        let Phase::Finding { lives } = &self.phase else { return };
        let is_heard = lives.answered_count() > 0;
        if self.is_late(cx)
            && is_heard
            && self.judge_silence(cx, lives.silent()) == Silence::Bearable
        {
            cx.mark(Mark::RecoveredWithoutNode);
            self.lock_logs(cx);
        }
    }

    /// The same for those that were found and don't answer the lock.
    pub(super) fn lock_no_longer(&mut self, cx: &mut Cx<'_>) {
        let Phase::Locking { locks } = &self.phase else { return };
        let old = self.old_log_servers();
        let has_answered = |node: &NodeId| locks.answered().any(|(answered, _)| answered == *node);
        let silent = old.into_iter().filter(|node| !has_answered(node));
        let is_heard = locks.answered_count() > 0;
        if self.is_late(cx) && is_heard && self.judge_silence(cx, silent) == Silence::Bearable {
            self.end_lock(cx);
        }
    }

    fn lock_logs(&mut self, cx: &mut Cx<'_>) {
        let Phase::Finding { lives } = &self.phase else {
            panic!("logs are locked once nodes were found, not in {}", self.phase.name())
        };
        self.lives = lives.answered().map(|(node, life)| (node, life.peer())).collect();
        assert!(!self.lives.is_empty(), "somebody was found");
        self.gone.clear();
        let old = self.old_log_servers();
        if old.is_empty() {
            // The very first epoch: there is nothing to survive, and everybody is whole.
            let whole = self.topology.log_servers.clone();
            return self.recruit(cx, Version::ZERO, whole);
        }
        let servers: Vec<NodeId> =
            old.into_iter().filter(|node| self.lives.contains_key(node)).collect();
        let count = servers.len();
        self.enter(cx, Phase::Locking { locks: Gather::new(servers, count) });
        self.ask_for_locks(cx);
    }

    pub(super) fn ask_for_locks(&mut self, cx: &mut Cx<'_>) {
        let Phase::Locking { locks } = &self.phase else { return };
        let last = self.state.generations.last().expect("a generation is locked");
        let generation = last.epoch;
        for node in locks.silent() {
            cx.send(self.life(node, Role::LogServer), self.epoch, Lock { generation });
        }
    }

    pub(super) fn handle_locked(&mut self, cx: &mut Cx<'_>, from: Endpoint, locked: Locked) {
        let Phase::Locking { locks } = &mut self.phase else { return };
        assert!(
            locked.known_committed <= locked.durable,
            "{from:?} knows {} committed but has {}",
            locked.known_committed,
            locked.durable
        );
        // The generation was published after its first version was durable on every one of its log servers.
        let first_version = self
            .state
            .generations
            .last()
            .map_or(Version::ZERO, |last| last.begin.plus(FENCE_JUMP_VERSIONS));
        if locked.durable < first_version {
            let detail = format!(
                "the log of {} ends at {}, but had {first_version}: it is another disk, or was emptied",
                from.node, locked.durable
            );
            return cx.halt("log_lost", detail);
        }
        if locks.answer(from.node, locked) == Gathered::Enough {
            self.end_lock(cx);
        }
    }

    /// Enough are locked: fixes RV. Those that have not answered are not whole from here on.
    fn end_lock(&mut self, cx: &mut Cx<'_>) {
        let Phase::Locking { locks } = &self.phase else {
            panic!("RV follows the locks, not {}", self.phase.name())
        };
        let mut version = recovery_version(locks.answered().map(|(_, locked)| locked));
        let committed = locks.answered().map(|(_, locked)| locked.known_committed).max();
        if committed.is_some_and(|committed| committed > version) {
            let detail = format!(
                "{committed:?} was committed, durable on all, and a log ends at {version}: {:?}",
                locks.answered().collect::<Vec<_>>()
            );
            return cx.halt("log_lost", detail);
        }
        if cx.planted(Plant::LeastKnown) {
            let known = locks.answered().map(|(_, locked)| locked.known_committed);
            version = known.min().unwrap_or(version);
        }
        if cx.planted(Plant::LongestLog) {
            let ends = locks.answered().map(|(_, locked)| locked.durable);
            version = ends.max().unwrap_or(version);
        }
        let whole = locks.answered().map(|(node, _)| node).collect();
        self.recruit(cx, version, whole);
    }

    /// A role on the present life of a node.
    pub(super) fn life(&self, node: NodeId, role: Role) -> Endpoint {
        self.lives.get(&node).map_or_else(|| whoever(node, role), |peer| peer.endpoint(role))
    }
}

/// Whether a recovery can do without those that don't answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
enum Silence {
    /// What answered holds a copy of everything, and no acknowledgement was possible without it.
    Bearable,
    /// The silent may hold all copies of something.
    Fatal,
}

/// A role on whichever life of a node is there.
pub(super) const fn whoever(node: NodeId, role: Role) -> Endpoint {
    Endpoint { node, incarnation: common::Incarnation::ZERO, role }
}
