//! A writer: draws operations and tells what became of them.

use std::collections::{BTreeMap, BTreeSet};

use client::Error;
use client::View;
use client::session::{Answer, CallId, Committed, LaneId, PullFrom, PullerId, Session};
use common::{Code, Cx, Epoch, IdempotencyId, Position, StreamId, Version};

use super::actor::{Caller, Io};
use super::plan::{
    Naming, Plan, Span, Write, balance_of, balance_value, event_value, list_of, list_value,
};
use super::{Mix, Unsettled, stream_name};
use crate::observe::{Observation, Submission, TxnId};

/// Versions that an ancient read lies behind, at most.
const ANCIENT_VERSIONS: u64 = 30_000_000;
/// Versions that a read from the future lies ahead, at least: no run gets there.
const FUTURE_VERSIONS_MIN: u64 = 10_000_000_000;

/// What a call was for.
#[derive(Clone, Debug)]
enum Doing {
    Commit(TxnId),
    /// The same, as part of a lane.
    Ordered(LaneId, TxnId),
    /// A read version, and what it is for.
    ReadVersion(u64, Next),
    Follow,
    Trim(StreamId),
    Describe(u64),
    Create(usize),
    Resolve(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    Nothing,
    Transfer,
    Points,
    Ranges,
    Skew,
    List,
    Resubmit,
}

/// Where the lists are, in the stream of the accounts.
pub(super) const LIST_PREFIX: &[u8] = b"list-";
/// Transactions of a lane, at most.
const LANE_MAX: u64 = 6;

/// What a lane promises: successes ascend, and none comes behind a failure.
#[derive(Debug, Default)]
struct LaneWatch {
    open: u64,
    last: Option<Position>,
    has_failed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Writer {
    doing: BTreeMap<CallId, Doing>,
    /// Streams that this writer is finding out about.
    finding: BTreeSet<usize>,
    follower: Option<PullerId>,
    is_following: bool,
    view: View,
    /// What reads values, and waits until the view has reached its read version.
    waiting: Vec<(Next, Version)>,
    /// Lanes with open elements: how many, and the last success; none behind a failure.
    lanes: BTreeMap<LaneId, LaneWatch>,
    reads_asked: u64,
    newest_read: Version,
    has_resubmitted: bool,
}

impl Writer {
    pub(super) fn work(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        let (is_stopping, has_streams, mix) = {
            let shared = io.shared.borrow();
            (shared.is_stopping, shared.has_streams(), shared.mix.clone())
        };
        let wait = io.rng.below(2 * mix.think_us) + 1;
        io.wake(Caller::Writer, cx.now.plus(core::time::Duration::from_micros(wait)));
        if !has_streams {
            return self.find_streams(cx, session, io);
        }
        self.resubmit(cx, session, io);
        if is_stopping {
            self.waiting.clear();
            return;
        }
        if (self.doing.len() as u64) < mix.calls_max {
            let own = io.shared.borrow_mut().begin_operation(io.me.node);
            if let Some(own) = own {
                let common = core::mem::replace(&mut io.rng, own);
                self.operate(cx, session, io, &mix);
                io.rng = common;
            }
        }
    }

    fn start(&mut self, io: &mut Io, doing: Doing) -> CallId {
        let call = io.call(Caller::Writer);
        self.doing.insert(call, doing);
        call
    }

    fn find_streams(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        let missing: Vec<usize> = {
            let shared = io.shared.borrow();
            let all = shared.streams.iter().enumerate();
            all.filter(|(_, id)| id.is_none()).map(|(place, _)| place).collect()
        };
        for place in missing {
            if self.finding.insert(place) {
                let call = self.start(io, Doing::Create(place));
                session.create_stream(cx, call, &stream_name(place));
            }
        }
    }

    /// What an earlier life of this client left open is tried again under its own name.
    fn resubmit(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        if core::mem::replace(&mut self.has_resubmitted, true) {
            return;
        }
        let has_left = {
            let shared = io.shared.borrow();
            shared.unsettled.get(&io.me.node).is_some_and(|mine| !mine.is_empty())
        };
        // Which of them the log remembers shows only at a fresh read version.
        if has_left {
            self.read_then(cx, session, io, Next::Resubmit);
        }
    }

    fn resubmit_remembered(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        let left: Vec<Plan> = {
            let shared = io.shared.borrow();
            let mine = shared.unsettled.get(&io.me.node).into_iter().flat_map(BTreeMap::values);
            mine.filter(|left| left.is_remembered(&shared)).map(|left| left.plan.clone()).collect()
        };
        for plan in left {
            self.submit(cx, session, io, plan);
        }
    }

    fn operate(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io, mix: &Mix) {
        let shares = [
            mix.append,
            mix.transfer,
            mix.points,
            mix.ranges,
            mix.twice,
            mix.at_most_once,
            mix.ancient,
            mix.read_version,
            mix.describe,
            mix.trim,
            mix.lane,
            mix.future,
            mix.skew,
            mix.list,
        ];
        let mut drawn = io.rng.below(shares.iter().sum::<u64>().max(1));
        let choice = shares.iter().position(|share| match drawn.checked_sub(*share) {
            Some(rest) => {
                drawn = rest;
                false
            }
            None => true,
        });
        match choice {
            Some(1) => self.read_then(cx, session, io, Next::Transfer),
            Some(2) => self.read_then(cx, session, io, Next::Points),
            Some(3) => self.read_then(cx, session, io, Next::Ranges),
            Some(4) => {
                let mut plan = events(io, mix);
                plan.naming = Naming::Application(IdempotencyId(io.rng.bytes16()));
                self.submit(cx, session, io, plan.clone());
                self.submit(cx, session, io, plan);
            }
            Some(5) => {
                let mut plan = events(io, mix);
                plan.naming = Naming::None;
                self.submit(cx, session, io, plan);
            }
            Some(6) => {
                let version = self.newest_read.minus_saturating(io.rng.below(ANCIENT_VERSIONS));
                let plan = points(io, mix, version);
                self.submit(cx, session, io, plan);
            }
            Some(7) => self.read_then(cx, session, io, Next::Nothing),
            Some(8) => {
                let streams = user_streams(io);
                self.reads_asked += 1;
                let number = self.reads_asked;
                let epoch = known_epoch(session);
                io.observe(Observation::AskedDescription { epoch, number });
                let call = self.start(io, Doing::Describe(number));
                session.describe(cx, call, streams);
            }
            Some(9) => self.trim(cx, session, io),
            Some(10) => self.run_lane(cx, session, io, mix),
            Some(11) => {
                let ahead = io.rng.between(FUTURE_VERSIONS_MIN, 20 * FUTURE_VERSIONS_MIN);
                let plan = points(io, mix, self.newest_read.plus(ahead));
                self.submit(cx, session, io, plan);
            }
            Some(12) => self.read_then(cx, session, io, Next::Skew),
            Some(13) => self.read_then(cx, session, io, Next::List),
            _ => {
                let mut plan = events(io, mix);
                if io.rng.chance(1, 2) {
                    plan.naming = Naming::Application(IdempotencyId(io.rng.bytes16()));
                }
                self.submit(cx, session, io, plan);
            }
        }
    }

    /// A few transactions in order, pipelined; sometimes one of them reads at a version that is too old.
    fn run_lane(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io, mix: &Mix) {
        let Ok(lane) = session.open_lane() else { return };
        let count = io.rng.between(1, LANE_MAX);
        let broken_at = io.rng.below(3 * count);
        self.lanes.insert(lane, LaneWatch { open: count, ..LaneWatch::default() });
        for place in 0..count {
            let plan = if place == broken_at {
                let old = self.newest_read.minus_saturating(io.rng.below(ANCIENT_VERSIONS));
                points(io, mix, old)
            } else {
                events(io, mix)
            };
            let submission = Submission { is_in_lane: true, ..plan.submission() };
            io.observe(Observation::Submitted(Box::new(submission)));
            let call = self.start(io, Doing::Ordered(lane, plan.txn));
            session.commit_ordered(cx, call, lane, plan.transaction());
        }
        session.close_lane(lane);
    }

    /// One of a lane was answered, perhaps with an error that leaves its outcome open.
    fn watch_lane(&mut self, io: &mut Io, lane: LaneId, result: Result<Position, bool>) {
        let Some(watch) = self.lanes.get_mut(&lane) else { return };
        let in_order = match result {
            Ok(position) => !watch.has_failed && watch.last.is_none_or(|last| last < position),
            Err(_) => true,
        };
        if !in_order {
            io.broken(format!("{lane:?}: {result:?} behind {watch:?}"));
        }
        watch.has_failed |= result == Err(false);
        watch.last = result.ok().or(watch.last);
        watch.open -= 1;
        if watch.open == 0 {
            self.lanes.remove(&lane);
        }
    }

    fn submit(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io, plan: Plan) {
        io.observe(Observation::Submitted(Box::new(plan.submission())));
        let call = self.start(io, Doing::Commit(plan.txn));
        session.commit(cx, call, plan.transaction());
        if matches!(plan.naming, Naming::Application(_)) {
            let mut shared = io.shared.borrow_mut();
            let (newest, named) = (shared.newest, shared.next_txn);
            let mine = shared.unsettled.entry(io.me.node).or_default();
            mine.entry(plan.txn).or_insert(Unsettled { plan, newest, named });
        }
    }

    fn read_then(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io, next: Next) {
        self.reads_asked += 1;
        let number = self.reads_asked;
        io.observe(Observation::AskedReadVersion { number });
        let call = self.start(io, Doing::ReadVersion(number, next));
        session.read_version(cx, call);
    }

    /// Only what every consumer has read, and never the accounts: new followers read them from the start.
    fn trim(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        let streams = user_streams(io);
        let stream = *io.rng.pick(&streams[1..]);
        let through = io.shared.borrow().consumed();
        io.observe(Observation::AskedTrim { stream, through });
        let call = self.start(io, Doing::Trim(stream));
        session.trim(cx, call, stream, through);
    }

    pub(super) fn answered(
        &mut self,
        cx: &mut Cx<'_>,
        session: &mut Session,
        io: &mut Io,
        call: CallId,
        result: Result<Answer, Error>,
    ) {
        let doing = self.doing.remove(&call).expect("every call is for something");
        match (doing, result) {
            (Doing::Commit(txn), Ok(Answer::Committed(committed))) => {
                self.committed(io, txn, committed);
            }
            (Doing::Commit(txn), Err(error)) => self.not_committed(io, txn, &error),
            (Doing::Ordered(lane, txn), Ok(Answer::Committed(committed))) => {
                self.watch_lane(io, lane, Ok(committed.position));
                self.committed(io, txn, committed);
            }
            (Doing::Ordered(lane, txn), Err(error)) => {
                self.watch_lane(io, lane, Err(matches!(error, Error::Unknown(_))));
                self.not_committed(io, txn, &error);
            }
            (Doing::ReadVersion(number, next), Ok(Answer::ReadVersion(version))) => {
                io.observe(Observation::GotReadVersion { number, version });
                self.newest_read = self.newest_read.max(version);
                let mut shared = io.shared.borrow_mut();
                shared.newest = shared.newest.max(version);
                drop(shared);
                self.go_on(cx, session, io, next, version);
            }
            (Doing::Follow, Ok(Answer::Pulled(pulled))) => {
                self.is_following = false;
                if let Err(error) = self.view.follow(&pulled.batches, pulled.through) {
                    io.broken(format!("the view: {error}"));
                }
                self.transfer_all(cx, session, io);
            }
            (Doing::Follow, Err(_)) => {
                self.is_following = false;
                self.waiting.clear();
                if let Some(follower) = self.follower.take() {
                    session.close_puller(cx, follower);
                }
            }
            (Doing::Trim(stream), Ok(Answer::Trimmed(state))) => {
                let (through, first_offset) = (state.through, state.first_offset);
                let epoch = known_epoch(session);
                io.observe(Observation::GotTrim { epoch, stream, through, first_offset });
            }
            (Doing::Describe(number), Ok(Answer::Described(states))) => {
                for state in states {
                    io.observe(Observation::Described {
                        number,
                        stream: state.stream,
                        first_offset: state.first_offset,
                        next_offset: state.next_offset,
                        trimmed_through: state.trimmed_through,
                    });
                }
            }
            (Doing::Create(place), Ok(Answer::Created(id)))
            | (Doing::Resolve(place), Ok(Answer::Resolved(Some(id)))) => {
                self.finding.remove(&place);
                let known = io.shared.borrow_mut().streams[place].replace(id);
                if known.is_some_and(|known| known != id) {
                    io.broken(format!("stream {place} was {known:?} and is {id}"));
                }
            }
            (Doing::Create(place), Err(error)) if error.code() == Code::StreamExists => {
                let call = self.start(io, Doing::Resolve(place));
                session.resolve_stream(cx, call, &stream_name(place));
            }
            (Doing::Create(place) | Doing::Resolve(place), Ok(Answer::Resolved(None)) | Err(_)) => {
                self.finding.remove(&place);
            }
            (_, Err(_)) => {}
            (doing, Ok(answer)) => io.broken(format!("{doing:?} was answered with {answer:?}")),
        }
    }

    fn committed(&self, io: &mut Io, txn: TxnId, committed: Committed) {
        let Committed { position, offsets, .. } = committed;
        let known = offsets.iter().filter_map(|(stream, offset)| Some((*stream, (*offset)?)));
        io.observe(Observation::Committed { txn, position, offsets: known.collect() });
        let mut shared = io.shared.borrow_mut();
        shared.committed_count += 1;
        shared.newest = shared.newest.max(position.version);
        drop(shared);
        settle(io, txn);
    }

    fn not_committed(&self, io: &mut Io, txn: TxnId, error: &Error) {
        if matches!(error, Error::Unknown(_)) {
            return;
        }
        let mut code = error.code();
        // Settled by a fence: not committed, but nothing was read that somebody else has written.
        if code == Code::Conflict && !error.refusal().detail.starts_with("read at") {
            code = Code::TimedOut;
        }
        let expected = [
            Code::Conflict,
            Code::TooOld,
            Code::Overloaded,
            Code::DiskFull,
            Code::Recovering,
            Code::TimedOut,
            Code::WrongEpoch,
            Code::Locked,
            Code::NotHere,
            Code::FutureVersion,
            Code::LaneBroken,
            Code::TransactionTooLarge,
        ];
        if !expected.contains(&code) {
            io.broken(format!("{txn:?} was refused: {error}"));
        }
        let version = match code {
            Code::Conflict => verdict_version(&error.refusal().detail),
            _ => None,
        };
        io.observe(Observation::NotCommitted { txn, code, version });
        settle(io, txn);
    }

    fn go_on(
        &mut self,
        cx: &mut Cx<'_>,
        session: &mut Session,
        io: &mut Io,
        next: Next,
        version: Version,
    ) {
        let mix = io.shared.borrow().mix.clone();
        if io.shared.borrow().is_stopping {
            return;
        }
        match next {
            Next::Nothing => {}
            Next::Resubmit => self.resubmit_remembered(cx, session, io),
            Next::Points => {
                let plan = points(io, &mix, version);
                self.submit(cx, session, io, plan);
            }
            Next::Ranges => {
                let plan = ranges(io, &mix, version);
                self.submit(cx, session, io, plan);
            }
            Next::Skew => {
                let plan = skew(io, &mix, version);
                self.submit(cx, session, io, plan);
            }
            Next::Transfer | Next::List => {
                self.waiting.push((next, version));
                self.transfer_all(cx, session, io);
            }
        }
    }

    /// Makes the transfers whose read version the view has reached; follows the accounts for the others.
    fn transfer_all(&mut self, cx: &mut Cx<'_>, session: &mut Session, io: &mut Io) {
        let through = self.view.through();
        let (ready, rest): (Vec<_>, Vec<_>) =
            self.waiting.drain(..).partition(|(_, version)| *version <= through);
        self.waiting = rest;
        for (next, version) in ready {
            let plan = match next {
                Next::List => self.append_to_list(io, version),
                _ => self.transfer(io, version),
            };
            self.submit(cx, session, io, plan);
        }
        if self.waiting.is_empty() || self.is_following {
            return;
        }
        let accounts = io.shared.borrow().streams[0].expect("operations begin with all streams");
        let from = PullFrom::after(vec![accounts], through);
        let follower = self.follower.map_or_else(|| session.open_puller(cx, from).ok(), Some);
        let Some(follower) = follower else { return };
        self.follower = Some(follower);
        self.is_following = true;
        let call = self.start(io, Doing::Follow);
        let want = self.waiting.iter().map(|(_, version)| *version).max().unwrap_or_default();
        session.pull(cx, call, follower, want);
    }

    fn append_to_list(&self, io: &mut Io, version: Version) -> Plan {
        let (keys, accounts) = {
            let shared = io.shared.borrow();
            (shared.mix.keys, shared.streams[0].expect("operations begin with all streams"))
        };
        let key = [LIST_PREFIX, format!("{:04}", io.rng.below(keys)).as_bytes()].concat();
        let mut plan = Plan::new(io.shared.borrow_mut().name_txn());
        let value = self.view.value(accounts, &key, version).expect("the view has reached it");
        let before = value.and_then(|value| list_of(&value)).unwrap_or_default();
        plan.read_version = Some(version);
        plan.reads.push(Span::Point(key.clone()));
        plan.writes.push(Span::Point(key.clone()));
        let value = list_value(plan.txn, &before);
        plan.records.push((accounts, vec![Write::Put(key, value)]));
        plan
    }

    fn transfer(&self, io: &mut Io, version: Version) -> Plan {
        let (keys, accounts) = {
            let shared = io.shared.borrow();
            (shared.mix.keys, shared.streams[0].expect("operations begin with all streams"))
        };
        let from = io.rng.below(keys);
        let to = (from + 1 + io.rng.below(keys - 1)) % keys;
        let amount = io.rng.between(1, 100) as i64;
        let mut plan = Plan::new(io.shared.borrow_mut().name_txn());
        plan.read_version = Some(version);
        let mut writes = Vec::new();
        for (account, change) in [(from, -amount), (to, amount)] {
            let key = account_key(account);
            let value = self.view.value(accounts, &key, version);
            let value = value.expect("the view has reached the version");
            let balance = value.and_then(|value| balance_of(&value)).unwrap_or(0) + change;
            plan.reads.push(Span::Point(key.clone()));
            plan.writes.push(Span::Point(key.clone()));
            writes.push(Write::Put(key, balance_value(plan.txn, balance)));
        }
        plan.records.push((accounts, writes));
        plan
    }
}

fn settle(io: &Io, txn: TxnId) {
    let mut shared = io.shared.borrow_mut();
    if let Some(mine) = shared.unsettled.get_mut(&io.me.node) {
        mine.remove(&txn);
    }
}

fn user_streams(io: &Io) -> Vec<StreamId> {
    io.shared.borrow().streams.iter().copied().flatten().collect()
}

fn account_key(account: u64) -> Vec<u8> {
    format!("account-{account:04}").into_bytes()
}

fn conflict_key(key: u64) -> Vec<u8> {
    format!("key-{key:04}").into_bytes()
}

/// Events on one or some of the streams behind the accounts.
fn events(io: &mut Io, mix: &Mix) -> Plan {
    let mut plan = Plan::new(io.shared.borrow_mut().name_txn());
    add_events(io, mix, &mut plan);
    plan
}

fn add_events(io: &mut Io, mix: &Mix, plan: &mut Plan) {
    let mut streams = user_streams(io).split_off(1);
    streams.sort_unstable();
    let first = io.rng.below(streams.len() as u64) as usize;
    for (place, stream) in streams.into_iter().enumerate() {
        if place != first && !io.rng.chance(1, 4) {
            continue;
        }
        let count = io.rng.between(1, 3);
        let mut draw = || Write::Append(event_value(plan.txn, io.rng.below(mix.record_bytes_max)));
        plan.records.push((stream, (0..count).map(|_| draw()).collect()));
    }
}

fn points(io: &mut Io, mix: &Mix, version: Version) -> Plan {
    let mut plan = events(io, mix);
    plan.read_version = Some(version);
    for _ in 0..io.rng.between(1, 3) {
        plan.reads.push(Span::Point(conflict_key(io.rng.below(mix.keys))));
        plan.writes.push(Span::Point(conflict_key(io.rng.below(mix.keys))));
    }
    plan
}

fn ranges(io: &mut Io, mix: &Mix, version: Version) -> Plan {
    let mut plan = events(io, mix);
    plan.read_version = Some(version);
    let mut span = || {
        let (a, b) = (io.rng.below(mix.keys), io.rng.below(mix.keys));
        match io.rng.below(10) {
            0 => Span::Range(Vec::new(), vec![0xff]),
            1 => Span::Range(conflict_key(a), conflict_key(a)),
            _ => Span::Range(conflict_key(a.min(b)), conflict_key(a.max(b) + 1)),
        }
    };
    plan.reads = vec![span()];
    plan.writes = vec![span()];
    plan
}

/// Two of these that read the same and write different keys must not both commit.
fn skew(io: &mut Io, mix: &Mix, version: Version) -> Plan {
    let mut plan = events(io, mix);
    plan.read_version = Some(version);
    let a = io.rng.below(mix.keys);
    let b = (a + 1) % mix.keys;
    let written = if io.rng.chance(1, 2) { a } else { b };
    plan.reads = if io.rng.chance(1, 2) {
        vec![Span::Point(conflict_key(a)), Span::Point(conflict_key(b))]
    } else {
        vec![Span::Range(conflict_key(a.min(b)), conflict_key(a.max(b) + 1))]
    };
    plan.writes = vec![Span::Point(conflict_key(written))];
    plan
}

/// The version of the verdict, which ends the text of a conflict.
fn verdict_version(detail: &str) -> Option<Version> {
    let (_, digits) = detail.rsplit_once('v')?;
    digits.parse().ok().map(Version)
}

/// The epoch that the client knows of.
fn known_epoch(session: &Session) -> Epoch {
    session.view().map_or(Epoch::ZERO, |view| view.epoch)
}
