//! `millrace quickstart`: the main job on real input, in two acts on a node of its own.
//!
//! ```text
//! act 1, ingest     capture --Ingester--> node --SIGKILL, restart--> node --pull--> engine: rows = the
//!                   database's
//! act 2, frontends  8 frontends: read at a version, add, commit if nobody wrote, else again --> four sums,
//!                   equal
//! ```

mod frontends;
mod ingest;
mod tpcb;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use serde_json::json;

use self::tpcb::Capture;
use super::child::ChildNode;
use super::connect::{ConnectArgs, block_on};
use super::exit::Exit;
use super::output::{Output, complain};

/// Proves on real PostgreSQL DML what the log promises.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  millrace quickstart -o json\n  \
    millrace quickstart --input capture.jsonl.zst --expect rows.csv\n\n\
    Without --input a sample of 1,000 TPC-B transactions is used. A wrong row or sum is exit code 1.")]
pub(crate) struct QuickstartArgs {
    /// A wal2json capture of pgbench's TPC-B-like transactions, plain or zstd.
    #[arg(long, value_name = "FILE", requires = "expect")]
    input: Option<PathBuf>,
    /// The rows that the database ended with: table,key,balance; plain or zstd.
    #[arg(long, value_name = "FILE", requires = "input")]
    expect: Option<PathBuf>,
    /// A new or empty directory for the node's data; a temporary one when not given.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// How many frontends execute the transactions at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    frontends: u32,
}

fn is_fresh(directory: &Path) -> bool {
    std::fs::read_dir(directory).map_or(true, |mut entries| entries.next().is_none())
}

/// Runs `quickstart`.
///
/// # Errors
/// When the capture is damaged or the node can't be run.
pub(crate) fn run(args: &QuickstartArgs, output: Output) -> Result<Exit> {
    let capture = match (&args.input, &args.expect) {
        (Some(input), Some(expect)) => Capture::open(input, expect)?,
        _ => Capture::sample()?,
    };
    if let Some(directory) = args.dir.as_ref().filter(|directory| !is_fresh(directory)) {
        // What an earlier run has left would be counted again.
        complain(&format!("millrace: {} is not empty", directory.display()));
        return Ok(Exit::Refused);
    }
    let temporary = match &args.dir {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix("millrace-quickstart-").tempdir()?),
    };
    let directory = match (&args.dir, &temporary) {
        (Some(directory), _) => directory.clone(),
        (None, Some(temporary)) => temporary.path().to_owned(),
        (None, None) => unreachable!("one of the two is there"),
    };
    block_on(async {
        let mut node = ChildNode::start(&directory)?;
        let connect = ConnectArgs::local(&directory);
        output.say(&format!(
            "act 1: ingesting {} transactions, with a SIGKILL of the node in the middle",
            capture.transactions.len()
        ));
        let ingested = ingest::run(&capture, &mut node, &connect).await?;
        output.say(&format!("act 2: {} frontends execute them anew", args.frontends));
        let executed = frontends::run(&capture, &connect, args.frontends).await?;
        node.stop()?;

        let is_right = ingested.is_right() && executed.is_right();
        let json = json!({
            "ingest": ingested.json(),
            "frontends": executed.json(),
            "right": is_right,
        });
        output.print(&json, || format!("{}\n{}", ingested.text(), executed.text()))?;
        Ok(if is_right { Exit::Done } else { Exit::No })
    })
}
