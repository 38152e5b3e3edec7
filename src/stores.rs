//! The stores that a URL can name. Errors never repeat the URL, because it might contain a password.

use std::borrow::Cow;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::scheme::{Scheme, StoreConfig, StoreUrl, invalid};
use url::Url;

use crate::{parse_duration, schemes};

/// A row of [`STORES`]: a store that a URL can name.
struct StoreEntry {
    /// The cargo feature that compiles the store in.
    feature: &'static str,
    /// The schemes of the store's URLs.
    schemes: &'static [&'static str],
    /// The forms of the store's URLs, for messages. Empty if another row names the same store.
    urls: &'static str,
    /// The schemes that the store's crate exports. `None` if the store was not compiled in.
    compiled_in: Option<&'static [Scheme]>,
}

/// Builds a row of [`STORES`].
macro_rules! store {
    ($feature:tt, $package:ident, $schemes:expr, $urls:expr) => {
        StoreEntry {
            feature: $feature,
            schemes: &$schemes,
            urls: $urls,
            #[cfg(feature = $feature)]
            compiled_in: Some($package::SCHEMES),
            #[cfg(not(feature = $feature))]
            compiled_in: None,
        }
    };
}

/// All stores. A new store adds a row here, and its feature to the `Cargo.toml` of the facade and of `lock-cli`.
#[rustfmt::skip]
const STORES: &[StoreEntry] = &[
    store!("memory", leasehold_memory, ["memory"], "memory:, memory:NAME"),
    store!("file", leasehold_file, ["file"], "file:///DIRECTORY"),
    store!(
        "postgres-advisory",
        leasehold_postgres_advisory,
        ["postgres", "postgresql", "postgres+advisory", "postgresql+advisory", "postgres+advisory-xact", "postgresql+advisory-xact"],
        "postgres:// also with +advisory, +advisory-xact, +row or +ttl"
    ),
    store!("postgres-row", leasehold_postgres_row, ["postgres+row", "postgresql+row"], ""),
    store!("postgres-ttl", leasehold_postgres_ttl, ["postgres+ttl", "postgresql+ttl"], ""),
    store!("etcd", leasehold_etcd, ["etcd", "etcds"], "etcd:// or etcds://HOST,HOST/PREFIX"),
];

/// Returns the settings of the store that `url` names, without opening it.
pub(crate) fn read(url: &str) -> Result<Box<dyn StoreConfig>, Error> {
    let url = parse(url)?;
    if let Some(scheme) = schemes::find(&url.scheme) {
        return scheme.read(&url);
    }
    let store = find(&url.scheme)
        .ok_or_else(|| invalid(format!("no store has the scheme {:?}; known are {}", url.scheme, known())))?;
    let schemes = store.compiled_in.ok_or_else(|| not_compiled_in(store.feature))?;
    let scheme = schemes.iter().find(|scheme| scheme.names().contains(&url.scheme.as_str()));
    scheme.ok_or_else(|| not_compiled_in(store.feature))?.read(&url)
}

/// Returns whether this scheme names a store of leasehold, compiled in or not.
pub(crate) fn is_ours(scheme: &str) -> bool {
    find(scheme).is_some()
}

fn find(scheme: &str) -> Option<&'static StoreEntry> {
    STORES.iter().find(|store| store.schemes.contains(&scheme))
}

/// Parses a URL with any scheme.
pub(crate) fn parse(text: &str) -> Result<StoreUrl, Error> {
    let text = text.trim();
    let url = Url::parse(&with_one_host(text)).map_err(|error| {
        // Adds advice on escaping: an unescaped `/`, `?` or `#` ends the password early, and the parser fails on a port
        // that is not a number.
        let escape = if text.contains("://") && text.contains('@') {
            "; if the password has special characters, percent-encode the password: / as %2F, ? as %3F, # as %23, @ as %40"
        } else {
            ""
        };
        invalid(format!("this is not the URL of a store{escape}; known are {}", known())).with_source(error)
    })?;
    Ok(StoreUrl {
        scheme: url.scheme().to_owned(),
        // Takes the rest from the text, because the parser completes `file:x` to `file:///x`.
        rest: text.split_once(':').map_or("", |(_, rest)| rest).to_owned(),
        path: url.path().to_owned(),
        file_path: url.to_file_path().ok(),
        has_fragment: url.fragment().is_some(),
        parameters: url.query_pairs().into_owned().collect(),
        parse_duration,
    })
}

/// Returns the URL in a form that the parser accepts. If it has several hosts, or a user without a host, it gets one
/// host instead. Postgres URLs can have both forms and etcd URLs several hosts, but the URL parser accepts neither form.
fn with_one_host(text: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = text.split_once("://") else { return text.into() };
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

/// Returns the URLs that [`connect`](crate::connect()) knows, for messages.
fn known() -> String {
    let urls: Vec<_> = STORES.iter().map(|store| store.urls).filter(|urls| !urls.is_empty()).collect();
    let (last, others) = urls.split_last().unwrap_or((&"", &[]));
    format!("{}, and {last}{}", others.join(", "), schemes::known())
}

fn not_compiled_in(feature: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "this program was compiled without the {feature} store; switch on the cargo feature `{feature}` of the crate leasehold"
        ),
    )
}

#[cfg(test)]
mod tests;
