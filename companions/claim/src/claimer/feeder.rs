//! Takes claims for the workers, in passes: each is a scan over the table, and pauses and sleep lie between them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::time::{Instant, sleep_until, timeout};

use super::backoff::Backoff;
use super::shared::ClaimerCore;
use crate::claimer::pass::{Pass, PassEnd};
use crate::error::ClaimError;
use crate::store::Outcome;

/// The time for which the first take waits for the listener, because notifications sent before it listens would be
/// missed.
const PRIMING: Duration = Duration::from_secs(1);

/// The longest time that a pass runs while it still finds work. Then the next pass starts at the top, because new rows
/// before the cursor must not wait until a table that others keep filling is empty.
const LONGEST_PASS: Duration = Duration::from_secs(1);

/// The pauses after passes that found only locked rows or rows that were put back.
const PAUSES: Backoff = Backoff::exponential(Duration::from_millis(20));
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const FAILURES: Backoff = Backoff::exponential(Duration::from_millis(200));
const LONGEST_FAILURE: Duration = Duration::from_secs(10);

/// The number of consecutive calls that find only rows which the table refuses to write. After more of them, the feeder
/// pauses.
const FRUITLESS: u32 = 8;

/// The shortest time from a pass that found nothing to the next, so many notifications in a row cause few passes.
const GAP: Duration = Duration::from_millis(10);

/// The feeder's action after a step.
enum Next {
    Go,
    Pause(Duration),
    Idle,
}

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let mut feeder = Feeder::new(shared);
    feeder.rest(PRIMING, Duration::ZERO).await;
    while feeder.demand().await {
        match feeder.step().await {
            Next::Go => {}
            // A notification shortens the pause but does not cancel it, because it might be of the rows that caused
            // the pause.
            Next::Pause(pause) => feeder.rest(pause, GAP.max(pause / 4)).await,
            Next::Idle => feeder.idle().await,
        }
    }
}

struct Feeder {
    shared: Arc<ClaimerCore>,
    pass: Pass,
    /// The start of the current pass, or `None` between passes.
    began: Option<Instant>,
    /// The number of consecutive pauses.
    pauses: u32,
    failures: u32,
    /// The number of consecutive calls that found only rows which the table refuses to write.
    refusals: u32,
}

impl Feeder {
    fn new(shared: Arc<ClaimerCore>) -> Self {
        Self { shared, pass: Pass::new(), began: None, pauses: 0, failures: 0, refusals: 0 }
    }

    /// Waits until a worker wants claims. Returns false when the claimer is stopped.
    async fn demand(&self) -> bool {
        loop {
            if self.shared.stop.is_cancelled() {
                return false;
            }
            if self.shared.wanted() > 0 {
                return true;
            }
            self.shared.stop.run_until_cancelled(self.shared.demand.notified()).await;
        }
    }

    async fn step(&mut self) -> Next {
        match self.try_step().await {
            Ok(next) => {
                self.failures = 0;
                next
            }
            Err(error) => {
                self.shared.report(&error);
                (self.pass, self.began) = (Pass::new(), None);
                self.failures += 1;
                Next::Pause(self.at_most(FAILURES, LONGEST_FAILURE).after(self.failures))
            }
        }
    }

    async fn try_step(&mut self) -> Result<Next, ClaimError> {
        let began = match self.began {
            Some(began) => began,
            None => {
                // Resets the signal of new work, because a pass that starts now sees all work announced before.
                self.shared.take_woken();
                *self.began.insert(Instant::now())
            }
        };
        let limit = self.shared.wanted();
        if limit == 0 {
            return Ok(Next::Go);
        }
        let cursor = self.pass.cursor();
        let take = self.shared.take(limit).after(cursor.clone());
        let asked = self.shared.clock.now();
        let taken = self.bounded(self.shared.store.take(&take)).await?;
        self.pass.record(&taken);
        let fruitless = taken.claims.is_empty() && !taken.refused.is_empty();
        self.refusals = if fruitless { self.refusals.saturating_add(1) } else { 0 };
        for refused in taken.refused {
            self.shared.refused(refused);
        }
        if self.refusals > FRUITLESS {
            // The pass goes on after a pause, because the table might refuse all rows.
            return Ok(Next::Pause(self.at_most(FAILURES, LONGEST_PAUSE).after(self.refusals - FRUITLESS)));
        }
        let is_end = taken.claims.is_empty() && (taken.cursor.is_none() || taken.cursor == cursor);
        self.shared.accept(taken.claims, asked);
        let is_long = began.elapsed() >= LONGEST_PASS && self.pass.net_claims() > 0;
        if is_end || is_long { self.end().await } else { Ok(Next::Go) }
    }

    async fn end(&mut self) -> Result<Next, ClaimError> {
        self.pass.returned(self.shared.take_returned());
        let pending = self.pass.must_ask() && {
            let take = self.shared.take(1);
            self.bounded(self.shared.store.pending(&take)).await?
        };
        self.began = None;
        Ok(match self.pass.end(pending) {
            PassEnd::Found => {
                self.pauses = 0;
                Next::Go
            }
            PassEnd::Skipped => Next::Pause(self.pause()),
            PassEnd::Clean => Next::Idle,
        })
    }

    /// Sleeps until work might exist. At each poll, sends only a query whether rows are claimable, because the result
    /// is usually no.
    async fn idle(&mut self) {
        while self.sleep().await && self.shared.wanted() > 0 {
            let take = self.shared.take(1);
            if !matches!(self.bounded(self.shared.store.pending(&take)).await, Ok(false)) {
                break;
            }
        }
    }

    /// Sleeps until woken, at most until the next poll. Returns whether only the poll ended the sleep.
    async fn sleep(&mut self) -> bool {
        let gap = Instant::now() + GAP;
        // Polls up to a fifth earlier, so processes do not poll together.
        let poll = self.shared.config.poll(self.shared.announced.load(Ordering::Acquire));
        let poll = Instant::now() + poll.mul_f64(1.0 - fastrand::f64() / 5.0);
        let is_news = loop {
            let mut wake = std::pin::pin!(self.shared.wake.notified());
            wake.as_mut().enable();
            if self.shared.take_woken() {
                break true;
            }
            if self.shared.has_returned() {
                break false;
            }
            let until = self.shared.next_wake_time().map_or(poll, |later| later.min(poll));
            tokio::select! {
                () = self.shared.stop.cancelled() => return false,
                () = wake => {}
                () = sleep_until(until) => if Instant::now() >= poll { return true },
            }
        };
        let until = if is_news { gap } else { gap + self.pause() };
        self.shared.stop.run_until_cancelled(sleep_until(until)).await;
        false
    }

    /// Sleeps for `pause`. Ends earlier if new work might exist, but not before `least` has passed.
    async fn rest(&self, pause: Duration, least: Duration) {
        let now = Instant::now();
        let (least, until) = (now + least, now + pause);
        loop {
            let mut wake = std::pin::pin!(self.shared.wake.notified());
            wake.as_mut().enable();
            if self.shared.take_woken() {
                break;
            }
            let until = self.shared.next_wake_time().map_or(until, |later| later.min(until));
            tokio::select! {
                () = self.shared.stop.cancelled() => return,
                () = wake => {}
                () = sleep_until(until) => break,
            }
        }
        self.shared.stop.run_until_cancelled(sleep_until(least.min(until))).await;
    }

    fn pause(&mut self) -> Duration {
        self.pauses = self.pauses.saturating_add(1);
        self.at_most(PAUSES, LONGEST_PAUSE).after(self.pauses)
    }

    /// Limits the pauses of `pauses` to `longest` and to twice the time between polls.
    fn at_most(&self, pauses: Backoff, longest: Duration) -> Backoff {
        pauses.at_most(longest.min(self.shared.config.poll(true) * 2))
    }

    async fn bounded<T>(&self, call: impl Future<Output = Result<T, ClaimError>>) -> Result<T, ClaimError> {
        match timeout(self.shared.config.call_limit(), call).await {
            Ok(answer) => answer,
            Err(_) => {
                let message = "the store took longer to answer than a lease lasts; it is asked again";
                Err(Error::new(ErrorKind::Unavailable, message).into())
            }
        }
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        // Puts back claims that no worker has started. This also runs when the runtime ends, because waiting workers
        // must learn that no claim will come.
        for hold in self.shared.unbegun(None) {
            self.shared.give_back(&hold, Outcome::PutBack);
        }
        self.shared.end_feeding();
    }
}
