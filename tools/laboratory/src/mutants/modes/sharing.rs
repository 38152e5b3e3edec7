//! A client with one fault in the sharing of a hold by its readers. The engine does the sharing, so this lock changes the
//! settings of the engine and the guards that it makes.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AcquireOptions, BoxFuture, Capabilities, Error, FencingToken, Grant, HolderId, Lock, LockAdmin,
    LockGuard, LockKey, LossSignal, Lost, Mode, MultiGuard, Release, Validity, Wanted,
};
use leasehold_engine::{Backend, Engine, EngineBuilder, Request, Timing};
use leasehold_memory::MemoryBackend;

use super::fault::ModeFault as Fault;

/// Longer than every case.
const HOUR: Duration = Duration::from_secs(3600);

/// One client.
#[derive(Debug)]
pub(super) struct SharingLock {
    engine: Engine,
    backend: Arc<MemoryBackend>,
    fault: Fault,
    capabilities: Capabilities,
}

impl SharingLock {
    pub(super) fn start(
        engine: EngineBuilder,
        backend: Arc<MemoryBackend>,
        fault: Fault,
    ) -> Result<Self, Error> {
        let share_for = Timing::default().share_for;
        let lasts = if fault == Fault::JoinsBeyondShareFor { HOUR } else { share_for };
        let engine = engine.share_for(lasts).start()?;
        let mut capabilities = engine.capabilities().clone();
        capabilities.share_for = share_for;
        Ok(Self { engine, backend, fault, capabilities })
    }

    fn changed(&self, guard: LockGuard) -> LockGuard {
        if guard.mode() != Mode::Shared {
            return guard;
        }
        let (backend, fault) = (Arc::clone(&self.backend), self.fault);
        LockGuard::new(Arc::new(SharingGrant { inner: guard.into_grant(), backend, fault }))
    }
}

impl fmt::Display for SharingLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.engine, f)
    }
}

#[async_trait]
impl Lock for SharingLock {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        Ok(self.engine.try_acquire(key, options).await?.map(|guard| self.changed(guard)))
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        Ok(self.changed(self.engine.acquire(key, options).await?))
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        self.engine.try_acquire_all(keys, options).await
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        self.engine.acquire_all(keys, options).await
    }

    async fn try_acquire_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        self.engine.try_acquire_wanted(wanted, options).await
    }

    async fn acquire_wanted(&self, wanted: &[Wanted], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        self.engine.acquire_wanted(wanted, options).await
    }

    async fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        self.engine.adopt(text).await
    }

    async fn close(&self) -> Result<(), Error> {
        self.engine.close().await
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.engine.admin()
    }
}

/// The grant of one reader.
#[derive(Debug)]
struct SharingGrant {
    inner: Arc<dyn Grant>,
    backend: Arc<MemoryBackend>,
    fault: Fault,
}

impl SharingGrant {
    /// Returns whether the store has granted this reader, and not only a reader before it.
    fn is_first(&self) -> bool {
        self.inner.holder() == self.inner.stored_holder()
    }

    fn hides_loss(&self) -> bool {
        self.fault == Fault::LossEndsOneReader && !self.is_first()
    }

    fn releases_for_all(&self) -> bool {
        self.fault == Fault::FirstReaderReleasesForAll && self.is_first()
    }
}

impl Grant for SharingGrant {
    fn key(&self) -> &LockKey {
        self.inner.key()
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

    fn validity(&self) -> Validity {
        match self.inner.validity() {
            Validity::Lost if self.hides_loss() => Validity::Valid,
            validity => validity,
        }
    }

    fn remaining(&self) -> Option<Duration> {
        self.inner.remaining()
    }

    fn lost(&self) -> Lost {
        if self.hides_loss() { LossSignal::new().subscribe() } else { self.inner.lost() }
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
        Arc::clone(&self.inner).renew(ttl)
    }

    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Arc::clone(&self.inner).confirm()
    }

    fn relabel(self: Arc<Self>, label: Arc<str>) -> BoxFuture<'static, Result<(), Error>> {
        Arc::clone(&self.inner).relabel(label)
    }

    fn release(self: Arc<Self>) -> Release {
        let release = Arc::clone(&self.inner).release();
        if !self.releases_for_all() {
            return release;
        }
        Release::pending(async move {
            let answer = release.await;
            let hold = Request::new(self.key().clone(), self.stored_holder()).hold();
            drop(self.backend.release(vec![hold]).await);
            answer
        })
    }

    fn abandon(self: Arc<Self>) {
        if self.releases_for_all() {
            drop(self.backend.release_now(self.key(), self.stored_holder()));
        }
        Arc::clone(&self.inner).abandon();
    }
}
