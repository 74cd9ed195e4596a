//! Trims, persisted before anything goes (I13), and how streams stand.

use std::collections::{BTreeMap, VecDeque};

use common::message::{Describe, Described, StreamState, Trim, Trimmed};
use common::{Code, Cx, Endpoint, Epoch, Note, Offset, Plant, RequestId, StreamId, Version};

use super::LogServer;

/// Trims that wait for the disk, at most.
const TRIMS_WAITING_MAX: usize = 16_384;

/// A trim on its way to the disk.
#[derive(Clone, Debug)]
struct Waiting {
    /// The meta generation that holds it.
    ticket: u64,
    /// `None`: the server's own.
    asker: Option<(Endpoint, RequestId)>,
    stream: StreamId,
    through: Version,
    first_offset: Offset,
}

/// Trims on their way to the disk, in the order of their tickets.
#[derive(Clone, Debug, Default)]
pub(super) struct Trims {
    waiting: VecDeque<Waiting>,
    /// Each stream's latest one: ticket, what it trims, what it leaves.
    latest: BTreeMap<StreamId, (u64, Version, Offset)>,
}

impl Trims {
    pub(super) fn waiting_count(&self) -> usize {
        self.waiting.len()
    }
}

impl LogServer {
    pub(super) fn handle_trim(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        trim: Trim,
    ) {
        // The ids are trimmed here; the catalog never is: without it no stream is known any more.
        if trim.stream.is_system() {
            let detail = format!("{} is the system's", trim.stream);
            return self.refuse(cx, from, trim.request, Code::SystemStream, detail);
        }
        // From a lock to the next epoch's begin nothing is trimmed, so that one who returns misses no trim;
        // and then only by those who know the epoch's log servers.
        let is_ignored = cx.planted(Plant::TrimWhileLocked) && self.generation.is_some();
        if !self.serves() && !is_ignored {
            let detail = "no epoch serves here";
            return self.refuse(cx, from, trim.request, Code::Recovering, detail);
        }
        if epoch < self.epoch() {
            let detail = format!("{epoch} is over, {} has other log servers", self.epoch());
            return self.refuse(cx, from, trim.request, Code::WrongEpoch, detail);
        }
        if self.follower.is_some() {
            let detail = "this log server catches up: others have its share";
            return self.refuse(cx, from, trim.request, Code::NotHere, detail);
        }
        if self.trims.waiting.len() >= TRIMS_WAITING_MAX {
            let detail = format!("{} trims wait", self.trims.waiting.len());
            return self.refuse(cx, from, trim.request, Code::Overloaded, detail);
        }
        // What is not committed may still be replaced.
        let through = trim.through.min(self.served_limit());
        let through = if cx.planted(Plant::TrimFurther) { self.served_limit() } else { through };
        if cx.planted(Plant::TrimUnpersisted) {
            self.answer_trim(cx, Some((from, trim.request)), trim.stream, through);
            return self.begin_trim(cx, None, trim.stream, through);
        }
        self.begin_trim(cx, Some((from, trim.request)), trim.stream, through);
    }

    /// Trims `stream`, for an asker or for the server itself.
    pub(super) fn begin_trim(
        &mut self,
        cx: &mut Cx<'_>,
        asker: Option<(Endpoint, RequestId)>,
        stream: StreamId,
        through: Version,
    ) {
        // A later trim of the same stream that is on its way answers for this one, too.
        let on_its_way =
            self.trims.latest.get(&stream).filter(|latest| latest.1 >= through).copied();
        let latest = on_its_way.or_else(|| {
            let (ticket, first_offset) = self.log.persist_trim(stream, through)?;
            Some((ticket, through, first_offset))
        });
        let Some((ticket, through, first_offset)) = latest else {
            return self.answer_trim(cx, asker, stream, through);
        };
        self.trims.latest.insert(stream, (ticket, through, first_offset));
        self.trims.waiting.push_back(Waiting { ticket, asker, stream, through, first_offset });
    }

    /// Carries out and answers the trims that are persisted.
    pub(super) fn progress_trims(&mut self, cx: &mut Cx<'_>) {
        let persisted = self.log.persisted();
        while self.trims.waiting.front().is_some_and(|first| first.ticket <= persisted) {
            let Waiting { asker, stream, through, first_offset, .. } =
                self.trims.waiting.pop_front().expect("it was just looked at");
            if self.trims.latest.get(&stream).is_some_and(|latest| latest.0 <= persisted) {
                self.trims.latest.remove(&stream);
            }
            if self.log.trim(stream, through) {
                cx.note(Note::Trimmed { stream, through, first_offset });
            }
            self.answer_trim(cx, asker, stream, through);
        }
    }

    fn answer_trim(
        &self,
        cx: &mut Cx<'_>,
        asker: Option<(Endpoint, RequestId)>,
        stream: StreamId,
        through: Version,
    ) {
        let Some((to, request)) = asker else { return };
        // Of a stream that this server holds nothing of, nothing is remembered either: anybody can name any
        // number of them.
        let entry = self.log.index().stream(stream);
        let through = entry.map_or(Version::ZERO, |entry| entry.trimmed_through().max(through));
        let first_offset = entry.map_or(Offset::ZERO, |entry| entry.first_offset());
        cx.send(to, self.epoch(), Trimmed { request, through, first_offset });
    }

    pub(super) fn handle_describe(&self, cx: &mut Cx<'_>, from: Endpoint, describe: Describe) {
        let count = describe.streams.len() as u64;
        if count > cx.knobs.pull_streams_max {
            let detail = format!("{count} streams; the limit is {}", cx.knobs.pull_streams_max);
            return self.refuse(cx, from, describe.request, Code::LimitExceeded, detail);
        }
        let limit = self.served_limit();
        let states = describe.streams.iter().map(|stream| self.state_of(*stream, limit));
        let described = Described { request: describe.request, streams: states.collect() };
        cx.send(from, self.epoch(), described);
    }

    /// How a stream stands for those who may see up to `limit`.
    fn state_of(&self, stream: StreamId, limit: Version) -> StreamState {
        let Some(entry) = self.log.index().stream(stream) else {
            return StreamState {
                stream,
                first_offset: Offset::ZERO,
                next_offset: Offset::ZERO,
                trimmed_through: Version::ZERO,
                last_version: Version::ZERO,
                bytes: 0,
            };
        };
        let last = entry.last_through(limit);
        let hidden: u64 = entry.after(limit).map(|block| u64::from(block.bytes)).sum();
        StreamState {
            stream,
            first_offset: entry.first_offset(),
            next_offset: last.map_or(entry.first_offset(), |block| block.end_offset()),
            trimmed_through: entry.trimmed_through(),
            last_version: last.map_or(entry.last_gone(), |block| block.version),
            bytes: entry.bytes() - hidden,
        }
    }
}
