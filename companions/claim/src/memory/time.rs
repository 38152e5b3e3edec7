//! The clock of a table in memory, and times in JSON.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since 1970, the precision of the server's `timestamptz`.
pub(super) type Micros = i64;

const DAY: i64 = 86_400 * 1_000_000;

/// The clock by which leases in memory end. Clones are the same clock, so several tables can share one.
///
/// ```
/// use std::time::Duration;
/// use leasehold_claim::MemoryClock;
///
/// let clock = MemoryClock::stopped();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(30));
/// assert_eq!(clock.now().duration_since(before)?, Duration::from_secs(30));
/// # Ok::<(), std::time::SystemTimeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemoryClock {
    begun: Micros,
    running: Option<Instant>,
    ahead: Arc<AtomicI64>,
}

impl MemoryClock {
    /// Builds a clock that starts at the machine's time and advances steadily, independent of later changes of the
    /// machine's clock.
    #[must_use]
    pub fn running() -> Self {
        Self { running: Some(Instant::now()), ..Self::stopped() }
    }

    /// Builds a clock that only [`advance`](Self::advance) moves.
    #[must_use]
    pub fn stopped() -> Self {
        Self { begun: micros(SystemTime::now()), running: None, ahead: Arc::default() }
    }

    /// Moves the clock and its clones forward by `by`.
    pub fn advance(&self, by: Duration) {
        self.ahead.fetch_add(span(by), Ordering::SeqCst);
    }

    /// Returns the time of the clock.
    #[must_use]
    pub fn now(&self) -> SystemTime {
        time(self.micros())
    }

    pub(super) fn micros(&self) -> Micros {
        let run = self.running.map_or(0, |begun| span(begun.elapsed()));
        self.begun.saturating_add(run).saturating_add(self.ahead.load(Ordering::SeqCst))
    }
}

impl Default for MemoryClock {
    fn default() -> Self {
        Self::running()
    }
}

/// Converts a duration to microseconds, at most 292,000 years.
pub(super) fn span(duration: Duration) -> Micros {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Returns the time from `earlier` to `later`, or zero if `later` is earlier.
pub(super) fn between(earlier: Micros, later: Micros) -> Duration {
    Duration::from_micros(u64::try_from(later.saturating_sub(earlier)).unwrap_or(0))
}

pub(super) fn micros(time: SystemTime) -> Micros {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => span(since),
        Err(error) => -span(error.duration()),
    }
}

pub(super) fn time(micros: Micros) -> SystemTime {
    let distance = Duration::from_micros(micros.unsigned_abs());
    let time = if micros < 0 { UNIX_EPOCH.checked_sub(distance) } else { UNIX_EPOCH.checked_add(distance) };
    time.unwrap_or(UNIX_EPOCH)
}

/// Formats a time as the server formats a `timestamptz` in JSON if its time zone is UTC.
pub(super) fn text(micros: Micros) -> String {
    let (days, of_day) = (micros.div_euclid(DAY), micros.rem_euclid(DAY));
    let (year, month, day) = civil(days);
    let (seconds, fraction) = (of_day / 1_000_000, of_day % 1_000_000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let fraction = match fraction {
        0 => String::new(),
        fraction => format!(".{fraction:06}").trim_end_matches('0').to_owned(),
    };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}+00:00")
}

/// Parses times such as `2026-01-31T12:00:00.5+01:00`. The zone is required. A blank can replace the `T`.
pub(super) fn parse(text: &str) -> Option<Micros> {
    let (date, rest) = text.split_once(['T', ' '])?;
    let zone_at = rest.find(['Z', '+', '-'])?;
    let (clock, zone) = rest.split_at(zone_at);
    let mut date = date.splitn(3, '-');
    let (year, month, day) = (number(date.next()?)?, number(date.next()?)?, number(date.next()?)?);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let (hour, minute, second) = hours(clock)?;
    let within =
        (1..=12).contains(&month) && hour < 24 && minute < 60 && second <= 60 && (0..=9999).contains(&year);
    let days = days(year, month, day);
    if !within || civil(days) != (year, month, day) || fraction.is_empty() || fraction.len() > 6 {
        return None;
    }
    let fraction = number(&format!("{fraction:0<6}"))?;
    let offset = match zone.split_at_checked(1)? {
        ("Z", "") => 0,
        (sign, offset) => {
            let (hours, minutes, seconds) = hours(offset)?;
            let offset = hours * 3600 + minutes * 60 + seconds;
            if sign == "-" { -offset } else { offset }
        }
    };
    let seconds = hour * 3600 + minute * 60 + second - offset;
    Some(days * DAY + seconds * 1_000_000 + fraction)
}

/// Parses `HH`, `HH:MM` or `HH:MM:SS`.
fn hours(text: &str) -> Option<(i64, i64, i64)> {
    let mut parts = text.splitn(3, ':');
    let mut next = || parts.next().map_or(Some(0), number);
    Some((next()?, next()?, next()?))
}

fn number(text: &str) -> Option<i64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Returns the date `days` after 1970-01-01, by Howard Hinnant's algorithm over eras of 400 years.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// Returns the days from 1970-01-01 to a date, the inverse of [`civil`].
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_server_writes_them_and_read_again() {
        assert_eq!(text(0), "1970-01-01T00:00:00+00:00");
        assert_eq!(text(951_827_696_500_000), "2000-02-29T12:34:56.5+00:00");
        assert_eq!(parse("2000-02-29 13:34:56.5+01"), Some(951_827_696_500_000));
        assert_eq!(parse("2000-02-29T12:34:56.500000Z"), Some(951_827_696_500_000));
        assert_eq!(parse("1969-12-31T23:59:59-00:00"), Some(-1_000_000));
        for day in (-800_000..2_900_000).step_by(97) {
            let micros = day * DAY + 1;
            if (0..=9999).contains(&civil(day).0) {
                assert_eq!(parse(&text(micros)), Some(micros), "{}", text(micros));
            }
        }
        for bad in
            ["", "2001-02-29T00:00:00Z", "2000-01-01T00:00:00", "2000-13-01T00:00:00Z", "2000-01-01", "x"]
        {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
