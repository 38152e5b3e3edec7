//! How a caller gets the reply to a job of a session.

use leasehold_api::Error;
use leasehold_postgres::{Job, Lane};
use tokio::sync::oneshot;

use crate::error::interrupted;

pub(crate) type Answer<T> = oneshot::Sender<Result<T, Error>>;

/// Sends a job and waits for its answer; a session that ended meanwhile leaves the outcome unknown.
pub(crate) async fn ask<J: Job, T>(
    lane: &Lane<J>,
    job: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> J,
) -> Result<T, Error> {
    let (answer, answered) = oneshot::channel();
    lane.push(job(answer));
    answered.await.unwrap_or_else(|_| Err(interrupted()))
}
