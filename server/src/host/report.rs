//! What the shell adds to a node's status, and what it counts.

use common::message::StatusReply;
use common::wire::Envelope;
use common::{Endpoint, Epoch, Note, RequestId, Role};
use serde_json::{Value, json};

use super::Host;
use super::mesh::Mesh;
use super::process;

/// Counts of what happened since the process started.
#[derive(Debug, Default)]
pub(super) struct Meters {
    commits: u64,
    conflicts: u64,
    versions: u64,
    refusals: u64,
    delivered: u64,
    commit_groups: u64,
}

impl Meters {
    pub(super) fn count(&mut self, by: Endpoint, note: &Note) {
        match note {
            Note::Acknowledged { .. } => self.commits += 1,
            Note::Decided { refused, .. } => self.conflicts += u64::from(*refused),
            Note::Assigned { .. } => self.versions += 1,
            Note::Refused { .. } => self.refusals += 1,
            Note::Delivered { .. } => self.delivered += 1,
            // Exactly one for each flush that made versions durable.
            Note::Durable { .. } => self.commit_groups += 1,
            Note::Phase { epoch, name } => tracing::info!(%epoch, phase = name, "recovery"),
            Note::RecoveryVersion { epoch, recovery_version, first_version } => {
                tracing::info!(%epoch, %recovery_version, %first_version, "recovery version fixed");
            }
            Note::Opened { durable, torn_frames, segments } => {
                tracing::info!(%durable, torn_frames, segments, "the log is open");
            }
            Note::Mended { stream, version, from } => {
                tracing::info!(%stream, %version, %from, "a damaged block was mended");
            }
            Note::Scrubbed { blocks, damaged } => {
                tracing::info!(blocks, damaged, "the log was read through");
            }
            Note::RoleChanged { role, epoch, began } => tracing::debug!(?role, %epoch, began),
            Note::Serving { epoch } => tracing::info!(%epoch, ?by, "serving"),
            _ => {}
        }
    }
}

impl Host {
    pub(super) fn handle_status(&mut self, to: Endpoint, request: RequestId) {
        let mut report = self.node.status_json(self.now());
        let info = self.driver.info();
        let stats = self.driver.stats();
        report["disk"] = json!({
            "engine": info.to_string(),
            "flushes": stats.flushes,
            "writes": stats.writes,
            "bytes_written": stats.bytes_written,
            "reads": stats.reads,
            "bytes_read": stats.bytes_read,
            "log": {
                "commit_groups": self.meters.commit_groups,
                "flushes": stats.log.flushes,
                "kernel_writes": stats.log.kernel_writes,
                "bytes_written": stats.log.bytes_written,
            },
        });
        report["process"] = process::report();
        report["counters"] = json!({
            "commits": self.meters.commits,
            "conflicts": self.meters.conflicts,
            "versions": self.meters.versions,
            "refusals": self.meters.refusals,
            "pulls_delivered": self.meters.delivered,
        });
        report["register"] = self.register.report();
        report["cluster"] = self.mesh.as_ref().map_or(Value::Null, Mesh::report);
        report["connections"] = json!(self.peers.count());
        let from = self.node.peer().endpoint(Role::Node);
        let message = StatusReply { request, json: report.to_string() }.into();
        self.peers.send(&Envelope { from, to, epoch: Epoch::ZERO, message });
    }
}
