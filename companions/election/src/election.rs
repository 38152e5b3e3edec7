//! A candidate: its settings, and the calls that campaign.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, BoxFuture, Error, Lock, LockKey};

use crate::campaign::Campaign;
use crate::state::{ElectionHandle, Shared};
use crate::term::{Term, TermResult};

/// The action on a body that runs when its term is lost.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLoss {
    /// Drop the body at its next await. A body without awaits continues until it returns.
    #[default]
    Drop,
    /// Notify the body by [`Term::over`], and wait until it returns. Until then another client can lead at the
    /// same time.
    Tell,
    /// End the process with this exit code within 100 ms, also if the body blocks its thread. No destructors
    /// run. A request to step down notifies the body by [`Term::over`].
    Exit(i32),
}

/// A candidate for the leadership of a key. `P` points to the lock: a reference
/// ([`ElectExt::elect`](crate::ElectExt::elect)) or an `Arc`.
#[derive(Debug)]
#[must_use = "nothing happens until lead is awaited"]
pub struct Election<P> {
    pub(crate) lock: P,
    pub(crate) key: Result<LockKey, Error>,
    pub(crate) options: AcquireOptions,
    pub(crate) on_loss: OnLoss,
    /// The pause after a term that ends by a request to release. `None` ignores such requests.
    pub(crate) rest_if_asked: Option<Duration>,
    pub(crate) shared: Arc<Shared>,
}

impl<P: Deref<Target: Lock>> Election<P> {
    /// Makes an election of `key`. An unusable key is an error of [`lead`](Self::lead).
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::sync::Arc;
    /// use leasehold_api::Lock;
    /// use leasehold_election::{Election, Next};
    /// let lock: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
    /// let election = Election::new(Arc::clone(&lock), "scheduler").value("10.0.0.7:8080");
    /// let handle = election.handle(); // for other tasks of this process
    /// let campaign = tokio::spawn(async move { election.lead(async |_| Ok(Next::Done)).await });
    /// campaign.await.unwrap()?;
    /// assert!(!handle.state().is_leading());
    /// # Ok(())
    /// # }
    /// ```
    pub fn new<K>(lock: P, key: K) -> Self
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        // A failure of the store ends an attempt, because the campaign shows it and retries.
        let options = AcquireOptions::new().wait_forever().give_up_on_failure();
        let key = key.try_into().map_err(Into::into);
        Self { lock, key, options, on_loss: OnLoss::Drop, rest_if_asked: None, shared: Shared::new() }
    }

    /// Sets the value that observers see while this candidate leads, such as its address. It is the label of
    /// the hold, at most 256 bytes. A term changes it by `term.guard().relabel(..)`.
    pub fn value(self, value: impl Into<Arc<str>>) -> Self {
        Self { options: self.options.label(value), ..self }
    }

    /// Sets the TTL of the lease, instead of the store's default.
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { options: self.options.ttl(ttl), ..self }
    }

    /// Sets the action on a body that runs when its term is lost.
    pub fn on_loss(self, on_loss: OnLoss) -> Self {
        Self { on_loss, ..self }
    }

    /// Steps down at a request to release the key (`ask` of [`LockAdmin`](leasehold_api::LockAdmin)), with this
    /// `pause` as in [`Term::step_down`](crate::Term::step_down). Without this setting, a term learns of the request by
    /// `term.guard().asked()`.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_election::ElectExt;
    /// let lock = leasehold_memory::connect()?;
    /// let election = lock.elect("scheduler").step_down_if_asked(Duration::from_secs(30));
    /// # Ok(())
    /// # }
    /// ```
    pub fn step_down_if_asked(self, pause: Duration) -> Self {
        Self { rest_if_asked: Some(pause), ..self }
    }

    /// Returns a handle that watches this candidate and ends its terms.
    #[must_use]
    pub fn handle(&self) -> ElectionHandle {
        ElectionHandle::new(&self.shared)
    }

    /// Campaigns, and runs `body` whenever this candidate is elected, until `body` returns
    /// [`Next::Done`](crate::Next::Done) or the lock is closed. A spawned task whose body captures variables needs
    /// [`lead_boxed`](Self::lead_boxed).
    ///
    /// The key is released when `body` has ended and the [`state`](ElectionHandle::state) has changed. After a
    /// loss, a failure of the store or an error of `body` the campaign goes on. Failures of the store are retried after
    /// pauses of 0.1 s to 10 s, terms that ended in an error, or within a second, after 1 s to 60 s. The pauses double,
    /// with up to as much jitter. If `body` panics, the key is released and this call panics.
    ///
    /// # Errors
    ///
    /// [`Closed`](leasehold_api::ErrorKind::Closed) if the lock was closed.
    /// [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) for a value that is too long, and if this client
    /// already campaigns for the key. `InvalidKey`, `Unsupported` and `NoRuntime`, because no retry helps. After
    /// `Done`, the error of the release ([`LockGuard::release`](leasehold_api::LockGuard::release)).
    ///
    /// # Cancel safety
    ///
    /// If dropped, `body` is dropped where it is, and the candidacy or the term ends in the background.
    pub async fn lead<F>(&self, mut body: F) -> Result<(), Error>
    where
        F: AsyncFnMut(&Term) -> TermResult,
    {
        let mut campaign = Campaign::start(self)?;
        while let Some(seat) = campaign.elected().await? {
            let end = seat.run(self.on_loss, self.rest_if_asked, body(&seat.term)).await;
            campaign.leave(seat, end).await?;
        }
        Ok(())
    }

    /// Leads like [`lead`](Self::lead), for spawned tasks and generic code, which need a `Send` future. Rust cannot
    /// yet prove this for the future of an `AsyncFnMut`, so the body boxes its future.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use leasehold_api::{BoxFuture, Error, Lock};
    /// use leasehold_election::{Election, Next, Term, TermResult};
    ///
    /// fn spawn(
    ///     lock: Arc<dyn Lock>,
    ///     body: impl for<'t> FnMut(&'t Term) -> BoxFuture<'t, TermResult> + Send + 'static,
    /// ) -> tokio::task::JoinHandle<Result<(), Error>> {
    ///     tokio::spawn(async move { Election::new(lock, "scheduler").lead_boxed(body).await })
    /// }
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Error> {
    /// let lock = Arc::new(leasehold_memory::connect()?);
    /// spawn(lock, |term| Box::pin(async move {
    ///     println!("leading with token {:?}", term.token());
    ///     Ok(Next::Done)
    /// })).await.unwrap()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lead`](Self::lead).
    ///
    /// # Cancel safety
    ///
    /// As [`lead`](Self::lead).
    pub async fn lead_boxed<F>(&self, mut body: F) -> Result<(), Error>
    where
        F: for<'t> FnMut(&'t Term) -> BoxFuture<'t, TermResult> + Send,
    {
        let mut campaign = Campaign::start(self)?;
        while let Some(seat) = campaign.elected().await? {
            let end = seat.run(self.on_loss, self.rest_if_asked, body(&seat.term)).await;
            campaign.leave(seat, end).await?;
        }
        Ok(())
    }
}
