//! Ties a hold to a transaction in the same etcd cluster, whose writes are carried out only if the hold stands.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, LockGuard, LockKey, LossReason, Validity};

use crate::backend::Shared;
use crate::cluster::Cluster;
use crate::wire::{Compare, RequestOp, Target, TxnRequest, delete, put};

/// The time limit of a fenced write.
const LIMIT: Duration = Duration::from_secs(8);

/// The most writes in one transaction. A server accepts 128 operations by default.
const MOST_WRITES: usize = 100;

/// The fence of a hold, returned by [`LockGuard::extension`] of this store's guards. Most callers use [`EtcdGuardExt`].
///
/// With another client of etcd, add to your own transaction the condition that the create revision of
/// [`entry`](Self::entry) equals [`create_revision`](Self::create_revision). The condition is false after the holder's
/// lease has ended, so the server carries out none of its late writes.
#[derive(Clone)]
pub struct EtcdFence {
    cluster: Arc<Cluster>,
    key: LockKey,
    entry: Vec<u8>,
    created: i64,
}

/// A write of a fenced transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdWrite(RequestOp);

impl EtcdWrite {
    /// Puts a value.
    pub fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        Self(put(key, value, 0))
    }

    /// Deletes a key.
    pub fn delete(key: impl Into<Vec<u8>>) -> Self {
        Self(delete(key))
    }
}

/// Fencing for guards of this store.
///
/// ```no_run
/// # async fn pay(lock: leasehold_engine::Engine) -> Result<(), leasehold_api::Error> {
/// use leasehold_api::LockExt as _;
/// use leasehold_etcd::{EtcdGuardExt as _, EtcdWrite};
///
/// let guard = lock.key("ledger:42").acquire().await?;
/// guard.write(vec![EtcdWrite::put("ledger/42", "90")]).await?; // written while the lock was held, or not at all
/// guard.release().await
/// # }
/// ```
#[async_trait]
pub trait EtcdGuardExt {
    /// Carries out all of `writes` in one transaction if the store still has the hold, and otherwise none. The keys must
    /// be different, and not under the store's prefix.
    ///
    /// # Errors
    ///
    /// - [`Lost`](leasehold_api::ErrorKind::Lost) if the hold has ended. Nothing was written.
    /// - [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) for more than 100 writes.
    /// - [`OutcomeUnknown`](leasehold_api::ErrorKind::OutcomeUnknown) if there was no reply. Read the keys to see whether
    ///   they were written.
    /// - [`Unsupported`](leasehold_api::ErrorKind::Unsupported) for the guard of another store.
    /// - Otherwise the server's error.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the writes might be carried out.
    async fn write(&self, writes: Vec<EtcdWrite>) -> Result<(), Error>;
}

#[async_trait]
impl EtcdGuardExt for LockGuard {
    async fn write(&self, writes: Vec<EtcdWrite>) -> Result<(), Error> {
        let fence = self.extension::<EtcdFence>();
        let fence = fence.ok_or_else(|| Error::unsupported("holds in etcd to fence a transaction with"))?;
        if self.validity() == Validity::Lost {
            return Err(Error::lost(self.lost().reason().unwrap_or(LossReason::Expired)).with_key(self.key()));
        }
        fence.write(writes).await
    }
}

impl EtcdFence {
    pub(crate) fn new(shared: &Shared, key: &LockKey, entry: Vec<u8>, created: i64) -> Self {
        Self { cluster: Arc::clone(&shared.cluster), key: key.clone(), entry, created }
    }

    /// Returns the key of the hold's entry in etcd.
    #[must_use]
    pub fn entry(&self) -> &[u8] {
        &self.entry
    }

    /// Returns the create revision that the entry has while the hold lasts. It differs from the token of the guard.
    #[must_use]
    pub const fn create_revision(&self) -> i64 {
        self.created
    }

    /// Works like [`EtcdGuardExt::write`], but only the server checks the hold, not the guard's clock.
    ///
    /// # Errors
    ///
    /// As [`EtcdGuardExt::write`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, the writes might be carried out.
    pub async fn write(&self, writes: Vec<EtcdWrite>) -> Result<(), Error> {
        let txn = self.transaction(writes)?;
        // Sends the request once, because a second copy could overwrite a later value of the caller's keys.
        let answer =
            self.cluster.call_once(txn, LIMIT).await.map_err(|failure| failure.error(Some(&self.key)))?;
        if answer.reply.succeeded { Ok(()) } else { Err(Error::lost(LossReason::Gone).with_key(&self.key)) }
    }

    fn transaction(&self, writes: Vec<EtcdWrite>) -> Result<TxnRequest, Error> {
        if writes.len() > MOST_WRITES {
            let message = format!("a fenced transaction has at most {MOST_WRITES} writes; split it");
            return Err(crate::error::invalid(message).with_key(&self.key));
        }
        Ok(TxnRequest {
            compare: vec![Compare::is(self.entry.clone(), Target::Create(self.created))],
            success: writes.into_iter().map(|write| write.0).collect(),
            failure: Vec::new(),
        })
    }
}

impl fmt::Debug for EtcdFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdFence")
            .field("key", &self.key)
            .field("create_revision", &self.created)
            .finish_non_exhaustive()
    }
}
