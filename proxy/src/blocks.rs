//! The bytes of a batch: for each stream one block, all in one buffer.
//!
//! ```text
//!  buffer   | IDS block          | CATALOG block | s16 block                   | s17 block ...
//!           | section: t0's id   | section ...   | section of t0 | section of t2 |
//! ```
//!
//! A section of the IDS block holds one put record: what its transaction, if it has an id, leaves behind so
//! that a client can find out where it committed. Key: the 16 bytes of the id. Value, little-endian, for each
//! section of the request in its order:
//!
//! ```text
//! off  size  field
//!   0     8  stream
//!   8     4  ordinal   records of that stream in earlier sections of the batch: the block's first offset +
//!                      ordinal
//!  12     4  count     records of the section
//! ```

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use common::StreamId;
use common::message::{CommitKind, PushBlock};
use common::record::{Record, SECTION_HEADER_BYTES, Section};

use crate::batch::Transaction;

/// What the record of an id takes with its parts, as a rule, bytes.
const ID_BYTES_USUAL: usize = 128;

/// A section on its way into a block.
struct Piece {
    index: u16,
    record_count: u32,
    records: Bytes,
}

/// Lays out the blocks of all transactions that have not failed, ascending by stream, and notes each
/// section's ordinal in its transaction. What was copied is let go.
pub(crate) fn assemble(transactions: &mut [Transaction]) -> Vec<(PushBlock, Bytes)> {
    let mut streams: BTreeMap<StreamId, Vec<Piece>> = BTreeMap::new();
    let mut counts: BTreeMap<StreamId, u32> = BTreeMap::new();
    // The records of ids and their parts, one behind the other: they share one piece of memory.
    let mut ids = BytesMut::with_capacity(transactions.len() * ID_BYTES_USUAL);
    for (transaction, index) in transactions.iter_mut().zip(0_u16..) {
        let payload = core::mem::take(&mut transaction.request.payload);
        if transaction.failed.is_some() {
            continue;
        }
        let mut start = 0;
        for section in &transaction.request.sections {
            let bytes = section.bytes as usize;
            let records = payload.slice(start, bytes).expect("the door has checked the sections");
            start += bytes;
            let count = counts.entry(section.stream).or_default();
            transaction.ordinals.push(*count);
            ids.put_u64_le(section.stream.0);
            ids.put_u32_le(*count);
            ids.put_u32_le(section.record_count);
            *count = count.checked_add(section.record_count).expect("fewer than 2^32 records");
            let piece = Piece { index, record_count: section.record_count, records };
            streams.entry(section.stream).or_default().push(piece);
        }
        assert_eq!(start, payload.len(), "the sections of {index} are its payload");
        let value = ids.split().freeze();
        if let (Some(id), CommitKind::User) = (transaction.request.id, transaction.request.kind) {
            ids.put_slice(&id.0);
            let key = ids.split().freeze();
            Record::put(key, value).encode(&mut ids);
            let piece = Piece { index, record_count: 1, records: ids.split().freeze() };
            streams.entry(StreamId::IDS).or_default().push(piece);
        }
    }
    lay_out(&streams)
}

fn lay_out(streams: &BTreeMap<StreamId, Vec<Piece>>) -> Vec<(PushBlock, Bytes)> {
    let bytes_of = |pieces: &Vec<Piece>| -> usize {
        pieces.iter().map(|piece| SECTION_HEADER_BYTES + piece.records.len()).sum()
    };
    let total = streams.values().map(bytes_of).sum();
    let mut buffer = BytesMut::with_capacity(total);
    for piece in streams.values().flatten() {
        let Piece { index, record_count, records } = piece;
        buffer.put_slice(&Section::header(*index, *record_count, records.len()));
        buffer.put_slice(records);
    }
    assert_eq!(buffer.len(), total, "the buffer has the size that was reckoned");

    let mut rest = buffer.freeze();
    let mut blocks = Vec::with_capacity(streams.len());
    for (stream, pieces) in streams {
        let body = rest.split_to(bytes_of(pieces));
        let record_count = pieces
            .iter()
            .try_fold(0_u32, |sum, piece| sum.checked_add(piece.record_count))
            .expect("a block has fewer than 2^32 records");
        let bytes = u32::try_from(body.len()).expect("a block below 4 GiB");
        let checksum = crc32c::crc32c(&body);
        blocks.push((PushBlock { stream: *stream, record_count, bytes, checksum }, body));
    }
    assert!(rest.is_empty(), "{} bytes belong to no block", rest.len());
    blocks
}
