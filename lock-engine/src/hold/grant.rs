//! The operations of a guard on its hold: check, renew, release.

use std::any::{Any, TypeId};
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{
    BoxFuture, Error, ErrorKind, FencingToken, Grant, HolderId, LockKey, LossReason, Lost, Mode, Operation,
    PortableHold, Release, Validity,
};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::context::TokioContext;

use crate::acquire::queue::GrantOutcome;
use crate::acquire::unconfirmed::UnconfirmedAttempt;
use crate::clock::Moment;
use crate::driver::outbox::PendingRelease;
use crate::driver::renewal::RenewalRequest;
use crate::hold::Hold;
use crate::hold::lease_clock::LeaseClock;
use crate::metrics::Event;
use crate::store::backend::ReleaseReply;
use crate::store::missing_replies_error;

impl Grant for Hold {
    fn key(&self) -> &LockKey {
        Self::key(self)
    }

    fn holder(&self) -> HolderId {
        self.id()
    }

    fn stored_holder(&self) -> HolderId {
        self.stored_id().get()
    }

    fn token(&self) -> Option<FencingToken> {
        Self::token(self)
    }

    fn mode(&self) -> Mode {
        Self::mode(self)
    }

    fn permit(&self) -> Option<u32> {
        self.permit_number()
    }

    fn validity(&self) -> Validity {
        self.current_validity()
    }

    fn remaining(&self) -> Option<Duration> {
        if !self.current_validity().is_held() {
            return Some(Duration::ZERO);
        }
        let end = self.leases().map(LeaseClock::end).min()?;
        (end != Moment::NEVER).then(|| end.since(self.core.clock.now()))
    }

    fn lost(&self) -> Lost {
        self.phase.watch()
    }

    fn validity_changed(self: Arc<Self>, seen: Validity) -> BoxFuture<'static, Validity> {
        Box::pin(self.other_validity(seen))
    }

    fn asked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { *self.stored_hold().asked.wait().await })
    }

    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        Self::extension(self, id)
    }

    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            match self.carrier().cloned() {
                Some(carrier) => self.renew_carrier(carrier, ttl).await,
                None => self.renew_now(ttl, Operation::Renew).await.map(drop),
            }
        })
    }

    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            match self.carrier().cloned() {
                Some(carrier) => self.while_held(carrier.confirm_now(), Operation::Confirm).await,
                None => self.confirm_now().await,
            }
        })
    }

    fn relabel(self: Arc<Self>, label: Arc<str>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            let Some(carrier) = self.carrier().cloned() else { return self.relabel_now(label).await };
            // Later readers have another label, so they call the store.
            carrier.end_chain();
            self.while_held(carrier.relabel_now(label), Operation::Relabel).await
        })
    }

    fn into_ref(self: Arc<Self>, ttl: Duration) -> BoxFuture<'static, Result<PortableHold, Error>> {
        Box::pin(self.give_out(ttl))
    }

    fn release(self: Arc<Self>) -> Release {
        match self.begin_release() {
            Ok(true) => return Release::ready(Ok(())),
            Ok(false) => {}
            Err(error) => return Release::ready(Err(error.with_operation(Operation::Release))),
        }
        match self.release_now() {
            Some(answer) => Release::ready(self.released(answer)),
            None => {
                Release::pending(Releasing { _beside: self.begin_release_beside(), hold: Some(self) }.run())
            }
        }
    }

    fn release_in_batch(self: Arc<Self>) -> Release {
        match self.begin_release() {
            Ok(true) => return Release::ready(Ok(())),
            Ok(false) => {}
            Err(error) => return Release::ready(Err(error.with_operation(Operation::Release))),
        }
        if let Some(answer) = self.release_now() {
            return Release::ready(self.released(answer));
        }
        let (reply, answer) = oneshot::channel();
        let permit = self.claim_permit(GrantOutcome::Ended);
        let queued =
            self.core.inbox.queue_release(PendingRelease::guard_released(&self, permit).reply(reply));
        if !queued {
            return Release::ready(Err(self.unanswered()));
        }
        Release::pending(BatchRelease { hold: self, answer, begun: false })
    }

    fn abandon(self: Arc<Self>) {
        if !matches!(self.begin_release(), Ok(false)) {
            return;
        }
        let release = || self.call_release_now();
        // Catches panics, because dropping a guard must not panic.
        let answer = if self.ends_cooldown() { Ok(None) } else { catch_unwind(AssertUnwindSafe(release)) };
        match answer.unwrap_or(None) {
            // Drops the result, because no caller gets it. A failure is retried in the background.
            Some(answer) => drop(self.released(answer)),
            None => self.release_later(),
        }
    }
}

impl Hold {
    /// Renews through the driver, because the driver keeps the renewals of one hold in order. For
    /// [`GiveOut`](Operation::GiveOut) the store also marks the hold as given out. Returns the time for which the
    /// answer is true.
    pub(crate) async fn renew_now(
        self: Arc<Self>,
        ttl: Option<Duration>,
        operation: Operation,
    ) -> Result<Moment, Error> {
        let named = |e: Error| self.named(e).with_operation(operation);
        match ttl {
            Some(Duration::ZERO) => {
                let message = "a TTL of zero ends before it begins";
                return Err(named(Error::new(ErrorKind::InvalidOption, message)));
            }
            Some(ttl) => self.core.check_ttl(ttl).map_err(named)?,
            None => {}
        }
        match (ttl, self.lease.as_ref().and_then(|lease| lease.ttl())) {
            (_, Some(_)) => {}
            (None, None) => return Err(named(Error::unsupported("lease on this hold to renew"))),
            (Some(_), None) => {
                let message = "this hold was acquired without a lease; give a TTL when acquiring it";
                return Err(named(Error::new(ErrorKind::InvalidOption, message)));
            }
        }
        self.current_validity();
        let ended = || self.loss_reason().map_or_else(Error::closed, Error::lost);
        if !self.is_live() {
            return Err(named(ended()));
        }
        let (reply, answer) = oneshot::channel();
        let gives_out = operation == Operation::GiveOut;
        if !self.core.inbox.renew(RenewalRequest::new(Arc::clone(&self), ttl, gives_out, reply)) {
            return Err(named(ended()));
        }
        let lost = self.phase.watch();
        tokio::select! {
            biased;
            outcome = answer => match outcome {
                Ok(outcome) => outcome.map_err(named),
                Err(_) => Err(named(ended())),
            },
            reason = lost => Err(named(Error::lost(reason))),
        }
    }

    /// Releases without I/O, if the store can. If the store panics, the driver releases and passes the permit
    /// on.
    fn release_now(&self) -> Option<Result<ReleaseReply, Error>> {
        let panics = ReleasePanics(self);
        let answer = self.call_release_now();
        mem::forget(panics);
        answer
    }

    /// Calls the store to release without I/O.
    pub(crate) fn call_release_now(&self) -> Option<Result<ReleaseReply, Error>> {
        self.core.backend.release_now(self.key(), self.stored_id().get())
    }

    /// Settles the reply to a release, and passes the permit on.
    fn released(&self, answer: Result<ReleaseReply, Error>) -> Result<(), Error> {
        match answer {
            Ok(freed) => {
                self.core.yield_if_remote_waiters(self.key(), self.stored_id(), freed);
                if freed.was_held {
                    self.core.metrics.publish(Event::Released);
                    self.pass_on(GrantOutcome::Released);
                    return Ok(());
                }
                if !self.core.closing.is_cancelled() {
                    self.core.metrics.found_lost(self.key());
                }
                self.pass_on(GrantOutcome::Ended);
                Err(self.was_not_held())
            }
            Err(error) => {
                self.core.metrics.count(Event::Failure);
                let error = self.named(error).with_operation(Operation::Release);
                tracing::debug!(key = %self.key(), store = %self.core.name, %error, "release failed; it is retried in the background");
                self.release_again(&error);
                Err(error)
            }
        }
    }

    /// Passes a failed release to the driver. If its outcome is unknown, the next waiter calls the store at
    /// once. Otherwise the driver retries once first.
    fn release_again(&self, error: &Error) {
        let mut release = PendingRelease::guard_released(self, self.claim_permit(GrantOutcome::Ended));
        let unknown = error.kind() == ErrorKind::OutcomeUnknown;
        // The permit is passed on at the end of this function, when the driver has the release, as in
        // `Hold::lose`.
        let _permit = if unknown { release.take_permit() } else { None };
        self.core.release_in_background(release);
    }

    /// Hands the release to the driver, which passes the permit on after its first try.
    fn release_later(&self) {
        self.core.release_in_background(PendingRelease::guard_released(
            self,
            self.claim_permit(GrantOutcome::Ended),
        ));
    }

    /// Returns the error of a release that found no hold at the store.
    fn was_not_held(&self) -> Error {
        // Reports an unanswered release, because a closing engine releases all holds, possibly before this
        // call.
        if self.core.closing.is_cancelled() {
            return self.unanswered();
        }
        self.named(Error::lost(LossReason::Gone)).with_operation(Operation::Release)
    }

    fn unanswered(&self) -> Error {
        let message = "the lock was closed, or its runtime ended, before the store answered the release";
        self.named(Error::new(ErrorKind::OutcomeUnknown, message)).with_operation(Operation::Release)
    }
}

/// A release without I/O under way. A panic of the store drops it, which hands the release to the driver.
struct ReleasePanics<'a>(&'a Hold);

impl Drop for ReleasePanics<'_> {
    fn drop(&mut self) {
        self.0.release_later();
    }
}

/// A release that a caller waits for. If dropped before the store has answered, it hands the release to the
/// driver.
struct Releasing {
    /// `None` once the reply was settled.
    hold: Option<Arc<Hold>>,
    /// Set for a hold outside of its key's own slot, until the reply was settled.
    _beside: Option<UnconfirmedAttempt>,
}

impl Releasing {
    async fn run(mut self) -> Result<(), Error> {
        let Some(hold) = &self.hold else { return Ok(()) };
        let (backend, limit) = (Arc::clone(&hold.core.backend), hold.core.timing.request_timeout);
        let (reference, handle) = (hold.reference(), hold.core.tasks.handle().clone());
        // Polls in the context of the engine's runtime, because the timer needs it and another executor may
        // poll the caller.
        let call = async move { timeout(limit, backend.release(vec![reference])).await };
        let mut closed = hold.core.closed.clone();
        let answered = tokio::select! {
            biased;
            // Ends the call here, because it must not be polled after its runtime has ended, and only the
            // driver retries.
            () = hold.core.runtime_gone.cancelled() => None,
            _ = closed.wait_for(Option::is_some) => None,
            answered = AssertUnwindSafe(TokioContext::new(call, handle)).catch_unwind() => match answered {
                Ok(answered) => Some(answered),
                // Counts as no answer, because tokio's timers panic when their runtime has gone.
                Err(_) if hold.core.runtime_gone.is_cancelled() => None,
                Err(panic) => resume_unwind(panic),
            },
        };
        let answer = match answered {
            None => Err(hold.unanswered()),
            Some(Ok(mut answers)) => answers.pop().unwrap_or_else(|| Err(missing_replies_error())),
            Some(Err(_)) => Err(Error::new(
                ErrorKind::OutcomeUnknown,
                format!(
                    "the store did not answer the release within {limit:?}; it is repeated in the background"
                ),
            )),
        };
        self.hold.take().map_or(Ok(()), |hold| hold.released(answer))
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            hold.release_later();
        }
    }
}

/// A release that the driver sends with others, once the first of them is polled or dropped.
struct BatchRelease {
    hold: Arc<Hold>,
    answer: oneshot::Receiver<Result<ReleaseReply, Error>>,
    begun: bool,
}

impl BatchRelease {
    fn begin(&mut self) {
        if !mem::replace(&mut self.begun, true) {
            self.hold.core.inbox.wakeup.notify_one();
        }
    }
}

impl Future for BatchRelease {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.begin();
        let Poll::Ready(answer) = Pin::new(&mut self.answer).poll(cx) else { return Poll::Pending };
        // Only reports the reply: the driver has settled it, and retries a failure.
        Poll::Ready(match answer {
            Ok(Ok(freed)) if freed.was_held => Ok(()),
            Ok(Ok(_)) => Err(self.hold.was_not_held()),
            Ok(Err(error)) => Err(self.hold.named(error).with_operation(Operation::Release)),
            Err(_) => Err(self.hold.unanswered()),
        })
    }
}

impl Drop for BatchRelease {
    fn drop(&mut self) {
        self.begin();
    }
}
