//! The register in PostgreSQL.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use common::register::{RegisterOutcome, Revision};
use millrace::register::{Register, RegisterOptions, RegisterTls};
use tests::{POSTGRES_PASSWORD, RegisterServer, run};

use super::servers::{HASTY_MS, PATIENT_MS, is_refused, keeps_the_contract, open, options};
use super::{cas, read, read_patiently, written};

#[test]
fn postgres_keeps_the_contract() {
    let mut server = RegisterServer::postgres();
    run(keeps_the_contract(&mut server));
}

/// A session of the test's own.
async fn connect(server: &RegisterServer) -> tokio_postgres::Client {
    let mut config = tokio_postgres::Config::new();
    config.host("127.0.0.1").port(server.port()).user("millrace").password(POSTGRES_PASSWORD);
    config.dbname("postgres");
    let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

const LOCK_ROW: &str = "BEGIN; SELECT 1 FROM millrace_register FOR UPDATE";
const BLOCKED: &str = "SELECT pid FROM pg_stat_activity \
     WHERE application_name = 'test' AND wait_event_type = 'Lock'";

async fn wait_until_blocked(client: &tokio_postgres::Client) {
    while client.query(BLOCKED, &[]).await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn a_session_that_postgres_ends_leaves_doubt() {
    let server = RegisterServer::postgres();
    run(async {
        let mut register = open(&server, "doubt", PATIENT_MS);
        assert_eq!(read_patiently(&mut register).await.0, 0);
        assert_eq!(cas(&mut register, 0, b"one").await, written(1));
        let (holder, killer) = (connect(&server).await, connect(&server).await);
        holder.batch_execute(LOCK_ROW).await.unwrap();
        let kill = async {
            wait_until_blocked(&killer).await;
            let kill = format!("SELECT pg_terminate_backend(pid) FROM ({BLOCKED}) AS blocked");
            killer.execute(&kill, &[]).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(cas(&mut register, 1, b"two"), kill);
        assert!(matches!(outcome, RegisterOutcome::Indeterminate(_)), "{outcome:?}");
        holder.batch_execute("ROLLBACK").await.unwrap();
        assert_eq!(read(&mut register).await, (1, Bytes::from_static(b"one")));
        // A refusal is none.
        killer
            .batch_execute("ALTER TABLE millrace_register ADD CHECK (revision < 2)")
            .await
            .unwrap();
        let outcome = cas(&mut register, 1, b"two").await;
        assert!(matches!(&outcome, RegisterOutcome::Unavailable(what) if what.contains("check")));
        assert_eq!(read(&mut register).await, (1, Bytes::from_static(b"one")));
    });
}

#[test]
fn a_write_may_happen_long_after_it_was_given_up() {
    let server = RegisterServer::postgres();
    run(async {
        let mut register = open(&server, "late", PATIENT_MS);
        assert_eq!(read_patiently(&mut register).await.0, 0);
        assert_eq!(cas(&mut register, 0, b"one").await, written(1));
        let (holder, watcher) = (connect(&server).await, connect(&server).await);
        holder.batch_execute(LOCK_ROW).await.unwrap();
        let mut hasty = open(&server, "late", HASTY_MS);
        let outcome = loop {
            match cas(&mut hasty, 1, b"late").await {
                RegisterOutcome::Unavailable(_) => {}
                other => break other,
            }
        };
        assert!(matches!(outcome, RegisterOutcome::Indeterminate(_)), "{outcome:?}");
        wait_until_blocked(&watcher).await;
        assert_eq!(read(&mut register).await, (1, Bytes::from_static(b"one")), "not yet");
        let release = async { holder.batch_execute("COMMIT").await.unwrap() };
        let (outcome, ()) = tokio::join!(cas(&mut register, 1, b"rival"), release);
        let (revision, value) = loop {
            let seen = read(&mut register).await;
            if seen.0 > 1 {
                break seen;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        // Both stood at the same revision: one of them it is, and the rival knows which.
        assert_eq!(revision, 2);
        match outcome {
            RegisterOutcome::Written(Revision(2)) => assert_eq!(value, b"rival"[..]),
            RegisterOutcome::Lost => assert_eq!(value, b"late"[..]),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn postgres_is_verified_and_asks_for_a_password_and_a_certificate() {
    let server = RegisterServer::postgres_with_tls();
    run(async {
        let right = options(&server, server.port(), "tls", PATIENT_MS);
        let mut register = Register::open(&right, Path::new("")).unwrap();
        assert_eq!(read_patiently(&mut register).await, (0, Bytes::new()));
        assert_eq!(cas(&mut register, 0, b"one").await, written(1));
        // The same password, in the URL.
        let encoded = POSTGRES_PASSWORD.replace(' ', "%20").replace('&', "%26");
        let url = server.url_at(server.port());
        let url = url.replace("millrace@", &format!("millrace:{encoded}@"));
        let in_url = RegisterOptions { password: None, url: url.parse().unwrap(), ..right.clone() };
        assert_eq!(read(&mut Register::open(&in_url, Path::new("")).unwrap()).await.0, 1);
        let secret = |text: &str| Some(text.to_owned().into());
        let wrong = RegisterOptions { password: secret("hunter2"), ..right.clone() };
        assert!(is_refused(&wrong, "hunter2").await);
        let none = RegisterOptions { password: None, ..right.clone() };
        assert!(is_refused(&none, POSTGRES_PASSWORD).await);
        let plain = RegisterOptions { tls: None, ..right.clone() };
        assert!(is_refused(&plain, POSTGRES_PASSWORD).await);
        let files = right.tls.clone().unwrap();
        let tls = Some(RegisterTls { identity: None, ..files.clone() });
        assert!(is_refused(&RegisterOptions { tls, ..right.clone() }, POSTGRES_PASSWORD).await);
        // A CA that has not signed it, as an impostor's would be.
        let directory = tempfile::tempdir().unwrap();
        common::quic::tls::Development::open(directory.path(), &[]).unwrap();
        let tls = Some(RegisterTls { ca: directory.path().join("ca.pem"), ..files });
        assert!(is_refused(&RegisterOptions { tls, ..right }, POSTGRES_PASSWORD).await);
    });
}
