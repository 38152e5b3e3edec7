//! Freeing in the background: calls that were abandoned, releases that failed, holds that were lost.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures_util::FutureExt as _;
use leasehold_api::{Error, ErrorKind};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::backend::{Attempt, Backend, HoldRef, short_answer};
use crate::counters::{Event, Tally};
use crate::hold::Turn;
use crate::queue::Queues;
use crate::shared::{Call, Seat};

/// What freeing needs of an engine, without keeping the engine alive.
#[derive(Clone)]
pub(crate) struct Means {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) queues: Arc<Queues<Seat>>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) closing: CancellationToken,
    /// The limit of one call.
    pub(crate) limit: Duration,
}

/// The shortest and the longest pause between two attempts to free something.
const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(5);

/// Finishes a call that nobody waits for, then has the store let go of `holds`, retrying until it has.
pub(crate) struct Undo {
    means: Means,
    call: Option<Call>,
    holds: Vec<HoldRef>,
    turns: Vec<Turn>,
}

impl Undo {
    pub(crate) fn new(means: Means, call: Option<Call>, holds: Vec<HoldRef>, turns: Vec<Turn>) -> Self {
        Self { means, call, holds, turns }
    }

    pub(crate) async fn run(mut self) {
        if let Some(call) = self.call.take() {
            self.means.tally.count(Event::Undone);
            // Answered "held" throughout, nothing is left to undo. Else, and also when no answer comes,
            // the release by holder id settles it.
            // A call that panicked in its caller's hands panics again when it is polled here.
            let finished = AssertUnwindSafe(timeout(self.means.limit, call)).catch_unwind().await;
            if let Ok(Ok(answers)) = finished {
                if answers.len() == self.holds.len()
                    && answers.iter().all(|a| matches!(a, Ok(Attempt::Held(_))))
                {
                    return;
                }
            }
        }
        let mut pauses = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(SHORT)
            .with_max_delay(LONG)
            .without_max_times()
            .build();
        let mut lasted = Duration::ZERO;
        while let Err(error) = self.run_once().await {
            // One try keeps the key's turn; after that the next in line may ask the store itself.
            self.turns.clear();
            if error.kind() == ErrorKind::Closed || self.is_over(lasted) {
                return;
            }
            self.means.tally.count(Event::ReleaseRetry);
            // A closing engine bounds it, and has no time for long pauses.
            let closing = self.means.closing.is_cancelled();
            let pause = if closing { SHORT } else { pauses.next().unwrap_or(LONG) };
            lasted = lasted.saturating_add(pause);
            tokio::select! {
                () = sleep(pause) => {}
                () = self.means.closing.cancelled(), if !closing => {}
            }
        }
    }

    /// As [`run_once`](Self::run_once), repeated until it succeeds. For a closing engine, which bounds it.
    pub(crate) async fn run_until_freed(&mut self) {
        while self.run_once().await.is_err() {
            sleep(SHORT).await;
        }
    }

    /// Asks the store once to free what is left; `Err` with the first failure.
    pub(crate) async fn run_once(&mut self) -> Result<(), Error> {
        if self.holds.is_empty() {
            return Ok(());
        }
        let call = timeout(self.means.limit, self.means.backend.release(self.holds.clone()));
        let mut answers = match AssertUnwindSafe(call).catch_unwind().await {
            Ok(Ok(answers)) => answers.into_iter(),
            _ => return Err(Error::new(ErrorKind::OutcomeUnknown, "no answer in time")),
        };
        let mut failure = None;
        let mut freed = Vec::new();
        self.holds.retain(|hold| match answers.next().unwrap_or_else(|| Err(short_answer())) {
            Ok(_) => {
                freed.push(hold.key.clone());
                false
            }
            Err(error) => {
                failure.get_or_insert(error);
                true
            }
        });
        self.turns.retain(|turn| !freed.contains(turn.key()));
        // Whoever asks the store for these keys from here may have met the hold that has just gone.
        for key in freed {
            let nudge = self.means.queues.with(&key, |seat| seat.nudge.clone());
            if let Some(nudge) = nudge.flatten() {
                nudge.notify_one();
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Leases end by themselves: after twice their TTL there is nothing left to free.
    fn is_over(&self, lasted: Duration) -> bool {
        self.holds.iter().all(|h| h.ttl.is_some_and(|ttl| lasted > ttl.saturating_mul(2)))
    }
}
