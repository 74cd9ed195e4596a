//! A node of our own in a process of its own, so that it can be killed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::register::REGISTER_VARIABLE;

/// A running `millrace serve`.
pub(crate) struct ChildNode {
    directory: PathBuf,
    address: String,
    options: Vec<String>,
    child: Child,
}

impl ChildNode {
    /// Starts a node on a free port and waits until it serves.
    pub(crate) fn start(directory: &Path) -> Result<Self> {
        Self::start_with(directory, Vec::new())
    }

    /// The same with further options of `serve`.
    pub(crate) fn start_with(directory: &Path, options: Vec<String>) -> Result<Self> {
        let (child, address) = spawn(directory, "127.0.0.1:0", &options)?;
        Ok(Self { directory: directory.to_owned(), address, options, child })
    }

    /// Kills the node as a power switch would the process, and starts it again where it was.
    pub(crate) fn kill_and_restart(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        (self.child, self.address) = spawn(&self.directory, &self.address, &self.options)?;
        Ok(())
    }

    /// Ends the node in good order.
    pub(crate) fn stop(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the node ended with {status}");
        Ok(())
    }
}

impl Drop for ChildNode {
    fn drop(&mut self) {
        // Whatever went wrong: nothing of ours goes on running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(directory: &Path, listen: &str, options: &[String]) -> Result<(Child, String)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["serve", "-o", "json", "--listen", listen, "--dir"])
        .arg(directory)
        .args(options)
        // Alone, whatever cluster the environment is for.
        .env_remove(REGISTER_VARIABLE)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the node")?;
    let stdout = child.stdout.take().context("the pipe that was asked for")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    if line.is_empty() {
        let status = child.wait()?;
        anyhow::bail!("the node did not start: {status}");
    }
    let ready: Value = serde_json::from_str(&line)?;
    let address = ready["serving"].as_str().context("the node's address")?.to_owned();
    Ok((child, address))
}
