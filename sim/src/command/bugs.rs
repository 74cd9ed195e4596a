//! `bugs`: the test of the tests. Each planted bug must be found by the oracle that is meant for it.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Args;
use common::{Plant, Plants};
use serde::Serialize;
use sim::oracle::Violation;
use sim::run::Options;

use super::{FAILED, Output, run_placed, say};

#[derive(Args, Debug)]
pub(super) struct BugsArgs {
    /// Seeds for each bug, at most
    #[arg(long, default_value_t = 1_000)]
    seeds_max: u64,
    /// Only these, e.g. P04
    #[arg(long)]
    only: Vec<String>,
    /// Threads
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// How to print the result
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Serialize, Clone, Debug)]
struct Found {
    id: &'static str,
    text: &'static str,
    expected_oracle: &'static str,
    /// The rule that the seed breaks which the expected oracle found, or any other found.
    found_by: Option<String>,
    /// How many seeds it took until the expected oracle found it.
    seeds_needed: Option<u64>,
    /// What found it before that.
    also_found_by: Vec<String>,
}

/// The switch of a planted bug, if one is asked for.
pub(super) fn plant_named(id: Option<&str>) -> Result<Plants, String> {
    let Some(id) = id else { return Ok(Plants::NONE) };
    let found = Plant::ALL.iter().find(|plant| plant.id() == id);
    let plant = found.ok_or_else(|| format!("no planted bug is called {id}"))?;
    if !cfg!(feature = "plants") {
        return Err("this build has no planted bugs; build with --features plants".to_owned());
    }
    Ok(Plants::only(*plant))
}

pub(super) fn find_bugs(args: &BugsArgs) -> ExitCode {
    if !cfg!(feature = "plants") {
        return run_with_plants();
    }
    let wanted: Vec<Plant> = Plant::ALL
        .iter()
        .copied()
        .filter(|plant| args.only.is_empty() || args.only.iter().any(|id| id == plant.id()))
        .collect();
    let (next, all) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..args.jobs {
            scope.spawn(|| {
                while let Some(plant) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = find(*plant, args.seeds_max);
                    if args.output == Output::Text {
                        say(&line(&found));
                    }
                    all.lock().expect("no thread panics with it").push(found);
                }
            });
        }
    });
    let mut all = all.into_inner().expect("all threads have ended");
    all.sort_by_key(|found| found.id);
    if args.output == Output::Json {
        say(&serde_json::to_string(&all).expect("plain data serializes"));
    }
    let missed = all.iter().filter(|found| found.seeds_needed.is_none()).count();
    if args.output == Output::Text {
        say(&format!("{} of {} found by the expected oracle", all.len() - missed, all.len()));
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

fn line(found: &Found) -> String {
    let Found { id, text, expected_oracle, found_by, seeds_needed, also_found_by } = found;
    let seeds = seeds_needed.map_or("-".to_owned(), |seeds| seeds.to_string());
    let by = found_by.as_deref().unwrap_or("nothing");
    format!(
        "{id} {seeds:>5} seeds, expected {expected_oracle:8} found by {by:24} {also_found_by:?} {text}"
    )
}

fn find(plant: Plant, seeds_max: u64) -> Found {
    let options = Options { plants: Plants::only(plant), ..Options::default() };
    let mut found = Found {
        id: plant.id(),
        text: plant.text(),
        expected_oracle: plant.expected()[0],
        found_by: None,
        seeds_needed: None,
        also_found_by: Vec::new(),
    };
    for seed in 0..seeds_max {
        let Some(failure) = run_placed(seed, &options).failure else { continue };
        let rule = bitten_by(&failure);
        if plant.expected().iter().any(|expected| is_of(&rule, expected)) {
            found.found_by = Some(rule);
            found.seeds_needed = Some(seed + 1);
            break;
        }
        if !found.also_found_by.contains(&rule) {
            found.also_found_by.push(rule);
        }
    }
    if found.found_by.is_none() {
        found.found_by = found.also_found_by.first().cloned();
    }
    found
}

/// The rule that was broken; for a role's own assertion, the invariant that it cites.
fn bitten_by(failure: &Violation) -> String {
    let cited = failure.detail.split_once(':').map_or("", |(cited, _)| cited);
    let is_cited = cited.strip_prefix('I').is_some_and(|number| number.parse::<u8>().is_ok());
    if failure.rule == "panic" && is_cited {
        return format!("{cited}.asserted");
    }
    failure.rule.to_owned()
}

/// `I1` is the oracle of `I1.chain`, but not of `I12.dense`.
fn is_of(rule: &str, oracle: &str) -> bool {
    rule.strip_prefix(oracle).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Planted bugs are a feature of their own, so that no other build has them: cargo, if it runs this, builds
/// it so.
fn run_with_plants() -> ExitCode {
    let Some(cargo) = std::env::var_os("CARGO") else {
        say(
            "this build has no planted bugs: cargo run --profile sim -p sim --features plants -- bugs",
        );
        return ExitCode::from(2);
    };
    let mut command = std::process::Command::new(cargo);
    command.args(["run", "--quiet", "--profile", "sim", "-p", "sim", "--features", "plants", "--"]);
    match command.args(std::env::args_os().skip(1)).status() {
        Ok(status) => ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)),
        Err(error) => {
            say(&format!("cargo: {error}"));
            ExitCode::from(2)
        }
    }
}
