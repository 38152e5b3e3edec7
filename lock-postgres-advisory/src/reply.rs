//! The channels for replies to a session's jobs.

use leasehold_api::Error;
use leasehold_postgres::{Job, JobQueue};
use tokio::sync::oneshot;

use crate::error::interrupted;

/// Sends a session's reply to a job.
pub(crate) type ReplySender<T> = oneshot::Sender<Result<T, Error>>;

/// Receives the reply for the caller of a job.
pub(crate) type ReplyReceiver<T> = oneshot::Receiver<Result<T, Error>>;

/// Queues a job and returns the reply.
///
/// # Errors
///
/// [`ErrorKind::OutcomeUnknown`](leasehold_api::ErrorKind::OutcomeUnknown) if the session ends before it
/// replies.
pub(crate) async fn ask<J: Job, T>(
    queue: &JobQueue<J>,
    job: impl FnOnce(ReplySender<T>) -> J,
) -> Result<T, Error> {
    let (answer, answered) = oneshot::channel();
    queue.push(job(answer));
    answered.await.unwrap_or_else(|_| Err(interrupted()))
}
