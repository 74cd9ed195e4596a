//! I1, I2: the pairs of an epoch form one chain from RV, and everyone takes each pair once, in order. I8: a
//! locked log server takes nothing of an older epoch.

use std::collections::BTreeMap;

use common::{Endpoint, Epoch, NodeId, Note, Version};

use super::facts::Facts;
use super::{Judged, demand};

#[derive(Clone, Debug, Default)]
pub(super) struct Chain {
    /// The pairs that were handed out: version to previous version.
    pairs: BTreeMap<Epoch, BTreeMap<Version, Version>>,
    sequencers: BTreeMap<Epoch, Endpoint>,
    decided: BTreeMap<(Endpoint, Epoch), Version>,
    accepted: BTreeMap<(NodeId, Epoch), Version>,
    locked: BTreeMap<NodeId, Epoch>,
}

impl Chain {
    pub(super) fn note(&mut self, from: Endpoint, note: &Note, facts: &Facts) -> Judged {
        match note {
            Note::Assigned { epoch, previous, version, .. } => {
                self.assigned(from, *epoch, *previous, *version, facts)
            }
            Note::Decided { epoch, previous, version, .. } => {
                let at = self.decided.entry((from, *epoch)).or_insert(begin(*epoch, facts));
                demand!(
                    "I1.resolver",
                    *at == *previous,
                    "{from:?} of {epoch} stands at {at} and takes {previous} -> {version}"
                );
                *at = *version;
                self.is_pair("I1.resolver_pair", from, *epoch, *previous, *version)
            }
            Note::Accepted { epoch, previous, version, .. } => {
                let locked = self.locked.get(&from.node).copied().unwrap_or_default();
                demand!(
                    "I8.locked",
                    *epoch >= locked,
                    "{from:?} takes {version} of {epoch}, but is locked for {locked}"
                );
                let key = (from.node, *epoch);
                let at = self.accepted.entry(key).or_insert(begin(*epoch, facts));
                demand!(
                    "I1.log_server",
                    *at == *previous,
                    "{from:?} of {epoch} stands at {at} and takes {previous} -> {version}"
                );
                *at = *version;
                self.is_pair("I1.log_server_pair", from, *epoch, *previous, *version)
            }
            Note::Locked { epoch, .. } => {
                let locked = self.locked.entry(from.node).or_default();
                *locked = (*locked).max(*epoch);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn assigned(
        &mut self,
        from: Endpoint,
        epoch: Epoch,
        previous: Version,
        version: Version,
        facts: &Facts,
    ) -> Judged {
        let Some(beginning) = facts.beginning(epoch) else {
            demand!("I1.unknown_epoch", false, "{version} in {epoch}, which has no beginning");
            return Ok(());
        };
        let sequencer = *self.sequencers.entry(epoch).or_insert(from);
        demand!("I1.one_sequencer", sequencer == from, "{epoch}: {sequencer:?} and {from:?}");
        let last = self.pairs.get(&epoch).and_then(|pairs| pairs.last_key_value());
        match last {
            Some((last, _)) => {
                demand!(
                    "I1.chain",
                    *last == previous,
                    "{epoch}: {previous} -> {version} behind {last}"
                );
            }
            None => {
                let rv = beginning.recovery_version;
                demand!("I1.begin", previous == rv, "{epoch} begins with {previous}, RV is {rv}");
                let first = beginning.first_version;
                demand!(
                    "I5.first",
                    version >= first,
                    "{epoch} begins with {version}, RTV is {first}"
                );
                // A recovery that never reached the register may have begun with the same version. One that
                // was overtaken goes on for a while, and nothing comes of it.
                let highest = self.highest_before(epoch, facts);
                demand!(
                    "O9.reused",
                    version > highest,
                    "{epoch} begins with {version}, but {highest} was handed out"
                );
            }
        }
        demand!("I1.ascending", version > previous, "{epoch}: {previous} -> {version}");
        self.pairs.entry(epoch).or_default().insert(version, previous);
        Ok(())
    }

    /// The highest version of all older epochs that are in the register.
    fn highest_before(&self, epoch: Epoch, facts: &Facts) -> Version {
        let older = self.pairs.range(..epoch);
        let written = older.filter(|(older, _)| facts.is_written(**older));
        let last = written.filter_map(|(_, pairs)| pairs.last_key_value());
        last.map(|(version, _)| *version).max().unwrap_or_default()
    }

    fn is_pair(
        &self,
        rule: &'static str,
        from: Endpoint,
        epoch: Epoch,
        previous: Version,
        version: Version,
    ) -> Judged {
        let found = self.pairs.get(&epoch).and_then(|pairs| pairs.get(&version)).copied();
        if found == Some(previous) {
            return Ok(());
        }
        let detail =
            format!("{from:?} takes {previous} -> {version} of {epoch}; handed out: {found:?}");
        Err(super::Violation { rule, detail })
    }
}

fn begin(epoch: Epoch, facts: &Facts) -> Version {
    facts.beginning(epoch).map_or(Version::ZERO, |beginning| beginning.recovery_version)
}
