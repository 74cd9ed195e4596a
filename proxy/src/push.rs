//! Pushing: every log server gets every version of this proxy, in chain order, with the blocks that it holds.
//!
//! ```text
//!  blocks        IDS  s16  s17                        placement::holders says who holds a stream
//!  server 0      IDS       s17    durable 20  ack     KCV = 18, the minimum:
//!  server 1      IDS  s16         durable 18  ack     all at or below it are committed (I3)
//!  server 2           s16  s17    durable 25  ack     a block's first offset is the same on both (I12)
//! ```
//!
//! A batch waits for its turn, and while it would be more than LIFE ahead of the known committed version:
//! what lies above a recovery version is thus never far above it. The version right behind the known
//! committed one is always pushed, since nothing else could move it. A push is sent again to the servers that
//! have not answered.

use bytes::Bytes;
use common::message::{
    Announce, CommitOutcome, Durable, EpochPlan, LogState, Push, PushAck, PushBlock,
};
use common::{Cx, Endpoint, Offset, Payload, Plant, StreamId, Time, Version, placement};

use crate::Proxy;
use crate::batch::{Pair, Phase};
use crate::blocks::assemble;

/// What the proxy knows of a log server.
#[derive(Clone, Debug)]
pub(crate) struct LogServer {
    pub(crate) endpoint: Endpoint,
    /// Inclusive.
    pub(crate) durable: Version,
    pub(crate) state: LogState,
    /// When it was last heard.
    pub(crate) heard_at: Time,
}

impl LogServer {
    pub(crate) const fn new(endpoint: Endpoint, recovery_version: Version) -> Self {
        Self { endpoint, durable: recovery_version, state: LogState::Open, heard_at: Time::ZERO }
    }
}

/// A batch at the log servers.
#[derive(Clone, Debug)]
pub(crate) struct Pushed {
    blocks: Vec<PushBlock>,
    bodies: Vec<Bytes>,
    /// For each block, from the first acknowledgement on.
    base_offsets: Vec<Option<Offset>>,
    servers: Vec<ServerShare>,
}

/// One log server's part of a push.
#[derive(Clone, Debug)]
struct ServerShare {
    /// Places of the blocks that it holds.
    blocks: Vec<usize>,
    is_acknowledged: bool,
}

impl Pushed {
    /// Whether the server at `place` has said all that there is to say. Nothing lies there for an empty push.
    pub(crate) fn has(&self, place: usize, durable: Version, version: Version) -> bool {
        let share = &self.servers[place];
        durable >= version && (share.is_acknowledged || share.blocks.is_empty())
    }

    /// The offset of the record that has `ordinal` records of the batch in front of it.
    pub(crate) fn offset(&self, stream: StreamId, ordinal: u32) -> Offset {
        let block = self.blocks.binary_search_by_key(&stream, |block| block.stream);
        let block = block.expect("each section of a committed transaction has its block");
        let base = self.base_offsets[block].expect("every holder has acknowledged");
        base.plus(u64::from(ordinal))
    }
}

impl Proxy {
    /// Pushes what has its verdicts, strictly in the order of the numbers.
    pub(crate) fn push_ready(&mut self, cx: &mut Cx<'_>) {
        for place in 0..self.batches.len() {
            let batch = &self.batches[place];
            if batch.pushed.is_some() {
                continue;
            }
            let (Phase::Pushing, Some(pair)) = (batch.phase, batch.pair) else { return };
            let is_held = self.is_too_far_ahead(cx, pair);
            self.batches[place].is_held = is_held;
            if is_held {
                return;
            }
            self.push(cx, place, pair);
        }
    }

    /// Whether the version must wait until more is known committed.
    fn is_too_far_ahead(&self, cx: &Cx<'_>, pair: Pair) -> bool {
        pair.previous > self.known_committed
            && pair.version > self.known_committed.plus(cx.knobs.life_versions)
    }

    fn push(&mut self, cx: &mut Cx<'_>, place: usize, pair: Pair) {
        let batch = &mut self.batches[place];
        let (blocks, bodies): (Vec<PushBlock>, Vec<Bytes>) =
            assemble(&mut batch.transactions).into_iter().unzip();
        let mut servers = vec![
            ServerShare { blocks: Vec::new(), is_acknowledged: false };
            self.log_servers.len()
        ];
        for (block, entry) in blocks.iter().enumerate() {
            for holder in holders(cx, &self.plan, entry.stream) {
                servers[holder].blocks.push(block);
            }
        }
        let base_offsets = vec![None; blocks.len()];
        batch.pushed = Some(Pushed { blocks, bodies, base_offsets, servers });
        batch.since = cx.now;
        batch.sent_at = cx.now;
        assert!(pair.version > self.known_committed, "{} is pushed twice", pair.version);
        for server in 0..self.log_servers.len() {
            self.push_to(cx, place, server);
        }
    }

    pub(crate) fn push_to(&self, cx: &mut Cx<'_>, place: usize, server: usize) {
        let answered = self.answered_by(server);
        let batch = &self.batches[place];
        let (Some(pair), Some(pushed)) = (batch.pair, &batch.pushed) else {
            unreachable!("batch {} has been assembled", batch.number)
        };
        assert!(answered < pair.version, "{answered} is behind {}", pair.version);
        let share = &pushed.servers[server];
        if cx.planted(Plant::NoEmptyPush) && share.blocks.is_empty() {
            return;
        }
        let mut payload = Payload::new();
        share.blocks.iter().for_each(|block| payload.push(pushed.bodies[*block].clone()));
        let message = Push {
            previous_version: pair.previous,
            version: pair.version,
            commit_time: pair.commit_time,
            known_committed: self.known_committed,
            answered,
            blocks: share.blocks.iter().map(|block| pushed.blocks[*block]).collect(),
            payload,
        };
        cx.send(self.log_servers[server].endpoint, self.plan.epoch, message);
    }

    /// The servers that a pushed batch still waits for.
    pub(crate) fn silent_servers<'a>(
        &'a self,
        pushed: &'a Pushed,
        version: Version,
    ) -> impl Iterator<Item = usize> + 'a {
        let servers = self.log_servers.iter().enumerate();
        servers
            .filter(move |(server, state)| !pushed.has(*server, state.durable, version))
            .map(|(server, _)| server)
    }

    fn answered_by(&self, server: usize) -> Version {
        let durable = self.log_servers[server].durable;
        self.answered_through(|batch| {
            let (version, pushed) = (batch.version(), batch.pushed.as_ref());
            version
                .zip(pushed)
                .is_some_and(|(version, pushed)| pushed.has(server, durable, version))
        })
    }

    pub(crate) fn handle_durable(&mut self, cx: &mut Cx<'_>, from: Endpoint, durable: Durable) {
        let Some(server) = self.log_server_place(from) else { return };
        self.log_servers[server].state = durable.state;
        self.raise_durable(cx, server, durable.durable);
        for ack in durable.acks {
            assert!(ack.version <= durable.durable, "I7: {ack:?} above {}", durable.durable);
            self.acknowledge(cx, server, ack);
        }
    }

    /// Takes in how far a server is durable, and with it what is known committed everywhere.
    pub(crate) fn raise_durable(&mut self, cx: &Cx<'_>, server: usize, durable: Version) {
        let state = &mut self.log_servers[server];
        state.heard_at = cx.now;
        state.durable = state.durable.max(durable);
        let known = self.log_servers.iter().map(|server| server.durable).min();
        let known = known.expect("an epoch has log servers");
        assert!(known >= self.known_committed, "KCV {} -> {known}", self.known_committed);
        self.known_committed = known;
    }

    /// Where the blocks of a push lie on a server: the same place on all that hold a stream (I12).
    fn acknowledge(&mut self, cx: &mut Cx<'_>, server: usize, ack: PushAck) {
        let Some(place) = self.batch_place(ack.version) else { return };
        let Some(pushed) = &mut self.batches[place].pushed else {
            unreachable!("{} was acknowledged and never pushed", ack.version)
        };
        let share = &mut pushed.servers[server];
        assert_eq!(ack.base_offsets.len(), share.blocks.len(), "{ack:?} for {:?}", share.blocks);
        share.is_acknowledged = true;
        for (block, offset) in share.blocks.iter().zip(ack.base_offsets) {
            let known = pushed.base_offsets[*block].replace(offset);
            if known.is_some_and(|known| known != offset) {
                let stream = pushed.blocks[*block].stream;
                let detail = format!(
                    "{stream} at {}: {known:?} and, on server {server}, {offset}",
                    ack.version
                );
                cx.halt("offset_divergence", detail);
            }
        }
    }

    /// Tells the log servers at once what the last batch of a burst made known: nothing else would, soon.
    pub(crate) fn announce(&self, cx: &mut Cx<'_>) {
        for server in &self.log_servers {
            let announce = Announce { known_committed: self.known_committed };
            cx.send(server.endpoint, self.plan.epoch, announce);
        }
    }

    /// The planted bug's idea of durable: one log server may be missing.
    pub(crate) fn is_oldest_almost_durable(&self) -> bool {
        let Some(oldest) = self.batches.front() else { return false };
        let (Some(version), Some(pushed)) = (oldest.version(), &oldest.pushed) else {
            return false;
        };
        let missing = self.silent_servers(pushed, version).count();
        missing < self.log_servers.len()
            && missing == 1
            && pushed.base_offsets.iter().all(Option::is_some)
    }

    /// Whether the oldest batch is durable everywhere and all its blocks' places are known.
    pub(crate) fn is_oldest_durable(&self) -> bool {
        let Some(oldest) = self.batches.front() else { return false };
        let (Some(version), Some(pushed)) = (oldest.version(), &oldest.pushed) else {
            return false;
        };
        self.silent_servers(pushed, version).next().is_none()
    }
}

/// Whether an outcome is the good one.
pub(crate) const fn is_committed(outcome: &CommitOutcome) -> bool {
    matches!(outcome, CommitOutcome::Committed { .. })
}

/// Who holds a stream, by their place among the plan's log servers.
fn holders(cx: &Cx<'_>, plan: &EpochPlan, stream: StreamId) -> Vec<usize> {
    if cx.planted(Plant::SharesMove) {
        let all: Vec<_> = plan.log_servers.iter().map(|server| server.node).collect();
        return placement::holders(stream, &plan.seats, &all, &[], plan.replication);
    }
    plan.holders(stream)
}
