//! I3, I7, I8: what is announced or acknowledged would survive a power cut, on every log server.
//!
//! White-box: at the moment of the announcement the simulated disk is asked. That finds an announcement
//! before its barrier without any crash.

use std::collections::{BTreeMap, BTreeSet};

use common::disk::{DiskOp, DiskRequest, File};
use common::{Endpoint, Epoch, NodeId, Note, Role, Version};

use super::facts::Facts;
use super::frames::frames_in;
use super::{Judged, Probe, demand};

#[derive(Clone, Copy, Debug)]
struct Place {
    file: File,
    offset: u64,
    bytes: u64,
}

#[derive(Clone, Debug, Default)]
struct Server {
    /// Where the newest frame of each version was written.
    frames: BTreeMap<Version, Place>,
    /// Segments that were recycled: that nothing in them is needed is for others to judge (I13).
    recycled: BTreeSet<File>,
    /// Accepted, and not yet seen to be durable.
    unproven: BTreeMap<Version, Epoch>,
    /// The newest announcement.
    announced: Version,
    announced_epoch: Epoch,
    /// The newest lock: its epoch, and what it said is durable.
    locked: Option<(Epoch, Version)>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Durability {
    servers: BTreeMap<NodeId, Server>,
}

impl Durability {
    /// A log server gives a write to its disk.
    pub(super) fn wrote(&mut self, node: NodeId, request: &DiskRequest) {
        let DiskOp::Write { file, offset, data, .. } = &request.op else { return };
        let server = self.servers.entry(node).or_default();
        for found in frames_in(&data.contiguous()) {
            let place = Place { file: *file, offset: offset + found.offset, bytes: found.bytes };
            server.frames.insert(found.version, place);
        }
    }

    pub(super) fn note(
        &mut self,
        from: Endpoint,
        note: &Note,
        facts: &Facts,
        probe: &impl Probe,
    ) -> Judged {
        match note {
            Note::Accepted { epoch, version, .. } | Note::Copied { epoch, version, .. } => {
                self.servers.entry(from.node).or_default().unproven.insert(*version, *epoch);
                Ok(())
            }
            // What it had announced in epochs that are over no longer binds it: others have that, too.
            Note::CatchingUp { epoch, from: certain } => {
                let server = self.servers.entry(from.node).or_default();
                (server.announced_epoch, server.announced) = (*epoch, *certain);
                server.unproven.retain(|version, _| *version <= *certain);
                Ok(())
            }
            // It begins at RV: what it had above is nobody's.
            Note::RoleChanged { role: Role::LogServer, epoch, began: true } => {
                let server = self.servers.entry(from.node).or_default();
                if let Some(recovery_version) = facts.recovery_version(*epoch) {
                    server.unproven.retain(|version, _| *version <= recovery_version);
                }
                Ok(())
            }
            Note::Durable { epoch, version } => self.durable(from, *epoch, *version, probe),
            Note::Locked { epoch, durable } => self.locked(from, *epoch, *durable, probe),
            Note::Recycled { last_version, .. } => {
                let server = self.servers.entry(from.node).or_default();
                let file = server.frames.get(last_version).map(|place| place.file);
                server.recycled.extend(file);
                Ok(())
            }
            Note::Opened { durable, .. } => self.opened(from, *durable, facts),
            Note::Acknowledged { epoch, position, client, .. } if client.role == Role::Client => {
                self.acknowledged(*epoch, position.version, facts, probe)
            }
            _ => Ok(()),
        }
    }

    fn durable(
        &mut self,
        from: Endpoint,
        epoch: Epoch,
        version: Version,
        probe: &impl Probe,
    ) -> Judged {
        let server = self.servers.entry(from.node).or_default();
        if let Some((lock, durable)) = server.locked {
            demand!(
                "I8.announced",
                epoch >= lock || version <= durable,
                "{from:?} announces {version} of {epoch} after it answered the lock of {lock} with {durable}"
            );
        }
        demand!(
            "I7.backwards",
            epoch > server.announced_epoch || version >= server.announced,
            "{from:?} announced {} and now {version}",
            server.announced
        );
        (server.announced_epoch, server.announced) = (epoch, version);
        server.prove(from.node, version, "I7.durable", probe)
    }

    fn locked(
        &mut self,
        from: Endpoint,
        epoch: Epoch,
        durable: Version,
        probe: &impl Probe,
    ) -> Judged {
        let server = self.servers.entry(from.node).or_default();
        server.locked = Some((epoch, durable));
        server.prove(from.node, durable, "I8.durable", probe)
    }

    /// What was announced before must be found again, unless a later epoch began below it.
    fn opened(&mut self, from: Endpoint, durable: Version, facts: &Facts) -> Judged {
        let server = self.servers.entry(from.node).or_default();
        let dropped = facts.lowest_recovery_after(server.announced_epoch);
        let expect = server.announced.min(dropped);
        demand!(
            "O5.lost",
            durable >= expect,
            "{from:?} finds {durable}, but had announced {expect}"
        );
        server.unproven.retain(|version, _| *version <= durable);
        Ok(())
    }

    fn acknowledged(
        &self,
        epoch: Epoch,
        version: Version,
        facts: &Facts,
        probe: &impl Probe,
    ) -> Judged {
        for node in facts.log_servers(epoch) {
            let durable = facts.durable(epoch, node);
            demand!(
                "I3.durable",
                durable >= version,
                "{version} of {epoch} is acknowledged, but {node} is durable up to {durable} only"
            );
            let server = self.servers.get(&node);
            let place = server.and_then(|server| server.frames.get(&version));
            let is_recycled = |file| server.is_some_and(|server| server.recycled.contains(&file));
            let survives = place.is_some_and(|place| {
                is_recycled(place.file)
                    || probe.would_survive(node, place.file, place.offset, place.bytes)
            });
            demand!(
                "I3.survives",
                survives,
                "{version} of {epoch} is acknowledged, but {node} has it at {place:?} and would lose it"
            );
        }
        Ok(())
    }
}

impl Server {
    /// Everything accepted up to `through` would survive now.
    fn prove(
        &mut self,
        node: NodeId,
        through: Version,
        rule: &'static str,
        probe: &impl Probe,
    ) -> Judged {
        while let Some((version, epoch)) = self.unproven.first_key_value() {
            if *version > through {
                break;
            }
            let place = self.frames.get(version);
            let survives = place.is_some_and(|place| {
                probe.would_survive(node, place.file, place.offset, place.bytes)
            });
            if !survives {
                let detail = format!(
                    "{node} says that {through} is durable, but would lose {version} of {epoch} at {place:?}"
                );
                return Err(super::Violation { rule, detail });
            }
            self.unproven.pop_first();
        }
        Ok(())
    }
}
