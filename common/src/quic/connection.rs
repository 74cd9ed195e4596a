//! One connection: a queue and a writer, a reader and a cutter per lane, and one task that reports
//! the end.
//!
//! ```text
//!            Connection (any number of handles)
//!   try_send --> Queue[lane] --> write_lane --> stream
//!                                     |
//!    close, drain ------------------> +--------------- quinn connection
//!                                     |                      |
//!   events <-- Frames <-- budget <-- read_lane <-- stream    |
//!   events <-- Closed <------- supervise <-------------------'
//!                              (waits for the readers first)
//! ```
//!
//! Dropping handles does not close: `close`, the peer, or the end of the endpoint does.

use core::net::SocketAddr;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use quinn::{ReadError, RecvStream, SendStream, VarInt, WriteError};
use rustls::pki_types::CertificateDer;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::close::{CloseCode, CloseReason};
use super::endpoint::Context;
use super::frame::{Cutter, claimed_bytes, gather};
use super::{ConnectionId, Event, FRAME_BYTES_MIN, Inbound, LANES, Lane};
use crate::wire::Frame;

/// Frames that one write takes from the queue at most; more go with the next one.
const WRITE_FRAMES_MAX: usize = 4096;
/// Chunks, a packet's payload each, that a reader takes from quinn at once.
const READ_CHUNKS_MAX: usize = 256;

/// Why a frame was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[must_use]
pub enum SendError {
    /// The lane's queue is at its limit of bytes or frames: the peer or the network is slower.
    #[error("the lane's queue is full")]
    Full,
    /// The connection is over or draining.
    #[error("the connection is closed")]
    Closed,
    /// The frame is longer than `frame_bytes_max`; the peer would close the connection.
    #[error("the frame is longer than the limit")]
    TooLong,
}

/// What a connection has moved so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Frames handed to QUIC.
    pub frames_sent: u64,
    /// Writes that took: `frames_sent / writes` is the coalescing.
    pub writes: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Frames received whole.
    pub frames_received: u64,
    /// Batches that they came in.
    pub batches: u64,
    /// Their bytes.
    pub bytes_received: u64,
}

/// A handle on a connection with all its lanes open.
#[derive(Clone, Debug)]
pub struct Connection {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: ConnectionId,
    remote: SocketAddr,
    quinn: quinn::Connection,
    queues: [Queue; LANES],
    queue_bytes_max: AtomicUsize,
    frame_bytes_max: usize,
    /// True once `drain` was called.
    draining: watch::Sender<bool>,
    /// Writers that have not ended.
    writers: watch::Sender<usize>,
    /// Why this side closed, if it was this side. The first reason stays.
    local_reason: Mutex<Option<CloseReason>>,
    counters: Counters,
}

#[derive(Debug)]
struct Queue {
    frames: mpsc::Sender<Frame>,
    /// Bytes queued or in the write that is under way.
    bytes: AtomicUsize,
}

#[derive(Default, Debug)]
struct Counters {
    frames_sent: AtomicU64,
    writes: AtomicU64,
    bytes_sent: AtomicU64,
    frames_received: AtomicU64,
    batches: AtomicU64,
    bytes_received: AtomicU64,
}

impl Connection {
    /// Its name within the endpoint.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.shared.id
    }

    /// The peer's address.
    #[must_use]
    pub fn remote(&self) -> SocketAddr {
        self.shared.remote
    }

    /// The certificates that the peer has shown and TLS has verified, its own first.
    #[must_use]
    pub fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        let shown = self.shared.quinn.peer_identity();
        shown.and_then(|shown| shown.downcast().ok()).map_or_else(Vec::new, |shown| *shown)
    }

    /// Queues a frame; never waits.
    ///
    /// # Errors
    /// See [`SendError`]. The frame is then not sent, in whole or in part.
    ///
    /// # Panics
    /// When the length in the frame's head is not the frame's length.
    pub fn try_send(&self, lane: Lane, frame: impl Into<Frame>) -> Result<(), SendError> {
        let frame = frame.into();
        let shared = &*self.shared;
        let bytes = frame.len();
        let claimed = claimed_bytes(&frame);
        assert_eq!(claimed, Some(bytes), "a frame of {bytes} bytes claims {claimed:?}");
        assert!(bytes >= FRAME_BYTES_MIN, "a frame of {bytes} bytes has no header");
        if bytes > shared.frame_bytes_max {
            return Err(SendError::TooLong);
        }
        let queue = &shared.queues[lane.index()];
        let before = queue.bytes.fetch_add(bytes, Ordering::Relaxed);
        let refused = if before + bytes > shared.queue_bytes_max.load(Ordering::Relaxed)
            && !queue.frames.is_closed()
        {
            SendError::Full
        } else {
            match queue.frames.try_send(frame) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Full(_)) => SendError::Full,
                Err(TrySendError::Closed(_)) => SendError::Closed,
            }
        };
        queue.bytes.fetch_sub(bytes, Ordering::Relaxed);
        Err(refused)
    }

    /// Sets another limit for the bytes in each lane's queue than the endpoint's options have.
    pub fn limit_queues(&self, bytes_max: usize) {
        let frame_bytes_max = self.shared.frame_bytes_max;
        assert!(bytes_max >= frame_bytes_max, "{bytes_max} is no room for {frame_bytes_max}");
        self.shared.queue_bytes_max.store(bytes_max, Ordering::Relaxed);
    }

    /// Bytes that wait in a lane's queue, with the write that is under way.
    #[must_use]
    pub fn queued_bytes(&self, lane: Lane) -> usize {
        self.shared.queues[lane.index()].bytes.load(Ordering::Relaxed)
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.quinn.close_reason().is_some()
    }

    /// The smoothed round trip.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.shared.quinn.rtt()
    }

    /// Bytes of a packet's payload at present: 6500 on loopback unless losses have lowered it.
    #[must_use]
    pub fn mtu(&self) -> u16 {
        self.shared.quinn.stats().path.current_mtu
    }

    /// What it has moved so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counters = &self.shared.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            frames_sent: of(&counters.frames_sent),
            writes: of(&counters.writes),
            bytes_sent: of(&counters.bytes_sent),
            frames_received: of(&counters.frames_received),
            batches: of(&counters.batches),
            bytes_received: of(&counters.bytes_received),
        }
    }

    /// Ends it now; what is queued is dropped. The owner still gets its `Closed`.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.shared.close(CloseReason::Local, code, reason);
    }

    /// Takes no more frames, waits until the peer has what was queued, then closes. At the deadline
    /// it closes all the same; the answer says whether everything had gone.
    pub async fn drain(&self, code: CloseCode, reason: &str, deadline: Duration) -> Drained {
        self.shared.draining.send_replace(true);
        let mut writers = self.shared.writers.subscribe();
        let all_ended = timeout(deadline, writers.wait_for(|&running| running == 0)).await;
        let was_open = self.shared.quinn.close_reason().is_none();
        self.close(code, reason);
        if all_ended.is_ok() && was_open { Drained::Whole } else { Drained::Cut }
    }
}

/// How a [`Connection::drain`] ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Drained {
    /// The peer's QUIC has acknowledged every queued frame.
    Whole,
    /// The deadline or the end of the connection came first.
    Cut,
}

impl Shared {
    fn close(&self, why: CloseReason, code: CloseCode, reason: &str) {
        let mut local = self.local_reason.lock().unwrap_or_else(PoisonError::into_inner);
        if local.is_none() && self.quinn.close_reason().is_none() {
            *local = Some(why);
        }
        drop(local);
        self.quinn.close(VarInt::from(code), reason.as_bytes());
    }

    fn close_for_protocol(&self, what: &str) {
        self.close(CloseReason::protocol(what), CloseCode::PROTOCOL, what);
    }
}

/// A lane whose task has panicked would hang in silence: its connection ends instead.
struct PanicGuard<'a>(&'a Shared);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "the task of a lane panicked";
            self.0.close(CloseReason::Internal(what.to_owned()), CloseCode::INTERNAL, what);
        }
    }
}

/// The streams of a connection's lanes, open in both directions.
pub(super) type Streams = [(Lane, SendStream, RecvStream); LANES];

/// A connection whose tasks have not begun: the owner hears of it before its first frame.
pub(super) struct Unstarted {
    connection: Connection,
    streams: Streams,
    queues: [mpsc::Receiver<Frame>; LANES],
    slot: OwnedSemaphorePermit,
}

impl Unstarted {
    pub(super) fn new(
        context: &Context,
        quinn: quinn::Connection,
        streams: Streams,
        slot: OwnedSemaphorePermit,
    ) -> Self {
        let channels = Lane::ALL.map(|_| mpsc::channel(context.options.queue_frames_max));
        let (senders, queues): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
        let mut senders = senders.into_iter();
        let shared = Shared {
            id: context.next_id(),
            remote: quinn.remote_address(),
            quinn,
            queues: core::array::from_fn(|_| Queue {
                frames: senders.next().expect("one channel per lane"),
                bytes: AtomicUsize::new(0),
            }),
            queue_bytes_max: AtomicUsize::new(context.options.queue_bytes_max),
            frame_bytes_max: context.options.frame_bytes_max,
            draining: watch::Sender::new(false),
            writers: watch::Sender::new(LANES),
            local_reason: Mutex::new(None),
            counters: Counters::default(),
        };
        let queues = queues.try_into().expect("one channel per lane");
        Self { connection: Connection { shared: Arc::new(shared) }, streams, queues, slot }
    }

    pub(super) fn connection(&self) -> Connection {
        self.connection.clone()
    }

    pub(super) fn start(self, context: &Arc<Context>) {
        let mut readers = JoinSet::new();
        for ((lane, send, receive), queue) in self.streams.into_iter().zip(self.queues) {
            let shared = Arc::clone(&self.connection.shared);
            tokio::spawn(write_lane(lane, send, queue, shared));
            let shared = Arc::clone(&self.connection.shared);
            readers.spawn(read_lane(lane, receive, shared, Arc::clone(context)));
        }
        let shared = self.connection.shared;
        tokio::spawn(supervise(readers, shared, Arc::clone(context), self.slot));
    }
}

/// Sends what is queued, everything there is with each write.
async fn write_lane(
    lane: Lane,
    mut stream: SendStream,
    mut queue: mpsc::Receiver<Frame>,
    shared: Arc<Shared>,
) {
    let _guard = PanicGuard(&shared);
    match write_frames(lane, &mut stream, &mut queue, &shared).await {
        Ok(()) => {}
        // The supervisor reports it.
        Err(WriteError::ConnectionLost(_)) => {}
        Err(error) => shared.close_for_protocol(&format!("lane {lane:?}, sending: {error}")),
    }
    drop(queue);
    shared.writers.send_modify(|running| *running -= 1);
}

/// Returns once the queue has been drained and the peer has acknowledged all of it.
async fn write_frames(
    lane: Lane,
    stream: &mut SendStream,
    queue: &mut mpsc::Receiver<Frame>,
    shared: &Shared,
) -> Result<(), WriteError> {
    let mut draining = shared.draining.subscribe();
    let mut frames = Vec::new();
    let mut chunks = Vec::new();
    loop {
        let frame_count = tokio::select! {
            biased;
            frame_count = queue.recv_many(&mut frames, WRITE_FRAMES_MAX) => frame_count,
            _ = draining.wait_for(|&begun| begun), if !queue.is_closed() => {
                queue.close();
                continue;
            }
            error = shared.quinn.closed() => return Err(WriteError::ConnectionLost(error)),
        };
        if frame_count == 0 {
            break;
        }
        chunks.clear();
        let bytes = gather(frames.drain(..), &mut chunks);
        stream.write_all_chunks(&mut chunks).await?;
        let before = shared.queues[lane.index()].bytes.fetch_sub(bytes, Ordering::Relaxed);
        assert!(before >= bytes, "lane {lane:?}: {bytes} bytes left a queue of {before}");
        shared.counters.frames_sent.fetch_add(frame_count as u64, Ordering::Relaxed);
        shared.counters.writes.fetch_add(1, Ordering::Relaxed);
        shared.counters.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }
    // Only a reset could have closed the stream, and nothing here resets it.
    let _ = stream.finish();
    match stream.stopped().await {
        Ok(None) => Ok(()),
        Ok(Some(code)) => Err(WriteError::Stopped(code)),
        Err(error) => match shared.quinn.close_reason() {
            Some(lost) => Err(WriteError::ConnectionLost(lost)),
            None => unreachable!("a stream without early data ended with {error}"),
        },
    }
}

/// Cuts what arrives into frames and hands them on, a batch for each wake.
async fn read_lane(lane: Lane, mut stream: RecvStream, shared: Arc<Shared>, context: Arc<Context>) {
    let _guard = PanicGuard(&shared);
    let mut cutter = Cutter::new(shared.frame_bytes_max);
    let mut chunks = vec![Bytes::new(); READ_CHUNKS_MAX];
    loop {
        let chunk_count = match stream.read_chunks(&mut chunks).await {
            Ok(Some(chunk_count)) => chunk_count,
            Ok(None) if cutter.is_inside_frame() => {
                return shared.close_for_protocol(&format!("lane {lane:?} ended inside a frame"));
            }
            // The peer drains: nothing more comes on this lane.
            Ok(None) | Err(ReadError::ConnectionLost(_)) => return,
            Err(error) => {
                return shared.close_for_protocol(&format!("lane {lane:?}, receiving: {error}"));
            }
        };
        let mut frames = Vec::new();
        let mut cut = Ok(());
        for chunk in &mut chunks[..chunk_count] {
            cut = cut.and_then(|()| cutter.push(core::mem::take(chunk), &mut frames));
        }
        // What came before a bad length is good.
        if !frames.is_empty() && !hand_on(lane, frames, &shared, &context).await {
            return shared.close(CloseReason::Local, CloseCode::SHUTDOWN, "nobody receives");
        }
        if let Err(bad_length) = cut {
            return shared.close_for_protocol(&format!("lane {lane:?}: {bad_length}"));
        }
    }
}

/// Waits for the budget and for room among the events. False: the owner is gone.
async fn hand_on(lane: Lane, frames: Vec<Bytes>, shared: &Shared, context: &Context) -> bool {
    let bytes: usize = frames.iter().map(Bytes::len).sum();
    // A batch above the whole budget takes all of it.
    let share = bytes.min(context.options.inbound_bytes_max);
    let share = u32::try_from(share).expect("Options::check keeps the budget within 32 bits");
    let Ok(budget) = Arc::clone(&context.inbound_budget).acquire_many_owned(share).await else {
        return false;
    };
    shared.counters.frames_received.fetch_add(frames.len() as u64, Ordering::Relaxed);
    shared.counters.batches.fetch_add(1, Ordering::Relaxed);
    shared.counters.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
    let inbound = Inbound { connection: shared.id, lane, frames, budget: Some(budget) };
    context.events.send(Event::Frames(inbound)).await.is_ok()
}

/// Reports the end, once, after every reader has handed on its last frames.
async fn supervise(
    mut readers: JoinSet<()>,
    shared: Arc<Shared>,
    context: Arc<Context>,
    slot: OwnedSemaphorePermit,
) {
    while readers.join_next().await.is_some() {}
    // A peer that drains closes right after. One that ended its lanes and stays is of no use.
    let idle = context.options.idle;
    if timeout(idle, shared.quinn.closed()).await.is_err() {
        shared.close_for_protocol("all lanes ended and the connection stayed");
    }
    let error = shared.quinn.closed().await;
    let local = shared.local_reason.lock().unwrap_or_else(PoisonError::into_inner).take();
    let reason = local.unwrap_or_else(|| context.reason(&error));
    // Nobody is left to hear it when this fails.
    let _ = context.events.send(Event::Closed { connection: shared.id, reason }).await;
    // Only now: an owner that takes no events must not gather ended connections without bound.
    drop(slot);
}
