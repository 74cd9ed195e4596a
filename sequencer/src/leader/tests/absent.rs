//! Going on without a log server, and taking it back.

use common::message::CaughtUp;
use common::register::Generation;

use super::*;

const OLD_END: u64 = FENCE_JUMP_VERSIONS + 100;

/// A generation of both was live; the rival is silent from here on.
fn after_a_generation_of_both(replication: u8) -> World {
    let mut world = World::new(&[]);
    let log_servers = vec![NODE, RIVAL];
    let topology =
        Topology { log_servers: log_servers.clone(), replication, ..Topology::single(NODE) };
    world.leader = Leader::new(topology);
    let generation = Generation {
        epoch: Epoch(1),
        first_epoch: Epoch(1),
        begin: Version(0),
        end: None,
        log_servers,
        absent: Vec::new(),
        replication,
    };
    let (epoch, leader, stamp, generations) = (Epoch(1), NODE, 3, vec![generation]);
    let state = RegisterState { epoch, leader, stamp, generations, ..RegisterState::empty() };
    world.register = (Revision(1), state.encode());
    world.durable = Version(OLD_END);
    world.run(None);
    world
}

fn pass_finding(world: &mut World) {
    world.now = world.now.plus(Duration::from_millis(Knobs::small().finding_ms + 1));
    world.run(Some(Event::Timer(RETRY)));
}

fn last_generation(world: &World) -> Generation {
    let state = RegisterState::decode(&world.register.1).unwrap();
    state.generations.last().unwrap().clone()
}

#[test]
fn a_log_server_that_holds_the_only_copies_is_waited_for() {
    let mut world = after_a_generation_of_both(1);
    pass_finding(&mut world);
    let status = world.leader.status();
    assert_eq!((status.phase, &status.waiting_for[..]), ("finding_nodes", "nodes n9"));
}

#[test]
fn a_recovery_goes_on_without_one_whose_copies_others_have() {
    let mut world = after_a_generation_of_both(2);
    pass_finding(&mut world);
    world.run_until_serving();
    let last = last_generation(&world);
    assert_eq!((last.log_servers, last.absent, last.replication), (vec![NODE], vec![RIVAL], 2));
    assert_eq!(last.begin, Version(OLD_END));
    // It has no spare copy any more: without the other one nothing goes.
    assert_eq!(last_generation(&world).spare_copies(), 0);
}

#[test]
fn one_that_was_found_and_never_locks_is_left_behind() {
    let mut world = after_a_generation_of_both(2);
    let view = sign_of_life(&mut world);
    world.run(Some(from_rival(Role::Node, 2, view)));
    assert_eq!(world.leader.status().phase, "locking_logs");
    pass_finding(&mut world);
    world.run(Some(from_rival(Role::Node, 2, Serving {})));
    world.run_until_serving();
    assert_eq!(last_generation(&world).absent, [RIVAL]);
}

#[test]
fn one_that_falls_silent_in_an_epoch_is_not_waited_for() {
    let mut world = after_a_generation_of_both(2);
    let view = sign_of_life(&mut world);
    world.run(Some(from_rival(Role::Node, 2, view)));
    let (durable, known_committed) = (Version(OLD_END), Version(OLD_END));
    world.run(Some(from_rival(Role::LogServer, 2, Locked { durable, known_committed })));
    world.run(Some(from_rival(Role::Node, 2, Recruited { role: Role::LogServer })));
    world.run(Some(from_rival(Role::Node, 2, Serving {})));
    assert_eq!(last_generation(&world).log_servers, [NODE, RIVAL]);
    assert_eq!(world.leader.status().phase, "serving");

    let begin = world.now;
    for _ in 0..=SILENT_TICKS_MAX {
        assert_eq!(last_generation(&world).absent, []);
        world.run(Some(Event::Timer(RETRY)));
    }
    let status = world.leader.status();
    assert_eq!((status.cause, status.phase), ("node_silent", "serving"));
    assert_eq!(last_generation(&world).absent, [RIVAL]);
    let took = world.now.since(begin);
    assert!(took < Duration::from_millis(Knobs::small().finding_ms), "{took:?}");
}

#[test]
fn an_absent_log_server_is_told_to_catch_up_and_taken_back() {
    let mut world = after_a_generation_of_both(2);
    pass_finding(&mut world);
    world.run_until_serving();
    world.elsewhere.clear();
    world.run(Some(Event::Timer(RETRY)));
    assert!(world.elsewhere.contains(&(RIVAL, "CatchUp")), "{:?}", world.elsewhere);
    let not_yet = CaughtUp { through: Version(5), is_near: false };
    world.run(Some(from_rival(Role::LogServer, 2, not_yet)));
    assert_eq!(world.leader.status().phase, "serving");

    let near = CaughtUp { through: Version(OLD_END), is_near: true };
    world.run(Some(from_rival(Role::LogServer, 2, near)));
    assert_eq!(world.leader.status().cause, "log_server_returns");
    let view = sign_of_life(&mut world);
    world.run(Some(from_rival(Role::Node, 3, view)));
    let plan = world.leader.plan.clone().expect("a plan is made");
    assert_eq!((plan.returning, plan.absent), (vec![RIVAL], vec![]));
    world.run(Some(from_rival(Role::Node, 3, Recruited { role: Role::LogServer })));
    world.run(Some(from_rival(Role::Node, 3, Serving {})));
    world.run_until_serving();
    let last = last_generation(&world);
    assert_eq!((last.log_servers, last.absent), (vec![NODE, RIVAL], vec![]));
}

#[test]
fn a_return_that_is_refused_costs_one_attempt_and_then_waits() {
    let mut world = after_a_generation_of_both(2);
    pass_finding(&mut world);
    world.run_until_serving();
    let near = CaughtUp { through: Version(OLD_END), is_near: true };
    world.run(Some(from_rival(Role::LogServer, 2, near)));
    let view = sign_of_life(&mut world);
    world.run(Some(from_rival(Role::Node, 3, view)));
    let refusal = Refusal::new(Code::NotHere, "it does not catch up");
    let refused = Refused { request: RequestId::ZERO, refusal };
    world.run(Some(from_rival(Role::LogServer, 3, refused)));
    assert_eq!(world.leader.status().cause, "return_refused");
    pass_finding(&mut world);
    world.run_until_serving();
    assert_eq!(last_generation(&world).absent, [RIVAL]);
    let epoch = world.leader.epoch.0;
    world.run(Some(from_rival(Role::LogServer, epoch, near)));
    assert_eq!(world.leader.status().phase, "serving", "it tries again later");
}
