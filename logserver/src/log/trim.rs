//! What a persisted trim lets go (I13).

use common::{StreamId, Version};

use super::{Log, segments};

impl Log {
    /// Forgets the blocks of `stream` at or below `through`, which is persisted: whether the trim moved.
    /// Their segments go when nothing else is needed of them.
    pub(crate) fn trim(&mut self, stream: StreamId, through: Version) -> bool {
        let before =
            self.index.stream(stream).map_or(Version::ZERO, |entry| entry.trimmed_through());
        assert!(
            through <= self.known_committed,
            "I13: {stream} is trimmed through {through}; committed {}",
            self.known_committed
        );
        let segments = &mut self.segments;
        self.index.trim(stream, through, |block| segments::release(segments, block));
        through > before
    }

    /// How many segments the log has.
    pub(crate) fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// How many spares are ready.
    pub(crate) fn spare_count(&self) -> usize {
        self.files.spare_count() + usize::from(self.files.next_is_ready())
    }

    /// Whether frames wait because no segment has room for them.
    pub(crate) fn waits_for_segment(&self) -> bool {
        self.flight.is_none() && !self.gathering.is_empty()
    }
}
