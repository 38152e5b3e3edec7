//! `etcd:` and `etcds:` URLs.

use std::borrow::Cow;
use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::scheme::{HANDOVER, Parameters, StoreUrl};
use percent_encoding::percent_decode_str;

use super::{DEFAULT_PREFIX, EtcdConfig, EtcdTls};
use crate::error::invalid;

/// Reads the settings from a URL. Errors repeat no part that might be a password.
pub(crate) fn read(url: &StoreUrl) -> Result<EtcdConfig, Error> {
    let is_tls = url.scheme == "etcds";
    let known: &[&str] =
        if is_tls { &["ttl", "handover", "ca", "cert", "key"] } else { &["ttl", "handover"] };
    let rest = url.rest.strip_prefix("//").ok_or_else(|| {
        invalid("an etcd URL has two slashes behind its scheme: write etcd://host1,host2,host3/prefix")
    })?;
    let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, prefix) = before_query.split_once('/').unwrap_or((before_query, ""));
    // Refuses these first, because the errors of the parts could repeat a piece of a password.
    if prefix.contains('@') || (query.contains('@') && !authority.contains('@')) {
        return Err(invalid(
            "the URL has a / or a ? before its @: escape special characters of user and password, / as %2F, ? as %3F and @ as %40",
        ));
    }
    let given = url.only(known)?;
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (Some(login), hosts),
        None => (None, authority),
    };
    if hosts.is_empty() {
        return Err(invalid("an etcd URL names its members: write etcd://host1,host2,host3/prefix"));
    }
    let prefix = decoded(prefix.trim_end_matches('/'))?;
    let prefix = if prefix.is_empty() { DEFAULT_PREFIX.into() } else { prefix };
    let mut config = EtcdConfig::new(hosts.split(','), prefix);
    if let Some(login) = login {
        let (user, password) = login.split_once(':').unwrap_or((login, ""));
        config = config.credentials(decoded(user)?, decoded(password)?);
    }
    if is_tls {
        config = config.tls(tls(&given)?);
    }
    if let Some(ttl) = given.duration("ttl")? {
        config = config.ttl(ttl);
    }
    if let Some(handover) = given.one_of("handover", &HANDOVER)? {
        config = config.handover(handover);
    }
    config.addresses()?;
    Ok(config)
}

fn tls(given: &Parameters) -> Result<EtcdTls, Error> {
    let mut tls = EtcdTls::new();
    if let Some(ca) = given.get("ca") {
        tls = tls.ca(ca);
    }
    match (given.get("cert"), given.get("key")) {
        (Some(certificate), Some(key)) => Ok(tls.identity(certificate, key)),
        (None, None) => Ok(tls),
        _ => Err(invalid("the parameters cert and key belong together; name both files or neither")),
    }
}

fn decoded(text: &str) -> Result<Cow<'_, str>, Error> {
    percent_decode_str(text)
        .decode_utf8()
        .map_err(|_| invalid("the percent-encoded parts of an etcd URL are UTF-8 text"))
}

/// Splits a URL as the facade does, for a program that uses this crate alone.
pub(super) fn split(text: &str) -> Result<StoreUrl, Error> {
    let (scheme, rest) = text.trim().split_once(':').unwrap_or(("", ""));
    let scheme = scheme.to_ascii_lowercase();
    if scheme != "etcd" && scheme != "etcds" {
        return Err(invalid("the URL of an etcd cluster begins with etcd:// or etcds://"));
    }
    let (before_fragment, has_fragment) = match rest.split_once('#') {
        Some((before, _)) => (before, true),
        None => (rest, false),
    };
    let (before_query, query) = before_fragment.split_once('?').unwrap_or((before_fragment, ""));
    let path = before_query.trim_start_matches('/').split_once('/').map_or("", |(_, path)| path);
    Ok(StoreUrl {
        scheme,
        rest: before_fragment.to_owned(),
        path: format!("/{path}"),
        file_path: None,
        has_fragment,
        parameters: form_urlencoded::parse(query.as_bytes()).into_owned().collect(),
        parse_duration: whole_seconds,
    })
}

/// Reads a TTL such as `30s`, `5m` or `1h`. The facade also reads other forms.
fn whole_seconds(text: &str) -> Result<Duration, Error> {
    let refuse = || invalid("a TTL is written 30s, 5m or 1h");
    let unit = text.chars().next_back().ok_or_else(refuse)?;
    let factor = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return Err(refuse()),
    };
    let digits = text.trim_end_matches(unit);
    if digits.is_empty() || !digits.chars().all(|c| c.is_ascii_digit()) {
        return Err(refuse());
    }
    let number: u64 = digits.parse().map_err(|_| refuse())?;
    Ok(Duration::from_secs(number.saturating_mul(factor)))
}
