//! Resolving: every resolver gets every version, with its share of the ranges, and all must say yes.
//!
//! ```text
//!  key space   [ "" ........ g )[ g ............. )          shares of two resolvers
//!  reads       (c) [e ......... k)   id
//!  share 0     (c) [e .. g)                                  indexes 0 1   -> client's 0 1
//!  share 1              [g .. k) (id)                        indexes 0 1   -> client's 1 2
//! ```
//!
//! To the client's ranges the proxy adds the key of the idempotency id, then those of the streams that the
//! transaction creates, as reads and as writes; so a transaction with one of these needs a read version even
//! if it reads nothing. In a report, the index behind the client's last range stands for the id; the keys of
//! streams are left out.
//!
//! A resolver that found no conflict remembers the writes even when another one refused, or when the
//! transaction falls with its lane: a false conflict at worst.

use common::message::{CommitOutcome, Resolve, ResolveTransaction, Resolved, Verdict};
use common::transaction::{id_key, stream_id_key, stream_name_key};
use common::{
    Code, Cx, Endpoint, Gather, Gathered, KeyRange, Mark, Plant, Ranges, Refusal, Version,
};

use crate::Proxy;
use crate::batch::{Pair, Phase, Transaction};

/// A batch at the resolvers.
#[derive(Clone, Debug)]
pub(crate) struct Resolution {
    verdicts: Gather<usize, Vec<Verdict>>,
}

impl Resolution {
    pub(crate) fn has(&self, place: usize) -> bool {
        self.verdicts.answered().any(|(answered, _)| answered == place)
    }

    pub(crate) fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        self.verdicts.silent()
    }
}

impl Proxy {
    /// Sends the batches that have their versions to the resolvers, in the order of their numbers.
    pub(crate) fn resolve_ready(&mut self, cx: &mut Cx<'_>) {
        for place in 0..self.batches.len() {
            match (self.batches[place].phase, self.batches[place].pair) {
                (Phase::Versioning, Some(pair)) => self.resolve(cx, place, pair),
                (Phase::Versioning, None) => return,
                _ => {}
            }
        }
    }

    fn resolve(&mut self, cx: &mut Cx<'_>, place: usize, pair: Pair) {
        let resolver_count = self.plan.resolvers.len();
        let batch = &mut self.batches[place];
        for transaction in &mut batch.transactions {
            refuse_future(cx, transaction, pair.version);
        }
        let verdicts = Gather::new(0..resolver_count, resolver_count);
        batch.resolution = Some(Resolution { verdicts });
        batch.enter(Phase::Resolving, cx.now);
        for resolver in 0..resolver_count {
            self.ask_resolver(cx, place, resolver);
        }
    }

    /// Asks one resolver; asked again, in the same words.
    pub(crate) fn ask_resolver(&self, cx: &mut Cx<'_>, place: usize, resolver: usize) {
        let answered = self.answered_through(|batch| {
            batch.resolution.as_ref().is_some_and(|resolution| resolution.has(resolver))
        });
        let batch = &self.batches[place];
        let Pair { previous, version, .. } = batch.pair.expect("the batch has its version");
        assert!(answered < version, "{answered} is behind {version}");
        let share = self.share(resolver);
        let message = Resolve {
            previous_version: previous,
            version,
            answered,
            transactions: batch.transactions.iter().map(|one| share.transaction(one)).collect(),
        };
        cx.send(self.plan.resolvers[resolver].resolver, self.plan.epoch, message);
    }

    fn share(&self, resolver: usize) -> Share<'_> {
        let shares = &self.plan.resolvers;
        let end = shares.get(resolver + 1).map(|share| &share.begin[..]);
        Share { begin: &shares[resolver].begin, end }
    }

    pub(crate) fn handle_resolved(&mut self, cx: &mut Cx<'_>, from: Endpoint, resolved: Resolved) {
        let resolver = self.plan.resolvers.iter().position(|share| share.resolver == from);
        let (Some(resolver), Some(place)) = (resolver, self.batch_place(resolved.version)) else {
            return;
        };
        let batch = &mut self.batches[place];
        assert_eq!(
            resolved.verdicts.len(),
            batch.transactions.len(),
            "{from:?} decides each transaction of {}",
            resolved.version
        );
        let Some(resolution) = &mut batch.resolution else { return };
        match resolution.verdicts.answer(resolver, resolved.verdicts) {
            Gathered::Enough => self.judge(cx, place, resolved.version),
            Gathered::Waiting | Gathered::Ignored => {}
            Gathered::More => unreachable!("all are needed"),
        }
    }

    fn judge(&mut self, cx: &Cx<'_>, place: usize, version: Version) {
        let count = self.batches[place].transactions.len();
        let heard = if cx.planted(Plant::FirstVerdict) { 1 } else { usize::MAX };
        let failed: Vec<_> =
            (0..count).map(|index| self.combine(place, index, version, heard)).collect();
        let batch = &mut self.batches[place];
        for (transaction, failed) in batch.transactions.iter_mut().zip(failed) {
            // What was refused before it was resolved keeps its reason.
            transaction.failed = transaction.failed.take().or(failed);
        }
        batch.enter(Phase::Pushing, cx.now);
    }

    /// Yes iff all say yes. Too old counts before a conflict, as it does on a single resolver.
    fn combine(
        &self,
        place: usize,
        index: usize,
        version: Version,
        heard: usize,
    ) -> Option<CommitOutcome> {
        let batch = &self.batches[place];
        let transaction = &batch.transactions[index];
        let resolution = batch.resolution.as_ref().expect("the batch has been resolved");
        let (mut is_conflict, mut ranges) = (false, Vec::new());
        for (resolver, verdicts) in resolution.verdicts.answered().take(heard) {
            match &verdicts[index] {
                Verdict::Committed => {}
                Verdict::TooOld => return Some(CommitOutcome::TooOld { version }),
                Verdict::Conflict { ranges: local } => {
                    is_conflict = true;
                    if !local.is_empty() {
                        let indexes = self.share(resolver).read_indexes(transaction);
                        ranges.extend(local.iter().filter_map(|read| indexes.get(*read as usize)));
                    }
                }
            }
        }
        if !is_conflict {
            return None;
        }
        let request = &transaction.request;
        let named = request.reads.len() + usize::from(request.id.is_some());
        ranges.retain(|range| (*range as usize) < named);
        // A range over several shares is named once.
        ranges.sort_unstable();
        ranges.dedup();
        Some(CommitOutcome::Conflict { version, ranges })
    }
}

/// A read version that the batch's own version is not above has never been handed out.
fn refuse_future(cx: &mut Cx<'_>, transaction: &mut Transaction, version: Version) {
    let request = &transaction.request;
    let has_reads =
        !request.reads.is_empty() || request.id.is_some() || !transaction.definitions.is_empty();
    if has_reads && request.read_version >= version {
        cx.mark(Mark::FutureVersion);
        let detail = format!("read version {} at version {version}", request.read_version);
        let refusal = Refusal::new(Code::FutureVersion, detail);
        transaction.failed = Some(CommitOutcome::Refused(refusal));
    }
}

/// A resolver's part of the key space.
#[derive(Clone, Copy)]
struct Share<'a> {
    begin: &'a [u8],
    /// Exclusive; the last one has no end.
    end: Option<&'a [u8]>,
}

impl Share<'_> {
    /// What the resolver sees of a transaction. One that has failed already has no ranges, only a place in
    /// the batch.
    fn transaction(self, transaction: &Transaction) -> ResolveTransaction {
        let request = &transaction.request;
        let (mut reads, mut writes) = (Ranges::default(), Ranges::default());
        if transaction.failed.is_none() {
            let keys = system_keys(transaction);
            reads = self.clip(&with_keys(&request.reads, &keys)).0;
            writes = self.clip(&with_keys(&request.writes, &keys)).0;
        }
        let (read_version, report_conflicts) = (request.read_version, request.report_conflicts);
        ResolveTransaction { read_version, reads, writes, report_conflicts }
    }

    /// For each read that the resolver sees, its place among all reads.
    fn read_indexes(self, transaction: &Transaction) -> Vec<u32> {
        self.clip(&with_keys(&transaction.request.reads, &system_keys(transaction))).1
    }

    /// The part of `ranges` that lies inside, and the index of each piece's range.
    fn clip(self, ranges: &Ranges) -> (Ranges, Vec<u32>) {
        let all = 0..u32::try_from(ranges.len()).expect("a transaction has fewer than 2^32 ranges");
        if self.begin.is_empty() && self.end.is_none() {
            return (ranges.clone(), all.collect());
        }
        let (mut pieces, mut indexes) = (Vec::new(), Vec::new());
        for (range, index) in ranges.iter().zip(all) {
            if let Some(piece) = range.within(self.begin, self.end) {
                pieces.push(piece);
                indexes.push(index);
            }
        }
        (Ranges::from_ranges(pieces), indexes)
    }
}

fn with_keys(ranges: &Ranges, keys: &[Vec<u8>]) -> Ranges {
    if keys.is_empty() {
        return ranges.clone();
    }
    ranges.iter().chain(keys.iter().map(|key| KeyRange::point(key))).collect()
}

/// The keys that the system adds as reads and writes: the id first, then the streams that are created.
fn system_keys(transaction: &Transaction) -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = transaction.request.id.map(id_key).into_iter().collect();
    for definition in &transaction.definitions {
        keys.push(stream_name_key(&definition.name));
        keys.push(stream_id_key(definition.stream));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_range_once_and_keep_its_index() {
        let ranges = Ranges::from_ranges([
            KeyRange::point(b"a"),
            KeyRange::new(b"b", b"p").unwrap(),
            KeyRange::point(b"g"),
            KeyRange::new(b"h", b"h").unwrap(),
            KeyRange::new(b"c", b"g").unwrap(),
            KeyRange::point(b"z"),
        ]);
        let (low, low_indexes) = Share { begin: b"", end: Some(b"g") }.clip(&ranges);
        let (high, high_indexes) = Share { begin: b"g", end: None }.clip(&ranges);
        assert_eq!(low_indexes, [0, 1, 4]);
        assert_eq!(high_indexes, [1, 2, 3, 5]);
        let low: Vec<_> = low.iter().map(|range| range.end_key()).collect();
        assert_eq!(low, [&b"a\0"[..], b"g", b"g"]);
        let high: Vec<_> = high.iter().map(|range| range.begin).collect();
        assert_eq!(high, [&b"g"[..], b"g", b"h", b"z"]);
    }
}
