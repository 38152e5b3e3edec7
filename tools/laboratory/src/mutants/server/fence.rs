//! The fence of the server: a transaction that keeps later holders out while it is open.

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, HolderId, LockKey, LossReason};
use tokio::time::Instant;

use super::Server;

/// The fence of one grant, as the extension of its guard.
#[derive(Debug)]
pub(crate) struct SmallFence {
    server: Arc<Server>,
    key: LockKey,
    holder: HolderId,
    token: u64,
}

impl SmallFence {
    /// Returns the fence of a grant that the store knows by `holder` and `token`.
    pub(crate) fn new(server: &Arc<Server>, key: &LockKey, holder: HolderId, token: u64) -> Self {
        Self { server: Arc::clone(server), key: key.clone(), holder, token }
    }

    /// Begins a transaction that fences the grant, if the store still has it.
    pub(crate) fn begin(&self) -> Result<OpenTransaction, Error> {
        if self.server.fence(&self.key, self.holder, self.token) {
            Ok(OpenTransaction { server: Arc::clone(&self.server), key: self.key.clone() })
        } else {
            Err(Error::lost(LossReason::Gone).with_key(&self.key))
        }
    }
}

/// An open transaction that fences a grant.
pub(crate) struct OpenTransaction {
    server: Arc<Server>,
    key: LockKey,
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        self.server.end_fence(&self.key);
    }
}

impl fmt::Debug for OpenTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OpenTransaction").field(&self.key).finish()
    }
}

impl Server {
    /// Fences the grant if its holder has the key. Returns whether it has.
    fn fence(&self, key: &LockKey, holder: HolderId, token: u64) -> bool {
        let (name, fault) = (self.name(0, key), self.fault);
        let mut state = self.lock();
        let Some(record) = state.records.get_mut(&name) else { return false };
        let is_held = record.hold.as_ref().is_some_and(|hold| {
            (hold.holder, hold.token) == (holder, token) && hold.is_live(fault, Instant::now())
        });
        record.fences += u32::from(is_held);
        is_held
    }

    fn end_fence(&self, key: &LockKey) {
        let name = self.name(0, key);
        let mut state = self.lock();
        if let Some(record) = state.records.get_mut(&name) {
            record.fences -= 1;
        }
        state.serve(self.fault, &name);
        let news = state.wake_all(key);
        drop(state);
        news.tell();
    }
}
