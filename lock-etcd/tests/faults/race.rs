//! Clients that lock one key in turns. A grant beside a valid one, or a token that goes back, fails the test.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold_api::{FencingToken, GrantHandle, LockExt as _, LockGuard, Validity};
use leasehold_engine::Engine;
use tokio::task::JoinSet;

use crate::LONG;
use crate::support::until;

/// The running clients.
pub(crate) struct Race {
    shared: Arc<Shared>,
    clients: JoinSet<()>,
}

struct Shared {
    key: String,
    ends: AtomicBool,
    grants: AtomicUsize,
    last: Mutex<Last>,
}

struct Last {
    grant: Option<GrantHandle>,
    token: Option<FencingToken>,
    at: Instant,
    longest: Duration,
}

impl Race {
    /// Starts a task for each client.
    pub(crate) fn start(clients: Vec<Arc<Engine>>, key: &str) -> Self {
        let last = Last { grant: None, token: None, at: Instant::now(), longest: Duration::ZERO };
        let shared = Arc::new(Shared {
            key: key.to_owned(),
            ends: AtomicBool::new(false),
            grants: AtomicUsize::new(0),
            last: Mutex::new(last),
        });
        let clients = clients.into_iter().map(|lock| run(lock, shared.clone())).collect();
        Self { shared, clients }
    }

    /// Waits for this many more grants.
    pub(crate) async fn more(&self, grants: usize) {
        let wanted = self.shared.grants.load(Ordering::SeqCst) + grants;
        until("too few grants", async || self.shared.grants.load(Ordering::SeqCst) >= wanted).await;
    }

    /// Ends the race, prints the longest time without a grant, and returns the number of grants.
    pub(crate) async fn end(mut self, fault: &str) -> usize {
        self.shared.ends.store(true, Ordering::SeqCst);
        while let Some(client) = self.clients.join_next().await {
            // A client that saw a violation has panicked.
            client.unwrap();
        }
        let grants = self.shared.grants.load(Ordering::SeqCst);
        let longest = self.shared.last.lock().unwrap().longest;
        println!("{fault}: {grants} grants, at most {longest:?} without one");
        grants
    }
}

async fn run(lock: Arc<Engine>, shared: Arc<Shared>) {
    while !shared.ends.load(Ordering::SeqCst) {
        match lock.key(&*shared.key).wait(LONG).acquire().await {
            Ok(guard) => {
                shared.note(&guard);
                // Other clients queue.
                tokio::time::sleep(Duration::from_millis(2)).await;
                let _ = guard.release().await;
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

impl Shared {
    /// Checks a grant against the one before.
    fn note(&self, guard: &LockGuard) {
        let mut last = self.last.lock().unwrap();
        // A grant that ended before its task ran protects nothing.
        if guard.validity() != Validity::Valid {
            return;
        }
        if let Some(before) = last.grant.replace(guard.handle()) {
            assert_ne!(before.validity(), Validity::Valid, "{before:?} and {guard:?} are valid at once");
        }
        let (token, before) = (guard.token(), last.token);
        assert!(token > before, "{token:?} follows {before:?}");
        last.token = token;
        last.longest = last.longest.max(last.at.elapsed());
        last.at = Instant::now();
        self.grants.fetch_add(1, Ordering::SeqCst);
    }
}
