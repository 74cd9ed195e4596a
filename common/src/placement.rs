//! Which log servers hold a stream: rendezvous hashing, so that a server more or less moves only its share.

use crate::{NodeId, StreamId};

/// The places in `present` of those that hold `stream`, best first. System streams follow the same rule.
///
/// A log server that is `absent` keeps its share: what it would hold is held by one copy less until it has
/// caught up, and nothing moves. While fewer than `replication` are absent every stream has a holder.
///
/// Source of the idea: Thaler and Ravishankar, highest random weight (1998).
#[must_use]
pub fn holders(
    stream: StreamId,
    present: &[NodeId],
    absent: &[NodeId],
    replication: u8,
) -> Vec<usize> {
    let present = present.iter().enumerate().map(|(place, node)| (*node, Some(place)));
    let absent = absent.iter().map(|node| (*node, None));
    let mut ranked: Vec<(u64, NodeId, Option<usize>)> =
        present.chain(absent).map(|(node, place)| (weight(stream, node), node, place)).collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.truncate(usize::from(replication));
    ranked.into_iter().filter_map(|(_, _, place)| place).collect()
}

const fn weight(stream: StreamId, node: NodeId) -> u64 {
    let mut z = stream.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ node.0.rotate_left(32);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_spread_and_stay_when_a_server_leaves() {
        let servers: Vec<NodeId> = (1..=4).map(NodeId).collect();
        let mut counts = [0; 4];
        for stream in (0..1000).map(StreamId) {
            let held = holders(stream, &servers, &[], 2);
            assert_eq!(held.len(), 2);
            assert_ne!(held[0], held[1]);
            held.iter().for_each(|place| counts[*place] += 1);
            let without_last = holders(stream, &servers[..3], &[], 2);
            if !held.contains(&3) {
                assert_eq!(held, without_last);
            }
            let others: Vec<usize> = held.iter().copied().filter(|place| *place != 3).collect();
            assert_eq!(holders(stream, &servers[..3], &servers[3..], 2), others, "nothing moves");
        }
        assert!(counts.iter().all(|count| (400..600).contains(count)), "{counts:?}");
    }
}
