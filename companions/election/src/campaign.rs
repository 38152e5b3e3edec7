//! The campaign: waits to be elected, runs the terms, and goes on after each failure.

use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold_api::{Error, Lock, LockGuard, LockKey, LossReason, Lost, Validity};
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until};

use crate::campaigns::Entry;
use crate::election::{Election, OnLoss};
use crate::exit::exit_on_loss;
use crate::pauses::{Pauses, after};
use crate::state::{Failure, Shared, State};
use crate::term::{Next, Term, TermResult};

/// A term that ends within this time counts as a failed start.
const SHORT: Duration = Duration::from_secs(1);

/// A campaign under way.
pub(crate) struct Campaign<'a, P> {
    election: &'a Election<P>,
    key: LockKey,
    /// Receives the requests to step down.
    resigned: Receiver<Duration>,
    outages: Pauses,
    starts: Pauses,
    /// The time of the next attempt.
    not_before: Instant,
    /// Whether a body has ended the campaign.
    is_done: bool,
    /// Ends the campaign when it is dropped.
    _entry: Entry,
}

/// An election that was won. If dropped, it changes the state before it releases the key, because its fields are
/// dropped in order.
pub(crate) struct Seat {
    leaving: Leaving,
    pub(crate) term: Term,
    /// The time of the election.
    begun: Instant,
}

/// How the body of a term ended.
pub(crate) enum End {
    Body(TermResult),
    Lost(LossReason),
    Resigned,
}

impl Seat {
    /// Runs the body of a term to its end, or until it has to be dropped.
    pub(crate) async fn run(
        &self,
        on_loss: OnLoss,
        rest_if_asked: Option<Duration>,
        work: impl Future<Output = TermResult>,
    ) -> End {
        let term = &self.term;
        let _watch: Option<mpsc::Sender<()>> = match on_loss {
            OnLoss::Exit(code) => match exit_on_loss(term.guard.handle(), code) {
                Ok(watch) => Some(watch),
                Err(error) => return End::Body(Err(error.into())),
            },
            OnLoss::Drop | OnLoss::Tell => None,
        };
        let follow = term.shared.follow(term.guard.handle());
        let asked = async {
            if let Some(pause) = rest_if_asked {
                term.guard.asked().await;
                term.step_down(pause);
            }
        };
        let mut follow = pin!(async { tokio::join!(follow, asked) });
        let (mut lost, mut resigned) = (term.guard.lost(), term.resigned.clone());
        let mut resigned = pin!(resigned.changed());
        let mut work = pin!(work);
        let mut is_followed = false;
        poll_fn(|cx| {
            is_followed = is_followed || follow.as_mut().poll(cx).is_ready();
            if on_loss == OnLoss::Drop {
                // Checked before each poll, so the body takes no step if the term was lost while the whole process
                // was stopped.
                if let Some(reason) = loss(&term.guard, &mut lost, cx) {
                    return Poll::Ready(End::Lost(reason));
                }
                if resigned.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(End::Resigned);
                }
            }
            work.as_mut().poll(cx).map(End::Body)
        })
        .await
    }
}

impl<'a, P: Deref<Target: Lock>> Campaign<'a, P> {
    pub(crate) fn start(election: &'a Election<P>) -> Result<Self, Error> {
        let key = election.key.clone()?;
        Ok(Self {
            _entry: Entry::new(&*election.lock, &key, &election.shared)?,
            election,
            key,
            resigned: election.shared.resigned(),
            outages: Pauses::new(Duration::from_millis(100), Duration::from_secs(10)),
            starts: Pauses::new(Duration::from_secs(1), Duration::from_secs(60)),
            not_before: Instant::now(),
            is_done: false,
        })
    }

    /// Waits until this candidate is elected. Returns `None` if the campaign is over.
    ///
    /// # Errors
    ///
    /// A failure that no retry can help.
    pub(crate) async fn elected(&mut self) -> Result<Option<Seat>, Error> {
        let shared = &self.election.shared;
        while !self.is_done {
            self.rest().await;
            shared.set(State::Candidate);
            let granted = tokio::select! {
                biased;
                _ = self.resigned.changed() => {
                    self.not_before = after(*self.resigned.borrow());
                    shared.set(State::Resting { until: self.not_before.into_std() });
                    continue;
                }
                granted = self.election.lock.acquire(&self.key, &self.election.options) => granted,
            };
            match granted {
                Ok(guard) => {
                    self.outages.reset();
                    shared.leads(guard.handle());
                    let leaving = Leaving { shared: Arc::clone(shared), state: State::Idle };
                    let term = Term { guard, shared: Arc::clone(shared), resigned: self.resigned.clone() };
                    return Ok(Some(Seat { leaving, term, begun: Instant::now() }));
                }
                Err(error) if !error.kind().can_recover() => return Err(error),
                Err(error) => {
                    tracing::warn!(key = %self.key, %error, "the campaign failed and is retried");
                    self.not_before = after(self.outages.next());
                    let next_try = self.not_before.into_std();
                    shared.set(State::Failed { error: Failure::Lock(error), next_try });
                }
            }
        }
        Ok(None)
    }

    /// Waits for the time of the next attempt. A request to step down extends the wait.
    async fn rest(&mut self) {
        loop {
            tokio::select! {
                biased;
                _ = self.resigned.changed() => {
                    self.not_before = self.not_before.max(after(*self.resigned.borrow()));
                    self.election.shared.set(State::Resting { until: self.not_before.into_std() });
                }
                () = sleep_until(self.not_before) => return,
            }
        }
    }

    /// Changes the state and releases the key, in this order.
    ///
    /// # Errors
    ///
    /// The error of the release, if the campaign is over.
    pub(crate) async fn leave(&mut self, seat: Seat, end: End) -> Result<(), Error> {
        let Seat { mut leaving, term: Term { guard, .. }, begun } = seat;
        let was_short = begun.elapsed() < SHORT;
        if !was_short {
            self.starts.reset();
        }
        let has_resigned = self.resigned.has_changed().unwrap_or(false);
        let rest = has_resigned.then(|| *self.resigned.borrow_and_update());
        let (failure, pauses) = match end {
            End::Body(Ok(Next::Done)) => {
                self.is_done = true;
                drop(leaving);
                return guard.release().await;
            }
            End::Body(Ok(Next::Again)) => (None, was_short && !has_resigned),
            End::Body(Err(error)) => (Some(Failure::Body(Arc::from(error))), true),
            End::Lost(reason) => (Some(Failure::Lock(Error::lost(reason).with_key(&self.key))), was_short),
            End::Resigned => (None, false),
        };
        let pause = if pauses { self.starts.next() } else { Duration::ZERO };
        self.not_before = after(pause.max(rest.unwrap_or_default()));
        let until = self.not_before.into_std();
        leaving.state = match failure {
            Some(error) => {
                tracing::warn!(key = %self.key, %error, "the term failed");
                State::Failed { error, next_try: until }
            }
            None if pauses || has_resigned => State::Resting { until },
            None => State::Candidate,
        };
        drop(leaving);
        if let Err(error) = guard.release().await {
            // Shown as a loss before, or retried by the lock in the background.
            tracing::debug!(key = %self.key, %error, "the release of the term is not confirmed");
        }
        Ok(())
    }
}

/// Sets the state when it is dropped.
struct Leaving {
    shared: Arc<Shared>,
    state: State,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.shared.set(self.state.clone());
    }
}

fn loss(guard: &LockGuard, lost: &mut Lost, cx: &mut Context<'_>) -> Option<LossReason> {
    match Pin::new(&mut *lost).poll(cx) {
        Poll::Ready(reason) => Some(reason),
        Poll::Pending if guard.validity() == Validity::Lost => {
            Some(lost.reason().unwrap_or(LossReason::Expired))
        }
        Poll::Pending => None,
    }
}
