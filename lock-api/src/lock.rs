//! The trait that domain code depends on.

use std::fmt::{Debug, Display};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;

use crate::admin::LockAdmin;
use crate::capabilities::Capabilities;
use crate::error::{Error, Operation};
use crate::guard::LockGuard;
use crate::key::LockKey;
use crate::multi::MultiGuard;
use crate::options::{AcquireOptions, Mode, Wanted};

/// A boxed future that can move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A lock over named keys. A grant is a guard, which holds the key until [`LockGuard::release`] or its drop. Domain code
/// depends on this trait, as `Arc<dyn Lock>`.
///
/// ```
/// use std::sync::Arc;
/// use leasehold_api::{Error, Lock, LockExt};
/// /// Domain code names no store.
/// async fn spend(lock: &dyn Lock) -> Result<(), Error> {
///     let guard = lock.key("ledger:42").acquire().await?;
///     guard.release().await
/// }
/// # #[tokio::main]
/// # async fn main() -> Result<(), Error> {
/// let lock: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
/// spend(&*lock).await
/// # }
/// ```
///
/// The builder calls (`lock.key("ledger:42").acquire()`) are on [`LockExt`](crate::LockExt). The methods here
/// are for wrappers to forward. To add a store, implement the `Backend` trait of `leasehold-engine`, whose
/// engine provides this trait.
///
/// # Contract
///
/// Every implementation keeps the rules of the project's `docs/contract.md`, which
/// `leasehold-conformance` tests. In short:
///
/// - Two grants of a key that exclude each other are never valid at once.
/// - Each grant has its own identity and, if declared, a larger token than all earlier ones.
/// - A try does not wait for another holder.
/// - Every wait has a budget.
/// - Every future can be dropped at any poll.
/// - `release` is `Ok` only if the lock was held until then.
/// - A guard knows from the clock whether it is still valid.
///
/// `Display` names the store for people and must not show a password.
///
/// Any crate can implement this trait, so a new required method needs a new major version. Optional methods
/// have a default. A feature of one store is an [`extension`](crate::LockGuard::extension) of its grants.
#[async_trait]
pub trait Lock: Debug + Display + Send + Sync + 'static {
    /// Makes one attempt. Returns the guard, or `None` if another caller holds or awaits the key.
    ///
    /// The attempt waits for no other holder, does not overtake local waiters and ignores `options.wait`. It
    /// waits for the store's reply, up to the store's time limit.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{AcquireOptions, Lock, LockKey};
    /// let lock = leasehold_memory::connect()?;
    /// let (key, options) = (LockKey::new("ledger:42")?, AcquireOptions::new());
    /// let guard = lock.try_acquire(&key, &options).await?;
    /// assert!(guard.is_some());
    /// assert!(lock.try_acquire(&key, &options).await?.is_none(), "held by `guard`");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// An error if the store is slow, down, not set up or refuses the request.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) also if the key may be held only by an earlier attempt of
    /// this client that is still being undone.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the attempt is given up. If the store had granted it, the grant is undone within
    /// [`Capabilities::undo`].
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error>;

    /// Waits until the key is granted, the budget of `options.wait` ends, or the lock is closed.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockKey};
    /// let lock = leasehold_memory::connect()?;
    /// let key = LockKey::new("ledger:42")?;
    /// let options = AcquireOptions::new().wait(Duration::from_millis(10));
    /// let guard = lock.acquire(&key, &options).await?;
    /// let error = lock.acquire(&key, &options).await.unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Timeout);
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// The budget also covers outages: a store that cannot be reached, restarts or is full
    /// ([`Unavailable`](crate::ErrorKind::Unavailable), [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown),
    /// [`Capacity`](crate::ErrorKind::Capacity)). The lock retries with growing pauses, and the caller keeps
    /// its place among the callers of this client. Such a failure ends the wait only with
    /// [`give_up_on_failure`](AcquireOptions::give_up_on_failure), with a budget of zero, or if a cooldown may
    /// have started. Every other failure ends it.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) if the budget ended, or the store's failure if the store only
    /// failed in that time. [`NotDue`](crate::ErrorKind::NotDue) if a cooldown lasts and the policy is
    /// [`OnCooldown::NotDue`](crate::OnCooldown::NotDue). [`Closed`](crate::ErrorKind::Closed) if the lock was
    /// closed. Otherwise the failure that ended the wait.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the caller loses its place in the queue, and a later call starts at the end. A grant or a
    /// place in the store's queue is undone within [`Capabilities::undo`].
    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error>;

    /// Makes one attempt at all keys. Returns the guards in the order of `keys`, or `None` if another caller
    /// holds or awaits at least one key. Otherwise like [`try_acquire`](Lock::try_acquire).
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{AcquireOptions, Lock, LockKey};
    /// let lock = leasehold_memory::connect()?;
    /// let keys = [LockKey::new("account:1")?, LockKey::new("account:2")?];
    /// let guards = lock.try_acquire_all(&keys, &AcquireOptions::new()).await?;
    /// assert!(guards.is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`acquire_all`](Lock::acquire_all), except [`Timeout`](crate::ErrorKind::Timeout). After an error no
    /// key stays held.
    ///
    /// # Cancel safety
    ///
    /// As [`try_acquire`](Lock::try_acquire), for all keys.
    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error>;

    /// Takes all keys or none, within one budget. Returns the guards in the order of `keys`.
    ///
    /// The keys are taken in byte order, so two calls of this method cannot deadlock with each other.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{AcquireOptions, Lock, LockKey};
    /// let lock = leasehold_memory::connect()?;
    /// let keys = [LockKey::new("account:2")?, LockKey::new("account:1")?];
    /// let guards = lock.acquire_all(&keys, &AcquireOptions::new()).await?;
    /// assert_eq!(guards[0].key(), &keys[0]);
    /// guards.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) if a key occurs twice, else as
    /// [`acquire`](Lock::acquire). After an error no key stays held.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Lock::acquire), for all keys.
    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error>;

    /// Makes one attempt at all keys, each in its own mode, which replaces the mode of `options`. Otherwise like
    /// [`try_acquire_all`](Lock::try_acquire_all). By default [`Unsupported`](crate::ErrorKind::Unsupported), unless all
    /// modes are the same.
    ///
    /// # Errors
    ///
    /// As [`try_acquire_all`](Lock::try_acquire_all).
    ///
    /// # Cancel safety
    ///
    /// As [`try_acquire_all`](Lock::try_acquire_all).
    async fn try_acquire_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let (keys, options) = all_alike(wanted, options)?;
        self.try_acquire_all(&keys, &options).await
    }

    /// Takes all keys or none, each in its own mode, which replaces the mode of `options`. Otherwise like
    /// [`acquire_all`](Lock::acquire_all): the keys are taken in byte order in every mode, so two calls cannot
    /// deadlock with each other. By default [`Unsupported`](crate::ErrorKind::Unsupported), unless all modes are the
    /// same.
    ///
    /// # Errors
    ///
    /// As [`acquire_all`](Lock::acquire_all). A key that occurs twice, also in two modes, is
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire_all`](Lock::acquire_all).
    async fn acquire_wanted(&self, wanted: &[Wanted], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let (keys, options) = all_alike(wanted, options)?;
        self.acquire_all(&keys, &options).await
    }

    /// Takes over a hold that another client, for example in another process, has given out
    /// ([`LockGuard::into_ref`], with an [example](crate::PortableHold)). Returns an ordinary guard with its own holder
    /// id and a greater token, whose TTL is the text's.
    ///
    /// One call of the store compares the text with the present hold, so each text is adopted once, and only while its
    /// hold lasts. The call does not queue behind callers of this client. A failure that can pass is retried for up to
    /// [`DEFAULT_WAIT`](crate::DEFAULT_WAIT), and a repeated request is the same grant. A request without any answer is
    /// given up after the time limit of a call (10 s).
    ///
    /// # Errors
    ///
    /// - [`Lost`](crate::ErrorKind::Lost) if the hold of the text has ended, was adopted or never given out, or is of
    ///   another store or [namespace](crate::Namespaced): acquire the key again.
    /// - [`InvalidOption`](crate::ErrorKind::InvalidOption) if the text was cut, or its TTL is out of the store's bounds.
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) unless [`Capabilities::portable`] is declared.
    /// - Otherwise the store's failure. To find out, call again: if the request was carried out, the hold was
    ///   released, and the text is `Lost`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the request can still reach the store, for up to the time limit of a call. If it is carried out, the
    /// hold is released within [`Capabilities::undo`], and the text is `Lost`. To keep the text, await the answer.
    async fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        let _ = text;
        Err(Error::unsupported("hold that can be adopted").with_operation(Operation::Adopt))
    }

    /// Releases every hold, marks the remaining guards as lost, ends every wait with
    /// [`Closed`](crate::ErrorKind::Closed) and refuses later calls. A second call is allowed. `close` has its
    /// own time limit, so a silent store does not block it.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{ErrorKind, Lock, LockExt, Validity};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").acquire().await?;
    /// lock.close().await?;
    /// assert_eq!(guard.validity(), Validity::Lost);
    /// assert_eq!(lock.key("ledger:42").acquire().await.unwrap_err().kind(), ErrorKind::Closed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) if the store did not confirm every release in time.
    /// The lock is closed even then. A request that can still arrive at the store, for example behind a pooler, counts
    /// as released if the store cannot stop it. A warning names its key.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the closing goes on.
    async fn close(&self) -> Result<(), Error>;

    /// Returns the features of the store and its bounds.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{Fencing, Lock, Scope};
    /// let lock = leasehold_memory::connect()?;
    /// assert_eq!(lock.capabilities().scope, Scope::Process);
    /// assert_eq!(lock.capabilities().fencing, Fencing::Volatile);
    /// # Ok(())
    /// # }
    /// ```
    fn capabilities(&self) -> &Capabilities;

    /// Returns the operator's view, if the store has one. Not for domain code. See [`LockAdmin`] for an
    /// example.
    fn admin(&self) -> Option<&dyn LockAdmin>;
}

/// Returns the keys, and the options with the mode of all of them. Without keys the mode stays.
fn all_alike(wanted: &[Wanted], options: &AcquireOptions) -> Result<(Vec<LockKey>, AcquireOptions), Error> {
    let mode: Mode = wanted.first().map_or(options.mode, |first| first.mode);
    if wanted.iter().any(|wanted| wanted.mode != mode) {
        return Err(Error::unsupported("call for several keys in different modes"));
    }
    Ok((wanted.iter().map(|wanted| wanted.key.clone()).collect(), options.clone().mode(mode)))
}

/// Forwards every method to the lock behind a pointer. Written by hand, because `async_trait` would box each
/// future twice.
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

            fn try_acquire_wanted<'a, 'b, 'c, 'f>(
                &'a self,
                wanted: &'b [Wanted],
                options: &'c AcquireOptions,
            ) -> BoxFuture<'f, Result<Option<MultiGuard>, Error>>
            where
                'a: 'f,
                'b: 'f,
                'c: 'f,
            {
                (**self).try_acquire_wanted(wanted, options)
            }

            fn acquire_wanted<'a, 'b, 'c, 'f>(
                &'a self,
                wanted: &'b [Wanted],
                options: &'c AcquireOptions,
            ) -> BoxFuture<'f, Result<MultiGuard, Error>>
            where
                'a: 'f,
                'b: 'f,
                'c: 'f,
            {
                (**self).acquire_wanted(wanted, options)
            }

            fn adopt<'a, 'b, 'f>(&'a self, text: &'b str) -> BoxFuture<'f, Result<LockGuard, Error>>
            where
                'a: 'f,
                'b: 'f,
            {
                (**self).adopt(text)
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
