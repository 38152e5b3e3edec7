//! Runs a body under guards until it is done or a lock is lost.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use crate::error::{Error, Operation};
use crate::guard::LockGuard;
use crate::multi::MultiGuard;
use crate::validity::{LossReason, Validity};

/// The failure of a `run`, and whether its body has run.
///
/// ```
/// # #[tokio::main]
/// # async fn main() {
/// use leasehold_api::{LockExt, RunError};
/// let lock = leasehold_memory::connect().unwrap();
/// match lock.key("nightly-report").run(async |_| "report").await {
///     Ok(report) => println!("{report}"),
///     Err(RunError::NotRun(error)) => println!("try again later: {error}"),
///     Err(RunError::Stopped(error)) => println!("stopped half-way: {error}"),
///     Err(RunError::Unconfirmed { value, error }) => println!("{value}, but {error}"),
/// }
/// # }
/// ```
///
/// Only [`NotRun`](Self::NotRun) can be worth a retry, and [`is_retryable`](Self::is_retryable) returns whether
/// it is. A retry of the other cases would do the work twice.
#[derive(Clone, thiserror::Error)]
#[allow(clippy::exhaustive_enums)] // Complete: a body has not begun, was stopped, or has finished.
pub enum RunError<T> {
    /// The lock was not granted, so the body did not start.
    #[error("not run: {0}")]
    NotRun(#[source] Error),
    /// The lock was lost while the body ran. The body was dropped at an await and may have done part of its
    /// work.
    #[error("stopped before it was done: {0}")]
    Stopped(#[source] Error),
    /// The body finished with `value`, but the release did not confirm that the lock was held until the end.
    #[error("done, but the release is not confirmed: {error}")]
    Unconfirmed {
        /// The value that the body returned.
        value: T,
        /// The error of the release: [`Lost`](crate::ErrorKind::Lost) if another client may have held the lock
        /// before the end. Otherwise the store did not answer, and the release goes on in the background.
        #[source]
        error: Error,
    },
}

impl<T> RunError<T> {
    /// Returns whether the same call may succeed later, which requires that the body has not started.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotRun(error) if error.is_retryable())
    }

    /// Returns the error of the lock.
    #[must_use]
    pub fn error(&self) -> &Error {
        match self {
            Self::NotRun(error) | Self::Stopped(error) | Self::Unconfirmed { error, .. } => error,
        }
    }

    /// Returns the value of the body, if the body finished.
    ///
    /// ```
    /// use leasehold_api::{Error, LossReason, RunError};
    /// let error = RunError::Unconfirmed { value: "report", error: Error::lost(LossReason::Expired) };
    /// assert!(!error.is_retryable(), "the body has run");
    /// assert_eq!(error.into_value(), Some("report"));
    /// ```
    #[must_use]
    pub fn into_value(self) -> Option<T> {
        match self {
            Self::Unconfirmed { value, .. } => Some(value),
            Self::NotRun(_) | Self::Stopped(_) => None,
        }
    }

    /// Maps the value, if there is one.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> RunError<U> {
        match self {
            Self::NotRun(error) => RunError::NotRun(error),
            Self::Stopped(error) => RunError::Stopped(error),
            Self::Unconfirmed { value, error } => RunError::Unconfirmed { value: f(value), error },
        }
    }
}

/// Drops the value. The error is retryable only if the body has not started.
impl<T> From<RunError<T>> for Error {
    fn from(error: RunError<T>) -> Self {
        match error {
            RunError::NotRun(error) | RunError::Stopped(error) | RunError::Unconfirmed { error, .. } => error,
        }
    }
}

impl<T> fmt::Debug for RunError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::NotRun(_) => "NotRun",
            Self::Stopped(_) => "Stopped",
            Self::Unconfirmed { .. } => "Unconfirmed",
        };
        f.debug_tuple(name).field(self.error()).finish()
    }
}

/// Runs `body` under `guard` and releases it.
pub(crate) async fn run_one<T>(
    guard: LockGuard,
    body: impl AsyncFnOnce(&LockGuard) -> T,
) -> Result<T, RunError<T>> {
    let value = until_lost(std::slice::from_ref(&guard), body(&guard)).await.map_err(RunError::Stopped)?;
    confirm(value, guard.release().await)
}

/// Runs `body` under all of `guards` and releases them.
pub(crate) async fn run_many<T>(
    guards: MultiGuard,
    body: impl AsyncFnOnce(&MultiGuard) -> T,
) -> Result<T, RunError<T>> {
    let value = until_lost(&guards, body(&guards)).await.map_err(RunError::Stopped)?;
    confirm(value, guards.release().await)
}

fn confirm<T>(value: T, released: Result<(), Error>) -> Result<T, RunError<T>> {
    match released {
        Ok(()) => Ok(value),
        Err(error) => Err(RunError::Unconfirmed { value, error }),
    }
}

/// Polls `work` until it is done or one of `guards` is lost. Checks the guards before each poll, so `work`
/// takes no step if the lock was lost while the whole process was stopped.
async fn until_lost<T>(guards: &[LockGuard], work: impl Future<Output = T>) -> Result<T, Error> {
    let mut work = pin!(work);
    let mut losses: Vec<_> = guards.iter().map(LockGuard::lost).collect();
    poll_fn(|cx| {
        for (guard, lost) in guards.iter().zip(&mut losses) {
            let reason = match std::pin::Pin::new(&mut *lost).poll(cx) {
                Poll::Ready(reason) => reason,
                Poll::Pending if guard.validity() == Validity::Lost => {
                    lost.reason().unwrap_or(LossReason::Expired)
                }
                Poll::Pending => continue,
            };
            return Poll::Ready(Err(Error::lost(reason)
                .with_key(guard.key())
                .with_operation(Operation::Run)));
        }
        work.as_mut().poll(cx).map(Ok)
    })
    .await
}
