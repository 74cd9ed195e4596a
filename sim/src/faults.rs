//! The faults of a run that come as events: a generated list, so that it can be printed and made shorter.

use common::{NodeId, Prng};
use serde::Serialize;

use crate::clock::Moment;
use crate::disk::Crash;
use crate::process::Spawn;
use crate::random::{Randomness, log_uniform};
use crate::swarm::{Config, FaultRates};
use crate::world::World;

const MS: u64 = 1_000_000;
/// Faults of one kind in a run, at most.
const OF_A_KIND_MAX: usize = 200;

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
    planner.plan.sort_by_key(|(at, _)| *at);
    planner.plan
}

struct Planner {
    chaos_ms: u64,
    randomness: Randomness,
    plan: Vec<(Moment, Fault)>,
}

impl Planner {
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

/// What has to be done later about a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Later {
    /// Start the node again.
    Start(NodeId),
    /// The disk has room again.
    Unlimit(NodeId),
}

/// Brings a fault about; returns what has to be done when.
pub fn strike<S: Spawn>(world: &mut World<S>, fault: Fault) -> Option<(Moment, Later)> {
    world.say(|| format!("fault {fault:?}"));
    let after = |world: &World<S>, ms: u64| world.now().plus_ns(ms * MS);
    match fault {
        Fault::Kill { node, down_ms } | Fault::PowerCut { node, down_ms } => {
            let node = NodeId(node);
            world.live(node)?;
            let is_kill = matches!(fault, Fault::Kill { .. });
            world.crash(node, if is_kill { Crash::Kill } else { Crash::PowerCut });
            return Some((after(world, down_ms), Later::Start(node)));
        }
        Fault::Pause { node, ms } => world.pause(NodeId(node), ms * MS),
        Fault::Cut { from, to, ms } => world.cut(NodeId(from), NodeId(to), ms * MS),
        Fault::Clog { from, to, ms } => world.clog(NodeId(from), NodeId(to), ms * MS),
        Fault::Reset { a, b } => world.reset(NodeId(a), NodeId(b)),
        Fault::RegisterOutage { ms } => {
            let until = after(world, ms);
            world.register_mut().outage(until);
        }
        Fault::DiskStall { node, ms } => {
            let until = after(world, ms);
            world.disk_mut(NodeId(node)).stall(until);
        }
        Fault::DiskFull { node, slack_bytes, ms } => {
            let disk = world.disk_mut(NodeId(node));
            disk.limit(disk.used_bytes() + slack_bytes);
            return Some((after(world, ms), Later::Unlimit(NodeId(node))));
        }
        Fault::BarrierError { node } => world.disk_mut(NodeId(node)).fail_next_barrier(),
    }
    None
}
