//! The one source of randomness: seeded, integers only, one stream per concern.
//!
//! xoshiro256** (Blackman and Vigna), seeded through splitmix64. Streams are derived by hashing a label
//! with the seed, so one more draw in one place doesn't shift the others.

/// A seeded stream of random integers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Prng {
    state: [u64; 4],
}

const fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Prng {
    /// The stream of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        let mut s = seed;
        Self { state: [splitmix(&mut s), splitmix(&mut s), splitmix(&mut s), splitmix(&mut s)] }
    }

    /// The stream of `seed` for one concern: `label` names it, `index` tells it from its siblings.
    #[must_use]
    pub fn derive(seed: u64, label: &str, index: u64) -> Self {
        let mut hash = seed ^ 0xcbf2_9ce4_8422_2325;
        for byte in label.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        let mut mixed = hash ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self::new(splitmix(&mut mixed))
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        let result = self.state[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = self.state[1] << 17;
        self.state[2] ^= self.state[0];
        self.state[3] ^= self.state[1];
        self.state[1] ^= self.state[2];
        self.state[0] ^= self.state[3];
        self.state[2] ^= t;
        self.state[3] = self.state[3].rotate_left(45);
        result
    }

    /// Uniform in `0..bound`; `bound` must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no members");
        let wide = u128::from(self.next()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// Uniform in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high, "{low} > {high}");
        match (high - low).checked_add(1) {
            Some(count) => low + self.below(count),
            None => self.next(),
        }
    }

    /// True `numerator` times out of `denominator`.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// One of `items`, which must not be empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// Sixteen random bytes.
    pub fn bytes16(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next().to_le_bytes());
        bytes[8..].copy_from_slice(&self.next().to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let (mut a, mut b) = (Prng::derive(7, "disk", 0), Prng::derive(7, "disk", 1));
        let first: Vec<u64> = (0..8).map(|_| a.next()).collect();
        assert_ne!(first, (0..8).map(|_| b.next()).collect::<Vec<_>>());
        let mut again = Prng::derive(7, "disk", 0);
        assert_eq!(first, (0..8).map(|_| again.next()).collect::<Vec<_>>());
    }

    #[test]
    fn below_stays_below_and_reaches_both_ends() {
        let mut prng = Prng::new(1);
        let drawn: Vec<u64> = (0..1000).map(|_| prng.below(7)).collect();
        assert!(drawn.iter().all(|n| *n < 7));
        assert!(drawn.contains(&0) && drawn.contains(&6));
    }
}
