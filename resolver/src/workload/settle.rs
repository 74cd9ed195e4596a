//! A workload over several resolvers that proxies tell, some batches later, what became of each batch.
//!
//! ```text
//! batch        ... n-4        n-3   n-2   n-1   n          of proxies 0 1 2 0 1 ...
//! a resolver   settled        | not settled yet            here: settled 3 batches later
//! ```
//!
//! The real [`Settling`] and [`OwnWrites`], without the roles around them. A batch that waits for an earlier
//! one is told of it at once.

use std::collections::VecDeque;

use common::message::{ResolveTransaction, Settlement, Verdict};
use common::{Endpoint, Incarnation, NodeId, OwnWrites, Peer, Role, Version};

use super::{Batch, Split, Transaction, Workload};
use crate::settle::{Ruling, Settling, Slips};

/// How the batches are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Telling {
    /// Proxies, whose batches take turns, at least 1.
    pub proxies: usize,
    /// A batch is settled so many batches later, at least 1.
    pub after: usize,
    /// How many batches of the workload.
    pub batches: usize,
    /// Entries that eviction looks at after each batch.
    pub eviction_entries: usize,
}

/// What came of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Told {
    /// Whether each transaction commits.
    pub yes: Vec<bool>,
    /// How often a resolver had to wait with a batch.
    pub held: usize,
    /// How many verdicts a resolver left to the proxy.
    pub left: usize,
    /// For each resolver what `clock` counted while it decided and settled.
    pub spent: Vec<u64>,
}

struct Proxy {
    endpoint: Endpoint,
    own: OwnWrites,
}

struct Resolver {
    settling: Settling,
    spent: u64,
}

/// Runs a workload through the resolvers of `split`. `clock` is read around all that they do.
#[must_use]
pub fn settled(
    workload: &Workload,
    split: &Split,
    telling: Telling,
    clock: impl Fn() -> u64,
) -> Told {
    let Telling { proxies, after, batches, .. } = telling;
    assert!(after > 0 && proxies > 0, "{proxies} proxies settle after {after} batches");
    let mut proxies: Vec<Proxy> = (0..proxies).map(Proxy::new).collect();
    let mut resolvers: Vec<Resolver> = (0..split.shares())
        .map(|_| Resolver { settling: Settling::new(Version::ZERO), spent: 0 })
        .collect();
    let (mut open, mut told) = (VecDeque::new(), Told::default());
    for (turn, batch) in workload.batches().take(batches).enumerate() {
        if open.len() == after {
            let (by, settlement): (Endpoint, Settlement) = open.pop_front().expect("it is full");
            for resolver in &mut resolvers {
                resolver.settle(by, &settlement, &clock);
            }
        }
        let count = proxies.len();
        let proxy = &mut proxies[turn % count];
        let parts = (0..).zip(&mut resolvers).map(|(share, resolver)| {
            let mut part = part(&batch, &split.share(&batch, share));
            loop {
                let ruling = resolver.decide(&batch, proxy.endpoint, &mut part, telling, &clock);
                match ruling {
                    Ruling::Decided(decided) => {
                        let settled = resolver.settling.settled(proxy.endpoint, batch.version);
                        break (decided.verdicts, settled);
                    }
                    Ruling::Held(wait) => {
                        told.held += 1;
                        let mut all = open.iter();
                        let found = all.find(|(_, one)| one.version == wait.version);
                        let (by, settlement) = found.expect("what is open is not told yet");
                        resolver.settle(*by, settlement, &clock);
                    }
                }
            }
        });
        let answers: Vec<_> = parts.collect();
        let yes = proxy.judge(&batch, &answers, &mut told.left);
        open.push_back((proxy.endpoint, Settlement::new(batch.version, yes.iter().copied())));
        told.yes.extend(yes);
    }
    told.spent = resolvers.iter().map(|resolver| resolver.spent).collect();
    told
}

/// A batch as one resolver is asked for it.
fn part(whole: &Batch, part: &Batch) -> Vec<ResolveTransaction> {
    let both = whole.transactions.iter().zip(&part.transactions);
    both.map(|(whole, part)| ResolveTransaction {
        read_version: part.read_version,
        reads: part.reads.clone(),
        writes: part.writes.clone(),
        report_conflicts: false,
        is_final: whole.reads == part.reads && whole.writes == part.writes,
    })
    .collect()
}

impl Resolver {
    fn settle(&mut self, by: Endpoint, settlement: &Settlement, clock: impl Fn() -> u64) {
        let begin = clock();
        let _ = self.settling.settle(by, settlement, Slips::default());
        self.spent += clock() - begin;
    }

    fn decide(
        &mut self,
        batch: &Batch,
        asker: Endpoint,
        part: &mut [ResolveTransaction],
        telling: Telling,
        clock: impl Fn() -> u64,
    ) -> Ruling {
        let begin = clock();
        self.settling.advance_oldest(batch.oldest);
        let (plenty, slips) = (u64::MAX, Slips::default());
        let ruling = self.settling.decide(batch.version, asker, part, plenty, slips);
        self.settling.evict(telling.eviction_entries);
        self.spent += clock() - begin;
        ruling
    }
}

impl Proxy {
    fn new(index: usize) -> Self {
        let index = u8::try_from(index).expect("a plan has few proxies");
        let peer = Peer { node: NodeId(u64::from(index)), incarnation: Incarnation(1) };
        Self { endpoint: peer.endpoint(Role::Proxy(index)), own: OwnWrites::default() }
    }

    /// Yes iff all say yes, and nothing conflicts that was left to the proxy.
    fn judge(
        &mut self,
        batch: &Batch,
        answers: &[(Vec<Verdict>, Version)],
        left: &mut usize,
    ) -> Vec<bool> {
        self.own.begin(batch.version);
        let mut all = Vec::new();
        for (index, transaction) in batch.transactions.iter().enumerate() {
            let mut verdicts = answers.iter().map(|(verdicts, _)| &verdicts[index]);
            let says = |of: fn(&Verdict) -> bool| verdicts.clone().any(of);
            let is_left = says(|one| *one == Verdict::Yours);
            *left += usize::from(is_left);
            let yes = verdicts.all(|one| matches!(one, Verdict::Committed | Verdict::Yours))
                && !(is_left && self.meets(transaction));
            if yes {
                self.own.commit(transaction.writes.clone());
            }
            all.push(yes);
        }
        let settled = answers.iter().map(|(_, settled)| *settled).min();
        self.own.forget(settled.expect("there are resolvers"));
        all
    }

    fn meets(&mut self, transaction: &Transaction) -> bool {
        let mut reads = transaction.reads.iter();
        reads.any(|read| self.own.meets(read, transaction.read_version))
    }
}
