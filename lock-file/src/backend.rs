//! The backend of the file store, called by the engine.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, Fairness, Fencing, KeyIdentity, LockAdmin, LockKey, Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Confirm, Contended, Events, HoldRef, Moment, ReleaseReply, Renewed,
    Request, Timing, Waiting,
};
use tokio::time::timeout;

use crate::pool::{OperationFailure, Pool, Progress, STALLED_AFTER};
use crate::requests::{OperationGuard, Registration, Requests};
use crate::store::{Caller, FileStore, MAX_PERMITS};
use crate::waiting::KeyWaiter;

const CONFIRM_EVERY: Duration = Duration::from_secs(2);
/// Maximum time until a running holder detects that its files were removed or replaced.
const LOSS_DETECTION: Duration = Duration::from_secs(10);

/// How long callers of one client pass a hold to each other.
const HANDOVER_FOR: Duration = Duration::from_millis(2);

/// A client of the store in one directory, for an engine.
///
/// Two clients exclude each other, even within one process, because each opens its own files.
pub struct FileBackend {
    store: Arc<FileStore>,
    requests: Arc<Requests>,
    pool: Pool,
    poll: Duration,
    handover: bool,
    capabilities: Capabilities,
    events: OnceLock<Events>,
}

impl FileBackend {
    pub(crate) fn new(store: FileStore, poll: Duration) -> Self {
        Self {
            store: Arc::new(store),
            requests: Arc::default(),
            pool: Pool::default(),
            poll,
            handover: true,
            capabilities: capabilities(),
            events: OnceLock::new(),
        }
    }

    pub(crate) fn handover(mut self, on: bool) -> Self {
        self.handover = on;
        self
    }

    pub(crate) fn store(&self) -> &Arc<FileStore> {
        &self.store
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the poll interval for waits without a notification.
    pub(crate) fn poll(&self) -> Duration {
        self.poll
    }

    /// Returns the current time on the engine's clock.
    pub(crate) fn now(&self) -> Option<Moment> {
        self.events.get().map(Events::now)
    }

    /// Runs `job`, which locks nothing, on a thread. If the disk does not answer, the job is abandoned.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        job: impl FnOnce(&FileStore, &Progress) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let store = Arc::clone(&self.store);
        let answer = self.pool.inspect.run_or_give_up(move |progress| job(&store, progress)).await;
        answer.map_err(Error::from).flatten().map_err(|e| self.named(e))
    }

    fn named(&self, error: Error) -> Error {
        error.with_store(Arc::clone(self.store.name()))
    }

    /// Adds the key and the store to an error.
    fn answer(&self, answer: Result<Attempt, Error>, key: &LockKey) -> Result<Attempt, Error> {
        let named = |error: Error| self.named(error.with_key(key));
        match answer {
            Ok(Attempt::Refused(error)) => Ok(Attempt::Refused(named(error))),
            answer => answer.map_err(named),
        }
    }

    fn register(&self, request: &Request) -> Result<Arc<Registration>, Error> {
        check(request)?;
        if self.store.is_read_only() {
            return Err(Error::unsupported("locking: it was opened to look only"));
        }
        self.requests.register(request)
    }

    /// Waits for earlier file operations of one request.
    async fn prepare(registration: Arc<Registration>, request: Request) -> Result<Prepared, Error> {
        let operation = registration.slot().operation().await?;
        Ok(Prepared { registration, operation, request })
    }

    /// Makes one attempt. If the caller drops it, the slot of the request ends, and a late grant is released.
    pub(crate) async fn attempt(
        &self,
        registration: &Arc<Registration>,
        request: &Request,
        caller: Caller,
    ) -> Result<Attempt, Error> {
        let prepared = Self::prepare(Arc::clone(registration), request.clone()).await?;
        let store = Arc::clone(&self.store);
        match self.pool.acquire.run(move || prepared.attempt(&store, caller)).await {
            Ok(answer) => answer,
            Err(OperationFailure::NotBegun(error)) => Ok(Attempt::Refused(error)),
            Err(OperationFailure::Unknown(error)) => Err(error),
        }
    }

    /// Works like [`acquire`](Backend::acquire), without a time limit.
    async fn acquire_all(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let keys: Vec<_> = requests.iter().map(|r| r.key.clone()).collect();
        let mut all = Vec::with_capacity(keys.len());
        for request in requests {
            // Registers the request before a thread runs the attempt, because a release must find the request
            // at any time.
            all.push(match self.register(&request) {
                Ok(registration) => Self::prepare(registration, request).await.map_err(Err),
                Err(error) => Err(Ok(Attempt::Refused(error))),
            });
        }
        let store = Arc::clone(&self.store);
        let attempt = move |prepared: Result<Prepared, _>| match prepared {
            Ok(prepared) => prepared.attempt(&store, Caller::Newcomer),
            Err(answer) => answer,
        };
        let job = move || all.into_iter().map(attempt).collect();
        let answers = match self.pool.acquire.run(job).await {
            Ok(answers) => answers,
            Err(OperationFailure::NotBegun(error)) => each(&keys, || Ok(Attempt::Refused(error.clone()))),
            Err(OperationFailure::Unknown(error)) => each(&keys, || Err(error.clone())),
        };
        answers.into_iter().zip(&keys).map(|(answer, key)| self.answer(answer, key)).collect()
    }

    async fn release_one(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        let Some(slot) = self.requests.find(&hold) else {
            return Ok(ReleaseReply::new(false));
        };
        let Some(ending) = slot.end() else {
            // Waits for the attempt under way: it will not keep the lock, but might still hold it.
            slot.operation().await.map_err(|e| self.named(e))?;
            self.requests.remove(&slot);
            return Ok(ReleaseReply::new(false));
        };
        // Blocks later operations of this slot, so a repeated release waits for this one.
        let operation = slot.try_operation();
        let requests = Arc::clone(&self.requests);
        let job = {
            let slot = Arc::clone(&slot);
            move || {
                let freed = ending.free(hold.unused);
                requests.remove(&slot);
                drop(operation);
                freed
            }
        };
        match self.pool.release.run(job).await {
            Ok(freed) => Ok(freed),
            Err(OperationFailure::NotBegun(_)) => {
                // Counts as released: the hold was dropped with the job, which unlocked it without checking
                // its files.
                self.requests.remove(&slot);
                Ok(ReleaseReply::new(true))
            }
            Err(OperationFailure::Unknown(error)) => Err(self.named(error.with_key(&hold.key))),
        }
    }
}

/// A request ready for an attempt on a thread.
struct Prepared {
    registration: Arc<Registration>,
    operation: OperationGuard,
    request: Request,
}

impl Prepared {
    fn attempt(self, store: &FileStore, caller: Caller) -> Result<Attempt, Error> {
        self.registration.attempt(store, &self.request, caller, &self.operation)
    }
}

fn capabilities() -> Capabilities {
    let mut has = Capabilities::new(Scope::Machine);
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Roughly;
    has.loss_detection = LOSS_DETECTION;
    has.undo = Duration::from_secs(5);
    has.handover = Duration::from_secs(2);
    // The kernel releases the lock when the process ends. The two seconds are the time that a waiter needs to
    // notice.
    has.crash_release = Some(Duration::from_secs(2));
    has.modes.shared = true;
    has.modes.max_permits = MAX_PERMITS;
    has.cooldown = true;
    has.relabel = true;
    has.admin = AdminCapabilities::read_only();
    has.admin.ask = true;
    has.keys = KeyIdentity::Hashed { bits: 256 };
    has
}

#[async_trait]
impl Backend for FileBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = Waiting::Store;
        // The kernel never releases the lock of a living process. A holder that was stopped or suspended still has it,
        // so missing confirmations lose no lock.
        timing.confirm = Some(Confirm::new(CONFIRM_EVERY, Duration::MAX));
        timing.handover_for = if self.handover { HANDOVER_FOR } else { Duration::ZERO };
        timing
    }

    fn attach(&self, events: Events) {
        // Keeps the events of the first engine. A second engine on one backend would be a caller's bug.
        let _ = self.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        // A waiting request can also wait for the disk. It is exempt from the limit of one call, because each call
        // repeated by the engine would occupy another thread. The exception does not apply if a cooldown might have
        // begun.
        let patient = match &requests[..] {
            [request] if request.waits && request.cooldown.is_none() => Some(request.hold()),
            _ => None,
        };
        let answers = self.acquire_all(requests);
        let Some(hold) = patient else { return answers.await };
        timeout(STALLED_AFTER, answers).await.unwrap_or_else(|_| {
            // The disk has not answered: ends the request's slot, and with it a late grant. The engine then
            // starts the wait again.
            if let Some(slot) = self.requests.find(&hold) {
                drop(slot.end());
                self.requests.remove(&slot);
            }
            vec![Ok(Attempt::Contended(Contended::new()))]
        })
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let answer = match self.register(&request) {
            // Keeps the request registered until the wait ends, because a release must also find it between
            // two attempts.
            Ok(registration) => KeyWaiter::new(self, &registration, &request).wait(&stop).await,
            Err(error) => Ok(Attempt::Refused(error)),
        };
        self.answer(answer, &request.key)
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let keys: Vec<_> = holds.iter().map(|h| h.key.clone()).collect();
        let requests = Arc::clone(&self.requests);
        let events = self.events.get().cloned();
        let confirm = move |hold: &HoldRef| {
            let answer = requests.confirm(hold);
            if let (Ok(Renewed::Extended), Some(events)) = (&answer, &events)
                && requests.is_asked(hold)
            {
                events.asked(&hold.key, hold.holder);
            }
            answer
        };
        let job = move || holds.iter().map(confirm).collect();
        let answers: Vec<Result<_, Error>> = self.pool.renew.run(job).await.unwrap_or_else(|failure| {
            let error = Error::from(failure);
            each(&keys, || Err(error.clone()))
        });
        let named = |(answer, key): (Result<_, Error>, _)| answer.map_err(|e| self.named(e.with_key(key)));
        answers.into_iter().zip(&keys).map(named).collect()
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        let requests = Arc::clone(&self.requests);
        let job = move || requests.relabel(&hold, &label);
        let answer = self.pool.renew.run(job).await.map_err(Error::from).flatten();
        answer.map_err(|e| self.named(e))
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        // Releases each hold separately, because a hold that waits for the disk must not block the others.
        join_all(holds.into_iter().map(|hold| self.release_one(hold))).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.requests.abort();
    }

    fn abort(&self) {
        self.requests.abort();
    }
}

fn check(request: &Request) -> Result<(), Error> {
    if request.ttl.is_none() {
        return Ok(());
    }
    let what = "leases: a lock is held until it is released or its process ends";
    Err(Error::unsupported(what).with_key(&request.key))
}

/// Returns the same result for each of `keys`, after a common failure.
fn each<T>(keys: &[LockKey], answer: impl Fn() -> T) -> Vec<T> {
    keys.iter().map(|_| answer()).collect()
}

impl fmt::Display for FileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.store.name())
    }
}

impl fmt::Debug for FileBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileBackend")
            .field("store", &self.store)
            .field("poll", &self.poll)
            .finish_non_exhaustive()
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        // Unlocks all holds. An attempt that still runs on its thread will not keep its lock either.
        self.requests.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use leasehold_api::{ErrorKind, HolderId};
    use std::error::Error as _;

    #[tokio::test]
    async fn requests_that_were_not_granted_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let backend = FileBackend::new(FileStore::open(dir.path(), None).unwrap(), Duration::from_millis(1));
        let key = LockKey::new("k").unwrap();
        let [first, second, third] =
            [1, 2, 3].map(|serial| Request::new(key.clone(), HolderId::from_parts(1, serial)));
        let answers = backend.acquire(vec![first.clone(), second]).await;
        assert!(matches!(answers[..], [Ok(Attempt::Granted(_)), Ok(Attempt::Contended(_))]));
        let stop = CancellationToken::new();
        stop.cancel();
        assert!(matches!(backend.wait(third, stop).await, Ok(Attempt::Contended(_))));
        assert_eq!(backend.requests.len(), 1, "the granted one");
        backend.release(vec![first.hold()]).await;
        assert_eq!(backend.requests.len(), 0);
    }

    #[test]
    fn requests_that_failed_together_all_have_the_source() {
        let dir = tempfile::tempdir().unwrap();
        let backend = FileBackend::new(FileStore::open(dir.path(), None).unwrap(), Duration::from_millis(1));
        let requests = ["a", "b", "c"].map(|key| {
            let key = LockKey::new(key).unwrap();
            Request::new(key, HolderId::from_parts(1, 1))
        });
        let ended = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let handle = ended.handle().clone();
        ended.shutdown_background();
        let _within = handle.enter();
        let acquired = backend.acquire(requests.to_vec()).now_or_never().unwrap();
        let renewed = backend.renew(requests.iter().map(Request::hold).collect()).now_or_never().unwrap();
        assert_eq!((acquired.len(), renewed.len()), (3, 3));
        for (request, (acquired, renewed)) in requests.iter().zip(acquired.into_iter().zip(renewed)) {
            let Ok(Attempt::Refused(refused)) = acquired else { panic!("{acquired:?}") };
            for error in [refused, renewed.unwrap_err()] {
                assert_eq!((error.kind(), error.key()), (ErrorKind::Closed, Some(&request.key)));
                assert!(error.source().unwrap().is::<tokio::task::JoinError>());
                assert!(error.store().is_some());
            }
        }
        assert_eq!(backend.requests.len(), 0);
    }
}
