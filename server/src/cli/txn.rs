//! `millrace txn`: a small script of reads and writes, for trying conflicts by hand.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use client::Transaction;
use client::face::Client;
use common::{Code, IdempotencyId, Version};
use serde_json::json;

use super::connect::{ConnectArgs, block_on, find_stream};
use super::exit::{Exit, Failure};
use super::output::Output;

/// Runs transactions from a script.
#[derive(Args, Debug)]
#[command(after_help = "A script, one statement a line, # begins a comment:\n  \
    at VERSION | at now         the read version (default: now, when there are reads)\n  \
    read KEY | read KEY KEY     a key or a half-open range that was read\n  \
    write KEY | write KEY KEY   a key or a half-open range that is written\n  \
    append STREAM VALUE         a record; so are:\n  \
    put STREAM KEY VALUE        delete STREAM KEY\n  \
    id 32-HEX-DIGITS            an idempotency id\n  \
    commit                      commits, prints the outcome, begins the next transaction\n\n\
    Keys and values may have \\xNN and \\_ (a space).\n\n\
    Example:\n  printf 'read a\\nwrite a\\nput orders a 1\\ncommit\\n' | millrace txn --dir ./data")]
pub(crate) struct TxnArgs {
    /// The script; stdin when there is none.
    script: Option<PathBuf>,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs `txn`. A conflict is exit code 1.
///
/// # Errors
/// What is wrong with the script, or why there is no verdict.
pub(crate) fn run(args: &TxnArgs, output: Output) -> Result<Exit> {
    let script = match &args.script {
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => std::io::read_to_string(std::io::stdin())?,
    };
    block_on(async {
        let client = args.connect.open().await?;
        let mut draft = Draft::default();
        let mut exit = Exit::Done;
        for (number, line) in script.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let at = || format!("line {}: {line}", number + 1);
            if line == "commit" {
                exit = std::mem::take(&mut draft).commit(&client, output).await.with_context(at)?;
            } else {
                draft.take(&client, line).await.map_err(refused_unless_known).with_context(at)?;
            }
        }
        if draft.has_statements {
            exit = draft.commit(&client, output).await?;
        }
        client.close().await;
        Ok(exit)
    })
}

/// What the cluster has not said is wrong with the script.
fn refused_unless_known(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<client::Error>() {
        Some(_) => error,
        None => Failure::refused(format!("{error:#}")).into(),
    }
}

#[derive(Default)]
struct Draft {
    transaction: Transaction,
    read_version: Option<Version>,
    has_reads: bool,
    has_statements: bool,
}

impl Draft {
    async fn take(&mut self, client: &Client, line: &str) -> Result<()> {
        self.has_statements = true;
        let words: Vec<&str> = line.split_whitespace().collect();
        let key = |place: usize| unescape(words[place]);
        match (words[0], words.len()) {
            ("at", 2) if words[1] == "now" => {
                self.read_version = Some(client.read_version().await?)
            }
            ("at", 2) => {
                self.read_version = Some(Version(words[1].trim_start_matches('v').parse()?))
            }
            ("read", 2) => {
                self.has_reads = true;
                self.transaction.read_point(&key(1)?);
            }
            ("read", 3) => {
                self.has_reads = true;
                self.transaction.read(&key(1)?, &key(2)?);
            }
            ("write", 2) => {
                self.transaction.write_point(&key(1)?);
            }
            ("write", 3) => {
                self.transaction.write(&key(1)?, &key(2)?);
            }
            ("append", 3) => {
                let stream = find_stream(client, words[1]).await?;
                self.transaction.append(stream, key(2)?);
            }
            ("put", 4) => {
                let stream = find_stream(client, words[1]).await?;
                self.transaction.put(stream, key(2)?, key(3)?);
            }
            ("delete", 3) => {
                let stream = find_stream(client, words[1]).await?;
                self.transaction.delete(stream, key(2)?);
            }
            ("id", 2) => {
                self.transaction.idempotency_id(parse_id(words[1])?);
            }
            _ => bail!("no such statement; see millrace txn --help"),
        }
        Ok(())
    }

    async fn commit(mut self, client: &Client, output: Output) -> Result<Exit> {
        if self.has_reads && self.read_version.is_none() {
            self.read_version = Some(client.read_version().await?);
        }
        if let Some(version) = self.read_version {
            self.transaction.read_version(version);
        }
        self.transaction.report_conflicts();
        match client.commit(self.transaction).await {
            Ok(committed) => {
                let offsets: Vec<_> = committed
                    .offsets
                    .iter()
                    .map(|(stream, offset)| json!([stream.0, offset.map(|offset| offset.0)]))
                    .collect();
                let json = json!({
                    "outcome": "committed",
                    "version": committed.position.version.0,
                    "index": committed.position.index,
                    "offsets": offsets,
                });
                output.print(&json, || format!("committed at {}", committed.position))?;
                Ok(Exit::Done)
            }
            Err(error) if matches!(error.code(), Code::Conflict | Code::TooOld) => {
                let ranges = match &error {
                    client::Error::Retry { conflicts, .. } => conflicts.clone(),
                    _ => Vec::new(),
                };
                let name = error.code().name();
                let json = json!({"outcome": name, "conflicting_reads": ranges});
                output.print(&json, || format!("{name}: {error} (reads {ranges:?})"))?;
                Ok(Exit::No)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn parse_id(hex: &str) -> Result<IdempotencyId> {
    let number = u128::from_str_radix(hex, 16).context("32 hex digits")?;
    Ok(IdempotencyId(number.to_be_bytes()))
}

fn unescape(word: &str) -> Result<Vec<u8>> {
    let (mut out, mut rest) = (Vec::new(), word.as_bytes());
    while let [first, tail @ ..] = rest {
        rest = match (first, tail) {
            (b'\\', [b'x', high, low, after @ ..]) => {
                let digits = std::str::from_utf8(&[*high, *low])?.to_owned();
                out.push(u8::from_str_radix(&digits, 16).context("\\xNN")?);
                after
            }
            (b'\\', [b'_', after @ ..]) => {
                out.push(b' ');
                after
            }
            (byte, after) => {
                out.push(*byte);
                after
            }
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_bytes() {
        assert_eq!(unescape(r"a\x00\xffb\_c\").unwrap(), b"a\x00\xffb c\\");
        assert!(unescape(r"\xzz").is_err());
        assert_eq!(parse_id("0f").unwrap().0[15], 15);
    }
}
