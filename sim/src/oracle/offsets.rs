//! I12: a stream's offsets are dense over all epochs, and every replica computes the same.
//!
//! Each epoch is a branch that grows out of its parent at RV. What an epoch that never reached the register
//! wrote is on a branch of its own and in nobody's way.

use std::collections::BTreeMap;

use common::{Endpoint, Epoch, Note, Offset, StreamId, Version};

use super::facts::Facts;
use super::{Judged, demand};

type Blocks = BTreeMap<Version, (Offset, u32)>;

#[derive(Clone, Debug, Default)]
pub(super) struct Offsets {
    branches: BTreeMap<(Epoch, StreamId), Blocks>,
}

impl Offsets {
    pub(super) fn note(&mut self, from: Endpoint, note: &Note, facts: &Facts) -> Judged {
        match note {
            Note::Accepted { epoch, version, blocks, .. } => {
                for (stream, base, count) in blocks {
                    self.accepted(from, *epoch, *version, (*stream, *base, *count), facts)?;
                }
                Ok(())
            }
            // What was copied is what another replica has.
            Note::Copied { version, blocks, .. } => {
                for (stream, base, count) in blocks {
                    let known = self.any_block(*stream, *version);
                    demand!(
                        "I12.copy",
                        known == Some((*base, *count)),
                        "{from:?} copies {version} of {stream} at {base} + {count}, which is {known:?}"
                    );
                }
                Ok(())
            }
            Note::Acknowledged { epoch, position, offsets, .. } => {
                for (stream, offset) in offsets {
                    let block = self.block(*epoch, *stream, position.version);
                    let inside = block.is_some_and(|(base, count)| {
                        (base.0..base.0 + u64::from(count)).contains(&offset.0)
                    });
                    demand!(
                        "I12.acknowledged",
                        inside,
                        "{position} got {offset} in {stream}, whose block is {block:?}"
                    );
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn accepted(
        &mut self,
        from: Endpoint,
        epoch: Epoch,
        version: Version,
        (stream, base, count): (StreamId, Offset, u32),
        facts: &Facts,
    ) -> Judged {
        let known = self.block(epoch, stream, version);
        if let Some(known) = known {
            demand!(
                "I12.replica",
                known == (base, count),
                "{from:?} has {version} of {stream} at {base} + {count}, another at {known:?}"
            );
            return Ok(());
        }
        let next = self.next_offset(epoch, stream, Version::MAX, facts);
        demand!(
            "I12.dense",
            base == next && count > 0,
            "{from:?} puts {count} records of {version} of {epoch} at {base} of {stream}; next is {next}"
        );
        let branch = self.branches.entry((epoch, stream)).or_default();
        let last = branch.last_key_value().map_or(Version::ZERO, |(last, _)| *last);
        demand!("I12.order", version > last, "{from:?} has {version} of {stream} behind {last}");
        branch.insert(version, (base, count));
        Ok(())
    }

    fn block(&self, epoch: Epoch, stream: StreamId, version: Version) -> Option<(Offset, u32)> {
        self.branches.get(&(epoch, stream))?.get(&version).copied()
    }

    /// Any branch's block of a version: versions are never handed out twice.
    pub(super) fn any_block(&self, stream: StreamId, version: Version) -> Option<(Offset, u32)> {
        let branches = self.branches.iter().filter(|((_, of), _)| *of == stream);
        branches.rev().find_map(|(_, blocks)| blocks.get(&version).copied())
    }

    fn next_offset(
        &self,
        mut epoch: Epoch,
        stream: StreamId,
        mut through: Version,
        facts: &Facts,
    ) -> Offset {
        loop {
            if let Some(branch) = self.branches.get(&(epoch, stream))
                && let Some((_, (base, count))) = branch.range(..=through).next_back()
            {
                return base.plus(u64::from(*count));
            }
            match facts.beginning(epoch) {
                Some(beginning) if beginning.parent < epoch => {
                    through = through.min(beginning.recovery_version);
                    epoch = beginning.parent;
                }
                _ => return Offset::ZERO,
            }
        }
    }
}
