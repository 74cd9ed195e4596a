//! Pulls: whole versions, in order, up to the served limit (I11).
//!
//! ```text
//! Pull --> trimmed? refuse
//!      --> something new --> all in the tail: answer
//!      |                 |-> read ahead of it: answer (see `ahead`)
//!      |                 `-> else read, then answer
//!      `-> nothing new   --> wait for a stream of it; for the version that it wants to know of, or the
//!                            deadline: a progress mark
//! ```
//!
//! A waiting pull is found by its streams: each version that becomes visible wakes those that asked for one
//! of its streams, not all.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use common::message::{Pull, Pulled, PulledBlock, PulledVersion};
use common::{Code, Cx, Endpoint, Mark, Note, Payload, Peer, Plant, StreamId, Time, Version};

use super::ahead::Ahead;
use super::mend::Finder;
use super::{LogServer, PULLS};
use crate::log::index::BlockRef;
use crate::log::{Log, ReadFailure, ReadId};

/// Pulls that read at once; the others wait for their turn.
pub(super) const READING_MAX: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct PullId(u64);

/// A pull that is not answered.
#[derive(Clone, Debug)]
struct Waiting {
    from: Endpoint,
    pull: Pull,
    deadline: Time,
}

/// An answer that waits for bodies off the disk.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) from: Endpoint,
    pub(super) pull: Pull,
    pub(super) answer: Gathered,
    pub(super) wanted: Wanted,
}

/// Who waits for a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// The consumer, which has asked.
    Now,
    /// Nobody yet.
    Ahead,
    /// Nobody any more.
    Never,
}

/// What an answer will consist of.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathered {
    pub(super) through: Version,
    pub(super) versions: Vec<PulledVersion>,
    pub(super) blocks: Vec<(StreamId, BlockRef)>,
}

impl Gathered {
    /// Bytes of the bodies.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.iter().map(|(_, block)| u64::from(block.bytes)).sum()
    }

    /// What was read, by the block that it belongs to.
    pub(super) fn bodies(&self, read: Vec<Bytes>) -> BTreeMap<(StreamId, Version), Bytes> {
        let keys = self.blocks.iter().map(|(stream, block)| (*stream, block.version));
        keys.zip(read).collect()
    }

    /// What of it is below `version`, if there is any.
    pub(super) fn before(mut self, version: Version) -> Option<Self> {
        assert!(
            version <= self.through,
            "{version} is no part of an answer through {}",
            self.through
        );
        self.versions.retain(|kept| kept.version < version);
        self.blocks.retain(|(_, block)| block.version < version);
        self.through = version.minus_saturating(1);
        (!self.blocks.is_empty()).then_some(self)
    }
}

/// All pulls that are not answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Pulls {
    next: u64,
    waiting: BTreeMap<PullId, Waiting>,
    by_stream: BTreeMap<StreamId, BTreeSet<PullId>>,
    deadlines: BTreeSet<(Time, PullId)>,
    /// Those that a progress mark will do for.
    wants: BTreeSet<(Version, PullId)>,
    /// Have something new, and wait until they may read.
    queued: VecDeque<(Endpoint, Pull)>,
    pub(super) reading: BTreeMap<ReadId, Reading>,
    pub(super) ahead: Ahead,
    /// Accepted versions that are not visible yet, with their streams.
    expected: VecDeque<(Version, Vec<StreamId>)>,
    /// More than what is expected may have become visible.
    is_anything_expected: bool,
    armed: Option<Time>,
}

impl Pulls {
    pub(super) fn count(&self) -> usize {
        self.waiting.len() + self.reading_count()
    }

    pub(super) fn has_queue(&self) -> bool {
        !self.queued.is_empty()
    }

    pub(super) fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn reading_count(&self) -> usize {
        let asked = self.reading.values().filter(|reading| reading.wanted == Wanted::Now);
        self.queued.len() + asked.count()
    }

    /// A version was accepted.
    pub(super) fn expect(&mut self, version: Version, streams: impl Iterator<Item = StreamId>) {
        let streams: Vec<StreamId> = streams.collect();
        if !streams.is_empty() {
            self.expected.push_back((version, streams));
        }
    }

    /// Versions that were accepted in another life may become visible.
    pub(super) const fn expect_anything(&mut self) {
        self.is_anything_expected = true;
    }

    /// Versions above `version` will never be visible.
    pub(super) fn drop_above(&mut self, version: Version) {
        while self.expected.back().is_some_and(|(last, _)| *last > version) {
            self.expected.pop_back();
        }
    }

    /// The peer is gone: nobody waits for these answers.
    pub(super) fn forget(&mut self, peer: Peer) {
        let gone: Vec<PullId> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.from.peer() == peer)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.take(id);
        }
        self.queued.retain(|(from, _)| from.peer() != peer);
        self.ahead.forget(peer);
        for reading in self.reading.values_mut().filter(|reading| reading.from.peer() == peer) {
            reading.wanted = Wanted::Never;
        }
    }

    fn insert(&mut self, from: Endpoint, pull: Pull, deadline: Time) {
        // Asked again, it waits no longer than it would have: a consumer that asks before each answer can
        // reach it would else never get one.
        let superseded = self.take_superseded(from, &pull);
        let deadline = superseded.map_or(deadline, |earlier| deadline.min(earlier.deadline));
        let id = PullId(self.next);
        self.next += 1;
        if pull.want > pull.after {
            self.wants.insert((pull.want, id));
        }
        for stream in &pull.streams {
            self.by_stream.entry(*stream).or_default().insert(id);
        }
        self.deadlines.insert((deadline, id));
        self.waiting.insert(id, Waiting { from, pull, deadline });
    }

    /// A consumer that asks again from the same place does not wait for the earlier answer any more.
    fn take_superseded(&mut self, from: Endpoint, pull: &Pull) -> Option<Waiting> {
        let of_stream = pull.streams.first().and_then(|stream| self.by_stream.get(stream));
        let earlier = of_stream.into_iter().flatten().copied().find(|id| {
            let waiting = &self.waiting[id];
            waiting.from == from
                && waiting.pull.after == pull.after
                && waiting.pull.streams == pull.streams
        });
        earlier.and_then(|earlier| self.take(earlier))
    }

    fn take(&mut self, id: PullId) -> Option<Waiting> {
        let waiting = self.waiting.remove(&id)?;
        self.wants.remove(&(waiting.pull.want, id));
        self.deadlines.remove(&(waiting.deadline, id));
        for stream in &waiting.pull.streams {
            let set =
                self.by_stream.get_mut(stream).expect("a waiting pull is found by its streams");
            set.remove(&id);
            if set.is_empty() {
                self.by_stream.remove(stream);
            }
        }
        Some(waiting)
    }

    /// The pulls that may have something new up to `limit`.
    fn woken(&mut self, limit: Version) -> BTreeSet<PullId> {
        let mut woken = BTreeSet::new();
        while self.expected.front().is_some_and(|(version, _)| *version <= limit) {
            let (_, streams) = self.expected.pop_front().expect("it was just looked at");
            for ids in streams.iter().filter_map(|stream| self.by_stream.get(stream)) {
                woken.extend(ids);
            }
        }
        woken.extend(self.wants.iter().take_while(|(want, _)| *want <= limit).map(|(_, id)| *id));
        if core::mem::take(&mut self.is_anything_expected) {
            woken.extend(self.waiting.keys());
        }
        woken
    }

    pub(super) fn arm(&mut self, cx: &mut Cx<'_>) {
        let first = self.deadlines.first().map(|(deadline, _)| *deadline);
        if first == self.armed {
            return;
        }
        self.armed = first;
        match first {
            Some(deadline) => cx.arm(PULLS, deadline),
            None => cx.disarm(PULLS),
        }
    }

    pub(super) fn check(&self) {
        assert_eq!(self.deadlines.len(), self.waiting.len(), "each waiting pull has a deadline");
        let ascends = |(a, b): (&(Version, _), &(Version, _))| a.0 < b.0;
        let pairs = self.expected.iter().zip(self.expected.iter().skip(1));
        assert!(pairs.into_iter().all(ascends), "I1: what is expected ascends");
        assert!(self.reading.len() <= READING_MAX, "{} pulls read", self.reading.len());
        self.ahead.check();
    }
}

impl LogServer {
    pub(super) fn handle_pull(&mut self, cx: &mut Cx<'_>, from: Endpoint, pull: Pull) {
        if let Err((code, detail)) = self.judge_pull(cx, &pull) {
            return self.refuse(cx, from, pull.request, code, detail);
        }
        let limit = self.served_limit();
        if self.has_news(&pull, limit) {
            return self.serve(cx, from, pull);
        }
        let wait_ms = u64::from(pull.wait_ms).min(cx.knobs.pull_wait_ms_max);
        if wait_ms == 0 {
            return self.serve(cx, from, pull);
        }
        cx.mark(Mark::PullWaited);
        let deadline = cx.now.plus(Duration::from_millis(wait_ms));
        self.pulls.insert(from, pull, deadline);
    }

    fn judge_pull(&self, cx: &Cx<'_>, pull: &Pull) -> Result<(), (Code, String)> {
        let count = pull.streams.len() as u64;
        if count > cx.knobs.pull_streams_max {
            let detail = format!("{count} streams; the limit is {}", cx.knobs.pull_streams_max);
            return Err((Code::LimitExceeded, detail));
        }
        if let Some(pair) = pull.streams.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err((Code::Malformed, format!("{} after {}", pair[1], pair[0])));
        }
        let waiting = self.pulls.count() + self.mends.held_count();
        if waiting as u64 >= cx.knobs.pulls_waiting_max {
            let detail = format!("{waiting} pulls wait; the limit is reached");
            return Err((Code::Overloaded, detail));
        }
        self.judge_trims(pull)
    }

    pub(super) fn judge_trims(&self, pull: &Pull) -> Result<(), (Code, String)> {
        for stream in &pull.streams {
            let trimmed = self.log.index().stream(*stream).map(|entry| entry.trimmed_through());
            if let Some(trimmed) = trimmed
                && pull.after < trimmed
            {
                return Err((Code::Trimmed, format!("{stream} is trimmed through {trimmed}")));
            }
        }
        Ok(())
    }

    fn has_news(&self, pull: &Pull, limit: Version) -> bool {
        if pull.want > pull.after && pull.want <= limit {
            return true;
        }
        let news = |stream: &StreamId| {
            let next = self.log.index().stream(*stream)?.after(pull.after).next()?;
            Some(next.version <= limit)
        };
        pull.streams.iter().any(|stream| news(stream) == Some(true))
    }

    /// What an answer to a pull will consist of.
    pub(super) fn plan(&self, cx: &Cx<'_>, pull: &Pull) -> Gathered {
        let bytes_max = u64::from(pull.bytes_max).min(cx.knobs.pull_bytes_max);
        let limit = self.served_limit();
        let limit = if cx.planted(Plant::ServeUncommitted) { self.log.durable() } else { limit };
        let mut answer = gather(&self.log, &pull.streams, pull.after, limit, bytes_max);
        if cx.planted(Plant::ThroughTooFar) {
            answer.through = limit.max(pull.after);
        }
        assert!(
            answer.through >= pull.after && answer.blocks.iter().all(|(_, b)| b.version <= limit),
            "I11: {} to {} is served below {limit}",
            pull.after,
            answer.through
        );
        answer
    }

    /// Answers with what there is, or reads what the tail does not have.
    fn serve(&mut self, cx: &mut Cx<'_>, from: Endpoint, pull: Pull) {
        let Err(pull) = self.serve_ahead(cx, from, pull) else { return };
        let answer = self.plan(cx, &pull);
        if self.has_in_tail(&answer) {
            if !answer.blocks.is_empty() {
                cx.mark(Mark::PullFromTail);
            }
            return self.answer_pull(cx, from, &pull, answer, &BTreeMap::new());
        }
        if self.pulls.reading.len() >= READING_MAX {
            return self.pulls.queued.push_back((from, pull));
        }
        cx.mark(Mark::PullFromDisk);
        // Read whole versions: by the time the disk answers, the tail may have lost the rest.
        let id = self.log.read(cx, answer.blocks.clone());
        self.pulls.reading.insert(id, Reading { from, pull, answer, wanted: Wanted::Now });
    }

    pub(super) fn answer_pull(
        &self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        pull: &Pull,
        answer: Gathered,
        bodies: &BTreeMap<(StreamId, Version), Bytes>,
    ) {
        let (blocks, payload) = self.join(&answer, bodies);
        let (after, through) = (pull.after, answer.through);
        cx.note(Note::Delivered { to: from, after, through });
        let versions = answer.versions;
        let request = pull.request;
        let pulled = Pulled { request, after, through, versions, blocks, payload };
        cx.send(from, self.epoch(), pulled);
    }

    /// Whether no body of an answer has to be read.
    pub(super) fn has_in_tail(&self, answer: &Gathered) -> bool {
        let tail = self.log.tail();
        answer.blocks.iter().all(|(stream, block)| tail.body(*stream, block.version).is_some())
    }

    /// The blocks of an answer and their bodies: what was read, and the rest from the tail.
    pub(super) fn join(
        &self,
        answer: &Gathered,
        bodies: &BTreeMap<(StreamId, Version), Bytes>,
    ) -> (Vec<PulledBlock>, Payload) {
        let mut payload = Payload::new();
        let mut blocks = Vec::with_capacity(answer.blocks.len());
        for (stream, block) in &answer.blocks {
            blocks.push(PulledBlock {
                stream: *stream,
                base_offset: block.base_offset,
                record_count: block.record_count,
                bytes: block.bytes,
                checksum: block.checksum,
            });
            match bodies.get(&(*stream, block.version)) {
                Some(body) => payload.push(body.clone()),
                None => {
                    let body = self.log.tail().body(*stream, block.version);
                    let body = body.expect("what was not read is in the tail");
                    body.pieces().iter().for_each(|piece| payload.push(piece.clone()));
                }
            }
        }
        (blocks, payload)
    }

    /// The disk has answered a pull's read.
    pub(super) fn handle_read(
        &mut self,
        cx: &mut Cx<'_>,
        id: ReadId,
        result: Result<Vec<Bytes>, Vec<ReadFailure>>,
    ) {
        let Reading { from, pull, answer, wanted } =
            self.pulls.reading.remove(&id).expect("only pulls read an open log");
        match (result, wanted) {
            (Ok(bodies), Wanted::Ahead) => self.keep_ahead(cx, from, pull, answer, bodies),
            // Whoever asks for it will read it again, and hear what is wrong.
            (_, Wanted::Never) | (Err(_), Wanted::Ahead) => {}
            (Ok(bodies), Wanted::Now) => {
                let (through, bodies) = (answer.through, answer.bodies(bodies));
                self.answer_pull(cx, from, &pull, answer, &bodies);
                self.read_ahead(cx, from, pull, through);
            }
            (Err(failures), Wanted::Now) => {
                self.find_damage(cx, &failures, Finder::Pull);
                let failure = &failures[0];
                // What lies before the damage is served; the next pull ends at it.
                match answer.before(failure.version) {
                    Some(answer) => {
                        let id = self.log.read(cx, answer.blocks.clone());
                        let wanted = Wanted::Now;
                        self.pulls.reading.insert(id, Reading { from, pull, answer, wanted });
                    }
                    None => self.hold_pull(cx, from, pull, failure),
                }
            }
        }
        if let Some((from, pull)) = self.pulls.queued.pop_front() {
            self.serve_again(cx, from, pull);
        }
    }

    /// Serves a pull that has waited: meanwhile its streams may have been trimmed.
    pub(super) fn serve_again(&mut self, cx: &mut Cx<'_>, from: Endpoint, pull: Pull) {
        match self.judge_trims(&pull) {
            Ok(()) => self.serve(cx, from, pull),
            Err((code, detail)) => self.refuse(cx, from, pull.request, code, detail),
        }
    }

    /// Serves the pulls that have something new up to `limit`.
    pub(super) fn wake_pulls(&mut self, cx: &mut Cx<'_>, limit: Version) {
        for id in self.pulls.woken(limit) {
            let news = self.pulls.waiting.get(&id).is_some_and(|w| self.has_news(&w.pull, limit));
            if news && let Some(waiting) = self.pulls.take(id) {
                self.serve_again(cx, waiting.from, waiting.pull);
            }
        }
    }

    pub(super) fn handle_pulls_timer(&mut self, cx: &mut Cx<'_>) {
        self.pulls.armed = None;
        while let Some((deadline, id)) = self.pulls.deadlines.first().copied() {
            if deadline > cx.now {
                break;
            }
            let waiting = self.pulls.take(id).expect("a deadline is of a waiting pull");
            self.serve_again(cx, waiting.from, waiting.pull);
        }
    }
}

/// The blocks of the streams above `after` and up to `limit`, by version, then by stream: whole
/// versions up to `bytes_max`, and at least one.
pub(super) fn gather(
    log: &Log,
    streams: &[StreamId],
    after: Version,
    limit: Version,
    bytes_max: u64,
) -> Gathered {
    let mut cursors: Vec<_> = streams
        .iter()
        .filter_map(|stream| Some((*stream, log.index().stream(*stream)?.after(after).peekable())))
        .collect();
    let mut heads = BinaryHeap::new();
    for (place, (_, cursor)) in cursors.iter_mut().enumerate() {
        if let Some(block) = cursor.peek() {
            heads.push(Reverse((block.version, place)));
        }
    }
    // Nothing else of these streams is at or below it, though nothing may be above `after` yet.
    let mut gathered = Gathered { through: limit.max(after), ..Gathered::default() };
    let (mut bytes, mut version_bytes) = (0, 0);
    let mut started: Option<PulledVersion> = None;
    while let Some(Reverse((version, place))) = heads.pop() {
        if version > limit {
            break;
        }
        let (stream, cursor) = &mut cursors[place];
        let block = *cursor.next().expect("its head is in the heap");
        if let Some(next) = cursor.peek() {
            heads.push(Reverse((next.version, place)));
        }
        if started.is_none_or(|started| started.version != version) {
            if let Some(complete) = started.take() {
                bytes += core::mem::take(&mut version_bytes);
                gathered.versions.push(complete);
            }
            let commit_time = block.commit_time;
            started = Some(PulledVersion { version, commit_time, block_count: 0 });
        }
        let current = started.as_mut().expect("it was just begun");
        version_bytes += u64::from(block.bytes) + BLOCK_OVERHEAD_BYTES;
        if let Some(last) = gathered.versions.last()
            && bytes + version_bytes > bytes_max
        {
            gathered.through = last.version;
            let complete: usize =
                gathered.versions.iter().map(|version| version.block_count as usize).sum();
            gathered.blocks.truncate(complete);
            return gathered;
        }
        current.block_count += 1;
        gathered.blocks.push((*stream, block));
    }
    gathered.versions.extend(started);
    gathered
}

/// What a block's entry counts for beside its body, bytes.
const BLOCK_OVERHEAD_BYTES: u64 = 32;
