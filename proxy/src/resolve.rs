//! Resolving: every resolver gets every version, with its share of the ranges, and all must say yes.
//!
//! ```text
//!  key space   [ "" ........ g )[ g ............. )          shares of two resolvers
//!  reads       (c) [e ......... k)   id
//!  share 0     (c) [e .. g)                                  indexes 0 1   -> client's 0 1
//!  share 1              [g .. k) (id)                        indexes 0 1   -> client's 1 2
//! ```
//!
//! To the client's ranges the proxy adds the key of the idempotency id, then those of the streams that the transaction
//! creates, as reads and as writes. In a report, the index behind the client's last range stands for the id; the keys of
//! streams are left out.
//!
//! A resolver that found no conflict remembers the writes even when another one refused, or when the transaction falls
//! with its lane: a false conflict at worst.

use common::message::{CommitOutcome, Resolve, ResolveTransaction, Resolved, Verdict};
use common::transaction::{id_key, stream_id_key, stream_name_key};
use common::{
    Code, Cx, Endpoint, Gather, Gathered, KeyRange, Mark, RangeEnd, Ranges, Refusal, Version,
};

use crate::Proxy;
use crate::batch::{Pair, Phase, Transaction};

/// A batch at the resolvers.
#[derive(Clone, Debug)]
pub(crate) struct Resolution {
    /// What each resolver was asked, and how its read indexes translate; dropped once all have answered.
    asked: Vec<Asked>,
    verdicts: Gather<usize, Vec<Verdict>>,
}

#[derive(Clone, Debug)]
struct Asked {
    message: Resolve,
    /// For each transaction: the index of each read among all its reads.
    read_indexes: Vec<Vec<u32>>,
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
        let mut asked: Vec<Asked> = (0..resolver_count)
            .map(|_| Asked {
                message: Resolve {
                    previous_version: pair.previous,
                    version: pair.version,
                    answered: Version::ZERO,
                    transactions: Vec::with_capacity(batch.transactions.len()),
                },
                read_indexes: Vec::new(),
            })
            .collect();
        let begins: Vec<&[u8]> = self.plan.resolvers.iter().map(|share| &share.begin[..]).collect();
        for transaction in &mut batch.transactions {
            refuse_future(cx, transaction, pair.version);
            for (asked, share) in asked.iter_mut().zip(shares(transaction, &begins)) {
                asked.message.transactions.push(share.transaction);
                asked.read_indexes.push(share.read_indexes);
            }
        }
        batch.resolution =
            Some(Resolution { asked, verdicts: Gather::new(0..resolver_count, resolver_count) });
        batch.enter(Phase::Resolving, cx.now);
        for resolver in 0..resolver_count {
            self.ask_resolver(cx, place, resolver);
        }
    }

    pub(crate) fn ask_resolver(&self, cx: &mut Cx<'_>, place: usize, resolver: usize) {
        let answered = self.answered_through(|batch| {
            batch.resolution.as_ref().is_some_and(|resolution| resolution.has(resolver))
        });
        let resolution = self.batches[place].resolution.as_ref().expect("the batch is resolving");
        let mut message = resolution.asked[resolver].message.clone();
        assert!(answered < message.version, "{answered} is behind {}", message.version);
        message.answered = answered;
        cx.send(self.plan.resolvers[resolver].resolver, self.plan.epoch, message);
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
            Gathered::Enough => {
                let resolution = batch.resolution.as_mut().expect("it has just been answered");
                for (index, transaction) in batch.transactions.iter_mut().enumerate() {
                    let failed = combine(resolution, index, transaction, resolved.version);
                    // What was refused before it was resolved keeps its reason.
                    transaction.failed = transaction.failed.take().or(failed);
                }
                resolution.asked = Vec::new();
                batch.enter(Phase::Pushing, cx.now);
            }
            Gathered::Waiting | Gathered::Ignored => {}
            Gathered::More => unreachable!("all are needed"),
        }
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

/// Yes iff all say yes. Too old counts before a conflict, as it does on a single resolver.
fn combine(
    resolution: &Resolution,
    index: usize,
    transaction: &Transaction,
    version: Version,
) -> Option<CommitOutcome> {
    let (mut is_conflict, mut ranges) = (false, Vec::new());
    for (resolver, verdicts) in resolution.verdicts.answered() {
        match &verdicts[index] {
            Verdict::Committed => {}
            Verdict::TooOld => return Some(CommitOutcome::TooOld { version }),
            Verdict::Conflict { ranges: local } => {
                is_conflict = true;
                let indexes = &resolution.asked[resolver].read_indexes[index];
                ranges.extend(local.iter().filter_map(|read| indexes.get(*read as usize)));
            }
        }
    }
    if !is_conflict {
        return None;
    }
    let named = transaction.request.reads.len() + usize::from(transaction.request.id.is_some());
    ranges.retain(|range| (*range as usize) < named);
    // A range over several shares is named once.
    ranges.sort_unstable();
    ranges.dedup();
    Some(CommitOutcome::Conflict { version, ranges })
}

/// What one resolver sees of a transaction.
struct Share {
    transaction: ResolveTransaction,
    read_indexes: Vec<u32>,
}

/// Cuts a transaction along the shares of the resolvers. One that has failed already has no ranges, only a
/// place in the batch.
fn shares(transaction: &Transaction, begins: &[&[u8]]) -> Vec<Share> {
    let request = &transaction.request;
    let keys = if transaction.failed.is_none() { system_keys(transaction) } else { Vec::new() };
    let all = |ranges: &Ranges| -> Ranges {
        match (&transaction.failed, keys.is_empty()) {
            (Some(_), _) => Ranges::default(),
            (None, true) => ranges.clone(),
            (None, false) => {
                ranges.iter().chain(keys.iter().map(|key| KeyRange::point(key))).collect()
            }
        }
    };
    let (reads, writes) = (all(&request.reads), all(&request.writes));
    let share = |reads, writes, read_indexes| Share {
        transaction: ResolveTransaction {
            read_version: request.read_version,
            reads,
            writes,
            report_conflicts: request.report_conflicts,
        },
        read_indexes,
    };
    if begins.len() == 1 {
        let read_indexes = if request.report_conflicts { indexes(reads.len()) } else { Vec::new() };
        return vec![share(reads, writes, read_indexes)];
    }
    (0..begins.len())
        .map(|place| {
            let (begin, end) = (begins[place], begins.get(place + 1).copied());
            let (reads, read_indexes) = clip(&reads, begin, end);
            share(reads, clip(&writes, begin, end).0, read_indexes)
        })
        .collect()
}

fn indexes(count: usize) -> Vec<u32> {
    (0..u32::try_from(count).expect("a transaction has fewer than 2^32 ranges")).collect()
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

/// The part of `ranges` in `[begin, end)` and the index of each piece's range. An empty range holds no key but
/// is a read all the same: it goes where it begins.
fn clip(ranges: &Ranges, begin: &[u8], end: Option<&[u8]>) -> (Ranges, Vec<u32>) {
    let is_inside = |key: &[u8]| begin <= key && end.is_none_or(|end| key < end);
    let (mut pieces, mut indexes) = (Vec::new(), Vec::new());
    for (range, index) in ranges.iter().zip(0_u32..) {
        let piece = match range.end {
            RangeEnd::Before(last) if !range.is_empty() => {
                let first = range.begin.max(begin);
                let last = end.map_or(last, |end| last.min(end));
                (first < last).then(|| KeyRange::new(first, last).expect("just compared"))
            }
            RangeEnd::Point | RangeEnd::Before(_) => is_inside(range.begin).then_some(range),
        };
        if let Some(piece) = piece {
            pieces.push(piece);
            indexes.push(index);
        }
    }
    (Ranges::from_ranges(pieces), indexes)
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
        let (low, low_indexes) = clip(&ranges, b"", Some(b"g"));
        let (high, high_indexes) = clip(&ranges, b"g", None);
        assert_eq!(low_indexes, [0, 1, 4]);
        assert_eq!(high_indexes, [1, 2, 3, 5]);
        let low: Vec<_> = low.iter().map(|range| range.end_key()).collect();
        assert_eq!(low, [&b"a\0"[..], b"g", b"g"]);
        let high: Vec<_> = high.iter().map(|range| range.begin).collect();
        assert_eq!(high, [&b"g"[..], b"g", b"h", b"z"]);
    }
}
