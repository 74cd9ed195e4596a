//! Time as machines see it: handed in, never read.

use core::fmt;
use core::time::Duration;

use rkyv::{Archive, Deserialize, Serialize};

/// Nanoseconds on one process' monotonic clock. Never compared across processes.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The start of the clock.
    pub const ZERO: Self = Self(0);

    /// `self + duration`; an overflow stops the process.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        let ns = u64::try_from(duration.as_nanos()).expect("a duration below 584 years");
        Self(self.0.checked_add(ns).expect("a clock below 584 years"))
    }

    /// How long ago `earlier` was; zero when it is not past yet.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}s", self.0 / 1_000_000_000, self.0 / 1_000 % 1_000_000)
    }
}

/// Microseconds since 1970-01-01 UTC by one process' wall clock. For people and for retention by age,
/// never for correctness.
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Debug,
    Archive,
    Serialize,
    Deserialize,
)]
pub struct WallTime(pub u64);
