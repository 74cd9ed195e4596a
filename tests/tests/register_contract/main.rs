//! One contract for all registers, kept by the real ones: the file, the simulator's, a private PostgreSQL, a
//! private etcd.
//!
//! ```text
//!                       file  shared  simulated  postgres  etcd
//! keeps_values           x      x        x         x       x    fresh, stale, the largest; opened again
//! has_one_winner                x        x         x       x    four writers at once, again and again
//! survives_an_outage                     x         x       x    unavailable without it, then as before
//! admits_doubt                                     x       x    a connection that breaks around a write
//! lets_a_read_decide                     x         x       x    frozen or killed within a write
//! ```
//!
//! The directory's lock keeps a second handle out of the file: there is nobody to win against. Neither file
//! has a connection to lose.

#[cfg(feature = "etcd")]
#[expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]
mod etcd;
#[cfg(feature = "postgres")]
#[expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]
mod postgres;
#[cfg(any(feature = "postgres", feature = "etcd"))]
#[expect(clippy::unwrap_used, reason = "whatever goes wrong fails the test")]
mod servers;
mod simulated;

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use common::register::{REGISTER_BYTES_MAX, RegisterOp, RegisterOutcome, Revision};
use millrace::register::{Register, RegisterOptions};
use tests::run;

const ROUNDS: u64 = 100;
const WRITERS: usize = 4;

/// What keeps the contract.
trait Kept {
    async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome;
}

impl Kept for Register {
    async fn apply(&mut self, op: RegisterOp) -> RegisterOutcome {
        Self::apply(self, op).await
    }
}

async fn cas(register: &mut impl Kept, expect: u64, value: &[u8]) -> RegisterOutcome {
    let value = Bytes::copy_from_slice(value);
    register.apply(RegisterOp::Cas { expect: Revision(expect), value }).await
}

async fn read(register: &mut impl Kept) -> (u64, Bytes) {
    match register.apply(RegisterOp::Read).await {
        RegisterOutcome::Value(revision, value) => (revision.0, value),
        other => panic!("{other:?}"),
    }
}

/// Reads until the register is there: a server that has just started may not take questions yet.
async fn read_patiently(register: &mut impl Kept) -> (u64, Bytes) {
    loop {
        match register.apply(RegisterOp::Read).await {
            RegisterOutcome::Value(revision, value) => return (revision.0, value),
            RegisterOutcome::Unavailable(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            other => panic!("{other:?}"),
        }
    }
}

const fn written(revision: u64) -> RegisterOutcome {
    RegisterOutcome::Written(Revision(revision))
}

async fn keeps_values<K: Kept>(open: &dyn Fn(&str) -> K) {
    let mut register = open("values");
    assert_eq!(read(&mut register).await, (0, Bytes::new()));
    assert_eq!(cas(&mut register, 1, b"early").await, RegisterOutcome::Lost);
    assert_eq!(cas(&mut register, 0, b"one").await, written(1));
    assert_eq!(cas(&mut register, 0, b"stale").await, RegisterOutcome::Lost);
    assert_eq!(cas(&mut register, 2, b"early").await, RegisterOutcome::Lost);
    assert_eq!(cas(&mut register, u64::MAX, b"absurd").await, RegisterOutcome::Lost);
    assert_eq!(read(&mut register).await, (1, Bytes::from_static(b"one")));
    let mut revision = 1;
    for length in [0, 1, 4095, REGISTER_BYTES_MAX] {
        let value: Vec<u8> = (0..length).map(|n: usize| (n * 7) as u8).collect();
        revision += 1;
        assert_eq!(cas(&mut register, revision - 1, &value).await, written(revision));
        assert_eq!(read(&mut register).await, (revision, Bytes::from(value)));
    }
    let before = read(&mut register).await;
    drop(register);
    let mut register = open("values");
    assert_eq!(read(&mut register).await, before);
    assert_eq!(cas(&mut register, 1, b"stale").await, RegisterOutcome::Lost);
    let mut other = open("another cluster");
    assert_eq!(read(&mut other).await, (0, Bytes::new()));
}

async fn has_one_winner<K: Kept>(registers: &mut [K; WRITERS]) {
    let [one, two, three, four] = registers;
    for round in 0..ROUNDS {
        let values: [Vec<u8>; WRITERS] =
            std::array::from_fn(|n| format!("{round} {n}").into_bytes());
        let outcomes: [RegisterOutcome; WRITERS] = tokio::join!(
            cas(one, round, &values[0]),
            cas(two, round, &values[1]),
            cas(three, round, &values[2]),
            cas(four, round, &values[3])
        )
        .into();
        let won = written(round + 1);
        let winners: Vec<usize> = (0..WRITERS).filter(|n| outcomes[*n] == won).collect();
        assert_eq!(winners.len(), 1, "round {round}: {outcomes:?}");
        let losers = outcomes.iter().filter(|outcome| **outcome == RegisterOutcome::Lost);
        assert_eq!(losers.count(), WRITERS - 1, "round {round}: {outcomes:?}");
        assert_eq!(read(three).await, (round + 1, Bytes::from(values[winners[0]].clone())));
    }
}

/// `set_running` stops the server and starts it again. `doubts_max` of the writes meanwhile may be
/// indeterminate.
async fn survives_an_outage(
    register: &mut impl Kept,
    doubts_max: usize,
    set_running: &mut dyn FnMut(bool),
) {
    let before = Bytes::from_static(b"before the outage");
    let (revision, _) = read_patiently(register).await;
    assert_eq!(cas(register, revision, &before).await, written(revision + 1));
    set_running(false);
    let mut doubts = 0;
    for _ in 0..3 {
        match cas(register, revision + 1, b"into the void").await {
            RegisterOutcome::Indeterminate(_) => doubts += 1,
            RegisterOutcome::Unavailable(_) => {}
            other => panic!("{other:?}"),
        }
        let there = register.apply(RegisterOp::Read).await;
        assert!(matches!(there, RegisterOutcome::Unavailable(_)), "{there:?}");
    }
    assert!(doubts <= doubts_max, "{doubts} doubts");
    set_running(true);
    let found = read_patiently(register).await;
    let is_late = doubts_max > 1 && found == (revision + 2, Bytes::from_static(b"into the void"));
    assert!(is_late || found == (revision + 1, before), "{found:?}");
}

/// Whether an indeterminate write of `value` at `revision` has happened. A read tells, once a write at what
/// was read has kept a late one out.
async fn decide(register: &mut impl Kept, revision: u64, value: &[u8]) -> bool {
    loop {
        let (found, bytes) = read_patiently(register).await;
        if found > revision {
            assert_eq!(found, revision + 1, "one of the two");
            assert!(bytes == *value || bytes == *DECIDED, "{bytes:?} is nobody's");
            return bytes == *value;
        }
        // However it ends, the next read shows it.
        let _ = cas(register, revision, DECIDED).await;
    }
}

const DECIDED: &[u8] = b"decided";

#[test]
fn the_file_keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    let open = |cluster: &str| {
        let directory = directory.path().join(cluster);
        std::fs::create_dir_all(&directory).unwrap();
        Register::open(&RegisterOptions::default(), &directory).unwrap()
    };
    run(keeps_values(&open));
}

#[test]
fn the_shared_file_keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    let open = |cluster: &str| {
        let url = format!("file://{}", directory.path().join(cluster).display());
        let url = url.replace(' ', "%20").parse().unwrap();
        Register::open(&RegisterOptions::new(url), Path::new("")).unwrap()
    };
    run(keeps_values(&open));
    run(has_one_winner(&mut std::array::from_fn(|_| open("raced"))));
}

/// Handles of one file on threads of their own: what one has written no other writes over.
#[test]
fn threads_that_share_a_file_count_together() {
    const INCREMENTS: u64 = 50;
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}", directory.path().join("counter").display());
    let count = || {
        let options = RegisterOptions::new(url.parse().unwrap());
        let mut register = Register::open(&options, Path::new("")).unwrap();
        run(async {
            let mut done = 0;
            while done < INCREMENTS {
                let (revision, bytes) = read(&mut register).await;
                let before: u64 = std::str::from_utf8(&bytes).unwrap().parse().unwrap_or(0);
                let after = (before + 1).to_string();
                let outcome = cas(&mut register, revision, after.as_bytes()).await;
                done += u64::from(outcome == written(revision + 1));
            }
            read(&mut register).await
        })
    };
    let counts = std::thread::scope(|scope| {
        let all: Vec<_> = (0..WRITERS).map(|_| scope.spawn(count)).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    });
    let total = WRITERS as u64 * INCREMENTS;
    assert_eq!(counts, (total, Bytes::from(total.to_string())));
}
