//! Verbs that run to their end.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{HANG, binary};

/// How a verb ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// What it said on stdout.
    pub stdout: String,
    /// What it said on stderr.
    pub stderr: String,
}

impl Ended {
    /// Itself, if it ended with this exit code.
    ///
    /// # Panics
    /// When it ended otherwise.
    #[must_use]
    pub fn with_code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Every line of stdout as JSON.
    ///
    /// # Panics
    /// When a line is none.
    #[must_use]
    pub fn json(&self) -> Vec<Value> {
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line:?}"));
        self.stdout.lines().map(parse).collect()
    }

    /// The only line of stdout, as JSON.
    ///
    /// # Panics
    /// When there are more, or none.
    #[must_use]
    pub fn one_json(&self) -> Value {
        let mut lines = self.json();
        assert_eq!(lines.len(), 1, "{}", self.stdout);
        lines.remove(0)
    }
}

/// Runs `millrace` with these arguments.
///
/// # Panics
/// When it can't be started, or hangs.
pub fn millrace<A: AsRef<OsStr>>(args: &[A]) -> Ended {
    millrace_with_stdin(args, "")
}

/// Runs `millrace` with these arguments and this on stdin.
///
/// # Panics
/// When it can't be started, or hangs.
pub fn millrace_with_stdin<A: AsRef<OsStr>>(args: &[A], stdin: &str) -> Ended {
    let mut child = Command::new(binary())
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut pipe, stdin) = (child.stdin.take().unwrap(), stdin.to_owned());
    let writer = thread::spawn(move || {
        // A verb that has ended does not read the rest.
        let _ = pipe.write_all(stdin.as_bytes());
    });
    let ended = ended_within_hang(child);
    writer.join().unwrap();
    ended
}

/// Waits for a child whose output is piped; one that hangs is killed.
pub(crate) fn ended_within_hang(child: Child) -> Ended {
    let pid = Pid::from_child(&child);
    let (done, output) = mpsc::channel();
    thread::spawn(move || done.send(child.wait_with_output()));
    match output.recv_timeout(HANG) {
        Ok(output) => {
            let output = output.unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
            Ended { code: output.status.code(), stdout, stderr }
        }
        Err(_) => {
            kill_process(pid, Signal::KILL).unwrap();
            panic!("process {pid:?} hangs");
        }
    }
}
