//! How the proxy stands, for people: every wait with its reason.

use common::message::LogState;
use common::{Endpoint, Epoch, Time, Version};

use crate::Proxy;
use crate::batch::{Batch, Phase};

/// How the proxy stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProxyStatus {
    /// The epoch.
    pub epoch: Epoch,
    /// The proxy's place.
    pub index: u8,
    /// Whether clients are served.
    pub is_serving: bool,
    /// Whether a locked log server has ended the epoch.
    pub is_fenced: bool,
    /// Clients that are known.
    pub client_count: usize,
    /// Requests that have no outcome yet.
    pub pending_count: usize,
    /// Bytes that they take.
    pub bytes: u64,
    /// Transactions that wait for the next batch.
    pub gathering_count: usize,
    /// Transactions that wait for the catalog.
    pub catalog_waiting_count: usize,
    /// The catalog is known up to here.
    pub catalog_through: Version,
    /// Batches in flight, the oldest first.
    pub batches: Vec<BatchStatus>,
    /// Settlements that a resolver has not confirmed.
    pub unconfirmed_count: usize,
    /// Known durable on all log servers.
    pub known_committed: Version,
    /// The log servers.
    pub log_servers: Vec<LogServerStatus>,
    /// Questions for a read version that wait for the next round.
    pub read_versions_waiting: usize,
    /// The round of proof that goes on: number, questions, answers.
    pub round: Option<(u64, usize, usize)>,
}

/// How a batch stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchStatus {
    /// Its number.
    pub number: u64,
    /// Its phase.
    pub phase: Phase,
    /// Since when.
    pub since: Time,
    /// Its version, once it has one.
    pub version: Option<Version>,
    /// Its transactions.
    pub transaction_count: usize,
    /// What it waits for.
    pub waits_for: String,
}

/// How a log server stands, as the proxy knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogServerStatus {
    /// The server.
    pub endpoint: Endpoint,
    /// Its durable version.
    pub durable: Version,
    /// Whether it takes more.
    pub state: LogState,
    /// When it was last heard.
    pub heard_at: Time,
}

impl Proxy {
    /// How it stands.
    #[must_use]
    pub fn status(&self) -> ProxyStatus {
        let servers = self.log_servers.iter();
        ProxyStatus {
            epoch: self.plan.epoch,
            index: self.index,
            is_serving: self.is_serving,
            is_fenced: self.is_fenced,
            client_count: self.door.client_count(),
            pending_count: self.door.pending_count(),
            bytes: self.door.bytes(),
            gathering_count: self.gathering.transactions.len(),
            catalog_waiting_count: self.catalog.waiting().count(),
            catalog_through: self.catalog.through,
            batches: self.batches.iter().map(|batch| self.batch_status(batch)).collect(),
            unconfirmed_count: self.settlements.len(),
            known_committed: self.known_committed,
            log_servers: servers
                .map(|server| LogServerStatus {
                    endpoint: server.endpoint,
                    durable: server.durable,
                    state: server.state,
                    heard_at: server.heard_at,
                })
                .collect(),
            read_versions_waiting: self.reads.waiting_count(),
            round: self.reads.round(),
        }
    }

    fn batch_status(&self, batch: &Batch) -> BatchStatus {
        BatchStatus {
            number: batch.number,
            phase: batch.phase,
            since: batch.since,
            version: batch.version(),
            transaction_count: batch.transactions.len(),
            waits_for: self.waits_for(batch),
        }
    }

    fn waits_for(&self, batch: &Batch) -> String {
        match batch.phase {
            Phase::Versioning if batch.pair.is_some() => "an earlier batch's version".to_owned(),
            Phase::Versioning => format!("a version of {:?}", self.plan.sequencer),
            Phase::Resolving => {
                let resolution = batch.resolution.iter();
                let silent: Vec<usize> =
                    resolution.flat_map(|resolution| resolution.silent()).collect();
                match silent.is_empty() {
                    true => "the verdicts of an earlier batch".to_owned(),
                    false => format!("resolvers {silent:?}"),
                }
            }
            Phase::Pushing => match (&batch.pushed, batch.version()) {
                (Some(pushed), Some(version)) => {
                    let silent = self.silent_servers(pushed, version);
                    let silent: Vec<Endpoint> =
                        silent.map(|server| self.log_servers[server].endpoint).collect();
                    format!("log servers {silent:?}")
                }
                (None, Some(version)) if batch.is_held => format!(
                    "{version} is more than LIFE ahead of known committed {}",
                    self.known_committed
                ),
                _ => "its turn to be pushed".to_owned(),
            },
            Phase::Batching | Phase::Replying => String::new(),
        }
    }
}
