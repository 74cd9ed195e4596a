//! `millrace cluster` and `millrace node`: many nodes seen as one, and a few of them on one machine.

pub(crate) mod local;
mod survey;

use anyhow::Result;
use clap::{Args, Subcommand};

use super::connect::ConnectArgs;
use super::exit::Exit;
use super::output::Output;

/// The file in the directory of a local cluster that defines it.
pub(crate) const DEFINITION_FILE: &str = "cluster.toml";

/// What `cluster` does.
#[derive(Subcommand, Debug)]
pub(crate) enum ClusterVerb {
    /// Makes a cluster on this machine and runs its nodes until SIGINT or SIGTERM.
    StartLocal(local::StartLocalArgs),
    /// Tells who plays which role, how the epoch stands, and why the last one ended.
    Describe(ReachArgs),
}

/// What `node` does.
#[derive(Subcommand, Debug)]
pub(crate) enum NodeVerb {
    /// Lists the nodes: address, standing, roles, links. Asks each of them.
    List(ReachArgs),
}

/// Which cluster.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  millrace cluster describe --dir ./local\n  \
    millrace node list --connect db1:7070,db2:7070 --tls-ca ca.pem -o json")]
pub(crate) struct ReachArgs {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs a verb of `cluster`.
///
/// # Errors
/// The verb's own.
pub(crate) fn cluster(verb: &ClusterVerb, output: Output) -> Result<Exit> {
    match verb {
        ClusterVerb::StartLocal(args) => local::run(args, output),
        ClusterVerb::Describe(args) => survey::describe(&args.connect, output),
    }
}

/// Runs a verb of `node`.
///
/// # Errors
/// The verb's own.
pub(crate) fn node(verb: &NodeVerb, output: Output) -> Result<Exit> {
    match verb {
        NodeVerb::List(args) => survey::list(&args.connect, output),
    }
}
