//! The role around the log: who may write, what may be read.
//!
//! ```text
//! proxy  --Push, Announce, Confirm-->   push     chain order, acknowledgements, known committed version
//! leader --Lock, Recruit, Serve----->   epoch    which epoch may write here
//! leader --CatchUp------------------>   catch_up an absent server becomes whole again
//! absent --Copy--------------------->   copy     what it has missed
//! client --Pull--------------------->   pull     whole versions up to the served limit
//! log    --FetchBlock, FetchedBlock->   mend     a block that a disk has lost
//! client --Trim, Describe----------->   trim
//! client --FindId------------------->   ids      what became of a transaction
//! disk   --completions-------------->   crate::log
//! timer  --------------------------->   scrub    the log is read through, slowly
//! ```
//!
//! # Epochs
//! ```text
//! opening -> locked <-----------------------. Lock of a newer epoch, or a restart
//!               | Recruit, persisted        |
//!               v                           |
//!            recruited --Serve--> confirmed-'
//! ```
//! Between `Recruit` and `Serve` the epoch may still come to nothing: its leader can die before the
//! generation is in the register, and the next one can choose a lower recovery version. So what the epoch
//! claims to be committed, its recovery version included, counts for consumers only after `Serve` (I10, I11).
//!
//! # Versions, ascending
//! ```text
//! trims <= served limit = min(known committed, durable) <= durable <= last accepted
//! ```
//! `known committed <= durable` is what honest proxies say; the minimum is taken all the same.

mod ahead;
mod catch_up;
mod copy;
mod epoch;
mod ids;
mod known;
mod mend;
mod pull;
mod push;
mod scrub;
mod status;
#[cfg(test)]
mod tests;
mod trim;

pub use mend::MendStatus;
pub use scrub::{ScrubPass, ScrubStatus};
pub use status::{LogStatus, Standing};

use common::message::{Lock, Message, Refused};
use common::{
    Code, Cx, Endpoint, Epoch, Event, NodeId, Note, Plant, Refusal, RequestId, Timer, Version,
};

use crate::log::{Log, LogEvent};
use catch_up::Follower;
use copy::Copies;
use epoch::{Generation, Takeover};
use ids::Ids;
use mend::Mends;
use pull::Pulls;
use scrub::Scrub;
use trim::Trims;

/// Tries to make spare segments again.
pub(crate) const SPARES: Timer = Timer(0);
/// A waiting pull has waited long enough.
const PULLS: Timer = Timer(1);
/// A waiting question after an id has waited long enough.
const FINDS: Timer = Timer(2);
/// Copies: asks again, or for news.
const COPIES: Timer = Timer(3);
/// Mends: an answer is late, or it is time to try again.
const MENDS: Timer = Timer(4);
/// Reading the log through goes on.
const SCRUB: Timer = Timer(5);

/// The log server: a machine that keeps the log of its node.
#[derive(Clone, Debug)]
pub struct LogServer {
    log: Log,
    /// The epoch that was recruited here in this life of the process, even if it is locked by now.
    generation: Option<Generation>,
    /// Pushes of older epochs are refused. At least what is persisted.
    locked: Epoch,
    /// A lock or a recruitment that waits for the disk.
    takeover: Option<Takeover>,
    /// A lock that came while the log was being opened, of the newest epoch: answered as soon as it is open.
    early_lock: Option<(Endpoint, Epoch, Lock)>,
    /// Catching up, while the live epoch is written without this server.
    follower: Option<Follower>,
    copies: Copies,
    mends: Mends,
    scrub: Scrub,
    pulls: Pulls,
    trims: Trims,
    ids: Ids,
}

impl LogServer {
    /// The log server of `node`, closed.
    #[must_use]
    pub fn new(node: NodeId) -> Self {
        Self {
            log: Log::new(node),
            generation: None,
            locked: Epoch::ZERO,
            takeover: None,
            early_lock: None,
            follower: None,
            copies: Copies::default(),
            mends: Mends::default(),
            scrub: Scrub::default(),
            pulls: Pulls::default(),
            trims: Trims::default(),
            ids: Ids::default(),
        }
    }

    /// Reads the directory. Until that is done, requests are refused or left to be sent again.
    pub fn open(&mut self, cx: &mut Cx<'_>) {
        self.log.open(cx);
    }

    /// Takes one event in.
    pub fn step(&mut self, cx: &mut Cx<'_>, event: Event) {
        let before = (self.served_limit(), self.log.known_committed());
        match event {
            Event::Message { from, epoch, message } => {
                self.handle_message(cx, from, epoch, message)
            }
            Event::Timer(SPARES) => self.log.handle_spares_timer(cx),
            Event::Timer(PULLS) => self.handle_pulls_timer(cx),
            Event::Timer(FINDS) => self.handle_finds_timer(cx),
            Event::Timer(COPIES) => self.handle_copies_timer(cx),
            Event::Timer(MENDS) => self.handle_mends_timer(cx),
            Event::Timer(SCRUB) => self.handle_scrub_timer(cx),
            Event::Timer(timer) => panic!("{timer:?} is no timer of a log server"),
            Event::Disk(completion) => {
                for event in self.log.handle_disk(cx, completion) {
                    self.handle_log(cx, event);
                }
            }
            Event::Register(_) => {}
            Event::PeerDown(peer) => {
                self.pulls.forget(peer);
                self.mends.forget(peer);
            }
        }
        if self.log.is_open()
            && let Some((leader, epoch, lock)) = self.early_lock.take()
        {
            self.handle_lock(cx, leader, epoch, lock);
        }
        self.take_pushes(cx);
        self.log.pump(cx);
        self.progress_takeover(cx);
        self.progress_follower(cx);
        self.progress_trims(cx);
        self.handle_limit(cx, before);
        self.progress_mends(cx);
        self.log.pump(cx);
        self.arm_timers(cx);
    }

    /// Writes out what was accepted, notes that the stop was clean, and halts with the reason `stopped`.
    /// Nothing is accepted from here on.
    pub fn shut_down(&mut self, cx: &mut Cx<'_>) {
        if let Some(generation) = &mut self.generation {
            generation.end();
        }
        self.log.shut_down(cx);
    }

    /// The state's ordering chain; stops the process where it doesn't hold.
    pub fn check(&self) {
        self.log.check();
        self.pulls.check();
        self.copies.check();
        self.mends.check(self.log.mend_count());
        self.scrub.check();
        self.ids.check();
        if let Some(generation) = &self.generation {
            generation.check(&self.log, self.locked);
        }
        assert!(
            !self.log.is_open() || self.locked >= self.log.locked(),
            "a lock is never forgotten: {} is persisted, {} holds",
            self.log.locked(),
            self.locked
        );
        assert!(
            self.log.durable() <= self.log.last(),
            "I7: {} is durable of {}",
            self.log.durable(),
            self.log.last()
        );
    }

    /// The part of the invariants that looks at every block: for now and then, not for every event.
    pub fn check_all(&self) {
        self.check();
        self.log.check_index();
    }

    /// The highest version that consumers may see (I11).
    fn served_limit(&self) -> Version {
        self.log.known_committed().min(self.log.durable())
    }

    /// The epoch that this server speaks for.
    fn epoch(&self) -> Epoch {
        self.generation.as_ref().map_or(Epoch::ZERO, |generation| generation.epoch())
    }

    fn handle_message(&mut self, cx: &mut Cx<'_>, from: Endpoint, epoch: Epoch, message: Message) {
        if !self.log.is_open() {
            return self.hear_while_closed(cx, from, epoch, &message);
        }
        match message {
            Message::Push(push) => self.handle_push(cx, from, epoch, push),
            Message::Announce(announce) => self.handle_announce(cx, epoch, announce),
            Message::Confirm(confirm) => self.handle_confirm(cx, from, epoch, confirm),
            Message::Lock(lock) => self.handle_lock(cx, from, epoch, lock),
            Message::CatchUp(catch_up) => self.handle_catch_up(cx, from, epoch, &catch_up),
            Message::Copy(copy) => self.handle_copy(cx, from, epoch, &copy),
            Message::Copied(copied) => self.handle_copied(cx, from, *copied),
            Message::FetchBlock(fetch) => self.handle_fetch(cx, from, epoch, fetch),
            Message::FetchedBlock(fetched) => self.handle_fetched(cx, from, &fetched),
            Message::Recruit(recruit) => self.handle_recruit(cx, from, *recruit),
            Message::Serve(serve) => self.handle_serve(&serve),
            Message::Pull(pull) => self.handle_pull(cx, from, pull),
            Message::Trim(trim) => self.handle_trim(cx, from, epoch, trim),
            Message::Describe(describe) => self.handle_describe(cx, from, describe),
            Message::FindId(find) => self.handle_find_id(cx, from, find),
            Message::Refused(_) => {}
            other => {
                let code = Code::NotHere;
                self.refuse(cx, from, RequestId::ZERO, code, format!("no {} here", other.name()));
            }
        }
    }

    /// Clients are told, a lock waits, and whatever else roles ask they ask again.
    fn hear_while_closed(
        &mut self,
        cx: &mut Cx<'_>,
        from: Endpoint,
        epoch: Epoch,
        message: &Message,
    ) {
        let request = match message {
            Message::Lock(lock) => {
                let is_newer = self.early_lock.is_none_or(|(_, earlier, _)| epoch >= earlier);
                if is_newer {
                    self.early_lock = Some((from, epoch, *lock));
                }
                return;
            }
            Message::Pull(pull) => pull.request,
            Message::Trim(trim) => trim.request,
            Message::Describe(describe) => describe.request,
            Message::FindId(find) => find.request,
            _ => return,
        };
        self.refuse(cx, from, request, Code::Recovering, "the log is being opened");
    }

    fn handle_log(&mut self, cx: &mut Cx<'_>, event: LogEvent) {
        match event {
            LogEvent::Opened => self.handle_opened(cx),
            LogEvent::IdBlock { version, commit_time, body } => {
                if !cx.planted(Plant::IdsLost) {
                    self.enter_ids(cx, version, commit_time, &body);
                }
            }
            LogEvent::Flushed => self.announce_durable(cx),
            LogEvent::StateChanged => self.announce_state(cx),
            LogEvent::Read { id, result } if self.copies.is_reading(id) => {
                self.handle_copy_read(cx, id, result);
            }
            LogEvent::Read { id, result } if self.scrub.is_reading(id) => {
                self.handle_scrub_read(cx, result);
            }
            LogEvent::Read { id, result } if self.mends.is_fetching(id) => {
                self.handle_fetch_read(cx, id, result);
            }
            LogEvent::Read { id, result } => self.handle_read(cx, id, result),
            LogEvent::Mend { id, outcome } => self.handle_mend(cx, id, outcome),
        }
    }

    fn handle_opened(&mut self, cx: &mut Cx<'_>) {
        assert!(self.generation.is_none(), "a log is opened once");
        // A restarted server is locked for every epoch that it has seen: what it accepted and did not flush
        // is lost, so it can't go on in that epoch's chain.
        let seen = self.log.epoch();
        let above_seen = if seen == Epoch::ZERO { seen } else { seen.plus(1) };
        self.locked = self.log.locked().max(above_seen);
        self.begin_scrub(cx);
    }

    /// What follows from a higher served limit.
    fn handle_limit(&mut self, cx: &mut Cx<'_>, before: (Version, Version)) {
        if !self.log.is_open() {
            return;
        }
        let (limit, known_committed) = (self.served_limit(), self.log.known_committed());
        if known_committed > before.1 {
            cx.note(Note::KnownCommitted { version: known_committed });
        }
        if limit > before.0 {
            self.wake_pulls(cx, limit);
            self.wake_finds(cx, limit);
            self.forget_old_ids(cx, limit);
        }
    }

    fn arm_timers(&mut self, cx: &mut Cx<'_>) {
        self.pulls.arm(cx);
        self.ids.arm(cx);
    }

    fn refuse(
        &self,
        cx: &mut Cx<'_>,
        to: Endpoint,
        request: RequestId,
        code: Code,
        detail: impl Into<String>,
    ) {
        cx.note(Note::Refused { code });
        let retry_after_ms = if code == Code::Overloaded { OVERLOADED_RETRY_MS } else { 0 };
        let refusal = Refusal::later(code, detail, retry_after_ms);
        cx.send(to, self.epoch(), Refused { request, refusal });
    }

    /// Refuses a role's message of `epoch`, and speaks for that epoch: the role that has the sender's address
    /// by now, of another epoch, must not take it for its own.
    fn refuse_role(
        &self,
        cx: &mut Cx<'_>,
        to: Endpoint,
        epoch: Epoch,
        code: Code,
        detail: impl Into<String>,
    ) {
        cx.note(Note::Refused { code });
        let refusal = Refusal::new(code, detail);
        cx.send(to, epoch, Refused { request: RequestId::ZERO, refusal });
    }
}

/// When to come again after a queue was full, ms.
const OVERLOADED_RETRY_MS: u32 = 50;
