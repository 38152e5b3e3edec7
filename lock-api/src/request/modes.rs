//! Requests that name a mode: shared grants, permits, and several keys in different modes.

use super::{LockRequest, acquiring};
use crate::error::Error;
use crate::lock::Lock;
use crate::multi::MultiGuard;
use crate::options::{Mode, Wanted};
use crate::run::{RunError, run_many};

/// A request for several keys, each in its own mode ([`LockExt::wanting`](super::LockExt::wanting)).
pub type WantedRequest<'a, L> = LockRequest<'a, L, Vec<Wanted>>;

impl<L: Lock + ?Sized, K, W> LockRequest<'_, L, K, W> {
    /// Sets which other holders the grant excludes. A mode that the store does not declare is
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    pub fn mode(self, mode: Mode) -> Self {
        self.with(|options| options.mode(mode))
    }

    /// Takes the key as a reader: beside other shared grants, and never beside an exclusive one. A waiting exclusive
    /// request comes before later readers.
    ///
    /// Readers of one client with the same TTL and label share one hold of the store
    /// ([`Capabilities::share_for`](crate::Capabilities::share_for)). Lease and label belong to that hold, and
    /// a loss of the hold ends all its readers.
    ///
    /// A guard is never upgraded. A reader that acquires its key exclusively waits for its own guard, until its budget
    /// ends. Release the shared guard first, and read again under the exclusive one.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let readers = [lock.key("catalogue").shared().acquire().await?, lock.key("catalogue").shared().acquire().await?];
    /// assert!(lock.key("catalogue").try_acquire().await?.is_none(), "two readers hold it");
    /// # drop(readers);
    /// # Ok(())
    /// # }
    /// ```
    pub fn shared(self) -> Self {
        self.mode(Mode::Shared)
    }

    /// Takes one of `of` permits of the key. All callers name the same number. An exclusive request waits for all permits
    /// and blocks later ones, which is how to drain a semaphore.
    ///
    /// While the key is in use with another number, the call is
    /// [`ModeMismatch`](crate::ErrorKind::ModeMismatch). In a rolling deployment that changes the number, the new
    /// processes therefore fail until the last old holder has released. Use a new key for a new number.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("render").permits(8).acquire().await?;
    /// assert!(guard.permit().is_some_and(|number| number < 8));
    /// guard.release().await
    /// # }
    /// ```
    pub fn permits(self, of: u32) -> Self {
        self.mode(Mode::Permit { of })
    }
}

impl<L: Lock + ?Sized> WantedRequest<'_, L> {
    /// Takes all keys or none. Returns the guards in the order of the keys. See [`Lock::acquire_wanted`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::acquire_wanted`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::acquire_wanted`].
    pub async fn acquire(self) -> Result<MultiGuard, Error> {
        acquiring(self.lock.acquire_wanted(&self.key?, &self.options).await)
    }

    /// Makes one attempt at all keys. Returns `None` if at least one of them cannot be granted now. See
    /// [`Lock::try_acquire_wanted`].
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey), and as [`Lock::try_acquire_wanted`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::try_acquire_wanted`].
    pub async fn try_acquire(self) -> Result<Option<MultiGuard>, Error> {
        acquiring(self.lock.try_acquire_wanted(&self.key?, &self.options).await)
    }

    /// Takes all keys, runs `body` and releases the keys. The loss of one key stops `body`. See
    /// [`KeyRequest::run`](super::KeyRequest::run).
    ///
    /// # Errors
    ///
    /// [`RunError`], as [`KeyRequest::run`](super::KeyRequest::run).
    ///
    /// # Cancel safety
    ///
    /// As [`KeyRequest::run`](super::KeyRequest::run).
    pub async fn run<F, T>(self, body: F) -> Result<T, RunError<T>>
    where
        F: AsyncFnOnce(&MultiGuard) -> T,
    {
        run_many(self.acquire().await.map_err(RunError::NotRun)?, body).await
    }
}
