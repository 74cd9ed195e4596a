//! QUIC: frames between processes, for the server and for the client's async face.
//!
//! This is shell code: it runs on a current-thread tokio runtime, moves opaque frames and knows no
//! message. Only the first four bytes of a frame mean something here: its whole length. The rest
//! of the header belongs to [`wire`](crate::wire).
//!
//! ```text
//!    one process                                                     another process
//!  try_send -> [bounded queue] -> writer ==lane Control stream==> reader -> cut --.
//!  try_send -> [bounded queue] -> writer ==lane Commit  stream==> reader -> cut --+-> Events
//!  try_send -> [bounded queue] -> writer ==lane Pull    stream==> reader -> cut --'   (bounded)
//!               Full | Closed      |                                |
//!                                  one write per wake      one batch of frames per wake
//!
//!  a lane is one bidirectional stream that lives as long as its connection. Each direction:
//!
//!   0      1                5                                1 + length
//!   +------+----------------+--------------------------------+----------------+-- ..
//!   | lane | length u32 LE  | rest of the header, the body   | length u32 LE  |
//!   +------+----------------+--------------------------------+----------------+-- ..
//!     once  \____________ frame: `length` bytes in all ______/ \___ next frame
//! ```
//!
//! | who | does |
//! |---|---|
//! | the side that dials | opens all lanes at once, writes each one's byte, waits for its echo |
//! | the side that accepts | takes the lanes, each once, echoes the bytes, then reports `Opened` |
//! | either | sends whole frames; reports `Closed` exactly once, after the last `Frames` |
//!
//! Rules that the code keeps:
//!
//! 1. Nothing buffers without a named limit: frames and bytes of a lane's queue, bytes and batches
//!    on their way to the owner, bytes of a frame, connections ([`Options`], `tuning`).
//! 2. `try_send` never waits. An owner that does not take events stops the readers; QUIC's flow
//!    control then stops the peer's writers, whose queues answer [`SendError::Full`].
//! 3. A peer that breaks the rules loses its own connection and nothing else.
//! 4. Frames of one lane arrive in order. Lanes are not ordered among each other.
//! 5. A frame handed over is not a frame delivered: only an answer of the peer's role proves that.
//!
//! A received frame may be a slice of a larger receive buffer (up to 64 KiB). Who keeps a small
//! frame for long should copy it.

mod close;
mod connection;
mod endpoint;
mod frame;
#[cfg(test)]
mod tests;
pub mod tls;
mod tuning;

use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;

use crate::wire::FRAME_BYTES_MAX;

pub use close::{CloseCode, CloseReason};
pub use connection::{Connection, Drained, SendError, Stats};
pub use endpoint::{BindError, ConnectError, ConnectFailure, QuicEndpoint, host};
pub use frame::FRAME_BYTES_MIN;

/// The protocols that this build speaks, the best first. The number is the major version: peers
/// without a common one do not talk.
pub const PROTOCOLS: &[&str] = &["millrace/1"];

/// Offered after [`PROTOCOLS`] by every version, for ever. Peers that share nothing else meet here
/// only to tell each other what they speak; no lane ever opens on it.
pub const PROTOCOL_PROBE: &str = "millrace/0";

/// How many lanes a connection has.
pub const LANES: usize = 3;

/// One stream of a connection. A full lane does not hold up the others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Lane {
    /// Small and urgent: heartbeats, locks, recovery, status. Goes first.
    Control = 1,
    /// The commit path: commits, versions, conflict ranges, pushes and their answers.
    Commit = 2,
    /// Bulk reads by consumers and copies between log servers. Goes last.
    Pull = 3,
}

impl Lane {
    /// Every lane, in the order in which they open.
    pub const ALL: [Self; LANES] = [Self::Control, Self::Commit, Self::Pull];

    /// The first byte of its stream.
    #[must_use]
    pub const fn byte(self) -> u8 {
        self as u8
    }

    /// The lane of a first byte; `None` for any other byte.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Control),
            2 => Some(Self::Commit),
            3 => Some(Self::Pull),
            _ => None,
        }
    }

    const fn index(self) -> usize {
        self as usize - 1
    }

    /// A higher one is sent first while the congestion window is the limit.
    const fn priority(self) -> i32 {
        match self {
            Self::Control => 2,
            Self::Commit => 1,
            Self::Pull => 0,
        }
    }
}

/// Names a connection within its endpoint; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(pub u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "connection {}", self.0)
    }
}

/// What an endpoint tells its owner, in order.
///
/// `Opened` or a good `Dialed` comes before the first `Frames` of its connection, `Closed` once
/// after the last. A connection made by [`QuicEndpoint::connect`] has no opening event.
#[derive(Debug)]
pub enum Event {
    /// A peer has connected and all its lanes are open.
    Opened(Connection),
    /// The end of [`QuicEndpoint::dial`].
    Dialed {
        /// What the caller of `dial` gave.
        token: u64,
        /// The connection, or what happened at each address.
        outcome: Result<Connection, ConnectError>,
    },
    /// Frames of one lane, in order.
    Frames(Inbound),
    /// A connection is over.
    Closed {
        /// Which one.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
    },
    /// A peer tried to connect and never got as far as `Opened`. For logs and metrics.
    Refused {
        /// The peer's address.
        remote: SocketAddr,
        /// Why.
        reason: CloseReason,
    },
}

/// A batch of whole frames. Drop it as soon as the frames are taken: it holds its share of
/// [`Options::inbound_bytes_max`].
#[derive(Debug)]
pub struct Inbound {
    /// Where they came from.
    pub connection: ConnectionId,
    /// On which lane.
    pub lane: Lane,
    /// The frames, each with its length prefix; never empty.
    pub frames: Vec<Bytes>,
    budget: Option<OwnedSemaphorePermit>,
}

impl Inbound {
    /// Takes the frames and gives the budget back.
    #[must_use]
    pub fn into_frames(self) -> Vec<Bytes> {
        drop(self.budget);
        self.frames
    }
}

/// The limits and times of an endpoint. What was measured and need not be set is in `tuning`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of one frame, sent or received. A received longer one closes its connection.
    pub frame_bytes_max: usize,
    /// Bytes waiting in one lane's queue; at least `frame_bytes_max`.
    pub queue_bytes_max: usize,
    /// Frames waiting in one lane's queue.
    pub queue_frames_max: usize,
    /// Bytes of received frames that the owner has not taken yet, over all connections.
    pub inbound_bytes_max: usize,
    /// Events that the owner has not taken yet.
    pub events_max: usize,
    /// Connections of an endpoint, with those that are still opening.
    pub connections_max: usize,
    /// From the first packet to open lanes, at each address.
    pub attempt_deadline: Duration,
    /// A packet goes out after this much silence.
    pub keep_alive: Duration,
    /// A connection is over after this much silence of the peer; above `keep_alive`.
    pub idle: Duration,
    /// What this side speaks, the best first.
    pub protocols: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            frame_bytes_max: FRAME_BYTES_MAX,
            queue_bytes_max: FRAME_BYTES_MAX,
            queue_frames_max: 16_384,
            inbound_bytes_max: 256 << 20,
            events_max: 1024,
            connections_max: 1024,
            attempt_deadline: Duration::from_secs(2),
            keep_alive: Duration::from_millis(250),
            idle: Duration::from_secs(2),
            protocols: PROTOCOLS.iter().map(|&name| name.to_owned()).collect(),
        }
    }
}

impl Options {
    /// Says what does not fit together.
    ///
    /// # Errors
    /// The first relation that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let rules = [
            (self.frame_bytes_max >= FRAME_BYTES_MIN, "frame_bytes_max is below a frame's header"),
            (u32::try_from(self.frame_bytes_max).is_ok(), "frame_bytes_max does not fit 32 bits"),
            (
                self.queue_bytes_max >= self.frame_bytes_max,
                "queue_bytes_max is below frame_bytes_max: the largest frame could never be sent",
            ),
            (self.queue_frames_max > 0, "queue_frames_max is 0"),
            (
                (1..=u32::MAX as usize).contains(&self.inbound_bytes_max),
                "inbound_bytes_max is 0 or does not fit 32 bits",
            ),
            (self.events_max > 0, "events_max is 0"),
            (self.connections_max > 0, "connections_max is 0"),
            (self.keep_alive < self.idle, "keep_alive is not below idle"),
            (!self.protocols.is_empty(), "protocols is empty"),
            (
                self.protocols.iter().all(|name| (1..=255).contains(&name.len())),
                "a protocol's name is empty or above 255 bytes",
            ),
            (
                self.protocols.iter().all(|name| name != PROTOCOL_PROBE),
                "protocols contains the probe",
            ),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, broken)) => Err(broken.to_owned()),
            None => Ok(()),
        }
    }
}
