//! Waiting: for a permit, for a hint, for the time to ask again.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockKey, OnCooldown};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::acquire::budget::{Limit, Refusal};
use crate::acquire::owner::Owner;
use crate::acquire::owner::Permit;
use crate::acquire::queue::{QueuesClosed, Waiter};
use crate::clock::scaled;
use crate::shared::Shared;
use crate::store::backend::Contended;

/// Whether whoever has the key's permit here is only waiting for the store to let go, if anybody has it.
pub(crate) fn is_ending(shared: &Shared, key: &LockKey) -> Option<bool> {
    shared.queues.with(key, |owner| owner.is_ending())
}

/// How the store fails whoever has the key's permit here, if it does.
pub(crate) fn failure_of(shared: &Shared, key: &LockKey) -> Option<Error> {
    shared.queues.with(key, |owner| owner.failure.clone()).flatten()
}

/// Whether a failure of the store may pass, so that who waits asks again.
pub(crate) fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::OutcomeUnknown | ErrorKind::Capacity)
}

/// For a caller who does not wait for a cooldown: how long the one lasts that whoever has the key's permit here
/// has begun or met.
pub(crate) fn not_due(shared: &Shared, key: &LockKey, policy: OnCooldown) -> Option<Error> {
    if policy != OnCooldown::NotDue {
        return None;
    }
    let until = shared.queues.with(key, |owner| owner.hold.cooling_until())?;
    let left = until.since(shared.clock.now());
    (!left.is_zero()).then(|| shared.name_error(Error::not_due(left), Some(key)))
}

/// The permit, once it has come; `NotDue` for those who do not wait for a cooldown, once somebody here knows of
/// one; and for those who give up on a failure that of whoever has the permit.
pub(crate) async fn permitted(
    shared: &Arc<Shared>,
    waiter: Waiter<Owner>,
    key: &LockKey,
    policy: OnCooldown,
    gives_up: bool,
) -> Result<Permit, Refusal> {
    let mut waiter = waiter;
    poll_fn(|cx| {
        if let Poll::Ready(permit) = Pin::new(&mut waiter).poll(cx) {
            return Poll::Ready(
                permit.map_err(|QueuesClosed| shared.name_error(Error::closed(), Some(key)).into()),
            );
        }
        let failure = || gives_up.then(|| failure_of(shared, key)).flatten();
        match not_due(shared, key, policy).or_else(failure) {
            Some(error) => Poll::Ready(Err(error.into())),
            None => Poll::Pending,
        }
    })
    .await
}

/// How a pause ended.
pub(crate) enum Paused {
    Over,
    OutOfBudget,
}

/// Waits for a hint or until it is time to ask again.
pub(crate) async fn pause(
    shared: &Shared,
    key: &LockKey,
    wakeup: &Notify,
    duration: Duration,
    limit: Limit,
) -> Result<Paused, Refusal> {
    tokio::select! {
        biased;
        () = shared.closing.cancelled() => Err(shared.name_error(Error::closed(), Some(key)).into()),
        () = wakeup.notified() => Ok(Paused::Over),
        () = limit.passed() => Ok(Paused::OutOfBudget),
        () = sleep(duration) => Ok(Paused::Over),
    }
}

/// When to ask a store that is polled again: jittered, and sooner if it is known to let go sooner.
pub(crate) fn poll_in(every: Duration, contended: &Contended) -> Duration {
    let jittered = scaled(every, 0.75 + fastrand::f64() / 2.0);
    contended.retry_after.map_or(jittered, |d| d.min(jittered)).max(Duration::from_millis(1))
}
