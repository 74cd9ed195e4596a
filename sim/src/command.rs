//! The command line.

mod batch;
mod bugs;
mod explore;
mod minimize;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::{Mutex, OnceLock};

use clap::{Parser, Subcommand, ValueEnum};
use common::Mark;
use sim::edits::Edits;
use sim::run::{Options, Outcome, run};

/// The exit code when a seed has failed.
const FAILED: u8 = 10;
/// Lines of a trace that a replay prints when it fails, without `--trace`.
const TAIL_LINES: usize = 60;

/// Millrace's simulator: one seed, one run, every fault.
#[derive(Parser, Debug)]
#[command(name = "sim", version)]
pub(crate) struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand, Debug)]
enum Verb {
    /// Run a range of seeds, e.g. `sim run --seeds 0..10000 --minutes 5 -o json`
    Run(batch::RunArgs),
    /// Run fresh seeds until the time is over; the first one is drawn and printed
    Soak(batch::SoakArgs),
    /// Run one seed again and say what happens
    Replay {
        /// The seed
        seed: u64,
        /// Print the whole trace
        #[arg(long)]
        trace: bool,
        /// What to leave out, as `shrink` prints it
        #[arg(long)]
        edits: Option<String>,
        /// The planted bug to switch on, e.g. P04
        #[arg(long)]
        plant: Option<String>,
        /// As in `run`
        #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
        damage: bool,
    },
    /// Find the fewest faults and operations with which a failing seed still fails
    Shrink(minimize::ShrinkArgs),
    /// Switch on each planted bug and run seeds until its oracle finds it
    Bugs(bugs::BugsArgs),
    /// Go all ways that a small configuration can take, and check each state
    Explore(explore::ExploreArgs),
    /// Run a five-node cluster under the load of 20 clients and say how fast that goes
    Bench {
        /// How many seeds
        #[arg(long, default_value_t = 20)]
        seeds: u64,
        /// Time between two operations of a client, ms, on average
        #[arg(long, default_value_t = 100)]
        think_ms: u64,
    },
    /// Print each seed's trace hash, to compare processes and builds
    Hashes {
        /// The seeds, `from..to`, to excluded
        #[arg(long, value_parser = batch::parse_range)]
        seeds: (u64, u64),
    },
    /// List all marks and how often they must be hit; with seeds, how often they are
    Marks {
        /// The seeds, `from..to`, to excluded
        #[arg(long, value_parser = batch::parse_range)]
        seeds: Option<(u64, u64)>,
        /// Threads
        #[arg(long, default_value_t = 2)]
        jobs: u64,
    },
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Output {
    Text,
    Json,
}

impl Command {
    pub(crate) fn carry_out(self) -> ExitCode {
        // The failure itself says what a panic said; the hook's text would only mix threads.
        std::panic::set_hook(Box::new(remember_panic));
        match self.verb {
            Verb::Run(args) => batch::run_seeds(&args),
            Verb::Soak(args) => batch::soak(&args),
            Verb::Replay { seed, trace, edits, plant, damage } => {
                match replay_options(edits.as_deref(), plant.as_deref()) {
                    Ok(options) => {
                        replay(seed, trace, &Options { without_damage: !damage, ..options })
                    }
                    Err(what) => {
                        say(&what);
                        ExitCode::from(2)
                    }
                }
            }
            Verb::Shrink(args) => minimize::shrink_seed(&args),
            Verb::Bugs(args) => bugs::find_bugs(&args),
            Verb::Explore(args) => explore::explore_scopes(&args),
            Verb::Bench { seeds, think_ms } => batch::bench(seeds, think_ms),
            Verb::Hashes { seeds } => batch::print_hashes(seeds),
            Verb::Marks { seeds, jobs } => list_marks(seeds, jobs),
        }
    }
}

fn replay_options(edits: Option<&str>, plant: Option<&str>) -> Result<Options, String> {
    let edits: Edits = match edits {
        Some(text) => serde_json::from_str(text).map_err(|error| format!("edits: {error}"))?,
        None => Edits::default(),
    };
    let plants = bugs::plant_named(plant)?;
    Ok(Options { edits, plants, with_text: true, without_damage: false })
}

static LAST_PANIC: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

fn remember_panic(info: &std::panic::PanicHookInfo<'_>) {
    let at = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = format!("{:?}", std::thread::current().id());
    if let Ok(mut last) = LAST_PANIC.lock() {
        last.insert(thread, at);
    }
}

/// Where the last panic of this thread was.
fn panic_place() -> String {
    let thread = format!("{:?}", std::thread::current().id());
    let last = LAST_PANIC.lock().ok();
    last.and_then(|mut last| last.remove(&thread)).unwrap_or_default()
}

/// Runs a seed; says where it panicked if it did.
fn run_placed(seed: u64, options: &Options) -> Outcome {
    let mut outcome = run(seed, options);
    if let Some(failure) = outcome.failure.as_mut().filter(|failure| failure.rule == "panic") {
        failure.detail = format!("{} at {}", failure.detail, panic_place());
    }
    outcome
}

fn replay(seed: u64, trace: bool, options: &Options) -> ExitCode {
    let outcome = run(seed, options);
    say(&outcome.config);
    let skip = match (trace, &outcome.failure) {
        (true, _) => 0,
        (false, Some(_)) => outcome.text.len().saturating_sub(TAIL_LINES),
        (false, None) => outcome.text.len(),
    };
    outcome.text.iter().skip(skip).for_each(|line| say(line));
    say(&format!(
        "seed {seed}: {} events, {} ms simulated, {} commits, trace {:032x}",
        outcome.events,
        outcome.simulated_ns / 1_000_000,
        outcome.acknowledged,
        outcome.trace_hash
    ));
    match outcome.failure {
        None => ExitCode::SUCCESS,
        Some(failure) => {
            say(&format!("FAIL {}: {} {}", failure.rule, failure.detail, panic_place()));
            ExitCode::from(FAILED)
        }
    }
}

fn list_marks(seeds: Option<(u64, u64)>, jobs: u64) -> ExitCode {
    let counts: BTreeMap<&str, u64> =
        seeds.map(|seeds| batch::count_marks(seeds, jobs)).unwrap_or_default();
    for mark in Mark::ALL {
        let rarity = format!("{:?}", mark.rarity());
        match seeds {
            None => say(&format!("{rarity:10} {}", mark.name())),
            Some(_) => {
                let count = counts.get(mark.name()).copied().unwrap_or(0);
                say(&format!("{count:10} {rarity:10} {}", mark.name()));
            }
        }
    }
    ExitCode::SUCCESS
}

/// The commit of the checkout that this runs in, for reports.
fn commit() -> &'static str {
    static COMMIT: OnceLock<String> = OnceLock::new();
    COMMIT.get_or_init(|| {
        let asked =
            std::process::Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
        let answer = asked.ok().filter(|answer| answer.status.success());
        let text = answer.and_then(|answer| String::from_utf8(answer.stdout).ok());
        text.map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned())
    })
}

fn say(line: &str) {
    // A closed pipe is the reader's business.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
