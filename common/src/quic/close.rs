//! Why a connection ends, and what the two sides say to each other about it.
//!
//! ```text
//!  close(code, reason) ----- QUIC application close: code, reason ----> PeerClosed { code, reason }
//!  frame too long, bad lane - PROTOCOL, what was wrong ---------------> PeerClosed { PROTOCOL, .. }
//!   `-> Protocol(what)
//!  no common version -------- PROTOCOL_MISMATCH, what we speak -------> ProtocolMismatch { theirs }
//!  certificate refused ------ TLS alert ------------------------------> Tls(..), at both ends
//!  SIGKILL, cable cut ------- nothing --------------------------------> IdleTimeout
//!  SIGKILL, started again --- a token that only it can know ----------> PeerGone
//! ```

use core::fmt;

use quinn::{ConnectionError, TransportErrorCode, VarInt};

use crate::Code;

/// TLS alert `no_application_protocol`.
const ALERT_NO_PROTOCOL: u8 = 120;
/// QUIC puts TLS alerts at this offset of its own error codes.
const CRYPTO_ERRORS: core::ops::Range<u64> = 0x100..0x200;
/// Bytes of a peer's reason that are kept.
const REASON_BYTES_MAX: usize = 512;

/// Why a side closes, as a number on the wire. Numbers are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CloseCode(pub u32);

impl CloseCode {
    /// The process or the endpoint goes away in order.
    pub const SHUTDOWN: Self = Self(1);
    /// The peer broke the framing.
    pub const PROTOCOL: Self = Self(2);
    /// No common protocol version; the reason lists what the closing side speaks.
    pub const PROTOCOL_MISMATCH: Self = Self(3);
    /// The connection is of no use any more: a newer one replaces it, or nobody needs it.
    pub const REPLACED: Self = Self(4);
    /// The peer is not who it should be: another cluster, another incarnation.
    pub const IDENTITY: Self = Self(5);
    /// The closing side found a bug of its own.
    pub const INTERNAL: Self = Self(6);

    /// A refusal: from [`REFUSALS`](Self::REFUSALS) on the numbers are those of [`Code`].
    #[must_use]
    pub const fn refusal(code: Code) -> Self {
        assert!(code.number() as u32 >= Self::REFUSALS, "below are the transport's own");
        Self(code.number() as u32)
    }

    /// Where the numbers of refusals begin.
    pub const REFUSALS: u32 = 100;

    /// The refusal that this is.
    #[must_use]
    pub fn code(self) -> Option<Code> {
        let is_refusal = |code: &&Code| u32::from(code.number()) == self.0;
        Code::ALL.iter().find(is_refusal).copied()
    }
}

impl fmt::Display for CloseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::SHUTDOWN => f.write_str("shutdown"),
            Self::PROTOCOL => f.write_str("protocol"),
            Self::PROTOCOL_MISMATCH => f.write_str("protocol mismatch"),
            Self::REPLACED => f.write_str("replaced"),
            Self::IDENTITY => f.write_str("identity"),
            Self::INTERNAL => f.write_str("internal"),
            Self(other) => match self.code() {
                Some(code) => f.write_str(code.name()),
                None => write!(f, "code {other}"),
            },
        }
    }
}

/// Why a connection is over.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer closed it and said why.
    #[error("closed by the peer: {code}: {reason}")]
    PeerClosed {
        /// Its code.
        code: CloseCode,
        /// Its words, shortened.
        reason: String,
    },
    /// The peer does not know the connection any more: it has restarted.
    #[error("the peer is gone: it does not know this connection any more")]
    PeerGone,
    /// The peer has been silent for [`Options::idle`](super::Options::idle): dead, hung, or cut
    /// off.
    #[error("the peer has been silent for too long")]
    IdleTimeout,
    /// The peer takes no more connections.
    #[error("the peer takes no more connections")]
    Refused,
    /// The peer broke the framing, or QUIC itself.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// The two sides have no protocol version in common.
    #[error("no common protocol: this side speaks {ours}, the peer {theirs}")]
    ProtocolMismatch {
        /// What this side speaks, separated by commas.
        ours: String,
        /// What the peer speaks; `another protocol` where it could not say.
        theirs: String,
    },
    /// A certificate was refused, by this side or by the peer.
    #[error("TLS: {0}")]
    Tls(String),
    /// This side closed it.
    #[error("closed by this side")]
    Local,
    /// A bug in this transport.
    #[error("bug in the transport: {0}")]
    Internal(String),
}

impl CloseReason {
    pub(super) fn protocol(what: impl fmt::Display) -> Self {
        Self::Protocol(what.to_string())
    }

    /// What quinn says, in our words. `ours` is what this side speaks.
    pub(super) fn from_quinn(error: &ConnectionError, ours: &[String]) -> Self {
        match error {
            ConnectionError::TransportError(error) => {
                Self::from_transport(u64::from(error.code), &error.reason, ours)
            }
            ConnectionError::ConnectionClosed(close) => {
                if close.error_code == TransportErrorCode::CONNECTION_REFUSED {
                    return Self::Refused;
                }
                let code = u64::from(close.error_code);
                let reason = shorten(&close.reason);
                Self::from_transport(code, &format!("refused by the peer: {reason}"), ours)
            }
            ConnectionError::ApplicationClosed(close) => {
                let code = CloseCode(u32::try_from(close.error_code.into_inner()).unwrap_or(0));
                let reason = shorten(&close.reason);
                if code == CloseCode::PROTOCOL_MISMATCH {
                    return Self::ProtocolMismatch { ours: ours.join(","), theirs: reason };
                }
                Self::PeerClosed { code, reason }
            }
            ConnectionError::Reset => Self::PeerGone,
            ConnectionError::TimedOut => Self::IdleTimeout,
            ConnectionError::LocallyClosed | ConnectionError::CidsExhausted => Self::Local,
            ConnectionError::VersionMismatch => Self::protocol("no common QUIC version"),
        }
    }

    fn from_transport(code: u64, reason: &str, ours: &[String]) -> Self {
        if !CRYPTO_ERRORS.contains(&code) {
            return Self::Protocol(format!("QUIC error {code:#x}: {reason}"));
        }
        let alert = (code - CRYPTO_ERRORS.start) as u8;
        if alert == ALERT_NO_PROTOCOL {
            let theirs = "another protocol".to_owned();
            return Self::ProtocolMismatch { ours: ours.join(","), theirs };
        }
        Self::Tls(format!("alert {alert}: {reason}"))
    }
}

impl From<CloseCode> for VarInt {
    fn from(code: CloseCode) -> Self {
        Self::from_u32(code.0)
    }
}

fn shorten(reason: &[u8]) -> String {
    String::from_utf8_lossy(&reason[..reason.len().min(REASON_BYTES_MAX)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quinn_errors_become_typed_reasons() {
        let ours = ["millrace/1".to_owned()];
        let of = |error| CloseReason::from_quinn(&error, &ours);
        assert_eq!(of(ConnectionError::TimedOut), CloseReason::IdleTimeout);
        assert_eq!(of(ConnectionError::Reset), CloseReason::PeerGone);
        assert_eq!(of(ConnectionError::LocallyClosed), CloseReason::Local);
        let application = |code: CloseCode, reason: &'static str| {
            ConnectionError::ApplicationClosed(quinn::ApplicationClose {
                error_code: code.into(),
                reason: bytes::Bytes::from_static(reason.as_bytes()),
            })
        };
        assert_eq!(
            of(application(CloseCode::SHUTDOWN, "bye")),
            CloseReason::PeerClosed { code: CloseCode::SHUTDOWN, reason: "bye".to_owned() }
        );
        assert_eq!(
            of(application(CloseCode::PROTOCOL_MISMATCH, "millrace/7")),
            CloseReason::ProtocolMismatch {
                ours: "millrace/1".to_owned(),
                theirs: "millrace/7".to_owned()
            }
        );
    }

    #[test]
    fn a_long_reason_is_cut() {
        assert_eq!(shorten(&[b'x'; 2000]).len(), REASON_BYTES_MAX);
    }
}
