//! The role: chain, retransmissions, shares and memory.

use std::collections::BTreeSet;

use common::machine::Output;
use common::message::{ResolverShare, Verdict};
use common::{
    FENCE_JUMP_VERSIONS, Incarnation, KeyRange, Knobs, NodeId, Peer, Prng, Ranges, Role, Time,
    WallTime,
};

use super::*;

const RV: Version = Version(1000);
const RTV: Version = Version(1000 + FENCE_JUMP_VERSIONS);

fn endpoint(node: u64, role: Role) -> Endpoint {
    Peer { node: NodeId(node), incarnation: Incarnation(1) }.endpoint(role)
}

fn proxy(index: u8) -> Endpoint {
    endpoint(2, Role::Proxy(index))
}

fn plan() -> EpochPlan {
    EpochPlan {
        epoch: Epoch(3),
        recovery_version: RV,
        first_version: RTV,
        leader: endpoint(1, Role::Leader),
        sequencer: endpoint(1, Role::Sequencer),
        proxies: vec![proxy(0), proxy(1)],
        resolvers: vec![ResolverShare { resolver: endpoint(1, Role::Resolver(0)), begin: vec![] }],
        log_servers: vec![endpoint(3, Role::LogServer)],
        absent: Vec::new(),
        returning: Vec::new(),
        replication: 1,
        seats: common::membership::Seats::new(),
    }
}

struct World {
    resolver: Resolver,
    knobs: Knobs,
    rng: Prng,
    marks: BTreeSet<Mark>,
    decided: Vec<(Version, Version)>,
}

impl World {
    fn new(knobs: Knobs) -> Self {
        let resolver = Resolver::new(&plan(), 0);
        Self { resolver, knobs, rng: Prng::new(1), marks: BTreeSet::new(), decided: vec![] }
    }

    fn resolve(&mut self, from: Endpoint, resolve: Resolve) -> Vec<(Endpoint, Resolved)> {
        self.resolve_in(Epoch(3), from, resolve)
    }

    fn resolve_in(
        &mut self,
        epoch: Epoch,
        from: Endpoint,
        resolve: Resolve,
    ) -> Vec<(Endpoint, Resolved)> {
        self.tell(epoch, from, resolve)
    }

    fn settle(
        &mut self,
        from: Endpoint,
        settlements: Vec<Settlement>,
    ) -> Vec<(Endpoint, Resolved)> {
        self.tell(Epoch(3), from, Settle { settlements })
    }

    fn tell(
        &mut self,
        epoch: Epoch,
        from: Endpoint,
        message: impl Into<Message>,
    ) -> Vec<(Endpoint, Resolved)> {
        let mut out = Vec::new();
        let mut cx = Cx {
            now: Time::ZERO,
            wall: WallTime(0),
            knobs: &self.knobs,
            rng: &mut self.rng,
            me: endpoint(1, Role::Resolver(0)),
            out: &mut out,
        };
        let message = message.into();
        self.resolver.step(&mut cx, Event::Message { from, epoch, message });
        self.resolver.check();
        let mut replies = Vec::new();
        for output in out {
            match output {
                Output::Send { to, message: Message::Resolved(reply), .. } => {
                    replies.push((to, reply))
                }
                Output::Mark(mark) => drop(self.marks.insert(mark)),
                Output::Note(Note::Decided { previous, version, .. }) => {
                    self.decided.push((previous, version));
                }
                other => panic!("{other:?}"),
            }
        }
        replies
    }
}

fn points(keys: &[&str]) -> Ranges {
    Ranges::from_ranges(keys.iter().map(|key| KeyRange::point(key.as_bytes())))
}

fn transaction(read_version: Version, reads: &[&str], writes: &[&str]) -> ResolveTransaction {
    let (reads, writes) = (points(reads), points(writes));
    ResolveTransaction { read_version, reads, writes, report_conflicts: true, is_final: true }
}

fn batch(previous: Version, version: Version, transactions: Vec<ResolveTransaction>) -> Resolve {
    let (answered, settlements) = (Version::ZERO, vec![]);
    Resolve { previous_version: previous, version, answered, settlements, transactions }
}

/// An answer when nothing is open.
fn resolved(version: Version, verdicts: Vec<Verdict>) -> Resolved {
    Resolved { version, settled: version, verdicts }
}

#[test]
fn verdicts_come_in_chain_order_to_the_proxy_that_asked() {
    let mut world = World::new(Knobs::default());
    let (second, third) = (RTV.plus(10), RTV.plus(20));
    let late = batch(second, third, vec![transaction(RTV, &["k"], &[])]);
    assert_eq!(world.resolve(proxy(0), late), []);
    let middle = batch(RTV, second, vec![transaction(RTV, &[], &["k"])]);
    assert_eq!(world.resolve(proxy(1), middle), []);
    let replies = world.resolve(proxy(0), batch(RV, RTV, vec![]));
    let conflict = Verdict::Conflict { ranges: vec![0] };
    assert_eq!(
        replies,
        [
            (proxy(0), resolved(RTV, vec![])),
            (proxy(1), resolved(second, vec![Verdict::Committed])),
            (proxy(0), resolved(third, vec![conflict])),
        ]
    );
    assert!(world.marks.contains(&Mark::ResolveEarly));
}

#[test]
fn everything_read_before_the_epoch_is_too_old_and_blind_writes_are_not() {
    let mut world = World::new(Knobs::default());
    let transactions = vec![
        transaction(RV.minus_saturating(1), &["k"], &[]),
        transaction(RV, &["k"], &[]),
        transaction(Version::ZERO, &[], &["k"]),
    ];
    let replies = world.resolve(proxy(0), batch(RV, RTV, transactions));
    assert_eq!(replies[0].1.verdicts, [Verdict::TooOld, Verdict::TooOld, Verdict::Committed]);
    assert!(world.marks.contains(&Mark::ResolveTooOld));
}

#[test]
fn the_window_is_exactly_life() {
    let mut world = World::new(Knobs::default());
    world.resolve(proxy(0), batch(RV, RTV, vec![transaction(RV, &[], &["k"])]));
    let version = RTV.plus(world.knobs.life_versions);
    let at_edge = transaction(RTV, &["k"], &[]);
    let below = transaction(RTV.minus_saturating(1), &["k"], &[]);
    let replies = world.resolve(proxy(0), batch(RTV, version, vec![at_edge, below]));
    assert_eq!(replies[0].1.verdicts, [Verdict::Committed, Verdict::TooOld]);
}

#[test]
fn verdicts_are_repeated_until_they_are_answered() {
    let mut world = World::new(Knobs::default());
    let first =
        batch(RV, RTV, vec![transaction(RTV, &["k"], &["k"]), transaction(RTV, &["k"], &[])]);
    let told = world.resolve(proxy(0), first.clone());
    assert_eq!(told[0].1.verdicts[1], Verdict::Conflict { ranges: vec![0] });
    assert_eq!(world.resolve(proxy(0), first.clone()), told, "decided once");
    let second = Resolve { answered: RTV, ..batch(RTV, RTV.plus(1), vec![]) };
    assert_eq!(world.resolve(proxy(0), second).len(), 1);
    assert_eq!(world.resolve(proxy(0), first), [], "the proxy has said that it has it");
    assert_eq!(world.resolver.status().reply_count, 1);
    assert!(
        world.marks.contains(&Mark::ResolveAgain) && world.marks.contains(&Mark::ConflictInBatch)
    );
}

/// One that another resolver is asked for as well.
fn shared(read_version: Version, reads: &[&str], writes: &[&str]) -> ResolveTransaction {
    ResolveTransaction { is_final: false, ..transaction(read_version, reads, writes) }
}

fn settlement(version: Version, commits: bool) -> Settlement {
    Settlement::new(version, [commits])
}

/// Two batches: proxy 0 writes `k`, proxy 1 reads it. The second one is held.
fn held(knobs: Knobs) -> (World, Version) {
    let mut world = World::new(knobs);
    let open = batch(RV, RTV, vec![shared(RTV, &[], &["k"])]);
    let told = world.resolve(proxy(0), open);
    assert_eq!(
        told[0].1,
        Resolved { settled: RTV.minus_saturating(1), ..resolved(RTV, vec![Verdict::Committed]) }
    );
    let reader = RTV.plus(10);
    let read = batch(RTV, reader, vec![shared(RTV.minus_saturating(1), &["k"], &[])]);
    assert_eq!(world.resolve(proxy(1), read), []);
    (world, reader)
}

#[test]
fn a_held_batch_is_named_and_goes_on_when_it_is_settled() {
    let (mut world, reader) = held(Knobs::default());
    assert!(world.marks.contains(&Mark::ResolveHeld));
    let status = world.resolver.status();
    let (version, wait) = status.held.expect("it is held");
    assert_eq!((version, status.version, status.waiting_count), (reader, RTV, 1));
    assert!(wait.to_string().contains(&RTV.to_string()), "{wait}");
    // What comes behind it waits as well, and its repetition gets nothing.
    let behind = batch(reader, reader.plus(1), vec![shared(RTV, &["x"], &[])]);
    assert_eq!(world.resolve(proxy(0), behind), []);
    let again = batch(RTV, reader, vec![shared(RTV.minus_saturating(1), &["k"], &[])]);
    assert_eq!(world.resolve(proxy(1), again), []);
    // The word of another proxy, or in another epoch, is not heard.
    assert_eq!(world.settle(proxy(7), vec![settlement(RTV, true)]), []);
    assert_eq!(
        world.tell(Epoch(2), proxy(0), Settle { settlements: vec![settlement(RTV, true)] }),
        []
    );
    let told = world.settle(proxy(0), vec![settlement(RTV, false)]);
    assert_eq!(
        told,
        [
            (proxy(1), resolved(reader, vec![Verdict::Committed])),
            (proxy(0), resolved(reader.plus(1), vec![Verdict::Committed])),
        ]
    );
    assert_eq!(world.settle(proxy(0), vec![settlement(RTV, false)]), []);
    assert!(world.marks.contains(&Mark::SettlementAgain));
    assert_eq!(world.resolver.status().held, None);
}

#[test]
fn settlements_count_even_when_their_batch_is_dropped() {
    let (mut world, reader) = held(Knobs { resolves_waiting_max: 1, ..Knobs::default() });
    let far = Resolve {
        settlements: vec![settlement(RTV, true)],
        ..batch(reader.plus(5), reader.plus(6), vec![])
    };
    let conflict = Verdict::Conflict { ranges: vec![0] };
    assert_eq!(world.resolve(proxy(0), far), [(proxy(1), resolved(reader, vec![conflict]))]);
    assert_eq!(world.resolver.status().overflow_count, 1);
}

#[test]
fn strangers_get_nothing_and_overflow_is_dropped() {
    let mut world = World::new(Knobs { resolves_waiting_max: 1, ..Knobs::default() });
    assert_eq!(world.resolve(proxy(7), batch(RV, RTV, vec![])), []);
    assert_eq!(world.resolve_in(Epoch(2), proxy(0), batch(RV, RTV, vec![])), []);
    assert_eq!(world.resolver.status().version, RV);
    assert_eq!(world.resolve(proxy(0), batch(RTV, RTV.plus(1), vec![])), []);
    assert_eq!(world.resolve(proxy(0), batch(RTV.plus(1), RTV.plus(2), vec![])), []);
    assert_eq!(world.resolver.status().overflow_count, 1);
    assert_eq!(world.resolve(proxy(1), batch(RV, RTV, vec![])).len(), 2);
    assert_eq!(world.resolve(proxy(0), batch(RTV.plus(1), RTV.plus(2), vec![])).len(), 1);
    // What was decided is told again however many wait.
    assert_eq!(world.resolve(proxy(0), batch(RTV.plus(5), RTV.plus(6), vec![])), []);
    assert_eq!(world.resolve(proxy(1), batch(RV, RTV, vec![])).len(), 1);
}

#[test]
fn what_left_the_window_leaves_the_memory() {
    let mut world = World::new(Knobs::default());
    let keys: Vec<String> = (0..500).map(|key| format!("key {key}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let _ = world.resolve(proxy(0), batch(RV, RTV, vec![transaction(RV, &[], &keys)]));
    assert!(world.resolver.status().entry_count >= 500);
    let (mut previous, life) = (RTV, world.knobs.life_versions);
    for _ in 0..3 {
        let version = previous.plus(life);
        let _ = world.resolve(proxy(0), batch(previous, version, vec![]));
        previous = version;
    }
    assert!(world.resolver.status().entry_count < 10);
}

#[test]
fn want_of_memory_shortens_the_window_and_decides_nothing_wrongly() {
    let mut world = World::new(Knobs { conflict_set_bytes_max: 10_000, ..Knobs::default() });
    let (mut at, mut previous) = (RTV, RV);
    for round in 0..400_u64 {
        let key = format!("key {round}");
        let write = transaction(at, &[], &[&key]);
        let replies = world.resolve(proxy(0), batch(previous, at, vec![write]));
        assert_eq!(replies[0].1.verdicts, [Verdict::Committed], "a blind write is never refused");
        (previous, at) = (at, at.plus(1000));
    }
    assert!(world.resolver.status().memory_bytes < 40_000);
    let old = transaction(RTV, &["key 399"], &[]);
    let fresh = transaction(previous, &["key 399"], &[]);
    let replies = world.resolve(proxy(0), batch(previous, at, vec![old, fresh]));
    assert_eq!(replies[0].1.verdicts, [Verdict::TooOld, Verdict::Committed]);
}

#[test]
fn whatever_the_network_does_each_pair_is_decided_once_and_alike() {
    for seed in 0..100 {
        let mut prng = Prng::new(seed);
        let mut world = World::new(Knobs { resolves_waiting_max: 4, ..Knobs::default() });
        let mut model = World::new(Knobs::default());
        let (mut previous, mut version) = (RV, RTV);
        let mut batches = Vec::new();
        let mut truth = BTreeMap::new();
        for _ in 0..30 {
            let keys = ["a", "b", "c", "d"];
            let transactions: Vec<_> = (0..prng.below(4))
                .map(|_| {
                    let read_version = previous.minus_saturating(prng.below(40));
                    let mut key = || *prng.pick(&keys);
                    transaction(read_version, &[key()], &[key()])
                })
                .collect();
            let from = proxy(prng.below(2) as u8);
            let resolve = batch(previous, version, transactions);
            truth.extend(
                model.resolve(from, resolve.clone()).into_iter().map(|(_, r)| (r.version, r)),
            );
            batches.push((from, resolve));
            (previous, version) = (version, version.plus(1 + prng.below(20)));
        }
        let mut got = BTreeMap::new();
        let mut tries = 0;
        while got.len() < batches.len() {
            let (from, resolve) = prng.pick(&batches).clone();
            for (to, reply) in world.resolve(from, resolve) {
                assert!(
                    batches.iter().any(|(from, sent)| *from == to && sent.version == reply.version)
                );
                if prng.chance(1, 2) {
                    assert_eq!(truth[&reply.version], reply);
                    got.insert(reply.version, reply);
                }
            }
            tries += 1;
            assert!(tries < 100_000);
        }
        assert_eq!(world.decided, model.decided);
    }
}
