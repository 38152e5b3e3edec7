//! The value you hold.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Operation};
use crate::grant::Grant;
use crate::handle::GrantHandle;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::loss::Lost;
use crate::validity::Validity;

/// One grant of one key. Dropping it releases in the background; [`release`](LockGuard::release)
/// tells whether the lock was held until the end. The end of the lock's runtime waits for such releases, up to a second;
/// `std::process::exit` does not.
///
/// A guard may move to another task or thread and be released there. One that is leaked
/// (`std::mem::forget`) is held until its lock is closed or its process ends.
#[must_use = "dropping a guard releases the lock"]
pub struct LockGuard {
    // `None` only while `release` or `into_grant` takes it out.
    grant: Option<Arc<dyn Grant>>,
}

impl LockGuard {
    /// Makes a guard of a grant, for those who build locks.
    pub fn new(grant: Arc<dyn Grant>) -> Self {
        Self { grant: Some(grant) }
    }

    /// Takes the grant out, for wrappers. The caller releases or abandons it.
    #[must_use]
    pub fn into_grant(mut self) -> Arc<dyn Grant> {
        match self.grant.take() {
            Some(grant) => grant,
            None => unreachable!("a guard has its grant until it is consumed"),
        }
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.grant().key()
    }

    /// The identity of this grant, as operators see it.
    #[must_use]
    pub fn holder(&self) -> HolderId {
        self.grant().holder()
    }

    /// The fencing token, where the store gives one: greater than that of every earlier grant of the key.
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.grant().token()
    }

    /// What is known of the grant now, computed from the clock.
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.grant().validity()
    }

    /// How much longer the grant is good without a further word from the store. `None`: it does not
    /// end by itself. Zero once lost.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.grant().remaining()
    }

    /// Resolves when the grant is lost, never after a normal release.
    pub fn lost(&self) -> Lost {
        self.grant().lost()
    }

    /// What another task needs to watch this grant: it can look, but neither renew nor release.
    #[must_use]
    pub fn handle(&self) -> GrantHandle {
        GrantHandle { grant: self.shared() }
    }

    /// A typed extra of the store, such as what ties a database transaction to the lease.
    #[must_use]
    pub fn extension<T: std::any::Any + Send + Sync>(&self) -> Option<&T> {
        self.grant().extension(TypeId::of::<T>())?.downcast_ref()
    }

    /// Renews the lease now, for the TTL that it has. Renewal is automatic; this is for making sure before a
    /// long step.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) when it is not held any more (an ended lease is never revived),
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may or may not have renewed; validity never claims more than was confirmed.
    pub async fn renew(&self) -> Result<(), Error> {
        self.shared().renew(None).await.map_err(|e| e.with_operation(Operation::Renew))
    }

    /// Renews the lease now, for `ttl` from now on, which is its TTL from then on. A shorter one counts for
    /// [`validity`](Self::validity) as soon as it is sent: the store may have it before its answer is here.
    ///
    /// # Errors
    ///
    /// As [`renew`](Self::renew), and [`InvalidOption`](crate::ErrorKind::InvalidOption) for a TTL that the
    /// store does not take.
    ///
    /// # Cancel safety
    ///
    /// As [`renew`](Self::renew); the lease may have the new TTL or the old one.
    pub async fn renew_for(&self, ttl: Duration) -> Result<(), Error> {
        self.shared().renew(Some(ttl)).await.map_err(|e| e.with_operation(Operation::Renew))
    }

    /// Asks the store whether the lock is still held, for a step that cannot be undone. `Ok` means that the store
    /// answered a question that was sent after this call, and that the lock was held then.
    ///
    /// [`validity`](Self::validity) is computed from a clock. A machine that its hypervisor stops (a snapshot, a
    /// migration) has no clock that counts while it stands still, and reads valid until the next look. This call does
    /// not rely on a clock. It still says nothing about the time after its answer: send the
    /// [`token`](Self::token) along where the receiver can check it.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock is not held any more.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) if the
    /// store did not answer within the limit of one call: nothing is known then, so do not take the step.
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a lock that cannot ask its store.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn confirm(&self) -> Result<(), Error> {
        self.shared().confirm().await.map_err(|e| e.with_operation(Operation::Confirm))
    }

    /// Releases the lock and tells the truth about it: `Ok` means that it was held until now and is
    /// free (or with the next waiter) from here on.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost): it was lost before, or with the connection that kept it while
    /// it was being released, so the work under it may have overlapped with another holder's. [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) or
    /// [`Unavailable`](crate::ErrorKind::Unavailable): the store did not confirm; the release is
    /// retried in the background until it succeeds or the hold is over.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases in the background; only the answer is lost.
    pub async fn release(self) -> Result<(), Error> {
        self.into_grant().release().await.map_err(|e| e.with_operation(Operation::Release))
    }

    fn grant(&self) -> &Arc<dyn Grant> {
        match &self.grant {
            Some(grant) => grant,
            None => unreachable!("a guard has its grant until it is consumed"),
        }
    }

    fn shared(&self) -> Arc<dyn Grant> {
        Arc::clone(self.grant())
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            grant.abandon();
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key", self.key())
            .field("holder", &self.holder())
            .field("token", &self.token())
            .field("validity", &self.validity())
            .finish_non_exhaustive()
    }
}
