//! The register's own thread: no disk, name look-up or handshake of a register ever holds the loop up.
//!
//! ```text
//!  the loop --RegisterRequest--> [questions, bounded] --> thread: one apply() at a time
//!           <--RegisterAnswer--- [answers]            <--         and how it went, for status
//!                                                            --> a read of its own where nobody asks
//! ```
//!
//! A healthy epoch asks nothing, so that the thread looks after a server by itself: status says that it has
//! gone long before a recovery needs it.
//!
//! Questions are carried out in their order, also those that the leader has given up: it goes by what it
//! reads after them. Dropping this ends the thread: at once while it waits for a server, after the write
//! while it waits for the file's disk.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use common::register::{RegisterAnswer, RegisterOp, RegisterOutcome, RegisterRequest};
use serde_json::{Value, json};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::register::{Register, RegisterOptions, RegisterUrl};

/// Questions that wait; the leader has one at a time, and gives a few up while a server hangs.
const QUESTIONS_MAX: usize = 16;
/// Answers that wait for the loop.
const ANSWERS_MAX: usize = 16;
/// How long a server is left alone before the thread asks it whether it is there.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// The register as the loop sees it.
pub(super) struct RegisterThread {
    questions: Option<mpsc::Sender<RegisterRequest>>,
    answers: mpsc::Receiver<RegisterAnswer>,
    /// Answers that need no register.
    refusals: VecDeque<RegisterAnswer>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    kind: &'static str,
    place: String,
    history: Arc<Mutex<History>>,
}

/// How the register has answered so far.
#[derive(Debug, Default)]
struct History {
    answers: u64,
    reach: Reach,
    /// When `reach` became what it is.
    since: Option<Instant>,
    last_error: Option<Failed>,
}

/// What the last answer says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Reach {
    #[default]
    Unasked,
    Reachable,
    Unreachable,
}

#[derive(Debug)]
struct Failed {
    code: &'static str,
    what: String,
    at: Instant,
}

/// The register's thread has ended, which it never does by itself.
#[derive(Debug)]
pub(super) struct Ended;

impl RegisterThread {
    /// Opens the register and starts its thread.
    pub(super) fn start(options: &RegisterOptions, directory: &Path) -> Result<Self> {
        let register = Register::open(options, directory)?;
        let (questions, asked) = mpsc::channel(QUESTIONS_MAX);
        let (answered, answers) = mpsc::channel(ANSWERS_MAX);
        let (stop, stopped) = oneshot::channel();
        let history = Arc::new(Mutex::new(History::default()));
        let shared = Arc::clone(&history);
        // The file answers from memory.
        let probe = if options.url == RegisterUrl::File { None } else { Some(PROBE_INTERVAL) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new()
            .name("register".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        biased;
                        () = serve(register, asked, answered, probe, &shared) => {}
                        _ = stopped => {}
                    }
                });
                // A name look-up may take its time yet.
                runtime.shutdown_background();
            })
            .context("the register's thread")?;
        Ok(Self {
            questions: Some(questions),
            answers,
            refusals: VecDeque::new(),
            stop: Some(stop),
            thread: Some(thread),
            kind: options.url.kind(),
            place: options.url.to_string(),
            history,
        })
    }

    /// Puts a question; [`RegisterThread::answer`] brings the answer. What there is no room for is
    /// unavailable.
    pub(super) fn ask(&mut self, request: RegisterRequest) -> Result<(), Ended> {
        let questions = self.questions.as_ref().ok_or(Ended)?;
        match questions.try_send(request) {
            Ok(()) => {}
            Err(TrySendError::Full(RegisterRequest { id, .. })) => {
                let what = "it has not answered the questions before".to_owned();
                let outcome = RegisterOutcome::Unavailable(what);
                self.refusals.push_back(RegisterAnswer { id, outcome });
            }
            Err(TrySendError::Closed(_)) => return Err(Ended),
        }
        Ok(())
    }

    /// The next answer. May be dropped and called again.
    pub(super) async fn answer(&mut self) -> RegisterAnswer {
        if let Some(refusal) = self.refusals.pop_front() {
            return refusal;
        }
        match self.answers.recv().await {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }

    /// For `status`.
    pub(super) fn report(&self) -> Value {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let since_ms = |at: Instant| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last_error = history.last_error.as_ref().map(
            |failed| json!({"code": failed.code, "what": failed.what, "ago_ms": since_ms(failed.at)}),
        );
        json!({
            "kind": self.kind,
            "at": self.place,
            "state": history.reach.name(),
            "since_ms": history.since.map(since_ms),
            "answers": history.answers,
            "last_error": last_error,
        })
    }
}

impl Drop for RegisterThread {
    fn drop(&mut self) {
        drop((self.questions.take(), self.stop.take()));
        if let Some(thread) = self.thread.take() {
            // Its panic was told when it happened.
            let _ = thread.join();
        }
    }
}

async fn serve(
    mut register: Register,
    mut asked: mpsc::Receiver<RegisterRequest>,
    answered: mpsc::Sender<RegisterAnswer>,
    probe: Option<Duration>,
    history: &Mutex<History>,
) {
    let take = |outcome: &RegisterOutcome| {
        history.lock().unwrap_or_else(PoisonError::into_inner).take(outcome);
    };
    loop {
        let request = tokio::select! {
            biased;
            request = asked.recv() => request,
            // A read that is dropped half-way has done nothing.
            outcome = look_after(&mut register, probe) => {
                take(&outcome);
                continue;
            }
        };
        let Some(RegisterRequest { id, op }) = request else { return };
        let outcome = register.apply(op).await;
        take(&outcome);
        if answered.send(RegisterAnswer { id, outcome }).await.is_err() {
            return;
        }
    }
}

/// A read after a while; never, without one.
async fn look_after(register: &mut Register, after: Option<Duration>) -> RegisterOutcome {
    match after {
        Some(after) => tokio::time::sleep(after).await,
        None => std::future::pending().await,
    }
    register.apply(RegisterOp::Read).await
}

impl History {
    fn take(&mut self, outcome: &RegisterOutcome) {
        let (code, what) = match outcome {
            RegisterOutcome::Unavailable(what) => ("register_unavailable", what),
            RegisterOutcome::Indeterminate(what) => ("register_indeterminate", what),
            RegisterOutcome::Value(..) | RegisterOutcome::Written(_) | RegisterOutcome::Lost => {
                self.answers += 1;
                if self.enter(Reach::Reachable) == Reach::Unreachable {
                    tracing::warn!("the register answers again");
                }
                return;
            }
        };
        if self.enter(Reach::Unreachable) != Reach::Unreachable {
            tracing::warn!("{code}: {what}");
        }
        self.last_error = Some(Failed { code, what: what.clone(), at: Instant::now() });
    }

    /// What it was before.
    fn enter(&mut self, reach: Reach) -> Reach {
        if self.reach != reach {
            self.since = Some(Instant::now());
        }
        std::mem::replace(&mut self.reach, reach)
    }
}

impl Reach {
    const fn name(self) -> &'static str {
        match self {
            Self::Unasked => "unasked",
            Self::Reachable => "reachable",
            Self::Unreachable => "unreachable",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn a_register_that_is_silent_holds_nobody_up() {
        run(async {
            // Takes connections, and that is all.
            let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
            let port = silent.local_addr().unwrap().port();
            let url = format!("postgres://me:hunter2@127.0.0.1:{port}/db?timeout_ms=60000");
            let options = RegisterOptions::new(url.parse().unwrap());
            let mut register = RegisterThread::start(&options, Path::new("")).unwrap();
            // One is being asked and as many as may wait are waiting; the next are refused.
            for id in 0..QUESTIONS_MAX as u64 + 3 {
                assert!(register.ask(RegisterRequest { id, op: RegisterOp::Read }).is_ok());
            }
            let answer = register.answer().await;
            assert!(answer.id >= QUESTIONS_MAX as u64, "{answer:?}");
            assert!(matches!(answer.outcome, RegisterOutcome::Unavailable(_)), "{answer:?}");
            let report = register.report();
            assert_eq!(report["at"], format!("postgres://me@127.0.0.1:{port}/db"));
            assert_eq!((&report["answers"], &report["last_error"]), (&json!(0), &Value::Null));
            // Ends at once, long before the minute is over: the test would hang.
        });
    }

    #[test]
    fn answers_come_in_order_and_failures_are_reported() {
        run(async {
            let directory = tempfile::tempdir().unwrap();
            let mut register =
                RegisterThread::start(&RegisterOptions::default(), directory.path()).unwrap();
            for id in 0..3 {
                assert!(register.ask(RegisterRequest { id, op: RegisterOp::Read }).is_ok());
            }
            for id in 0..3 {
                assert_eq!(register.answer().await.id, id);
            }
            let report = register.report();
            assert_eq!((&report["kind"], &report["answers"]), (&json!("file"), &json!(3)));
            drop(register);
            // Nobody listens on that port.
            let gone = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let port = gone.local_addr().unwrap().port();
            drop(gone);
            let url = format!("postgres://me:hunter2@127.0.0.1:{port}/db");
            let options = RegisterOptions::new(url.parse().unwrap());
            let mut register = RegisterThread::start(&options, directory.path()).unwrap();
            assert!(register.ask(RegisterRequest { id: 7, op: RegisterOp::Read }).is_ok());
            let answer = register.answer().await;
            assert!(matches!(answer.outcome, RegisterOutcome::Unavailable(_)), "{answer:?}");
            let report = register.report();
            assert_eq!(report["state"], "unreachable");
            assert_eq!(report["last_error"]["code"], "register_unavailable");
            let report = report.to_string();
            assert!(!report.contains("hunter2"), "{report}");
        });
    }
}
