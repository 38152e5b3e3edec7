//! What a lock is there for, and what follows when it is not to be had: `docs/cookbook/README.md`.

use std::time::Duration;

use leasehold_api::{ErrorKind, FencingToken, Lock, LockExt as _, LockKey, RunError};

/// What a lock is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // It enforces a constraint or it does not.
pub enum Duty {
    /// Two runs at once break something. Without the lock nothing is done, and the work gets a fencing token, which
    /// whatever it writes to must compare.
    EnforceConstraint,
    /// Two runs at once cost something. If the store cannot be reached, the work is done all the same.
    SaveWork,
}

/// Runs `work` under `key` unless somebody else has it. `None`: somebody else is at it.
///
/// # Errors
///
/// [`RunError`]. With [`Duty::EnforceConstraint`] also [`Unsupported`](ErrorKind::Unsupported) on a store whose fencing tokens
/// do not survive its restart.
///
/// # Cancel safety
///
/// Dropping the future drops `work` where it is and releases in the background.
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

/// Whether the store could not be asked, as opposed to having said no.
fn is_out(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::OutcomeUnknown)
}
