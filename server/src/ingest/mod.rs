//! Ingesting an upstream exactly once: its position is stored in the same commit as the data.
//!
//! ```text
//!  claim:   read + write <source>/owner  --------------------> version V: whoever owned it before is refused
//!  resume:  pull <source>/position through V ------------------> position p
//!  p+1..:   read <source>/owner at V, write <source>/position,
//!           rows of one source transaction + put position  --> one commit each, pipelined on one lane
//! ```
//!
//! - A zombie's commits conflict on the owner key, since its claim is older.
//! - The lane keeps the upstream's order: after a commit that failed none behind it commits. So the position
//!   in the log says exactly which source transactions are in it.
//! - Each acknowledged commit has read the owner key, so later ones may read at the version before it: the
//!   read version stays young however long the ingestion takes.

pub mod input;
pub mod wal2json;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use client::face::{Client, CommitFuture, Lane};
use client::{Error, Transaction};
use common::record::Op;
use common::{Code, StreamId, Version};
use serde_json::{Value, json};

use self::wal2json::SourceTransaction;

/// Commits that are on their way at once.
const PIPELINE_MAX: usize = 64;
/// Attempts to claim a source before it is given up; each waits for the cluster by itself.
const CLAIMS_MAX: u32 = 50;
const POSITION_KEY: &str = "position";

/// The name of the stream that keeps a source's position.
#[must_use]
pub fn position_stream(source: &str) -> String {
    format!("ingest/{source}")
}

/// Who ingests, and into which streams.
#[derive(Clone, Debug)]
pub struct Source {
    /// The upstream's name: one ingester at a time owns it.
    pub name: String,
    /// What stands in front of table names in stream names.
    pub prefix: String,
    /// Whether positions that are overtaken may go, so that they pin no disk.
    pub trims_positions: bool,
}

impl Source {
    fn owner_key(&self) -> Vec<u8> {
        format!("ingest/{}/owner", self.name).into_bytes()
    }

    fn position_key(&self) -> Vec<u8> {
        format!("ingest/{}/position", self.name).into_bytes()
    }

    /// The position that the log holds at `through`; 0 when it holds none.
    async fn read_position(
        &self,
        client: &Client,
        stream: StreamId,
        through: Version,
    ) -> Result<u64> {
        let state = client.describe_streams([stream]).await?;
        let trimmed = state.first().map_or(Version::ZERO, |state| state.trimmed_through);
        let mut pull = client.pull([stream], trimmed).await?;
        let (mut position, mut held_at, mut reached) = (0, Version::ZERO, trimmed);
        while reached < through {
            let pulled = pull.next_until(through).await?;
            for batch in pulled.batches.iter().filter(|batch| batch.version <= through) {
                for delivered in batch.records()? {
                    position = parse_position(&delivered.record.value)?;
                    held_at = batch.version;
                }
            }
            reached = pulled.through;
        }
        if self.trims_positions && held_at > trimmed {
            // Only a courtesy to the disk: a failure costs nothing but room.
            let _ = client.trim(stream, held_at.minus_saturating(1)).await;
        }
        Ok(position)
    }
}

/// An ingester that owns its source.
pub struct Ingester<'a> {
    client: &'a Client,
    source: &'a Source,
    streams: BTreeMap<String, StreamId>,
    position_stream: StreamId,
    lane: Lane,
    /// The owner key is known to be ours up to here.
    owned_through: Version,
    /// The last source transaction that is in the log.
    position: u64,
    in_flight: VecDeque<(u64, Instant, CommitFuture)>,
}

/// The stream of a name, created when there is none.
///
/// # Errors
/// When the catalog can't be read or written.
pub async fn ensure_stream(client: &Client, name: &str) -> Result<StreamId> {
    loop {
        if let Some(stream) = client.find_stream(name).await? {
            return Ok(stream);
        }
        match client.create_stream(name).await {
            Ok(stream) => return Ok(stream),
            Err(error) if error.code() == Code::StreamExists => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl<'a> Ingester<'a> {
    /// Takes the source over and finds out where the log stands. Waits through recoveries.
    ///
    /// # Errors
    /// When the cluster can't be reached for long.
    pub async fn claim(client: &'a Client, source: &'a Source) -> Result<Self> {
        let mut last = None;
        for _ in 0..CLAIMS_MAX {
            match Self::try_claim(client, source).await {
                Ok(ingester) => return Ok(ingester),
                Err(error) => match error.downcast_ref::<Error>() {
                    Some(inner) if inner.is_retryable() || matches!(inner, Error::Unknown(_)) => {
                        last = Some(error);
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    _ => return Err(error),
                },
            }
        }
        Err(last.context("claims are tried at least once")?)
    }

    async fn try_claim(client: &'a Client, source: &'a Source) -> Result<Self> {
        let position_stream = ensure_stream(client, &position_stream(&source.name)).await?;
        let mut transaction = Transaction::new();
        let read_version = client.read_version().await?;
        transaction.read_version(read_version).read_point(&source.owner_key());
        transaction.write_point(&source.owner_key());
        let claimed = client.commit(transaction).await?.position.version;
        let position = source.read_position(client, position_stream, claimed).await?;
        Ok(Self {
            client,
            source,
            streams: BTreeMap::new(),
            position_stream,
            lane: client.ordered_lane().await?,
            owned_through: claimed,
            position,
            in_flight: VecDeque::new(),
        })
    }

    /// The last source transaction that is in the log.
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.position
    }

    /// Commits a source transaction behind the earlier ones. Empty ones and those that are in the log already
    /// are skipped. `acknowledged` hears the latency of each commit that came through meanwhile.
    ///
    /// # Errors
    /// The first commit that failed; nothing behind it has committed. Claim anew and go on.
    pub async fn take(
        &mut self,
        transaction: &SourceTransaction,
        acknowledged: &mut impl FnMut(Duration),
    ) -> Result<()> {
        if transaction.changes.is_empty() || transaction.ordinal <= self.position {
            return Ok(());
        }
        while self.in_flight.len() >= PIPELINE_MAX {
            self.settle_one(acknowledged).await?;
        }
        let commit = self.transaction_of(transaction).await?;
        let sent = Instant::now();
        let verdict = self.lane.submit(commit).await;
        self.in_flight.push_back((transaction.ordinal, sent, verdict));
        Ok(())
    }

    /// Waits for everything that is on its way.
    ///
    /// # Errors
    /// As [`Ingester::take`].
    pub async fn finish(&mut self, acknowledged: &mut impl FnMut(Duration)) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.settle_one(acknowledged).await?;
        }
        Ok(())
    }

    async fn settle_one(&mut self, acknowledged: &mut impl FnMut(Duration)) -> Result<()> {
        let Some((ordinal, sent, verdict)) = self.in_flight.pop_front() else { return Ok(()) };
        let committed = verdict.await?;
        assert!(ordinal > self.position, "{ordinal} behind {}", self.position);
        self.position = ordinal;
        // Our commit has read the owner key; but a claim behind it in the same batch would have the same
        // version, and a write is seen by reads below its version only. One below is certain.
        let certain = committed.position.version.minus_saturating(1);
        self.owned_through = self.owned_through.max(certain);
        acknowledged(sent.elapsed());
        Ok(())
    }

    async fn transaction_of(&mut self, source: &SourceTransaction) -> Result<Transaction> {
        let mut transaction = Transaction::new();
        transaction.read_version(self.owned_through).read_point(&self.source.owner_key());
        transaction.write_point(&self.source.position_key());
        // What became of a commit without an answer, the position in the log tells.
        transaction.at_most_once();
        for change in &source.changes {
            let stream = self.stream_of(&change.table).await?;
            transaction.record(stream, &change.record);
        }
        let position = json!({"ordinal": source.ordinal, "xid": source.xid}).to_string();
        transaction.put(self.position_stream, POSITION_KEY, position);
        Ok(transaction)
    }

    async fn stream_of(&mut self, table: &str) -> Result<StreamId> {
        if let Some(stream) = self.streams.get(table) {
            return Ok(*stream);
        }
        let name = format!("{}{table}", self.source.prefix);
        let stream = ensure_stream(self.client, &name).await?;
        self.streams.insert(table.to_owned(), stream);
        Ok(stream)
    }
}

/// The ordinal in a position record's value.
///
/// # Errors
/// When it is not one of ours.
pub fn parse_position(value: &[u8]) -> Result<u64> {
    let value: Value = serde_json::from_slice(value).context("a position record")?;
    value["ordinal"].as_u64().context("a position without an ordinal")
}

/// A table as a stream engine keeps it: the last value of each key.
#[derive(Debug, Default)]
pub struct Table {
    /// Key to value.
    pub rows: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Events without a key, in order.
    pub events: Vec<Vec<u8>>,
}

impl Table {
    /// Folds a record in.
    ///
    /// # Errors
    /// When a record deletes what is not there: an upstream never does that.
    pub fn fold(&mut self, op: Op, key: &[u8], value: &[u8]) -> Result<()> {
        match op {
            Op::Append => self.events.push(value.to_vec()),
            Op::Put => drop(self.rows.insert(key.to_vec(), value.to_vec())),
            Op::Delete if self.rows.remove(key).is_none() => {
                bail!("a delete of {}, which is not there", String::from_utf8_lossy(key))
            }
            Op::Delete => {}
        }
        Ok(())
    }
}
