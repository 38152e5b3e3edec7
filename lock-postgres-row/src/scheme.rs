//! `postgres+row:` URLs.

use std::any::{Any, TypeId};
use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::scheme::{HANDOVER, OpenOptions, Scheme, StoreConfig, StoreUrl, invalid};
use leasehold_engine::{Engine, EngineBuilder, async_trait};
use leasehold_postgres::schema::Stores;
use leasehold_postgres::scheme::{self, ProgramCredentials};

use crate::config::{CONFIRMS, RowConfig};

/// The schemes of this store.
pub const SCHEMES: &[Scheme] = &[Scheme::new(&["postgres+row", "postgresql+row"], read)];

fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
    let (server, given) = scheme::server(url, &["poll", "lost_after", "handover"])?;
    let mut config = RowConfig::new(server);
    if let Some(poll) = given.duration("poll")? {
        config = config.poll(poll);
    }
    if let Some(lost_after) = given.duration("lost_after")? {
        config = config.confirm(confirm_of(lost_after)?);
    }
    if let Some(handover) = given.one_of("handover", &HANDOVER)? {
        config = config.handover(handover);
    }
    Ok(Box::new(config))
}

/// Returns the interval at which holders check their rows. After `lost_after` without an answer the rows count as lost.
fn confirm_of(lost_after: Duration) -> Result<Duration, Error> {
    let confirm = lost_after / CONFIRMS;
    let bounds = Duration::from_millis(50)..=Duration::from_secs(60);
    if !bounds.contains(&confirm) {
        return Err(invalid("the parameter lost_after of rows is 250ms to 5m"));
    }
    Ok(confirm)
}

#[async_trait]
impl StoreConfig for RowConfig {
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
        let mut config = self.clone();
        config.postgres = ProgramCredentials::of(options, &self.postgres);
        Ok(Engine::builder(config.backend().await?))
    }

    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        scheme::extension(id, &self.postgres, &Stores::Row)
    }
}
