//! What a proxy accepts: limits on a commit request, and the keys that the system adds to it.
//!
//! Keys from [`SYSTEM_KEYS`] on are the system's. A user's range may end there but not reach beyond.
//!
//! ```text
//! FF 'i' <16 bytes>      conflict key of an idempotency id
//! FF 'n' <name>          conflict key of a stream's name
//! FF 's' <id, 8 bytes>   conflict key of a stream's id
//! ```

use std::collections::BTreeSet;

use crate::message::{CommitKind, CommitRequest};
use crate::record::count_records;
use crate::{
    Code, IdempotencyId, KeyRange, Knobs, RangeEnd, RangeError, Ranges, Refusal, StreamId,
};

/// The first key that only the system uses.
pub const SYSTEM_KEYS: &[u8] = &[0xff];

/// The conflict key of an idempotency id.
#[must_use]
pub fn id_key(id: IdempotencyId) -> Vec<u8> {
    [SYSTEM_KEYS, b"i", &id.0].concat()
}

/// The conflict key of a stream's name.
#[must_use]
pub fn stream_name_key(name: &str) -> Vec<u8> {
    [SYSTEM_KEYS, b"n", name.as_bytes()].concat()
}

/// The conflict key of a stream's id.
#[must_use]
pub fn stream_id_key(stream: StreamId) -> Vec<u8> {
    [SYSTEM_KEYS, b"s", &stream.0.to_be_bytes()[..]].concat()
}

/// Bytes that a request counts for against the limits: keys, records and a little for each entry.
#[must_use]
pub fn request_bytes(request: &CommitRequest) -> u64 {
    const ENTRY_BYTES: usize = 16;
    let entries = request.reads.len() + request.writes.len() + request.sections.len() + 1;
    let keys = request.reads.key_bytes() + request.writes.key_bytes();
    (keys + request.payload.len() + entries * ENTRY_BYTES) as u64
}

/// Checks everything about a request that needs no state.
///
/// # Errors
/// The refusal to answer with; the request has changed nothing.
pub fn validate(request: &CommitRequest, knobs: &Knobs) -> Result<(), Refusal> {
    let bytes = request_bytes(request);
    if bytes > knobs.transaction_bytes_max {
        let detail = format!("{bytes} bytes; the limit is {}", knobs.transaction_bytes_max);
        return Err(Refusal::new(Code::TransactionTooLarge, detail));
    }
    for ranges in [&request.reads, &request.writes] {
        validate_ranges(ranges, knobs)?;
    }
    if request.kind != CommitKind::User && !request.sections.is_empty() {
        return Err(Refusal::new(Code::Malformed, "only a user's transaction has records"));
    }
    // Each section costs a log server more than the bytes that are counted here: a batch of the largest
    // transactions must fit a segment.
    if request.sections.len() as u64 > knobs.pull_streams_max {
        let detail =
            format!("{} streams; the limit is {}", request.sections.len(), knobs.pull_streams_max);
        return Err(Refusal::new(Code::LimitExceeded, detail));
    }
    validate_sections(request)
}

fn validate_ranges(ranges: &Ranges, knobs: &Knobs) -> Result<(), Refusal> {
    ranges.validate(knobs.key_bytes_max as usize).map_err(|error| {
        let code = match error {
            RangeError::Inverted { .. } => Code::RangeInverted,
            RangeError::KeyTooLong { .. } => Code::KeyTooLong,
            RangeError::Malformed => Code::Malformed,
        };
        Refusal::new(code, error.to_string())
    })?;
    if ranges.len() as u64 > knobs.transaction_ranges_max {
        let detail =
            format!("{} ranges; the limit is {}", ranges.len(), knobs.transaction_ranges_max);
        return Err(Refusal::new(Code::LimitExceeded, detail));
    }
    if ranges.iter().any(reaches_system_keys) {
        return Err(Refusal::new(Code::SystemKey, "keys from ff on are the system's"));
    }
    Ok(())
}

fn reaches_system_keys(range: KeyRange<'_>) -> bool {
    match range.end {
        RangeEnd::Point => range.begin >= SYSTEM_KEYS,
        RangeEnd::Before(end) => end > SYSTEM_KEYS,
    }
}

fn validate_sections(request: &CommitRequest) -> Result<(), Refusal> {
    let (mut start, mut seen) = (0, BTreeSet::new());
    for section in &request.sections {
        let stream = section.stream;
        if !seen.insert(stream) {
            return Err(Refusal::new(Code::Malformed, format!("{stream} has two sections")));
        }
        if stream.is_system() && stream != StreamId::CATALOG {
            return Err(Refusal::new(Code::SystemStream, format!("{stream} is the system's")));
        }
        let bytes = section.bytes as usize;
        let Some(records) = request.payload.slice(start, bytes) else {
            return Err(Refusal::new(
                Code::Malformed,
                format!("the records of {stream} are cut off"),
            ));
        };
        start += bytes;
        match count_records(&records) {
            Ok(count) if count == section.record_count && count > 0 => {}
            Ok(count) => {
                let detail =
                    format!("{stream} has {count} records, {} claimed", section.record_count);
                return Err(Refusal::new(Code::Malformed, detail));
            }
            Err(error) => return Err(Refusal::new(Code::Malformed, format!("{stream}: {error}"))),
        }
    }
    if start != request.payload.len() {
        return Err(Refusal::new(Code::Malformed, "bytes behind the last section"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;
    use crate::RequestId;
    use crate::message::SectionEntry;
    use crate::record::Record;

    fn to_streams(streams: impl Iterator<Item = u64>) -> CommitRequest {
        let (mut payload, mut sections) = (BytesMut::new(), Vec::new());
        for stream in streams {
            let record = Record::append("");
            record.encode(&mut payload);
            let (stream, bytes) = (StreamId(stream), record.encoded_bytes() as u32);
            sections.push(SectionEntry { stream, record_count: 1, bytes });
        }
        CommitRequest {
            sections,
            payload: payload.freeze().into(),
            ..CommitRequest::empty(CommitKind::User, RequestId(1))
        }
    }

    #[test]
    fn a_transaction_writes_to_so_many_streams_at_most_each_once() {
        let knobs = Knobs::default();
        let many = knobs.pull_streams_max;
        assert_eq!(validate(&to_streams(16..16 + many), &knobs), Ok(()));
        let code = |request| validate(&request, &knobs).unwrap_err().code();
        assert_eq!(code(to_streams(16..17 + many)), Code::LimitExceeded);
        assert_eq!(code(to_streams([16, 17, 16].into_iter())), Code::Malformed);
        assert_eq!(code(to_streams([0].into_iter())), Code::SystemStream);
    }
}
