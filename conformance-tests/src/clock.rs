//! A clock that is off.

use std::time::Duration;

use leasehold_engine::{Clock, Moment, Skew};

/// A clock that is ahead of another or behind it, for [`ClientSetup::skew`](crate::ClientSetup): give it to the
/// engine of the client. A store that ends leases by its own clock does not notice.
#[derive(Debug)]
pub struct SkewedClock<C> {
    clock: C,
    offset: u64,
}

impl<C: Clock> SkewedClock<C> {
    /// `clock`, off by `skew`.
    pub fn new(clock: C, skew: Skew) -> Self {
        // Late enough to be behind by much; the engine uses differences alone.
        const MIDDLE: u64 = u64::MAX / 4;
        let nanos = |by: Duration| u64::try_from(by.as_nanos()).unwrap_or(MIDDLE).min(MIDDLE);
        let offset = match skew {
            Skew::None => MIDDLE,
            Skew::Ahead(by) => MIDDLE + nanos(by),
            Skew::Behind(by) => MIDDLE - nanos(by),
        };
        Self { clock, offset }
    }
}

impl<C: Clock> Clock for SkewedClock<C> {
    fn now(&self) -> Moment {
        Moment::from_nanos(self.clock.now().as_nanos().saturating_add(self.offset))
    }

    fn wall(&self) -> Option<Duration> {
        self.clock.wall()
    }
}
