//! pgbench's TPC-B-like transactions: what a capture holds, and what the database ended with.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

use crate::ingest::input;
use crate::ingest::wal2json::{SourceTransaction, Transactions};

const SAMPLE: &[u8] = include_bytes!("../../../../tests/data/tpcb-1000.jsonl.zst");
const SAMPLE_ROWS: &[u8] = include_bytes!("../../../../tests/data/tpcb-1000.rows.csv");

/// The tables that keep a balance: short name, table, key column, balance column.
pub(super) const BALANCES: [(&str, &str, &str, &str); 3] = [
    ("accounts", "public.pgbench_accounts", "aid", "abalance"),
    ("tellers", "public.pgbench_tellers", "tid", "tbalance"),
    ("branches", "public.pgbench_branches", "bid", "bbalance"),
];
pub(super) const HISTORY: &str = "public.pgbench_history";

/// A capture and what it must lead to.
pub(super) struct Capture {
    /// The transactions that changed something, in the upstream's order.
    pub(super) transactions: Vec<SourceTransaction>,
    /// Short table name and key, to balance.
    pub(super) expected: BTreeMap<(String, u64), i64>,
}

/// What a transaction does, without the values that it happened to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) account: u64,
    pub(super) teller: u64,
    pub(super) branch: u64,
    pub(super) delta: i64,
}

impl Capture {
    pub(super) fn open(capture: &Path, rows: &Path) -> Result<Self> {
        Self::read(input::open(capture)?, input::open(rows)?)
    }

    /// The sample that comes with the program.
    pub(super) fn sample() -> Result<Self> {
        Self::read(input::from_reader(SAMPLE)?, BufReader::new(SAMPLE_ROWS))
    }

    fn read(capture: impl BufRead, rows: impl BufRead) -> Result<Self> {
        let mut transactions = Vec::new();
        for transaction in Transactions::new(capture) {
            let transaction = transaction?;
            if !transaction.changes.is_empty() {
                transactions.push(transaction);
            }
        }
        ensure!(!transactions.is_empty(), "the capture holds no transaction");
        let mut expected = BTreeMap::new();
        for line in rows.lines() {
            let line = line?;
            let fields: Vec<&str> = line.trim().split(',').collect();
            let [table, key, balance] = fields[..] else {
                anyhow::bail!("{line:?} is not table,key,balance");
            };
            let row = (table.to_owned(), key.parse().context("a key")?);
            expected.insert(row, balance.parse().context("a balance")?);
        }
        Ok(Self { transactions, expected })
    }
}

impl Transfer {
    /// What a transaction of the capture does: its history row says it all.
    pub(super) fn of(transaction: &SourceTransaction) -> Result<Self> {
        let rows = transaction.changes.iter();
        let mut history = rows.filter(|change| change.table == HISTORY);
        let row =
            history.next().with_context(|| format!("xid {}: no history row", transaction.xid))?;
        let number = |name: &str| integer(&row.columns, name);
        let key = |name: &str| number(name).and_then(|key| Ok(u64::try_from(key)?));
        Ok(Self {
            account: key("aid")?,
            teller: key("tid")?,
            branch: key("bid")?,
            delta: number("delta")?,
        })
    }
}

/// An integer column of a row.
pub(super) fn integer(row: &Map<String, Value>, name: &str) -> Result<i64> {
    row.get(name).and_then(Value::as_i64).with_context(|| format!("no integer {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_whole() {
        let capture = Capture::sample().unwrap();
        assert_eq!(capture.transactions.len(), 1000);
        let sum = |table: &str| -> i64 {
            capture
                .expected
                .iter()
                .filter(|(row, _)| row.0 == table)
                .map(|(_, balance)| balance)
                .sum()
        };
        let deltas: i64 =
            capture.transactions.iter().map(|source| Transfer::of(source).unwrap().delta).sum();
        for table in ["accounts", "tellers", "branches"] {
            assert_eq!(sum(table), deltas, "{table}");
        }
    }
}
