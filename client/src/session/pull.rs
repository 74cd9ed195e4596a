//! Pullers: whole versions of some streams, in order, from several log servers.
//!
//! ```text
//!  group A {s16, s17} from n1   [v5][v9]........through 12     asked: after 12
//!  group B {s20}      from n3   [v9][v11]..through 11          asked: after 11
//!                                      merged ---^ v5, v9 (both blocks), v11 -> Pulled {.., through 11}
//! ```
//!
//! 1. Everything at or below `position` has been delivered, once; nothing above it has.
//! 2. A version is delivered when every group is known through it, with all its blocks.
//! 3. An offset that is not the one expected is a gap or a duplicate: the puller ends as corrupt (I12).
//! 4. When a source goes away or refuses, all groups are formed anew from `position`; what was fetched above
//!    it is fetched again. So sources never have to agree on anything but the log.
//!
//! Fetching runs one answer ahead of the consumer and then stops until the next call. A log server keeps a
//! question until one of its streams has news, or until it is known through the version that the consumer
//! wants to read at.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::message::{Message, Pulled as PulledMessage};
use common::{Backoff, Class, Code, Cx, Endpoint, NodeId, Offset, Refusal, StreamId, Version};

use super::question::{Ask, Reply, unexpected};
use super::{Answer, CallId, Item, Key, Owner, PULLERS_MAX, Pulled, Session};
use crate::{Batch, Block, Error};

/// Answers that are damaged are asked for at another replica, in a row at most.
const DAMAGED_ANSWERS_MAX: u32 = 3;

/// A puller of one session; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PullerId(u64);

/// What to pull from where.
#[derive(Clone, Debug, Default)]
pub struct PullFrom {
    streams: Vec<StreamId>,
    after: Version,
    expected: BTreeMap<StreamId, Offset>,
}

impl PullFrom {
    /// All versions above `after` (exclusive) of these streams.
    #[must_use]
    pub fn after(mut streams: Vec<StreamId>, after: Version) -> Self {
        streams.sort_unstable();
        streams.dedup();
        Self { streams, after, expected: BTreeMap::new() }
    }

    /// The offset of the stream's next record, as the consumer has kept it: another one is a gap.
    #[must_use]
    pub fn expect(mut self, stream: StreamId, offset: Offset) -> Self {
        self.expected.insert(stream, offset);
        self
    }
}

/// Who waits for the next versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waiter {
    Call(CallId),
    Catalog,
}

/// Streams that come from one log server.
#[derive(Clone, Debug)]
struct Group {
    source: Endpoint,
    streams: Vec<StreamId>,
    /// Known through here.
    through: Version,
    fetched: VecDeque<Batch>,
    fetched_bytes: u64,
    question: Option<Key>,
    /// What the question wants to know of; see [`Puller::want`].
    asked_want: Version,
}

/// One consumer's place in the log.
#[derive(Clone, Debug)]
pub(super) struct Puller {
    streams: Vec<StreamId>,
    position: Version,
    /// A progress mark through here will do: the consumer reads at this version.
    want: Version,
    /// The next offset of each stream, once one is known.
    expected: BTreeMap<StreamId, Offset>,
    /// Whether streams without an expected offset begin with 0.
    is_from_start: bool,
    /// Formed anew whenever that is in doubt; empty until somebody can be asked.
    groups: Vec<Group>,
    /// Counts the formations: an answer for an earlier one passes by.
    rotation: u32,
    waiter: Option<Waiter>,
    backoff: Backoff,
    damaged: u32,
    /// Log servers whose copy is damaged somewhere behind the position.
    avoided: BTreeSet<Endpoint>,
    failed: Option<Error>,
}

impl Puller {
    pub(super) fn check(&self) {
        for group in &self.groups {
            let first = group.fetched.front().map_or(group.through, |batch| batch.version);
            let last = group.fetched.back().map_or(first, |batch| batch.version);
            assert!(
                self.position <= first && first <= last && last <= group.through,
                "{} <= {first} <= {last} <= {}",
                self.position,
                group.through
            );
        }
        let streams: usize = self.groups.iter().map(|group| group.streams.len()).sum();
        assert!(streams <= self.streams.len(), "{streams} streams in groups");
    }
}

impl Session {
    /// Opens a puller. It fetches nothing before the first [`Session::pull`].
    ///
    /// # Errors
    /// [`Code::LimitExceeded`] for too many pullers or streams, [`Code::UnknownStream`] for no stream.
    pub fn open_puller(&mut self, cx: &mut Cx<'_>, from: PullFrom) -> Result<PullerId, Error> {
        if self.pullers.len() >= PULLERS_MAX {
            return Err(Error::new(Code::LimitExceeded, format!("{PULLERS_MAX} pullers are open")));
        }
        let (count, max) = (from.streams.len(), cx.knobs.pull_streams_max);
        if count as u64 > max {
            return Err(Error::new(Code::LimitExceeded, format!("{count} streams; {max} at once")));
        }
        if count == 0 {
            return Err(Error::new(Code::UnknownStream, "a pull of no stream"));
        }
        Ok(self.insert_puller(cx, from))
    }

    pub(super) fn insert_puller(&mut self, cx: &mut Cx<'_>, from: PullFrom) -> PullerId {
        let puller = PullerId(self.key().0);
        let PullFrom { streams, after, expected } = from;
        self.pullers.insert(
            puller,
            Puller {
                streams,
                position: after,
                want: Version::ZERO,
                expected,
                is_from_start: after == Version::ZERO,
                groups: Vec::new(),
                // Clients spread over the replicas.
                rotation: cx.rng.below(1 << 16) as u32,
                waiter: None,
                backoff: Backoff::default(),
                damaged: 0,
                avoided: BTreeSet::new(),
                failed: None,
            },
        );
        puller
    }

    /// Asks for the next versions; waits for news of the streams, for the log to be known through `want`, or
    /// for a progress mark now and then. One call a puller at a time.
    pub fn pull(&mut self, cx: &mut Cx<'_>, call: CallId, puller: PullerId, want: Version) {
        match self.pullers.get(&puller) {
            None => self.complete(call, Err(Error::new(Code::Internal, "the puller is closed"))),
            Some(found) if found.waiter.is_some() => {
                let error = Error::new(Code::LimitExceeded, "a pull of the same puller waits");
                self.complete(call, Err(error));
            }
            Some(_) => {
                self.want_pull(puller, Waiter::Call(call), want);
                self.pump(cx);
            }
        }
    }

    /// The puller's place: everything at or below has been delivered.
    #[must_use]
    pub fn pull_position(&self, puller: PullerId) -> Option<Version> {
        self.pullers.get(&puller).map(|puller| puller.position)
    }

    /// Ends a puller; a call that waits ends as timed out.
    pub fn close_puller(&mut self, cx: &mut Cx<'_>, puller: PullerId) {
        self.scatter(cx, puller);
        let Some(found) = self.pullers.remove(&puller) else { return };
        self.alarms.clear(Item::Puller(puller));
        self.ready.remove(&Item::Puller(puller));
        if let Some(Waiter::Call(call)) = found.waiter {
            self.complete(call, Err(Error::new(Code::TimedOut, "the puller was closed")));
        }
    }

    pub(super) fn want_pull(&mut self, puller: PullerId, waiter: Waiter, want: Version) {
        let found = self.pullers.get_mut(&puller).expect("the caller has looked it up");
        found.waiter = Some(waiter);
        found.want = found.want.max(want);
        self.ready.insert(Item::Puller(puller));
    }

    /// Delivers what can be, then fetches what is missing; `false` when nobody can be asked now.
    pub(super) fn place_puller(&mut self, cx: &mut Cx<'_>, puller: PullerId) -> bool {
        let Some(found) = self.pullers.get_mut(&puller) else { return true };
        if found.failed.is_some() {
            self.deliver_pulled(cx, puller);
            return true;
        }
        if found.groups.is_empty() && (found.waiter.is_none() || !self.gather_groups(puller)) {
            return self.pullers[&puller].waiter.is_none();
        }
        self.deliver_pulled(cx, puller);
        self.fetch(cx, puller);
        true
    }

    /// Spreads the streams over as few connected log servers as will do.
    fn gather_groups(&mut self, puller: PullerId) -> bool {
        let found = self.pullers.get_mut(&puller).expect("the caller has looked it up");
        let sound = |stream: &StreamId| {
            let all = self.cluster.holders(*stream);
            let sound: Vec<Endpoint> =
                all.iter().copied().filter(|holder| !found.avoided.contains(holder)).collect();
            (*stream, if sound.is_empty() { all } else { sound })
        };
        let mut left: Vec<(StreamId, Vec<Endpoint>)> = found.streams.iter().map(sound).collect();
        if left.iter().any(|(_, holders)| holders.is_empty()) {
            return false;
        }
        let mut groups = Vec::new();
        while !left.is_empty() {
            let mut covers: BTreeMap<Endpoint, usize> = BTreeMap::new();
            for holder in left.iter().flat_map(|(_, holders)| holders) {
                *covers.entry(*holder).or_default() += 1;
            }
            let most = covers.values().max().copied().expect("every stream has a holder");
            let best: Vec<Endpoint> =
                covers.iter().filter(|(_, count)| **count == most).map(|(at, _)| *at).collect();
            let source = best[found.rotation as usize % best.len()];
            let (here, rest): (Vec<_>, Vec<_>) =
                left.into_iter().partition(|(_, holders)| holders.contains(&source));
            assert!(!here.is_empty(), "{source:?} covers {most} streams");
            left = rest;
            groups.push(Group {
                source,
                streams: here.into_iter().map(|(stream, _)| stream).collect(),
                through: found.position,
                fetched: VecDeque::new(),
                fetched_bytes: 0,
                question: None,
                asked_want: Version::ZERO,
            });
        }
        found.groups = groups;
        true
    }

    /// Lets go of all sources; what was fetched and not delivered is fetched again.
    fn scatter(&mut self, _cx: &mut Cx<'_>, puller: PullerId) {
        let Some(found) = self.pullers.get_mut(&puller) else { return };
        found.rotation = found.rotation.wrapping_add(1);
        let groups = core::mem::take(&mut found.groups);
        for question in groups.into_iter().filter_map(|group| group.question) {
            self.forget_question(question);
        }
        self.ready.insert(Item::Puller(puller));
    }

    /// Pullers with a source that is gone look for another.
    pub(super) fn reroute_pullers(&mut self, cx: &mut Cx<'_>) {
        let servers: Vec<NodeId> = self
            .cluster
            .view()
            .map(|view| view.log_servers.iter().map(|server| server.node).collect())
            .unwrap_or_default();
        let is_good =
            |source: &Endpoint| self.cluster.reaches(*source) && servers.contains(&source.node);
        let cut: Vec<PullerId> = self
            .pullers
            .iter()
            .filter(|(_, puller)| !puller.groups.iter().all(|group| is_good(&group.source)))
            .map(|(puller, _)| *puller)
            .collect();
        cut.into_iter().for_each(|puller| self.scatter(cx, puller));
    }

    fn fetch(&mut self, cx: &mut Cx<'_>, puller: PullerId) {
        let Some(found) = self.pullers.get_mut(&puller) else { return };
        let (position, wanted, want) = (found.position, found.waiter.is_some(), found.want);
        let (mut asks, mut late) = (Vec::new(), Vec::new());
        for (place, group) in found.groups.iter_mut().enumerate() {
            let is_behind = group.through <= position;
            let has_room = group.fetched_bytes < cx.knobs.pull_bytes_max;
            // A question that waits for records does not know that a mark will do by now.
            if wanted && group.through < want && group.asked_want < want {
                late.extend(group.question.take());
            }
            if group.question.is_none() && (is_behind || wanted) && has_room {
                group.asked_want = want;
                let ask = Ask::Pull {
                    at: group.source,
                    streams: group.streams.clone(),
                    after: group.through,
                    bytes_max: cx.knobs.pull_bytes_max,
                    wait_ms: cx.knobs.pull_wait_ms_max,
                    want,
                };
                asks.push((place, ask));
            }
        }
        for question in late {
            self.forget_question(question);
        }
        for (place, ask) in asks {
            let owner = Owner::Puller(puller, place as u32);
            let question = self.ask(cx, owner, ask, None);
            let found = self.pullers.get_mut(&puller).expect("looked up above");
            found.groups[place].question = Some(question);
        }
    }

    /// An answer to a group's question.
    pub(super) fn handle_pulled(
        &mut self,
        cx: &mut Cx<'_>,
        puller: PullerId,
        group: u32,
        reply: Reply,
    ) {
        let Some(found) = self.pullers.get_mut(&puller) else { return };
        let group = found.groups.get_mut(group as usize).expect("questions end with their groups");
        group.question = None;
        let source = group.source;
        let error = match reply {
            Reply::Message(Message::Pulled(pulled)) => match group.take(&pulled) {
                Ok(is_progress) => {
                    found.damaged = 0;
                    if is_progress {
                        found.backoff.reset();
                        self.ready.insert(Item::Puller(puller));
                    } else {
                        // Nothing new, and perhaps without a wait: don't ask in a circle.
                        self.rest_puller(cx, puller);
                    }
                    return;
                }
                Err(error) => error,
            },
            Reply::Refused(refusal) if !is_final(&refusal) => {
                self.scatter_for_a_while(cx, puller);
                return;
            }
            Reply::Lost => return self.scatter_for_a_while(cx, puller),
            other => unexpected(other),
        };
        let is_damage = matches!(error, Error::Corrupt(_));
        if is_damage {
            found.avoided.insert(source);
        }
        found.damaged += u32::from(is_damage);
        if is_damage && found.damaged < DAMAGED_ANSWERS_MAX {
            return self.scatter_for_a_while(cx, puller);
        }
        self.fail_puller(cx, puller, error);
    }

    fn rest_puller(&mut self, cx: &mut Cx<'_>, puller: PullerId) {
        let found = self.pullers.get_mut(&puller).expect("the caller has looked it up");
        let wait = found.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        self.alarms.set(Item::Puller(puller), cx.now.plus(wait));
    }

    fn scatter_for_a_while(&mut self, cx: &mut Cx<'_>, puller: PullerId) {
        self.scatter(cx, puller);
        self.ready.remove(&Item::Puller(puller));
        self.rest_puller(cx, puller);
    }

    fn fail_puller(&mut self, cx: &mut Cx<'_>, puller: PullerId, error: Error) {
        self.scatter(cx, puller);
        let found = self.pullers.get_mut(&puller).expect("the caller has looked it up");
        found.failed = Some(error);
        self.deliver_pulled(cx, puller);
    }

    /// Gives the waiter what every group is known through.
    fn deliver_pulled(&mut self, cx: &mut Cx<'_>, puller: PullerId) {
        let found = self.pullers.get_mut(&puller).expect("the caller has looked it up");
        let Some(waiter) = found.waiter else { return };
        let result = match &found.failed {
            Some(error) => Err(error.clone()),
            None => match found.merge() {
                Ok(None) => return,
                Ok(Some(pulled)) => Ok(pulled),
                Err(error) => {
                    found.failed = Some(error.clone());
                    self.scatter(cx, puller);
                    Err(error)
                }
            },
        };
        self.pullers.get_mut(&puller).expect("looked up above").waiter = None;
        match waiter {
            Waiter::Call(call) => self.complete(call, result.map(Answer::Pulled)),
            Waiter::Catalog => self.handle_catalog(cx, result),
        }
    }
}

/// Whether it makes an error: another log server would refuse as well, or this one's copy is damaged.
fn is_final(refusal: &Refusal) -> bool {
    matches!(refusal.code().class(), Class::FixRequest | Class::Internal | Class::Corrupt)
}

impl Group {
    /// Takes an answer in; says whether it brought the group forward.
    fn take(&mut self, pulled: &PulledMessage) -> Result<bool, Error> {
        let corrupt = |what: String| {
            Error::new(Code::Corrupt, format!("{:?} after {}: {what}", self.source, self.through))
        };
        if pulled.after != self.through || pulled.through < self.through {
            return Err(corrupt(format!("answer {}..={}", pulled.after, pulled.through)));
        }
        let (mut at, mut entries, mut last) = (0_usize, pulled.blocks.iter(), self.through);
        let mut batches = Vec::with_capacity(pulled.versions.len());
        for version in &pulled.versions {
            if version.version <= last || version.version > pulled.through {
                return Err(corrupt(format!("{} behind {last}", version.version)));
            }
            last = version.version;
            let mut blocks: Vec<Block> = Vec::with_capacity(version.block_count as usize);
            for _ in 0..version.block_count {
                let entry =
                    entries.next().ok_or_else(|| corrupt("a block is missing".to_owned()))?;
                let body = pulled.payload.slice(at, entry.bytes as usize);
                let body = body.ok_or_else(|| corrupt("a body is cut off".to_owned()))?;
                at += body.len();
                let in_order = blocks.last().is_none_or(|before| before.stream < entry.stream);
                if !in_order || self.streams.binary_search(&entry.stream).is_err() {
                    return Err(corrupt(format!("{} was not asked for", entry.stream)));
                }
                blocks.push(Block::check(version.version, entry, &body)?);
            }
            batches.push(Batch {
                version: version.version,
                commit_time: version.commit_time,
                blocks,
            });
        }
        if entries.next().is_some() || at != pulled.payload.len() {
            return Err(corrupt("bytes behind the last block".to_owned()));
        }
        let is_progress = pulled.through > self.through;
        self.through = pulled.through;
        self.fetched_bytes += at as u64;
        self.fetched.extend(batches);
        Ok(is_progress)
    }
}

impl Puller {
    /// Takes out what every group is known through; checks the offsets of all of it.
    fn merge(&mut self) -> Result<Option<Pulled>, Error> {
        let Some(through) = self.groups.iter().map(|group| group.through).min() else {
            return Ok(None);
        };
        if through <= self.position {
            return Ok(None);
        }
        let mut merged: BTreeMap<Version, Batch> = BTreeMap::new();
        for group in &mut self.groups {
            while let Some(batch) = group.fetched.pop_front_if(|batch| batch.version <= through) {
                match merged.get_mut(&batch.version) {
                    Some(same) => same.blocks.extend(batch.blocks),
                    None => drop(merged.insert(batch.version, batch)),
                }
            }
            if group.fetched.is_empty() {
                group.fetched_bytes = 0;
            }
        }
        let mut batches: Vec<Batch> = merged.into_values().collect();
        for batch in &mut batches {
            batch.blocks.sort_by_key(|block| block.stream);
            batch.blocks.iter().try_for_each(|block| self.expect(block))?;
        }
        let after = core::mem::replace(&mut self.position, through);
        self.avoided.clear();
        Ok(Some(Pulled { after, through, batches }))
    }

    /// Offsets are dense (I12).
    fn expect(&mut self, block: &Block) -> Result<(), Error> {
        let Block { stream, version, base_offset, .. } = *block;
        let is_cut = self.is_from_start && base_offset != Offset::ZERO;
        match self.expected.insert(stream, block.end_offset()) {
            Some(expected) if expected != base_offset => Err(Error::new(
                Code::Corrupt,
                format!("{stream} at {version}: {base_offset} where {expected} was expected"),
            )),
            None if is_cut => Err(Error::new(
                Code::Trimmed,
                format!("{stream} begins with {base_offset} at {version}"),
            )),
            _ => Ok(()),
        }
    }
}
