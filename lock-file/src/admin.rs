//! Inspection and administration for operators.

use std::sync::Arc;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey};

use crate::backend::FileBackend;

#[async_trait]
impl LockAdmin for FileBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let wanted = key.clone();
        self.look(move |store, _| store.inspect(&wanted)).await.map_err(|e| e.with_key(key))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let query = query.clone();
        self.look(move |store, progress| store.list(&query, progress)).await
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let wanted = key.clone();
        self.look(move |store, _| store.ask(&wanted, holder)).await.map_err(|e| e.with_key(key))
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        // Looks for the holder, because the message names it if it is known. The error has the same kind in
        // any case.
        let info = self.inspect(key).await.ok();
        let hold = info.iter().flat_map(|info| &info.holders).find(|hold| hold.holder == Some(holder));
        let advice = match hold.and_then(|h| h.owner.as_ref()) {
            Some(process) => format!("end {process}, and the kernel frees the lock"),
            None => {
                "end that process, and the kernel frees the lock; inspect shows who holds it now".to_owned()
            }
        };
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("a lock of the file store belongs to its process and cannot be taken away: {advice}"),
        )
        .with_key(key)
        .with_store(Arc::clone(self.store().name())))
    }
}
