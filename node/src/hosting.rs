//! Hosting: roles begin when the leader recruits them, and end with their epoch.

use std::collections::BTreeMap;

use common::membership::Seats;
use common::message::{
    ClusterView, EpochPlan, FindCluster, Message, Recruit, Recruited, Serve, Serving, StatusReply,
};
use common::{Code, Endpoint, Epoch, Event, Note, RequestId, Role, Version};
use proxy::Proxy;
use resolver::role::Resolver;
use sequencer::leader::Leader;
use sequencer::versions::Sequencer;

use crate::routing::role_cx;
use crate::{Hosted, Node, Surroundings};

impl Node {
    pub(crate) fn handle_node_message(
        &mut self,
        s: &mut Surroundings<'_>,
        from: Endpoint,
        epoch: Epoch,
        message: Message,
    ) {
        match message {
            Message::FindCluster(find) => self.handle_find_cluster(s, from, epoch, find),
            Message::Status(status) => {
                let json = self.status_json(s.now).to_string();
                let reply = StatusReply { request: status.request, json };
                self.send_as_node(s, from, epoch, reply.into());
            }
            Message::Recruit(recruit) => self.handle_recruit(s, from, epoch, *recruit),
            Message::Serve(serve) => self.handle_serve(s, from, epoch, *serve),
            Message::Refused(_) => {}
            other => {
                let why = (epoch, Code::NotHere);
                self.refuse(s, Role::Node, from, &other, why, "not a node's message");
            }
        }
    }

    fn send_as_node(
        &mut self,
        s: &mut Surroundings<'_>,
        to: Endpoint,
        epoch: Epoch,
        message: Message,
    ) {
        self.send(s, self.peer.endpoint(Role::Node), to, epoch, message);
    }

    fn handle_find_cluster(
        &mut self,
        s: &mut Surroundings<'_>,
        from: Endpoint,
        epoch: Epoch,
        find: FindCluster,
    ) {
        // An epoch that it were found for would end with it.
        if self.is_stopping && from.role == Role::Leader && from.node != self.peer.node {
            return;
        }
        let has_room = (self.watchers.len() as u64) < s.knobs.proxy_clients_max;
        if from.role == Role::Client && has_room {
            self.watchers.insert(from);
        }
        let mut view = self.view(find.request);
        // Nodes know where they are.
        if from.role == Role::Client {
            view.addresses.clone_from(&self.addresses);
        }
        self.send_as_node(s, from, epoch, view.into());
    }

    /// What clients may know: nothing before the generation is in the register (I10).
    fn view(&self, request: RequestId) -> ClusterView {
        let phase = self.leader.as_ref().map_or("following", Leader::phase);
        let mut view = ClusterView {
            request,
            epoch: Epoch::ZERO,
            recovery_version: Version::ZERO,
            proxies: Vec::new(),
            log_servers: Vec::new(),
            absent: Vec::new(),
            replication: 0,
            seats: Seats::new(),
            phase: phase.to_owned(),
            addresses: Vec::new(),
        };
        if let Some(hosted) = self.hosted.as_ref().filter(|hosted| hosted.is_serving) {
            view.epoch = hosted.plan.epoch;
            view.recovery_version = hosted.plan.recovery_version;
            view.proxies.clone_from(&hosted.plan.proxies);
            view.log_servers.clone_from(&hosted.plan.log_servers);
            view.absent.clone_from(&hosted.plan.absent);
            view.replication = hosted.plan.replication;
            view.seats.clone_from(&hosted.plan.seats);
        }
        view
    }

    fn tell_watchers(&mut self, s: &mut Surroundings<'_>) {
        let view = self.view(RequestId::ZERO);
        for watcher in self.watchers.clone() {
            self.send_as_node(s, watcher, view.epoch, view.clone().into());
        }
    }

    fn handle_recruit(
        &mut self,
        s: &mut Surroundings<'_>,
        from: Endpoint,
        epoch: Epoch,
        recruit: Recruit,
    ) {
        let here = self.epoch();
        if self.is_stopping && recruit.plan.epoch > here {
            return;
        }
        if recruit.plan.epoch < here {
            let detail = format!("this is {here}");
            let message = Message::from(recruit);
            let why = (epoch, Code::WrongEpoch);
            return self.refuse(s, Role::Node, from, &message, why, &detail);
        }
        recruit.plan.check();
        if recruit.plan.epoch > here {
            self.begin_epoch(s, recruit.plan.clone());
        }
        let Recruit { role, plan } = recruit;
        match role {
            // The log server persists what it must before it answers by itself.
            Role::LogServer => {
                let message = Message::from(Recruit { role, plan });
                let event = Event::Message { from, epoch, message };
                self.with_log_server(s, |log_server, cx| log_server.step(cx, event));
            }
            role => {
                self.begin_role(s, role, &plan);
                self.send_as_node(s, from, epoch, Recruited { role }.into());
            }
        }
    }

    /// Ends the roles of the epoch before; clients hear that nobody serves now.
    fn begin_epoch(&mut self, s: &mut Surroundings<'_>, plan: EpochPlan) {
        let epoch = self.epoch();
        for role in self.epoch_roles() {
            self.note(s, role, Note::RoleChanged { role, epoch, began: false });
        }
        let was_serving = self.serving_epoch().is_some();
        self.hosted = Some(Hosted {
            plan,
            sequencer: None,
            proxies: BTreeMap::new(),
            resolvers: BTreeMap::new(),
            is_serving: false,
        });
        if was_serving {
            self.tell_watchers(s);
        }
    }

    /// Begins a role; asked again, the one that is there goes on.
    fn begin_role(&mut self, s: &mut Surroundings<'_>, role: Role, plan: &EpochPlan) {
        let hosted = self.hosted.as_mut().expect("the epoch has begun");
        assert_eq!(hosted.plan, *plan, "an epoch has one plan");
        let mut out = Vec::new();
        let mut cx = role_cx(s, self.peer, role, &mut out);
        match role {
            Role::Sequencer if hosted.sequencer.is_none() => {
                hosted.sequencer.insert(Sequencer::new(plan)).start(&mut cx);
            }
            Role::Proxy(index) if !hosted.proxies.contains_key(&index) => {
                hosted.proxies.entry(index).or_insert(Proxy::new(plan, index)).start(&mut cx);
            }
            Role::Resolver(index) if !hosted.resolvers.contains_key(&index) => {
                hosted.resolvers.entry(index).or_insert(Resolver::new(plan, index)).start(&mut cx);
            }
            _ => return,
        }
        self.carry_out(s, role, plan.epoch, out);
        self.note(s, role, Note::RoleChanged { role, epoch: plan.epoch, began: true });
    }

    fn note(&self, s: &mut Surroundings<'_>, role: Role, note: Note) {
        s.out.push(crate::NodeOutput::Note(self.peer.endpoint(role), note));
    }

    fn handle_serve(
        &mut self,
        s: &mut Surroundings<'_>,
        from: Endpoint,
        epoch: Epoch,
        serve: Serve,
    ) {
        let here = self.epoch();
        if serve.plan.epoch < here {
            let (message, detail) = (Message::from(serve), format!("this is {here}"));
            let why = (epoch, Code::WrongEpoch);
            return self.refuse(s, Role::Node, from, &message, why, &detail);
        }
        if serve.plan.epoch > here {
            // A node without a role in the epoch serves by naming those that have one.
            self.begin_epoch(s, serve.plan.clone());
        }
        let hosted = self.hosted.as_mut().expect("the epoch has begun");
        if !hosted.is_serving {
            hosted.is_serving = true;
            // What the log server holds of this epoch may reach consumers only from here on (I10, I11).
            let event = Event::Message { from, epoch, message: serve.clone().into() };
            self.with_log_server(s, |log_server, cx| log_server.step(cx, event));
            for role in self.epoch_roles() {
                let message = serve.clone().into();
                self.with_epoch_role(s, role, Event::Message { from, epoch, message });
            }
            self.note(s, Role::Node, Note::Serving { epoch: serve.plan.epoch });
            self.tell_watchers(s);
        }
        self.send_as_node(s, from, epoch, Serving {}.into());
    }
}
