//! The command line: one module a verb, data on stdout, everything else on stderr.

mod bench;
mod child;
mod cluster;
mod connect;
mod exit;
mod ingest;
mod inspect;
mod output;
mod quickstart;
mod register;
mod serve;
mod stream;
mod txn;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use common::Knobs;
use serde_json::json;

use self::exit::Exit;
use self::output::{Form, Output, complain};
use crate::register::{RegisterError, RegisterSetupError};

/// A distributed, transactional write-ahead log.
#[derive(Parser, Debug)]
#[command(name = "millrace", version, about, after_help = exit::HELP)]
struct Cli {
    /// The form of results.
    #[arg(short, long, global = true, value_enum, default_value_t = Form::Text)]
    output: Form,
    /// What to log on stderr, as `tracing` filters: warn, info, millrace=debug, ...
    #[arg(long, global = true, value_name = "FILTER", default_value = "warn")]
    log: String,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Runs a node.
    Serve(serve::ServeArgs),
    /// Starts a cluster on this machine, and describes clusters.
    #[command(
        subcommand,
        after_help = "Example:\n  millrace cluster start-local --nodes 3 --dir ./local &\n  \
            millrace cluster describe --dir ./local"
    )]
    Cluster(cluster::ClusterVerb),
    /// Lists, drains and removes the nodes of a cluster.
    #[command(
        subcommand,
        after_help = "Examples:\n  millrace node list --dir ./local -o json\n  \
        millrace node remove 2 --dir ./local --wait 600"
    )]
    Node(cluster::NodeVerb),
    /// Proves on real PostgreSQL DML what the log promises.
    Quickstart(quickstart::QuickstartArgs),
    /// Appends records.
    Append(stream::AppendArgs),
    /// Prints records by version.
    Pull(stream::PullArgs),
    /// Runs transactions from a script.
    Txn(txn::TxnArgs),
    /// Creates, lists, describes and trims streams.
    #[command(subcommand, after_help = "Example:\n  millrace stream create orders --dir ./data")]
    Stream(stream::StreamVerb),
    /// Tells how a node stands.
    Status(stream::StatusArgs),
    /// Looks into a log directory, offline.
    #[command(subcommand, after_help = "Example:\n  millrace inspect verify ./data")]
    Inspect(inspect::InspectVerb),
    /// Brings an upstream's changes into streams, exactly once.
    #[command(
        subcommand,
        after_help = "Example:\n  millrace ingest wal2json changes.jsonl.zst --dir ./data"
    )]
    Ingest(ingest::IngestVerb),
    /// Measures.
    #[command(subcommand, after_help = "Example:\n  millrace bench append --clients 1,64")]
    Bench(bench::BenchVerb),
    /// Lists the knobs and their defaults.
    #[command(after_help = "Example:\n  millrace knobs -o json")]
    Knobs,
}

/// Parses the command line, does what it says, and says how it ended.
#[must_use]
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(&cli.log))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    match dispatch(&cli.verb, Output::new(cli.output)) {
        Ok(exit) => exit.into(),
        // Whoever reads stdout has read enough.
        Err(error) if is_broken_pipe(&error) => Exit::Done.into(),
        Err(error) => {
            complain(&format!("millrace: {error:#}"));
            exit_of(&error).into()
        }
    }
}

fn dispatch(verb: &Verb, output: Output) -> anyhow::Result<Exit> {
    match verb {
        Verb::Serve(args) => serve::run(args, output),
        Verb::Cluster(verb) => cluster::cluster(verb, output),
        Verb::Node(verb) => cluster::node(verb, output),
        Verb::Quickstart(args) => quickstart::run(args, output),
        Verb::Append(args) => stream::append(args, output),
        Verb::Pull(args) => stream::pull(args, output),
        Verb::Txn(args) => txn::run(args, output),
        Verb::Stream(verb) => stream::stream(verb, output),
        Verb::Status(args) => stream::status(args, output),
        Verb::Inspect(verb) => inspect::run(verb, output),
        Verb::Ingest(verb) => ingest::run(verb, output),
        Verb::Bench(verb) => bench::run(verb, output),
        Verb::Knobs => knobs(output),
    }
}

fn knobs(output: Output) -> anyhow::Result<Exit> {
    for (name, value) in Knobs::default().list() {
        output.print(&json!({"knob": name, "default": value}), || format!("{name} = {value}"))?;
    }
    Ok(Exit::Done)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let inner = error.downcast_ref::<std::io::Error>();
    inner.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Whether a failure leaves the log as it was, or in a state that it tells itself: go on from there.
fn is_interruption(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<client::Error>()
        .is_some_and(|error| error.is_retryable() || matches!(error, client::Error::Unknown(_)))
}

fn exit_of(error: &anyhow::Error) -> Exit {
    if let Some(failure) = error.downcast_ref::<exit::Failure>() {
        return failure.exit;
    }
    if let Some(refusal) = error.downcast_ref::<common::Refusal>() {
        return Exit::of(refusal.code());
    }
    if let Some(error) = error.downcast_ref::<client::Error>() {
        return Exit::of(error.code());
    }
    match error.downcast_ref() {
        Some(RegisterSetupError::File(RegisterError::Corrupt { .. })) => return Exit::Corrupt,
        Some(RegisterSetupError::File(_)) | None => {}
        Some(_) => return Exit::Usage,
    }
    match error.downcast_ref::<client::face::ConnectError>() {
        Some(_) => Exit::Unavailable,
        None => Exit::Failed,
    }
}
