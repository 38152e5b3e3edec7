//! Acquires that wait in the background of a case.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, Lock, LockGuard, LockKey};
use tokio::task::JoinHandle;

use crate::context::{Context, joined};
use crate::inconclusive::Answered as _;

impl Context {
    /// Starts an acquire, polls it once so that it enters the queue, and continues it in a task.
    pub(crate) async fn queue(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> Waiter {
        self.queue_with(lock, key, self.patient()).await
    }

    pub(crate) async fn queue_with(
        &self,
        lock: &Arc<dyn Lock>,
        key: &LockKey,
        options: AcquireOptions,
    ) -> Waiter {
        let (lock, key) = (Arc::clone(lock), key.clone());
        let mut waiting = Box::pin(async move { lock.acquire(&key, &options).await });
        let first = std::future::poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx))).await;
        let task = tokio::spawn(async move {
            match first {
                Poll::Ready(outcome) => outcome,
                Poll::Pending => waiting.await,
            }
        });
        self.settle().await;
        Waiter(task)
    }

    /// Queues like [`Context::queue`]. If the store counts its waiters, returns only after the store counts
    /// this one. Needed because a new connection on a busy machine can take longer than [`Context::settle`].
    pub(crate) async fn queue_at_store(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> Waiter {
        let waiter = self.queue(lock, key).await;
        if self.is_virtual() {
            return waiter;
        }
        let any = async {
            while !waiter.is_done() {
                self.settle().await;
            }
        };
        tokio::select! {
            () = self.registered(lock, key) => {}
            () = any => {}
        }
        waiter
    }

    /// Waits until a waiter that has just started has reached the store: until the store counts a waiter of the key, if
    /// it counts them, and for a moment in any case.
    pub(crate) async fn registered(&self, lock: &Arc<dyn Lock>, key: &LockKey) {
        self.sleep(self.settling().max(Duration::from_millis(20))).await;
        let Some(admin) = lock.admin().filter(|_| self.capabilities().admin.inspect && !self.is_virtual())
        else {
            return;
        };
        let counted = async {
            while admin.inspect(key).await.answered("the store answers").waiters == Some(0) {
                self.settle().await;
            }
        };
        self.within("a waiter's way to the store", self.patience(), counted).await;
    }
}

/// An acquire that waits in a task.
#[derive(Debug)]
pub(crate) struct Waiter(JoinHandle<Result<LockGuard, Error>>);

impl Waiter {
    pub(crate) fn is_done(&self) -> bool {
        self.0.is_finished()
    }

    /// Drops the waiting acquire. Fails the case if it has already ended.
    pub(crate) async fn cancel(self) {
        self.0.abort();
        match self.0.await {
            Ok(Ok(guard)) => panic!("granted before it could be cancelled: {guard:?}"),
            Ok(Err(error)) => panic!("ended before it could be cancelled: {error}"),
            Err(join) => assert!(join.is_cancelled(), "{join}"),
        }
    }

    /// Drops the waiting acquire. Returns the guard if the acquire was granted first.
    pub(crate) async fn leave(self) -> Option<LockGuard> {
        self.0.abort();
        match self.0.await {
            Ok(outcome) => Some(outcome.expect("granted, or still waiting")),
            Err(join) if join.is_cancelled() => None,
            Err(join) => std::panic::resume_unwind(join.into_panic()),
        }
    }

    pub(crate) async fn outcome(self) -> Result<LockGuard, Error> {
        joined(self.0).await
    }

    /// Returns the guard. Fails the case if the grant takes longer than `bound`.
    pub(crate) async fn granted(self, cx: &Context, bound: Duration) -> LockGuard {
        match cx.within("the waiter's grant", bound, self.outcome()).await {
            Ok(guard) => guard,
            Err(error) => panic!("the waiter must be granted: {error}"),
        }
    }
}
