//! What a node may say of its disk: exactly what the simulator did to it.
//!
//! | the disk | the node | otherwise |
//! |---|---|---|
//! | whole, its own | never calls it damaged | `halted`, `O7.whole` |
//! | harmed | may halt as `corrupt_log`, or refuse a pull as `corrupt` | silence shows elsewhere: `O5.lost`, `O10`, `O11` |
//! | another node's | halts as `foreign_log` | `O7.foreign` |
//! | with a failed barrier | halts | `I7.durable` |
//!
//! Log servers mend single blocks from each other (`crate::mends`). What ends a node the simulator puts
//! right, as an operator would.

use common::machine::Halt;
use common::{Endpoint, Note, Peer};

use crate::oracle::Violation;

/// What the simulator did to a node's disk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Condition {
    /// Something on it reads otherwise than it should, or did when a read began.
    pub is_harmed: bool,
    /// It is a copy of another node's.
    pub is_foreign: bool,
}

/// What an operator does about a halt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Remedy {
    /// Turns the machine off: what a failed barrier left in the cache is not to be trusted.
    PowerOff,
    /// Puts back what was harmed.
    Repair,
    /// Gives the node its own disk.
    ReturnDisk,
}

/// Judges a halt.
///
/// # Errors
/// `halted`: this run gave it no reason.
pub fn judge_halt(peer: Peer, halt: &Halt, condition: Condition) -> Result<Remedy, Violation> {
    match halt.reason {
        "fsync_failed" | "disk_error" => Ok(Remedy::PowerOff),
        "foreign_log" if condition.is_foreign => Ok(Remedy::ReturnDisk),
        "corrupt_log" | "open_failed" if condition.is_harmed => Ok(Remedy::Repair),
        _ => Err(Violation { rule: "halted", detail: format!("{peer:?}: {halt:?}") }),
    }
}

/// Judges what a log server says of its disk.
///
/// # Errors
/// `O7.foreign`: it goes on with another node's log. `O7.whole`: it calls whole data damaged.
pub fn judge_note(from: Endpoint, note: &Note, condition: Condition) -> Result<(), Violation> {
    match note {
        Note::Opened { .. } if condition.is_foreign => {
            let detail = format!("{from:?} opens the log of another node");
            Err(Violation { rule: "O7.foreign", detail })
        }
        Note::Warning { code: "corrupt_block", detail } if !condition.is_harmed => {
            let detail = format!("{from:?} calls whole data damaged: {detail}");
            Err(Violation { rule: "O7.whole", detail })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use common::{Incarnation, NodeId, Role, Version};

    use super::*;

    const PEER: Peer = Peer { node: NodeId(1), incarnation: Incarnation(2) };
    const WHOLE: Condition = Condition { is_harmed: false, is_foreign: false };
    const HARMED: Condition = Condition { is_harmed: true, is_foreign: false };
    const FOREIGN: Condition = Condition { is_harmed: false, is_foreign: true };

    fn halt(reason: &'static str, condition: Condition) -> Result<Remedy, &'static str> {
        let halt = Halt { reason, detail: String::new() };
        judge_halt(PEER, &halt, condition).map_err(|violation| violation.rule)
    }

    fn note(note: Note, condition: Condition) -> Result<(), &'static str> {
        let from = PEER.endpoint(Role::LogServer);
        judge_note(from, &note, condition).map_err(|violation| violation.rule)
    }

    #[test]
    fn a_halt_needs_its_own_reason() {
        assert_eq!(halt("fsync_failed", WHOLE), Ok(Remedy::PowerOff));
        assert_eq!(halt("corrupt_log", HARMED), Ok(Remedy::Repair));
        assert_eq!(halt("foreign_log", FOREIGN), Ok(Remedy::ReturnDisk));
        for (reason, condition) in [
            ("corrupt_log", WHOLE),
            ("corrupt_log", FOREIGN),
            ("foreign_log", HARMED),
            ("forked_history", HARMED),
            ("log_lost", HARMED),
        ] {
            assert_eq!(halt(reason, condition), Err("halted"), "{reason} {condition:?}");
        }
    }

    #[test]
    fn another_nodes_log_is_never_opened_and_whole_data_never_called_damaged() {
        let opened = || Note::Opened { durable: Version(1), torn_frames: 0, segments: 1 };
        let damaged = || Note::Warning { code: "corrupt_block", detail: String::new() };
        assert_eq!(note(opened(), WHOLE), Ok(()));
        assert_eq!(note(opened(), HARMED), Ok(()));
        assert_eq!(note(opened(), FOREIGN), Err("O7.foreign"));
        assert_eq!(note(damaged(), HARMED), Ok(()));
        assert_eq!(note(damaged(), WHOLE), Err("O7.whole"));
    }
}
