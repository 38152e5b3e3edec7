//! The guards of blocking locks.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{End, Error, LossReason, PortableHold};

use super::runtime::Runtime;

/// One grant of one key. Dropping the guard releases the key, and [waits up to a second](crate::blocking#at-the-end-of-main) for
/// the store's reply. [`release`](Self::release) returns whether the lock was held until the end.
///
/// It dereferences to the async [`LockGuard`](crate::LockGuard) for key, token, validity and the other calls that do
/// not wait. A guard can be moved to another thread and be released there.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// use leasehold::Validity;
/// let lock = leasehold::blocking::connect("memory:")?;
/// let guard = lock.key("ledger:42").acquire()?;
/// assert_eq!(guard.validity(), Validity::Valid);
/// println!("{} with token {:?}", guard.key(), guard.token());
/// guard.release()
/// # }
/// ```
#[must_use = "dropping a guard releases the lock"]
pub struct LockGuard {
    // `None` only while `release`, `into_ref` or the drop takes it out.
    guard: Option<crate::LockGuard>,
    runtime: Arc<Runtime>,
}

impl LockGuard {
    /// Wraps a guard that the store has just granted.
    pub(super) fn new(guard: crate::LockGuard, runtime: &Arc<Runtime>) -> Self {
        runtime.granted();
        Self { guard: Some(guard), runtime: Arc::clone(runtime) }
    }

    /// Calls `callback` once if the grant is lost, on a separate thread that it can block. Does not call it after a
    /// release. A busy machine can delay the call, so check [`validity`](crate::LockGuard::validity) before a step
    /// that cannot be undone.
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// use std::sync::mpsc;
    /// use std::time::Duration;
    /// use leasehold::LossReason;
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// let guard = lock.key("report").max_hold(Duration::from_millis(20)).acquire()?;
    /// let (sender, losses) = mpsc::channel();
    /// guard.when_lost(move |reason| drop(sender.send(reason)));
    /// assert_eq!(losses.recv(), Ok(LossReason::HeldTooLong));
    /// # Ok(())
    /// # }
    /// ```
    pub fn when_lost(&self, callback: impl FnOnce(LossReason) + Send + 'static) {
        let ended = self.lost().ended();
        self.runtime.handle().spawn(async move {
            if let End::Lost(reason) = ended.await {
                tokio::task::spawn_blocking(move || callback(reason));
            }
        });
    }

    /// Renews the lease now, for its TTL. Renewal is automatic, so call this only to be sure before a long step.
    ///
    /// # Errors
    ///
    /// As the async [`renew`](crate::LockGuard::renew). [`Unsupported`](crate::ErrorKind::Unsupported) also inside an
    /// async task.
    pub fn renew(&self) -> Result<(), Error> {
        self.runtime.block_on(crate::LockGuard::renew(self))?
    }

    /// Renews the lease now, for `ttl`, which also is its TTL for later renewals.
    ///
    /// # Errors
    ///
    /// As the async [`renew_for`](crate::LockGuard::renew_for). [`Unsupported`](crate::ErrorKind::Unsupported) also
    /// inside an async task.
    pub fn renew_for(&self, ttl: Duration) -> Result<(), Error> {
        self.runtime.block_on(crate::LockGuard::renew_for(self, ttl))?
    }

    /// Queries the store whether the lock is still held, for a step that cannot be undone. See the async
    /// [`confirm`](crate::LockGuard::confirm).
    ///
    /// # Errors
    ///
    /// As the async [`confirm`](crate::LockGuard::confirm). [`Unsupported`](crate::ErrorKind::Unsupported) also inside
    /// an async task.
    pub fn confirm(&self) -> Result<(), Error> {
        self.runtime.block_on(crate::LockGuard::confirm(self))?
    }

    /// Changes the label that operators and observers see beside the hold.
    ///
    /// # Errors
    ///
    /// As the async [`relabel`](crate::LockGuard::relabel). [`Unsupported`](crate::ErrorKind::Unsupported) also inside
    /// an async task.
    pub fn relabel(&self, label: impl Into<Arc<str>>) -> Result<(), Error> {
        self.runtime.block_on(crate::LockGuard::relabel(self, label))?
    }

    /// Gives the hold out of this client for another process, which releases it ([`Lock::adopt`](super::Lock::adopt)).
    /// See the async [`into_ref`](crate::LockGuard::into_ref).
    ///
    /// # Errors
    ///
    /// As the async [`into_ref`](crate::LockGuard::into_ref). [`Unsupported`](crate::ErrorKind::Unsupported) also inside
    /// an async task. After an error the guard is released in the background.
    pub fn into_ref(mut self, ttl: Duration) -> Result<PortableHold, Error> {
        match self.guard.take() {
            Some(guard) => self.runtime.block_on(guard.into_ref(ttl))?,
            None => unreachable!("a guard has its grant until it is consumed"),
        }
    }

    /// Releases the lock. `Ok` means that the lock was held until now, and is free or with the next waiter.
    ///
    /// # Errors
    ///
    /// As the async [`release`](crate::LockGuard::release). [`Unsupported`](crate::ErrorKind::Unsupported) inside an
    /// async task. The release then goes on in the background.
    pub fn release(mut self) -> Result<(), Error> {
        match self.guard.take() {
            Some(guard) => self.runtime.block_on(guard.release())?,
            None => unreachable!("a guard is released once"),
        }
    }
}

impl Deref for LockGuard {
    type Target = crate::LockGuard;

    fn deref(&self) -> &crate::LockGuard {
        match &self.guard {
            Some(guard) => guard,
            None => unreachable!("a guard has its grant until it is consumed"),
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.runtime.wait_for_release(guard.release());
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
}

/// The guards of several keys that were taken together, in the order in which the keys were given. Dropping it releases
/// all of them, and waits as the drop of a [`LockGuard`] does.
///
/// It dereferences to the async [`MultiGuard`](crate::MultiGuard), and so to a slice of guards. Take it apart by
/// `into_iter()`, for example to call [`LockGuard::when_lost`] of each guard.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// let lock = leasehold::blocking::connect("memory:")?;
/// let guards = lock.keys(["account:1", "account:2"]).acquire()?;
/// for guard in guards.iter() {
///     println!("{} with token {:?}", guard.key(), guard.token());
/// }
/// guards.release()
/// # }
/// ```
#[must_use = "dropping the guards releases the locks"]
pub struct MultiGuard {
    // `None` only while `release` or the drop takes it out.
    guards: Option<crate::MultiGuard>,
    runtime: Arc<Runtime>,
}

impl MultiGuard {
    /// Wraps guards that the store has just granted.
    pub(super) fn new(guards: crate::MultiGuard, runtime: &Arc<Runtime>) -> Self {
        runtime.granted();
        Self { guards: Some(guards), runtime: Arc::clone(runtime) }
    }

    /// Confirms all guards, as [`LockGuard::confirm`].
    ///
    /// # Errors
    ///
    /// The first failure in the order of the keys, as [`LockGuard::confirm`].
    pub fn confirm(&self) -> Result<(), Error> {
        self.runtime.block_on(crate::MultiGuard::confirm(self))?
    }

    /// Releases all guards, even if one release fails.
    ///
    /// # Errors
    ///
    /// The first failure in the order of the keys, as [`LockGuard::release`]. The other guards are released too.
    pub fn release(mut self) -> Result<(), Error> {
        match self.guards.take() {
            Some(guards) => self.runtime.block_on(guards.release())?,
            None => unreachable!("guards are released once"),
        }
    }
}

impl Deref for MultiGuard {
    type Target = crate::MultiGuard;

    fn deref(&self) -> &crate::MultiGuard {
        match &self.guards {
            Some(guards) => guards,
            None => unreachable!("the guards stay until they are consumed"),
        }
    }
}

impl IntoIterator for MultiGuard {
    type Item = LockGuard;
    type IntoIter = std::vec::IntoIter<LockGuard>;

    fn into_iter(mut self) -> Self::IntoIter {
        let guards = self.guards.take().into_iter().flatten();
        let alone = |guard| LockGuard { guard: Some(guard), runtime: Arc::clone(&self.runtime) };
        guards.map(alone).collect::<Vec<_>>().into_iter()
    }
}

impl Drop for MultiGuard {
    fn drop(&mut self) {
        if let Some(guards) = self.guards.take() {
            self.runtime.wait_for_release(guards.release());
        }
    }
}

impl fmt::Debug for MultiGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guards.fmt(f)
    }
}
