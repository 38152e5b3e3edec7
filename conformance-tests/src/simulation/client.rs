//! The scheduler and the clock of a simulated client.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use fastrand::Rng;
use leasehold_engine::{Clock, Moment, Turns};
use tokio::time::Instant;

/// The scheduler of the tasks of one client. It pauses all of them together, and can change the order of
/// ready tasks.
#[derive(Debug)]
pub(crate) struct ClientTurns(Mutex<TurnState>);

#[derive(Debug)]
struct TurnState {
    dice: Rng,
    /// Whether ready tasks sometimes yield to other tasks.
    shuffles: bool,
    paused_at: Option<Instant>,
    /// Whether the client's clocks stop during the pause, as in a stopped virtual machine.
    is_stopped: bool,
    /// The total time of all past pauses with stopped clocks. `went_on` is the end of the last one.
    stopped: Duration,
    went_on: Option<Instant>,
    /// The end of the last pause, with clocks stopped or not.
    resumed: Option<Instant>,
    /// The total time of all past pauses.
    stood_still: Duration,
    dead: bool,
    parked: Vec<Waker>,
}

impl ClientTurns {
    pub(crate) fn new(seed: u64, shuffles: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(TurnState {
            dice: Rng::with_seed(seed),
            shuffles,
            paused_at: None,
            is_stopped: false,
            stopped: Duration::ZERO,
            went_on: None,
            resumed: None,
            stood_still: Duration::ZERO,
            dead: false,
            parked: Vec::new(),
        })))
    }

    pub(crate) fn pause(&self) {
        self.lock().paused_at.get_or_insert_with(Instant::now);
    }

    /// Pauses the client and its clocks. Does nothing if the client is already paused.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        if state.paused_at.is_none() {
            (state.paused_at, state.is_stopped) = (Some(Instant::now()), true);
        }
    }

    /// Returns the total time for which the clocks have stood still, including a current stop.
    fn stopped(&self) -> Duration {
        let state = self.lock();
        let now = state.paused_at.filter(|_| state.is_stopped).map_or(Duration::ZERO, |at| at.elapsed());
        state.stopped + now
    }

    /// Returns when the client last continued after its clocks had stood still.
    pub(crate) fn went_on(&self) -> Option<Instant> {
        self.lock().went_on
    }

    /// Returns when the client last continued after a pause.
    pub(crate) fn resumed(&self) -> Option<Instant> {
        self.lock().resumed
    }

    pub(crate) fn resume(&self) {
        let mut state = self.lock();
        if let Some(at) = state.paused_at.take() {
            state.stood_still += at.elapsed();
            state.resumed = Some(Instant::now());
            if std::mem::take(&mut state.is_stopped) {
                state.stopped += at.elapsed();
                state.went_on = Some(Instant::now());
            }
        }
        let mut parked = std::mem::take(&mut state.parked);
        state.dice.shuffle(&mut parked);
        drop(state);
        parked.into_iter().for_each(Waker::wake);
    }

    /// Prevents all further progress of the client's tasks.
    pub(crate) fn die(&self) {
        self.lock().dead = true;
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.lock().paused_at.is_some()
    }

    /// Returns the total time of all pauses, including a current one.
    pub(crate) fn stood_still(&self) -> Duration {
        let state = self.lock();
        state.stood_still + state.paused_at.map_or(Duration::ZERO, |at| at.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turns for ClientTurns {
    fn poll_turn(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if state.dead {
            return Poll::Pending;
        }
        if state.paused_at.is_some() {
            state.parked.push(cx.waker().clone());
            return Poll::Pending;
        }
        if state.shuffles && state.dice.u8(..4) == 0 {
            drop(state);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    }
}

/// A task of the client outside of its engine. It pauses with the client.
pub(crate) struct InTurn<F> {
    turns: Arc<ClientTurns>,
    task: Pin<Box<F>>,
}

impl<F> InTurn<F> {
    pub(crate) fn new(turns: &Arc<ClientTurns>, task: F) -> Self {
        Self { turns: Arc::clone(turns), task: Box::pin(task) }
    }
}

impl<F: Future> Future for InTurn<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        ready!(self.turns.poll_turn(cx));
        self.task.as_mut().poll(cx)
    }
}

/// The greatest deviation of a client's clock rate. It is below the tenth of the TTL that the engine keeps as
/// a margin.
pub(crate) const DRIFT: f64 = 0.09;

/// A client's clock with a separate offset and rate. It continues while the client is paused, but not while
/// the client is stopped.
#[derive(Debug)]
pub(crate) struct ClientClock {
    turns: Arc<ClientTurns>,
    origin: Instant,
    offset: u64,
    rate: f64,
}

impl ClientClock {
    pub(crate) fn draw(dice: &mut Rng, drifts: bool, turns: &Arc<ClientTurns>) -> Arc<Self> {
        let offset = dice.u64(..1 << 50);
        let off = [-1.0, 1.0, dice.f64() * 2.0 - 1.0, 0.0][dice.usize(..4)];
        let rate = if drifts { 1.0 + DRIFT * off } else { 1.0 };
        Arc::new(Self { turns: Arc::clone(turns), origin: Instant::now(), offset, rate })
    }
}

impl Clock for ClientClock {
    fn now(&self) -> Moment {
        let elapsed = self.origin.elapsed().saturating_sub(self.turns.stopped()).mul_f64(self.rate);
        Moment::from_nanos(self.offset + u64::try_from(elapsed.as_nanos()).unwrap_or(0))
    }
}
