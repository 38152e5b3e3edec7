//! Elects a leader among replicas: `docs/cookbook/leader.md`.

use std::time::Duration;

use leasehold_api::{BoxFuture, Error, Lock, LockExt as _, LockGuard, LockKey, RunError};

/// Pause between two tries while the store cannot be reached.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs `term` whenever this replica leads, until the lock is closed. A term that returns has resigned.
///
/// # Errors
///
/// Returns the reason why this replica will not lead again.
///
/// # Cancel safety
///
/// If dropped, `term` is dropped too, and the lock is released in the background.
pub async fn lead(
    lock: &dyn Lock,
    key: &LockKey,
    term: impl for<'g> Fn(&'g LockGuard) -> BoxFuture<'g, ()> + Send + Sync,
) -> Error {
    loop {
        match lock.key(key.clone()).wait_forever().run_boxed(&term).await {
            // It resigned, or it was deposed and `term` was dropped at an await.
            Ok(()) | Err(RunError::Stopped(_) | RunError::Unconfirmed { .. }) => {}
            Err(RunError::NotRun(error)) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
            // It will not lead again, because the lock is closed or misconfigured.
            Err(RunError::NotRun(error)) => return error,
        }
    }
}
