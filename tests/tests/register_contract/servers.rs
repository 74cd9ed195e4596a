//! What a register on a server keeps, whatever the server and whatever happens to it.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use common::register::{RegisterOp, RegisterOutcome};
use millrace::register::{Register, RegisterOptions, RegisterTls};
use tests::{Cutter, Harm, POSTGRES_PASSWORD, RegisterServer};

use super::{
    WRITERS, cas, decide, has_one_winner, keeps_values, read, read_patiently, survives_an_outage,
    written,
};

/// So long that only a hang reaches it.
pub(super) const PATIENT_MS: u64 = 30_000;
/// For where the time-out is what is waited for.
pub(super) const HASTY_MS: u64 = 500;
const POLL: Duration = Duration::from_millis(5);

/// How a register reaches the server, by way of a port.
pub(super) fn options(
    server: &RegisterServer,
    port: u16,
    cluster: &str,
    limit_ms: u64,
) -> RegisterOptions {
    let url = format!("{}&timeout_ms={limit_ms}", server.url_at(port));
    let tls = server.tls().cloned();
    RegisterOptions {
        cluster: cluster.to_owned(),
        password: Some(POSTGRES_PASSWORD.to_owned().into()),
        tls: tls.map(|tls| RegisterTls { ca: tls.ca, identity: tls.identity }),
        ..RegisterOptions::new(url.parse().unwrap())
    }
}

pub(super) fn open(server: &RegisterServer, cluster: &str, limit_ms: u64) -> Register {
    open_at(server, server.port(), cluster, limit_ms)
}

fn open_at(server: &RegisterServer, port: u16, cluster: &str, limit_ms: u64) -> Register {
    Register::open(&options(server, port, cluster, limit_ms), Path::new("")).unwrap()
}

/// The whole contract.
pub(super) async fn keeps_the_contract(server: &mut RegisterServer) {
    // Four that may make a table at once, on a server that may still be starting.
    let mut registers: [Register; WRITERS] =
        std::array::from_fn(|_| open(server, "race", PATIENT_MS));
    let [one, two, three, four] = &mut registers;
    tokio::join!(
        read_patiently(one),
        read_patiently(two),
        read_patiently(three),
        read_patiently(four)
    );
    keeps_values(&|cluster| open(server, cluster, PATIENT_MS)).await;
    has_one_winner(&mut registers).await;
    admits_doubt(server).await;
    lets_a_read_decide(server).await;
    let mut register = open(server, "outage", PATIENT_MS);
    // The connection may turn out to be dead only after the request was handed to it.
    survives_an_outage(&mut register, 1, &mut |running| match running {
        true => server.start_again(),
        false => server.stop(),
    })
    .await;
}

async fn admits_doubt(server: &RegisterServer) {
    let server_port = server.port();
    let open = |port, limit_ms, name: &str| open_at(server, port, name, limit_ms);
    let cutter = Cutter::start(server_port).await;
    for round in 0..2 {
        for harm in [Harm::CutBefore, Harm::CutAfter, Harm::Silence] {
            // Each has a register of its own: what was given up may be carried out at any time.
            let name = format!("{harm:?} in round {round}");
            let mut direct = open(server_port, PATIENT_MS, &name);
            assert_eq!(cas(&mut direct, 0, b"before").await, written(1));
            let value = format!("<<{name}>>").into_bytes();
            let limit_ms = if harm == Harm::Silence { HASTY_MS } else { PATIENT_MS };
            // On a loaded machine the hasty one may give up before it has sent anything.
            let outcome = loop {
                cutter.arm(harm, &value);
                let mut register = open(cutter.port(), limit_ms, &name);
                let outcome = write_and_cut(&mut register, &value, &cutter, &mut direct).await;
                if cutter.is_done() {
                    break outcome;
                }
                assert!(matches!(outcome, RegisterOutcome::Unavailable(_)), "{outcome:?}");
            };
            assert!(matches!(outcome, RegisterOutcome::Indeterminate(_)), "{harm:?}: {outcome:?}");
            let before = (1, Bytes::from_static(b"before"));
            let after = (2, Bytes::from(value));
            let found = read(&mut direct).await;
            let is_possible = match harm {
                Harm::CutBefore => found == before,
                Harm::CutAfter => found == after,
                _ => found == before || found == after,
            };
            assert!(is_possible, "{harm:?}: {found:?}");
        }
    }
    let mut direct = open(server_port, PATIENT_MS, "swallowed");
    let mut register = open(cutter.port(), HASTY_MS, "swallowed");
    let (revision, before) = read(&mut direct).await;
    cutter.arm(Harm::Swallow, b"");
    let outcome = cas(&mut register, revision, b"swallowed").await;
    assert!(matches!(outcome, RegisterOutcome::Unavailable(_)), "{outcome:?}");
    let outcome = register.apply(RegisterOp::Read).await;
    assert!(matches!(outcome, RegisterOutcome::Unavailable(_)), "{outcome:?}");
    // The same register finds its way back.
    cutter.arm(Harm::None, b"");
    assert_eq!(read_patiently(&mut register).await, (revision, before));
}

/// Writes at revision 1; cuts the connection as soon as the value is there.
async fn write_and_cut(
    register: &mut Register,
    value: &[u8],
    cutter: &Cutter,
    direct: &mut Register,
) -> RegisterOutcome {
    let mut writing = std::pin::pin!(cas(register, 1, value));
    loop {
        tokio::select! {
            biased;
            outcome = &mut writing => return outcome,
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
        if read(direct).await.0 == 2 {
            cutter.cut();
        }
    }
}

/// The value reaches a server that is frozen, or one that is being killed.
async fn lets_a_read_decide(server: &mut RegisterServer) {
    let cutter = Cutter::start(server.port()).await;
    for is_killed in [false, true] {
        let name = if is_killed { "killed" } else { "frozen" };
        let mut direct = open(server, name, PATIENT_MS);
        assert_eq!(cas(&mut direct, 0, b"before").await, written(1));
        let value = format!("<<{name}>>").into_bytes();
        let limit_ms = if is_killed { PATIENT_MS } else { HASTY_MS };
        let outcome = loop {
            cutter.arm(Harm::Hold, &value);
            let mut register = open_at(server, cutter.port(), name, limit_ms);
            let mut writing = std::pin::pin!(cas(&mut register, 1, &value));
            let early = loop {
                tokio::select! {
                    biased;
                    outcome = &mut writing => break Some(outcome),
                    () = tokio::time::sleep(POLL) => {}
                }
                if cutter.is_done() {
                    break None;
                }
            };
            // On a loaded machine the hasty one may give up before it has sent anything.
            if matches!(early, Some(RegisterOutcome::Unavailable(_))) {
                continue;
            }
            if is_killed {
                server.kill();
            } else {
                server.freeze();
            }
            cutter.cut();
            break match early {
                Some(outcome) => outcome,
                None => writing.await,
            };
        };
        assert!(matches!(outcome, RegisterOutcome::Indeterminate(_)), "{name}: {outcome:?}");
        let there = open(server, name, HASTY_MS).apply(RegisterOp::Read).await;
        assert!(matches!(there, RegisterOutcome::Unavailable(_)), "{name}: {there:?}");
        if is_killed {
            server.start_again();
            assert!(!decide(&mut direct, 1, &value).await, "it has reached nobody");
        } else {
            server.thaw();
            // Either, for good: the loser stays out.
            let has_happened = decide(&mut direct, 1, &value).await;
            let (revision, found) = read(&mut direct).await;
            assert_eq!((revision, found == value), (2, has_happened));
        }
    }
}

/// Unavailable, for a reason that does not repeat the password.
pub(super) async fn is_refused(options: &RegisterOptions, password: &str) -> bool {
    let mut register = Register::open(options, Path::new("")).unwrap();
    match register.apply(RegisterOp::Read).await {
        RegisterOutcome::Unavailable(what) => {
            assert!(!what.contains(password), "{what}");
            assert!(!format!("{register:?} {options:?}").contains(password));
            true
        }
        other => panic!("{other:?}"),
    }
}
