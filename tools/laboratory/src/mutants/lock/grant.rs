//! Grants of the small lock.

mod begin;

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_api::{
    BoxFuture, Error, ErrorKind, FencingToken, Grant, HolderId, LockKey, LossReason, LossSignal, Lost, Mode,
    Release, Validity,
};
use leasehold_engine::{HoldRef, ReleaseReply, Renewed, Request};
use tokio::runtime::Handle;
use tokio::sync::{Notify, SetOnce};
use tokio::time::{Instant, sleep, timeout};

use super::super::server::fence::SmallFence;
use super::batch::Batch;
use super::baton::{Lease, Tenure};
use super::client::{CALL, SmallClient, lock};
use super::fault::LockFault as Fault;
use super::permits::Permit;
use leasehold_conformance::Op;

/// One hold of one client.
pub(crate) struct Hold {
    pub(super) client: Arc<SmallClient>,
    pub(super) key: LockKey,
    pub(super) holder: HolderId,
    token: AtomicU64,
    pub(super) life: Mutex<HoldLife>,
    /// The grant of the store that this one is or continues.
    pub(super) tenure: Arc<Tenure>,
    fence: SmallFence,
    /// Whether a caller has requested the fence.
    pub(super) extended: AtomicBool,
    signal: Arc<LossSignal>,
    permit: Mutex<Option<Permit>>,
    /// End of the maximum hold, which renewals do not extend.
    pub(super) ends: Option<Instant>,
    /// Notified when the deadline or the phase changes.
    pub(super) changed: Notify,
    pub(super) renewing: tokio::sync::Mutex<()>,
    pub(super) asked: SetOnce<()>,
    pub(super) request: Request,
}

pub(super) struct HoldLife {
    pub(super) phase: Phase,
    /// Whether the hold is released before a caller received it.
    unused: bool,
    pub(super) lease: Lease,
    /// Whether the last renewal failed.
    pub(super) failing: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Phase {
    Live,
    Released,
    Lost(LossReason),
}

impl Hold {
    pub(super) fn is_live(&self) -> bool {
        lock(&self.life).phase == Phase::Live
    }

    /// Marks the hold as released before a caller received it.
    pub(super) fn mark_unused(&self) {
        lock(&self.life).unused = true;
    }

    pub(super) fn reference(&self) -> HoldRef {
        let mut reference = self.request.hold();
        reference.mode = Mode::Exclusive;
        let life = lock(&self.life);
        let Lease { ttl, longest, .. } = life.lease;
        let lasts = if self.client.fault == Fault::ReleaseForTheKnownLease { ttl } else { longest };
        (reference.ttl, reference.unused) = (Some(lasts), life.unused);
        reference.token = Some(FencingToken::from_u64(self.token()));
        if self.client.fault != Fault::ReleaseByLocalId {
            reference.holder = self.tenure.holder;
        }
        reference
    }

    pub(super) fn token(&self) -> u64 {
        self.token.load(Ordering::Relaxed)
    }

    /// Sets the deadline after the store confirmed a request sent at `sent`. The lease lasts `ttl` from that time.
    pub(super) fn confirm(&self, sent: Instant, ttl: Duration) {
        lock(&self.life).lease.confirm(self.client.fault, sent, ttl);
        self.changed.notify_waiters();
    }

    /// Ends a live hold as lost.
    pub(super) fn lose(&self, reason: LossReason) {
        {
            let mut life = lock(&self.life);
            if life.phase != Phase::Live {
                return;
            }
            life.phase = Phase::Lost(reason);
        }
        if !matches!(self.client.fault, Fault::LostNeverFires | Fault::LostOnNextCall) {
            self.signal.fire(reason);
        }
        let permit = lock(&self.permit).take();
        if let (Fault::HandedOverWhenExpired, LossReason::Expired) = (self.client.fault, reason) {
            if let Some(Err((permit, baton))) = permit.map(|permit| permit.hand_over(self.baton())) {
                baton.release(Some(permit));
            }
            return;
        }
        drop(permit);
        self.changed.notify_waiters();
        let kept = reason == LossReason::HeldTooLong && self.client.fault == Fault::MaxHoldKeepsLease;
        if matches!(reason, LossReason::Expired | LossReason::HeldTooLong) && !kept {
            // The store might still have the hold, because only its answers might have been lost.
            let (client, reference) = (Arc::clone(&self.client), self.reference());
            self.client.handle.spawn(async move { client.undo(reference).await });
        }
    }

    /// Ends the hold without the loss signal, for [`Fault::CloseIsSilent`].
    pub(super) fn end_silently(&self) {
        lock(&self.life).phase = Phase::Released;
        drop(lock(&self.permit).take());
    }

    fn validity(&self) -> Validity {
        let (phase, deadline, doubt) = {
            let life = lock(&self.life);
            (life.phase, life.lease.deadline, life.lease.doubt)
        };
        let now = Instant::now();
        match phase {
            Phase::Lost(reason) => {
                if self.client.fault == Fault::LostOnNextCall {
                    self.signal.fire(reason);
                }
                Validity::Lost
            }
            Phase::Live if now >= deadline && self.client.fault != Fault::ValidityIsFlag => {
                self.lose(LossReason::Expired);
                Validity::Lost
            }
            Phase::Live if self.is_overdue(now) => {
                self.lose(self.overdue());
                Validity::Lost
            }
            Phase::Live if now >= doubt => Validity::InDoubt,
            Phase::Released if self.client.fault != Fault::ReleasedReadsValid => Validity::Ended,
            Phase::Live | Phase::Released => Validity::Valid,
        }
    }

    /// Returns whether the maximum hold has passed.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.ends.is_some_and(|end| now >= end)
    }

    pub(super) fn overdue(&self) -> LossReason {
        match self.client.fault {
            Fault::MaxHoldIsExpiry => LossReason::Expired,
            _ => LossReason::HeldTooLong,
        }
    }

    fn shorten(&self, deadline: Instant) {
        let mut life = lock(&self.life);
        life.lease.deadline = life.lease.deadline.min(deadline);
    }

    /// Renews once, within `limit`. Returns `false` if the store no longer has the hold.
    pub(super) async fn renew_once(&self, ttl: Duration, limit: Duration) -> Result<bool, Error> {
        let mut reference = self.reference();
        reference.ttl = Some(ttl);
        // Renewals run one at a time. A shorter lease counts from its request, because the store might apply it
        // without an answer.
        let _one = self.renewing.lock().await;
        let sent = Instant::now();
        let shorter = sent + ttl.mul_f64(0.9);
        if !matches!(self.client.fault, Fault::ShorterFromAnswer | Fault::ShorterFromFailure) {
            self.shorten(shorter);
        }
        {
            let mut life = lock(&self.life);
            life.lease.longest = life.lease.longest.max(ttl);
            life.lease.unsettled |= ttl < life.lease.ttl;
        }
        let limit = match self.client.fault {
            Fault::LostWaitsForStore => Duration::from_secs(1 << 30),
            _ => limit,
        };
        let call =
            self.client.connection.call(Op::Renew, |server, requester| server.renew(requester, &reference));
        let answer = timeout(limit, call).await;
        if self.client.fault == Fault::ShorterFromFailure && !matches!(answer, Ok(Ok(_))) {
            self.shorten(shorter);
        }
        match answer {
            Ok(Ok(Renewed::Extended)) => {
                if self.is_live() {
                    let late = self.client.fault == Fault::ValidityFromAnswer;
                    self.confirm(if late { Instant::now() } else { sent }, ttl);
                    if self.client.fault == Fault::RenewChangesToken {
                        self.token.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Ok(true)
            }
            Ok(Ok(Renewed::Gone(reason))) => {
                self.lose(reason);
                Ok(false)
            }
            Ok(Ok(_)) => Ok(true),
            Ok(Err(kind)) => Err(self.client.store_error(kind)),
            Err(_) => Err(Error::new(ErrorKind::OutcomeUnknown, "the store did not answer the renewal")),
        }
    }

    /// Ends the hold for a release. Returns the loss reason as an error if the hold was lost before.
    pub(super) fn end(&self) -> Released {
        self.validity();
        let mut life = lock(&self.life);
        match life.phase {
            Phase::Live => life.phase = Phase::Released,
            Phase::Lost(reason) => return Err(reason),
            Phase::Released => {}
        }
        drop(life);
        self.changed.notify_waiters();
        match self.client.fault {
            Fault::LostOnRelease => drop(self.signal.fire(LossReason::Gone)),
            Fault::EndedNeverFires => {}
            _ => drop(self.signal.released()),
        }
        let permit = lock(&self.permit).take();
        if let Some(permit) = &permit {
            permit.begin_release();
        }
        Ok(permit)
    }

    /// Converts the store's answer to the result of a release. Retries in the background if the answer is missing.
    pub(super) fn confirm_release(
        self: &Arc<Self>,
        permit: Option<Permit>,
        answer: Result<Result<ReleaseReply, ErrorKind>, ()>,
    ) -> Result<(), Error> {
        let client = &self.client;
        let error = match answer {
            Ok(Ok(freed)) => {
                return if freed.was_held { Ok(()) } else { Err(self.lost_error(LossReason::Gone)) };
            }
            Ok(Err(kind)) => client.store_error(kind),
            Err(()) => Error::new(ErrorKind::OutcomeUnknown, "the store did not answer the release"),
        };
        match client.fault {
            Fault::ReleaseNotRetried => {}
            Fault::ReleaseWedges => std::mem::forget(permit),
            _ => {
                // Passes the permit, so the next waiter tries at the store.
                drop(permit);
                let (again, reference) = (Arc::clone(client), self.reference());
                client.handle.spawn(async move { again.undo(reference).await });
            }
        }
        if client.fault == Fault::ReleaseFailsSilently {
            return Ok(());
        }
        Err(client.named(error, &self.key))
    }

    pub(super) fn lost_error(&self, reason: LossReason) -> Error {
        self.client.named(Error::lost(reason), &self.key)
    }
}

/// The grant inside a guard.
pub(crate) struct SmallGrant(pub(super) Arc<Hold>);

impl Grant for SmallGrant {
    fn key(&self) -> &LockKey {
        &self.0.key
    }

    fn holder(&self) -> HolderId {
        self.0.holder
    }

    fn stored_holder(&self) -> HolderId {
        self.0.tenure.holder
    }

    fn token(&self) -> Option<FencingToken> {
        Some(FencingToken::from_u64(self.0.token()))
    }

    fn validity(&self) -> Validity {
        self.0.validity()
    }

    fn remaining(&self) -> Option<Duration> {
        if !self.0.validity().is_held() {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let life = lock(&self.0.life);
        let left = life.lease.deadline.saturating_duration_since(now);
        Some(match (self.0.client.fault, self.0.ends) {
            (Fault::RemainingIsTtl, _) => life.lease.ttl,
            (_, Some(end)) => left.min(end.saturating_duration_since(now)),
            (_, None) => left,
        })
    }

    fn lost(&self) -> Lost {
        if self.0.client.fault == Fault::LostOnlyOnce && !self.0.is_live() {
            return LossSignal::new().subscribe();
        }
        self.0.signal.subscribe()
    }

    fn validity_changed(self: Arc<Self>, seen: Validity) -> BoxFuture<'static, Validity> {
        Box::pin(async move {
            loop {
                let now = self.0.validity();
                let hidden = self.0.client.fault == Fault::DoubtIsNotTold && now == Validity::InDoubt;
                if (now != seen && !hidden) || !now.is_held() {
                    return now;
                }
                sleep(Duration::from_millis(10)).await;
            }
        })
    }

    fn asked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { *self.0.asked.wait().await })
    }

    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        let hold = &self.0;
        if id != TypeId::of::<SmallFence>() {
            return None;
        }
        // A grant that has ended has no fence, because the next grant of the client might continue its hold.
        let life = lock(&hold.life);
        if life.phase == Phase::Released && hold.client.fault != Fault::EndedHandleFences {
            return None;
        }
        hold.extended.store(true, Ordering::Release);
        Some(&hold.fence)
    }

    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            let hold = &self.0;
            if ttl == Some(Duration::ZERO) {
                let error = Error::new(ErrorKind::InvalidOption, "a TTL of zero ends before it begins");
                return Err(hold.client.named(error, &hold.key));
            }
            if let Some(ttl) = ttl {
                hold.client.check_ttl(ttl).map_err(|e| hold.client.named(e, &hold.key))?;
            }
            let lost = |hold: &Hold| match lock(&hold.life).phase {
                Phase::Lost(reason) if hold.client.fault != Fault::RenewLostIsOk => {
                    Err(hold.lost_error(reason))
                }
                _ => Ok(()),
            };
            hold.validity();
            lost(hold)?;
            let old = lock(&hold.life).lease.ttl;
            let ttl = ttl.filter(|_| hold.client.fault != Fault::RenewIgnoresTtl).unwrap_or(old);
            if hold.is_live() {
                hold.renew_once(ttl, CALL).await.map_err(|e| hold.client.named(e, &hold.key))?;
            }
            lost(hold)
        })
    }

    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        if self.0.client.fault == Fault::ConfirmsFromMemory && self.0.validity() == Validity::Valid {
            return Box::pin(std::future::ready(Ok(())));
        }
        if self.0.client.fault == Fault::ConfirmsByEarlierRenewal && self.0.renewing.try_lock().is_err() {
            return Box::pin(async move {
                drop(self.0.renewing.lock().await);
                Ok(())
            });
        }
        // A renewal confirms the hold because it is sent after this call.
        self.renew(None)
    }

    fn release(self: Arc<Self>) -> Release {
        let hold = Arc::clone(&self.0);
        let client = Arc::clone(&hold.client);
        if client.fault == Fault::ReleaseFuturePolled {
            return Release::pending(async move { release(hold.end(), hold).await });
        }
        let Some(released) = hold.end_or_hand_over() else { return Release::ready(Ok(())) };
        // Releases in a separate task, so the release continues if the caller drops the future.
        let done = client.handle.spawn(release(released, hold));
        Release::pending(async move { done.await.unwrap_or_else(|_| Err(Error::closed())) })
    }

    fn release_in_batch(self: Arc<Self>) -> Release {
        match self.0.client.fault {
            Fault::ReleaseFuturePolled | Fault::ReleasesOneByOne => self.release(),
            _ => match self.0.end_or_hand_over() {
                None => Release::ready(Ok(())),
                Some(released) => Batch::release(&self.0.client, Arc::clone(&self.0), released),
            },
        }
    }

    fn abandon(self: Arc<Self>) {
        let hold = Arc::clone(&self.0);
        let Some(Ok(permit)) = hold.end_or_hand_over() else { return };
        let client = Arc::clone(&hold.client);
        let work = async move {
            if hold.client.fault == Fault::DropIsLate {
                sleep(Duration::from_secs(5)).await;
            }
            if hold.client.fault == Fault::DropForgetsWaiters {
                hold.client.connection.server().forget_waiters(&hold.key);
            }
            // Ignores the result, because no caller receives it.
            let _ = release(Ok(permit), hold).await;
        };
        match client.fault {
            Fault::DropLeaves => {}
            // This fault does nothing during a panic, because a second panic would abort the whole test process.
            Fault::DropNeedsRuntime if Handle::try_current().is_err() => {
                assert!(std::thread::panicking(), "there is no runtime here");
            }
            _ => drop(client.handle.spawn(work)),
        }
    }
}

/// The permit of a released hold, or the reason why the hold was lost before.
pub(super) type Released = Result<Option<Permit>, LossReason>;

async fn release(released: Released, hold: Arc<Hold>) -> Result<(), Error> {
    let client = &hold.client;
    let permit = match (released, client.fault) {
        (Ok(permit), _) => permit,
        (Err(_), Fault::ReleaseLostIsOk) => return Ok(()),
        (Err(reason), Fault::ReleaseLostFreesSuccessor) => {
            client.connection.server().end(&hold.key, None, LossReason::Gone, false);
            return Err(hold.lost_error(reason));
        }
        (Err(reason), _) => return Err(hold.lost_error(reason)),
    };
    let reference = hold.reference();
    let call =
        client.connection.call(Op::Release, |_, requester| client.connection.release(requester, &reference));
    let answer = timeout(CALL, call).await.map_err(drop).map(|answer| answer.and_then(|freed| freed));
    hold.confirm_release(permit, answer)
}

impl fmt::Debug for SmallGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SmallGrant").field(&self.0.key).field(&self.0.holder).finish()
    }
}
