//! A backend whose calls arrive late, hang, fail or panic as scripted by a test.

use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Engine, EngineBuilder, Events, HoldRef, ReleaseReply, Renewed,
    Request, Timing, TokioClock,
};
use leasehold_memory::{MemoryBackend, MemoryStore};
use tokio::time::sleep;

/// The script for the calls of one client, and their counts.
#[derive(Debug, Default)]
pub struct Net {
    pub hang_release: AtomicBool,
    pub hang_renew: AtomicBool,
    pub hang_close: AtomicBool,
    /// Number of releases that fail with `Unavailable` and do nothing.
    pub fail_release: AtomicU64,
    pub panic_acquire: AtomicBool,
    pub panic_renew: AtomicU64,
    pub panic_release: AtomicU64,
    /// Delay of acquires, which arrive even if their call is dropped.
    pub acquire_takes: Mutex<Duration>,
    /// Delays of the next renewals, which arrive even if their call is dropped.
    pub renewals_take: Mutex<Vec<Duration>>,
    pub acquires: AtomicU64,
    pub renewals: AtomicU64,
}

pub struct Distant {
    inner: Arc<MemoryBackend>,
    net: Arc<Net>,
}

/// Returns the builder of a client of `store`, and its script.
pub fn distant(store: &MemoryStore) -> (EngineBuilder, Arc<Net>) {
    let net = Arc::new(Net::default());
    let backend = Distant { inner: Arc::new(store.backend()), net: Arc::clone(&net) };
    (Engine::builder(backend).clock(Arc::new(TokioClock::new())), net)
}

fn takes_one(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
}

async fn hang_if(flag: &AtomicBool) {
    if flag.load(Ordering::SeqCst) {
        pending::<()>().await;
    }
}

#[async_trait]
impl Backend for Distant {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn timing(&self) -> Timing {
        self.inner.timing()
    }

    fn attach(&self, events: Events) {
        self.inner.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        self.net.acquires.fetch_add(1, Ordering::SeqCst);
        let (inner, takes) = (Arc::clone(&self.inner), *self.net.acquire_takes.lock().unwrap());
        let answers = match takes {
            Duration::ZERO => inner.acquire(requests).await,
            takes => {
                let travelling = tokio::spawn(async move {
                    sleep(takes).await;
                    inner.acquire(requests).await
                });
                travelling.await.unwrap()
            }
        };
        assert!(!self.net.panic_acquire.load(Ordering::SeqCst), "a bug of the backend, after the grant");
        answers
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        self.inner.wait(request, stop).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.net.renewals.fetch_add(1, Ordering::SeqCst);
        hang_if(&self.net.hang_renew).await;
        if takes_one(&self.net.panic_renew) {
            sleep(Duration::from_millis(50)).await;
            panic!("a bug of the backend");
        }
        let takes = {
            let mut takes = self.net.renewals_take.lock().unwrap();
            if takes.is_empty() { Duration::ZERO } else { takes.remove(0) }
        };
        let inner = Arc::clone(&self.inner);
        let travelling = tokio::spawn(async move {
            sleep(takes).await;
            inner.renew(holds).await
        });
        travelling.await.unwrap()
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        assert!(!takes_one(&self.net.panic_release), "a bug of the backend");
        hang_if(&self.net.hang_release).await;
        if takes_one(&self.net.fail_release) {
            let failure = || Err(Error::new(ErrorKind::Unavailable, "a failure that the test asked for"));
            return holds.iter().map(|_| failure()).collect();
        }
        self.inner.release(holds).await
    }

    /// Frees nothing, so that a hold forgotten by the engine stays held.
    async fn close(&self) {
        hang_if(&self.net.hang_close).await;
    }
}

impl fmt::Display for Distant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("distant")
    }
}

impl fmt::Debug for Distant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Distant")
    }
}
