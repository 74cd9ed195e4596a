//! What a persisted trim lets go (I13).

use common::{Offset, StreamId, Version};

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

    /// Takes over a trim of another replica, which is persisted here.
    pub(crate) fn adopt_trim(&mut self, stream: StreamId, through: Version, first_offset: Offset) {
        let segments = &mut self.segments;
        let release = |block: &_| segments::release(segments, block);
        let has_more =
            self.index.stream(stream).is_some_and(|entry| entry.next_offset() > first_offset);
        if has_more {
            self.index.trim(stream, through, release);
        } else {
            self.index.adopt_trim(stream, through, first_offset, release);
        }
        let found = self.index.stream(stream).map(|entry| entry.first_offset());
        assert_eq!(found, Some(first_offset), "I12: {stream} is trimmed through {through}");
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
