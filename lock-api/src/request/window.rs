//! Requests that are granted at most once per window.

use std::time::Duration;

use super::{Always, KeyRequest, LockRequest, acquiring};
use crate::error::{Error, ErrorKind};
use crate::guard::LockGuard;
use crate::key::LockKey;
use crate::lock::Lock;
use crate::options::{AcquireOptions, OnCooldown};
use crate::run::{RunError, run_one};

/// A [`LockRequest`] that is granted at most once per window.
#[derive(Clone, Copy, Debug)]
pub struct Window(pub(super) Duration);

/// The outcome of a request that is granted at most once per window.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
#[allow(clippy::exhaustive_enums)] // Complete: a window lasts or has ended.
pub enum WindowOutcome<T> {
    /// The request was due. Contains the guard, or the value of the body.
    Due(T),
    /// The window of an earlier grant still lasts.
    NotDue {
        /// The time until that window ends.
        retry_after: Duration,
    },
}

impl<'a, L: Lock + ?Sized> KeyRequest<'a, L> {
    /// Allows one grant per `window` among all callers. No release is needed, and a crash does not start a
    /// second run in the same window. The window is a [`cooldown`](Self::cooldown) that is reported instead of
    /// waited out. All callers of the key must use the same window.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::{LockExt, WindowOutcome};
    /// let lock = leasehold_memory::connect()?;
    /// let hour = Duration::from_secs(3600);
    /// let hourly = || lock.key("hourly-report").at_most_once_per(hour);
    /// assert_eq!(hourly().run(async |_| "report").await?, WindowOutcome::Due("report"));
    /// let WindowOutcome::NotDue { retry_after } = hourly().run(async |_| "again").await? else {
    ///     panic!("ran twice in an hour")
    /// };
    /// assert!(retry_after <= hour);
    /// # Ok(())
    /// # }
    /// ```
    pub fn at_most_once_per(self, window: Duration) -> KeyRequest<'a, L, Window> {
        let Self { lock, key, options, window: Always } = self;
        LockRequest { lock, key, options, window: Window(window) }
    }
}

impl<L: Lock + ?Sized> KeyRequest<'_, L, Window> {
    /// Waits for the lock, unless the window of an earlier grant lasts.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::{LockExt, WindowOutcome};
    /// let lock = leasehold_memory::connect()?;
    /// let hour = Duration::from_secs(3600);
    /// match lock.key("hourly-report").at_most_once_per(hour).acquire().await? {
    ///     WindowOutcome::Due(guard) => guard.release().await?,
    ///     WindowOutcome::NotDue { retry_after } => println!("not before {retry_after:?} from now"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Lock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::acquire`]. A grant that is undone may leave its window running.
    pub async fn acquire(self) -> Result<WindowOutcome<LockGuard>, Error> {
        let (lock, key, options) = self.windowed();
        due(acquiring(lock.acquire(&key?, &options).await))
    }

    /// Makes one attempt. Returns `None` if another caller holds the key and no window lasts.
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

    /// Runs `body` under the lock, unless the window of an earlier grant lasts.
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

fn due<T>(outcome: Result<T, Error>) -> Result<WindowOutcome<T>, Error> {
    match outcome {
        Ok(value) => Ok(WindowOutcome::Due(value)),
        Err(error) => match (error.kind(), error.retry_after()) {
            (ErrorKind::NotDue, Some(retry_after)) => Ok(WindowOutcome::NotDue { retry_after }),
            _ => Err(error),
        },
    }
}
