//! Real clusters under load while every role is killed, stopped and cut off: nobody is told of an error, and
//! what was told can be.
//!
//! ```text
//!  transfers between accounts --.                                      .--> two consumers, alive all along
//!  appends, one stream each ----+--> n1 n2 n3 n4 n5, three keep the log |--> a third one, after the end
//!         | Told                     SIGKILL | SIGSTOP | cut            '--> Seen
//!         '------------------> history::check <------------------------------'
//! ```
//!
//! Each node is in a network namespace of its own, where the test can cut it off; without root the tests are
//! left out. `MILLRACE_FAULTS` says how many faults there are instead of the default.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "it is a test, and what happened is for people"
)]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::env;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use client::face::{Client, LiveView};
use client::{Committed, Error, Transaction};
use common::{Code, Prng, StreamId, Version};
use serde_json::Value;
#[cfg(any(feature = "postgres", feature = "etcd"))]
use tests::RegisterServer;
use tests::history::{History, Seen, Told, Verdict, check};
use tests::{Cluster, HANG, Inside, Network, Records, Roles, Site, inside};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_blocking, spawn_local};

const NODES: u64 = 5;
const PORT: u16 = 7070;
const WRITERS: u64 = 4;
const TELLERS: u64 = 3;
const ACCOUNTS: u64 = 12;
const OPENED_WITH: i64 = 100;
/// Acknowledgements that every caller has between two faults.
const ACKNOWLEDGED_MIN: u64 = 10;
/// How long a node is away, at most.
const AWAY_MS_MAX: u64 = 3000;
/// How many faults come without waiting for the cluster to be whole again: one of so many.
const HASTE: u64 = 4;
const FAULTS_VARIABLE: &str = "MILLRACE_FAULTS";

/// What is done to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Kill,
    Stop,
    Cut,
}

const FAULTS: [Fault; 3] = [Fault::Kill, Fault::Stop, Fault::Cut];
/// By the names that `status` has for who plays them.
const ROLES: [&str; 4] = ["leader", "log_servers", "proxies", "resolvers"];

/// What the callers share.
struct Town {
    told: RefCell<Vec<Told>>,
    /// Moves with every event.
    clock: Cell<u64>,
    /// Acknowledgements of each caller.
    acknowledged: RefCell<BTreeMap<String, u64>>,
    /// Nobody begins anything any more.
    is_over: Cell<bool>,
    /// Everybody has been answered.
    is_settled: Cell<bool>,
    settled: Notify,
}

impl Town {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            told: RefCell::default(),
            clock: Cell::new(0),
            acknowledged: RefCell::default(),
            is_over: Cell::new(false),
            is_settled: Cell::new(false),
            settled: Notify::new(),
        })
    }

    fn tick(&self) -> u64 {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// Commits and writes down what came of it.
    async fn commit(
        &self,
        client: &Client,
        caller: &str,
        name: String,
        reads: Vec<(String, i64)>,
        transaction: Transaction,
    ) {
        let sent = self.tick();
        let verdict = verdict(client.commit(transaction).await);
        let answered = self.tick();
        if matches!(verdict, Verdict::Committed(..)) {
            *self.acknowledged.borrow_mut().entry(caller.to_owned()).or_default() += 1;
        }
        self.told.borrow_mut().push(Told { name, sent, answered, reads, verdict });
    }

    /// A call that has nothing to commit must not fail either.
    fn note_error(&self, name: String, error: &Error) {
        let (sent, answered) = (self.tick(), self.tick());
        let (reads, verdict) = (Vec::new(), Verdict::Error(error.to_string()));
        self.told.borrow_mut().push(Told { name, sent, answered, reads, verdict });
    }

    /// Waits until every caller has had so many more acknowledgements.
    async fn more(&self, count: u64) {
        let before = self.acknowledged.borrow().clone();
        let begin = Instant::now();
        loop {
            let enough = {
                let now = self.acknowledged.borrow();
                let more = |(caller, now): (&String, &u64)| {
                    now - before.get(caller).copied().unwrap_or(0) >= count
                };
                now.len() as u64 == WRITERS + TELLERS && now.iter().all(more)
            };
            if enough {
                return;
            }
            assert!(begin.elapsed() < HANG, "{before:?}, and then {:?}", self.acknowledged);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn verdict(result: Result<Committed, Error>) -> Verdict {
    match result {
        Ok(committed) => {
            let offset = |(stream, offset): &(StreamId, Option<common::Offset>)| {
                (stream.0, offset.expect("nothing is trimmed").0)
            };
            let position = committed.position;
            let offsets = committed.offsets.iter().map(offset).collect();
            Verdict::Committed((position.version.0, position.index), offsets)
        }
        // Not committed, for a reason that is the transaction's own: it read what others have changed.
        Err(error) if matches!(error.code(), Code::Conflict | Code::TooOld) => Verdict::Refused,
        Err(error) => Verdict::Error(error.to_string()),
    }
}

async fn write(town: Rc<Town>, client: Client, stream: StreamId, caller: String) {
    for number in 0.. {
        if town.is_over.get() {
            break;
        }
        let name = format!("{caller}-{number}");
        let mut transaction = Transaction::new();
        transaction.append(stream, name.clone());
        town.commit(&client, &caller, name, Vec::new(), transaction).await;
    }
    client.close().await;
}

/// Moves money between two accounts after having looked at both.
async fn transfer(town: Rc<Town>, client: Client, bank: StreamId, caller: String, mut prng: Prng) {
    let mut view = client.live_view([bank]).await.unwrap();
    for number in 0.. {
        if town.is_over.get() {
            break;
        }
        let name = format!("{caller}-{number}");
        match prepare(&mut view, bank, &name, &mut prng).await {
            Ok((transaction, reads)) => {
                town.commit(&client, &caller, name, reads, transaction).await;
            }
            Err(error) => town.note_error(name, &error),
        }
    }
    drop(view);
    client.close().await;
}

async fn prepare(
    view: &mut LiveView,
    bank: StreamId,
    name: &str,
    prng: &mut Prng,
) -> Result<(Transaction, Vec<(String, i64)>), Error> {
    let mut reading = view.begin().await?;
    let from = prng.below(ACCOUNTS);
    let to = (from + 1 + prng.below(ACCOUNTS - 1)) % ACCOUNTS;
    let amount = i64::try_from(prng.below(30)).unwrap();
    let mut reads = Vec::new();
    for (account, change) in [(from, -amount), (to, amount)] {
        let key = format!("account-{account}");
        let value = reading.value(view.view(), bank, key.as_bytes())?.expect("it is open");
        let value = String::from_utf8(value.to_vec()).unwrap();
        let balance: i64 = value.split(' ').nth(1).unwrap().parse().unwrap();
        reading.put(bank, key.clone(), format!("{name} {}", balance + change));
        reads.push((key, balance));
    }
    view.prune(reading.read_version());
    Ok((reading.finish(), reads))
}

async fn open_accounts(town: &Town, client: &Client, bank: StreamId) {
    let mut transaction = Transaction::new();
    for account in 0..ACCOUNTS {
        transaction.put(bank, format!("account-{account}"), format!("open {OPENED_WITH}"));
    }
    let name = "open".to_owned();
    let sent = town.tick();
    let verdict = verdict(client.commit(transaction).await);
    let answered = town.tick();
    town.told.borrow_mut().push(Told { name, sent, answered, reads: Vec::new(), verdict });
}

/// A consumer that is there from the beginning and sees every fault.
async fn follow(town: Rc<Town>, client: Client, streams: Vec<StreamId>) -> Records {
    let mut pull = client.pull(streams, Version::ZERO).await.unwrap();
    let mut records = Records::default();
    let mut through = Version::ZERO;
    while !town.is_settled.get() {
        tokio::select! {
            biased;
            // A pull that is dropped loses nothing.
            () = town.settled.notified() => {}
            known = records.take(&mut pull, Version::ZERO) => through = known,
        }
    }
    let until = client.read_version().await.unwrap();
    while through < until {
        through = records.take(&mut pull, until).await;
    }
    drop(pull);
    client.close().await;
    records
}

fn seen(records: &Records) -> Vec<Seen> {
    let of = |found: &tests::Found| Seen {
        stream: found.stream.0,
        offset: found.offset.0,
        position: (found.position.version.0, found.position.index),
        key: found.key.clone(),
        value: found.value.clone(),
    };
    records.all().iter().map(of).collect()
}

/// The cluster and its network, which faults change off the thread of the clients.
#[derive(Clone)]
struct Place {
    cluster: Arc<Mutex<Cluster>>,
    network: Arc<Network>,
}

impl Place {
    async fn aside<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Cluster, &Network) -> T + Send + 'static,
    ) -> T {
        let site = self.clone();
        spawn_blocking(move || act(&mut site.cluster.lock().unwrap(), &site.network)).await.unwrap()
    }

    async fn client(&self) -> Client {
        let (addresses, options) = {
            let cluster = self.cluster.lock().unwrap();
            (cluster.addresses(), cluster.client_options())
        };
        Client::connect(addresses, options).await.unwrap()
    }

    /// Waits until all nodes serve one epoch with every log server; what one of them says.
    async fn whole(&self) -> Value {
        self.aside(|cluster, _| {
            let begin = Instant::now();
            loop {
                let statuses: Vec<Value> =
                    (1..=NODES).filter_map(|id| cluster.try_status(id)).collect();
                let is_whole = |status: &Value| {
                    status["serving"] == true
                        && status["epoch"] == statuses[0]["epoch"]
                        && status["plan"]["absent"] == serde_json::json!([])
                };
                if statuses.len() as u64 == NODES && statuses.iter().all(is_whole) {
                    return statuses[0].clone();
                }
                assert!(begin.elapsed() < HANG, "never whole again: {statuses:#?}");
                std::thread::sleep(Duration::from_millis(100));
            }
        })
        .await
    }

    /// Any node's word.
    async fn serving(&self) -> Value {
        self.aside(|cluster, _| {
            let begin = Instant::now();
            loop {
                let mut statuses = (1..=NODES).filter_map(|id| cluster.try_status(id));
                if let Some(status) = statuses.find(|status| status["serving"] == true) {
                    return status;
                }
                assert!(begin.elapsed() < HANG, "nobody serves");
            }
        })
        .await
    }

    async fn begin(&self, fault: Fault, node: u64) {
        self.aside(move |cluster, network| match fault {
            Fault::Kill => cluster.kill(node),
            Fault::Stop => cluster.freeze(node),
            Fault::Cut => network.cut(node),
        })
        .await;
    }

    async fn end(&self, fault: Fault, node: u64) {
        self.aside(move |cluster, network| match fault {
            Fault::Kill => cluster.start(node),
            Fault::Stop => cluster.thaw(node),
            Fault::Cut => network.heal(node),
        })
        .await;
    }
}

/// A node that plays the role, as `status` tells it.
fn victim(status: &Value, role: &str, prng: &mut Prng) -> u64 {
    let plan = &status["plan"][role];
    let names = plan.as_array().cloned().unwrap_or_else(|| vec![plan.clone()]);
    let place = usize::try_from(prng.below(names.len() as u64)).unwrap();
    names[place].as_str().unwrap()[1..].parse().unwrap()
}

async fn strike(site: &Place, town: &Rc<Town>, prng: &mut Prng, count: u64) {
    for number in 0..count {
        let place = |all: usize| usize::try_from(number).unwrap() % all;
        let (fault, role) = (FAULTS[place(FAULTS.len())], ROLES[place(ROLES.len())]);
        town.more(ACKNOWLEDGED_MIN).await;
        let is_hasty = number % HASTE == HASTE - 1;
        let status = if is_hasty { site.serving().await } else { site.whole().await };
        let node = victim(&status, role, prng);
        let away = Duration::from_millis(prng.between(50, AWAY_MS_MAX));
        let before = town.told.borrow().len();
        let begin = Instant::now();
        site.begin(fault, node).await;
        tokio::time::sleep(away).await;
        let meanwhile = town.told.borrow().len() - before;
        site.end(fault, node).await;
        town.more(1).await;
        println!(
            "fault {number}: {fault:?} of n{node} ({role}) in epoch {} for {away:?}: {meanwhile} answers \
             meanwhile, all callers go on after {:?}",
            status["epoch"],
            begin.elapsed()
        );
    }
}

async fn town(cluster: Cluster, network: Network, faults: u64, seed: u64) {
    let site = Place { cluster: Arc::new(Mutex::new(cluster)), network: Arc::new(network) };
    let mut prng = Prng::new(seed);
    let town = Town::new();
    let first = site.client().await;
    let bank = first.create_stream("bank").await.unwrap();
    let mut streams = vec![bank];
    for number in 0..WRITERS {
        streams.push(first.create_stream(&format!("writer/{number}")).await.unwrap());
    }
    open_accounts(&town, &first, bank).await;

    let mut callers: Vec<JoinHandle<()>> = Vec::new();
    for (number, stream) in (0..WRITERS).zip(&streams[1..]) {
        let (client, caller) = (site.client().await, format!("w{number}"));
        callers.push(spawn_local(write(Rc::clone(&town), client, *stream, caller)));
    }
    for number in 0..TELLERS {
        let (client, caller) = (site.client().await, format!("t{number}"));
        let prng = Prng::new(prng.next());
        callers.push(spawn_local(transfer(Rc::clone(&town), client, bank, caller, prng)));
    }
    let mut consumers = Vec::new();
    for _ in 0..2 {
        let client = site.client().await;
        consumers.push(spawn_local(follow(Rc::clone(&town), client, streams.clone())));
    }

    strike(&site, &town, &mut prng, faults).await;
    town.more(ACKNOWLEDGED_MIN).await;
    let status = site.whole().await;
    town.is_over.set(true);
    for caller in callers {
        caller.await.unwrap();
    }
    town.is_settled.set(true);
    town.settled.notify_waiters();
    let late = Records::of(&first, &streams).await;
    let mut all = vec![seen(&late)];
    for consumer in consumers {
        all.push(seen(&consumer.await.unwrap()));
    }
    first.close().await;
    let total = i64::try_from(ACCOUNTS).unwrap() * OPENED_WITH;
    let history = History { told: town.told.take(), consumers: all, bank: (bank.0, total) };
    let count =
        |is: fn(&Verdict) -> bool| history.told.iter().filter(|told| is(&told.verdict)).count();
    let acknowledged = count(|verdict| matches!(verdict, Verdict::Committed(..)));
    println!(
        "{faults} faults, epoch {}: {acknowledged} acknowledged, {} refused, {} errors, {} records",
        status["epoch"],
        count(|verdict| *verdict == Verdict::Refused),
        count(|verdict| matches!(verdict, Verdict::Error(_))),
        history.consumers[0].len()
    );
    let wrong = check(&history);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(acknowledged as u64 > faults * ACKNOWLEDGED_MIN, "{acknowledged} were acknowledged");
}

/// Where the register is.
enum Register {
    File,
    #[cfg(any(feature = "postgres", feature = "etcd"))]
    Server(fn() -> RegisterServer),
}

/// Runs this test in a network of its own: so many faults, with so many copies of each stream.
fn survives(test: &str, register: &Register, faults: u64, replication: u64) {
    if inside(test) == Inside::Done {
        return;
    }
    let faults = env::var(FAULTS_VARIABLE).map_or(faults, |count| count.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let network = Network::new(NODES);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    let seed = 0xfa17 + replication;
    println!("{faults} faults, {replication} copies, seed {seed}");
    local.block_on(&runtime, async {
        let reached = Reached::start(register, directory.path()).await;
        let site = site(&network, &reached);
        let (at, roles) = (directory.path().to_owned(), roles(replication));
        let started = spawn_blocking(move || Cluster::at(&at, roles, site).started());
        town(started.await.unwrap(), network, faults, seed).await;
    });
}

fn roles(replication: u64) -> Roles {
    Roles {
        nodes: NODES,
        leaders: (1..=NODES).collect(),
        proxies: vec![1, 2],
        resolver: 1,
        log_servers: vec![3, 4, 5],
        replication,
    }
}

fn site(network: &Network, reached: &Reached) -> Site {
    Site {
        addresses: (1..=NODES).map(|id| format!("{}:{PORT}", Network::address(id))).collect(),
        register: reached.url.clone(),
        enter: (1..=NODES).map(|id| network.enter(id)).collect(),
        options: reached.options.clone(),
    }
}

/// A register that the nodes reach through the network of the test.
struct Reached {
    url: String,
    options: Vec<String>,
    #[cfg(any(feature = "postgres", feature = "etcd"))]
    _server: Option<(tests::Cutter, RegisterServer)>,
}

impl Reached {
    async fn start(register: &Register, directory: &Path) -> Self {
        match register {
            Register::File => Self {
                url: format!("file://{}", directory.join("register").display()),
                options: Vec::new(),
                #[cfg(any(feature = "postgres", feature = "etcd"))]
                _server: None,
            },
            #[cfg(any(feature = "postgres", feature = "etcd"))]
            Register::Server(start) => {
                let server = start();
                let cutter = tests::Cutter::start_at(tests::HUB, server.port()).await;
                let mut options = Vec::new();
                let url = server.url_at(cutter.port()).replacen("127.0.0.1", tests::HUB, 1);
                if url.starts_with("postgres") {
                    let password = directory.join("password");
                    std::fs::write(&password, tests::POSTGRES_PASSWORD).unwrap();
                    options.push("--register-password-file".to_owned());
                    options.push(password.display().to_string());
                }
                Self { url, options, _server: Some((cutter, server)) }
            }
        }
    }
}

#[test]
fn faults_with_the_register_in_a_file() {
    survives("faults_with_the_register_in_a_file", &Register::File, 4, 2);
}

#[cfg(feature = "etcd")]
mod etcd {
    use super::*;

    const REGISTER: Register = Register::Server(RegisterServer::etcd);

    #[test]
    fn faults_with_two_copies() {
        survives("etcd::faults_with_two_copies", &REGISTER, 6, 2);
    }

    #[test]
    #[ignore = "takes minutes"]
    fn many_faults_with_two_copies() {
        survives("etcd::many_faults_with_two_copies", &REGISTER, 100, 2);
    }

    #[test]
    #[ignore = "takes minutes"]
    fn many_faults_with_three_copies() {
        survives("etcd::many_faults_with_three_copies", &REGISTER, 100, 3);
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use super::*;

    const REGISTER: Register = Register::Server(RegisterServer::postgres);

    #[test]
    fn faults_with_three_copies() {
        survives("postgres::faults_with_three_copies", &REGISTER, 6, 3);
    }

    #[test]
    #[ignore = "takes minutes"]
    fn many_faults_with_two_copies() {
        survives("postgres::many_faults_with_two_copies", &REGISTER, 100, 2);
    }

    #[test]
    #[ignore = "takes minutes"]
    fn many_faults_with_three_copies() {
        survives("postgres::many_faults_with_three_copies", &REGISTER, 100, 3);
    }
}
