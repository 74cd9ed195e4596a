//! Building a transaction.
//!
//! Records are encoded as they are added, so sealing copies nothing. Conflict keys are the application's
//! own, below `ff`; keyed records can add theirs, laid out so that they sort by stream, then by key:
//!
//! ```text
//! 's' <stream id, 8 bytes big-endian> <key>
//! ```

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use common::message::{CommitKind, CommitRequest, SectionEntry};
use common::record::{Record, count_records};
use common::{
    Code, IdempotencyId, KeyRange, Knobs, Payload, RangeEnd, Ranges, Refusal, RequestId, StreamId,
    Version, transaction,
};

use crate::Error;

const KEYED: u8 = b's';

/// The conflict key of a keyed record.
#[must_use]
pub fn conflict_key(stream: StreamId, key: &[u8]) -> Vec<u8> {
    [&[KEYED][..], &stream.0.to_be_bytes(), key].concat()
}

/// The end (exclusive) of all conflict keys of a stream's records.
#[must_use]
pub fn conflict_key_end(stream: StreamId) -> Vec<u8> {
    match stream.0.checked_add(1) {
        Some(next) => conflict_key(StreamId(next), b""),
        None => vec![KEYED + 1],
    }
}

/// Whose idempotency id a transaction carries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) enum IdChoice {
    /// The session draws one.
    #[default]
    Session,
    /// The caller's, perhaps used before.
    Caller(IdempotencyId),
    /// The caller's, and the caller knows that it has never been used.
    CallerFresh(IdempotencyId),
    /// None: an unknown outcome stays unknown.
    None,
}

/// What to commit: what was read at which version, what is written, and the records.
///
/// A transaction without reads is *blind*: it never conflicts and is never too old.
#[derive(Clone, Debug, Default)]
pub struct Transaction {
    read_version: Option<Version>,
    reads: KeyList,
    writes: KeyList,
    sections: BTreeMap<StreamId, Records>,
    id: IdChoice,
    report_conflicts: bool,
    conflict_on_keys: bool,
    error: Option<Refusal>,
}

#[derive(Clone, Debug, Default)]
struct Records {
    count: u32,
    /// Records of [`Transaction::append_encoded`], and what was encoded before them.
    pieces: Vec<Bytes>,
    tail: BytesMut,
}

impl Transaction {
    /// An empty transaction.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The snapshot that the reads were made at. Needed as soon as there are reads.
    pub const fn read_version(&mut self, version: Version) -> &mut Self {
        self.read_version = Some(version);
        self
    }

    /// A range that was read, half-open.
    pub fn read(&mut self, begin: &[u8], end: &[u8]) -> &mut Self {
        self.reads.push(begin, Some(end));
        self
    }

    /// A key that was read.
    pub fn read_point(&mut self, key: &[u8]) -> &mut Self {
        self.reads.push(key, None);
        self
    }

    /// A range that is written, half-open.
    pub fn write(&mut self, begin: &[u8], end: &[u8]) -> &mut Self {
        self.writes.push(begin, Some(end));
        self
    }

    /// A key that is written.
    pub fn write_point(&mut self, key: &[u8]) -> &mut Self {
        self.writes.push(key, None);
        self
    }

    /// From here on, [`Transaction::put`] and [`Transaction::delete`] also write the
    /// [`conflict_key`] of what they change.
    pub const fn conflict_on_keys(&mut self) -> &mut Self {
        self.conflict_on_keys = true;
        self
    }

    /// Appends an event to a stream.
    pub fn append(&mut self, stream: StreamId, value: impl Into<Bytes>) -> &mut Self {
        self.record(stream, &Record::append(value))
    }

    /// Gives a key of a stream a value.
    pub fn put(
        &mut self,
        stream: StreamId,
        key: impl Into<Bytes>,
        value: impl Into<Bytes>,
    ) -> &mut Self {
        let record = Record::put(key, value);
        self.touch(stream, &record.key).record(stream, &record)
    }

    /// Ends a key of a stream.
    pub fn delete(&mut self, stream: StreamId, key: impl Into<Bytes>) -> &mut Self {
        let record = Record::delete(key);
        self.touch(stream, &record.key).record(stream, &record)
    }

    fn touch(&mut self, stream: StreamId, key: &[u8]) -> &mut Self {
        if self.conflict_on_keys {
            self.writes.push(&conflict_key(stream, key), None);
        }
        self
    }

    /// Adds a record with all its fields to a stream.
    pub fn record(&mut self, stream: StreamId, record: &Record) -> &mut Self {
        if record.headers.len() > usize::from(u16::MAX)
            || record.headers.iter().any(|(name, _)| name.len() > usize::from(u16::MAX))
        {
            return self.fail(Code::LimitExceeded, "more than 65,535 headers or bytes of a name");
        }
        let records = self.sections.entry(stream).or_default();
        record.encode(&mut records.tail);
        records.count += 1;
        self
    }

    /// Adds records that are encoded already, without copying them.
    pub fn append_encoded(&mut self, stream: StreamId, encoded: Bytes) -> &mut Self {
        let count = match count_records(&encoded) {
            Ok(count) => count,
            Err(error) => return self.fail(Code::Malformed, &format!("{stream}: {error}")),
        };
        let records = self.sections.entry(stream).or_default();
        let before = records.tail.split().freeze();
        records.pieces.extend([before, encoded]);
        records.count += count;
        self
    }

    /// The transaction's name: it commits at most once under it (I16), whoever asks, for as long as the log
    /// remembers ids (`id_life_versions`, `ids_max`). Looked up before the commit, which costs a round trip;
    /// see [`Transaction::fresh_idempotency_id`].
    pub const fn idempotency_id(&mut self, id: IdempotencyId) -> &mut Self {
        self.id = IdChoice::Caller(id);
        self
    }

    /// The transaction's name, of which the caller knows that no commit has used it before.
    pub const fn fresh_idempotency_id(&mut self, id: IdempotencyId) -> &mut Self {
        self.id = IdChoice::CallerFresh(id);
        self
    }

    /// No idempotency id: cheaper for the log, but a broken connection leaves [`Error::Unknown`].
    pub const fn at_most_once(&mut self) -> &mut Self {
        self.id = IdChoice::None;
        self
    }

    /// Asks which read ranges conflicted.
    pub const fn report_conflicts(&mut self) -> &mut Self {
        self.report_conflicts = true;
        self
    }

    /// Whether there is nothing to commit.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sections.is_empty() && self.writes.bounds.is_empty()
    }

    fn fail(&mut self, code: Code, detail: &str) -> &mut Self {
        self.error.get_or_insert_with(|| Refusal::new(code, detail));
        self
    }

    /// Checks the limits that the proxy would check and lays the request out.
    pub(crate) fn seal(self, knobs: &Knobs) -> Result<Sealed, Error> {
        if let Some(refusal) = self.error {
            return Err(refusal.into());
        }
        if !self.reads.bounds.is_empty() && self.read_version.is_none() {
            return Err(Error::new(Code::Malformed, "reads without a read version"));
        }
        let pinned =
            !self.reads.bounds.is_empty() || self.sections.contains_key(&StreamId::CATALOG);
        let mut request = CommitRequest {
            request: RequestId::ZERO,
            answered_below: RequestId::ZERO,
            kind: CommitKind::User,
            read_version: self.read_version.unwrap_or_default(),
            report_conflicts: self.report_conflicts,
            id: None,
            lane: None,
            reads: self.reads.seal(),
            writes: self.writes.seal(),
            sections: Vec::new(),
            payload: Payload::new(),
        };
        // The records were encoded or counted here, so only their size is left to check; ranges first.
        transaction::validate(&request, knobs)?;
        for (stream, records) in self.sections {
            if stream.is_system() && stream != StreamId::CATALOG {
                return Err(Error::new(Code::SystemStream, format!("{stream} is the system's")));
            }
            let before = request.payload.len();
            records.pieces.into_iter().for_each(|piece| request.payload.push(piece));
            request.payload.push(records.tail.freeze());
            let bytes = u32::try_from(request.payload.len() - before).unwrap_or(u32::MAX);
            request.sections.push(SectionEntry { stream, record_count: records.count, bytes });
        }
        let bytes = transaction::request_bytes(&request);
        if bytes > knobs.transaction_bytes_max {
            let detail = format!("{bytes} bytes; the limit is {}", knobs.transaction_bytes_max);
            return Err(Error::new(Code::TransactionTooLarge, detail));
        }
        Ok(Sealed { request, id: self.id, pinned, bytes })
    }
}

/// A checked transaction, laid out as a request without numbers.
#[derive(Clone, Debug)]
pub(crate) struct Sealed {
    pub(crate) request: CommitRequest,
    pub(crate) id: IdChoice,
    /// Whether the read version is the caller's: something was read at it.
    pub(crate) pinned: bool,
    pub(crate) bytes: u64,
}

/// Ranges as they come: one arena, and the length of each begin and end.
#[derive(Clone, Debug, Default)]
struct KeyList {
    arena: Vec<u8>,
    bounds: Vec<(usize, Option<usize>)>,
}

impl KeyList {
    fn push(&mut self, begin: &[u8], end: Option<&[u8]>) {
        self.arena.extend_from_slice(begin);
        self.arena.extend_from_slice(end.unwrap_or_default());
        self.bounds.push((begin.len(), end.map(<[u8]>::len)));
    }

    /// Inverted ranges pass here and are refused by the check of the whole request.
    fn seal(&self) -> Ranges {
        let mut rest: &[u8] = &self.arena;
        Ranges::from_ranges(self.bounds.iter().map(|(begin_bytes, end_bytes)| {
            let (begin, tail) = rest.split_at(*begin_bytes);
            let (end, tail) = tail.split_at(end_bytes.unwrap_or(0));
            rest = tail;
            let end = end_bytes.map_or(RangeEnd::Point, |_| RangeEnd::Before(end));
            KeyRange { begin, end }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(build: impl FnOnce(&mut Transaction)) -> Code {
        let mut transaction = Transaction::new();
        build(&mut transaction);
        transaction.seal(&Knobs::small()).unwrap_err().code()
    }

    #[test]
    fn limits_have_the_proxys_codes() {
        let stream = StreamId(16);
        assert_eq!(
            code(|t| {
                t.append(stream, vec![0; 70 << 10]);
            }),
            Code::TransactionTooLarge
        );
        assert_eq!(
            code(|t| {
                t.write_point(&[0; 300]);
            }),
            Code::KeyTooLong
        );
        assert_eq!(
            code(|t| {
                t.write(b"b", b"a");
            }),
            Code::RangeInverted
        );
        assert_eq!(
            code(|t| {
                t.write_point(&[0xff, 1]);
            }),
            Code::SystemKey
        );
        assert_eq!(
            code(|t| {
                t.append(StreamId::IDS, "x");
            }),
            Code::SystemStream
        );
        assert_eq!(
            code(|t| {
                t.read_point(b"a");
            }),
            Code::Malformed
        );
        assert_eq!(
            code(|t| {
                t.append_encoded(stream, "x".into());
            }),
            Code::Malformed
        );
    }

    #[test]
    fn a_sealed_transaction_passes_the_proxys_check() {
        let (a, b) = (StreamId(16), StreamId(17));
        let mut encoded = BytesMut::new();
        Record::append("three").encode(&mut encoded);
        let mut transaction = Transaction::new();
        transaction.read_version(Version(5)).read(b"a", b"b").read_point(b"c").conflict_on_keys();
        transaction.put(b, "k", "v").append(a, "one").append(a, "two");
        transaction.append_encoded(a, encoded.freeze()).append(a, "four").delete(b, "k");
        let sealed = transaction.seal(&Knobs::small()).unwrap();
        transaction::validate(&sealed.request, &Knobs::small()).unwrap();
        let counts: Vec<_> =
            sealed.request.sections.iter().map(|s| (s.stream, s.record_count)).collect();
        assert_eq!(counts, [(a, 4), (b, 2)]);
        let key = conflict_key(b, b"k");
        assert!(sealed.request.writes.iter().all(|write| write == KeyRange::point(&key)));
        assert!(key < conflict_key_end(b) && conflict_key_end(a) <= key);
        assert!(sealed.pinned && sealed.request.reads.len() == 2);
    }
}
