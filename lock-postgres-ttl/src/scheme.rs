//! `postgres+ttl:` URLs.

use std::any::{Any, TypeId};

use leasehold_api::Error;
use leasehold_engine::scheme::{HANDOVER, OpenOptions, Scheme, StoreConfig, StoreUrl};
use leasehold_engine::{Engine, EngineBuilder, async_trait};
use leasehold_postgres::schema::Stores;
use leasehold_postgres::scheme::{self, ProgramCredentials};

use crate::config::TtlConfig;

/// The schemes of this store.
pub const SCHEMES: &[Scheme] = &[Scheme::new(&["postgres+ttl", "postgresql+ttl"], read)];

fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
    let (server, given) = scheme::server(url, &["ttl", "poll", "handover"])?;
    let mut config = TtlConfig::new(server);
    if let Some(ttl) = given.duration("ttl")? {
        config = config.ttl(ttl);
    }
    if let Some(poll) = given.duration("poll")? {
        config = config.poll(poll);
    }
    if let Some(handover) = given.one_of("handover", &HANDOVER)? {
        config = config.handover(handover);
    }
    Ok(Box::new(config))
}

#[async_trait]
impl StoreConfig for TtlConfig {
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
        let mut config = self.clone();
        config.postgres = ProgramCredentials::of(options, &self.postgres);
        Ok(Engine::builder(config.backend().await?))
    }

    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        scheme::extension(id, &self.postgres, &Stores::Lease)
    }
}
