//! The queue in front of one or several sessions: what arrives while a round trip is under way travels
//! together in the next one.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::Error;
use tokio::sync::Notify;

/// Something to do on a session, with somebody who waits for the answer.
pub trait Job: Send + 'static {
    /// Answers with `error`: the job was not begun.
    fn fail(self, error: Error);
}

/// The queue. Cheap to clone; all clones are one queue.
pub struct Lane<J: Job>(Arc<Inner<J>>);

struct Inner<J> {
    state: Mutex<State<J>>,
    /// One permit per job that arrived while somebody was idle.
    arrived: Notify,
    closing: Notify,
}

struct State<J> {
    jobs: VecDeque<J>,
    closed: bool,
    /// How many sessions are connected and take jobs.
    serving: usize,
}

impl<J: Job> Lane<J> {
    /// An empty queue that is open.
    #[must_use]
    pub fn new() -> Self {
        let state = State { jobs: VecDeque::new(), closed: false, serving: 0 };
        Self(Arc::new(Inner { state: Mutex::new(state), arrived: Notify::new(), closing: Notify::new() }))
    }

    /// Adds a job; one idle session is woken. On a closed lane it fails at once.
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
        state.jobs.extend(jobs);
        drop(state);
        // The one that became idle last: its caches are warm.
        self.0.arrived.notify_last();
    }

    /// Ends the sessions once the queue is empty; later jobs fail.
    pub fn close(&self) {
        self.state().closed = true;
        self.0.closing.notify_waiters();
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Waits for jobs and takes up to `most` of them, oldest first; `None` once it is closed and empty.
    pub(crate) async fn take(&self, most: usize) -> Option<Vec<J>> {
        self.until(|state| {
            let count = state.jobs.len().min(most);
            (count > 0).then(|| state.jobs.drain(..count).collect())
        })
        .await
    }

    /// Waits until there is a job, and leaves it there; `false` once the lane is closed and empty.
    pub(crate) async fn wanted(&self) -> bool {
        self.until(|state| (!state.jobs.is_empty()).then_some(())).await.is_some()
    }

    async fn until<T>(&self, mut look: impl FnMut(&mut State<J>) -> Option<T>) -> Option<T> {
        loop {
            // Both are registered before the look, so that nothing in between is missed.
            let mut arrived = std::pin::pin!(self.0.arrived.notified());
            let mut closing = std::pin::pin!(self.0.closing.notified());
            closing.as_mut().enable();
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
            tokio::select! {
                () = &mut arrived => {}
                () = &mut closing => {}
            }
        }
    }

    /// A session takes jobs until the returned value is dropped.
    pub(crate) fn serve(&self) -> Serving<J> {
        self.state().serving += 1;
        Serving(self.clone())
    }

    /// Fails what waits, unless another session can do it.
    pub(crate) fn fail_if_unserved(&self, error: &Error) {
        let mut state = self.state();
        if state.serving > 0 {
            return;
        }
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        jobs.into_iter().for_each(|job| job.fail(again(error)));
    }

    fn state(&self) -> MutexGuard<'_, State<J>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same failure for one more caller; the source stays with the first.
#[must_use]
pub fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.message().to_owned())
}

/// A session that takes jobs.
pub(crate) struct Serving<J: Job>(Lane<J>);

impl<J: Job> Drop for Serving<J> {
    fn drop(&mut self) {
        self.0.state().serving -= 1;
        // Whoever is left looks again: the permit of a job may have been ours.
        self.0.0.arrived.notify_one();
    }
}

impl<J: Job> Clone for Lane<J> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<J: Job> Default for Lane<J> {
    fn default() -> Self {
        Self::new()
    }
}

impl<J: Job> fmt::Debug for Lane<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Lane").field("jobs", &state.jobs.len()).field("closed", &state.closed).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_api::ErrorKind;
    use tokio::sync::mpsc;

    struct Number(u32, mpsc::UnboundedSender<(u32, ErrorKind)>);

    impl Job for Number {
        fn fail(self, error: Error) {
            let _ = self.1.send((self.0, error.kind()));
        }
    }

    #[tokio::test]
    async fn what_came_together_is_taken_together_and_in_order() {
        let (failed, mut failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        lane.push_all((0..5).map(|n| Number(n, failed.clone())));
        lane.push(Number(5, failed.clone()));
        let taken = |jobs: Option<Vec<Number>>| jobs.unwrap().iter().map(|job| job.0).collect::<Vec<_>>();
        assert_eq!(taken(lane.take(4).await), [0, 1, 2, 3]);
        assert_eq!(taken(lane.take(4).await), [4, 5]);
        lane.push(Number(6, failed.clone()));
        lane.close();
        lane.push(Number(7, failed.clone()));
        assert_eq!(failures.try_recv().unwrap(), (7, ErrorKind::Closed));
        assert_eq!(taken(lane.take(4).await), [6], "what was queued before the close is still done");
        assert!(lane.take(4).await.is_none());
    }

    #[tokio::test]
    async fn jobs_fail_only_when_no_session_is_left() {
        let (failed, mut failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let serving = lane.serve();
        lane.push(Number(1, failed.clone()));
        let down = Error::new(ErrorKind::Unavailable, "down");
        lane.fail_if_unserved(&down);
        assert!(failures.try_recv().is_err());
        drop(serving);
        lane.fail_if_unserved(&down);
        assert_eq!(failures.try_recv().unwrap(), (1, ErrorKind::Unavailable));
    }

    #[tokio::test(start_paused = true)]
    async fn a_close_wakes_an_idle_session() {
        let lane: Lane<Number> = Lane::new();
        let idle = tokio::spawn({
            let lane = lane.clone();
            async move { lane.take(1).await.is_none() }
        });
        tokio::task::yield_now().await;
        lane.close();
        assert!(tokio::time::timeout(std::time::Duration::from_secs(1), idle).await.unwrap().unwrap());
    }
}
