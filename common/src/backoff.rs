//! Waiting longer after each failure, with jitter, up to a limit.

use core::time::Duration;

use crate::Prng;

const FIRST_MS: u64 = 10;

/// How long to wait before the next attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Forgets the failures.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// How often it has failed in a row.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        self.failures
    }

    /// Counts a failure and says how long to wait: 10 ms doubled with each failure, at most `max_ms`, of
    /// which a random half to whole.
    pub fn next(&mut self, max_ms: u64, prng: &mut Prng) -> Duration {
        let doubled = FIRST_MS.saturating_mul(1 << self.failures.min(20));
        self.failures = self.failures.saturating_add(1);
        let ms = doubled.min(max_ms).max(1);
        Duration::from_micros(prng.between(ms * 500, ms * 1000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_limit_and_start_over() {
        let (mut backoff, mut prng) = (Backoff::default(), Prng::new(1));
        let waits: Vec<Duration> = (0..12).map(|_| backoff.next(1000, &mut prng)).collect();
        assert!(waits[0] <= Duration::from_millis(10));
        assert!(
            waits[11] >= Duration::from_millis(500) && waits[11] <= Duration::from_millis(1000)
        );
        backoff.reset();
        assert!(backoff.next(1000, &mut prng) <= Duration::from_millis(10));
    }
}
