//! From a Postgres URL to its store.

use std::sync::Arc;

use leasehold_api::{Error, Lock};

use crate::postgres_url::{PgStore, PgTarget};

pub(crate) async fn open(target: PgTarget) -> Result<Arc<dyn Lock>, Error> {
    match target.store {
        #[cfg(feature = "postgres-advisory")]
        PgStore::Advisory => {
            let config = crate::postgres_advisory::AdvisoryConfig::new(server(&target)?);
            Ok(Arc::new(config.hasher(hasher(&target)).connect().await?))
        }
        #[cfg(feature = "postgres-advisory")]
        PgStore::AdvisoryXact => {
            let config = crate::postgres_advisory::XactConfig::new(server(&target)?);
            Ok(Arc::new(config.hasher(hasher(&target)).connect().await?))
        }
        #[cfg(feature = "postgres-row")]
        PgStore::Row => {
            let mut config = crate::postgres_row::RowConfig::new(server(&target)?);
            if let Some(poll) = target.poll {
                config = config.poll(poll);
            }
            Ok(Arc::new(config.connect().await?))
        }
        #[cfg(feature = "postgres-ttl")]
        PgStore::Ttl => {
            let mut config = crate::postgres_ttl::TtlConfig::new(server(&target)?);
            if let Some(poll) = target.poll {
                config = config.poll(poll);
            }
            if let Some(ttl) = target.ttl {
                config = config.ttl(ttl);
            }
            Ok(Arc::new(config.connect().await?))
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
        _ => Err(crate::target::invalid(
            "this needs the URL of a Postgres database, such as postgres://user@host:5432/database",
        )),
    }
}

#[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
fn server(target: &PgTarget) -> Result<crate::postgres::PgConfig, Error> {
    use crate::postgres::{Identifier, PgConfig, Pooler};
    use crate::postgres_url::PgPooler;

    let mut config = PgConfig::from_url(&target.server.0)?.install_schema(target.install);
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
    Ok(config)
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
