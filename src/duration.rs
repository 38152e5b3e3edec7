//! Durations as people write them in URLs and on the command line.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};

/// Reads a duration such as `250ms`, `30s`, `5m`, `1h`, `7d` or `1h30m`.
///
/// A number needs its unit, and units are lower case: `ms`, `s`, `m` (minutes), `h` and `d`.
///
/// ```
/// use std::time::Duration;
///
/// assert_eq!(leasehold::parse_duration("250ms")?, Duration::from_millis(250));
/// assert_eq!(leasehold::parse_duration("1h30m")?, Duration::from_secs(5400));
/// assert!(leasehold::parse_duration("30").is_err());
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// # Errors
///
/// [`ErrorKind::InvalidOption`] for anything else.
pub fn parse_duration(text: &str) -> Result<Duration, Error> {
    let refuse = || {
        Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{text:?} is not a duration: write a number and its unit, such as 250ms, 30s, 5m, 1h or 7d"
            ),
        )
    };
    // humantime also knows months, years and units in words; `5M` would be five months.
    let known = |c: char| c.is_ascii_digit() || "dhms".contains(c);
    if !text.chars().all(known) {
        return Err(refuse());
    }
    humantime::parse_duration(text).map_err(|error| refuse().with_source(error))
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
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(millis), "{text}");
        }
    }

    #[test]
    fn refuses_what_could_be_meant_otherwise() {
        for bad in [
            "",
            "30",
            "s",
            "-1s",
            "1.5s",
            "5M",
            "1month",
            "1y",
            "1w",
            "5 m",
            "1S",
            "١s",
            "99999999999999999999s",
        ] {
            let error = parse_duration(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{bad:?}");
            assert!(error.message().contains("30s"), "{error}");
        }
    }
}
