//! The maximum time that a transaction holds a lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::OpenTransaction;
use sqlx::{PgConnection, PgPool};
use tokio::runtime::Handle;
use tokio::time::sleep;

use crate::xact::query::ANSWER_LIMIT;

/// How often the end of a transaction is tried, for example while the pool has no connection.
const TRIES: u32 = 20;

/// Queue length at which ended transactions are removed for the first time.
const FULL: usize = 1024;

/// The tracing target, independent of the module path because operators' filters name it.
const TARGET: &str = "leasehold_postgres_advisory::xact_watch";

/// The longest maximum hold, which is practically no limit.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The maximum hold, and the thread that ends transactions after it. A thread is needed because a blocked worker of the
/// runtime can delay the runtime's timers and recently woken tasks.
#[derive(Clone, Debug)]
pub(crate) struct MaxHold {
    longest: Duration,
    thread: Sender<WatchedTransaction>,
}

/// A transaction that must end by `at`.
struct WatchedTransaction {
    at: Instant,
    open: OpenTransaction,
    is_over: Arc<AtomicBool>,
    runtime: Handle,
}

impl MaxHold {
    pub(crate) fn new(longest: Duration, pool: PgPool) -> Self {
        let longest = longest.min(LONGEST);
        let (thread, inbox) = channel();
        let started = std::thread::Builder::new()
            .name("leasehold-max-hold".to_owned())
            .spawn(move || watch(&inbox, &pool, longest));
        if let Err(error) = started {
            // Only logs the failure. Later transactions are refused, and with them their locks.
            tracing::error!(target: TARGET, %error, "the thread that bounds transactions cannot be started");
        }
        Self { longest, thread }
    }

    /// Starts the maximum hold of the transaction of `connection`.
    pub(crate) async fn watch(&self, connection: &mut PgConnection) -> Result<MaxHoldWatch, Error> {
        let at = Instant::now() + self.longest;
        let open = OpenTransaction::of(connection, ANSWER_LIMIT).await?;
        let is_over = Arc::new(AtomicBool::new(false));
        let due = WatchedTransaction { at, open, is_over: Arc::clone(&is_over), runtime: Handle::current() };
        self.thread.send(due).map_err(|_| {
            let message =
                "the thread that bounds transactions is not there; roll back, and make the locks anew";
            Error::new(ErrorKind::Unavailable, message)
        })?;
        Ok(MaxHoldWatch(is_over))
    }
}

/// Ends each transaction when its time has come, in the order of arrival, because all have the same limit.
fn watch(inbox: &Receiver<WatchedTransaction>, pool: &PgPool, longest: Duration) {
    let (mut queue, mut is_open, mut full) = (VecDeque::<WatchedTransaction>::new(), true, FULL);
    loop {
        let next = queue.front().map(|due| due.at.saturating_duration_since(Instant::now()));
        match next {
            Some(wait) if !wait.is_zero() && is_open => match inbox.recv_timeout(wait) {
                Ok(due) => queue.push_back(due),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => is_open = false,
            },
            Some(wait) if !wait.is_zero() => std::thread::sleep(wait),
            None => match inbox.recv() {
                Ok(due) => queue.push_back(due),
                Err(_) => return,
            },
            Some(_) => {
                if let Some(WatchedTransaction { open, is_over, runtime, .. }) = queue.pop_front()
                    && !is_over.load(Ordering::Acquire)
                {
                    runtime.spawn(end(open, pool.clone(), longest));
                }
            }
        }
        while queue.front().is_some_and(|due| due.is_over.load(Ordering::Acquire)) {
            queue.pop_front();
        }
        if queue.len() >= full {
            // Removes ended transactions from the whole queue, which one long transaction at its front would
            // keep.
            queue.retain(|due| !due.is_over.load(Ordering::Acquire));
            full = FULL.max(queue.len() * 2);
        }
    }
}

async fn end(open: OpenTransaction, pool: PgPool, longest: Duration) {
    for _ in 0..TRIES {
        match open.end(&pool, ANSWER_LIMIT).await {
            Ok(true) => {
                tracing::warn!(
                    target: TARGET,
                    ?longest,
                    "a transaction with a lock was open for too long, its session was ended"
                );
            }
            Ok(false) => {}
            Err(error) => {
                tracing::error!(target: TARGET, %error, "a transaction with a lock is open for too long, and cannot be ended yet");
                sleep(Duration::from_secs(1)).await;
                continue;
            }
        }
        return;
    }
}

/// A watched transaction. Dropping this value does not end the watch, because the transaction might still be open.
#[derive(Debug)]
pub(crate) struct MaxHoldWatch(Arc<AtomicBool>);

impl MaxHoldWatch {
    /// Records the end of the transaction.
    pub(crate) fn over(&self) {
        self.0.store(true, Ordering::Release);
    }
}
