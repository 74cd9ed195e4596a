//! Reading wal2json, format version 2: one JSON object a line, transactions between `B` and `C`.
//!
//! ```text
//! {"action":"B","xid":739,...}
//! {"action":"U","schema":"public","table":"t","columns":[{"name":"id","value":1},..],"identity":[..],..}
//! {"action":"C","xid":739,...}
//! ```
//!
//! A row's key is the JSON array of its primary key's values, in the key's order; its value is the JSON
//! object of its columns. Tables without a primary key are event streams: their inserts are appends.
//!
//! | action | becomes |
//! |---|---|
//! | I, U with a primary key | put of the new key; a delete of the old key first when the key changed |
//! | D with a key | delete |
//! | I, U, D without a primary key | append of the row, with a header `action` |
//! | T (truncate) | an error: a stream has no such record |
//! | M (message) | nothing |

use std::io::BufRead;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use common::record::Record;
use serde::Deserialize;
use serde_json::{Map, Value};

/// A row change: where, and the record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// `schema.table`: the stream's name.
    pub table: String,
    /// What happens to the row.
    pub record: Record,
    /// The row's columns, when it has any.
    pub columns: Map<String, Value>,
}

/// A transaction of the upstream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SourceTransaction {
    /// Its place in the upstream, from 1, empty ones counted.
    pub ordinal: u64,
    /// The upstream's own number for it; 0 when it does not say.
    pub xid: u64,
    /// Its changes in order; empty for a transaction that changed nothing.
    pub changes: Vec<Change>,
}

#[derive(Deserialize)]
struct Line {
    action: String,
    #[serde(default)]
    xid: u64,
    #[serde(default)]
    schema: String,
    #[serde(default)]
    table: String,
    #[serde(default)]
    columns: Vec<Column>,
    #[serde(default)]
    identity: Vec<Column>,
    #[serde(default)]
    pk: Vec<Column>,
    timestamp: Option<String>,
}

#[derive(Deserialize, Clone)]
struct Column {
    name: String,
    #[serde(default)]
    value: Value,
}

/// Reads transactions one after the other.
pub struct Transactions<R> {
    lines: std::io::Lines<R>,
    line_number: u64,
    ordinal: u64,
}

impl<R: BufRead> Transactions<R> {
    /// Reads from the start of a capture.
    pub fn new(reader: R) -> Self {
        Self { lines: reader.lines(), line_number: 0, ordinal: 0 }
    }

    fn next_line(&mut self) -> Result<Option<Line>> {
        for text in self.lines.by_ref() {
            self.line_number += 1;
            let text = text.with_context(|| format!("line {}", self.line_number))?;
            if !text.trim().is_empty() {
                let line = serde_json::from_str(&text);
                return line.with_context(|| format!("line {}", self.line_number)).map(Some);
            }
        }
        Ok(None)
    }

    fn next_transaction(&mut self) -> Result<Option<SourceTransaction>> {
        let begin = loop {
            match self.next_line()? {
                None => return Ok(None),
                Some(line) if line.action == "M" => {}
                Some(line) if line.action == "B" => break line,
                Some(line) => {
                    bail!("line {}: {:?} outside a transaction", self.line_number, line.action)
                }
            }
        };
        let mut changes = Vec::new();
        loop {
            let line = self.next_line()?;
            let line = line
                .with_context(|| format!("xid {} has no end: the capture is cut off", begin.xid))?;
            match line.action.as_str() {
                "C" => break,
                "M" => {}
                "I" | "U" | "D" => {
                    let at = || format!("line {}", self.line_number);
                    change(line, &mut changes).with_context(at)?;
                }
                other => bail!("line {}: action {other:?} can't be ingested", self.line_number),
            }
        }
        self.ordinal += 1;
        Ok(Some(SourceTransaction { ordinal: self.ordinal, xid: begin.xid, changes }))
    }
}

impl<R: BufRead> Iterator for Transactions<R> {
    type Item = Result<SourceTransaction>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_transaction().transpose()
    }
}

fn change(line: Line, out: &mut Vec<Change>) -> Result<()> {
    ensure!(!line.table.is_empty(), "no table");
    let table = format!("{}.{}", line.schema, line.table);
    let columns: Map<String, Value> =
        line.columns.iter().map(|column| (column.name.clone(), column.value.clone())).collect();
    let event_time_us = line.timestamp.as_deref().and_then(timestamp_us);
    let mut push = |mut record: Record, columns| {
        record.event_time_us = event_time_us;
        out.push(Change { table: table.clone(), record, columns });
    };
    let value = || Bytes::from(Value::Object(columns.clone()).to_string());
    if line.pk.is_empty() {
        let row = if line.action == "D" {
            object(&line.identity).to_string()
        } else {
            value_text(&columns)
        };
        let mut record = Record::append(row);
        record.headers.push((Bytes::from_static(b"action"), Bytes::from(line.action)));
        push(record, columns);
        return Ok(());
    }
    let old_key = key_of(&line.pk, &line.identity);
    if line.action == "D" {
        let key =
            old_key.context("a delete without the old key: set the table's replica identity")?;
        push(Record::delete(key), Map::new());
        return Ok(());
    }
    let key = key_of(&line.pk, &line.columns).context("a row without its primary key")?;
    if let Some(old) = old_key.filter(|old| line.action == "U" && *old != key) {
        push(Record::delete(old), Map::new());
    }
    push(Record::put(key, value()), columns.clone());
    Ok(())
}

fn value_text(columns: &Map<String, Value>) -> String {
    Value::Object(columns.clone()).to_string()
}

fn object(columns: &[Column]) -> Value {
    Value::Object(
        columns.iter().map(|column| (column.name.clone(), column.value.clone())).collect(),
    )
}

/// The values of the primary key's columns among `columns`; `None` when one is missing.
fn key_of(pk: &[Column], columns: &[Column]) -> Option<String> {
    let value = |name: &str| columns.iter().find(|column| column.name == name);
    let values: Option<Vec<Value>> =
        pk.iter().map(|part| value(&part.name).map(|column| column.value.clone())).collect();
    Some(Value::Array(values?).to_string())
}

/// `2026-11-30 13:30:20.941638+00` in microseconds since 1970; `None` for another shape.
fn timestamp_us(text: &str) -> Option<i64> {
    let number = |range: core::ops::Range<usize>| text.get(range)?.parse::<i64>().ok();
    let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
    let (hour, minute, second) = (number(11..13)?, number(14..16)?, number(17..19)?);
    let rest = &text[19..];
    let zone_at = rest.find(['+', '-'])?;
    let fraction: String = rest[..zone_at].trim_start_matches('.').chars().take(6).collect();
    let micros: i64 = format!("{fraction:0<6}").parse().ok()?;
    let sign = if rest.as_bytes()[zone_at] == b'-' { -1 } else { 1 };
    let zone = rest[zone_at + 1..].get(..2)?.parse::<i64>().ok()? * 3600;
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    Some((seconds - sign * zone) * 1_000_000 + micros)
}

/// Days from 1970-01-01 in the proleptic Gregorian calendar, counting years from March.
const fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let year_of_era = shifted - era * 400;
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use common::record::Op;

    use super::*;

    fn read(text: &str) -> Result<Vec<SourceTransaction>> {
        Transactions::new(text.as_bytes()).collect()
    }

    const UPDATE: &str = concat!(
        r#"{"action":"U","schema":"public","table":"t","#,
        r#""columns":[{"name":"id","value":2},{"name":"x","value":null}],"#,
        r#""identity":[{"name":"id","value":1}],"pk":[{"name":"id"}]}"#
    );

    #[test]
    fn a_changed_key_is_a_delete_and_a_put() {
        let text =
            format!("{{\"action\":\"B\",\"xid\":7}}\n{UPDATE}\n{{\"action\":\"C\",\"xid\":7}}\n");
        let all = read(&text).unwrap();
        assert_eq!((all.len(), all[0].ordinal, all[0].xid), (1, 1, 7));
        let changes = &all[0].changes;
        assert_eq!(changes[0].record, Record::delete("[1]"));
        assert_eq!(changes[1].record, Record::put("[2]", r#"{"id":2,"x":null}"#));
        assert_eq!(changes[1].table, "public.t");
    }

    #[test]
    fn tables_without_a_key_are_event_streams() {
        let text = r#"{"action":"B"}
{"action":"I","schema":"public","table":"h","columns":[{"name":"delta","value":5}],"pk":[]}
{"action":"C"}"#;
        let record = &read(text).unwrap()[0].changes[0].record;
        assert_eq!((record.op, &record.value[..]), (Op::Append, &br#"{"delta":5}"#[..]));
    }

    #[test]
    fn damage_is_named_with_its_line() {
        let cut = format!("{{\"action\":\"B\",\"xid\":7}}\n{UPDATE}\n");
        assert!(format!("{:#}", read(&cut).unwrap_err()).contains("xid 7 has no end"));
        assert!(
            format!("{:#}", read("{\"action\":\"B\"}\nnonsense").unwrap_err()).contains("line 2")
        );
        assert!(read("{\"action\":\"C\"}").is_err());
        assert!(read("{\"action\":\"B\"}\n{\"action\":\"T\",\"table\":\"t\"}").is_err());
    }

    #[test]
    fn timestamps_of_the_capture_are_read() {
        assert_eq!(timestamp_us("1970-01-01 00:00:00+00"), Some(0));
        assert_eq!(timestamp_us("2026-11-30 13:30:20.941638+00"), Some(1_796_045_420_941_638));
        assert_eq!(timestamp_us("2000-03-01 01:00:00.5+01"), Some(951_868_800_500_000));
        assert_eq!(timestamp_us("yesterday"), None);
    }
}
