//! The faults of a run that come as events: a generated list, so that it can be printed and made shorter.

use common::membership::MemberChange;
use common::{NodeId, Prng};
use serde::Serialize;

use crate::clock::Moment;
use crate::random::{Randomness, log_uniform};
use crate::swarm::{Config, FaultRates};
use crate::world::Isolation;

mod strike;

pub use self::strike::{Later, Struck, has_heir, strike};

const MS: u64 = 1_000_000;
/// Wall clocks are set by up to this much.
const WALL_JUMP_US_MAX: u64 = 10_000_000;
/// Between two nodes that stop, or come back, in a swizzle, at most.
const SWIZZLE_STEP_MS_MAX: u64 = 100;
/// Faults of one kind in a run, at most.
const OF_A_KIND_MAX: usize = 200;

/// What an operator can decide about a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Decision {
    /// It plays no role for a while.
    Drain,
    /// It plays roles again.
    Restore,
    /// It never comes back.
    Remove,
}

impl Decision {
    /// As it is sent.
    #[must_use]
    pub const fn change(self) -> MemberChange {
        match self {
            Self::Drain => MemberChange::Drain,
            Self::Restore => MemberChange::Restore,
            Self::Remove => MemberChange::Remove,
        }
    }
}

/// One fault. Durations are in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Fault {
    /// A process is killed and comes back later.
    Kill {
        /// Whose.
        node: u64,
        /// How long it stays away.
        down_ms: u64,
    },
    /// A machine loses its power and comes back later.
    PowerCut {
        /// Which.
        node: u64,
        /// How long it stays away.
        down_ms: u64,
    },
    /// A process pauses.
    Pause {
        /// Whose.
        node: u64,
        /// How long.
        ms: u64,
    },
    /// What one sends to the other is lost.
    Cut {
        /// The sender.
        from: u64,
        /// The receiver.
        to: u64,
        /// How long.
        ms: u64,
    },
    /// What one sends to the other is held back.
    Clog {
        /// The sender.
        from: u64,
        /// The receiver.
        to: u64,
        /// How long.
        ms: u64,
    },
    /// A connection breaks.
    Reset {
        /// One side.
        a: u64,
        /// The other.
        b: u64,
    },
    /// Nobody reaches the register.
    RegisterOutage {
        /// How long.
        ms: u64,
    },
    /// A disk does nothing.
    DiskStall {
        /// Whose.
        node: u64,
        /// How long.
        ms: u64,
    },
    /// A disk has room for so much more, for a while.
    DiskFull {
        /// Whose.
        node: u64,
        /// Bytes that are left.
        slack_bytes: u64,
        /// How long.
        ms: u64,
    },
    /// A disk's next barrier fails.
    BarrierError {
        /// Whose.
        node: u64,
    },
    /// Every request to a disk takes longer.
    SlowDisk {
        /// Whose.
        node: u64,
        /// So many times as long.
        factor: u64,
        /// For how long.
        ms: u64,
    },
    /// A durable page gets a flipped bit.
    BitRot {
        /// Whose.
        node: u64,
        /// What the atlas draws the page from.
        draw: u64,
    },
    /// A durable page can't be read any more.
    LatentError {
        /// Whose.
        node: u64,
        /// What the atlas draws the page from.
        draw: u64,
    },
    /// The next footer of a segment is written somewhere else.
    Misdirect {
        /// Whose.
        node: u64,
        /// What the atlas draws the page from that it hits.
        draw: u64,
    },
    /// A node is started on a copy of another node's disk, by mistake.
    ForeignDisk {
        /// Which node.
        node: u64,
        /// Whose disk.
        other: u64,
        /// How long it stays away before that.
        down_ms: u64,
    },
    /// The network falls apart into two halves.
    Split {
        /// Who is where: a bit for each node and client, by its number modulo 64.
        sides: u64,
        /// How long.
        ms: u64,
    },
    /// A node is cut off.
    Isolate {
        /// Which.
        node: u64,
        /// In which direction.
        how: Isolation,
        /// How long.
        ms: u64,
    },
    /// One of several nodes that stop one after the other and come back in another order.
    Swizzle {
        /// Which.
        node: u64,
        /// How long.
        ms: u64,
    },
    /// A machine is lost for good, with its disk, if the cluster can bear that.
    Lose {
        /// Which.
        node: u64,
        /// How long until an operator removes it; 0 for never.
        removed_after_ms: u64,
    },
    /// An operator decides about a node, if that leaves enough of them.
    Decide {
        /// About whom.
        node: u64,
        /// What: to drain it, to restore it, or to remove it.
        what: Decision,
    },
    /// A wall clock is set forward or back.
    WallClock {
        /// Whose.
        node: u64,
        /// By how much, microseconds.
        us: i64,
    },
}

impl Fault {
    /// The names of all kinds.
    pub const KINDS: &[&str] = &[
        "barrier_error",
        "bit_rot",
        "clog",
        "cut",
        "decide",
        "disk_full",
        "disk_stall",
        "foreign_disk",
        "isolate",
        "kill",
        "latent_error",
        "lose",
        "misdirect",
        "pause",
        "power_cut",
        "register_outage",
        "reset",
        "slow_disk",
        "split",
        "swizzle",
        "wall_clock",
    ];

    /// The kinds that harm what is durable: `FaultRates::spare_what_is_durable` turns them off.
    pub const DAMAGE: &[&str] = &["bit_rot", "latent_error", "misdirect"];

    /// The name of its kind.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Kill { .. } => "kill",
            Self::PowerCut { .. } => "power_cut",
            Self::Pause { .. } => "pause",
            Self::Cut { .. } => "cut",
            Self::Clog { .. } => "clog",
            Self::Reset { .. } => "reset",
            Self::RegisterOutage { .. } => "register_outage",
            Self::DiskStall { .. } => "disk_stall",
            Self::DiskFull { .. } => "disk_full",
            Self::BarrierError { .. } => "barrier_error",
            Self::SlowDisk { .. } => "slow_disk",
            Self::BitRot { .. } => "bit_rot",
            Self::LatentError { .. } => "latent_error",
            Self::Misdirect { .. } => "misdirect",
            Self::ForeignDisk { .. } => "foreign_disk",
            Self::Isolate { .. } => "isolate",
            Self::Swizzle { .. } => "swizzle",
            Self::Split { .. } => "split",
            Self::Lose { .. } => "lose",
            Self::Decide { .. } => "decide",
            Self::WallClock { .. } => "wall_clock",
        }
    }
}

/// The faults of a run, in order.
#[must_use]
pub fn plan(
    config: &Config,
    nodes: &[NodeId],
    clients: &[NodeId],
    randomness: Randomness,
) -> Vec<(Moment, Fault)> {
    let mut planner = Planner { chaos_ms: config.chaos_ms, randomness, plan: Vec::new() };
    let rates: &FaultRates = &config.rates;
    let down_ms_max = rates.down_ms_max.max(1);
    let everyone: Vec<NodeId> = nodes.iter().chain(clients).copied().collect();
    let pair = |prng: &mut Prng| {
        let from = *prng.pick(&everyone);
        let others: Vec<NodeId> = everyone
            .iter()
            .copied()
            .filter(|other| *other != from && (nodes.contains(other) || nodes.contains(&from)))
            .collect();
        (from.0, prng.pick(&others).0)
    };
    planner.add("kill", rates.kill_ms, |prng| Fault::Kill {
        node: prng.pick(nodes).0,
        down_ms: log_uniform(prng, 1, down_ms_max),
    });
    planner.add("power cut", rates.power_cut_ms, |prng| Fault::PowerCut {
        node: prng.pick(nodes).0,
        down_ms: log_uniform(prng, 1, down_ms_max),
    });
    planner.add("client kill", rates.client_kill_ms, |prng| Fault::Kill {
        node: prng.pick(clients).0,
        down_ms: log_uniform(prng, 1, down_ms_max),
    });
    planner.add("pause", rates.pause_ms, |prng| Fault::Pause {
        node: prng.pick(&everyone).0,
        ms: log_uniform(prng, 1, 1_000),
    });
    planner.add("cut", rates.cut_ms, |prng| {
        let (from, to) = pair(prng);
        Fault::Cut { from, to, ms: log_uniform(prng, 1, 1_000) }
    });
    planner.add("clog", rates.clog_ms, |prng| {
        let (from, to) = pair(prng);
        Fault::Clog { from, to, ms: log_uniform(prng, 1, 1_000) }
    });
    planner.add("reset", rates.reset_ms, |prng| {
        let (a, b) = pair(prng);
        Fault::Reset { a, b }
    });
    planner.add("register outage", rates.register_outage_ms, |prng| Fault::RegisterOutage {
        ms: log_uniform(prng, 1, 1_000),
    });
    planner.add("disk stall", rates.disk_stall_ms, |prng| Fault::DiskStall {
        node: prng.pick(nodes).0,
        ms: log_uniform(prng, 1, 1_000),
    });
    planner.add("disk full", rates.disk_full_ms, |prng| Fault::DiskFull {
        node: prng.pick(nodes).0,
        slack_bytes: prng.below(3) * (256 << 10),
        ms: log_uniform(prng, 10, 1_000),
    });
    planner.add("barrier error", rates.barrier_error_ms, |prng| Fault::BarrierError {
        node: prng.pick(nodes).0,
    });
    planner.add("slow disk", rates.slow_disk_ms, |prng| Fault::SlowDisk {
        node: prng.pick(nodes).0,
        factor: log_uniform(prng, 2, 200),
        ms: log_uniform(prng, 1, 1_000),
    });
    planner.add("bit rot", rates.bit_rot_ms, |prng| Fault::BitRot {
        node: prng.pick(nodes).0,
        draw: prng.next(),
    });
    planner.add("latent error", rates.latent_error_ms, |prng| Fault::LatentError {
        node: prng.pick(nodes).0,
        draw: prng.next(),
    });
    planner.add("misdirect", rates.misdirect_ms, |prng| Fault::Misdirect {
        node: prng.pick(nodes).0,
        draw: prng.next(),
    });
    if nodes.len() > 1 {
        planner.add("foreign disk", rates.foreign_disk_ms, |prng| {
            let node = prng.pick(nodes).0;
            let others: Vec<NodeId> = nodes.iter().copied().filter(|of| of.0 != node).collect();
            let down_ms = log_uniform(prng, 1, down_ms_max);
            Fault::ForeignDisk { node, other: prng.pick(&others).0, down_ms }
        });
    }
    planner.add("isolate", rates.isolate_ms, |prng| Fault::Isolate {
        node: prng.pick(&everyone).0,
        how: *prng.pick(&[Isolation::Deaf, Isolation::Mute, Isolation::Clogged]),
        ms: log_uniform(prng, 1, 1_000),
    });
    planner.add("split", rates.split_ms, |prng| Fault::Split {
        sides: prng.next(),
        ms: log_uniform(prng, 1, 2_000),
    });
    planner.add("wall clock", rates.wall_clock_ms, |prng| Fault::WallClock {
        node: prng.pick(nodes).0,
        us: i64::try_from(prng.below(2 * WALL_JUMP_US_MAX)).expect("some seconds")
            - i64::try_from(WALL_JUMP_US_MAX).expect("some seconds"),
    });
    if nodes.len() > 1 {
        planner.add("lose", rates.lose_ms, |prng| Fault::Lose {
            node: prng.pick(nodes).0,
            removed_after_ms: if prng.chance(1, 2) { 0 } else { log_uniform(prng, 1, 1_000) },
        });
        planner.add("decide", rates.decide_ms, |prng| Fault::Decide {
            node: prng.pick(nodes).0,
            what: *prng.pick(&[
                Decision::Drain,
                Decision::Drain,
                Decision::Restore,
                Decision::Remove,
            ]),
        });
    }
    planner.swizzle(rates.swizzle_ms, &everyone);
    planner.plan.sort_by_key(|(at, _)| *at);
    planner.plan
}

struct Planner {
    chaos_ms: u64,
    randomness: Randomness,
    plan: Vec<(Moment, Fault)>,
}

impl Planner {
    /// FoundationDB's swizzle: some stop one after the other, then come back in another order.
    fn swizzle(&mut self, mean_ms: u64, everyone: &[NodeId]) {
        if mean_ms == 0 {
            return;
        }
        let mut prng = self.randomness.stream("swizzle", 1);
        let mut begin_ms = prng.below(2 * mean_ms);
        while begin_ms < self.chaos_ms && self.plan.len() < 10 * OF_A_KIND_MAX {
            let mut stopped = everyone.to_vec();
            shuffle(&mut stopped, &mut prng);
            stopped.truncate(prng.between(1, everyone.len() as u64) as usize);
            let mut order: Vec<u64> = (1..=stopped.len() as u64).collect();
            shuffle(&mut order, &mut prng);
            let step_ms = prng.between(1, SWIZZLE_STEP_MS_MAX);
            let all_ms = step_ms * stopped.len() as u64;
            for ((place, node), back) in (0..).zip(&stopped).zip(&order) {
                let at_ms = begin_ms + place * step_ms;
                let ms = all_ms + back * step_ms - place * step_ms;
                let fault = Fault::Swizzle { node: node.0, ms };
                self.plan.push((Moment(at_ms * MS + prng.below(MS)), fault));
            }
            begin_ms += 1 + prng.below(2 * mean_ms);
        }
    }

    fn add(&mut self, kind: &str, mean_ms: u64, mut draw: impl FnMut(&mut Prng) -> Fault) {
        if mean_ms == 0 {
            return;
        }
        let mut prng = self.randomness.stream(kind, 1);
        let (mut at_ms, mut count) = (prng.below(2 * mean_ms), 0);
        while at_ms < self.chaos_ms && count < OF_A_KIND_MAX {
            self.plan.push((Moment(at_ms * MS + prng.below(MS)), draw(&mut prng)));
            at_ms += 1 + prng.below(2 * mean_ms);
            count += 1;
        }
    }
}

fn shuffle<T>(items: &mut [T], prng: &mut Prng) {
    for place in (1..items.len()).rev() {
        items.swap(place, prng.below(place as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_kind_is_planned_by_some_seed_and_swizzles_overlap() {
        let (nodes, clients) = ([1, 2, 3].map(NodeId), [100, 101].map(NodeId));
        let (mut kinds, mut overlaps) = (BTreeSet::new(), 0);
        for seed in 0..200 {
            let randomness = Randomness::new(seed);
            let config = Config::draw(randomness);
            let plan = plan(&config, &nodes, &clients, randomness);
            assert!(plan.is_sorted_by_key(|(at, _)| *at));
            kinds.extend(plan.iter().map(|(_, fault)| fault.kind()));
            let stops: Vec<(u64, u64)> = plan
                .iter()
                .filter_map(|(at, fault)| match fault {
                    Fault::Swizzle { ms, .. } => Some((at.0 / MS, at.0 / MS + ms)),
                    _ => None,
                })
                .collect();
            overlaps += stops.windows(2).filter(|pair| pair[1].0 < pair[0].1).count();
        }
        assert_eq!(kinds.into_iter().collect::<Vec<_>>(), Fault::KINDS);
        assert!(overlaps > 20, "{overlaps}");
    }
}
