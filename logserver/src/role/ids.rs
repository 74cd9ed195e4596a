//! Which transaction had which idempotency id: the log's word on what became of a commit (I16).
//!
//! A proxy puts one record into the block of [`StreamId::IDS`] for each transaction that carried an id:
//!
//! ```text
//! put  key    16 bytes, the id               the section's index is the transaction's place in the batch
//!      value  for each of its sections: u64 stream | u32 ordinal | u32 count      little-endian
//! ```
//!
//! `ordinal` is how many records of that stream earlier transactions of the same batch have: the block's
//! first offset plus the ordinal is the section's first offset. Ids are remembered for `id_life_versions`;
//! the server trims their stream itself.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::{Buf, Bytes};
use common::message::{FindId, FoundId, FoundSection, IdFound};
use common::record::{Record, records, sections};
use common::{
    Code, Cx, Endpoint, IdempotencyId, Note, Plant, Position, RequestId, StreamId, Time, Version,
    WallTime,
};

use super::known::KnownIds;
use super::{FINDS, LogServer};

/// Bytes of a section's entry in a record's value.
const SECTION_BYTES: usize = 16;
/// The stream of ids is trimmed in so many steps a life.
const TRIMS_A_LIFE: u64 = 16;

/// A transaction with an id.
#[derive(Clone, Debug)]
struct Entry {
    position: Position,
    commit_time: WallTime,
    /// Stream, ordinal, count.
    sections: Vec<(StreamId, u32)>,
}

/// A question that waits until enough is committed.
#[derive(Clone, Debug)]
struct Waiting {
    from: Endpoint,
    find: FindId,
    deadline: Time,
}

/// The ids of recent transactions.
#[derive(Clone, Debug, Default)]
pub(super) struct Ids {
    known: KnownIds,
    /// By what they wait for.
    waiting: BTreeMap<(Version, u64), Waiting>,
    deadlines: BTreeSet<(Time, (Version, u64))>,
    next: u64,
    armed: Option<Time>,
    trimmed_through: Version,
    /// Ids at or below this version have been forgotten, or could not be read.
    forgotten_through: Version,
}

impl Ids {
    pub(super) fn count(&self) -> usize {
        self.known.len()
    }

    pub(super) fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// Enters a block of ids.
    pub(super) fn enter(
        &mut self,
        cx: &mut Cx<'_>,
        version: Version,
        commit_time: WallTime,
        body: &Bytes,
    ) {
        let mut ids = Vec::new();
        if let Err(what) = parse_block(body, |_, id, _| ids.push(id)) {
            self.forgotten_through = self.forgotten_through.max(version);
            let detail = format!("the block of ids at {version}: {what}");
            return cx.note(Note::Warning { code: "bad_ids", detail });
        }
        self.known.enter(version, commit_time, body, &ids);
        while self.known.len() as u64 > cx.knobs.ids_max {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        let version = self.known.forget_first().expect("there are ids");
        self.forgotten_through = self.forgotten_through.max(version);
    }

    /// The transaction of that id at or below `through`.
    fn find(&self, id: IdempotencyId, through: Version) -> Option<Entry> {
        let block = self.known.find(id, through)?;
        let mut found = None;
        let parsed = parse_block(&block.body, |index, of, value| {
            if of == id {
                found = Some((index, value));
            }
        });
        parsed.expect("it was parsed when it was entered");
        let (index, mut value) = found?;
        let mut sections = Vec::with_capacity(value.len() / SECTION_BYTES);
        while value.has_remaining() {
            let (stream, ordinal, _) = (value.get_u64_le(), value.get_u32_le(), value.get_u32_le());
            sections.push((StreamId(stream), ordinal));
        }
        let position = Position { version: block.version, index };
        Some(Entry { position, commit_time: block.commit_time, sections })
    }

    /// Versions above `version` are no part of history.
    pub(super) fn drop_above(&mut self, version: Version) {
        self.known.drop_above(version);
    }

    pub(super) fn check(&self) {
        self.known.check();
        assert_eq!(self.deadlines.len(), self.waiting.len(), "each question has a deadline");
    }

    pub(super) fn arm(&mut self, cx: &mut Cx<'_>) {
        let first = self.deadlines.first().map(|(deadline, _)| *deadline);
        if first == self.armed {
            return;
        }
        self.armed = first;
        match first {
            Some(deadline) => cx.arm(FINDS, deadline),
            None => cx.disarm(FINDS),
        }
    }
}

impl LogServer {
    /// Enters a block of ids that was found when the log was opened.
    pub(super) fn enter_ids(
        &mut self,
        cx: &mut Cx<'_>,
        version: Version,
        commit_time: WallTime,
        body: &Bytes,
    ) {
        self.ids.enter(cx, version, commit_time, body);
    }

    pub(super) fn handle_find_id(&mut self, cx: &mut Cx<'_>, from: Endpoint, find: FindId) {
        let limit = self.served_limit();
        if limit < find.at_least && cx.planted(Plant::FindTooEarly) {
            let (found, forgotten_through) = (None, Version::ZERO);
            let (request, through) = (find.request, find.at_least);
            let answer = IdFound { request, found, through, forgotten_through };
            return cx.send(from, self.epoch(), answer);
        }
        if limit >= find.at_least {
            return self.answer_find(cx, from, find.request, find.id, limit);
        }
        if self.ids.waiting.len() as u64 >= cx.knobs.pulls_waiting_max {
            let detail = format!("{} questions after ids wait", self.ids.waiting.len());
            return self.refuse(cx, from, find.request, Code::Overloaded, detail);
        }
        let deadline = cx.now.plus(Duration::from_millis(cx.knobs.pull_wait_ms_max));
        let key = (find.at_least, self.ids.next);
        self.ids.next += 1;
        self.ids.deadlines.insert((deadline, key));
        self.ids.waiting.insert(key, Waiting { from, find, deadline });
    }

    /// Answers the questions that waited for a version up to `limit`.
    pub(super) fn wake_finds(&mut self, cx: &mut Cx<'_>, limit: Version) {
        while let Some(first) = self.ids.waiting.first_entry().filter(|e| e.key().0 <= limit) {
            let (key, Waiting { from, find, deadline }) = first.remove_entry();
            self.ids.deadlines.remove(&(deadline, key));
            self.answer_find(cx, from, find.request, find.id, limit);
        }
    }

    pub(super) fn handle_finds_timer(&mut self, cx: &mut Cx<'_>) {
        self.ids.armed = None;
        while let Some((deadline, key)) = self.ids.deadlines.first().copied() {
            if deadline > cx.now {
                break;
            }
            self.ids.deadlines.remove(&(deadline, key));
            let waiting = self.ids.waiting.remove(&key).expect("a deadline is of a question");
            let detail = format!(
                "{} is not known committed; the log is at {}",
                waiting.find.at_least,
                self.served_limit()
            );
            self.refuse(cx, waiting.from, waiting.find.request, Code::Recovering, detail);
        }
    }

    fn answer_find(
        &self,
        cx: &mut Cx<'_>,
        to: Endpoint,
        request: RequestId,
        id: IdempotencyId,
        through: Version,
    ) {
        // What is above may still be replaced.
        let found = self.ids.find(id, through).map(|entry| {
            let version = entry.position.version;
            let sections = entry.sections.iter().map(|(stream, ordinal)| {
                let block = self.log.index().block(*stream, version);
                let base_offset = block.map(|block| block.base_offset.plus(u64::from(*ordinal)));
                FoundSection { stream: *stream, base_offset }
            });
            let (position, commit_time) = (entry.position, entry.commit_time);
            FoundId { position, commit_time, sections: sections.collect() }
        });
        let ids = self.log.index().stream(StreamId::IDS);
        let trimmed_through = ids.map_or(Version::ZERO, |ids| ids.trimmed_through());
        let forgotten_through = self.ids.forgotten_through.max(trimmed_through);
        cx.send(to, self.epoch(), IdFound { request, found, through, forgotten_through });
    }

    /// Forgets ids whose life is over, so that the segments that hold them can go.
    pub(super) fn forget_old_ids(&mut self, cx: &mut Cx<'_>, limit: Version) {
        let life = cx.knobs.id_life_versions;
        let through = limit.minus_saturating(life);
        if through.0 < self.ids.trimmed_through.0 + life / TRIMS_A_LIFE {
            return;
        }
        if self.follower.is_some() {
            // The trims of its share come with the copies.
            return;
        }
        self.ids.trimmed_through = through;
        while self.ids.known.first().is_some_and(|first| first <= through) {
            self.ids.forget_first();
        }
        self.begin_trim(cx, None, StreamId::IDS, through);
    }
}

/// Visits the ids of a block with the index and the value of each; all of them have been checked or none is
/// of use.
fn parse_block(
    body: &Bytes,
    mut visit: impl FnMut(u16, IdempotencyId, Bytes),
) -> Result<(), String> {
    for section in sections(body).map_err(|error| error.to_string())? {
        for record in records(&section.records) {
            let Record { key, value, .. } = record.map_err(|error| error.to_string())?;
            let id = <[u8; 16]>::try_from(&key[..])
                .map_err(|_| format!("an id of {} bytes", key.len()))?;
            if !value.len().is_multiple_of(SECTION_BYTES) {
                return Err(format!("a value of {} bytes", value.len()));
            }
            visit(section.index, IdempotencyId(id), value);
        }
    }
    Ok(())
}
