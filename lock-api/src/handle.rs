//! A handle to watch a grant from another task.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::grant::Grant;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::loss::{Ended, Lost};
use crate::options::Mode;
use crate::validity::Validity;

/// Watches a grant that another task owns. `Clone + Send + 'static`, made by
/// [`LockGuard::handle`](crate::LockGuard::handle).
///
/// A handle neither renews nor releases, and does not delay the end of the grant. It keeps the client's
/// background task alive, so drop it when [`ended`](Self::ended) resolves.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use leasehold_api::{End, LockExt, Validity};
///
/// let lock = leasehold_memory::connect()?;
/// let guard = lock.key("leader").acquire().await?;
/// let handle = guard.handle();
/// let watcher = tokio::spawn(async move { (handle.ended().await, handle.validity()) });
/// guard.release().await?;
/// assert_eq!(watcher.await.unwrap(), (End::Released, Validity::Ended));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct GrantHandle {
    pub(crate) grant: Arc<dyn Grant>,
}

impl GrantHandle {
    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.grant.key()
    }

    /// Returns the identity of the grant.
    #[must_use]
    pub fn holder(&self) -> HolderId {
        self.grant.holder()
    }

    /// Returns the identity by which the store knows the hold. See
    /// [`LockGuard::stored_holder`](crate::LockGuard::stored_holder).
    #[must_use]
    pub fn stored_holder(&self) -> HolderId {
        self.grant.stored_holder()
    }

    /// Returns the fencing token, if the store has tokens.
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.grant.token()
    }

    /// Returns the mode of the grant.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.grant.mode()
    }

    /// Returns the number of a permit. See [`LockGuard::permit`](crate::LockGuard::permit).
    #[must_use]
    pub fn permit(&self) -> Option<u32> {
        self.grant.permit()
    }

    /// Returns the current validity of the grant. [`Validity::Ended`] once its guard was released or dropped.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{LockExt, Validity};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").acquire().await?;
    /// let handle = guard.handle();
    /// assert_eq!(handle.validity(), Validity::Valid);
    /// drop(guard);
    /// assert_eq!(handle.validity(), Validity::Ended);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.grant.validity()
    }

    /// Returns how much longer the grant is valid if the store confirms nothing more. See
    /// [`LockGuard::remaining`](crate::LockGuard::remaining). Zero once it has ended.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.grant.remaining()
    }

    /// Waits until the validity differs from `seen`, and returns it. See
    /// [`LockGuard::validity_changed`](crate::LockGuard::validity_changed).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the grant is unaffected. A later call with the same `seen` returns the change.
    pub async fn validity_changed(&self, seen: Validity) -> Validity {
        Arc::clone(&self.grant).validity_changed(seen).await
    }

    /// Waits for a request to release. See the method of [`LockGuard`](crate::LockGuard).
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing is lost. A later future still resolves.
    pub async fn asked(&self) {
        Arc::clone(&self.grant).asked().await;
    }

    /// Returns a future that resolves when the grant is lost, and never after a normal release.
    pub fn lost(&self) -> Lost {
        self.grant.lost()
    }

    /// Returns a future that resolves when the grant has ended: released, dropped or lost.
    pub fn ended(&self) -> Ended {
        self.grant.lost().ended()
    }

    /// Returns an extension of the grant by its type. See
    /// [`LockGuard::extension`](crate::LockGuard::extension). `None` also once the guard was released or dropped.
    #[must_use]
    pub fn extension<T: std::any::Any + Send + Sync>(&self) -> Option<&T> {
        self.grant.extension(TypeId::of::<T>())?.downcast_ref()
    }
}

impl fmt::Debug for GrantHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrantHandle")
            .field("key", self.key())
            .field("holder", &self.holder())
            .field("token", &self.token())
            .field("validity", &self.validity())
            .finish()
    }
}
