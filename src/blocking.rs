//! Locks for programs without an async runtime.
//!
//! ```
//! # fn main() -> Result<(), leasehold::Error> {
//! let lock = leasehold::blocking::connect("memory:jobs")?;
//!
//! let guard = lock.key("nightly-report").acquire()?;
//! println!("held with token {:?}", guard.token());
//! guard.release()?; // lost or unknown is an error; drop is the safety net
//!
//! let report = lock.key("nightly-report").run(|guard| format!("report {}", guard.key()))?;
//! assert_eq!(report, "report nightly-report");
//! # Ok(())
//! # }
//! ```
//!
//! Contract, URLs, options and errors are the same as of [`connect`](crate::connect()). [`Lock`] owns a small runtime
//! on a separate thread, which renews leases and notices losses while the caller works.
//!
//! # Inside an async runtime
//!
//! A call that blocks would stop the other tasks of its worker thread. In a tokio task or in an `async fn main`,
//! each call therefore returns [`Unsupported`](crate::ErrorKind::Unsupported) at once: use
//! [`leasehold::connect`](crate::connect()) and `.await` there. The calls work where tokio allows to block, in
//! `spawn_blocking` and `block_in_place`. Tasks of other executors are not recognized.
//!
//! Lock and guards can be dropped everywhere. In an async task the drop does not wait.
//!
//! # At the end of `main`
//!
//! When `main` returns, its guards are released, whether they are dropped before the lock, after it, or with the lock
//! in a static variable. Because `main` ends the process, and with it the background thread, the drop of a guard waits
//! for the store's reply, at most a second. Guards that are dropped one after the other share that second: after a wait
//! without a reply, drops do not wait for the next ten seconds or until the next grant. Their releases go on in the
//! background, which the last drop of lock and guards awaits for up to two seconds.
//!
//! Rust does not drop a guard in a static variable, a forgotten guard, or a guard of a thread that still runs when
//! `main` returns. `std::process::exit` drops no guard at all. Such guards stay valid until the process ends, and then
//! the locks end as after a crash:
//!
//! - File, session and transaction: free at once.
//! - Lease, etcd: free when the lease ends, with the default TTL within 30 s (etcd: 31 s, and later after an election).
//! - Row: held until an operator releases it.
//!
//! Call [`Lock::close`] at the end of `main` to release them too.

mod guard;
mod request;
mod runtime;

use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, ErrorKind, LockExt as _, LockKey, Mode};

use crate::ConnectOptions;
use runtime::Runtime;

pub use guard::{LockGuard, MultiGuard};
pub use request::{KeyRequest, KeysRequest, LockRequest, WantedRequest};

/// Connects to the store that `url` names. See [`connect`](crate::connect()) for the URLs.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// let lock = leasehold::blocking::connect("memory:jobs?ttl=30s")?;
/// lock.key("nightly-report").acquire()?.release()
/// # }
/// ```
///
/// # Errors
///
/// As [`connect`](crate::connect()), except [`NoRuntime`](crate::ErrorKind::NoRuntime).
/// [`Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
/// [`Unavailable`](crate::ErrorKind::Unavailable) if the system refuses a thread.
pub fn connect(url: &str) -> Result<Lock, Error> {
    connect_with(url, ConnectOptions::new())
}

/// Connects like [`connect`], with `options` that a URL cannot contain.
///
/// # Errors
///
/// As [`connect`].
pub fn connect_with(url: &str, options: ConnectOptions) -> Result<Lock, Error> {
    connect_by(crate::connect_with(url, options))
}

/// Connects by a store's own function, for settings that a URL cannot contain. `connecting` runs on the runtime of
/// the returned lock.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// use leasehold::{blocking, memory};
/// let lock = blocking::connect_by(async { memory::connect() })?;
/// lock.key("nightly-report").acquire()?.release()
/// # }
/// ```
///
/// # Errors
///
/// As [`connect`], and the error of `connecting`.
pub fn connect_by<L: crate::Lock>(connecting: impl Future<Output = Result<L, Error>>) -> Result<Lock, Error> {
    let runtime = Runtime::start()?;
    let lock = runtime.block_on(connecting)??;
    Ok(Lock { lock: Arc::new(lock), runtime: Arc::new(runtime) })
}

/// A lock over named keys whose calls block the calling thread.
///
/// Clones share one connection. When the last clone and the last guard are dropped, the connection ends, and the
/// drop waits up to two seconds for releases under way and for callbacks.
#[derive(Clone)]
pub struct Lock {
    lock: Arc<dyn crate::Lock>,
    runtime: Arc<Runtime>,
}

impl Lock {
    /// Starts a request for one key. It does nothing until a call of the builder that acquires.
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// let guard = lock.key("ledger:42").wait(Duration::from_millis(250)).acquire()?;
    /// assert!(lock.key("ledger:42").try_acquire()?.is_none(), "held by `guard`");
    /// guard.release()
    /// # }
    /// ```
    pub fn key<K>(&self, key: K) -> KeyRequest<'_>
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        LockRequest::new((*self.lock).key(key), &self.runtime)
    }

    /// Starts a request for several keys, all or none.
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// let guards = lock.keys(["account:1", "account:2"]).acquire()?;
    /// assert_eq!(guards.len(), 2);
    /// guards.release()
    /// # }
    /// ```
    pub fn keys<I>(&self, keys: I) -> KeysRequest<'_>
    where
        I: IntoIterator,
        I::Item: TryInto<LockKey>,
        <I::Item as TryInto<LockKey>>::Error: Into<Error>,
    {
        LockRequest::new((*self.lock).keys(keys), &self.runtime)
    }

    /// Starts a request for several keys, each in its own mode, all or none. See the async
    /// [`wanting`](crate::LockExt::wanting).
    pub fn wanting<I, K>(&self, wanted: I) -> WantedRequest<'_>
    where
        I: IntoIterator<Item = (K, Mode)>,
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        LockRequest::new((*self.lock).wanting(wanted), &self.runtime)
    }

    /// Takes over a hold that another client, for example in another process, has given out. See
    /// [`Lock::adopt`](crate::Lock::adopt).
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// use std::time::Duration;
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// let minute = Duration::from_secs(60);
    /// let portable = lock.key("report").ttl(minute).acquire()?.into_ref(minute)?;
    /// let guard = lock.adopt(portable.expose())?;
    /// guard.release()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Lock::adopt`](crate::Lock::adopt). [`Unsupported`](crate::ErrorKind::Unsupported) also inside an async task.
    pub fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        let guard = self.runtime.block_on(self.lock.adopt(text))??;
        Ok(LockGuard::new(guard, &self.runtime))
    }

    /// Releases every hold, marks the remaining guards as lost and ends the waits of other threads. See
    /// [`Lock::close`](crate::Lock::close).
    ///
    /// # Errors
    ///
    /// As [`Lock::close`](crate::Lock::close). [`Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn close(&self) -> Result<(), Error> {
        self.runtime.block_on(self.lock.close())?
    }

    /// Returns the async lock, for its capabilities, for the operator's view, and for async code. It works while this
    /// lock or a guard of it exists.
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// use leasehold::{LockExt, Requirements};
    /// let lock = leasehold::blocking::connect("memory:")?;
    /// lock.as_async().require(&Requirements::new().fencing())
    /// # }
    /// ```
    #[must_use]
    pub fn as_async(&self) -> &Arc<dyn crate::Lock> {
        &self.lock
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lock").field(&self.lock).finish()
    }
}

/// Names the store without a password.
impl fmt::Display for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// Returns the error of a blocking call in an async task.
fn in_async_task() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "a blocking call in an async task would stop the other tasks of its thread. Connect with \
         leasehold::connect and await there, or make the call in tokio::task::spawn_blocking",
    )
}
