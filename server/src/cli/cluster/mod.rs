//! `millrace cluster` and `millrace node`: many nodes seen as one, and a few of them on one machine.

pub(crate) mod local;
mod members;
mod survey;

use anyhow::Result;
use clap::{Args, Subcommand};
use common::membership::MemberChange;

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
    /// Takes a node's roles away, to stop it for a while; its seat in the log passes to a spare node.
    Drain(MemberArgs),
    /// Lets a drained node play roles again.
    Restore(MemberArgs),
    /// Gives a node up for good: a spare node copies its share of the log and takes its seat.
    Remove(MemberArgs),
}

/// Which cluster.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  millrace cluster describe --dir ./local\n  \
    millrace node list --connect db1:7070,db2:7070 --tls-ca ca.pem -o json")]
pub(crate) struct ReachArgs {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Which node, and where its cluster is.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  millrace node drain 2 --dir ./local\n  \
    millrace node remove 2 --dir ./local --wait 600\n\n\
    With --wait the command ends once the node sits in no seat of the log any more: then every\n\
    stream has all its copies elsewhere, and the node's directory may go.")]
pub(crate) struct MemberArgs {
    /// The node's id, `2` or `n2`.
    #[arg(value_name = "NODE", value_parser = node_id)]
    pub(super) node: u64,
    /// Wait so many seconds for the seat to have passed on; 0: as soon as it is decided.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub(super) wait: u64,
    #[command(flatten)]
    pub(super) connect: ConnectArgs,
}

fn node_id(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix('n').unwrap_or(text);
    digits.parse().map_err(|_| format!("{text:?} is no node: 2 or n2"))
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
        NodeVerb::Drain(args) => members::change(args, MemberChange::Drain, output),
        NodeVerb::Restore(args) => members::change(args, MemberChange::Restore, output),
        NodeVerb::Remove(args) => members::change(args, MemberChange::Remove, output),
    }
}
