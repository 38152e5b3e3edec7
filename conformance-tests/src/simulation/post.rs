//! The post of a small scope: each message, the end of each hold and each drop of a call waits in it until a choice
//! lets it happen. So the choices determine the order.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::ErrorKind;
use leasehold_engine::Op;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

use super::disturbance::Disturbance as D;
use super::network::{CallFailure, LATE_COPY};

/// How late a late request or the late end of a hold is. Longer than the limit of one call.
pub(crate) const LATE: Duration = Duration::from_millis(1_500);

/// The steps of a schedule that wait for their turn.
#[derive(Debug, Default)]
pub(crate) struct Post {
    state: Mutex<PostState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct PostState {
    /// In the order in which the steps were posted.
    waiting: Vec<WaitingStep>,
    /// The number of changes so far.
    changes: u64,
    /// Whether each step happens at once, because the choices have ended.
    is_open: bool,
}

#[derive(Debug)]
struct WaitingStep {
    client: u64,
    step: Step,
    turn: oneshot::Sender<Fate>,
}

/// A step of a client that waits for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A request arrives at the store.
    Request(Op),
    /// A late request, or the second copy of a request, arrives at the store.
    Copy,
    /// A hold ends.
    End,
    /// The caller of a running call drops it.
    Call,
}

/// How a step happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Without a fault.
    Happens,
    /// The request never arrives.
    Lost,
    /// The request is carried out, but its reply never arrives.
    AnswerLost,
    /// The request arrives, or the hold ends, [`LATE`].
    Late,
    /// The request arrives twice.
    Twice,
    /// The request is answered with an error and not carried out.
    Failed,
    /// The caller drops its call, or its guard.
    Dropped,
}

/// A way in which a schedule goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The waiting step at this place.
    Step(usize, Fate),
    /// No step, so time passes until another step is posted.
    Time,
}

impl Step {
    const fn fates(self) -> &'static [Fate] {
        match self {
            Self::Request(Op::Acquire | Op::Release) => {
                &[Fate::Happens, Fate::Lost, Fate::AnswerLost, Fate::Late, Fate::Twice, Fate::Failed]
            }
            // A renewal or a wait does not arrive twice, like in the schedules from a seed.
            Self::Request(_) => &[Fate::Happens, Fate::Lost, Fate::AnswerLost, Fate::Late, Fate::Failed],
            Self::Copy => &[Fate::Happens],
            Self::End => &[Fate::Happens, Fate::Late, Fate::Dropped],
            Self::Call => &[Fate::Dropped],
        }
    }

    /// Returns whether the step comes before all others, unless it is late. A release, a renewal and their replies follow
    /// at once.
    const fn is_first(self) -> bool {
        matches!(self, Self::Request(Op::Release | Op::Renew))
    }
}

impl Fate {
    pub(crate) const fn is_fault(self) -> bool {
        !matches!(self, Self::Happens)
    }

    /// Returns the disturbance that the judge knows this fault as.
    pub(crate) const fn disturbance(self, step: Step) -> Option<D> {
        match self {
            Self::Happens => None,
            Self::Lost => Some(D::LostRequest),
            Self::AnswerLost => Some(D::LostAnswer),
            Self::Late if matches!(step, Step::End) => None,
            Self::Late => Some(D::LateRequest),
            Self::Twice => Some(D::Twice),
            Self::Failed => Some(D::Failure),
            Self::Dropped => Some(D::Cancel),
        }
    }
}

impl Post {
    /// Posts a step. Its turn comes with its fate.
    pub(crate) fn turn(&self, client: u64, step: Step) -> oneshot::Receiver<Fate> {
        let (turn, receiver) = oneshot::channel();
        let mut state = self.lock();
        if state.is_open && step != Step::Call {
            let _ = turn.send(Fate::Happens);
        } else {
            state.waiting.push(WaitingStep { client, step, turn });
        }
        drop(state);
        self.poke();
        receiver
    }

    /// Sends a request, whose reply arrives at once. Returns `None` if no reply arrives.
    pub(crate) async fn send<T, W, F>(
        self: &Arc<Self>,
        client: u64,
        op: Op,
        work: W,
    ) -> Option<Result<T, CallFailure>>
    where
        W: Fn() -> F + Send + 'static,
        F: Future<Output = T> + Send + 'static,
        T: Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let (post, turn) = (Arc::clone(self), self.turn(client, Step::Request(op)));
        tokio::spawn(async move {
            match turn.await {
                Ok(Fate::Happens | Fate::Dropped) => {
                    let _ = reply.send(Ok(work().await));
                }
                Ok(Fate::Lost) | Err(_) => {}
                Ok(Fate::AnswerLost) => drop(work().await),
                Ok(Fate::Late) => {
                    drop(reply);
                    sleep(LATE).await;
                    if post.turn(client, Step::Copy).await.is_ok() {
                        drop(work().await);
                    }
                }
                Ok(Fate::Twice) => {
                    let copy = post.turn(client, Step::Copy);
                    let _ = reply.send(Ok(work().await));
                    if copy.await.is_ok() {
                        drop(LATE_COPY.scope((), work()).await);
                    }
                }
                Ok(Fate::Failed) => {
                    let _ = reply.send(Err(CallFailure { kind: ErrorKind::OutcomeUnknown, refused: false }));
                }
            }
        });
        answer.await.ok()
    }

    /// Returns the ways in which the schedule goes on: with faults if it `may_fail`, and with a pause before other steps if
    /// it `may_pause`.
    pub(crate) fn ways(&self, may_fail: bool, may_pause: bool) -> Vec<Way> {
        let mut state = self.lock();
        state.waiting.retain(|step| !step.turn.is_closed());
        let first = state.waiting.iter().position(|waiting| waiting.step.is_first());
        let such = |at: &usize| first.is_none_or(|first| first == *at);
        let mut ways = Vec::new();
        for (at, waiting) in state.waiting.iter().enumerate().filter(|(at, _)| such(at)) {
            let fates = waiting.step.fates().iter().filter(|fate| may_fail || !fate.is_fault());
            ways.extend(fates.map(|fate| Way::Step(at, *fate)));
        }
        let must_pause = ways.iter().all(|way| matches!(way, Way::Step(_, fate) if fate.is_fault()));
        if must_pause || (may_pause && first.is_none()) {
            ways.push(Way::Time);
        }
        // Faults come last, because the first way is the choice after the last byte.
        ways.sort_by_key(|way| matches!(way, Way::Step(_, fate) if fate.is_fault()));
        ways
    }

    /// Returns the client whose step happens.
    pub(crate) fn client_of(&self, way: Way) -> Option<u64> {
        match way {
            Way::Step(at, _) => self.lock().waiting.get(at).map(|waiting| waiting.client),
            Way::Time => None,
        }
    }

    /// Makes the waiting step at this place happen. Returns the step with its client.
    pub(crate) fn carry_out(&self, at: usize, fate: Fate) -> (u64, Step) {
        let WaitingStep { client, step, turn } = self.lock().waiting.remove(at);
        let _ = turn.send(fate);
        (client, step)
    }

    /// Returns the number of changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Lets time pass until there are more changes than `seen`, or until `end`.
    pub(crate) async fn changed(&self, seen: u64, end: Instant) {
        while self.changes() == seen && timeout_at(end, self.changed.notified()).await.is_ok() {}
    }

    /// Notes a change, for example the end of a call.
    pub(crate) fn poke(&self) {
        self.lock().changes += 1;
        self.changed.notify_one();
    }

    /// Makes all waiting and later steps happen at once.
    pub(crate) fn open(&self) {
        let mut state = self.lock();
        state.is_open = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for WaitingStep { step, turn, .. } in waiting {
            if step != Step::Call {
                let _ = turn.send(Fate::Happens);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, PostState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
