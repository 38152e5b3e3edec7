//! A clock with an offset.

use std::time::Duration;

use leasehold_engine::{Clock, Moment, Skew};

/// A clock that is ahead of another clock or behind it. Pass it to the engine of a client to follow
/// [`ClientSetup::skew`](crate::ClientSetup). A store that ends leases by the server's clock is not affected.
#[derive(Debug)]
pub struct SkewedClock<C> {
    clock: C,
    offset: u64,
}

impl<C: Clock> SkewedClock<C> {
    /// Makes a clock that differs from `clock` by `skew`.
    pub fn new(clock: C, skew: Skew) -> Self {
        // Starts in the middle so that it can be far behind. The engine uses only differences.
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
