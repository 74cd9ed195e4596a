//! I13: trims are persisted before data goes, never go back, and never reach further than somebody asked.

use std::collections::BTreeMap;

use common::{Endpoint, Epoch, NodeId, Note, Offset, Peer, StreamId, Version};

use super::facts::Facts;
use super::{Judged, demand};
use crate::observe::Observation;

#[derive(Clone, Debug, Default)]
pub(super) struct Trims {
    asked: BTreeMap<StreamId, Version>,
    /// What clients were told is persisted, by the epoch that they knew of.
    told: BTreeMap<(StreamId, Epoch), (Version, Offset)>,
    /// The same, when each description was asked for, of the epochs up to the asker's: a log server that is
    /// left behind answers those who are left behind with it.
    told_before: BTreeMap<(Peer, u64), BTreeMap<StreamId, (Version, Offset)>>,
    /// What log servers said that they have persisted.
    noted: BTreeMap<(NodeId, StreamId), (Version, Offset)>,
    /// What they can have persisted.
    persisted: BTreeMap<(NodeId, StreamId), Version>,
    /// The last version that each log server took.
    last: BTreeMap<NodeId, Version>,
    /// What each log server cut off before it caught up: above the first, up to the second.
    void: BTreeMap<NodeId, Vec<(Version, Version)>>,
}

impl Trims {
    /// Whether a log server has cut off what it had of the version.
    pub(super) fn is_void(&self, node: NodeId, version: Version) -> bool {
        let void = self.void.get(&node);
        void.is_some_and(|void| {
            void.iter().any(|(after, last)| (*after < version) && version <= *last)
        })
    }

    /// Whether a block was not trimmed.
    pub(super) fn is_wanted(&self, node: NodeId, stream: StreamId, version: Version) -> bool {
        let trimmed = self.persisted.get(&(node, stream)).copied().unwrap_or_default();
        version > trimmed
    }

    pub(super) fn note(&mut self, from: Endpoint, note: &Note, facts: &Facts) -> Judged {
        match note {
            Note::Trimmed { stream, through, first_offset } if !stream.is_system() => {
                let asked = self.asked.get(stream).copied().unwrap_or_default();
                demand!(
                    "I13.asked",
                    *through <= asked,
                    "{from:?} trims {stream} to {through}, asked was {asked}"
                );
                let new = (*through, *first_offset);
                let old = self.noted.insert((from.node, *stream), new).unwrap_or_default();
                let possible = self.persisted.entry((from.node, *stream)).or_default();
                *possible = (*possible).max(*through);
                let forward = old.0 <= new.0 && old.1 <= new.1;
                demand!(
                    "I13.backwards",
                    forward,
                    "{from:?} trims {stream} from {old:?} to {new:?}"
                );
                Ok(())
            }
            Note::Accepted { version, .. } | Note::Copied { version, .. } => {
                self.last.insert(from.node, *version);
                Ok(())
            }
            // What it has above is copied anew, elsewhere on its disk.
            Note::CatchingUp { from: certain, .. } => {
                let last = self.last.insert(from.node, *certain).unwrap_or_default();
                self.void.entry(from.node).or_default().push((*certain, last));
                Ok(())
            }
            // A trim that a crash has interrupted may have become durable without a word.
            Note::Opened { .. } => {
                for (stream, asked) in &self.asked {
                    let old = self.persisted.entry((from.node, *stream)).or_default();
                    *old = (*old).max(*asked);
                }
                Ok(())
            }
            Note::Recycled { last_version, streams } => {
                for (stream, last) in streams.iter().filter(|(stream, _)| !stream.is_system()) {
                    let key = (from.node, *stream);
                    let trimmed = self.persisted.get(&key).copied().unwrap_or_default();
                    demand!(
                        "I13.recycled",
                        *last <= trimmed
                            || facts.is_rolled_back(*last)
                            || self.is_void(from.node, *last),
                        "{from:?} drops {last} of {stream}, trimmed to {trimmed}; \
                         the segment ends at {last_version}"
                    );
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn observe(&mut self, client: Peer, observation: &Observation) -> Judged {
        match observation {
            Observation::AskedTrim { stream, through } => {
                let asked = self.asked.entry(*stream).or_default();
                *asked = (*asked).max(*through);
            }
            Observation::GotTrim { epoch, stream, through, first_offset } => {
                let told = self.told.entry((*stream, *epoch)).or_default();
                *told = (told.0.max(*through), told.1.max(*first_offset));
            }
            Observation::AskedDescription { epoch, number } => {
                let mut before = BTreeMap::<StreamId, (Version, Offset)>::new();
                for ((stream, _), told) in self.told.iter().filter(|((_, at), _)| at <= epoch) {
                    let highest = before.entry(*stream).or_default();
                    *highest = (highest.0.max(told.0), highest.1.max(told.1));
                }
                self.told_before.insert((client, *number), before);
            }
            Observation::Described {
                number,
                stream,
                first_offset,
                next_offset,
                trimmed_through,
            } => {
                let told = self.told_before.get(&(client, *number));
                let told = told.and_then(|told| told.get(stream)).copied().unwrap_or_default();
                demand!(
                    "I13.forgotten",
                    *trimmed_through >= told.0,
                    "{stream} is trimmed to {trimmed_through}, but {told:?} was promised"
                );
                demand!(
                    "I13.offsets",
                    first_offset <= next_offset,
                    "{stream}: first {first_offset}, next {next_offset}"
                );
            }
            _ => {}
        }
        Ok(())
    }
}
