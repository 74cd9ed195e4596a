//! Nodes that are drained or removed, and seats that pass to an heir.

use common::membership::{MemberChange, Seat, Sitting};
use common::message::{CaughtUp, ChangeMember};
use common::register::Generation;

use super::*;

const SPARE: NodeId = NodeId(12);
const CLIENT: NodeId = NodeId(99);

/// Two log servers, and a spare node that lives; the rival does not answer.
fn without_the_rival(replication: u8) -> World {
    let mut world = World::new(&[]);
    let log_servers = vec![NODE, RIVAL];
    let spares = vec![SPARE];
    world.leader =
        Leader::new(Topology { log_servers, replication, spares, ..Topology::single(NODE) });
    let generation = Generation {
        epoch: Epoch(1),
        first_epoch: Epoch(1),
        begin: Version(0),
        end: None,
        log_servers: vec![NODE, RIVAL],
        absent: Vec::new(),
        replication,
    };
    let state = RegisterState {
        epoch: Epoch(1),
        leader: NODE,
        stamp: 3,
        generations: vec![generation],
        ..RegisterState::empty()
    };
    world.register = (Revision(1), state.encode());
    world.durable = Version(FENCE_JUMP_VERSIONS + 100);
    world.run(None);
    world
}

fn of(node: NodeId, role: Role, epoch: u64, message: impl Into<Message>) -> Event {
    let from = Peer { node, incarnation: Incarnation(1) }.endpoint(role);
    Event::Message { from, epoch: Epoch(epoch), message: message.into() }
}

impl World {
    /// Goes on until an epoch serves; the spare answers what it is asked.
    fn serve_with_spare(&mut self) {
        for _ in 0..20 {
            let view = sign_of_life(self);
            self.run(Some(of(SPARE, Role::Node, 0, view)));
            self.run(Some(of(SPARE, Role::Node, self.leader.epoch.0, Serving {})));
            if self.leader.phase() == "serving" {
                return;
            }
            self.now = self.now.plus(Duration::from_millis(Knobs::small().finding_ms + 1));
            self.run(Some(Event::Timer(RETRY)));
        }
        panic!("stuck: {:?}", self.leader.status());
    }

    /// What an operator hears, and whether a recovery began.
    fn decide(&mut self, node: NodeId, change: MemberChange) -> Option<Code> {
        let asked = ChangeMember { request: RequestId(1), node, change };
        let out = self.step(Some(of(CLIENT, Role::Client, 0, asked)));
        let heard = out.iter().find_map(|output| match output {
            Output::Send { to, message: Message::Refused(no), .. } if to.node == CLIENT => {
                Some(Some(no.refusal.code()))
            }
            Output::Send { to, message: Message::MemberChanged(_), .. } if to.node == CLIENT => {
                Some(None)
            }
            _ => None,
        });
        for output in out {
            if let Some(event) = self.answer(output) {
                self.run(Some(event));
            }
        }
        heard.expect("an operator is answered")
    }

    fn state(&self) -> RegisterState {
        RegisterState::decode(&self.register.1).unwrap()
    }
}

#[test]
fn the_heir_of_a_removed_log_server_copies_and_then_sits_in_its_seat() {
    let mut world = without_the_rival(2);
    world.serve_with_spare();
    assert_eq!(world.state().generations.last().unwrap().absent, [RIVAL]);

    assert_eq!(world.decide(RIVAL, MemberChange::Remove), Some(Code::Recovering));
    assert_eq!(world.leader.status().cause, "node_removed");
    assert_eq!(world.state().membership.removed, [RIVAL], "it is in the register");
    world.serve_with_spare();
    assert_eq!(world.decide(RIVAL, MemberChange::Remove), None, "and only then it is decided");

    world.run(Some(Event::Timer(RETRY)));
    assert_eq!(world.leader.status().cause, "seat_given");
    let heir = Sitting { seat: Seat(RIVAL.0), node: SPARE };
    assert_eq!(world.state().membership.seats.sittings(), [heir]);
    world.serve_with_spare();
    let last = world.state().generations.last().unwrap().clone();
    assert_eq!((last.log_servers, last.absent), (vec![NODE], vec![RIVAL]), "it has nothing yet");

    world.elsewhere.clear();
    world.run(Some(Event::Timer(RETRY)));
    assert!(world.elsewhere.contains(&(SPARE, "CatchUp")), "{:?}", world.elsewhere);
    let near = CaughtUp { through: world.durable, is_near: true };
    world.run(Some(of(SPARE, Role::LogServer, world.leader.epoch.0, near)));
    assert_eq!(world.leader.status().cause, "seat_inherited");
    let view = sign_of_life(&mut world);
    world.run(Some(of(SPARE, Role::Node, 0, view)));
    let plan = world.leader.plan.clone().expect("nobody waits for a removed node");
    assert_eq!((plan.returning, plan.absent), (vec![SPARE], vec![]));
    assert_eq!(plan.seats.seat_of(SPARE), Seat(RIVAL.0));
    let epoch = world.leader.epoch.0;
    world.run(Some(of(SPARE, Role::Node, epoch, Recruited { role: Role::LogServer })));
    world.serve_with_spare();
    let last = world.state().generations.last().unwrap().clone();
    assert_eq!((last.log_servers, last.absent), (vec![SPARE, NODE], vec![]));
    world.run(Some(Event::Timer(RETRY)));
    assert_eq!(world.leader.status().seats_waiting, Vec::<String>::new());
}

#[test]
fn what_the_cluster_cant_do_without_is_not_given_up() {
    let mut world = without_the_rival(2);
    assert_eq!(world.decide(RIVAL, MemberChange::Remove), Some(Code::Recovering));
    assert_eq!(world.state().membership.removed, [], "not while a recovery goes on");
    world.serve_with_spare();
    assert_eq!(world.decide(NODE, MemberChange::Drain), Some(Code::NodeNeeded), "nobody leads");
    assert_eq!(world.decide(NodeId(77), MemberChange::Drain), Some(Code::UnknownNode));
    assert_eq!(world.decide(SPARE, MemberChange::Restore), None, "it stays anyway");
    assert_eq!(world.decide(SPARE, MemberChange::Remove), Some(Code::Recovering));
    world.serve_with_spare();
    assert_eq!(world.decide(SPARE, MemberChange::Restore), Some(Code::NodeRemoved));
}

#[test]
fn a_log_server_that_is_silent_for_long_loses_its_seat() {
    let mut world = without_the_rival(2);
    world.serve_with_spare();
    let view = sign_of_life(&mut world);
    world.run(Some(of(SPARE, Role::Node, 0, view)));
    world.run(Some(Event::Timer(RETRY)));
    assert_eq!(world.state().membership.seats.sittings(), [], "not yet");
    let limit = Duration::from_millis(Knobs::small().replace_after_ms);
    world.now = world.now.plus(limit + Duration::from_millis(1));
    let view = sign_of_life(&mut world);
    world.run(Some(of(SPARE, Role::Node, 0, view)));
    world.run(Some(Event::Timer(RETRY)));
    assert_eq!(world.leader.status().cause, "seat_given");
    assert_eq!(world.state().membership.seats.heir(RIVAL), Some(SPARE));
    assert!(!world.state().membership.is_leaving(RIVAL), "it may play other roles");
}

#[test]
fn the_heir_of_one_that_is_whole_waits_while_another_is_missing() {
    let mut world = without_the_rival(2);
    world.serve_with_spare();
    let mut state = world.state();
    state.membership.give_seat(NODE, SPARE);
    world.leader.state = state;
    let placed = [NODE, RIVAL];
    let (seated, ready) = world.leader.seat_heirs(&placed, 2, &[NODE], vec![SPARE]);
    assert_eq!((seated, ready), (placed.to_vec(), vec![]), "I9: it would be one copy too few");
    let (seated, ready) = world.leader.seat_heirs(&placed, 2, &[NODE, RIVAL], vec![SPARE]);
    assert_eq!((seated, ready), (vec![SPARE, RIVAL], vec![SPARE]));
}
