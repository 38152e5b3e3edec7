//! The operator's view of the memory store.

use async_trait::async_trait;
use leasehold_api::{Error, HoldInfo, HoldState, HolderId, ListQuery, LockAdmin, LockKey, LossReason};

use crate::backend::MemoryBackend;

#[async_trait]
impl LockAdmin for MemoryBackend {
    async fn inspect(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error> {
        // Over, but a cooldown may still keep others out.
        Ok(self.store.inspect(key, true).filter(|hold| hold.state != HoldState::Expired))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error> {
        let mut infos = self.store.list(&query.prefix, query.include_ended);
        infos.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(infos)
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        Ok(self.store.end(key, Some(holder), Some(LossReason::ForcedRelease)))
    }
}
