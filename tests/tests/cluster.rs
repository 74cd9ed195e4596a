//! Clusters of real processes: they elect, serve and commit, go on without those that die, and let nobody in
//! who does not belong.
//!
//! Where a node is to be lost for good the log is on others: a recovery still waits for every log server.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::cell::{Cell, RefCell};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use client::Transaction;
use client::face::Client;
use common::message::{Hello, NodeHello};
use common::quic::tls::make_development_cluster;
use common::quic::{CloseCode, Lane};
use common::{Code, StreamId};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tests::{Cluster, Peer, Records, Roles, run};

/// Four nodes: two that lead and commit, two that keep the log.
fn apart() -> Roles {
    Roles {
        nodes: 4,
        leaders: vec![1, 2],
        proxies: vec![1, 2],
        resolver: 1,
        log_servers: vec![3, 4],
        replication: 2,
    }
}

async fn append(client: &Client, stream: StreamId, value: &str) {
    let mut transaction = Transaction::new();
    transaction.append(stream, value.to_owned());
    client.commit(transaction).await.unwrap_or_else(|error| panic!("{value}: {error}"));
}

/// Appends 0, 1, 2, ... one after the other until it is told to stop; what was acknowledged is counted.
struct Writer {
    acknowledged: Rc<Cell<u64>>,
    stop: Rc<Cell<bool>>,
    task: tokio::task::JoinHandle<()>,
}

impl Writer {
    fn start(client: Client, stream: StreamId) -> Self {
        let (acknowledged, stop) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        let (count, is_over) = (Rc::clone(&acknowledged), Rc::clone(&stop));
        let task = tokio::task::spawn_local(async move {
            while !is_over.get() {
                append(&client, stream, &count.get().to_string()).await;
                count.set(count.get() + 1);
            }
            client.close().await;
        });
        Self { acknowledged, stop, task }
    }

    /// Waits for so many more acknowledgements.
    async fn more(&self, count: u64) {
        let until = self.acknowledged.get() + count;
        while self.acknowledged.get() < until {
            assert!(!self.task.is_finished(), "the writer has failed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Every acknowledged value is there once, in order, and nothing else.
    async fn finish(self, reader: &Client, stream: StreamId) {
        self.stop.set(true);
        self.task.await.unwrap();
        let records = Records::of(reader, &[stream]).await;
        let wanted: Vec<String> = (0..self.acknowledged.get()).map(|n| n.to_string()).collect();
        assert_eq!(records.values(stream), wanted);
    }
}

/// Runs `act` on a cluster, off the thread of the clients.
async fn aside<T: Send + 'static>(
    cluster: &RefCell<Option<Cluster>>,
    act: impl FnOnce(&mut Cluster) -> T + Send + 'static,
) -> T {
    let mut taken = cluster.borrow_mut().take().unwrap();
    let (taken, result) = tokio::task::spawn_blocking(move || {
        let result = act(&mut taken);
        (taken, result)
    })
    .await
    .unwrap();
    *cluster.borrow_mut() = Some(taken);
    result
}

#[test]
fn three_nodes_come_up_and_commit() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::serving(directory.path(), Roles::all(3));
    run(async {
        // One address is enough: the proxies are on the other two nodes.
        let client = cluster.client(&[3]).await;
        let stream = client.create_stream("orders").await.unwrap();
        for value in ["one", "two", "three"] {
            append(&client, stream, value).await;
        }
        let records = Records::of(&client, &[stream]).await;
        assert_eq!(records.values(stream), ["one", "two", "three"]);
        client.close().await;
    });

    let list = cluster.cli(&["node", "list"]).with_code(0).json();
    let of = |key: &str| list.iter().map(|node| node[key].clone()).collect::<Vec<Value>>();
    assert_eq!(of("node"), ["n1", "n2", "n3"]);
    assert_eq!(of("state"), ["serving", "serving", "serving"]);
    assert_eq!(of("label"), ["rack 1", "rack 2", "rack 3"]);
    let roles = |node: &Value| node["roles"].as_array().unwrap().clone();
    let leaders = list.iter().filter(|node| roles(node).contains(&Value::from("leader")));
    assert_eq!(leaders.count(), 1, "{list:?}");
    assert!(list.iter().all(|node| roles(node).contains(&Value::from("log_server"))), "{list:?}");

    let described = cluster.cli(&["cluster", "describe"]).with_code(0).one_json();
    assert_eq!(described["cluster"], "test");
    assert_eq!(described["phase"], "serving");
    assert_eq!(described["register"]["kind"], "shared_file");
    assert_eq!(described["plan"]["log_servers"], serde_json::json!(["n1", "n2", "n3"]));
    let status = cluster.try_status(2).unwrap();
    assert_eq!(status["node"], "n2");
    for other in [1, 3] {
        assert_eq!(Cluster::link(&status, other)["state"], "up", "{status}");
    }
}

#[test]
fn another_node_leads_when_the_leader_is_killed_and_nothing_is_lost_or_doubled() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::serving(directory.path(), apart());
    let before = cluster.leader(3);
    run(async {
        let client = cluster.client(&[1, 2, 3, 4]).await;
        let reader = cluster.client(&[3]).await;
        let cluster = RefCell::new(Some(cluster));
        let stream = client.create_stream("orders").await.unwrap();
        let writer = Writer::start(client, stream);
        writer.more(50).await;
        aside(&cluster, move |cluster| cluster.kill(before)).await;
        writer.more(50).await;
        let after = aside(&cluster, |cluster| cluster.leader(3)).await;
        assert_ne!(before, after);
        // It comes back as a follower: the epoch goes on.
        let epoch = |cluster: &mut Cluster| cluster.try_status(3).unwrap()["epoch"].clone();
        let serving = aside(&cluster, epoch).await;
        aside(&cluster, move |cluster| {
            cluster.start(before);
            cluster.wait_until_serving(before);
        })
        .await;
        writer.more(50).await;
        assert_eq!(aside(&cluster, epoch).await, serving);
        writer.finish(&reader, stream).await;
        reader.close().await;
    });
}

#[test]
fn a_leader_that_stops_hands_over() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::serving(directory.path(), apart());
    let before = cluster.leader(3);
    let other = 3 - before;
    run(async {
        let client = cluster.client(&[1, 2, 3, 4]).await;
        let reader = cluster.client(&[4]).await;
        let cluster = RefCell::new(Some(cluster));
        let stream = client.create_stream("orders").await.unwrap();
        let writer = Writer::start(client, stream);
        writer.more(20).await;
        aside(&cluster, move |cluster| cluster.stop(before)).await;
        writer.more(20).await;
        let status = aside(&cluster, move |cluster| {
            cluster.wait_for(other, "that it leads", |status| {
                status["recovery"]["phase"] == "serving" && status["serving"] == true
            })
        })
        .await;
        assert_eq!(status["recovery"]["cause"], "handed_over", "{status}");
        writer.finish(&reader, stream).await;
        reader.close().await;
    });
}

#[test]
fn a_killed_log_server_that_starts_again_has_everything() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::serving(directory.path(), Roles::all(3));
    // Twice, so that it is once perhaps the leader and once not.
    let leader = cluster.leader(1);
    run(async {
        let client = cluster.client(&[1, 2, 3]).await;
        let reader = cluster.client(&[1, 2, 3]).await;
        let cluster = RefCell::new(Some(cluster));
        let stream = client.create_stream("orders").await.unwrap();
        let writer = Writer::start(client, stream);
        for victim in [leader, leader % 3 + 1] {
            writer.more(20).await;
            aside(&cluster, move |cluster| {
                cluster.kill(victim);
                cluster.start(victim);
                cluster.wait_until_serving(victim);
            })
            .await;
        }
        writer.more(20).await;
        writer.finish(&reader, stream).await;
        reader.close().await;
    });
}

/// More than one frame of the largest size is on its way to each log server at once: a link that broke for
/// that would get the same again when it is back, and break again.
#[test]
fn many_large_transactions_at_once_break_no_link() {
    const CLIENTS: usize = 4;
    const BYTES: usize = 40 << 20;
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::serving(directory.path(), Roles::all(3));
    run(async {
        let client = cluster.client(&[1, 2, 3]).await;
        let stream = client.create_stream("large").await.unwrap();
        let mut commits = tokio::task::JoinSet::new();
        for _ in 0..CLIENTS {
            // A client of its own each: one alone can't have so much under way.
            let client = cluster.client(&[1, 2, 3]).await;
            commits.spawn_local(async move {
                let mut transaction = Transaction::new();
                transaction.append(stream, vec![b'x'; BYTES]);
                let committed = client.commit(transaction).await.unwrap();
                client.close().await;
                committed.offsets[0].1.unwrap().0
            });
        }
        let mut offsets = commits.join_all().await;
        offsets.sort_unstable();
        assert_eq!(offsets, (0..CLIENTS as u64).collect::<Vec<_>>());
        client.close().await;
    });
    for id in 1..=3 {
        assert!(!cluster.stderr(id).contains("the lane's queue is full"), "{}", cluster.stderr(id));
    }
}

/// Waits until nodes 1 and 2 serve without node 3, which keeps no log and leads nothing.
fn two_of_three(directory: &Path) -> Cluster {
    let roles = Roles { leaders: vec![1, 2], log_servers: vec![1, 2], ..Roles::all(3) };
    let mut cluster = Cluster::new(directory, roles);
    [1, 2].into_iter().for_each(|id| cluster.start(id));
    [1, 2].into_iter().for_each(|id| cluster.wait_until_serving(id));
    cluster
}

/// Starts node 3 with this definition: the nodes that meet it refuse it, with this code.
fn is_refused(cluster: &mut Cluster, definition: &str, code: &str) {
    let file = cluster.definition().with_file_name("other.toml");
    fs::write(&file, definition).unwrap();
    cluster.start_with(3, &["--cluster", file.to_str().unwrap()]);
    let status = cluster.wait_for(1, code, |status| {
        let link = Cluster::link(status, 3);
        link["last_error"]["code"] == code && link["state"] != "up"
    });
    assert_eq!(status["serving"], true, "nobody else cares");
    while !cluster.stderr(3).contains(code) {
        thread::sleep(Duration::from_millis(20));
    }
    cluster.kill(3);
}

#[test]
fn who_does_not_belong_is_refused_with_a_code() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = two_of_three(directory.path());
    let other = cluster.definition_text("other", "tls");
    is_refused(&mut cluster, &other, "wrong_cluster");

    let names: Vec<_> =
        (1..=3).map(|id| (format!("node-{id}"), vec![format!("node-{id}")])).collect();
    make_development_cluster(&directory.path().join("foreign"), &names).unwrap();
    let foreign = cluster.definition_text("test", "foreign");
    is_refused(&mut cluster, &foreign, "not_vouched");

    // A certificate of the right CA, but of another node.
    let borrowed = cluster.definition_text("test", "tls").replace("tls/node-3.", "tls/node-2.");
    is_refused(&mut cluster, &borrowed, "not_vouched");

    // As it should be, it is welcome.
    cluster.start(3);
    cluster.wait_until_serving(3);
}

#[test]
fn two_processes_can_not_be_one_node() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = two_of_three(directory.path());
    cluster.start(3);
    cluster.wait_until_serving(3);
    cluster.wait_for(1, "that node 3 is there", |status| Cluster::link(status, 3)["state"] == "up");

    // Another directory that claims to be node 3, and counts its lives from 1 as node 3 did.
    let definition = cluster.definition();
    let definition = definition.to_str().unwrap();
    let twin = directory.path().join("twin");
    let twin =
        ["--cluster", definition, "--listen", "127.0.0.1:0", "--dir", twin.to_str().unwrap()];
    let ended = tests::millrace(&[&["serve", "--node", "3"][..], &twin].concat()).with_code(3);
    assert!(
        ended.stderr.contains("identity_clash: n1 says: ")
            || ended.stderr.contains("identity_clash: n2 says: "),
        "{ended:?}"
    );
    let status = cluster.try_status(3).unwrap();
    assert_eq!((&status["serving"], &status["incarnation"]), (&true.into(), &1.into()));

    // The directory of one node is not another's.
    cluster.kill(3);
    let wrong = cluster.node_directory(3);
    let wrong = ["--cluster", definition, "--node", "2", "--dir", wrong.to_str().unwrap()];
    let ended = tests::millrace(&[&["serve", "--listen", "127.0.0.1:0"][..], &wrong].concat());
    assert!(ended.with_code(3).stderr.contains("identity_clash"));
}

#[test]
fn strangers_can_not_speak_as_nodes() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = two_of_three(directory.path());
    let ca = directory.path().join("tls/ca.pem");
    run(async {
        let address = cluster.address(1);
        let mut stranger = Peer::connect_to(&address, &ca, 3).await;
        let Hello { peer, protocol_min, protocol_max, .. } = stranger.hello();
        let (cluster, definition) = ("test".to_owned(), 0);
        let hello = NodeHello { peer, stamp: 1, protocol_min, protocol_max, cluster, definition };
        stranger.send(Lane::Control, hello).await;
        let (code, reason) = stranger.closed().await;
        assert_eq!(code, u64::from(Code::NotVouched.number()), "{reason}");

        // A client can't take a node's id either.
        let mut client = Peer::connect_to(&address, &ca, 3).await;
        client.send(Lane::Control, client.hello()).await;
        let (code, reason) = client.closed().await;
        assert_eq!(code, u64::from(CloseCode::IDENTITY.0), "{reason}");
    });
}

#[test]
fn mistakes_of_a_definition_are_told_with_their_codes() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::new(directory.path(), Roles::all(3));
    let good = cluster.definition_text("test", "tls");
    let file = cluster.definition().with_file_name("wrong.toml");
    let refused = |text: &str, code: &str, more: &[&str]| {
        fs::write(&file, text).unwrap();
        let options = [&["--cluster", file.to_str().unwrap()][..], more].concat();
        let ended = cluster.run_to_end(1, &options).with_code(2);
        assert!(ended.stderr.contains(&format!("{code}: ")), "{code}: {}", ended.stderr);
    };
    refused(&good.replace("replication = 2", "replication = 4"), "cluster_replication", &[]);
    refused(&good.replace("leaders = [1,", "leaders = [9,"), "cluster_unknown_node", &[]);
    refused(&good.replace("leaders", "leader"), "cluster_syntax", &[]);
    refused(&good, "cluster_conflict", &["--register", "file:///elsewhere"]);
    let ended = cluster.run_to_end(9, &["--cluster", cluster.definition().to_str().unwrap()]);
    assert!(ended.with_code(2).stderr.contains("cluster_this_node: "));
    let missing = good.replace("tls/node-1.key", "tls/no.key");
    fs::write(&file, missing).unwrap();
    let ended = cluster.run_to_end(1, &["--cluster", file.to_str().unwrap()]);
    assert!(ended.stderr.contains("no.key"), "{ended:?}");
}

/// `millrace cluster start-local` in a process of its own.
struct Local {
    child: Option<Child>,
    ready: Value,
}

impl Local {
    fn start(directory: &Path) -> Self {
        let mut child = Command::new(tests::binary())
            .args(["cluster", "start-local", "--nodes", "3", "-o", "json", "--dir"])
            .arg(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap();
        Self { child: Some(child), ready }
    }

    fn pids(&self) -> Vec<Pid> {
        let nodes = self.ready["nodes"].as_array().unwrap().iter();
        nodes.map(|node| Pid::from_raw(node["pid"].as_i64().unwrap() as i32).unwrap()).collect()
    }

    fn end(mut self, signal: Signal) -> Option<i32> {
        let mut child = self.child.take().unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        child.wait().unwrap().code()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Its nodes stop with it.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_local_cluster_starts_stops_and_goes_on_with_one_command() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("local");
    let at = ["-o", "json", "--dir", path.to_str().unwrap()];
    let cli = |args: &[&str], stdin: &str| {
        tests::millrace_with_stdin(&[args, &at].concat(), stdin).with_code(0)
    };
    let local = Local::start(&path);
    assert_eq!(local.ready["nodes"].as_array().unwrap().len(), 3);
    let _ = cli(&["stream", "create", "orders"], "");
    let _ = cli(&["append", "orders"], "one\n");
    let described = cli(&["cluster", "describe"], "").one_json();
    assert_eq!((&described["cluster"], &described["serving"]), (&"local".into(), &true.into()));
    let pids = local.pids();
    assert_eq!(local.end(Signal::TERM), Some(0));
    assert!(pids.iter().all(|pid| test_kill_process(*pid).is_err()), "its nodes have ended");

    let local = Local::start(&path);
    let _ = cli(&["append", "orders"], "two\n");
    let list = cli(&["node", "list"], "").json();
    assert!(list.iter().all(|node| node["incarnation"] == 2), "{list:?}");
    let pids = local.pids();
    // Nobody asks them, and they stop all the same.
    assert_eq!(local.end(Signal::KILL), None);
    for pid in pids {
        while test_kill_process(pid).is_ok() && !is_zombie(pid) {
            thread::sleep(Duration::from_millis(10));
        }
    }

    let local = Local::start(&path);
    let appended = cli(&["append", "orders"], "three\n").one_json();
    assert_eq!(appended["offset"], 2, "{appended}");
    assert_eq!(local.end(Signal::INT), Some(0));
    // With another number of nodes it would be another cluster.
    let other = ["cluster", "start-local", "--nodes", "4"];
    let refused = tests::millrace(&[&other[..], &at].concat()).with_code(2);
    assert!(refused.stderr.contains("cluster_conflict: "), "{refused:?}");
}

/// Ended, and not yet waited for by whoever has inherited it.
fn is_zombie(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" Z")))
}
