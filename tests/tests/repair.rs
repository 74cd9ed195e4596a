//! Nodes that are lost for good, removed or drained: a spare node copies the share and takes the seat.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

use std::fs;

use client::Transaction;
use client::face::Client;
use common::StreamId;
use tests::{Cluster, Records, Roles, run};

const STREAMS: u64 = 12;
const ROUNDS: u64 = 40;

/// Three log servers, two copies of each stream, and a spare node.
fn with_spare() -> Roles {
    Roles { nodes: 4, log_servers: vec![1, 2, 3], proxies: vec![1, 4], ..Roles::all(4) }
}

async fn create(client: &Client) -> Vec<StreamId> {
    let mut streams = Vec::new();
    for place in 0..STREAMS {
        streams.push(client.create_stream(&format!("s-{place}")).await.unwrap());
    }
    streams
}

/// Appends the numbers from `from` on to each stream.
async fn append(client: &Client, streams: &[StreamId], from: u64) {
    for number in from..from + ROUNDS {
        let mut transaction = Transaction::new();
        for stream in streams {
            transaction.append(*stream, number.to_string());
        }
        client.commit(transaction).await.unwrap();
    }
}

async fn expect(client: &Client, streams: &[StreamId], count: u64) {
    let records = Records::of(client, streams).await;
    let wanted: Vec<String> = (0..count).map(|number| number.to_string()).collect();
    for stream in streams {
        assert_eq!(records.values(*stream), wanted, "{stream}");
    }
}

/// Kills a node and takes its disk away.
fn lose(cluster: &mut Cluster, id: u64) {
    cluster.kill(id);
    fs::remove_dir_all(cluster.node_directory(id)).unwrap();
}

#[test]
fn after_a_log_server_is_lost_and_repaired_a_second_one_can_be_lost() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::serving(directory.path(), with_spare());
    let streams = run(async {
        let client = cluster.client(&[1, 2, 3, 4]).await;
        let streams = create(&client).await;
        append(&client, &streams, 0).await;
        // What is trimmed must not come back with the copies.
        client.close().await;
        streams
    });

    lose(&mut cluster, 2);
    run(async {
        let client = cluster.client(&[1, 3, 4]).await;
        append(&client, &streams, ROUNDS).await;
        client.close().await;
    });
    let removed = cluster.cli(&["node", "remove", "2", "--wait", "60"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    let told = removed.one_json();
    assert_eq!(told["seat_passed_on"], true, "{told}");
    let seated = told["log_servers"].as_array().unwrap();
    assert!(seated.iter().any(|node| node == "n4") && seated.len() == 3, "{told}");

    lose(&mut cluster, 3);
    run(async {
        let client = cluster.client(&[1, 4]).await;
        append(&client, &streams, 2 * ROUNDS).await;
        expect(&client, &streams, 3 * ROUNDS).await;
        client.close().await;
    });
    // Nobody is left to take the seat, and status says so.
    let removed = cluster.cli(&["node", "remove", "n3"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    let described = cluster.cli(&["cluster", "describe"]).one_json();
    let waiting = described["members"]["seats_waiting"].to_string();
    assert!(waiting.contains("the seat of n3 waits for a spare node"), "{described}");
    assert_eq!(described["members"]["removed"].to_string(), r#"["n2","n3"]"#);
}

#[test]
fn a_drained_leader_gives_up_its_roles_and_its_seat_and_clients_see_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Cluster::serving(directory.path(), with_spare());
    let leader = cluster.leader(1);
    let name = format!("n{leader}");
    run(async {
        let client = cluster.client(&[1, 2, 3, 4]).await;
        let streams = create(&client).await;
        append(&client, &streams, 0).await;
        client.close().await;
    });
    let drained = cluster.cli(&["node", "drain", &name, "--wait", "60"]);
    let is_log_server = leader != 4;
    assert_eq!(drained.code, Some(0), "{drained:?}");
    let asked = leader % 4 + 1;
    let status = cluster.wait_for(asked, "another leader without it", |status| {
        let plan = &status["plan"];
        let has = |role: &str| plan[role].to_string().contains(&name);
        let roles = ["proxies", "resolvers", "log_servers", "absent"];
        status["serving"] == true && plan["leader"] != name.as_str() && !roles.into_iter().any(has)
    });
    assert!(!is_log_server || status["plan"]["log_servers"].to_string().contains("n4"), "{status}");
    run(async {
        let client = cluster.client(&[1, 2, 3, 4]).await;
        let streams: Vec<StreamId> =
            client.list_streams().await.unwrap().into_iter().map(|(_, stream)| stream).collect();
        append(&client, &streams, ROUNDS).await;
        expect(&client, &streams, 2 * ROUNDS).await;
        client.close().await;
    });
    let restored = cluster.cli(&["node", "restore", &name]);
    assert_eq!(restored.code, Some(0), "{restored:?}");
}

#[test]
fn what_can_not_be_given_up_is_refused_with_a_code() {
    let directory = tempfile::tempdir().unwrap();
    let roles = Roles { leaders: vec![1], replication: 1, ..with_spare() };
    let cluster = Cluster::serving(directory.path(), roles);
    for (args, code) in [
        (["node", "remove", "77"], "unknown_node"),
        (["node", "drain", "1"], "node_needed"),
        (["node", "remove", "2"], "node_needed"),
    ] {
        let refused = cluster.cli(&args);
        assert_eq!(refused.code, Some(3), "{args:?}: {refused:?}");
        assert!(refused.stderr.contains(code), "{args:?}: {refused:?}");
    }
    assert_eq!(cluster.cli(&["node", "remove", "banana"]).code, Some(2));
}
