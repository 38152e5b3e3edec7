//! The options of `run` and `lock` for acquiring a lock. The comments are the help text.
#![allow(clippy::doc_markdown)]

use std::time::Duration;

use leasehold::Mode;

use super::{Keys, duration};
use crate::exit;

#[derive(Debug, clap::Args)]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    pub(crate) keys: Keys,

    /// Wait at most this long for the store and the lock, such as 250ms, 30s or 5m [default: indefinitely].
    ///
    /// While the store cannot be reached, connecting is retried within that time.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) wait: Option<Duration>,

    /// The same limit in seconds, as with flock(1).
    #[arg(short = 'w', alias = "timeout", value_name = "SECONDS", value_parser = seconds, conflicts_with = "wait")]
    pub(crate) wait_seconds: Option<Duration>,

    /// Make one attempt and do not wait.
    #[arg(short = 'n', long, aliases = ["nb", "nonblock"], conflicts_with_all = ["wait", "wait_seconds"])]
    pub(crate) no_wait: bool,

    /// Take the lock as a reader: beside other runs with --shared, while excluding all others. A waiting writer comes before
    /// later readers.
    #[arg(short = 's', long, conflicts_with_all = ["slots", "once_per", "cooldown"])]
    pub(crate) shared: bool,

    /// Take one of N slots of the key, so at most N runs hold it at once. All runs of the key name the same N. While others
    /// use it with another N, exit with 64.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with_all = ["once_per", "cooldown"])]
    pub(crate) slots: Option<u32>,

    /// Take a lease of this length, renewed while the lock is held [default: the store's].
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) ttl: Option<Duration>,

    /// Hold the lock at most this long. After that it counts as lost, and other clients can get it.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,

    /// Start a cooldown of this length with the grant. During the cooldown of an earlier grant, report that the run is
    /// not due, and exit.
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "cooldown")]
    pub(crate) once_per: Option<Duration>,

    /// Start a cooldown of this length with the grant, in which other runs wait, even if the hold ends sooner.
    // The former name still works for existing scripts.
    #[arg(long, alias = "min-hold", value_name = "DURATION", value_parser = duration)]
    pub(crate) cooldown: Option<Duration>,

    /// Show this text in lists of the locks [default: user, host, program and process].
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,

    /// Exit with this code if another client held the lock for the whole wait.
    #[arg(short = 'E', long, value_name = "N", default_value_t = exit::CONFLICT)]
    pub(crate) conflict_exit_code: u8,

    /// Exit with this code if the run is not due by --once-per [default: 0 of `run`, 75 of `lock`].
    #[arg(long, value_name = "N", requires = "once_per")]
    pub(crate) not_due_exit_code: Option<u8>,
}

impl AcquireArgs {
    /// Returns which other holders the lock excludes.
    pub(crate) fn mode(&self) -> Mode {
        match self.slots {
            Some(of) => Mode::Permit { of },
            None if self.shared => Mode::Shared,
            None => Mode::Exclusive,
        }
    }

    /// Returns how long to wait, or `None` for no limit.
    pub(crate) fn budget(&self) -> Option<Duration> {
        if self.no_wait { Some(Duration::ZERO) } else { self.wait.or(self.wait_seconds) }
    }
}

/// Parses seconds without a unit, or a duration with one.
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
