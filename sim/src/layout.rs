//! Where the roles of a run live: drawn, then static for the whole run.
//!
//! ```text
//!  n1  [leader with sequencer] [proxy] [resolver] [log server]  a single node has everything, perhaps twice
//!  n2  [proxy] [resolver] [log server]
//!  n3  ...                                                     replication <= log servers
//! ```

use common::{NodeId, Prng};
use sequencer::leader::Topology;
use serde::Serialize;

/// Where shares of the key space can begin: at conflict keys, account keys, ids, and where nothing is.
const SPLITS: &[&[u8]] = &[
    b"\x00\x80",
    b"\x01",
    b"account-0001",
    b"key-0001",
    b"key-0003",
    b"key-0100",
    b"z",
    b"\xff\x80",
];

/// Who plays which role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// Nodes, numbered from 1.
    pub nodes: u64,
    /// The first so many of them may lead.
    pub candidates: u64,
    /// Nodes of the proxies.
    pub proxies: Vec<u64>,
    /// Nodes of the resolvers, and where their shares begin.
    pub resolvers: Vec<(u64, Vec<u8>)>,
    /// Nodes of the log servers.
    pub log_servers: Vec<u64>,
    /// Copies of each stream.
    pub replication: u8,
}

impl Layout {
    /// One node with one of everything.
    #[must_use]
    pub fn single() -> Self {
        Self {
            nodes: 1,
            candidates: 1,
            proxies: vec![1],
            resolvers: vec![(1, Vec::new())],
            log_servers: vec![1],
            replication: 1,
        }
    }

    /// Draws a layout: a single node in about half of the runs.
    #[must_use]
    pub fn draw(prng: &mut Prng) -> Self {
        let nodes = *prng.pick(&[1, 1, 1, 3, 3, 5]);
        if nodes == 1 && prng.chance(1, 2) {
            return Self::single();
        }
        Self::spread(nodes, prng)
    }

    /// Spreads some of each role over so many nodes.
    #[must_use]
    pub fn spread(nodes: u64, prng: &mut Prng) -> Self {
        let mut somewhere =
            |count: u64| -> Vec<u64> { (0..count).map(|_| prng.between(1, nodes)).collect() };
        let count = somewhere(2);
        let proxies = somewhere(1 + count[0] % 3);
        let resolvers = somewhere(1 + count[1] % 3);
        let mut log_servers: Vec<u64> = (1..=nodes).collect();
        for place in (1..log_servers.len()).rev() {
            log_servers.swap(place, prng.below(place as u64 + 1) as usize);
        }
        log_servers.truncate(prng.between(nodes.min(2), nodes) as usize);
        let replication = prng.between(1, (log_servers.len() as u64).min(3));
        let mut splits = SPLITS.to_vec();
        while splits.len() >= resolvers.len() {
            splits.remove(prng.below(splits.len() as u64) as usize);
        }
        let candidates =
            if prng.chance(1, 4) { 1 } else { prng.between(2, nodes.max(2)).min(nodes) };
        let begins = [Vec::new()].into_iter().chain(splits.into_iter().map(<[u8]>::to_vec));
        Self {
            nodes,
            candidates,
            proxies,
            resolvers: resolvers.into_iter().zip(begins).collect(),
            log_servers,
            replication: u8::try_from(replication).expect("at most three copies"),
        }
    }

    /// The same for the leader.
    #[must_use]
    pub fn topology(&self) -> Topology {
        let ids = |nodes: &[u64]| nodes.iter().copied().map(NodeId).collect();
        Topology {
            candidates: (1..=self.candidates).map(NodeId).collect(),
            proxies: ids(&self.proxies),
            resolvers: self
                .resolvers
                .iter()
                .map(|(node, begin)| (NodeId(*node), begin.clone()))
                .collect(),
            log_servers: ids(&self.log_servers),
            replication: self.replication,
            spares: (1..=self.nodes).map(NodeId).collect(),
            domains: (1..=self.nodes)
                .map(|node| (NodeId(node), format!("rack {}", node % 3)))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_draw_is_a_layout() {
        let mut spread = 0;
        for seed in 0..500 {
            let layout = Layout::draw(&mut Prng::new(seed));
            assert!(usize::from(layout.replication) <= layout.log_servers.len(), "{layout:?}");
            let begins = layout.resolvers.windows(2);
            assert!(layout.resolvers[0].1.is_empty(), "{layout:?}");
            assert!(begins.into_iter().all(|pair| pair[0].1 < pair[1].1), "{layout:?}");
            let topology = layout.topology();
            assert!(topology.nodes().iter().all(|node| (1..=layout.nodes).contains(&node.0)));
            spread += u64::from(layout.nodes > 1);
        }
        assert!((150..350).contains(&spread), "{spread} of 500");
    }
}
