//! The runtime of a blocking lock, on a separate thread.

use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::coop;
use tokio::time::timeout;

use super::in_async_task;

/// The longest that the end of the runtime waits for a callback that runs, after up to a second for releases.
const CALLBACKS: Duration = Duration::from_secs(1);

/// The longest that the drop of a guard waits for the store.
const RELEASE: Duration = Duration::from_secs(1);

pub(super) struct Runtime {
    handle: Handle,
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
        Ok(Self { handle, stop: Some(stop), thread: Some(thread.map_err(refused)?) })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Polls `work` on this thread until it is done. The store's connections and timers run on the runtime's thread.
    pub(super) fn block_on<F: Future>(&self, work: F) -> Result<F::Output, Error> {
        if !may_block() {
            return Err(in_async_task());
        }
        // A connecting store looks for its runtime.
        let _entered = self.handle.enter();
        Ok(pollster::block_on(work))
    }

    /// Waits for the release of a dropped guard, if this thread may block. A release that takes longer goes on in the
    /// background.
    pub(super) fn wait_for_release(&self, release: impl Future) {
        if may_block() {
            let _entered = self.handle.enter();
            let _ = pollster::block_on(async { timeout(RELEASE, release).await });
        }
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
