//! Watching a grant from another task.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::grant::Grant;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::loss::{Ended, Lost};
use crate::validity::Validity;

/// Looks at a grant that somebody else owns: `Clone + Send + 'static`, made by
/// [`LockGuard::handle`](crate::LockGuard::handle).
///
/// It neither renews nor releases, and the grant ends without regard to it. It keeps the client's background
/// task alive; a watcher should go when [`ended`](Self::ended) resolves.
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
    /// The key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.grant.key()
    }

    /// The identity of the grant.
    #[must_use]
    pub fn holder(&self) -> HolderId {
        self.grant.holder()
    }

    /// The fencing token, where the store gives one.
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.grant.token()
    }

    /// What is known of the grant now; [`Validity::Ended`] once its guard was released or dropped.
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.grant.validity()
    }

    /// How much longer the grant is good without a further word from the store; see
    /// [`LockGuard::remaining`](crate::LockGuard::remaining). Zero once it has ended.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.grant.remaining()
    }

    /// Resolves when the grant is lost, never after a normal release.
    pub fn lost(&self) -> Lost {
        self.grant.lost()
    }

    /// Resolves when the grant has ended in whatever way.
    pub fn ended(&self) -> Ended {
        self.grant.lost().ended()
    }

    /// A typed extra of the store; see [`LockGuard::extension`](crate::LockGuard::extension).
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
