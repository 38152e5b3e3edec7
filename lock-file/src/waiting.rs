//! Waits for a key, first in the kernel for the waiter lock, then for the holder.

use std::future::{Future, pending};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Mode};
use leasehold_engine::{Attempt, CancellationToken, Contended, Request};
use tokio::time::{Instant, sleep, sleep_until};

use crate::backend::FileBackend;
use crate::error::io_error;
use crate::hold::wait_for_release;
use crate::kernel_wait::PendingWait;
use crate::layout::KeyFiles;
use crate::pool::{STALLED_AFTER, no_answer};
use crate::requests::Registration;
use crate::store::Caller;
use crate::waiter_lock::{EnterResult, HEARTBEAT_EVERY, WaiterLock};

/// Average interval at which later waiters check whether the next waiter has stopped.
const LOOK_EVERY: Duration = Duration::from_millis(700);

/// Average interval at which later waiters try the lock itself while the next waiter is stopped.
const PAST_STOPPED_EVERY: Duration = Duration::from_millis(100);

/// The first pause if the lock is taken although its status file is not locked, because a holder is just
/// releasing or acquiring it.
const FIRST_PAUSE: Duration = Duration::from_micros(100);

/// How long a file operation under way can take after the wait was stopped. It is less than the time that the
/// engine waits for the reply.
const LEAVING: Duration = Duration::from_millis(50);

/// How long a wait sleeps during a cooldown before it reports the cooldown to the engine, whose caller might not want
/// to wait for one.
const COOLDOWN_NAP: Duration = Duration::from_secs(1);

/// One waiter for one key. If dropped, it leaves its place.
pub(crate) struct KeyWaiter<'a> {
    backend: &'a FileBackend,
    registration: &'a Arc<Registration>,
    request: &'a Request,
    place: QueuePlace,
    /// Next pause while no holder is visible, from very short to the poll interval.
    pause: Duration,
    /// Whether the last wait in the kernel returned at once, because no status file was locked.
    nobody_shows: bool,
    was_contended: bool,
}

/// The place of a waiter.
enum QueuePlace {
    /// The waiter has no place: it has not asked for one, or all threads were busy.
    Outside,
    /// Behind other waiters, with a thread that waits for the waiter lock.
    Behind(PendingWait<WaiterLock>),
    /// The next waiter, possibly with a thread that waits for the holder.
    First(WaiterLock, Option<PendingWait<bool>>),
}

/// A waiter's next step.
enum NextStep {
    Attempt,
    Sleep(Duration),
}

/// The reason a waiter wakes up.
enum WakeReason {
    Stopped,
    Turn(io::Result<WaiterLock>),
    Release(io::Result<bool>),
    TimeUp,
}

impl<'a> KeyWaiter<'a> {
    /// Creates a waiter for `request`, registered by `registration`.
    pub(crate) fn new(
        backend: &'a FileBackend,
        registration: &'a Arc<Registration>,
        request: &'a Request,
    ) -> Self {
        let (place, pause) = (QueuePlace::Outside, FIRST_PAUSE);
        Self { backend, registration, request, place, pause, nobody_shows: false, was_contended: false }
    }

    /// Makes attempts until granted or `stop` fires.
    pub(crate) async fn wait(mut self, stop: &CancellationToken) -> Result<Attempt, Error> {
        loop {
            let nap = match unless_overdue(stop, self.advance()).await? {
                // Reports the attempt as refused, because no attempt so far can have left a grant.
                Err(error) => return Ok(Attempt::Refused(error)),
                Ok(NextStep::Sleep(nap)) => nap,
                Ok(NextStep::Attempt) => match unless_overdue(stop, self.attempt()).await?? {
                    Attempt::Contended(contended) => match contended.cooling_for {
                        // Reports the cooldown to the engine, because its caller might not want to wait for a
                        // cooldown.
                        Some(_) if self.was_contended => return Ok(Attempt::Contended(contended)),
                        Some(left) => left.min(COOLDOWN_NAP),
                        None => self.after_contention(),
                    },
                    answer => return Ok(answer),
                },
            };
            self.was_contended = true;
            let woken = tokio::select! {
                biased;
                () = stop.cancelled() => WakeReason::Stopped,
                woken = self.place.woken() => woken,
                () = sleep(nap) => WakeReason::TimeUp,
            };
            match woken {
                WakeReason::Stopped => return Ok(Attempt::Contended(Contended::new())),
                WakeReason::Turn(Ok(waiter)) => self.place = QueuePlace::First(waiter, None),
                // Enters again, which creates the directory if it is gone.
                WakeReason::Turn(Err(e)) if e.kind() == io::ErrorKind::NotFound => {
                    self.place = QueuePlace::Outside;
                }
                WakeReason::Turn(Err(e)) => {
                    return Ok(Attempt::Refused(io_error(e, "wait for", &self.files().next())));
                }
                WakeReason::Release(waited) => self.after_release(waited),
                WakeReason::TimeUp => {}
            }
        }
    }

    async fn attempt(&self) -> Result<Attempt, Error> {
        let asked_at = self.backend.now();
        let mut answer = self.backend.attempt(self.registration, self.request, Caller::Waiter).await?;
        if let Attempt::Granted(granted) = &mut answer {
            granted.asked_at = asked_at;
        }
        Ok(answer)
    }

    /// Takes a place, or does the next step at the current place.
    async fn advance(&mut self) -> Result<NextStep, Error> {
        match &mut self.place {
            QueuePlace::Outside => self.enter().await,
            QueuePlace::Behind(_) => {
                let next = self.files().next();
                let look = move || WaiterLock::is_stopped(&next).map_err(|e| io_error(e, "look at", &next));
                let is_stopped = self.backend.pool().acquire.run(look).await??;
                if is_stopped { Ok(NextStep::Attempt) } else { Ok(NextStep::Sleep(jittered(LOOK_EVERY))) }
            }
            QueuePlace::First(waiter, _) => {
                if let Some(heartbeat) = waiter.heartbeat() {
                    // Continues without a heartbeat if it fails. Other callers might then go first.
                    self.backend.pool().acquire.run(heartbeat).await?.unwrap_or_else(|error| {
                        tracing::debug!(%error, "cannot write the heartbeat of a waiter");
                    });
                }
                Ok(NextStep::Attempt)
            }
        }
    }

    async fn enter(&mut self) -> Result<NextStep, Error> {
        let (store, key) = (Arc::clone(self.backend.store()), self.request.key.clone());
        let entered = self.backend.pool().acquire.run(move || store.enter_waiter_lock(&key)).await??;
        let is_stopped = match entered {
            EnterResult::First(waiter) => {
                self.place = QueuePlace::First(waiter, None);
                return Ok(NextStep::Attempt);
            }
            EnterResult::Behind => false,
            EnterResult::BehindStopped => true,
        };
        if let Some(claim) = WaiterLock::wait_for(&self.files().next(), self.files().mode()) {
            self.place = QueuePlace::Behind(claim);
        }
        Ok(match (is_stopped, &self.place) {
            (true, _) => NextStep::Attempt,
            (false, QueuePlace::Outside) => NextStep::Sleep(jittered(self.backend.poll())),
            (false, _) => NextStep::Sleep(jittered(LOOK_EVERY)),
        })
    }

    /// Returns how long to sleep after a failed attempt, unless an event comes first.
    fn after_contention(&mut self) -> Duration {
        let files = self.files();
        let QueuePlace::First(_, claim) = &mut self.place else {
            let every = if matches!(self.place, QueuePlace::Behind(_)) {
                PAST_STOPPED_EVERY
            } else {
                self.backend.poll()
            };
            return jittered(every);
        };
        // Polls for a permit, because any of the holders can leave first.
        let is_permit = matches!(self.request.mode, Mode::Permit { .. });
        if !is_permit && claim.is_none() && !std::mem::take(&mut self.nobody_shows) {
            *claim = wait_for_release(&files);
        }
        if claim.is_some() {
            // Also tries the lock at this interval, in case the holder's status file is not locked.
            return HEARTBEAT_EVERY;
        }
        let pause = self.pause;
        self.pause = pause.saturating_mul(2).min(self.backend.poll());
        jittered(pause)
    }

    /// Notes the end of the wait for a holder: no holder is visible now. `answer` is whether there was one
    /// before.
    fn after_release(&mut self, answer: io::Result<bool>) {
        if let QueuePlace::First(_, claim) = &mut self.place {
            *claim = None;
        }
        let waited = answer.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot wait for a holder: polling");
            false
        });
        self.nobody_shows = !waited;
        if waited {
            self.pause = FIRST_PAUSE;
        }
    }

    fn files(&self) -> KeyFiles {
        self.backend.store().files(&self.request.key)
    }
}

impl QueuePlace {
    /// Waits for the event that ends this place: the waiter's turn, or a release by the holder.
    async fn woken(&mut self) -> WakeReason {
        let ended = || io::Error::from(io::ErrorKind::NotFound);
        match self {
            Self::Behind(claim) => WakeReason::Turn(claim.await.unwrap_or_else(|_| Err(ended()))),
            Self::First(_, Some(claim)) => WakeReason::Release(claim.await.unwrap_or_else(|_| Err(ended()))),
            Self::Outside | Self::First(_, None) => pending().await,
        }
    }
}

/// Returns the output of a file operation. Returns an error if the operation has not ended soon after `stop`,
/// although the disk had enough time. The caller's budget was then spent on the disk and not on a holder.
async fn unless_overdue<F: Future>(stop: &CancellationToken, operation: F) -> Result<F::Output, Error> {
    let begun = Instant::now();
    let overdue = async {
        stop.cancelled().await;
        sleep_until((begun + STALLED_AFTER).max(Instant::now() + LEAVING)).await;
    };
    tokio::select! {
        biased;
        output = operation => Ok(output),
        () = overdue => Err(no_answer()),
    }
}

fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(0.5 + fastrand::f64())
}
