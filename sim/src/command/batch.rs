//! Batches of seeds on some threads: their failures, their marks, their pace.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use common::{Mark, Rarity};
use serde::Serialize;
use sim::faults::Fault;
use sim::run::{Options, Outcome, run, run_config};
use sim::swarm::Config;

use super::{FAILED, Output, commit, run_placed, say};

/// Seeds of a batch after which a common mark must have been hit.
const COMMON_SEEDS: u64 = 2_000;
/// The same for an uncommon one.
const UNCOMMON_SEEDS: u64 = 20_000;
/// Seeds of a batch after which every kind of fault must have struck.
const FAULT_SEEDS: u64 = 200;
/// Failures that are printed in full, at most.
const FAILURES_PRINTED_MAX: usize = 50;

#[derive(Args, Debug)]
pub(super) struct RunArgs {
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
    /// Harm what is durable, too: bit rot, latent errors, misdirected writes
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    damage: bool,
    /// How to print the result
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Args, Debug)]
pub(super) struct SoakArgs {
    /// For how long
    #[arg(long)]
    minutes: u64,
    /// The first seed; drawn from the clock when it is not given
    #[arg(long)]
    from: Option<u64>,
    /// Threads
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// How to print the result
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

pub(super) fn parse_range(text: &str) -> Result<(u64, u64), String> {
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
    /// Kinds of faults that never struck.
    faults_unhit: Vec<&'static str>,
    marks: BTreeMap<&'static str, u64>,
    /// How often each kind of fault struck, and what noticed damage.
    faults: BTreeMap<&'static str, u64>,
    /// Failing seeds by the rule that they break.
    by_rule: BTreeMap<String, Vec<u64>>,
    failures: Vec<Failure>,
}

pub(super) fn run_seeds(args: &RunArgs) -> ExitCode {
    let deadline = args.minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
    let options = Options { without_damage: !args.damage, ..Options::default() };
    let how = (args.twice, args.output);
    let summary = run_all(args.seeds, deadline, args.jobs, &options, how);
    report(&summary, args.output)
}

pub(super) fn soak(args: &SoakArgs) -> ExitCode {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let from = args.from.unwrap_or(since_epoch.as_secs() << 20);
    if args.output == Output::Text {
        say(&format!("seeds from {from}, {} minutes, commit {}", args.minutes, commit()));
    }
    let deadline = Instant::now() + Duration::from_secs(60 * args.minutes);
    let (options, how) = (Options::default(), (true, args.output));
    let summary = run_all((from, u64::MAX), Some(deadline), args.jobs, &options, how);
    report(&summary, args.output)
}

fn run_all(
    (from, to): (u64, u64),
    deadline: Option<Instant>,
    jobs: u64,
    options: &Options,
    (twice, output): (bool, Output),
) -> Summary {
    let (next, summary) = (AtomicU64::new(from), Mutex::new(Summary::default()));
    let cpu_before = cpu_seconds();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= to || deadline.is_some_and(|deadline| Instant::now() > deadline) {
                        break;
                    }
                    let outcome = run_checked(seed, options, twice && seed.is_multiple_of(20));
                    let mut summary = summary.lock().expect("no thread panics with it");
                    summary.add(outcome, output);
                }
            });
        }
    });
    let mut summary = summary.into_inner().expect("all threads have ended");
    summary.cpu_seconds = cpu_seconds() - cpu_before;
    summary.close(options);
    summary
}

fn report(summary: &Summary, output: Output) -> ExitCode {
    match output {
        Output::Json => say(&serde_json::to_string(summary).expect("plain data serializes")),
        Output::Text => {
            for (rule, seeds) in &summary.by_rule {
                let some: Vec<u64> = seeds.iter().copied().take(10).collect();
                say(&format!("{:6} x {rule}: {some:?}", seeds.len()));
            }
            say(&format!(
                "{} seeds, {} failed, {} simulated s in {} CPU s, {} commits, {} events, \
                 {} marks unhit {:?}, \
                 faults unhit {:?}",
                summary.seeds,
                summary.failed,
                summary.simulated_seconds,
                summary.cpu_seconds,
                summary.acknowledged,
                summary.events,
                summary.marks_unhit.len(),
                summary.marks_unhit,
                summary.faults_unhit
            ));
        }
    }
    let is_hit = summary.marks_unhit.is_empty() && summary.faults_unhit.is_empty();
    let is_good = summary.failed == 0 && is_hit;
    if is_good { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

pub(super) fn count_marks(seeds: (u64, u64), jobs: u64) -> BTreeMap<&'static str, u64> {
    run_all(seeds, None, jobs, &Options::default(), (false, Output::Json)).marks
}

/// The figure to compare with other simulators: five nodes, 20 clients, faults as ever.
pub(super) fn bench(seeds: u64, think_ms: u64) -> ExitCode {
    let (mut simulated_ns, mut events, mut commits, mut failed) = (0, 0, 0, 0);
    let started = Instant::now();
    let cpu_before = cpu_ticks();
    for seed in 0..seeds {
        let outcome = run_config(Config::bench(seed, think_ms), &Options::default());
        simulated_ns += outcome.simulated_ns;
        events += outcome.events;
        commits += outcome.acknowledged;
        failed += u64::from(outcome.failure.is_some());
    }
    let cpu_ticks = (cpu_ticks() - cpu_before).max(1);
    let simulated = simulated_ns / 1_000_000_000;
    let per_cpu_second = |count: u64| count * TICKS_PER_SECOND / cpu_ticks;
    let cpu_ms = cpu_ticks * 1000 / TICKS_PER_SECOND;
    say(&format!(
        "{seeds} seeds of 5 nodes and 20 clients, {failed} failed: \
         {simulated} simulated s in {cpu_ms} CPU ms ({} s wall): \
         {} simulated s/CPU s, {} events/CPU s, {} commits/simulated s, {} events/commit",
        started.elapsed().as_secs(),
        per_cpu_second(simulated),
        per_cpu_second(events),
        commits / simulated.max(1),
        events / commits.max(1)
    ));
    ExitCode::SUCCESS
}

pub(super) fn print_hashes((from, to): (u64, u64)) -> ExitCode {
    for seed in from..to {
        let outcome = run(seed, &Options::default());
        say(&format!("{seed} {:032x} {}", outcome.trace_hash, outcome.events));
    }
    ExitCode::SUCCESS
}

/// Runs a seed, some of them twice: the trace must be the same.
fn run_checked(seed: u64, options: &Options, twice: bool) -> Outcome {
    let mut outcome = run_placed(seed, options);
    if twice && outcome.failure.is_none() {
        let again = run(seed, &Options { with_text: true, ..options.clone() });
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
        for (kind, count) in &outcome.struck {
            *self.faults.entry(kind).or_default() += count;
        }
        let Some(failure) = outcome.failure else { return };
        self.failed += 1;
        self.by_rule.entry(failure.rule.to_owned()).or_default().push(outcome.seed);
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
    fn close(&mut self, options: &Options) {
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
        let is_due = self.seeds >= FAULT_SEEDS;
        let is_drawn = |kind: &&str| !(options.without_damage && Fault::DAMAGE.contains(kind));
        let kinds = Fault::KINDS.iter().copied().filter(is_drawn);
        self.faults_unhit = kinds
            .filter(|kind| is_due && self.faults.get(kind).is_none_or(|count| *count == 0))
            .collect();
        self.failures.truncate(FAILURES_PRINTED_MAX);
    }
}

/// CPU time of this process so far, by the kernel's account.
fn cpu_seconds() -> u64 {
    cpu_ticks() / TICKS_PER_SECOND
}

const TICKS_PER_SECOND: u64 = 100;

fn cpu_ticks() -> u64 {
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return 0 };
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = behind_name.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    ticks(11) + ticks(12)
}
