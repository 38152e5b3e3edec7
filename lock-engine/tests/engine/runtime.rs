//! Places where the engine runs: other executors, plain threads, runtimes that end.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use leasehold_api::{Capabilities, Error, ErrorKind, Lock, LockExt, LossReason, Scope, Validity};
use leasehold_engine::{
    Attempt, Backend as _, Engine, Granted, HoldRef, ReleaseReply, Renewed, Request, Single, SingleKey,
};
use leasehold_memory::{ClientSetup, Fault, MemoryStore, Op};
use tokio::runtime::{Builder, Runtime};

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn without_a_runtime_it_says_what_to_do() {
    let error = MemoryStore::new().client().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoRuntime);
    assert!(error.to_string().contains("runtime handle"), "{error}");
}

#[test]
fn any_executor_polls_its_futures() {
    let runtime = runtime();
    let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
    let client = runtime.block_on(async { store.client_with(ClientSetup::new()) }).unwrap();
    // The futures below run outside of tokio.
    futures_executor(async {
        client.faults.script(Op::Acquire, Fault::Delay(Duration::from_millis(20)));
        client.faults.script(Op::Release, Fault::Delay(Duration::from_millis(20)));
        let guard = client.lock.key("k").acquire().await.unwrap();
        assert_eq!(
            client.lock.key("k").wait(Duration::from_millis(20)).acquire().await.unwrap_err().kind(),
            ErrorKind::Timeout
        );
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        client.lock.close().await.unwrap();
    });
}

/// A minimal executor that parks the thread until woken.
fn futures_executor<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut cx = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut cx) {
            return value;
        }
        std::thread::park();
    }
}

#[test]
fn a_guard_may_be_dropped_on_a_plain_thread() {
    let runtime = runtime();
    let store = MemoryStore::new();
    let client = runtime.block_on(async { store.client_with(ClientSetup::new()) }).unwrap();
    for slow in [false, true] {
        let guard = runtime.block_on(client.lock.key("k").acquire()).unwrap();
        if slow {
            // The release needs I/O, which the dropping thread cannot do.
            client.faults.script(Op::Release, Fault::Delay(Duration::from_millis(1)));
        }
        std::thread::spawn(move || drop(guard)).join().unwrap();
        let next = runtime.block_on(client.lock.key("k").wait(Duration::from_secs(10)).acquire()).unwrap();
        drop(next);
    }
}

#[test]
fn a_runtime_that_goes_away_loses_everything_loudly() {
    let store = MemoryStore::new();
    let (gone, other_runtime) = (runtime(), runtime());
    let lock = Arc::new(gone.block_on(async { store.client() }).unwrap());
    let other = other_runtime.block_on(async { store.client() }).unwrap();
    let guard = gone.block_on(lock.key("k").acquire()).unwrap();
    let lost = guard.lost();
    let waiter = {
        let lock = Arc::clone(&lock);
        other_runtime.spawn(async move { lock.key("k").wait_forever().acquire().await.map(drop) })
    };
    gone.shutdown_timeout(Duration::from_secs(10));
    assert_eq!(other_runtime.block_on(lost), LossReason::RuntimeGone);
    assert_eq!(guard.validity(), Validity::Lost);
    assert_eq!(other_runtime.block_on(waiter).unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(other_runtime.block_on(guard.release()).unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(other_runtime.block_on(lock.key("k").acquire()).unwrap_err().kind(), ErrorKind::Closed);
    other_runtime.block_on(lock.close()).expect("everything was released as the runtime ended");
    // The client's hold has left the store.
    assert!(other_runtime.block_on(other.key("k").try_acquire()).unwrap().is_some());
}

#[test]
fn closing_is_bounded_also_while_every_worker_is_blocked() {
    let runtime = runtime();
    let backend = MemoryStore::new().default_ttl(Duration::from_secs(30)).backend();
    let mut timing = backend.timing();
    timing.close = Duration::from_millis(200);
    let lock = Engine::builder(backend).timing(timing).runtime(runtime.handle().clone()).start().unwrap();
    let guard = futures_executor(lock.key("k").acquire()).unwrap();
    let (blocked, is_blocked) = mpsc::channel();
    let (unblock, blocking) = mpsc::channel::<()>();
    runtime.spawn(async move {
        blocked.send(()).unwrap();
        let _ = blocking.recv();
    });
    is_blocked.recv().unwrap();
    // The only worker is blocked until the close has returned.
    let error = futures_executor(lock.close()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    assert_eq!(guard.validity(), Validity::Lost);
    drop(unblock);
}

/// A store whose calls block their thread until a signal and then never return.
#[derive(Debug)]
struct Blocking {
    capabilities: Capabilities,
    releases: bool,
    entered: mpsc::Sender<()>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Blocking {
    async fn block(&self) {
        self.entered.send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
        std::future::pending::<()>().await;
    }
}

impl std::fmt::Display for Blocking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("blocking")
    }
}

#[async_trait::async_trait]
impl SingleKey for Blocking {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn acquire(&self, _: Request) -> Result<Attempt, Error> {
        if !self.releases {
            self.block().await;
        }
        Ok(Attempt::Granted(Granted::with_token(None)))
    }

    async fn renew(&self, _: HoldRef) -> Result<Renewed, Error> {
        Ok(Renewed::Extended)
    }

    async fn release(&self, _: HoldRef) -> Result<ReleaseReply, Error> {
        self.block().await;
        Ok(ReleaseReply::new(true))
    }
}

#[test]
fn a_runtime_that_goes_away_in_the_middle_of_a_poll_is_no_panic() {
    for releases in [false, true] {
        let runtime = runtime();
        let ((entered, has_entered), (go_on, may_go_on)) = (mpsc::channel(), mpsc::channel());
        let capabilities = Capabilities::new(Scope::Process);
        let backend = Blocking { capabilities, releases, entered, go_on: Mutex::new(may_go_on) };
        let lock = Engine::builder(Single::new(backend)).runtime(runtime.handle().clone()).start().unwrap();
        let caller = std::thread::spawn(move || {
            futures_executor(async {
                let guard = lock.key("k").acquire().await?;
                guard.release().await
            })
        });
        has_entered.recv().unwrap();
        runtime.shutdown_timeout(Duration::from_secs(10));
        go_on.send(()).unwrap();
        let error = caller.join().expect("no panic").unwrap_err();
        let expected = if releases { ErrorKind::OutcomeUnknown } else { ErrorKind::Closed };
        assert_eq!(error.kind(), expected, "{error}");
    }
}

#[test]
fn closing_ends_with_a_runtime_that_ends_meanwhile() {
    let gone = runtime();
    let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
    let client = gone.block_on(async { store.client_with(ClientSetup::new()) }).unwrap();
    let guard = gone.block_on(client.lock.key("k").acquire()).unwrap();
    client.faults.silence(true);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| futures_executor(client.lock.close()));
        // Waits for the loss, which shows that the close has started.
        assert_eq!(futures_executor(guard.lost()), LossReason::Closed);
        gone.shutdown_background();
        let error = closing.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    });
}

#[test]
fn the_driver_ends_with_the_engine_and_its_last_guard() {
    let runtime = runtime();
    let metrics = runtime.metrics();
    runtime.block_on(async {
        let lock = MemoryStore::new().default_ttl(Duration::from_secs(30)).client().unwrap();
        let guard = lock.key("k").acquire().await.unwrap();
        drop(lock);
        assert_eq!(metrics.num_alive_tasks(), 1, "a guard keeps its engine going");
        assert_eq!(guard.validity(), Validity::Valid);
        guard.release().await.unwrap();
        while metrics.num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn an_engine_can_be_given_its_runtime() {
    let runtime = runtime();
    let lock =
        Engine::builder(MemoryStore::new().backend()).runtime(runtime.handle().clone()).start().unwrap();
    let guard = futures_executor(lock.key("k").acquire()).unwrap();
    futures_executor(guard.release()).unwrap();
}
