//! The builders that callers use on every lock.

mod modes;
mod window;

use std::sync::Arc;
use std::time::Duration;

use crate::capabilities::Requirements;
use crate::error::{Error, Operation};
use crate::guard::LockGuard;
use crate::key::LockKey;
use crate::lock::{BoxFuture, Lock};
use crate::multi::MultiGuard;
use crate::options::{AcquireOptions, Mode, Wanted};
use crate::run::{RunError, run_many, run_one};

pub use self::modes::WantedRequest;
pub use self::window::{Window, WindowOutcome};

/// The calls that domain code uses. Every [`Lock`] has them.
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
/// Any executor can poll the futures. The store's connections and the timers of waits run on the runtime on
/// which the lock was connected. Do not block the only thread of that runtime, for example by `block_on` inside
/// a current-thread runtime, because the wait would never end.
pub trait LockExt: Lock {
    /// Starts a request for one key. It does nothing until an async method of the builder is awaited.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{LockExt, key};
    /// let lock = leasehold_memory::connect()?;
    /// let account = 42;
    /// let by_text = lock.key("nightly-report").acquire().await?;
    /// let by_parts = lock.key(key!["ledger", account]?).acquire().await?;
    /// # drop((by_text, by_parts));
    /// # Ok(())
    /// # }
    /// ```
    fn key<K>(&self, key: K) -> KeyRequest<'_, Self>
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        LockRequest::new(self, key.try_into().map_err(Into::into))
    }

    /// Starts a request for several keys, all or none.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guards = lock.keys(["account:1", "account:2"]).acquire().await?;
    /// assert_eq!(guards.len(), 2);
    /// guards.release().await
    /// # }
    /// ```
    fn keys<I>(&self, keys: I) -> KeysRequest<'_, Self>
    where
        I: IntoIterator,
        I::Item: TryInto<LockKey>,
        <I::Item as TryInto<LockKey>>::Error: Into<Error>,
    {
        LockRequest::new(self, keys.into_iter().map(|k| k.try_into().map_err(Into::into)).collect())
    }

    /// Starts a request for several keys, each in its own mode, which are taken together or not at all.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{LockExt, Mode};
    /// let lock = leasehold_memory::connect()?;
    /// let guards = lock.wanting([("prices", Mode::Shared), ("ledger:42", Mode::Exclusive)]).acquire().await?;
    /// assert_eq!(guards[0].mode(), Mode::Shared);
    /// guards.release().await
    /// # }
    /// ```
    fn wanting<I, K>(&self, wanted: I) -> WantedRequest<'_, Self>
    where
        I: IntoIterator<Item = (K, Mode)>,
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        let wanted = wanted.into_iter().map(|(key, mode)| match key.try_into() {
            Ok(key) => Ok(Wanted::new(key, mode)),
            Err(error) => Err(error.into()),
        });
        LockRequest::new(self, wanted.collect())
    }

    /// Checks at start-up that the store has the features that this program needs.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{LockExt, Requirements, Scope};
    /// let lock = leasehold_memory::connect()?;
    /// lock.require(&Requirements::new().fencing())?;
    /// let error = lock.require(&Requirements::new().scope(Scope::Network)).unwrap_err();
    /// assert!(error.message().contains("exclusion between all clients"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) with a list of all missing features.
    fn require(&self, needs: &Requirements) -> Result<(), Error> {
        needs.check(self.capabilities()).map_err(|e| e.with_store(self.to_string()))
    }
}

impl<L: Lock + ?Sized> LockExt for L {}

/// A builder of a request for one key ([`LockExt::key`]) or several ([`LockExt::keys`]), unlimited or at most
/// once per window. The order of the settings does not matter.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::time::Duration;
/// use leasehold_api::LockExt;
/// let lock = leasehold_memory::connect()?;
/// let request = lock.key("nightly-report")
///     .wait(Duration::from_secs(5))
///     .ttl(Duration::from_secs(60))
///     .label("report of worker 7");
/// let guard = request.acquire().await?;
/// assert!(guard.remaining().is_some_and(|left| left <= Duration::from_secs(60)));
/// guard.release().await
/// # }
/// ```
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

impl<'a, L: Lock + ?Sized, K> LockRequest<'a, L, K> {
    fn new(lock: &'a L, key: Result<K, Error>) -> Self {
        let key = key.map_err(|e| e.with_operation(Operation::Acquire));
        Self { lock, key, options: AcquireOptions::new(), window: Always }
    }
}

impl<L: Lock + ?Sized, K, W> LockRequest<'_, L, K, W> {
    /// Limits the wait for all keys together. Zero makes exactly one attempt. The default is 30 seconds.
    pub fn wait(self, budget: Duration) -> Self {
        self.with(|options| options.wait(budget))
    }

    /// Waits without a limit, until the key is granted or the lock is closed.
    pub fn wait_forever(self) -> Self {
        self.with(AcquireOptions::wait_forever)
    }

    /// Returns a failure of the store at once, instead of retrying until the wait budget ends. See
    /// [`AcquireOptions::give_up_on_failure`].
    pub fn give_up_on_failure(self) -> Self {
        self.with(AcquireOptions::give_up_on_failure)
    }

    /// Sets the TTL of the lease, instead of the store's default.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|options| options.ttl(ttl))
    }

    /// Ends the hold this long after the grant, even if the holder does not release it. See
    /// [`AcquireOptions::max_hold`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::{LockExt, LossReason};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("report").max_hold(Duration::from_millis(20)).acquire().await?;
    /// assert_eq!(guard.lost().await, LossReason::HeldTooLong);
    /// # Ok(())
    /// # }
    /// ```
    pub fn max_hold(self, limit: Duration) -> Self {
        self.with(|options| options.max_hold(limit))
    }

    /// Blocks the next grant of the key until this long after the grant, even if the holder releases sooner or
    /// crashes. Other callers wait for a cooldown like for a holder.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("cleanup").cooldown(Duration::from_secs(60)).acquire().await?;
    /// guard.release().await?;
    /// assert!(lock.key("cleanup").try_acquire().await?.is_none(), "for a minute");
    /// # Ok(())
    /// # }
    /// ```
    pub fn cooldown(self, duration: Duration) -> Self {
        self.with(|options| options.cooldown(duration))
    }

    /// Sets a text that operators see beside the hold.
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        self.with(|options| options.label(label))
    }

    /// Replaces all options. A window set by [`at_most_once_per`](LockRequest::at_most_once_per) stays.
    pub fn options(self, options: AcquireOptions) -> Self {
        self.with(|_| options)
    }

    fn with(self, change: impl FnOnce(AcquireOptions) -> AcquireOptions) -> Self {
        Self { options: change(self.options), ..self }
    }
}

impl<'a, L: Lock + ?Sized> KeyRequest<'a, L> {
    /// Waits for the lock. See [`Lock::acquire`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").wait(Duration::from_millis(250)).acquire().await?;
    /// // The protected work runs here.
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, the caller loses its place in the queue, and a grant is undone.
    pub async fn acquire(self) -> Result<LockGuard, Error> {
        acquiring(self.lock.acquire(&self.key?, &self.options).await)
    }

    /// Makes one attempt. See [`Lock::try_acquire`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// match lock.key("nightly-report").try_acquire().await? {
    ///     Some(guard) => guard.release().await?,
    ///     None => println!("another worker writes the report"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, a grant is undone.
    pub async fn try_acquire(self) -> Result<Option<LockGuard>, Error> {
        acquiring(self.lock.try_acquire(&self.key?, &self.options).await)
    }

    /// Waits for the lock, runs `body` under it and releases it, also if `body` panics. If the lock is lost,
    /// `body` is dropped at its next await. Returns the value of `body`.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let token = lock.key("nightly-report").run(async |guard| guard.token()).await?;
    /// assert!(token.is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RunError`], with one case each for a body that did not run, was stopped, or finished without a
    /// confirmed release.
    ///
    /// # Cancel safety
    ///
    /// If dropped, `body` is dropped where it is, and the lock is released in the background. A request that
    /// `body` has sent, such as a `COMMIT`, can still take effect after the release. If the caller can be
    /// dropped, like the handler of a request whose client disconnects, run this call in a separate task.
    pub async fn run<F, T>(self, body: F) -> Result<T, RunError<T>>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        run_one(self.acquire().await.map_err(RunError::NotRun)?, body).await
    }

    /// Runs `body` like [`run`](Self::run), but makes only one attempt. Returns `None` if the lock is not free.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let held = lock.key("nightly-report").acquire().await?;
    /// let skipped = lock.key("nightly-report").try_run(async |_| "report").await?;
    /// assert_eq!(skipped, None);
    /// held.release().await
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
    pub async fn try_run<F, T>(self, body: F) -> Result<Option<T>, RunError<T>>
    where
        F: AsyncFnOnce(&LockGuard) -> T,
    {
        match self.try_acquire().await.map_err(RunError::NotRun)? {
            Some(guard) => run_one(guard, body).await.map(Some),
            None => Ok(None),
        }
    }

    /// Runs `body` like [`run`](Self::run), for code that is generic over the body and needs a `Send` future.
    /// Rust cannot yet require `Send` of the future of an `AsyncFnOnce`, so the body boxes its future.
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

impl<L: Lock + ?Sized> KeysRequest<'_, L> {
    /// Takes all keys or none. Returns the guards in the order of the keys. See [`Lock::acquire_all`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::acquire_all`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::acquire_all`].
    pub async fn acquire(self) -> Result<MultiGuard, Error> {
        acquiring(self.lock.acquire_all(&self.key?, &self.options).await)
    }

    /// Makes one attempt at all keys. Returns `None` if another caller holds at least one. See
    /// [`Lock::try_acquire_all`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let _held = lock.key("account:2").acquire().await?;
    /// assert!(lock.keys(["account:1", "account:2"]).try_acquire().await?.is_none());
    /// assert!(lock.key("account:1").try_acquire().await?.is_some(), "nothing stays held");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::try_acquire_all`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::try_acquire_all`].
    pub async fn try_acquire(self) -> Result<Option<MultiGuard>, Error> {
        acquiring(self.lock.try_acquire_all(&self.key?, &self.options).await)
    }

    /// Takes all keys, runs `body` and releases the keys. The loss of one key stops `body`. See
    /// [`KeyRequest::run`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let keys = lock.keys(["account:1", "account:2"]).run(async |guards| guards.len()).await?;
    /// assert_eq!(keys, 2);
    /// # Ok(())
    /// # }
    /// ```
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
