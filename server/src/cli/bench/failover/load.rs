//! Callers in closed loops that write down every acknowledgement and when it came.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use client::face::Client;
use client::{Committed, Transaction};
use common::StreamId;

use super::history::Acknowledged;

/// A caller that was told of an error rests this long.
const REST: Duration = Duration::from_millis(20);

/// What one caller has been told.
#[derive(Default)]
pub(super) struct Told {
    pub(super) acknowledged: Vec<Acknowledged>,
    /// When, of each acknowledgement.
    pub(super) at: Vec<Instant>,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
}

/// All callers of one role's kills; each appends 0, 1, 2 ... to a stream of its own.
pub(super) struct Load {
    pub(super) streams: Vec<StreamId>,
    pub(super) told: Vec<Rc<RefCell<Told>>>,
    is_over: Rc<Cell<bool>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    pub(super) fn start(clients: &[Client], streams: Vec<StreamId>) -> Self {
        let is_over = Rc::new(Cell::new(false));
        let told: Vec<_> = streams.iter().map(|_| Rc::new(RefCell::new(Told::default()))).collect();
        let tasks = streams
            .iter()
            .zip(&told)
            .enumerate()
            .map(|(caller, (stream, told))| {
                let client = clients[caller % clients.len()].clone();
                tokio::task::spawn_local(call(
                    client,
                    *stream,
                    Rc::clone(told),
                    Rc::clone(&is_over),
                ))
            })
            .collect();
        Self { streams, told, is_over, tasks }
    }

    /// The fewest acknowledgements that a caller has had since then.
    pub(super) fn fewest_since(&self, since: Instant) -> usize {
        let count = |told: &Rc<RefCell<Told>>| {
            told.borrow().at.iter().rev().take_while(|at| **at > since).count()
        };
        self.told.iter().map(count).min().unwrap_or(0)
    }

    /// Lets every call come to its end.
    pub(super) async fn finish(&mut self) -> Result<()> {
        self.is_over.set(true);
        for task in self.tasks.drain(..) {
            task.await.context("a caller")?;
        }
        Ok(())
    }

    /// The longest time without any acknowledgement that ends after `since`; and the longest of one caller.
    pub(super) fn gaps(&self, since: Instant) -> (Duration, Duration) {
        let mut all: Vec<Instant> = Vec::new();
        let mut of_caller = Duration::ZERO;
        for told in &self.told {
            let told = told.borrow();
            let after = told.at.partition_point(|at| *at <= since);
            let near = &told.at[after.saturating_sub(1)..];
            of_caller = of_caller.max(longest_gap(near, since));
            all.extend(near);
        }
        all.sort_unstable();
        (longest_gap(&all, since), of_caller)
    }
}

/// The longest time between two neighbours of which the later is after `since`.
fn longest_gap(sorted: &[Instant], since: Instant) -> Duration {
    let pairs = sorted.windows(2).filter(|pair| pair[1] > since);
    pairs.map(|pair| pair[1] - pair[0]).max().unwrap_or(Duration::ZERO)
}

async fn call(client: Client, stream: StreamId, told: Rc<RefCell<Told>>, is_over: Rc<Cell<bool>>) {
    let mut number = 0;
    while !is_over.get() {
        let mut transaction = Transaction::new();
        transaction.append(stream, number.to_string());
        match client.commit(transaction).await {
            Ok(Committed { position, offsets, .. }) => {
                let offset = offsets.first().and_then(|(_, offset)| *offset).map(|offset| offset.0);
                let position = (position.version.0, position.index);
                let mut told = told.borrow_mut();
                told.acknowledged.push(Acknowledged { number, position, offset });
                told.at.push(Instant::now());
            }
            Err(error) => {
                {
                    let mut told = told.borrow_mut();
                    told.errors += 1;
                    told.first_error.get_or_insert_with(|| format!("{stream} {number}: {error}"));
                }
                tokio::time::sleep(REST).await;
            }
        }
        number += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_when_it_ends_after_the_kill() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let all = [at(0), at(900), at(910), at(1010), at(1300), at(1310)];
        assert_eq!(longest_gap(&all, at(905)), Duration::from_millis(290));
        assert_eq!(longest_gap(&all, at(1305)), Duration::from_millis(10));
        assert_eq!(longest_gap(&all, at(2000)), Duration::ZERO);
    }
}
