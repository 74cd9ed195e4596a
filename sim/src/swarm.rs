//! Swarm testing: what a seed's run is made of.
//!
//! Each run enables a random *subset* of the faults and of the client operations, each with its own
//! intensity: runs that do a little of everything all look the same. One run in twenty is calm. The whole
//! draw prints as one JSON line before the first event.

use std::collections::BTreeMap;

use common::{Knobs, LIFE_VERSIONS_MAX, Prng};
use serde::Serialize;

use crate::disk::DiskProfile;
use crate::layout::Layout;
use crate::network::NetworkProfile;
use crate::random::{Randomness, log_uniform};
use crate::register::RegisterProfile;
use crate::workload::Mix;
use crate::world::Profile;

const MS: u64 = 1_000_000;
/// One-way latencies that a commit may take, with its tails and repeats.
const HOPS_OF_A_COMMIT: u64 = 40;

/// How often each kind of fault comes, as the mean time between two, ms; 0 is never.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FaultRates {
    /// A node's process is killed.
    pub kill_ms: u64,
    /// A node's machine loses power.
    pub power_cut_ms: u64,
    /// A client's process is killed.
    pub client_kill_ms: u64,
    /// A node or a client pauses.
    pub pause_ms: u64,
    /// Two processes can't reach each other, in one direction or both.
    pub cut_ms: u64,
    /// What is sent between two processes is held back.
    pub clog_ms: u64,
    /// A connection breaks.
    pub reset_ms: u64,
    /// Nobody reaches the register.
    pub register_outage_ms: u64,
    /// A disk does nothing for a while.
    pub disk_stall_ms: u64,
    /// A disk is full for a while.
    pub disk_full_ms: u64,
    /// A barrier fails.
    pub barrier_error_ms: u64,
    /// How long what was killed stays away, ms, at most.
    pub down_ms_max: u64,
    /// A disk gets slow for a while.
    pub slow_disk_ms: u64,
    /// A durable page rots.
    pub bit_rot_ms: u64,
    /// A durable page can't be read any more.
    pub latent_error_ms: u64,
    /// A write goes to another place.
    pub misdirect_ms: u64,
    /// A node is started on another node's disk.
    pub foreign_disk_ms: u64,
    /// A node is cut off.
    pub isolate_ms: u64,
    /// Some nodes stop, one after the other, and come back in another order.
    pub swizzle_ms: u64,
    /// A wall clock is set.
    pub wall_clock_ms: u64,
    /// A machine is lost for good.
    pub lose_ms: u64,
    /// The network falls apart into two halves.
    pub split_ms: u64,
    /// An operator drains, restores or removes a node.
    pub decide_ms: u64,
}

impl FaultRates {
    /// Whether anything that was durable is ever harmed.
    #[must_use]
    pub const fn may_rot(&self) -> bool {
        self.bit_rot_ms + self.latent_error_ms + self.misdirect_ms > 0
    }

    /// Nothing that was durable is ever harmed.
    pub const fn spare_what_is_durable(&mut self) {
        (self.bit_rot_ms, self.latent_error_ms, self.misdirect_ms) = (0, 0, 0);
    }
}

/// What one seed's run is made of.
#[derive(Clone, Debug, Serialize)]
pub struct Config {
    /// The seed.
    pub seed: u64,
    /// Whether there are no faults at all.
    pub is_calm: bool,
    /// Where the roles live.
    pub layout: Layout,
    /// How many clients that write.
    pub writers: u64,
    /// How many clients that only consume.
    pub consumers: u64,
    /// How long the faulty part lasts, ms.
    pub chaos_ms: u64,
    /// The world.
    pub profile: Profile,
    /// Faults that come as events.
    pub rates: FaultRates,
    /// What clients do.
    pub mix: Mix,
    /// The knobs that differ from the simulator's everyday ones.
    pub knobs_changed: BTreeMap<&'static str, u64>,
    /// All knobs.
    #[serde(skip)]
    pub knobs: Knobs,
}

impl Config {
    /// Draws the run of a seed.
    #[must_use]
    pub fn draw(randomness: Randomness) -> Self {
        let mut prng = randomness.stream("swarm", 0);
        let is_calm = prng.chance(1, 20);
        let mut knobs = Knobs::small();
        // A wait and the drift of two clocks over it must fit into a client's patience.
        knobs.pull_wait_ms_max = 500;
        let everyday = knobs.clone();
        if prng.chance(4, 5) {
            knobs.randomize(&mut randomness.stream("knobs", 0));
        }
        // Whose patience is shorter than an answer takes never hears one, and what is read at a version must
        // reach the resolvers within LIFE of it.
        let profile = profile(is_calm, &mut randomness.stream("swarm profile", 0));
        let one_way_ns = profile.network.latency_ns + profile.network.pair_extra_ns;
        let commit_ms = HOPS_OF_A_COMMIT * one_way_ns / MS;
        let commit_versions = commit_ms * knobs.versions_per_second / 1000;
        knobs.client_timeout_ms = knobs.client_timeout_ms.max(commit_ms);
        knobs.life_versions = knobs.life_versions.max(commit_versions).min(LIFE_VERSIONS_MAX);
        knobs.check().expect("every draw keeps the relations");
        let changed = knobs.list().into_iter().zip(everyday.list());
        let knobs_changed = changed.filter(|(new, old)| new != old).map(|(new, _)| new).collect();
        let consumers = prng.between(1, 3);
        let layout = Layout::draw(&mut randomness.stream("swarm layout", 0));
        let mix = Mix::draw(&mut randomness.stream("swarm mix", 0));
        // Runs take about as long as each other: who thinks longer gets more time.
        let stretch = u64::from(mix.think_us.ilog10().pow(2) / 4).max(1);
        Self {
            seed: randomness.seed(),
            is_calm,
            layout,
            writers: prng.between(1, 8),
            consumers,
            chaos_ms: log_uniform(&mut prng, 300, 4_000) * stretch,
            profile,
            rates: rates(is_calm, &mut randomness.stream("swarm rates", 0)),
            mix,
            knobs_changed,
            knobs,
        }
    }

    /// The run of the benchmark: five nodes, three copies, 20 clients; a seed's network, disks and faults.
    #[must_use]
    pub fn bench(seed: u64, think_ms: u64) -> Self {
        let randomness = Randomness::new(seed);
        let mut config = Self::draw(randomness);
        let layout = Layout::spread(5, &mut randomness.stream("bench layout", 0));
        config.layout = Layout { replication: 3.min(layout.log_servers.len() as u8), ..layout };
        (config.writers, config.consumers, config.chaos_ms) = (18, 2, 10_000);
        config.mix.think_us = 1_000 * think_ms;
        config
    }

    /// One JSON line.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data serializes")
    }
}

/// Something log-uniform in a share of the runs, else nothing.
fn sometimes(prng: &mut Prng, percent: u64, low: u64, high: u64) -> u64 {
    // Both draws are always made, so that the share can be changed without shifting what follows.
    let (on, value) = (prng.chance(percent, 100), log_uniform(prng, low, high));
    if on { value } else { 0 }
}

fn profile(is_calm: bool, prng: &mut Prng) -> Profile {
    let network = NetworkProfile {
        latency_ns: log_uniform(prng, 20_000, 5 * MS),
        tail_factor: prng.between(1, 100),
        pair_extra_ns: sometimes(prng, 30, 100_000, 20 * MS),
        loss_ppm: sometimes(prng, 40, 100, 100_000),
        duplicate_ppm: sometimes(prng, 40, 1_000, 300_000),
        reorder_ppm: sometimes(prng, 40, 1_000, 300_000),
        reset_ppm: sometimes(prng, 50, 10, 5_000),
        bit_flip_ppm: sometimes(prng, 50, 10, 5_000),
        through_codec: prng.chance(1, 5),
        idle_ns: log_uniform(prng, 100 * MS, 2_000 * MS),
    };
    let disk = DiskProfile {
        request_ns: log_uniform(prng, 5_000, MS),
        barrier_ns: log_uniform(prng, 20_000, 5 * MS),
        page_ns: log_uniform(prng, 100, 20_000),
        tail_factor: prng.between(1, 100),
        barrier_errors_ppm: sometimes(prng, 10, 100, 10_000),
        quota_bytes: 1 << 40,
    };
    let register = RegisterProfile {
        latency_ns: log_uniform(prng, 100_000, 20 * MS),
        lost_ppm: sometimes(prng, 40, 10_000, 300_000),
        unavailable_ppm: sometimes(prng, 40, 10_000, 300_000),
    };
    let drift_ppm_max = sometimes(prng, 50, 100, 50_000);
    if !is_calm {
        return Profile { network, disk, register, drift_ppm_max };
    }
    Profile {
        network: NetworkProfile {
            latency_ns: network.latency_ns,
            through_codec: network.through_codec,
            ..NetworkProfile::default()
        },
        disk: DiskProfile { barrier_ns: disk.barrier_ns, ..DiskProfile::default() },
        register: RegisterProfile::default(),
        drift_ppm_max: 0,
    }
}

fn rates(is_calm: bool, prng: &mut Prng) -> FaultRates {
    let rates = FaultRates {
        kill_ms: sometimes(prng, 60, 50, 2_000),
        power_cut_ms: sometimes(prng, 60, 50, 2_000),
        client_kill_ms: sometimes(prng, 30, 100, 2_000),
        pause_ms: sometimes(prng, 30, 50, 2_000),
        cut_ms: sometimes(prng, 30, 50, 2_000),
        clog_ms: sometimes(prng, 40, 20, 2_000),
        reset_ms: sometimes(prng, 40, 20, 2_000),
        register_outage_ms: sometimes(prng, 25, 100, 2_000),
        disk_stall_ms: sometimes(prng, 25, 50, 2_000),
        disk_full_ms: sometimes(prng, 15, 100, 2_000),
        barrier_error_ms: sometimes(prng, 15, 100, 2_000),
        down_ms_max: log_uniform(prng, 1, 500),
        slow_disk_ms: sometimes(prng, 15, 100, 2_000),
        bit_rot_ms: sometimes(prng, 15, 100, 1_000),
        latent_error_ms: sometimes(prng, 10, 100, 1_000),
        misdirect_ms: sometimes(prng, 15, 20, 500),
        foreign_disk_ms: sometimes(prng, 10, 100, 2_000),
        isolate_ms: sometimes(prng, 20, 100, 2_000),
        swizzle_ms: sometimes(prng, 20, 200, 3_000),
        wall_clock_ms: sometimes(prng, 20, 50, 2_000),
        lose_ms: sometimes(prng, 20, 100, 2_000),
        decide_ms: sometimes(prng, 20, 100, 2_000),
        split_ms: sometimes(prng, 20, 100, 2_000),
    };
    // A lost disk is a copy less of everything.
    let lose_ms = if rates.may_rot() { 0 } else { rates.lose_ms };
    if is_calm { FaultRates::default() } else { FaultRates { lose_ms, ..rates } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_one_config_and_subsets_differ() {
        let draw = |seed| Config::draw(Randomness::new(seed)).to_json();
        assert_eq!(draw(1), draw(1));
        let configs: Vec<Config> =
            (0..300).map(|seed| Config::draw(Randomness::new(seed))).collect();
        let share = |has: &dyn Fn(&Config) -> bool| configs.iter().filter(|of| has(of)).count();
        assert!((3..40).contains(&share(&|of| of.is_calm)));
        assert!((100..250).contains(&share(&|of| of.rates.kill_ms > 0)));
        assert!((20..150).contains(&share(&|of| of.profile.network.through_codec)));
        assert!((10..100).contains(&share(&|of| of.rates.disk_full_ms > 0)));
    }
}
