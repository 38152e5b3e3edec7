//! Background tasks of a hold of the small lock: renewals, and the watch of its deadline.

use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_api::{ErrorKind, LossReason};
use leasehold_engine::HoldRef;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::client::{CALL, SmallClient, lock};
use super::fault::LockFault as Fault;
use super::grant::{Hold, Phase};
use leasehold_conformance::Op;

/// Ends the hold as lost when its deadline or maximum hold has passed, without a call to the store.
pub(super) async fn watch_deadline(hold: Weak<Hold>) {
    loop {
        let deadline = |hold: &Hold| {
            let life = lock(&hold.life);
            match hold.client.fault {
                Fault::LostWaitsForFailure if life.failing => life.lease.deadline + life.lease.ttl / 24,
                _ => life.lease.deadline,
            }
        };
        let first = |hold: Arc<Hold>| hold.ends.map_or(deadline(&hold), |end| end.min(deadline(&hold)));
        let Some(first) = hold.upgrade().filter(|h| h.is_live()).map(first) else { return };
        sleep_until(first).await;
        let Some(hold) = hold.upgrade() else { return };
        let now = Instant::now();
        if now >= deadline(&hold) {
            hold.lose(LossReason::Expired);
        } else if hold.is_overdue(now) {
            hold.lose(hold.overdue());
        }
    }
}

/// Renews until the hold ends.
pub(super) async fn renew_while_live(weak: Weak<Hold>, client: Arc<SmallClient>, reference: HoldRef) {
    let fault = client.fault;
    let mut failed = false;
    // A hold that continues another is renewed as the other would have been.
    let continued = weak.upgrade().filter(|hold| hold.holder != hold.tenure.holder);
    let mut since = continued.map(|hold| lock(&hold.life).lease.confirmed);
    loop {
        let Some(hold) = weak.upgrade() else {
            if fault != Fault::RenewsAfterRelease {
                return;
            }
            let renewed =
                client.connection.call(Op::Renew, |server, requester| server.renew(requester, &reference));
            let _ = timeout(CALL, renewed).await;
            sleep(Duration::from_secs(3)).await;
            continue;
        };
        let ttl = lock(&hold.life).lease.ttl;
        if !hold.is_live() && fault == Fault::LostRevoked {
            resume(&hold, ttl).await;
        } else if !hold.is_live() && !matches!(fault, Fault::RenewsAfterRelease | Fault::MaxHoldKeepsLease) {
            return;
        }
        let pause = match (failed, fault) {
            (_, Fault::RenewsTooLate) => ttl * 17 / 20,
            (true, _) => ttl / 12,
            (false, _) => ttl / 3,
        };
        // A change of the lease was a renewal, so the pause starts again.
        let since = since.take().unwrap_or_else(Instant::now);
        let early = timeout_at(since + pause, hold.changed.notified()).await.is_ok();
        if early && fault != Fault::RenewsAfterRelease {
            failed = false;
            continue;
        }
        let ttl = lock(&hold.life).lease.ttl;
        let outcome = hold.renew_once(ttl, CALL.min(ttl / 4)).await;
        failed = outcome.is_err();
        lock(&hold.life).failing = failed;
        let unanswered = outcome.is_err_and(|error| error.kind() == ErrorKind::OutcomeUnknown);
        match (failed, fault) {
            (true, Fault::RenewStopsOnFailure) => return,
            (true, Fault::RenewStopsOnSilence) if unanswered => return,
            (true, Fault::LossAtFirstFailure) => hold.lose(LossReason::SessionLost),
            _ => {}
        }
    }
}

/// Acquires the key again under the old grant, for [`Fault::LostRevoked`].
async fn resume(hold: &Hold, ttl: Duration) {
    if lock(&hold.life).phase == Phase::Released {
        return;
    }
    let call = hold
        .client
        .connection
        .call(Op::Acquire, |server, requester| server.acquire(requester, &hold.request));
    if let Ok(Ok(Ok(leasehold_engine::Attempt::Granted(_)))) = timeout(CALL, call).await {
        lock(&hold.life).phase = Phase::Live;
        hold.confirm(Instant::now(), ttl);
    }
}
