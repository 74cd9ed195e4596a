//! How a log server stands: for status pages and metrics.

use common::message::LogState;
use common::{Epoch, Version};

use super::LogServer;
use super::catch_up::Follower;
use super::mend::MendStatus;
use super::scrub::ScrubStatus;

/// What a log server does now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// Reads its directory, or has not begun to.
    Opening,
    /// Takes no pushes: no epoch, or an ended one.
    Locked,
    /// Takes the pushes of its epoch.
    Serving,
    /// Writes out the rest.
    Stopping,
}

/// How a log server stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogStatus {
    /// What it does.
    pub standing: Standing,
    /// The epoch that recruited it in this life; 0 when none has.
    pub epoch: Epoch,
    /// Pushes of older epochs are refused.
    pub locked: Epoch,
    /// The last version that was accepted.
    pub last: Version,
    /// Inclusive.
    pub durable: Version,
    /// Inclusive.
    pub known_committed: Version,
    /// What consumers may see, inclusive.
    pub served: Version,
    /// Whether its disk is full.
    pub state: LogState,
    /// Segments in the log.
    pub segments: u64,
    /// Spares that are ready.
    pub spares: u64,
    /// Streams that it knows.
    pub streams: u64,
    /// Blocks in the index.
    pub blocks: u64,
    /// Bodies in memory, bytes.
    pub tail_bytes: u64,
    /// Accepted but not flushed, bytes.
    pub unflushed_bytes: u64,
    /// Idempotency ids in memory.
    pub ids: u64,
    /// Pulls that wait for news.
    pub pulls_waiting: u64,
    /// Pulls that read, or wait for their turn to.
    pub pulls_reading: u64,
    /// Damaged blocks.
    pub mends: MendStatus,
    /// Reading the log through.
    pub scrub: ScrubStatus,
    /// What was read ahead of consumers that catch up and is not asked for yet, bytes.
    pub read_ahead_bytes: u64,
    /// What is being waited for, in words.
    pub waits: Vec<String>,
}

impl LogServer {
    /// How it stands.
    #[must_use]
    pub fn status(&self) -> LogStatus {
        let (log, epoch) = (&self.log, self.epoch());
        let standing = if log.is_stopping() {
            Standing::Stopping
        } else if !log.is_open() {
            Standing::Opening
        } else if self.is_accepting(epoch) {
            Standing::Serving
        } else {
            Standing::Locked
        };
        LogStatus {
            standing,
            epoch,
            locked: self.locked,
            last: log.last(),
            durable: log.durable(),
            known_committed: log.known_committed(),
            served: self.served_limit(),
            state: log.state(),
            segments: log.segment_count() as u64,
            spares: log.spare_count() as u64,
            streams: log.index().stream_count() as u64,
            blocks: log.index().block_count(),
            tail_bytes: log.tail().bytes(),
            unflushed_bytes: log.unflushed_bytes(),
            ids: self.ids.count() as u64,
            pulls_waiting: self.pulls.waiting_count() as u64,
            pulls_reading: self.pulls.reading_count() as u64,
            mends: self.mends.status(),
            scrub: self.scrub.status(),
            read_ahead_bytes: self.pulls.ahead.bytes(),
            waits: self.waits(),
        }
    }

    fn waits(&self) -> Vec<String> {
        let mut waits = Vec::new();
        if let Some(takeover) = &self.takeover {
            waits.push(format!("{} by {} waits for the disk", takeover.word(), takeover.epoch()));
        }
        waits.extend(self.follower.as_ref().map(Follower::waits));
        if self.log.waits_for_segment() {
            waits.push("a flush waits for a segment".to_owned());
        }
        let early =
            self.generation.as_ref().map_or(0, |generation| generation.chain.waiting_count());
        let copies = self.copies.reading_count();
        let trims = self.trims.waiting_count();
        let finds = self.ids.waiting_count();
        let held = self.mends.held_count();
        for (count, what) in [
            (early, "pushes wait for their predecessor or for room"),
            (trims, "trims wait for the disk"),
            (held, "pulls wait for a damaged block to be mended"),
            (copies, "copies for others wait for the disk"),
            (finds, "questions after ids wait for a version to be committed"),
        ] {
            if count > 0 {
                waits.push(format!("{count} {what}"));
            }
        }
        waits
    }
}
