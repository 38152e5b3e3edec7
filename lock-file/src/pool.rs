//! The threads of file operations: a fixed number, even on a slow disk.
//!
//! A file operation cannot be cancelled. On a hanging disk, every retry would leave another blocked thread, until the
//! application's blocking tasks find none. So each operation needs a permit and keeps it until it ends, even if its
//! caller is gone.

use std::fmt::Display;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;
use tokio::time::timeout;

/// How long a call waits while earlier operations make no progress. Half of the engine's default limit for
/// one call, so the call fails before the engine counts its outcome as unknown.
pub(crate) const STALLED_AFTER: Duration = Duration::from_secs(5);

/// The 16 permits of one backend. Each purpose has its own permits, so inspection and acquisition cannot block a
/// release.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) acquire: Permits,
    pub(crate) renew: Permits,
    pub(crate) release: Permits,
    pub(crate) inspect: Permits,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            acquire: Permits::new(8),
            renew: Permits::new(2),
            release: Permits::new(4),
            inspect: Permits::new(2),
        }
    }
}

/// The permits for operations of one purpose.
#[derive(Debug)]
pub(crate) struct Permits {
    count: usize,
    free: Arc<Semaphore>,
    progress: Progress,
}

/// The number of completed steps. A wait is only abandoned if the number does not change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Counts a completed operation, or a step of a long one.
    pub(crate) fn step(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn steps(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why an operation has no result.
#[derive(Debug)]
pub(crate) enum OperationFailure {
    /// The operation has not started, and will not start.
    NotBegun(Error),
    /// The operation has started, and its outcome is unknown.
    Unknown(Error),
}

impl From<OperationFailure> for Error {
    fn from(failure: OperationFailure) -> Self {
        match failure {
            OperationFailure::NotBegun(error) | OperationFailure::Unknown(error) => error,
        }
    }
}

impl Permits {
    fn new(count: usize) -> Self {
        Self { count, free: Arc::new(Semaphore::new(count)), progress: Progress::default() }
    }

    /// Runs `job` on a thread once a permit is free. If dropped before that, `job` does not run. If dropped later,
    /// `job` runs to its end.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, OperationFailure> {
        let permit = self.permit().await.map_err(OperationFailure::NotBegun)?;
        self.start(permit, |_| job()).await
    }

    /// Works like [`run`](Self::run), for a job without effects, which is abandoned if it makes no progress.
    pub(crate) async fn run_or_give_up<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Progress) -> T + Send + 'static,
    ) -> Result<T, OperationFailure> {
        let permit = self.permit().await.map_err(OperationFailure::NotBegun)?;
        let answer = self.unless_stalled(self.start(permit, job)).await;
        answer.unwrap_or_else(|| Err(OperationFailure::Unknown(self.stalled())))
    }

    async fn permit(&self) -> Result<OwnedSemaphorePermit, Error> {
        if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            return Ok(permit);
        }
        let permit = self.unless_stalled(Arc::clone(&self.free).acquire_owned()).await;
        // Maps the semaphore's error, although the semaphore is never closed.
        permit.ok_or_else(|| self.stalled())?.map_err(|_| Error::closed())
    }

    async fn start<T: Send + 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        job: impl FnOnce(&Progress) -> T + Send + 'static,
    ) -> Result<T, OperationFailure> {
        let progress = self.progress.clone();
        let job = move || {
            let answer = job(&progress);
            progress.step();
            drop(permit);
            answer
        };
        tokio::task::spawn_blocking(job).await.map_err(failure)
    }

    /// Returns the output of `future`, or `None` if neither the future nor any operation with these permits
    /// makes progress.
    async fn unless_stalled<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        loop {
            let steps = self.progress.steps();
            match timeout(STALLED_AFTER, &mut future).await {
                Ok(output) => return Some(output),
                Err(_) if self.progress.steps() != steps => {}
                Err(_) => return None,
            }
        }
    }

    fn stalled(&self) -> Error {
        let busy = self.count - self.free.available_permits();
        stalled(format_args!("none of the {busy} file operations under way has got anywhere"))
    }
}

/// Creates the error for an operation that has started but did not end in time.
pub(crate) fn no_answer() -> Error {
    stalled("the file operation under way has not ended")
}

fn stalled(what: impl Display) -> Error {
    let message = format!(
        "the disk does not answer: {what} within {STALLED_AFTER:?}; check the disk and the file system, then try again"
    );
    Error::new(ErrorKind::Unavailable, message)
}

fn failure(error: JoinError) -> OperationFailure {
    if error.is_panic() {
        let message = "a file operation panicked: this is a bug of leasehold-file, please report it";
        return OperationFailure::Unknown(Error::new(ErrorKind::OutcomeUnknown, message).with_source(error));
    }
    // Counts as not begun, because only a runtime's shutdown cancels a blocking task, and only before its
    // start.
    OperationFailure::NotBegun(Error::closed().with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::error::Error as _;
    use std::sync::mpsc;
    use tokio::runtime;

    /// Returns an operation that hangs until the sender is dropped.
    fn hang() -> (mpsc::Sender<()>, impl FnOnce() + Send + 'static) {
        let (end, hanging) = mpsc::channel();
        (end, move || assert!(hanging.recv().is_err()))
    }

    /// Polls `future` once, which must be pending.
    async fn begin<F: Future + Unpin>(future: &mut F) {
        tokio::select! {
            biased;
            _ = future => panic!("it did not wait"),
            () = std::future::ready(()) => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_operation_keeps_its_permit_until_it_ends() {
        let permits = Permits::new(1);
        let (end, hanging) = hang();
        let mut abandoned = Box::pin(permits.run(hanging));
        begin(&mut abandoned).await;
        drop(abandoned);
        let mut next = Box::pin(permits.run(|| 7));
        begin(&mut next).await;
        tokio::time::advance(STALLED_AFTER - Duration::from_millis(1)).await;
        begin(&mut next).await;
        tokio::time::advance(Duration::from_millis(1)).await;
        let Err(OperationFailure::NotBegun(error)) = next.await else { panic!("it ran") };
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("the disk does not answer: none of the 1 "), "{error}");
        drop(end);
        assert_eq!(permits.run(|| 7).await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_goes_on_while_there_is_progress() {
        let permits = Permits::new(1);
        let (end, hanging) = hang();
        let (say, steps) = mpsc::channel::<mpsc::Sender<()>>();
        // Starts a long operation with several steps, like a list.
        let mut long = Box::pin(permits.run_or_give_up(move |progress| {
            for stepped in steps {
                progress.step();
                stepped.send(()).unwrap();
            }
            hanging();
        }));
        begin(&mut long).await;
        let mut next = Box::pin(permits.run(|| 7));
        begin(&mut next).await;
        for _ in 0..4 {
            let (stepped, step) = mpsc::channel();
            say.send(stepped).unwrap();
            step.recv().unwrap();
            tokio::time::advance(STALLED_AFTER).await;
            begin(&mut long).await;
            begin(&mut next).await;
        }
        tokio::time::advance(STALLED_AFTER).await;
        assert!(matches!(long.await, Err(OperationFailure::Unknown(_))), "it hangs, and is given up");
        assert!(matches!(next.await, Err(OperationFailure::NotBegun(_))));
        drop((say, end));
        assert_eq!(permits.run(|| 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_panic_is_told_as_a_bug() {
        let permits = Permits::new(1);
        for _ in 0..2 {
            let Err(OperationFailure::Unknown(error)) = permits.run(|| panic!("lost the thread")).await
            else {
                panic!("no failure")
            };
            assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
            assert!(error.to_string().contains("bug of leasehold-file"), "{error}");
            assert!(error.source().unwrap().to_string().contains("lost the thread"));
        }
    }

    #[test]
    fn a_runtime_that_has_ended_begins_nothing() {
        let permits = Permits::new(1);
        let ended = runtime::Builder::new_multi_thread().build().unwrap();
        let handle = ended.handle().clone();
        ended.shutdown_background();
        let _within = handle.enter();
        let Some(Err(OperationFailure::NotBegun(error))) = permits.run(|| panic!("it ran")).now_or_never()
        else {
            panic!("it began")
        };
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert_eq!(permits.free.available_permits(), 1);
    }
}
