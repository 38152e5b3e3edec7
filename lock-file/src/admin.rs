//! The operator's view.

use std::sync::Arc;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind, HoldInfo, HolderId, ListQuery, LockAdmin, LockKey};

use crate::backend::FileBackend;

#[async_trait]
impl LockAdmin for FileBackend {
    async fn inspect(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error> {
        let (store, wanted) = (Arc::clone(self.store()), key.clone());
        self.on_thread(move || store.look(&wanted)).await.map_err(|e| e.with_key(key))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error> {
        let (store, query) = (Arc::clone(self.store()), query.clone());
        self.on_thread(move || store.list(&query)).await
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        // Who holds it is told if it can be; the answer is the same in any case.
        let owner =
            self.inspect(key).await.ok().flatten().filter(|i| i.holder == Some(holder)).and_then(|i| i.owner);
        let advice = match owner {
            Some(process) => format!("end {process}, and the kernel frees the lock at once"),
            None => "end that process, and the kernel frees the lock at once; inspect shows who holds it now"
                .to_owned(),
        };
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("a lock of the file store belongs to its process and cannot be taken away: {advice}"),
        )
        .with_key(key)
        .with_store(Arc::clone(self.store().name())))
    }
}
