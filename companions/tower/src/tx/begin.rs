//! Who begins a transaction when: in the process first, so that those who wait do not hold the connections that
//! those who work need.

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
    /// One of each key goes to the server.
    keys: Arc<dyn leasehold_api::Lock>,
    /// All but one connection of the pool.
    transactions: Arc<Semaphore>,
    /// Those of them that may wait for a lock: locks are held by other processes too.
    waiting: Arc<Semaphore>,
    /// How long a handler may have a transaction.
    pub(super) longest: Option<Duration>,
}

/// A transaction that has its lock, and what it takes up while it lasts.
pub(super) struct BegunTx {
    pub(super) tx: XactGuard,
    pub(super) admission: Admission,
}

/// To be dropped when the transaction has ended.
pub(super) struct Admission {
    _bound: Option<Bound>,
    _key: Arc<Mutex<Option<LockGuard>>>,
    _transaction: OwnedSemaphorePermit,
}

/// The task that releases the key when a handler had its transaction for too long.
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

    /// Bounds how long a handler may have a transaction. The handler goes first; if it cannot be dropped, its session is ended.
    pub(super) fn bound(&mut self, longest: Duration) {
        self.longest = Some(longest);
        self.locks = self.locks.clone().max_hold(longest.saturating_add(GRACE), self.pool.clone());
    }

    pub(super) async fn begin(&self, key: &LockKey, wait: Duration) -> Result<BegunTx, Error> {
        // A budget too long for the clock is as good as a year.
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
        // Who has to wait leaves its place to those who need not, until it may wait at the server.
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
                // A handler that does not come back keeps nobody waiting here either.
                let key =
                    key.upgrade().and_then(|key| key.lock().unwrap_or_else(PoisonError::into_inner).take());
                drop(key);
            });
            Bound(task.abort_handle())
        });
        let admission = Admission { _bound: bound, _key: key, _transaction: transaction };
        if self.longest.is_some() {
            // The task gets its timer before a handler can block the worker that has to begin with it.
            tokio::task::yield_now().await;
        }
        admission
    }

    /// `None` while others hold the key: mostly nobody does, and then nobody is waited for.
    async fn attempt(&self, key: &LockKey, deadline: Instant) -> Result<Option<XactGuard>, Error> {
        let attempt = self.locks.begin_with(&self.pool, key, LockWait::Skip);
        timeout_at(deadline, attempt).await.unwrap_or_else(|_| {
            let message = "the pool had no connection in time, or the server did not answer; try again";
            Err(Error::new(ErrorKind::Unavailable, message))
        })
    }
}

/// How long a handler whose time is over has until its session is ended.
const GRACE: Duration = Duration::from_secs(1);

/// How long a connection is waited for by whoever has no time to wait for the lock.
const LOOK: Duration = Duration::from_secs(1);

async fn permit(places: &Arc<Semaphore>, deadline: Instant) -> Result<OwnedSemaphorePermit, Error> {
    // Polled first, so that a budget of zero still takes a place that is free.
    match timeout_at(deadline, Arc::clone(places).acquire_owned()).await {
        Ok(permit) => permit.map_err(|_| Error::closed()),
        Err(_) => Err(Error::new(
            ErrorKind::Timeout,
            "the pool's connections are taken by transactions of this layer; try again, or use a larger pool",
        )),
    }
}
