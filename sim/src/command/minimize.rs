//! `shrink`: what is left of a failing seed.

use std::process::ExitCode;

use clap::Args;
use sim::run::Options;
use sim::shrink::shrink;

use super::{FAILED, TAIL_LINES, bugs, commit, say};

#[derive(Args, Debug)]
pub(super) struct ShrinkArgs {
    /// The seed
    seed: u64,
    /// Runs that it may take
    #[arg(long, default_value_t = 600)]
    runs: u64,
    /// The planted bug to switch on, e.g. P04
    #[arg(long)]
    plant: Option<String>,
}

pub(super) fn shrink_seed(args: &ShrinkArgs) -> ExitCode {
    let plants = match bugs::plant_named(args.plant.as_deref()) {
        Ok(plants) => plants,
        Err(what) => {
            say(&what);
            return ExitCode::from(2);
        }
    };
    let options = Options { plants, ..Options::default() };
    let Some(shrunk) = shrink(args.seed, &options, args.runs) else {
        say(&format!("seed {} does not fail", args.seed));
        return ExitCode::SUCCESS;
    };
    let lines = &shrunk.outcome.text;
    lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)).for_each(|line| say(line));
    if let Some(failure) = &shrunk.outcome.failure {
        say(&format!("FAIL {}: {}", failure.rule, failure.detail));
    }
    say(&format!(
        "{} of {} faults and {} of {} operations are left after {} runs; plainer {:?}",
        shrunk.faults.1,
        shrunk.faults.0,
        shrunk.operations.1,
        shrunk.operations.0,
        shrunk.runs,
        shrunk.edits.plainer
    ));
    let edits = serde_json::to_string(&shrunk.edits).expect("plain data serializes");
    let plant = args.plant.as_ref().map(|plant| format!(" --plant {plant}")).unwrap_or_default();
    say(&format!("commit={} sim replay {}{plant} --edits '{edits}'", commit(), args.seed));
    ExitCode::from(FAILED)
}
