//! The catalog: stream names and ids, kept in the system stream [`StreamId::CATALOG`].
//!
//! A stream is created by an ordinary transaction that appends one put record: key = name, value = the id,
//! 8 bytes big-endian. The proxy adds a read and a write of the conflict keys of both, so that neither a name
//! nor an id is ever given twice.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::record::{Op, Record};
use crate::{Code, Refusal, StreamId};

/// A name's limit in bytes.
pub const NAME_BYTES_MAX: usize = 200;

/// A stream's name and id.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct StreamDefinition {
    /// The name.
    pub name: String,
    /// The id.
    pub stream: StreamId,
}

impl StreamDefinition {
    /// The record that defines the stream.
    #[must_use]
    pub fn to_record(&self) -> Record {
        Record::put(self.name.clone(), Bytes::copy_from_slice(&self.stream.0.to_be_bytes()))
    }

    /// The inverse of [`StreamDefinition::to_record`].
    ///
    /// # Errors
    /// The refusal for a record that defines no stream.
    pub fn from_record(record: &Record) -> Result<Self, Refusal> {
        let name = std::str::from_utf8(&record.key)
            .map_err(|_| Refusal::new(Code::BadName, "a name that is no UTF-8"))?;
        check_name(name)?;
        let (Op::Put, Ok(id)) = (record.op, <[u8; 8]>::try_from(&record.value[..])) else {
            return Err(Refusal::new(Code::Malformed, "a catalog record is a put of 8 bytes"));
        };
        let stream = StreamId(u64::from_be_bytes(id));
        if stream.is_system() {
            return Err(Refusal::new(Code::SystemStream, format!("{stream} is the system's")));
        }
        Ok(Self { name: name.to_owned(), stream })
    }
}

/// Checks a stream's name.
///
/// # Errors
/// [`Code::BadName`].
pub fn check_name(name: &str) -> Result<(), Refusal> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(good) {
        let detail = format!("{name:?}: 1 to {NAME_BYTES_MAX} characters of A-Za-z0-9._/-");
        return Err(Refusal::new(Code::BadName, detail));
    }
    Ok(())
}

/// All definitions up to some version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Catalog {
    by_name: BTreeMap<String, StreamId>,
    by_id: BTreeMap<StreamId, String>,
}

impl Catalog {
    /// Takes a definition in. Names and ids are unique by the conflict keys.
    pub fn define(&mut self, definition: StreamDefinition) {
        let StreamDefinition { name, stream } = definition;
        let old = self.by_name.insert(name.clone(), stream);
        assert!(old.is_none_or(|id| id == stream), "{name} was {old:?} and is {stream}");
        let old = self.by_id.insert(stream, name.clone());
        assert!(old.as_ref().is_none_or(|old| *old == name), "{stream} was {old:?} and is {name}");
    }

    /// The stream of a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<StreamId> {
        self.by_name.get(name).copied()
    }

    /// The name of a stream.
    #[must_use]
    pub fn name(&self, stream: StreamId) -> Option<&str> {
        self.by_id.get(&stream).map(String::as_str)
    }

    /// Whether a user's stream exists, or it is the system's.
    #[must_use]
    pub fn contains(&self, stream: StreamId) -> bool {
        stream.is_system() || self.by_id.contains_key(&stream)
    }

    /// The smallest id above all that are taken.
    #[must_use]
    pub fn next_id(&self) -> StreamId {
        self.by_id.last_key_value().map_or(StreamId::FIRST_USER, |(last, _)| last.plus(1))
    }

    /// All definitions in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, StreamId)> {
        self.by_name.iter().map(|(name, stream)| (name.as_str(), *stream))
    }
}
