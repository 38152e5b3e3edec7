//! Blocking locks behind the async interface, so that the suite can call them.

use std::any::{Any, TypeId};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::blocking;
use leasehold::{
    AcquireOptions, BoxFuture, Capabilities, Error, FencingToken, Grant, GrantHandle, HolderId, Lock,
    LockAdmin, LockGuard, LockKey, Lost, Mode, MultiGuard, PortableHold, Release, Validity, Wanted,
    async_trait,
};
use tokio::task::spawn_blocking;

/// Makes each call of a blocking lock on a thread where blocking is allowed.
#[derive(Debug)]
pub(crate) struct Adapter(pub(crate) blocking::Lock);

impl std::fmt::Display for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

async fn on_a_thread<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(call).await.unwrap()
}

fn pairs(wanted: &[Wanted]) -> Vec<(LockKey, Mode)> {
    wanted.iter().map(|one| (one.key.clone(), one.mode)).collect()
}

#[async_trait]
impl Lock for Adapter {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let (lock, key, options) = (self.0.clone(), key.clone(), options.clone());
        let guard = on_a_thread(move || lock.key(key).options(options).try_acquire()).await?;
        Ok(guard.map(AdaptedGrant::guard))
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let (lock, key, options) = (self.0.clone(), key.clone(), options.clone());
        on_a_thread(move || lock.key(key).options(options).acquire()).await.map(AdaptedGrant::guard)
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let (lock, keys, options) = (self.0.clone(), keys.to_vec(), options.clone());
        let guards = on_a_thread(move || lock.keys(keys).options(options).try_acquire()).await?;
        Ok(guards.map(|guards| guards.into_iter().map(AdaptedGrant::guard).collect()))
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let (lock, keys, options) = (self.0.clone(), keys.to_vec(), options.clone());
        let guards = on_a_thread(move || lock.keys(keys).options(options).acquire()).await?;
        Ok(guards.into_iter().map(AdaptedGrant::guard).collect())
    }

    async fn try_acquire_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let (lock, wanted, options) = (self.0.clone(), pairs(wanted), options.clone());
        let guards = on_a_thread(move || lock.wanting(wanted).options(options).try_acquire()).await?;
        Ok(guards.map(|guards| guards.into_iter().map(AdaptedGrant::guard).collect()))
    }

    async fn acquire_wanted(&self, wanted: &[Wanted], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let (lock, wanted, options) = (self.0.clone(), pairs(wanted), options.clone());
        let guards = on_a_thread(move || lock.wanting(wanted).options(options).acquire()).await?;
        Ok(guards.into_iter().map(AdaptedGrant::guard).collect())
    }

    async fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        let (lock, text) = (self.0.clone(), text.to_owned());
        on_a_thread(move || lock.adopt(&text)).await.map(AdaptedGrant::guard)
    }

    async fn close(&self) -> Result<(), Error> {
        let lock = self.0.clone();
        on_a_thread(move || lock.close()).await
    }

    fn capabilities(&self) -> &Capabilities {
        self.0.as_async().capabilities()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.0.as_async().admin()
    }
}

#[derive(Debug)]
struct AdaptedGrant {
    watch: GrantHandle,
    guard: Mutex<Option<blocking::LockGuard>>,
}

impl AdaptedGrant {
    fn guard(guard: blocking::LockGuard) -> LockGuard {
        LockGuard::new(Arc::new(Self { watch: guard.handle(), guard: Mutex::new(Some(guard)) }))
    }

    fn take(&self) -> blocking::LockGuard {
        self.guard.lock().unwrap().take().unwrap()
    }

    /// Makes a call of the guard, which is there until it is released.
    async fn call(
        self: Arc<Self>,
        call: impl FnOnce(&blocking::LockGuard) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        on_a_thread(move || call(self.guard.lock().unwrap().as_ref().unwrap())).await
    }
}

impl Grant for AdaptedGrant {
    fn key(&self) -> &LockKey {
        self.watch.key()
    }

    fn holder(&self) -> HolderId {
        self.watch.holder()
    }

    fn stored_holder(&self) -> HolderId {
        self.watch.stored_holder()
    }

    fn token(&self) -> Option<FencingToken> {
        self.watch.token()
    }

    fn mode(&self) -> Mode {
        self.watch.mode()
    }

    fn permit(&self) -> Option<u32> {
        self.watch.permit()
    }

    fn validity(&self) -> Validity {
        self.watch.validity()
    }

    fn remaining(&self) -> Option<Duration> {
        self.watch.remaining()
    }

    fn lost(&self) -> Lost {
        self.watch.lost()
    }

    fn asked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { self.watch.asked().await })
    }

    fn extension(&self, _: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        None
    }

    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.call(move |guard| match ttl {
            Some(ttl) => guard.renew_for(ttl),
            None => guard.renew(),
        }))
    }

    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.call(blocking::LockGuard::confirm))
    }

    fn relabel(self: Arc<Self>, label: Arc<str>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.call(move |guard| guard.relabel(label)))
    }

    fn into_ref(self: Arc<Self>, ttl: Duration) -> BoxFuture<'static, Result<PortableHold, Error>> {
        let guard = self.take();
        Box::pin(on_a_thread(move || guard.into_ref(ttl)))
    }

    fn release(self: Arc<Self>) -> Release {
        let guard = self.take();
        Release::pending(on_a_thread(move || guard.release()))
    }

    fn abandon(self: Arc<Self>) {
        // Outside of any runtime, where the drop of a guard waits, and before the next call of the case. `None` after a
        // failed `into_ref`.
        let guard = self.guard.lock().unwrap().take();
        let _ = std::thread::spawn(move || drop(guard)).join();
    }
}
