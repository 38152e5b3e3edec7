//! The slow-down of cases in real time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The environment variable with the factor for all durations in real time.
pub(crate) const PACE: &str = "LEASEHOLD_CONFORMANCE_PACE";
const LARGEST: u32 = 100;

/// The additional factor of a retry. One factor for the process is enough, because a retry runs alone.
static SLOWER: AtomicU32 = AtomicU32::new(1);

/// Returns the factor by which the running case multiplies its durations in real time, from 1 to 100. It is
/// the value of `LEASEHOLD_CONFORMANCE_PACE`, or 1, and greater in a retry of an inconclusive case. A harness
/// multiplies the TTL and the timeouts of each new client by it.
///
/// # Panics
///
/// If the environment variable is set to anything except a number from 1 to 100.
pub fn pace() -> u32 {
    (usual_pace() * SLOWER.load(Ordering::Acquire)).min(LARGEST)
}

/// Returns the factor without the slow-down of a retry.
pub(crate) fn usual_pace() -> u32 {
    static SET: OnceLock<u32> = OnceLock::new();
    *SET.get_or_init(|| match std::env::var(PACE) {
        Ok(text) => {
            parse(&text).unwrap_or_else(|| panic!("{PACE} is {text:?}; set a number from 1 to {LARGEST}"))
        }
        Err(_) => 1,
    })
}

/// Returns a number of milliseconds, multiplied by the pace.
pub(crate) fn real(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds) * pace()
}

/// Slows all cases in real time down by a factor until it is dropped. Used by a case that runs alone.
#[derive(Debug)]
pub(crate) struct Slower(());

impl Slower {
    pub(crate) fn by(factor: u32) -> Self {
        SLOWER.store(factor, Ordering::Release);
        Self(())
    }
}

impl Drop for Slower {
    fn drop(&mut self) {
        SLOWER.store(1, Ordering::Release);
    }
}

fn parse(text: &str) -> Option<u32> {
    text.parse().ok().filter(|pace| (1..=LARGEST).contains(pace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_a_number() {
        assert_eq!([parse("1"), parse("100"), parse(" 4")], [Some(1), Some(100), None]);
        assert_eq!([parse("0"), parse("101"), parse("fast")], [None; 3]);
    }
}
