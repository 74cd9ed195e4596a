//! A node in a process of its own.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use client::face::{Client, ConnectOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{Ended, HANG, binary, millrace};

/// Options of `serve` for segments of 1 MiB: a little data fills several.
pub const SMALL_FILES: &[&str] = &[
    "--knob",
    "segment_bytes=1_048_576",
    "--knob",
    "transaction_bytes_max=262_144",
    "--knob",
    "batch_bytes_max=262_144",
];

/// Options of `serve` for segments of 256 KiB, which can be copied hundreds of times.
pub const TINY_FILES: &[&str] = &[
    "--knob",
    "segment_bytes=262_144",
    "--knob",
    "transaction_bytes_max=65_536",
    "--knob",
    "batch_bytes_max=65_536",
];

/// A running `millrace serve`. It is killed when it is dropped.
#[derive(Debug)]
pub struct Node {
    directory: PathBuf,
    options: Vec<String>,
    address: String,
    child: Child,
}

impl Node {
    /// Starts a node on a free port and waits until it serves.
    ///
    /// # Panics
    /// When it does not come to serve.
    #[must_use]
    pub fn start(directory: &Path, options: &[&str]) -> Self {
        Self::try_start(directory, options).unwrap_or_else(|ended| panic!("no node: {ended:?}"))
    }

    /// Starts a node on a free port; waits until it serves or ends.
    ///
    /// # Errors
    /// How it ended, when it came to an end before it served.
    pub fn try_start(directory: &Path, options: &[&str]) -> Result<Self, Ended> {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        Self::spawn(directory, options, "127.0.0.1:0")
    }

    fn spawn(directory: &Path, options: Vec<String>, listen: &str) -> Result<Self, Ended> {
        let stderr = File::create(stderr_file(directory)).unwrap();
        let mut child = Command::new(binary())
            .args(["serve", "-o", "json", "--listen", listen, "--dir"])
            .arg(directory)
            .args(&options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        match first_line(&mut child) {
            Some(line) => {
                let ready: Value = serde_json::from_str(&line).unwrap();
                assert_eq!(ready["pid"], child.id());
                let address = ready["serving"].as_str().unwrap().to_owned();
                Ok(Self { directory: directory.to_owned(), options, address, child })
            }
            None => {
                let code = child.wait().unwrap().code();
                let stderr = fs::read_to_string(stderr_file(directory)).unwrap();
                Err(Ended { code, stdout: String::new(), stderr })
            }
        }
    }

    /// Where it keeps everything.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What it has said on stderr in this life.
    ///
    /// # Panics
    /// When the file is gone.
    #[must_use]
    pub fn stderr(&self) -> String {
        fs::read_to_string(stderr_file(&self.directory)).unwrap()
    }

    /// Kills the process without a warning.
    ///
    /// # Panics
    /// When it had ended before.
    pub fn kill(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "the node had ended by itself: {ended:?}\n{}", self.stderr());
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again where it was, after [`Node::kill`]; how long it took until it served.
    ///
    /// # Panics
    /// When it does not come to serve.
    pub fn start_again(&mut self) -> Duration {
        let began = Instant::now();
        let again = Self::spawn(&self.directory, self.options.clone(), &self.address);
        *self = again.unwrap_or_else(|ended| panic!("no node again: {ended:?}"));
        began.elapsed()
    }

    /// Ends it in good order and waits for that.
    ///
    /// # Panics
    /// When the exit code is not 0, or the node hangs.
    pub fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let deadline = Instant::now() + HANG;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the node does not stop");
            thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(status.code(), Some(0), "{}", self.stderr());
    }

    /// Runs a verb against it and expects exit code 0.
    ///
    /// # Panics
    /// When the exit code is another.
    pub fn cli(&self, args: &[&str]) -> Ended {
        self.try_cli(args).with_code(0)
    }

    /// Runs a verb against it, with JSON for results.
    pub fn try_cli(&self, args: &[&str]) -> Ended {
        let directory = self.directory.to_str().unwrap();
        millrace(&[args, &["-o", "json", "--dir", directory]].concat())
    }

    /// A client of it.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn client(&self) -> Client {
        let options = self.connect_options();
        Client::connect([self.address.clone()], options).await.unwrap()
    }

    /// How clients reach it.
    #[must_use]
    pub fn connect_options(&self) -> ConnectOptions {
        let mut options = ConnectOptions::new(self.directory.join("tls/ca.pem"));
        options.connect_timeout = HANG;
        options
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let stderr = fs::read_to_string(stderr_file(&self.directory)).unwrap_or_default();
            #[expect(clippy::print_stderr, reason = "for whoever reads why a test failed")]
            {
                eprintln!("the node's stderr:\n{stderr}");
            }
        }
    }
}

/// Beside the directory, so that the directory holds nothing but the node's own.
fn stderr_file(directory: &Path) -> PathBuf {
    directory.with_extension("stderr")
}

/// The first line on stdout; `None` when the process has ended without one.
fn first_line(child: &mut Child) -> Option<String> {
    let stdout = child.stdout.take().unwrap();
    let (done, line) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        done.send(read.map(|_| line))
    });
    match line.recv_timeout(HANG) {
        Ok(line) => Some(line.unwrap()).filter(|line| !line.is_empty()),
        Err(_) => {
            child.kill().unwrap();
            panic!("the node neither serves nor ends");
        }
    }
}
