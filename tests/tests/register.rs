//! A node whose register is elsewhere: it needs it to recover, and only then.
#![expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]

#[cfg(any(feature = "postgres", feature = "etcd"))]
mod outage {
    use std::fs;
    use std::path::Path;
    use std::thread;
    use std::time::Duration;

    use client::Transaction;
    use common::StreamId;
    use serde_json::Value;
    use tests::{Node, POSTGRES_PASSWORD, Records, RegisterServer, millrace, run};

    const POLL: Duration = Duration::from_millis(20);

    fn append(node: &Node, stream: StreamId, value: &str) {
        run(async {
            let client = node.client().await;
            let mut transaction = Transaction::new();
            transaction.append(stream, value.to_owned());
            client.commit(transaction).await.unwrap();
            client.close().await;
        });
    }

    /// Status of a node that need not be serving, nor be there.
    fn try_status(address: &str, ca: &Path) -> Option<Value> {
        let ca = ca.to_str().unwrap();
        let connect = ["--connect", address, "--tls-ca", ca, "--tls-name", "millrace"];
        let ended = millrace(&[&["status", "-o", "json"][..], &connect].concat());
        (ended.code == Some(0)).then(|| ended.one_json())
    }

    fn wait_for(what: &str, status: impl Fn() -> Option<Value>) -> Value {
        loop {
            match status() {
                Some(status) if status["register"]["state"] == what => return status,
                _ => thread::sleep(POLL),
            }
        }
    }

    fn outlives_its_register(kind: &str, mut server: RegisterServer) {
        let directory = tempfile::tempdir().unwrap();
        let password = directory.path().join("password");
        fs::write(&password, format!("{POSTGRES_PASSWORD}\n")).unwrap();
        let directory = directory.path().join("node");
        let url = server.url_at(server.port());
        let mut options = vec!["--register", &url, "--cluster-name", "outage"];
        options.extend(["--register-password-file", password.to_str().unwrap()]);
        let mut node = Node::start(&directory, &options);
        assert!(!directory.join("register").exists(), "the register is elsewhere");
        let status = node.cli(&["status"]).one_json();
        assert_eq!(status["register"]["kind"], kind);
        assert_eq!(status["register"]["state"], "reachable");
        assert!(!status.to_string().contains(POSTGRES_PASSWORD), "{status}");
        let stream = run(async {
            let client = node.client().await;
            let stream = client.create_stream("orders").await.unwrap();
            client.close().await;
            stream
        });
        append(&node, stream, "one");

        // The epoch does not care, though status says it.
        server.stop();
        append(&node, stream, "two");
        let status = wait_for("unreachable", || Some(node.cli(&["status"]).one_json()));
        assert_eq!(status["serving"], true);
        assert!(status["register"]["since_ms"].is_u64(), "{status}");
        assert_eq!(status["register"]["last_error"]["code"], "register_unavailable");
        append(&node, stream, "three");

        // The next one does: it waits, and says for what.
        node.kill();
        let address = node.address().to_owned();
        let ca = directory.join("tls/ca.pem");
        thread::scope(|scope| {
            let started = scope.spawn(|| node.start_again());
            let status = wait_for("unreachable", || try_status(&address, &ca));
            assert_eq!(status["serving"], false);
            assert_eq!(status["recovery"]["phase"], "reading_register");
            assert_eq!(status["recovery"]["waiting_for"], "the register");
            server.start_again();
            started.join().unwrap();
        });
        append(&node, stream, "four");
        run(async {
            let client = node.client().await;
            let records = Records::of(&client, &[stream]).await;
            assert_eq!(records.values(stream), ["one", "two", "three", "four"]);
            client.close().await;
        });
        let inspect = ["inspect", "register", directory.to_str().unwrap(), "-o", "json"];
        let inspected = millrace(&[&inspect[..], &options].concat());
        assert_eq!(inspected.with_code(0).one_json()["epoch"], 2);
        node.stop();
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_node_outlives_its_postgres() {
        outlives_its_register("postgres", RegisterServer::postgres());
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn a_node_outlives_its_etcd() {
        outlives_its_register("etcd", RegisterServer::etcd());
    }
}

use tests::millrace;

fn refused(options: &[&str]) -> String {
    let directory = tempfile::tempdir().unwrap();
    let serve = ["serve", "--dir", directory.path().to_str().unwrap()];
    let ended = millrace(&[&serve[..], options].concat()).with_code(2);
    assert!(!ended.stderr.contains("ter2"), "{ended:?}");
    ended.stderr
}

#[test]
fn a_wrong_register_is_refused_without_being_repeated() {
    for url in ["postgres://me:hun/ter2@host/db", "http://me:hunter2@host", "etcd://a:hunter2@?"] {
        assert!(refused(&["--register", url]).contains("register_url: "), "{url}");
    }
    let url = "postgres://me:hunter2@host/db";
    let ca = refused(&["--register", url, "--register-tls-ca", "no/such/file"]);
    assert!(ca.contains("register_tls: no/such/file"), "{ca}");
    let password = refused(&["--register", url, "--register-password-file", "no/such/file"]);
    assert!(password.contains("register_password: no/such/file"), "{password}");
    refused(&["--register-tls-ca", "no/such/file"]);
    refused(&["--register", url, "--register-tls-cert", "cert.pem"]);
}

#[cfg(not(feature = "etcd"))]
#[test]
fn a_build_without_etcd_says_so() {
    let etcd = refused(&["--register", "etcd://me:hunter2@host"]);
    assert!(etcd.contains("register_not_built: "), "{etcd}");
}
