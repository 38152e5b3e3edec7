//! The operator's view: inspect, list and forced release. Not for domain code.

use std::any::{Any, TypeId};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::Error;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::options::Mode;

/// The operations for operators. Inspecting and listing never take, block or extend a lock.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use leasehold_api::{ListQuery, Lock, LockExt, LossReason};
/// let lock = leasehold_memory::connect()?;
/// let guard = lock.key("ledger:42").label("worker 7").acquire().await?;
/// let Some(admin) = lock.admin() else { return Ok(()) };
/// for info in admin.list(&ListQuery::new().prefix("ledger:")).await? {
///     println!("{} is held by {:?}", info.key, info.holder().and_then(|hold| hold.label.clone()));
/// }
/// let info = admin.inspect(guard.key()).await?;
/// if let Some(holder) = info.holder().and_then(|hold| hold.holder) {
///     assert!(admin.force_release(guard.key(), holder).await?);
/// }
/// assert_eq!(guard.lost().await, LossReason::ForcedRelease);
/// # Ok(())
/// # }
/// ```
#[async_trait]
pub trait LockAdmin: Debug + Send + Sync {
    /// Returns the holders, waiters and cooldown of one key. A free key has neither holders nor cooldown.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{Lock, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").acquire().await?;
    /// if let Some(admin) = lock.admin() {
    ///     let info = admin.inspect(guard.key()).await?;
    ///     assert_eq!(info.holder().and_then(|hold| hold.holder), Some(guard.holder()));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless declared. Otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no lock is affected.
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error>;

    /// Returns the keys that `query` selects, in byte order.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{ListQuery, Lock, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let _guards = lock.keys(["ledger:1", "ledger:2", "report"]).acquire().await?;
    /// if let Some(admin) = lock.admin() {
    ///     let held = admin.list(&ListQuery::new().prefix("ledger:").limit(10)).await?;
    ///     assert_eq!(held.len(), 2);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](LockAdmin::inspect).
    ///
    /// # Cancel safety
    ///
    /// If dropped, no lock is affected.
    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error>;

    /// Ends the hold of `key` if and only if `holder` has it. Other holders of a shared key keep theirs. After `Ok(true)`
    /// the holder's guard reads lost within [`Capabilities::loss_detection`](crate::Capabilities::loss_detection), and the
    /// next grant has a larger token. `Ok(false)` means that this holder does not hold the key.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{ErrorKind, Lock, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").acquire().await?;
    /// if let Some(admin) = lock.admin() {
    ///     assert!(admin.force_release(guard.key(), guard.holder()).await?);
    ///     assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless declared. Otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call may still end the hold. Inspect the key to see.
    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error>;

    /// Sends `holder` a request to release `key`, if and only if it holds the key. Another client's grant is named by its
    /// [`stored_holder`](crate::LockGuard::stored_holder), which inspection shows. After `Ok(true)` the future
    /// `asked` of its [guard](crate::LockGuard) resolves within
    /// [`Capabilities::loss_detection`](crate::Capabilities::loss_detection), and inspection shows the request
    /// ([`HoldInfo`]). The lock stays as it is, because the holder decides. A second call is the same as the first.
    /// After `Ok(false)` nothing has changed, because the key is free or has another holder. The caller needs the rights
    /// of [`force_release`](LockAdmin::force_release).
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{Lock, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").acquire().await?;
    /// if let Some(admin) = lock.admin() {
    ///     assert!(admin.ask(guard.key(), guard.holder()).await?);
    /// }
    /// guard.asked().await;
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) unless declared. Otherwise the error of the store.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call may still send the request. Inspect the key to see.
    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let _ = holder;
        Err(Error::unsupported("requests to release a lock").with_key(key))
    }

    /// Waits until the holders or labels of `seen.key` differ from `seen`, and returns the new state. `None` if
    /// they are the same after `at_most`, so `seen` is still right.
    ///
    /// `seen` is an earlier answer of this method or of [`inspect`](LockAdmin::inspect), or [`KeyInfo::free`] to
    /// get a holder at once. A change is another grant, the end of a grant without a successor,
    /// or another label ([`KeyInfo::differs_from`]). The end of a lease counts when the store lets others in. The
    /// caller is not among the waiters of the key.
    ///
    /// The engine looks when it is called, on a notification of the store, when a shown lease ends, and at the
    /// poll interval of waiters. It sees a change within [`Capabilities::handover`](crate::Capabilities::handover)
    /// plus [`AdminCapabilities::lag`](crate::AdminCapabilities::lag). If a state lasts for a shorter time, it may
    /// miss that state.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::{KeyInfo, Lock, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").label("10.0.0.7:8080").acquire().await?;
    /// let Some(admin) = lock.admin() else { return Ok(()) };
    /// let mut seen = KeyInfo::free(guard.key().clone());
    /// while let Some(now) = admin.changed(&seen, Duration::from_millis(1)).await? {
    ///     println!("the leader is {:?}", now.holder().and_then(|hold| hold.label.as_deref()));
    ///     seen = now;
    /// }
    /// assert_eq!(seen.holder().and_then(|hold| hold.holder), Some(guard.holder()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](LockAdmin::inspect): the first look that fails ends the wait. [`Closed`](crate::ErrorKind::Closed)
    /// if the lock was closed. By default [`Unsupported`](crate::ErrorKind::Unsupported), but the engine waits on
    /// every store with inspection.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no lock is affected. A later call with the same `seen` returns the change.
    async fn changed(&self, seen: &KeyInfo, at_most: Duration) -> Result<Option<KeyInfo>, Error> {
        let _ = at_most;
        Err(Error::unsupported("wait for a change of a key").with_key(&seen.key))
    }

    /// Returns facts about the store, such as the version of its server, which `leasehold check` prints. By default
    /// none.
    ///
    /// # Errors
    ///
    /// The error of the store.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no lock is affected.
    async fn facts(&self) -> Result<Vec<StoreFact>, Error> {
        Ok(Vec::new())
    }

    /// Returns an extra operation of this store by its type. See [`extension`](#method.extension) on `dyn
    /// LockAdmin`.
    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        let _ = id;
        None
    }
}

impl dyn LockAdmin + '_ {
    /// Returns an operation that only some stores have, by the type that the store's crate documents. For
    /// example, one ends a database session with all its holds. A wrapper whose keys differ from the store's
    /// returns `None`.
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.extension_of(TypeId::of::<T>())?.downcast_ref()
    }
}

/// A fact about a store, for an operator.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFact {
    /// The name, in a few words.
    pub name: String,
    /// The value. It contains no password.
    pub value: String,
    /// The next step of the operator, if the value shows a problem.
    pub advice: Option<String>,
}

impl StoreFact {
    /// Makes a fact that shows no problem.
    #[must_use]
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into(), advice: None }
    }

    /// Sets the next step of the operator.
    #[must_use]
    pub fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
}

/// The selection of keys that [`LockAdmin::list`] returns.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListQuery {
    /// The text with which the listed keys begin.
    pub prefix: String,
    /// The maximum number of keys. `None` lists all.
    pub limit: Option<usize>,
    /// Includes free keys with a running cooldown, and expired holds that no client has replaced.
    pub include_ended: bool,
}

impl ListQuery {
    /// Selects all held keys.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Selects only keys that begin with `prefix`.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Selects at most `limit` keys.
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Includes expired leases and cooldowns.
    #[must_use]
    pub fn include_ended(mut self) -> Self {
        self.include_ended = true;
        self
    }
}

/// The store's data about one key.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyInfo {
    /// The key.
    pub key: LockKey,
    /// Whether `key` is the real name. A store that hashes keys
    /// ([`KeyIdentity::Hashed`](crate::KeyIdentity::Hashed)) may know only a number, and `key` is then the text
    /// of that number.
    pub named: bool,
    /// The current holders, or the last holder if its lease ended and no client has taken the key since. More
    /// than one only in shared modes.
    pub holders: Vec<HoldInfo>,
    /// The number of waiters, if the store knows it.
    pub waiters: Option<u64>,
    /// The time until a new grant is possible, if a cooldown lasts.
    pub cooldown: Option<Duration>,
}

impl KeyInfo {
    /// Makes the data of a key without a holder. The store then sets the fields that it knows.
    #[must_use]
    pub const fn free(key: LockKey) -> Self {
        Self { key, named: true, holders: Vec::new(), waiters: None, cooldown: None }
    }

    /// Makes the data of a key with one current or past hold.
    #[must_use]
    pub fn with_hold(key: LockKey, hold: HoldInfo) -> Self {
        Self { holders: vec![hold], ..Self::free(key) }
    }

    /// Returns the first current holder.
    #[must_use]
    pub fn holder(&self) -> Option<&HoldInfo> {
        self.holders.iter().find(|hold| hold.state == HoldState::Held)
    }

    /// Returns whether the key is held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.holder().is_some()
    }

    /// Returns whether the current holders or their labels are others than in `seen`. Times, waiters,
    /// cooldowns and requests to release do not count.
    #[must_use]
    pub fn differs_from(&self, seen: &Self) -> bool {
        fn held(
            info: &KeyInfo,
        ) -> impl Iterator<Item = (Option<HolderId>, Option<FencingToken>, Option<&str>)> {
            let held = info.holders.iter().filter(|hold| hold.state == HoldState::Held);
            held.map(|hold| (hold.holder, hold.token, hold.label.as_deref()))
        }
        !held(self).eq(held(seen))
    }

    /// Returns whether the key can be granted now, because it has neither holder nor cooldown.
    #[must_use]
    pub fn is_free(&self) -> bool {
        !self.is_held() && self.cooldown.is_none()
    }
}

/// The store's data about one hold.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldInfo {
    /// Whether the hold is live, or its lease has ended.
    pub state: HoldState,
    /// The holder id of the grant that has, or last had, the key.
    pub holder: Option<HolderId>,
    /// The mode. A key has several holders only in a mode other than exclusive, and then all have the same.
    pub mode: Mode,
    /// The number of the permit, for [`Mode::Permit`].
    pub permit: Option<u32>,
    /// The fencing token of the grant, if the store has tokens.
    pub token: Option<FencingToken>,
    /// The label of the request.
    pub label: Option<Arc<str>>,
    /// The time of the grant, by the store's clock.
    pub since: Option<SystemTime>,
    /// The time until the lease ends by itself. `None` without a lease.
    pub expires_in: Option<Duration>,
    /// The holder as the operating system or the server sees it, such as a process or a client address. `None` also while
    /// the hold is on its way to another process ([`LockGuard::into_ref`](crate::LockGuard::into_ref)).
    pub owner: Option<String>,
    /// Whether the holder has a request to release ([`LockAdmin::ask`]). False on stores without such requests.
    pub asked: bool,
}

impl HoldInfo {
    /// Makes the data of a live, exclusive hold. The store then sets the fields that it knows.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: HoldState::Held,
            holder: None,
            mode: Mode::Exclusive,
            permit: None,
            token: None,
            label: None,
            since: None,
            expires_in: None,
            owner: None,
            asked: false,
        }
    }
}

impl Default for HoldInfo {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a hold is live.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldState {
    /// The key is held now.
    Held,
    /// The lease ended, and no client has taken the key since.
    Expired,
}
