//! One thing for each node, found by the node's number: the simulator's innermost lookups.
//!
//! ```text
//! NodeId   0    1    2   ..   100   101
//!        [ - | n1 | n2 | - | c100 | c101 ]     a run's numbers are small: nodes from 1, clients from 100
//! ```

use common::NodeId;

/// Numbers of nodes lie below this: the table is as long as the highest one.
const NODES_MAX: usize = 1 << 12;

/// A map from nodes, in the order of their numbers.
#[derive(Clone, Debug)]
pub(crate) struct ByNode<T> {
    slots: Vec<Option<T>>,
}

impl<T> Default for ByNode<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> ByNode<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new() }
    }

    pub(crate) fn get(&self, node: NodeId) -> Option<&T> {
        self.slots.get(place(node))?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, node: NodeId) -> Option<&mut T> {
        self.slots.get_mut(place(node))?.as_mut()
    }

    /// What is there for a node; `make` makes it when there is nothing.
    pub(crate) fn entry(&mut self, node: NodeId, make: impl FnOnce() -> T) -> &mut T {
        let place = place(node);
        if place >= self.slots.len() {
            assert!(place < NODES_MAX, "{node} of {NODES_MAX}");
            self.slots.resize_with(place + 1, || None);
        }
        self.slots[place].get_or_insert_with(make)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = NodeId> + '_ {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, slot)| slot.is_some()).map(|(place, _)| NodeId(place as u64))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().flatten()
    }
}

/// A number beyond all tables finds nothing, and can't be entered.
fn place(node: NodeId) -> usize {
    usize::try_from(node.0).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_entered_is_found_in_order() {
        let mut table = ByNode::new();
        for node in [7, 1, 100] {
            assert_eq!(*table.entry(NodeId(node), || node), node);
        }
        *table.entry(NodeId(7), || panic!("it is there")) = 8;
        assert_eq!(table.keys().collect::<Vec<_>>(), [NodeId(1), NodeId(7), NodeId(100)]);
        assert_eq!((table.get(NodeId(7)), table.get(NodeId(2))), (Some(&8), None));
        assert_eq!(table.get(NodeId(u64::MAX)), None);
        table.values_mut().for_each(|value| *value += 1);
        assert_eq!(table.get_mut(NodeId(100)), Some(&mut 101));
    }
}
