//! `millrace append`, `pull`, `stream` and `status`.

use std::io::BufRead;

use anyhow::Result;
use clap::{Args, Subcommand};
use client::face::Client;
use client::{Delivered, Transaction};
use common::record::{Op, Record};
use common::{StreamId, Version};
use serde_json::{Value, json};

use super::connect::{ConnectArgs, block_on, find_stream};
use super::exit::Exit;
use super::output::Output;

/// Appends records, one commit each line of stdin or each value given.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  echo hello | millrace append orders --dir ./data\n  \
    millrace append orders 'one' 'two' --key customer-7 --dir ./data")]
pub(crate) struct AppendArgs {
    /// The stream's name, or its id as `s17`.
    stream: String,
    /// The values; lines of stdin when there are none.
    values: Vec<String>,
    /// Makes the records puts of this key.
    #[arg(long)]
    key: Option<String>,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs `append`.
///
/// # Errors
/// Why a record is not committed; those before it are.
pub(crate) fn append(args: &AppendArgs, output: Output) -> Result<Exit> {
    block_on(async {
        let client = args.connect.open().await?;
        let stream = find_stream(&client, &args.stream).await?;
        if args.values.is_empty() {
            for line in std::io::stdin().lock().lines() {
                append_one(&client, stream, args, line?, output).await?;
            }
        }
        for value in &args.values {
            append_one(&client, stream, args, value.clone(), output).await?;
        }
        client.close().await;
        Ok(Exit::Done)
    })
}

async fn append_one(
    client: &Client,
    stream: StreamId,
    args: &AppendArgs,
    value: String,
    output: Output,
) -> Result<()> {
    let mut transaction = Transaction::new();
    match &args.key {
        Some(key) => transaction.put(stream, key.clone(), value),
        None => transaction.append(stream, value),
    };
    let committed = client.commit(transaction).await?;
    let offset = committed.offsets.first().and_then(|(_, offset)| *offset);
    let json = json!({
        "version": committed.position.version.0,
        "index": committed.position.index,
        "stream": stream.0,
        "offset": offset.map(|offset| offset.0),
        "commit_time_us": committed.commit_time.0,
    });
    output.print(&json, || {
        let offset = offset.map_or_else(|| "?".to_owned(), |offset| offset.0.to_string());
        format!("{} offset {offset}", committed.position)
    })
}

/// Prints records by version.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  millrace pull orders payments --from 0 --dir ./data -o json\n\n\
    Without --follow it ends at what was committed when it began."
)]
pub(crate) struct PullArgs {
    /// Names of streams, or ids as `s17`.
    #[arg(required = true)]
    streams: Vec<String>,
    /// Versions above this one.
    #[arg(long, default_value_t = 0, value_name = "VERSION")]
    from: u64,
    /// Goes on with what is committed from now on.
    #[arg(long, short)]
    follow: bool,
    /// Ends after this many records.
    #[arg(long, value_name = "COUNT")]
    limit: Option<u64>,
    /// Prints progress marks too.
    #[arg(long)]
    marks: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs `pull`.
///
/// # Errors
/// When the streams can't be pulled.
pub(crate) fn pull(args: &PullArgs, output: Output) -> Result<Exit> {
    block_on(async {
        let client = args.connect.open().await?;
        let mut names = Vec::new();
        for name in &args.streams {
            names.push((find_stream(&client, name).await?, name.clone()));
        }
        let until = if args.follow { Version::MAX } else { client.read_version().await? };
        let streams: Vec<StreamId> = names.iter().map(|(stream, _)| *stream).collect();
        let mut pull = client.pull(streams, Version(args.from)).await?;
        let (mut through, mut printed) = (Version(args.from), 0);
        while through < until {
            let pulled = pull.next_until(until).await?;
            for batch in pulled.batches.iter().filter(|batch| batch.version <= until) {
                for record in batch.records()? {
                    if args.limit.is_some_and(|limit| printed >= limit) {
                        return Ok(Exit::Done);
                    }
                    let name = names.iter().find(|(stream, _)| *stream == record.stream);
                    print_record(&record, name.map_or("", |(_, name)| name), output)?;
                    printed += 1;
                }
            }
            through = pulled.through;
            if args.marks {
                output.print(&json!({"through": through.0}), || format!("-- through {through}"))?;
            }
        }
        Ok(Exit::Done)
    })
}

fn print_record(record: &Delivered, name: &str, output: Output) -> Result<()> {
    let json = record_json(record, name);
    output.print(&json, || {
        let op = json["op"].as_str().unwrap_or_default();
        let (key, value) = (text(&record.record.key), text(&record.record.value));
        let key = if key.is_empty() { String::new() } else { format!(" {key}") };
        format!("{} {name} {} {op}{key} {value}", record.position, record.offset.0)
    })
}

fn record_json(delivered: &Delivered, name: &str) -> Value {
    let Record { op, event_time_us, key, value, headers } = &delivered.record;
    let op = match op {
        Op::Append => "append",
        Op::Put => "put",
        Op::Delete => "delete",
    };
    let headers: Vec<Value> =
        headers.iter().map(|(name, value)| json!([text(name), text(value)])).collect();
    json!({
        "version": delivered.position.version.0,
        "index": delivered.position.index,
        "stream": name,
        "offset": delivered.offset.0,
        "op": op,
        "event_time_us": event_time_us,
        "key": text(key),
        "value": text(value),
        "headers": headers,
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What to do with streams.
#[derive(Subcommand, Debug)]
pub(crate) enum StreamVerb {
    /// Creates a stream.
    #[command(after_help = "Example:\n  millrace stream create orders --dir ./data")]
    Create {
        /// The name: A-Za-z0-9._/-
        name: String,
        #[command(flatten)]
        connect: ConnectArgs,
    },
    /// Lists all streams.
    #[command(after_help = "Example:\n  millrace stream list --dir ./data -o json")]
    List {
        #[command(flatten)]
        connect: ConnectArgs,
    },
    /// Tells how streams stand.
    #[command(after_help = "Example:\n  millrace stream describe orders --dir ./data")]
    Describe {
        /// Names, or ids as `s17`.
        #[arg(required = true)]
        names: Vec<String>,
        #[command(flatten)]
        connect: ConnectArgs,
    },
    /// Lets go of everything of a stream at or below a version.
    #[command(
        after_help = "Example:\n  millrace stream trim orders --through 20000017 --dir ./data"
    )]
    Trim {
        /// The name, or the id as `s17`.
        name: String,
        /// The version, inclusive.
        #[arg(long, value_name = "VERSION")]
        through: u64,
        #[command(flatten)]
        connect: ConnectArgs,
    },
}

/// Runs `stream`.
///
/// # Errors
/// Why not.
pub(crate) fn stream(verb: &StreamVerb, output: Output) -> Result<Exit> {
    block_on(async {
        match verb {
            StreamVerb::Create { name, connect } => {
                let stream = connect.open().await?.create_stream(name).await?;
                let json = json!({"name": name, "stream": stream.0});
                output.print(&json, || format!("{name} is {stream}"))?;
            }
            StreamVerb::List { connect } => {
                for (name, stream) in connect.open().await?.list_streams().await? {
                    let json = json!({"name": name, "stream": stream.0});
                    output.print(&json, || format!("{stream} {name}"))?;
                }
            }
            StreamVerb::Describe { names, connect } => {
                describe(&connect.open().await?, names, output).await?;
            }
            StreamVerb::Trim { name, through, connect } => {
                let client = connect.open().await?;
                let stream = find_stream(&client, name).await?;
                let state = client.trim(stream, Version(*through)).await?;
                let json = json!({
                    "name": name,
                    "through": state.through.0,
                    "first_offset": state.first_offset.0,
                });
                output.print(&json, || {
                    format!(
                        "{name} begins at offset {}, above {}",
                        state.first_offset.0, state.through
                    )
                })?;
            }
        }
        Ok(Exit::Done)
    })
}

async fn describe(client: &Client, names: &[String], output: Output) -> Result<()> {
    for name in names {
        let stream = find_stream(client, name).await?;
        for state in client.describe_streams([stream]).await? {
            let json = json!({
                "name": name,
                "stream": stream.0,
                "first_offset": state.first_offset.0,
                "next_offset": state.next_offset.0,
                "trimmed_through": state.trimmed_through.0,
                "last_version": state.last_version.0,
                "bytes": state.bytes,
            });
            output.print(&json, || {
                format!(
                    "{stream} {name}: offsets {}..{}, {} bytes, last {}, trimmed through {}",
                    state.first_offset.0,
                    state.next_offset.0,
                    state.bytes,
                    state.last_version,
                    state.trimmed_through
                )
            })?;
        }
    }
    Ok(())
}

/// Tells how a node stands, and what waits for what.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  millrace status --dir ./data -o json")]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs `status`.
///
/// # Errors
/// When no node answers.
pub(crate) fn status(args: &StatusArgs, output: Output) -> Result<Exit> {
    block_on(async {
        let client = args.connect.open_named().await?;
        let report: Value = serde_json::from_str(&client.status().await?)?;
        output.print(&report, || status_text(&report))?;
        Ok(Exit::Done)
    })
}

fn status_text(report: &Value) -> String {
    let mut lines = vec![
        format!(
            "node      {} (life {}), up {} ms",
            report["node"], report["incarnation"], report["up_ms"]
        ),
        format!("epoch     {}, serving: {}", report["epoch"], report["serving"]),
    ];
    let recovery = &report["recovery"];
    lines.push(match recovery["phase"].as_str() {
        None => "recovery  not by this node: it is none of the leaders".to_owned(),
        Some(phase) => format!(
            "recovery  {phase} for {} ms, since {}{}",
            recovery["since_ms"],
            recovery["cause"],
            match recovery["waiting_for"].as_str() {
                None | Some("") => String::new(),
                Some(what) => format!(", waiting for {what}"),
            }
        ),
    });
    let roles = report["roles"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let roles = roles.collect::<Vec<_>>().join(", ");
    lines.push(format!("roles     {}; led by {}", roles, report["plan"]["leader"]));
    lines.extend(cluster_lines(&report["cluster"]));
    lines.push(register_line(&report["register"]));
    let log = &report["log"];
    lines.push(format!(
        "log       {}, {}; durable {}, known committed {}, {} segments, {} spares, {} blocks",
        log["standing"],
        log["state"],
        log["durable"],
        log["known_committed"],
        log["segments"],
        log["spares"],
        log["blocks"]
    ));
    lines.push(format!("disk      {}", report["disk"]["engine"]));
    lines.push(format!("counters  {}", report["counters"]));
    let waits = log["waiting_for"].as_array().into_iter().flatten();
    lines.extend(waits.map(|what| format!("waits     {what}")));
    lines.join("\n")
}

fn cluster_lines(cluster: &Value) -> Vec<String> {
    let Some(name) = cluster["name"].as_str() else { return Vec::new() };
    let mut lines = vec![format!("cluster   {name}, definition {}", cluster["definition"])];
    for link in cluster["nodes"].as_array().into_iter().flatten() {
        let text = |key: &str| link[key].as_str().unwrap_or_default().to_owned();
        let mut line = format!(
            "link      {} {}, {} for {} ms, {} breaks",
            text("node"),
            text("address"),
            text("state"),
            link["since_ms"],
            link["breaks"]
        );
        let error = &link["last_error"];
        if let (Some(code), Some(what)) = (error["code"].as_str(), error["what"].as_str()) {
            line += &format!(": {code}: {what}");
        }
        lines.push(line);
    }
    lines
}

fn register_line(register: &Value) -> String {
    let mut line = format!(
        "register  {}, {} for {} ms",
        register["at"], register["state"], register["since_ms"]
    );
    let error = &register["last_error"];
    if register["state"] == "unreachable" {
        line += &format!(": {}: {}", error["code"], error["what"]);
    }
    line
}
