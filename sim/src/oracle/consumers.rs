//! I11, I12, O10, O11: consumers get committed versions only, whole, in order, without a gap, and all the
//! same.

use std::collections::BTreeMap;

use common::{Endpoint, Note, Offset, StreamId, Version};

use super::facts::Facts;
use super::offsets::Offsets;
use super::{Judged, demand};
use crate::observe::{ConsumerId, Observation, SeenBlock};

#[derive(Clone, Debug, Default)]
struct Consumer {
    streams: Vec<StreamId>,
    through: Version,
    /// The next offset of each stream, once it is known.
    next: BTreeMap<StreamId, Offset>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Consumers {
    consumers: BTreeMap<ConsumerId, Consumer>,
    /// What anyone was given: the first one defines it.
    log: BTreeMap<StreamId, BTreeMap<Version, SeenBlock>>,
    /// Up to where somebody has read a stream without a gap from its start.
    complete: BTreeMap<StreamId, Version>,
}

impl Consumers {
    pub(super) fn note(&self, from: Endpoint, note: &Note, facts: &Facts) -> Judged {
        match note {
            Note::Delivered { to, after, through } => {
                demand!(
                    "I11.order",
                    after <= through,
                    "{from:?} gives {to:?} {after} to {through}"
                );
                let committed = facts.committed();
                demand!(
                    "I11.committed",
                    *through <= committed,
                    "{from:?} gives {to:?} up to {through}, committed is {committed}"
                );
            }
            Note::KnownCommitted { version } => {
                let committed = facts.committed();
                demand!(
                    "I11.known",
                    *version <= committed,
                    "{from:?} takes {version} for committed, but it is {committed}"
                );
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn observe(
        &mut self,
        observation: &Observation,
        facts: &Facts,
        offsets: &Offsets,
    ) -> Judged {
        match observation {
            Observation::Subscribed { consumer, streams, after } => {
                let mut fresh =
                    Consumer { streams: streams.clone(), through: *after, next: BTreeMap::new() };
                for stream in streams.iter().filter(|stream| self.complete(**stream) >= *after) {
                    let mut blocks = self.log.get(stream).into_iter().flatten();
                    let last = blocks.rfind(|(version, _)| *version <= after);
                    let next = last.map_or(Offset::ZERO, |(_, block)| {
                        block.base_offset.plus(u64::from(block.record_count))
                    });
                    fresh.next.insert(*stream, next);
                }
                self.consumers.insert(*consumer, fresh);
                Ok(())
            }
            Observation::Pulled { consumer, after, through, blocks } => {
                let committed = facts.committed();
                demand!(
                    "I11.seen",
                    *through <= committed,
                    "{consumer:?} sees up to {through}, committed is {committed}"
                );
                self.pulled(*consumer, *after, *through, blocks, offsets)
            }
            _ => Ok(()),
        }
    }

    fn pulled(
        &mut self,
        id: ConsumerId,
        after: Version,
        through: Version,
        blocks: &[SeenBlock],
        offsets: &Offsets,
    ) -> Judged {
        let Some(mut consumer) = self.consumers.remove(&id) else {
            demand!("O11.stranger", false, "{id:?} never subscribed");
            return Ok(());
        };
        let at = consumer.through;
        demand!(
            "O11.prefix",
            after == at && through >= after,
            "{id:?} stands at {at} and gets {after} to {through}"
        );
        let mut last = (after, StreamId::MAX);
        for block in blocks {
            let here = (block.version, block.stream);
            demand!(
                "O11.order",
                here > last && block.version <= through,
                "{id:?}: {here:?} behind {last:?}, through {through}"
            );
            last = here;
            self.block(id, &mut consumer, block, offsets)?;
        }
        self.nothing_missing(id, &consumer, after, through, blocks)?;
        consumer.through = through;
        for stream in &consumer.streams {
            let known = self.complete(*stream);
            if after <= known {
                self.complete.insert(*stream, known.max(through));
            }
        }
        self.consumers.insert(id, consumer);
        Ok(())
    }

    fn block(
        &mut self,
        id: ConsumerId,
        consumer: &mut Consumer,
        block: &SeenBlock,
        offsets: &Offsets,
    ) -> Judged {
        let SeenBlock { stream, version, base_offset, record_count, .. } = *block;
        demand!(
            "O11.stream",
            consumer.streams.contains(&stream),
            "{id:?} never asked for {stream}"
        );
        let end = base_offset.plus(u64::from(record_count));
        if let Some(next) = consumer.next.insert(stream, end) {
            demand!(
                "I12.consumer",
                next == base_offset,
                "{id:?}: {version} of {stream} begins at {base_offset}, expected {next}"
            );
        }
        let written = offsets.any_block(stream, version);
        demand!(
            "O7.phantom",
            written == Some((base_offset, record_count)),
            "{id:?} got {version} of {stream} at {base_offset} + {record_count}; written was {written:?}"
        );
        let log = self.log.entry(stream).or_default();
        let canonical = log.entry(version).or_insert_with(|| block.clone());
        demand!(
            "O10.differs",
            canonical == block,
            "{id:?} got {block:?}, another consumer {canonical:?}"
        );
        Ok(())
    }

    fn nothing_missing(
        &self,
        id: ConsumerId,
        consumer: &Consumer,
        after: Version,
        through: Version,
        blocks: &[SeenBlock],
    ) -> Judged {
        for stream in &consumer.streams {
            let Some(log) = self.log.get(stream) else { continue };
            let known = log.range(after.plus(1)..=through.max(after.plus(1)));
            let expect = known.filter(|(version, _)| **version <= through).count();
            let got = blocks.iter().filter(|block| block.stream == *stream).count();
            demand!(
                "O11.gap",
                got == expect,
                "{id:?} got {got} blocks of {stream} in {after} to {through}, others {expect}"
            );
        }
        Ok(())
    }

    /// All blocks that anyone was given.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &SeenBlock> {
        self.log.values().flat_map(BTreeMap::values)
    }

    /// Up to where a stream is known completely.
    pub(super) fn complete(&self, stream: StreamId) -> Version {
        self.complete.get(&stream).copied().unwrap_or_default()
    }
}
