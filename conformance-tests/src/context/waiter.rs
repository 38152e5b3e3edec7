//! Acquires that wait while a case goes on.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, Lock, LockGuard, LockKey};
use tokio::task::JoinHandle;

use crate::context::{Context, joined};

impl Context {
    /// An acquire that was polled once, so that it is queued, and goes on as a task.
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

    /// Like [`Context::queue`], and returns only after the store has the waiter, if the store counts its waiters. To
    /// reach the store can need a new connection, which a busy machine delays for longer than [`Context::settle`].
    pub(crate) async fn queue_at_store(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> Waiter {
        let waiter = self.queue(lock, key).await;
        let Some(admin) = lock.admin().filter(|_| self.capabilities().admin.inspect && !self.is_virtual())
        else {
            return waiter;
        };
        let registered = async {
            while !waiter.is_done() && admin.inspect(key).await.expect("the store answers").waiters == Some(0)
            {
                self.settle().await;
            }
        };
        self.within("a waiter's way to the store", self.patience(), registered).await;
        waiter
    }
}

/// An acquire that waits in a task.
#[derive(Debug)]
pub(crate) struct Waiter(JoinHandle<Result<LockGuard, Error>>);

impl Waiter {
    pub(crate) fn is_done(&self) -> bool {
        self.0.is_finished()
    }

    /// Drops the acquire where it is.
    pub(crate) async fn cancel(self) {
        self.0.abort();
        match self.0.await {
            Ok(Ok(guard)) => panic!("granted before it could be cancelled: {guard:?}"),
            Ok(Err(error)) => panic!("ended before it could be cancelled: {error}"),
            Err(join) => assert!(join.is_cancelled(), "{join}"),
        }
    }

    /// Drops the acquire where it is; the guard, if it was granted first.
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

    /// The guard, which must come within `bound`.
    pub(crate) async fn granted(self, cx: &Context, bound: Duration) -> LockGuard {
        match cx.within("the waiter's grant", bound, self.outcome()).await {
            Ok(guard) => guard,
            Err(error) => panic!("the waiter must be granted: {error}"),
        }
    }
}
