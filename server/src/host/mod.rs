//! One node on real hardware: sockets, a log disk, a register and clocks around a `node::Node`.
//!
//! ```text
//!   quinn tasks --events--> +-------------------------------+ --submit--> disk thread (io_uring)
//!   disk thread --notify--> |  the loop: one task of one    | --ask-----> register thread
//!   register   --answers--> |  current-thread runtime       | --try_send-> quinn tasks
//!   sleep      -----------> |  inputs, then timers, outputs |
//!                           +-------------------------------+
//! ```
//!
//! The loop takes everything that waits, steps the node for each, and fires timers only then: what arrived in
//! one burst is in one batch. The outputs of a step are carried out in their order at once.

mod identity;
mod mesh;
mod nodes;
mod peers;
pub mod process;
mod register;
mod report;
mod timers;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use common::disk::DiskCompletion;
use common::quic::tls::{ClientTls, Development, ServerTls};
use common::quic::{CloseCode, Event, QuicEndpoint};
use common::{Halt, Knobs, NodeId, Note, Prng, Time, WallTime};
use logserver::driver::{Driver, IdlePoll, Options as DriverOptions};
use node::{Node, NodeEvent, NodeOutput, Surroundings};
use sequencer::leader::Topology;
use tokio::sync::{Notify, mpsc};

use self::identity::Claim;
use self::mesh::Mesh;
use self::peers::Peers;
use self::register::RegisterThread;
use self::report::Meters;
use self::timers::Timers;
use crate::definition::Definition;
use crate::register::RegisterOptions;

/// Network events that one turn takes before timers get theirs.
const EVENTS_PER_TURN: usize = 64;
/// Timers that one turn fires before events get theirs.
const TIMERS_PER_TURN: usize = 256;
/// How long a stop may take before the process ends anyway.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// How long the end waits for other nodes to take what was said to them last: that another one may lead.
const DRAIN_DEADLINE: Duration = Duration::from_millis(500);
/// How long one dial of a node takes at most. A node that starts meanwhile is not heard before the next.
const NODE_DIAL_DEADLINE: Duration = Duration::from_secs(1);

/// How to run a node.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Where everything is kept.
    pub directory: PathBuf,
    /// Where clients connect; port 0 picks one.
    pub listen: SocketAddr,
    /// Limits and intervals.
    pub knobs: Knobs,
    /// The log disk.
    pub disk: DriverOptions,
    /// A real certificate; a development one is made when there is none.
    pub tls: Option<ServerTls>,
    /// Names and addresses that a development certificate also holds.
    pub names: Vec<String>,
    /// Where the cluster's register is.
    pub register: RegisterOptions,
    /// The cluster that it is a node of; alone without one.
    pub cluster: Option<Membership>,
}

/// A node's place in a cluster. Its certificate is in [`HostOptions::tls`] or in the definition.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The cluster.
    pub definition: Definition,
    /// Which of its nodes this is.
    pub node: NodeId,
}

impl Membership {
    /// What the node shows, whom it trusts, and how it dials.
    fn tls(&self, given: Option<&ServerTls>) -> Result<(ServerTls, ClientTls)> {
        let defined = self.definition.node(self.node).and_then(|node| node.identity.clone());
        let identity = given.map(|tls| tls.identity.clone()).or(defined).with_context(|| {
            format!("cluster_node_certificate: {} has no certificate: nodes show one", self.node)
        })?;
        let ca = self.definition.ca.clone();
        let dialing =
            ClientTls { ca: ca.clone(), identity: Some(identity.clone()), server_name: None };
        let client_ca = given.and_then(|tls| tls.client_ca.clone());
        Ok((ServerTls { identity, client_ca, node_ca: Some(ca) }, dialing))
    }
}

/// The development certificate's directory of a node.
#[must_use]
pub fn development_tls(directory: &Path) -> PathBuf {
    directory.join("tls")
}

/// A node with its hardware, open but not running yet.
pub struct Host {
    node: Node,
    knobs: Knobs,
    rng: Prng,
    started: Instant,
    timers: Timers,
    peers: Peers,
    mesh: Option<Mesh>,
    /// Where clients and nodes are told to connect; the socket's address without one.
    address: Option<String>,
    endpoint: QuicEndpoint,
    events: mpsc::Receiver<Event>,
    /// Above the driver, so that it has ended when the lock on the directory is released.
    register: RegisterThread,
    driver: Driver,
    disk_wake: Arc<Notify>,
    completions: Vec<DiskCompletion>,
    outputs: Vec<NodeOutput>,
    meters: Meters,
    halt: Option<Halt>,
    idle: IdlePoll,
}

impl Host {
    /// Opens the directory, the disk, the register and the socket. Needs a running tokio runtime.
    ///
    /// # Errors
    /// What can't be opened, and why.
    pub fn open(options: &HostOptions) -> Result<Self> {
        options.knobs.check().map_err(anyhow::Error::msg)?;
        let directory = &options.directory;
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        let disk_wake = Arc::new(Notify::new());
        let wake = Arc::clone(&disk_wake);
        // The driver's lock on its directory is the lock on the whole node: it comes first.
        let driver = Driver::open(
            &directory.join("log"),
            &options.disk,
            Arc::new(move || wake.notify_one()),
        )?;
        let mut rng = Prng::new(seed());
        let fresh = rng.next();
        let cluster = options.cluster.as_ref();
        let claim = cluster.map_or(Claim::Fresh(fresh), |cluster| Claim::Defined(cluster.node));
        let peer = identity::begin_life(directory, claim)?;
        let register = RegisterThread::start(&options.register, directory)?;
        let (tls, dialing) = match (cluster, &options.tls) {
            (Some(cluster), given) => {
                let (accepting, dialing) = cluster.tls(given.as_ref())?;
                (accepting, Some(dialing))
            }
            (None, Some(tls)) => (tls.clone(), None),
            (None, None) => {
                (Development::open(&development_tls(directory), &options.names)?.server(), None)
            }
        };
        let mut quic = common::quic::Options::default();
        if cluster.is_some() {
            quic.attempt_deadline = NODE_DIAL_DEADLINE;
        }
        let (endpoint, events) =
            QuicEndpoint::server(options.listen, &tls, dialing.as_ref(), quic)?;
        let mesh = cluster.map(|cluster| Mesh::new(peer, rng.next(), cluster.definition.clone()));
        let topology = match cluster {
            None => Some(Topology::single(peer.node)),
            Some(cluster) => {
                let topology = &cluster.definition.topology;
                topology.candidates.contains(&peer.node).then(|| topology.clone())
            }
        };
        let addresses = cluster.map(|cluster| cluster.definition.addresses()).unwrap_or_default();
        let address = addresses.iter().find(|address| address.node == peer.node);
        let address = address.map(|address| address.address.clone());
        Ok(Self {
            node: Node::new(peer, topology).at(addresses),
            mesh: mesh.transpose()?,
            address,
            knobs: options.knobs.clone(),
            rng,
            started: Instant::now(),
            timers: Timers::default(),
            peers: Peers::new(peer),
            endpoint,
            events,
            driver,
            disk_wake,
            completions: Vec::new(),
            register,
            outputs: Vec::new(),
            meters: Meters::default(),
            halt: None,
            idle: IdlePoll::new(options.disk.idle_poll),
        })
    }

    /// Where clients connect: as the cluster's definition has it, or the socket's address.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> std::io::Result<String> {
        match &self.address {
            Some(address) => Ok(address.clone()),
            None => Ok(self.endpoint.local_addr()?.to_string()),
        }
    }

    /// What the log disk runs on, for people.
    #[must_use]
    pub fn disk_info(&self) -> String {
        self.driver.info().to_string()
    }

    /// Runs until the node halts. `stop` asks for an end in good order; the halt's reason is then `stopped`.
    /// `serving` is called once, when the first epoch serves.
    pub async fn run(mut self, stop: impl Future<Output = ()>, serving: impl FnOnce(&str)) -> Halt {
        let mut stop = std::pin::pin!(stop);
        let (mut stopping, mut serving) = (false, Some(serving));
        self.with_node(|node, s| node.start(s));
        loop {
            self.take_completions();
            self.take_events();
            self.fire_timers();
            if let Some(halt) = self.halt.take() {
                self.close(&halt).await;
                return halt;
            }
            if serving.is_some() && self.node.serving_epoch().is_some() {
                self.announce(serving.take());
            }
            self.dial_nodes();
            let idle_since = Instant::now();
            let has_work = self.poll_for_work(idle_since).await;
            let timer = self.timers.next_at().map(|at| self.started + Duration::from_nanos(at.0));
            let dial = self.mesh.as_ref().and_then(Mesh::next_due);
            let next = timer.into_iter().chain(dial).min();
            tokio::select! {
                biased;
                () = &mut stop, if !stopping => {
                    stopping = true;
                    self.with_node(|node, s| node.shut_down(s));
                }
                () = tokio::time::sleep(STOP_DEADLINE), if stopping => {
                    let detail = "the stop took too long".to_owned();
                    return Halt { reason: "stop_timed_out", detail };
                }
                Some(event) = self.events.recv() => self.handle_event(event),
                answer = self.register.answer() => self.step(NodeEvent::Register(answer)),
                () = self.disk_wake.notified() => {}
                () = std::future::ready(()), if has_work => {}
                () = sleep_until(next) => {}
            }
            self.idle.waited(idle_since);
        }
    }

    /// Says once that the first epoch serves, and where.
    fn announce(&self, serving: Option<impl FnOnce(&str)>) {
        if let (Some(serving), Ok(address)) = (serving, self.address()) {
            serving(&address);
        }
    }

    /// Looks for work for a moment before the loop sleeps: with few clients, being woken again and again
    /// takes as long as the flushes. Whether there is any.
    async fn poll_for_work(&self, since: Instant) -> bool {
        while self.idle.looks_on(since) {
            let is_due = self.timers.next_at().is_some_and(|at| at <= self.now());
            if is_due || self.driver.has_completions() || !self.events.is_empty() {
                return true;
            }
            // The tasks of the connections get their turn, then whoever else wants the core.
            tokio::task::yield_now().await;
            std::thread::yield_now();
        }
        false
    }

    async fn close(&self, halt: &Halt) {
        let mut drains = tokio::task::JoinSet::new();
        for connection in self.peers.nodes() {
            let (connection, reason) = (connection.clone(), halt.reason);
            drains.spawn(async move {
                connection.drain(CloseCode::SHUTDOWN, reason, DRAIN_DEADLINE).await
            });
        }
        while drains.join_next().await.is_some() {}
        self.endpoint.close(CloseCode::SHUTDOWN, halt.reason);
        self.endpoint.wait_idle(Duration::from_millis(500)).await;
    }

    fn take_completions(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        self.driver.drain(&mut completions);
        for completion in completions.drain(..) {
            self.step(NodeEvent::Disk(completion));
        }
        self.completions = completions;
        if !self.driver.is_alive() {
            let detail = "a thread of the disk driver has ended".to_owned();
            self.halt.get_or_insert(Halt { reason: "disk_driver_ended", detail });
        }
    }

    fn take_events(&mut self) {
        for _ in 0..EVENTS_PER_TURN {
            let Ok(event) = self.events.try_recv() else { return };
            self.handle_event(event);
        }
    }

    fn fire_timers(&mut self) {
        for _ in 0..TIMERS_PER_TURN {
            let now = self.now();
            let Some(key) = self.timers.take_due(now) else { return };
            self.step(NodeEvent::Timer(key));
        }
    }

    fn step(&mut self, event: NodeEvent) {
        self.with_node(|node, s| node.step(s, event));
    }

    fn with_node(&mut self, run: impl FnOnce(&mut Node, &mut Surroundings<'_>)) {
        let mut outputs = std::mem::take(&mut self.outputs);
        let mut s = Surroundings {
            now: self.now(),
            wall: wall(),
            knobs: &self.knobs,
            rng: &mut self.rng,
            out: &mut outputs,
        };
        run(&mut self.node, &mut s);
        for output in outputs.drain(..) {
            self.carry_out(output);
        }
        self.outputs = outputs;
    }

    fn carry_out(&mut self, output: NodeOutput) {
        match output {
            NodeOutput::Send(envelope) => self.peers.send(&envelope),
            NodeOutput::Arm { key, at } => self.timers.arm(key, at),
            NodeOutput::Disarm(key) => self.timers.disarm(key),
            NodeOutput::Disk(request) => {
                if let Err(error) = self.driver.submit(request) {
                    let halt = Halt { reason: "disk_driver_refused", detail: error.to_string() };
                    self.halt.get_or_insert(halt);
                }
            }
            NodeOutput::Register(request) => {
                if self.register.ask(request).is_err() {
                    let detail = "the register's thread has ended".to_owned();
                    self.halt.get_or_insert(Halt { reason: "register_ended", detail });
                }
            }
            NodeOutput::Halt(halt) => {
                self.halt.get_or_insert(halt);
            }
            NodeOutput::Note(by, note) => {
                if let Note::Warning { code, detail } = &note {
                    tracing::warn!(?by, code, "{detail}");
                }
                self.meters.count(by, &note);
            }
            NodeOutput::Mark(mark) => tracing::trace!(mark = mark.name()),
        }
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).expect("less than 584 years"))
    }
}

fn wall() -> WallTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    WallTime(u64::try_from(since.as_micros()).expect("less than 584,542 years"))
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// Randomness from the system, once: everything else is drawn from it.
fn seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let hasher = std::hash::RandomState::new().build_hasher();
    hasher.finish() ^ wall().0.rotate_left(32) ^ u64::from(std::process::id())
}
