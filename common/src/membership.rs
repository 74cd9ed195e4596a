//! Who sits in which seat of the log, and which nodes are on their way out. The register keeps it.
//!
//! ```text
//!  seat 2:  node-2 ------------ lost, drained or removed: node-5 is its heir --------- node-5 sits there
//!           placed by its seat  node-2 keeps the seat while node-5 copies its share    by the very same seat
//! ```
//!
//! Placement knows a log server by its seat: the number of the node that sat there first. So an heir takes
//! over exactly the share of the one before, and nothing moves between the others.
//!
//! # Invariants
//! - A node sits at most once, ever: what an heir finds on its disk is of this one seat. Who has left a seat
//!   plays other roles, and gets no seat again.
//! - A removed node does not come back under its number.

use rkyv::{Archive, Deserialize, Serialize};

use crate::NodeId;

/// Heirs of seats that the register remembers, and nodes that were removed, of each at most.
pub const MEMBERS_PAST_MAX: usize = 1024;

/// What placement knows a log server by: the number of the node that sat there first.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Archive, Serialize, Deserialize,
)]
pub struct Seat(pub u64);

/// A node in a seat that was another's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub struct Sitting {
    /// The seat.
    pub seat: Seat,
    /// Who sits there, or copies what it takes to sit there.
    pub node: NodeId,
}

/// The seats that are not their first node's any more; everybody else sits in its own.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub struct Seats(Vec<Sitting>);

impl Seats {
    /// Everybody sits in its own.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Where a log server sits, or will.
    #[must_use]
    pub fn seat_of(&self, node: NodeId) -> Seat {
        let sitting = self.0.iter().find(|sitting| sitting.node == node);
        sitting.map_or(Seat(node.0), |sitting| sitting.seat)
    }

    /// Who sits, or is to sit, where `node` did.
    #[must_use]
    pub fn heir(&self, node: NodeId) -> Option<NodeId> {
        let seat = self.seat_of(node);
        let last = self.0.iter().rev().find(|sitting| sitting.seat == seat)?;
        (last.node != node).then_some(last.node)
    }

    /// Whether a node was ever named for a seat that was another's, or has left its own.
    #[must_use]
    pub fn has_moved(&self, node: NodeId) -> bool {
        self.0.iter().any(|sitting| sitting.node == node || sitting.seat == Seat(node.0))
    }

    /// What those need to know who look only at `nodes`.
    #[must_use]
    pub fn among(&self, nodes: &[NodeId]) -> Self {
        Self(self.0.iter().filter(|sitting| nodes.contains(&sitting.node)).copied().collect())
    }

    /// The seats that are not their first node's, in the order in which they were given.
    #[must_use]
    pub fn sittings(&self) -> &[Sitting] {
        &self.0
    }

    /// Names the heir of a seat.
    fn give(&mut self, sitting: Sitting) {
        assert!(!self.has_moved(sitting.node), "{} sits once, in {:?}", sitting.node, self.0);
        assert_ne!(Seat(sitting.node.0), sitting.seat, "a seat's first node is not its heir");
        self.0.push(sitting);
    }
}

/// What was decided about nodes.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub struct Membership {
    /// Who sits where.
    pub seats: Seats,
    /// Who shall play no role until it is restored; it keeps its seat until its heir has copied its share.
    pub drained: Vec<NodeId>,
    /// Who never comes back.
    pub removed: Vec<NodeId>,
}

/// What can be decided about a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Archive, Serialize, Deserialize)]
pub enum MemberChange {
    /// It shall play no role for a while.
    Drain,
    /// It may play roles again.
    Restore,
    /// It never comes back.
    Remove,
}

impl MemberChange {
    /// For people.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Restore => "restore",
            Self::Remove => "remove",
        }
    }
}

impl Membership {
    /// Whether a node shall play no role.
    #[must_use]
    pub fn is_leaving(&self, node: NodeId) -> bool {
        self.drained.contains(&node) || self.removed.contains(&node)
    }

    /// Whether `change` of `node` is what is decided already.
    #[must_use]
    pub fn is_decided(&self, node: NodeId, change: MemberChange) -> bool {
        match change {
            MemberChange::Drain => self.is_leaving(node),
            MemberChange::Restore => !self.is_leaving(node),
            MemberChange::Remove => self.removed.contains(&node),
        }
    }

    /// Decides about a node. A removed one stays removed.
    pub fn decide(&mut self, node: NodeId, change: MemberChange) {
        if self.removed.contains(&node) {
            return;
        }
        self.drained.retain(|other| *other != node);
        match change {
            MemberChange::Drain => self.drained.push(node),
            MemberChange::Restore => {}
            MemberChange::Remove => self.removed.push(node),
        }
        assert!(
            change == MemberChange::Restore || self.is_leaving(node),
            "{node} leaves: {self:?}"
        );
    }

    /// Names the heir of the seat that `node` sits in.
    pub fn give_seat(&mut self, node: NodeId, heir: NodeId) {
        assert!(!self.is_leaving(heir), "{heir} leaves, and inherits from {node}");
        self.seats.give(Sitting { seat: self.seats.seat_of(node), node: heir });
    }

    /// Whether the register has no room for more.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let counts = [self.seats.0.len(), self.drained.len(), self.removed.len()];
        counts.iter().any(|count| *count >= MEMBERS_PAST_MAX)
    }

    /// The order that every membership keeps.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        let nodes: std::collections::BTreeSet<NodeId> =
            self.seats.0.iter().map(|sitting| sitting.node).collect();
        if nodes.len() != self.seats.0.len() {
            return Err(format!("a node sits twice: {:?}", self.seats.0));
        }
        match self.drained.iter().find(|node| self.removed.contains(node)) {
            Some(node) => Err(format!("{node} is drained and removed")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_pass_from_heir_to_heir() {
        let mut membership = Membership::default();
        assert_eq!(membership.seats.seat_of(NodeId(2)), Seat(2));
        assert_eq!(membership.seats.heir(NodeId(2)), None);
        membership.give_seat(NodeId(2), NodeId(5));
        assert_eq!(membership.seats.seat_of(NodeId(5)), Seat(2));
        assert_eq!(membership.seats.heir(NodeId(2)), Some(NodeId(5)));
        assert_eq!(membership.seats.heir(NodeId(5)), None);
        membership.give_seat(NodeId(5), NodeId(6));
        assert_eq!(membership.seats.heir(NodeId(2)), Some(NodeId(6)), "the last one counts");
        assert_eq!(membership.seats.heir(NodeId(5)), Some(NodeId(6)));
        assert_eq!(membership.seats.heir(NodeId(6)), None);
        assert!([2, 5, 6].iter().all(|node| membership.seats.has_moved(NodeId(*node))));
        assert_eq!(membership.seats.among(&[NodeId(1), NodeId(6)]).sittings().len(), 1);
        membership.check().unwrap();
    }

    #[test]
    #[should_panic(expected = "sits once")]
    fn nobody_sits_twice() {
        let mut membership = Membership::default();
        membership.give_seat(NodeId(2), NodeId(5));
        membership.give_seat(NodeId(3), NodeId(5));
    }

    #[test]
    fn a_removed_node_stays_removed() {
        let mut membership = Membership::default();
        membership.decide(NodeId(1), MemberChange::Drain);
        assert!(membership.is_decided(NodeId(1), MemberChange::Drain));
        membership.decide(NodeId(1), MemberChange::Restore);
        assert!(!membership.is_leaving(NodeId(1)));
        membership.decide(NodeId(1), MemberChange::Remove);
        membership.decide(NodeId(1), MemberChange::Restore);
        assert!(membership.is_decided(NodeId(1), MemberChange::Remove));
        assert!(!membership.is_decided(NodeId(1), MemberChange::Restore));
        membership.check().unwrap();
    }
}
