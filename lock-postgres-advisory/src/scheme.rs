//! `postgres:` and `postgres+advisory:` URLs (session scope), and `postgres+advisory-xact:` URLs (transaction scope).

use std::any::{Any, TypeId};
use std::sync::Arc;

use leasehold_api::Error;
use leasehold_engine::scheme::{HANDOVER, OpenOptions, Parameters, Scheme, StoreConfig, StoreUrl};
use leasehold_engine::{Engine, EngineBuilder, async_trait};
use leasehold_postgres::schema::Stores;
use leasehold_postgres::scheme::{self, ProgramCredentials};
use leasehold_postgres::{
    Djb2Xor, Fnv1a64, KeyNumber, Liveness, PgConfig, RawBigint, RawPair, Sha256, SqlxNames,
};

use crate::config::{AdvisoryConfig, XactConfig};

/// The schemes of this store.
pub const SCHEMES: &[Scheme] = &[
    Scheme::new(&["postgres", "postgresql", "postgres+advisory", "postgresql+advisory"], |url| {
        let (server, hasher, given) = read(url, &SESSION)?;
        let handover = given.one_of("handover", &HANDOVER)?.unwrap_or(true);
        Ok(Box::new(AdvisoryConfig::new(server).hasher(hasher).handover(handover)))
    }),
    Scheme::new(&["postgres+advisory-xact", "postgresql+advisory-xact"], |url| {
        let (server, hasher, _) = read(url, &TRANSACTION)?;
        Ok(Box::new(XactConfig::new(server).hasher(hasher)))
    }),
];

type Hasher = fn() -> Arc<dyn KeyNumber>;

/// The values of the parameter `hash`, which selects the mapping from keys to numbers.
const HASHERS: [(&str, Hasher); 7] = [
    ("fnv", || Arc::new(Fnv1a64)),
    ("sha256", || Arc::new(Sha256::default())),
    ("raw", || Arc::new(RawBigint)),
    ("pair", || Arc::new(RawPair)),
    ("djb2", || Arc::new(Djb2Xor::Forward)),
    ("djb2-reverse", || Arc::new(Djb2Xor::Reverse)),
    ("sqlx", || Arc::new(SqlxNames)),
];

/// The parameters of the transaction store, and of the session store.
const TRANSACTION: [&str; 4] = ["hash", "confirm_every", "lost_after", "server_gives_up"];
const SESSION: [&str; 5] = ["hash", "confirm_every", "lost_after", "server_gives_up", "handover"];

fn read(url: &StoreUrl, own: &[&str]) -> Result<(PgConfig, Arc<dyn KeyNumber>, Parameters), Error> {
    let (server, given) = scheme::server(url, own)?;
    let server = server.liveness(liveness(&given)?);
    server.check()?;
    let hasher = given.one_of("hash", &HASHERS)?;
    Ok((server, hasher.map_or_else(|| Arc::new(Fnv1a64) as _, |make| make()), given))
}

/// Reads the liveness parameters. Missing ones are derived from `lost_after` in the default ratio.
fn liveness(given: &Parameters) -> Result<Liveness, Error> {
    let lost_after = given.duration("lost_after")?.unwrap_or(Liveness::default().lost_after);
    Ok(Liveness::new(
        given.duration("confirm_every")?.unwrap_or(lost_after * 3 / 10),
        lost_after,
        given.duration("server_gives_up")?.unwrap_or(lost_after * 3 / 2),
    ))
}

#[async_trait]
impl StoreConfig for AdvisoryConfig {
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
        let mut config = self.clone();
        config.server = ProgramCredentials::of(options, &self.server);
        Ok(Engine::builder(config.backend().await?))
    }

    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        scheme::extension(id, &self.server, &Stores::Advisory)
    }
}

#[async_trait]
impl StoreConfig for XactConfig {
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
        let mut config = self.clone();
        config.server = ProgramCredentials::of(options, &self.server);
        Ok(Engine::builder(config.backend().await?))
    }

    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        scheme::extension(id, &self.server, &Stores::Advisory)
    }
}
