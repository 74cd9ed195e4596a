//! What a pull yields: whole versions, their blocks still encoded.
//!
//! ```text
//! Batch v17 --+-- Block s16 offsets 40..43   sections of transactions 0 and 2 of the batch
//!             `-- Block s20 offsets 7..8     section of transaction 2
//! ```
//!
//! Checksums, section counts and offsets are checked when a block comes in; records are decoded when somebody
//! looks at them.

use bytes::Bytes;
use common::message::PulledBlock;
use common::record::{Record, Section, decode_records, sections};
use common::{Code, Offset, Position, StreamId, Version, WallTime};

use crate::Error;

/// All blocks of one version, of the streams that were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The version.
    pub version: Version,
    /// When it was handed out.
    pub commit_time: WallTime,
    /// By stream, ascending; each stream once.
    pub blocks: Vec<Block>,
}

impl Batch {
    /// All records in the order of their positions, those of one transaction by stream.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a record does not fit the layout.
    pub fn records(&self) -> Result<Vec<Delivered>, Error> {
        let mut all = Vec::new();
        for block in &self.blocks {
            all.extend(block.records()?);
        }
        all.sort_by_key(|record| (record.position, record.stream, record.offset));
        Ok(all)
    }
}

/// All records of one stream in one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The stream.
    pub stream: StreamId,
    /// The version.
    pub version: Version,
    /// The offset of the first record.
    pub base_offset: Offset,
    /// How many records.
    pub record_count: u32,
    sections: Vec<Section>,
}

/// A record with its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// The stream.
    pub stream: StreamId,
    /// The record's place in its stream.
    pub offset: Offset,
    /// Its transaction's place among all transactions.
    pub position: Position,
    /// The record.
    pub record: Record,
}

impl Block {
    /// Checks a block against its entry.
    pub(crate) fn check(
        version: Version,
        entry: &PulledBlock,
        body: &Bytes,
    ) -> Result<Self, Error> {
        let PulledBlock { stream, base_offset, record_count, .. } = *entry;
        let corrupt =
            |what: String| Error::new(Code::Corrupt, format!("{stream} {version}: {what}"));
        let computed = crc32c::crc32c(body);
        if computed != entry.checksum {
            return Err(corrupt(format!(
                "checksum {:08x}, computed {computed:08x}",
                entry.checksum
            )));
        }
        let sections = sections(body).map_err(|error| corrupt(error.to_string()))?;
        let counted: u64 = sections.iter().map(|section| u64::from(section.record_count)).sum();
        if counted != u64::from(record_count) || record_count == 0 {
            return Err(corrupt(format!("{record_count} records claimed, {counted} in sections")));
        }
        if !sections.windows(2).all(|pair| pair[0].index < pair[1].index) {
            return Err(corrupt("sections out of order".to_owned()));
        }
        Ok(Self { stream, version, base_offset, record_count, sections })
    }

    /// The offset behind the last record.
    #[must_use]
    pub fn end_offset(&self) -> Offset {
        self.base_offset.plus(u64::from(self.record_count))
    }

    /// The transactions' parts, still encoded, each with the offset of its first record.
    pub fn sections(&self) -> impl Iterator<Item = (Offset, &Section)> {
        let mut next = self.base_offset;
        self.sections.iter().map(move |section| {
            let offset = next;
            next = next.plus(u64::from(section.record_count));
            (offset, section)
        })
    }

    /// Decodes the records.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when a record does not fit the layout.
    pub fn records(&self) -> Result<Vec<Delivered>, Error> {
        let mut delivered = Vec::with_capacity(self.record_count as usize);
        for (first, section) in self.sections() {
            let corrupt = |what: String| {
                Error::new(Code::Corrupt, format!("{} {}: {what}", self.stream, self.version))
            };
            let records =
                decode_records(&section.records).map_err(|error| corrupt(error.to_string()))?;
            if records.len() as u64 != u64::from(section.record_count) {
                return Err(corrupt(format!(
                    "{} records claimed, {} found",
                    section.record_count,
                    records.len()
                )));
            }
            let position = Position { version: self.version, index: section.index };
            delivered.extend(records.into_iter().enumerate().map(|(place, record)| Delivered {
                stream: self.stream,
                offset: first.plus(place as u64),
                position,
                record,
            }));
        }
        Ok(delivered)
    }
}
