//! Looks: checks that the store still has a hold, without extending it. Looks run periodically, because this
//! machine could have been stopped together with its clocks, and when a holder wants a confirmation.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind, Operation};
use tokio::time::timeout;

use crate::clock::Moment;
use crate::core::Core;
use crate::hold::Hold;
use crate::hold::lease_clock::LeaseClock;
use crate::store::backend::{Backend, HoldRef, Renewed};
use crate::store::missing_replies_error;

/// One call of [`Backend::look`]: when it was sent, for which holds, and its answers (`None` if it timed out
/// or panicked).
pub(crate) struct LookCall {
    sent: Moment,
    holds: Vec<Arc<Hold>>,
    answers: Option<Vec<Result<Renewed, Error>>>,
}

impl Core {
    /// Makes one call for all `holds`, sent when the future is polled.
    pub(crate) fn look(
        &self,
        holds: Vec<Arc<Hold>>,
    ) -> impl Future<Output = LookCall> + Send + 'static + use<> {
        let (backend, clock) = (Arc::clone(&self.backend), Arc::clone(&self.clock));
        // A reply after the end of a short lease would be of no use.
        let windows = holds.iter().filter_map(|hold| hold.lease.as_ref()).map(|lease| lease.window());
        let limit = windows.fold(self.timing.request_timeout, Duration::min);
        async move {
            let sent = clock.now();
            let reference = |hold: &Arc<Hold>| HoldRef { limit, ..hold.reference() };
            let references = holds.iter().map(reference).collect();
            let call = async { timeout(limit, Arc::<dyn Backend>::clone(&backend).look(references)).await };
            let answers = AssertUnwindSafe(call).catch_unwind().await.ok().and_then(Result::ok);
            LookCall { sent, holds, answers }
        }
    }

    /// Makes a [`look`](Self::look) for the driver, and schedules the next one.
    pub(crate) fn periodic_look(
        &self,
        holds: Vec<Arc<Hold>>,
    ) -> impl Future<Output = LookCall> + Send + 'static + use<> {
        for hold in &holds {
            if let Some(lease) = &hold.lease {
                // The time of the next look if this one gets no answer.
                let again = lease.look_every().map_or(Moment::NEVER, |every| self.clock.now().after(every));
                lease.look_at(again);
                self.plan(hold, lease);
            }
        }
        self.look(holds)
    }

    /// Settles the answers of a look.
    pub(crate) fn settle_looks(&self, done: LookCall) {
        for (hold, _) in settled(done) {
            if let Some(lease) = &hold.lease {
                self.plan(&hold, lease);
            }
        }
    }

    /// Puts all leases in doubt and schedules a check of each at the store, because the clock of this machine
    /// seems to have lost the time `lost`.
    pub(crate) fn distrust(&self, now: Moment, lost: Duration) {
        let (mut holds, mut batons) = (Vec::new(), Vec::new());
        self.queues.for_each_with_baton(|owner, baton| {
            // Takes the holds that no caller has picked up, because they are in doubt.
            batons.extend(baton.take());
            let hold = owner.hold.stored_hold();
            // Under the lock, and also for a hold that is about to pass to the next caller, which takes over its times.
            let is_stored = hold.is_live() || hold.place().is_some();
            let distrust = |lease: &LeaseClock| lease.distrust(now, lost, hold.phase.is_renewing());
            if is_stored && hold.lease.as_deref().is_some_and(distrust) {
                holds.push(Arc::clone(hold));
            }
        });
        drop(batons);
        for hold in holds.iter().filter(|hold| hold.is_live()) {
            if let Some(lease) = &hold.lease {
                tracing::debug!(key = %hold.key(), store = %self.name, ?lost, "the wall clock is ahead; in doubt until the store confirms");
                self.plan(hold, lease);
            }
        }
    }
}

/// Applies the answers to the holds. Returns for each hold the time for which its answer is true.
fn settled(done: LookCall) -> impl Iterator<Item = (Arc<Hold>, Result<Moment, Error>)> {
    let LookCall { sent, holds, answers } = done;
    let mut answers = answers.map(Vec::into_iter);
    holds.into_iter().map(move |hold| {
        let answer = match &mut answers {
            Some(answers) => answers.next().unwrap_or_else(|| Err(missing_replies_error())),
            None => Err(Error::new(
                ErrorKind::Unavailable,
                "the store did not answer whether the lock is still held; do not take it for held",
            )),
        };
        let answer = answer.map(|renewed| match renewed {
            Renewed::Extended => heard(&hold, sent, sent),
            Renewed::ExtendedFrom(from) => heard(&hold, from.min(sent), sent),
            Renewed::Gone(reason) => {
                hold.gone(reason);
                sent
            }
        });
        (hold, answer)
    })
}

/// Notes that the store had `hold` at `from`, by the answer to a look sent at `sent`. Returns `from`.
fn heard(hold: &Hold, from: Moment, sent: Moment) -> Moment {
    if let Some(lease) = &hold.lease {
        lease.heard(from, sent);
    }
    from
}

impl Hold {
    /// Confirms that the store still has the hold, by a request sent after the call.
    pub(crate) async fn confirm_now(self: Arc<Self>) -> Result<(), Error> {
        let named = |error: Error| self.named(error).with_operation(Operation::Confirm);
        let ended = || named(self.loss_reason().map_or_else(Error::closed, Error::lost));
        self.current_validity();
        if !self.is_live() {
            return Err(ended());
        }
        let called = self.core.clock.now();
        // Asks twice, because the first answer can be the one to an earlier request.
        for _ in 0..2 {
            let from = self.ask_now().await.map_err(named)?;
            // Checks the clock again, because an answer that came after the hold had ended here changes nothing.
            self.current_validity();
            if !self.is_live() {
                return Err(ended());
            }
            if from >= called {
                return Ok(());
            }
        }
        let message = "the store answered from an earlier request, so it is not known whether the lock is still held; do not take it for held, and call again";
        Err(named(Error::new(ErrorKind::Unavailable, message)))
    }

    /// Asks the store whether it still has the hold. Returns the time for which the answer is true.
    async fn ask_now(self: &Arc<Self>) -> Result<Moment, Error> {
        let has_lease = self.lease.as_ref().is_some_and(|lease| lease.ttl().is_some());
        if has_lease && self.core.timing.look.is_none() {
            // Renews through the driver, because the driver keeps the renewals of one hold in order, and an
            // older renewal must not shorten the lease.
            return Arc::clone(self).renew_now(None, Operation::Renew).await;
        }
        // Looks in a separate task, because some stores answer a look by a renewal, which must not be
        // dropped half-way.
        let looks = self.core.tasks.spawn(self.core.look(vec![Arc::clone(self)]));
        let lost = self.phase.watch();
        let ended = || self.loss_reason().map_or_else(Error::closed, Error::lost);
        tokio::select! {
            biased;
            looks = looks => {
                let looks = looks.map_err(|_| ended())?;
                settled(looks).next().map_or_else(|| Err(missing_replies_error()), |(_, answer)| answer)
            }
            reason = lost => Err(Error::lost(reason)),
        }
    }
}
