//! A wrapper that keeps the keys of one part of a program apart from all others.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::admin::{KeyInfo, ListQuery, LockAdmin, StoreFact};
use crate::capabilities::Capabilities;
use crate::error::{Error, Operation};
use crate::grant::{Grant, Release};
use crate::guard::LockGuard;
use crate::id::{FencingToken, HolderId};
use crate::key::{LockKey, namespace_prefix};
use crate::lock::{BoxFuture, Lock};
use crate::loss::Lost;
use crate::multi::MultiGuard;
use crate::options::{AcquireOptions, Mode, Wanted};
use crate::portable::PortableHold;
use crate::validity::Validity;

/// A lock whose keys are in a namespace of another lock. The key `"42"` in the namespace `ledger` is
/// `ledger:42` in the store, while guards, errors and listings show `42`.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::sync::Arc;
/// use leasehold_api::{Lock, LockExt, Namespaced};
/// let store: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
/// let ledger = Namespaced::new(Arc::clone(&store), "ledger")?;
/// let guard = ledger.key("42").acquire().await?;
/// assert_eq!(guard.key().as_str(), "42");
/// assert!(store.key("ledger:42").try_acquire().await?.is_none());
/// guard.release().await
/// # }
/// ```
///
/// Closing it closes the underlying lock for all its users.
#[derive(Clone, Debug)]
pub struct Namespaced {
    inner: Arc<dyn Lock>,
    prefix: Arc<str>,
}

impl Namespaced {
    /// Puts every key of `inner` into the namespace `name`.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey) for a name that is empty, contains NUL, or leaves no room
    /// for a key.
    pub fn new(inner: Arc<dyn Lock>, name: &str) -> Result<Self, Error> {
        // Checks the name with the shortest possible key, which has to fit.
        LockKey::from_parts([name, "k"])?;
        Ok(Self { inner, prefix: namespace_prefix(name).into() })
    }

    fn outer_to_inner(&self, key: &LockKey) -> Result<LockKey, Error> {
        LockKey::new(format!("{}{key}", self.prefix, key = key.as_str())).map_err(|e| e.with_key(key))
    }

    fn inner_to_outer(&self, mut info: KeyInfo) -> Option<KeyInfo> {
        info.key = LockKey::new(info.key.as_str().strip_prefix(&*self.prefix)?).ok()?;
        Some(info)
    }

    fn wrap(key: &LockKey, guard: LockGuard) -> LockGuard {
        LockGuard::new(Arc::new(NamespacedGrant { inner: guard.into_grant(), key: key.clone() }))
    }

    fn wrap_all(keys: &[LockKey], guards: MultiGuard) -> MultiGuard {
        keys.iter().zip(guards).map(|(key, guard)| Self::wrap(key, guard)).collect()
    }

    fn all_to_inner(&self, keys: &[LockKey]) -> Result<Vec<LockKey>, Error> {
        keys.iter().map(|key| self.outer_to_inner(key)).collect()
    }

    /// Returns the caller's keys, and the store's with their modes.
    fn all_wanted_to_inner(&self, wanted: &[Wanted]) -> Result<(Vec<LockKey>, Vec<Wanted>), Error> {
        let inner = wanted.iter().map(|one| Ok(Wanted::new(self.outer_to_inner(&one.key)?, one.mode)));
        Ok((keys_of(wanted), inner.collect::<Result<_, Error>>()?))
    }

    fn inner_admin(&self) -> Result<&dyn LockAdmin, Error> {
        self.inner.admin().ok_or_else(|| Error::unsupported("inspection"))
    }
}

fn keys_of(wanted: &[Wanted]) -> Vec<LockKey> {
    wanted.iter().map(|one| one.key.clone()).collect()
}

/// Replaces the store's key in the error by the caller's key.
fn name_outer(error: Error, keys: &[LockKey], inner: &[LockKey]) -> Error {
    let at = error.key().and_then(|named| inner.iter().position(|key| key == named));
    match at {
        Some(at) => error.replace_key(&keys[at]),
        None => error,
    }
}

impl fmt::Display for Namespaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in namespace {}", self.inner, self.prefix.trim_end_matches(':'))
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Lock for Namespaced {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let inner = self.outer_to_inner(key)?;
        let guard = self.inner.try_acquire(&inner, options).await.map_err(|e| e.replace_key(key))?;
        Ok(guard.map(|g| Self::wrap(key, g)))
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let inner = self.outer_to_inner(key)?;
        let guard = self.inner.acquire(&inner, options).await.map_err(|e| e.replace_key(key))?;
        Ok(Self::wrap(key, guard))
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let inner = self.all_to_inner(keys)?;
        let guards = self.inner.try_acquire_all(&inner, options).await;
        let guards = guards.map_err(|e| name_outer(e, keys, &inner))?;
        Ok(guards.map(|guards| Self::wrap_all(keys, guards)))
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let inner = self.all_to_inner(keys)?;
        let guards = self.inner.acquire_all(&inner, options).await;
        Ok(Self::wrap_all(keys, guards.map_err(|e| name_outer(e, keys, &inner))?))
    }

    async fn try_acquire_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let (keys, inner) = self.all_wanted_to_inner(wanted)?;
        let guards = self.inner.try_acquire_wanted(&inner, options).await;
        let guards = guards.map_err(|e| name_outer(e, &keys, &keys_of(&inner)))?;
        Ok(guards.map(|guards| Self::wrap_all(&keys, guards)))
    }

    async fn acquire_wanted(&self, wanted: &[Wanted], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let (keys, inner) = self.all_wanted_to_inner(wanted)?;
        let guards = self.inner.acquire_wanted(&inner, options).await;
        Ok(Self::wrap_all(&keys, guards.map_err(|e| name_outer(e, &keys, &keys_of(&inner)))?))
    }

    /// Adopts a hold that was given out in a namespace of this name. For a text of another namespace the store finds
    /// no hold ([`Lost`](crate::ErrorKind::Lost)).
    async fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        let named = |e: Error| e.with_operation(Operation::Adopt);
        let hold = text.parse::<PortableHold>().map_err(named)?;
        let inner = hold.of_key(&self.outer_to_inner(hold.key()).map_err(named)?);
        let guard = self.inner.adopt(inner.expose()).await.map_err(|e| e.replace_key(hold.key()))?;
        Ok(Self::wrap(hold.key(), guard))
    }

    async fn close(&self) -> Result<(), Error> {
        self.inner.close().await
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin().map(|_| self as &dyn LockAdmin)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl LockAdmin for Namespaced {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let inner = self.outer_to_inner(key)?;
        let mut info = self.inner_admin()?.inspect(&inner).await.map_err(|e| e.replace_key(key))?;
        info.key = key.clone();
        Ok(info)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let mut inner = query.clone();
        inner.prefix = format!("{}{}", self.prefix, query.prefix);
        let infos = self.inner_admin()?.list(&inner).await?;
        Ok(infos.into_iter().filter_map(|i| self.inner_to_outer(i)).collect())
    }

    async fn changed(&self, seen: &KeyInfo, at_most: Duration) -> Result<Option<KeyInfo>, Error> {
        let mut inner = seen.clone();
        inner.key = self.outer_to_inner(&seen.key)?;
        let changed = self.inner_admin()?.changed(&inner, at_most).await;
        let changed = changed.map_err(|e| e.replace_key(&seen.key))?;
        Ok(changed.map(|info| KeyInfo { key: seen.key.clone(), ..info }))
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let inner = self.outer_to_inner(key)?;
        self.inner_admin()?.force_release(&inner, holder).await.map_err(|e| e.replace_key(key))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let inner = self.outer_to_inner(key)?;
        self.inner_admin()?.ask(&inner, holder).await.map_err(|e| e.replace_key(key))
    }

    async fn facts(&self) -> Result<Vec<StoreFact>, Error> {
        self.inner_admin()?.facts().await
    }

    /// Returns `None`, because an extension works with the store's own keys. Use the underlying lock instead.
    fn extension_of(&self, _: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        None
    }
}

#[derive(Debug)]
struct NamespacedGrant {
    inner: Arc<dyn Grant>,
    key: LockKey,
}

#[deny(clippy::missing_trait_methods)]
impl Grant for NamespacedGrant {
    fn key(&self) -> &LockKey {
        &self.key
    }

    fn holder(&self) -> HolderId {
        self.inner.holder()
    }

    fn stored_holder(&self) -> HolderId {
        self.inner.stored_holder()
    }

    fn token(&self) -> Option<FencingToken> {
        self.inner.token()
    }

    fn mode(&self) -> Mode {
        self.inner.mode()
    }

    fn permit(&self) -> Option<u32> {
        self.inner.permit()
    }

    fn validity(&self) -> Validity {
        self.inner.validity()
    }

    fn remaining(&self) -> Option<Duration> {
        self.inner.remaining()
    }

    fn lost(&self) -> Lost {
        self.inner.lost()
    }

    fn validity_changed(self: Arc<Self>, seen: Validity) -> BoxFuture<'static, Validity> {
        Arc::clone(&self.inner).validity_changed(seen)
    }

    fn asked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Arc::clone(&self.inner).asked()
    }

    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        self.inner.extension(id)
    }

    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>> {
        let renewed = Arc::clone(&self.inner).renew(ttl);
        Box::pin(async move { renewed.await.map_err(|e| e.replace_key(&self.key)) })
    }

    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        let confirmed = Arc::clone(&self.inner).confirm();
        Box::pin(async move { confirmed.await.map_err(|e| e.replace_key(&self.key)) })
    }

    fn relabel(self: Arc<Self>, label: Arc<str>) -> BoxFuture<'static, Result<(), Error>> {
        let relabelled = Arc::clone(&self.inner).relabel(label);
        Box::pin(async move { relabelled.await.map_err(|e| e.replace_key(&self.key)) })
    }

    fn into_ref(self: Arc<Self>, ttl: Duration) -> BoxFuture<'static, Result<PortableHold, Error>> {
        let given_out = Arc::clone(&self.inner).into_ref(ttl);
        Box::pin(async move {
            let given_out = given_out.await.map(|hold| hold.of_key(&self.key));
            given_out.map_err(|e| e.replace_key(&self.key))
        })
    }

    fn release(self: Arc<Self>) -> Release {
        Arc::clone(&self.inner).release().map_err(move |e| e.replace_key(&self.key))
    }

    fn release_in_batch(self: Arc<Self>) -> Release {
        Arc::clone(&self.inner).release_in_batch().map_err(move |e| e.replace_key(&self.key))
    }

    fn abandon(self: Arc<Self>) {
        Arc::clone(&self.inner).abandon();
    }
}
