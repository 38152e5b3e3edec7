//! `memory:` URLs.

use leasehold_api::Error;
use leasehold_engine::scheme::{OpenOptions, Scheme, StoreConfig, StoreUrl, invalid};
use leasehold_engine::{EngineBuilder, async_trait};

use crate::config::MemoryStore;

/// The schemes of this store.
pub const SCHEMES: &[Scheme] = &[Scheme::new(&["memory"], read)];

fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
    if url.rest.starts_with('/') {
        return Err(invalid("a memory URL has no host and no slashes: write memory: or memory:NAME"));
    }
    let given = url.only(&["ttl"])?;
    let store = match url.path.as_str() {
        "" => MemoryStore::new(),
        name => MemoryStore::named(name),
    };
    Ok(Box::new(match given.duration("ttl")? {
        Some(ttl) => store.default_ttl(ttl),
        None => store,
    }))
}

#[async_trait]
impl StoreConfig for MemoryStore {
    async fn open(&self, _: &OpenOptions) -> Result<EngineBuilder, Error> {
        self.builder()
    }
}
