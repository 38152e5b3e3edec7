//! Waiting for a permit, for a hint, and for the time of the next attempt.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey, Mode, OnCooldown};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::acquire::budget::{Limit, Refusal};
use crate::acquire::owner::Owner;
use crate::acquire::owner::Permit;
use crate::acquire::queue::{QueuesClosed, SlotOwner as _, Waiter};
use crate::clock::scaled;
use crate::core::Core;
use crate::store::backend::Contended;

/// Returns whether the owner of the key's permit only waits for its release at the store, or without an owner all holds of
/// the key's group do. `None` without both.
pub(crate) fn is_ending(core: &Core, key: &LockKey) -> Option<bool> {
    core.queues.with(key, |owner| owner.is_ending()).or_else(|| core.queues.is_group_ending(key))
}

/// Returns the last store error of the current permit owner, if there is one.
pub(crate) fn failure_of(core: &Core, key: &LockKey) -> Option<Error> {
    core.queues.with(key, |owner| owner.failure.clone()).flatten()
}

/// Returns whether a failure of the store may pass, in which case a waiting caller retries.
pub(crate) fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::OutcomeUnknown | ErrorKind::Capacity)
}

/// Returns the `NotDue` error if this caller does not wait for cooldowns and the permit owner knows of a
/// running cooldown.
pub(crate) fn not_due(core: &Core, key: &LockKey, policy: OnCooldown) -> Option<Error> {
    if policy != OnCooldown::NotDue {
        return None;
    }
    let until = core.queues.with(key, |owner| owner.hold.cooling_until())?;
    let left = until.since(core.clock.now());
    (!left.is_zero()).then(|| core.name_error(Error::not_due(left), Some(key)))
}

/// Returns the error of a request for permits whose key this client uses with another number of permits.
pub(crate) fn mismatch(core: &Core, key: &LockKey, mode: Mode) -> Option<Error> {
    let Mode::Permit { of: wanted } = mode else { return None };
    match core.queues.group_mode(key)? {
        Mode::Permit { of } if of != wanted => {
            Some(core.name_error(Error::mode_mismatch(of, wanted), Some(key)))
        }
        _ => None,
    }
}

/// Waits for the permit, or until `leaves` returns a reason to wait no longer.
pub(crate) async fn permitted(
    core: &Core,
    waiter: Waiter<Owner>,
    key: &LockKey,
    leaves: impl Fn() -> Option<Refusal>,
) -> Result<Permit, Refusal> {
    let mut waiter = waiter;
    poll_fn(|cx| {
        if let Poll::Ready(permit) = Pin::new(&mut waiter).poll(cx) {
            return Poll::Ready(
                permit.map_err(|QueuesClosed| core.name_error(Error::closed(), Some(key)).into()),
            );
        }
        leaves().map_or(Poll::Pending, |refusal| Poll::Ready(Err(refusal)))
    })
    .await
}

/// How a pause ended.
pub(crate) enum Paused {
    Over,
    OutOfBudget,
}

/// Waits for a hint, or for `duration`.
pub(crate) async fn pause(
    core: &Core,
    key: &LockKey,
    wakeup: &Notify,
    duration: Duration,
    limit: Limit,
) -> Result<Paused, Refusal> {
    tokio::select! {
        biased;
        () = core.closing.cancelled() => Err(core.name_error(Error::closed(), Some(key)).into()),
        () = wakeup.notified() => Ok(Paused::Over),
        () = limit.passed() => Ok(Paused::OutOfBudget),
        () = sleep(duration) => Ok(Paused::Over),
    }
}

/// Returns the jittered pause before the next poll, shortened if the store knows when the hold ends.
pub(crate) fn poll_in(every: Duration, contended: &Contended) -> Duration {
    let jittered = scaled(every, 0.75 + fastrand::f64() / 2.0);
    contended.retry_after.map_or(jittered, |d| d.min(jittered)).max(Duration::from_millis(1))
}
