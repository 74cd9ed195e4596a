//! Handing out versions: one unbroken chain of (previous, version) pairs for all proxies of an epoch.
//!
//! ```text
//!  proxy 0 --3--> |      | RV -> RTV      to proxy 0, number 1
//!  proxy 1 --1--> | last | RTV -> v1      to proxy 1, number 1
//!  proxy 0 --2--> |      | v1 -> v2       to proxy 0, number 2; its 3 waited for this
//! ```
//!
//! | in | out |
//! |---|---|
//! | `VersionRequest {number, answered}` | `VersionReply {number, previous_version, version, commit_time}` |
//!
//! # Invariants
//! - I1: each pair begins where the one before it ended; the first is (RV, RTV).
//! - I2: to look at the chain's end and to move it is one step.
//! - I15: a reply is kept until its proxy says that it has it; the same number gets the same pair.
//! - Requests of one proxy are served in the order of their numbers. Where a proxy's numbers have a gap, the
//!   later ones wait, at most [`REQUESTS_EARLY_MAX`] of them; the rest is dropped and comes again.
//!
//! A pair that was handed out and never pushed is a hole that nobody can fill: the epoch of a proxy that died
//! ends.

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use common::message::{EpochPlan, VersionReply, VersionRequest};
use common::{Cx, Endpoint, Epoch, Event, Mark, Message, Note, Plant, Role, Time, Version};

/// Requests of one proxy that wait for an earlier one, at most.
pub const REQUESTS_EARLY_MAX: usize = 1024;
/// Replies that are kept for one proxy, at most; more are not handed out until it has said what it has.
pub const REPLIES_KEPT_MAX: usize = 4096;

/// The version that follows `current` when `elapsed` has passed since it was handed out.
///
/// It advances with the clock, so that a number of versions means a time; by one at least, so that versions
/// are unique; and by `step_max` at most, so that the end of a pause does not push every reader out of the
/// window.
#[must_use]
pub fn figure_version(
    current: Version,
    elapsed: Duration,
    versions_per_second: u64,
    step_max: u64,
) -> Version {
    let due = elapsed.as_nanos().saturating_mul(u128::from(versions_per_second)) / 1_000_000_000;
    let step = u64::try_from(due).unwrap_or(u64::MAX).clamp(1, step_max.max(1));
    current.plus(step)
}

/// The longest step between two versions of an epoch: half of LIFE, in versions.
#[must_use]
pub const fn step_max(life_versions: u64) -> u64 {
    life_versions / 2
}

/// What the sequencer knows of one proxy.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Asker {
    /// The last number that was served.
    served: u64,
    /// Numbers that wait for an earlier one.
    early: BTreeSet<u64>,
    /// Replies that the proxy may ask for again (I15).
    replies: BTreeMap<u64, VersionReply>,
}

/// The machine that hands out versions.
#[derive(Clone, Debug)]
pub struct Sequencer {
    epoch: Epoch,
    recovery_version: Version,
    first_version: Version,
    /// The chain's end: RV before the first pair.
    last: Version,
    last_at: Time,
    askers: BTreeMap<Endpoint, Asker>,
}

/// How the sequencer stands, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SequencerStatus {
    /// The epoch.
    pub epoch: Epoch,
    /// The last version that was handed out; RV when none was.
    pub last_version: Version,
    /// When that was.
    pub last_at: Time,
    /// For each proxy: the last number served, numbers that wait, replies kept.
    pub proxies: Vec<(Endpoint, u64, usize, usize)>,
}

impl Sequencer {
    /// The sequencer of `plan`.
    #[must_use]
    pub fn new(plan: &EpochPlan) -> Self {
        plan.check();
        Self {
            epoch: plan.epoch,
            recovery_version: plan.recovery_version,
            first_version: plan.first_version,
            last: plan.recovery_version,
            last_at: Time::ZERO,
            askers: plan.proxies.iter().map(|proxy| (*proxy, Asker::default())).collect(),
        }
    }

    /// Nothing to arm: a sequencer only answers.
    pub fn start(&mut self, cx: &mut Cx<'_>) {
        assert_eq!(cx.me.role, Role::Sequencer, "{:?} begins another's role", cx.me);
        self.last_at = cx.now;
    }

    /// Takes one event. Everything but a version request of this epoch is ignored.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        if let Event::Message { from, epoch, message: Message::VersionRequest(request) } = event
            && epoch == self.epoch
        {
            self.handle_version_request(cx, from, request);
        }
    }

    fn handle_version_request(&mut self, cx: &mut Cx<'_>, from: Endpoint, request: VersionRequest) {
        let VersionRequest { number, answered } = request;
        // A proxy of another incarnation has no place in this chain.
        let Some(asker) = self.askers.get_mut(&from) else { return };
        assert!(answered < number, "{from:?} asks for {number} and has replies up to {answered}");
        assert!(
            answered <= asker.served,
            "{from:?} has replies up to {answered} of {} served",
            asker.served
        );
        asker.replies = asker.replies.split_off(&(answered + 1));

        if number <= asker.served {
            // A reply that is gone has been received, so that this is a late copy of the question.
            if cx.planted(Plant::FreshPairAgain) {
                let reply = self.assign(cx, number);
                return cx.send(from, self.epoch, reply);
            }
            if let Some(reply) = asker.replies.get(&number) {
                cx.mark(Mark::VersionRequestAgain);
                cx.send(from, self.epoch, *reply);
            }
            return;
        }
        if number > asker.served + 1 {
            cx.mark(Mark::VersionRequestEarly);
        }
        if number == asker.served + 1 || asker.early.len() < REQUESTS_EARLY_MAX {
            asker.early.insert(number);
        }
        self.serve(cx, from);
    }

    /// Serves what waits of one proxy, up to the first number that is missing.
    fn serve(&mut self, cx: &mut Cx<'_>, proxy: Endpoint) {
        loop {
            let asker = self.askers.get_mut(&proxy).expect("the caller has found it");
            let number = asker.served + 1;
            if asker.replies.len() >= REPLIES_KEPT_MAX || !asker.early.remove(&number) {
                return;
            }
            let reply = self.assign(cx, number);
            let asker = self.askers.get_mut(&proxy).expect("the caller has found it");
            asker.served = number;
            asker.replies.insert(number, reply);
            cx.note(Note::Assigned {
                epoch: self.epoch,
                previous: reply.previous_version,
                version: reply.version,
                proxy,
            });
            cx.send(proxy, self.epoch, reply);
        }
    }

    /// The next pair of the chain: check and advance in one step (I2).
    fn assign(&mut self, cx: &Cx<'_>, number: u64) -> VersionReply {
        let previous_version = self.last;
        let version = if previous_version == self.recovery_version {
            if cx.planted(Plant::FirstVersionLow) {
                previous_version.plus(1)
            } else {
                self.first_version
            }
        } else {
            let elapsed = cx.now.since(self.last_at);
            let step_max = step_max(cx.knobs.life_versions);
            figure_version(previous_version, elapsed, cx.knobs.versions_per_second, step_max)
        };
        assert!(version > previous_version, "I1: {previous_version} -> {version}");
        assert!(
            version >= self.first_version || cx.planted(Plant::FirstVersionLow),
            "I5: {version} < RTV {}",
            self.first_version
        );
        self.last = version;
        self.last_at = cx.now;
        let previous_version = if cx.planted(Plant::ChainSkips) && number.is_multiple_of(50) {
            self.recovery_version
        } else {
            previous_version
        };
        VersionReply { number, previous_version, version, commit_time: cx.wall }
    }

    /// RV < RTV <= last, or RV = last before the first pair; replies lie in the served part, and early
    /// numbers behind it.
    pub fn check(&self) {
        assert!(self.recovery_version < self.first_version);
        assert!(
            self.last == self.recovery_version || self.last >= self.first_version,
            "the chain's end {} lies between RV {} and RTV {}",
            self.last,
            self.recovery_version,
            self.first_version
        );
        for (proxy, asker) in &self.askers {
            let Asker { served, early, replies } = asker;
            assert!(
                early.first().is_none_or(|first| first > served)
                    && replies.last_key_value().is_none_or(|(last, _)| last <= served),
                "{proxy:?} is served up to {served}: waiting {early:?}, kept {replies:?}"
            );
            assert!(early.len() <= REQUESTS_EARLY_MAX + 1 && replies.len() <= REPLIES_KEPT_MAX);
            let ascending = replies.values().zip(replies.values().skip(1));
            for (one, next) in ascending {
                assert!(one.version <= next.previous_version, "I1: {one:?} before {next:?}");
            }
        }
    }

    /// How it stands.
    #[must_use]
    pub fn status(&self) -> SequencerStatus {
        let proxies = self.askers.iter();
        SequencerStatus {
            epoch: self.epoch,
            last_version: self.last,
            last_at: self.last_at,
            proxies: proxies
                .map(|(proxy, asker)| {
                    (*proxy, asker.served, asker.early.len(), asker.replies.len())
                })
                .collect(),
        }
    }
}
