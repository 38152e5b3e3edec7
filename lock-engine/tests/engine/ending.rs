//! A runtime that ends with guards just dropped or still alive. No key stays held, or a warning names it.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold_api::{Capabilities, Error, Lock as _, LockExt, LockKey, LossReason, Scope};
use leasehold_engine::{
    Attempt, Engine, Granted, HoldRef, ReleaseReply, Renewed, Request, Single, SingleKey,
};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

/// A store that sends releases through a task, like a session. The task ends with the runtime.
#[derive(Debug)]
struct ThroughATask {
    capabilities: Capabilities,
    held: Held,
    jobs: mpsc::UnboundedSender<(LockKey, oneshot::Sender<()>)>,
    /// Whether the store can release without that task.
    reconnects: bool,
}

type Held = Arc<Mutex<HashSet<LockKey>>>;

impl ThroughATask {
    fn start(held: &Held, reconnects: bool) -> Engine {
        let (jobs, mut asked) = mpsc::unbounded_channel::<(LockKey, oneshot::Sender<()>)>();
        let of_task = Arc::clone(held);
        tokio::spawn(async move {
            while let Some((key, done)) = asked.recv().await {
                tokio::time::sleep(Duration::from_millis(1)).await;
                of_task.lock().unwrap().remove(&key);
                let _ = done.send(());
            }
        });
        let capabilities = Capabilities::new(Scope::Process);
        Engine::start(Single::new(Self { capabilities, held: Arc::clone(held), jobs, reconnects })).unwrap()
    }
}

impl fmt::Display for ThroughATask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("through a task")
    }
}

#[async_trait::async_trait]
impl SingleKey for ThroughATask {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn acquire(&self, request: Request) -> Result<Attempt, Error> {
        self.held.lock().unwrap().insert(request.key);
        Ok(Attempt::Granted(Granted::with_token(None)))
    }

    async fn renew(&self, _: HoldRef) -> Result<Renewed, Error> {
        Ok(Renewed::Extended)
    }

    async fn release(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        let (done, is_done) = oneshot::channel();
        self.jobs.send((hold.key, done)).map_err(|_| Error::closed())?;
        is_done.await.map_err(|_| Error::closed())?;
        Ok(ReleaseReply::new(true))
    }

    async fn release_on_new_runtime(&self, hold: HoldRef) -> Result<ReleaseReply, Error> {
        if !self.reconnects {
            // Needs the task, like a store that does not support this call.
            return self.release(hold).await;
        }
        // Sleeps, because a real store needs the timers of the new runtime.
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(ReleaseReply::new(self.held.lock().unwrap().remove(&hold.key)))
    }
}

type Named = (&'static str, fn() -> Runtime);

fn runtimes() -> [Named; 3] {
    [
        ("current thread", || Builder::new_current_thread().enable_all().build().unwrap()),
        ("one worker", || Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()),
        ("two workers", || Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()),
    ]
}

/// The time for which the end of a runtime waits for its releases.
const WAITS: Duration = Duration::from_secs(1);

/// Ends the runtime of a `turn`, and asserts that no key is held. On a busy machine the releases can take longer than the
/// end of the runtime waits, and the turn is repeated. Returns the rest of the turn.
fn released_at_the_end<T>(what: &str, turn: impl Fn() -> (Runtime, Held, T)) -> T {
    for _ in 0..60 {
        let (runtime, held, rest) = turn();
        let begun = Instant::now();
        drop(runtime);
        let left = held.lock().unwrap().clone();
        if left.is_empty() {
            return rest;
        }
        assert!(begun.elapsed() >= WAITS, "{what}: {left:?}");
    }
    panic!("{what}: the releases took longer in every turn")
}

#[test]
fn a_guard_dropped_just_before_its_runtime_ends_is_released() {
    for (name, runtime) in runtimes() {
        for drops_the_lock in [false, true] {
            released_at_the_end(&format!("{name}, lock dropped: {drops_the_lock}"), || {
                let (runtime, held) = (runtime(), Held::default());
                let lock = runtime.block_on(async { ThroughATask::start(&held, true) });
                let guard = runtime.block_on(lock.key("k").acquire()).unwrap();
                let mut lock = Some(lock);
                runtime.block_on(async {
                    drop(guard);
                    if drops_the_lock {
                        lock.take();
                    }
                });
                (runtime, held, lock)
            });
        }
    }
}

#[test]
fn a_guard_that_is_out_when_its_runtime_ends_is_lost_and_released() {
    for (name, runtime) in runtimes() {
        let (lock, outside) = released_at_the_end(name, || {
            let (runtime, held) = (runtime(), Held::default());
            let lock = runtime.block_on(async { ThroughATask::start(&held, true) });
            // One guard stays outside, one is in a task that is dropped with the runtime.
            let outside = runtime.block_on(lock.key("outside").acquire()).unwrap();
            let inside = runtime.block_on(lock.key("inside").acquire()).unwrap();
            runtime.spawn(async move {
                std::future::pending::<()>().await;
                drop(inside);
            });
            (runtime, held, (lock, outside))
        });
        assert_eq!(
            futures_util::FutureExt::now_or_never(outside.lost()),
            Some(LossReason::RuntimeGone),
            "{name}"
        );
        let closed = futures_util::FutureExt::now_or_never(lock.close());
        assert!(matches!(closed, Some(Ok(()))), "{name}: {closed:?}");
    }
}

#[test]
fn a_call_that_is_under_way_when_its_runtime_ends_is_taken_over() {
    for (name, runtime) in runtimes() {
        released_at_the_end(name, || {
            let (runtime, held) = (runtime(), Held::default());
            let lock = runtime.block_on(async { ThroughATask::start(&held, true) });
            runtime.block_on(async {
                let mut guards = Vec::new();
                for n in 0..50 {
                    guards.push(lock.key(format!("k{n}")).acquire().await.unwrap());
                }
                drop(guards);
                // Lets the driver send its calls, which the task handles one by one.
                tokio::task::yield_now().await;
            });
            (runtime, held, lock)
        });
    }
}

#[test]
fn what_cannot_be_released_as_a_runtime_ends_is_a_warning_with_its_keys() {
    let log = crate::common::log::warnings();
    for (number, (name, runtime)) in runtimes().into_iter().enumerate() {
        let (runtime, held) = (runtime(), Held::default());
        let lock = runtime.block_on(async { ThroughATask::start(&held, false) });
        let key = format!("left-over-{number}");
        runtime.block_on(async { drop(lock.key(key.clone()).acquire().await.unwrap()) });
        let begun = Instant::now();
        drop(runtime);
        assert!(begun.elapsed() < Duration::from_secs(60), "{name}: the end of the runtime is bounded");
        if !held.lock().unwrap().is_empty() {
            assert!(log.have(&key), "{name}: nothing said of {key}");
        }
    }
}
