//! URLs of stores, read strictly. No error here repeats the URL: it may hold a password.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use url::Url;

use crate::duration::parse_duration;
use crate::postgres_url::{PgStore, PgTarget};
use crate::schemes;

/// The URLs that [`connect`](crate::connect) knows, for messages.
const KNOWN: &str = "memory:, memory:NAME, file:///DIRECTORY, and postgres:// also with +advisory, +advisory-xact, +row or +ttl";

/// What a URL names, whether or not that store is compiled in.
#[derive(Debug)]
pub(crate) enum Target {
    Memory { name: Option<String>, ttl: Option<Duration> },
    File { directory: PathBuf, poll: Option<Duration>, mode: Option<u32>, read_only: bool },
    Postgres(PgTarget),
}

impl Target {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let url = Url::parse(&with_one_host(text)).map_err(|error| {
            // A password is cut at the first of these, and its rest is no port.
            let escape = if text.starts_with("postgres") && text.contains('@') {
                "; if the password has special characters, percent-encode the password: / as %2F, ? as %3F, # as %23, @ as %40"
            } else {
                ""
            };
            let others = schemes::known();
            invalid(format!("this is not the URL of a store{escape}; known are {KNOWN}{others}")).with_source(error)
        })?;
        // As it was given: the parser completes `file:x` to `file:///x`.
        let rest = text.split_once(':').map_or("", |(_, rest)| rest);
        match url.scheme() {
            "memory" => memory(&url, rest),
            "file" => file(&url, rest),
            scheme => match PgStore::of_scheme(scheme) {
                Some(store) => PgTarget::parse(store, &url, rest).map(Target::Postgres),
                None => {
                    let others = schemes::known();
                    Err(invalid(format!("no store has the scheme {scheme:?}; known are {KNOWN}{others}")))
                }
            },
        }
    }
}

/// The URL of several hosts, or of a user and no host, with one in their place: URLs of Postgres know both, URLs in general
/// neither.
fn with_one_host(text: &str) -> Cow<'_, str> {
    let of_postgres = |scheme: &str| PgStore::of_scheme(&scheme.to_ascii_lowercase()).is_some();
    let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| of_postgres(scheme)) else {
        return text.into();
    };
    let (authority, behind) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) =
        authority.rsplit_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
    match login {
        Some(login) if hosts.is_empty() || hosts.contains(',') => {
            format!("{scheme}://{login}@host{behind}").into()
        }
        None if hosts.contains(',') => format!("{scheme}://host{behind}").into(),
        _ => text.into(),
    }
}

/// Whether this scheme names one of the stores here, compiled in or not.
pub(crate) fn is_ours(scheme: &str) -> bool {
    ["memory", "file"].contains(&scheme) || PgStore::of_scheme(scheme).is_some()
}

fn memory(url: &Url, rest: &str) -> Result<Target, Error> {
    if rest.starts_with('/') {
        return Err(invalid("a memory URL has no host and no slashes: write memory: or memory:NAME"));
    }
    let name = Some(url.path()).filter(|name| !name.is_empty()).map(str::to_owned);
    Ok(Target::Memory { name, ttl: only_parameter(url, "ttl")? })
}

fn file(url: &Url, rest: &str) -> Result<Target, Error> {
    // `file:dir` and `file://dir` would be read as /dir and as a host: neither is what was meant.
    if !rest.starts_with("///") && !rest.starts_with("//localhost/") {
        return Err(invalid(
            "a file URL names an absolute path on this machine, with three slashes and without a host or a user: write file:///var/lib/locks",
        ));
    }
    let directory = url
        .to_file_path()
        .ok()
        .filter(|path| path.parent().is_some())
        .ok_or_else(|| invalid("a file URL names a directory of its own: write file:///var/lib/locks"))?;
    let (mut poll, mut mode, mut read_only) = (None, None, None);
    no_fragment(url)?;
    for (given, text) in url.query_pairs() {
        match &*given {
            "poll" => once("poll", &mut poll, duration("poll", &text)?)?,
            "mode" => once("mode", &mut mode, octal(&text)?)?,
            "read-only" if text == "true" => once("read-only", &mut read_only, ())?,
            "read-only" => return Err(invalid("the parameter read-only is true or left out")),
            _ => {
                return Err(invalid(format!(
                    "a file URL has no parameter {given:?}; those it has are poll, mode and read-only"
                )));
            }
        }
    }
    Ok(Target::File { directory, poll, mode, read_only: read_only.is_some() })
}

/// Permissions as they are written for files: 0660.
fn octal(text: &str) -> Result<u32, Error> {
    u32::from_str_radix(text, 8).map_err(|error| {
        invalid("the parameter mode is written in octal: 0660 for one group, 0666 for everybody")
            .with_source(error)
    })
}

fn once<T>(name: &str, value: &mut Option<T>, given: T) -> Result<(), Error> {
    match value.replace(given) {
        None => Ok(()),
        Some(_) => Err(invalid(format!("the parameter {name} is given twice; leave one out"))),
    }
}

fn no_fragment(url: &Url) -> Result<(), Error> {
    if url.fragment().is_some() {
        return Err(invalid("the URL of a store has no fragment; write a # that belongs to a name as %23"));
    }
    Ok(())
}

/// The value of the one parameter, a duration, that the scheme has.
fn only_parameter(url: &Url, name: &str) -> Result<Option<Duration>, Error> {
    no_fragment(url)?;
    let mut value = None;
    for (given, text) in url.query_pairs() {
        if given != name {
            let scheme = url.scheme();
            return Err(invalid(format!(
                "a {scheme} URL has no parameter {given:?}; the one it has is {name}"
            )));
        }
        once(name, &mut value, duration(name, &text)?)?;
    }
    Ok(value)
}

/// The value of the parameter `name`, which is longer than zero.
pub(crate) fn duration(name: &str, text: &str) -> Result<Duration, Error> {
    let duration = parse_duration(text)
        .map_err(|error| invalid(format!("the parameter {name}: {}", error.message())))?;
    if duration.is_zero() {
        return Err(invalid(format!("the parameter {name} cannot be zero; leave it out for the default")));
    }
    Ok(duration)
}

pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}
