//! How many commits may wait for their verdicts: fewer when they are too many, more with each verdict.
//!
//! ```text
//!  a verdict              one more, up to all that the session lets in
//!  Overloaded, timed out  half of those that wait, at least one
//! ```
//!
//! A proxy keeps every outcome until the client's oldest request is settled, refusals too. A session that
//! answered each refusal with the next request would fill the proxy's table with refusals only, and what it
//! gives up stays in the proxy's queue. Source of the idea: additive increase, multiplicative decrease (Chiu
//! and Jain, 1989).

/// The bound of what waits for verdicts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Window {
    /// `None`: no more than the session lets in.
    size: Option<usize>,
}

impl Window {
    pub(super) const fn new() -> Self {
        Self { size: None }
    }

    /// Whether one more may be sent while so many wait.
    pub(super) fn is_open(self, waiting: usize) -> bool {
        self.size.is_none_or(|size| waiting < size)
    }

    /// A verdict came; `in_flight_max` is what the session lets in.
    pub(super) fn grow(&mut self, in_flight_max: u64) {
        self.size = self.size.map(|size| size + 1).filter(|size| (*size as u64) < in_flight_max);
    }

    /// One was too many, and so many still wait.
    pub(super) fn shrink(&mut self, waiting: usize) {
        let size = self.size.map_or(waiting, |size| size.min(waiting));
        self.size = Some((size / 2).max(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_closes_by_half_and_opens_one_by_one() {
        let mut window = Window::new();
        assert!(window.is_open(1_000_000));
        window.shrink(100);
        assert!(window.is_open(49) && !window.is_open(50));
        (0..20).for_each(|_| window.shrink(100));
        assert!(window.is_open(0) && !window.is_open(1), "never shut for good");
        (0..7).for_each(|_| window.grow(8));
        assert!(window.is_open(1_000_000));
    }
}
