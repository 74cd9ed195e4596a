//! Records: what a client appends to a stream, and their bytes.
//!
//! Records outlive the software, so their layout is laid by hand and never changes under the same
//! [`RECORD_FORMAT`]. Little-endian, packed, no padding:
//!
//! ```text
//! off  size  field
//!   0     4  length      bytes of this record behind this field (>= 22)
//!   4     1  op          0 append, 1 put, 2 delete
//!   5     1  format      RECORD_FORMAT
//!   6     8  event time  microseconds since 1970, signed; i64::MIN = none
//!  14     4  key length
//!  18     4  value length
//!  22     2  header count
//!  24     -  key, value, then each header: u16 name length, u32 value length, name, value
//! ```
//!
//! A section is what one transaction appends to one stream; a block is all sections of one stream in one
//! version, and the unit that is stored, replicated, indexed and delivered:
//!
//! ```text
//! block = section*      section = | u16 index | u16 0 | u32 record count | u32 bytes | records |
//! ```
//!
//! `index` is the transaction's place in the batch: with the block's version it is the records' position.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use thiserror::Error;

/// The format byte of the layout above.
pub const RECORD_FORMAT: u8 = 1;
/// Bytes in front of a section's records.
pub const SECTION_HEADER_BYTES: usize = 12;

const LENGTH_BYTES: usize = 4;
const FIXED_BYTES: usize = 24;
const HEADER_FIXED_BYTES: usize = 6;
const NO_EVENT_TIME: i64 = i64::MIN;

/// What a record does to its key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// An event: the key, if any, only names what it is about.
    Append,
    /// The key's value from here on.
    Put,
    /// The key has no value from here on.
    Delete,
}

/// One record of a stream.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Record {
    /// What it does.
    pub op: Op,
    /// When it happened, in microseconds since 1970, by the client's own account.
    pub event_time_us: Option<i64>,
    /// The key; empty when there is none.
    pub key: Bytes,
    /// The value; empty for a delete.
    pub value: Bytes,
    /// Names and values.
    pub headers: Vec<(Bytes, Bytes)>,
}

/// Bytes that are no records.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("record at byte {at}: {what}")]
pub struct RecordError {
    /// Where, from the start of the bytes.
    pub at: usize,
    /// What.
    pub what: &'static str,
}

impl Record {
    /// An event.
    #[must_use]
    pub fn append(value: impl Into<Bytes>) -> Self {
        Self {
            op: Op::Append,
            event_time_us: None,
            key: Bytes::new(),
            value: value.into(),
            headers: vec![],
        }
    }

    /// A key's new value.
    #[must_use]
    pub fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { op: Op::Put, key: key.into(), ..Self::append(value) }
    }

    /// A key's end.
    #[must_use]
    pub fn delete(key: impl Into<Bytes>) -> Self {
        Self { op: Op::Delete, key: key.into(), ..Self::append(Bytes::new()) }
    }

    /// Bytes of the encoded record.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        let headers: usize =
            self.headers.iter().map(|(n, v)| HEADER_FIXED_BYTES + n.len() + v.len()).sum();
        FIXED_BYTES + self.key.len() + self.value.len() + headers
    }

    /// Appends the encoded record to `out`. Lengths above the fields' width stop the process: limits on
    /// transactions are far below.
    pub fn encode(&self, out: &mut BytesMut) {
        let width = |len: usize| u32::try_from(len).expect("a field below 4 GiB");
        let start = out.len();
        out.reserve(self.encoded_bytes());
        out.put_u32_le(width(self.encoded_bytes() - LENGTH_BYTES));
        out.put_u8(match self.op {
            Op::Append => 0,
            Op::Put => 1,
            Op::Delete => 2,
        });
        out.put_u8(RECORD_FORMAT);
        out.put_i64_le(self.event_time_us.unwrap_or(NO_EVENT_TIME));
        out.put_u32_le(width(self.key.len()));
        out.put_u32_le(width(self.value.len()));
        out.put_u16_le(u16::try_from(self.headers.len()).expect("at most 65,535 headers"));
        out.put_slice(&self.key);
        out.put_slice(&self.value);
        for (name, value) in &self.headers {
            out.put_u16_le(u16::try_from(name.len()).expect("a header name below 64 KiB"));
            out.put_u32_le(width(value.len()));
            out.put_slice(name);
            out.put_slice(value);
        }
        assert_eq!(out.len() - start, self.encoded_bytes(), "a record has the length it claims");
    }

    fn decode(mut body: Bytes, at: usize) -> Result<Self, RecordError> {
        let bad = |what| RecordError { at, what };
        if body.len() < FIXED_BYTES - LENGTH_BYTES {
            return Err(bad("too short"));
        }
        let op = match body.get_u8() {
            0 => Op::Append,
            1 => Op::Put,
            2 => Op::Delete,
            _ => return Err(bad("unknown op")),
        };
        if body.get_u8() != RECORD_FORMAT {
            return Err(bad("unknown format"));
        }
        let event_time_us = Some(body.get_i64_le()).filter(|time| *time != NO_EVENT_TIME);
        let (key_len, value_len) = (body.get_u32_le() as usize, body.get_u32_le() as usize);
        let header_count = body.get_u16_le();
        let take = |body: &mut Bytes, len: usize, what| {
            if body.len() < len { Err(bad(what)) } else { Ok(body.split_to(len)) }
        };
        let key = take(&mut body, key_len, "the key is cut off")?;
        let value = take(&mut body, value_len, "the value is cut off")?;
        let mut headers = Vec::new();
        for _ in 0..header_count {
            let mut lengths = take(&mut body, HEADER_FIXED_BYTES, "a header is cut off")?;
            let (name_len, len) = (lengths.get_u16_le() as usize, lengths.get_u32_le() as usize);
            let name = take(&mut body, name_len, "a header's name is cut off")?;
            headers.push((name, take(&mut body, len, "a header's value is cut off")?));
        }
        if !body.is_empty() {
            return Err(bad("bytes behind the last header"));
        }
        Ok(Self { op, event_time_us, key, value, headers })
    }
}

/// Cuts encoded records apart; the records share the bytes.
///
/// # Errors
/// [`RecordError`] at the first record that does not fit the layout.
pub fn decode_records(bytes: &Bytes) -> Result<Vec<Record>, RecordError> {
    records(bytes).collect()
}

/// Cuts encoded records apart one after the other; nothing is behind the first error.
pub fn records(bytes: &Bytes) -> impl Iterator<Item = Result<Record, RecordError>> + '_ {
    let mut at = 0;
    core::iter::from_fn(move || {
        let cut = (at < bytes.len()).then(|| next_record(bytes, at))?;
        let record = cut.and_then(|(body, end)| {
            let start = core::mem::replace(&mut at, end);
            Record::decode(body, start)
        });
        if record.is_err() {
            at = bytes.len();
        }
        Some(record)
    })
}

/// Checks the frame of encoded records without building them, and counts them.
///
/// # Errors
/// [`RecordError`] at the first record that does not fit the layout.
pub fn count_records(bytes: &Bytes) -> Result<u32, RecordError> {
    records(bytes).try_fold(0, |count, record| record.map(|_| count + 1))
}

/// The body of the record at `at`, and where the next one begins.
fn next_record(bytes: &Bytes, at: usize) -> Result<(Bytes, usize), RecordError> {
    let Some(mut head) = bytes.get(at..at + LENGTH_BYTES) else {
        return Err(RecordError { at, what: "the length is cut off" });
    };
    let (start, length) = (at + LENGTH_BYTES, head.get_u32_le() as usize);
    match start.checked_add(length) {
        Some(end) if end <= bytes.len() => Ok((bytes.slice(start..end), end)),
        _ => Err(RecordError { at, what: "the record is cut off" }),
    }
}

/// One transaction's records in a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Section {
    /// The transaction's place in the batch.
    pub index: u16,
    /// How many records.
    pub record_count: u32,
    /// Their bytes.
    pub records: Bytes,
}

impl Section {
    /// The header that goes in front of the records.
    #[must_use]
    pub fn header(index: u16, record_count: u32, bytes: usize) -> [u8; SECTION_HEADER_BYTES] {
        let mut header = [0; SECTION_HEADER_BYTES];
        header[..2].copy_from_slice(&index.to_le_bytes());
        header[4..8].copy_from_slice(&record_count.to_le_bytes());
        let bytes = u32::try_from(bytes).expect("a section below 4 GiB");
        header[8..].copy_from_slice(&bytes.to_le_bytes());
        header
    }
}

/// Cuts a block's body into sections; they share the bytes.
///
/// # Errors
/// [`RecordError`] where the body does not fit the layout.
pub fn sections(body: &Bytes) -> Result<Vec<Section>, RecordError> {
    let (mut rest, mut found) = (body.clone(), Vec::new());
    while !rest.is_empty() {
        let at = body.len() - rest.len();
        if rest.len() < SECTION_HEADER_BYTES {
            return Err(RecordError { at, what: "a section header is cut off" });
        }
        let (index, _) = (rest.get_u16_le(), rest.get_u16_le());
        let (record_count, bytes) = (rest.get_u32_le(), rest.get_u32_le() as usize);
        if rest.len() < bytes {
            return Err(RecordError { at, what: "a section is cut off" });
        }
        found.push(Section { index, record_count, records: rest.split_to(bytes) });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blob() -> impl Strategy<Value = Bytes> {
        prop::collection::vec(any::<u8>(), 0..20).prop_map(Bytes::from)
    }

    fn record() -> impl Strategy<Value = Record> {
        (
            0_usize..3,
            any::<Option<u32>>(),
            blob(),
            blob(),
            prop::collection::vec((blob(), blob()), 0..3),
        )
            .prop_map(|(op, time, key, value, headers)| Record {
                op: [Op::Append, Op::Put, Op::Delete][op],
                event_time_us: time.map(i64::from),
                key,
                value,
                headers,
            })
    }

    #[test]
    fn the_bytes_of_a_record_are_frozen() {
        let mut out = BytesMut::new();
        let record = Record {
            event_time_us: Some(1),
            headers: vec![(Bytes::from_static(b"h"), Bytes::from_static(b"w"))],
            ..Record::put("k", "v")
        };
        record.encode(&mut out);
        let golden = [
            &[30, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0][..],
            b"kv\x01\0\x01\0\0\0hw",
        ]
        .concat();
        assert_eq!(out, golden);
    }

    proptest! {
        #[test]
        fn records_round_trip(records in prop::collection::vec(record(), 0..6)) {
            let mut out = BytesMut::new();
            records.iter().for_each(|record| record.encode(&mut out));
            let bytes = out.freeze();
            prop_assert_eq!(&decode_records(&bytes).unwrap(), &records);
            prop_assert_eq!(count_records(&bytes).unwrap() as usize, records.len());
        }

        #[test]
        fn any_cut_is_refused_or_shorter(
            records in prop::collection::vec(record(), 1..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut out = BytesMut::new();
            records.iter().for_each(|record| record.encode(&mut out));
            let bytes = out.freeze();
            let cut = cut.index(bytes.len());
            let cut = bytes.slice(..cut);
            if let Ok(found) = decode_records(&cut) {
                prop_assert!(found.len() < records.len());
            }
            // One by one, what is whole comes first, and nothing behind the first error.
            let found: Vec<_> = super::records(&cut).collect();
            let whole = found.iter().take_while(|record| record.is_ok()).count();
            prop_assert!(found.len() - whole <= 1);
            for (record, expected) in found.into_iter().zip(&records).take(whole) {
                prop_assert_eq!(&record.unwrap(), expected);
            }
        }

        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = Bytes::from(bytes);
            let _ = decode_records(&bytes);
            let _ = sections(&bytes);
        }
    }
}
