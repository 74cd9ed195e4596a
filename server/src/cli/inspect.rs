//! `millrace inspect`: the log directory offline, read-only; a running node does not mind.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use common::record::Op;
use common::register::{RegisterOp, RegisterOutcome, RegisterState};
use common::{Code, Refusal, SegmentId, StreamId};
use logserver::format::inspect::{self, Seal, SegmentReport};
use logserver::format::meta::MetaChoice;
use logserver::format::scan::ScanEnd;
use serde_json::{Value, json};

use super::exit::{Exit, Failure};
use super::output::{Output, complain};
use super::register::RegisterArgs;
use crate::register::{Register, RegisterOptions, RegisterUrl};

/// What to look at.
#[derive(Subcommand, Debug)]
pub(crate) enum InspectVerb {
    /// The segments: versions, frames, how much of them is live.
    #[command(after_help = "Example:\n  millrace inspect segments ./data")]
    Segments(Directory),
    /// The frames: one version each.
    #[command(after_help = "Example:\n  millrace inspect frames ./data --segment 3 -o json")]
    Frames {
        #[command(flatten)]
        directory: Directory,
        /// Only this segment.
        #[arg(long)]
        segment: Option<u64>,
    },
    /// The streams: names, offsets, versions, how much of them is live.
    #[command(after_help = "Example:\n  millrace inspect streams ./data -o json")]
    Streams(Directory),
    /// The records of a stream, or of all.
    #[command(
        visible_alias = "dump",
        after_help = "Examples:\n  \
        millrace inspect records ./data --stream orders --decoder json --from-offset 40 --limit 2 -o json\n  \
        millrace inspect dump ./data --decoder hex"
    )]
    Records(RecordsArgs),
    /// Checks every checksum, the chain of frames, the footers and the offsets. A finding is exit code 5.
    #[command(after_help = "Example:\n  millrace inspect verify ./data && echo sound")]
    Verify(Directory),
    /// What the register holds; with a file, only while no node runs on the directory.
    #[command(after_help = "Examples:\n  millrace inspect register ./data -o json\n  \
        millrace inspect register ./data --register postgres://millrace@db1/log")]
    Register {
        #[command(flatten)]
        directory: Directory,
        #[command(flatten)]
        register: RegisterArgs,
    },
}

/// Which records, and how to show them.
#[derive(Args, Debug)]
pub(crate) struct RecordsArgs {
    #[command(flatten)]
    directory: Directory,
    /// Only this stream: its name, or its id, `16` or `s16`.
    #[arg(long)]
    stream: Option<String>,
    /// How keys, values and headers are read.
    #[arg(long, value_enum, default_value_t = Decoder::Text)]
    decoder: Decoder,
    /// Only records with at least this offset.
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    from_offset: u64,
    /// No more than so many.
    #[arg(long, value_name = "COUNT")]
    limit: Option<u64>,
}

/// What the bytes of a record are taken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Decoder {
    /// UTF-8; what is none is replaced.
    Text,
    /// Two digits a byte: nothing is lost.
    Hex,
    /// JSON where it is JSON, otherwise as text.
    Json,
}

impl Decoder {
    fn decode(self, bytes: &[u8]) -> Value {
        let text = || String::from_utf8_lossy(bytes).into_owned().into();
        match self {
            Self::Text => text(),
            Self::Hex => bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into(),
            Self::Json => serde_json::from_slice(bytes).unwrap_or_else(|_| text()),
        }
    }
}

/// A node's data directory.
#[derive(Args, Debug)]
pub(crate) struct Directory {
    /// What `serve --dir` was given.
    directory: PathBuf,
}

impl Directory {
    fn log(&self) -> Result<PathBuf> {
        let log = self.directory.join("log");
        anyhow::ensure!(log.is_dir(), "{} holds no log", self.directory.display());
        Ok(log)
    }
}

/// Runs `inspect`.
///
/// # Errors
/// When the directory can't be read.
pub(crate) fn run(verb: &InspectVerb, output: Output) -> Result<Exit> {
    match verb {
        InspectVerb::Segments(directory) => segments(&directory.log()?, output),
        InspectVerb::Frames { directory, segment } => {
            frames(&directory.log()?, segment.map(SegmentId), output)
        }
        InspectVerb::Streams(directory) => streams(&directory.log()?, output),
        InspectVerb::Records(args) => records(args, output),
        InspectVerb::Verify(directory) => verify(&directory.log()?, output),
        InspectVerb::Register { directory, register } => {
            show_register(&directory.directory, &register.options()?, output)
        }
    }
}

fn segments(log: &Path, output: Output) -> Result<Exit> {
    let report = inspect::inspect(log)?;
    let mut exit = Exit::Done;
    let meta = match &report.meta {
        MetaChoice::Found { meta, .. } => json!({
            "generation": meta.generation,
            "locked": meta.locked.0,
            "trims": meta.trims.len(),
            "clean_shutdown": meta.clean_shutdown.map(|sequence| sequence.0),
        }),
        other => json!({"state": format!("{other:?}")}),
    };
    let json = json!({
        "node": report.node.map(|node| node.to_string()),
        "meta": meta,
        "spares": report.spares.len(),
        "foreign": report.foreign,
    });
    output
        .print(&json, || format!("node {} meta {meta} spares {}", json["node"], json["spares"]))?;
    for segment in &report.segments {
        if matches!(segment.end, Some(ScanEnd::Rot(_))) {
            exit = Exit::Corrupt;
        }
        let json = segment_json(segment);
        output.print(&json, || {
            format!(
                "{} frames {} versions {}..{} {} bytes, {} live, {}, ends {}",
                segment.segment,
                json["frames"],
                json["first_version"],
                json["last_version"],
                json["frame_bytes"],
                json["live_ratio"],
                json["seal"],
                json["end"]
            )
        })?;
    }
    Ok(exit)
}

fn segment_json(report: &SegmentReport) -> Value {
    let frames = &report.frames;
    json!({
        "segment": report.segment.0,
        "file_bytes": report.file_bytes,
        "frames": frames.frame_count,
        "blocks": frames.block_count,
        "records": frames.record_count,
        "first_version": frames.versions.map(|(first, _)| first.0),
        "last_version": frames.versions.map(|(_, last)| last.0),
        "first_epoch": frames.epochs.map(|(first, _)| first.0),
        "last_epoch": frames.epochs.map(|(_, last)| last.0),
        "frame_bytes": frames.frame_bytes,
        "live_ratio": report.live_ratio(),
        "seal": match &report.seal {
            Seal::Open => "open".to_owned(),
            Seal::Sealed(_) => "sealed".to_owned(),
            Seal::Damaged(error) => format!("damaged: {error}"),
        },
        "end": match &report.end {
            None => "none".to_owned(),
            Some(ScanEnd::Whole { .. }) => "whole".to_owned(),
            Some(ScanEnd::Torn { frames_cut, .. }) => format!("torn, {frames_cut} frames cut"),
            Some(ScanEnd::Rot(rot)) => format!("rot: {rot}"),
        },
    })
}

/// Prints until the reader of stdout has gone.
fn until_gone(printed: &mut Result<()>, step: Result<()>) -> ControlFlow<()> {
    match step {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            *printed = Err(error);
            ControlFlow::Break(())
        }
    }
}

fn frames(log: &Path, segment: Option<SegmentId>, output: Output) -> Result<Exit> {
    let mut printed = Ok(());
    inspect::frames(log, segment, |segment, frame| {
        let header = &frame.header;
        let blocks: Vec<Value> = frame
            .entries
            .iter()
            .map(|entry| {
                json!({
                    "stream": entry.stream.0,
                    "base_offset": entry.base_offset.0,
                    "records": entry.record_count,
                    "bytes": entry.bytes,
                })
            })
            .collect();
        let json = json!({
            "segment": segment.0,
            "offset": frame.offset,
            "sequence": header.sequence.0,
            "epoch": header.epoch.0,
            "previous_version": header.previous_version.0,
            "version": header.version.0,
            "known_committed": header.known_committed.0,
            "durable_sequence": header.durable_sequence.0,
            "bytes": header.frame_bytes,
            "blocks": blocks,
        });
        let step = output.print(&json, || {
            format!(
                "{segment} @{} {} {} {} -> {} {} bytes {} blocks",
                frame.offset,
                header.sequence,
                header.epoch,
                header.previous_version,
                header.version,
                header.frame_bytes,
                blocks.len()
            )
        });
        until_gone(&mut printed, step)
    })?;
    printed.map(|()| Exit::Done)
}

fn streams(log: &Path, output: Output) -> Result<Exit> {
    for (stream, report) in inspect::streams(log)? {
        let json = json!({
            "stream": stream.0,
            "name": report.name,
            "segments": report.segment_count,
            "blocks": report.block_count,
            "records": report.record_count,
            "body_bytes": report.body_bytes,
            "live_ratio": report.live_ratio(),
            "first_offset": report.offsets.map(|(first, _)| first.0),
            "next_offset": report.offsets.map(|(_, next)| next.0),
            "first_version": report.versions.map(|(first, _)| first.0),
            "last_version": report.versions.map(|(_, last)| last.0),
            "first_commit_time_us": report.commit_times.map(|(first, _)| first.0),
            "last_commit_time_us": report.commit_times.map(|(_, last)| last.0),
            "trimmed_through": report.trimmed_through.map(|version| version.0),
        });
        output.print(&json, || {
            format!(
                "{stream} {} {} records {}..{} in {} segments, {} bytes, {} live",
                report.name.as_deref().unwrap_or("-"),
                report.record_count,
                json["first_offset"],
                json["next_offset"],
                report.segment_count,
                report.body_bytes,
                json["live_ratio"]
            )
        })?;
    }
    Ok(Exit::Done)
}

/// The stream of an id, or of a name that is defined in the log.
fn find_stream(log: &Path, name: &str) -> Result<StreamId> {
    if let Ok(id) = name.strip_prefix('s').unwrap_or(name).parse() {
        return Ok(StreamId(id));
    }
    let found = inspect::streams(log)?.into_iter();
    let mut named = found.filter(|(_, report)| report.name.as_deref() == Some(name));
    let refusal = || Refusal::new(Code::UnknownStream, format!("no stream is named {name:?}"));
    Ok(named.next().ok_or_else(refusal)?.0)
}

fn records(args: &RecordsArgs, output: Output) -> Result<Exit> {
    let log = args.directory.log()?;
    let only = args.stream.as_deref().map(|name| find_stream(&log, name)).transpose()?;
    let decode = |bytes: &[u8]| args.decoder.decode(bytes);
    let (mut printed, mut left) = (Ok(()), args.limit.unwrap_or(u64::MAX));
    inspect::records(&log, only, |line| {
        if left == 0 {
            return ControlFlow::Break(());
        }
        if line.offset.0 < args.from_offset {
            return ControlFlow::Continue(());
        }
        left -= 1;
        let op = match line.record.op {
            Op::Append => "append",
            Op::Put => "put",
            Op::Delete => "delete",
        };
        let headers = line.record.headers.iter();
        let headers: Vec<Value> =
            headers.map(|(name, value)| json!([decode(name), decode(value)])).collect();
        let json = json!({
            "segment": line.segment.0,
            "epoch": line.epoch.0,
            "version": line.position.version.0,
            "index": line.position.index,
            "commit_time_us": line.commit_time.0,
            "stream": line.stream.0,
            "offset": line.offset.0,
            "op": op,
            "event_time_us": line.record.event_time_us,
            "key": decode(&line.record.key),
            "value": decode(&line.record.value),
            "headers": headers,
        });
        let step = output.print(&json, || {
            let place = match only {
                Some(_) => line.position.to_string(),
                None => format!("{} {}", line.position, line.stream),
            };
            let plain =
                |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
            let (key, value) = (plain(&json["key"]), plain(&json["value"]));
            format!("{place} {} {op} {key} {value}", line.offset.0)
        });
        until_gone(&mut printed, step)
    })?;
    printed.map(|()| Exit::Done)
}

fn verify(log: &Path, output: Output) -> Result<Exit> {
    let findings = inspect::verify(log)?;
    for finding in &findings {
        let json = json!({
            "file": finding.file,
            "kind": finding.kind.name(),
            "detail": finding.detail,
        });
        output.print(&json, || finding.to_string())?;
    }
    if findings.is_empty() {
        output.print(&json!({"findings": 0}), || "sound".to_owned())?;
        return Ok(Exit::Done);
    }
    complain(&format!("millrace: {} findings", findings.len()));
    Ok(Exit::Corrupt)
}

fn show_register(directory: &Path, options: &RegisterOptions, output: Output) -> Result<Exit> {
    let path = match &options.url {
        RegisterUrl::SharedFile(path) => path.clone(),
        _ => directory.join("register"),
    };
    let is_file = matches!(options.url, RegisterUrl::File | RegisterUrl::SharedFile(_));
    anyhow::ensure!(!is_file || path.exists(), "{} does not exist", path.display());
    let mut register = Register::open(options, directory)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(register.apply(RegisterOp::Read));
    let (revision, bytes) = match outcome {
        RegisterOutcome::Value(revision, bytes) => (revision, bytes),
        RegisterOutcome::Unavailable(what) => {
            return Err(Failure::unavailable(format!("{}: {what}", options.url)).into());
        }
        other => anyhow::bail!("no answer to a read: {other:?}"),
    };
    let state =
        RegisterState::decode(&bytes).map_err(anyhow::Error::msg).context("the register")?;
    let generations: Vec<Value> = state
        .generations
        .iter()
        .map(|generation| {
            let servers: Vec<String> =
                generation.log_servers.iter().map(ToString::to_string).collect();
            json!({
                "epoch": generation.epoch.0,
                "begin": generation.begin.0,
                "end": generation.end.map(|end| end.0),
                "log_servers": servers,
                "replication": generation.replication,
            })
        })
        .collect();
    let json = json!({
        "revision": revision.0,
        "epoch": state.epoch.0,
        "leader": state.leader.to_string(),
        "generations": generations,
    });
    output.print(&json, || format!("{json:#}"))?;
    Ok(Exit::Done)
}
