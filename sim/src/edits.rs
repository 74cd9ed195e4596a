//! What is left out of a run: how a failing one is made shorter, and kept as text.

use std::collections::BTreeSet;

use common::Knobs;
use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::disk::DiskProfile;
use crate::faults::Fault;
use crate::network::NetworkProfile;
use crate::register::RegisterProfile;
use crate::swarm::Config;

/// A way to make a run plainer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Plainer {
    /// Nothing is lost, doubled, reordered or damaged; connections break only by a listed fault.
    Network,
    /// Every message takes about as long.
    Latency,
    /// Barriers fail only by a listed fault, and every request takes about as long.
    Disk,
    /// The register always answers.
    Register,
    /// Clocks run alike.
    Clocks,
    /// Knobs as on every day.
    Knobs,
    /// Messages do not pass the codec.
    Codec,
}

impl Plainer {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Network,
        Self::Latency,
        Self::Disk,
        Self::Register,
        Self::Clocks,
        Self::Knobs,
        Self::Codec,
    ];

    fn apply(self, config: &mut Config) {
        let network = &mut config.profile.network;
        match self {
            Self::Network => {
                (network.loss_ppm, network.duplicate_ppm, network.reorder_ppm) = (0, 0, 0);
                (network.reset_ppm, network.bit_flip_ppm) = (0, 0);
            }
            Self::Latency => {
                let plain = NetworkProfile::default();
                (network.latency_ns, network.tail_factor) = (plain.latency_ns, 1);
                network.pair_extra_ns = 0;
            }
            Self::Disk => {
                config.profile.disk = DiskProfile { tail_factor: 1, ..DiskProfile::default() };
            }
            Self::Register => config.profile.register = RegisterProfile::default(),
            Self::Clocks => config.profile.drift_ppm_max = 0,
            Self::Knobs => {
                config.knobs = Knobs { pull_wait_ms_max: 500, ..Knobs::small() };
                config.knobs_changed.clear();
            }
            Self::Codec => network.through_codec = false,
        }
    }
}

/// What is left out of a seed's run.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Edits {
    /// Ways in which it is plainer.
    #[serde(default)]
    pub plainer: BTreeSet<Plainer>,
    /// Places of faults in the run's list that do not happen.
    #[serde(default)]
    pub faults: BTreeSet<usize>,
    /// Operations of clients that do not happen: the client, and its how manieth.
    #[serde(default)]
    pub operations: BTreeSet<(u64, u64)>,
}

impl Edits {
    /// Makes a configuration plainer.
    pub fn simplify(&self, config: &mut Config) {
        self.plainer.iter().for_each(|plainer| plainer.apply(config));
    }

    /// Leaves faults out.
    pub fn thin(&self, plan: &mut Vec<(Moment, Fault)>) {
        let mut place = 0;
        plan.retain(|_| {
            place += 1;
            !self.faults.contains(&(place - 1))
        });
    }
}
