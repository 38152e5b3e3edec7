//! One run for all callers that arrived before its start.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Runs that concurrent callers share. A run serves only callers that arrived before its start, because its output must be
/// younger than their calls. So callers at the same time need at most two runs.
#[derive(Debug)]
pub(super) struct Flight<T> {
    state: Mutex<State<T>>,
    /// Locked by the caller that makes a run. If that caller is dropped, the next one makes another run.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State<T> {
    /// The number of runs so far, with the failed and the dropped runs.
    started: u64,
    callers: usize,
    /// The number of the last run that succeeded, and its output. `None` without callers, because an output is large.
    last: Option<(u64, T)>,
}

/// One caller, until it has returned or is dropped.
struct Caller<'a, T> {
    flight: &'a Flight<T>,
    /// The number of runs that started before its arrival.
    arrived: u64,
}

impl<T> Flight<T> {
    pub(super) fn new() -> Self {
        let state = State { started: 0, callers: 0, last: None };
        Self { state: Mutex::new(state), turn: tokio::sync::Mutex::default() }
    }

    fn arrive(&self) -> Caller<'_, T> {
        let mut state = self.lock();
        state.callers += 1;
        Caller { flight: self, arrived: state.started }
    }

    /// Notes the start of a run, and returns its number.
    fn start(&self) -> u64 {
        let mut state = self.lock();
        state.started += 1;
        state.started
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> Flight<T> {
    /// Returns the output of a run that started after this call. Polls `run` only if no other caller has made such a run. A
    /// failure counts only for the caller that made the run, because the other callers possibly have more time.
    pub(super) async fn join<E>(&self, run: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let caller = self.arrive();
        let _turn = self.turn.lock().await;
        if let Some(output) = caller.output() {
            return Ok(output);
        }
        let number = self.start();
        let output = run.await?;
        self.lock().last = Some((number, output.clone()));
        Ok(output)
    }
}

impl<T: Clone> Caller<'_, T> {
    /// Returns the output of the last run, if that run started after the arrival.
    fn output(&self) -> Option<T> {
        let state = self.flight.lock();
        state.last.as_ref().filter(|(number, _)| *number > self.arrived).map(|(_, output)| output.clone())
    }
}

impl<T> Drop for Caller<'_, T> {
    fn drop(&mut self) {
        let mut state = self.flight.lock();
        state.callers = state.callers.saturating_sub(1);
        if state.callers == 0 {
            state.last = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use futures_util::future::join_all;
    use test_bounds::within;
    use tokio::task::yield_now;
    use tokio::time::sleep;

    use super::*;

    /// A liveness bound.
    const MINUTE: Duration = Duration::from_secs(60);

    /// The polls of a run before its last poll.
    const YIELDS: u32 = 3;

    /// Counts the run, and returns its number.
    async fn run(runs: &Cell<u32>) -> Result<u32, u32> {
        let number = runs.get() + 1;
        runs.set(number);
        for _ in 0..YIELDS {
            yield_now().await;
        }
        Ok(number)
    }

    /// Runs as [`run`]. The first two runs fail.
    async fn run_that_fails_twice(runs: &Cell<u32>) -> Result<u32, u32> {
        let number = run(runs).await?;
        if number > 2 { Ok(number) } else { Err(number) }
    }

    #[tokio::test]
    async fn a_hundred_callers_at_once_need_two_runs() {
        let (flight, runs) = (Flight::new(), Cell::new(0));
        for round in 0..2 {
            let outputs = join_all((0..100).map(|_| flight.join(run(&runs)))).await;
            let got = |number: u32| outputs.iter().filter(|output| **output == Ok(number)).count();
            let before = round * 2;
            assert_eq!((got(before + 1), got(before + 2), runs.get()), (1, 99, before + 2));
            assert!(flight.lock().last.is_none(), "an output stays without callers");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_gets_no_output_of_a_run_that_started_before_its_call() {
        let (flight, runs) = (Flight::new(), Cell::new(0));
        let slow = || async {
            let output = run(&runs).await;
            sleep(Duration::from_secs(2)).await;
            output
        };
        let later = || async {
            sleep(Duration::from_secs(1)).await;
            flight.join(slow()).await
        };
        let outputs = tokio::join!(flight.join(slow()), later(), later());
        assert_eq!((outputs, runs.get()), ((Ok(1), Ok(2), Ok(2)), 2));
    }

    #[tokio::test]
    async fn another_caller_takes_over_if_the_one_that_runs_is_dropped_at_any_poll() {
        for polls in 1..=YIELDS {
            let (flight, runs) = (Flight::new(), Cell::new(0));
            let mut first = Box::pin(flight.join(run(&runs)));
            let mut others: Vec<_> = (0..3).map(|_| Box::pin(flight.join(run(&runs)))).collect();
            for _ in 0..polls {
                assert_eq!(first.as_mut().now_or_never(), None);
                for other in &mut others {
                    assert_eq!(other.as_mut().now_or_never(), None);
                }
            }
            drop(first);
            // Drops the caller that takes over too.
            assert_eq!(others[0].as_mut().now_or_never(), None);
            drop(others.remove(0));
            let outputs = within(MINUTE, "taking over", join_all(others)).await;
            assert_eq!((outputs, runs.get()), (vec![Ok(3); 2], 3), "dropped after {polls} polls");
        }
    }

    #[tokio::test]
    async fn a_failed_run_counts_only_for_its_caller() {
        let (flight, runs) = (Flight::new(), Cell::new(0));
        let outputs = join_all((0..5).map(|_| flight.join(run_that_fails_twice(&runs)))).await;
        assert_eq!((outputs, runs.get()), (vec![Err(1), Err(2), Ok(3), Ok(3), Ok(3)], 3));
    }
}
