//! A small world: real nodes, and a choice of what happens next instead of a clock.
//!
//! ```text
//!   letters {message, peer down, question, answer}     any of them next, lost, or twice
//!      |                                  ^
//!      v                                  |
//!   host {node, disk, timers, own time} --'--notes--> oracles, at once
//! ```
//!
//! - Letters are a set: what is sent again while it is still under way is one letter. That it comes twice is
//!   a choice.
//! - Each host has its own time. It moves only when one of its timers runs out.
//! - A crash and the next life's beginning are one step.
//! - Where disks are no part of the question, they carry out every request at once.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use common::disk::{DiskCompletion, DiskOp, DiskRequest, File};
use common::register::{
    RegisterAnswer, RegisterOp, RegisterOutcome, RegisterRequest, RegisterState, Revision,
};
use common::wire::Envelope;
use common::{Endpoint, Incarnation, Knobs, NodeId, Note, Peer, Plants, Prng, Time, WallTime};
use node::{Node, NodeEvent, NodeOutput, Surroundings, TimerKey};
use sequencer::leader::Topology;

use super::digest::{Digest, digest_of};
use super::letter::{Choice, Letter, Name, Trouble};
use crate::clock::Moment;
use crate::disk::{Crash, Disk, DiskProfile, Ticket};
use crate::oracle::{Oracles, Probe, Violation};
use crate::workload::FIRST_CLIENT;
use crate::world::Happened;

type Judged = Result<(), Violation>;

/// Where every host's time begins.
const BEGIN: Time = Time(1_000_000_000);
/// Events that one choice may cause by itself, at most.
const EVENTS_MAX: usize = 10_000;

/// What does not change while a small world is explored.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) knobs: Knobs,
    /// The leaders, each with its topology.
    pub(super) leaders: BTreeMap<NodeId, Topology>,
    /// Disk requests are carried out when that is chosen, not at once.
    pub(super) has_slow_disks: bool,
    /// How many draws of what a power cut leaves there are; 0: processes are only killed.
    pub(super) power_cuts: u64,
    /// States behind this epoch are not looked at.
    pub(super) epoch_max: u64,
    /// A broken register, to see that it is noticed: a compare-and-set does not compare.
    pub(super) is_register_blind: bool,
}

#[derive(Clone, Debug)]
struct Host {
    me: Peer,
    node: Node,
    rng: Prng,
    now: Time,
    disk: Disk,
    /// Requests that the disk may carry out next.
    tickets: Vec<Ticket>,
    timers: BTreeMap<TimerKey, Time>,
    /// The newest life of each other node that it had to do with, and whether that is thought to go on.
    met: BTreeMap<NodeId, (Incarnation, bool)>,
    digest: u128,
}

/// What the register holds.
#[derive(Clone, Debug)]
struct Shelf {
    revision: Revision,
    value: bytes::Bytes,
}

#[derive(Clone, Debug)]
struct Posted {
    letter: Rc<Letter>,
    /// When it was sent; nothing depends on it but the fair order.
    order: u64,
}

/// A state.
#[derive(Clone, Debug)]
pub(super) struct Small {
    rules: Rc<Rules>,
    hosts: BTreeMap<NodeId, Rc<Host>>,
    letters: BTreeMap<Name, Posted>,
    shelf: Shelf,
    oracles: Rc<Oracles>,
    /// 0: not known.
    oracles_digest: u128,
    trouble: Trouble,
    posted: u64,
}

struct Eyes<'a>(&'a BTreeMap<NodeId, Rc<Host>>, &'a Shelf);

impl Probe for Eyes<'_> {
    fn would_survive(&self, node: NodeId, file: File, offset: u64, bytes: u64) -> bool {
        self.0[&node].disk.would_survive(file, offset, bytes)
    }

    fn register(&self) -> RegisterState {
        RegisterState::decode(&self.1.value).expect("the register holds what a leader wrote")
    }
}

impl Small {
    pub(super) fn new(rules: Rules, resolvers: usize) -> Self {
        Self {
            rules: Rc::new(rules),
            hosts: BTreeMap::new(),
            letters: BTreeMap::new(),
            shelf: Shelf { revision: Revision(0), value: bytes::Bytes::new() },
            oracles: Rc::new(Oracles::new(resolvers)),
            oracles_digest: 0,
            trouble: Trouble::default(),
            posted: 0,
        }
    }

    /// The first life of a node.
    pub(super) fn boot(&mut self, node: NodeId) -> Judged {
        let disk = Disk::new(DiskProfile::default(), Prng::derive(1, "explored disk", node.0));
        let host = self.life(Peer { node, incarnation: Incarnation(1) }, BEGIN, disk);
        self.hosts.insert(node, Rc::new(host));
        self.step(node, None)
    }

    fn life(&self, me: Peer, now: Time, disk: Disk) -> Host {
        let index = me.node.0 << 20 | me.incarnation.0;
        Host {
            me,
            node: Node::new(me, self.rules.leaders.get(&me.node).cloned()),
            rng: Prng::derive(1, "explored", index),
            now,
            disk,
            tickets: Vec::new(),
            timers: BTreeMap::new(),
            met: BTreeMap::new(),
            digest: 0,
        }
    }

    pub(super) fn allow(&mut self, trouble: Trouble) {
        self.trouble = trouble;
    }

    pub(super) fn node(&self, node: NodeId) -> &Node {
        &self.hosts[&node].node
    }

    pub(super) fn live(&self, node: NodeId) -> Peer {
        self.hosts[&node].me
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.letters.is_empty() && self.hosts.values().all(|host| host.tickets.is_empty())
    }

    /// The newest epoch that was claimed.
    pub(super) fn epoch(&self) -> u64 {
        RegisterState::decode(&self.shelf.value).map_or(0, |state| state.epoch.0)
    }

    pub(super) fn acknowledged_count(&self) -> u64 {
        self.oracles.acknowledged_count()
    }

    /// What this state is known by.
    pub(super) fn digest(&mut self) -> u128 {
        if self.oracles_digest == 0 {
            self.oracles_digest = digest_of(&self.oracles);
        }
        let mut digest = Digest::new();
        for (node, host) in &self.hosts {
            digest.word(node.0).wide(host.digest);
        }
        digest.word(self.letters.len() as u64);
        for name in self.letters.keys() {
            digest.wide(*name);
        }
        digest.word(self.shelf.revision.0).debug(&self.shelf.value);
        digest.wide(self.oracles_digest).debug(&self.trouble).end()
    }

    /// What can happen next.
    pub(super) fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        if self.epoch() > self.rules.epoch_max {
            return choices;
        }
        let trouble = self.trouble;
        for (name, posted) in &self.letters {
            choices.push(Choice::Deliver(*name));
            let is_message = posted.letter.is_message();
            if is_message && trouble.doubles > 0 {
                choices.push(Choice::Double(*name));
            }
            if is_message && trouble.drops > 0 {
                choices.push(Choice::Drop(*name));
            }
            if posted.letter.is_open_question() && trouble.unsures > 0 {
                choices.push(Choice::Unsure(*name));
            }
        }
        for (node, host) in &self.hosts {
            choices.extend(host.tickets.iter().map(|ticket| Choice::Disk(*node, *ticket)));
            choices.extend(self.timer_choice(*node, host));
            if trouble.crashes > 0 {
                choices.push(Choice::Crash(*node, Crash::Kill, 0));
                let draws = 0..self.rules.power_cuts;
                choices.extend(draws.map(|draw| Choice::Crash(*node, Crash::PowerCut, draw)));
            }
        }
        choices
    }

    /// The earliest timer of a host. When it is not due yet that is trouble: the letters are slower than it.
    fn timer_choice(&self, node: NodeId, host: &Host) -> Option<Choice> {
        let (key, at) = host.timers.iter().min_by_key(|(_, at)| **at)?;
        let is_free = *at <= host.now || self.trouble.timers > 0;
        is_free.then_some(Choice::Fire(node, *key))
    }

    /// A line about a choice, before it is made.
    pub(super) fn describe(&self, choice: Choice) -> String {
        let letter = |name: Name| match self.letters.get(&name) {
            Some(posted) => posted.letter.to_string(),
            None => format!("no letter {name:032x}"),
        };
        match choice {
            Choice::Deliver(name) => letter(name),
            Choice::Double(name) => format!("{} (and again)", letter(name)),
            Choice::Drop(name) => format!("lost: {}", letter(name)),
            Choice::Unsure(name) => format!("nobody knows: {}", letter(name)),
            Choice::Fire(node, TimerKey { role, epoch, timer }) => {
                format!("{:?} timer {} of {role:?} {epoch}", self.live(node), timer.0)
            }
            Choice::Disk(node, ticket) => format!("{:?} disk {ticket:?}", self.live(node)),
            Choice::Crash(node, crash, draw) => {
                format!("{:?} ends: {crash:?} {draw}", self.live(node))
            }
        }
    }

    /// Lets it happen.
    pub(super) fn make(&mut self, choice: Choice) -> Judged {
        match choice {
            Choice::Deliver(name) => {
                let posted = self.letters.remove(&name).expect("a choice is of a letter");
                self.deliver(&posted.letter)
            }
            Choice::Double(name) => {
                self.trouble.doubles -= 1;
                let letter = self.letters[&name].letter.clone();
                self.deliver(&letter)
            }
            Choice::Drop(name) => {
                self.trouble.drops -= 1;
                self.letters.remove(&name);
                Ok(())
            }
            Choice::Unsure(name) => {
                self.trouble.unsures -= 1;
                self.keep_silent(name);
                Ok(())
            }
            Choice::Fire(node, key) => {
                let host = Rc::make_mut(self.hosts.get_mut(&node).expect("a choice is of a host"));
                let at = host.timers.remove(&key).expect("a choice is of an armed timer");
                self.trouble.timers -= u8::from(at > host.now);
                host.now = host.now.max(at);
                self.step(node, Some(NodeEvent::Timer(key)))
            }
            Choice::Disk(node, ticket) => match self.carry_out(node, ticket) {
                Some(completion) => self.step(node, Some(NodeEvent::Disk(completion))),
                None => Ok(()),
            },
            Choice::Crash(node, crash, draw) => {
                self.trouble.crashes -= 1;
                self.crash(node, crash, draw)
            }
        }
    }

    /// The next step of a world where nothing goes wrong: letters in the order in which they were sent, then
    /// timers. `false` when nothing is left to happen.
    pub(super) fn make_fair(&mut self) -> Result<bool, Violation> {
        let tickets = self.hosts.iter().find(|(_, host)| !host.tickets.is_empty());
        if let Some((node, host)) = tickets {
            let (node, ticket) = (*node, host.tickets[0]);
            self.make(Choice::Disk(node, ticket))?;
            return Ok(true);
        }
        let first = self.letters.iter().min_by_key(|(_, posted)| posted.order);
        if let Some((name, _)) = first {
            let name = *name;
            self.make(Choice::Deliver(name))?;
            return Ok(true);
        }
        let timers = self
            .hosts
            .iter()
            .flat_map(|(node, host)| host.timers.iter().map(|(key, at)| (*at, *node, *key)));
        let Some((at, node, key)) = timers.min() else { return Ok(false) };
        self.trouble.timers += u8::from(at > self.hosts[&node].now);
        self.make(Choice::Fire(node, key))?;
        Ok(true)
    }

    fn deliver(&mut self, letter: &Letter) -> Judged {
        match letter {
            Letter::Message { to, envelope } => self.deliver_message(*to, envelope),
            Letter::Down { to, peer } => {
                let host = self.host_mut(to.node);
                if host.met.get(&peer.node) != Some(&(peer.incarnation, true)) {
                    return Ok(());
                }
                host.met.insert(peer.node, (peer.incarnation, false));
                self.step(to.node, Some(NodeEvent::PeerDown(*peer)))
            }
            Letter::Ask { from, request, is_answered } => {
                let outcome = self.ask_register(&request.op);
                if *is_answered {
                    let answer = RegisterAnswer { id: request.id, outcome };
                    self.post(Letter::Answer { to: *from, answer });
                }
                Ok(())
            }
            Letter::Answer { to, answer } => {
                self.step(to.node, Some(NodeEvent::Register(answer.clone())))
            }
        }
    }

    /// Rules 3 and 4 of `crate::network`: a later life is met after the end of the one before, which is not
    /// heard any more.
    fn deliver_message(&mut self, to: Peer, envelope: &Envelope) -> Judged {
        let from = envelope.from.peer();
        if from.node.0 < FIRST_CLIENT {
            let host = self.host_mut(to.node);
            let met = host.met.get(&from.node).copied();
            if met.is_some_and(|(known, is_open)| {
                known > from.incarnation || (known == from.incarnation && !is_open)
            }) {
                return Ok(());
            }
            host.met.insert(from.node, (from.incarnation, true));
            if let Some((incarnation, true)) = met
                && incarnation < from.incarnation
            {
                let peer = Peer { node: from.node, incarnation };
                self.step(to.node, Some(NodeEvent::PeerDown(peer)))?;
            }
        }
        self.step(to.node, Some(NodeEvent::Message(envelope.clone())))
    }

    fn ask_register(&mut self, op: &RegisterOp) -> RegisterOutcome {
        let is_blind = self.rules.is_register_blind;
        match op {
            RegisterOp::Read => {
                RegisterOutcome::Value(self.shelf.revision, self.shelf.value.clone())
            }
            RegisterOp::Cas { expect, value } if *expect == self.shelf.revision || is_blind => {
                self.shelf.revision = Revision(self.shelf.revision.0 + 1);
                self.shelf.value = value.clone();
                RegisterOutcome::Written(self.shelf.revision)
            }
            RegisterOp::Cas { .. } => RegisterOutcome::Lost,
        }
    }

    /// The asker is told at once that nobody knows. A write may still be carried out, at any time or never.
    fn keep_silent(&mut self, name: Name) {
        let posted = self.letters.remove(&name).expect("a choice is of a letter");
        let Letter::Ask { from, request, .. } = &*posted.letter else {
            panic!("only questions have no answer")
        };
        let outcome = if posted.letter.is_write() {
            RegisterOutcome::Indeterminate("explored".to_owned())
        } else {
            RegisterOutcome::Unavailable("explored".to_owned())
        };
        let answer = RegisterAnswer { id: request.id, outcome };
        self.post(Letter::Answer { to: *from, answer });
        self.leave_write(&posted.letter);
    }

    /// A write of somebody who does not listen any more may still be carried out.
    fn leave_write(&mut self, letter: &Letter) {
        if let Letter::Ask { from, request, .. } = letter
            && letter.is_write()
        {
            let (from, request) = (*from, request.clone());
            self.post(Letter::Ask { from, request, is_answered: false });
        }
    }

    fn carry_out(&mut self, node: NodeId, ticket: Ticket) -> Option<DiskCompletion> {
        let host = self.host_mut(node);
        host.tickets.retain(|other| *other != ticket);
        let mut started = Vec::new();
        let completion = host.disk.complete(Moment::ZERO, ticket, &mut started);
        host.tickets.extend(started.into_iter().map(|(_, ticket)| ticket));
        completion
    }

    fn crash(&mut self, node: NodeId, crash: Crash, draw: u64) -> Judged {
        let (me, mut disk, now) = {
            let host = self.host_mut(node);
            (host.me, host.disk.clone(), host.now)
        };
        disk.reseed(Prng::derive(1, "explored power cut", draw));
        disk.crash(crash);
        disk.reseed(Prng::derive(1, "explored disk", node.0));
        self.judge(&Happened::Crashed(me, crash))?;
        let next = Peer { node, incarnation: Incarnation(me.incarnation.0 + 1) };
        let life = self.life(next, now, disk);
        self.hosts.insert(node, Rc::new(life));
        self.forget_life(me);
        self.step(node, None)
    }

    /// What was for a life that is over is lost; its writes to the register may still be carried out.
    fn forget_life(&mut self, over: Peer) {
        for (_, posted) in core::mem::take(&mut self.letters) {
            match &*posted.letter {
                letter if letter.receiver() == Some(over) => {}
                Letter::Ask { from, .. } if *from == over => self.leave_write(&posted.letter),
                letter => drop(self.letters.insert(digest_of(letter), posted)),
            }
        }
        let knew: Vec<Peer> = self
            .hosts
            .values()
            .filter(|host| host.met.get(&over.node) == Some(&(over.incarnation, true)))
            .map(|host| host.me)
            .collect();
        for to in knew {
            self.post(Letter::Down { to, peer: over });
        }
    }

    pub(super) fn post(&mut self, letter: Letter) {
        self.posted += 1;
        let order = self.posted;
        self.letters.entry(digest_of(&letter)).or_insert(Posted { letter: Rc::new(letter), order });
    }

    /// Steps a host; `None` begins its life. Carries out everything that it asks for.
    fn step(&mut self, node: NodeId, event: Option<NodeEvent>) -> Judged {
        let rules = self.rules.clone();
        let (mut events, mut count) = (VecDeque::from([event]), 0);
        while let Some(event) = events.pop_front() {
            count += 1;
            assert!(count <= EVENTS_MAX, "{node} is busy for ever");
            let mut out = Vec::new();
            let host = self.host_mut(node);
            let mut s = Surroundings {
                now: host.now,
                wall: WallTime(host.now.0 / 1000),
                knobs: &rules.knobs,
                rng: &mut host.rng,
                out: &mut out,
            };
            match event {
                None => host.node.start(&mut s),
                Some(event) => host.node.step(&mut s, event),
            }
            for output in out {
                self.take_output(node, output, &mut events)?;
            }
        }
        let host = self.host_mut(node);
        if rules.knobs.plants == Plants::NONE {
            host.node.check();
        }
        host.digest = host.digest_now();
        Ok(())
    }

    fn take_output(
        &mut self,
        node: NodeId,
        output: NodeOutput,
        events: &mut VecDeque<Option<NodeEvent>>,
    ) -> Judged {
        match output {
            NodeOutput::Send(envelope) => self.send(node, envelope),
            NodeOutput::Arm { key, at } => drop(self.host_mut(node).timers.insert(key, at)),
            NodeOutput::Disarm(key) => drop(self.host_mut(node).timers.remove(&key)),
            NodeOutput::Disk(request) => {
                if matches!(request.op, DiskOp::Write { file: File::Segment(_), .. }) {
                    self.judge(&Happened::Wrote(node, request.clone()))?;
                }
                self.submit(node, request, events);
            }
            NodeOutput::Register(request) => self.ask(node, request),
            NodeOutput::Halt(halt) => {
                let detail = format!("{:?}: {halt:?}", self.live(node));
                return Err(Violation { rule: "halted", detail });
            }
            NodeOutput::Note(from, note) => self.note(from, note)?,
            NodeOutput::Mark(_) => {}
        }
        Ok(())
    }

    fn ask(&mut self, node: NodeId, request: RegisterRequest) {
        let from = self.live(node);
        self.post(Letter::Ask { from, request, is_answered: true });
    }

    /// What clients are told shows in the notes.
    fn send(&mut self, from: NodeId, envelope: Envelope) {
        let to = envelope.to;
        let Some(live) = self.hosts.get(&to.node).map(|host| host.me) else { return };
        if ![Incarnation::ZERO, live.incarnation].contains(&to.incarnation) {
            return;
        }
        let host = self.host_mut(from);
        let met = host.met.entry(to.node).or_insert((live.incarnation, true));
        if met.0 < live.incarnation && !met.1 {
            *met = (live.incarnation, true);
        }
        self.post(Letter::Message { to: live, envelope });
    }

    fn submit(
        &mut self,
        node: NodeId,
        request: DiskRequest,
        events: &mut VecDeque<Option<NodeEvent>>,
    ) {
        let mut started = Vec::new();
        let host = self.host_mut(node);
        host.disk.submit(Moment::ZERO, request, &mut started);
        host.tickets.extend(started.into_iter().map(|(_, ticket)| ticket));
        if self.rules.has_slow_disks {
            return;
        }
        while let Some(ticket) = self.host_mut(node).tickets.first().copied() {
            let completion = self.carry_out(node, ticket);
            events.extend(completion.map(|completion| Some(NodeEvent::Disk(completion))));
        }
    }

    fn note(&mut self, from: Endpoint, note: Note) -> Judged {
        self.judge(&Happened::Note(from, note))
    }

    fn judge(&mut self, happened: &Happened) -> Judged {
        let eyes = Eyes(&self.hosts, &self.shelf);
        Rc::make_mut(&mut self.oracles).judge(happened, &eyes)?;
        self.oracles_digest = 0;
        Ok(())
    }

    fn host_mut(&mut self, node: NodeId) -> &mut Host {
        Rc::make_mut(self.hosts.get_mut(&node).unwrap_or_else(|| panic!("no host {node}")))
    }
}

impl Host {
    fn digest_now(&self) -> u128 {
        let Self { me, node, rng, now, disk, tickets, timers, met, digest: _ } = self;
        let mut digest = Digest::new();
        digest.debug(&(me, rng, now, tickets, timers, met)).debug(node);
        disk.fingerprint(&mut |word| {
            digest.word(word);
        });
        digest.end()
    }
}
