//! What roles, clients and nodes say to each other.
//!
//! ```text
//! client  --Commit, ReadVersion--> proxy      --CommitReply, ReadVersionReply--> client
//! proxy   --VersionRequest--> sequencer       --VersionReply--> proxy
//! proxy   --Resolve, Settle--> resolver       --Resolved--> proxy
//! proxy   --Push, Announce, Confirm--> log    --Durable, Confirmed--> proxy
//! client  --Pull, Trim, Describe, FindId--> log --Pulled, Trimmed, Described, IdFound--> client
//! leader  --CatchUp--> absent log server      --CaughtUp--> leader
//! absent  --Copy--> log server                --Copied--> absent
//! log     --FetchBlock--> log server          --FetchedBlock--> log
//! leader  --Beat, HandOver--> candidate
//! leader  --Lock--> log, --Recruit, Serve--> node --Locked, Recruited--> leader
//! client  --FindCluster, Status--> node       --ClusterView, StatusReply--> client
//! client  --ChangeMember--> leader            --MemberChanged--> client
//! any     --Refused--> any
//! ```
//!
//! A message type is frozen once released; a changed one gets a new number (golden-bytes tests in
//! [`crate::wire`]). Bulk bytes are no part of the rkyv body: they travel behind it as a [`Payload`] and are
//! never copied by passing a message on.

mod client;
mod copy;
mod mend;
mod pipeline;
mod recovery;

pub use client::{
    ChangeMember, ClusterView, CommitKind, CommitOutcome, CommitReply, CommitRequest, Describe,
    Described, FindCluster, FindId, FoundId, FoundSection, IdFound, LaneOrder, MemberChanged,
    NodeAddress, Pull, Pulled, PulledBlock, PulledVersion, ReadVersionReply, ReadVersionRequest,
    Refused, SectionEntry, Status, StatusReply, StreamState, Trim, Trimmed,
};
pub use copy::{CatchUp, CaughtUp, Copied, CopiedTrim, Copy};
pub use mend::{FetchBlock, FetchedBlock};
pub use pipeline::{
    Announce, Confirm, Confirmed, Durable, LogState, Push, PushAck, PushBlock, Resolve,
    ResolveTransaction, Resolved, Settle, Settlement, Verdict, VersionReply, VersionRequest,
};
pub use recovery::{
    Beat, EpochPlan, HandOver, Hello, Lock, Locked, NodeHello, Recruit, Recruited, ResolverShare,
    Serve, Serving,
};

use bytes::Bytes;
use rkyv::rancor::Error;

use crate::{Payload, RequestId};

/// How a message body lies behind a frame header.
pub(crate) trait Body: Sized {
    fn payload(&self) -> Option<&Payload> {
        None
    }

    fn set_payload(&mut self, _payload: Payload) {}
}

/// How a message holds its body: a large one in a box, so that the others are moved cheaply.
macro_rules! held {
    ($name:ident) => { $name };
    ($name:ident boxed) => { Box<$name> };
}

macro_rules! messages {
    ($($number:literal $name:ident $lane:ident $($boxed:ident)?),* $(,)?) => {
        /// Any message.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum Message {
            $(
                // A struct of that name: `Copy` is a derive, too.
                #[doc = concat!("See [`", stringify!($name), "`](struct@", stringify!($name), ").")]
                $name(held!($name $($boxed)?))
            ),*
        }

        $(impl From<$name> for Message {
            fn from(message: $name) -> Self {
                Self::$name(message.into())
            }
        })*

        impl Message {
            /// The frozen number of the message's type.
            #[must_use]
            pub const fn number(&self) -> u16 {
                match self { $(Self::$name(_) => $number),* }
            }

            /// The type's name, for traces.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$name(_) => stringify!($name)),* }
            }

            /// Which of a connection's streams the message travels on.
            #[must_use]
            pub const fn lane(&self) -> MessageLane {
                match self { $(Self::$name(_) => MessageLane::$lane),* }
            }

            /// Appends the body to what stands in `out` already.
            pub(crate) fn encode_body(&self, out: Vec<u8>) -> Vec<u8> {
                match self {
                    $(Self::$name(body) => {
                        let body: &$name = body;
                        rkyv::api::high::to_bytes_in::<_, Error>(body, out)
                    })*
                }
                .expect("plain data encodes")
            }

            pub(crate) fn payload(&self) -> Option<&Payload> {
                match self { $(Self::$name(body) => body.payload()),* }
            }

            /// `None` for an unknown number.
            pub(crate) fn decode_body(
                number: u16,
                body: &[u8],
                payload: Bytes,
            ) -> Option<Result<Self, Error>> {
                Some(match number {
                    $($number => rkyv::from_bytes::<$name, Error>(body).map(|mut message| {
                        message.set_payload(payload.into());
                        message.into()
                    }),)*
                    _ => return None,
                })
            }
        }
    };
}

/// The streams of a connection: bulk reads don't delay commits, commits don't delay control.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MessageLane {
    /// Small and urgent: versions, locks, status.
    Control,
    /// Commits, pushes and their answers.
    Commit,
    /// Pulls and their answers.
    Pull,
}

messages! {
    1 CommitRequest Commit boxed,
    2 CommitReply Commit,
    3 ReadVersionRequest Commit,
    4 ReadVersionReply Commit,
    10 VersionRequest Control,
    11 VersionReply Control,
    // 20 and 21 were these two before there were settlements.
    22 Resolve Commit,
    23 Resolved Commit,
    24 Settle Commit,
    30 Push Commit,
    31 Durable Commit,
    32 Announce Control,
    33 Confirm Control,
    34 Confirmed Control,
    40 Pull Pull,
    41 Pulled Pull,
    42 Trim Control,
    43 Trimmed Control,
    44 Describe Control,
    45 Described Control,
    46 FindId Control,
    47 IdFound Control,
    50 Lock Control,
    51 Locked Control,
    52 Recruit Control boxed,
    53 Recruited Control,
    54 Serve Control boxed,
    55 Serving Control,
    56 Beat Control,
    57 HandOver Control,
    58 CatchUp Control boxed,
    59 CaughtUp Control,
    80 Copy Pull,
    81 Copied Pull boxed,
    82 FetchBlock Pull,
    83 FetchedBlock Pull boxed,
    60 FindCluster Control,
    61 ClusterView Control boxed,
    62 Status Control,
    63 StatusReply Control,
    64 ChangeMember Control,
    65 MemberChanged Control,
    70 Refused Control,
    90 Hello Control,
    91 NodeHello Control,
}

impl Message {
    /// The request that an answer to a client belongs to; `None` for everything else.
    #[must_use]
    pub const fn answers(&self) -> Option<RequestId> {
        Some(match self {
            Self::CommitReply(reply) => reply.request,
            Self::ReadVersionReply(reply) => reply.request,
            Self::Pulled(reply) => reply.request,
            Self::Trimmed(reply) => reply.request,
            Self::Described(reply) => reply.request,
            Self::IdFound(reply) => reply.request,
            Self::ClusterView(reply) => reply.request,
            Self::StatusReply(reply) => reply.request,
            Self::MemberChanged(reply) => reply.request,
            Self::Refused(reply) => reply.request,
            _ => return None,
        })
    }
}
