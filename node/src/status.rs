//! What `status` shows: one JSON object, with a reason for everything that waits.

use core::time::Duration;

use common::{Endpoint, NodeId, Role, Time};
use logserver::ScrubPass;
use sequencer::leader::{LeaderStatus, Recovery};
use serde_json::{Value, json};

use crate::Node;

/// The version of the object's shape.
const SCHEMA: u64 = 1;

impl Node {
    /// The report for people and scripts.
    #[must_use]
    pub fn status_json(&self, now: Time) -> Value {
        json!({
            "schema": SCHEMA,
            "node": self.peer.node.to_string(),
            "incarnation": self.peer.incarnation.0,
            "up_ms": ms(now, self.started),
            "epoch": self.hosted.as_ref().map(|hosted| hosted.plan.epoch.0),
            "serving": self.serving_epoch().is_some(),
            "roles": self.roles(),
            "plan": self.plan(),
            "recovery": self.recovery(now),
            "sequencer": self.sequencer(now),
            "proxies": self.proxies(now),
            "resolvers": self.resolvers(),
            "log": self.log(now),
        })
    }

    /// The roles of the present epoch that live here.
    fn roles(&self) -> Vec<String> {
        let Some(hosted) = &self.hosted else { return Vec::new() };
        let me = |endpoint: &Endpoint| endpoint.peer() == self.peer;
        let plan = &hosted.plan;
        let leader = me(&plan.leader).then(|| "leader".to_owned());
        let log_server = plan.log_servers.iter().any(me).then(|| "log_server".to_owned());
        let others = self.epoch_roles().into_iter().map(|role| match role {
            Role::Proxy(index) => format!("proxy {index}"),
            Role::Resolver(index) => format!("resolver {index}"),
            other => format!("{other:?}").to_lowercase(),
        });
        leader.into_iter().chain(others).chain(log_server).collect()
    }

    /// Who plays which role in the present epoch.
    fn plan(&self) -> Value {
        let Some(hosted) = &self.hosted else { return Value::Null };
        let names = |of: &[Endpoint]| -> Vec<String> {
            of.iter().map(|endpoint| endpoint.node.to_string()).collect()
        };
        let plan = &hosted.plan;
        let resolvers: Vec<Endpoint> = plan.resolvers.iter().map(|share| share.resolver).collect();
        json!({
            "leader": plan.leader.node.to_string(),
            "recovery_version": plan.recovery_version.0,
            "first_version": plan.first_version.0,
            "proxies": names(&plan.proxies),
            "resolvers": names(&resolvers),
            "log_servers": names(&plan.log_servers),
            "absent": plan.absent.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "replication": plan.replication,
        })
    }

    fn recovery(&self, now: Time) -> Value {
        let Some(leader) = &self.leader else { return Value::Null };
        let status = leader.status();
        json!({
            "phase": status.phase,
            "since_ms": ms(now, status.since),
            "waiting_for": status.waiting_for,
            "epoch": status.epoch.0,
            "cause": status.cause,
            "generations": status.generations,
            "members": members(&status),
            "recoveries": status.recoveries.iter().map(|recovery| recovery_value(now, recovery))
                .collect::<Vec<_>>(),
        })
    }

    fn sequencer(&self, now: Time) -> Value {
        let sequencer = self.hosted.as_ref().and_then(|hosted| hosted.sequencer.as_ref());
        sequencer.map_or(Value::Null, |sequencer| {
            let status = sequencer.status();
            json!({
                "last_version": status.last_version.0,
                "idle_ms": ms(now, status.last_at),
                "requests_waiting": status.proxies.iter().map(|proxy| proxy.2).sum::<usize>(),
            })
        })
    }

    fn proxies(&self, now: Time) -> Value {
        let proxies = self.hosted.iter().flat_map(|hosted| hosted.proxies.values());
        let all: Vec<Value> = proxies
            .map(|proxy| {
                let status = proxy.status();
                let batches: Vec<Value> = status
                    .batches
                    .iter()
                    .map(|batch| {
                        json!({
                            "phase": batch.phase.name(),
                            "since_ms": ms(now, batch.since),
                            "version": batch.version.map(|version| version.0),
                            "transactions": batch.transaction_count,
                            "waiting_for": batch.waits_for,
                        })
                    })
                    .collect();
                json!({
                    "index": status.index,
                    "serving": status.is_serving,
                    "fenced": status.is_fenced,
                    "clients": status.client_count,
                    "pending": status.pending_count,
                    "pending_bytes": status.bytes,
                    "gathering": status.gathering_count,
                    "waiting_for_catalog": status.catalog_waiting_count,
                    "catalog_through": status.catalog_through.0,
                    "settlements_unconfirmed": status.unconfirmed_count,
                    "known_committed": status.known_committed.0,
                    "read_versions_waiting": status.read_versions_waiting,
                    "batches": batches,
                    "log_servers": status.log_servers.iter().map(|server| json!({
                        "node": server.endpoint.node.to_string(),
                        "durable": server.durable.0,
                        "state": format!("{:?}", server.state).to_lowercase(),
                        "heard_ms": ms(now, server.heard_at),
                    })).collect::<Vec<_>>(),
                })
            })
            .collect();
        json!(all)
    }

    fn resolvers(&self) -> Value {
        let resolvers = self.hosted.iter().flat_map(|hosted| &hosted.resolvers);
        let all: Vec<Value> = resolvers
            .map(|(index, resolver)| {
                let status = resolver.status();
                json!({
                    "index": index,
                    "version": status.version.0,
                    "oldest": status.oldest.0,
                    "entries": status.entry_count,
                    "memory_bytes": status.memory_bytes,
                    "under_pressure": status.is_under_pressure,
                    "batches_waiting": status.waiting_count,
                    "held": status.held.map(|(version, wait)| json!({
                        "version": version.0,
                        "waiting_for": wait.to_string(),
                    })),
                    "batches_unsettled": status.unsettled_count,
                    "unsettled_bytes": status.unsettled_bytes,
                })
            })
            .collect();
        json!(all)
    }
}

impl Node {
    fn log(&self, now: Time) -> Value {
        let status = self.log_server.status();
        let damaged = status.mends.blocks.iter();
        let damaged = damaged.map(|(since, what)| json!({"what": what, "ago_ms": ms(now, *since)}));
        json!({
            "standing": format!("{:?}", status.standing).to_lowercase(),
            "epoch": status.epoch.0,
            "locked": status.locked.0,
            "last": status.last.0,
            "durable": status.durable.0,
            "known_committed": status.known_committed.0,
            "served": status.served.0,
            "state": format!("{:?}", status.state).to_lowercase(),
            "segments": status.segments,
            "spares": status.spares,
            "streams": status.streams,
            "blocks": status.blocks,
            "tail_bytes": status.tail_bytes,
            "unflushed_bytes": status.unflushed_bytes,
            "ids": status.ids,
            "pulls_waiting": status.pulls_waiting,
            "pulls_reading": status.pulls_reading,
            "damage": {
                "damaged": status.mends.damaged,
                "mended": status.mends.mended,
                "pulls_waiting": status.mends.pulls_waiting,
                "blocks": damaged.collect::<Vec<_>>(),
            },
            "scrub": {
                "pass": status.scrub.pass.map(|pass| pass_value(now, &pass)),
                "segment": status.scrub.segment.map(|segment| segment.0),
                "last": status.scrub.last.map(|pass| pass_value(now, &pass)),
            },
            "read_ahead_bytes": status.read_ahead_bytes,
            "waiting_for": status.waits,
        })
    }
}

/// Who sits where, and who is on its way out.
fn members(status: &LeaderStatus) -> Value {
    let names = |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
    let sittings = status.membership.seats.sittings().iter();
    let heirs = sittings.map(|sitting| {
        json!({"node": sitting.node.to_string(), "seat": NodeId(sitting.seat.0).to_string()})
    });
    json!({
        "heirs": heirs.collect::<Vec<_>>(),
        "drained": names(&status.membership.drained),
        "removed": names(&status.membership.removed),
        "seats_waiting": status.seats_waiting,
    })
}

fn pass_value(now: Time, pass: &ScrubPass) -> Value {
    json!({
        "began_ago_ms": ms(now, pass.began),
        "ended_ago_ms": pass.ended.map(|ended| ms(now, ended)),
        "blocks": pass.blocks,
        "bytes": pass.bytes,
        "damaged": pass.damaged,
    })
}

fn ms(now: Time, since: Time) -> u64 {
    whole_ms(now.since(since))
}

fn whole_ms(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}

fn recovery_value(now: Time, recovery: &Recovery) -> Value {
    let phases = recovery.phases.iter();
    json!({
        "epoch": recovery.epoch.0,
        "cause": recovery.cause,
        "ago_ms": ms(now, recovery.began),
        "took_ms": recovery.took.map(whole_ms),
        "attempts": recovery.attempts,
        "phases_ms": phases.map(|(name, took)| ((*name).to_owned(), json!(whole_ms(*took))))
            .collect::<serde_json::Map<_, _>>(),
    })
}
