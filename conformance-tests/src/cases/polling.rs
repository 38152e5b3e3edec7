//! Helpers that drop a future after a number of polls.

use std::future::Future;
use std::task::Poll;
use std::time::Duration;

use crate::context::Context;

/// Polls `work` at most `polls` times, then drops it. Returns its output if it is ready before. Also drops it
/// if it takes longer than `patience`.
pub(crate) async fn dropped_after<F: Future>(cx: &Context, polls: usize, work: F) -> Option<F::Output> {
    let mut work = Box::pin(work);
    let mut left = polls;
    let counted = std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match work.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    });
    tokio::time::timeout(patience(cx), counted).await.unwrap_or(None)
}

/// Returns the time limit for all polls of a future, because a future might never ask for its next poll.
fn patience(cx: &Context) -> Duration {
    if cx.is_virtual() { Duration::from_millis(250) } else { Duration::from_millis(60) }
}

/// Returns the numbers of polls to try, which are more than any call needs.
pub(crate) fn each_poll() -> std::ops::Range<usize> {
    0..12
}
