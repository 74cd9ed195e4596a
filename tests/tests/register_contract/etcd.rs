//! The register in etcd.

use std::path::Path;

use bytes::Bytes;
use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use millrace::register::{Register, RegisterOptions, RegisterTls};
use tests::{RegisterServer, run};

use super::servers::{HASTY_MS, PATIENT_MS, is_refused, keeps_the_contract, options};
use super::{cas, read, read_patiently, written};

#[test]
fn etcd_keeps_the_contract() {
    let mut server = RegisterServer::etcd();
    run(keeps_the_contract(&mut server));
}

/// A client of the test's own.
async fn connect(server: &RegisterServer) -> Client {
    let files = server.tls().expect("it has TLS");
    let identity = files.identity.as_ref().expect("it shows a certificate");
    let read = |path: &Path| std::fs::read(path).unwrap();
    let tls = TlsOptions::new()
        .ca_certificate(Certificate::from_pem(read(&files.ca)))
        .identity(Identity::from_pem(read(&identity.certificate), read(&identity.key)));
    let endpoint = format!("https://127.0.0.1:{}", server.port());
    Client::connect([endpoint], Some(ConnectOptions::new().with_tls(tls))).await.unwrap()
}

#[test]
fn etcd_is_verified_and_asks_for_a_password_and_a_certificate() {
    let server = RegisterServer::etcd_with_tls();
    run(async {
        let open = options(&server, server.port(), "tls", PATIENT_MS);
        let mut register = Register::open(&open, Path::new("")).unwrap();
        assert_eq!(read_patiently(&mut register).await, (0, Bytes::new()));
        assert_eq!(cas(&mut register, 0, b"one").await, written(1));
        let mut admin = connect(&server).await;
        admin.user_add("root", "hunter2", None).await.unwrap();
        admin.user_grant_role("root", "root").await.unwrap();
        admin.auth_enable().await.unwrap();

        let with = |password: &str, limit_ms: u64| {
            let url = server.url_at(server.port()).replace("etcd://", "etcd://root@");
            let url = format!("{url}&timeout_ms={limit_ms}");
            let password = Some(password.to_owned().into());
            RegisterOptions { url: url.parse().unwrap(), password, ..open.clone() }
        };
        let right = with("hunter2", PATIENT_MS);
        assert_eq!(read(&mut Register::open(&right, Path::new("")).unwrap()).await.0, 1);
        assert!(is_refused(&with("swordfish", 10 * HASTY_MS), "swordfish").await);
        let right = with("hunter2", HASTY_MS);
        let plain = RegisterOptions { tls: None, ..right.clone() };
        assert!(is_refused(&plain, "hunter2").await);
        let files = right.tls.clone().unwrap();
        let tls = Some(RegisterTls { identity: None, ..files.clone() });
        assert!(is_refused(&RegisterOptions { tls, ..right.clone() }, "hunter2").await);
        let directory = tempfile::tempdir().unwrap();
        common::quic::tls::Development::open(directory.path(), &[]).unwrap();
        let tls = Some(RegisterTls { ca: directory.path().join("ca.pem"), ..files });
        assert!(is_refused(&RegisterOptions { tls, ..right }, "hunter2").await);
    });
}
