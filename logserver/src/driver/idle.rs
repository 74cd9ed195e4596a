//! Whether it pays to look for work for a moment before sleeping.
//!
//! ```text
//! idle since --looks on, up to the limit--> sleeps --> work
//!              only while the last wait was not much longer than that
//! ```
//!
//! To be woken takes a good part of a flush. So a thread that gets work again and again stays awake, and one
//! that has nothing to do sleeps.

use std::time::{Duration, Instant};

/// The waits of one thread, or of one loop.
#[derive(Clone, Copy, Debug)]
pub struct IdlePoll {
    limit: Duration,
    last_wait: Duration,
}

impl IdlePoll {
    /// Looks on for `limit` at most; not at all when that is zero.
    #[must_use]
    pub const fn new(limit: Duration) -> Self {
        Self { limit, last_wait: Duration::MAX }
    }

    /// Whether to look once more, with nothing to do since `since`.
    #[must_use]
    pub fn looks_on(&self, since: Instant) -> bool {
        self.last_wait <= 2 * self.limit && since.elapsed() < self.limit
    }

    /// The wait that began at `since` is over.
    pub fn waited(&mut self, since: Instant) {
        self.last_wait = since.elapsed();
    }
}
