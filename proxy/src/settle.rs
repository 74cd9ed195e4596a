//! Settling: the proxy tells the resolvers what became of its batches, and judges what they leave to it.
//!
//! ```text
//!  batch 7  judged --settlement, not sent--.
//!  batch 8  Versioning ....................'--> Resolve 8 {7: ...} to every resolver that has 7 open
//!  batch 9  none is near: Settle {8: ...}       goes alone, at once
//!           unconfirmed for long: Settle again  until Resolved.settled of a judged batch has reached it
//! ```
//!
//! The protocol, and why nobody waits for ever, is in the module `settle` of the resolver. Here is kept, for
//! each batch that a resolver may have open: the settlement, and the writes that committed. A resolver that
//! met one of these says `Yours`; the batch that it says it of is judged after them, by what is kept here.
//! Both are dropped when all resolvers' `settled` has reached them, as told with the last batch that was
//! judged; so nothing that an unjudged batch may need is gone.
//!
//! With one resolver nothing is open, and nothing is kept or sent.

use core::time::Duration;
use std::collections::VecDeque;

use common::message::{Settle, Settlement};
use common::{Cx, Mark, OwnWrites, Plant, Time, Version};

use crate::Proxy;
use crate::batch::Phase;

/// What became of a batch, and whether the resolvers may know.
#[derive(Clone, Debug)]
struct Unconfirmed {
    settlement: Settlement,
    /// When it was last sent; at first, when it was known.
    since: Time,
    is_sent: bool,
}

/// What the resolvers have to be told.
#[derive(Clone, Debug)]
pub(crate) struct Settlements {
    /// By resolver: through which version it has nothing of this proxy open. From the last judged batch.
    settled: Vec<Version>,
    /// Versions ascend.
    unconfirmed: VecDeque<Unconfirmed>,
    /// The writes of the same batches, and those of the batch that is being judged.
    pub(crate) own: OwnWrites,
}

impl Settlements {
    pub(crate) fn new(resolver_count: usize) -> Self {
        Self {
            settled: vec![Version::ZERO; resolver_count],
            unconfirmed: VecDeque::new(),
            own: OwnWrites::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.unconfirmed.len()
    }

    /// Whether several resolvers are there: with a single one nothing is ever open.
    pub(crate) const fn are_needed(&self) -> bool {
        self.settled.len() > 1
    }

    /// Takes a batch that was judged: whether each transaction commits, and through where each resolver had
    /// settled when it answered.
    pub(crate) fn take(
        &mut self,
        version: Version,
        commits: impl Iterator<Item = bool>,
        settled: impl Iterator<Item = Version>,
        now: Time,
    ) {
        for (resolver, (before, settled)) in self.settled.iter_mut().zip(settled).enumerate() {
            assert!(
                *before <= settled && settled <= version,
                "resolver {resolver} had settled {before}, with {version} {settled}"
            );
            *before = settled;
        }
        let through = self.settled.iter().copied().min().expect("an epoch has resolvers");
        if through < version {
            assert!(self.are_needed(), "{version} is open at a resolver that is alone");
            let settlement = Settlement::new(version, commits);
            self.unconfirmed.push_back(Unconfirmed { settlement, since: now, is_sent: false });
        }
        let is_settled = |one: &mut Unconfirmed| one.settlement.version <= through;
        while self.unconfirmed.pop_front_if(is_settled).is_some() {}
        self.own.forget(through);
    }

    /// What a resolver has to be told for the first time.
    pub(crate) fn unsent(&self, resolver: usize) -> Vec<Settlement> {
        self.chosen(resolver, |one| !one.is_sent)
    }

    fn chosen(&self, resolver: usize, of: impl Fn(&Unconfirmed) -> bool) -> Vec<Settlement> {
        let settled = self.settled[resolver];
        let open = self.unconfirmed.iter().filter(|one| one.settlement.version > settled);
        open.filter(|one| of(one)).map(|one| one.settlement.clone()).collect()
    }

    /// Everything has been sent.
    pub(crate) fn sent(&mut self, now: Time) {
        // What is not sent yet is the newest.
        for one in self.unconfirmed.iter_mut().rev().take_while(|one| !one.is_sent) {
            (one.is_sent, one.since) = (true, now);
        }
    }

    /// Versions ascend, none is confirmed; what was written is kept for as long.
    pub(crate) fn check(&self, judged: Version) {
        let through = self.settled.iter().copied().min().unwrap_or_default();
        let mut below = through;
        for one in &self.unconfirmed {
            let version = one.settlement.version;
            assert!(below < version && version <= judged, "{below}, {version}, judged {judged}");
            below = version;
        }
        assert_eq!(self.own.len(), self.unconfirmed.len(), "writes of what is unconfirmed");
    }
}

impl Proxy {
    /// Sends what the resolvers don't know yet, unless a batch that is about to get its version takes it
    /// along.
    pub(crate) fn settle_alone(&mut self, cx: &mut Cx<'_>) {
        let is_unsent = self.settlements.unconfirmed.back().is_some_and(|one| !one.is_sent);
        let is_near = self.batches.back().is_some_and(|batch| batch.phase == Phase::Versioning);
        if is_unsent && !is_near {
            cx.mark(Mark::SettleAlone);
            self.send_settlements(cx, |one| !one.is_sent);
            self.settlements.sent(cx.now);
        }
    }

    /// Sends again what has gone unconfirmed for long, and what waits for a batch that does not come.
    pub(crate) fn settle_again(&mut self, cx: &mut Cx<'_>) {
        let patience = Duration::from_millis(cx.knobs.retransmit_ms);
        let now = cx.now;
        let is_late = |one: &Unconfirmed| now.since(one.since) >= patience;
        if !self.settlements.unconfirmed.iter().any(is_late) || cx.planted(Plant::NeverSettleAgain)
        {
            return;
        }
        cx.mark(Mark::SettleAgain);
        self.send_settlements(cx, is_late);
        for one in self.settlements.unconfirmed.iter_mut().filter(|one| is_late(one)) {
            (one.is_sent, one.since) = (true, now);
        }
    }

    fn send_settlements(&self, cx: &mut Cx<'_>, of: impl Fn(&Unconfirmed) -> bool) {
        for (resolver, share) in self.plan.resolvers.iter().enumerate() {
            let settlements = self.settlements.chosen(resolver, &of);
            if !settlements.is_empty() {
                cx.send(share.resolver, self.plan.epoch, Settle { settlements });
            }
        }
    }
}
