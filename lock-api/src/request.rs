//! The builders that callers use on every lock.

use std::sync::Arc;
use std::time::Duration;

use crate::capabilities::Requirements;
use crate::error::{Error, ErrorKind, Operation};
use crate::guard::LockGuard;
use crate::key::LockKey;
use crate::lock::{BoxFuture, Lock};
use crate::multi::MultiGuard;
use crate::options::{AcquireOptions, Mode, OnCooldown};
use crate::run::{RunError, run_many, run_one};

/// What callers use. Every [`Lock`] has it.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold_api::{Lock, LockExt, key};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// let lock: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
///
/// let guard = lock.key(key!["ledger", 42]?).wait(Duration::from_millis(250)).acquire().await?;
/// println!("held with token {:?}", guard.token());
/// guard.release().await?;
///
/// let report = lock.key("nightly-report").run(async |guard| guard.key().to_string()).await?;
/// assert_eq!(report, "nightly-report");
/// # Ok(())
/// # }
/// ```
///
/// The futures may be polled by any executor, but the store's connections and the timers of waits run on the runtime on which
/// the lock was connected. Whoever blocks the only thread of that one (`block_on` inside of a current-thread runtime) waits
/// without end, whatever the budget.
pub trait LockExt: Lock {
    /// Begins a request for one key. Nothing happens before one of the builder's async methods is awaited.
    fn key<K>(&self, key: K) -> KeyRequest<'_, Self>
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        LockRequest::new(self, key.try_into().map_err(Into::into))
    }

    /// Begins a request for several keys, all or none.
    fn keys<I>(&self, keys: I) -> KeysRequest<'_, Self>
    where
        I: IntoIterator,
        I::Item: TryInto<LockKey>,
        <I::Item as TryInto<LockKey>>::Error: Into<Error>,
    {
        LockRequest::new(self, keys.into_iter().map(|k| k.try_into().map_err(Into::into)).collect())
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

/// A request that is being put together: for one key ([`LockExt::key`]) or several ([`LockExt::keys`]), every
/// time or at most once per window. The settings may come in any order.
#[derive(Debug)]
#[must_use = "nothing happens until acquire, try_acquire or run is awaited"]
pub struct LockRequest<'a, L: ?Sized, K, W = Always> {
    lock: &'a L,
    key: Result<K, Error>,
    options: AcquireOptions,
    window: W,
}

/// A request for one key.
pub type KeyRequest<'a, L, W = Always> = LockRequest<'a, L, LockKey, W>;

/// A request for several keys.
pub type KeysRequest<'a, L> = LockRequest<'a, L, Vec<LockKey>>;

/// A [`LockRequest`] that is granted whenever the key is free.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default)]
pub struct Always;

/// A [`LockRequest`] that is granted at most once per window.
#[derive(Clone, Copy, Debug)]
pub struct Window(Duration);

/// What came of a request that is granted at most once per window.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
#[allow(clippy::exhaustive_enums)] // A window is open or it is not.
pub enum WindowOutcome<T> {
    /// It was due: the guard, or what the body returned.
    Due(T),
    /// The window of an earlier grant has not passed.
    NotDue {
        /// How long it still lasts.
        retry_after: Duration,
    },
}

impl<'a, L: Lock + ?Sized, K> LockRequest<'a, L, K> {
    fn new(lock: &'a L, key: Result<K, Error>) -> Self {
        let key = key.map_err(|e| e.with_operation(Operation::Acquire));
        Self { lock, key, options: AcquireOptions::new(), window: Always }
    }
}

impl<L: Lock + ?Sized, K, W> LockRequest<'_, L, K, W> {
    /// Waits at most this long, for all keys together; zero is exactly one attempt. The default is 30 seconds.
    pub fn wait(self, budget: Duration) -> Self {
        self.with(|options| options.wait(budget))
    }

    /// Waits until granted or closed.
    pub fn wait_forever(self) -> Self {
        self.with(AcquireOptions::wait_forever)
    }

    /// Answers a failure of the store at once, instead of asking again until the wait budget ends
    /// ([`AcquireOptions::give_up_on_failure`]).
    pub fn give_up_on_failure(self) -> Self {
        self.with(AcquireOptions::give_up_on_failure)
    }

    /// Asks for a lease of this TTL instead of the store's default.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|options| options.ttl(ttl))
    }

    /// Ends the hold this long after the grant, whatever the holder does: see [`AcquireOptions::max_hold`].
    pub fn max_hold(self, limit: Duration) -> Self {
        self.with(|options| options.max_hold(limit))
    }

    /// No new grant of the key before this long after this one, even if released sooner or crashed.
    /// Others wait for it as for a holder.
    pub fn cooldown(self, duration: Duration) -> Self {
        self.with(|options| options.cooldown(duration))
    }

    /// Shows operators this text beside the hold.
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        self.with(|options| options.label(label))
    }

    /// Sets which other holders the grant excludes. All but [`Mode::Exclusive`] are
    /// [`Unsupported`](ErrorKind::Unsupported).
    pub fn mode(self, mode: Mode) -> Self {
        self.with(|options| options.mode(mode))
    }

    /// Replaces all options. A window that was set stays.
    pub fn options(self, options: AcquireOptions) -> Self {
        self.with(|_| options)
    }

    fn with(self, change: impl FnOnce(AcquireOptions) -> AcquireOptions) -> Self {
        Self { options: change(self.options), ..self }
    }
}

impl<'a, L: Lock + ?Sized> KeyRequest<'a, L> {
    /// At most one grant per `window`, whoever asks: nobody has to release, and a crash does not
    /// start a second run in the same window. It is a [`cooldown`](Self::cooldown) of that length which is
    /// reported instead of waited for. All callers of the key should use the same window.
    pub fn at_most_once_per(self, window: Duration) -> KeyRequest<'a, L, Window> {
        let Self { lock, key, options, window: Always } = self;
        LockRequest { lock, key, options, window: Window(window) }
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
        acquiring(self.lock.acquire(&self.key?, &self.options).await)
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
        acquiring(self.lock.try_acquire(&self.key?, &self.options).await)
    }

    /// Waits for the lock, runs `body` under it, and releases: after it returned, and also when it
    /// panics. When the lock is lost, `body` is dropped at its next await.
    ///
    /// The result is about the lock; the value in it is whatever `body` returns.
    ///
    /// # Errors
    ///
    /// [`RunError`]: whether `body` has not run, was stopped, or has finished without a confirmed release.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `body` where it is and releases in the background. What `body` has sent goes on: a `COMMIT`
    /// that is on its way may be carried out after the release. Where the caller may be dropped, as a request's handler is when
    /// its client leaves, run this in a task.
    pub async fn run<F, T>(self, body: F) -> Result<T, RunError<T>>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        run_one(self.acquire().await.map_err(RunError::NotRun)?, body).await
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
    pub async fn try_run<F, T>(self, body: F) -> Result<Option<T>, RunError<T>>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        match self.try_acquire().await.map_err(RunError::NotRun)? {
            Some(guard) => run_one(guard, body).await.map(Some),
            None => Ok(None),
        }
    }

    /// As [`run`](Self::run), for code that is generic over the body and needs the future to be `Send`: Rust
    /// cannot yet say that of what an `AsyncFnOnce` returns, so the body boxes its future.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use leasehold_api::{BoxFuture, Lock, LockExt, LockGuard, RunError};
    ///
    /// fn spawn<T: Send + 'static>(
    ///     lock: Arc<dyn Lock>,
    ///     body: impl for<'g> FnOnce(&'g LockGuard) -> BoxFuture<'g, T> + Send + 'static,
    /// ) -> tokio::task::JoinHandle<Result<T, RunError<T>>> {
    ///     tokio::spawn(async move { lock.key("k").run_boxed(body).await })
    /// }
    /// # #[tokio::main]
    /// # async fn main() {
    /// let lock = Arc::new(leasehold_memory::connect().unwrap());
    /// let token = spawn(lock, |guard| Box::pin(async move { guard.token() })).await.unwrap().unwrap();
    /// assert!(token.is_some());
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    pub async fn run_boxed<F, T>(self, body: F) -> Result<T, RunError<T>>
    where
        F: for<'g> FnOnce(&'g LockGuard) -> BoxFuture<'g, T> + Send,
    {
        run_one(self.acquire().await.map_err(RunError::NotRun)?, async |guard| body(guard).await).await
    }
}

impl<L: Lock + ?Sized> KeyRequest<'_, L, Window> {
    /// Waits for the lock unless the window of an earlier grant has not passed.
    ///
    /// # Errors
    ///
    /// As [`Lock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::acquire`]. A grant that is undone may still have begun its window.
    pub async fn acquire(self) -> Result<WindowOutcome<LockGuard>, Error> {
        let (lock, key, options) = self.windowed();
        due(acquiring(lock.acquire(&key?, &options).await))
    }

    /// Makes one attempt; `None` when somebody holds the key and its window has passed, or has none.
    ///
    /// # Errors
    ///
    /// As [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(self) -> Result<Option<WindowOutcome<LockGuard>>, Error> {
        let (lock, key, options) = self.windowed();
        match due(acquiring(lock.try_acquire(&key?, &options).await))? {
            WindowOutcome::Due(guard) => Ok(guard.map(WindowOutcome::Due)),
            WindowOutcome::NotDue { retry_after } => Ok(Some(WindowOutcome::NotDue { retry_after })),
        }
    }

    /// Runs `body` under the lock unless the window of an earlier grant has not passed.
    ///
    /// # Errors
    ///
    /// [`RunError`], as [`KeyRequest::run`].
    ///
    /// # Cancel safety
    ///
    /// As [`KeyRequest::run`].
    pub async fn run<F, T>(self, body: F) -> Result<WindowOutcome<T>, RunError<T>>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        match self.acquire().await.map_err(RunError::NotRun)? {
            WindowOutcome::Due(guard) => run_one(guard, body).await.map(WindowOutcome::Due),
            WindowOutcome::NotDue { retry_after } => Ok(WindowOutcome::NotDue { retry_after }),
        }
    }
}

impl<'a, L: Lock + ?Sized> KeyRequest<'a, L, Window> {
    fn windowed(self) -> (&'a L, Result<LockKey, Error>, AcquireOptions) {
        (self.lock, self.key, self.options.cooldown(self.window.0).on_cooldown(OnCooldown::NotDue))
    }
}

impl<L: Lock + ?Sized> KeysRequest<'_, L> {
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
    pub async fn acquire(self) -> Result<MultiGuard, Error> {
        acquiring(self.lock.acquire_all(&self.key?, &self.options).await)
    }

    /// One attempt at all keys; `None` when at least one is held by somebody else. See
    /// [`Lock::try_acquire_all`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](ErrorKind::InvalidKey), and as [`Lock::try_acquire_all`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::try_acquire_all`].
    pub async fn try_acquire(self) -> Result<Option<MultiGuard>, Error> {
        acquiring(self.lock.try_acquire_all(&self.key?, &self.options).await)
    }

    /// Takes all keys, runs `body`, and releases them; see [`KeyRequest::run`]. Losing any one of
    /// them stops `body`.
    ///
    /// # Errors
    ///
    /// [`RunError`], as [`KeyRequest::run`].
    ///
    /// # Cancel safety
    ///
    /// As [`KeyRequest::run`].
    pub async fn run<F, T>(self, body: F) -> Result<T, RunError<T>>
    where
        F: AsyncFnOnce(&MultiGuard) -> T,
    {
        run_many(self.acquire().await.map_err(RunError::NotRun)?, body).await
    }
}

fn acquiring<T>(outcome: Result<T, Error>) -> Result<T, Error> {
    outcome.map_err(|e| e.with_operation(Operation::Acquire))
}

fn due<T>(outcome: Result<T, Error>) -> Result<WindowOutcome<T>, Error> {
    match outcome {
        Ok(value) => Ok(WindowOutcome::Due(value)),
        Err(error) => match (error.kind(), error.retry_after()) {
            (ErrorKind::NotDue, Some(retry_after)) => Ok(WindowOutcome::NotDue { retry_after }),
            _ => Err(error),
        },
    }
}
