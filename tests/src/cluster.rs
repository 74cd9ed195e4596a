//! Several nodes that know each other, each in a process of its own.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use client::face::{Client, ConnectOptions};
use common::quic::tls::{DEVELOPMENT_NAME, make_development_cluster};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::child::ended_within_hang;
use crate::{Ended, HANG, binary, millrace};

const POLL: Duration = Duration::from_millis(20);

/// Who plays which role; nodes are numbered from 1.
#[derive(Clone, Debug)]
pub struct Roles {
    /// How many nodes there are.
    pub nodes: u64,
    /// Who may lead.
    pub leaders: Vec<u64>,
    /// A proxy for each.
    pub proxies: Vec<u64>,
    /// The resolver's node.
    pub resolver: u64,
    /// Who keeps the log.
    pub log_servers: Vec<u64>,
    /// Copies.
    pub replication: u64,
}

impl Roles {
    /// Everything everywhere.
    #[must_use]
    pub fn all(nodes: u64) -> Self {
        let all: Vec<u64> = (1..=nodes).collect();
        let (leaders, log_servers) = (all.clone(), all);
        Self { nodes, leaders, proxies: vec![1, 2], resolver: 1, log_servers, replication: 2 }
    }
}

/// Where the nodes and their register are.
#[derive(Clone, Debug)]
pub struct Site {
    /// `host:port` of each node, from 1.
    pub addresses: Vec<String>,
    /// The register's URL.
    pub register: String,
    /// What stands before each node's command.
    pub enter: Vec<Vec<String>>,
    /// More options of `serve`.
    pub options: Vec<String>,
}

impl Site {
    /// On free ports of loopback, with a register in a file of this directory.
    fn loopback(directory: &Path, nodes: u64) -> Self {
        let sockets: Vec<UdpSocket> =
            (0..nodes).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let address = |socket: &UdpSocket| socket.local_addr().unwrap().to_string();
        Self {
            addresses: sockets.iter().map(address).collect(),
            register: format!("file://{}", directory.join("register").display()),
            enter: vec![Vec::new(); sockets.len()],
            options: Vec::new(),
        }
    }
}

struct Member {
    child: Child,
    serving: mpsc::Receiver<String>,
}

/// Nodes on one directory. Those that run are killed when it is dropped.
pub struct Cluster {
    directory: PathBuf,
    roles: Roles,
    site: Site,
    running: BTreeMap<u64, Member>,
}

impl Cluster {
    /// Makes the certificates and the definition; nothing runs yet.
    ///
    /// # Panics
    /// When the directory can't be written.
    #[must_use]
    pub fn new(directory: &Path, roles: Roles) -> Self {
        let site = Site::loopback(directory, roles.nodes);
        Self::at(directory, roles, site)
    }

    /// The same, somewhere else.
    ///
    /// # Panics
    /// When the directory can't be written.
    #[must_use]
    pub fn at(directory: &Path, roles: Roles, site: Site) -> Self {
        let names: Vec<_> = (1..=roles.nodes)
            .map(|id| (format!("node-{id}"), vec![format!("node-{id}")]))
            .collect();
        make_development_cluster(&directory.join("tls"), &names).unwrap();
        let running = BTreeMap::new();
        let cluster = Self { directory: directory.to_owned(), roles, site, running };
        fs::write(cluster.definition(), cluster.definition_text("test", "tls")).unwrap();
        cluster
    }

    /// Makes a cluster, starts every node and waits until all serve.
    #[must_use]
    pub fn serving(directory: &Path, roles: Roles) -> Self {
        Self::new(directory, roles).started()
    }

    /// Starts every node and waits until all serve.
    #[must_use]
    pub fn started(mut self) -> Self {
        let cluster = &mut self;
        (1..=cluster.roles.nodes).for_each(|id| cluster.start(id));
        (1..=cluster.roles.nodes).for_each(|id| cluster.wait_until_serving(id));
        self
    }

    /// The definition's file.
    #[must_use]
    pub fn definition(&self) -> PathBuf {
        self.directory.join("cluster.toml")
    }

    /// Where a node keeps everything.
    #[must_use]
    pub fn node_directory(&self, id: u64) -> PathBuf {
        self.directory.join(format!("node-{id}"))
    }

    /// What the definition says, for a cluster of this name with the certificates in this directory.
    #[must_use]
    pub fn definition_text(&self, name: &str, tls: &str) -> String {
        let Roles { leaders, proxies, resolver, log_servers, replication, .. } = &self.roles;
        let mut text = format!(
            "cluster = \"{name}\"\nregister = \"{}\"\nleaders = {leaders:?}\n\
             proxies = {proxies:?}\nresolvers = [{{ node = {resolver} }}]\n\
             log_servers = {log_servers:?}\nreplication = {replication}\nca = \"{tls}/ca.pem\"\n",
            self.site.register
        );
        for (id, address) in (1..).zip(&self.site.addresses) {
            text += &format!(
                "[[nodes]]\nid = {id}\naddress = \"{address}\"\nlabel = \"rack {id}\"\n\
                 tls_name = \"node-{id}\"\ncertificate = \"{tls}/node-{id}.pem\"\n\
                 key = \"{tls}/node-{id}.key\"\n"
            );
        }
        text
    }

    /// The command that runs a node, without its definition.
    fn serve(&self, id: u64, options: &[&str]) -> Command {
        // A node that no definition knows has no place of its own.
        let enter = self.site.enter.get(place(id)).map_or(&[][..], Vec::as_slice);
        let mut command = Command::new(enter.first().map_or(binary().as_os_str(), OsStr::new));
        command.args(enter.iter().skip(1));
        if !enter.is_empty() {
            command.arg(binary());
        }
        command
            .args(["serve", "-o", "json", "--log", "warn,millrace=info"])
            .args(["--node", &id.to_string(), "--dir"])
            .arg(self.node_directory(id))
            .args(&self.site.options)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }

    /// Starts a node; does not wait.
    pub fn start(&mut self, id: u64) {
        let definition = self.definition();
        self.start_with(id, &["--cluster", definition.to_str().unwrap()]);
    }

    /// Starts a node with these options instead of the definition.
    ///
    /// # Panics
    /// When it runs already.
    pub fn start_with(&mut self, id: u64, options: &[&str]) {
        let stderr = File::options().create(true).append(true).open(self.stderr_file(id)).unwrap();
        let mut child = self.serve(id, options).stderr(stderr).spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let (told, serving) = mpsc::channel();
        thread::spawn(move || {
            let mut line = String::new();
            if BufReader::new(stdout).read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                // A test that has ended does not listen.
                let _ = told.send(line);
            }
        });
        let twin = self.running.insert(id, Member { child, serving });
        assert!(twin.is_none(), "node {id} runs already");
    }

    /// Runs a node with these options until it ends by itself.
    #[must_use]
    pub fn run_to_end(&self, id: u64, options: &[&str]) -> Ended {
        ended_within_hang(self.serve(id, options).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Waits until a node serves for the first time in its life.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_until_serving(&self, id: u64) {
        let line = self.running[&id].serving.recv_timeout(HANG);
        let line =
            line.unwrap_or_else(|why| panic!("node {id} does not serve: {why}\n{}", self.logs()));
        let ready: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(ready["serving"], self.address(id));
    }

    /// Kills a node without a warning.
    pub fn kill(&mut self, id: u64) {
        let mut member = self.running.remove(&id).unwrap();
        member.child.kill().unwrap();
        member.child.wait().unwrap();
    }

    /// Keeps a node from running until [`Self::thaw`].
    pub fn freeze(&self, id: u64) {
        self.signal(id, Signal::STOP);
    }

    /// Lets it go on.
    pub fn thaw(&self, id: u64) {
        self.signal(id, Signal::CONT);
    }

    fn signal(&self, id: u64, signal: Signal) {
        kill_process(Pid::from_child(&self.running[&id].child), signal).unwrap();
    }

    /// Ends a node in good order.
    ///
    /// # Panics
    /// When it does not end, or not well.
    pub fn stop(&mut self, id: u64) {
        let member = self.running.remove(&id).unwrap();
        kill_process(Pid::from_child(&member.child), Signal::TERM).unwrap();
        let ended = ended_within_hang(member.child);
        assert_eq!(ended.code, Some(0), "{}", self.logs());
    }

    /// Where a node is.
    #[must_use]
    pub fn address(&self, id: u64) -> String {
        self.site.addresses[place(id)].clone()
    }

    /// All addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        (1..=self.roles.nodes).map(|id| self.address(id)).collect()
    }

    /// Runs a verb against the cluster, with JSON for results.
    #[must_use]
    pub fn cli(&self, args: &[&str]) -> Ended {
        let directory = self.directory.to_str().unwrap();
        millrace(&[args, &["-o", "json", "--dir", directory]].concat())
    }

    /// What one node says of itself; `None` when it does not answer.
    #[must_use]
    pub fn try_status(&self, id: u64) -> Option<Value> {
        let ca = self.directory.join("tls/ca.pem");
        let address = self.address(id);
        let at = ["--connect", &address, "--tls-ca", ca.to_str().unwrap()];
        let ended =
            millrace(&[&["status", "-o", "json", "--connect-seconds", "5"][..], &at].concat());
        (ended.code == Some(0)).then(|| ended.one_json())
    }

    /// Asks a node again and again until it says what is wanted.
    ///
    /// # Panics
    /// When it never does.
    pub fn wait_for(&self, id: u64, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + HANG;
        let mut last = None;
        while Instant::now() < deadline {
            last = self.try_status(id).or(last);
            if let Some(status) = last.as_ref().filter(|status| is_so(status)) {
                return status.clone();
            }
            thread::sleep(POLL);
        }
        panic!("node {id} never says {what}; last {last:?}\n{}", self.logs());
    }

    /// What a node says of its link to another.
    #[must_use]
    pub fn link(status: &Value, to: u64) -> &Value {
        let links = status["cluster"]["nodes"].as_array().unwrap();
        links.iter().find(|link| link["node"] == format!("n{to}")).unwrap()
    }

    /// Who leads the epoch that this node serves.
    #[must_use]
    pub fn leader(&self, asked: u64) -> u64 {
        let status = self.wait_for(asked, "who leads", |status| status["serving"] == true);
        status["plan"]["leader"].as_str().unwrap()[1..].parse().unwrap()
    }

    /// How a client reaches the cluster.
    #[must_use]
    pub fn client_options(&self) -> ConnectOptions {
        let mut options = ConnectOptions::new(self.directory.join("tls/ca.pem"));
        options.tls.server_name = Some(DEVELOPMENT_NAME.to_owned());
        options.connect_timeout = HANG;
        options
    }

    /// A client that was told of these nodes.
    ///
    /// # Panics
    /// When none answers.
    pub async fn client(&self, nodes: &[u64]) -> Client {
        let addresses = nodes.iter().map(|id| self.address(*id));
        Client::connect(addresses, self.client_options()).await.unwrap()
    }

    /// What a node has said on stderr in all its lives.
    #[must_use]
    pub fn stderr(&self, id: u64) -> String {
        fs::read_to_string(self.stderr_file(id)).unwrap_or_default()
    }

    fn stderr_file(&self, id: u64) -> PathBuf {
        self.directory.join(format!("node-{id}.stderr"))
    }

    fn logs(&self) -> String {
        (1..=self.roles.nodes).map(|id| format!("node {id}:\n{}", self.stderr(id))).collect()
    }
}

fn place(id: u64) -> usize {
    usize::try_from(id).unwrap() - 1
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for member in self.running.values_mut() {
            // It may have ended already.
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
        if thread::panicking() {
            #[expect(clippy::print_stderr, reason = "for whoever reads why a test failed")]
            {
                eprintln!("{}", self.logs());
            }
        }
    }
}
