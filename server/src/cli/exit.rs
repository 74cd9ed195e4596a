//! Exit codes: what a script should do with a command that did not go well.

use std::process::ExitCode;

use common::{Class, Code};

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Exit {
    /// All is well.
    Done = 0,
    /// The answer is no: a wrong row, a conflict, a finding.
    No = 1,
    /// The command line is wrong; the parser says so, too.
    Usage = 2,
    /// The request is refused as it is: fix it.
    Refused = 3,
    /// Not now: no server, no serving epoch, overloaded, disk full. Try again.
    Unavailable = 4,
    /// Data is damaged.
    Corrupt = 5,
    /// A newer epoch or owner has taken over.
    Fenced = 6,
    /// Anything else.
    Failed = 70,
}

/// A failure of the command line's own, which knows its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct Failure {
    /// How the command ends.
    pub(crate) exit: Exit,
    what: String,
}

impl Failure {
    /// The command line is wrong.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, what: what.into() }
    }

    /// The request is wrong.
    pub(crate) fn refused(what: impl Into<String>) -> Self {
        Self { exit: Exit::Refused, what: what.into() }
    }

    /// It may work later.
    pub(crate) fn unavailable(what: impl Into<String>) -> Self {
        Self { exit: Exit::Unavailable, what: what.into() }
    }
}

/// What `--help` ends with.
pub(crate) const HELP: &str = "\
Example:
  millrace quickstart -o json

Exit codes:
  0   done
  1   the answer is no: a wrong row, a conflict, a finding of verify
  2   the command line is wrong
  3   refused as it is (unknown stream, key too long, ...): fix the request
  4   not now (no server, recovering, overloaded, disk full): try again
  5   data is damaged
  6   a newer epoch or owner has taken over
  70  anything else";

impl Exit {
    /// The exit code of an error code.
    #[must_use]
    pub(crate) const fn of(code: Code) -> Self {
        match code.class() {
            Class::Retry if matches!(code, Code::Conflict | Code::TooOld | Code::LaneBroken) => {
                Self::No
            }
            Class::Retry | Class::Wait => Self::Unavailable,
            Class::FixRequest => Self::Refused,
            Class::Fenced => Self::Fenced,
            Class::Corrupt => Self::Corrupt,
            Class::Internal => Self::Failed,
        }
    }

    /// The exit code of a node's halt.
    #[must_use]
    pub(crate) fn of_halt(reason: &str) -> Self {
        match reason {
            "stopped" => Self::Done,
            "identity_clash" => Self::Refused,
            "corrupt_log" | "corrupt_register" | "corrupt_meta" | "foreign_log" => Self::Corrupt,
            _ => Self::Failed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
