//! The runtime of a blocking lock, on a separate thread.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::coop;
use tokio::time::{Instant, timeout_at};

use super::in_async_task;

/// The longest that the end of the runtime waits for a callback that runs, after up to a second for releases.
const CALLBACKS: Duration = Duration::from_secs(1);

/// The longest that the drops of guards, one after the other, wait for a store that does not reply.
const RELEASE: Duration = Duration::from_secs(1);

/// How long the drops after such a wait return at once. A reply of the store ends this time.
const NO_WAIT: Duration = Duration::from_secs(10);

pub(super) struct Runtime {
    handle: Handle,
    patience: Patience,
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Runtime {
    /// Starts the thread.
    pub(super) fn start() -> Result<Self, Error> {
        if !may_block() {
            return Err(in_async_task());
        }
        let refused = |error| {
            Error::new(ErrorKind::Unavailable, "the system refuses a thread for the lock").with_source(error)
        };
        let runtime = Builder::new_current_thread()
            .thread_name("leasehold-callback")
            .enable_all()
            .build()
            .map_err(refused)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("leasehold".to_owned()).spawn(move || {
            // Ends with an error when the sender is dropped.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_timeout(CALLBACKS);
        });
        let thread = Some(thread.map_err(refused)?);
        Ok(Self { handle, patience: Patience::default(), stop: Some(stop), thread })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Polls `work` on this thread until it is done. The store's connections and timers run on the runtime's thread.
    pub(super) fn block_on<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        if !may_poll() {
            return Err(in_async_task());
        }
        // A connecting store looks for its runtime.
        let _entered = self.handle.enter();
        Ok(pollster::block_on(work))
    }

    /// Notes that the store replied, because it granted a request.
    pub(super) fn granted(&self) {
        self.patience.replied();
    }

    /// Waits for the release of a dropped guard, if this thread may block and if the store replied recently. The
    /// engine finishes the release in the background if `release` is dropped.
    ///
    /// Without the wait nothing would finish it if the lock is in a static variable and `main` returns now.
    pub(super) fn wait_for_release(&self, release: impl Future<Output = Result<(), Error>>) {
        let end = self.patience.end_of_wait(Instant::now());
        if end <= Instant::now() || !may_poll() {
            return;
        }
        let _entered = self.handle.enter();
        match pollster::block_on(async { timeout_at(end, release).await }) {
            Ok(Ok(())) => self.patience.replied(),
            Err(_) => self.patience.silent(end),
            Ok(Err(error)) if is_silence(&error) => self.patience.silent(end),
            // The guard was lost before, so the error does not concern the store.
            Ok(Err(_)) => {}
        }
    }
}

/// Returns whether a release failed with `error` because the store did not reply.
fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::OutcomeUnknown)
}

/// The end of the wait of the last drop without a reply. A reply of the store
/// clears it. The following drops share it, so many guards together wait the time of one.
#[derive(Default)]
struct Patience(Mutex<Option<Instant>>);

impl Patience {
    /// Returns until when a drop that begins `now` waits. The result can be in the past.
    fn end_of_wait(&self, now: Instant) -> Instant {
        match *self.lock() {
            Some(end) if now < end + NO_WAIT => end,
            _ => now + RELEASE,
        }
    }

    fn silent(&self, end: Instant) {
        *self.lock() = Some(end);
    }

    fn replied(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        drop(self.stop.take());
        // The thread ends in about two seconds at the latest. In an async task it ends by itself.
        if let Some(thread) = self.thread.take().filter(|_| may_block()) {
            let _ = thread.join();
        }
    }
}

/// Returns whether this thread can poll futures of tokio and [may block](may_block). It cannot in the destructor of a
/// thread-local variable, if tokio's own variable is gone already.
fn may_poll() -> bool {
    may_block() && !Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed())
}

/// Returns whether tokio allows this thread to block: outside a runtime, in `spawn_blocking` and in
/// `block_in_place`.
///
/// A task has a budget of polls, after which it must yield (<https://docs.rs/tokio/latest/tokio/task/coop>). Without
/// a budget, blocking is allowed. So this takes more pieces of budget than a task can have, and returns them.
fn may_block() -> bool {
    if Handle::try_current().is_err() {
        return true;
    }
    let mut cx = Context::from_waker(Waker::noop());
    let mut taken = Vec::new();
    // More than any budget, which tokio counts in eight bits.
    while taken.len() <= usize::from(u8::MAX) {
        match coop::poll_proceed(&mut cx) {
            Poll::Ready(piece) => taken.push(piece),
            Poll::Pending => break,
        }
    }
    let may = taken.len() > usize::from(u8::MAX);
    // The last piece first, because each puts back the budget that it found.
    while taken.pop().is_some() {}
    may
}

#[cfg(test)]
mod tests {
    use tokio::task::{LocalSet, block_in_place, spawn, spawn_blocking};

    use super::*;

    #[test]
    fn blocking_is_refused_in_tasks_and_nowhere_else() {
        assert!(may_block());
        for flavor in [Builder::new_current_thread, Builder::new_multi_thread as fn() -> Builder] {
            let runtime = flavor().enable_all().build().unwrap();
            let seen = runtime.block_on(async {
                let local = LocalSet::new();
                [
                    may_block(),
                    spawn(async { may_block() }).await.unwrap(),
                    local
                        .run_until(async { tokio::task::spawn_local(async { may_block() }).await.unwrap() })
                        .await,
                    spawn_blocking(may_block).await.unwrap(),
                ]
            });
            assert_eq!(seen, [false, false, false, true]);
        }
        let runtime = Builder::new_multi_thread().build().unwrap();
        assert!(runtime.block_on(async { block_in_place(may_block) }));
        // A thread that only entered the runtime, as ours does while it waits.
        let _entered = runtime.enter();
        assert!(may_block());
    }

    #[test]
    fn a_dropped_runtime_has_ended_with_its_tasks() {
        let runtime = Runtime::start().unwrap();
        let kept = std::sync::Arc::new(());
        let of_the_task = std::sync::Arc::clone(&kept);
        runtime.handle().spawn(async move {
            std::future::pending::<()>().await;
            drop(of_the_task);
        });
        drop(runtime);
        assert_eq!(std::sync::Arc::strong_count(&kept), 1);
    }

    #[test]
    fn drops_that_get_no_reply_share_one_second() {
        let (patience, begun) = (Patience::default(), Instant::now());
        let (mut now, mut waits) = (begun, 0);
        for _ in 0..20 {
            let end = patience.end_of_wait(now);
            if now < end {
                waits += 1;
                now = end;
                patience.silent(end);
            }
        }
        assert_eq!((waits, now), (1, begun + RELEASE));
        // A drop that begins during the wait of another one.
        assert_eq!(patience.end_of_wait(begun + RELEASE / 2), begun + RELEASE);
        // A store can be back, although no call has reached it since.
        let later = now + NO_WAIT;
        assert_eq!(patience.end_of_wait(later), later + RELEASE);
        patience.replied();
        assert_eq!(patience.end_of_wait(now), now + RELEASE);
    }

    #[test]
    fn twenty_drops_call_a_silent_store_once_and_wait_again_after_a_reply() {
        let runtime = Runtime::start().unwrap();
        let waits = std::cell::Cell::new(0);
        let wait = |reply: Option<Result<(), Error>>| {
            runtime.wait_for_release(async {
                waits.set(waits.get() + 1);
                match reply {
                    Some(reply) => reply,
                    None => std::future::pending().await,
                }
            });
            waits.replace(0)
        };
        let lost = || Error::lost(leasehold_api::LossReason::Expired);
        assert_eq!([wait(Some(Ok(()))), wait(Some(Err(lost())))], [1; 2]);
        assert!(runtime.patience.lock().is_none(), "a lost guard is no silence");
        // A second wait only if the machine stood still for ten seconds between two drops.
        let silent: u32 = (0..20).map(|_| wait(None)).sum();
        assert!((1..=2).contains(&silent), "{silent} of 20 drops waited");
        runtime.granted();
        assert_eq!(wait(Some(Ok(()))), 1);
        // An error that comes before the end of the wait is no reply either.
        let refused = || Err(Error::new(ErrorKind::Unavailable, "refused"));
        assert_eq!(wait(Some(refused())), 1);
        assert!(runtime.patience.lock().is_some());
    }

    #[tokio::test]
    async fn the_question_leaves_the_budget_of_a_task_as_it_was() {
        tokio::task::yield_now().await;
        let budget = || {
            let mut cx = Context::from_waker(Waker::noop());
            let mut pieces = Vec::new();
            while let (true, Poll::Ready(piece)) = (pieces.len() < 300, coop::poll_proceed(&mut cx)) {
                pieces.push(piece);
            }
            let count = pieces.len();
            while pieces.pop().is_some() {}
            count
        };
        let before = budget();
        assert!(before < 300, "a task has a budget");
        assert!(!may_block());
        assert_eq!(budget(), before);
        assert!(coop::has_budget_remaining());
    }
}
