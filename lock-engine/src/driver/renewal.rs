//! Renewals and confirmations: which holds are batched in one call, and how the answers change them.

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind, HolderId};
use tokio::time::timeout;

use crate::clock::{Moment, scaled};
use crate::core::Core;
use crate::driver::MAX_PARTS;
use crate::driver::inbox::RenewReply;
use crate::hold::Hold;
use crate::hold::lease_clock::LeaseClock;
use crate::metrics::Event;
use crate::store::backend::{Backend, HoldRef, Renewed};
use crate::store::missing_replies_error;

/// The calls that are due now.
pub(crate) struct Due {
    /// The renewals of each call.
    pub(crate) renewals: Vec<Vec<Renewal>>,
    /// The holds to check, without renewal, in each call (a look).
    pub(crate) looks: Vec<Vec<Arc<Hold>>>,
}

/// One hold in a renewal.
pub(crate) struct Renewal {
    hold: Arc<Hold>,
    /// The new TTL, or the time until an unconfirmed hold counts as lost.
    window: Duration,
    replies: Vec<RenewReply>,
    /// Whether the call also marks the hold as given out. Such a hold has a call for itself.
    gives_out: bool,
}

/// One call of [`Backend::renew`]: when it was sent, its renewals, and its answers (`None` if it timed out or
/// panicked).
pub(crate) struct RenewalCall {
    sent: Moment,
    renewals: Vec<Renewal>,
    answers: Option<Vec<Result<Renewed, Error>>>,
}

/// Renewals that wait until another renewal of the same hold has ended.
#[derive(Default)]
pub(crate) struct QueuedRenewals(HashMap<HolderId, VecDeque<RenewalRequest>>);

/// One renewal of a hold, and the callers that wait for it.
pub(crate) struct RenewalRequest {
    hold: Arc<Hold>,
    ttl: Option<Duration>,
    replies: Vec<RenewReply>,
    gives_out: bool,
}

/// Holds whose windows (TTLs) differ by a larger factor are renewed or checked in separate calls. The shortest window
/// limits a call, so one short lease would shorten the limit of a thousand long ones.
const SAME_CALL: u32 = 4;

impl Core {
    /// Ends the due holds whose time has passed, and returns the calls to make for the others.
    pub(crate) fn due(&self) -> Due {
        let now = self.clock.now();
        // Includes holds that are due soon, to batch them in the same call.
        let ahead = |hold: &Hold| match &hold.lease {
            Some(lease) if lease.is_renewed() && lease.is_renewed_by(now) => lease.interval() / 2,
            Some(lease) => lease.look_every().unwrap_or_default() / 2,
            None => Duration::ZERO,
        };
        let holds = self.schedule.take_due(now, ahead);
        let renews = |hold: &Arc<Hold>| hold.lease.as_ref().is_some_and(|lease| lease.is_renewed_by(now));
        let any_renewal = holds.iter().any(renews);
        let (mut renewals, mut looks) = (Vec::new(), Vec::new());
        for hold in holds {
            let Some(lease) = &hold.lease else { continue };
            hold.end_if_over();
            // Schedules only the hold's end, because a renewal is under way or the hold needs none. The
            // schedule ignores a hold that has ended.
            if hold.phase.is_renewing() || !lease.is_renewed() {
                self.schedule.schedule(&hold, lease.end());
            } else if hold.is_live() {
                let by = if any_renewal { now.after(lease.interval() / 2) } else { now };
                if lease.is_renewed_by(by) {
                    let window = lease.window();
                    renewals.push(Renewal { window, hold, replies: Vec::new(), gives_out: false });
                } else {
                    looks.push(hold);
                }
            }
        }
        let renewals = by_window(renewals, |renewal| renewal.window);
        let window = |hold: &Arc<Hold>| hold.lease.as_ref().map_or(Duration::MAX, |lease| lease.window());
        Due {
            renewals: renewals.into_iter().flat_map(split_unanswered).collect(),
            looks: by_window(looks, window),
        }
    }

    /// Schedules `hold` for the time of its next renewal, look or end.
    pub(crate) fn plan(&self, hold: &Arc<Hold>, lease: &LeaseClock) {
        self.schedule.schedule(hold, lease.next());
    }

    /// Returns the renewal that a caller requested, or queues it behind the one under way.
    pub(crate) fn request_renewal(
        &self,
        request: RenewalRequest,
        waiting: &mut QueuedRenewals,
    ) -> Option<Vec<Renewal>> {
        let RenewalRequest { hold, ttl, mut replies, gives_out } = request;
        // Skips the renewal if no caller waits, or if the hold has ended.
        replies.retain(|reply| !reply.is_closed());
        let lease = hold.lease.as_ref().filter(|_| !replies.is_empty() && hold.is_live())?;
        if hold.phase.is_renewing() {
            waiting.add(RenewalRequest { hold, ttl, replies, gives_out });
            return None;
        }
        let window = match ttl {
            // Decided here, because an earlier renewal of another reader has ended now.
            Some(ttl) if hold.is_carrier() => ttl.max(lease.window()),
            Some(ttl) => ttl,
            None => lease.window(),
        };
        Some(vec![Renewal { hold, window, replies, gives_out }])
    }

    /// Makes one call for all `renewals` whose holds are still live. A hold is in at most one call at a time. `None` if
    /// there is nothing to renew.
    pub(crate) fn renew(
        &self,
        mut renewals: Vec<Renewal>,
    ) -> Option<impl Future<Output = RenewalCall> + Send + 'static + use<>> {
        // A hold that has ended possibly has passed to another caller, which would not know of this renewal.
        renewals.retain(|renewal| renewal.hold.phase.begin_renewal());
        if renewals.is_empty() {
            return None;
        }
        let mut limit = self.timing.request_timeout;
        let mut holds = Vec::with_capacity(renewals.len());
        let gives_out = renewals.iter().any(|renewal| renewal.gives_out);
        let sent = self.clock.now();
        for Renewal { hold, window, .. } in &renewals {
            let mut reference = hold.reference();
            reference.ttl = reference.ttl.map(|_| *window);
            holds.push(reference);
            if let Some(lease) = &hold.lease {
                lease.mark_sent();
                lease.note_sent(sent, *window);
                // Limits the call, to leave time for another try before the lease ends, and then for one more
                // in a smaller call.
                limit = limit.min(*window / if lease.was_unanswered() { 8 } else { 3 });
                self.schedule.schedule(hold, lease.end());
            }
        }
        holds.iter_mut().for_each(|hold| hold.limit = limit);
        let backend = Arc::clone(&self.backend);
        Some(async move {
            // Catches panics, also those before the first await: a panic counts as no answer.
            let call = async { timeout(limit, renew_or_give_out(backend, holds, gives_out)).await };
            let answers = AssertUnwindSafe(call).catch_unwind().await.ok().and_then(Result::ok);
            RenewalCall { sent, renewals, answers }
        })
    }

    /// Settles the answers of a renewal.
    pub(crate) fn settle_renewals(&self, done: RenewalCall) {
        let RenewalCall { sent, renewals, answers } = done;
        // If the store answered, each hold is batched with all others again. If not, the next calls are
        // smaller.
        let batch = if answers.is_some() { usize::MAX } else { renewals.len().div_ceil(MAX_PARTS) };
        let mut answers = answers.map(Vec::into_iter);
        // All holds get the same jitter, which keeps them together in the next call.
        let jitter = 1.0 - fastrand::f64() / 10.0;
        for Renewal { hold, window, replies, .. } in renewals {
            let answer = match &mut answers {
                Some(answers) => answers.next().unwrap_or_else(|| Err(missing_replies_error())),
                None => Err(Error::new(
                    ErrorKind::OutcomeUnknown,
                    "the store did not answer the renewal in time; it is repeated while the lease lasts",
                )),
            };
            let Some(lease) = &hold.lease else { continue };
            lease.batch.store(batch, Ordering::Relaxed);
            let outcome = self.settle_renewal(&hold, lease, (sent, window), jitter, answer);
            // After the times are set, because the hold can pass to another caller afterwards.
            hold.phase.end_renewal();
            for reply in replies {
                let _ = reply.send(outcome.clone());
            }
        }
    }

    fn settle_renewal(
        &self,
        hold: &Arc<Hold>,
        lease: &LeaseClock,
        (sent, window): (Moment, Duration),
        jitter: f64,
        answer: Result<Renewed, Error>,
    ) -> Result<Moment, Error> {
        let now = self.clock.now();
        let from = if let Ok(Renewed::ExtendedFrom(from)) = answer { from.min(now) } else { sent };
        match answer {
            Ok(Renewed::Extended | Renewed::ExtendedFrom(_)) if now < lease.end() => {
                self.metrics.count(Event::Renewed);
                let left = lease.deadline().since(now);
                let share = || left.as_secs_f64() / lease.window().as_secs_f64().max(f64::MIN_POSITIVE);
                self.metrics.facade.margin(hold, share);
                lease.confirmed(from, window);
                // Pauses after an answer that is older than its request, because the next answer can be the same.
                let soonest = if from < sent { now.after(lease.interval() / 8) } else { now };
                lease.renew_at(from.after(scaled(lease.interval(), jitter)).max(soonest), soonest);
                self.plan(hold, lease);
            }
            // The renewal came too late: the hold had ended here, which is final.
            Ok(Renewed::Extended | Renewed::ExtendedFrom(_)) => hold.end_if_over(),
            Ok(Renewed::Gone(reason)) => hold.gone(reason),
            Err(error) => {
                self.metrics.count(Event::Failure);
                tracing::debug!(key = %hold.key(), store = %self.name, %error, "renewal failed; it is repeated while the hold lasts");
                lease.renewal_outcome_unknown(sent, window);
                // Retries soon enough for a shorter lease that the store possibly started. After a call
                // without any answer the pause is shorter, because the call itself took time.
                let share = if lease.was_unanswered() { 64 } else { 8 };
                let pause = (lease.interval().min(window / 3) / share).max(Duration::from_millis(1));
                lease.renew_at(now.after(pause), now.after(pause));
                self.plan(hold, lease);
                return Err(error);
            }
        }
        hold.loss_reason().map_or(Ok(from), |reason| Err(Error::lost(reason)))
    }
}

impl RenewalCall {
    /// Returns the holder ids of the call.
    pub(crate) fn holders(&self) -> Vec<HolderId> {
        self.renewals.iter().map(|renewal| renewal.hold.id()).collect()
    }
}

impl QueuedRenewals {
    fn add(&mut self, mut request: RenewalRequest) {
        let waiting = self.0.entry(request.hold.id()).or_default();
        // Merges requests without a TTL into one renewal.
        match waiting.back_mut().filter(|last| last.ttl.is_none() && request.ttl.is_none()) {
            Some(last) => last.replies.append(&mut request.replies),
            None => waiting.push_back(request),
        }
    }

    /// Removes and returns the requests that waited for a renewal of that hold.
    pub(crate) fn take(&mut self, holder: HolderId) -> VecDeque<RenewalRequest> {
        self.0.remove(&holder).unwrap_or_default()
    }
}

impl RenewalRequest {
    pub(crate) fn new(hold: Arc<Hold>, ttl: Option<Duration>, gives_out: bool, reply: RenewReply) -> Self {
        Self { hold, ttl, gives_out, replies: vec![reply] }
    }
}

/// Makes the call of the store for `holds`, which are one hold if it is given out.
async fn renew_or_give_out(
    backend: Arc<dyn Backend>,
    holds: Vec<HoldRef>,
    gives_out: bool,
) -> Vec<Result<Renewed, Error>> {
    if !gives_out {
        return backend.renew(holds).await;
    }
    let mut answers = Vec::with_capacity(holds.len());
    for hold in holds {
        answers.push(backend.give_out(hold).await);
    }
    answers
}

/// Splits renewals or looks into calls. The windows (TTLs) of one call have about the same length.
fn by_window<T>(mut due: Vec<T>, window: impl Fn(&T) -> Duration) -> Vec<Vec<T>> {
    due.sort_by_cached_key(&window);
    let mut calls: Vec<Vec<T>> = Vec::new();
    for one in due {
        match calls.last_mut() {
            Some(call) if window(&one) <= window(&call[0]).saturating_mul(SAME_CALL) => call.push(one),
            _ => calls.push(vec![one]),
        }
    }
    calls
}

/// Moves the holds whose last call got no answer into separate calls, at most [`MAX_PARTS`].
fn split_unanswered(call: Vec<Renewal>) -> Vec<Vec<Renewal>> {
    let (mut unanswered, answered): (Vec<_>, Vec<_>) =
        call.into_iter().partition(|renewal| renewal.hold.lease.as_ref().is_some_and(|l| l.was_unanswered()));
    let leases = unanswered.iter().filter_map(|renewal| renewal.hold.lease.as_ref());
    let smallest = leases.map(|lease| lease.batch.load(Ordering::Relaxed)).min().unwrap_or(1);
    let most = smallest.max(unanswered.len().div_ceil(MAX_PARTS));
    let mut calls = vec![answered];
    while !unanswered.is_empty() {
        calls.push(unanswered.split_off(unanswered.len().saturating_sub(most)));
    }
    calls.retain(|call| !call.is_empty());
    calls
}
