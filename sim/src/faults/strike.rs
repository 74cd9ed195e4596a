//! Bringing a fault about.

use common::{NodeId, Prng};

use super::{Fault, MS};
use crate::atlas::{Atlas, Victim};
use crate::clock::Moment;
use crate::disk::{Crash, Harm};
use crate::process::Spawn;
use crate::world::World;

/// What has to be done later about a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Later {
    /// Start the node again.
    Start(NodeId),
    /// The disk has room again.
    Unlimit(NodeId),
}

/// What came of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Struck {
    /// There was nothing to harm, or nothing that may be harmed.
    Missed,
    /// Done.
    Done,
    /// Done, and something is to be done later.
    Then(Moment, Later),
}

/// Brings a fault about.
pub fn strike<S: Spawn>(world: &mut World<S>, atlas: &mut Atlas, fault: Fault) -> Struck {
    world.say(|| format!("fault {fault:?}"));
    let after = |world: &World<S>, ms: u64| world.now().plus_ns(ms * MS);
    match fault {
        Fault::Kill { node, down_ms } | Fault::PowerCut { node, down_ms } => {
            let is_kill = matches!(fault, Fault::Kill { .. });
            let crash = if is_kill { Crash::Kill } else { Crash::PowerCut };
            return end(world, NodeId(node), crash, down_ms);
        }
        Fault::Pause { node, ms } => world.pause(NodeId(node), ms * MS),
        Fault::Cut { from, to, ms } => world.cut(NodeId(from), NodeId(to), ms * MS),
        Fault::Clog { from, to, ms } => world.clog(NodeId(from), NodeId(to), ms * MS),
        Fault::Reset { a, b } => world.reset(NodeId(a), NodeId(b)),
        Fault::Isolate { node, how, ms } => world.isolate(NodeId(node), how, ms * MS),
        Fault::Swizzle { node, ms } => {
            world.isolate(NodeId(node), crate::world::Isolation::Clogged, ms * MS);
        }
        Fault::WallClock { node, us } => world.jump_wall_clock(NodeId(node), us),
        Fault::RegisterOutage { ms } => {
            let until = after(world, ms);
            world.register_mut().outage(until);
        }
        Fault::DiskStall { node, ms } => {
            let until = after(world, ms);
            world.disk_mut(NodeId(node)).stall(until);
        }
        Fault::SlowDisk { node, factor, ms } => {
            let until = after(world, ms);
            world.disk_mut(NodeId(node)).slow(factor, until);
        }
        Fault::DiskFull { node, slack_bytes, ms } => {
            let disk = world.disk_mut(NodeId(node));
            disk.limit(disk.used_bytes() + slack_bytes);
            return Struck::Then(after(world, ms), Later::Unlimit(NodeId(node)));
        }
        Fault::BarrierError { node } => world.disk_mut(NodeId(node)).fail_next_barrier(),
        Fault::BitRot { node, draw } | Fault::LatentError { node, draw } => {
            let mut prng = Prng::new(draw);
            let is_flip = matches!(fault, Fault::BitRot { .. });
            let Some(victim) = choose(world, atlas, NodeId(node), &mut prng) else {
                return Struck::Missed;
            };
            let harm = if is_flip { Harm::Flipped(prng.next() as u32) } else { Harm::Unreadable };
            world.say(|| format!("n{node} {victim:?} is harmed: {harm:?}"));
            world.disk_mut(NodeId(node)).harm(victim.file, victim.page, harm);
        }
        Fault::Misdirect { node, draw } => {
            let node = NodeId(node);
            let Some(victim) = choose(world, atlas, node, &mut Prng::new(draw)) else {
                return Struck::Missed;
            };
            world.disk_mut(node).misdirect(victim.file, victim.page);
        }
        Fault::ForeignDisk { node, other, down_ms } => {
            let (node, other) = (NodeId(node), NodeId(other));
            let is_fit = world.live(node).is_some()
                && !world.is_on_foreign_disk(node)
                && atlas.has_opened(other);
            if !is_fit {
                return Struck::Missed;
            }
            let struck = end(world, node, Crash::Kill, down_ms);
            world.lend_disk(node, other);
            return struck;
        }
    }
    Struck::Done
}

fn choose<S: Spawn>(
    world: &World<S>,
    atlas: &mut Atlas,
    node: NodeId,
    prng: &mut Prng,
) -> Option<Victim> {
    // What an absent log server misses must be there for it.
    if world.is_on_foreign_disk(node) || world.is_someone_absent() {
        return None;
    }
    atlas.choose(node, world.disk(node), prng)
}

fn end<S: Spawn>(world: &mut World<S>, node: NodeId, crash: Crash, down_ms: u64) -> Struck {
    if world.live(node).is_none() {
        return Struck::Missed;
    }
    world.crash(node, crash);
    Struck::Then(world.now().plus_ns(down_ms * MS), Later::Start(node))
}
