//! The task that runs the session: commands and events in, frames and answers out.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use common::message::Message;
use common::quic::{CloseCode, Event as QuicEvent, QuicEndpoint};
use common::{
    Cx, Endpoint, Event, Incarnation, Knobs, NodeId, Output, Prng, Role, Time, Timer, WallTime,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, sleep_until};

use super::links::{Heard, Links};
use super::{Command, ConnectOptions, Ended, Reply};
use crate::session::{CallId, Session};

/// Commands and events that are taken in one go.
const TAKEN_MAX: usize = 256;
/// How long the end waits for frames that are on their way.
const DRAIN_DEADLINE: Duration = Duration::from_secs(1);

pub(super) struct Inputs {
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) ends: mpsc::UnboundedReceiver<Ended>,
    pub(super) events: mpsc::Receiver<QuicEvent>,
}

struct Driver {
    session: Session,
    links: Links,
    knobs: Knobs,
    rng: Prng,
    started: Instant,
    out: Vec<Output>,
    alarm: Option<(Timer, Instant)>,
    calls: BTreeMap<CallId, Reply>,
    /// Those of them that wait for news as long as it takes.
    pulls: BTreeSet<CallId>,
    last_call: u64,
    first: Option<oneshot::Sender<Result<(), String>>>,
    is_closing: bool,
    /// Whether the addresses that nodes tell are dialed.
    discovers: bool,
}

fn entropy() -> u64 {
    // The hasher's keys come from the system's random source.
    RandomState::new().build_hasher().finish()
}

pub(super) async fn run(
    endpoint: QuicEndpoint,
    mut inputs: Inputs,
    addresses: Vec<String>,
    options: ConnectOptions,
    first: oneshot::Sender<Result<(), String>>,
) {
    let node = NodeId(entropy() | 1 << 63);
    let me = Endpoint { node, incarnation: Incarnation::ZERO, role: Role::Client };
    let started = Instant::now();
    let mut driver = Driver {
        session: Session::new(me),
        links: Links::new(node, addresses, started),
        knobs: options.knobs,
        rng: Prng::new(entropy()),
        started,
        out: Vec::new(),
        alarm: None,
        calls: BTreeMap::new(),
        pulls: BTreeSet::new(),
        last_call: 0,
        first: Some(first),
        is_closing: false,
        discovers: options.discover,
    };
    driver.serve(&endpoint, &mut inputs, options.connect_timeout).await;
    inputs.commands.close();
    for connection in driver.links.connections() {
        let _ = connection.drain(CloseCode::SHUTDOWN, "the client ends", DRAIN_DEADLINE).await;
    }
    endpoint.close(CloseCode::SHUTDOWN, "the client ends");
    endpoint.wait_idle(DRAIN_DEADLINE).await;
}

impl Driver {
    async fn serve(&mut self, endpoint: &QuicEndpoint, inputs: &mut Inputs, patience: Duration) {
        let mut commands = Vec::with_capacity(TAKEN_MAX);
        let mut events = Vec::with_capacity(TAKEN_MAX);
        let given_up = sleep(patience);
        tokio::pin!(given_up);
        loop {
            let dial_at = self.links.dial(endpoint, Instant::now());
            let alarm_at = self.alarm.map(|(_, at)| at);
            let wake = [dial_at, alarm_at].into_iter().flatten().min();
            let sleeping = sleep_until(wake.unwrap_or(self.started).into());
            tokio::select! {
                biased;
                count = inputs.events.recv_many(&mut events, TAKEN_MAX) => {
                    assert!(count > 0, "the endpoint outlives its events");
                    events.drain(..).for_each(|event| self.handle_quic(event));
                }
                Some(ended) = inputs.ends.recv() => self.handle_ended(ended),
                count = inputs.commands.recv_many(&mut commands, TAKEN_MAX), if !self.is_closing => {
                    commands.drain(..).for_each(|command| self.handle_command(command));
                    self.is_closing |= count == 0;
                }
                () = &mut given_up, if self.first.is_some() => {
                    let first = self.first.take().expect("the branch's condition");
                    // Nobody waits any more when the caller has dropped its future.
                    let _ = first.send(Err(self.links.failures()));
                    return;
                }
                () = sleeping, if wake.is_some() => self.handle_wake(),
            }
            self.answer();
            if self.is_closing && self.is_idle() {
                return;
            }
        }
    }

    /// Whether nobody waits for an answer any more, but for news.
    fn is_idle(&self) -> bool {
        self.calls.iter().all(|(call, reply)| reply.is_closed() || self.pulls.contains(call))
    }

    fn drive<R>(&mut self, act: impl FnOnce(&mut Session, &mut Cx<'_>) -> R) -> R {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut cx = Cx {
            now: self.now(),
            wall: WallTime(wall.as_micros() as u64),
            knobs: &self.knobs,
            rng: &mut self.rng,
            me: self.session.me_at(NodeId::ZERO),
            out: &mut self.out,
        };
        let result = act(&mut self.session, &mut cx);
        self.carry_out();
        result
    }

    fn now(&self) -> Time {
        Time(self.started.elapsed().as_nanos() as u64)
    }

    fn carry_out(&mut self) {
        for output in self.out.drain(..) {
            match output {
                Output::Send { to, epoch, message } => self.links.send(to, epoch, message),
                Output::Arm { timer, at } => {
                    self.alarm = Some((timer, self.started + Duration::from_nanos(at.0)));
                }
                Output::Disarm(_) => self.alarm = None,
                Output::Note(_) | Output::Mark(_) => {}
                Output::Disk(_) | Output::Register(_) | Output::Halt(_) => {
                    unreachable!("a client has no disk, no register and no part in the cluster")
                }
            }
        }
    }

    fn answer(&mut self) {
        for done in self.session.drain() {
            self.pulls.remove(&done.call);
            if let Some(reply) = self.calls.remove(&done.call) {
                // Whoever has dropped its future does not want to know.
                let _ = reply.send(done.result);
            }
        }
    }

    fn handle_wake(&mut self) {
        if let Some((timer, at)) = self.alarm
            && at <= Instant::now()
        {
            self.alarm = None;
            self.drive(|session, cx| session.step(cx, Event::Timer(timer)));
        }
    }

    fn handle_quic(&mut self, event: QuicEvent) {
        let now = Instant::now();
        match event {
            QuicEvent::Dialed { token, outcome } => {
                let outcome = outcome.map_err(|error| error.to_string());
                self.links.handle_dialled(token, outcome, now, &mut self.rng);
            }
            QuicEvent::Closed { connection, reason } => {
                let reason = reason.to_string();
                let gone = self.links.handle_closed(connection, reason, now, &mut self.rng);
                if let Some(peer) = gone {
                    self.drive(|session, cx| session.step(cx, Event::PeerDown(peer)));
                }
            }
            QuicEvent::Frames(inbound) => {
                let id = inbound.connection;
                for frame in inbound.into_frames() {
                    match self.links.handle_frame(id, &frame) {
                        Heard::Nothing => {}
                        Heard::Linked(peer, me) => {
                            self.drive(|session, cx| session.connected(cx, peer, me));
                        }
                        Heard::Message(envelope) => self.handle_message(envelope),
                    }
                }
            }
            QuicEvent::Opened(_) | QuicEvent::Refused { .. } => {}
        }
    }

    fn handle_message(&mut self, envelope: common::wire::Envelope) {
        let common::wire::Envelope { from, epoch, message, .. } = envelope;
        let is_view = matches!(message, Message::ClusterView(_));
        if let Message::ClusterView(view) = &message
            && self.discovers
        {
            self.links.learn(&view.addresses, Instant::now());
        }
        self.drive(|session, cx| session.step(cx, Event::Message { from, epoch, message }));
        if is_view && let Some(first) = self.first.take() {
            // Nobody waits any more when the caller has dropped its future.
            let _ = first.send(Ok(()));
        }
    }

    fn handle_ended(&mut self, ended: Ended) {
        match ended {
            Ended::Lane(lane) => self.session.close_lane(lane),
            Ended::Puller(puller) => self.drive(|session, cx| session.close_puller(cx, puller)),
        }
    }

    fn handle_command(&mut self, command: Command) {
        self.last_call += 1;
        let call = CallId(self.last_call);
        match command {
            Command::Commit(transaction, lane, reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| match lane {
                    Some(lane) => session.commit_ordered(cx, call, lane, transaction),
                    None => session.commit(cx, call, transaction),
                });
            }
            Command::ReadVersion(reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.read_version(cx, call));
            }
            Command::Trim(stream, through, reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.trim(cx, call, stream, through));
            }
            Command::Describe(streams, reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.describe(cx, call, streams));
            }
            Command::Cluster(reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.find_cluster(cx, call));
            }
            Command::Status(reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.status(cx, call));
            }
            Command::ChangeMember(node, change, reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.change_member(cx, call, node, change));
            }
            Command::Create(name, reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.create_stream(cx, call, &name));
            }
            Command::List(reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.list_streams(cx, call));
            }
            Command::Resolve(name, reply) => {
                self.calls.insert(call, reply);
                self.drive(|session, cx| session.resolve_stream(cx, call, &name));
            }
            Command::Pull(puller, want, reply) => {
                self.calls.insert(call, reply);
                self.pulls.insert(call);
                self.drive(|session, cx| session.pull(cx, call, puller, want));
            }
            Command::OpenPuller(from, reply) => {
                let opened = self.drive(|session, cx| session.open_puller(cx, from));
                if let Err(Ok(puller)) = reply.send(opened) {
                    self.handle_ended(Ended::Puller(puller));
                }
            }
            Command::OpenLane(reply) => {
                let opened = self.session.open_lane();
                if let Err(Ok(lane)) = reply.send(opened) {
                    self.handle_ended(Ended::Lane(lane));
                }
            }
            Command::Close => self.is_closing = true,
        }
    }
}
