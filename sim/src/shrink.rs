//! Shrinking: the fewest faults and operations of a failing seed that still break the same promise.
//!
//! ```text
//! plainer network, disk, knobs ..  -->  ddmin over the list of faults  -->  ddmin over operations
//! ```
//!
//! A candidate counts when it breaks the same rule, whatever the details. Delta debugging (Zeller and
//! Hildebrandt, 2002): leave out halves, then quarters, ... until nothing can be left out alone, or the
//! budget of runs is spent.

use std::collections::BTreeSet;

use crate::edits::{Edits, Plainer};
use crate::run::{Options, Outcome, run};

/// What shrinking came to.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// What is left out.
    pub edits: Edits,
    /// The run that is left, with its text.
    pub outcome: Outcome,
    /// Faults before and after.
    pub faults: (usize, usize),
    /// Operations before and after.
    pub operations: (usize, usize),
    /// Runs that it took.
    pub runs: u64,
}

/// Shrinks a seed; `None` when it does not fail.
#[must_use]
pub fn shrink(seed: u64, options: &Options, runs_max: u64) -> Option<Shrunk> {
    let whole = run(seed, options);
    let rule = whole.failure.as_ref()?.rule;
    let mut search = Search { seed, options: options.clone(), rule, runs: 1, runs_max };
    let mut edits = options.edits.clone();
    for plainer in Plainer::ALL {
        let mut candidate = edits.clone();
        candidate.plainer.insert(*plainer);
        if search.fails(&candidate) {
            edits = candidate;
        }
    }
    let faults: Vec<usize> = (0..whole.faults).filter(|at| !edits.faults.contains(at)).collect();
    let left =
        search.thin(&faults, |left| Edits { faults: without(&faults, left), ..edits.clone() });
    edits.faults = without(&faults, &left);
    let operations: Vec<(u64, u64)> = whole
        .operations
        .iter()
        .flat_map(|(client, count)| (0..*count).map(|place| (*client, place)))
        .filter(|operation| !edits.operations.contains(operation))
        .collect();
    let some = search.thin(&operations, |left| Edits {
        operations: without(&operations, left),
        ..edits.clone()
    });
    edits.operations = without(&operations, &some);
    let with_text = Options { with_text: true, edits: edits.clone(), ..options.clone() };
    Some(Shrunk {
        outcome: run(seed, &with_text),
        faults: (faults.len(), left.len()),
        operations: (operations.len(), some.len()),
        runs: search.runs,
        edits,
    })
}

fn without<T: Copy + Ord>(all: &[T], left: &[T]) -> BTreeSet<T> {
    let left: BTreeSet<T> = left.iter().copied().collect();
    all.iter().copied().filter(|item| !left.contains(item)).collect()
}

struct Search {
    seed: u64,
    options: Options,
    rule: &'static str,
    runs: u64,
    runs_max: u64,
}

impl Search {
    fn fails(&mut self, edits: &Edits) -> bool {
        if self.runs >= self.runs_max {
            return false;
        }
        self.runs += 1;
        let options = Options { with_text: false, edits: edits.clone(), ..self.options.clone() };
        run(self.seed, &options).failure.is_some_and(|failure| failure.rule == self.rule)
    }

    /// The fewest of `items` that still fail, as far as the budget goes.
    fn thin<T: Copy + Ord>(&mut self, items: &[T], edits: impl Fn(&[T]) -> Edits) -> Vec<T> {
        ddmin(items, |left| self.fails(&edits(left)))
    }
}

/// Leaves out as much of `items` as can be while `fails` holds.
fn ddmin<T: Copy>(items: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    if items.is_empty() || fails(&[]) {
        return Vec::new();
    }
    let (mut left, mut parts) = (items.to_vec(), 2);
    while left.len() > 1 {
        let size = left.len().div_ceil(parts);
        let rest = (0..left.len()).step_by(size).find_map(|from| {
            let to = (from + size).min(left.len());
            let rest = [&left[..from], &left[to..]].concat();
            fails(&rest).then_some(rest)
        });
        match rest {
            Some(rest) => {
                left = rest;
                parts = (parts - 1).max(2);
            }
            None if size == 1 => break,
            None => parts = (2 * parts).min(left.len()),
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_matters_is_left() {
        let items: Vec<u32> = (0..100).collect();
        let mut runs = 0;
        let left = ddmin(&items, |left| {
            runs += 1;
            left.contains(&13) && left.contains(&77)
        });
        assert_eq!(left, [13, 77]);
        assert!(runs < 100, "{runs} runs");
        assert!(ddmin(&items, |_| true).is_empty());
    }
}
