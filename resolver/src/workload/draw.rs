//! Random numbers of the workloads: the generator that the recorded figures were measured with.

/// splitmix64.
#[derive(Clone, Debug)]
pub struct SplitMix {
    state: u64,
}

impl SplitMix {
    /// The stream of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// Uniform in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing is below {bound}");
        let wide = u128::from(self.next()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// Uniform in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A bijection that scatters ids.
#[must_use]
pub(super) const fn mix(id: u64) -> u64 {
    let mut z = id;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Zipf's law with exponent 0.99 over `0..count`, by Gray et al., as YCSB draws it.
#[derive(Clone, Debug)]
pub(super) struct Zipf {
    count: u64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

const THETA: f64 = 0.99;

impl Zipf {
    pub(super) fn new(count: u64) -> Self {
        let zeta_of = |n: u64| (1..=n).map(|i| (i as f64).powf(-THETA)).sum::<f64>();
        let zeta = zeta_of(count);
        let ratio = (2.0 / count as f64).powf(1.0 - THETA);
        let eta = (1.0 - ratio) / (1.0 - zeta_of(2) / zeta);
        Self { count, zeta, alpha: 1.0 / (1.0 - THETA), eta }
    }

    pub(super) fn draw(&self, rng: &mut SplitMix) -> u64 {
        let unit = rng.unit();
        let scaled = unit * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(THETA) {
            return 1;
        }
        let drawn = self.count as f64 * (self.eta * unit - self.eta + 1.0).powf(self.alpha);
        (drawn as u64).min(self.count - 1)
    }
}
