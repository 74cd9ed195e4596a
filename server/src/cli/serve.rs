//! `millrace serve`: one node, alone or of a cluster, until it is told to stop.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use common::Knobs;
use common::quic::tls::{Identity, ServerTls};
use logserver::driver::{Barrier, EngineKind, Options as DriverOptions};
use serde_json::json;

use super::exit::{Exit, Failure};
use super::output::{Output, complain};
use super::register::{EXAMPLES, RegisterArgs};
use crate::definition::{Definition, DefinitionError};
use crate::host::{Host, HostOptions, Membership};

/// The file in the data directory that names the address of the node that runs there.
pub(crate) const ADDRESS_FILE: &str = "address";
/// Where a node listens that nobody has told.
const LISTEN: &str = "127.0.0.1:7070";

/// How the log disk is driven.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum EngineChoice {
    /// io_uring.
    Ring,
    /// Plain reads and writes.
    Plain,
}

/// How a write becomes durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum BarrierChoice {
    /// fdatasync after the writes.
    Fdatasync,
    /// Writes with RWF_DSYNC.
    Dsync,
}

/// Runs a node.
#[derive(Args, Clone, Debug)]
#[command(after_help = format!("Examples:\n  millrace serve --dir ./data --listen 127.0.0.1:7070\n\
    \x20 millrace serve --cluster cluster.toml --node 2 --dir ./node-2\n\
    {EXAMPLES}\n\n\
    Prints one line when the first epoch serves, and stops in good order on SIGTERM or SIGINT."))]
pub(crate) struct ServeArgs {
    /// Where everything is kept; made when it does not exist.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// The cluster's definition, a TOML file: the book's page `cluster` draws it.
    #[arg(long, value_name = "FILE", requires = "node")]
    pub(crate) cluster: Option<PathBuf>,
    /// Which of its nodes this is.
    #[arg(long, value_name = "ID", requires = "cluster")]
    pub(crate) node: Option<u64>,
    /// Where clients, and the other nodes, connect; port 0 picks one. Without it 127.0.0.1:7070, or the
    /// node's address in the cluster's definition.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// A TOML file with `knobs = { name = value }`.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sets a knob (see `millrace knobs`); wins over the file.
    #[arg(long = "knob", value_name = "NAME=VALUE", value_parser = parse_knob)]
    pub(crate) knobs: Vec<(String, u64)>,
    /// Bytes that the log may use.
    #[arg(long, value_name = "BYTES")]
    pub(crate) quota_bytes: Option<u64>,
    /// Bytes of the file system that are left to others.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    reserve_free_bytes: u64,
    /// How long the node looks for work before it sleeps, in microseconds, while there is some again and
    /// again: takes some 150 us off a commit where clients are few, for as much of a core. 0 never does.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 300)]
    idle_poll_us: u64,
    /// Reads the whole log and checks every checksum before opening it. Without it, sealed segments are
    /// opened by their footers, and a rotten block in them is found when it is read.
    #[arg(long)]
    verify: bool,
    /// Forces an engine instead of choosing one.
    #[arg(long, value_enum)]
    engine: Option<EngineChoice>,
    /// Forces a barrier instead of measuring.
    #[arg(long, value_enum)]
    barrier: Option<BarrierChoice>,
    #[command(flatten)]
    register: RegisterArgs,
    /// A certificate chain of a real CA, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Only clients with a certificate of this CA connect.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Stops in good order when stdin ends: with whoever has started the node.
    #[arg(long, hide = true)]
    stop_with_stdin: bool,
    /// A name or address that the development certificate also holds.
    #[arg(long = "tls-dev-name", value_name = "NAME")]
    names: Vec<String>,
}

fn parse_knob(text: &str) -> Result<(String, u64), String> {
    let (name, value) = text.split_once('=').ok_or("NAME=VALUE")?;
    let value = value.replace('_', "").parse().map_err(|error| format!("{value}: {error}"))?;
    Ok((name.to_owned(), value))
}

impl ServeArgs {
    fn options(&self) -> Result<HostOptions> {
        let mut knobs = Knobs::default();
        if let Some(path) = &self.config {
            read_config(path, &mut knobs)?;
        }
        for (name, value) in &self.knobs {
            if !knobs.set(name, *value) {
                let what = format!("no knob {name:?}; `millrace knobs` lists them");
                return Err(Failure::usage(what).into());
            }
        }
        knobs.check().map_err(Failure::usage)?;
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Some(ServerTls {
                identity: Identity { certificate: certificate.clone(), key: key.clone() },
                client_ca: self.tls_client_ca.clone(),
                node_ca: None,
            }),
            _ => None,
        };
        let cluster = self.membership()?;
        let register = match &cluster {
            Some(cluster) => self.register.options_of(&cluster.definition)?,
            None => self.register.options()?,
        };
        Ok(HostOptions {
            directory: self.dir.clone(),
            listen: self.listen_at(cluster.as_ref())?,
            knobs,
            disk: DriverOptions {
                engine: self.engine.map(|engine| match engine {
                    EngineChoice::Ring => EngineKind::Ring,
                    EngineChoice::Plain => EngineKind::Plain,
                }),
                barrier: self.barrier.map(|barrier| match barrier {
                    BarrierChoice::Fdatasync => Barrier::InlineFdatasync,
                    BarrierChoice::Dsync => Barrier::Dsync,
                }),
                buffered: false,
                quota_bytes: self.quota_bytes,
                reserve_free_bytes: self.reserve_free_bytes,
                idle_poll: Duration::from_micros(self.idle_poll_us),
            },
            tls,
            names: self.names.clone(),
            register,
            cluster,
        })
    }

    fn membership(&self) -> Result<Option<Membership>> {
        let (Some(file), Some(node)) = (&self.cluster, self.node) else { return Ok(None) };
        let wrong = |error: DefinitionError| Failure::usage(error.to_string());
        let definition = Definition::read(file).map_err(wrong)?;
        let node = definition.this_node(node).map_err(wrong)?.id;
        Ok(Some(Membership { definition, node }))
    }

    fn listen_at(&self, cluster: Option<&Membership>) -> Result<SocketAddr> {
        if let Some(listen) = self.listen {
            return Ok(listen);
        }
        let defined = cluster.and_then(|cluster| cluster.definition.node(cluster.node));
        let address = defined.map_or(LISTEN, |node| node.address.as_str());
        let found = address.to_socket_addrs().map(|mut found| found.next());
        match found {
            Ok(Some(found)) => Ok(found),
            Ok(None) => {
                Err(Failure::usage(format!("listen_address: {address}: no address")).into())
            }
            Err(error) => Err(Failure::usage(format!("listen_address: {address}: {error}")).into()),
        }
    }
}

fn read_config(path: &Path, knobs: &mut Knobs) -> Result<()> {
    let wrong = |what: String| Failure::usage(format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let config: toml::Table =
        text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    for (section, value) in config {
        let Some(table) = value.as_table().filter(|_| section == "knobs") else {
            return Err(wrong(format!("unknown key {section:?}")).into());
        };
        for (name, value) in table {
            let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
            let number = number.ok_or_else(|| wrong(format!("{name} is no number")))?;
            if !knobs.set(name, number) {
                return Err(wrong(format!("no knob {name:?}")).into());
            }
        }
    }
    Ok(())
}

/// Runs a node in this process until SIGTERM, SIGINT, or a reason to halt.
///
/// # Errors
/// When the node can't be opened.
pub(crate) fn run(args: &ServeArgs, output: Output) -> Result<Exit> {
    let options = args.options()?;
    let log = args.dir.join("log");
    if args.verify && log.is_dir() && !is_sound(&log)? {
        return Ok(Exit::Corrupt);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let host = Host::open(&options)?;
        output.say(&format!("log disk: {}", host.disk_info()));
        if let Some(Membership { definition, node }) = &options.cluster {
            let (name, at) = (&definition.cluster, host.address()?);
            output.say(&format!("{node} of cluster {name:?} at {at}: waiting for an epoch"));
        }
        let address_file = args.dir.join(ADDRESS_FILE);
        let halt = host
            .run(stop_request(args.stop_with_stdin), |address| {
                let told = std::fs::write(&address_file, address)
                    .map_err(anyhow::Error::from)
                    .and_then(|()| {
                        let json = json!({"serving": address, "pid": std::process::id()});
                        output.print(&json, || format!("serving on {address}"))
                    });
                if let Err(error) = told {
                    complain(&format!("millrace: {error:#}"));
                }
            })
            .await;
        let _ = std::fs::remove_file(&address_file);
        let exit = Exit::of_halt(halt.reason);
        if exit == Exit::Done {
            output.say("stopped");
        } else {
            complain(&format!("millrace: {}: {}", halt.reason, halt.detail));
        }
        Ok(exit)
    })
}

/// Checks the whole log; findings go to stderr by name.
fn is_sound(log: &Path) -> Result<bool> {
    let findings = logserver::format::inspect::verify(log)?;
    for finding in &findings {
        complain(&format!("millrace: {finding}"));
    }
    Ok(findings.is_empty())
}

async fn stop_request(with_stdin: bool) {
    let (ended, parent_gone) = tokio::sync::oneshot::channel::<()>();
    if !with_stdin {
        return stop_signal().await;
    }
    std::thread::spawn(move || {
        let _ended = ended;
        // Whatever ends it: nobody is there any more.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    });
    tokio::select! {
        biased;
        () = stop_signal() => {}
        _ = parent_gone => {}
    }
}

/// SIGTERM or SIGINT.
pub(crate) async fn stop_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        biased;
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
    }
}
