//! Interactive transactions: reads through a view at one version, with the transaction's own writes on top.
//!
//! ```text
//!  read(key) --> own writes? --yes--> that, nothing recorded
//!                     | no
//!                     v
//!                view at the read version, and a read of the key's conflict key
//! ```
//!
//! What was read is recorded as conflict keys, what is written as records and conflict keys; so the commit
//! succeeds only if nobody has changed what was seen, ranges with keys that were not there included.

use std::collections::BTreeMap;

use bytes::Bytes;
use common::{StreamId, Version};

use crate::{Error, Transaction, View, conflict_key, conflict_key_end};

/// A transaction that reads what it is going to change.
#[derive(Clone, Debug)]
pub struct ReadTransaction {
    read_version: Version,
    /// The transaction's own writes; `None` is a delete.
    written: BTreeMap<(StreamId, Bytes), Option<Bytes>>,
    transaction: Transaction,
}

impl ReadTransaction {
    /// Begins at a read version; the view must have followed the log through it.
    #[must_use]
    pub fn new(read_version: Version) -> Self {
        let mut transaction = Transaction::new();
        transaction.read_version(read_version).conflict_on_keys();
        Self { read_version, written: BTreeMap::new(), transaction }
    }

    /// The version that is read at.
    #[must_use]
    pub const fn read_version(&self) -> Version {
        self.read_version
    }

    /// The key's value as this transaction sees it.
    ///
    /// # Errors
    /// When the view can't be read at the read version; see [`View::value`].
    pub fn value(
        &mut self,
        view: &View,
        stream: StreamId,
        key: &[u8],
    ) -> Result<Option<Bytes>, Error> {
        if let Some(value) = self.written.get(&(stream, Bytes::copy_from_slice(key))) {
            return Ok(value.clone());
        }
        let value = view.value(stream, key, self.read_version)?;
        self.transaction.read_point(&conflict_key(stream, key));
        Ok(value)
    }

    /// The keys in `begin..end` and their values as this transaction sees them. Without an end: to the last
    /// key of the stream.
    ///
    /// # Errors
    /// When the view can't be read at the read version; see [`View::value`].
    pub fn scan(
        &mut self,
        view: &View,
        stream: StreamId,
        begin: &[u8],
        end: Option<&[u8]>,
    ) -> Result<Vec<(Bytes, Bytes)>, Error> {
        let found = view.scan(stream, begin, end, self.read_version)?;
        let mut merged: BTreeMap<Bytes, Bytes> = found.collect();
        let first = (stream, Bytes::copy_from_slice(begin));
        for ((_, key), value) in self.written.range(first..).take_while(|((found, key), _)| {
            *found == stream && end.is_none_or(|end| &key[..] < end)
        }) {
            match value {
                Some(value) => merged.insert(key.clone(), value.clone()),
                None => merged.remove(key),
            };
        }
        let end = end.map_or_else(|| conflict_key_end(stream), |end| conflict_key(stream, end));
        self.transaction.read(&conflict_key(stream, begin), &end);
        Ok(merged.into_iter().collect())
    }

    /// Gives a key a value.
    pub fn put(&mut self, stream: StreamId, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        let (key, value) = (key.into(), value.into());
        self.transaction.put(stream, key.clone(), value.clone());
        self.written.insert((stream, key), Some(value));
    }

    /// Ends a key.
    pub fn delete(&mut self, stream: StreamId, key: impl Into<Bytes>) {
        let key = key.into();
        self.transaction.delete(stream, key.clone());
        self.written.insert((stream, key), None);
    }

    /// Everything else that a transaction can do: appends, keys of one's own, an idempotency id.
    pub const fn transaction(&mut self) -> &mut Transaction {
        &mut self.transaction
    }

    /// What there is to commit.
    #[must_use]
    pub fn finish(self) -> Transaction {
        self.transaction
    }
}

#[cfg(test)]
mod tests {
    use common::{KeyRange, Knobs};

    use super::*;

    const STREAM: StreamId = StreamId(16);

    #[test]
    fn own_writes_are_seen_and_only_foreign_reads_are_recorded() {
        let mut view = View::new();
        view.advance(Version(9));
        let mut transaction = ReadTransaction::new(Version(9));
        assert_eq!(transaction.value(&view, STREAM, b"a").unwrap(), None);
        transaction.put(STREAM, "b", "1");
        transaction.put(STREAM, "c", "2");
        transaction.delete(STREAM, "c");
        assert_eq!(transaction.value(&view, STREAM, b"b").unwrap().unwrap(), "1");
        assert_eq!(transaction.value(&view, STREAM, b"c").unwrap(), None);
        let scanned = transaction.scan(&view, STREAM, b"b", None).unwrap();
        assert_eq!(scanned, [(Bytes::from("b"), Bytes::from("1"))]);

        let sealed = transaction.finish().seal(&Knobs::small()).unwrap();
        let (a, b, end) =
            (conflict_key(STREAM, b"a"), conflict_key(STREAM, b"b"), conflict_key_end(STREAM));
        let reads: Vec<_> = sealed.request.reads.iter().collect();
        assert_eq!(reads, [KeyRange::point(&a), KeyRange::new(&b, &end).unwrap()]);
        assert_eq!(sealed.request.writes.len(), 3);
        assert_eq!(sealed.request.read_version, Version(9));
    }

    #[test]
    fn a_view_that_is_behind_is_refused_and_nothing_recorded() {
        let mut transaction = ReadTransaction::new(Version(9));
        assert!(transaction.value(&View::new(), STREAM, b"a").is_err());
        assert!(transaction.scan(&View::new(), STREAM, b"a", None).is_err());
        assert!(transaction.finish().seal(&Knobs::small()).unwrap().request.reads.is_empty());
    }
}
