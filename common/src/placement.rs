//! Which log servers hold a stream: rendezvous hashing, so that a server more or less moves only its share.

use crate::membership::{Seat, Seats};
use crate::{NodeId, StreamId};

/// The places in `present` of those that hold `stream`, best first. System streams follow the same rule.
/// A log server counts by its seat: an heir holds what the one before it held.
///
/// A log server that is `absent` keeps its share: what it would hold is held by one copy less until it has
/// caught up, and nothing moves. While fewer than `replication` are absent every stream has a holder.
///
/// Source of the idea: Thaler and Ravishankar, highest random weight (1998).
#[must_use]
pub fn holders(
    stream: StreamId,
    seats: &Seats,
    present: &[NodeId],
    absent: &[NodeId],
    replication: u8,
) -> Vec<usize> {
    let present = present.iter().enumerate().map(|(place, node)| (*node, Some(place)));
    let absent = absent.iter().map(|node| (*node, None));
    let ranked = present.chain(absent).map(|(node, place)| {
        let seat = seats.seat_of(node);
        (weight(stream, seat), seat, place)
    });
    let mut ranked: Vec<(u64, Seat, Option<usize>)> = ranked.collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.truncate(usize::from(replication));
    ranked.into_iter().filter_map(|(_, _, place)| place).collect()
}

const fn weight(stream: StreamId, seat: Seat) -> u64 {
    let mut z = stream.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seat.0.rotate_left(32);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::Membership;

    #[test]
    fn an_heir_holds_what_the_one_before_it_held() {
        let mut membership = Membership::default();
        membership.give_seat(NodeId(2), NodeId(9));
        let old: Vec<NodeId> = [1, 2, 3].into_iter().map(NodeId).collect();
        let new: Vec<NodeId> = [1, 3, 9].into_iter().map(NodeId).collect();
        for stream in (0..200).map(StreamId) {
            let by = |nodes: &[NodeId], seats: &Seats| -> Vec<NodeId> {
                holders(stream, seats, nodes, &[], 2).into_iter().map(|at| nodes[at]).collect()
            };
            let mut before = by(&old, &Seats::new());
            before.iter_mut().filter(|node| **node == NodeId(2)).for_each(|node| *node = NodeId(9));
            assert_eq!(by(&new, &membership.seats), before, "nothing moves between the others");
        }
    }

    #[test]
    fn streams_spread_and_stay_when_a_server_leaves() {
        let servers: Vec<NodeId> = (1..=4).map(NodeId).collect();
        let seats = Seats::new();
        let mut counts = [0; 4];
        for stream in (0..1000).map(StreamId) {
            let held = holders(stream, &seats, &servers, &[], 2);
            assert_eq!(held.len(), 2);
            assert_ne!(held[0], held[1]);
            held.iter().for_each(|place| counts[*place] += 1);
            let without_last = holders(stream, &seats, &servers[..3], &[], 2);
            if !held.contains(&3) {
                assert_eq!(held, without_last);
            }
            let others: Vec<usize> = held.iter().copied().filter(|place| *place != 3).collect();
            assert_eq!(
                holders(stream, &seats, &servers[..3], &servers[3..], 2),
                others,
                "nothing moves"
            );
        }
        assert!(counts.iter().all(|count| (400..600).contains(count)), "{counts:?}");
    }
}
