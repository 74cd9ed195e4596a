//! Proving and Announcing: the recovery transaction through the normal path, then the nodes may serve.

use common::message::{CommitKind, CommitOutcome, CommitReply, CommitRequest, Serve};
use common::{Cx, Endpoint, Gather, Gathered, Note, Plant, Role};

use super::{Leader, Phase};

impl Leader {
    pub(super) fn prove(&mut self, cx: &mut Cx<'_>) {
        self.request = self.request.plus(1);
        self.enter(cx, Phase::Proving);
        self.ask_for_proof(cx);
    }

    pub(super) fn ask_for_proof(&mut self, cx: &mut Cx<'_>) {
        let plan = self.plan.as_ref().expect("proving follows a plan");
        let request = CommitRequest {
            read_version: plan.recovery_version,
            ..CommitRequest::empty(CommitKind::Recovery, self.request)
        };
        cx.send(plan.proxies[0], self.epoch, request);
    }

    pub(super) fn handle_proof(&mut self, cx: &mut Cx<'_>, reply: CommitReply) {
        if !matches!(self.phase, Phase::Proving) || reply.request != self.request {
            return;
        }
        let first_version = self.plan.as_ref().expect("proving follows a plan").first_version;
        match reply.outcome {
            CommitOutcome::Committed { position, .. } => {
                assert!(
                    position.version >= first_version,
                    "the epoch began at {}, below its first version {first_version}",
                    position.version
                );
                if cx.planted(Plant::ServeUnwritten) {
                    return self.announce(cx);
                }
                self.publish(cx);
            }
            outcome => {
                let detail = format!("the recovery transaction: {outcome:?}");
                cx.note(Note::Warning { code: "recovery_refused", detail });
                self.recover(cx, "recovery_refused");
            }
        }
    }

    /// The generation is in the register: from here on clients may know of it (I10).
    pub(super) fn announce(&mut self, cx: &mut Cx<'_>) {
        let nodes: Vec<_> = self.lives.keys().copied().collect();
        let count = nodes.len();
        self.enter(cx, Phase::Announcing { nodes: Gather::new(nodes, count) });
        self.ask_to_serve(cx);
    }

    pub(super) fn ask_to_serve(&mut self, cx: &mut Cx<'_>) {
        let (Phase::Announcing { nodes }, Some(plan)) = (&self.phase, &self.plan) else { return };
        for node in nodes.silent() {
            cx.send(self.life(node, Role::Node), self.epoch, Serve { plan: plan.clone() });
        }
    }

    pub(super) fn handle_serving(&mut self, cx: &mut Cx<'_>, from: Endpoint) {
        let Phase::Announcing { nodes } = &mut self.phase else { return };
        if nodes.answer(from.node, ()) == Gathered::Enough {
            self.begin_to_watch(cx);
        }
    }

    pub(super) fn begin_to_watch(&mut self, cx: &mut Cx<'_>) {
        self.silent_ticks.clear();
        self.late_count = 0;
        self.enter(cx, Phase::Serving);
    }
}
