//! Private PostgreSQL and etcd servers on loopback, for tests of the registers.
//!
//! ```text
//! RegisterServer::postgres() --initdb, postgres--> 127.0.0.1:<free port>, user millrace with a password
//! RegisterServer::etcd() ------etcd--------------> 127.0.0.1:<free port>, no users
//!
//! stop, kill, freeze ... thaw, start_again         on the same port, with the same data
//! ```
//!
//! The programs are Debian's (`scripts/setup` installs them). PostgreSQL does not run as root: root starts
//! it as the user `postgres`. A server ends with the thread that started it, at the latest.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use common::quic::tls::{ClientTls, Development, Identity};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The password of PostgreSQL's user `millrace`.
pub const POSTGRES_PASSWORD: &str = "f3nce & JUMP";
/// Another process may take a port between its choice and its use.
const PORTS_TRIED: usize = 5;
const POLL: Duration = Duration::from_millis(20);
/// A minute: no server takes that long to listen.
const LISTEN_POLLS: usize = 3000;

/// A private server in a child process. It ends when it is dropped.
#[derive(Debug)]
pub struct RegisterServer {
    directory: TempDir,
    port: u16,
    arguments: Vec<String>,
    stop_signal: Signal,
    /// What stands before and after host and port.
    url: (&'static str, &'static str),
    tls: Option<ClientTls>,
    child: Option<Child>,
}

impl RegisterServer {
    /// A PostgreSQL with one superuser, `millrace`, and the database `postgres`.
    ///
    /// # Panics
    /// When PostgreSQL is not installed or does not start.
    #[must_use]
    pub fn postgres() -> Self {
        start_postgres(false)
    }

    /// One that takes TLS connections only, and only with a certificate of its CA.
    ///
    /// # Panics
    /// As [`Self::postgres`].
    #[must_use]
    pub fn postgres_with_tls() -> Self {
        start_postgres(true)
    }

    /// An etcd of one member.
    ///
    /// # Panics
    /// When etcd is not installed or does not start.
    #[must_use]
    pub fn etcd() -> Self {
        start_etcd(false)
    }

    /// One that takes TLS connections only, and only with a certificate of its CA.
    ///
    /// # Panics
    /// As [`Self::etcd`].
    #[must_use]
    pub fn etcd_with_tls() -> Self {
        start_etcd(true)
    }

    /// Where it listens on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The register's URL without a password, by way of another port (a proxy's) if need be; `&name=value`
    /// may follow.
    #[must_use]
    pub fn url_at(&self, port: u16) -> String {
        format!("{}127.0.0.1:{port}{}", self.url.0, self.url.1)
    }

    /// What a client trusts and shows, with TLS.
    #[must_use]
    pub const fn tls(&self) -> Option<&ClientTls> {
        self.tls.as_ref()
    }

    /// Starts it again, on the same port.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "it runs");
        assert!(self.spawn(), "{}", self.log());
    }

    /// Ends it in good order.
    ///
    /// # Panics
    /// When it can't be waited for.
    pub fn stop(&mut self) {
        self.thaw();
        let Some(mut child) = self.child.take() else { return };
        // It may have ended by itself.
        let _ = kill_process(Pid::from_child(&child), self.stop_signal);
        child.wait().unwrap();
    }

    /// Ends it, and all that belongs to it, without a warning.
    ///
    /// # Panics
    /// When it had ended before.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.take().expect("it runs").wait().unwrap();
    }

    /// Keeps it from running until [`Self::thaw`].
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// To the process, then to its children, of which PostgreSQL has one a connection.
    fn signal(&self, signal: Signal) {
        let Some(child) = &self.child else { return };
        let parent = Pid::from_child(child);
        let id = parent.as_raw_nonzero();
        // Listed before: the children of a killed process are somebody else's at once.
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let _ = kill_process(parent, signal);
        for child in children.unwrap_or_default().split_ascii_whitespace() {
            if let Some(pid) = child.parse().ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, signal);
            }
        }
    }

    fn start_on_a_free_port(&mut self, arguments: impl Fn(u16) -> Vec<String>) {
        for _ in 0..PORTS_TRIED {
            self.port = free_port();
            self.arguments = arguments(self.port);
            if self.spawn() {
                return;
            }
        }
        panic!("{} ended: {}", self.arguments.join(" "), self.log());
    }

    /// Whether it listens; otherwise it has ended.
    fn spawn(&mut self) -> bool {
        let log = File::options().create(true).append(true).open(self.directory.path().join("log"));
        let log = log.unwrap();
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "INT"])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        for _ in 0..LISTEN_POLLS {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                self.child = Some(child);
                return true;
            }
            thread::sleep(POLL);
        }
        panic!("{} does not listen: {}", self.arguments.join(" "), self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for RegisterServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn start_postgres(with_tls: bool) -> RegisterServer {
    let owner = Owner::of_postgres();
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    initialise(&owner, directory.path(), &data);
    let mut settings = "fsync = off\nunix_socket_directories = ''\nshared_buffers = 8MB\n\
        listen_addresses = '127.0.0.1'\n"
        .to_owned();
    let certificates = with_tls.then(|| Certificates::new(directory.path()));
    if let Some(Certificates { shown, ca }) = &certificates {
        owner.give(&directory.path().join("tls"));
        for file in [ca, &shown.certificate, &shown.key] {
            owner.give(file);
        }
        settings += &format!(
            "ssl = on\nssl_ca_file = '{}'\nssl_cert_file = '{}'\nssl_key_file = '{}'\n",
            ca.display(),
            shown.certificate.display(),
            shown.key.display()
        );
        let rule = "hostssl all all 127.0.0.1/32 scram-sha-256 clientcert=verify-ca\n";
        fs::write(data.join("pg_hba.conf"), rule).unwrap();
    }
    let file = File::options().append(true).open(data.join("postgresql.conf"));
    std::io::Write::write_all(&mut file.unwrap(), settings.as_bytes()).unwrap();
    let mut server = RegisterServer {
        directory,
        port: 0,
        arguments: Vec::new(),
        // A fast shutdown.
        stop_signal: Signal::INT,
        url: ("postgres://millrace@", "/postgres?application_name=test"),
        tls: certificates.map(Certificates::into_client),
        child: None,
    };
    server.start_on_a_free_port(|port| {
        let mut arguments = owner.arguments();
        arguments.push(program("postgres").display().to_string());
        arguments.extend(["-D".to_owned(), data.display().to_string()]);
        arguments.extend(["-p".to_owned(), port.to_string()]);
        arguments
    });
    server
}

/// Makes the data directory.
fn initialise(owner: &Owner, directory: &Path, data: &Path) {
    let secret = directory.join("password");
    fs::write(&secret, POSTGRES_PASSWORD).unwrap();
    owner.give(directory);
    owner.give(&secret);
    let initdb = Command::new("setpriv")
        .args(["--pdeathsig", "INT"])
        .args(owner.arguments())
        .arg(program("initdb"))
        .args(["--no-sync", "--no-instructions", "--auth=scram-sha-256", "--encoding=UTF8"])
        .args(["--locale=C", "--username=millrace"])
        .arg(format!("--pwfile={}", secret.display()))
        .arg(data)
        .output()
        .unwrap();
    assert!(initdb.status.success(), "{}", String::from_utf8_lossy(&initdb.stderr));
}

fn start_etcd(with_tls: bool) -> RegisterServer {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let certificates = with_tls.then(|| Certificates::new(directory.path()));
    let mut certificate_arguments = Vec::new();
    if let Some(Certificates { shown, ca }) = &certificates {
        certificate_arguments.push("--client-cert-auth".to_owned());
        for (flag, file) in [
            ("--trusted-ca-file", ca),
            ("--cert-file", &shown.certificate),
            ("--key-file", &shown.key),
        ] {
            certificate_arguments.extend([flag.to_owned(), file.display().to_string()]);
        }
    }
    let mut server = RegisterServer {
        directory,
        port: 0,
        arguments: Vec::new(),
        stop_signal: Signal::TERM,
        url: ("etcd://", "/test?servername=127.0.0.1"),
        tls: certificates.map(Certificates::into_client),
        child: None,
    };
    server.start_on_a_free_port(|port| {
        let scheme = if with_tls { "https" } else { "http" };
        let client = format!("{scheme}://127.0.0.1:{port}");
        let peer = format!("http://127.0.0.1:{}", free_port());
        let mut arguments = vec![program("etcd").display().to_string()];
        for (flag, value) in [
            ("--data-dir", data.display().to_string().as_str()),
            ("--name", "alone"),
            ("--listen-client-urls", &client),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
            ("--initial-cluster", &format!("alone={peer}")),
            // Alone, it has nobody to wait for.
            ("--heartbeat-interval", "20"),
            ("--election-timeout", "200"),
            ("--bcrypt-cost", "4"),
            ("--log-level", "error"),
        ] {
            arguments.extend([flag.to_owned(), value.to_owned()]);
        }
        arguments.extend(certificate_arguments.iter().cloned());
        arguments
    });
    server
}

/// A port of 127.0.0.1 that nobody listens on at the moment.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// A development certificate is good for both sides.
struct Certificates {
    shown: Identity,
    ca: PathBuf,
}

impl Certificates {
    fn new(directory: &Path) -> Self {
        let made = Development::open(&directory.join("tls"), &[]).unwrap();
        Self { shown: made.server().identity, ca: made.client().ca }
    }

    fn into_client(self) -> ClientTls {
        ClientTls { ca: self.ca, identity: Some(self.shown), server_name: None }
    }
}

/// Whom the data belong to.
struct Owner(Option<(u32, u32)>);

impl Owner {
    fn of_postgres() -> Self {
        if !rustix::process::geteuid().is_root() {
            return Self(None);
        }
        let id = |flag: &str| -> u32 {
            let output = Command::new("id").args([flag, "postgres"]).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.trim().parse().expect("Debian's package has made the user postgres")
        };
        Self(Some((id("-u"), id("-g"))))
    }

    fn give(&self, path: &Path) {
        if let Some((user, group)) = self.0 {
            chown(path, Some(user), Some(group)).unwrap();
        }
        let mode = if path.is_dir() { 0o700 } else { 0o600 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// For setpriv.
    fn arguments(&self) -> Vec<String> {
        let Some((user, group)) = self.0 else { return Vec::new() };
        let (user, group) = (format!("--reuid={user}"), format!("--regid={group}"));
        vec![user, group, "--clear-groups".to_owned()]
    }
}

/// A program where Debian's package has put it, as in `/usr/lib/postgresql/15/bin`, or on the path.
fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|directory| directory.join(name));
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let packaged = versions.map(|version| version.path().join("bin").join(name));
    let newest = packaged.filter(|file| file.is_file()).max();
    let found = newest.into_iter().chain(on_path).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("no {name}: scripts/setup installs it"))
}
