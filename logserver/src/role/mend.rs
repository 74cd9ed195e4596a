//! Mending: a block that this server's disk has lost comes from another holder of its stream.
//!
//! ```text
//! pull, copy, fetch, scrub --damage--> wounds, bounded
//!
//! queued --look--> sound: a read went wrong, not the disk                        --> forgotten
//!    ^      `----> damaged --in the tail?----------------------------.
//!    |                `--FetchBlock--> holder 1, 2 .. --FetchedBlock, compared--> write, read again --> mended
//!    `--- nobody has it, or something around it is unclear: after `mend_retry_ms`
//! ```
//!
//! # Invariants
//! - I11: only what is known to be committed here is asked for, and only that is given out.
//! - A body is taken only if it is the block that the index has: stream, version, offsets, length, checksum.
//! - A wound is forgotten when its block is trimmed: nobody will read it.
//!
//! A pull that meets damage at its begin waits for the mend, for `mend_wait_ms` at most, if there is anybody
//! to ask; then it is refused as `corrupt`, and its consumer asks another replica.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use common::message::{FetchBlock, FetchedBlock, Pull, PulledBlock};
use common::{
    Code, Cx, Endpoint, Epoch, Mark, NodeId, Note, Payload, Peer, Plant, RequestId, Role,
    SegmentId, StreamId, Time, Version,
};

use super::{LogServer, MENDS};
use crate::log::index::BlockRef;
use crate::log::{MendId, MendOutcome, ReadFailure, ReadId};

/// Damaged blocks that are remembered; more are found again when these are mended.
const WOUNDS_MAX: usize = 1024;
/// Blocks that are mended at once, each in a segment of its own.
const MENDS_MAX: usize = 4;
/// Blocks that are read for others at once; who asks beyond that asks again.
const FETCHES_READING_MAX: usize = 8;
/// Damage that `status` names.
const NAMED_MAX: usize = 16;

/// A block, by its stream and its version.
type Place = (StreamId, Version);

/// Who met the damage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Finder {
    Pull,
    Copy,
    Fetch,
    Scrub,
}

/// A damaged block.
#[derive(Clone, Debug)]
struct Wound {
    block: BlockRef,
    found_by: Finder,
    what: String,
    since: Time,
    step: Step,
}

#[derive(Clone, Debug)]
enum Step {
    Queued,
    Looking,
    Asking { id: MendId, number: u64, holder: Endpoint, rest: Vec<Endpoint>, deadline: Time },
    Writing { from: NodeId },
}

/// A pull that waits for a mend.
#[derive(Clone, Debug)]
struct Held {
    from: Endpoint,
    pull: Pull,
    place: Place,
    deadline: Time,
    detail: String,
}

/// A block that is read for another log server.
#[derive(Clone, Debug)]
struct Fetching {
    from: Endpoint,
    epoch: Epoch,
    number: u64,
    place: Place,
    block: BlockRef,
}

/// Damaged blocks, and what becomes of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Mends {
    wounds: BTreeMap<Place, Wound>,
    queue: BTreeSet<(Time, Place)>,
    under_way: BTreeMap<MendId, Place>,
    held: Vec<Held>,
    fetching: BTreeMap<ReadId, Fetching>,
    next_number: u64,
    mended: u64,
    armed: Option<Time>,
}

/// Damage, for status pages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MendStatus {
    /// Blocks that are damaged and not mended yet.
    pub damaged: u64,
    /// Blocks that were mended in this life.
    pub mended: u64,
    /// Pulls that wait for a mend.
    pub pulls_waiting: u64,
    /// Some of the damaged blocks: since when each is known, and where it is, what is wrong, who met it, and
    /// what it waits for.
    pub blocks: Vec<(Time, String)>,
}

impl Mends {
    pub(super) fn is_fetching(&self, id: ReadId) -> bool {
        self.fetching.contains_key(&id)
    }

    pub(super) fn held_count(&self) -> usize {
        self.held.len()
    }

    /// The peer is gone: nobody waits for these answers.
    pub(super) fn forget(&mut self, peer: Peer) {
        self.held.retain(|held| held.from.peer() != peer);
    }

    pub(super) fn status(&self) -> MendStatus {
        let named = self.wounds.iter().take(NAMED_MAX);
        let named = named.map(|((stream, version), wound)| {
            let Wound { block, found_by, what, since, step } = wound;
            let waits = match step {
                Step::Queued => "waits for somebody who has it".to_owned(),
                Step::Looking => "is looked at again".to_owned(),
                Step::Asking { holder, .. } => format!("{} is asked for it", holder.node),
                Step::Writing { .. } => "is written".to_owned(),
            };
            let segment = block.segment;
            let text = format!(
                "{stream} at {version} in segment {segment}: {what}; met by a {}; {waits}",
                found_by.word()
            );
            (*since, text)
        });
        MendStatus {
            damaged: self.wounds.len() as u64,
            mended: self.mended,
            pulls_waiting: self.held.len() as u64,
            blocks: named.collect(),
        }
    }

    pub(super) fn check(&self, mends_on_disk: usize) {
        assert!(self.wounds.len() <= WOUNDS_MAX, "{} wounds", self.wounds.len());
        assert!(self.under_way.len() <= MENDS_MAX, "{} mends", self.under_way.len());
        assert_eq!(self.under_way.len(), mends_on_disk, "each mend is of a wound");
        assert_eq!(
            self.queue.len() + self.under_way.len(),
            self.wounds.len(),
            "a wound waits or is mended"
        );
        let segments = self.under_way.values().map(|place| self.wounds[place].block.segment);
        let segments: BTreeSet<SegmentId> = segments.collect();
        assert_eq!(segments.len(), self.under_way.len(), "one mend at a time in a segment");
        assert!(self.fetching.len() <= FETCHES_READING_MAX, "{} fetched", self.fetching.len());
    }

    fn queue_again(&mut self, place: Place, at: Time) {
        let wound = self.wounds.get_mut(&place).expect("a wound that is queued is known");
        wound.step = Step::Queued;
        self.queue.insert((at, place));
    }

    /// The mend that may begin next. One at a time in a segment: blocks may share pages.
    fn next_queued(&self) -> Option<(Time, Place)> {
        if self.under_way.len() >= MENDS_MAX {
            return None;
        }
        let segment = |place: &Place| self.wounds[place].block.segment;
        let is_busy = |id: SegmentId| self.under_way.values().any(|other| segment(other) == id);
        self.queue.iter().find(|(_, place)| !is_busy(segment(place))).copied()
    }

    /// When something has to happen next.
    fn next_at(&self) -> Option<Time> {
        let queued = self.next_queued().map(|(at, _)| at);
        let asking = self.under_way.values().filter_map(|place| match self.wounds[place].step {
            Step::Asking { deadline, .. } => Some(deadline),
            Step::Queued | Step::Looking | Step::Writing { .. } => None,
        });
        asking.chain(queued).chain(self.held.iter().map(|held| held.deadline)).min()
    }
}

impl Finder {
    const fn word(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Copy => "copy",
            Self::Fetch => "fetch",
            Self::Scrub => "scrub",
        }
    }
}

impl LogServer {
    /// Notes damage that a read has met; how many of the blocks were not known to be damaged.
    pub(super) fn find_damage(
        &mut self,
        cx: &mut Cx<'_>,
        failures: &[ReadFailure],
        found_by: Finder,
    ) -> u64 {
        let mut new = 0;
        for failure in failures {
            let place = (failure.stream, failure.version);
            let block = self.log.index().block(failure.stream, failure.version);
            let Some(block) = block.copied() else { continue };
            let is_known = self.mends.wounds.contains_key(&place);
            if is_known || self.mends.wounds.len() >= WOUNDS_MAX {
                continue;
            }
            cx.note(Note::Warning { code: "corrupt_block", detail: failure.to_string() });
            let what = failure.what.clone();
            let wound = Wound { block, found_by, what, since: cx.now, step: Step::Queued };
            self.mends.wounds.insert(place, wound);
            self.mends.queue.insert((cx.now, place));
            new += 1;
        }
        new
    }

    /// A pull that begins with damage: waits for the mend, or is refused.
    pub(super) fn hold_pull(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        pull: Pull,
        failure: &ReadFailure,
    ) {
        let place = (failure.stream, failure.version);
        let count = self.pulls.count() + self.mends.held.len();
        let may_wait = self.mends.wounds.contains_key(&place)
            && self.has_source(cx, failure.stream, failure.version)
            && (count as u64) < cx.knobs.pulls_waiting_max;
        let detail = failure.to_string();
        if !may_wait {
            return self.refuse(cx, from, pull.request, Code::Corrupt, detail);
        }
        let deadline = cx.now.plus(Duration::from_millis(cx.knobs.mend_wait_ms));
        self.mends.held.push(Held { from, pull, place, deadline, detail });
    }

    /// Whether anybody may have the block's body.
    fn has_source(&self, cx: &Cx<'_>, stream: StreamId, version: Version) -> bool {
        self.log.tail().body(stream, version).is_some()
            || (version <= self.served_limit() && !self.sources(cx, stream).is_empty())
    }

    /// The other log servers that hold the stream.
    fn sources(&self, cx: &Cx<'_>, stream: StreamId) -> Vec<Endpoint> {
        let mut sources = match (&self.generation, &self.follower) {
            (Some(generation), _) => generation.holders(stream),
            (None, Some(follower)) => follower.holders(stream),
            (None, None) => Vec::new(),
        };
        sources.retain(|source| source.node != cx.me.node);
        sources
    }

    /// Begins the mends that are due.
    pub(super) fn progress_mends(&mut self, cx: &mut Cx<'_>) {
        if !self.log.is_open() || self.log.is_stopping() {
            return;
        }
        while let Some((at, place)) = self.mends.next_queued().filter(|(at, _)| *at <= cx.now) {
            self.mends.queue.remove(&(at, place));
            self.begin_mend(cx, place);
        }
        let next = self.mends.next_at();
        if next != self.mends.armed {
            self.mends.armed = next;
            match next {
                Some(at) => cx.arm(MENDS, at),
                None => cx.disarm(MENDS),
            }
        }
    }

    fn begin_mend(&mut self, cx: &mut Cx<'_>, (stream, version): Place) {
        let place = (stream, version);
        let wound = &self.mends.wounds[&place];
        if self.log.index().block(stream, version) != Some(&wound.block) {
            return self.heal(cx, place);
        }
        let is_durable = version <= self.log.durable();
        if !is_durable || !self.has_source(cx, stream, version) {
            return self.mends.queue_again(place, retry_at(cx));
        }
        let id = self.log.look(cx, stream, wound.block);
        self.mends.under_way.insert(id, place);
        self.mends.wounds.get_mut(&place).expect("it was just there").step = Step::Looking;
    }

    /// The disk has something to say of a mend.
    pub(super) fn handle_mend(&mut self, cx: &mut Cx<'_>, id: MendId, outcome: MendOutcome) {
        let place = self.mends.under_way[&id];
        let (stream, version) = place;
        match outcome {
            MendOutcome::Damaged => self.find_body(cx, id, place),
            MendOutcome::Sound => {
                cx.mark(Mark::MendNotNeeded);
                self.mends.under_way.remove(&id);
                self.heal(cx, place);
            }
            MendOutcome::Mended => {
                let Step::Writing { from } = self.mends.wounds[&place].step else {
                    panic!("{stream} at {version} was mended and not written")
                };
                cx.mark(Mark::Mended);
                cx.note(Note::Mended { stream, version, from });
                self.mends.mended += 1;
                self.mends.under_way.remove(&id);
                self.heal(cx, place);
            }
            MendOutcome::Unsealed | MendOutcome::Failed => {
                self.mends.under_way.remove(&id);
                self.mends.queue_again(place, retry_at(cx));
            }
        }
    }

    fn find_body(&mut self, cx: &mut Cx<'_>, id: MendId, place: Place) {
        let (stream, version) = place;
        if let Some(body) = self.log.tail().body(stream, version) {
            cx.mark(Mark::MendedFromTail);
            let body = body.contiguous();
            return self.write_body(cx, id, place, body, cx.me.node);
        }
        let sources = self.sources(cx, stream);
        self.ask_next(cx, id, place, sources);
    }

    fn write_body(&mut self, cx: &mut Cx<'_>, id: MendId, place: Place, body: Bytes, from: NodeId) {
        let wound = self.mends.wounds.get_mut(&place).expect("a mend is of a wound");
        assert!(
            matches!(wound.step, Step::Looking | Step::Asking { .. }),
            "{} at {} is written once",
            place.0,
            place.1
        );
        wound.step = Step::Writing { from };
        self.log.mend(cx, id, body);
    }

    fn ask_next(&mut self, cx: &mut Cx<'_>, id: MendId, place: Place, mut rest: Vec<Endpoint>) {
        let (stream, version) = place;
        if rest.is_empty() || version > self.served_limit() {
            self.log.drop_mend(id);
            self.mends.under_way.remove(&id);
            return self.mends.queue_again(place, retry_at(cx));
        }
        let holder = rest.remove(0);
        let number = self.mends.next_number;
        self.mends.next_number += 1;
        let deadline = cx.now.plus(Duration::from_millis(cx.knobs.retransmit_ms));
        let wound = self.mends.wounds.get_mut(&place).expect("a mend is of a wound");
        assert!(
            wound.block.version == version && holder.node != cx.me.node,
            "{version} is asked of {holder:?} for {:?}",
            wound.block
        );
        wound.step = Step::Asking { id, number, holder, rest, deadline };
        cx.send(holder, self.epoch(), FetchBlock { number, stream, version });
    }

    /// Another holder has answered.
    pub(super) fn handle_fetched(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        fetched: &FetchedBlock,
    ) {
        let asked =
            self.mends.under_way.values().find_map(|place| match &self.mends.wounds[place].step {
                Step::Asking { id, number, holder, rest, .. }
                    if *number == fetched.number && *holder == from =>
                {
                    Some((*place, *id, rest.clone()))
                }
                _ => None,
            });
        let Some((place, id, rest)) = asked else { return };
        let block = self.mends.wounds[&place].block;
        let mut body = fetched.payload.contiguous();
        let is_same = fetched.block.is_some_and(|found| is_same(place, &block, &found, fetched));
        if cx.planted(Plant::MendUncompared) && fetched.block.is_some() {
            let mut taken = body.to_vec();
            taken.resize(block.bytes as usize, 0);
            body = taken.into();
        } else if !is_same {
            if let Some(found) = fetched.block {
                let detail = format!("{} has {found:?}, here it is {block:?}", from.node);
                cx.note(Note::Warning { code: "mend_refused", detail });
            }
            return self.ask_next(cx, id, place, rest);
        }
        if self.sources(cx, place.0).first() != Some(&from) {
            cx.mark(Mark::MendElsewhere);
        }
        self.write_body(cx, id, place, body, from.node);
    }

    /// A block is whole, or gone: nobody waits for it any more.
    fn heal(&mut self, cx: &mut Cx<'_>, place: Place) {
        self.mends.wounds.remove(&place).expect("a wound heals once");
        let (healed, held): (Vec<Held>, Vec<Held>) =
            core::mem::take(&mut self.mends.held).into_iter().partition(|held| held.place == place);
        self.mends.held = held;
        for held in healed {
            cx.mark(Mark::MendAwaited);
            self.serve_again(cx, held.from, held.pull);
        }
    }

    pub(super) fn handle_mends_timer(&mut self, cx: &mut Cx<'_>) {
        self.mends.armed = None;
        let late = |place: &Place| match &self.mends.wounds[place].step {
            Step::Asking { id, rest, deadline, .. } if *deadline <= cx.now => {
                Some((*id, *place, rest.clone()))
            }
            _ => None,
        };
        let late: Vec<_> = self.mends.under_way.values().filter_map(late).collect();
        for (id, place, rest) in late {
            self.ask_next(cx, id, place, rest);
        }
        let (late, held): (Vec<Held>, Vec<Held>) = core::mem::take(&mut self.mends.held)
            .into_iter()
            .partition(|held| held.deadline <= cx.now);
        self.mends.held = held;
        for held in late {
            self.refuse(cx, held.from, held.pull.request, Code::Corrupt, held.detail);
        }
    }

    /// Another log server's disk has lost a block.
    pub(super) fn handle_fetch(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        fetch: FetchBlock,
    ) {
        if from.role != Role::LogServer {
            let detail = format!("{from:?} is no log server");
            return self.refuse(cx, from, RequestId::ZERO, Code::Malformed, detail);
        }
        let FetchBlock { number, stream, version } = fetch;
        // I11: what is above may still be cut off, here or there.
        let is_committed = version <= self.served_limit();
        let mut block = self.log.index().block(stream, version).copied().filter(|_| is_committed);
        if cx.planted(Plant::MendUncompared) {
            let other = self.log.index().stream(stream).and_then(|of| of.after(version).next());
            block = other.copied().filter(|other| other.version <= self.served_limit()).or(block);
        }
        let Some(block) = block else {
            let payload = Payload::new();
            return cx.send(from, epoch, FetchedBlock { number, version, block: None, payload });
        };
        let fetching = Fetching { from, epoch, number, place: (stream, version), block };
        if let Some(body) = self.log.tail().body(stream, block.version) {
            return answer_fetch(cx, &fetching, body.clone());
        }
        if self.mends.fetching.len() < FETCHES_READING_MAX {
            let id = self.log.read(cx, vec![(stream, block)]);
            self.mends.fetching.insert(id, fetching);
        }
    }

    /// The disk has answered a fetch's read.
    pub(super) fn handle_fetch_read(
        &mut self,
        cx: &mut Cx<'_>,
        id: ReadId,
        result: Result<Vec<Bytes>, Vec<ReadFailure>>,
    ) {
        let fetching = self.mends.fetching.remove(&id).expect("it was looked at");
        match result {
            Ok(mut bodies) => {
                let body = bodies.pop().expect("one block was read");
                answer_fetch(cx, &fetching, body.into());
            }
            Err(failures) => {
                self.find_damage(cx, &failures, Finder::Fetch);
                let Fetching { from, epoch, number, place: (_, version), .. } = fetching;
                let payload = Payload::new();
                cx.send(from, epoch, FetchedBlock { number, version, block: None, payload });
            }
        }
    }
}

fn answer_fetch(cx: &mut Cx<'_>, fetching: &Fetching, payload: Payload) {
    let Fetching { from, epoch, number, place: (stream, version), block } = *fetching;
    let block = Some(PulledBlock {
        stream,
        base_offset: block.base_offset,
        record_count: block.record_count,
        bytes: block.bytes,
        checksum: block.checksum,
    });
    cx.send(from, epoch, FetchedBlock { number, version, block, payload });
}

/// Whether an answer is the very block that the index has.
fn is_same(place: Place, block: &BlockRef, found: &PulledBlock, fetched: &FetchedBlock) -> bool {
    let expected = PulledBlock {
        stream: place.0,
        base_offset: block.base_offset,
        record_count: block.record_count,
        bytes: block.bytes,
        checksum: block.checksum,
    };
    fetched.version == place.1
        && *found == expected
        && fetched.payload.len() == block.bytes as usize
        && crc32c::crc32c(&fetched.payload.contiguous()) == block.checksum
}

fn retry_at(cx: &Cx<'_>) -> Time {
    cx.now.plus(Duration::from_millis(cx.knobs.mend_retry_ms))
}
