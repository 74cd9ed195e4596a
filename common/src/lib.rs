//! What all of Millrace shares: ids, versions, key ranges, transactions, blocks, messages, the wire codec,
//! knobs, and the seams to clock, randomness, network, disk and register.
//!
//! Roles meet only here. A role crate depends on this one and on no other role.
//!
//! ```text
//!  ids time range payload          words and numbers
//!  record block transaction        what clients commit and consumers get
//!  message/* wire                  what roles say to each other, and its bytes
//!  machine disk register           the seams: events in, outputs out
//!  knobs error note mark           limits, refusals, what oracles and metrics see
//!  prng ordered gather backoff     small tools of the machines
//! ```
#![forbid(unsafe_code)]

pub mod disk;
pub mod error;
mod ids;
mod payload;
mod prng;
#[cfg(feature = "quic")]
pub mod quic;
mod range;
mod time;

pub use error::{Class, Code, Refusal};
pub use ids::{
    Endpoint, Epoch, IdempotencyId, Incarnation, NodeId, Offset, Peer, Position, RequestId, Role,
    SegmentId, Sequence, StreamId, Version,
};
pub use payload::Payload;
pub use prng::Prng;
pub use range::{KeyRange, RangeEnd, RangeError, Ranges};
pub use time::{Time, WallTime};
