//! The meta slots: what must be persisted beside the log, written in turn.
//!
//! ```text
//! lock, begin_epoch, trim --> wanted --write--> slot of the generation's parity --> persisted
//! ```
//!
//! One write is in flight; changes that come meanwhile share the next. A *ticket* is the generation that will
//! hold a change: it is persisted once [`MetaSlots::persisted`] has reached it. Trims go through the
//! background lane, locks and epochs through the log lane: a recovery waits for them.

use std::collections::BTreeMap;

use common::disk::{DiskOp, File, Lane};
use common::{Cx, Epoch, NodeId, Offset, Payload, Sequence, StreamId, Version};

use super::{Log, Purpose};
use crate::format::meta::{Meta, StreamTrim, slot_of};
use crate::format::segment::EpochStart;

/// The wanted state and how much of it is persisted.
#[derive(Clone, Debug)]
pub(super) struct MetaSlots {
    node: NodeId,
    locked: Epoch,
    /// Where epochs begin whose older frames may still be on the disk; the last is the latest recruited.
    epochs: Vec<EpochStart>,
    trims: BTreeMap<StreamId, (Version, Offset)>,
    clean_shutdown: Option<Sequence>,
    /// The generation of the last write.
    written: u64,
    /// The generation of the last write that is durable.
    persisted: u64,
    is_dirty: bool,
    is_urgent: bool,
}

impl MetaSlots {
    pub(super) const fn new(node: NodeId) -> Self {
        Self {
            node,
            locked: Epoch::ZERO,
            epochs: Vec::new(),
            trims: BTreeMap::new(),
            clean_shutdown: None,
            written: 0,
            persisted: 0,
            is_dirty: false,
            is_urgent: false,
        }
    }

    /// What was found on the disk.
    pub(super) fn restore(meta: &Meta) -> Self {
        let trims = meta.trims.iter();
        Self {
            locked: meta.locked,
            epochs: meta.epochs.clone(),
            trims: trims.map(|trim| (trim.stream, (trim.through, trim.first_offset))).collect(),
            clean_shutdown: meta.clean_shutdown,
            written: meta.generation,
            persisted: meta.generation,
            ..Self::new(meta.node)
        }
    }

    pub(super) const fn persisted(&self) -> u64 {
        self.persisted
    }

    /// Whether everything that is wanted is persisted.
    pub(super) const fn is_settled(&self) -> bool {
        !self.is_dirty && self.written == self.persisted
    }

    /// The slot of the newest generation, if there is one.
    pub(super) fn newest_slot(&self) -> Option<u8> {
        (self.written > 0).then(|| slot_of(self.written))
    }

    pub(super) const fn locked(&self) -> Epoch {
        self.locked
    }

    pub(super) const fn clean_shutdown(&self) -> Option<Sequence> {
        self.clean_shutdown
    }

    pub(super) fn epochs(&self) -> &[EpochStart] {
        &self.epochs
    }

    pub(super) fn trims(&self) -> impl Iterator<Item = (StreamId, Version, Offset)> + '_ {
        self.trims.iter().map(|(stream, (through, first))| (*stream, *through, *first))
    }

    /// The latest epoch that recruited this server.
    pub(super) fn epoch(&self) -> Epoch {
        self.epochs.last().map_or(Epoch::ZERO, |start| start.epoch)
    }

    /// The ticket of everything that was wanted so far.
    const fn ticket(&self) -> u64 {
        if self.is_dirty { self.written + 1 } else { self.written }
    }

    /// Something changed: its ticket.
    pub(super) const fn touch(&mut self, is_urgent: bool) -> u64 {
        self.is_dirty = true;
        self.is_urgent |= is_urgent;
        self.ticket()
    }

    fn lock(&mut self, epoch: Epoch) -> u64 {
        if epoch <= self.locked {
            return self.ticket();
        }
        self.locked = epoch;
        self.touch(true)
    }

    /// `oldest` is the epoch below which no frame is left, where that is known.
    pub(super) fn begin_epoch(
        &mut self,
        epoch: Epoch,
        recovery_version: Version,
        oldest: Option<Epoch>,
    ) {
        assert!(epoch > self.epoch(), "{epoch} begins after {}", self.epoch());
        // A start matters as long as frames of older epochs may be on the disk.
        self.epochs.retain(|start| oldest.is_some_and(|oldest| start.epoch > oldest));
        self.epochs.push(EpochStart { epoch, previous_version: recovery_version });
        self.touch(true);
    }

    fn trim(&mut self, stream: StreamId, through: Version, first_offset: Offset) -> u64 {
        let old = self.trims.insert(stream, (through, first_offset));
        if let Some((old_through, old_first)) = old {
            assert!(
                old_through <= through && old_first <= first_offset,
                "I13: {stream} was trimmed through {old_through}, now {through}"
            );
        }
        self.touch(false)
    }

    pub(super) const fn mark_clean(&mut self, last: Sequence) -> u64 {
        self.clean_shutdown = Some(last);
        self.touch(true)
    }

    pub(super) const fn mark_unclean(&mut self) {
        self.clean_shutdown = None;
    }

    pub(super) fn written(&mut self, generation: u64) {
        assert!(
            generation == self.written && generation > self.persisted,
            "one write is in flight: {generation} of {}, {} is persisted",
            self.written,
            self.persisted
        );
        self.persisted = generation;
    }

    fn next(&mut self) -> Option<Meta> {
        if !self.is_dirty || self.written != self.persisted {
            return None;
        }
        self.is_dirty = false;
        self.written += 1;
        let trims = self.trims.iter();
        Some(Meta {
            generation: self.written,
            node: self.node,
            locked: self.locked,
            epochs: self.epochs.clone(),
            trims: trims
                .map(|(stream, (through, first_offset))| StreamTrim {
                    stream: *stream,
                    through: *through,
                    first_offset: *first_offset,
                    // More may have been given out, but what is not committed can still be taken back.
                    next_offset_hint: *first_offset,
                })
                .collect(),
            clean_shutdown: self.clean_shutdown,
        })
    }
}

impl Log {
    /// The epoch below which everything is refused for good.
    pub(crate) const fn locked(&self) -> Epoch {
        self.meta.locked()
    }

    /// The generation of the meta that is durable.
    pub(crate) const fn persisted(&self) -> u64 {
        self.meta.persisted()
    }

    /// Locks epochs below `epoch`: the ticket.
    pub(crate) fn persist_lock(&mut self, epoch: Epoch) -> u64 {
        self.meta.lock(epoch)
    }

    /// Says that everything of `stream` at or below `through` may go, once that is persisted: the ticket, and
    /// the first offset that is left. `None` when there is nothing to trim.
    pub(crate) fn persist_trim(
        &mut self,
        stream: StreamId,
        through: Version,
    ) -> Option<(u64, Offset)> {
        assert!(
            through <= self.known_committed && through <= self.durable,
            "I13: {stream} is trimmed through {through}; committed {}, durable {}",
            self.known_committed,
            self.durable
        );
        let first_offset = self.index.trim_offset(stream, through)?;
        Some((self.meta.trim(stream, through, first_offset), first_offset))
    }

    /// Says that another replica has trimmed `stream` through `through`, so that was committed: the ticket.
    pub(crate) fn persist_adopted_trim(
        &mut self,
        stream: StreamId,
        through: Version,
        first_offset: Offset,
    ) -> u64 {
        self.meta.trim(stream, through, first_offset)
    }

    /// The latest epoch that this server was recruited for or caught up under, and what it began at.
    pub(crate) fn latest_start(&self) -> (Epoch, Version) {
        self.meta
            .epochs()
            .last()
            .map_or((Epoch::ZERO, Version::ZERO), |start| (start.epoch, start.previous_version))
    }

    pub(super) fn write_meta(&mut self, cx: &mut Cx<'_>) {
        let Some(meta) = self.meta.next() else { return };
        let lane = if self.meta.is_urgent { Lane::Log } else { Lane::Background };
        self.meta.is_urgent = false;
        let (file, data) = (File::Meta(meta.slot()), Payload::from(meta.encode()));
        let op = DiskOp::Write { file, offset: 0, data, durable: true };
        self.request(cx, lane, Purpose::Meta(meta.generation), op);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_during_a_write_share_the_next_one() {
        let mut meta = MetaSlots::new(NodeId(1));
        let first = meta.lock(Epoch(1));
        assert_eq!(meta.next().unwrap().generation, first);
        let second = meta.lock(Epoch(2));
        assert_eq!(meta.trim(StreamId(17), Version(5), Offset(1)), second);
        assert!(meta.next().is_none(), "one write is in flight");
        meta.written(first);
        assert!(meta.persisted() >= first && meta.persisted() < second);
        let write = meta.next().unwrap();
        assert_eq!((write.generation, write.trims.len()), (second, 1));
        meta.written(second);
        assert_eq!(meta.lock(Epoch(2)), second, "a repeat is persisted already");
    }

    #[test]
    fn old_epoch_starts_leave_when_no_older_frame_is_left() {
        let mut meta = MetaSlots::new(NodeId(1));
        meta.begin_epoch(Epoch(1), Version(0), None);
        meta.begin_epoch(Epoch(3), Version(10), Some(Epoch(1)));
        meta.begin_epoch(Epoch(4), Version(20), Some(Epoch(1)));
        let epochs: Vec<u64> = meta.epochs().iter().map(|start| start.epoch.0).collect();
        assert_eq!(epochs, [3, 4]);
    }
}
