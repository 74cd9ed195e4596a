//! Errors by what the reader should do.

use common::{Class, Code, Refusal};
use thiserror::Error as ThisError;

/// Why a call did not do what was asked. Whatever it is but [`Error::Unknown`], a commit that ends with it
/// has not committed and never will.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[must_use]
pub enum Error {
    /// Do the same again, with fresh reads where there were any.
    #[error("{refusal}")]
    Retry {
        /// Why.
        refusal: Refusal,
        /// Indexes of the read ranges that conflicted, when the transaction asked for a report.
        conflicts: Vec<u32>,
    },
    /// Change the request: the same one fails again.
    #[error("{0}")]
    FixRequest(Refusal),
    /// Wait until somebody has acted or a recovery has ended, then do the same again.
    #[error("{0}")]
    Wait(Refusal),
    /// Data is damaged: an operator must look.
    #[error("{0}")]
    Corrupt(Refusal),
    /// A bug in Millrace.
    #[error("{0}")]
    Internal(Refusal),
    /// The commit may or may not have happened: it carried no idempotency id, or the cluster has forgotten
    /// the id.
    #[error("the outcome is unknown: {0}")]
    Unknown(Refusal),
}

impl Error {
    /// An error of a code's own class.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Refusal::new(code, detail).into()
    }

    /// The refusal inside.
    #[must_use]
    pub const fn refusal(&self) -> &Refusal {
        match self {
            Self::Retry { refusal, .. }
            | Self::FixRequest(refusal)
            | Self::Wait(refusal)
            | Self::Corrupt(refusal)
            | Self::Internal(refusal)
            | Self::Unknown(refusal) => refusal,
        }
    }

    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.refusal().code()
    }

    /// Whether the same call may succeed later. Never for an unknown outcome: doing it again could do it
    /// twice.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Retry { .. } | Self::Wait(_))
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal.code().class() {
            Class::Retry => Self::Retry { refusal, conflicts: Vec::new() },
            Class::FixRequest => Self::FixRequest(refusal),
            // The session looks for the newer epoch by itself: for the caller it is only a matter of time.
            Class::Wait | Class::Fenced => Self::Wait(refusal),
            Class::Corrupt => Self::Corrupt(refusal),
            Class::Internal => Self::Internal(refusal),
        }
    }
}
