//! A wrapper that keeps the keys of one part of a program apart from all others.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::admin::{HoldInfo, ListQuery, LockAdmin, SessionInfo};
use crate::capabilities::Capabilities;
use crate::error::Error;
use crate::guard::LockGuard;
use crate::id::{FencingToken, HolderId};
use crate::key::{LockKey, namespace_prefix};
use crate::lock::{BoxFuture, Grant, Lock, Release};
use crate::options::AcquireOptions;
use crate::validity::{Lost, Validity};

/// A lock whose keys live in a namespace of another lock: `"42"` in the namespace `ledger` is the
/// key `ledger:42` of the store, while guards, errors and listings show `42`.
///
/// Closing it closes the lock beneath, for everybody who uses that.
#[derive(Clone, Debug)]
pub struct Namespaced {
    inner: Arc<dyn Lock>,
    prefix: Arc<str>,
}

impl Namespaced {
    /// Puts every key of `inner` into the namespace `name`.
    #[must_use]
    pub fn new(inner: Arc<dyn Lock>, name: &str) -> Self {
        Self { inner, prefix: namespace_prefix(name).into() }
    }

    fn outer_to_inner(&self, key: &LockKey) -> Result<LockKey, Error> {
        LockKey::new(format!("{}{key}", self.prefix, key = key.as_str())).map_err(|e| e.with_key(key))
    }

    fn inner_to_outer(&self, mut info: HoldInfo) -> Option<HoldInfo> {
        info.key = LockKey::new(info.key.as_str().strip_prefix(&*self.prefix)?).ok()?;
        Some(info)
    }

    fn wrap(key: &LockKey, guard: LockGuard) -> LockGuard {
        LockGuard::new(Arc::new(NamespacedGrant { inner: guard.into_grant(), key: key.clone() }))
    }

    fn inner_admin(&self) -> Result<&dyn LockAdmin, Error> {
        self.inner.admin().ok_or_else(|| Error::unsupported("inspection"))
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

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<Vec<LockGuard>, Error> {
        let inner: Vec<_> = keys.iter().map(|k| self.outer_to_inner(k)).collect::<Result<_, _>>()?;
        let guards = self.inner.acquire_all(&inner, options).await.map_err(|e| {
            let outer = e.key().and_then(|k| inner.iter().position(|i| i == k)).map(|i| &keys[i]);
            match outer {
                Some(key) => e.replace_key(key),
                None => e,
            }
        })?;
        Ok(keys.iter().zip(guards).map(|(key, guard)| Self::wrap(key, guard)).collect())
    }

    async fn release(&self, guard: LockGuard) -> Result<(), Error> {
        guard.release().await
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
    async fn inspect(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error> {
        let inner = self.outer_to_inner(key)?;
        let info = self.inner_admin()?.inspect(&inner).await.map_err(|e| e.replace_key(key))?;
        Ok(info.and_then(|i| self.inner_to_outer(i)))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error> {
        let mut inner = query.clone();
        inner.prefix = format!("{}{}", self.prefix, query.prefix);
        let infos = self.inner_admin()?.list(&inner).await?;
        Ok(infos.into_iter().filter_map(|i| self.inner_to_outer(i)).collect())
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let inner = self.outer_to_inner(key)?;
        self.inner_admin()?.force_release(&inner, holder).await.map_err(|e| e.replace_key(key))
    }

    async fn session_of(&self, key: &LockKey) -> Result<Option<SessionInfo>, Error> {
        let inner = self.outer_to_inner(key)?;
        self.inner_admin()?.session_of(&inner).await.map_err(|e| e.replace_key(key))
    }

    async fn end_session(&self, session: &SessionInfo) -> Result<bool, Error> {
        self.inner_admin()?.end_session(session).await
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

    fn token(&self) -> Option<FencingToken> {
        self.inner.token()
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

    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        self.inner.extension(id)
    }

    fn renew(&self, ttl: Option<Duration>) -> BoxFuture<'_, Result<(), Error>> {
        let renewed = self.inner.renew(ttl);
        Box::pin(async { renewed.await.map_err(|e| e.replace_key(&self.key)) })
    }

    fn release(self: Arc<Self>) -> Release {
        match Arc::clone(&self.inner).release() {
            Release::Done(answer) => Release::Done(answer.map_err(|e| e.replace_key(&self.key))),
            Release::Pending(answer) => {
                Release::pending(async move { answer.await.map_err(|e| e.replace_key(&self.key)) })
            }
        }
    }

    fn abandon(self: Arc<Self>) {
        Arc::clone(&self.inner).abandon();
    }
}
