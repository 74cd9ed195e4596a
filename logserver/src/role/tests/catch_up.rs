//! An absent log server: what it cuts off, what it copies, and how it returns.

use common::message::{
    CatchUp, CaughtUp, Copied, CopiedTrim, Copy, EpochPlan, Lock, Message, PulledBlock,
    PulledVersion, Recruit, Recruited, Serve,
};
use common::{
    Code, Endpoint, Epoch, Mark, NodeId, Offset, Payload, Role, StreamId, Version, WallTime,
};

use crate::testing::rig::{NODE, Rig, body, endpoint, leader, push, versions};

const WHOLE: u64 = 2;

fn whole() -> Endpoint {
    endpoint(WHOLE, Role::LogServer)
}

/// An epoch on the other log server, with this one absent or returning.
fn plan(rig: &Rig, epoch: u64, recovery_version: u64, is_returning: bool) -> EpochPlan {
    let mut plan = rig.plan(epoch, recovery_version);
    plan.replication = 2;
    if is_returning {
        plan.log_servers = vec![rig.me, whole()];
        plan.returning = vec![NODE];
    } else {
        plan.log_servers = vec![whole()];
        plan.absent = vec![NODE];
    }
    plan
}

/// Epoch 1 was written to both; 3 is live without this one and began at `absent_from`.
fn catch_up(rig: &mut Rig, epoch: u64, absent_from: u64) {
    let message = CatchUp {
        plan: plan(rig, epoch, absent_from, false),
        present_in: Epoch(1),
        absent_since: Epoch(3),
        absent_from: Version(absent_from),
    };
    rig.send(leader(), epoch, message);
    rig.settle();
}

/// Epoch 3 is caught up with: 40 is copied, and nothing else is up to `through`.
fn catch_up_with_40(rig: &mut Rig, through: u64) {
    catch_up(rig, 3, 20);
    let copy = asked(rig).remove(0);
    rig.send(whole(), 3, copied(&copy, through, &[(40, 2)]));
    rig.settle();
}

fn asked(rig: &mut Rig) -> Vec<Copy> {
    rig.take_sent(|message| match message {
        Message::Copy(copy) => Some(copy),
        _ => None,
    })
}

fn caught_up(rig: &mut Rig) -> Vec<CaughtUp> {
    rig.take_sent(|message| match message {
        Message::CaughtUp(caught_up) => Some(caught_up),
        _ => None,
    })
}

/// An answer with a block of one record of s17 in each version.
fn copied(copy: &Copy, through: u64, blocks: &[(u64, u64)]) -> Copied {
    let mut answer = Copied {
        round: copy.round,
        after: copy.after,
        through: Version(through),
        is_all: true,
        is_damaged: false,
        trims: vec![],
        versions: vec![],
        blocks: vec![],
        payload: Payload::new(),
    };
    for (version, base) in blocks {
        let body = body(*version as u8, 1, 20);
        answer.versions.push(PulledVersion {
            version: Version(*version),
            commit_time: WallTime(1),
            block_count: 1,
        });
        answer.blocks.push(PulledBlock {
            stream: StreamId(17),
            base_offset: Offset(*base),
            record_count: 1,
            bytes: body.len() as u32,
            checksum: crc32c::crc32c(&body),
        });
        answer.payload.push(body);
    }
    answer
}

/// A server that took 10, 20 and 30 of epoch 1, and was locked by an epoch that came to nothing.
fn absent(seed: u64) -> Rig {
    let mut rig = Rig::serving(seed);
    rig.push(1, push(0, 10, &[(17, 1, 5)]));
    rig.push(1, push(10, 20, &[(17, 1, 5)]));
    rig.push(1, push(20, 30, &[(17, 1, 5)]));
    rig.settle();
    rig.send(leader(), 2, Lock { generation: Epoch(1) });
    rig.settle();
    rig.sent.clear();
    rig
}

#[test]
fn what_was_never_committed_is_cut_off_and_what_was_missed_is_copied() {
    let mut rig = absent(1);
    catch_up(&mut rig, 3, 20);
    assert!(rig.marks.contains(&Mark::CatchUpCut), "30 was not committed");
    let copies = asked(&mut rig);
    assert_eq!((copies[0].after, copies[0].through), (Version(20), Version::ZERO));
    assert_eq!((&copies[0].whole[..], &copies[0].others[..]), (&[NodeId(WHOLE)][..], &[NODE][..]));
    // From somebody else, or of another round: not taken.
    let answer = copied(&copies[0], 60, &[(40, 2), (50, 3)]);
    rig.send(endpoint(5, Role::LogServer), 3, answer.clone());
    rig.send(whole(), 3, Copied { round: 99, ..answer.clone() });
    rig.settle();
    assert_eq!(rig.server.status().last, Version(20));
    rig.send(whole(), 3, answer);
    rig.settle();
    let status = rig.server.status();
    assert_eq!((status.last, status.known_committed), (Version(50), Version(50)));
    assert_eq!(versions(&rig.pulled(&[17], 0)), [10, 20, 40, 50]);
    catch_up(&mut rig, 3, 20);
    assert_eq!(caught_up(&mut rig), [CaughtUp { through: Version(50), is_near: true }]);
}

#[test]
fn copies_survive_a_crash_and_are_gone_on_with_in_a_later_epoch() {
    for seed in 0..10 {
        let mut rig = absent(seed);
        catch_up(&mut rig, 3, 20);
        let copy = asked(&mut rig).remove(0);
        rig.send(whole(), 3, copied(&copy, 60, &[(40, 2), (50, 3)]));
        rig.settle();
        let copy = {
            rig.pass_ms(1000);
            asked(&mut rig).pop().expect("news is asked for")
        };
        assert_eq!(copy.after, Version(60));
        rig.send(whole(), 3, copied(&copy, 80, &[(70, 4)]));
        rig.settle();
        rig.crash();
        rig.restart();
        rig.settle();
        // Epoch 4 is live; the generation without this server still began at 20.
        catch_up(&mut rig, 4, 20);
        let after = asked(&mut rig)[0].after;
        assert!(after >= Version(50) && after <= Version(70), "seed {seed}: {after}");
        assert_eq!(rig.halts, []);
    }
}

#[test]
fn one_that_returns_copies_up_to_the_recovery_version_and_only_then_answers() {
    let mut rig = absent(3);
    catch_up_with_40(&mut rig, 45);
    let returning = plan(&rig, 4, 60, true);
    let recruit = Recruit { role: Role::LogServer, plan: returning.clone() };
    rig.send(leader(), 4, recruit);
    rig.settle();
    let copy = asked(&mut rig).pop().expect("the rest is asked for");
    assert_eq!((copy.after, copy.through), (Version(40), Version(60)));
    assert!(rig.take_sent(recruited).is_empty(), "it is not whole");
    rig.send(whole(), 4, copied(&copy, 60, &[(55, 3)]));
    rig.settle();
    assert_eq!(rig.take_sent(recruited).len(), 1);
    assert_eq!(rig.server.status().known_committed, Version(40), "the epoch may come to nothing");
    rig.send(leader(), 4, Serve { plan: returning });
    rig.push(4, push(60, 100, &[(17, 1, 5)]));
    rig.settle();
    assert_eq!(rig.server.status().durable, Version(100));
    assert_eq!(versions(&rig.pulled(&[17], 0)), [10, 20, 40, 55]);
}

/// Between its last answer and its lock a source may have taken one more trim.
#[test]
fn one_that_has_everything_still_asks_a_locked_source_before_it_returns() {
    let mut rig = absent(8);
    catch_up_with_40(&mut rig, 40);
    let returning = plan(&rig, 4, 40, true);
    rig.send(leader(), 4, Recruit { role: Role::LogServer, plan: returning });
    rig.settle();
    let has_answered = rig.sent.iter().any(|(_, _, sent)| matches!(sent, Message::Recruited(_)));
    assert!(!has_answered, "the source may have trimmed since");
    let copy = asked(&mut rig).pop().expect("trims are asked for");
    assert!(copy.wants_all_trims && copy.after == Version(40), "{copy:?}");
    let trim = CopiedTrim { stream: StreamId(17), through: Version(40), first_offset: Offset(3) };
    rig.send(whole(), 4, Copied { trims: vec![trim], ..copied(&copy, 40, &[]) });
    rig.settle();
    assert_eq!(rig.take_sent(recruited).len(), 1);
    let stands = rig.server.log.index().stream(StreamId(17)).expect("it holds s17");
    assert_eq!(stands.trimmed_through(), Version(40), "adopted before it answered");
}

/// The disk may be busy when a newer epoch locks a server that returns to an older one.
#[test]
fn a_return_to_an_epoch_that_is_over_goes_no_further() {
    let mut rig = absent(9);
    catch_up_with_40(&mut rig, 40);
    let returning = plan(&rig, 4, 60, true);
    rig.send(leader(), 4, Recruit { role: Role::LogServer, plan: returning });
    rig.settle();
    let copy = asked(&mut rig).pop().expect("the rest is asked for");
    rig.send(whole(), 4, copied(&copy, 60, &[(55, 3)]));
    let overtaking = CatchUp {
        plan: plan(&rig, 5, 20, false),
        present_in: Epoch(1),
        absent_since: Epoch(3),
        absent_from: Version(20),
    };
    // 55 is on its way to the disk.
    rig.send(leader(), 5, overtaking);
    rig.settle();
    assert!(rig.take_sent(recruited).is_empty(), "I8: epoch 5 has locked it");
    catch_up(&mut rig, 5, 20);
    assert_eq!(rig.server.status().last, Version(40), "55 is nobody's");
}

#[test]
fn a_recruitment_that_still_waits_for_the_disk_is_superseded() {
    let mut rig = absent(10);
    let mut overtaken = plan(&rig, 4, 30, true);
    overtaken.returning.clear();
    rig.send(leader(), 4, Recruit { role: Role::LogServer, plan: overtaken });
    let overtaking = CatchUp {
        plan: plan(&rig, 5, 20, false),
        present_in: Epoch(1),
        absent_since: Epoch(5),
        absent_from: Version(20),
    };
    rig.send(leader(), 5, overtaking.clone());
    rig.settle();
    // The leader asks again.
    rig.send(leader(), 5, overtaking);
    rig.settle();
    let copy = asked(&mut rig).pop().expect("it catches up");
    assert_eq!(copy.after, Version(20), "30 was never committed");
    assert_eq!(rig.halts, []);
}

fn recruited(message: Message) -> Option<Recruited> {
    match message {
        Message::Recruited(recruited) => Some(recruited),
        _ => None,
    }
}

#[test]
fn what_was_copied_for_an_epoch_that_came_to_nothing_is_cut_off() {
    let mut rig = absent(4);
    catch_up_with_40(&mut rig, 45);
    let plan = plan(&rig, 4, 60, true);
    rig.send(leader(), 4, Recruit { role: Role::LogServer, plan });
    rig.settle();
    let copy = asked(&mut rig).pop().expect("the rest is asked for");
    rig.send(whole(), 4, copied(&copy, 60, &[(55, 3)]));
    rig.settle();
    rig.sent.clear();
    // The next leader has chosen a lower recovery version: 55 is nobody's.
    catch_up(&mut rig, 5, 20);
    assert_eq!(asked(&mut rig)[0].after, Version(40));
    assert_eq!(rig.server.status().last, Version(40));
}

#[test]
fn one_that_does_not_catch_up_can_not_return() {
    let mut rig = absent(5);
    let plan = plan(&rig, 4, 60, true);
    rig.send(leader(), 4, Recruit { role: Role::LogServer, plan });
    assert_eq!(rig.refusals()[0].code(), Code::NotHere);
}

#[test]
fn a_trim_that_was_missed_is_persisted_before_what_lies_behind_it() {
    for seed in 0..10 {
        let mut rig = absent(seed);
        catch_up(&mut rig, 3, 20);
        let copy = asked(&mut rig).remove(0);
        let trim =
            CopiedTrim { stream: StreamId(17), through: Version(45), first_offset: Offset(7) };
        let answer = Copied { trims: vec![trim], ..copied(&copy, 60, &[(50, 7)]) };
        rig.send(whole(), 3, answer);
        for _ in 0..seed {
            rig.disk_step();
        }
        rig.crash();
        rig.restart();
        rig.settle();
        assert_eq!(rig.halts, [], "seed {seed}");
        catch_up(&mut rig, 3, 20);
        let copy = asked(&mut rig).remove(0);
        if copy.after == Version(20) {
            let answer = Copied { trims: vec![trim], ..copied(&copy, 60, &[(50, 7)]) };
            rig.send(whole(), 3, answer);
            rig.settle();
        }
        assert_eq!(versions(&rig.pulled(&[17], 45)), [50], "seed {seed}");
    }
}

#[test]
fn a_block_at_another_offset_ends_the_server() {
    let mut rig = absent(6);
    catch_up(&mut rig, 3, 20);
    let copy = asked(&mut rig).remove(0);
    rig.send(whole(), 3, copied(&copy, 60, &[(40, 3)]));
    rig.settle();
    assert_eq!(rig.halts[0].reason, "forked_history", "I12");
}

#[test]
fn a_whole_server_gives_its_share_and_no_more_than_is_committed_or_asked_for() {
    let mut rig = Rig::serving(7);
    rig.push(1, push(0, 10, &[(17, 1, 5), (18, 2, 5)]));
    rig.push(1, push(10, 20, &[(17, 1, 5)]));
    rig.settle();
    let copy = Copy {
        round: 1,
        node: NodeId(WHOLE),
        whole: vec![NODE],
        others: vec![NodeId(WHOLE)],
        replication: 2,
        seats: common::membership::Seats::new(),
        wants_all_trims: false,
        after: Version::ZERO,
        through: Version(10),
    };
    rig.send(whole(), 2, copy.clone());
    let answers = rig.take_sent(|message| match message {
        Message::Copied(copied) => Some(*copied),
        _ => None,
    });
    assert_eq!((answers[0].through, answers[0].blocks.len()), (Version(10), 2));
    rig.send(whole(), 2, Copy { whole: vec![NodeId(5)], ..copy });
    assert_eq!(rig.refusals()[0].code(), Code::Malformed);
}
