//! The simulated network: order, loss, partitions, and the same seed twice.

use std::collections::BTreeMap;

use common::message::{Confirm, Message};
use common::{Epoch, Role};

use super::*;

const A: Peer = Peer { node: NodeId(1), incarnation: Incarnation(1) };
const B: Peer = Peer { node: NodeId(2), incarnation: Incarnation(1) };

fn confirm(from: Peer, to: Peer, number: u64) -> Envelope {
    Envelope {
        from: from.endpoint(Role::Node),
        to: to.endpoint(Role::Node),
        epoch: Epoch::ZERO,
        message: Confirm { number }.into(),
    }
}

/// What a process sees, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Seen {
    Number(Peer, u64),
    Down(Peer),
}

struct Bench {
    network: Network,
    queue: Vec<(Moment, Traffic)>,
    now: Moment,
    seen: BTreeMap<Peer, Vec<Seen>>,
}

impl Bench {
    fn new(profile: NetworkProfile, seed: u64) -> Self {
        let mut network = Network::new(profile, Randomness::new(seed));
        network.join(A);
        network.join(B);
        Self { network, queue: Vec::new(), now: Moment::ZERO, seen: BTreeMap::new() }
    }

    fn send(&mut self, from: Peer, to: Peer, number: u64) {
        let envelope = Box::new(confirm(from, to, number));
        self.network.send(self.now, envelope, &mut self.queue);
    }

    fn run_until(&mut self, until: Moment) {
        loop {
            let next = self.queue.iter().enumerate().min_by_key(|(_, (at, _))| *at);
            let Some((place, (at, _))) = next.filter(|(_, (at, _))| *at <= until) else { break };
            self.now = self.now.max(*at);
            let (_, traffic) = self.queue.remove(place);
            self.take(traffic);
        }
        self.now = self.now.max(until);
    }

    fn take(&mut self, traffic: Traffic) {
        match traffic {
            Traffic::Down { to, peer, session } => {
                if self.network.learn_down(to, peer, session) {
                    self.seen.entry(to).or_default().push(Seen::Down(peer));
                }
            }
            Traffic::Arrive(mut flight) => match self.network.arrive(self.now, &mut flight) {
                Arrival::Lost => {}
                Arrival::Damaged => {
                    let from = flight.envelope.from.peer();
                    self.network.reset(self.now, from, flight.to, &mut self.queue);
                }
                Arrival::Deliver { down_first } => {
                    let seen = self.seen.entry(flight.to).or_default();
                    seen.extend(down_first.map(Seen::Down));
                    let Message::Confirm(Confirm { number }) = flight.envelope.message else {
                        panic!("only confirms are sent here")
                    };
                    seen.push(Seen::Number(flight.envelope.from.peer(), number));
                }
            },
        }
    }

    fn numbers(&self, at: Peer) -> Vec<u64> {
        let seen = self.seen.get(&at).into_iter().flatten();
        seen.filter_map(|seen| match seen {
            Seen::Number(_, number) => Some(*number),
            Seen::Down(_) => None,
        })
        .collect()
    }
}

#[test]
fn a_calm_network_delivers_everything_in_order() {
    let mut bench = Bench::new(NetworkProfile { through_codec: true, ..Default::default() }, 1);
    (0..100).for_each(|number| bench.send(A, B, number));
    bench.run_until(Moment(1 << 40));
    assert_eq!(bench.numbers(B), (0..100).collect::<Vec<_>>());
}

#[test]
fn a_reset_loses_a_suffix_and_both_sides_learn_of_it_once() {
    let mut lost = 0;
    for seed in 0..100 {
        let mut bench = Bench::new(NetworkProfile::default(), seed);
        bench.send(B, A, 900);
        bench.run_until(Moment(10_000_000));
        (0..20).for_each(|number| bench.send(A, B, number));
        bench.network.reset(bench.now, A, B, &mut bench.queue);
        bench.run_until(Moment(10_000_000_000));
        (100..105).for_each(|number| bench.send(A, B, number));
        bench.run_until(Moment(20_000_000_000));
        let numbers = bench.numbers(B);
        let old = numbers.iter().filter(|number| **number < 100).count() as u64;
        lost += 20 - old;
        let expect: Vec<u64> = (0..old).chain(100..105).collect();
        assert_eq!(numbers, expect, "seed {seed}: a prefix, then the new session");
        for (at, peer) in [(A, B), (B, A)] {
            let downs = bench.seen[&at].iter().filter(|seen| **seen == Seen::Down(peer)).count();
            assert_eq!(downs, 1, "seed {seed} at {at:?}: {:?}", bench.seen[&at]);
        }
    }
    assert!(lost > 100, "{lost}");
}

#[test]
fn nothing_of_an_incarnation_comes_after_its_end_was_seen() {
    for seed in 0..200 {
        let profile = NetworkProfile {
            reorder_ppm: 500_000,
            duplicate_ppm: 300_000,
            reset_ppm: 20_000,
            ..Default::default()
        };
        let mut bench = Bench::new(profile, seed);
        let mut sender = A;
        for life in 1..5_u64 {
            for number in 0..10 {
                bench.send(sender, B, life * 100 + number);
            }
            bench.run_until(bench.now.plus_ns(150_000));
            bench.network.leave(bench.now, sender, &mut bench.queue);
            sender = Peer { node: sender.node, incarnation: Incarnation(life + 1) };
            bench.network.join(sender);
        }
        bench.run_until(Moment(1 << 42));
        let mut last = Incarnation::ZERO;
        for seen in bench.seen.get(&B).into_iter().flatten() {
            match seen {
                Seen::Number(from, _) => {
                    assert!(from.incarnation >= last, "seed {seed}: {:?}", bench.seen[&B]);
                    last = from.incarnation;
                }
                Seen::Down(peer) => assert!(peer.incarnation >= last, "seed {seed}"),
            }
        }
    }
}

#[test]
fn a_message_to_a_dead_incarnation_is_answered_with_its_end() {
    let mut bench = Bench::new(NetworkProfile::default(), 3);
    bench.send(A, B, 1);
    bench.run_until(Moment(1 << 30));
    bench.network.leave(bench.now, B, &mut bench.queue);
    bench.queue.clear();
    bench.send(A, B, 2);
    bench.run_until(Moment(1 << 34));
    assert_eq!(bench.seen[&A], [Seen::Down(B)]);
}

#[test]
fn whoever_is_there_gets_what_names_no_incarnation() {
    let mut bench = Bench::new(NetworkProfile::default(), 4);
    bench.send(A, Peer { incarnation: Incarnation::ZERO, ..B }, 5);
    bench.run_until(Moment(1 << 34));
    assert_eq!(bench.numbers(B), [5]);
}

#[test]
fn a_cut_is_one_way_and_a_clog_only_delays() {
    let mut bench = Bench::new(NetworkProfile::default(), 5);
    bench.network.cut(Moment::ZERO, A.node, B.node, Moment(1_000_000_000), &mut bench.queue);
    bench.network.clog(B.node, A.node, Moment(500_000_000));
    bench.send(A, B, 1);
    bench.send(B, A, 2);
    bench.run_until(Moment(400_000_000));
    assert_eq!((bench.numbers(B), bench.numbers(A)), (vec![], vec![]));
    bench.run_until(Moment(1_000_000_000));
    bench.send(A, B, 3);
    bench.run_until(Moment(2_000_000_000));
    assert_eq!((bench.numbers(B), bench.numbers(A)), (vec![3], vec![2]));
}

#[test]
fn damaged_bytes_close_the_connection_and_never_get_through() {
    let profile =
        NetworkProfile { through_codec: true, bit_flip_ppm: 200_000, ..Default::default() };
    let mut bench = Bench::new(profile, 6);
    for number in 0..50 {
        bench.send(A, B, number);
        bench.run_until(bench.now.plus_ns(5_000_000_000));
    }
    let numbers = bench.numbers(B);
    assert!(numbers.len() < 50 && numbers.len() > 10, "{}", numbers.len());
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
}

#[test]
fn a_dialled_connection_has_one_life() {
    let client = Peer { node: NodeId(100), incarnation: Incarnation(2) };
    for seed in 0..50 {
        let mut bench = Bench::new(NetworkProfile::default(), seed);
        assert!(bench.network.connect(bench.now, client, A));
        bench.send(client, A, 1);
        bench.send(A, client, 2);
        bench.run_until(Moment(1 << 30));
        assert_eq!((bench.numbers(A), bench.numbers(client)), (vec![1], vec![2]));
        bench.network.reset_nodes(bench.now, A.node, client.node, &mut bench.queue);
        bench.send(A, client, 3);
        bench.run_until(Moment(1 << 34));
        bench.send(A, client, 4);
        bench.send(client, A, 5);
        bench.run_until(Moment(1 << 36));
        assert_eq!(bench.numbers(A), [1], "seed {seed}");
        // The third was sent before anybody noticed: it may still be a part of the prefix.
        assert!([&[2][..], &[2, 3]].contains(&&bench.numbers(client)[..]), "seed {seed}");
        assert_eq!(bench.seen[&client].last(), Some(&Seen::Down(A)));
        assert_eq!(bench.seen[&A].last(), Some(&Seen::Down(client)));
    }
}
