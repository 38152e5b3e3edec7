//! Parses durations in URLs and on the command line.

use std::time::Duration;

use jiff::{Span, SpanRelativeTo};
use leasehold_api::{Error, ErrorKind};

/// Parses a duration such as `250ms`, `30s`, `5m`, `1h`, `7d` or `1h30m`.
///
/// A number needs its unit, and units are lower case, the longest first: `d` (24 hours), `h`, `m` (minutes), `s`
/// and `ms`.
///
/// # Errors
///
/// [`ErrorKind::InvalidOption`] for any other text.
pub fn parse_duration(text: &str) -> Result<Duration, Error> {
    let refuse = || {
        Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{text:?} is not a duration: write a number and its unit, such as 250ms, 30s, 5m, 1h, 7d or 1h30m"
            ),
        )
    };
    // Allows only these characters. Jiff also accepts signs, fractions, clock times, ISO 8601, longer units, and
    // capitals. For example, jiff reads `5M` as five minutes, but other parsers read it as five months.
    let known = |c: char| c.is_ascii_digit() || "dhms".contains(c);
    // Also refuses `0` without a unit, which jiff accepts.
    if !text.chars().all(known) || text.ends_with(|c: char| c.is_ascii_digit()) {
        return Err(refuse());
    }
    text.parse::<Span>()
        .and_then(|span| span.to_duration(SpanRelativeTo::days_are_24_hours()))
        .and_then(Duration::try_from)
        .map_err(|error| refuse().with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_unit() {
        for (text, millis) in [
            ("250ms", 250),
            ("0s", 0),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("2d", 172_800_000),
            ("1m30s", 90_000),
            ("1h30m", 5_400_000),
            ("1d2h3m4s5ms", 93_784_005),
            ("1000000d", 86_400_000_000_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(millis), "{text}");
        }
    }

    #[test]
    fn refuses_what_could_be_meant_otherwise() {
        for bad in [
            "",
            "0",
            "30",
            "s",
            "-1s",
            "+1s",
            "1.5s",
            "1,5s",
            "5M",
            "1month",
            "1mo",
            "1y",
            "1w",
            "5 m",
            " 5m",
            "1S",
            "PT30S",
            "01:30:00",
            "1s ago",
            "1s2",
            "1s1h",
            "1s1s",
            "1mm",
            "1us",
            "١s",
            "99999999999999999999s",
        ] {
            let error = parse_duration(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{bad:?}");
            assert!(error.message().contains("30s"), "{error}");
        }
    }
}
