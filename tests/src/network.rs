//! A network of the test's own: a namespace for each node, a bridge between them, and cuts.
//!
//! ```text
//!  namespace of the test            namespaces of the nodes
//!   10.77.0.254 bridge --veth-- 10.77.0.1     a cut takes the node's end off the bridge:
//!      clients     |----veth--- 10.77.0.2     what it sends, and what it is sent, vanishes
//!      register    '----veth--- 10.77.0.3
//! ```
//!
//! The namespaces have no names: each is held by a process, and is gone with it. Nothing outside is touched.
//! A test runs itself again inside; see [`inside`].

use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use rustix::process::geteuid;

use crate::binary;

/// Says to a test that it runs inside already.
const INSIDE: &str = "MILLRACE_INSIDE_NETWORK";
/// Where the test itself is.
pub const HUB: &str = "10.77.0.254";
const BRIDGE: &str = "bridge";
const POLL: Duration = Duration::from_millis(10);
/// Ten seconds: no process takes that long to be in its namespace.
const POLLS: usize = 1000;

/// Whether a test goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Inside {
    /// It runs in a network of its own.
    Yes,
    /// It has run there, or can't.
    Done,
}

/// Runs the test of this name again in a network namespace of its own, unless that is where it is. Without
/// root, or without `ip`, it says so and leaves the test out.
///
/// # Panics
/// When the test has failed there.
pub fn inside(test: &str) -> Inside {
    if env::var_os(INSIDE).is_some() {
        return Inside::Yes;
    }
    let why = if !geteuid().is_root() {
        Some("network namespaces need root")
    } else if Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_err() {
        Some("no `ip`: scripts/setup installs iproute2")
    } else {
        None
    };
    if let Some(why) = why {
        #[expect(clippy::print_stderr, reason = "for whoever wonders what was tested")]
        {
            eprintln!("left out: {why}");
        }
        return Inside::Done;
    }
    let status = Command::new("unshare")
        .args(["--net", "setpriv", "--pdeathsig", "KILL"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(INSIDE, "1")
        .env("MILLRACE_BINARY", binary())
        .status()
        .unwrap();
    assert!(status.success(), "{test} inside its network: {status}");
    Inside::Done
}

/// The nodes' namespaces. They are gone when it is dropped.
pub struct Network {
    holders: Vec<Child>,
}

impl Network {
    /// Makes the network for so many nodes.
    ///
    /// # Panics
    /// When it can't be made, or the test is not [`inside`].
    #[must_use]
    pub fn new(nodes: u64) -> Self {
        assert!(env::var_os(INSIDE).is_some(), "not in anybody else's network");
        ip(&["link", "set", "lo", "up"]);
        ip(&["link", "add", BRIDGE, "type", "bridge", "forward_delay", "0"]);
        ip(&["addr", "add", &format!("{HUB}/24"), "dev", BRIDGE]);
        ip(&["link", "set", BRIDGE, "up"]);
        let mut network = Self { holders: Vec::new() };
        for id in 1..=nodes {
            let holder = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
                .stdin(Stdio::null())
                .spawn()
                .unwrap();
            network.holders.push(holder);
            network.plug(id);
        }
        network
    }

    fn plug(&self, id: u64) {
        let pid = self.holder(id);
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        let theirs = || fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let mut polls = 0..POLLS;
        while theirs().is_none_or(|theirs| theirs == own) {
            assert!(polls.next().is_some(), "the namespace of node {id} does not come");
            thread::sleep(POLL);
        }
        let (port, end, pid) = (port(id), format!("end-{id}"), pid.to_string());
        ip(&["link", "add", &port, "type", "veth", "peer", "name", &end]);
        ip(&["link", "set", &end, "netns", &pid]);
        ip(&["link", "set", &port, "master", BRIDGE, "up"]);
        for command in [
            &["link", "set", "lo", "up"][..],
            &["addr", "add", &format!("{}/24", Self::address(id)), "dev", &end],
            &["link", "set", &end, "up"],
        ] {
            let mut enter = Command::new("nsenter");
            enter.arg(format!("--net=/proc/{pid}/ns/net")).arg("ip").args(command);
            assert!(enter.status().unwrap().success(), "{command:?}");
        }
    }

    fn holder(&self, id: u64) -> u32 {
        self.holders[usize::try_from(id).unwrap() - 1].id()
    }

    /// Where a node is.
    #[must_use]
    pub fn address(id: u64) -> String {
        format!("10.77.0.{id}")
    }

    /// What to put before a command so that it runs where the node is. The process is the command's own.
    #[must_use]
    pub fn enter(&self, id: u64) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--net=/proc/{}/ns/net", self.holder(id))]
    }

    /// Nothing reaches the node or leaves it until [`Self::heal`].
    pub fn cut(&self, id: u64) {
        ip(&["link", "set", &port(id), "nomaster"]);
    }

    /// Undoes [`Self::cut`].
    pub fn heal(&self, id: u64) {
        ip(&["link", "set", &port(id), "master", BRIDGE]);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for holder in &mut self.holders {
            // It may have ended already.
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

fn port(id: u64) -> String {
    format!("port-{id}")
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().unwrap();
    assert!(status.success(), "ip {}: {status}", arguments.join(" "));
}
