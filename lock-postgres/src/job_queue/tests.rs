//! Tests of batching, order and waiting.

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
    let queue = JobQueue::new();
    let mut session = queue.serve();
    queue.push_all((0..5).map(|n| Number(n, failed.clone())));
    queue.push(Number(5, failed.clone()));
    assert_eq!(numbers(session.take(4).await), [0, 1, 2, 3]);
    assert_eq!(numbers(session.take(4).await), [4, 5]);
    queue.push(Number(6, failed.clone()));
    queue.close();
    queue.push(Number(7, failed.clone()));
    assert_eq!(failures.try_recv().unwrap(), (7, ErrorKind::Closed));
    assert_eq!(numbers(session.take(4).await), [6], "what was queued before the close is still done");
    assert!(session.take(4).await.is_none());
}

#[tokio::test]
async fn what_those_ask_for_who_were_just_answered_travels_together() {
    let (failed, _failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let mut session = queue.serve();
    let mut asked = 0;
    for round in 0..3 {
        queue.push_all((0..20).map(|n| Number(n, failed.clone())));
        assert_eq!(session.take(64).await.unwrap().len(), 20, "round {round}");
        // Starts tasks that yield up to twice before they queue a job.
        for n in 0..20 {
            let (queue, failed) = (queue.clone(), failed.clone());
            asked += 1;
            tokio::spawn(async move {
                for _ in 0..n % 3 {
                    tokio::task::yield_now().await;
                }
                queue.push(Number(n, failed));
            });
        }
        assert_eq!(session.take(64).await.unwrap().len(), 20, "round {round}");
    }
    assert_eq!(asked, 60);
    assert_eq!(queue.state().jobs.len(), 0);
}

#[tokio::test]
async fn callers_who_are_busy_are_waited_for_and_those_who_do_not_come_are_not() {
    let (failed, _failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let mut session = queue.serve();
    queue.push_all((0..3).map(|n| Number(n, failed.clone())));
    assert_eq!(session.take(64).await.unwrap().len(), 3);
    for yields in [1, IDLE_YIELDS, 100] {
        let (queue, failed) = (queue.clone(), failed.clone());
        tokio::spawn(async move {
            for _ in 1..yields {
                tokio::task::yield_now().await;
            }
            queue.push(Number(yields, failed));
        });
    }
    assert_eq!(numbers(session.take(64).await), [1, IDLE_YIELDS]);
}

#[tokio::test]
async fn what_others_take_meanwhile_delays_nobody() {
    let (failed, _failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let mut other = queue.serve();
    let steps = Arc::new(AtomicUsize::new(0));
    tokio::spawn({
        let (queue, steps) = (queue.clone(), Arc::clone(&steps));
        async move {
            for step in 0..10_000 {
                if step % 2 == 0 {
                    queue.push(Number(step, failed.clone()));
                } else {
                    assert_eq!(other.take(64).await.unwrap().len(), 1);
                }
                steps.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        }
    });
    queue.gather(8).await;
    assert_eq!(steps.load(Ordering::Relaxed), 8 * YIELDS_PER_JOB);
}

#[tokio::test]
async fn a_lone_job_is_taken_without_yielding_to_anybody() {
    let (failed, _failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let mut session = queue.serve();
    for n in 0..3 {
        queue.push(Number(n, failed.clone()));
        let taken = std::pin::pin!(session.take(64)).now_or_never();
        assert_eq!(numbers(taken.unwrap()), [n]);
    }
}

#[tokio::test]
async fn many_jobs_are_divided_and_few_are_not() {
    let (failed, _failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let (mut one, mut other) = (queue.serve(), queue.serve());
    queue.push_all((0..64).map(|n| Number(n, failed.clone())));
    assert_eq!(one.take(512).await.unwrap().len(), 32);
    assert_eq!(other.take(512).await.unwrap().len(), 32);
    // Jobs under way in other sessions count for the share: 33 and 31 are better than 1 and 63.
    queue.push_all((0..32).map(|n| Number(n, failed.clone())));
    assert_eq!(one.take(512).await.unwrap().len(), 32);
    queue.push_all((0..7).map(|n| Number(n, failed.clone())));
    assert_eq!(other.take(512).await.unwrap().len(), 7);
    // A session also takes a few jobs beyond its share.
    queue.push_all((0..18).map(|n| Number(n, failed.clone())));
    assert_eq!(one.take(512).await.unwrap().len(), 18, "its share is 13");
    queue.push_all((0..23).map(|n| Number(n, failed.clone())));
    assert_eq!(one.take(20).await.unwrap().len(), 15, "its share, as eight more are many");
    assert_eq!(one.take(4).await.unwrap().len(), 4, "never more than it may");
    assert_eq!(other.take(512).await.unwrap().len(), 4);
    // Ends the other session, which then has no jobs under way.
    drop(other);
    queue.push_all((0..40).map(|n| Number(n, failed.clone())));
    assert_eq!(one.take(512).await.unwrap().len(), 40);
    drop(one);
    let state = queue.state();
    assert_eq!((state.under_way, state.serving), (0, 0));
}

/// A job that defers odd numbers behind even ones.
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
    let queue = JobQueue::new();
    let mut session = queue.serve();
    queue.push_all((1..6).map(Parity));
    let taken = |jobs: Option<Vec<Parity>>| jobs.unwrap().iter().map(|job| job.0).collect::<Vec<_>>();
    assert_eq!(taken(session.take(4).await), [2, 4]);
    assert_eq!(taken(session.take(4).await), [1, 3, 5]);
}

#[tokio::test]
async fn each_job_is_deferred_only_so_often() {
    let queue = JobQueue::new();
    let mut session = queue.serve();
    let taken = |jobs: Option<Vec<Parity>>| jobs.unwrap().iter().map(|job| job.0).collect::<Vec<_>>();
    queue.push_all([1, 2].map(Parity));
    assert_eq!(taken(session.take(8).await), [2]);
    queue.push_all([3, 4].map(Parity));
    assert_eq!(taken(session.take(8).await), [4]);
    queue.push_all([5, 6].map(Parity));
    assert_eq!(taken(session.take(8).await), [1, 3, 5, 6], "an endless stream of others holds it up twice");
    queue.push_all([7, 8].map(Parity));
    assert_eq!(taken(session.take(8).await), [8]);
    assert_eq!(taken(session.take(8).await), [7]);
}

#[tokio::test]
async fn a_session_that_is_interrupted_does_not_gather_anew() {
    let (failed, _failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let mut session = queue.serve();
    queue.push_all((0..9).map(|n| Number(n, failed.clone())));
    assert_eq!(session.take(64).await.unwrap().len(), 9);
    queue.push(Number(9, failed.clone()));
    assert!(std::pin::pin!(session.take(64)).now_or_never().is_none(), "it expects more");
    let taken = std::pin::pin!(session.take(64)).now_or_never();
    assert_eq!(numbers(taken.unwrap()), [9]);
}

#[tokio::test]
async fn what_is_left_for_another_session_wakes_it() {
    let queue = JobQueue::new();
    let mut other = queue.serve();
    let waiting = tokio::spawn(async move { other.take(4).await.map(|jobs| jobs.len()) });
    tokio::task::yield_now().await;
    let mut session = queue.serve();
    queue.push_all((1..4).map(Parity));
    assert_eq!(session.take(4).await.unwrap().len(), 1);
    assert_eq!(waiting.await.unwrap(), Some(2));
}

#[tokio::test]
async fn jobs_fail_only_when_no_session_is_left() {
    let (failed, mut failures) = mpsc::unbounded_channel();
    let queue = JobQueue::new();
    let serving = queue.serve();
    queue.push(Number(1, failed.clone()));
    let down = Error::new(ErrorKind::Unavailable, "down");
    queue.fail_if_unserved(&down);
    assert!(failures.try_recv().is_err());
    drop(serving);
    queue.fail_if_unserved(&down);
    assert_eq!(failures.try_recv().unwrap(), (1, ErrorKind::Unavailable));
}

#[tokio::test(start_paused = true)]
async fn a_close_wakes_an_idle_session() {
    let queue: JobQueue<Number> = JobQueue::new();
    let idle = tokio::spawn({
        let queue = queue.clone();
        async move { queue.serve().take(1).await.is_none() }
    });
    tokio::task::yield_now().await;
    queue.close();
    assert!(tokio::time::timeout(std::time::Duration::from_secs(1), idle).await.unwrap().unwrap());
}
