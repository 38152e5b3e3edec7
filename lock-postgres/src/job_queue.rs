//! The queue in front of one or several sessions. Jobs that arrive during a round trip are batched in the next one.
//!
//! Most of a statement's cost does not depend on its number of rows, so fewer statements are better:
//!
//! - After a large batch, a session yields to the runtime before it takes the next one, because the answered callers
//!   can then queue their next requests. It uses no timer and stops after a few yields without a new job.
//! - Jobs of different kinds need different statements. A round trip carries one kind ([`Job::later`]), because the
//!   callers of the first statement would wait for the second. The other kind is deferred to the next round trip, each
//!   job at most [`MAX_DEFERRALS`] times.
//! - Many jobs are divided evenly among the sessions, because a session with a single job wastes a round trip.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::Error;
use tokio::sync::Notify;

/// A request to a session, with a caller that waits for the result.
pub trait Job: Send + 'static {
    /// Completes the job with `error`, before any statement was sent for it.
    fn fail(self, error: Error);

    /// Returns, for each of `jobs`, whether to defer it to the next round trip or another session. Deferred jobs stay
    /// first in the queue, and at least one job must not be deferred. Default: an empty list, which defers none.
    fn later(jobs: &[&Self]) -> Vec<bool> {
        let _ = jobs;
        Vec::new()
    }
}

/// How often in a row a session yields without a new job before it stops waiting. The expected callers might
/// be busy on another thread.
const IDLE_YIELDS: u32 = 4;

/// How often a session yields at most, per job that it expects.
const YIELDS_PER_JOB: usize = 4;

/// How often a job is deferred at most: once by each of two sessions, after which one of them runs jobs of
/// its kind.
const MAX_DEFERRALS: u8 = 2;

/// Up to this many jobs are not divided among sessions.
const FEW: usize = 8;

/// The job queue. Cheap to clone, and all clones share one queue.
pub struct JobQueue<J: Job>(Arc<Inner<J>>);

struct Inner<J> {
    state: Mutex<QueueState<J>>,
    /// Holds a permit for each job that arrived while a session was idle. A close wakes all sessions.
    arrived: Notify,
}

struct QueueState<J> {
    jobs: VecDeque<QueuedJob<J>>,
    closed: bool,
    /// Number of connected sessions that take jobs.
    serving: usize,
    /// Number of jobs that all sessions have taken and not finished.
    under_way: usize,
}

struct QueuedJob<J> {
    job: J,
    /// How often a job of another kind was preferred to this one.
    deferrals: u8,
}

impl<J: Job> JobQueue<J> {
    /// Creates an empty, open queue.
    #[must_use]
    pub fn new() -> Self {
        let state = QueueState { jobs: VecDeque::new(), closed: false, serving: 0, under_way: 0 };
        Self(Arc::new(Inner { state: Mutex::new(state), arrived: Notify::new() }))
    }

    /// Adds a job and wakes one idle session. On a closed queue the job fails at once.
    pub fn push(&self, job: J) {
        self.push_all([job]);
    }

    /// Adds several jobs at once, which one session can batch.
    pub fn push_all(&self, jobs: impl IntoIterator<Item = J>) {
        let mut state = self.state();
        if state.closed {
            drop(state);
            jobs.into_iter().for_each(|job| job.fail(Error::closed()));
            return;
        }
        state.jobs.extend(jobs.into_iter().map(|job| QueuedJob { job, deferrals: 0 }));
        drop(state);
        // Wakes the session that became idle last, because its data is most likely still in the processor's
        // caches.
        self.0.arrived.notify_last();
    }

    /// Ends the sessions once the queue is empty. Later jobs fail.
    pub fn close(&self) {
        self.state().closed = true;
        self.0.arrived.notify_waiters();
    }

    /// Returns whether the queue was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Returns whether a connected session takes jobs.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.state().serving > 0
    }

    /// Waits for a job without taking it. Returns `false` once the queue is closed and empty.
    pub(crate) async fn wanted(&self) -> bool {
        self.until(1, |state| (!state.jobs.is_empty()).then_some(())).await.is_some()
    }

    /// Yields to the callers answered last until `expected` of them have queued another job, or no further job arrives.
    async fn gather(&self, expected: usize) {
        let mut waiting = 0;
        let mut in_vain = 0;
        // Limits the number of yields, because other sessions can take the jobs that arrive during the wait.
        for _ in 0..expected * YIELDS_PER_JOB {
            tokio::task::yield_now().await;
            let before = std::mem::replace(&mut waiting, self.state().jobs.len());
            in_vain = if waiting > before { 0 } else { in_vain + 1 };
            if waiting >= expected || in_vain == IDLE_YIELDS {
                return;
            }
        }
    }

    async fn until<T>(
        &self,
        expected: usize,
        mut look: impl FnMut(&mut QueueState<J>) -> Option<T>,
    ) -> Option<T> {
        loop {
            if expected > 1 {
                self.gather(expected).await;
            }
            // Registers before the check, because a close after the check must still wake this session. For a
            // job, the permit is stored.
            let arrived = self.0.arrived.notified();
            {
                let mut state = self.state();
                if let Some(found) = look(&mut state) {
                    let more = !state.jobs.is_empty();
                    drop(state);
                    if more {
                        self.0.arrived.notify_one();
                    }
                    return Some(found);
                }
                if state.closed {
                    return None;
                }
            }
            arrived.await;
        }
    }

    /// Registers a connected session. It takes jobs through the returned value, until that value is dropped.
    pub(crate) fn serve(&self) -> Serving<J> {
        self.state().serving += 1;
        Serving { queue: self.clone(), under_way: 0, last: 0 }
    }

    /// Fails the queued jobs unless another session can run them.
    pub(crate) fn fail_if_unserved(&self, error: &Error) {
        let mut state = self.state();
        if state.serving > 0 {
            return;
        }
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        jobs.into_iter().for_each(|waiting| waiting.job.fail(error.clone()));
    }

    fn state(&self) -> MutexGuard<'_, QueueState<J>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session that takes jobs.
pub(crate) struct Serving<J: Job> {
    queue: JobQueue<J>,
    /// Number of jobs that this session has taken and not finished.
    under_way: usize,
    /// Size of the last batch, or 0 after the session has waited for its callers' next jobs.
    last: usize,
}

impl<J: Job> Serving<J> {
    /// Finishes the previous batch, then waits for jobs and takes this session's share of up to `most`, oldest first.
    /// Returns `None` once the queue is closed and empty.
    ///
    /// # Cancel safety
    ///
    /// If dropped, it has taken nothing.
    pub(crate) async fn take(&mut self, most: usize) -> Option<Vec<J>> {
        self.done();
        let look = |state: &mut QueueState<J>| {
            let all = state.jobs.len() + state.under_way;
            let share = all.div_ceil(state.serving.max(1)).max(FEW).min(most);
            let waiting = state.jobs.len();
            // Takes all jobs if only a few more than the share are queued, to avoid a small remainder.
            let share = if waiting < share + FEW { waiting.min(most) } else { share };
            let together: Vec<_> = state.jobs.drain(..share).collect();
            let mut later = Vec::new();
            if together.len() > 1 {
                later = J::later(&together.iter().map(|waiting| &waiting.job).collect::<Vec<_>>());
            }
            if together
                .iter()
                .zip(&later)
                .any(|(waiting, later)| *later && waiting.deferrals == MAX_DEFERRALS)
            {
                later.clear();
            }
            let mut jobs = Vec::with_capacity(together.len());
            let mut left = Vec::new();
            for (index, QueuedJob { job, deferrals }) in together.into_iter().enumerate() {
                if later.get(index) == Some(&true) {
                    left.push(QueuedJob { job, deferrals: deferrals + 1 });
                } else {
                    jobs.push(job);
                }
            }
            for waiting in left.into_iter().rev() {
                state.jobs.push_front(waiting);
            }
            state.under_way += jobs.len();
            (!jobs.is_empty()).then_some(jobs)
        };
        // Waits for the callers' next jobs only once per batch, because a caller that drops this future to
        // read a notification calls it again.
        let expected = std::mem::take(&mut self.last);
        let jobs = self.queue.until(expected, look).await?;
        self.under_way = jobs.len();
        self.last = jobs.len();
        Some(jobs)
    }

    fn done(&mut self) {
        let done = std::mem::take(&mut self.under_way);
        if done > 0 {
            self.queue.state().under_way -= done;
        }
    }
}

impl<J: Job> Drop for Serving<J> {
    fn drop(&mut self) {
        self.done();
        self.queue.state().serving -= 1;
        // Wakes another session, because this session might have consumed a job's permit.
        self.queue.0.arrived.notify_one();
    }
}

impl<J: Job> Clone for JobQueue<J> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<J: Job> Default for JobQueue<J> {
    fn default() -> Self {
        Self::new()
    }
}

impl<J: Job> fmt::Debug for JobQueue<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("JobQueue").field("jobs", &state.jobs.len()).field("closed", &state.closed).finish()
    }
}

#[cfg(test)]
mod tests;
