//! From a Postgres URL to its store.

use std::sync::Arc;

use leasehold_api::{Error, Lock};

use crate::connect::ConnectOptions;
#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
use crate::engine::Engine;
use crate::postgres_url::{PgStore, PgTarget};

#[cfg_attr(
    not(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl")),
    allow(unused_variables) // There is nothing to open.
)]
pub(crate) async fn open(target: PgTarget, options: ConnectOptions) -> Result<Arc<dyn Lock>, Error> {
    match target.store {
        #[cfg(feature = "postgres-advisory")]
        PgStore::Advisory => {
            let config = crate::postgres_advisory::AdvisoryConfig::new(options.log_in(server(&target)?));
            options.start(Engine::builder(config.hasher(hasher(&target)).backend().await?))
        }
        #[cfg(feature = "postgres-advisory")]
        PgStore::AdvisoryXact => {
            let config = crate::postgres_advisory::XactConfig::new(options.log_in(server(&target)?));
            options.start(Engine::builder(config.hasher(hasher(&target)).backend().await?))
        }
        #[cfg(feature = "postgres-row")]
        PgStore::Row => {
            let mut config = crate::postgres_row::RowConfig::new(options.log_in(server(&target)?));
            if let Some(poll) = target.poll {
                config = config.poll(poll);
            }
            if let Some(lost_after) = target.lost_after {
                config = config.confirm(confirm_of(lost_after)?);
            }
            options.start(Engine::builder(config.backend().await?))
        }
        #[cfg(feature = "postgres-ttl")]
        PgStore::Ttl => {
            let mut config = crate::postgres_ttl::TtlConfig::new(options.log_in(server(&target)?));
            if let Some(poll) = target.poll {
                config = config.poll(poll);
            }
            if let Some(ttl) = target.ttl {
                config = config.ttl(ttl);
            }
            options.start(Engine::builder(config.backend().await?))
        }
        #[cfg(not(feature = "postgres-advisory"))]
        PgStore::Advisory | PgStore::AdvisoryXact => {
            Err(crate::connect::not_compiled_in("postgres-advisory"))
        }
        #[cfg(not(feature = "postgres-row"))]
        PgStore::Row => Err(crate::connect::not_compiled_in("postgres-row")),
        #[cfg(not(feature = "postgres-ttl"))]
        PgStore::Ttl => Err(crate::connect::not_compiled_in("postgres-ttl")),
    }
}

/// The server, database and schema that a Postgres URL names, for what is done there besides locking:
/// installing the schema, looking at the server.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for the URL of another store and for everything
/// that [`connect`](crate::connect()) would refuse about it. No error repeats the URL.
#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
pub fn postgres_config(url: &str) -> Result<crate::postgres::PgConfig, Error> {
    match crate::target::Target::parse(url)? {
        crate::target::Target::Postgres(target) => server(&target),
        _ => Err(not_of_postgres()),
    }
}

/// The user and the password that a Postgres URL names, or the environment where it names none: for
/// [`ConnectOptions::credentials`], where the URL is a secret that changes. Nothing else of the URL counts.
///
/// # Errors
///
/// As [`postgres_config`].
#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
pub fn postgres_credentials(url: &str) -> Result<crate::postgres::Credentials, Error> {
    match crate::target::Target::parse(url)? {
        crate::target::Target::Postgres(target) => crate::postgres::Credentials::from_url(&target.server.0),
        _ => Err(not_of_postgres()),
    }
}

#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
fn not_of_postgres() -> Error {
    crate::target::invalid(
        "this needs the URL of a Postgres database, such as postgres://user@host:5432/database",
    )
}

#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
fn server(target: &PgTarget) -> Result<crate::postgres::PgConfig, Error> {
    use crate::postgres::{Identifier, PgConfig, Pooler};
    use crate::postgres_url::PgPooler;

    let mut config = PgConfig::from_url(&target.server.0)?.install_schema(target.install);
    if matches!(target.store, PgStore::Advisory | PgStore::AdvisoryXact) {
        config = config.liveness(liveness(target));
    }
    if let Some(schema) = &target.schema {
        config = config.schema(Identifier::new(schema)?);
    }
    if let Some(pooler) = target.pooler {
        config = config.pooler(match pooler {
            PgPooler::Detect => Pooler::Detect,
            PgPooler::Transaction => Pooler::Transaction,
            PgPooler::None => Pooler::None,
        });
    }
    if let Some(timeout) = target.connect_timeout {
        config = config.connect_timeout(timeout);
    }
    if let Some(timeout) = target.statement_timeout {
        config = config.statement_timeout(timeout);
    }
    if let Some(idle) = target.idle {
        config = config.idle(idle);
    }
    config.check()?;
    Ok(config)
}

/// What the URL leaves out keeps its share of `lost_after`.
#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
fn liveness(target: &PgTarget) -> crate::postgres::Liveness {
    use crate::postgres::Liveness;

    let lost_after = target.lost_after.unwrap_or(Liveness::default().lost_after);
    Liveness::new(
        target.confirm_every.unwrap_or(lost_after * 3 / 10),
        lost_after,
        target.server_gives_up.unwrap_or(lost_after * 3 / 2),
    )
}

/// How often holders of rows look whether these are still theirs, to count them as lost after `lost_after` without
/// an answer.
#[cfg(feature = "postgres-row")]
fn confirm_of(lost_after: std::time::Duration) -> Result<std::time::Duration, Error> {
    let confirm = lost_after / 5;
    let bounds = std::time::Duration::from_millis(50)..=std::time::Duration::from_secs(60);
    if !bounds.contains(&confirm) {
        return Err(crate::target::invalid("the parameter lost_after of rows is 250ms to 5m"));
    }
    Ok(confirm)
}

#[cfg(feature = "postgres-advisory")]
fn hasher(target: &PgTarget) -> Arc<dyn crate::postgres::KeyNumber> {
    use crate::postgres::{Djb2Xor, Fnv1a64, RawBigint, RawPair, Sha256, SqlxNames};
    use crate::postgres_url::PgHash;

    match target.hash {
        None | Some(PgHash::Fnv) => Arc::new(Fnv1a64),
        Some(PgHash::Sha256) => Arc::new(Sha256::default()),
        Some(PgHash::Raw) => Arc::new(RawBigint),
        Some(PgHash::Pair) => Arc::new(RawPair),
        Some(PgHash::Djb2) => Arc::new(Djb2Xor::Forward),
        Some(PgHash::Djb2Reverse) => Arc::new(Djb2Xor::Reverse),
        Some(PgHash::Sqlx) => Arc::new(SqlxNames),
    }
}
