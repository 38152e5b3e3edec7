//! How a lock is asked for, the same for `run` and `lock`. The comments are the help text.
#![allow(clippy::doc_markdown)]

use std::time::Duration;

use super::{Keys, duration};
use crate::exit;

#[derive(Debug, clap::Args)]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    pub(crate) keys: Keys,

    /// Wait at most this long for the store and the lock, such as 250ms, 30s or 5m [default: for ever].
    ///
    /// While the store cannot be reached, it is tried again and again in that time.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) wait: Option<Duration>,

    /// The same in seconds, as with flock(1).
    #[arg(short = 'w', alias = "timeout", value_name = "SECONDS", value_parser = seconds, conflicts_with = "wait")]
    pub(crate) wait_seconds: Option<Duration>,

    /// Make one attempt and do not wait.
    #[arg(short = 'n', long, aliases = ["nb", "nonblock"], conflicts_with_all = ["wait", "wait_seconds"])]
    pub(crate) no_wait: bool,

    /// Take a lease of this length, renewed while the lock is held [default: the store's].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) ttl: Option<Duration>,

    /// Hold the lock at most this long. Past it, it counts as lost, and others get in.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,

    /// Let nobody else in for this long after the grant; in the window of an earlier grant, say that it is not due and exit.
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "cooldown")]
    pub(crate) once_per: Option<Duration>,

    /// Let nobody else in before this time has passed since the grant, even if the hold ends sooner.
    // Its former name does what it did for those who have it in their scripts.
    #[arg(long, alias = "min-hold", value_name = "DURATION", value_parser = duration)]
    pub(crate) cooldown: Option<Duration>,

    /// Show this text to those who list the locks [default: user, host, program and process].
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,

    /// Exit with this code when somebody else held the lock for as long as was waited.
    #[arg(short = 'E', long, value_name = "N", default_value_t = exit::CONFLICT)]
    pub(crate) conflict_exit_code: u8,

    /// Exit with this code when --once-per says that it is not due [default: 0 of `run`, 75 of `lock`].
    #[arg(long, value_name = "N", requires = "once_per")]
    pub(crate) not_due_exit_code: Option<u8>,
}

impl AcquireArgs {
    /// How long to wait; `None` for ever.
    pub(crate) fn budget(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait.or(self.wait_seconds) }
    }
}

/// Seconds without a unit, or a duration with one.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let is_number = text.starts_with(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_digit() || c == '.');
    match text.parse().ok().filter(|_| is_number).map(Duration::try_from_secs_f64) {
        Some(Ok(time)) => Ok(time),
        _ => duration(text).map_err(|error| format!("{error}; a number without a unit is seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_without_a_unit_is_seconds() {
        for (text, millis) in [("0", 0), ("5", 5000), ("0.25", 250), ("90s", 90_000), ("1m", 60_000)] {
            assert_eq!(seconds(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for bad in ["", ".", "-1", "1e3", "inf", "NaN", "5x", "1.5s", "99999999999999999999999"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
