//! SIGKILL under load, twenty times over: what was acknowledged is there once, at its place, and nothing else
//! is.
//!
//! ```text
//! writers, alive over all rounds          node                     consumers
//!   plain x3    8 in flight      --.                          .--> live, alive over all rounds
//!   lane        16 in flight       |--> serve  SIGKILL, again |
//!   twins       one id, 2 clients  |    serve  SIGKILL, ...   |
//!   at most once                   |    ...                   |
//!   counter x2  read, add, commit -'                          '--> late, from the beginning, after the end
//!        `--> Ledger: what each transaction was told
//! ```
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "it is a test, and times are for people"
)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use client::face::{Client, CommitFuture};
use client::{Committed, Error, Transaction};
use common::{Code, IdempotencyId, Prng, StreamId, Version};
use tests::{Node, Records, SMALL_FILES, millrace, run};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, spawn_blocking, spawn_local};

const ROUNDS: u64 = 20;
/// A round's kill comes only after so many acknowledgements, so that there is something to lose.
const ACKNOWLEDGED_MIN: u64 = 400;
const KILL_AFTER_MS_MAX: u64 = 150;
const PLAIN_WRITERS: u64 = 3;
const COUNTERS: u64 = 2;
const COUNTER_KEY: &str = "sum";

/// What a transaction was told.
#[derive(Clone, Debug)]
enum Told {
    Committed(Committed),
    /// It has not committed and never will.
    No(Code),
    /// Perhaps: only without an idempotency id.
    Unknown,
}

/// What every transaction was told, by its name, which is also the value of its records.
#[derive(Default)]
struct Ledger {
    told: RefCell<BTreeMap<String, Vec<Told>>>,
    acknowledged: Cell<u64>,
    is_over: Cell<bool>,
    /// Every transaction has its verdict.
    settled: Notify,
}

impl Ledger {
    /// Notes a verdict; whether it was yes.
    fn note(&self, name: &str, verdict: Result<Committed, Error>) -> bool {
        let told = match verdict {
            Ok(committed) => Told::Committed(committed),
            Err(Error::Unknown(_)) => Told::Unknown,
            Err(error) => Told::No(error.code()),
        };
        let is_yes = matches!(told, Told::Committed(_));
        self.acknowledged.set(self.acknowledged.get() + u64::from(is_yes));
        self.told.borrow_mut().entry(name.to_owned()).or_default().push(told);
        is_yes
    }
}

/// What the writers share.
#[derive(Clone)]
struct Load {
    ledger: Rc<Ledger>,
    /// The writers' own streams, one each.
    streams: Vec<StreamId>,
    /// Every transaction leaves a record here.
    shared: StreamId,
}

impl Load {
    /// A transaction that leaves its name in two streams.
    fn transaction(&self, stream: StreamId, name: &str) -> Transaction {
        let mut transaction = Transaction::new();
        transaction.append(stream, name.to_owned()).append(self.shared, name.to_owned());
        transaction
    }

    fn is_over(&self) -> bool {
        self.ledger.is_over.get()
    }

    async fn plain(self, client: Client, stream: StreamId, at_most_once: bool) {
        let mut sent: VecDeque<(String, CommitFuture)> = VecDeque::new();
        for number in 0.. {
            if self.is_over() {
                break;
            }
            let name = format!("{stream} plain {number} {}", "x".repeat(number % 700));
            let mut transaction = self.transaction(stream, &name);
            if at_most_once {
                transaction.at_most_once();
            }
            sent.push_back((name, client.submit(transaction).await));
            if sent.len() >= 8 {
                let (name, verdict) = sent.pop_front().unwrap();
                self.ledger.note(&name, verdict.await);
            }
        }
        for (name, verdict) in sent {
            self.ledger.note(&name, verdict.await);
        }
    }

    /// One lane after the other; each is used until something of it fails.
    async fn lanes(self, client: Client, stream: StreamId) {
        for lane_number in 0.. {
            let mut lane = client.ordered_lane().await.unwrap();
            let mut sent: VecDeque<(String, CommitFuture)> = VecDeque::new();
            let mut is_whole = true;
            for number in 0.. {
                if self.is_over() || !is_whole {
                    break;
                }
                let name = format!("{stream} lane {lane_number} {number}");
                sent.push_back((name.clone(), lane.submit(self.transaction(stream, &name)).await));
                if sent.len() >= 16 {
                    let (name, verdict) = sent.pop_front().unwrap();
                    is_whole = self.ledger.note(&name, verdict.await);
                }
            }
            for (name, verdict) in sent {
                let is_yes = self.ledger.note(&name, verdict.await);
                assert!(is_whole || !is_yes, "{name} committed after one of its lane had failed");
                is_whole &= is_yes;
            }
            if self.is_over() {
                return;
            }
        }
    }

    /// Two clients commit the same transaction under the same id.
    async fn twins(self, clients: [Client; 2], stream: StreamId, mut prng: Prng) {
        for number in 0.. {
            if self.is_over() {
                return;
            }
            let name = format!("{stream} twins {number}");
            let mut transaction = self.transaction(stream, &name);
            transaction.idempotency_id(IdempotencyId(prng.bytes16()));
            let first = clients[0].submit(transaction.clone()).await;
            let second = clients[1].submit(transaction).await;
            self.ledger.note(&name, first.await);
            self.ledger.note(&name, second.await);
        }
    }

    /// Adds 1 to a counter, if nobody else has meanwhile.
    async fn counter(self, client: Client, stream: StreamId, writer: u64) {
        let mut view = client.live_view([stream]).await.unwrap();
        for number in 0.. {
            if self.is_over() {
                return;
            }
            let Ok(mut transaction) = view.begin().await else { continue };
            view.prune(transaction.read_version());
            let value = transaction.value(view.view(), stream, COUNTER_KEY.as_bytes()).unwrap();
            let sum: u64 = value.map_or(0, |value| counted(std::str::from_utf8(&value).unwrap()));
            let name = format!("{} by {writer} in {number}", sum + 1);
            transaction.put(stream, COUNTER_KEY, name.clone());
            transaction.transaction().append(self.shared, name.clone());
            self.ledger.note(&name, client.commit(transaction.finish()).await);
        }
    }
}

fn counted(value: &str) -> u64 {
    value.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn twenty_kills_under_load_lose_nothing_and_double_nothing() {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(&directory.path().join("node"), SMALL_FILES);
    let (node, load, live, streams) = run(rounds(node, Prng::new(seed)));
    let directory = node.directory().to_owned();
    let late = run(async {
        let client = node.client().await;
        let late = Records::of(&client, &streams).await;
        client.close().await;
        late
    });
    node.stop();

    check_ledger(&load, &late);
    late.check_offsets();
    check_lane(&load, &late);
    check_counter(&load, &late);
    assert_eq!(live.all().len(), late.all().len(), "both consumers see as much");
    assert!(live == late, "both consumers see the same");
    check_epochs(&directory);
}

/// The rounds; gives back what the writers were told and what the live consumer saw.
async fn rounds(mut node: Node, mut prng: Prng) -> (Node, Load, Records, Vec<StreamId>) {
    let client = node.client().await;
    let mut streams = Vec::new();
    for number in 0..PLAIN_WRITERS + 4 {
        streams.push(client.create_stream(&format!("own/{number}")).await.unwrap());
    }
    let shared = client.create_stream("shared").await.unwrap();
    let load = Load { ledger: Rc::new(Ledger::default()), streams: streams.clone(), shared };
    streams.push(shared);
    let writers = start_writers(&load, &node, &mut prng).await;
    let live = spawn_local(follow(node.client().await, streams.clone(), Rc::clone(&load.ledger)));

    for round in 1..=ROUNDS {
        let target = load.ledger.acknowledged.get() + ACKNOWLEDGED_MIN;
        while load.ledger.acknowledged.get() < target {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_micros(prng.below(KILL_AFTER_MS_MAX * 1000))).await;
        let (served, spawned);
        (node, served, spawned) = spawn_blocking(move || {
            node.kill();
            let spawned = Instant::now();
            let served = node.start_again();
            (node, served, spawned)
        })
        .await
        .unwrap();
        let probe = node.client().await;
        let name = format!("probe {round}");
        let verdict = probe.commit(load.transaction(load.streams[0], &name)).await;
        assert!(load.ledger.note(&name, verdict), "a node that serves commits");
        println!(
            "round {round}: serves after {} ms, first acknowledgement after {} ms, {} so far",
            served.as_millis(),
            spawned.elapsed().as_millis(),
            load.ledger.acknowledged.get()
        );
        probe.close().await;
    }
    load.ledger.is_over.set(true);
    for writer in writers {
        writer.await.unwrap();
    }
    load.ledger.settled.notify_one();
    let live = live.await.unwrap();
    client.close().await;
    (node, load, live, streams)
}

async fn start_writers(load: &Load, node: &Node, prng: &mut Prng) -> Vec<JoinHandle<()>> {
    let mut streams = load.streams.iter().copied();
    let mut writers = Vec::new();
    for _ in 0..PLAIN_WRITERS {
        let stream = streams.next().unwrap();
        writers.push(spawn_local(load.clone().plain(node.client().await, stream, false)));
    }
    let stream = streams.next().unwrap();
    writers.push(spawn_local(load.clone().plain(node.client().await, stream, true)));
    let stream = streams.next().unwrap();
    writers.push(spawn_local(load.clone().lanes(node.client().await, stream)));
    let clients = [node.client().await, node.client().await];
    let ids = Prng::new(prng.next());
    writers.push(spawn_local(load.clone().twins(clients, streams.next().unwrap(), ids)));
    let stream = streams.next().unwrap();
    for writer in 0..COUNTERS {
        writers.push(spawn_local(load.clone().counter(node.client().await, stream, writer)));
    }
    writers
}

/// A consumer that is there from the beginning and sees every kill.
async fn follow(client: Client, streams: Vec<StreamId>, ledger: Rc<Ledger>) -> Records {
    let mut pull = client.pull(streams, Version::ZERO).await.unwrap();
    let mut records = Records::default();
    let mut through = Version::ZERO;
    loop {
        tokio::select! {
            biased;
            // A pull that is dropped loses nothing.
            () = ledger.settled.notified() => break,
            known = records.take(&mut pull, Version::ZERO) => through = known,
        }
    }
    let until = client.read_version().await.unwrap();
    while through < until {
        through = records.take(&mut pull, until).await;
    }
    records
}

fn check_ledger(load: &Load, records: &Records) {
    let places = records.by_value();
    let told = load.ledger.told.borrow();
    let (mut committed, mut refused, mut unknown) = (0, BTreeMap::new(), 0);
    for (name, told) in told.iter() {
        let found = |stream| places.get(&(stream, name.as_str())).map_or(&[][..], Vec::as_slice);
        let acknowledged: Vec<&Committed> = told
            .iter()
            .filter_map(|told| match told {
                Told::Committed(committed) => Some(committed),
                _ => None,
            })
            .collect();
        for yes in &acknowledged {
            committed += 1;
            assert_eq!(yes.offsets.len(), 2, "{name}");
            for (stream, offset) in &yes.offsets {
                let place = (yes.position, offset.expect("nothing is trimmed"));
                assert_eq!(found(*stream), [place], "{name} was acknowledged in {stream}");
            }
        }
        let is_unknown = told.iter().any(|told| matches!(told, Told::Unknown));
        unknown += u64::from(is_unknown);
        if acknowledged.is_empty() {
            let times = found(load.shared).len();
            assert!(
                times <= usize::from(is_unknown),
                "{name} was told {told:?}, is there {times}x"
            );
        }
        for no in told {
            if let Told::No(code) = no {
                *refused.entry(*code).or_insert(0) += 1;
            }
        }
    }
    for found in records.all() {
        assert!(told.contains_key(&found.value), "nobody has sent {found:?}");
    }
    assert!(committed > ROUNDS * ACKNOWLEDGED_MIN, "{committed} were committed");
    println!("{committed} acknowledged, {unknown} unknown, refused: {refused:?}");
}

/// What there is of a lane is its beginning, in order.
fn check_lane(load: &Load, records: &Records) {
    let mut next: BTreeMap<(StreamId, u64), u64> = BTreeMap::new();
    for found in records.all().iter().filter(|found| found.value.contains(" lane ")) {
        let mut numbers = found.value.split(' ').skip(2).map(|word| word.parse().unwrap());
        let (lane, number): (u64, u64) = (numbers.next().unwrap(), numbers.next().unwrap());
        let next = next.entry((found.stream, lane)).or_default();
        assert_eq!(number, *next, "{found:?}");
        *next += 1;
    }
    let lanes = next.keys().filter(|(stream, _)| *stream == load.shared).count();
    assert!(lanes > 1 && next.len() == 2 * lanes, "{lanes} lanes, in two streams: {next:?}");
}

/// Each sum is one more than the one before: nobody has overwritten what it had not seen.
fn check_counter(load: &Load, records: &Records) {
    let stream = *load.streams.last().unwrap();
    for (before, found) in records.stream(stream).enumerate() {
        assert_eq!(counted(&found.value), before as u64 + 1, "{found:?}");
    }
    assert!(records.stream(stream).count() > 0, "somebody has counted");
}

/// Offline: the log is sound, each life had its epoch, and their versions do not overlap.
fn check_epochs(directory: &std::path::Path) {
    let directory = directory.to_str().unwrap();
    let sound = millrace(&["inspect", "verify", directory, "-o", "json"]).with_code(0);
    assert_eq!(sound.one_json()["findings"], 0);
    let frames = millrace(&["inspect", "frames", directory, "-o", "json"]).with_code(0);
    let mut epochs: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for frame in frames.json() {
        let number = |name: &str| frame[name].as_u64().unwrap();
        let version = number("version");
        let range = epochs.entry(number("epoch")).or_insert((version, version));
        *range = (range.0.min(version), range.1.max(version));
    }
    let ranges: Vec<(u64, u64)> = epochs.values().copied().collect();
    for pair in ranges.windows(2) {
        assert!(pair[0].1 < pair[1].0, "{pair:?} overlap");
    }
    assert_eq!(epochs.keys().copied().collect::<Vec<_>>(), (1..=ROUNDS + 1).collect::<Vec<_>>());
}
