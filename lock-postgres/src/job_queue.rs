//! The queue in front of one or several sessions: what arrives while a round trip is under way travels
//! together in the next one.
//!
//! Most of a statement's cost does not depend on its number of rows, so the fewer statements the better:
//!
//! - A session that has answered a large batch yields to the runtime before it takes the next one, so that
//!   the callers it has answered can queue their next requests. It waits for no timer: when nobody queues
//!   anything, it has yielded a few times in vain.
//! - Jobs of different kinds need different statements, and one kind travels per round trip ([`Job::later`]):
//!   the callers of the first statement would wait for the second. The other kind is deferred to the next
//!   round trip, but each job at most [`MAX_DEFERRALS`] times.
//! - Many jobs are divided evenly among the sessions, so that no session is left with single ones.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::Error;
use tokio::sync::Notify;

/// Something to do on a session, with somebody who waits for the answer.
pub trait Job: Send + 'static {
    /// Answers with `error`: the job was not begun, and nothing was sent for it.
    fn fail(self, error: Error);

    /// Which of `jobs`, which could travel together, had better wait for the next round trip or another
    /// session; they stay first in the queue. At least one is left. By default none, also said by an empty
    /// answer.
    fn later(jobs: &[&Self]) -> Vec<bool> {
        let _ = jobs;
        Vec::new()
    }
}

/// How often in a row a session yields without a new job before it stops waiting for more: those who are
/// expected may be busy on another thread.
const IDLE_YIELDS: u32 = 4;

/// How often a session yields at most for each job that is expected.
const YIELDS_PER_JOB: usize = 4;

/// How often a job is deferred in favour of another kind: once by each of two sessions, after which one of
/// them does its kind.
const MAX_DEFERRALS: u8 = 2;

/// So few jobs are not divided among sessions.
const FEW: usize = 8;

/// The queue. Cheap to clone; all clones are one queue.
pub struct JobQueue<J: Job>(Arc<Inner<J>>);

struct Inner<J> {
    state: Mutex<QueueState<J>>,
    /// One permit per job that arrived while somebody was idle; all are told of a close.
    arrived: Notify,
}

struct QueueState<J> {
    jobs: VecDeque<QueuedJob<J>>,
    closed: bool,
    /// How many sessions are connected and take jobs.
    serving: usize,
    /// How many jobs these have taken and not done yet.
    under_way: usize,
}

struct QueuedJob<J> {
    job: J,
    /// How often it was left in the queue in favour of another kind.
    deferrals: u8,
}

impl<J: Job> JobQueue<J> {
    /// An empty queue that is open.
    #[must_use]
    pub fn new() -> Self {
        let state = QueueState { jobs: VecDeque::new(), closed: false, serving: 0, under_way: 0 };
        Self(Arc::new(Inner { state: Mutex::new(state), arrived: Notify::new() }))
    }

    /// Adds a job; one idle session is woken. On a closed queue it fails at once.
    pub fn push(&self, job: J) {
        self.push_all([job]);
    }

    /// Adds several jobs, which one session finds together.
    pub fn push_all(&self, jobs: impl IntoIterator<Item = J>) {
        let mut state = self.state();
        if state.closed {
            drop(state);
            jobs.into_iter().for_each(|job| job.fail(Error::closed()));
            return;
        }
        state.jobs.extend(jobs.into_iter().map(|job| QueuedJob { job, deferrals: 0 }));
        drop(state);
        // The one that became idle last: its caches are warm.
        self.0.arrived.notify_last();
    }

    /// Ends the sessions once the queue is empty; later jobs fail.
    pub fn close(&self) {
        self.state().closed = true;
        self.0.arrived.notify_waiters();
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Whether a session is open that takes jobs.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.state().serving > 0
    }

    /// Waits until there is a job, and leaves it there; `false` once the queue is closed and empty.
    pub(crate) async fn wanted(&self) -> bool {
        self.until(1, |state| (!state.jobs.is_empty()).then_some(())).await.is_some()
    }

    /// Yields to callers who were just answered, of whom `expected` are likely to queue another job: until
    /// all have, or no more do.
    async fn gather(&self, expected: usize) {
        let mut waiting = 0;
        let mut in_vain = 0;
        // Bounded: what other sessions take meanwhile must not keep this one waiting.
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
            // Made before the look, so that a close in between is not missed; a permit waits by itself.
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

    /// A session takes jobs until the returned value is dropped.
    pub(crate) fn serve(&self) -> Serving<J> {
        self.state().serving += 1;
        Serving { queue: self.clone(), under_way: 0, last: 0 }
    }

    /// Fails what waits, unless another session can do it.
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
    /// How many jobs it has taken and not done yet.
    under_way: usize,
    /// How many it took last, unless it has gathered since.
    last: usize,
}

impl<J: Job> Serving<J> {
    /// Waits for jobs and takes this session's share of them, up to `most`, oldest first; `None` once the
    /// queue is closed and empty. What it took before is done.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it has taken nothing.
    pub(crate) async fn take(&mut self, most: usize) -> Option<Vec<J>> {
        self.done();
        let look = |state: &mut QueueState<J>| {
            let all = state.jobs.len() + state.under_way;
            let share = all.div_ceil(state.serving.max(1)).max(FEW).min(most);
            let waiting = state.jobs.len();
            // A few more are not left behind.
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
        // Once after each batch: whoever drops this to read a notification does not begin to gather anew.
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
        // Whoever is left looks again: the permit of a job may have been ours.
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
