//! The comfortable calls: builders on every lock.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::capabilities::Requirements;
use crate::error::{Error, ErrorKind};
use crate::guard::{LockGuard, release_all};
use crate::key::LockKey;
use crate::lock::Lock;
use crate::options::{AcquireOptions, OnCooldown};
use crate::validity::{LossReason, Validity};

/// What callers use. Every [`Lock`] has it.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold_api::{Lock, LockExt};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// let lock: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
///
/// let guard = lock.key("ledger:42").wait(Duration::from_millis(250)).acquire().await?;
/// println!("held with token {:?}", guard.token());
/// guard.release().await?;
///
/// let report = lock.key("nightly-report").run(async |guard| guard.key().to_string()).await?;
/// assert_eq!(report, "nightly-report");
/// # Ok(())
/// # }
/// ```
pub trait LockExt: Lock {
    /// Begins a request for one key. Nothing happens before one of the builder's async methods is awaited.
    fn key<K>(&self, key: K) -> KeyRequest<'_, Self>
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        KeyRequest { lock: self, key: key.try_into().map_err(Into::into), options: AcquireOptions::new() }
    }

    /// Begins a request for several keys, all or none.
    fn keys<I>(&self, keys: I) -> KeysRequest<'_, Self>
    where
        I: IntoIterator,
        I::Item: TryInto<LockKey>,
        <I::Item as TryInto<LockKey>>::Error: Into<Error>,
    {
        KeysRequest {
            lock: self,
            keys: keys.into_iter().map(|k| k.try_into().map_err(Into::into)).collect(),
            options: AcquireOptions::new(),
        }
    }

    /// Checks once, at start-up, that the store has what this program needs.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](ErrorKind::Unsupported) that lists everything that is missing.
    fn require(&self, needs: &Requirements) -> Result<(), Error> {
        needs.check(self.capabilities()).map_err(|e| e.with_store(self.to_string()))
    }
}

impl<L: Lock + ?Sized> LockExt for L {}

/// A request for one key, made by [`LockExt::key`].
#[derive(Debug)]
#[must_use = "nothing happens until acquire, try_acquire or run is awaited"]
pub struct KeyRequest<'a, L: ?Sized> {
    lock: &'a L,
    key: Result<LockKey, Error>,
    options: AcquireOptions,
}

impl<L: Lock + ?Sized> KeyRequest<'_, L> {
    /// Waits at most this long; zero is exactly one attempt. The default is 30 seconds.
    pub fn wait(mut self, budget: Duration) -> Self {
        self.options = self.options.wait(budget);
        self
    }

    /// Waits until granted or closed.
    pub fn wait_forever(mut self) -> Self {
        self.options = self.options.wait_forever();
        self
    }

    /// Asks for a lease of this TTL instead of the store's default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options = self.options.ttl(ttl);
        self
    }

    /// Shows operators this text beside the hold.
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.options = self.options.label(label);
        self
    }

    /// No new grant of the key before this long after this one, even if released sooner or crashed.
    /// Others wait for it as for a holder.
    pub fn min_hold(mut self, duration: Duration) -> Self {
        self.options = self.options.cooldown(duration);
        self
    }

    /// At most one grant per `window`, whoever asks: nobody has to release, and a crash does not
    /// start a second run in the same window. All callers of the key should use the same window.
    pub fn at_most_once_per(mut self, window: Duration) -> OncePer<Self> {
        self.options = self.options.cooldown(window).on_cooldown(OnCooldown::NotDue);
        OncePer { request: self }
    }

    /// Replaces all options.
    pub fn options(mut self, options: AcquireOptions) -> Self {
        self.options = options;
        self
    }

    /// Waits for the lock. See [`Lock::acquire`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](ErrorKind::InvalidKey), and as [`Lock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in the queue and undoes what was granted meanwhile.
    pub async fn acquire(self) -> Result<LockGuard, Error> {
        self.lock.acquire(&self.key?, &self.options).await
    }

    /// Makes one attempt. See [`Lock::try_acquire`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](ErrorKind::InvalidKey), and as [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future undoes what was granted meanwhile.
    pub async fn try_acquire(self) -> Result<Option<LockGuard>, Error> {
        self.lock.try_acquire(&self.key?, &self.options).await
    }

    /// Waits for the lock, runs `body` under it, and releases: after it returned, and also when it
    /// panics. When the lock is lost, `body` is dropped at its next await.
    ///
    /// The outer result is about the lock, the inner value is whatever `body` returns.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire) when `body` did not run; [`Lost`](ErrorKind::Lost) when it was
    /// stopped; as [`LockGuard::release`] when it finished but the release did not confirm that the
    /// lock was held until the end.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `body` where it is and releases in the background.
    pub async fn run<F, T>(self, body: F) -> Result<T, Error>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        let guard = self.acquire().await?;
        run_under(guard, body).await
    }

    /// As [`run`](Self::run), but makes one attempt; `None` when the lock was not to be had.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    pub async fn try_run<F, T>(self, body: F) -> Result<Option<T>, Error>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        match self.try_acquire().await? {
            Some(guard) => run_under(guard, body).await.map(Some),
            None => Ok(None),
        }
    }
}

/// A request that is granted at most once per window, made by [`KeyRequest::at_most_once_per`].
#[derive(Debug)]
#[must_use = "nothing happens until acquire or run is awaited"]
pub struct OncePer<R> {
    request: R,
}

/// Whether a request with a window got its turn.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
#[allow(clippy::exhaustive_enums)] // A window is open or it is not.
pub enum Once<T> {
    /// It did, and this came of it.
    Ran(T),
    /// The window of an earlier grant has not passed.
    NotDue {
        /// How long it still lasts.
        again_in: Duration,
    },
}

impl<L: Lock + ?Sized> OncePer<KeyRequest<'_, L>> {
    /// Waits for the lock unless the window of an earlier grant has not passed.
    ///
    /// # Errors
    ///
    /// As [`KeyRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`KeyRequest::acquire`]. A grant that is undone may still have begun its window.
    pub async fn acquire(self) -> Result<Once<LockGuard>, Error> {
        due(self.request.acquire().await)
    }

    /// Runs `body` under the lock unless the window of an earlier grant has not passed.
    ///
    /// # Errors
    ///
    /// As [`KeyRequest::run`].
    ///
    /// # Cancel safety
    ///
    /// As [`KeyRequest::run`].
    pub async fn run<F, T>(self, body: F) -> Result<Once<T>, Error>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        match self.acquire().await? {
            Once::Ran(guard) => run_under(guard, body).await.map(Once::Ran),
            Once::NotDue { again_in } => Ok(Once::NotDue { again_in }),
        }
    }
}

fn due<T>(outcome: Result<T, Error>) -> Result<Once<T>, Error> {
    match outcome {
        Ok(value) => Ok(Once::Ran(value)),
        Err(error) => match (error.kind(), error.again_in()) {
            (ErrorKind::NotDue, Some(again_in)) => Ok(Once::NotDue { again_in }),
            _ => Err(error),
        },
    }
}

/// A request for several keys, made by [`LockExt::keys`].
#[derive(Debug)]
#[must_use = "nothing happens until acquire, try_acquire or run is awaited"]
pub struct KeysRequest<'a, L: ?Sized> {
    lock: &'a L,
    keys: Result<Vec<LockKey>, Error>,
    options: AcquireOptions,
}

impl<L: Lock + ?Sized> KeysRequest<'_, L> {
    /// Waits at most this long for all keys together; zero is exactly one attempt.
    pub fn wait(mut self, budget: Duration) -> Self {
        self.options = self.options.wait(budget);
        self
    }

    /// Waits until granted or closed.
    pub fn wait_forever(mut self) -> Self {
        self.options = self.options.wait_forever();
        self
    }

    /// Asks for leases of this TTL instead of the store's default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options = self.options.ttl(ttl);
        self
    }

    /// Shows operators this text beside each hold.
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.options = self.options.label(label);
        self
    }

    /// Replaces all options.
    pub fn options(mut self, options: AcquireOptions) -> Self {
        self.options = options;
        self
    }

    /// Takes all keys or none; the guards come in the order the keys were given. See
    /// [`Lock::acquire_all`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](ErrorKind::InvalidKey), and as [`Lock::acquire_all`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::acquire_all`].
    pub async fn acquire(self) -> Result<Vec<LockGuard>, Error> {
        self.lock.acquire_all(&self.keys?, &self.options).await
    }

    /// One attempt at all keys; `None` when at least one is held by somebody else.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), without [`Timeout`](ErrorKind::Timeout).
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::acquire_all`].
    pub async fn try_acquire(self) -> Result<Option<Vec<LockGuard>>, Error> {
        let options = self.options.wait(Duration::ZERO);
        match self.lock.acquire_all(&self.keys?, &options).await {
            Ok(guards) => Ok(Some(guards)),
            Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes all keys, runs `body`, and releases them; see [`KeyRequest::run`]. Losing any one of
    /// them stops `body`.
    ///
    /// # Errors
    ///
    /// As [`KeyRequest::run`].
    ///
    /// # Cancel safety
    ///
    /// As [`KeyRequest::run`].
    pub async fn run<F, T>(self, body: F) -> Result<T, Error>
    where
        F: AsyncFnOnce(&[LockGuard]) -> T,
    {
        let guards = self.acquire().await?;
        let value = until_lost(&guards, body(&guards)).await?;
        release_all(guards).await?;
        Ok(value)
    }
}

async fn run_under<F, T>(guard: LockGuard, body: F) -> Result<T, Error>
where
    F: AsyncFnOnce(&LockGuard) -> T,
{
    let value = until_lost(std::slice::from_ref(&guard), body(&guard)).await?;
    guard.release().await?;
    Ok(value)
}

/// Polls `work` until it is done or one of `guards` is lost, looking before each poll so that a
/// process that was stopped does not take one more step.
async fn until_lost<T>(guards: &[LockGuard], work: impl Future<Output = T>) -> Result<T, Error> {
    let mut work = pin!(work);
    let mut losses: Vec<_> = guards.iter().map(|g| Box::pin(g.lost())).collect();
    poll_fn(|cx| {
        for (guard, lost) in guards.iter().zip(&mut losses) {
            let reason = match lost.as_mut().poll(cx) {
                Poll::Ready(reason) => reason,
                Poll::Pending if guard.validity() == Validity::Lost => {
                    lost.reason().unwrap_or(LossReason::Expired)
                }
                Poll::Pending => continue,
            };
            return Poll::Ready(Err(Error::lost(reason).with_key(guard.key())));
        }
        work.as_mut().poll(cx).map(Ok)
    })
    .await
}
