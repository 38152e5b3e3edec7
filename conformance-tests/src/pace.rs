//! How slowly cases run in real time.

use std::sync::OnceLock;
use std::time::Duration;

/// Names by how much the durations of cases in real time are multiplied.
const PACE: &str = "LEASEHOLD_CONFORMANCE_PACE";

/// By how much durations in real time are multiplied: 1 unless the environment says more.
///
/// # Panics
///
/// When it says what is not a number from 1 to 100.
pub(crate) fn pace() -> u32 {
    static SET: OnceLock<u32> = OnceLock::new();
    *SET.get_or_init(|| match std::env::var(PACE) {
        Ok(text) => parse(&text).unwrap_or_else(|| panic!("{PACE} is {text:?}; set a number from 1 to 100")),
        Err(_) => 1,
    })
}

/// So many milliseconds, on a slow machine more.
pub(crate) fn real(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds) * pace()
}

fn parse(text: &str) -> Option<u32> {
    text.parse().ok().filter(|pace| (1..=100).contains(pace))
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
