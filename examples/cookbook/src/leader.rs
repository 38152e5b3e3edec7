//! A leader among replicas: `docs/cookbook/leader.md`.

use std::time::Duration;

use leasehold_api::{BoxFuture, Error, Lock, LockExt as _, LockGuard, LockKey, RunError};

/// Between two tries while the store cannot be reached.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs `term` whenever this replica leads, until the lock is closed. A term that returns has resigned.
///
/// # Errors
///
/// Returns why this replica will not lead any more.
///
/// # Cancel safety
///
/// Dropping the future drops `term` where it is and resigns in the background.
pub async fn lead(
    lock: &dyn Lock,
    key: &LockKey,
    term: impl for<'g> Fn(&'g LockGuard) -> BoxFuture<'g, ()> + Send + Sync,
) -> Error {
    loop {
        match lock.key(key.clone()).wait_forever().run_boxed(&term).await {
            // It resigned; or it was deposed, and `term` was dropped at an await.
            Ok(()) | Err(RunError::Stopped(_) | RunError::Unconfirmed { .. }) => {}
            Err(RunError::NotRun(error)) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
            // It will not be leader again: closed, or set up wrongly.
            Err(RunError::NotRun(error)) => return error,
        }
    }
}
