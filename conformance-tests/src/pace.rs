//! How slowly cases run in real time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Names by how much the durations of cases in real time are multiplied.
pub(crate) const PACE: &str = "LEASEHOLD_CONFORMANCE_PACE";
const LARGEST: u32 = 100;

/// By how much more a case that is run again is slowed down. It runs alone, so that one factor for the process is enough.
static SLOWER: AtomicU32 = AtomicU32::new(1);

/// By how much the durations of the case that runs are multiplied in real time: 1 to 100; what
/// `LEASEHOLD_CONFORMANCE_PACE` says, or 1, and more where an inconclusive case is run again. A harness multiplies its
/// own by it, such as the TTL and the timeouts of the clients that it makes, when it makes them.
///
/// # Panics
///
/// When the environment says what is not a number from 1 to 100.
pub fn pace() -> u32 {
    (usual_pace() * SLOWER.load(Ordering::Acquire)).min(LARGEST)
}

/// That of a case that is run for the first time.
pub(crate) fn usual_pace() -> u32 {
    static SET: OnceLock<u32> = OnceLock::new();
    *SET.get_or_init(|| match std::env::var(PACE) {
        Ok(text) => {
            parse(&text).unwrap_or_else(|| panic!("{PACE} is {text:?}; set a number from 1 to {LARGEST}"))
        }
        Err(_) => 1,
    })
}

/// So many milliseconds, on a slow machine more.
pub(crate) fn real(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds) * pace()
}

/// While it lives, the pace of all cases in real time is slower by a factor: for a case that runs alone.
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
