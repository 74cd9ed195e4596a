//! Exhaustive small scope: every order of what can happen, in a few small configurations.
//!
//! ```text
//! start --choice--> state --choice--> state      by breadth: the way to a broken promise is a shortest one
//!                     `--known already: not looked at again
//! ```
//!
//! The seeds of `crate::run` go deep on one way; this goes all ways, not far. Both run the same nodes, and
//! the same oracles judge both. A state is known by a digest of everything that decides its future: machines,
//! disks, letters, the register, what the oracles remember, and the trouble that is left.
//!
//! What is bounded: how much trouble of each kind a way may have, how many epochs, and how many states are
//! looked at. An *exhausted* frontier means that within those bounds nothing was left out.

mod digest;
mod letter;
mod scope;
mod small;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::Plants;
use serde::Serialize;

pub use self::letter::Trouble;
pub use self::scope::Scope;

use self::letter::Choice;
use self::small::Small;
use crate::oracle::Violation;
use crate::run::panic_text;

/// What is explored.
#[derive(Clone, Debug)]
pub struct Search {
    /// The configuration.
    pub scope: Scope,
    /// How much of each kind of trouble a way may have.
    pub trouble: Trouble,
    /// States that are looked at, at most.
    pub states_max: usize,
    /// Bugs that the roles have.
    pub plants: Plants,
    /// The register does not compare before it sets: to see that this is noticed.
    pub is_register_blind: bool,
}

impl Search {
    /// A scope with its own trouble.
    #[must_use]
    pub const fn new(scope: Scope, states_max: usize) -> Self {
        let trouble = scope.trouble();
        Self { scope, trouble, states_max, plants: Plants::NONE, is_register_blind: false }
    }
}

/// What an exploration came to.
#[derive(Clone, Debug, Serialize)]
pub struct Explored {
    /// The configuration.
    pub scope: Scope,
    /// How much trouble a way could have.
    pub trouble: Trouble,
    /// Different states.
    pub states: usize,
    /// Choices that were made.
    pub choices: u64,
    /// The longest of the shortest ways to a state.
    pub depth: u32,
    /// Whether no state was left to look at.
    pub is_exhausted: bool,
    /// The newest epoch of all states.
    pub epoch_max: u64,
    /// States in which a client's commit was acknowledged.
    pub acknowledged_states: usize,
    /// The broken promise, if there is one.
    pub broken: Option<Broken>,
}

/// A broken promise and the way to it.
#[derive(Clone, Debug, Serialize)]
pub struct Broken {
    /// The rule.
    pub rule: &'static str,
    /// Names and numbers.
    pub detail: String,
    /// What happened, in order.
    pub way: Vec<String>,
}

/// A state that is known, and how it was reached first.
#[derive(Clone, Copy, Debug)]
struct Known {
    from: u32,
    choice: Option<Choice>,
    depth: u32,
}

/// Explores a scope; stops at the first broken promise.
#[must_use]
pub fn explore(search: &Search) -> Explored {
    let mut explored = Explored {
        scope: search.scope,
        trouble: search.trouble,
        states: 0,
        choices: 0,
        depth: 0,
        is_exhausted: false,
        epoch_max: 0,
        acknowledged_states: 0,
        broken: None,
    };
    let mut known: Vec<Known> = Vec::new();
    let (mut digests, mut frontier) = (BTreeSet::new(), VecDeque::new());
    match guarded(|| start(search)) {
        Ok(mut small) => {
            digests.insert(small.digest());
            known.push(Known { from: 0, choice: None, depth: 0 });
            explored.meet(&small, 0);
            frontier.push_back((0, small));
        }
        Err(violation) => {
            explored.broken = Some(Broken {
                rule: violation.rule,
                detail: violation.detail,
                way: vec!["before the exploration".to_owned()],
            });
            return explored;
        }
    }
    while let Some((place, small)) = frontier.pop_front() {
        for choice in small.choices() {
            if known.len() >= search.states_max {
                return explored;
            }
            explored.choices += 1;
            let mut next = small.clone();
            if let Err(violation) = guarded(|| next.make(choice)) {
                explored.broken = Some(tell(search, &known, place, choice, violation));
                return explored;
            }
            if digests.insert(next.digest()) {
                let depth = known[place as usize].depth + 1;
                explored.meet(&next, depth);
                let id = u32::try_from(known.len()).expect("states_max is below 2^32");
                known.push(Known { from: place, choice: Some(choice), depth });
                frontier.push_back((id, next));
            }
        }
    }
    explored.is_exhausted = true;
    explored
}

impl Explored {
    fn meet(&mut self, small: &Small, depth: u32) {
        self.states += 1;
        self.depth = self.depth.max(depth);
        self.epoch_max = self.epoch_max.max(small.epoch());
        self.acknowledged_states += usize::from(small.acknowledged_count() > 0);
    }
}

fn start(search: &Search) -> Result<Small, Violation> {
    search.scope.start(search.trouble, search.plants, search.is_register_blind)
}

/// A panic is a broken promise as well.
fn guarded<T>(run: impl FnOnce() -> Result<T, Violation>) -> Result<T, Violation> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(Violation { rule: "panic", detail: panic_text(panic.as_ref()) })
    })
}

/// Goes the way to a broken promise again and says what happens on it.
fn tell(
    search: &Search,
    known: &[Known],
    place: u32,
    last: Choice,
    violation: Violation,
) -> Broken {
    let (mut choices, mut at) = (vec![last], place as usize);
    while let Some(choice) = known[at].choice {
        choices.push(choice);
        at = known[at].from as usize;
    }
    let mut small = start(search).expect("the start was good before");
    let mut way = Vec::new();
    for choice in choices.into_iter().rev() {
        way.push(small.describe(choice));
        // The last one breaks the promise.
        let _ = guarded(|| small.make(choice));
    }
    Broken { rule: violation.rule, detail: violation.detail, way }
}
