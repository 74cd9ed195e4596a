//! Recruiting: the plan of the new epoch, and its roles.

use common::membership::Seats;
use common::message::{EpochPlan, Recruit, ResolverShare};
use common::{
    Cx, Endpoint, FENCE_JUMP_VERSIONS, Gather, Gathered, Mark, NodeId, Note, Plant, Role, Version,
};

use super::{Leader, Phase};

impl Leader {
    /// Plans the epoch on `whole`, the log servers that have everything up to `recovery_version`.
    pub(super) fn recruit(
        &mut self,
        cx: &mut Cx<'_>,
        recovery_version: Version,
        whole: Vec<NodeId>,
    ) {
        let last_begin = self.state.generations.last().map_or(Version::ZERO, |last| last.begin);
        assert!(
            recovery_version >= last_begin,
            "I9: RV {recovery_version} is below the generation's begin {last_begin}"
        );
        let ready = self.returns.take_ready();
        let is_expected = !ready.is_empty();
        let is_there = |(node, peer): &(NodeId, common::Peer)| self.lives.get(node) == Some(peer);
        let returning: Vec<NodeId> =
            ready.into_iter().filter(is_there).map(|(node, _)| node).collect();
        let mut plan = self.plan_epoch(cx.me, recovery_version, &whole, returning);
        if is_expected && plan.returning.is_empty() {
            self.note_failed_return(cx);
        }
        if cx.planted(Plant::SeatByNumber) {
            plan.seats = Seats::new();
        }
        if !plan.absent.is_empty() {
            cx.mark(Mark::RecoveredWithoutLog);
        }
        plan.check();
        cx.note(Note::RecoveryVersion {
            epoch: plan.epoch,
            recovery_version,
            first_version: plan.first_version,
        });
        let roles = all_roles(&plan);
        let count = roles.len();
        self.plan = Some(plan);
        self.enter(cx, Phase::Recruiting { roles: Gather::new(roles, count) });
        self.ask_for_roles(cx);
    }

    fn plan_epoch(
        &self,
        leader: Endpoint,
        recovery_version: Version,
        whole: &[NodeId],
        returning: Vec<NodeId>,
    ) -> EpochPlan {
        let topology = &self.topology;
        let index = |place: usize| u8::try_from(place).expect("at most 256 of a role");
        // Whoever is not there, or leaves, is stood in for by somebody who is there and stays.
        let stays = |node: &NodeId| !self.state.membership.is_leaving(*node);
        let staying: Vec<NodeId> = self.lives.keys().copied().filter(stays).collect();
        let all = self.lives.keys().copied().collect();
        let able = if staying.is_empty() { all } else { staying };
        let alive = |place: usize, node: NodeId| {
            if able.contains(&node) { node } else { able[place % able.len()] }
        };
        // Shares stay where they were: what the register says of log servers is older than any configuration.
        let (placed, replication) = match self.state.generations.last() {
            Some(last) => ([&last.log_servers[..], &last.absent].concat(), last.replication),
            None => (topology.log_servers.clone(), topology.replication),
        };
        let (mut placed, returning) = self.seat_heirs(&placed, replication, whole, returning);
        placed.sort_by_key(|node| topology.log_servers.iter().position(|other| other == node));
        let is_present = |node: &NodeId| whole.contains(node) || returning.contains(node);
        let seats = self.state.membership.seats.among(&placed);
        let proxies = topology.proxies.iter().enumerate();
        let resolvers = topology.resolvers.iter().enumerate();
        EpochPlan {
            epoch: self.epoch,
            recovery_version,
            first_version: recovery_version.plus(FENCE_JUMP_VERSIONS),
            leader,
            sequencer: leader.with_role(Role::Sequencer),
            proxies: proxies
                .map(|(i, node)| self.life(alive(i, *node), Role::Proxy(index(i))))
                .collect(),
            resolvers: resolvers
                .map(|(i, (node, begin))| ResolverShare {
                    resolver: self.life(alive(i, *node), Role::Resolver(index(i))),
                    begin: begin.clone(),
                })
                .collect(),
            log_servers: placed
                .iter()
                .filter(|node| is_present(node))
                .map(|node| self.life(*node, Role::LogServer))
                .collect(),
            absent: placed.iter().filter(|node| !is_present(node)).copied().collect(),
            returning,
            replication,
            seats,
        }
    }

    pub(super) fn ask_for_roles(&mut self, cx: &mut Cx<'_>) {
        let (Phase::Recruiting { roles }, Some(plan)) = (&self.phase, &self.plan) else { return };
        for endpoint in roles.silent() {
            let recruit = Recruit { role: endpoint.role, plan: plan.clone() };
            cx.send(endpoint.with_role(Role::Node), self.epoch, recruit);
        }
    }

    pub(super) fn handle_recruited(&mut self, cx: &mut Cx<'_>, from: Endpoint, role: Role) {
        let Phase::Recruiting { roles } = &mut self.phase else { return };
        if roles.answer(from.with_role(role), ()) == Gathered::Enough {
            if cx.planted(Plant::PublishUnproven) {
                return self.publish(cx);
            }
            self.prove(cx);
        }
    }
}

/// Everybody who plays a role, one for each role.
pub(super) fn all_roles(plan: &EpochPlan) -> Vec<Endpoint> {
    let resolvers = plan.resolvers.iter().map(|share| share.resolver);
    let rest = plan.proxies.iter().chain(&plan.log_servers).copied();
    [plan.sequencer].into_iter().chain(resolvers).chain(rest).collect()
}
