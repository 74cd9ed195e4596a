//! Pairs, retransmissions, gaps and bounds of the sequencer.

use common::machine::Output;
use common::message::ResolverShare;
use common::{FENCE_JUMP_VERSIONS, Incarnation, Knobs, NodeId, Peer, Prng, WallTime};

use super::*;

const RV: Version = Version(1000);

fn endpoint(node: u64, role: Role) -> Endpoint {
    Peer { node: NodeId(node), incarnation: Incarnation(1) }.endpoint(role)
}

fn plan(proxies: u8) -> EpochPlan {
    EpochPlan {
        epoch: Epoch(3),
        recovery_version: RV,
        first_version: RV.plus(FENCE_JUMP_VERSIONS),
        leader: endpoint(1, Role::Leader),
        sequencer: endpoint(1, Role::Sequencer),
        proxies: (0..proxies).map(|index| endpoint(2, Role::Proxy(index))).collect(),
        resolvers: vec![ResolverShare { resolver: endpoint(1, Role::Resolver(0)), begin: vec![] }],
        log_servers: vec![endpoint(3, Role::LogServer)],
        absent: Vec::new(),
        returning: Vec::new(),
        replication: 1,
        seats: common::membership::Seats::new(),
    }
}

struct World {
    sequencer: Sequencer,
    now: Time,
    knobs: Knobs,
    rng: Prng,
    marks: BTreeSet<Mark>,
    notes: Vec<Note>,
}

impl World {
    fn new(proxies: u8) -> Self {
        let sequencer = Sequencer::new(&plan(proxies));
        let (knobs, rng) = (Knobs::default(), Prng::new(1));
        Self { sequencer, now: Time::ZERO, knobs, rng, marks: BTreeSet::new(), notes: vec![] }
    }

    fn ask_in(
        &mut self,
        epoch: Epoch,
        from: Endpoint,
        number: u64,
        answered: u64,
    ) -> Vec<VersionReply> {
        let mut out = Vec::new();
        let mut cx = Cx {
            now: self.now,
            wall: WallTime(7),
            knobs: &self.knobs,
            rng: &mut self.rng,
            me: endpoint(1, Role::Sequencer),
            out: &mut out,
        };
        let message = VersionRequest { number, answered }.into();
        self.sequencer.step(&mut cx, Event::Message { from, epoch, message });
        self.sequencer.check();
        let mut replies = Vec::new();
        for output in out {
            match output {
                Output::Send { to, message: Message::VersionReply(reply), .. } => {
                    assert_eq!(to, from);
                    replies.push(reply);
                }
                Output::Mark(mark) => drop(self.marks.insert(mark)),
                Output::Note(note) => self.notes.push(note),
                other => panic!("{other:?}"),
            }
        }
        replies
    }

    fn ask(&mut self, from: Endpoint, number: u64, answered: u64) -> Vec<VersionReply> {
        self.ask_in(Epoch(3), from, number, answered)
    }
}

#[test]
fn the_first_pair_joins_the_epochs_and_time_moves_versions() {
    let mut world = World::new(1);
    let proxy = endpoint(2, Role::Proxy(0));
    world.now = Time(5_000_000_000);
    let first = world.ask(proxy, 1, 0)[0];
    let rtv = RV.plus(FENCE_JUMP_VERSIONS);
    assert_eq!((first.previous_version, first.version), (RV, rtv));
    world.now = world.now.plus(Duration::from_millis(3));
    let second = world.ask(proxy, 2, 1)[0];
    assert_eq!((second.previous_version, second.version), (rtv, rtv.plus(3000)));
    // Without time, versions are still unique; after a long pause they jump by a bounded step.
    assert_eq!(world.ask(proxy, 3, 2)[0].version, rtv.plus(3001));
    world.now = world.now.plus(Duration::from_secs(3600));
    let step = step_max(world.knobs.life_versions);
    assert_eq!(world.ask(proxy, 4, 3)[0].version, rtv.plus(3001 + step));
}

#[test]
fn a_version_is_one_above_at_least_and_a_step_above_at_most() {
    let at = Version(10);
    assert_eq!(figure_version(at, Duration::ZERO, 1_000_000, 100), Version(11));
    assert_eq!(figure_version(at, Duration::from_nanos(2_999), 1_000_000, 100), Version(12));
    assert_eq!(figure_version(at, Duration::MAX, u64::MAX, 100), Version(110));
    assert_eq!(figure_version(at, Duration::from_secs(1), 1_000_000, 0), Version(11));
}

#[test]
fn a_repeated_request_gets_the_same_pair_until_it_is_answered() {
    let mut world = World::new(1);
    let proxy = endpoint(2, Role::Proxy(0));
    let first = world.ask(proxy, 1, 0);
    assert_eq!(world.ask(proxy, 1, 0), first);
    assert_eq!(world.ask(proxy, 2, 1).len(), 1);
    assert_eq!(world.ask(proxy, 1, 0), [], "the proxy has said that it has it");
    assert_eq!(world.notes.len(), 2);
    assert!(world.marks.contains(&Mark::VersionRequestAgain));
}

#[test]
fn strangers_and_other_epochs_get_nothing() {
    let mut world = World::new(1);
    assert_eq!(world.ask(endpoint(9, Role::Proxy(0)), 1, 0), []);
    assert_eq!(world.ask_in(Epoch(2), endpoint(2, Role::Proxy(0)), 1, 0), []);
    assert_eq!(world.sequencer.status().last_version, RV);
}

#[test]
fn early_requests_wait_within_their_limit() {
    let mut world = World::new(1);
    let proxy = endpoint(2, Role::Proxy(0));
    let last = REQUESTS_EARLY_MAX as u64 + 1;
    for number in 2..=last + 1 {
        assert_eq!(world.ask(proxy, number, 0), []);
    }
    let served: Vec<u64> = world.ask(proxy, 1, 0).iter().map(|reply| reply.number).collect();
    assert_eq!(served, (1..=last).collect::<Vec<_>>(), "the one above the limit was dropped");
    assert_eq!(world.ask(proxy, last + 1, last).len(), 1, "it came again");
    assert!(world.marks.contains(&Mark::VersionRequestEarly));
}

#[test]
fn a_proxy_that_never_says_what_it_has_gets_no_more() {
    let mut world = World::new(1);
    let proxy = endpoint(2, Role::Proxy(0));
    let limit = REPLIES_KEPT_MAX as u64;
    for number in 1..=limit {
        assert_eq!(world.ask(proxy, number, 0).len(), 1);
    }
    assert_eq!(world.ask(proxy, limit + 1, 0), []);
    assert_eq!(world.ask(proxy, limit + 1, 1).len(), 1);
}

#[test]
fn whatever_the_network_does_the_pairs_form_one_chain() {
    for seed in 0..200 {
        let mut prng = Prng::new(seed);
        let mut world = World::new(3);
        let proxies: Vec<Endpoint> = (0..3).map(|index| endpoint(2, Role::Proxy(index))).collect();
        // What each proxy has got: by number.
        let mut got: Vec<BTreeMap<u64, VersionReply>> = vec![BTreeMap::new(); 3];
        for _ in 0..300 {
            let place = prng.below(3) as usize;
            let answered =
                (1..).take_while(|number| got[place].contains_key(number)).count() as u64;
            let number = answered + 1 + prng.below(4);
            world.now = world.now.plus(Duration::from_nanos(prng.below(5_000)));
            for reply in world.ask(proxies[place], number, answered) {
                if prng.chance(3, 4) {
                    let earlier = got[place].insert(reply.number, reply);
                    assert!(earlier.is_none_or(|earlier| earlier == reply), "one number, one pair");
                }
            }
        }
        let mut at = RV;
        for note in &world.notes {
            let Note::Assigned { previous, version, .. } = note else { panic!("{note:?}") };
            assert_eq!(*previous, at);
            at = *version;
        }
        for replies in &got {
            let versions: Vec<Version> = replies.values().map(|reply| reply.version).collect();
            assert!(versions.is_sorted(), "numbers and versions have one order");
        }
        assert!(world.notes.len() > 30, "{}", world.notes.len());
    }
}
