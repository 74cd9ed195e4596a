//! What was acknowledged against what is in the log. Knows numbers only: nothing of the system judges itself.

use std::collections::BTreeMap;

/// An acknowledgement of one record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Acknowledged {
    /// Which of its caller's records.
    pub(super) number: u64,
    /// Version and place in the batch.
    pub(super) position: (u64, u16),
    /// Place in the stream, when it was told.
    pub(super) offset: Option<u64>,
}

/// A record that a reader was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Found {
    pub(super) number: u64,
    pub(super) position: (u64, u16),
    pub(super) offset: u64,
}

/// What is wrong with one stream; nothing, when all are 0.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Verdict {
    /// Acknowledged and not there.
    pub(super) lost: u64,
    /// There more than once, each further time.
    pub(super) doubled: u64,
    /// Not where it was acknowledged, or not where the stream goes on.
    pub(super) misplaced: u64,
}

impl Verdict {
    pub(super) fn add(&mut self, other: Self) {
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.misplaced += other.misplaced;
    }
}

/// Judges a stream that was read from its beginning.
pub(super) fn judge(acknowledged: &[Acknowledged], found: &[Found]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut by_number: BTreeMap<u64, Found> = BTreeMap::new();
    let mut last = None;
    for (place, record) in (0..).zip(found) {
        let goes_on = record.offset == place && last.is_none_or(|last| last < record.position);
        verdict.misplaced += u64::from(!goes_on);
        last = Some(record.position);
        let twin = by_number.insert(record.number, *record);
        verdict.doubled += u64::from(twin.is_some());
    }
    for told in acknowledged {
        match by_number.get(&told.number) {
            None => verdict.lost += 1,
            Some(record) => {
                let is_there = record.position == told.position
                    && told.offset.is_none_or(|offset| offset == record.offset);
                verdict.misplaced += u64::from(!is_there);
            }
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(number: u64, version: u64) -> Acknowledged {
        Acknowledged { number, position: (version, 0), offset: None }
    }

    fn found(number: u64, version: u64, offset: u64) -> Found {
        Found { number, position: (version, 0), offset }
    }

    #[test]
    fn a_good_history_passes() {
        let read = [found(0, 10, 0), found(1, 20, 1), found(2, 30, 2)];
        // 1 was never acknowledged: it may be there.
        assert_eq!(judge(&[told(0, 10), told(2, 30)], &read), Verdict::default());
    }

    #[test]
    fn lost_doubled_and_misplaced_records_are_counted() {
        let lost = judge(&[told(0, 10), told(1, 20)], &[found(0, 10, 0)]);
        assert_eq!(lost, Verdict { lost: 1, ..Verdict::default() });
        let doubled = judge(&[told(0, 10)], &[found(0, 5, 0), found(0, 10, 1)]);
        assert_eq!(doubled, Verdict { doubled: 1, ..Verdict::default() });
        let elsewhere = judge(&[told(0, 10)], &[found(0, 11, 0)]);
        assert_eq!(elsewhere, Verdict { misplaced: 1, ..Verdict::default() });
        let offset = Acknowledged { offset: Some(4), ..told(0, 10) };
        assert_eq!(judge(&[offset], &[found(0, 10, 0)]).misplaced, 1);
        let gap = judge(&[], &[found(0, 10, 0), found(1, 20, 2)]);
        assert_eq!(gap, Verdict { misplaced: 1, ..Verdict::default() });
        let backwards = judge(&[], &[found(0, 10, 0), found(1, 10, 1)]);
        assert_eq!(backwards, Verdict { misplaced: 1, ..Verdict::default() });
    }
}
