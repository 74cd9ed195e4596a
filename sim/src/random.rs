//! Randomness: one stream per concern, integers only.
//!
//! Every concern has a stream of its own, derived from the seed and a label, so that one more draw in one
//! place does not shift the others. Shrinking and bisecting depend on that.

use common::Prng;

/// Derives the streams of one run.
#[derive(Clone, Copy, Debug)]
pub struct Randomness {
    seed: u64,
}

impl Randomness {
    /// The streams of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The seed.
    #[must_use]
    pub const fn seed(self) -> u64 {
        self.seed
    }

    /// The stream of one concern; `index` tells it from its siblings.
    #[must_use]
    pub fn stream(self, concern: &str, index: u64) -> Prng {
        Prng::derive(self.seed, concern, index)
    }
}

/// A delay with a heavy tail, in nanoseconds: a base, something up to as much again, and with each further
/// coin twice as much. One in about a thousand is `tail_factor` times as long.
#[must_use]
pub fn delay_ns(prng: &mut Prng, base_ns: u64, tail_factor: u64) -> u64 {
    let base_ns = base_ns.max(1);
    let doublings = prng.next().trailing_zeros().min(6);
    let mut delay = base_ns / 2 + prng.below(base_ns) + (base_ns / 8) * ((1 << doublings) - 1);
    if tail_factor > 1 && prng.chance(1, 1024) {
        delay = delay.saturating_mul(prng.between(2, tail_factor.max(2)));
    }
    delay
}

/// A value between `low` and `high` whose logarithm is uniform, so that every order of magnitude is as
/// likely.
#[must_use]
pub fn log_uniform(prng: &mut Prng, low: u64, high: u64) -> u64 {
    assert!(0 < low && low <= high, "{low} to {high} has no logarithms");
    let bits = prng.between(u64::from(low.ilog2()), u64::from(high.ilog2()));
    let top = (1_u64 << bits).saturating_mul(2).saturating_sub(1);
    prng.between((1 << bits).max(low), top.min(high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_have_a_body_and_a_tail() {
        let mut prng = Prng::new(3);
        let mut drawn: Vec<u64> = (0..20_000).map(|_| delay_ns(&mut prng, 1000, 100)).collect();
        drawn.sort_unstable();
        assert!(drawn[0] >= 500);
        assert!((900..1600).contains(&drawn[10_000]), "median {}", drawn[10_000]);
        assert!(drawn[19_999] > 20_000, "longest {}", drawn[19_999]);
    }

    #[test]
    fn every_magnitude_is_drawn_and_the_bounds_hold() {
        let mut prng = Prng::new(4);
        let drawn: Vec<u64> = (0..1000).map(|_| log_uniform(&mut prng, 3, 5000)).collect();
        assert!(drawn.iter().all(|value| (3..=5000).contains(value)));
        assert!(drawn.iter().any(|value| *value < 8) && drawn.iter().any(|value| *value > 2048));
    }
}
