//! The operator's view of the memory store.

use async_trait::async_trait;
use leasehold_api::{Error, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey, LossReason};

use crate::backend::MemoryBackend;

#[async_trait]
impl LockAdmin for MemoryBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        Ok(self.store.inspect(key))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let mut infos = self.store.list(&query.prefix, query.include_ended);
        infos.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(infos)
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        Ok(self.store.end(key, Some(holder), Some(LossReason::ForcedRelease)))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        Ok(self.store.ask(key, holder))
    }
}
