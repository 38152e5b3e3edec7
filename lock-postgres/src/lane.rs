//! The queue in front of one or several sessions: what arrives while a round trip is under way travels
//! together in the next one.
//!
//! What a statement costs beside its rows is the larger part of it, so the fewer statements the better:
//!
//! - A session that has answered many gives them a chance to ask for what they want next before it looks. No
//!   time is waited for, only others' turns on the runtime: a few in vain when a lone job follows on many.
//! - Jobs that make statements of their own go one kind after the other ([`Job::later`]): whoever is answered by
//!   the first would wait for the second. A single straggler is not worth a statement of its own while many wait:
//!   it stands back until its kind's turn comes, but only so often.
//! - Many jobs are shared out evenly among the sessions, so that no session is left with single ones.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_api::Error;
use tokio::sync::Notify;

/// Something to do on a session, with somebody who waits for the answer.
pub trait Job: Send + 'static {
    /// Answers with `error`: the job was not begun.
    fn fail(self, error: Error);

    /// Which of `jobs`, which could travel together, had better wait for the next round trip or another session;
    /// they stay first in the queue. At least one is left. By default none, also said by an empty answer.
    fn later(jobs: &[&Self]) -> Vec<bool> {
        let _ = jobs;
        Vec::new()
    }
}

/// How often in a row others are given a turn in vain before they are not waited for any more: they may be at
/// work on another thread.
const LOOKS: u32 = 4;

/// How many turns are given away at most for each job that is expected.
const TURNS: usize = 4;

/// How often a job lets others go before it: once for each of two sessions, which then does its kind.
const MOST_PASSED: u8 = 2;

/// So few jobs are not shared out.
const FEW: usize = 8;

/// The queue. Cheap to clone; all clones are one queue.
pub struct Lane<J: Job>(Arc<Inner<J>>);

struct Inner<J> {
    state: Mutex<State<J>>,
    /// One permit per job that arrived while somebody was idle; all are told of a close.
    arrived: Notify,
}

struct State<J> {
    jobs: VecDeque<Waiting<J>>,
    closed: bool,
    /// How many sessions are connected and take jobs.
    serving: usize,
    /// How many jobs these have taken and not done yet.
    under_way: usize,
}

struct Waiting<J> {
    job: J,
    /// How often it has let others go before it.
    passed: u8,
}

impl<J: Job> Lane<J> {
    /// An empty queue that is open.
    #[must_use]
    pub fn new() -> Self {
        let state = State { jobs: VecDeque::new(), closed: false, serving: 0, under_way: 0 };
        Self(Arc::new(Inner { state: Mutex::new(state), arrived: Notify::new() }))
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
        state.jobs.extend(jobs.into_iter().map(|job| Waiting { job, passed: 0 }));
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

    /// Waits until there is a job, and leaves it there; `false` once the lane is closed and empty.
    pub(crate) async fn wanted(&self) -> bool {
        self.until(1, |state| (!state.jobs.is_empty()).then_some(())).await.is_some()
    }

    /// Lets those ask who have just been answered, or came together, where `expected` of them are likely to:
    /// until all have, or no more do.
    async fn gather(&self, expected: usize) {
        let mut waiting = 0;
        let mut in_vain = 0;
        // Bounded: what other sessions take meanwhile must not keep this one waiting.
        for _ in 0..expected * TURNS {
            tokio::task::yield_now().await;
            let before = std::mem::replace(&mut waiting, self.state().jobs.len());
            in_vain = if waiting > before { 0 } else { in_vain + 1 };
            if waiting >= expected || in_vain == LOOKS {
                return;
            }
        }
    }

    async fn until<T>(&self, expected: usize, mut look: impl FnMut(&mut State<J>) -> Option<T>) -> Option<T> {
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
        Serving { lane: self.clone(), under_way: 0, last: 0 }
    }

    /// Fails what waits, unless another session can do it.
    pub(crate) fn fail_if_unserved(&self, error: &Error) {
        let mut state = self.state();
        if state.serving > 0 {
            return;
        }
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        jobs.into_iter().for_each(|waiting| waiting.job.fail(again(error)));
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
pub(crate) struct Serving<J: Job> {
    lane: Lane<J>,
    /// How many jobs it has taken and not done yet.
    under_way: usize,
    /// How many it took last, unless it has gathered since.
    last: usize,
}

impl<J: Job> Serving<J> {
    /// Waits for jobs and takes this session's share of them, up to `most`, oldest first; `None` once the lane is
    /// closed and empty. What it took before is done.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it has taken nothing.
    pub(crate) async fn take(&mut self, most: usize) -> Option<Vec<J>> {
        self.done();
        let look = |state: &mut State<J>| {
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
            if together.iter().zip(&later).any(|(waiting, later)| *later && waiting.passed == MOST_PASSED) {
                later.clear();
            }
            let mut jobs = Vec::with_capacity(together.len());
            let mut left = Vec::new();
            for (place, Waiting { job, passed }) in together.into_iter().enumerate() {
                if later.get(place) == Some(&true) {
                    left.push(Waiting { job, passed: passed + 1 });
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
        let jobs = self.lane.until(expected, look).await?;
        self.under_way = jobs.len();
        self.last = jobs.len();
        Some(jobs)
    }

    fn done(&mut self) {
        let done = std::mem::take(&mut self.under_way);
        if done > 0 {
            self.lane.state().under_way -= done;
        }
    }
}

impl<J: Job> Drop for Serving<J> {
    fn drop(&mut self) {
        self.done();
        self.lane.state().serving -= 1;
        // Whoever is left looks again: the permit of a job may have been ours.
        self.lane.0.arrived.notify_one();
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt as _;
    use leasehold_api::ErrorKind;
    use tokio::sync::mpsc;

    struct Number(u32, mpsc::UnboundedSender<(u32, ErrorKind)>);

    impl Job for Number {
        fn fail(self, error: Error) {
            let _ = self.1.send((self.0, error.kind()));
        }
    }

    fn numbers(jobs: Option<Vec<Number>>) -> Vec<u32> {
        jobs.unwrap().iter().map(|job| job.0).collect()
    }

    #[tokio::test]
    async fn what_came_together_is_taken_together_and_in_order() {
        let (failed, mut failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let mut session = lane.serve();
        lane.push_all((0..5).map(|n| Number(n, failed.clone())));
        lane.push(Number(5, failed.clone()));
        assert_eq!(numbers(session.take(4).await), [0, 1, 2, 3]);
        assert_eq!(numbers(session.take(4).await), [4, 5]);
        lane.push(Number(6, failed.clone()));
        lane.close();
        lane.push(Number(7, failed.clone()));
        assert_eq!(failures.try_recv().unwrap(), (7, ErrorKind::Closed));
        assert_eq!(numbers(session.take(4).await), [6], "what was queued before the close is still done");
        assert!(session.take(4).await.is_none());
    }

    #[tokio::test]
    async fn what_those_ask_for_who_were_just_answered_travels_together() {
        let (failed, _failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let mut session = lane.serve();
        let mut asked = 0;
        for round in 0..3 {
            lane.push_all((0..20).map(|n| Number(n, failed.clone())));
            assert_eq!(session.take(64).await.unwrap().len(), 20, "round {round}");
            // Each is answered, and has something else to do before it asks again.
            for n in 0..20 {
                let (lane, failed) = (lane.clone(), failed.clone());
                asked += 1;
                tokio::spawn(async move {
                    for _ in 0..n % 3 {
                        tokio::task::yield_now().await;
                    }
                    lane.push(Number(n, failed));
                });
            }
            assert_eq!(session.take(64).await.unwrap().len(), 20, "round {round}");
        }
        assert_eq!(asked, 60);
        assert_eq!(lane.state().jobs.len(), 0);
    }

    #[tokio::test]
    async fn those_who_are_at_work_elsewhere_are_waited_for_and_those_who_do_not_come_are_not() {
        let (failed, _failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let mut session = lane.serve();
        lane.push_all((0..3).map(|n| Number(n, failed.clone())));
        assert_eq!(session.take(64).await.unwrap().len(), 3);
        for turns in [1, LOOKS, 100] {
            let (lane, failed) = (lane.clone(), failed.clone());
            tokio::spawn(async move {
                for _ in 1..turns {
                    tokio::task::yield_now().await;
                }
                lane.push(Number(turns, failed));
            });
        }
        assert_eq!(numbers(session.take(64).await), [1, LOOKS]);
    }

    #[tokio::test]
    async fn what_others_take_meanwhile_keeps_nobody_waiting() {
        let (failed, _failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let mut other = lane.serve();
        let turns = Arc::new(AtomicUsize::new(0));
        tokio::spawn({
            let (lane, turns) = (lane.clone(), Arc::clone(&turns));
            async move {
                for turn in 0..10_000 {
                    if turn % 2 == 0 {
                        lane.push(Number(turn, failed.clone()));
                    } else {
                        assert_eq!(other.take(64).await.unwrap().len(), 1);
                    }
                    turns.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            }
        });
        lane.gather(8).await;
        assert_eq!(turns.load(Ordering::Relaxed), 8 * TURNS);
    }

    #[tokio::test]
    async fn a_lone_job_is_taken_without_anybodys_turn_in_between() {
        let (failed, _failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let mut session = lane.serve();
        for n in 0..3 {
            lane.push(Number(n, failed.clone()));
            let taken = std::pin::pin!(session.take(64)).now_or_never();
            assert_eq!(numbers(taken.unwrap()), [n]);
        }
    }

    #[tokio::test]
    async fn many_jobs_are_shared_out_and_few_are_not() {
        let (failed, _failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let (mut one, mut other) = (lane.serve(), lane.serve());
        lane.push_all((0..64).map(|n| Number(n, failed.clone())));
        assert_eq!(one.take(512).await.unwrap().len(), 32);
        assert_eq!(other.take(512).await.unwrap().len(), 32);
        // Those that are under way elsewhere count: 33 and 31 are better than 1 and 63.
        lane.push_all((0..32).map(|n| Number(n, failed.clone())));
        assert_eq!(one.take(512).await.unwrap().len(), 32);
        lane.push_all((0..7).map(|n| Number(n, failed.clone())));
        assert_eq!(other.take(512).await.unwrap().len(), 7);
        // A few more than its share are not left behind.
        lane.push_all((0..18).map(|n| Number(n, failed.clone())));
        assert_eq!(one.take(512).await.unwrap().len(), 18, "its share is 13");
        lane.push_all((0..23).map(|n| Number(n, failed.clone())));
        assert_eq!(one.take(20).await.unwrap().len(), 15, "its share, as eight more are many");
        assert_eq!(one.take(4).await.unwrap().len(), 4, "never more than it may");
        assert_eq!(other.take(512).await.unwrap().len(), 4);
        // A session that has ended has nothing under way.
        drop(other);
        lane.push_all((0..40).map(|n| Number(n, failed.clone())));
        assert_eq!(one.take(512).await.unwrap().len(), 40);
        drop(one);
        let state = lane.state();
        assert_eq!((state.under_way, state.serving), (0, 0));
    }

    /// Even numbers go before odd ones.
    #[derive(Debug)]
    struct Parity(u32);

    impl Job for Parity {
        fn fail(self, _: Error) {}

        fn later(jobs: &[&Self]) -> Vec<bool> {
            let mixed = jobs.iter().any(|job| job.0 % 2 == 0);
            jobs.iter().map(|job| mixed && job.0 % 2 == 1).collect()
        }
    }

    #[tokio::test]
    async fn what_had_better_wait_stays_first_in_the_queue() {
        let lane = Lane::new();
        let mut session = lane.serve();
        lane.push_all((1..6).map(Parity));
        let taken = |jobs: Option<Vec<Parity>>| jobs.unwrap().iter().map(|job| job.0).collect::<Vec<_>>();
        assert_eq!(taken(session.take(4).await), [2, 4]);
        assert_eq!(taken(session.take(4).await), [1, 3, 5]);
    }

    #[tokio::test]
    async fn each_job_stands_back_only_so_often() {
        let lane = Lane::new();
        let mut session = lane.serve();
        let taken = |jobs: Option<Vec<Parity>>| jobs.unwrap().iter().map(|job| job.0).collect::<Vec<_>>();
        lane.push_all([1, 2].map(Parity));
        assert_eq!(taken(session.take(8).await), [2]);
        lane.push_all([3, 4].map(Parity));
        assert_eq!(taken(session.take(8).await), [4]);
        lane.push_all([5, 6].map(Parity));
        assert_eq!(
            taken(session.take(8).await),
            [1, 3, 5, 6],
            "an endless stream of others holds it up twice"
        );
        lane.push_all([7, 8].map(Parity));
        assert_eq!(taken(session.take(8).await), [8]);
        assert_eq!(taken(session.take(8).await), [7]);
    }

    #[tokio::test]
    async fn whoever_is_interrupted_does_not_gather_anew() {
        let (failed, _failures) = mpsc::unbounded_channel();
        let lane = Lane::new();
        let mut session = lane.serve();
        lane.push_all((0..9).map(|n| Number(n, failed.clone())));
        assert_eq!(session.take(64).await.unwrap().len(), 9);
        lane.push(Number(9, failed.clone()));
        assert!(std::pin::pin!(session.take(64)).now_or_never().is_none(), "it expects more");
        let taken = std::pin::pin!(session.take(64)).now_or_never();
        assert_eq!(numbers(taken.unwrap()), [9]);
    }

    #[tokio::test]
    async fn what_is_left_for_another_session_wakes_it() {
        let lane = Lane::new();
        let mut other = lane.serve();
        let waiting = tokio::spawn(async move { other.take(4).await.map(|jobs| jobs.len()) });
        tokio::task::yield_now().await;
        let mut session = lane.serve();
        lane.push_all((1..4).map(Parity));
        assert_eq!(session.take(4).await.unwrap().len(), 1);
        assert_eq!(waiting.await.unwrap(), Some(2));
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
            async move { lane.serve().take(1).await.is_none() }
        });
        tokio::task::yield_now().await;
        lane.close();
        assert!(tokio::time::timeout(std::time::Duration::from_secs(1), idle).await.unwrap().unwrap());
    }
}
