//! The trait that domain code depends on.

use std::fmt::{Debug, Display};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;

use crate::admin::LockAdmin;
use crate::capabilities::Capabilities;
use crate::error::Error;
use crate::guard::LockGuard;
use crate::key::LockKey;
use crate::multi::MultiGuard;
use crate::options::AcquireOptions;

/// A boxed future that can move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A lock over named keys: the trait that domain code depends on, as `Arc<dyn Lock>`.
///
/// The comfortable calls (`lock.key("ledger:42").acquire()`) are on [`LockExt`](crate::LockExt); the
/// methods here are what a wrapper forwards. Those who bring a new store implement the `Backend` trait
/// of `leasehold-engine` instead and get this one from the engine.
///
/// # Contract
///
/// The rules that every implementation keeps, with their numbers C1 to C18, are written down in the
/// project's `docs/contract.md` and tested by `leasehold-conformance`. In short: exclusion; each grant
/// has its own identity and, where declared, a larger token than every earlier one; a try never waits
/// for another holder; every wait has a budget; every future may be dropped at any poll; `release` is
/// `Ok` only when the lock was held until then; a guard knows from the clock whether it is still good.
///
/// `Display` names the store for people and must not show a password.
///
/// Anybody may implement it, so a new required method needs a new major version; what can be left out comes
/// with a default, and what only one store has is an [`extension`](crate::LockGuard::extension) of its grants.
#[async_trait]
pub trait Lock: Debug + Display + Send + Sync + 'static {
    /// One attempt: the guard, or `None` when somebody else holds or awaits the key.
    ///
    /// It does not wait for another holder and does not overtake local waiters; `options.wait` is not
    /// looked at. It does wait for the store to answer, up to the store's own time limit.
    ///
    /// # Errors
    ///
    /// A store that is slow, down, refuses or is not set up is an error, never `None`.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) also if the key may be held only by an earlier attempt of this
    /// client that is still being undone.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the attempt. If it had been granted meanwhile, it is undone within
    /// [`Capabilities::undo`].
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error>;

    /// Waits until granted, until the budget of `options.wait` ends, or until the lock is closed.
    ///
    /// The budget covers outages: a store that cannot be reached, restarts or is full
    /// ([`Unavailable`](crate::ErrorKind::Unavailable), [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown),
    /// [`Capacity`](crate::ErrorKind::Capacity)) is asked again, with growing pauses, and the caller keeps its place
    /// among the callers of this client. With
    /// [`give_up_on_failure`](AcquireOptions::give_up_on_failure), with a budget of zero, or where a cooldown may
    /// have begun, such a failure ends the wait. All others always do.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when the budget ended, or the store's failure if it has answered
    /// nothing else in all that time,
    /// [`NotDue`](crate::ErrorKind::NotDue) when a cooldown was met and
    /// [`OnCooldown::NotDue`](crate::OnCooldown::NotDue) was asked for,
    /// [`Closed`](crate::ErrorKind::Closed) when the lock was closed; and the failure that ended the wait.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the queue; a later call starts at the end. Whatever
    /// was granted or queued meanwhile is undone within [`Capabilities::undo`].
    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error>;

    /// One attempt at all keys: all guards in the order of `keys`, or `None` when at least one key is held or
    /// awaited by somebody else. As [`try_acquire`](Lock::try_acquire) for the rest.
    ///
    /// # Errors
    ///
    /// As [`acquire_all`](Lock::acquire_all), but no [`Timeout`](crate::ErrorKind::Timeout) for a key that is
    /// held. Nothing stays held.
    ///
    /// # Cancel safety
    ///
    /// As [`try_acquire`](Lock::try_acquire), for all keys.
    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error>;

    /// Takes all keys or none, within one budget. The guards come in the order of `keys`.
    ///
    /// The keys are taken in their byte order whatever order they are given in, so that calls of this
    /// method cannot deadlock with each other.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) when a key occurs twice; else as
    /// [`acquire`](Lock::acquire). Nothing stays held.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Lock::acquire), for all keys.
    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error>;

    /// Releases every hold, tells guards still out that they are lost, ends every waiter with
    /// [`Closed`](crate::ErrorKind::Closed), and refuses everything after. May be called twice. It has
    /// a deadline of its own and does not hang on a silent store.
    ///
    /// # Errors
    ///
    /// [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) when the store did not confirm every
    /// release in time; the lock is closed all the same.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the closing.
    async fn close(&self) -> Result<(), Error>;

    /// What the store has, and every bound.
    fn capabilities(&self) -> &Capabilities;

    /// The operator's view, if the store has one. Not for domain code.
    fn admin(&self) -> Option<&dyn LockAdmin>;
}

/// What a pointer to a lock does, the lock does. Without `async_trait`, which would box each future once more.
macro_rules! forward_lock {
    ($pointer:ident) => {
        #[deny(clippy::missing_trait_methods)]
        impl<L: Lock + ?Sized> Lock for $pointer<L> {
            fn try_acquire<'a, 'b, 'c, 'f>(
                &'a self,
                key: &'b LockKey,
                options: &'c AcquireOptions,
            ) -> BoxFuture<'f, Result<Option<LockGuard>, Error>>
            where
                'a: 'f,
                'b: 'f,
                'c: 'f,
            {
                (**self).try_acquire(key, options)
            }

            fn acquire<'a, 'b, 'c, 'f>(
                &'a self,
                key: &'b LockKey,
                options: &'c AcquireOptions,
            ) -> BoxFuture<'f, Result<LockGuard, Error>>
            where
                'a: 'f,
                'b: 'f,
                'c: 'f,
            {
                (**self).acquire(key, options)
            }

            fn try_acquire_all<'a, 'b, 'c, 'f>(
                &'a self,
                keys: &'b [LockKey],
                options: &'c AcquireOptions,
            ) -> BoxFuture<'f, Result<Option<MultiGuard>, Error>>
            where
                'a: 'f,
                'b: 'f,
                'c: 'f,
            {
                (**self).try_acquire_all(keys, options)
            }

            fn acquire_all<'a, 'b, 'c, 'f>(
                &'a self,
                keys: &'b [LockKey],
                options: &'c AcquireOptions,
            ) -> BoxFuture<'f, Result<MultiGuard, Error>>
            where
                'a: 'f,
                'b: 'f,
                'c: 'f,
            {
                (**self).acquire_all(keys, options)
            }

            fn close<'a, 'f>(&'a self) -> BoxFuture<'f, Result<(), Error>>
            where
                'a: 'f,
            {
                (**self).close()
            }

            fn capabilities(&self) -> &Capabilities {
                (**self).capabilities()
            }

            fn admin(&self) -> Option<&dyn LockAdmin> {
                (**self).admin()
            }
        }
    };
}

forward_lock!(Arc);
forward_lock!(Box);
