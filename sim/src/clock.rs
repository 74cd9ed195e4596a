//! Virtual time, and the clocks of processes that run off it.

use common::{Prng, Time, WallTime};

/// Nanoseconds of virtual time since the start of the run: what the event queue is sorted by. Processes never
/// see it, only their own clocks.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Moment(pub u64);

impl Moment {
    /// The start.
    pub const ZERO: Self = Self(0);

    /// `self` and `ns` more.
    #[must_use]
    pub fn plus_ns(self, ns: u64) -> Self {
        Self(self.0.checked_add(ns).expect("a run below 584 years"))
    }
}

const MILLION: u64 = 1_000_000;
/// Where wall clocks stand about: 2026-01-01, in microseconds.
const WALL_BASE_US: u64 = 1_767_225_600_000_000;

/// One process' clocks: they start anywhere and run too fast or too slow.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    started: Moment,
    offset_ns: u64,
    drift_ppm: i64,
    wall_offset_us: i64,
}

impl Clock {
    /// A clock that starts at `started`; it runs off by at most `drift_ppm_max` parts in a million.
    #[must_use]
    pub fn new(started: Moment, drift_ppm_max: u64, prng: &mut Prng) -> Self {
        let drift = prng.below(2 * drift_ppm_max + 1);
        Self {
            started,
            offset_ns: prng.below(1 << 40),
            drift_ppm: i64::try_from(drift).expect("a drift in ppm")
                - i64::try_from(drift_ppm_max).expect("a drift in ppm"),
            wall_offset_us: i64::try_from(prng.below(2_000_000)).expect("two seconds"),
        }
    }

    /// What the monotonic clock shows.
    #[must_use]
    pub fn time(&self, now: Moment) -> Time {
        let run = scaled(now.0 - self.started.0, self.rate(), 0, MILLION);
        Time(self.offset_ns + run)
    }

    /// What the wall clock shows.
    #[must_use]
    pub fn wall(&self, now: Moment) -> WallTime {
        let run_us = WALL_BASE_US + now.0 / 1000;
        WallTime(run_us.checked_add_signed(self.wall_offset_us).expect("a wall clock after 1970"))
    }

    /// Somebody sets the wall clock forward or back; the monotonic one does not notice.
    pub const fn jump_wall(&mut self, us: i64) {
        self.wall_offset_us = self.wall_offset_us.saturating_add(us);
    }

    /// The first moment at which the monotonic clock shows `time`; the start when that is past.
    #[must_use]
    pub fn moment(&self, time: Time) -> Moment {
        let rate = self.rate();
        let elapsed = scaled(time.0.saturating_sub(self.offset_ns), MILLION, rate - 1, rate);
        Moment(self.started.0 + elapsed)
    }

    /// What the monotonic clock runs while a million ns pass.
    fn rate(&self) -> u64 {
        MILLION.checked_add_signed(self.drift_ppm).expect("a clock that runs forward")
    }
}

/// `(ns * factor + more) / divisor`; wide arithmetic is for runs of hours only.
fn scaled(ns: u64, factor: u64, more: u64, divisor: u64) -> u64 {
    if let Some(sum) = ns.checked_mul(factor).and_then(|product| product.checked_add(more)) {
        return sum / divisor;
    }
    let wide = (u128::from(ns) * u128::from(factor) + u128::from(more)) / u128::from(divisor);
    u64::try_from(wide).expect("a moment within the run")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_wall_clock_leaves_the_monotonic_one_alone() {
        let mut clock = Clock::new(Moment(5), 0, &mut Prng::new(1));
        let at = Moment(7_000_000);
        let (time, wall) = (clock.time(at), clock.wall(at));
        clock.jump_wall(-3_000_000);
        assert_eq!((clock.time(at), clock.wall(at).0), (time, wall.0 - 3_000_000));
    }

    #[test]
    fn a_timer_never_fires_early_on_its_own_clock() {
        let mut prng = Prng::new(9);
        for _ in 0..1000 {
            let clock = Clock::new(Moment(prng.below(1 << 30)), 50_000, &mut prng);
            let target = Time(clock.offset_ns + prng.below(1 << 36));
            let moment = clock.moment(target);
            assert!(clock.time(moment) >= target, "{clock:?} {target:?}");
            assert!(clock.time(moment).since(target).as_nanos() <= 2, "{clock:?} {target:?}");
        }
    }
}
