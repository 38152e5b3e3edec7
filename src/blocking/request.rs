//! The builders of blocking requests.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Always, Error, LockKey, Mode, RunError, Wanted, Window, WindowOutcome};

use super::guard::{LockGuard, MultiGuard};
use super::runtime::Runtime;

/// A builder of a request for one key ([`Lock::key`](super::Lock::key)) or several
/// ([`Lock::keys`](super::Lock::keys)). It has the settings of the async
/// [`LockRequest`](crate::LockRequest), in any order.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// use std::time::Duration;
/// let lock = leasehold::blocking::connect("memory:")?;
/// let guard = lock.key("nightly-report")
///     .wait(Duration::from_secs(5))
///     .ttl(Duration::from_secs(60))
///     .label("report of worker 7")
///     .acquire()?;
/// guard.release()
/// # }
/// ```
#[must_use = "nothing happens until acquire, try_acquire or run is called"]
pub struct LockRequest<'a, K, W = Always> {
    request: crate::LockRequest<'a, dyn crate::Lock, K, W>,
    runtime: &'a Arc<Runtime>,
}

/// A request for one key.
pub type KeyRequest<'a, W = Always> = LockRequest<'a, LockKey, W>;

/// A request for several keys.
pub type KeysRequest<'a> = LockRequest<'a, Vec<LockKey>>;

/// A request for several keys, each in its own mode.
pub type WantedRequest<'a> = LockRequest<'a, Vec<Wanted>>;

impl<'a, K, W> LockRequest<'a, K, W> {
    pub(super) fn new(
        request: crate::LockRequest<'a, dyn crate::Lock, K, W>,
        runtime: &'a Arc<Runtime>,
    ) -> Self {
        Self { request, runtime }
    }

    /// Limits the wait for all keys together. Zero makes exactly one attempt. The default is 30 seconds.
    pub fn wait(self, budget: Duration) -> Self {
        self.with(|request| request.wait(budget))
    }

    /// Waits without a limit, until the key is granted or the lock is closed.
    pub fn wait_forever(self) -> Self {
        self.with(crate::LockRequest::wait_forever)
    }

    /// Returns a failure of the store at once, instead of retrying until the wait budget ends. See
    /// [`AcquireOptions::give_up_on_failure`].
    pub fn give_up_on_failure(self) -> Self {
        self.with(crate::LockRequest::give_up_on_failure)
    }

    /// Sets the TTL of the lease, instead of the store's default.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|request| request.ttl(ttl))
    }

    /// Ends the hold this long after the grant, even if the holder does not release it. See
    /// [`AcquireOptions::max_hold`].
    pub fn max_hold(self, limit: Duration) -> Self {
        self.with(|request| request.max_hold(limit))
    }

    /// Blocks the next grant of the key until this long after the grant, even if the holder releases sooner or
    /// crashes. Other callers wait for a cooldown like for a holder.
    pub fn cooldown(self, duration: Duration) -> Self {
        self.with(|request| request.cooldown(duration))
    }

    /// Sets a text that operators see beside the hold.
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        self.with(|request| request.label(label))
    }

    /// Sets which other holders the grant excludes. A mode that the store does not declare is
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    pub fn mode(self, mode: Mode) -> Self {
        self.with(|request| request.mode(mode))
    }

    /// Takes the key as a reader. See the async [`shared`](crate::LockRequest::shared).
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// let readers = [lock.key("catalogue").shared().acquire()?, lock.key("catalogue").shared().acquire()?];
    /// assert!(lock.key("catalogue").try_acquire()?.is_none(), "two readers hold it");
    /// # drop(readers);
    /// # Ok(())
    /// # }
    /// ```
    pub fn shared(self) -> Self {
        self.with(crate::LockRequest::shared)
    }

    /// Takes one of `of` permits of the key. See the async [`permits`](crate::LockRequest::permits).
    pub fn permits(self, of: u32) -> Self {
        self.with(|request| request.permits(of))
    }

    /// Replaces all options. A window that was set stays.
    pub fn options(self, options: AcquireOptions) -> Self {
        self.with(|request| request.options(options))
    }

    fn with(
        self,
        change: impl FnOnce(
            crate::LockRequest<'a, dyn crate::Lock, K, W>,
        ) -> crate::LockRequest<'a, dyn crate::Lock, K, W>,
    ) -> Self {
        Self { request: change(self.request), runtime: self.runtime }
    }
}

impl<'a> KeyRequest<'a> {
    /// Allows one grant per `window` among all callers. See the async
    /// [`at_most_once_per`](crate::LockRequest::at_most_once_per).
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    /// use leasehold::WindowOutcome;
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// let hourly = || lock.key("hourly-report").at_most_once_per(Duration::from_secs(3600));
    /// assert_eq!(hourly().run(|_| "report")?, WindowOutcome::Due("report"));
    /// assert!(matches!(hourly().run(|_| "again")?, WindowOutcome::NotDue { .. }));
    /// # Ok(())
    /// # }
    /// ```
    pub fn at_most_once_per(self, window: Duration) -> KeyRequest<'a, Window> {
        LockRequest { request: self.request.at_most_once_per(window), runtime: self.runtime }
    }

    /// Waits for the lock. See [`Lock::acquire`](crate::Lock::acquire).
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::acquire`](crate::Lock::acquire).
    /// [`Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn acquire(self) -> Result<LockGuard, Error> {
        let guard = self.runtime.block_on(self.request.acquire())??;
        Ok(LockGuard::new(guard, self.runtime))
    }

    /// Makes one attempt. Returns `None` if another caller holds or awaits the key. See
    /// [`Lock::try_acquire`](crate::Lock::try_acquire).
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), except [`Timeout`](crate::ErrorKind::Timeout).
    pub fn try_acquire(self) -> Result<Option<LockGuard>, Error> {
        let guard = self.runtime.block_on(self.request.try_acquire())??;
        Ok(guard.map(|guard| LockGuard::new(guard, self.runtime)))
    }

    /// Waits for the lock, runs `body` under it and releases it, also if `body` panics. Returns the value of `body`.
    ///
    /// `body` is not stopped if the lock is lost. Between its steps it can check
    /// [`guard.validity()`](crate::LockGuard::validity).
    ///
    /// # Errors
    ///
    /// [`RunError::NotRun`] if the lock was not granted. [`RunError::Unconfirmed`] with the value of `body` if the lock
    /// was lost, or if the store did not confirm the release.
    pub fn run<T>(self, body: impl FnOnce(&LockGuard) -> T) -> Result<T, RunError<T>> {
        run(self.acquire().map_err(RunError::NotRun)?, body)
    }

    /// Runs `body` like [`run`](Self::run), but makes only one attempt. Returns `None` if the lock is not free.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn try_run<T>(self, body: impl FnOnce(&LockGuard) -> T) -> Result<Option<T>, RunError<T>> {
        match self.try_acquire().map_err(RunError::NotRun)? {
            Some(guard) => run(guard, body).map(Some),
            None => Ok(None),
        }
    }
}

impl KeyRequest<'_, Window> {
    /// Waits for the lock, unless the window of an earlier grant lasts.
    ///
    /// # Errors
    ///
    /// As [`Lock::acquire`](crate::Lock::acquire). [`Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn acquire(self) -> Result<WindowOutcome<LockGuard>, Error> {
        Ok(match self.runtime.block_on(self.request.acquire())?? {
            WindowOutcome::Due(guard) => WindowOutcome::Due(LockGuard::new(guard, self.runtime)),
            WindowOutcome::NotDue { retry_after } => WindowOutcome::NotDue { retry_after },
        })
    }

    /// Makes one attempt. Returns `None` if another caller holds the key and no window lasts.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), except [`Timeout`](crate::ErrorKind::Timeout).
    pub fn try_acquire(self) -> Result<Option<WindowOutcome<LockGuard>>, Error> {
        Ok(match self.runtime.block_on(self.request.try_acquire())?? {
            Some(WindowOutcome::Due(guard)) => Some(WindowOutcome::Due(LockGuard::new(guard, self.runtime))),
            Some(WindowOutcome::NotDue { retry_after }) => Some(WindowOutcome::NotDue { retry_after }),
            None => None,
        })
    }

    /// Runs `body` under the lock, unless the window of an earlier grant lasts.
    ///
    /// # Errors
    ///
    /// As [`run`](LockRequest::run) without a window.
    pub fn run<T>(self, body: impl FnOnce(&LockGuard) -> T) -> Result<WindowOutcome<T>, RunError<T>> {
        match self.acquire().map_err(RunError::NotRun)? {
            WindowOutcome::Due(guard) => run(guard, body).map(WindowOutcome::Due),
            WindowOutcome::NotDue { retry_after } => Ok(WindowOutcome::NotDue { retry_after }),
        }
    }
}

impl KeysRequest<'_> {
    /// Takes all keys or none. Returns the guards in the order of the keys. See
    /// [`Lock::acquire_all`](crate::Lock::acquire_all).
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::acquire_all`](crate::Lock::acquire_all).
    /// [`Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn acquire(self) -> Result<MultiGuard, Error> {
        let guards = self.runtime.block_on(self.request.acquire())??;
        Ok(MultiGuard::new(guards, self.runtime))
    }

    /// Makes one attempt at all keys. Returns `None` if another caller holds or awaits at least one. See
    /// [`Lock::try_acquire_all`](crate::Lock::try_acquire_all).
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), except [`Timeout`](crate::ErrorKind::Timeout).
    pub fn try_acquire(self) -> Result<Option<MultiGuard>, Error> {
        let guards = self.runtime.block_on(self.request.try_acquire())??;
        Ok(guards.map(|guards| MultiGuard::new(guards, self.runtime)))
    }

    /// Takes all keys, runs `body` and releases the keys. See [`run`](LockRequest::run) of one key.
    ///
    /// # Errors
    ///
    /// As [`run`](LockRequest::run) of one key.
    pub fn run<T>(self, body: impl FnOnce(&MultiGuard) -> T) -> Result<T, RunError<T>> {
        let guards = self.acquire().map_err(RunError::NotRun)?;
        let value = body(&guards);
        confirmed(value, guards.release())
    }
}

impl WantedRequest<'_> {
    /// Takes all keys or none. Returns the guards in the order of the keys. See
    /// [`Lock::acquire_wanted`](crate::Lock::acquire_wanted).
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::acquire_wanted`](crate::Lock::acquire_wanted).
    /// [`Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn acquire(self) -> Result<MultiGuard, Error> {
        let guards = self.runtime.block_on(self.request.acquire())??;
        Ok(MultiGuard::new(guards, self.runtime))
    }

    /// Makes one attempt at all keys. Returns `None` if at least one of them cannot be granted now. See
    /// [`Lock::try_acquire_wanted`](crate::Lock::try_acquire_wanted).
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), except [`Timeout`](crate::ErrorKind::Timeout).
    pub fn try_acquire(self) -> Result<Option<MultiGuard>, Error> {
        let guards = self.runtime.block_on(self.request.try_acquire())??;
        Ok(guards.map(|guards| MultiGuard::new(guards, self.runtime)))
    }

    /// Takes all keys, runs `body` and releases the keys. See [`run`](LockRequest::run) of one key.
    ///
    /// # Errors
    ///
    /// As [`run`](LockRequest::run) of one key.
    pub fn run<T>(self, body: impl FnOnce(&MultiGuard) -> T) -> Result<T, RunError<T>> {
        let guards = self.acquire().map_err(RunError::NotRun)?;
        let value = body(&guards);
        confirmed(value, guards.release())
    }
}

fn run<T>(guard: LockGuard, body: impl FnOnce(&LockGuard) -> T) -> Result<T, RunError<T>> {
    let value = body(&guard);
    confirmed(value, guard.release())
}

fn confirmed<T>(value: T, released: Result<(), Error>) -> Result<T, RunError<T>> {
    match released {
        Ok(()) => Ok(value),
        Err(error) => Err(RunError::Unconfirmed { value, error }),
    }
}

impl<K: fmt::Debug, W: fmt::Debug> fmt::Debug for LockRequest<'_, K, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.request.fmt(f)
    }
}
