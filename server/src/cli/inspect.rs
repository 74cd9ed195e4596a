//! `millrace inspect`: the log directory offline, read-only; a running node does not mind.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use common::record::Op;
use common::register::{RegisterOp, RegisterOutcome, RegisterState};
use common::{SegmentId, StreamId};
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
    /// The records of a stream.
    #[command(after_help = "Example:\n  millrace inspect records ./data --stream 16")]
    Records {
        #[command(flatten)]
        directory: Directory,
        /// The stream's id.
        #[arg(long)]
        stream: u64,
    },
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
        InspectVerb::Records { directory, stream } => {
            records(&directory.log()?, StreamId(*stream), output)
        }
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

fn records(log: &Path, stream: StreamId, output: Output) -> Result<Exit> {
    let mut printed = Ok(());
    inspect::records(log, stream, |line| {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let op = match line.record.op {
            Op::Append => "append",
            Op::Put => "put",
            Op::Delete => "delete",
        };
        let (key, value) = (text(&line.record.key), text(&line.record.value));
        let json = json!({
            "segment": line.segment.0,
            "epoch": line.epoch.0,
            "version": line.position.version.0,
            "index": line.position.index,
            "offset": line.offset.0,
            "op": op,
            "key": key,
            "value": value,
        });
        let step = output
            .print(&json, || format!("{} {} {op} {key} {value}", line.position, line.offset.0));
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
