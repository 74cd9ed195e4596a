//! The command line.

pub mod exit;
pub mod output;
pub mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::exit::Exit;
use self::output::{Form, Output, complain};

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
}

/// Parses the command line, does what it says, and says how it ended.
#[must_use]
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(&cli.log))
        .with_writer(std::io::stderr)
        .init();
    let output = Output::new(cli.output);
    match dispatch(cli.verb, output) {
        Ok(exit) => exit.into(),
        Err(error) => {
            complain(&format!("millrace: {error:#}"));
            exit_of(&error).into()
        }
    }
}

fn dispatch(verb: Verb, output: Output) -> anyhow::Result<Exit> {
    match verb {
        Verb::Serve(args) => serve::run(&args, output),
    }
}

fn exit_of(error: &anyhow::Error) -> Exit {
    match error.downcast_ref::<client::Error>() {
        Some(error) => Exit::of(error.code()),
        None => Exit::Failed,
    }
}
