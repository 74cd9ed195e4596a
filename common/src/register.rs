//! The register seam: one small value with compare-and-set, and what Millrace keeps in it.
//!
//! ```text
//! leader --RegisterRequest--> file, PostgreSQL, etcd or simulated register --RegisterAnswer--> leader
//! ```
//!
//! Safety needs only the compare-and-set (I10). An answer may be *indeterminate*: the value may or may not
//! have been written. The caller then reads and compares; [`RegisterState::stamp`] makes its own write
//! recognisable.

use bytes::Bytes;
use rkyv::{Archive, Deserialize, Serialize};

use crate::membership::Membership;
use crate::{Epoch, NodeId, Version};

/// The largest value that every register takes. A state is a few hundred bytes; etcd takes 1.5 MiB.
pub const REGISTER_BYTES_MAX: usize = 240 << 10;

/// How often the register was written; 0 before the first time.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Revision(pub u64);

/// A question to the register. `id` comes back in the answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterRequest {
    /// The asker's number for it.
    pub id: u64,
    /// What to do.
    pub op: RegisterOp,
}

/// What a register can do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RegisterOp {
    /// Reads the newest value, linearizably.
    Read,
    /// Writes `value` if the register still stands at `expect`.
    Cas {
        /// The revision that the writer has seen.
        expect: Revision,
        /// The new value.
        value: Bytes,
    },
}

/// An answer of the register.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterAnswer {
    /// The request's number.
    pub id: u64,
    /// What came of it.
    pub outcome: RegisterOutcome,
}

/// What comes of a question to the register.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum RegisterOutcome {
    /// The value and its revision; empty bytes at revision 0.
    Value(Revision, Bytes),
    /// Written; the register stands at this revision now.
    Written(Revision),
    /// Not written: somebody else was faster. Read again.
    Lost,
    /// Perhaps written. Read and compare.
    Indeterminate(String),
    /// Not reached; nothing was written.
    Unavailable(String),
}

/// What the register holds.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Archive, Serialize, Deserialize)]
pub struct RegisterState {
    /// The newest epoch that a leader has claimed.
    pub epoch: Epoch,
    /// Who claimed it.
    pub leader: NodeId,
    /// Drawn anew for each write, so that a writer knows its own after an indeterminate answer.
    pub stamp: u64,
    /// All generations that may still hold data, oldest first; only the last has no end.
    pub generations: Vec<Generation>,
    /// Who sits in which seat of the log, and who is on its way out.
    pub membership: Membership,
}

/// The log servers of one epoch.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Archive, Serialize, Deserialize)]
pub struct Generation {
    /// The newest epoch that wrote it: neighbours on the same log servers are one generation.
    pub epoch: Epoch,
    /// The oldest one.
    pub first_epoch: Epoch,
    /// The recovery version it began at, exclusive: its first version is above.
    pub begin: Version,
    /// The last version that survived, inclusive; `None` while it is live.
    pub end: Option<Version>,
    /// Who holds its data, in the order of placement.
    pub log_servers: Vec<NodeId>,
    /// Who would hold a share too, but was not whole when it began.
    pub absent: Vec<NodeId>,
    /// How many hold each stream, the absent ones counted.
    pub replication: u8,
}

impl Generation {
    /// How many of its log servers may be silent while the others are known to hold a copy of everything.
    #[must_use]
    pub fn spare_copies(&self) -> usize {
        usize::from(self.replication).saturating_sub(1 + self.absent.len())
    }
}

const MAGIC: [u8; 4] = *b"MRRG";
const FORMAT: u16 = 3;
const HEADER_BYTES: usize = 12;

impl RegisterState {
    /// The state of a register that was never written.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            epoch: Epoch::ZERO,
            leader: NodeId::ZERO,
            stamp: 0,
            generations: Vec::new(),
            membership: Membership::default(),
        }
    }

    /// The bytes: `MRRG`, u16 format, u16 zero, u32 crc32c of the rest, then the rkyv body.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let body = rkyv::to_bytes::<rkyv::rancor::Error>(self).expect("plain data encodes");
        let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        out.extend_from_slice(&body);
        Bytes::from(out)
    }

    /// The inverse of [`RegisterState::encode`]; no bytes are the empty state.
    ///
    /// # Errors
    /// What is wrong with the bytes, for people.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.is_empty() {
            return Ok(Self::empty());
        }
        if bytes.len() < HEADER_BYTES || bytes[..4] != MAGIC {
            return Err("not a register of Millrace".to_owned());
        }
        let format = u16::from_le_bytes([bytes[4], bytes[5]]);
        if format != FORMAT {
            return Err(format!("register format {format}; this build knows {FORMAT}"));
        }
        let body = &bytes[HEADER_BYTES..];
        let stored = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        let computed = crc32c::crc32c(body);
        if stored != computed {
            return Err(format!("register checksum {stored:08x}, computed {computed:08x}"));
        }
        let state: Self =
            rkyv::from_bytes::<_, rkyv::rancor::Error>(body).map_err(|error| error.to_string())?;
        state.check()?;
        Ok(state)
    }

    /// The order that every state keeps: generations in order of epoch, each but the last closed, each
    /// beginning at or above the end of the one before.
    ///
    /// # Errors
    /// The numbers that are out of order.
    pub fn check(&self) -> Result<(), String> {
        self.membership.check()?;
        for pair in self.generations.windows(2) {
            let Some(end) = pair[0].end else {
                return Err(format!("{} has a successor but no end", pair[0].epoch));
            };
            if pair[0].epoch >= pair[1].epoch || pair[1].begin < end {
                return Err(format!(
                    "{} ends at {end} but {} begins at {}",
                    pair[0].epoch, pair[1].epoch, pair[1].begin
                ));
            }
        }
        match self.generations.last() {
            Some(last) if last.epoch > self.epoch => {
                Err(format!("generation {} is above epoch {}", last.epoch, self.epoch))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_round_trip_and_damage_is_named() {
        let state = RegisterState {
            epoch: Epoch(2),
            leader: NodeId(7),
            stamp: 9,
            generations: vec![Generation {
                epoch: Epoch(2),
                first_epoch: Epoch(2),
                begin: Version(5),
                end: None,
                log_servers: vec![NodeId(7)],
                absent: vec![NodeId(8)],
                replication: 2,
            }],
            membership: Membership::default(),
        };
        let bytes = state.encode();
        assert_eq!(RegisterState::decode(&bytes).unwrap(), state);
        assert_eq!(RegisterState::decode(&[]).unwrap(), RegisterState::empty());
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.to_vec();
            bad[at / 8] ^= 1 << (at % 8);
            if !(6..8).contains(&(at / 8)) {
                assert!(RegisterState::decode(&bad).is_err(), "bit {at}");
            }
        }
    }
}
