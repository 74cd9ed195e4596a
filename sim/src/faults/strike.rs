//! Bringing a fault about.

use common::{NodeId, Prng};

use super::{Decision, Fault, MS};
use crate::atlas::{Atlas, Victim};
use crate::clock::Moment;
use crate::disk::{Crash, Harm};
use crate::process::Spawn;
use crate::workload::FIRST_CLIENT;
use crate::world::World;

/// What has to be done later about a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Later {
    /// Start the node again.
    Start(NodeId),
    /// The disk has room again.
    Unlimit(NodeId),
    /// An operator asks for it until it is decided.
    Ask(NodeId, Decision),
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
        Fault::Split { sides, ms } => world.split(sides, ms * MS),
        Fault::Isolate { node, how, ms } => world.isolate(NodeId(node), how, ms * MS),
        Fault::Lose { node, removed_after_ms } => {
            let node = NodeId(node);
            if !may_lose(world, node) {
                return Struck::Missed;
            }
            world.lose(node);
            if removed_after_ms == 0 {
                return Struck::Done;
            }
            let at = after(world, removed_after_ms);
            return Struck::Then(at, Later::Ask(node, Decision::Remove));
        }
        Fault::Decide { node, what } => {
            return Struck::Then(world.now(), Later::Ask(NodeId(node), what));
        }
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

/// Whether what a node has is elsewhere, and a spare node can take its seat. One is lost in a run: its disk
/// counts as harmed everywhere.
fn may_lose<S: Spawn>(world: &World<S>, node: NodeId) -> bool {
    let state = world.register_state();
    let Some(last) = state.generations.last() else { return false };
    let is_placed = last.log_servers.contains(&node) || last.absent.contains(&node);
    let others_have_it = last.replication > 1 && last.absent.iter().all(|of| *of == node);
    world.lost().is_none()
        && world.live(node).is_some()
        && !world.is_on_foreign_disk(node)
        && (!is_placed || (others_have_it && has_heir(world, node)))
}

/// Whether somebody copies for the seat of a node, or could.
#[must_use]
pub fn has_heir<S: Spawn>(world: &World<S>, node: NodeId) -> bool {
    let state = world.register_state();
    let (membership, last) = (&state.membership, state.generations.last());
    let is_placed = |of: &NodeId| {
        last.is_some_and(|last| last.log_servers.contains(of) || last.absent.contains(of))
    };
    let is_spare = |of: NodeId| {
        of != node
            && !is_placed(&of)
            && !membership.seats.has_moved(of)
            && !membership.is_leaving(of)
    };
    let heir = membership.seats.heir(node);
    heir.is_some_and(|heir| !membership.is_leaving(heir))
        || world.hosts().filter(|of| of.0 < FIRST_CLIENT).any(is_spare)
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
