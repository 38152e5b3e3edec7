//! The purpose of a lock, and the effects if it is missing: `docs/cookbook/README.md`.

use std::time::Duration;

use leasehold_api::{ErrorKind, FencingToken, Lock, LockExt as _, LockKey, RunError};

/// The purpose of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because these two cases are complete.
pub enum Duty {
    /// Two concurrent runs would break a constraint. Without the lock nothing runs. The work gets a fencing token
    /// that every resource it writes to must check.
    EnforceConstraint,
    /// Two concurrent runs would only cost resources. If the store cannot be reached, the work runs anyway.
    SaveWork,
}

/// Runs `work` under `key`. Returns `None` if another client holds the lock.
///
/// # Errors
///
/// [`RunError`]. With [`Duty::EnforceConstraint`] also [`Unsupported`](ErrorKind::Unsupported) on a store whose
/// fencing tokens do not survive its restart.
///
/// # Cancel safety
///
/// If dropped, `work` is dropped too, and the lock is released in the background.
pub async fn run_for<T>(
    duty: Duty,
    lock: &dyn Lock,
    key: &LockKey,
    work: impl AsyncFn(Option<FencingToken>) -> T,
) -> Result<Option<T>, RunError<T>> {
    if duty == Duty::EnforceConstraint {
        let needs = leasehold_api::Requirements::new().durable_fencing();
        lock.require(&needs).map_err(RunError::NotRun)?;
    }
    let request = lock.key(key.clone()).wait(Duration::ZERO);
    match request.try_run(async |guard| work(guard.token()).await).await {
        Err(RunError::NotRun(error)) if duty == Duty::SaveWork && is_out(error.kind()) => {
            Ok(Some(work(None).await))
        }
        outcome => outcome,
    }
}

/// Returns whether the error means that the store could not be reached. False if the store refused the request.
fn is_out(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::OutcomeUnknown)
}
