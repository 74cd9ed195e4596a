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
//!  cover                           sets of keys; a proxy's own writes
//!  quic                            frames between processes (feature `quic`, shell code)
//! ```
#![forbid(unsafe_code)]

mod backoff;
pub mod catalog;
mod cover;
pub mod disk;
pub mod error;
mod gather;
mod ids;
mod knobs;
pub mod machine;
mod mark;
pub mod membership;
pub mod message;
mod note;
mod ordered;
mod payload;
pub mod placement;
mod plant;
mod prng;
#[cfg(feature = "quic")]
pub mod quic;
mod range;
pub mod record;
pub mod register;
mod time;
pub mod transaction;
pub mod wire;

pub use backoff::Backoff;
pub use cover::{Cover, OwnWrites};
pub use error::{Class, Code, Refusal};
pub use gather::{Gather, Gathered};
pub use ids::{
    Endpoint, Epoch, IdempotencyId, Incarnation, NodeId, Offset, Peer, Position, RequestId, Role,
    SegmentId, Sequence, StreamId, Version,
};
pub use knobs::{FENCE_JUMP_VERSIONS, Knobs, LIFE_VERSIONS_MAX};
pub use machine::{Cx, Event, Halt, Output, Timer};
pub use mark::{Mark, Rarity};
pub use message::Message;
pub use note::Note;
pub use ordered::{Offer, Ordered};
pub use payload::Payload;
pub use plant::{Plant, Plants};
pub use prng::Prng;
pub use range::{KeyRange, RangeEnd, RangeError, Ranges};
pub use time::{Time, WallTime};
