//! A stop in good order, a start, and who may start at all.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::path::Path;

use client::face::Client;
use client::{Committed, Transaction};
use common::{Code, FENCE_JUMP_VERSIONS, IdempotencyId, StreamId, Version};
use serde_json::Value;
use tests::{Node, Records, SMALL_FILES, frames, run};

async fn append(client: &Client, stream: StreamId, value: &str) -> Committed {
    let mut transaction = Transaction::new();
    transaction.append(stream, value.to_owned());
    client.commit(transaction).await.unwrap()
}

fn named(stream: StreamId, id: IdempotencyId) -> Transaction {
    let mut transaction = Transaction::new();
    transaction.idempotency_id(id).append(stream, "named");
    transaction
}

fn status(node: &Node) -> Value {
    node.cli(&["status"]).one_json()
}

/// What the first life leaves.
struct Left {
    stream: StreamId,
    other: StreamId,
    id: IdempotencyId,
    named: Committed,
    records: Records,
    trimmed: Version,
    last: Version,
}

async fn first_life(node: &Node) -> Left {
    let client = node.client().await;
    let stream = client.create_stream("orders").await.unwrap();
    let other = client.create_stream("payments").await.unwrap();
    let trimmed = append(&client, other, "gone").await.position.version;
    append(&client, other, "stays").await;
    for number in 0..50 {
        append(&client, stream, &number.to_string()).await;
    }
    let id = IdempotencyId([7; 16]);
    let named = client.commit(named(stream, id)).await.unwrap();
    assert_eq!(client.trim(other, trimmed).await.unwrap().first_offset.0, 1);
    let records = Records::of(&client, &[stream]).await;
    let last = client.read_version().await.unwrap();
    client.close().await;
    Left { stream, other, id, named, records, trimmed, last }
}

async fn check_second_life(node: &Node, left: &Left) {
    let client = node.client().await;
    assert_eq!(
        client.list_streams().await.unwrap(),
        [("orders".to_owned(), left.stream), ("payments".to_owned(), left.other)]
    );
    assert_eq!(client.create_stream("orders").await.unwrap_err().code(), Code::StreamExists);
    assert_ne!(client.create_stream("refunds").await.unwrap(), left.other, "a new id");
    assert!(Records::of(&client, &[left.stream]).await == left.records, "nothing is lost");

    // The id is still known: the same place, and not a second time.
    assert_eq!(client.commit(named(left.stream, left.id)).await.unwrap(), left.named);
    let next = append(&client, left.stream, "next").await;
    assert_eq!(next.offsets[0].1.unwrap().0, left.records.all().len() as u64);
    let jump = next.position.version.since(left.last);
    assert!(jump >= FENCE_JUMP_VERSIONS, "a jump of {jump} versions");

    let mut cut = client.pull([left.other], Version::ZERO).await.unwrap();
    assert_eq!(cut.next().await.unwrap_err().code(), Code::Trimmed);
    let mut rest = client.pull([left.other], left.trimmed).await.unwrap();
    let batches = rest.next().await.unwrap().batches;
    assert_eq!(batches[0].records().unwrap()[0].record.value, "stays");

    // What was read in the first life is too old to write on in the second.
    let mut transaction = Transaction::new();
    transaction.read_version(left.last).read_point(b"k").append(left.stream, "late");
    assert_eq!(client.commit(transaction).await.unwrap_err().code(), Code::TooOld);
    client.close().await;
}

#[test]
fn a_stop_and_a_start_lose_nothing_and_begin_an_epoch() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("node");
    let node = Node::start(&directory, SMALL_FILES);
    let left = run(first_life(&node));
    let before = status(&node);
    assert_eq!((&before["epoch"], &before["incarnation"]), (&1.into(), &1.into()));
    node.stop();
    assert!(!directory.join("address").exists(), "a stopped node has no address");

    let node = Node::start(&directory, SMALL_FILES);
    run(check_second_life(&node, &left));
    let after = status(&node);
    assert_eq!((&after["epoch"], &after["incarnation"]), (&2.into(), &2.into()));
    assert_eq!(after["node"], before["node"]);
    node.stop();
    check_versions(&directory);
}

/// Each version follows the one before, also over the jump.
fn check_versions(directory: &Path) {
    let frames = frames(directory);
    for pair in frames.windows(2) {
        assert_eq!(pair[0].version, pair[1].previous_version, "{pair:?}");
        assert!(pair[0].version < pair[1].version, "{pair:?}");
    }
    let jumps =
        frames.windows(2).filter(|pair| pair[1].version - pair[0].version >= FENCE_JUMP_VERSIONS);
    assert_eq!(jumps.count(), 1, "one epoch after the other");
}

#[test]
fn one_directory_has_one_node() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("node");
    let mut node = Node::start(&directory, SMALL_FILES);
    let identity = std::fs::read(directory.join("identity")).unwrap();
    let second = Node::try_start(&directory, SMALL_FILES).expect_err("a second node");
    assert_eq!(second.code, Some(70));
    assert!(second.stderr.contains("in use by another process"), "{}", second.stderr);
    assert_eq!(identity, std::fs::read(directory.join("identity")).unwrap());
    assert_eq!(status(&node)["serving"], true, "the first one goes on");

    // A killed node leaves no lock behind.
    node.kill();
    assert!(directory.join("address").exists(), "nobody has cleaned up");
    node.start_again();
    assert_eq!(status(&node)["epoch"], 2);
    node.stop();
}

#[test]
fn both_engines_read_each_others_log_and_status_names_them() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("node");
    for (life, engine) in ["plain", "ring", "plain"].into_iter().enumerate() {
        let started = Node::try_start(&directory, &[SMALL_FILES, &["--engine", engine]].concat());
        let node = match started {
            Ok(node) => node,
            // A kernel that forbids io_uring says so, and only then.
            Err(ended) if engine == "ring" => {
                assert!(ended.stderr.contains("io_uring"), "{ended:?}");
                continue;
            }
            Err(ended) => panic!("{ended:?}"),
        };
        let named = status(&node)["disk"]["engine"].as_str().unwrap().to_lowercase();
        assert!(named.starts_with(engine), "{named}");
        if life == 0 {
            node.cli(&["stream", "create", "orders"]);
        }
        for _ in 0..20 {
            node.cli(&["append", "orders", engine, "again", "and again"]);
        }
        let pulled = node.cli(&["pull", "orders"]).json();
        for (offset, record) in pulled.iter().enumerate() {
            assert_eq!(record["offset"], offset);
        }
        assert!(pulled.iter().any(|record| record["value"] == "plain"));
        assert_eq!(pulled.last().unwrap()["value"], "and again");
        node.stop();
    }
}

#[test]
fn a_stop_with_commits_on_their_way_answers_or_refuses_each() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("node");
    let node = Node::start(&directory, SMALL_FILES);
    let (stream, acknowledged, refused) = run(async {
        let client = node.client().await;
        let stream = client.create_stream("orders").await.unwrap();
        let mut verdicts = Vec::new();
        for number in 0..500 {
            let mut transaction = Transaction::new();
            transaction.at_most_once().append(stream, number.to_string());
            verdicts.push((number.to_string(), client.submit(transaction).await));
        }
        let stopped = tokio::task::spawn_blocking(move || node.stop());
        let (mut acknowledged, mut refused) = (Vec::new(), Vec::new());
        for (value, verdict) in verdicts {
            match verdict.await {
                Ok(committed) => acknowledged.push((value, committed)),
                Err(client::Error::Unknown(_)) => {}
                Err(_) => refused.push(value),
            }
        }
        stopped.await.unwrap();
        (stream, acknowledged, refused)
    });
    let node = Node::start(&directory, SMALL_FILES);
    run(async {
        let client = node.client().await;
        let records = Records::of(&client, &[stream]).await;
        records.check_offsets();
        let places = records.by_value();
        let at = |value: &str| places.get(&(stream, value)).cloned().unwrap_or_default();
        for (value, committed) in &acknowledged {
            let place = (committed.position, committed.offsets[0].1.unwrap());
            assert_eq!(at(value), [place], "{value} was acknowledged");
        }
        for value in &refused {
            assert_eq!(at(value), [], "{value} was refused");
        }
        assert!(places.values().all(|places| places.len() == 1));
        client.close().await;
    });
    node.stop();
}
