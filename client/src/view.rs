//! Key-value state of streams by version, as the log tells it.
//!
//! ```text
//!  pruned below          through
//!       |  versions that can be read  |
//!  -----[=============================]----> versions
//!  (stream, key) -> [(v3, value), (v7, none), (v9, value)]     newest at or below the asked one counts
//! ```
//!
//! Puts and deletes count; appends pass by. Older values go when [`View::prune`] says that nobody reads below
//! a version any more; each change costs one queue entry, so pruning costs what was written, not what is
//! held.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use common::record::Op;
use common::{Code, StreamId, Version};

use crate::{Batch, Error};

type Key = (StreamId, Bytes);

/// A multi-version key-value state that follows streams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Each key's values, by version ascending; `None` is a delete.
    values: BTreeMap<Key, Vec<(Version, Option<Bytes>)>>,
    /// What changed when, in order: what pruning has to look at.
    changes: VecDeque<(Version, Key)>,
    through: Version,
    pruned_below: Version,
}

impl View {
    /// An empty view: everything at version 0.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The last version that the view knows completely (inclusive).
    #[must_use]
    pub const fn through(&self) -> Version {
        self.through
    }

    /// The lowest version that can still be read.
    #[must_use]
    pub const fn pruned_below(&self) -> Version {
        self.pruned_below
    }

    /// How many keys have a value or a remembered delete.
    #[must_use]
    pub fn key_count(&self) -> usize {
        self.values.len()
    }

    /// Takes in what a pull yielded: its batches, then its progress mark.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a record does not fit the layout; the view then ends before that version.
    pub fn follow(&mut self, batches: &[Batch], through: Version) -> Result<(), Error> {
        batches.iter().try_for_each(|batch| self.apply(batch))?;
        self.advance(through);
        Ok(())
    }

    /// Takes a batch in. Batches come in version order; one that is known already passes by.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a record does not fit the layout; nothing of the batch is taken in.
    pub fn apply(&mut self, batch: &Batch) -> Result<(), Error> {
        if batch.version <= self.through {
            return Ok(());
        }
        for delivered in batch.records()? {
            let value = match delivered.record.op {
                Op::Append => continue,
                Op::Put => Some(delivered.record.value),
                Op::Delete => None,
            };
            self.change(batch.version, (delivered.stream, delivered.record.key), value);
        }
        self.advance(batch.version);
        Ok(())
    }

    fn change(&mut self, version: Version, key: Key, value: Option<Bytes>) {
        let history = self.values.entry(key.clone()).or_default();
        match history.last_mut() {
            // A later record of the same version: only the last one of a version can be read.
            Some((last, slot)) if *last == version => *slot = value,
            last => {
                assert!(
                    last.is_none_or(|(last, _)| *last < version),
                    "a change at {version} came late"
                );
                history.push((version, value));
                self.changes.push_back((version, key));
            }
        }
    }

    /// Nothing else is at or below `through`.
    pub fn advance(&mut self, through: Version) {
        self.through = self.through.max(through);
        assert!(self.pruned_below <= self.through, "{} > {}", self.pruned_below, self.through);
    }

    /// The key's value at a version.
    ///
    /// # Errors
    /// [`Code::TooOld`] below what was pruned, [`Code::FutureVersion`] above [`View::through`].
    pub fn value(&self, stream: StreamId, key: &[u8], at: Version) -> Result<Option<Bytes>, Error> {
        self.check_version(at)?;
        let key = (stream, Bytes::copy_from_slice(key));
        Ok(self.values.get(&key).and_then(|history| value_at(history, at)))
    }

    /// The keys in `begin..end` that have a value at a version, in order. Without an end: to the last key.
    ///
    /// # Errors
    /// As for [`View::value`].
    pub fn scan(
        &self,
        stream: StreamId,
        begin: &[u8],
        end: Option<&[u8]>,
        at: Version,
    ) -> Result<impl Iterator<Item = (Bytes, Bytes)> + '_, Error> {
        self.check_version(at)?;
        let first = (stream, Bytes::copy_from_slice(begin));
        let end = end.map(Bytes::copy_from_slice);
        Ok(self
            .values
            .range(first..)
            .take_while(move |((found, key), _)| {
                *found == stream && end.as_ref().is_none_or(|end| key < end)
            })
            .filter_map(move |((_, key), history)| Some((key.clone(), value_at(history, at)?))))
    }

    fn check_version(&self, at: Version) -> Result<(), Error> {
        if at < self.pruned_below {
            let detail = format!("{at} is pruned; the view begins at {}", self.pruned_below);
            return Err(Error::new(Code::TooOld, detail));
        }
        if at > self.through {
            let detail = format!("{at} is not known yet; the view ends at {}", self.through);
            return Err(Error::new(Code::FutureVersion, detail));
        }
        Ok(())
    }

    /// Nobody reads below `below` any more; at most up to [`View::through`].
    pub fn prune(&mut self, below: Version) {
        let below = below.min(self.through);
        self.pruned_below = self.pruned_below.max(below);
        while let Some((_, key)) = self.changes.pop_front_if(|(version, _)| *version <= below) {
            let Some(history) = self.values.get_mut(&key) else { continue };
            let superseded = history.partition_point(|(version, _)| *version <= below);
            history.drain(..superseded.saturating_sub(1));
            if matches!(history[..], [(version, None)] if version <= below) {
                self.values.remove(&key);
            }
        }
    }
}

fn value_at(history: &[(Version, Option<Bytes>)], at: Version) -> Option<Bytes> {
    let count = history.partition_point(|(version, _)| *version <= at);
    history[..count].last().and_then(|(_, value)| value.clone())
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut, BytesMut};
    use common::message::PulledBlock;
    use common::record::{Record, Section};
    use common::{Offset, WallTime};
    use proptest::prelude::*;

    use super::*;
    use crate::Block;

    const STREAM: StreamId = StreamId(16);

    fn batch(version: u64, records: &[Record]) -> Batch {
        let mut encoded = BytesMut::new();
        records.iter().for_each(|record| record.encode(&mut encoded));
        let record_count = records.len() as u32;
        let mut body = BytesMut::new();
        body.put_slice(&Section::header(0, record_count, encoded.len()));
        body.put_slice(&encoded);
        let body = body.freeze();
        let entry = PulledBlock {
            stream: STREAM,
            base_offset: Offset(0),
            record_count,
            bytes: body.len() as u32,
            checksum: crc32c::crc32c(&body),
        };
        let version = Version(version);
        let block = Block::check(version, &entry, &body).unwrap();
        Batch { version, commit_time: WallTime(0), blocks: vec![block] }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Change(Vec<(u8, Option<u8>)>),
        Idle,
        Prune(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop::collection::vec((0_u8..4, any::<Option<u8>>()), 1..4).prop_map(Step::Change),
            1 => Just(Step::Idle),
            1 => (0_u8..40).prop_map(Step::Prune),
        ]
    }

    fn record(key: u8, value: Option<u8>) -> Record {
        match value {
            Some(value) => Record::put(vec![key], vec![value]),
            None => Record::delete(vec![key]),
        }
    }

    proptest! {
        /// The model keeps the whole map of every version.
        #[test]
        fn every_readable_version_is_what_a_full_copy_says(steps in prop::collection::vec(step(), 0..40)) {
            let mut view = View::new();
            let mut copies = vec![BTreeMap::<u8, u8>::new()];
            for step in steps {
                let version = copies.len() as u64;
                let mut copy = copies.last().unwrap().clone();
                match step {
                    Step::Prune(below) => {
                        view.prune(Version(u64::from(below)));
                        continue;
                    }
                    Step::Idle => view.advance(Version(version)),
                    Step::Change(changes) => {
                        let records: Vec<Record> =
                            changes.iter().map(|(key, value)| record(*key, *value)).collect();
                        view.apply(&batch(version, &records)).unwrap();
                        for (key, value) in changes {
                            match value {
                                Some(value) => drop(copy.insert(key, value)),
                                None => drop(copy.remove(&key)),
                            }
                        }
                    }
                }
                copies.push(copy);
            }
            prop_assert_eq!(view.through(), Version(copies.len() as u64 - 1));
            for (version, copy) in copies.iter().enumerate() {
                let at = Version(version as u64);
                if at < view.pruned_below() {
                    prop_assert_eq!(view.value(STREAM, b"k", at).unwrap_err().code(), Code::TooOld);
                    continue;
                }
                let found: Vec<(u8, u8)> =
                    view.scan(STREAM, b"", None, at).unwrap().map(|(k, v)| (k[0], v[0])).collect();
                prop_assert_eq!(found, copy.clone().into_iter().collect::<Vec<_>>());
                for key in 0..4 {
                    let value = view.value(STREAM, &[key], at).unwrap().map(|value| value[0]);
                    prop_assert_eq!(value, copy.get(&key).copied());
                }
            }
            let last = view.through();
            view.prune(last);
            prop_assert_eq!(view.key_count(), copies.last().unwrap().len(), "nothing dead is held");
        }
    }

    #[test]
    fn the_future_is_refused_and_a_known_batch_passes_by() {
        let mut view = View::new();
        view.apply(&batch(5, &[record(1, Some(1))])).unwrap();
        view.apply(&batch(5, &[record(1, Some(2))])).unwrap();
        assert_eq!(view.value(STREAM, &[1], Version(5)).unwrap().unwrap(), &[1][..]);
        assert_eq!(view.value(STREAM, &[1], Version(6)).unwrap_err().code(), Code::FutureVersion);
    }
}
