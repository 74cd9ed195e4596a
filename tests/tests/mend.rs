//! A block that rots on one replica is mended from the other: by a pull that meets it, or by reading the log
//! through. Whoever consumes sees nothing of it.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::fs;

use client::Transaction;
use common::StreamId;
use tests::{
    Cluster, Frame, Place, Records, Roles, TINY_FILES, frames, millrace, run, segment_path,
};

const LOG_SERVERS: [u64; 2] = [3, 4];

/// Two nodes that lead and commit, two that keep the log, with little in memory.
fn cluster(directory: &std::path::Path, knobs: &[&str]) -> Cluster {
    let roles = Roles {
        nodes: 4,
        leaders: vec![1, 2],
        proxies: vec![1, 2],
        resolver: 1,
        log_servers: LOG_SERVERS.to_vec(),
        replication: 2,
    };
    let mut cluster = Cluster::new(directory, roles);
    let definition = cluster.definition();
    let mut options = vec!["--cluster", definition.to_str().unwrap()];
    options.extend(TINY_FILES);
    for knob in ["tail_bytes_max=1", "mend_wait_ms=5_000"].iter().chain(knobs) {
        options.extend(["--knob", *knob]);
    }
    (1..=4).for_each(|id| cluster.start_with(id, &options));
    (1..=4).for_each(|id| cluster.wait_until_serving(id));
    cluster
}

fn values() -> Vec<String> {
    (0..30).map(|number| format!("{number} {}", "x".repeat(20_000))).collect()
}

fn fill(cluster: &Cluster) -> StreamId {
    run(async {
        let client = cluster.client(&[1, 2]).await;
        let stream = client.create_stream("rows").await.unwrap();
        for value in values() {
            let mut transaction = Transaction::new();
            transaction.append(stream, value);
            client.commit(transaction).await.unwrap();
        }
        client.close().await;
        stream
    })
}

/// The `nth` frame with a row in a node's first segment.
fn frame(cluster: &Cluster, id: u64, nth: usize) -> Frame {
    let frames = frames(&cluster.node_directory(id)).into_iter();
    frames.filter(|of| of.segment == 1 && of.bytes > 20_000).nth(nth).unwrap()
}

fn bytes(cluster: &Cluster, id: u64, frame: &Frame) -> Vec<u8> {
    let file = fs::read(segment_path(&cluster.node_directory(id), frame.segment)).unwrap();
    let (from, to) =
        (usize::try_from(frame.offset).unwrap(), usize::try_from(frame.end()).unwrap());
    file[from..to].to_vec()
}

/// Stops everybody; no log has anything wrong.
fn check_sound(mut cluster: Cluster) {
    (1..=4).for_each(|id| cluster.stop(id));
    for id in LOG_SERVERS {
        let directory = cluster.node_directory(id);
        let _ = millrace(&["inspect", "verify", directory.to_str().unwrap()]).with_code(0);
    }
}

#[test]
fn rot_that_nobody_reads_is_found_and_mended() {
    let place = tempfile::tempdir().unwrap();
    let pace = ["scrub_rest_ms=100", "scrub_bytes_per_second=100_000_000"];
    let cluster = cluster(place.path(), &pace);
    fill(&cluster);
    let frame = frame(&cluster, 3, 2);
    let before = bytes(&cluster, 3, &frame);
    frame.flip_a_bit(&cluster.node_directory(3), Place::Body);
    let status = cluster.wait_for(3, "that it has mended", |status| {
        status["log"]["damage"]["mended"] == 1 && status["log"]["damage"]["damaged"] == 0
    });
    assert!(status["log"]["scrub"]["last"]["blocks"].as_u64().unwrap() > 30, "{status}");
    assert!(before == bytes(&cluster, 3, &frame), "every byte is as it was");
    let said = cluster.stderr(3);
    assert!(said.contains("corrupt_block") && said.contains("mended"), "{said}");
    check_sound(cluster);
}

#[test]
fn a_consumer_waits_for_a_mend_and_sees_no_error() {
    let place = tempfile::tempdir().unwrap();
    let cluster = cluster(place.path(), &["scrub_bytes_per_second=0"]);
    let stream = fill(&cluster);
    // On either server another one, whichever is read.
    for (id, nth) in [(3, 1), (4, 3)] {
        frame(&cluster, id, nth).flip_a_bit(&cluster.node_directory(id), Place::Body);
    }
    run(async {
        let client = cluster.client(&[1, 2]).await;
        assert_eq!(Records::of(&client, &[stream]).await.values(stream), values());
        client.close().await;
    });
    let mended = LOG_SERVERS.map(|id| {
        let status = cluster.try_status(id).unwrap();
        assert_eq!(status["log"]["damage"]["damaged"], 0, "{status}");
        status["log"]["damage"]["mended"].as_u64().unwrap()
    });
    assert!(mended.contains(&1), "{mended:?}");
}
