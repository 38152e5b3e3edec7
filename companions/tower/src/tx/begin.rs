//! Admits requests to transactions. Requests first queue in the process, because waiting requests must not hold the
//! connections that running ones need.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockExt as _, LockGuard, LockKey};
use leasehold_memory::MemoryStore;
use leasehold_postgres_advisory::{LockWait, XactGuard, XactLocks};
use sqlx::PgPool;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

#[derive(Clone)]
pub(super) struct TxQueue {
    locks: XactLocks,
    pool: PgPool,
    /// Locks per key in this process, so only one request per key goes to the server.
    keys: Arc<dyn leasehold_api::Lock>,
    /// Permits for transactions: one fewer than the pool has connections.
    transactions: Arc<Semaphore>,
    /// Permits for transactions that wait for a lock at the server. They are limited because other processes hold locks
    /// too.
    waiting: Arc<Semaphore>,
    /// Maximum time of a handler's transaction.
    pub(super) longest: Option<Duration>,
}

/// A transaction that holds its lock, and the permits for its duration.
pub(super) struct BegunTx {
    pub(super) tx: XactGuard,
    pub(super) admission: Admission,
}

/// The permits, to be dropped when the transaction has ended.
pub(super) struct Admission {
    _bound: Option<Bound>,
    _key: Arc<Mutex<Option<LockGuard>>>,
    _transaction: OwnedSemaphorePermit,
}

/// A task that releases the in-process key if a handler exceeds its maximum time. Dropping this value stops the task.
struct Bound(AbortHandle);

impl Drop for Bound {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl TxQueue {
    pub(super) fn new(locks: XactLocks, pool: PgPool) -> Result<Self, Error> {
        let size = pool.options().get_max_connections() as usize;
        let places = |n: usize| Arc::new(Semaphore::new(n.clamp(1, Semaphore::MAX_PERMITS)));
        Ok(Self {
            locks,
            keys: Arc::new(MemoryStore::new().client()?),
            transactions: places(size.saturating_sub(1)),
            waiting: places((size / 2).saturating_sub(1)),
            pool,
            longest: None,
        })
    }

    /// Limits a handler's transaction to `longest`. The handler is dropped first. If that does not end the transaction,
    /// its session is terminated after [`GRACE`].
    pub(super) fn bound(&mut self, longest: Duration) {
        self.longest = Some(longest);
        self.locks = self.locks.clone().max_hold(longest.saturating_add(GRACE), self.pool.clone());
    }

    pub(super) async fn begin(&self, key: &LockKey, wait: Duration) -> Result<BegunTx, Error> {
        // Treats a budget too long for the clock as a year.
        let now = Instant::now();
        let deadline = now.checked_add(wait).unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
        let key_guard = self.keys.key(key).wait(wait).acquire().await?;
        let transaction = permit(&self.transactions, deadline).await?;
        let tx = self.attempt(key, if wait.is_zero() { now + LOOK } else { deadline }).await?;
        if let Some(tx) = tx {
            return Ok(BegunTx { tx, admission: self.admission(key_guard, transaction).await });
        }
        if wait.is_zero() {
            return Err(Error::new(ErrorKind::Timeout, "others hold the lock or wait for it").with_key(key));
        }
        // Returns the permit, so requests that need not wait can use it. This request then queues for a wait at the
        // server.
        drop(transaction);
        let waiting = permit(&self.waiting, deadline).await?;
        let transaction = permit(&self.transactions, deadline).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        let tx = self.locks.begin(&self.pool, key, left).await?;
        drop(waiting);
        Ok(BegunTx { tx, admission: self.admission(key_guard, transaction).await })
    }

    async fn admission(&self, key: LockGuard, transaction: OwnedSemaphorePermit) -> Admission {
        let key = Arc::new(Mutex::new(Some(key)));
        let bound = self.longest.map(|longest| {
            let key = Arc::downgrade(&key);
            let task = tokio::spawn(async move {
                tokio::time::sleep(longest.saturating_add(GRACE)).await;
                // Releases the key after the limit, because a stuck handler must not block requests in this process.
                let key =
                    key.upgrade().and_then(|key| key.lock().unwrap_or_else(PoisonError::into_inner).take());
                drop(key);
            });
            Bound(task.abort_handle())
        });
        let admission = Admission { _bound: bound, _key: key, _transaction: transaction };
        if self.longest.is_some() {
            // Yields to let the task set its timer before a handler blocks this worker thread.
            tokio::task::yield_now().await;
        }
        admission
    }

    /// Tries without waiting, because the key is usually free. Returns `None` if it is held.
    async fn attempt(&self, key: &LockKey, deadline: Instant) -> Result<Option<XactGuard>, Error> {
        let attempt = self.locks.begin_with(&self.pool, key, LockWait::Skip);
        timeout_at(deadline, attempt).await.unwrap_or_else(|_| {
            let message = "the pool had no connection in time, or the server did not answer; try again";
            Err(Error::new(ErrorKind::Unavailable, message))
        })
    }
}

/// Time between the drop of a handler and the termination of its session.
const GRACE: Duration = Duration::from_secs(1);

/// Maximum wait for a connection if the budget is zero.
const LOOK: Duration = Duration::from_secs(1);

async fn permit(places: &Arc<Semaphore>, deadline: Instant) -> Result<OwnedSemaphorePermit, Error> {
    // Polls the semaphore first, so a budget of zero still takes a free place.
    match timeout_at(deadline, Arc::clone(places).acquire_owned()).await {
        Ok(permit) => permit.map_err(|_| Error::closed()),
        Err(_) => Err(Error::new(
            ErrorKind::Timeout,
            "the pool's connections are taken by transactions of this layer; try again, or use a larger pool",
        )),
    }
}
