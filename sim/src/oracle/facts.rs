//! What the other oracles build on: epochs and their ancestry, durable versions, acknowledgements.

use std::collections::{BTreeMap, BTreeSet};

use common::{Endpoint, Epoch, NodeId, Note, Role, Version};

use super::{Judged, Probe, demand};

/// How an epoch began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beginning {
    /// The epoch whose log it goes on with: the one that handed out RV.
    pub(super) parent: Epoch,
    pub(super) recovery_version: Version,
    pub(super) first_version: Version,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Which epoch handed out a version; the newest one when several did.
    assigned: BTreeMap<Version, Epoch>,
    beginnings: BTreeMap<Epoch, Beginning>,
    /// The log servers of each epoch whose generation is in the register.
    written: BTreeMap<Epoch, BTreeSet<NodeId>>,
    /// How far each log server has announced itself durable, by epoch.
    durable: BTreeMap<(Epoch, NodeId), Version>,
    /// The highest version that each epoch has acknowledged.
    acknowledged: BTreeMap<Epoch, Version>,
    acknowledged_count: u64,
    /// The answers that clients can have got: the same request to the same proxy never has two.
    answers: BTreeMap<((NodeId, Role), Endpoint, u64), common::Position>,
    /// The highest version that a consumer was given.
    delivered: Version,
}

impl Facts {
    pub(super) fn note(&mut self, from: Endpoint, note: &Note, probe: &impl Probe) -> Judged {
        match note {
            Note::RecoveryVersion { epoch, recovery_version, first_version } => {
                self.began(*epoch, *recovery_version, *first_version)
            }
            Note::Assigned { epoch, version, .. } => {
                let newest = self.assigned.entry(*version).or_default();
                *newest = (*newest).max(*epoch);
                Ok(())
            }
            Note::GenerationWritten { epoch } => self.written(*epoch, probe),
            Note::Serving { epoch } => {
                let is_written = self.written.contains_key(epoch);
                demand!("I10.serving", is_written, "{epoch} serves before it is in the register");
                Ok(())
            }
            Note::Durable { epoch, version } => {
                let entry = self.durable.entry((*epoch, from.node)).or_default();
                *entry = (*entry).max(*version);
                Ok(())
            }
            Note::Delivered { through, .. } => {
                self.delivered = self.delivered.max(*through);
                Ok(())
            }
            Note::Acknowledged { epoch, position, client, request, .. } => {
                if client.role != Role::Client {
                    return Ok(());
                }
                let is_written = self.written.contains_key(epoch);
                demand!(
                    "I10.acknowledged",
                    is_written,
                    "{position} of {epoch}, not in the register"
                );
                let later = self.beginnings.range(epoch.plus(1)..).next();
                if let Some((next, beginning)) = later.filter(|(next, _)| self.is_written(**next)) {
                    let rv = beginning.recovery_version;
                    demand!(
                        "O9.fenced",
                        position.version <= rv,
                        "{position} of {epoch} acknowledged, but {next} began at {rv}"
                    );
                }
                let key = ((from.node, from.role), *client, request.0);
                let earlier = self.answers.insert(key, *position);
                demand!(
                    "I15.one_answer",
                    earlier.is_none_or(|earlier| earlier == *position),
                    "{client:?} {request} was {earlier:?} and is {position}"
                );
                self.acknowledged_count += u64::from(earlier.is_none());
                let highest = self.acknowledged.entry(*epoch).or_default();
                *highest = (*highest).max(position.version);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Where an epoch began, inclusive.
    pub(super) fn recovery_version(&self, epoch: Epoch) -> Option<Version> {
        self.beginnings.get(&epoch).map(|beginning| beginning.recovery_version)
    }

    fn began(&mut self, epoch: Epoch, rv: Version, first: Version) -> Judged {
        demand!(
            "I5.jump",
            first.since(rv.min(first)) > 2 * common::LIFE_VERSIONS_MAX,
            "{epoch} jumps from {rv} to {first} only"
        );
        // A leader that was overtaken may get this far and no further.
        let acknowledged = self.acknowledged.range(..epoch).map(|(_, version)| *version).max();
        let acknowledged = acknowledged.unwrap_or_default();
        demand!(
            "I9.recovery_version",
            rv >= acknowledged,
            "{epoch} begins at {rv}, but {acknowledged} is acknowledged"
        );
        let is_overtaken = self.written.last_key_value().is_some_and(|(newest, _)| *newest > epoch);
        demand!(
            "I11.rolled_back",
            is_overtaken || rv >= self.delivered,
            "{epoch} begins at {rv}, but {} was delivered",
            self.delivered
        );
        let parent = self.assigned.get(&rv).copied();
        demand!(
            "I9.unknown",
            parent.is_some() || rv == Version::ZERO,
            "{epoch} begins at {rv}, which nobody handed out"
        );
        let parent = parent.unwrap_or_default();
        let beginning = Beginning { parent, recovery_version: rv, first_version: first };
        self.beginnings.insert(epoch, beginning);
        Ok(())
    }

    /// A leader says that its generation is in the register. When it learns that late, a newer one may stand
    /// behind it, and both may have become one.
    fn written(&mut self, epoch: Epoch, probe: &impl Probe) -> Judged {
        let state = probe.register();
        let found = state.generations.iter().find(|generation| generation.epoch >= epoch);
        let Some(generation) = found else {
            demand!("I10.register", false, "{epoch} is not in the register: {state:?}");
            return Ok(());
        };
        self.written.insert(epoch, generation.log_servers.iter().copied().collect());
        Ok(())
    }

    pub(super) fn beginning(&self, epoch: Epoch) -> Option<Beginning> {
        self.beginnings.get(&epoch).copied()
    }

    /// The lowest recovery version of the epochs after one, for those who may have missed some of them.
    pub(super) fn lowest_recovery_after(&self, epoch: Epoch) -> Version {
        let later = self.beginnings.range(epoch.plus(1)..);
        later.map(|(_, beginning)| beginning.recovery_version).min().unwrap_or(Version::MAX)
    }

    /// Whether a later epoch began below a version: nobody will ever read it, and it may go.
    pub(super) fn is_rolled_back(&self, version: Version) -> bool {
        let Some(epoch) = self.assigned.get(&version) else { return false };
        let later = self.beginnings.range(epoch.plus(1)..);
        later.into_iter().any(|(_, beginning)| beginning.recovery_version < version)
    }

    pub(super) fn is_written(&self, epoch: Epoch) -> bool {
        self.written.contains_key(&epoch)
    }

    pub(super) fn log_servers(&self, epoch: Epoch) -> impl Iterator<Item = NodeId> + '_ {
        self.written.get(&epoch).into_iter().flatten().copied()
    }

    /// How far a log server has announced itself durable in an epoch; at least where the epoch began.
    pub(super) fn durable(&self, epoch: Epoch, node: NodeId) -> Version {
        let begin = self.beginning(epoch).map_or(Version::ZERO, |begin| begin.recovery_version);
        self.durable.get(&(epoch, node)).copied().unwrap_or_default().max(begin)
    }

    /// The highest version that is truly committed: durable on all log servers of the newest generation that
    /// is in the register.
    pub(super) fn committed(&self) -> Version {
        let Some((epoch, servers)) = self.written.last_key_value() else { return Version::ZERO };
        let all = servers.iter().map(|node| self.durable(*epoch, *node));
        all.min().unwrap_or_default()
    }

    pub(super) fn acknowledged(&self) -> Version {
        self.acknowledged.values().copied().max().unwrap_or_default()
    }

    pub(super) const fn acknowledged_count(&self) -> u64 {
        self.acknowledged_count
    }
}
