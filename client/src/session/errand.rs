//! Errands: calls that take several questions one after another.
//!
//! ```text
//!  trim      for each log server that holds the stream: Trim           all must have it persisted (I13)
//!  describe  for each log server that holds some of the streams: Describe
//!  catalog   ReadVersion, follow the catalog through it, then look, or define and commit
//! ```

use std::collections::{BTreeMap, BTreeSet};

use common::message::{Message, StreamState};
use common::{Backoff, Code, Cx, NodeId, StreamId, Time, Version};

use super::question::{Ask, Reply, unexpected};
use super::{Answer, CallId, Item, Key, Owner, Session, TrimState};
use crate::Error;

/// A call in several steps.
#[derive(Clone, Debug)]
pub(super) struct Errand {
    pub(super) call: CallId,
    pub(super) work: Work,
    pub(super) deadline: Time,
    pub(super) backoff: Backoff,
    /// The question that is open, or the commit.
    pub(super) is_asking: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Work {
    Trim { stream: StreamId, through: Version, done: BTreeMap<NodeId, TrimState>, at: NodeId },
    Describe { streams: Vec<StreamId>, known: BTreeMap<StreamId, StreamState> },
    Catalog(super::catalog::CatalogWork),
}

impl Errand {
    pub(super) fn new(call: CallId, work: Work) -> Self {
        let backoff = Backoff::default();
        Self { call, work, deadline: Time::ZERO, backoff, is_asking: false }
    }

    pub(super) fn trim(call: CallId, stream: StreamId, through: Version) -> Self {
        let (done, at) = (BTreeMap::new(), NodeId::ZERO);
        Self::new(call, Work::Trim { stream, through, done, at })
    }

    pub(super) fn describe(call: CallId, streams: Vec<StreamId>) -> Self {
        Self::new(call, Work::Describe { streams, known: BTreeMap::new() })
    }
}

impl Session {
    pub(super) fn start_errand(&mut self, cx: &mut Cx<'_>, errand: Errand, deadline: Time) {
        let key = self.key();
        if let Work::Describe { streams, .. } = &errand.work
            && streams.len() as u64 > cx.knobs.pull_streams_max
        {
            let detail =
                format!("{} streams; {} at once", streams.len(), cx.knobs.pull_streams_max);
            return self.complete(errand.call, Err(Error::new(Code::LimitExceeded, detail)));
        }
        self.errands.insert(key, Errand { deadline, ..errand });
        self.alarms.set(Item::Errand(key), deadline);
        self.ready.insert(Item::Errand(key));
    }

    /// Takes the next step; `false` when nobody can be asked now.
    pub(super) fn place_errand(&mut self, cx: &mut Cx<'_>, key: Key) -> bool {
        let Some(errand) = self.errands.get(&key) else { return true };
        if errand.is_asking {
            return true;
        }
        match &errand.work {
            Work::Trim { .. } => self.place_trim(cx, key),
            Work::Describe { .. } => self.place_describe(cx, key),
            Work::Catalog(_) => self.place_catalog(cx, key),
        }
    }

    fn place_trim(&mut self, cx: &mut Cx<'_>, key: Key) -> bool {
        let Some(Errand {
            work: Work::Trim { stream, through, done, at },
            deadline,
            is_asking,
            ..
        }) = self.errands.get_mut(&key)
        else {
            panic!("{key:?} is no trim");
        };
        let (holders, holder_count) =
            (self.cluster.holders(*stream), self.cluster.holder_count(*stream));
        let next = holders.iter().find(|holder| !done.contains_key(&holder.node)).copied();
        if let Some(next) = next {
            (*at, *is_asking) = (next.node, true);
            let ask = Ask::Trim { at: next, stream: *stream, through: *through };
            let deadline = Some(*deadline);
            self.ask(cx, Owner::Errand(key), ask, deadline);
            return true;
        }
        // All that can be asked have it; those that can't, must.
        if holders.is_empty() || holders.len() < holder_count {
            return false;
        }
        let through = done.values().map(|state| state.through).min();
        let first_offset = done.values().map(|state| state.first_offset).min();
        let state = TrimState {
            through: through.expect("a holder has answered"),
            first_offset: first_offset.expect("a holder has answered"),
        };
        self.finish_errand(key, Ok(Answer::Trimmed(state)));
        true
    }

    fn place_describe(&mut self, cx: &mut Cx<'_>, key: Key) -> bool {
        let Some(Errand { work: Work::Describe { streams, known }, deadline, is_asking, .. }) =
            self.errands.get_mut(&key)
        else {
            panic!("{key:?} is no description");
        };
        let missing: BTreeSet<StreamId> =
            streams.iter().copied().filter(|stream| !known.contains_key(stream)).collect();
        let Some(first) = missing.first() else {
            let states = streams.iter().map(|stream| known[stream]).collect();
            self.finish_errand(key, Ok(Answer::Described(states)));
            return true;
        };
        let Some(at) = self.cluster.holders(*first).first().copied() else { return false };
        let streams =
            missing.into_iter().filter(|s| self.cluster.holders(*s).contains(&at)).collect();
        *is_asking = true;
        let deadline = Some(*deadline);
        self.ask(cx, Owner::Errand(key), Ask::Describe { at, streams }, deadline);
        true
    }

    pub(super) fn handle_errand_told(&mut self, cx: &mut Cx<'_>, key: Key, reply: Reply) {
        let Some(errand) = self.errands.get_mut(&key) else { return };
        errand.is_asking = false;
        match (&mut errand.work, reply) {
            (_, Reply::Lost) => return self.retry_errand(cx, key),
            (Work::Trim { done, at, .. }, Reply::Message(Message::Trimmed(trimmed))) => {
                let (through, first_offset) = (trimmed.through, trimmed.first_offset);
                done.insert(*at, TrimState { through, first_offset });
            }
            (Work::Describe { known, .. }, Reply::Message(Message::Described(described))) => {
                known.extend(described.streams.iter().map(|state| (state.stream, *state)));
            }
            (Work::Catalog(work), Reply::Message(Message::ReadVersionReply(reply))) => {
                work.read_version = Some(reply.version);
            }
            (_, reply) => return self.finish_errand(key, Err(unexpected(reply))),
        }
        self.ready.insert(Item::Errand(key));
    }

    pub(super) fn retry_errand(&mut self, cx: &mut Cx<'_>, key: Key) {
        let errand = self.errands.get_mut(&key).expect("the caller has looked it up");
        let wait = errand.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        self.alarms.set(Item::Errand(key), cx.now.plus(wait).min(errand.deadline));
    }

    pub(super) fn handle_errand_alarm(&mut self, cx: &mut Cx<'_>, key: Key) {
        let Some(errand) = self.errands.get(&key) else { return };
        // A definition that is being committed is waited for: its outcome must be known.
        let is_committing = matches!(&errand.work, Work::Catalog(work) if work.is_committing);
        if errand.deadline <= cx.now && !is_committing {
            let detail = "not done within client_timeout_ms";
            return self.finish_errand(key, Err(Error::new(Code::TimedOut, detail)));
        }
        if errand.deadline > cx.now {
            self.alarms.set(Item::Errand(key), errand.deadline);
        }
        self.ready.insert(Item::Errand(key));
    }

    pub(super) fn finish_errand(&mut self, key: Key, result: Result<Answer, Error>) {
        let errand = self.errands.remove(&key).expect("an errand ends once");
        self.alarms.clear(Item::Errand(key));
        let open: Vec<Key> = self
            .questions
            .iter()
            .filter(|(_, question)| question.owner() == Owner::Errand(key))
            .map(|(question, _)| *question)
            .collect();
        open.into_iter().for_each(|question| drop(self.forget_question(question)));
        self.complete(errand.call, result);
    }
}
