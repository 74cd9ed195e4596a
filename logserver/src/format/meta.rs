//! The little that isn't in the log: two slots, written in turn.
//!
//! ```text
//! meta-0: generation 6        meta-1: generation 7        the next write: generation 8 to meta-0
//!
//! slot = head (80) | epoch starts (16 each) | trims (32 each) | zeros up to whole pages
//! off size field                             trim
//!   0   4  magic           "MRMT"            off size field
//!   4   4  checksum        over 8..end         0   8  stream
//!   8   2  format version  FORMAT              8   8  through          version, inclusive
//!  10   2  clean           1 = shut down      16   8  first offset     that is left
//!  12   4  zero                               24   8  next offset hint
//!  16   8  generation
//!  24   8  node                              epoch start: as in `segment`
//!  32   8  locked          epoch
//!  40   8  clean shutdown  last sequence, when clean
//!  48   4  epoch starts    count
//!  52   4  trims           count
//!  56  24  zero
//! ```
//!
//! A torn write damages only the older slot, so the newest good one is what was last made durable. Trims go
//! here before the data goes (I13); an epoch is locked here before a lock is answered (I8).

use bytes::Bytes;
use common::disk::padded;
use common::{Epoch, NodeId, Offset, Sequence, StreamId, Version};
use thiserror::Error;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::flaw::{Flaw, check, read, seal};
use super::segment::{EpochStart, RawEpochStart};

/// The format version that this build writes, and the only one that it reads.
pub const FORMAT: u16 = 1;

const MAGIC: [u8; 4] = *b"MRMT";
const HEAD_BYTES: usize = size_of::<RawMeta>();
const EPOCH_START_BYTES: usize = size_of::<RawEpochStart>();
const TRIM_BYTES: usize = size_of::<RawTrim>();

const _: () = assert!(HEAD_BYTES == 80 && TRIM_BYTES == 32, "as drawn above");

/// What a log server must remember besides its log.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Meta {
    /// Counts the writes, from 1; its parity is the slot's number.
    pub generation: u64,
    /// Whose log this is.
    pub node: NodeId,
    /// Pushes of older epochs are refused for good.
    pub locked: Epoch,
    /// The epochs that this server was recruited for and still holds, ascending; the last one is the latest.
    pub epochs: Vec<EpochStart>,
    /// What has been trimmed, by stream, ascending.
    pub trims: Vec<StreamTrim>,
    /// The log's last sequence, when it was shut down in order and nothing was written since.
    pub clean_shutdown: Option<Sequence>,
}

/// How far a stream has been trimmed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamTrim {
    /// The stream.
    pub stream: StreamId,
    /// Everything up to this version may go, inclusive.
    pub through: Version,
    /// The first offset that is left.
    pub first_offset: Offset,
    /// At least this is the offset of the stream's next record, even when no block is left to tell (I12).
    pub next_offset_hint: Offset,
}

/// Why a slot is unusable.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum MetaError {
    /// It isn't there, or is damaged.
    #[error("{0}")]
    Flaw(#[from] Flaw),
    /// A good one whose fields contradict each other.
    #[error("contradicts itself: {what}")]
    Contradiction {
        /// Which fields.
        what: &'static str,
    },
}

/// What two slots say together.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum MetaChoice {
    /// Nothing was ever written.
    Fresh,
    /// One slot is blank, the other damaged: the first write of all was torn. Fresh if there are no segments,
    /// corrupt otherwise.
    FirstTorn {
        /// What is wrong with the damaged one.
        flaw: MetaError,
    },
    /// The newest good slot.
    Found {
        /// What it says.
        meta: Meta,
        /// The other slot is damaged: a torn write that was never acknowledged, or rot.
        other: Option<MetaError>,
    },
    /// Both slots are damaged.
    Corrupt {
        /// What is wrong with each.
        flaws: [MetaError; 2],
    },
}

/// The slot that a generation goes to: 0 or 1.
#[must_use]
pub const fn slot_of(generation: u64) -> u8 {
    (generation % 2) as u8
}

impl Meta {
    /// The slot that this generation goes to: 0 or 1.
    #[must_use]
    pub const fn slot(&self) -> u8 {
        slot_of(self.generation)
    }

    /// The slot's bytes in whole pages.
    ///
    /// Lists that aren't ascending stop the process.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        assert_eq!(self.contradiction(), None, "{self:?}");
        let count = |len: usize| U32::from(u32::try_from(len).expect("below the limit of streams"));
        let raw = RawMeta {
            magic: MAGIC,
            checksum: U32::ZERO,
            format: FORMAT.into(),
            clean: u16::from(self.clean_shutdown.is_some()).into(),
            zero: U32::ZERO,
            generation: self.generation.into(),
            node: self.node.0.into(),
            locked: self.locked.0.into(),
            clean_shutdown: self.clean_shutdown.unwrap_or_default().0.into(),
            epoch_start_count: count(self.epochs.len()),
            trim_count: count(self.trims.len()),
            reserved: [0; 24],
        };
        let bare = bare_bytes(self.epochs.len(), self.trims.len());
        let mut bytes = Vec::with_capacity(padded(bare as u64) as usize);
        bytes.extend_from_slice(raw.as_bytes());
        for start in &self.epochs {
            bytes.extend_from_slice(RawEpochStart::from(start).as_bytes());
        }
        for trim in &self.trims {
            bytes.extend_from_slice(RawTrim::from(trim).as_bytes());
        }
        assert_eq!(bytes.len(), bare, "generation {} has the length it claims", self.generation);
        seal(&mut bytes);
        bytes.resize(padded(bare as u64) as usize, 0);
        bytes.into()
    }

    /// Reads a slot; `bytes` start with it and may be longer.
    ///
    /// # Errors
    /// [`MetaError`]; [`Flaw::Blank`] and an empty file mean that it was never written.
    pub fn decode(bytes: &[u8]) -> Result<Self, MetaError> {
        let Some(raw) = read::<RawMeta>(bytes) else {
            return Err(Flaw::Short { have: bytes.len(), need: HEAD_BYTES }.into());
        };
        let (starts, trims) = (raw.epoch_start_count.get() as usize, raw.trim_count.get() as usize);
        // Without the magic word the counts mean nothing.
        let bare = if raw.magic == MAGIC { bare_bytes(starts, trims) } else { bytes.len() };
        check(bytes, bare, MAGIC, FORMAT)?;
        let (start_bytes, trim_bytes) =
            bytes[HEAD_BYTES..bare].split_at(starts * EPOCH_START_BYTES);
        let clean_shutdown = match raw.clean.get() {
            0 => None,
            1 => Some(Sequence(raw.clean_shutdown.get())),
            _ => return Err(MetaError::Contradiction { what: "neither clean nor not" }),
        };
        let meta = Self {
            generation: raw.generation.get(),
            node: NodeId(raw.node.get()),
            locked: Epoch(raw.locked.get()),
            epochs: start_bytes
                .chunks_exact(EPOCH_START_BYTES)
                .filter_map(read::<RawEpochStart>)
                .map(EpochStart::from)
                .collect(),
            trims: trim_bytes
                .chunks_exact(TRIM_BYTES)
                .filter_map(read::<RawTrim>)
                .map(StreamTrim::from)
                .collect(),
            clean_shutdown,
        };
        match meta.contradiction() {
            Some(what) => Err(MetaError::Contradiction { what }),
            None => Ok(meta),
        }
    }

    fn contradiction(&self) -> Option<&'static str> {
        if self.generation == 0 {
            Some("the generation is 0")
        } else if self.epochs.windows(2).any(|pair| pair[0].epoch >= pair[1].epoch) {
            Some("epochs out of order")
        } else if self.trims.windows(2).any(|pair| pair[0].stream >= pair[1].stream) {
            Some("streams out of order")
        } else if self.trims.iter().any(|trim| trim.first_offset > trim.next_offset_hint) {
            Some("first offset and next offset hint")
        } else {
            None
        }
    }
}

/// Judges two slots; an absent file is an empty slice.
pub fn choose(slot0: &[u8], slot1: &[u8]) -> MetaChoice {
    let blank = |slot: &[u8]| slot.iter().all(|byte| *byte == 0);
    match (Meta::decode(slot0), Meta::decode(slot1)) {
        (Ok(zero), Ok(one)) => {
            let meta = if zero.generation > one.generation { zero } else { one };
            MetaChoice::Found { meta, other: None }
        }
        (Ok(meta), Err(flaw)) => MetaChoice::Found { meta, other: (!blank(slot1)).then_some(flaw) },
        (Err(flaw), Ok(meta)) => MetaChoice::Found { meta, other: (!blank(slot0)).then_some(flaw) },
        (Err(zero), Err(one)) => match (blank(slot0), blank(slot1)) {
            (true, true) => MetaChoice::Fresh,
            (true, false) => MetaChoice::FirstTorn { flaw: one },
            (false, true) => MetaChoice::FirstTorn { flaw: zero },
            (false, false) => MetaChoice::Corrupt { flaws: [zero, one] },
        },
    }
}

const fn bare_bytes(epoch_start_count: usize, trim_count: usize) -> usize {
    HEAD_BYTES + epoch_start_count * EPOCH_START_BYTES + trim_count * TRIM_BYTES
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawMeta {
    magic: [u8; 4],
    checksum: U32,
    format: U16,
    clean: U16,
    zero: U32,
    generation: U64,
    node: U64,
    locked: U64,
    clean_shutdown: U64,
    epoch_start_count: U32,
    trim_count: U32,
    reserved: [u8; 24],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawTrim {
    stream: U64,
    through: U64,
    first_offset: U64,
    next_offset_hint: U64,
}

impl From<&StreamTrim> for RawTrim {
    fn from(trim: &StreamTrim) -> Self {
        Self {
            stream: trim.stream.0.into(),
            through: trim.through.0.into(),
            first_offset: trim.first_offset.0.into(),
            next_offset_hint: trim.next_offset_hint.0.into(),
        }
    }
}

impl From<&RawTrim> for StreamTrim {
    fn from(raw: &RawTrim) -> Self {
        Self {
            stream: StreamId(raw.stream.get()),
            through: Version(raw.through.get()),
            first_offset: Offset(raw.first_offset.get()),
            next_offset_hint: Offset(raw.next_offset_hint.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn meta(generation: u64) -> Meta {
        Meta {
            generation,
            node: NodeId(0x0102),
            locked: Epoch(5),
            epochs: vec![
                EpochStart { epoch: Epoch(3), previous_version: Version(0x0304) },
                EpochStart { epoch: Epoch(4), previous_version: Version(0x0506) },
            ],
            trims: vec![StreamTrim {
                stream: StreamId(20),
                through: Version(0x0708),
                first_offset: Offset(0x090a),
                next_offset_hint: Offset(0x0b0c),
            }],
            clean_shutdown: Some(Sequence(0x0d0e)),
        }
    }

    #[test]
    fn the_bytes_of_a_slot_are_frozen() {
        let fields: &[&[u8]] = &[
            b"MRMT\0\0\0\0",
            &[1, 0, 1, 0, 0, 0, 0, 0],
            &[6, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0, 0x0e, 0x0d, 0, 0, 0, 0, 0, 0],
            &[2, 0, 0, 0, 1, 0, 0, 0],
            &[0; 24],
            &[3, 0, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0],
            &[4, 0, 0, 0, 0, 0, 0, 0, 6, 5, 0, 0, 0, 0, 0, 0],
            &[20, 0, 0, 0, 0, 0, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0],
            &[0x0a, 9, 0, 0, 0, 0, 0, 0, 0x0c, 0x0b, 0, 0, 0, 0, 0, 0],
        ];
        let mut golden = fields.concat();
        golden[4..8].copy_from_slice(&GOLDEN_CHECKSUM.to_le_bytes());
        let slot = meta(6).encode();
        assert_eq!(slot[..golden.len()], golden);
        assert_eq!(slot.len(), 4096);
        assert_eq!(meta(6).slot(), 0);
    }

    const GOLDEN_CHECKSUM: u32 = 0x760c_319b;

    #[test]
    fn the_newest_good_slot_wins() {
        let (old, new) = (meta(6).encode(), meta(7).encode());
        let found = |generation| MetaChoice::Found { meta: meta(generation), other: None };
        assert_eq!(choose(&old, &new), found(7));
        assert_eq!(choose(&new, &old), found(7));
        assert_eq!(choose(&old, &[]), found(6));
        assert_eq!(choose(&[0; 4096], &new), found(7));
    }

    #[test]
    fn a_torn_write_anywhere_leaves_the_older_slot() {
        let (old, new) = (meta(6).encode(), meta(7).encode());
        let used = bare_bytes(2, 1);
        for at in 0..used {
            let mut flipped = new.to_vec();
            flipped[at] ^= 1 << (at % 8);
            let MetaChoice::Found { meta: found, other } = choose(&old, &flipped) else {
                panic!("byte {at}")
            };
            assert_eq!((found, other.is_some()), (meta(6), true), "byte {at}");
            assert!(matches!(choose(&flipped, &flipped), MetaChoice::Corrupt { .. }), "byte {at}");
            assert!(matches!(choose(&[], &flipped), MetaChoice::FirstTorn { .. }), "byte {at}");
        }
    }

    #[test]
    fn blank_slots_are_a_fresh_directory() {
        assert_eq!(choose(&[], &[]), MetaChoice::Fresh);
        assert_eq!(choose(&[0; 8192], &[0; 10]), MetaChoice::Fresh);
    }

    #[test]
    fn a_slot_may_hold_leftovers_of_a_longer_one() {
        let mut slot = Meta { trims: vec![], ..meta(6) }.encode().to_vec();
        let end = bare_bytes(2, 0);
        slot[end..].fill(0xee);
        assert_eq!(Meta::decode(&slot), Ok(Meta { trims: vec![], ..meta(6) }));
    }

    proptest! {
        #[test]
        fn slots_round_trip(
            generation in 1..u64::MAX,
            clean in any::<Option<u64>>(),
            epochs in prop::collection::btree_map(any::<u64>(), any::<u64>(), 0..4),
            trims in prop::collection::btree_map(any::<u64>(), prop::array::uniform3(any::<u64>()), 0..200),
        ) {
            let written = Meta {
                clean_shutdown: clean.map(Sequence),
                epochs: epochs
                    .into_iter()
                    .map(|(epoch, version)| EpochStart {
                        epoch: Epoch(epoch),
                        previous_version: Version(version),
                    })
                    .collect(),
                trims: trims
                    .into_iter()
                    .map(|(stream, [through, a, b])| StreamTrim {
                        stream: StreamId(stream),
                        through: Version(through),
                        first_offset: Offset(a.min(b)),
                        next_offset_hint: Offset(a.max(b)),
                    })
                    .collect(),
                ..meta(generation)
            };
            prop_assert_eq!(Meta::decode(&written.encode()), Ok(written));
        }

        #[test]
        fn hostile_bytes_never_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..300),
            counts in (0_u32..8, 0_u32..8),
        ) {
            let _ = Meta::decode(&bytes);
            if bytes.len() >= HEAD_BYTES {
                bytes[..4].copy_from_slice(&MAGIC);
                let _ = Meta::decode(&bytes);
                bytes[48..52].copy_from_slice(&counts.0.to_le_bytes());
                bytes[52..56].copy_from_slice(&counts.1.to_le_bytes());
                let end = bare_bytes(counts.0 as usize, counts.1 as usize).min(bytes.len());
                bytes[8..10].copy_from_slice(&[1, 0]);
                seal(&mut bytes[..end]);
                let _ = choose(&bytes, &bytes);
            }
        }
    }
}
