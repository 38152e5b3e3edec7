//! Fuzz targets: URLs of stores, whose passwords must not be shown, and durations.

use std::error::Error as _;
use std::time::Duration;

use fuzzing::{Fuzz, text};
use leasehold_api::Error;
use leasehold_engine::scheme::StoreUrl;

use crate::{parse_duration, stores};

const PASSWORD: &str = "Hunter2x";

const URLS: Fuzz<'_> = Fuzz {
    target: "urls",
    inputs: 10_000,
    examples: &[
        "memory:",
        "memory:jobs?ttl=30s",
        "file:///var/lib/locks?poll=20ms&mode=0660&read-only=true",
        "file://localhost/var/lib/my%20locks",
        "file://app:Hunter2x@host/locks",
        "postgres://app:Hunter2x@db:5432/ledger?sslmode=require",
        "postgresql+advisory://app:Hunter2x@[::1]:5433/my%20db?hash=djb2-reverse&confirm_every=500ms&lost_after=3s&server_gives_up=1m",
        "postgres+advisory-xact://db/x?password=Hunter2x&user=app&pooler=transaction&connect_timeout=3",
        "postgres+row://a%40b:p%3FHunter2x%2F@/x?host=/run/pg&schema=My%20%22locks&install=true&poll=500ms",
        "postgres+ttl://app:Hunter2x@db/x?ttl=45s&options=-c%20work_mem%3D1MB&options[geqo]=off&statement_timeout=2s",
        "etcd://app:Hunter2x@a.example:2379,b.example:2379,[::1]:2379/team/locks?ttl=45s&handover=off",
        "etcd://a,b,c/locks",
    ],
    words: &[
        "postgres://",
        "app:Hunter2x@",
        ":Hunter2x@",
        "Hunter2x",
        "password=",
        "?password=Hunter2x",
        "&schema=",
        "&schema=a",
        "sslmode=",
        "sslrootcert=",
        "application_name=",
        "hostaddr=",
        "port=",
        "dbname=",
        "options=",
        "statement-cache-capacity=",
        "lost_after=",
        "ttl=",
        "30s",
        "hash=",
        "raw",
        "[::1]",
        "%40",
        "%zz",
        "+row",
        "etcd://",
        "a:2379,",
        "//",
        "@db",
    ],
};

#[test]
fn fuzz_urls() {
    URLS.check(|input| {
        let url = text(input);
        let settings = stores::read(&url);
        is_silent(&url, &settings.as_ref().map_or_else(said, |settings| format!("{settings:?}")));
        if let (Ok(settings), Some(printed)) = (&settings, stores::parse(&url).ok().as_ref().and_then(print))
        {
            let again = stores::read(&printed).unwrap_or_else(|error| panic!("{printed}: {error}"));
            assert_eq!(format!("{again:?}"), format!("{settings:?}"), "{printed}");
            #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
            assert_eq!(crate::postgres_credentials(&printed).ok(), crate::postgres_credentials(&url).ok());
        }
        #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
        {
            let config = crate::postgres_config(&url);
            let shown = config.as_ref().map(|config| format!("{config:?} {config}"));
            is_silent(&url, &shown.unwrap_or_else(said));
        }
    });
}

/// Returns the whole text of an error, with its sources.
fn said(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut cause = error.source();
    while let Some(source) = cause {
        text += &format!(" {source} {source:?}");
        cause = source.source();
    }
    text
}

fn is_silent(url: &str, shown: &str) {
    assert!(!has_password(url) || !shown.contains(PASSWORD), "the password is shown: {shown}");
}

/// Returns whether the URL contains the password, possibly unescaped.
fn has_password(url: &str) -> bool {
    let Some((scheme, rest)) = url.split_once("://") else { return false };
    let Some((before, behind)) = rest.split_once(PASSWORD) else { return false };
    let is_scheme = scheme.trim().chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let is_path = scheme.trim().eq_ignore_ascii_case("file") && before.contains('/');
    let of_user = !is_path && before.contains(':') && !before.contains('@') && behind.contains('@');
    let is_parameter = before.ends_with("?password=") || before.ends_with("&password=");
    let is_first = before.matches('?').count() == 1 && !before.contains('#');
    // Decodes the URL as the parser does, because the decoded text can show the password elsewhere.
    let plain = url.replace(['\t', '\n', '\r'], "");
    let decoded = url::form_urlencoded::parse(plain.as_bytes());
    let times: usize = decoded.map(|(name, value)| (name + &*value).matches(PASSWORD).count()).sum();
    is_scheme && times == 1 && (of_user || is_parameter && is_first)
}

/// Returns the duration as text that can be parsed. `None` above a million days, because longer durations cannot always
/// be parsed.
fn written(duration: Duration) -> Option<String> {
    let days = duration.as_secs() / 86_400;
    (days <= 1_000_000).then(|| format!("{days}d{}ms", duration.as_millis() % 86_400_000))
}

/// Returns a URL of the same store, with re-encoded parameters. `None` if it could not be parsed again.
fn print(url: &StoreUrl) -> Option<String> {
    let before = url.rest.split('?').next().unwrap_or_default();
    // Skips URLs whose end changes their meaning: a user without a host is parsed only at the end of a URL, and
    // trailing control characters are dropped.
    if before.ends_with(|c: char| c == '@' || c.is_ascii_control()) {
        return None;
    }
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(&url.parameters);
    Some(format!("{}:{before}?{}", url.scheme, query.finish()))
}

const DURATIONS: Fuzz<'_> = Fuzz {
    target: "durations",
    inputs: 20_000,
    examples: &["250ms", "30s", "5m", "1h", "7d", "1h30m", "1d2h3m4s5ms", "1000000d", "PT30S"],
    words: &["d", "h", "m", "s", "ms", "us", "y", "1", "99999999999", "٣"],
};

#[test]
fn fuzz_durations() {
    DURATIONS.check(|input| {
        let given = text(input);
        let Ok(duration) = parse_duration(&given) else { return };
        assert_eq!(duration, sum(&given), "{given}");
        if let Some(text) = written(duration) {
            assert_eq!(parse_duration(&text).unwrap(), duration);
        }
    });
}

/// Returns the duration as the sum of its numbers with units.
fn sum(text: &str) -> Duration {
    let (mut millis, mut rest) = (0, text);
    while let Some(end) = rest.find(|c: char| !c.is_ascii_digit()) {
        let number: u128 = rest[..end].parse().unwrap();
        let unit_end = rest[end..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| end + at);
        let unit = match &rest[end..unit_end] {
            "d" => 86_400_000,
            "h" => 3_600_000,
            "m" => 60_000,
            "s" => 1_000,
            "ms" => 1,
            other => panic!("{other} is no unit"),
        };
        millis += number * unit;
        rest = &rest[unit_end..];
    }
    assert_eq!(rest, "");
    Duration::from_millis(millis.try_into().unwrap())
}
