//! The process around a client session: connections, timers, calls and their answers.

use std::collections::BTreeMap;
use std::rc::Rc;

use client::session::{CallId, Completion, Session};
use common::wire::Envelope;
use common::{Cx, Epoch, Event, Knobs, NodeId, Output, Peer, Prng, Role, Time, Timer};

use super::consumer::Consumer;
use super::writer::Writer;
use super::{FIRST_CLIENT, SharedHandle};
use crate::observe::Observation;
use crate::process::{Effect, Input, Process, Step, TimerKey};

/// The actor's own timers; the session's are below.
const WORK: Timer = Timer(1_000);
const REST: Timer = Timer(1_001);
const REDIAL: u32 = 2_000;
/// Rounds of answers and the calls that they lead to in one step, at most.
const ROUNDS_MAX: u32 = 1_000;

/// A client machine and its application.
#[derive(Debug)]
pub struct Actor {
    session: Session,
    io: Io,
    writer: Option<Writer>,
    consumer: Option<Consumer>,
}

/// What writer and consumer use of the process.
#[derive(Debug)]
pub(super) struct Io {
    pub(super) me: Peer,
    pub(super) shared: SharedHandle,
    pub(super) rng: Prng,
    knobs: Rc<Knobs>,
    next_call: u64,
    effects: Vec<Effect>,
    /// Empty between steps: the space that the session writes its outputs to.
    outputs: Vec<Output>,
    open: BTreeMap<CallId, Caller>,
    /// How many of them are the writer's, and what others were told of that.
    open_of_writer: usize,
    told_open: Option<usize>,
}

/// Whose call it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Caller {
    Writer,
    Consumer,
}

impl Io {
    pub(super) fn call(&mut self, caller: Caller) -> CallId {
        self.next_call += 1;
        let call = CallId(self.next_call);
        self.open.insert(call, caller);
        self.open_of_writer += usize::from(caller == Caller::Writer);
        call
    }

    fn close(&mut self, call: CallId) -> Option<Caller> {
        let caller = self.open.remove(&call)?;
        self.open_of_writer -= usize::from(caller == Caller::Writer);
        Some(caller)
    }

    /// Tells how many calls are open, when that is news.
    fn tell_open(&mut self) {
        if self.told_open != Some(self.open_of_writer) {
            self.told_open = Some(self.open_of_writer);
            self.shared.borrow_mut().open_calls.insert(self.me.node, self.open_of_writer);
        }
    }

    pub(super) fn observe(&mut self, observation: Observation) {
        self.effects.push(Effect::Observe(observation));
    }

    pub(super) fn broken(&mut self, what: String) {
        self.observe(Observation::Broken(what));
    }

    /// Wakes the writer (or the consumer) after a while.
    pub(super) fn wake(&mut self, caller: Caller, at: Time) {
        let timer = match caller {
            Caller::Writer => WORK,
            Caller::Consumer => REST,
        };
        self.effects.push(Effect::Arm { key: key(timer), at });
    }
}

const fn key(timer: Timer) -> TimerKey {
    TimerKey { role: Role::Client, epoch: Epoch::ZERO, timer }
}

impl Actor {
    /// A new life of a client. The first `writers` clients write; all others only consume.
    #[must_use]
    pub fn new(me: Peer, shared: &SharedHandle, writers: u64, rng: &mut Prng) -> Self {
        let is_writer = me.node.0 - FIRST_CLIENT < writers;
        let knobs = Rc::new(shared.borrow().knobs.clone());
        let io = Io {
            me,
            shared: shared.clone(),
            rng: Prng::new(rng.next()),
            knobs,
            next_call: 0,
            effects: Vec::new(),
            outputs: Vec::new(),
            open: BTreeMap::new(),
            open_of_writer: 0,
            told_open: None,
        };
        Self {
            session: Session::new(me.endpoint(Role::Client)),
            io,
            writer: is_writer.then(Writer::default),
            consumer: (!is_writer).then(Consumer::default),
        }
    }

    /// Gives the session an event, and then everything that its answers lead to.
    fn with_session(&mut self, step: &mut Step<'_>, run: impl FnOnce(&mut Self, &mut Cx<'_>)) {
        let mut out = core::mem::take(&mut self.io.outputs);
        let knobs = self.io.knobs.clone();
        let mut cx = Cx {
            now: step.now,
            wall: step.wall,
            knobs: &knobs,
            rng: step.rng,
            me: step.me.endpoint(Role::Client),
            out: &mut out,
        };
        run(self, &mut cx);
        for round in 0.. {
            assert!(round < ROUNDS_MAX, "answers that lead to calls without end");
            let answers: Vec<Completion> = self.session.drain().collect();
            if answers.is_empty() {
                break;
            }
            for answer in answers {
                self.take(&mut cx, answer);
            }
        }
        // What the application asked for comes first.
        step.out.append(&mut self.io.effects);
        for output in out.drain(..) {
            let effect = self.effect(output);
            step.out.push(effect);
        }
        self.io.outputs = out;
        self.io.tell_open();
    }

    fn take(&mut self, cx: &mut Cx<'_>, Completion { call, result }: Completion) {
        match self.io.close(call) {
            None => self.io.broken(format!("{call:?} was answered twice: {result:?}")),
            Some(Caller::Writer) => {
                let writer = self.writer.as_mut().expect("its call");
                writer.answered(cx, &mut self.session, &mut self.io, call, result);
            }
            Some(Caller::Consumer) => {
                let consumer = self.consumer.as_mut().expect("its call");
                consumer.answered(cx, &mut self.session, &mut self.io, result);
            }
        }
    }

    fn effect(&self, output: Output) -> Effect {
        match output {
            Output::Send { to, epoch, message } => {
                let from = self.session.me_at(to.node);
                Effect::Send(Box::new(Envelope { from, to, epoch, message }))
            }
            Output::Arm { timer, at } => Effect::Arm { key: key(timer), at },
            Output::Disarm(timer) => Effect::Disarm(key(timer)),
            Output::Halt(halt) => Effect::Halt(halt),
            Output::Note(note) => Effect::Note(self.io.me.endpoint(Role::Client), note),
            Output::Mark(mark) => Effect::Mark(mark),
            Output::Disk(_) | Output::Register(_) => panic!("a client has neither"),
        }
    }

    fn redial(&mut self, now: Time, node: NodeId) {
        let wait_us = self.io.rng.between(500, 20_000);
        let timer = Timer(REDIAL + u32::try_from(node.0).expect("a small number"));
        let at = now.plus(core::time::Duration::from_micros(wait_us));
        self.io.effects.push(Effect::Arm { key: key(timer), at });
    }

    fn begin(&mut self, now: Time) {
        let nodes = self.io.shared.borrow().nodes.clone();
        self.io.effects.extend(nodes.into_iter().map(Effect::Dial));
        let caller = if self.writer.is_some() { Caller::Writer } else { Caller::Consumer };
        self.io.wake(caller, now);
    }

    fn woken(&mut self, cx: &mut Cx<'_>, timer: Timer) {
        match timer {
            WORK => {
                if let Some(writer) = &mut self.writer {
                    writer.work(cx, &mut self.session, &mut self.io);
                }
            }
            REST => {
                if let Some(consumer) = &mut self.consumer {
                    consumer.work(cx, &mut self.session, &mut self.io);
                }
            }
            Timer(number) if number >= REDIAL => {
                self.io.effects.push(Effect::Dial(NodeId(u64::from(number - REDIAL))));
            }
            timer => self.session.step(cx, Event::Timer(timer)),
        }
    }
}

impl Process for Actor {
    fn step(&mut self, step: &mut Step<'_>, input: Input) {
        let now = step.now;
        self.with_session(step, |actor, cx| match input {
            Input::Boot => actor.begin(now),
            Input::Connected { node, me } => {
                actor.session.connected(cx, node, me.endpoint(Role::Client));
            }
            Input::DialFailed(node) => actor.redial(now, node),
            Input::PeerDown(peer) => {
                actor.session.step(cx, Event::PeerDown(peer));
                actor.redial(now, peer.node);
            }
            Input::Message(envelope) => {
                let Envelope { from, to, epoch, message } = *envelope;
                // What is addressed to an earlier connection is dropped.
                if to.incarnation == actor.session.me_at(from.node).incarnation {
                    actor.session.step(cx, Event::Message { from, epoch, message });
                }
            }
            Input::Timer(key) => actor.woken(cx, key.timer),
            Input::Disk(_) | Input::Register(_) => panic!("a client has neither"),
        });
    }

    fn check(&self) {
        self.session.check();
    }

    fn line(&self) -> String {
        format!(
            "client {:?}: {} open calls, serving {}, view {:?}",
            self.io.me,
            self.io.open.len(),
            self.session.is_serving(),
            self.session.view().map(|view| (view.epoch, view.proxies.len()))
        )
    }
}
