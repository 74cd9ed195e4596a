//! What is under way in a small world, and what can happen to it.

use core::fmt;

use common::register::{RegisterAnswer, RegisterOp, RegisterRequest};
use common::wire::Envelope;
use common::{NodeId, Peer};
use node::TimerKey;

use crate::disk::{Crash, Ticket};

/// Something under way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Letter {
    /// A message to one life of a node.
    Message { to: Peer, envelope: Envelope },
    /// A node is to learn that a life of its neighbour is over.
    Down { to: Peer, peer: Peer },
    /// A question to the register. The asker that is gone, or was told that nobody knows, gets no answer; a
    /// write may be carried out all the same.
    Ask { from: Peer, request: RegisterRequest, is_answered: bool },
    /// The register's answer.
    Answer { to: Peer, answer: RegisterAnswer },
}

impl Letter {
    /// The life that it is for; `None` for what is for the register.
    pub(super) const fn receiver(&self) -> Option<Peer> {
        match self {
            Self::Message { to, .. } | Self::Down { to, .. } | Self::Answer { to, .. } => Some(*to),
            Self::Ask { .. } => None,
        }
    }

    /// Whether the network may lose it or bring it twice. News of a break and answers of the register only
    /// come late.
    pub(super) const fn is_message(&self) -> bool {
        matches!(self, Self::Message { .. })
    }

    pub(super) const fn is_open_question(&self) -> bool {
        matches!(self, Self::Ask { is_answered: true, .. })
    }

    pub(super) fn is_write(&self) -> bool {
        matches!(self, Self::Ask { request, .. } if matches!(request.op, RegisterOp::Cas { .. }))
    }
}

impl fmt::Display for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message { to, envelope } => {
                let Envelope { from, to: role, epoch, message } = envelope;
                let text: String = format!("{message:?}").chars().take(160).collect();
                write!(f, "{to:?}/{:?} <- {from:?} {epoch} {text}", role.role)
            }
            Self::Down { to, peer } => write!(f, "{to:?} <- PeerDown({peer:?})"),
            Self::Ask { from, request, is_answered } => {
                let what = if self.is_write() { "compare-and-set" } else { "read" };
                let silent = if *is_answered { "" } else { ", unanswered" };
                write!(f, "register <- {from:?} {what} {}{silent}", request.id)
            }
            Self::Answer { to, answer } => {
                let text: String = format!("{:?}", answer.outcome).chars().take(40).collect();
                write!(f, "{to:?} <- register {} {text}", answer.id)
            }
        }
    }
}

/// A letter's name: its digest.
pub(super) type Name = u128;

/// What can happen next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Choice {
    /// A letter arrives.
    Deliver(Name),
    /// A letter arrives and will arrive again.
    Double(Name),
    /// A letter is lost.
    Drop(Name),
    /// The asker of the register is told that nobody knows.
    Unsure(Name),
    /// A timer of a node runs out: on time, or late.
    Fire(NodeId, TimerKey),
    /// The disk carries out a request.
    Disk(NodeId, Ticket),
    /// A node's process ends and the next life begins. A power cut draws what is left by the number.
    Crash(NodeId, Crash, u64),
}

/// How often each kind of trouble may still come.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct Trouble {
    /// Messages that are lost.
    pub drops: u8,
    /// Messages that come twice.
    pub doubles: u8,
    /// Answers of the register that say nothing.
    pub unsures: u8,
    /// Timers that run out before everything under way has arrived.
    pub timers: u8,
    /// Lives that end.
    pub crashes: u8,
}
