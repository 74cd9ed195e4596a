//! `explore`: every order of events in small configurations.

use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use sim::explore::{Explored, Scope, Search, explore};

use super::{FAILED, Output, bugs, say};

#[derive(Args, Debug)]
pub(super) struct ExploreArgs {
    /// Only this configuration; all of them without it
    #[arg(long)]
    scope: Option<String>,
    /// States of each configuration that are looked at, at most
    #[arg(long, default_value_t = 100_000)]
    states: usize,
    /// The planted bug to switch on, e.g. M12
    #[arg(long)]
    plant: Option<String>,
    /// Messages that may be lost on one way
    #[arg(long)]
    drops: Option<u8>,
    /// Messages that may come twice on one way
    #[arg(long)]
    doubles: Option<u8>,
    /// Answers of the register that may say nothing on one way
    #[arg(long)]
    unsures: Option<u8>,
    /// Timers that may run out early on one way
    #[arg(long)]
    timers: Option<u8>,
    /// Lives that may end on one way
    #[arg(long)]
    crashes: Option<u8>,
    /// How to print the result
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

pub(super) fn explore_scopes(args: &ExploreArgs) -> ExitCode {
    let searches = match searches(args) {
        Ok(searches) => searches,
        Err(what) => {
            say(&what);
            return ExitCode::from(2);
        }
    };
    let mut all = Vec::new();
    for search in searches {
        let started = Instant::now();
        let explored = explore(&search);
        if args.output == Output::Text {
            tell(&explored, started.elapsed().as_millis());
        }
        all.push(explored);
    }
    if args.output == Output::Json {
        say(&serde_json::to_string(&all).expect("plain data serializes"));
    }
    let is_good = all.iter().all(|explored| explored.broken.is_none());
    if is_good { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

fn searches(args: &ExploreArgs) -> Result<Vec<Search>, String> {
    let plants = bugs::plant_named(args.plant.as_deref())?;
    let is_asked = |scope: &Scope| args.scope.as_deref().is_none_or(|name| name == scope.name());
    let scopes: Vec<Scope> = Scope::ALL.iter().copied().filter(is_asked).collect();
    if scopes.is_empty() {
        let names: Vec<&str> = Scope::ALL.iter().map(|scope| scope.name()).collect();
        return Err(format!("no such scope; there are {}", names.join(", ")));
    }
    let searches = scopes.into_iter().map(|scope| {
        let mut search = Search { plants, ..Search::new(scope, args.states) };
        let trouble = &mut search.trouble;
        for (asked, kind) in [
            (args.drops, &mut trouble.drops),
            (args.doubles, &mut trouble.doubles),
            (args.unsures, &mut trouble.unsures),
            (args.timers, &mut trouble.timers),
            (args.crashes, &mut trouble.crashes),
        ] {
            *kind = asked.unwrap_or(*kind);
        }
        search
    });
    Ok(searches.collect())
}

fn tell(explored: &Explored, took_ms: u128) {
    let Explored { scope, trouble, states, choices, depth, .. } = explored;
    let end = if explored.is_exhausted { "exhausted" } else { "not exhausted" };
    say(&format!(
        "{:12} {states} states, {choices} choices, depth {depth}, {end}; epochs to e{}, \
         {} states with a commit; \
         {trouble:?} {took_ms} ms",
        scope.name(),
        explored.epoch_max,
        explored.acknowledged_states
    ));
    if let Some(broken) = &explored.broken {
        broken.way.iter().for_each(|line| say(&format!("    {line}")));
        say(&format!("FAIL {}: {}", broken.rule, broken.detail));
    }
}
