//! Refusals with stable codes, sorted by what the reader should do.

use core::fmt;

use rkyv::{Archive, Deserialize, Serialize};

/// What the reader of an error should do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// Do the same again, with fresh reads where there were any.
    Retry,
    /// Change the request: the same one fails again.
    FixRequest,
    /// Wait until somebody has acted or a recovery has ended, then do the same again.
    Wait,
    /// A newer epoch or owner has taken over: find it first.
    Fenced,
    /// Data is damaged: an operator must look.
    Corrupt,
    /// A bug in Millrace.
    Internal,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $number:literal $name:ident $text:literal $class:ident),* $(,)?) => {
        /// A stable code. Numbers and names are never reused.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* $name = $number),*
        }

        impl Code {
            /// Every code there is.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The number on the wire.
            #[must_use]
            pub const fn number(self) -> u16 {
                self as u16
            }

            /// The name that operators and scripts see.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// What the reader should do.
            #[must_use]
            pub const fn class(self) -> Class {
                match self { $(Self::$name => Class::$class),* }
            }

            /// The code of a number; an unknown one is [`Code::Internal`].
            #[must_use]
            pub const fn from_number(number: u16) -> Self {
                match number {
                    $($number => Self::$name,)*
                    _ => Self::Internal,
                }
            }
        }
    };
}

codes! {
    /// A read range was written since the read version.
    100 Conflict "conflict" Retry,
    /// The read version left the conflict window, or belongs to an earlier epoch.
    101 TooOld "too_old" Retry,
    /// A queue is at its limit.
    102 Overloaded "overloaded" Retry,
    /// An earlier commit of the same ordered lane failed; nothing of the lane after it commits.
    103 LaneBroken "lane_broken" Retry,
    /// A key is longer than `key_bytes_max`.
    200 KeyTooLong "key_too_long" FixRequest,
    /// A range begins after its end.
    201 RangeInverted "range_inverted" FixRequest,
    /// A transaction is larger than `transaction_bytes_max`.
    202 TransactionTooLarge "transaction_too_large" FixRequest,
    /// No stream of that id or name.
    203 UnknownStream "unknown_stream" FixRequest,
    /// A read version that has not been handed out yet.
    204 FutureVersion "future_version" FixRequest,
    /// Bytes that are no frame or no message.
    205 Malformed "malformed" FixRequest,
    /// A message type that this build does not know.
    206 Unsupported "unsupported" FixRequest,
    /// No common protocol version.
    207 ProtocolMismatch "protocol_mismatch" FixRequest,
    /// A frame larger than `frame_bytes_max`.
    208 FrameTooLarge "frame_too_large" FixRequest,
    /// A stream of that name exists.
    209 StreamExists "stream_exists" FixRequest,
    /// A name that is empty, too long, or has characters outside `[A-Za-z0-9._/-]`.
    210 BadName "bad_name" FixRequest,
    /// The records from that version on have been trimmed in part.
    211 Trimmed "trimmed" FixRequest,
    /// A write to a system stream that only the system may write.
    212 SystemStream "system_stream" FixRequest,
    /// More streams, ranges or transactions than a limit allows.
    213 LimitExceeded "limit_exceeded" FixRequest,
    /// A key from `ff` on, which only the system uses.
    214 SystemKey "system_key" FixRequest,
    /// The two sides belong to different clusters.
    215 WrongCluster "wrong_cluster" FixRequest,
    /// Two processes claim to be the same node, or a node is not the one that its address stands for.
    216 IdentityClash "identity_clash" FixRequest,
    /// Who claims to be a node has not shown a certificate of the nodes' CA.
    217 NotVouched "not_vouched" FixRequest,
    /// No node of that number is in the cluster.
    218 UnknownNode "unknown_node" FixRequest,
    /// The cluster can't do without the node: it is the only one that may lead, or holds the only copies.
    219 NodeNeeded "node_needed" FixRequest,
    /// The node was removed, and does not come back under its number.
    220 NodeRemoved "node_removed" FixRequest,
    /// The log's disk is full: trim, or make room.
    300 DiskFull "disk_full" Wait,
    /// No epoch is serving now.
    301 Recovering "recovering" Wait,
    /// No answer within the client's deadline.
    302 TimedOut "timed_out" Wait,
    /// The receiver belongs to another epoch.
    400 WrongEpoch "wrong_epoch" Fenced,
    /// The log server is locked for that epoch.
    401 Locked "locked" Fenced,
    /// The receiver does not play that role.
    402 NotHere "not_here" Fenced,
    /// A checksum does not fit its data.
    500 Corrupt "corrupt" Corrupt,
    /// A bug in Millrace.
    600 Internal "internal" Internal,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.number(), self.name())
    }
}

/// A refusal as it travels: a code, the numbers for people, and when to come again.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Archive, Serialize, Deserialize)]
pub struct Refusal {
    number: u16,
    /// For people: names and numbers, no secrets.
    pub detail: String,
    /// When to come again, in milliseconds; 0 when the code's class says enough.
    pub retry_after_ms: u32,
}

impl Refusal {
    /// A refusal without a hint when to come again.
    #[must_use]
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { number: code.number(), detail: detail.into(), retry_after_ms: 0 }
    }

    /// A refusal with a hint when to come again.
    #[must_use]
    pub fn later(code: Code, detail: impl Into<String>, retry_after_ms: u32) -> Self {
        Self { retry_after_ms, ..Self::new(code, detail) }
    }

    /// The code.
    #[must_use]
    pub const fn code(&self) -> Code {
        Code::from_number(self.number)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code(), self.detail)
    }
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_round_trip() {
        for pair in Code::ALL.windows(2) {
            assert!(pair[0].number() < pair[1].number(), "{} {}", pair[0], pair[1]);
        }
        for code in Code::ALL {
            assert_eq!(Code::from_number(code.number()), *code);
        }
        assert_eq!(Code::from_number(9999), Code::Internal);
    }
}
