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

/// How often it is tried to end a transaction, for example while the pool has no connection.
const TRIES: u32 = 20;

/// How many transactions are queued before those that have ended are removed for the first time.
const FULL: usize = 1024;

/// The tracing target. Filters of operators name it, so it does not follow the path of this module.
const TARGET: &str = "leasehold_postgres_advisory::xact_watch";

/// As good as never.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The maximum hold, and the thread that ends transactions after it. A thread, because a worker of the
/// runtime that blocks may keep the runtime's timers, and the tasks that it has woken last, from everybody.
#[derive(Clone, Debug)]
pub(crate) struct MaxHold {
    longest: Duration,
    thread: Sender<WatchedTransaction>,
}

/// A transaction whose time is over at `at`.
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
            // What is sent to it is refused then, and with it the lock.
            tracing::error!(target: TARGET, %error, "the thread that bounds transactions cannot be started");
        }
        Self { longest, thread }
    }

    /// Ends the transaction of `connection` when its time is over.
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

/// All last equally long, so that they end in the order in which they came.
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
            // One transaction that lasts must not keep all those behind it that have ended.
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

/// A transaction that is being watched. Dropping this does not end the watch, because the transaction may
/// still be open.
#[derive(Debug)]
pub(crate) struct MaxHoldWatch(Arc<AtomicBool>);

impl MaxHoldWatch {
    /// The transaction has ended.
    pub(crate) fn over(&self) {
        self.0.store(true, Ordering::Release);
    }
}
