//! A smaller trait than [`Backend`], for stores that handle one key per call.

use std::fmt::{Debug, Display};
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_api::{Capabilities, Error, LockAdmin};

use crate::store::backend::{Attempt, Backend, HoldRef, ReleaseReply, Renewed, Request, Timing};
use crate::store::events::Events;

/// A store that handles one key per call. [`Single`] turns it into a [`Backend`]. The rules of [`Backend`]
/// apply to each call.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::collections::HashMap;
/// use std::fmt;
/// use std::sync::Mutex;
/// use leasehold_api::{Capabilities, Error, HolderId, LockExt as _, LockKey, LossReason, Scope};
/// use leasehold_engine::{
///     Attempt, Contended, Engine, Granted, HoldRef, ReleaseReply, Renewed, Request, Single, SingleKey, async_trait,
/// };
/// #[derive(Debug)]
/// struct Table(Mutex<HashMap<LockKey, HolderId>>, Capabilities);
/// impl fmt::Display for Table {
///     fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
///         f.write_str("table")
///     }
/// }
/// #[async_trait]
/// impl SingleKey for Table {
///     fn capabilities(&self) -> &Capabilities {
///         &self.1
///     }
///     async fn acquire(&self, request: Request) -> Result<Attempt, Error> {
///         let holder = *self.0.lock().unwrap().entry(request.key).or_insert(request.holder);
///         let is_ours = holder == request.holder; // also if the request is repeated
///         Ok(if is_ours { Attempt::Granted(Granted::default()) } else { Attempt::Contended(Contended::new()) })
///     }
///     async fn renew(&self, hold: HoldRef) -> Result<Renewed, Error> {
///         let is_held = self.0.lock().unwrap().get(&hold.key) == Some(&hold.holder);
///         Ok(if is_held { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) })
///     }
///     async fn release(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
///         let mut table = self.0.lock().unwrap();
///         let is_held = table.get(&hold.key) == Some(&hold.holder);
///         if is_held {
///             table.remove(&hold.key);
///         }
///         Ok(ReleaseReply::new(is_held))
///     }
/// }
/// let lock = Engine::start(Single::new(Table(Mutex::default(), Capabilities::new(Scope::Process))))?;
/// lock.key("ledger:42").acquire().await?.release().await
/// # }
/// ```
#[async_trait]
pub trait SingleKey: Debug + Display + Send + Sync + 'static {
    /// Returns the features and bounds of the store. See [`Backend::capabilities`].
    fn capabilities(&self) -> &Capabilities;

    /// Returns the intervals and limits with which the engine drives the store.
    fn timing(&self) -> Timing {
        Timing::default()
    }

    /// Connects the store to its engine. See [`Backend::attach`].
    fn attach(&self, events: Events) {
        let _ = events;
    }

    /// Makes one attempt and does not wait for another holder.
    async fn acquire(&self, request: Request) -> Result<Attempt, Error>;

    /// Extends the hold, or confirms it if it has no lease.
    async fn renew(&self, hold: HoldRef) -> Result<Renewed, Error>;

    /// Returns whether the holder still has the hold. See [`Backend::look`].
    async fn look(&self, hold: HoldRef) -> Result<Renewed, Error> {
        self.renew(hold).await
    }

    /// Replaces the label of the hold. See [`Backend::relabel`].
    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        let _ = (hold, label);
        Err(Error::unsupported("label that can be changed"))
    }

    /// Renews the hold and marks it as given out. See [`Backend::give_out`].
    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let _ = hold;
        Err(Error::unsupported("hold that another process can adopt"))
    }

    /// Grants the request if the hold `given` has the key and is given out. See [`Backend::adopt`].
    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        let _ = (request, given);
        Ok(Attempt::Refused(Error::unsupported("hold that can be adopted")))
    }

    /// Releases the hold if that holder still has it.
    async fn release(&self, hold: HoldRef) -> Result<ReleaseReply, Error>;

    /// Releases after the runtime has ended. See [`Backend::release_on_new_runtime`].
    async fn release_on_new_runtime(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        self.release(hold).await
    }

    /// Returns the operator's view, if the store has one.
    fn admin(&self) -> Option<&dyn LockAdmin> {
        None
    }

    /// Closes the store after the engine has released all holds.
    async fn close(&self) {}

    /// Releases without waiting. See [`Backend::abort`].
    fn abort(&self) {}
}

/// A [`Backend`] made of a [`SingleKey`] store. Requests of one call run concurrently.
#[derive(Debug)]
pub struct Single<S>(S);

impl<S: SingleKey> Single<S> {
    /// Wraps the store.
    pub const fn new(store: S) -> Self {
        Self(store)
    }

    /// Returns the wrapped store.
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

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        self.0.relabel(hold, label).await
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        self.0.give_out(hold).await
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        self.0.adopt(request, given).await
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
