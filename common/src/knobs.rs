//! Knobs: every limit and interval, with its unit, its default and the range that the simulator draws from.

use crate::{Plants, Prng};

/// LIFE in versions, at most: how long after its read version a transaction can commit.
pub const LIFE_VERSIONS_MAX: u64 = 5_000_000;
/// FENCE_JUMP in versions: RTV - RV.
pub const FENCE_JUMP_VERSIONS: u64 = 20_000_000;

// I5. A read version of an old epoch is at most RV plus what was in flight above it, which is bounded by LIFE
// (pushed but uncommitted versions are at most LIFE ahead of the known committed version). So at RTV it is
// older than FENCE_JUMP - LIFE > LIFE, thus too old by the first decision of an empty conflict set.
const _: () = assert!(FENCE_JUMP_VERSIONS > 2 * LIFE_VERSIONS_MAX);

macro_rules! knobs {
    ($($(#[$doc:meta])* $name:ident = $default:expr, $low:expr => $high:expr;)*) => {
        /// Limits and intervals of all roles.
        #[derive(Clone, PartialEq, Eq, Debug, Hash)]
        pub struct Knobs {
            $($(#[$doc])* pub $name: u64,)*
            /// Bugs that the simulator has switched on; see [`Cx::planted`](crate::Cx::planted).
            pub plants: Plants,
        }

        impl Default for Knobs {
            fn default() -> Self {
                Self { $($name: $default,)* plants: Plants::NONE }
            }
        }

        impl Knobs {
            /// Every knob's name, with its value here.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            /// Sets a knob by name; `false` when there is none of that name.
            #[must_use]
            pub fn set(&mut self, name: &str, value: u64) -> bool {
                match name {
                    $(stringify!($name) => self.$name = value,)*
                    _ => return false,
                }
                true
            }

            /// Draws a random subset of the knobs from their simulated ranges; the others keep the
            /// simulator's everyday value, the middle of a small cluster's life.
            pub fn randomize(&mut self, prng: &mut Prng) {
                $(if prng.chance(1, 4) {
                    self.$name = prng.between($low, $high);
                })*
                for pages in [&mut self.segment_bytes, &mut self.read_bytes] {
                    *pages = pages.next_multiple_of(crate::disk::PAGE_BYTES);
                }
            }
        }
    };
}

knobs! {
    // Sequencer.
    /// How fast versions advance, versions a second of the sequencer's clock.
    versions_per_second = 1_000_000, 1_000_000 => 1_000_000;
    /// LIFE: versions between a read version and a commit version, at most.
    life_versions = LIFE_VERSIONS_MAX, 50_000 => LIFE_VERSIONS_MAX;

    // Transactions.
    /// Keys, records and entries of a transaction, bytes.
    transaction_bytes_max = 48 << 20, 16 << 10 => 64 << 10;
    /// One key, bytes.
    key_bytes_max = 10 << 10, 64 => 512;
    /// Read or write ranges of a transaction, each.
    transaction_ranges_max = 100_000, 64 => 1000;

    // Proxy.
    /// Transactions in a batch, at most.
    batch_transactions_max = 4096, 1 => 16;
    /// Bytes of a batch after which it closes.
    batch_bytes_max = 1 << 20, 1 << 10 => 64 << 10;
    /// Batches between version and reply, at most; the next one gathers meanwhile.
    batches_in_flight_max = 16, 1 => 4;
    /// Settlements that a resolver has not confirmed, beyond which a proxy has one batch in flight.
    settlements_max = 1024, 2 => 64;
    /// Bytes of all requests that a proxy has not answered, at most.
    proxy_bytes_max = 256 << 20, 128 << 10 => 1 << 20;
    /// Requests of one client that are not settled, at most.
    client_requests_max = 4096, 16 => 64;
    /// Clients that a proxy keeps state for, at most.
    proxy_clients_max = 65_536, 64 => 64;
    /// An idle proxy commits an empty batch this often, ms.
    heartbeat_ms = 1000, 20 => 500;
    /// A request to another role is sent again after this long without an answer, ms.
    retransmit_ms = 500, 5 => 100;
    /// Read versions that wait for one round of proof, at most.
    read_versions_waiting_max = 65_536, 4 => 64;
    /// How long a proxy's pull of the catalog waits for news, ms.
    catalog_wait_ms = 1000, 10 => 200;

    // Log server.
    /// A segment file, bytes; a multiple of 4096.
    segment_bytes = 64 << 20, 256 << 10 => 256 << 10;
    /// Frames are gathered into one flush up to this, bytes.
    flush_bytes_max = 1 << 20, 4 << 10 => 64 << 10;
    /// Accepted but not yet flushed, bytes; beyond it pushes wait.
    unflushed_bytes_max = 128 << 20, 256 << 10 => 1 << 20;
    /// Frames kept in memory for consumers of the tail, bytes.
    tail_bytes_max = 128 << 20, 4 << 10 => 64 << 10;
    /// Zero-written segments kept ready.
    spare_segments = 2, 1 => 2;
    /// Recycled segments kept beyond that, at most; more are removed.
    spare_segments_max = 16, 2 => 4;
    /// Scanning and catch-up read this much at once, bytes; a multiple of 4096.
    read_bytes = 1 << 20, 8 << 10 => 64 << 10;
    /// Reads in flight while scanning.
    scan_reads_max = 4, 1 => 4;
    /// Pulls that wait or read, at most.
    pulls_waiting_max = 16_384, 8 => 64;
    /// One answer to a pull, bytes, at most; one version always fits.
    pull_bytes_max = 4 << 20, 1 << 10 => 64 << 10;
    /// Answers that were read ahead of the pulls of consumers that catch up, bytes; 0 reads nothing ahead.
    read_ahead_bytes_max = 32 << 20, 0 => 256 << 10;
    /// A pull waits for news at most this long, ms.
    pull_wait_ms_max = 10_000, 10 => 1000;
    /// An absent log server that has caught up asks for news this often, ms; one that waits for an answer
    /// asks again after ten times as long.
    copy_ms = 20, 5 => 50;
    /// A damaged block that no other log server could give is asked for again after this long, ms.
    mend_retry_ms = 5000, 20 => 300;
    /// A pull that meets a damaged block waits at most this long for it to be mended, ms.
    mend_wait_ms = 500, 1 => 200;
    /// The log is read through at this pace to find damage, bytes a second; 0: never.
    scrub_bytes_per_second = 8 << 20, 64 << 10 => 8 << 20;
    /// Between two passes of that over the log, ms.
    scrub_rest_ms = 86_400_000, 10 => 1000;
    /// One that catches up copies at most so many bytes a second, so that others can serve; what it takes to
    /// be recruited is copied as fast as it goes.
    copy_bytes_per_second = 128 << 20, 16 << 10 => 64 << 20;
    /// Streams in one transaction, pull or description, at most.
    pull_streams_max = 10_000, 16 => 64;
    /// Pushes that wait for their predecessor, at most.
    pushes_waiting_max = 1024, 4 => 64;
    /// Idempotency ids are remembered for this many versions.
    id_life_versions = 600_000_000, 30_000_000 => 60_000_000;
    /// Idempotency ids in memory, at most; the oldest go first.
    ids_max = 4_000_000, 1000 => 1000;

    // Resolver.
    /// Batches that wait for their predecessor, at most.
    resolves_waiting_max = 1024, 4 => 64;
    /// Write ranges of batches that are not settled, bytes, beyond which the next batch waits.
    unsettled_bytes_max = 64 << 20, 256 => 64 << 10;
    /// Entries that eviction looks at after each batch, beside one for every four written since.
    eviction_entries = 256, 1 => 64;
    /// Memory of the conflict set, bytes, beyond which the resolver pushes back.
    conflict_set_bytes_max = 4 << 30, 4 << 30 => 4 << 30;

    // Leader.
    /// A phase of recovery is tried again after this long, ms.
    recovery_retry_ms = 1000, 20 => 200;
    /// Waiting before a failed register operation is tried again, ms, at most.
    register_backoff_ms_max = 2000, 20 => 200;
    /// A leader says that it lives this often, ms.
    leader_beat_ms = 50, 10 => 100;
    /// A candidate that hears no leader for this long, and up to half as long again, takes over, ms.
    leader_silence_ms = 250, 200 => 2000;
    /// A leader whose recovery takes longer than this falls silent, so that another one may try, ms.
    recovery_patience_ms = 10_000, 2000 => 10_000;
    /// A leader asks after its nodes this often, ms; one that has not answered six times in a row is gone.
    watch_ms = 50, 20 => 200;
    /// A recovery waits this long for nodes that it could do without, ms.
    finding_ms = 200, 20 => 1000;
    /// A log server that has been silent for this long loses its seat to a spare node, ms; 0 for never.
    replace_after_ms = 600_000, 700 => 15_000;

    // Client.
    /// A request is given up, and its outcome found out, after this long, ms.
    client_timeout_ms = 5000, 50 => 500;
    /// Waiting between attempts, ms, at most.
    client_backoff_ms_max = 1000, 20 => 200;
    /// Requests of a session that are not answered, at most.
    client_in_flight_max = 2048, 4 => 16;
}

impl Knobs {
    /// A set for tests and simulations: small files, short waits.
    #[must_use]
    pub fn small() -> Self {
        Self {
            transaction_bytes_max: 64 << 10,
            key_bytes_max: 256,
            batch_bytes_max: 32 << 10,
            segment_bytes: 256 << 10,
            flush_bytes_max: 64 << 10,
            unflushed_bytes_max: 1 << 20,
            tail_bytes_max: 128 << 10,
            read_bytes: 64 << 10,
            heartbeat_ms: 100,
            retransmit_ms: 30,
            recovery_retry_ms: 100,
            watch_ms: 100,
            replace_after_ms: 5_000,
            register_backoff_ms_max: 100,
            client_timeout_ms: 300,
            client_backoff_ms_max: 100,
            catalog_wait_ms: 100,
            mend_retry_ms: 100,
            mend_wait_ms: 100,
            scrub_bytes_per_second: 4 << 20,
            scrub_rest_ms: 200,
            ..Self::default()
        }
    }

    /// Checks the relations that the roles rely on.
    ///
    /// # Errors
    /// The first relation that does not hold, with its numbers.
    pub fn check(&self) -> Result<(), String> {
        let rules: &[(bool, &str, u64, u64)] = &[
            (
                self.life_versions <= LIFE_VERSIONS_MAX && self.life_versions > 0,
                "life_versions is at most LIFE_VERSIONS_MAX",
                self.life_versions,
                LIFE_VERSIONS_MAX,
            ),
            (
                self.batch_transactions_max <= 65_535 && self.batch_transactions_max > 0,
                "a place in the batch takes two bytes",
                self.batch_transactions_max,
                65_535,
            ),
            (
                self.segment_bytes.is_multiple_of(4096) && self.read_bytes.is_multiple_of(4096),
                "segment_bytes and read_bytes are whole pages",
                self.segment_bytes,
                self.read_bytes,
            ),
            (
                // A batch closes at batch_bytes_max but may hold one more transaction of the largest size.
                (self.transaction_bytes_max + self.batch_bytes_max) * 5 / 4 + (64 << 10)
                    <= self.segment_bytes,
                "the largest batch fits a segment",
                self.transaction_bytes_max,
                self.segment_bytes,
            ),
            (
                self.id_life_versions >= FENCE_JUMP_VERSIONS + LIFE_VERSIONS_MAX,
                "ids outlive a recovery",
                self.id_life_versions,
                FENCE_JUMP_VERSIONS,
            ),
            (
                self.leader_silence_ms >= 2 * self.leader_beat_ms,
                "one beat may be lost",
                self.leader_silence_ms,
                self.leader_beat_ms,
            ),
            (
                self.proxy_bytes_max >= self.transaction_bytes_max,
                "a proxy can hold the largest transaction",
                self.proxy_bytes_max,
                self.transaction_bytes_max,
            ),
        ];
        match rules.iter().find(|rule| !rule.0) {
            None => Ok(()),
            Some((_, text, left, right)) => Err(format!("{text} ({left}, {right})")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_every_simulated_draw_keep_the_relations() {
        Knobs::default().check().unwrap();
        for seed in 0..1000 {
            let mut knobs = Knobs::small();
            knobs.randomize(&mut Prng::new(seed));
            knobs.check().unwrap();
        }
    }

    #[test]
    fn knobs_are_set_by_name() {
        let mut knobs = Knobs::default();
        assert!(knobs.set("heartbeat_ms", 7) && knobs.heartbeat_ms == 7);
        assert!(!knobs.set("no_such_knob", 7));
    }
}
