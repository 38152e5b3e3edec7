//! The store as the engine drives it.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, ErrorKind, Fairness, Fencing, KeyIdentity, LockAdmin, Mode, Scope,
};
use leasehold_engine::{
    Attempt, Backend, Confirm, Events, Freed, Held, HoldRef, Renewed, Request, Stop, Timing, Waiting,
};
use tokio::time::sleep;

use crate::registry::{Registry, Slot};
use crate::store::{Standing, Store};
use crate::turnstile::{AtTurnstile, Turnstile};

const CONFIRM_EVERY: Duration = Duration::from_secs(2);
/// Within this a running holder learns that somebody removed or replaced its files.
const LOSS_DETECTION: Duration = Duration::from_secs(10);

/// How long a wait sleeps over a cooldown before it tells the engine of it, which may have a caller who
/// does not want to wait for one.
const COOLING_NAP: Duration = Duration::from_secs(1);

/// A client of the store in one directory: what an engine drives.
///
/// Two clients exclude each other, also within one process: each opens its own files.
pub struct FileBackend {
    store: Arc<Store>,
    registry: Arc<Registry>,
    poll: Duration,
    capabilities: Capabilities,
    events: OnceLock<Events>,
}

impl FileBackend {
    pub(crate) fn open(dir: &Path, poll: Duration) -> Result<Self, Error> {
        Ok(Self {
            store: Arc::new(Store::open(dir)?),
            registry: Arc::default(),
            poll,
            capabilities: capabilities(),
            events: OnceLock::new(),
        })
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Runs `job`, which may wait for the disk, on a thread for that.
    pub(crate) async fn on_thread<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let answer = tokio::task::spawn_blocking(job).await.unwrap_or_else(|e| {
            Err(Error::new(ErrorKind::OutcomeUnknown, "the runtime ended during a file operation")
                .with_source(e))
        });
        answer.map_err(|e| e.with_store(Arc::clone(self.store.name())))
    }

    /// One attempt for `slot` that may be abandoned at any moment.
    async fn attempt(
        &self,
        slot: &Arc<Slot>,
        request: &Request,
        standing: Standing,
    ) -> Result<Attempt, Error> {
        let (store, registry) = (Arc::clone(&self.store), Arc::clone(&self.registry));
        let (slot, request) = (Arc::clone(slot), request.clone());
        self.on_thread(move || registry.attempt(&store, &slot, &request, standing)).await
    }

    async fn enter_turnstile(&self, request: &Request) -> Result<AtTurnstile, Error> {
        let (store, key) = (Arc::clone(&self.store), request.key.clone());
        self.on_thread(move || store.enter_turnstile(&key)).await
    }

    /// Waits in the turnstile and then for the lock. Dropping the future leaves the turnstile.
    async fn wait_for(&self, slot: &Arc<Slot>, request: &Request, stop: &Stop) -> Result<Attempt, Error> {
        let mut turnstile: Option<Turnstile> = None;
        let mut was_refused = false;
        loop {
            let nap = match self.advance(&mut turnstile, request).await? {
                false => self.jittered(),
                true => {
                    let asked_at = self.events.get().map(Events::now);
                    let held = match self.attempt(slot, request, Standing::Turnstile).await? {
                        Attempt::Granted(mut granted) => {
                            granted.asked_at = asked_at;
                            return Ok(Attempt::Granted(granted));
                        }
                        Attempt::Held(held) => held,
                        other => return Ok(other),
                    };
                    match held.cooling_for {
                        // News for a caller who does not want to wait for a cooldown.
                        Some(_) if was_refused => return Ok(Attempt::Held(held)),
                        Some(left) => left.min(COOLING_NAP),
                        None => self.jittered(),
                    }
                }
            };
            was_refused = true;
            tokio::select! {
                biased;
                () = stop.stopped() => return Ok(Attempt::Held(Held::new())),
                () = sleep(nap) => {}
            }
        }
    }

    /// Enters the turnstile, or shows life in it; says whether it is this request's turn.
    async fn advance(&self, turnstile: &mut Option<Turnstile>, request: &Request) -> Result<bool, Error> {
        match turnstile {
            None => match self.enter_turnstile(request).await? {
                AtTurnstile::Entered(entered) => *turnstile = Some(entered),
                AtTurnstile::Occupied => return Ok(false),
                AtTurnstile::Stalled => {}
            },
            Some(entered) => {
                if let Some(show) = entered.due() {
                    // It costs the place at worst.
                    self.on_thread(move || Ok(show())).await?.unwrap_or_else(|error| {
                        tracing::debug!(%error, "cannot touch the turnstile");
                    });
                }
            }
        }
        Ok(true)
    }

    fn jittered(&self) -> Duration {
        self.poll.mul_f64(0.5 + fastrand::f64())
    }
}

fn capabilities() -> Capabilities {
    let mut has = Capabilities::new(Scope::Machine);
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Roughly;
    has.loss_detection = LOSS_DETECTION;
    has.undo = Duration::from_secs(5);
    has.handover = Duration::from_secs(2);
    // The kernel frees at once; the rest is what a waiter needs to see it.
    has.crash_release = Some(Duration::from_secs(2));
    has.cooldown = true;
    has.admin = AdminCapabilities::read_only();
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
        // The kernel never lets go of a lock whose process lives, so nothing is lost by silence: a holder
        // that was stopped or suspended still has it.
        timing.confirm = Some(Confirm::new(CONFIRM_EVERY, Duration::MAX));
        timing
    }

    fn attach(&self, events: Events) {
        // Attached once; a second engine on one backend would be a bug of the caller's.
        let _ = self.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let count = requests.len();
        let mut slots = Vec::with_capacity(count);
        for request in requests {
            // Made before the thread starts, so that a release finds it from here on.
            let slot = check(&request).and_then(|()| self.registry.slot(&request));
            slots.push((slot, request));
        }
        let (store, registry) = (Arc::clone(&self.store), Arc::clone(&self.registry));
        let job = move || {
            let attempt = |(slot, request): (Result<Arc<Slot>, Error>, Request)| {
                let slot = slot?;
                let answer = registry.attempt(&store, &slot, &request, Standing::Street);
                registry.forget_open(&slot);
                answer.map_err(|e| e.with_key(&request.key).with_store(Arc::clone(store.name())))
            };
            Ok(slots.into_iter().map(attempt).collect())
        };
        spread(self.on_thread(job).await, count)
    }

    async fn wait(&self, request: Request, stop: Stop) -> Result<Attempt, Error> {
        check(&request)?;
        let slot = self.registry.slot(&request)?;
        let answer = self.wait_for(&slot, &request, &stop).await;
        self.registry.forget_open(&slot);
        answer.map_err(|e| e.with_key(&request.key))
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let count = holds.len();
        let registry = Arc::clone(&self.registry);
        let job = move || Ok(holds.iter().map(|hold| registry.confirm(hold)).collect());
        spread(self.on_thread(job).await, count)
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<Freed, Error>> {
        let count = holds.len();
        let registry = Arc::clone(&self.registry);
        let job = move || Ok(holds.iter().map(|hold| Ok(registry.release(hold))).collect());
        spread(self.on_thread(job).await, count)
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        self.registry.sever();
    }

    fn sever(&self) {
        self.registry.sever();
    }
}

fn check(request: &Request) -> Result<(), Error> {
    let what = if request.mode != Mode::Exclusive {
        "shared locks"
    } else if request.ttl.is_some() {
        "leases: a lock is held until it is released or its process ends"
    } else {
        return Ok(());
    };
    Err(Error::unsupported(what).with_key(&request.key))
}

/// The answers to `count` requests, or the failure that met them all.
fn spread<T>(answers: Result<Vec<Result<T, Error>>, Error>, count: usize) -> Vec<Result<T, Error>> {
    answers.unwrap_or_else(|failure| {
        let again = || {
            let error = Error::new(failure.kind(), failure.message().to_owned());
            failure.store().into_iter().fold(error, Error::with_store)
        };
        (0..count).map(|_| Err(again())).collect()
    })
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
        // An attempt that still runs on its thread must not keep what it takes.
        self.registry.sever();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_api::{HolderId, LockKey};

    #[tokio::test]
    async fn refused_requests_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let backend = FileBackend::open(dir.path(), Duration::from_millis(1)).unwrap();
        let key = LockKey::new("k").unwrap();
        let [first, second, third] =
            [1, 2, 3].map(|serial| Request::new(key.clone(), HolderId::from_parts(1, serial)));
        let answers = backend.acquire(vec![first.clone(), second]).await;
        assert!(matches!(answers[..], [Ok(Attempt::Granted(_)), Ok(Attempt::Held(_))]));
        let stop = Stop::new();
        stop.fire();
        assert!(matches!(backend.wait(third, stop).await, Ok(Attempt::Held(_))));
        assert_eq!(backend.registry.len(), 1, "the granted one");
        backend.release(vec![first.hold()]).await;
        assert_eq!(backend.registry.len(), 0);
    }
}
