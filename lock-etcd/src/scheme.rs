//! Opens the store by its URL.

use std::any::{Any, TypeId};

use leasehold_api::Error;
use leasehold_engine::scheme::{OpenOptions, Scheme, StoreConfig, StoreUrl};
use leasehold_engine::{Engine, EngineBuilder, async_trait};

use crate::config::{self, EtcdConfig, EtcdCredentials};

/// The URL schemes of this store, for the facade and other programs that open stores by URL.
pub const SCHEMES: &[Scheme] = &[Scheme::new(&["etcd", "etcds"], read)];

fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
    Ok(Box::new(config::read(url)?))
}

#[async_trait]
impl StoreConfig for EtcdConfig {
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
        let mut config = self.clone();
        config.look_only = options.is_look_only();
        if let Some(credentials) = options.extension::<EtcdCredentials>() {
            config = config.credentials_from(credentials.clone());
        }
        Ok(Engine::builder(config.backend().await?))
    }

    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        if id == TypeId::of::<Self>() { Some(self) } else { None }
    }
}
