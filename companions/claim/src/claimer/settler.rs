//! Writes the ends of claims. A single end is written at once, and ends that come together are written in one call.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use leasehold_api::{Error, ErrorKind, LossReason};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::backoff::Backoff;
use super::in_flight::InFlight;
use super::on_failure::OnFailure;
use super::shared::{ClaimerCore, SettleRequest, closed};
use crate::error::ClaimError;
use crate::spec::ClaimSpec;
use crate::store::{Outcome, Settled};

/// The number of concurrent calls. While all are in flight, further ends are collected for the next call.
const CALLS: usize = 2;

/// The largest number of claims in one call of the store.
const BATCH: usize = 100;

/// The pauses before a failed write of an end is retried.
const PAUSES: Backoff = Backoff::exponential(Duration::from_millis(40)).at_most(Duration::from_secs(2));

/// The pauses before a row is tried again after its end was refused, if the failure policy has no pause.
const REFUSED: Backoff = Backoff::exponential(Duration::from_secs(1));

type Answers = Result<Vec<Result<Settled, ClaimError>>, ClaimError>;

pub(crate) async fn run(shared: Arc<ClaimerCore>, inbox: mpsc::UnboundedReceiver<SettleRequest>) {
    let settler =
        Settler { shared, inbox, queue: Vec::new(), resting: Vec::new(), calls: FuturesUnordered::new() };
    settler.run().await;
}

struct Settler {
    shared: Arc<ClaimerCore>,
    inbox: mpsc::UnboundedReceiver<SettleRequest>,
    queue: Vec<PendingSettlement>,
    /// Ends whose write is retried later, with the time of the retry.
    resting: Vec<(Instant, PendingSettlement)>,
    calls: FuturesUnordered<BoxFuture<'static, (Vec<PendingSettlement>, Answers)>>,
}

struct PendingSettlement {
    settle: SettleRequest,
    /// Whether an earlier call might have written this end.
    doubtful: bool,
    /// Whether this end is sent alone, because the call with others failed.
    alone: bool,
    /// The number of pauses before retries so far.
    rests: u32,
}

impl Settler {
    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut drained = std::pin::pin!(shared.drained());
        loop {
            self.start();
            let rested = self.resting.iter().map(|(when, _)| *when).min();
            tokio::select! {
                biased;
                Some((jobs, answers)) = self.calls.next() => self.answered(jobs, answers),
                Some(settle) = self.inbox.recv() => self.gather(settle),
                () = sleep_until(rested.unwrap_or_else(Instant::now)), if rested.is_some() => self.wake(),
                () = &mut drained => return,
            }
        }
    }

    fn gather(&mut self, settle: SettleRequest) {
        let mut next = Some(settle);
        while let Some(settle) = next {
            self.queue(settle);
            next = self.inbox.try_recv().ok();
        }
    }

    fn wake(&mut self) {
        let now = Instant::now();
        let (due, resting) =
            std::mem::take(&mut self.resting).into_iter().partition(|(when, _)| *when <= now);
        self.resting = resting;
        let due: Vec<(Instant, PendingSettlement)> = due;
        self.queue.extend(due.into_iter().map(|(_, job)| job));
    }

    fn start(&mut self) {
        while self.calls.len() < CALLS && !self.queue.is_empty() {
            let jobs = self.next_batch();
            let store = Arc::clone(&self.shared.store);
            let limit = self.shared.config.call_limit();
            self.calls.push(Box::pin(async move {
                let end = |job: &PendingSettlement| {
                    (job.settle.hold.claimed.claim.clone(), job.settle.outcome.clone())
                };
                let settlements: Vec<_> = jobs.iter().map(end).collect();
                let answers = match timeout(limit, store.settle(&settlements)).await {
                    Ok(Ok(answers)) if answers.len() != jobs.len() => Err(unknown(None)),
                    Ok(answers) => answers,
                    Err(_) => Err(unknown(None)),
                };
                (jobs, answers)
            }));
        }
    }

    fn next_batch(&mut self) -> Vec<PendingSettlement> {
        let at = self.queue.iter().position(|job| job.alone);
        let many = match at {
            Some(0) => 1,
            Some(at) => at.min(BATCH),
            None => self.queue.len().min(BATCH),
        };
        self.queue.drain(..many).collect()
    }

    fn answered(&mut self, jobs: Vec<PendingSettlement>, answers: Answers) {
        match answers {
            Ok(answers) => {
                for (job, answer) in jobs.into_iter().zip(answers) {
                    self.finish(job, answer);
                }
            }
            Err(error) => self.failed(jobs, error),
        }
    }

    /// Handles a call that failed, although its ends might be written. Retries the ends until their leases end. If the
    /// error is not one to retry, sends them one by one, because a single claim might have caused it.
    fn failed(&mut self, jobs: Vec<PendingSettlement>, error: ClaimError) {
        let now = self.shared.clock.now();
        let (is_many, is_retryable) = (jobs.len() > 1, error.is_retryable());
        let error = Arc::new(error);
        for mut job in jobs {
            job.doubtful = true;
            if is_many && !is_retryable {
                job.alone = true;
                self.queue.push(job);
            } else if is_retryable && job.settle.hold.deadline() > now {
                self.rest(job);
            } else {
                self.finish(job, Err(unknown(Some(Arc::clone(&error)))));
            }
        }
    }

    fn rest(&mut self, mut job: PendingSettlement) {
        job.rests += 1;
        self.resting.push((Instant::now() + PAUSES.after(job.rests), job));
    }

    fn finish(&mut self, job: PendingSettlement, answer: Result<Settled, ClaimError>) {
        if matches!(answer, Err(ClaimError::Busy { .. }))
            && job.settle.hold.deadline() > self.shared.clock.now()
        {
            // Retries only this end, because another transaction has locked the row briefly. The other ends of the
            // batch are written.
            self.rest(job);
            return;
        }
        let PendingSettlement {
            settle: SettleRequest { hold, outcome, reply, is_instead }, doubtful, ..
        } = job;
        let is_return = matches!(outcome, Outcome::Retry { .. } | Outcome::PutBack | Outcome::Snooze(_));
        let refusal = answer.as_ref().err().filter(|error| is_refusal(error));
        let instead = refusal.and_then(|error| self.instead(&hold, &outcome, error));
        let answer =
            if doubtful { resolve(answer, &outcome, self.shared.store.spec(), &hold) } else { answer };
        match (&answer, instead) {
            (Ok(settled), _) => {
                match is_instead && is_at_once(&outcome) {
                    true => self.shared.leave(&hold),
                    false => self.shared.forget(&hold),
                }
                self.shared.release(&hold);
                self.shared.after(&outcome);
                self.shared.report_exhausted(&settled.exhausted);
            }
            (Err(ClaimError::Superseded { .. } | ClaimError::NotFound { .. }), _) => {
                if is_instead {
                    self.shared.leave(&hold);
                }
                hold.signal.fire(LossReason::Gone);
                self.shared.release(&hold);
            }
            (Err(_), Some(outcome)) => {
                self.queue(SettleRequest { hold: Arc::clone(&hold), outcome, reply: None, is_instead: true });
            }
            (Err(_), None) => {
                self.shared.leave(&hold);
                hold.signal.fire(LossReason::Expired);
                self.shared.release(&hold);
            }
        }
        match (reply, answer) {
            // Ignores a failed send, because the caller might have stopped waiting.
            (Some(reply), answer) => drop(reply.send(answer)),
            (None, Ok(_)) => {}
            // Reports no error, because the claim was only to be put back and already is.
            (None, Err(ClaimError::Superseded { .. })) if is_return => {}
            // Reports the error, because either no caller waits for it or it is the last of several refused ends.
            (None, Err(error)) => self.shared.report(&hold.named(error)),
        }
    }

    /// Returns the end that replaces a refused one. Without it, the row would wait for the end of its lease. The
    /// replacement follows the failure policy, because the work counts as tried. Further replacements omit first the
    /// message and then the pause, which might be the refused part. `None` if no simpler end exists.
    fn instead(&self, hold: &InFlight, outcome: &Outcome, refusal: &ClaimError) -> Option<Outcome> {
        let (policy, spec) = (self.shared.config.on_failure, self.shared.store.spec());
        let retry = |error: Option<String>| {
            let after = match policy {
                Some(OnFailure::Retry(backoff)) => backoff.after(hold.tries(spec)),
                _ if spec.inner.ready_at.is_some() => REFUSED.after(hold.tries(spec)),
                _ => Duration::ZERO,
            };
            Outcome::Retry { error, after }
        };
        match outcome {
            Outcome::Done | Outcome::To(_) => Some(match policy {
                Some(OnFailure::Fail) => Outcome::Failed(refusal.to_string()),
                _ => retry(Some(refusal.to_string())),
            }),
            Outcome::Failed(message) if !message.is_empty() && !is_lacking(refusal) => {
                Some(Outcome::Failed(String::new()))
            }
            Outcome::Failed(_) => Some(retry(Some(refusal.to_string()))),
            Outcome::Retry { error: Some(_), after } if !is_lacking(refusal) => {
                Some(Outcome::Retry { error: None, after: *after })
            }
            Outcome::Retry { error, after } if !after.is_zero() => {
                Some(Outcome::Retry { error: error.clone(), after: Duration::ZERO })
            }
            Outcome::Snooze(pause) if !pause.is_zero() => Some(Outcome::PutBack),
            Outcome::Retry { .. } | Outcome::Snooze(_) | Outcome::PutBack => None,
        }
    }

    fn queue(&mut self, settle: SettleRequest) {
        self.queue.push(PendingSettlement { settle, doubtful: false, alone: false, rests: 0 });
    }
}

impl Drop for Settler {
    fn drop(&mut self) {
        // The runtime has ended. Dropped replies report calls in flight.
        self.inbox.close();
        let jobs = std::mem::take(&mut self.queue).into_iter();
        for job in jobs.chain(std::mem::take(&mut self.resting).into_iter().map(|(_, job)| job)) {
            self.shared.release(&job.settle.hold);
            if let Some(reply) = job.settle.reply {
                let _ = reply.send(Err(closed()));
            }
        }
    }
}

/// Interprets the reply to a call that was repeated. If the row is in the intended state with an unchanged epoch, no
/// other worker has had it, so an earlier call was carried out. That counts as success.
fn resolve(
    answer: Result<Settled, ClaimError>,
    outcome: &Outcome,
    spec: &ClaimSpec,
    hold: &InFlight,
) -> Result<Settled, ClaimError> {
    let Err(ClaimError::Superseded { row, epoch, current_epoch, state }) = answer else { return answer };
    let states = spec.states();
    let is_meant = state.as_ref().is_some_and(|state| match outcome {
        Outcome::Done => *state == states.done,
        Outcome::Failed(_) => Some(state) == states.failed.as_ref(),
        Outcome::To(to) => state == to,
        Outcome::Retry { .. } => states.takeable.contains(state) || Some(state) == states.exhausted.as_ref(),
        Outcome::PutBack | Outcome::Snooze(_) => states.takeable.contains(state),
    });
    let claimed = hold.claimed.claim.rows.iter().find(|(key, _)| *key == row).map(|(_, epoch)| *epoch);
    if is_meant && current_epoch.is_some() && current_epoch == claimed {
        return Ok(Settled { exhausted: Vec::new() });
    }
    if current_epoch.is_none() {
        // The outcome is unknown, because settling can delete the row, or the row has no epoch to compare.
        return Err(unknown(Some(Arc::new(ClaimError::Superseded { row, epoch, current_epoch, state }))));
    }
    Err(ClaimError::Superseded { row, epoch, current_epoch, state })
}

/// Returns whether other workers can take the row at once after this end.
fn is_at_once(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Retry { after: pause, .. } | Outcome::Snooze(pause) => pause.is_zero(),
        Outcome::PutBack => true,
        _ => false,
    }
}

/// Returns whether the end was refused because the spec lacks a state or a column. Then a shorter message does not
/// help.
fn is_lacking(refusal: &ClaimError) -> bool {
    matches!(refusal, ClaimError::Unsupported(_))
}

/// Returns whether the store has refused the end, so nothing was written.
fn is_refusal(error: &ClaimError) -> bool {
    !matches!(error, ClaimError::Store(_) | ClaimError::Busy { .. })
}

fn unknown(source: Option<Arc<ClaimError>>) -> ClaimError {
    let message = "the store did not confirm the end of the claim; check its row";
    let error = Error::new(ErrorKind::OutcomeUnknown, message);
    match source {
        Some(source) => error.with_source(source).into(),
        None => error.into(),
    }
}
