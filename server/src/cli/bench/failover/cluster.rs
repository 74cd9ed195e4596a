//! The cluster under the bench: five child processes of its own, killed and started by pid.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::sync::mpsc;

use super::FailoverArgs;
use crate::cli::cluster::local::{self, Running, StartLocalArgs};
use crate::cli::connect::ConnectArgs;
use crate::definition::Definition;

/// Nodes, log servers, copies.
const SHAPE: (u64, u64, u64) = (5, 3, 2);
/// How long one node is given to tell how it stands.
const NODE_PATIENCE: Duration = Duration::from_secs(1);
/// How long the cluster is given to be whole.
const WHOLE_PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked at until it is.
const LOOK: Duration = Duration::from_millis(100);

/// Who plays which role in the newest epoch.
pub(super) struct Roles {
    pub(super) epoch: u64,
    pub(super) leader: u64,
    pub(super) proxies: Vec<u64>,
    pub(super) resolvers: Vec<u64>,
    pub(super) log_servers: Vec<u64>,
}

/// Nodes that run. Whatever ends this process ends them, too: their stdin ends.
pub(super) struct Cluster {
    args: StartLocalArgs,
    directory: PathBuf,
    definition: Definition,
    running: Vec<Running>,
    lines: mpsc::UnboundedSender<u64>,
    _serving: mpsc::UnboundedReceiver<u64>,
}

impl Cluster {
    /// Makes the cluster and starts all nodes.
    pub(super) fn start(args: &FailoverArgs, directory: &Path) -> Result<Self> {
        let args = StartLocalArgs::of(SHAPE, args.register.clone(), args.knobs.clone());
        let definition = local::make(&args, directory)?;
        let (lines, serving) = mpsc::unbounded_channel();
        let directory = directory.to_owned();
        let running = Vec::new();
        let mut cluster = Self { args, directory, definition, running, lines, _serving: serving };
        for id in 1..=SHAPE.0 {
            cluster.start_node(id)?;
        }
        Ok(cluster)
    }

    pub(super) fn connect(&self) -> ConnectArgs {
        ConnectArgs::local(&self.directory)
    }

    /// Starts a node, or starts it again.
    pub(super) fn start_node(&mut self, id: u64) -> Result<()> {
        self.running.retain(|node| node.id != id || node.ended.is_none());
        ensure!(self.running.iter().all(|node| node.id != id), "node {id} runs");
        self.running.push(local::start(&self.args, &self.directory, id, self.lines.clone())?);
        Ok(())
    }

    /// Sends a node this signal.
    pub(super) fn signal(&self, id: u64, signal: Signal) -> Result<()> {
        let node = self.running.iter().find(|node| node.id == id && node.ended.is_none());
        let node = node.with_context(|| format!("node {id} does not run"))?;
        // It is ours until it is waited for, so its pid is nobody else's.
        Ok(kill_process(Pid::from_child(&node.child), signal)?)
    }

    /// Whether a node's process has ended.
    pub(super) fn has_ended(&mut self, id: u64) -> Result<bool> {
        let node = self.running.iter_mut().find(|node| node.id == id).context("a node of ours")?;
        if node.ended.is_none() {
            node.ended = node.child.try_wait()?;
        }
        Ok(node.ended.is_some())
    }

    /// Ends all nodes in good order.
    pub(super) async fn stop(&mut self) -> Result<()> {
        local::stop(&mut self.running).await
    }

    /// Waits until every node serves the same epoch and no log server is missing from it.
    pub(super) async fn whole(&mut self) -> Result<Roles> {
        let connect = self.connect();
        let deadline = Instant::now() + WHOLE_PATIENCE;
        loop {
            let mut statuses = Vec::new();
            for node in &self.definition.nodes {
                let asked = connect.status_of(&node.address, NODE_PATIENCE);
                let asked = tokio::time::timeout(NODE_PATIENCE, asked).await;
                statuses.extend(asked.ok().and_then(Result::ok));
            }
            if let Some(roles) = whole(&statuses) {
                return Ok(roles);
            }
            for id in 1..=SHAPE.0 {
                let log = local::log_file(&self.directory, id);
                ensure!(
                    !self.has_ended(id)?,
                    "node {id} has ended by itself; see {}",
                    log.display()
                );
            }
            ensure!(
                Instant::now() < deadline,
                "not every node serves with every log server: {statuses:#?}"
            );
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in self.running.iter_mut().filter(|node| node.ended.is_none()) {
            // Whatever went wrong: nothing of ours goes on running.
            let _ = node.child.kill();
            let _ = node.child.wait();
        }
    }
}

/// The roles, if all of these are all nodes, which agree and lack nobody.
fn whole(statuses: &[Value]) -> Option<Roles> {
    let epoch = statuses.first()?["epoch"].as_u64()?;
    let agrees = |status: &Value| status["epoch"] == epoch && status["serving"] == true;
    if statuses.len() as u64 != SHAPE.0 || !statuses.iter().all(agrees) {
        return None;
    }
    let plan = &statuses[0]["plan"];
    let id = |name: &Value| name.as_str()?.strip_prefix('n')?.parse().ok();
    let ids = |role: &str| plan[role].as_array()?.iter().map(id).collect::<Option<Vec<u64>>>();
    let log_servers = ids("log_servers")?;
    (log_servers.len() as u64 == SHAPE.1).then_some(Roles {
        epoch,
        leader: id(&plan["leader"])?,
        proxies: ids("proxies")?,
        resolvers: ids("resolvers")?,
        log_servers,
    })
}
