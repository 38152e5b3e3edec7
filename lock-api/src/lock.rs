//! The traits: what domain code depends on, and what a guard is made of.

use std::any::{Any, TypeId};
use std::fmt::{self, Debug, Display};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;

use crate::admin::LockAdmin;
use crate::capabilities::Capabilities;
use crate::error::Error;
use crate::guard::LockGuard;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::options::AcquireOptions;
use crate::validity::{Lost, Validity};

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
#[async_trait]
pub trait Lock: Debug + Display + Send + Sync + 'static {
    /// One attempt: the guard, or `None` when somebody else holds or awaits the key.
    ///
    /// It does not wait for another holder and does not overtake local waiters; `options.wait` is not
    /// looked at. It does wait for the store to answer, up to the store's own time limit.
    ///
    /// # Errors
    ///
    /// A store that is slow, down, refuses or is not set up is an error and never `None`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the attempt. If it had been granted meanwhile, it is undone within
    /// [`Capabilities::undo`].
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error>;

    /// Waits until granted, until the budget of `options.wait` ends, or until the lock is closed.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when the budget ended,
    /// [`NotDue`](crate::ErrorKind::NotDue) when a cooldown was met and
    /// [`OnCooldown::NotDue`](crate::OnCooldown::NotDue) was asked for,
    /// [`Closed`](crate::ErrorKind::Closed) when the lock was closed. A failure of the store ends the
    /// wait with that failure.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the queue; a later call starts at the end. Whatever
    /// was granted or queued meanwhile is undone within [`Capabilities::undo`].
    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error>;

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
    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<Vec<LockGuard>, Error>;

    /// Releases a guard: the same as [`LockGuard::release`].
    ///
    /// # Errors
    ///
    /// As [`LockGuard::release`].
    ///
    /// # Cancel safety
    ///
    /// As [`LockGuard::release`].
    async fn release(&self, guard: LockGuard) -> Result<(), Error>;

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

/// What a [`LockGuard`] is made of. Wrappers and locks from elsewhere build it; users see the guard.
///
/// It is shared between the guard and whoever watches over the hold, hence the `Arc`. The guard calls
/// [`release`](Grant::release) or [`abandon`](Grant::abandon), once.
pub trait Grant: Debug + Send + Sync + 'static {
    /// The key.
    fn key(&self) -> &LockKey;

    /// The identity of this grant.
    fn holder(&self) -> HolderId;

    /// The fencing token, where the store gives one.
    fn token(&self) -> Option<FencingToken>;

    /// Whether the grant still holds, computed from the clock now.
    fn validity(&self) -> Validity;

    /// How much longer the grant is good without a further word from the store; never more than the
    /// truth. `None`: it does not end by itself. Zero once lost.
    fn remaining(&self) -> Option<Duration>;

    /// Resolves when the grant is lost.
    fn lost(&self) -> Lost;

    /// A typed extra of the store, by type; wrappers forward it.
    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)>;

    /// Renews the lease now, with `ttl` or the one it has. Cancel safe: a dropped call may or may not
    /// have renewed, and validity never claims more than was confirmed.
    fn renew(&self, ttl: Option<Duration>) -> BoxFuture<'_, Result<(), Error>>;

    /// Releases; see [`LockGuard::release`]. Dropping the returned future, polled or not, still
    /// releases in the background.
    fn release(self: Arc<Self>) -> Release;

    /// The path of a dropped guard: synchronous, needs no runtime, never blocks and never panics.
    fn abandon(self: Arc<Self>);
}

/// A release under way: the answer of a store that needs no I/O, or the future of one that does.
#[must_use = "the answer tells whether the lock was held until the end"]
#[allow(clippy::exhaustive_enums)] // An answer is there or it is not.
pub enum Release {
    /// The answer.
    Done(Result<(), Error>),
    /// The answer is still to come.
    Pending(BoxFuture<'static, Result<(), Error>>),
}

impl Release {
    /// A release whose answer is still to come.
    pub fn pending(answer: impl Future<Output = Result<(), Error>> + Send + 'static) -> Self {
        Self::Pending(Box::pin(answer))
    }
}

impl Future for Release {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Done(answer) => Poll::Ready(std::mem::replace(answer, Ok(()))),
            Self::Pending(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl Debug for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(answer) => f.debug_tuple("Done").field(answer).finish(),
            Self::Pending(_) => f.write_str("Pending"),
        }
    }
}
