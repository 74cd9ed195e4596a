//! Small explorations that end, and broken things that they find.

use super::*;

/// With a debug build's patience.
const STATES_MAX: usize = 3_000;

#[test]
fn the_same_search_gives_the_same_states() {
    let search = Search::new(Scope::Pipeline, 300);
    let counts = |explored: Explored| (explored.states, explored.choices, explored.depth);
    assert_eq!(counts(explore(&search)), counts(explore(&search)));
}

#[test]
fn without_trouble_every_order_ends_well() {
    for scope in [Scope::Pipeline, Scope::Disk] {
        let search = Search { trouble: Trouble::default(), ..Search::new(scope, STATES_MAX) };
        let explored = explore(&search);
        assert!(explored.broken.is_none(), "{:?}", explored.broken);
        assert!(explored.is_exhausted && explored.acknowledged_states > 0, "{explored:?}");
    }
}

#[test]
fn a_register_that_does_not_compare_is_found() {
    let search = Search {
        trouble: Trouble::default(),
        is_register_blind: true,
        ..Search::new(Scope::Birth, 4 * STATES_MAX)
    };
    let explored = explore(&search);
    let broken = explored.broken.expect("two leaders own one epoch");
    assert!(broken.way.len() > 2, "{broken:?}");
}

/// `cargo test -p sim --features plants`: found by an oracle, or by the role's own check of an invariant.
#[cfg(feature = "plants")]
#[test]
fn planted_bugs_are_found() {
    use common::Plant;
    let none = Trouble::default();
    for (scope, trouble, plant, signs) in [
        (Scope::Pipeline, Scope::Pipeline.trouble(), Plant::FreshPairAgain, &["I1", "I15"][..]),
        (Scope::Pipeline, none, Plant::HoleCounts, &["I1"]),
        (Scope::Disk, none, Plant::AckBeforeSync, &["I7"]),
    ] {
        let plants = Plants::only(plant);
        let search = Search { trouble, plants, ..Search::new(scope, STATES_MAX) };
        let broken = explore(&search).broken;
        let sign = broken.as_ref().map_or("nothing", |broken| match broken.rule {
            "panic" => &broken.detail,
            rule => rule,
        });
        assert!(signs.iter().any(|start| sign.starts_with(start)), "{plant:?}: {broken:?}");
    }
}
