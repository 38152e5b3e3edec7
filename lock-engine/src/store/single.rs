//! A smaller trait for small stores.

use std::fmt::{Debug, Display};

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_api::{Capabilities, Error, LockAdmin};

use crate::store::backend::{Attempt, Backend, HoldRef, ReleaseReply, Renewed, Request, Timing};
use crate::store::events::Events;

/// A store that answers one key at a time. [`Single`] makes a [`Backend`] of it; the rules of
/// [`Backend`] apply to each call.
#[async_trait]
pub trait SingleKey: Debug + Display + Send + Sync + 'static {
    /// What the store has.
    fn capabilities(&self) -> &Capabilities;

    /// How the engine drives the store.
    fn timing(&self) -> Timing {
        Timing::default()
    }

    /// Called once, before anything else.
    fn attach(&self, events: Events) {
        let _ = events;
    }

    /// One attempt that does not wait for another holder.
    async fn acquire(&self, request: Request) -> Result<Attempt, Error>;

    /// Extends the hold, or confirms it where there is no lease.
    async fn renew(&self, hold: HoldRef) -> Result<Renewed, Error>;

    /// See [`Backend::look`].
    async fn look(&self, hold: HoldRef) -> Result<Renewed, Error> {
        self.renew(hold).await
    }

    /// Frees the hold if it is still that holder's.
    async fn release(&self, hold: HoldRef) -> Result<ReleaseReply, Error>;

    /// See [`Backend::release_on_new_runtime`].
    async fn release_on_new_runtime(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        self.release(hold).await
    }

    /// The operator's view, if there is one.
    fn admin(&self) -> Option<&dyn LockAdmin> {
        None
    }

    /// Ends the store after the engine has released everything.
    async fn close(&self) {}

    /// See [`Backend::abort`].
    fn abort(&self) {}
}

/// A [`Backend`] made of a [`SingleKey`] store: requests that come together run concurrently.
#[derive(Debug)]
pub struct Single<S>(S);

impl<S: SingleKey> Single<S> {
    /// Wraps the store.
    pub const fn new(store: S) -> Self {
        Self(store)
    }

    /// The store within.
    pub const fn store(&self) -> &S {
        &self.0
    }
}

impl<S: SingleKey> Display for Single<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Display::fmt(&self.0, f)
    }
}

#[async_trait]
impl<S: SingleKey> Backend for Single<S> {
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn timing(&self) -> Timing {
        self.0.timing()
    }

    fn attach(&self, events: Events) {
        self.0.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        join_all(requests.into_iter().map(|r| self.0.acquire(r))).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        join_all(holds.into_iter().map(|h| self.0.renew(h))).await
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        join_all(holds.into_iter().map(|h| self.0.look(h))).await
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        join_all(holds.into_iter().map(|h| self.0.release(h))).await
    }

    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        join_all(holds.into_iter().map(|h| self.0.release_on_new_runtime(h))).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.0.admin()
    }

    async fn close(&self) {
        self.0.close().await;
    }

    fn abort(&self) {
        self.0.abort();
    }
}
