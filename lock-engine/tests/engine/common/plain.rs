//! A small store with one row per key. Tests read its rows and calls and script its faults.

use std::collections::HashMap;
use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_api::{
    Capabilities, Error, ErrorKind, HolderId, LeaseBounds, Lock as _, LockKey, LossReason, Scope,
};
use leasehold_engine::{
    Attempt, Backend, Contended, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed, Request, Timing,
    TokioClock, late_copy_error,
};
use tokio::time::sleep;

/// The rows, the received calls and the scripted behavior of the store.
#[derive(Debug, Default)]
pub struct PlainNet {
    /// Acquires are refused before they start.
    pub refuse: Mutex<Option<ErrorKind>>,
    /// Acquires fail with this kind, with an unknown outcome.
    pub fail_acquire: Mutex<Option<ErrorKind>>,
    pub fail_release: Mutex<Option<ErrorKind>>,
    /// Releases fail because a copy of the request can still arrive.
    pub late_copies: AtomicBool,
    pub acquire_takes: Mutex<Duration>,
    pub release_takes: Mutex<Duration>,
    /// Delay of the reply after a release has been executed.
    pub release_replies_take: Mutex<Duration>,
    /// Whether acquires arrive even if their call is dropped.
    pub travels: AtomicBool,
    /// The engine that is closed during the next grant.
    pub closes: Mutex<Option<Arc<Engine>>>,
    /// Releases and renewals of this key get no reply, and neither do others in the same call.
    pub stuck: Mutex<Option<&'static str>>,
    pub hang: AtomicBool,
    /// The next attempt without I/O is granted and then panics.
    pub panic_try: AtomicBool,
    /// The next release without I/O panics.
    pub panic_release: AtomicBool,
    /// Renewals panic before their first await.
    pub panic_renew: AtomicBool,
    /// Number of holds in each call of release.
    pub releases: Mutex<Vec<usize>>,
    /// For each released hold, whether no caller ever had it.
    pub unused: Mutex<Vec<bool>>,
    /// Number of holds and shortest TTL of each renewal.
    pub renewals: Mutex<Vec<(usize, Option<Duration>)>>,
    pub rows: Mutex<HashMap<LockKey, HolderId>>,
    /// Number of opaque states returned with a release.
    pub states: AtomicU64,
}

impl PlainNet {
    pub fn calls(&self) -> usize {
        self.releases.lock().unwrap().len()
    }

    pub fn is_free(&self) -> bool {
        self.rows.lock().unwrap().is_empty()
    }
}

pub struct Plain {
    pub net: Arc<PlainNet>,
    pub caps: Capabilities,
    pub timing: Timing,
}

/// Returns a store that keeps holds until they are released.
pub fn plain(net: &Arc<PlainNet>) -> Plain {
    let mut caps = Capabilities::new(Scope::Network);
    caps.undo = Duration::from_secs(1);
    Plain { net: Arc::clone(net), caps, timing: Timing::default() }
}

impl Plain {
    /// Adds leases with this default TTL.
    pub fn leases(mut self, ttl: Duration) -> Self {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(3600));
        self.caps.lease = Some(LeaseBounds::new(Some(ttl), min, max));
        self
    }
}

/// Starts an engine with the clock of the test's runtime.
pub fn start(store: Plain) -> Engine {
    Engine::builder(store).clock(Arc::new(TokioClock::new())).start().unwrap()
}

impl fmt::Display for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("plain")
    }
}

impl fmt::Debug for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Plain")
    }
}

fn scripted(kind: ErrorKind) -> Error {
    Error::new(kind, "a failure that the test asked for")
}

impl PlainNet {
    fn attempt(&self, request: Request) -> Attempt {
        let mut rows = self.rows.lock().unwrap();
        match rows.get(&request.key) {
            Some(holder) if *holder != request.holder => Attempt::Contended(Contended::new()),
            _ => {
                rows.insert(request.key, request.holder);
                let mut granted = Granted::with_token(None);
                granted.state = Some(Arc::new(request.holder));
                Attempt::Granted(granted)
            }
        }
    }
}

#[async_trait]
impl Backend for Plain {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn timing(&self) -> Timing {
        self.timing.clone()
    }

    fn attach(&self, _: Events) {}

    fn try_now(&self, request: &Request) -> Option<Result<Attempt, Error>> {
        if self.net.panic_try.swap(false, SeqCst) {
            self.net.attempt(request.clone());
            panic!("a bug of the backend");
        }
        None
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        if self.net.hang.load(SeqCst) {
            pending::<()>().await;
        }
        if let Some(kind) = *self.net.refuse.lock().unwrap() {
            return requests.iter().map(|_| Ok(Attempt::Refused(scripted(kind)))).collect();
        }
        if let Some(kind) = *self.net.fail_acquire.lock().unwrap() {
            return requests.iter().map(|_| Err(scripted(kind))).collect();
        }
        let (net, takes) = (Arc::clone(&self.net), *self.net.acquire_takes.lock().unwrap());
        let arriving = async move {
            if !takes.is_zero() {
                sleep(takes).await;
            }
            let answers = requests.into_iter().map(|request| Ok(net.attempt(request))).collect();
            if let Some(engine) = net.closes.lock().unwrap().take() {
                assert!(engine.close().now_or_never().is_none(), "it waits for what is held");
            }
            answers
        };
        if self.net.travels.load(SeqCst) { tokio::spawn(arriving).await.unwrap() } else { arriving.await }
    }

    fn renew<'a, 'b>(
        &'a self,
        holds: Vec<HoldRef>,
    ) -> std::pin::Pin<Box<dyn Future<Output = Vec<Result<Renewed, Error>>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        // Not an async function, so that this panic occurs before the future exists.
        assert!(!self.net.panic_renew.swap(false, SeqCst), "a bug of the backend");
        Box::pin(async move {
            self.net.renewals.lock().unwrap().push((holds.len(), holds.iter().filter_map(|h| h.ttl).min()));
            let stuck = *self.net.stuck.lock().unwrap();
            if self.net.hang.load(SeqCst) || holds.iter().any(|hold| Some(hold.key.as_str()) == stuck) {
                pending::<()>().await;
            }
            let rows = self.net.rows.lock().unwrap();
            let is_held = |hold: &HoldRef| rows.get(&hold.key) == Some(&hold.holder);
            let answer =
                |hold| if is_held(hold) { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) };
            holds.iter().map(|hold| Ok(answer(hold))).collect()
        })
    }

    fn release_now(&self, _: &LockKey, _: HolderId) -> Option<Result<ReleaseReply, Error>> {
        assert!(!self.net.panic_release.swap(false, SeqCst), "a bug of the backend");
        None
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.net.releases.lock().unwrap().push(holds.len());
        let takes = *self.net.release_takes.lock().unwrap();
        if !takes.is_zero() {
            sleep(takes).await;
        }
        let stuck = *self.net.stuck.lock().unwrap();
        if self.net.hang.load(SeqCst) || holds.iter().any(|hold| Some(hold.key.as_str()) == stuck) {
            pending::<()>().await;
        }
        if let Some(kind) = *self.net.fail_release.lock().unwrap() {
            return holds.iter().map(|_| Err(scripted(kind))).collect();
        }
        if self.net.late_copies.load(SeqCst) {
            return holds.iter().map(|hold| Err(late_copy_error(&hold.key))).collect();
        }
        let answers = self.net.free(&holds);
        let takes = *self.net.release_replies_take.lock().unwrap();
        if !takes.is_zero() {
            sleep(takes).await;
        }
        answers
    }

    async fn close(&self) {}
}

impl PlainNet {
    fn free(&self, holds: &[HoldRef]) -> Vec<Result<ReleaseReply, Error>> {
        let mut rows = self.rows.lock().unwrap();
        let mut free = |hold: &HoldRef| {
            let state = hold.state.as_ref().and_then(|state| state.downcast_ref::<HolderId>());
            self.states.fetch_add(u64::from(state == Some(&hold.holder)), SeqCst);
            self.unused.lock().unwrap().push(hold.unused);
            let was_held = rows.get(&hold.key) == Some(&hold.holder);
            if was_held {
                rows.remove(&hold.key);
            }
            Ok(ReleaseReply::new(was_held))
        };
        holds.iter().map(&mut free).collect()
    }
}
