//! A future that completes in the background if its caller leaves.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use leasehold_api::BoxFuture;
use tokio::runtime::Handle;
use tracing::{Instrument as _, Span};

/// A future that completes in the background if its caller leaves. A server drops the handler of a client that has
/// left. A handler dropped during its `COMMIT` would release its lock before the commit is done.
///
/// The layers use it. A handler that acquires a lock itself must use it too:
///
/// ```
/// use leasehold_api::{Lock, LockExt as _, RunError};
/// use leasehold_tower::Finish;
///
/// # async fn commit() {}
/// # async fn spend(lock: std::sync::Arc<dyn Lock>) -> Result<(), RunError<()>> {
/// Finish::new(Box::pin(async move { lock.key("ledger:42").run(async |_| commit().await).await })).await
/// # }
/// ```
///
/// It is polled in place. If dropped early inside a tokio runtime, the rest runs in a task, in the same span but
/// without the caller's task-locals. A panic in the task is not reported. Limit the work with an inner timeout.
// Spawns a task only on drop, because a task per request would reduce the throughput noticeably.
#[must_use = "it does nothing unless it is polled or dropped"]
pub struct Finish<T: Send + 'static> {
    work: Option<BoxFuture<'static, T>>,
    /// The caller's span, in which the rest runs.
    span: Span,
}

impl<T: Send + 'static> Finish<T> {
    /// Wraps `work` in the current span.
    pub fn new(work: BoxFuture<'static, T>) -> Self {
        Self { work: Some(work), span: Span::current() }
    }
}

impl<T: Send + 'static> fmt::Debug for Finish<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finish").field("span", &self.span).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // Takes the work out during the poll, because a panicking future must be dropped and not polled again by a
        // task.
        let Some(mut work) = self.work.take() else { return Poll::Pending };
        let polled = work.as_mut().poll(cx);
        if polled.is_pending() {
            self.work = Some(work);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        // Passes the work to a task. Without a runtime nothing can continue, so the work is dropped here, and the lock
        // after it.
        if let (Some(work), Ok(runtime)) = (self.work.take(), Handle::try_current()) {
            let span = std::mem::replace(&mut self.span, Span::none());
            drop(runtime.spawn(async move { drop(work.await) }.instrument(span)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::panic::AssertUnwindSafe;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn work_that_panicked_is_not_polled_again() {
        let polls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&polls);
        let work = Finish::new(Box::pin(poll_fn(move |_| -> Poll<()> {
            counter.fetch_add(1, Ordering::SeqCst);
            std::panic::resume_unwind(Box::new("work of a test panics"))
        })));
        assert!(AssertUnwindSafe(work).catch_unwind().await.is_err());
        // Gives a task the chance to poll the work, which must not happen.
        tokio::task::yield_now().await;
        assert_eq!(polls.load(Ordering::SeqCst), 1);
        assert_eq!(Arc::strong_count(&polls), 1, "and it is dropped");
    }

    #[tokio::test]
    async fn what_is_left_of_it_goes_on() {
        let (open, opened) = tokio::sync::oneshot::channel();
        let (done, is_done) = tokio::sync::oneshot::channel();
        let mut work = Finish::new(Box::pin(async move {
            opened.await.unwrap();
            done.send(()).unwrap();
        }));
        assert!((&mut work).now_or_never().is_none());
        drop(work);
        open.send(()).unwrap();
        is_done.await.unwrap();
    }
}
