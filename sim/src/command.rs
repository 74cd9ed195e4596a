//! The command line.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use common::{Mark, Rarity};
use serde::Serialize;
use sim::run::{Options, Outcome, run};

/// The exit code when a seed has failed.
const FAILED: u8 = 10;
/// Seeds of a batch after which a common mark must have been hit.
const COMMON_SEEDS: u64 = 2_000;
/// The same for an uncommon one.
const UNCOMMON_SEEDS: u64 = 20_000;
/// Failures that are printed in full, at most.
const FAILURES_PRINTED_MAX: usize = 50;
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
    Run {
        /// The seeds, `from..to`, to excluded
        #[arg(long, value_parser = parse_range)]
        seeds: (u64, u64),
        /// Stop after so many minutes
        #[arg(long)]
        minutes: Option<u64>,
        /// Threads
        #[arg(long, default_value_t = 2)]
        jobs: u64,
        /// Run one seed in twenty twice and compare
        #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
        twice: bool,
        /// How to print the result
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Run one seed again and say what happens
    Replay {
        /// The seed
        seed: u64,
        /// Print the whole trace
        #[arg(long)]
        trace: bool,
    },
    /// List all marks and how often they must be hit
    Marks,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Output {
    Text,
    Json,
}

fn parse_range(text: &str) -> Result<(u64, u64), String> {
    let (from, to) = text.split_once("..").ok_or("expected from..to")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?}: {error}"));
    Ok((number(from)?, number(to)?))
}

#[derive(Serialize, Debug)]
struct Failure {
    seed: u64,
    rule: String,
    detail: String,
    replay: String,
    commit: &'static str,
    config: serde_json::Value,
}

#[derive(Serialize, Debug, Default)]
struct Summary {
    seeds: u64,
    failed: u64,
    simulated_seconds: u64,
    cpu_seconds: u64,
    events: u64,
    acknowledged: u64,
    marks_unhit: Vec<&'static str>,
    marks: BTreeMap<&'static str, u64>,
    failures: Vec<Failure>,
}

impl Command {
    pub(crate) fn carry_out(self) -> ExitCode {
        // The failure itself says what a panic said; the hook's text would only mix threads.
        std::panic::set_hook(Box::new(remember_panic));
        match self.verb {
            Verb::Run { seeds, minutes, jobs, twice, output } => {
                run_seeds(seeds, minutes, jobs, twice, output)
            }
            Verb::Replay { seed, trace } => replay(seed, trace),
            Verb::Marks => list_marks(),
        }
    }
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

fn run_seeds(
    (from, to): (u64, u64),
    minutes: Option<u64>,
    jobs: u64,
    twice: bool,
    output: Output,
) -> ExitCode {
    let deadline = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
    let (next, summary) = (AtomicU64::new(from), Mutex::new(Summary::default()));
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= to || deadline.is_some_and(|deadline| Instant::now() > deadline) {
                        break;
                    }
                    let outcome = run_checked(seed, twice && seed.is_multiple_of(20));
                    let mut summary = summary.lock().expect("no thread panics with it");
                    summary.add(outcome, output);
                }
            });
        }
    });
    let mut summary = summary.into_inner().expect("all threads have ended");
    summary.cpu_seconds = cpu_seconds();
    summary.close();
    match output {
        Output::Json => say(&serde_json::to_string(&summary).expect("plain data serializes")),
        Output::Text => say(&format!(
            "{} seeds, {} failed, {} simulated s in {} CPU s, {} commits, {} events, {} marks unhit {:?}",
            summary.seeds,
            summary.failed,
            summary.simulated_seconds,
            summary.cpu_seconds,
            summary.acknowledged,
            summary.events,
            summary.marks_unhit.len(),
            summary.marks_unhit
        )),
    }
    if summary.failed > 0 { ExitCode::from(FAILED) } else { ExitCode::SUCCESS }
}

/// Runs a seed, some of them twice: the trace must be the same.
fn run_checked(seed: u64, twice: bool) -> Outcome {
    let mut outcome = run(seed, Options::default());
    if let Some(failure) = outcome.failure.as_mut().filter(|failure| failure.rule == "panic") {
        failure.detail = format!("{} at {}", failure.detail, panic_place());
    }
    if twice && outcome.failure.is_none() {
        let again = run(seed, Options { with_text: true });
        if again.trace_hash != outcome.trace_hash || again.events != outcome.events {
            let detail = format!(
                "{:032x} after {} events, then {:032x} after {}",
                outcome.trace_hash, outcome.events, again.trace_hash, again.events
            );
            outcome.failure = Some(sim::oracle::Violation { rule: "O18.determinism", detail });
        }
    }
    outcome
}

impl Summary {
    fn add(&mut self, outcome: Outcome, output: Output) {
        self.seeds += 1;
        self.simulated_seconds += outcome.simulated_ns / 1_000_000;
        self.events += outcome.events;
        self.acknowledged += outcome.acknowledged;
        for (mark, count) in &outcome.marks {
            *self.marks.entry(mark.name()).or_default() += count;
        }
        let Some(failure) = outcome.failure else { return };
        self.failed += 1;
        let replay = format!("cargo run --profile sim -p sim -- replay {}", outcome.seed);
        if output == Output::Text && self.failures.len() < FAILURES_PRINTED_MAX {
            say(&format!("FAIL seed={} {}: {}", outcome.seed, failure.rule, failure.detail));
            say(&format!("     commit={} {replay}", commit()));
        }
        self.failures.push(Failure {
            seed: outcome.seed,
            rule: failure.rule.to_owned(),
            detail: failure.detail,
            replay,
            commit: commit(),
            config: serde_json::from_str(&outcome.config).unwrap_or_default(),
        });
    }

    /// Turns sums into what is printed.
    fn close(&mut self) {
        self.simulated_seconds /= 1_000;
        let due = |rarity| match rarity {
            Rarity::Common => self.seeds >= COMMON_SEEDS,
            Rarity::Uncommon => self.seeds >= UNCOMMON_SEEDS,
            Rarity::Rare => false,
        };
        self.marks_unhit = Mark::ALL
            .iter()
            .filter(|mark| due(mark.rarity()) && !self.marks.contains_key(mark.name()))
            .map(|mark| mark.name())
            .collect();
        self.failures.truncate(FAILURES_PRINTED_MAX);
    }
}

fn replay(seed: u64, trace: bool) -> ExitCode {
    let outcome = run(seed, Options { with_text: true });
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

fn list_marks() -> ExitCode {
    for mark in Mark::ALL {
        say(&format!("{:10} {}", format!("{:?}", mark.rarity()), mark.name()));
    }
    ExitCode::SUCCESS
}

/// The commit that this was built from, for reports.
fn commit() -> &'static str {
    option_env!("MILLRACE_COMMIT").unwrap_or("unknown")
}

fn say(line: &str) {
    // A closed pipe is the reader's business.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// CPU time of this process so far, by the kernel's account.
fn cpu_seconds() -> u64 {
    const TICKS_PER_SECOND: u64 = 100;
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return 0 };
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = behind_name.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    (ticks(11) + ticks(12)) / TICKS_PER_SECOND
}
