//! Oracles: they see everything that happens, and stop the run at the first broken promise.
//!
//! ```text
//! notes of machines --.                    facts: epochs, what is durable where, what is acknowledged
//! what clients saw  --+--> Oracles --+---> chain       I1 I2 I8
//! the disks, now    --'              |---> durability  I3 I7 I8 I9 I10
//! (Probe)                            |---> offsets     I12
//!                                    |---> consumers   I11 I12 O10 O11
//!                                    |---> trims       I13
//!                                    |---> reads       I4 (O4)
//!                                    `---> history     O1 O2 O5 O8 I16, at the end
//! ```
//!
//! They share no code with the roles, only the words of `common`. Each rule has a hand-made bad history among
//! the tests. Most checks cost O(1) at the event, so that a failure stops at its cause.

mod chain;
mod consumers;
mod durability;
mod facts;
mod frames;
mod history;
mod offsets;
mod reads;
mod serial;
#[cfg(test)]
mod tests;
mod trims;

#[cfg(test)]
pub(crate) use self::frames::frame;
pub(crate) use self::frames::{bodies_in, frames_in};

use common::disk::File;
use common::register::RegisterState;
use common::{Endpoint, NodeId, Note, Peer, StreamId, Version};

use crate::observe::Observation;
use crate::world::Happened;

/// A broken promise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The invariant or oracle rule, and a word: `I3.durable`.
    pub rule: &'static str,
    /// Names and numbers.
    pub detail: String,
}

type Judged = Result<(), Violation>;

/// Stops with a violation unless a condition holds.
macro_rules! demand {
    ($rule:literal, $condition:expr, $($detail:tt)+) => {
        if !$condition {
            return Err($crate::oracle::Violation { rule: $rule, detail: format!($($detail)+) });
        }
    };
}
use demand;

/// What oracles may ask of the world at the moment of an event.
pub trait Probe {
    /// Whether these bytes would read back as now after a power cut at this moment.
    fn would_survive(&self, node: NodeId, file: File, offset: u64, bytes: u64) -> bool;

    /// What the register holds now.
    fn register(&self) -> RegisterState;
}

/// All oracles of a run.
#[derive(Clone, Debug, Default)]
pub struct Oracles {
    facts: facts::Facts,
    chain: chain::Chain,
    durability: durability::Durability,
    offsets: offsets::Offsets,
    consumers: consumers::Consumers,
    trims: trims::Trims,
    reads: reads::Reads,
    history: history::History,
}

impl Oracles {
    /// Oracles of a run with so many resolvers.
    #[must_use]
    pub fn new(resolvers: usize) -> Self {
        let mut oracles = Self::default();
        oracles.history.is_sharded = resolvers > 1;
        oracles
    }

    /// Judges one thing that happened.
    ///
    /// # Errors
    /// The promise that it breaks.
    pub fn judge(&mut self, happened: &Happened, probe: &impl Probe) -> Judged {
        match happened {
            Happened::Note(from, note) => self.judge_note(*from, note, probe),
            Happened::Observation(client, observation) => self.judge_seen(*client, observation),
            Happened::Wrote(node, request) => {
                self.durability.wrote(*node, request);
                Ok(())
            }
            Happened::Began(_)
            | Happened::Crashed(..)
            | Happened::Mark(_)
            | Happened::Halted(..) => Ok(()),
        }
    }

    /// Judges the run as a whole, once consumers have read everything that is left.
    ///
    /// # Errors
    /// The promise that it breaks.
    pub fn finish(&self) -> Judged {
        self.history.finish(&self.consumers)
    }

    /// Commits that were acknowledged to clients.
    #[must_use]
    pub fn acknowledged_count(&self) -> u64 {
        self.facts.acknowledged_count()
    }

    /// The highest version that a client knows to be committed: by an acknowledgement, or by its id.
    #[must_use]
    pub fn acknowledged(&self) -> Version {
        self.facts.acknowledged().max(self.history.known_to_clients())
    }

    /// Whether a block that a log server has written is still to be read there, as far as anybody can tell:
    /// of the streams of the system nothing is known.
    pub(crate) fn is_wanted(&self, node: NodeId, stream: StreamId, version: Version) -> bool {
        !stream.is_system()
            && self.is_kept(node, version)
            && self.trims.is_wanted(node, stream, version)
    }

    /// Whether a log server keeps what it wrote of a version.
    pub(crate) fn is_kept(&self, node: NodeId, version: Version) -> bool {
        !self.facts.is_rolled_back(version)
            && version <= self.acknowledged()
            && !self.trims.is_void(node, version)
    }

    fn judge_note(&mut self, from: Endpoint, note: &Note, probe: &impl Probe) -> Judged {
        self.facts.note(from, note, probe)?;
        let facts = &self.facts;
        self.chain.note(from, note, facts)?;
        self.durability.note(from, note, facts, probe)?;
        self.offsets.note(from, note, facts)?;
        self.consumers.note(from, note, facts)?;
        self.trims.note(from, note, facts)
    }

    fn judge_seen(&mut self, client: Peer, observation: &Observation) -> Judged {
        if let Observation::Broken(detail) = observation {
            return Err(Violation { rule: "workload", detail: format!("{client:?}: {detail}") });
        }
        self.consumers.observe(observation, &self.facts, &self.offsets)?;
        self.trims.observe(client, observation)?;
        self.reads.observe(client, observation, &self.facts)?;
        self.history.observe(observation)
    }
}
