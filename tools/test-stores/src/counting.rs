//! A store that counts the releases of its engine.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold_api::{Capabilities, Error, HolderId, LockAdmin, LockKey};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Events, HoldRef, ReleaseReply, Renewed, Request, Timing, async_trait,
};

/// A wrapper that counts released holds.
#[derive(Debug)]
pub struct Counting<B> {
    /// The wrapped store.
    pub backend: Arc<B>,
    /// Number of released holds.
    pub released: Arc<AtomicUsize>,
    /// Whether a refusal becomes an unknown outcome, as in a store that cannot distinguish the two.
    pub tells_nothing_apart: bool,
}

impl<B: Backend> fmt::Display for Counting<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.backend.fmt(f)
    }
}

#[async_trait]
impl<B: Backend> Backend for Counting<B> {
    fn capabilities(&self) -> &Capabilities {
        self.backend.capabilities()
    }

    fn timing(&self) -> Timing {
        self.backend.timing()
    }

    fn attach(&self, events: Events) {
        self.backend.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let answers = self.backend.acquire(requests).await.into_iter();
        let blurred = |answer| match answer {
            Ok(Attempt::Refused(error)) if self.tells_nothing_apart => Err(error),
            answer => answer,
        };
        answers.map(blurred).collect()
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        self.backend.wait(request, stop).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.backend.renew(holds).await
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        self.backend.relabel(hold, label).await
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        self.backend.give_out(hold).await
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        self.backend.adopt(request, given).await
    }

    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<ReleaseReply, Error>> {
        let answer = self.backend.release_now(key, holder);
        self.released.fetch_add(usize::from(answer.is_some()), Ordering::SeqCst);
        answer
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.released.fetch_add(holds.len(), Ordering::SeqCst);
        self.backend.release(holds).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.backend.admin()
    }

    async fn close(&self) {
        self.backend.close().await;
    }

    fn abort(&self) {
        self.backend.abort();
    }
}
