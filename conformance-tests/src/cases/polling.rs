//! Dropping futures at each poll.

use std::future::Future;
use std::task::Poll;
use std::time::Duration;

use crate::context::Context;

/// Polls `work` as often as it asks to be polled, but at most `polls` times, then drops it where it
/// is. `Some` is its output if it was done sooner. If it stops asking, it is dropped after a while.
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

/// How long a future may stay without asking to be polled before it is dropped.
fn patience(cx: &Context) -> Duration {
    if cx.is_virtual() { Duration::from_millis(250) } else { Duration::from_millis(60) }
}

/// The numbers of polls that a product of drops goes through: more than any call needs.
pub(crate) fn each_poll() -> std::ops::Range<usize> {
    0..12
}
