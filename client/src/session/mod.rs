//! The session: one sync machine that is all of a client but its sockets.
//!
//! ```text
//!  call --> admit --waiting--> start --.        .-- commit    one transaction until its verdict
//!           (in flight,               |--item--+-- errand    trim, describe, catalog: several questions
//!            then a queue,            |        +-- question  one request to one role, until answered
//!            then Overloaded)         |        `-- puller    groups of streams, merged by version
//!                                     v
//!   event --> handle_* --> items become ready or are woken later --> pump: place each --> outputs
//!                                                                       `--> Completion
//! ```
//!
//! An *item* is whatever makes progress by itself. It is either waiting for an answer, or asleep until an
//! alarm, or in `ready`; `pump` places ready items as soon as there is somebody to send to.
//!
//! | message | goes to | answered by |
//! |---|---|---|
//! | `CommitRequest`, `ReadVersionRequest` | the proxy in use | `CommitReply`, `ReadVersionReply` |
//! | `Pull`, `Trim`, `Describe`, `FindId` | log servers that hold the stream | `Pulled`, `Trimmed`, `Described`, `IdFound` |
//! | `FindCluster`, `Status` | any connected node | `ClusterView`, `StatusReply` |
//! | `ChangeMember` | each connected node, until one leads | `MemberChanged` |
//!
//! Invariants kept here (numbers of the design):
//!
//! - I4: a read version is asked for after the call came; each retry asks anew.
//! - Congestion: fewer commits wait for verdicts when the proxy has too much (module `window`).
//! - I15: a commit request is settled once; `answered_below` is the lowest number still wanted.
//! - I16: a commit with an unknown outcome is fenced before anything of it is sent again (module `commit`).
//!
//! A connection is one incarnation of the client: the shell calls [`Session::connected`] with a fresh `me`
//! for each, sends with [`Session::me_at`], and drops what is addressed to an earlier one.
//!
//! Commit requests speak for the epoch that they were first sent in, so that a late copy is never taken by
//! the proxies of another; everything else speaks for no epoch.

mod alarms;
mod catalog;
mod cluster;
mod commit;
mod errand;
mod lane;
mod pull;
mod question;
#[cfg(test)]
mod tests;
mod window;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::membership::MemberChange;
use common::message::{ClusterView, FindCluster, Message, Refused, StreamState};
use common::{
    Code, Cx, Endpoint, Epoch, Event, NodeId, Offset, Peer, Plant, Position, RequestId, Role,
    StreamId, Time, Version, WallTime,
};

pub use lane::LaneId;
pub use pull::{PullFrom, PullerId};

use crate::transaction::Sealed;
use crate::{Batch, Error, Transaction};
use alarms::{Alarms, TICK};
use cluster::{Cluster, Learned, QUESTION_NUMBERS};
use commit::Commit;
use errand::Errand;
use lane::Lane;
use pull::Puller;
use question::Question;
use window::Window;

/// Calls that wait for a place in flight, at most, for each place.
const WAITING_CALLS_FACTOR: u64 = 8;
/// The time for an answer is doubled this often at most.
const PATIENCE_DOUBLINGS_MAX: u32 = 5;

/// How long an answer is waited for, ms, after so many that did not come in time: longer each time that it
/// was not enough. An answer that takes longer would never be heard with the same haste for ever.
fn patience_ms(cx: &Cx<'_>, timeouts: u32) -> u64 {
    cx.knobs.client_timeout_ms << timeouts.min(PATIENCE_DOUBLINGS_MAX)
}

/// How often one pump goes over what became ready meanwhile. What is left goes on with the next tick.
const PUMP_ROUNDS_MAX: u32 = 4;
/// Pullers of a session, at most.
const PULLERS_MAX: usize = 1024;
/// Lanes of a session, at most.
const LANES_MAX: usize = 4096;

/// The caller's number for a call; unique as long as the call is not answered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(pub u64);

/// The session's own number for whatever it is doing; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Key(u64);

/// What makes progress by itself. The order is the order of placing: questions last, since the others ask.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Item {
    /// Asking who serves.
    Find,
    Commit(Key),
    Errand(Key),
    Puller(PullerId),
    Question(Key),
}

/// Who waits for a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    /// A call of the application.
    Call(CallId),
    /// A commit that needs to know something.
    Commit(Key),
    /// An errand with several steps.
    Errand(Key),
    /// A group of streams of a puller.
    Puller(PullerId, u32),
    /// Commits that need a read version for their ids.
    Floor,
}

/// A transaction that committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its place in the order of all transactions.
    pub position: Position,
    /// When its version was handed out.
    pub commit_time: WallTime,
    /// Each stream's first offset, by stream; `None` only when the records have been trimmed before the
    /// outcome was found out.
    pub offsets: Vec<(StreamId, Option<Offset>)>,
}

impl Committed {
    /// The position as 10 sortable bytes.
    #[must_use]
    pub fn versionstamp(&self) -> [u8; 10] {
        self.position.versionstamp()
    }
}

/// What a pull brought: all of the streams in `after < version <= through`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Where the pull before ended (exclusive).
    pub after: Version,
    /// The progress mark (inclusive): nothing else of these streams is at or below it.
    pub through: Version,
    /// The versions that have records, ascending.
    pub batches: Vec<Batch>,
}

/// A stream's trim position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimState {
    /// Everything at or below is trimmed on every log server that holds the stream.
    pub through: Version,
    /// The first offset that is left somewhere, or that will come next.
    pub first_offset: Offset,
}

/// What a call was for, answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To a commit.
    Committed(Committed),
    /// Reads at this version see every commit that was acknowledged before the call.
    ReadVersion(Version),
    /// To a pull.
    Pulled(Pulled),
    /// To a trim.
    Trimmed(TrimState),
    /// To a description, in the order asked.
    Described(Vec<StreamState>),
    /// Who serves.
    Cluster(ClusterView),
    /// A node's report: one JSON object.
    Status(String),
    /// The cluster has decided about a node, for good.
    MemberChanged,
    /// The new stream's id.
    Created(StreamId),
    /// All streams, by name.
    Streams(Vec<(String, StreamId)>),
    /// The stream of a name, if there is one.
    Resolved(Option<StreamId>),
}

/// The end of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The call.
    pub call: CallId,
    /// What came of it.
    pub result: Result<Answer, Error>,
}

/// A call that waits for its turn.
#[derive(Clone, Debug)]
struct Waiting {
    call: CallId,
    submitted: Time,
    task: Task,
}

#[derive(Clone, Debug)]
enum Task {
    Commit(Box<Sealed>, Option<LaneId>),
    ReadVersion,
    Cluster,
    Status,
    ChangeMember(NodeId, MemberChange),
    Errand(Errand),
}

/// A client's session with a cluster.
#[derive(Clone, Debug)]
pub struct Session {
    me: Endpoint,
    cluster: Cluster,
    window: Window,
    waiting: VecDeque<Waiting>,
    /// Calls that have been started and are not answered, without pulls.
    in_flight: BTreeSet<CallId>,
    /// Bytes of all transactions in flight and waiting.
    bytes: u64,
    commits: BTreeMap<Key, Commit>,
    lanes: BTreeMap<LaneId, Lane>,
    /// Closed and whole.
    spare_lanes: Vec<(LaneId, Lane)>,
    errands: BTreeMap<Key, Errand>,
    questions: BTreeMap<Key, Question>,
    /// The questions by the numbers of their requests.
    asked: BTreeMap<RequestId, Key>,
    pullers: BTreeMap<PullerId, Puller>,
    catalog: catalog::Follower,
    /// The newest version that is known durable everywhere, and when that became known.
    newest: Option<(Version, Time)>,
    /// The first version that was ever known so, and the highest, of whatever epoch.
    seen: Option<(Version, Version)>,
    /// The question for a newer one.
    floor: Option<Key>,
    ready: BTreeSet<Item>,
    alarms: Alarms<Item>,
    last_key: u64,
    last_question: u64,
    done: Vec<Completion>,
}

impl Session {
    /// A session that is not connected to anybody. The node of `me` names the client; the incarnation is
    /// that of the first connection.
    #[must_use]
    pub fn new(me: Endpoint) -> Self {
        assert_eq!(me.role, Role::Client, "{me:?} is no client");
        Self {
            me,
            cluster: Cluster::default(),
            window: Window::new(),
            waiting: VecDeque::new(),
            in_flight: BTreeSet::new(),
            bytes: 0,
            commits: BTreeMap::new(),
            lanes: BTreeMap::new(),
            spare_lanes: Vec::new(),
            errands: BTreeMap::new(),
            questions: BTreeMap::new(),
            asked: BTreeMap::new(),
            pullers: BTreeMap::new(),
            catalog: catalog::Follower::default(),
            newest: None,
            seen: None,
            floor: None,
            ready: BTreeSet::new(),
            alarms: Alarms::default(),
            last_key: 0,
            last_question: QUESTION_NUMBERS,
            done: Vec::new(),
        }
    }

    /// Who this client is to a node: the sender of what goes there.
    #[must_use]
    pub fn me_at(&self, node: NodeId) -> Endpoint {
        self.cluster.me_at(node).unwrap_or(self.me)
    }

    /// The newest view of the cluster.
    #[must_use]
    pub const fn view(&self) -> Option<&ClusterView> {
        self.cluster.view()
    }

    /// Whether a commit could be sent now.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.cluster
            .view()
            .is_some_and(|view| view.proxies.iter().any(|proxy| self.cluster.reaches(*proxy)))
    }

    /// The answers since the last time, in the order in which they came.
    pub fn drain(&mut self) -> std::vec::Drain<'_, Completion> {
        self.done.drain(..)
    }

    /// How many calls have no answer yet, pulls not counted.
    #[must_use]
    pub fn open_calls(&self) -> usize {
        self.in_flight.len() + self.waiting.len()
    }

    /// Commits a transaction.
    pub fn commit(&mut self, cx: &mut Cx<'_>, call: CallId, transaction: Transaction) {
        self.submit_commit(cx, call, transaction, None);
    }

    /// Commits a transaction behind all earlier ones of its lane. After one that failed none commits.
    pub fn commit_ordered(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        lane: LaneId,
        transaction: Transaction,
    ) {
        match self.lanes.get(&lane) {
            None => self.complete(call, Err(lane::no_lane(lane))),
            Some(found) if found.is_broken() && found.is_settled() => {
                self.complete(call, Err(lane::broken(lane)));
            }
            Some(_) => self.submit_commit(cx, call, transaction, Some(lane)),
        }
    }

    fn submit_commit(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        transaction: Transaction,
        lane: Option<LaneId>,
    ) {
        match transaction.seal(cx.knobs) {
            Err(error) => self.refuse_call(cx, call, lane, error),
            Ok(sealed) => self.submit(cx, call, Task::Commit(Box::new(sealed), lane)),
        }
    }

    /// Asks for the newest version that every acknowledged commit is in (I4).
    pub fn read_version(&mut self, cx: &mut Cx<'_>, call: CallId) {
        if let (true, Some((version, _))) = (cx.planted(Plant::CachedRead), self.newest) {
            return self.complete(call, Ok(Answer::ReadVersion(version)));
        }
        self.submit(cx, call, Task::ReadVersion);
    }

    /// Everything of the stream at or below `through` may go.
    pub fn trim(&mut self, cx: &mut Cx<'_>, call: CallId, stream: StreamId, through: Version) {
        self.submit(cx, call, Task::Errand(Errand::trim(call, stream, through)));
    }

    /// How do these streams stand?
    pub fn describe(&mut self, cx: &mut Cx<'_>, call: CallId, streams: Vec<StreamId>) {
        self.submit(cx, call, Task::Errand(Errand::describe(call, streams)));
    }

    /// Who serves?
    pub fn find_cluster(&mut self, cx: &mut Cx<'_>, call: CallId) {
        self.submit(cx, call, Task::Cluster);
    }

    /// A report for people and scripts.
    pub fn status(&mut self, cx: &mut Cx<'_>, call: CallId) {
        self.submit(cx, call, Task::Status);
    }

    /// Drains, restores or removes a node; [`Code::TimedOut`] says that it may or may not be decided.
    pub fn change_member(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        node: NodeId,
        change: MemberChange,
    ) {
        self.submit(cx, call, Task::ChangeMember(node, change));
    }

    /// Creates a stream; [`Code::StreamExists`] when the name is taken.
    pub fn create_stream(&mut self, cx: &mut Cx<'_>, call: CallId, name: &str) {
        match common::catalog::check_name(name) {
            Err(refusal) => self.complete(call, Err(refusal.into())),
            Ok(()) => self.submit(cx, call, Task::Errand(Errand::create(call, name))),
        }
    }

    /// All streams, by name.
    pub fn list_streams(&mut self, cx: &mut Cx<'_>, call: CallId) {
        self.submit(cx, call, Task::Errand(Errand::list(call)));
    }

    /// The stream of a name.
    pub fn resolve_stream(&mut self, cx: &mut Cx<'_>, call: CallId, name: &str) {
        self.submit(cx, call, Task::Errand(Errand::resolve(call, name)));
    }

    fn submit(&mut self, cx: &mut Cx<'_>, call: CallId, task: Task) {
        let calls_max = cx.knobs.client_in_flight_max * WAITING_CALLS_FACTOR;
        let bytes = match &task {
            Task::Commit(sealed, _) => sealed.bytes,
            _ => 0,
        };
        let (calls, bytes_max) = (self.waiting.len() as u64, cx.knobs.proxy_bytes_max);
        if calls >= calls_max || (self.bytes > 0 && self.bytes + bytes > bytes_max) {
            let lane = if let Task::Commit(_, lane) = task { lane } else { None };
            let detail = format!(
                "{calls} calls wait, of {calls_max}; {} bytes in flight, of {bytes_max}",
                self.bytes
            );
            return self.refuse_call(cx, call, lane, Error::new(Code::Overloaded, detail));
        }
        self.bytes += bytes;
        self.waiting.push_back(Waiting { call, submitted: cx.now, task });
        self.pump(cx);
    }

    /// A call that is not even begun: of a lane, it is answered behind the earlier ones all the same.
    fn refuse_call(&mut self, cx: &mut Cx<'_>, call: CallId, lane: Option<LaneId>, error: Error) {
        match lane {
            Some(lane) => {
                self.in_flight.insert(call);
                self.refuse_in_lane(cx, lane, Owner::Call(call), error);
            }
            None => self.complete(call, Err(error)),
        }
    }

    /// The shell has a fresh connection to a node; `me` is this client's new incarnation.
    pub fn connected(&mut self, cx: &mut Cx<'_>, node: Peer, me: Endpoint) {
        let lost = self.cluster.connect(node, me);
        self.handle_lost(cx, lost);
        // Each node is asked, since only those that were asked tell of changes.
        let request = self.number_question();
        cx.send(node.endpoint(Role::Node), Epoch::ZERO, FindCluster { request });
        self.cluster.in_doubt = true;
        let wait = self.cluster.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        self.alarms.set(Item::Find, cx.now.plus(wait));
        self.reroute(cx);
        self.pump(cx);
    }

    /// Takes one event.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        match event {
            Event::Message { from, epoch, message } => {
                if self.cluster.reaches(from) {
                    self.handle_message(cx, from, epoch, message);
                }
            }
            Event::Timer(timer) => {
                assert_eq!(timer, TICK, "the session has one timer");
                self.handle_tick(cx);
            }
            Event::PeerDown(peer) => {
                let lost = self.cluster.disconnect(peer);
                self.cluster.in_doubt = true;
                self.handle_lost(cx, lost);
                self.ready.insert(Item::Find);
                self.reroute(cx);
            }
            // A client has no disk and no register.
            Event::Disk(_) | Event::Register(_) => {}
        }
        self.pump(cx);
    }

    fn handle_message(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch, message: Message) {
        match message {
            Message::CommitReply(reply) => self.handle_commit_reply(cx, from, epoch, reply),
            Message::Refused(Refused { request, refusal }) if request.0 < QUESTION_NUMBERS => {
                self.handle_commit_refused(cx, from, request, refusal);
            }
            Message::ClusterView(view) => self.handle_view(cx, *view),
            other => {
                if let Some(number) = other.answers() {
                    self.handle_answer(cx, number, other);
                }
            }
        }
    }

    fn handle_view(&mut self, cx: &mut Cx<'_>, view: ClusterView) {
        let number = view.request;
        let is_answer = number != RequestId::ZERO && self.asks(number);
        let answer = is_answer.then(|| Message::from(view.clone()));
        let recovery_version = view.recovery_version;
        match self.cluster.learn(view) {
            Learned::Nothing => {}
            Learned::Change => self.reroute(cx),
            Learned::Epoch => {
                // Older versions have left the conflict window with the jump (I5).
                if self.newest.is_some_and(|(version, _)| version <= recovery_version) {
                    self.newest = None;
                }
                let lost = self.commits_before(self.cluster.epoch());
                for (proxy, number) in lost {
                    let key = self.cluster.settle_commit(proxy, number);
                    self.handle_lost(cx, key.into_iter().collect());
                }
                self.reroute(cx);
            }
        }
        if let Some(answer) = answer {
            self.handle_answer(cx, number, answer);
        }
    }

    fn handle_tick(&mut self, cx: &mut Cx<'_>) {
        self.alarms.fired();
        while let Some(item) = self.alarms.pop(cx.now) {
            match item {
                Item::Find | Item::Puller(_) => {
                    self.ready.insert(item);
                }
                Item::Commit(key) => self.handle_commit_alarm(cx, key),
                Item::Errand(key) => self.handle_errand_alarm(cx, key),
                Item::Question(key) => self.handle_question_alarm(cx, key),
            }
        }
    }

    /// Starts calls and places items until nothing moves.
    fn pump(&mut self, cx: &mut Cx<'_>) {
        for _ in 0..PUMP_ROUNDS_MAX {
            self.admit(cx);
            let mut progress = false;
            let mut next = self.ready.first().copied();
            while let Some(item) = next {
                if self.place(cx, item) {
                    self.ready.remove(&item);
                    progress = true;
                }
                let after = (core::ops::Bound::Excluded(item), core::ops::Bound::Unbounded);
                next = self.ready.range(after).next().copied();
            }
            if !progress {
                return self.alarms.arm(cx);
            }
        }
        // What is left goes on with the next tick.
        self.alarms.set(Item::Find, cx.now);
        self.alarms.arm(cx);
    }

    fn admit(&mut self, cx: &mut Cx<'_>) {
        while (self.in_flight.len() as u64) < cx.knobs.client_in_flight_max {
            let Some(Waiting { call, submitted, task }) = self.waiting.pop_front() else { break };
            self.in_flight.insert(call);
            let wait = core::time::Duration::from_millis(cx.knobs.client_timeout_ms);
            self.start(cx, call, submitted.plus(wait), task);
        }
    }

    fn start(&mut self, cx: &mut Cx<'_>, call: CallId, deadline: Time, task: Task) {
        let owner = Owner::Call(call);
        match task {
            Task::Commit(sealed, lane) => self.start_commit(cx, owner, lane, *sealed, deadline),
            Task::ReadVersion => {
                self.ask(cx, owner, question::Ask::ReadVersion, Some(deadline));
            }
            Task::Cluster => {
                self.ask(cx, owner, question::Ask::Cluster, Some(deadline));
            }
            Task::Status => {
                self.ask(cx, owner, question::Ask::Status, Some(deadline));
            }
            Task::ChangeMember(node, change) => {
                let ask = question::Ask::ChangeMember { node, change };
                self.ask(cx, owner, ask, Some(deadline));
            }
            Task::Errand(errand) => self.start_errand(cx, errand, deadline),
        }
    }

    /// Whether the item found somebody to send to, or has nothing to do any more.
    fn place(&mut self, cx: &mut Cx<'_>, item: Item) -> bool {
        match item {
            Item::Find => self.place_find(cx),
            Item::Commit(key) => self.place_commit(cx, key),
            Item::Errand(key) => self.place_errand(cx, key),
            Item::Puller(puller) => self.place_puller(cx, puller),
            Item::Question(key) => self.place_question(cx, key),
        }
    }

    /// Asks again who serves, less often with each time, as long as that is in doubt.
    fn place_find(&mut self, cx: &mut Cx<'_>) -> bool {
        if !self.cluster.in_doubt {
            return true;
        }
        if let Some(node) = self.cluster.any_node(cx.rng) {
            let request = self.number_question();
            cx.send(node, Epoch::ZERO, FindCluster { request });
        }
        let wait = self.cluster.backoff.next(cx.knobs.client_backoff_ms_max, cx.rng);
        self.alarms.set(Item::Find, cx.now.plus(wait));
        true
    }

    /// The proxy did not do what it should.
    fn suspect(&mut self, proxy: Endpoint) {
        let asks_already = self.cluster.in_doubt;
        self.cluster.suspect(proxy);
        if !asks_already {
            self.ready.insert(Item::Find);
        }
    }

    const fn key(&mut self) -> Key {
        self.last_key += 1;
        Key(self.last_key)
    }

    const fn number_question(&mut self) -> RequestId {
        self.last_question += 1;
        RequestId(self.last_question)
    }

    fn saw(&mut self, version: Version, now: Time) {
        let (first, highest) = self.seen.unwrap_or((version, version));
        self.seen = Some((first.min(version), highest.max(version)));
        if self.newest.is_none_or(|(newest, _)| newest < version) {
            self.newest = Some((version, now));
        }
    }

    fn complete_owner(&mut self, cx: &mut Cx<'_>, owner: Owner, result: Result<Answer, Error>) {
        match owner {
            Owner::Call(call) => self.complete(call, result),
            Owner::Errand(key) => self.handle_errand_committed(cx, key, result),
            Owner::Commit(_) | Owner::Puller(..) | Owner::Floor => {
                panic!("{owner:?} waits for a message, not for a result")
            }
        }
    }

    fn complete(&mut self, call: CallId, result: Result<Answer, Error>) {
        self.in_flight.remove(&call);
        self.done.push(Completion { call, result });
    }

    /// The invariants of the state; stops the process when one does not hold.
    pub fn check(&self) {
        self.cluster.check();
        assert!(self.asked.len() <= self.questions.len(), "a number without a question");
        let held: u64 = self.commits.values().map(Commit::bytes).sum();
        assert!(held <= self.bytes, "{held} bytes of commits, {} counted", self.bytes);
        for lane in self.lanes.values() {
            lane.check();
        }
        for puller in self.pullers.values() {
            puller.check();
        }
    }
}
