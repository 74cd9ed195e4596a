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
//! Verdicts may come in any order, and batches are judged in that of their versions. Yes, if every resolver
//! says yes, no earlier commit of the lane failed, and nothing conflicts that a resolver has left to the
//! proxy: see `settle`.

use bytes::BytesMut;
use common::message::{
    CommitOutcome, EpochPlan, Resolve, ResolveTransaction, Resolved, Settlement, Verdict,
};
use common::transaction::{id_key, stream_id_key, stream_name_key};
use common::{
    Code, Cx, Endpoint, Gather, Gathered, KeyRange, Mark, OwnWrites, Plant, Ranges, Refusal,
    Version,
};

use crate::Proxy;
use crate::batch::{Pair, Phase, Transaction};
use crate::door::lane_broken;

/// A batch at the resolvers.
#[derive(Clone, Debug)]
pub(crate) struct Resolution {
    answers: Gather<usize, Resolved>,
}

impl Resolution {
    pub(crate) fn has(&self, place: usize) -> bool {
        self.answers.answered().any(|(answered, _)| answered == place)
    }

    pub(crate) fn silent(&self) -> impl Iterator<Item = usize> + '_ {
        self.answers.silent()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.answers.is_enough()
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
        let answers = Gather::new(0..resolver_count, resolver_count);
        batch.resolution = Some(Resolution { answers });
        batch.enter(Phase::Resolving, cx.now);
        for resolver in 0..resolver_count {
            let settlements = self.settlements.unsent(resolver);
            self.ask_resolver(cx, place, resolver, settlements);
        }
        self.settlements.sent(cx.now);
    }

    /// Asks one resolver; asked again, in the same words but for the settlements.
    pub(crate) fn ask_resolver(
        &self,
        cx: &mut Cx<'_>,
        place: usize,
        resolver: usize,
        settlements: Vec<Settlement>,
    ) {
        let answered = self.answered_through(|batch| {
            batch.resolution.as_ref().is_some_and(|resolution| resolution.has(resolver))
        });
        let batch = &self.batches[place];
        let Pair { previous, version, .. } = batch.pair.expect("the batch has its version");
        assert!(answered < version, "{answered} is behind {version}");
        let share = Share::of(&self.plan, resolver);
        let mut arena = BytesMut::with_capacity(batch.transactions.len() * ARENA_BYTES_USUAL);
        let transactions = batch.transactions.iter();
        let message = Resolve {
            previous_version: previous,
            version,
            answered,
            settlements,
            transactions: transactions.map(|one| share.transaction(&mut arena, one)).collect(),
        };
        cx.send(self.plan.resolvers[resolver].resolver, self.plan.epoch, message);
    }

    pub(crate) fn handle_resolved(&mut self, from: Endpoint, resolved: Resolved) {
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
        match resolution.answers.answer(resolver, resolved) {
            Gathered::Enough | Gathered::Waiting | Gathered::Ignored => {}
            Gathered::More => unreachable!("all are needed"),
        }
    }

    /// Judges the batches that have all verdicts, strictly in the order of their versions.
    pub(crate) fn judge_ready(&mut self, cx: &mut Cx<'_>) {
        for place in 0..self.batches.len() {
            let batch = &self.batches[place];
            let is_complete = batch.resolution.as_ref().is_some_and(Resolution::is_complete);
            match (batch.phase, batch.pair) {
                (Phase::Pushing | Phase::Replying, _) => {}
                (Phase::Resolving, Some(pair)) if is_complete => {
                    self.judge(cx, place, pair.version)
                }
                _ => return,
            }
        }
    }

    /// The last word on each transaction of a batch, in their order: what commits can refuse those behind
    /// it, and whatever fails breaks its lane for all behind it, in this batch and in later ones.
    fn judge(&mut self, cx: &mut Cx<'_>, place: usize, version: Version) {
        assert!(self.judged < version, "{version} is judged after {}", self.judged);
        self.judged = version;
        let resolution =
            self.batches[place].resolution.take().expect("the batch has been resolved");
        let is_open = self.settlements.are_needed();
        if is_open {
            self.settlements.own.begin(version);
        }
        for index in 0..self.batches[place].transactions.len() {
            let transaction = &self.batches[place].transactions[index];
            // What was refused before it was resolved keeps its reason.
            let mut failed = transaction.failed.clone();
            if failed.is_none() {
                let own = &mut self.settlements.own;
                failed = combine(cx, &self.plan, &resolution, (transaction, index), own, version);
            }
            if failed.is_none() && self.is_lane_broken(transaction) {
                failed = Some(lane_broken());
            }
            if failed.is_none() && is_open {
                let writes = with_keys(&transaction.request.writes, &system_keys(transaction));
                self.settlements.own.commit(writes);
            }
            let (client, request) = (transaction.client, transaction.request.request);
            if let (Some(order), true) = (transaction.request.lane, failed.is_some()) {
                self.break_lane(cx, client, order, request);
            }
            self.batches[place].transactions[index].failed = failed;
        }
        let batch = &mut self.batches[place];
        let commits = batch.transactions.iter().map(|transaction| transaction.failed.is_none());
        let settled = resolution.answers.answered().map(|(_, resolved)| resolved.settled);
        self.settlements.take(version, commits, settled, cx.now);
        batch.resolution = Some(resolution);
        batch.enter(Phase::Pushing, cx.now);
    }
}

/// Yes iff all say yes. Too old counts before a conflict, as it does on a single resolver.
fn combine(
    cx: &mut Cx<'_>,
    plan: &EpochPlan,
    resolution: &Resolution,
    (transaction, index): (&Transaction, usize),
    own: &mut OwnWrites,
    version: Version,
) -> Option<CommitOutcome> {
    let heard = if cx.planted(Plant::FirstVerdict) { 1 } else { usize::MAX };
    let request = &transaction.request;
    let (mut is_conflict, mut is_left, mut ranges) = (false, false, Vec::new());
    for (resolver, resolved) in resolution.answers.answered().take(heard) {
        match &resolved.verdicts[index] {
            Verdict::Committed => {}
            Verdict::Yours => is_left = true,
            Verdict::TooOld => return Some(CommitOutcome::TooOld { version }),
            Verdict::Conflict { ranges: local } => {
                is_conflict = true;
                if !local.is_empty() {
                    let indexes = Share::of(plan, resolver).read_indexes(transaction);
                    ranges.extend(local.iter().filter_map(|read| indexes.get(*read as usize)));
                }
            }
        }
    }
    // A report names all, also what a resolver with a conflict of its own left out.
    let wants_own = is_left || (is_conflict && request.report_conflicts);
    if wants_own && !cx.planted(Plant::OwnIgnored) {
        let met = own_conflicts(transaction, own);
        if is_left {
            cx.mark(if met.is_empty() { Mark::OwnConflictVoid } else { Mark::OwnConflict });
        }
        is_conflict |= !met.is_empty();
        if request.report_conflicts {
            ranges.extend(met);
        }
    }
    if !is_conflict {
        return None;
    }
    let named = request.reads.len() + usize::from(request.id.is_some());
    ranges.retain(|range| (*range as usize) < named);
    // A range over several shares is named once.
    ranges.sort_unstable();
    ranges.dedup();
    Some(CommitOutcome::Conflict { version, ranges })
}

/// The reads that meet what this proxy knows to have committed, before its resolvers do.
fn own_conflicts(transaction: &Transaction, own: &mut OwnWrites) -> Vec<u32> {
    if own.is_empty() {
        return Vec::new();
    }
    let request = &transaction.request;
    let reads = with_keys(&request.reads, &system_keys(transaction));
    let met = (0..).zip(reads.iter()).filter(|(_, read)| own.meets(*read, request.read_version));
    met.map(|(index, _)| index).collect()
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

impl<'a> Share<'a> {
    fn of(plan: &'a EpochPlan, resolver: usize) -> Self {
        let shares = &plan.resolvers;
        let end = shares.get(resolver + 1).map(|share| &share.begin[..]);
        Self { begin: &shares[resolver].begin, end }
    }

    /// What the resolver sees of a transaction. One that has failed already has no ranges, only a place in
    /// the batch.
    fn transaction(self, arena: &mut BytesMut, transaction: &Transaction) -> ResolveTransaction {
        let request = &transaction.request;
        let (mut reads, mut writes) = (Ranges::default(), Ranges::default());
        let mut is_final = true;
        if transaction.failed.is_none() {
            let keys = system_keys(transaction);
            let (all_reads, all_writes);
            (reads, all_reads) = self.clip(arena, &request.reads, &keys);
            (writes, all_writes) = self.clip(arena, &request.writes, &keys);
            // Nobody else has a part of it, or all of it is here.
            is_final = self.is_alone()
                || (request.lane.is_none() && [all_reads, all_writes] == [Part::All; 2]);
        }
        let (read_version, report_conflicts) = (request.read_version, request.report_conflicts);
        ResolveTransaction { read_version, reads, writes, report_conflicts, is_final }
    }

    /// Whether there is no other share.
    const fn is_alone(self) -> bool {
        self.begin.is_empty() && self.end.is_none()
    }

    /// For each read that the resolver sees, its place among all reads.
    fn read_indexes(self, transaction: &Transaction) -> Vec<u32> {
        self.indexes(&with_keys(&transaction.request.reads, &system_keys(transaction)))
    }

    fn indexes(self, ranges: &Ranges) -> Vec<u32> {
        let inside = (0..)
            .zip(ranges.iter())
            .filter_map(|(index, range)| range.within(self.begin, self.end).map(|_| index));
        inside.collect()
    }

    /// The part of `ranges` and `keys` that lies inside.
    fn clip(self, arena: &mut BytesMut, ranges: &Ranges, keys: &[Vec<u8>]) -> (Ranges, Part) {
        if self.is_alone() {
            return (with_keys_in(arena, ranges, keys), Part::All);
        }
        let mut part = Part::All;
        let keys = keys.iter().map(|key| KeyRange::point(key));
        let pieces = ranges.iter().chain(keys).filter_map(|range| {
            let piece = range.within(self.begin, self.end);
            if piece != Some(range) {
                part = Part::Some;
            }
            piece
        });
        let pieces = Ranges::in_arena(arena, pieces);
        (pieces, part)
    }
}

/// What the keys of a transaction take, as a rule, bytes.
const ARENA_BYTES_USUAL: usize = 128;

/// How much of something lies in a share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
enum Part {
    All,
    /// Something of it may lie in another share.
    Some,
}

fn with_keys(ranges: &Ranges, keys: &[Vec<u8>]) -> Ranges {
    if keys.is_empty() {
        return ranges.clone();
    }
    with_keys_in(&mut BytesMut::new(), ranges, keys)
}

fn with_keys_in(arena: &mut BytesMut, ranges: &Ranges, keys: &[Vec<u8>]) -> Ranges {
    if keys.is_empty() {
        return ranges.clone();
    }
    Ranges::in_arena(arena, ranges.iter().chain(keys.iter().map(|key| KeyRange::point(key))))
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
        let (low_share, high_share) =
            (Share { begin: b"", end: Some(b"g") }, Share { begin: b"g", end: None });
        let (low_indexes, high_indexes) = (low_share.indexes(&ranges), high_share.indexes(&ranges));
        let clip = |share: Share<'_>, ranges: &Ranges, keys: &[Vec<u8>]| {
            share.clip(&mut BytesMut::new(), ranges, keys)
        };
        let (low, low_part) = clip(low_share, &ranges, &[]);
        let (high, high_part) = clip(high_share, &ranges, &[]);
        assert_eq!((low_part, high_part), (Part::Some, Part::Some));
        assert_eq!(low_indexes, [0, 1, 4]);
        assert_eq!(high_indexes, [1, 2, 3, 5]);
        let low: Vec<_> = low.iter().map(|range| range.end_key()).collect();
        assert_eq!(low, [&b"a\0"[..], b"g", b"g"]);
        let high: Vec<_> = high.iter().map(|range| range.begin).collect();
        assert_eq!(high, [&b"g"[..], b"g", b"h", b"z"]);
        let keys = [b"id".to_vec()];
        assert_eq!(clip(low_share, &Ranges::default(), &keys), (Ranges::default(), Part::Some));
        let point = Ranges::from_ranges([KeyRange::point(b"h")]);
        assert_eq!(clip(high_share, &point, &[]), (point.clone(), Part::All));
        let both = Ranges::from_ranges([KeyRange::point(b"h"), KeyRange::point(b"id")]);
        assert_eq!(clip(high_share, &point, &keys), (both, Part::All));
    }
}
