//! A lock and grants that report to the judge.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_api::{
    AcquireOptions, BoxFuture, Capabilities, Error, FencingToken, Grant, GrantHandle, HolderId, Lock,
    LockAdmin, LockGuard, LockKey, Lost, MultiGuard, Release, Validity, Wait,
};

use super::super::caller::{CallOptions, Caller, HeldGuard, PendingCall};
use super::super::client::ClientTurns;
use super::super::judge::Judge;

/// The lock of a client, as one campaign calls it.
pub(super) struct WatchedLock {
    inner: Arc<dyn Lock>,
    judge: Arc<Judge>,
    turns: Arc<ClientTurns>,
    client: u64,
    campaign: u64,
}

impl WatchedLock {
    pub(super) fn new(caller: &Caller, campaign: u64) -> Self {
        let Caller { lock, judge, turns, client, .. } = caller;
        let (inner, judge, turns) = (Arc::clone(lock), Arc::clone(judge), Arc::clone(turns));
        Self { inner, judge, turns, client: *client, campaign }
    }
}

#[async_trait]
impl Lock for WatchedLock {
    async fn try_acquire(&self, _: &LockKey, _: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        Err(unwatched())
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let lease = self.inner.capabilities().lease;
        let budget = match options.wait {
            Wait::For(budget) => Some(budget),
            _ => None,
        };
        let asked = CallOptions {
            budget,
            cooldown: options.cooldown.is_some(),
            not_due: false,
            gives_up: options.give_up_on_failure || budget == Some(Duration::ZERO),
            max_hold: options.max_hold,
            tries: false,
            ttl: lease.and_then(|lease| options.ttl.or(lease.default)),
            keys: 1,
            mode: options.mode,
        };
        let calls = vec![self.judge.ask(self.client, key, asked, &self.turns)];
        let pending = PendingCall { judge: Arc::clone(&self.judge), calls };
        match self.inner.acquire(key, options).await {
            Ok(guard) => {
                pending.granted(std::slice::from_ref(&guard));
                self.judge.elected(self.campaign, guard.holder());
                let (handle, judge) = (guard.handle(), Arc::clone(&self.judge));
                let inner = guard.into_grant();
                Ok(LockGuard::new(Arc::new(WatchedGrant { inner, handle, judge, campaign: self.campaign })))
            }
            Err(error) => {
                pending.failed(&error);
                Err(error)
            }
        }
    }

    async fn try_acquire_all(&self, _: &[LockKey], _: &AcquireOptions) -> Result<Option<MultiGuard>, Error> {
        Err(unwatched())
    }

    async fn acquire_all(&self, _: &[LockKey], _: &AcquireOptions) -> Result<MultiGuard, Error> {
        Err(unwatched())
    }

    async fn close(&self) -> Result<(), Error> {
        self.inner.close().await
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin()
    }
}

fn unwatched() -> Error {
    Error::unsupported("call that the judge does not watch")
}

impl fmt::Display for WatchedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl fmt::Debug for WatchedLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedLock").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The grant of a term.
struct WatchedGrant {
    inner: Arc<dyn Grant>,
    handle: GrantHandle,
    judge: Arc<Judge>,
    campaign: u64,
}

impl Grant for WatchedGrant {
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

    fn renew(self: Arc<Self>, _: Option<Duration>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(std::future::ready(Err(unwatched())))
    }

    fn release(self: Arc<Self>) -> Release {
        let holder = self.holder();
        let is_asked = Arc::clone(&self.inner).asked().now_or_never().is_some();
        self.judge.term_ends(self.campaign);
        self.judge.note_end_of_term(self.campaign, &self.handle, is_asked);
        self.judge.releasing(&self.handle);
        let release = Arc::clone(&self.inner).release();
        let unanswered = HeldGuard { judge: Arc::clone(&self.judge), holder, guard: None };
        Release::pending(async move {
            let answer = release.await;
            unanswered.judge.released(holder, &answer);
            answer
        })
    }

    fn abandon(self: Arc<Self>) {
        self.judge.term_ends(self.campaign);
        self.judge.check_guards();
        Arc::clone(&self.inner).abandon();
        self.judge.dropped(self.holder());
    }
}

impl fmt::Debug for WatchedGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedGrant").field("inner", &self.inner).finish_non_exhaustive()
    }
}
