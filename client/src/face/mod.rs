//! The async face: a handle for applications, and one task that runs the session.
//!
//! ```text
//!  Client, Lane, Pull ..           driver task (one for all clones of a client)
//!   call --bounded channel--> [ take all there is -> session -> frames, one try_send each ]
//!    ^                                ^    ^                          |
//!    '-------- oneshot ---------------'    '--- QUIC events, timer ---'
//! ```
//!
//! A call costs a channel send and a oneshot, never a task. The driver takes what has gathered in one go, so
//! that requests of many callers leave in one packet.
//!
//! Dropping a future does not undo its call: a commit goes on, and its outcome is lost with the future.
#![expect(
    clippy::disallowed_types,
    reason = "the shell of the client: clocks, sockets and tasks are its trade"
)]

mod driver;
mod links;
mod live_view;
mod pull;
#[cfg(test)]
mod tests;

use core::future::Future;
use core::ops::{Deref, DerefMut};
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use std::path::PathBuf;

use common::membership::MemberChange;
use common::message::{ClusterView, StreamState};
use common::quic::tls::ClientTls;
use common::quic::{self, BindError};
use common::{Code, Knobs, NodeId, Refusal, StreamId, Version};
use tokio::sync::{mpsc, oneshot};

pub use live_view::LiveView;
pub use pull::Pull;

use crate::session::{Answer, Committed, LaneId, PullFrom, PullerId, TrimState};
use crate::{Error, Transaction};

/// Calls on their way to the driver; whoever has one more waits.
const COMMANDS_MAX: usize = 4096;

/// How to reach a cluster.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Whom to trust and what to show.
    pub tls: ClientTls,
    /// Limits and intervals of the session.
    pub knobs: Knobs,
    /// Limits and intervals of the transport.
    pub quic: quic::Options,
    /// How long [`Client::connect`] waits for the first node.
    pub connect_timeout: Duration,
    /// Whether to connect to the nodes that those at the given addresses tell of, too.
    pub discover: bool,
}

impl ConnectOptions {
    /// Trusts servers with a certificate of this CA, a PEM file.
    #[must_use]
    pub fn new(ca: impl Into<PathBuf>) -> Self {
        let tls = ClientTls { ca: ca.into(), identity: None, server_name: None };
        Self {
            tls,
            knobs: Knobs::default(),
            quic: quic::Options::default(),
            connect_timeout: Duration::from_secs(10),
            discover: true,
        }
    }
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The certificates or the socket are of no use.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// No node has answered in time.
    #[error("no node has answered: {0}")]
    Unreachable(String),
}

/// A call as it travels to the driver.
enum Command {
    Commit(Transaction, Option<LaneId>, Reply),
    ReadVersion(Reply),
    Trim(StreamId, Version, Reply),
    Describe(Vec<StreamId>, Reply),
    Cluster(Reply),
    Status(Reply),
    ChangeMember(NodeId, MemberChange, Reply),
    Create(String, Reply),
    List(Reply),
    Resolve(String, Reply),
    Pull(PullerId, Version, Reply),
    OpenPuller(PullFrom, oneshot::Sender<Result<PullerId, Error>>),
    OpenLane(oneshot::Sender<Result<LaneId, Error>>),
    Close,
}

/// What is over. It has a channel of its own, since a drop can't wait; at most one for each lane and puller.
enum Ended {
    Lane(LaneId),
    Puller(PullerId),
}

type Reply = oneshot::Sender<Result<Answer, Error>>;

/// A cluster, as an application sees it. Cheap to clone; the last clone's drop ends the connections.
#[derive(Clone, Debug)]
pub struct Client {
    commands: mpsc::Sender<Command>,
    ended: mpsc::UnboundedSender<Ended>,
}

fn closed() -> Error {
    Error::new(Code::TimedOut, "the client is closed")
}

fn misfit(answer: &Answer) -> Error {
    Error::new(Code::Internal, format!("{answer:?} answers something else"))
}

macro_rules! expect_answer {
    ($answer:expr, $variant:path) => {
        match $answer {
            $variant(value) => Ok(value),
            other => Err($crate::face::misfit(&other)),
        }
    };
}
use expect_answer;

impl Client {
    /// Connects to a cluster through any of its nodes' addresses (`host:port`): one that answers tells where
    /// the others are. Name several, for the day on which one of them is down. Needs a running tokio runtime;
    /// the driver is one of its tasks.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect<A: Into<String>>(
        addresses: impl IntoIterator<Item = A>,
        options: ConnectOptions,
    ) -> Result<Self, ConnectError> {
        let addresses: Vec<String> = addresses.into_iter().map(Into::into).collect();
        let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
        let (ended, ends) = mpsc::unbounded_channel();
        let (first, connected) = oneshot::channel();
        let (endpoint, events) = quic::QuicEndpoint::client(&options.tls, options.quic.clone())?;
        let inputs = driver::Inputs { commands: inbox, ends, events };
        tokio::spawn(driver::run(endpoint, inputs, addresses, options, first));
        match connected.await {
            Ok(Ok(())) => Ok(Self { commands, ended }),
            Ok(Err(why)) => Err(ConnectError::Unreachable(why)),
            Err(_) => Err(ConnectError::Unreachable("the driver has ended".to_owned())),
        }
    }

    /// Begins a transaction.
    pub fn transaction(&self) -> PendingTransaction {
        PendingTransaction { client: self.clone(), transaction: Transaction::new() }
    }

    /// Commits a transaction: durable everywhere, or not at all.
    ///
    /// # Errors
    /// Why it has not committed, except for [`Error::Unknown`].
    pub async fn commit(&self, transaction: Transaction) -> Result<Committed, Error> {
        self.submit(transaction).await.await
    }

    /// Hands a transaction over; the future answers when it has its verdict. Waits only while too many calls
    /// are on their way to the driver.
    pub async fn submit(&self, transaction: Transaction) -> CommitFuture {
        self.submit_to(None, transaction).await
    }

    async fn submit_to(&self, lane: Option<LaneId>, transaction: Transaction) -> CommitFuture {
        let (reply, verdict) = oneshot::channel();
        let taken = self.commands.send(Command::Commit(transaction, lane, reply)).await;
        CommitFuture { verdict: taken.ok().map(|()| verdict) }
    }

    async fn call(&self, command: impl FnOnce(Reply) -> Command) -> Result<Answer, Error> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?
    }

    /// The newest version that every acknowledged commit is in: reads at it see all of them.
    ///
    /// # Errors
    /// When no proxy answers in time.
    pub async fn read_version(&self) -> Result<Version, Error> {
        expect_answer!(self.call(Command::ReadVersion).await?, Answer::ReadVersion)
    }

    /// Pulls all versions above `after` (exclusive) of some streams.
    ///
    /// # Errors
    /// When there are too many streams or pulls, or none.
    pub async fn pull(
        &self,
        streams: impl IntoIterator<Item = StreamId>,
        after: Version,
    ) -> Result<Pull, Error> {
        self.pull_from(PullFrom::after(streams.into_iter().collect(), after)).await
    }

    /// Pulls with expected offsets.
    ///
    /// # Errors
    /// As [`Client::pull`].
    pub async fn pull_from(&self, from: PullFrom) -> Result<Pull, Error> {
        let (reply, opened) = oneshot::channel();
        self.commands.send(Command::OpenPuller(from, reply)).await.map_err(|_| closed())?;
        let puller = opened.await.map_err(|_| closed())??;
        Ok(Pull::new(self.clone(), puller))
    }

    /// A view of some streams that follows the log from its beginning.
    ///
    /// # Errors
    /// As [`Client::pull`].
    pub async fn live_view(
        &self,
        streams: impl IntoIterator<Item = StreamId>,
    ) -> Result<LiveView, Error> {
        Ok(LiveView::new(self.pull(streams, Version::ZERO).await?))
    }

    /// Everything of the stream at or below `through` may go.
    ///
    /// # Errors
    /// When not every log server that holds the stream has it persisted in time.
    pub async fn trim(&self, stream: StreamId, through: Version) -> Result<TrimState, Error> {
        let answer = self.call(|reply| Command::Trim(stream, through, reply)).await?;
        expect_answer!(answer, Answer::Trimmed)
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// [`Code::StreamExists`], [`Code::BadName`].
    pub async fn create_stream(&self, name: &str) -> Result<StreamId, Error> {
        let answer = self.call(|reply| Command::Create(name.to_owned(), reply)).await?;
        expect_answer!(answer, Answer::Created)
    }

    /// All streams, by name.
    ///
    /// # Errors
    /// When the catalog can't be read in time.
    pub async fn list_streams(&self) -> Result<Vec<(String, StreamId)>, Error> {
        expect_answer!(self.call(Command::List).await?, Answer::Streams)
    }

    /// The stream of a name, if there is one.
    ///
    /// # Errors
    /// When the catalog can't be read in time.
    pub async fn find_stream(&self, name: &str) -> Result<Option<StreamId>, Error> {
        let answer = self.call(|reply| Command::Resolve(name.to_owned(), reply)).await?;
        expect_answer!(answer, Answer::Resolved)
    }

    /// How these streams stand, in the order asked.
    ///
    /// # Errors
    /// When the log servers that hold them don't answer in time.
    pub async fn describe_streams(
        &self,
        streams: impl IntoIterator<Item = StreamId>,
    ) -> Result<Vec<StreamState>, Error> {
        let streams = streams.into_iter().collect();
        let answer = self.call(|reply| Command::Describe(streams, reply)).await?;
        expect_answer!(answer, Answer::Described)
    }

    /// Opens an ordered lane.
    ///
    /// # Errors
    /// When there are too many.
    pub async fn ordered_lane(&self) -> Result<Lane, Error> {
        let (reply, opened) = oneshot::channel();
        self.commands.send(Command::OpenLane(reply)).await.map_err(|_| closed())?;
        let lane = opened.await.map_err(|_| closed())??;
        Ok(Lane { client: self.clone(), lane })
    }

    /// Who serves.
    ///
    /// # Errors
    /// When no node answers in time.
    pub async fn cluster(&self) -> Result<ClusterView, Error> {
        expect_answer!(self.call(Command::Cluster).await?, Answer::Cluster)
    }

    /// A node's report: one JSON object.
    ///
    /// # Errors
    /// When no node answers in time.
    pub async fn status(&self) -> Result<String, Error> {
        expect_answer!(self.call(Command::Status).await?, Answer::Status)
    }

    /// Drains, restores or removes a node. Asking again for what is decided already does no harm.
    ///
    /// # Errors
    /// [`Code::UnknownNode`], [`Code::NodeNeeded`] and [`Code::NodeRemoved`] when it can't be;
    /// [`Code::TimedOut`] when no leader has answered in time.
    pub async fn change_member(&self, node: NodeId, change: MemberChange) -> Result<(), Error> {
        let ask = |reply| Command::ChangeMember(node, change, reply);
        match self.call(ask).await? {
            Answer::MemberChanged => Ok(()),
            other => Err(misfit(&other)),
        }
    }

    /// Ends the connections once all open calls are answered, and waits for that.
    pub async fn close(self) {
        // An error says that it has ended already.
        let _ = self.commands.send(Command::Close).await;
        self.commands.closed().await;
    }
}

/// A transaction that knows where to go; otherwise a [`Transaction`].
#[derive(Debug)]
#[must_use]
pub struct PendingTransaction {
    client: Client,
    transaction: Transaction,
}

impl PendingTransaction {
    /// Commits it; see [`Client::commit`].
    ///
    /// # Errors
    /// Why it has not committed, except for [`Error::Unknown`].
    pub async fn commit(self) -> Result<Committed, Error> {
        self.client.commit(self.transaction).await
    }
}

impl Deref for PendingTransaction {
    type Target = Transaction;

    fn deref(&self) -> &Transaction {
        &self.transaction
    }
}

impl DerefMut for PendingTransaction {
    fn deref_mut(&mut self) -> &mut Transaction {
        &mut self.transaction
    }
}

/// The verdict of a transaction that has been handed over.
#[derive(Debug)]
#[must_use = "the verdict is lost with the future"]
pub struct CommitFuture {
    /// `None` when the driver was gone before it took the transaction.
    verdict: Option<oneshot::Receiver<Result<Answer, Error>>>,
}

impl Future for CommitFuture {
    type Output = Result<Committed, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(verdict) = &mut self.verdict else { return Poll::Ready(Err(closed())) };
        Pin::new(verdict).poll(cx).map(|answered| match answered {
            Ok(answer) => expect_answer!(answer?, Answer::Committed),
            // The driver has ended with the transaction on its way.
            Err(_) => Err(Error::Unknown(Refusal::new(Code::TimedOut, "the client is closed"))),
        })
    }
}

/// Commits that are decided in the order of their [`Lane::submit`]. After one that failed, all later ones
/// fail with [`Code::LaneBroken`], and the lane is of no use any more.
#[derive(Debug)]
pub struct Lane {
    client: Client,
    lane: LaneId,
}

impl Lane {
    /// Hands a transaction over behind the earlier ones, without waiting for their verdicts.
    pub async fn submit(&mut self, transaction: Transaction) -> CommitFuture {
        self.client.submit_to(Some(self.lane), transaction).await
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A driver that is gone has no lanes.
        let _ = self.client.ended.send(Ended::Lane(self.lane));
    }
}
