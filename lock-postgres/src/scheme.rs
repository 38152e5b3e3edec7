//! Postgres URLs: the parameters common to all stores on a server, and the parameters of libpq and the driver.

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::scheme::{OpenOptions, Parameters, StoreUrl, given_twice, invalid};

use crate::config::{PgConfig, Pooler};
use crate::connect::credentials::{Credentials, Source};
use crate::connect::libpq::is_parameter;
use crate::ident::Identifier;
use crate::schema::Stores;

/// Parameters common to all stores.
const COMMON: [&str; 6] = ["schema", "install", "pooler", "connect_timeout", "statement_timeout", "idle"];

/// The values of the parameter `pooler`.
const POOLERS: [(&str, Pooler); 3] =
    [("transaction", Pooler::Transaction), ("none", Pooler::None), ("detect", Pooler::Detect)];

/// Reads the URL of a store whose specific parameters are `own`. Returns the configuration and the parameters that do
/// not belong to libpq. The environment counts as in [`PgConfig::from_url`].
///
/// # Errors
///
/// [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption), without the URL, which may hold a password.
pub fn server(url: &StoreUrl, own: &[&str]) -> Result<(PgConfig, Parameters), Error> {
    let (driver_url, given) = split(url, own)?;
    let install = given.one_of("install", &[("true", true), ("false", false)])?;
    let mut config = PgConfig::from_url(&driver_url)?.install_schema(install.unwrap_or(false));
    if let Some(schema) = given.get("schema") {
        config = config.schema(Identifier::new(schema)?);
    }
    if let Some(pooler) = given.one_of("pooler", &POOLERS)? {
        config = config.pooler(pooler);
    }
    if let Some(timeout) = connect_timeout(&given)? {
        config = config.connect_timeout(timeout);
    }
    if let Some(timeout) = given.duration("statement_timeout")? {
        config = config.statement_timeout(timeout);
    }
    if let Some(idle) = given.duration("idle")? {
        config = config.idle(idle);
    }
    config.check()?;
    Ok((config, given))
}

/// Returns the user and the password of `url`, or of the environment if the URL has none. Ignores parameters that do
/// not belong to libpq.
///
/// # Errors
///
/// As [`Credentials::from_url`].
pub fn credentials(url: &StoreUrl) -> Result<Credentials, Error> {
    let names: Vec<_> = url.parameters.iter().map(|(name, _)| name.as_str()).collect();
    let own: Vec<_> = names.into_iter().filter(|name| !is_parameter(name)).collect();
    Credentials::from_url(&split(url, &own)?.0)
}

/// The [credentials](PgConfig::credentials) of a store opened by URL: an extension of [`OpenOptions`].
#[derive(Clone)]
pub struct ProgramCredentials(Source);

impl ProgramCredentials {
    /// Calls `credentials` as [`PgConfig::credentials`] does.
    pub fn new<F, C>(credentials: C) -> Self
    where
        F: Future<Output = Result<Credentials, Error>> + Send + 'static,
        C: Fn() -> F + Send + Sync + 'static,
    {
        Self(Source::Program(Arc::new(move || Box::pin(credentials()))))
    }

    /// Returns `config` with the program's credentials from `options`, if any.
    #[must_use]
    pub fn of(options: &OpenOptions, config: &PgConfig) -> PgConfig {
        let config = config.clone();
        match options.extension::<Self>() {
            Some(Self(source)) => PgConfig { source: source.clone(), ..config },
            None => config,
        }
    }
}

impl std::fmt::Debug for ProgramCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProgramCredentials(..)")
    }
}

/// Returns the setting of type `id` that every store on a server exposes: the server, or the stores for which the role
/// needs privileges.
#[must_use]
pub fn extension<'a>(
    id: TypeId,
    server: &'a PgConfig,
    stores: &'static Stores,
) -> Option<&'a (dyn Any + Send + Sync)> {
    if id == TypeId::of::<PgConfig>() {
        Some(server)
    } else if id == TypeId::of::<Stores>() {
        Some(stores)
    } else {
        None
    }
}

/// Splits the URL into a driver URL, which keeps the libpq parameters, and the store's parameters.
fn split(url: &StoreUrl, own: &[&str]) -> Result<(String, Parameters), Error> {
    if !url.rest.starts_with("//") {
        return Err(invalid(
            "a Postgres URL has two slashes behind its scheme: write postgres://user@host:5432/database",
        ));
    }
    if url.has_fragment {
        return Err(invalid(
            "a Postgres URL has no fragment; write a # that belongs to a name or password as %23",
        ));
    }
    let (before_query, query) = url.rest.split_once('?').unwrap_or((&url.rest, ""));
    // Refuses an `@` in the path, because errors show the database name, and here it would be the rest of a
    // password.
    if before_query[2..].split_once('/').is_some_and(|(_, path)| path.contains('@')) {
        return Err(invalid(
            "the URL has a / before its @: escape special characters of user and password, / as %2F and @ as %40",
        ));
    }
    if query.contains('@') && !before_query.contains('@') {
        return Err(invalid(
            "the URL has a ? before its @: escape special characters of user and password, ? as %3F and @ as %40",
        ));
    }
    let (mut ours, mut of_driver) = (Vec::new(), Vec::new());
    for (at, (name, value)) in url.parameters.iter().enumerate() {
        let is_repeatable = name == "options" || (name.starts_with("options[") && name.ends_with(']'));
        if !is_repeatable && url.parameters[..at].iter().any(|(earlier, _)| earlier == name) {
            return Err(given_twice(name));
        }
        // Refuses this value, because it contains a password and messages repeat it.
        if value.to_ascii_lowercase().contains(";password=") {
            return Err(invalid(format!(
                "after the parameter {name}, separate parameters by & and not by ;"
            )));
        }
        let pair = (name.clone(), value.clone());
        if COMMON.iter().chain(own).any(|known| known == name) {
            ours.push(pair);
        } else if is_parameter(name) {
            of_driver.push(pair);
        } else {
            return Err(unknown(name, own));
        }
    }
    let mut text = format!("postgres:{before_query}");
    if !of_driver.is_empty() {
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.extend_pairs(of_driver);
        text += &format!("?{}", query.finish());
    }
    Ok((text, url.with_parameters(ours)))
}

fn unknown(name: &str, own: &[&str]) -> Error {
    let ours: Vec<_> = COMMON.iter().chain(own).copied().collect();
    // Shows only names that a parameter could have, because another name might be a piece of a password.
    let is_plain = name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '-');
    let which = if is_plain { format!("{name:?}") } else { "of that name".to_owned() };
    invalid(format!(
        "this store has no parameter {which} and neither has libpq; known are {}, and those of libpq, such as sslmode, sslrootcert, host, port, dbname, user, password, application_name, options",
        ours.join(", ")
    ))
}

/// Reads the timeout as a duration with a unit, or as whole seconds like libpq. The driver does not apply this
/// parameter.
fn connect_timeout(given: &Parameters) -> Result<Option<Duration>, Error> {
    let name = "connect_timeout";
    let timeout = match given.get(name).map(str::parse) {
        Some(Ok(seconds)) => Some(Duration::from_secs(seconds)),
        _ => given.duration(name)?,
    };
    let bounds = Duration::from_secs(1)..=Duration::from_secs(3600);
    if timeout.is_none_or(|timeout| bounds.contains(&timeout)) {
        return Ok(timeout);
    }
    Err(invalid("the parameter connect_timeout is 1 to 3600 seconds: write 5 or 5s"))
}

#[cfg(test)]
mod tests;
