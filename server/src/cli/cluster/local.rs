//! `millrace cluster start-local`: certificates, a definition and N nodes, in one command.
//!
//! ```text
//!  DIR/cluster.toml    the definition
//!  DIR/tls/            ca.pem, node-1.pem, node-1.key, ...
//!  DIR/register        shared by all nodes, unless --register says where
//!  DIR/node-1/         a data directory for each node; DIR/node-1.log has what it says
//! ```
//!
//! Each node is a child process in a process group of its own, so that Ctrl-C reaches only this one, which
//! then asks each child by its pid. A child also stops when this process is gone: its stdin ends.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use common::quic::tls::make_development_cluster;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::sync::mpsc;

use super::DEFINITION_FILE;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output::{Output, complain};
use crate::cli::register::REGISTER_VARIABLE;
use crate::cli::serve::stop_signal;
use crate::definition::Definition;
use crate::host::development_tls;
use crate::register::{RegisterUrl, Secret};

/// Nodes on one machine.
const NODES_MAX: u64 = 16;
/// How often the children are looked after.
const LOOK: Duration = Duration::from_millis(50);
/// How long they are given to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(15);

/// Makes a cluster on this machine and runs its nodes.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  millrace cluster start-local --nodes 3 --dir ./local\n  \
    millrace cluster start-local --register postgres://millrace@127.0.0.1/log\n\n\
    Started again on the same directory, the same cluster goes on. Prints a line when all nodes serve.")]
pub(crate) struct StartLocalArgs {
    /// How many nodes.
    #[arg(long, value_name = "COUNT", default_value_t = 3,
        value_parser = clap::value_parser!(u64).range(1..=NODES_MAX))]
    nodes: u64,
    /// Where everything is kept; a temporary directory, removed at the end, when there is none.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Copies of each stream; 2 when there are so many nodes.
    #[arg(long, value_name = "COUNT")]
    replication: Option<u64>,
    /// How many nodes, the last ones, keep the log; all of them when not said.
    #[arg(long, value_name = "COUNT")]
    log_servers: Option<u64>,
    /// The port of the first node, those of the others follow; free ones are picked when not said.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// The register: postgres://... or etcd://...; a file that the nodes share when not said.
    #[arg(long, value_name = "URL")]
    register: Option<Secret>,
    /// Sets a knob of every node; see `millrace knobs`.
    #[arg(long = "knob", value_name = "NAME=VALUE")]
    knobs: Vec<String>,
}

impl StartLocalArgs {
    /// A cluster that another verb runs for itself.
    pub(crate) fn of(
        (nodes, log_servers, replication): (u64, u64, u64),
        register: Option<Secret>,
        knobs: Vec<String>,
    ) -> Self {
        Self {
            nodes,
            dir: None,
            replication: Some(replication),
            log_servers: Some(log_servers),
            port: None,
            register,
            knobs,
        }
    }
}

/// A node of ours.
pub(crate) struct Running {
    pub(crate) id: u64,
    pub(crate) child: Child,
    pub(crate) ended: Option<ExitStatus>,
}

/// Makes the cluster when it is not there, and runs it.
///
/// # Errors
/// When it can't be made, or a node does not come to serve.
pub(super) fn run(args: &StartLocalArgs, output: Output) -> Result<Exit> {
    let temporary = match &args.dir {
        Some(_) => None,
        None => Some(tempfile::tempdir()?),
    };
    let given = args.dir.as_deref().or(temporary.as_ref().map(tempfile::TempDir::path));
    let directory = given.context("one of the two")?;
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let directory = directory.canonicalize()?;
    let definition = make(args, &directory)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (lines, mut serving) = mpsc::unbounded_channel();
        let mut running: Vec<Running> = Vec::new();
        let started = definition.nodes.iter().try_for_each(|node| {
            running.push(start(args, &directory, node.id.0, lines.clone())?);
            anyhow::Ok(())
        });
        drop(lines);
        let watched = match started {
            Ok(()) => watch(&directory, &definition, &mut running, &mut serving, output).await,
            Err(error) => Err(error),
        };
        stop(&mut running).await?;
        watched
    })
}

/// Prints when all nodes serve; returns when asked to stop, or when none is left.
async fn watch(
    directory: &Path,
    definition: &Definition,
    running: &mut [Running],
    serving: &mut mpsc::UnboundedReceiver<u64>,
    output: Output,
) -> Result<Exit> {
    let mut stop = std::pin::pin!(stop_signal());
    let (mut waiting, mut is_told) = (running.len(), false);
    loop {
        tokio::select! {
            biased;
            () = &mut stop => return Ok(Exit::Done),
            Some(_) = serving.recv(), if !is_told => {
                waiting -= 1;
                if waiting == 0 {
                    is_told = true;
                    tell(directory, definition, running, output)?;
                }
            }
            () = tokio::time::sleep(LOOK) => {}
        }
        for node in running.iter_mut().filter(|node| node.ended.is_none()) {
            let Some(status) = node.child.try_wait()? else { continue };
            node.ended = Some(status);
            let log = log_file(directory, node.id);
            complain(&format!(
                "millrace: node {} has ended: {status}; see {}",
                node.id,
                log.display()
            ));
            if !is_told {
                complain(fs::read_to_string(&log).unwrap_or_default().trim_end());
                return Ok(Exit::Failed);
            }
            let (again, at) = (directory.join(DEFINITION_FILE), node_directory(directory, node.id));
            output.say(&format!(
                "start it again with: millrace serve --cluster {} --node {} --dir {}",
                again.display(),
                node.id,
                at.display()
            ));
        }
        if running.iter().all(|node| node.ended.is_some()) {
            return Ok(Exit::Failed);
        }
    }
}

fn tell(
    directory: &Path,
    definition: &Definition,
    running: &[Running],
    output: Output,
) -> Result<()> {
    let nodes: Vec<_> = definition
        .nodes
        .iter()
        .zip(running)
        .map(|(node, child)| {
            json!({
                "node": node.id.to_string(),
                "id": node.id.0,
                "address": node.address,
                "pid": child.child.id(),
                "dir": node_directory(directory, node.id.0),
            })
        })
        .collect();
    let addresses: Vec<&str> = definition.nodes.iter().map(|node| node.address.as_str()).collect();
    let connect = addresses.join(",");
    let json = json!({
        "cluster": definition.cluster,
        "dir": directory,
        "definition": directory.join(DEFINITION_FILE),
        "connect": connect,
        "tls_ca": definition.ca,
        "nodes": nodes,
    });
    output.print(&json, || {
        let mut text = format!("cluster {:?} serves", definition.cluster);
        for (node, child) in definition.nodes.iter().zip(running) {
            text += &format!("\n  {}  {}  pid {}", node.id, node.address, child.child.id());
        }
        let at = directory.display();
        text + &format!("\ntry: millrace cluster describe --dir {at}\nCtrl-C stops it")
    })
}

/// Starts a node, which tells its id when it serves.
///
/// # Errors
/// When there is no process for it.
pub(crate) fn start(
    args: &StartLocalArgs,
    directory: &Path,
    id: u64,
    lines: mpsc::UnboundedSender<u64>,
) -> Result<Running> {
    let log = OpenOptions::new().create(true).append(true).open(log_file(directory, id))?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["serve", "-o", "json", "--log", "warn,millrace=info", "--stop-with-stdin"])
        .arg("--cluster")
        .arg(directory.join(DEFINITION_FILE))
        .args(["--node", &id.to_string(), "--dir"])
        .arg(node_directory(directory, id))
        // The definition says where it is.
        .env_remove(REGISTER_VARIABLE)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log);
    for knob in &args.knobs {
        command.args(["--knob", knob]);
    }
    let mut child = command.spawn().context("starting a node")?;
    let stdout = child.stdout.take().context("the pipe that was asked for")?;
    std::thread::Builder::new().name(format!("node {id}")).spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        if read.is_ok() && !line.is_empty() {
            // Nobody waits any more when this process is about to end.
            let _ = lines.send(id);
        }
    })?;
    Ok(Running { id, child, ended: None })
}

/// Asks every child to stop, and ends those that do not.
///
/// # Errors
/// When a child can't be waited for.
pub(crate) async fn stop(running: &mut [Running]) -> Result<()> {
    for node in running.iter_mut().filter(|node| node.ended.is_none()) {
        // It may just have ended: it is ours until it is waited for, so its pid is nobody else's.
        let _ = kill_process(Pid::from_child(&node.child), Signal::TERM);
    }
    let deadline = Instant::now() + STOP_PATIENCE;
    for node in running.iter_mut().filter(|node| node.ended.is_none()) {
        loop {
            if let Some(status) = node.child.try_wait()? {
                node.ended = Some(status);
                break;
            }
            if Instant::now() > deadline {
                complain(&format!("millrace: node {} does not stop and is killed", node.id));
                node.child.kill()?;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    Ok(())
}

/// The cluster in the directory, which is made when there is none.
///
/// # Errors
/// When it can't be made, or is another one.
pub(crate) fn make(args: &StartLocalArgs, directory: &Path) -> Result<Definition> {
    let file = directory.join(DEFINITION_FILE);
    let wrong = |what: String| Failure::usage(what);
    if !file.exists() {
        let stems: Vec<_> = (1..=args.nodes).map(|id| (stem(id), vec![stem(id)])).collect();
        make_development_cluster(&development_tls(directory), &stems)?;
        let text = definition_text(args, directory)?;
        // Checked before it is there.
        Definition::parse(&text, directory).map_err(|error| wrong(error.to_string()))?;
        let beside = directory.join("cluster.toml.new");
        fs::write(&beside, text)?;
        File::open(&beside)?.sync_all()?;
        fs::rename(&beside, &file)?;
    }
    let definition = Definition::read(&file).map_err(|error| wrong(error.to_string()))?;
    for node in &definition.nodes {
        fs::create_dir_all(node_directory(directory, node.id.0))?;
    }
    let there = definition.nodes.len() as u64;
    if there != args.nodes {
        let what = format!(
            "cluster_conflict: {} has {there} nodes, not {}: say --nodes {there}",
            file.display(),
            args.nodes
        );
        return Err(wrong(what).into());
    }
    Ok(definition)
}

fn definition_text(args: &StartLocalArgs, directory: &Path) -> Result<String> {
    let count = args.nodes;
    let list = |ids: std::ops::RangeInclusive<u64>| {
        let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
        format!("[{}]", ids.join(", "))
    };
    let register = match &args.register {
        Some(url) => url.reveal().to_owned(),
        None => format!("file://{}", encode(&directory.join("register"))),
    };
    if register.parse() == Ok(RegisterUrl::File) {
        return Err(Failure::usage("cluster_register: `file` is for a node alone").into());
    }
    let log_servers = args.log_servers.unwrap_or(count).clamp(1, count);
    let replication = args.replication.unwrap_or_else(|| log_servers.min(2));
    let ports = ports(args)?;
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let mut text = format!(
        "# Made by `millrace cluster start-local`.\n\
         cluster = \"local\"\n\
         register = {}\n\
         leaders = {}\n\
         proxies = {}\n\
         resolvers = [{{ node = 1 }}]\n\
         log_servers = {}\n\
         replication = {replication}\n\
         ca = \"tls/ca.pem\"\n",
        quoted(&register),
        list(1..=count),
        list(1..=count.min(2)),
        list(count - log_servers + 1..=count),
    );
    for (id, port) in (1..=count).zip(ports) {
        text += &format!(
            "\n[[nodes]]\nid = {id}\naddress = \"127.0.0.1:{port}\"\ntls_name = \"{0}\"\n\
             certificate = \"tls/{0}.pem\"\nkey = \"tls/{0}.key\"\n",
            stem(id)
        );
    }
    Ok(text)
}

/// Ports that are free now.
fn ports(args: &StartLocalArgs) -> Result<Vec<u16>> {
    if let Some(first) = args.port {
        let last = u64::from(first) + args.nodes - 1;
        if u16::try_from(last).is_err() {
            return Err(Failure::usage(format!("there is no port {last}")).into());
        }
        return Ok((0..args.nodes).map(|place| first + place as u16).collect());
    }
    // All at once, so that they differ.
    let sockets: Vec<UdpSocket> = (0..args.nodes)
        .map(|_| UdpSocket::bind(("127.0.0.1", 0)))
        .collect::<std::io::Result<_>>()?;
    let ports = sockets.iter().map(|socket| Ok(socket.local_addr()?.port()));
    ports.collect::<std::io::Result<_>>().map_err(Into::into)
}

fn stem(id: u64) -> String {
    format!("node-{id}")
}

fn node_directory(directory: &Path, id: u64) -> PathBuf {
    directory.join(stem(id))
}

pub(crate) fn log_file(directory: &Path, id: u64) -> PathBuf {
    directory.join(format!("{}.log", stem(id)))
}

/// A path as a URL has it.
fn encode(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let mut out = String::new();
    for byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-~+".contains(byte) {
            out.push(char::from(*byte));
        } else {
            out += &format!("%{byte:02x}");
        }
    }
    out
}
