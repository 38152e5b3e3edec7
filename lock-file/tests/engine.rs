//! The store behind an engine, as in programs.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use common::LONG;
use leasehold_api::{
    Capabilities, Error, ErrorKind, Lock, LockExt as _, LossReason, Requirements, Scope, Validity,
    WindowOutcome,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Engine, Events, HoldRef, ReleaseReply, Renewed, Request, Timing,
};
use leasehold_file::{FileBackend, FileConfig, HeldFile};
use test_bounds::within;
use tokio::time::timeout;

fn connect(dir: &tempfile::TempDir) -> Arc<dyn Lock> {
    Arc::new(leasehold_file::connect(dir.path()).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (connect(&dir), connect(&dir));
    let first = a.key("k").acquire().await.unwrap();
    assert!(b.key("k").try_acquire().await.unwrap().is_none());
    let timed_out = b.key("k").wait(Duration::from_secs(1)).acquire().await.unwrap_err();
    assert_eq!(timed_out.kind(), ErrorKind::Timeout);
    assert!(timed_out.store().unwrap().starts_with("file:///"));
    let waiting = tokio::spawn({
        let b = Arc::clone(&b);
        async move { b.key("k").acquire().await }
    });
    let token = first.token();
    first.release().await.unwrap();
    let second = within(LONG, "not ended", waiting).await.unwrap().unwrap();
    assert!(second.token() > token);
    assert_eq!(second.validity(), Validity::Valid);
    assert!(second.extension::<HeldFile>().unwrap().inheritable().is_ok());
    second.release().await.unwrap();
    a.key("k").try_acquire().await.unwrap().expect("free after the release").release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_loses_no_increment() {
    let dir = tempfile::tempdir().unwrap();
    let counter = dir.path().join("counter");
    let clients: Vec<_> = (0..4).map(|_| connect(&dir)).collect();
    std::fs::write(&counter, "0").unwrap();
    let tasks: Vec<_> = (0..16)
        .map(|i| {
            let (lock, counter) = (Arc::clone(&clients[i % 4]), counter.clone());
            tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = lock.key("counter").wait_forever().acquire().await.unwrap();
                    let count: u64 = std::fs::read_to_string(&counter).unwrap().parse().unwrap();
                    tokio::task::yield_now().await;
                    std::fs::write(&counter, (count + 1).to_string()).unwrap();
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        within(LONG, "not ended", task).await.unwrap();
    }
    assert_eq!(std::fs::read_to_string(&counter).unwrap(), "160");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_directory_is_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let lock = FileConfig::new(dir.path().join("store")).connect().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let mut lost = guard.lost();
    assert!(timeout(Duration::ZERO, &mut lost).await.is_err());
    std::fs::remove_dir_all(dir.path().join("store")).unwrap();
    let bound = lock.capabilities().loss_detection;
    assert_eq!(within(bound, "not noticed", lost).await, LossReason::Gone);
    assert_eq!(guard.validity(), Validity::Lost);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_what_was_taken_away_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let lock = FileConfig::new(dir.path().join("store")).connect().unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    std::fs::remove_dir_all(dir.path().join("store")).unwrap();
    // Released before a confirmation notices the loss.
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_waits_and_guards_leave_the_key_free() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (connect(&dir), connect(&dir));
    let bound = a.capabilities().undo;
    for i in 0..40 {
        let guard = a.key("k").acquire().await.unwrap();
        // Drops the wait at varying moments, also while a thread is about to acquire the lock for it.
        let waiting = timeout(Duration::from_micros(200 * i), b.key("k").acquire());
        drop(guard);
        drop(waiting.await);
    }
    let guard = within(bound, "not undone", a.key("k").wait_forever().acquire()).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_most_once_per_window() {
    const HOUR: Duration = Duration::from_secs(3600);
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (connect(&dir), connect(&dir));
    let ran = a.key("hourly").at_most_once_per(HOUR).run(async |_| 1).await.unwrap();
    assert!(matches!(ran, WindowOutcome::Due(1)), "{ran:?}");
    for lock in [&a, &b] {
        let again = lock.key("hourly").at_most_once_per(HOUR).run(async |_| 2).await.unwrap();
        assert!(matches!(again, WindowOutcome::NotDue { .. }), "{again:?}");
    }
    let waited = b.key("hourly").wait(Duration::from_secs(1)).acquire().await.unwrap_err();
    assert_eq!(waited.kind(), ErrorKind::Timeout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cooldown_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (connect(&dir), connect(&dir));
    let started = Instant::now();
    let pause = Duration::from_millis(300);
    a.key("k").cooldown(pause).acquire().await.unwrap().release().await.unwrap();
    let guard = within(LONG, "not ended", b.key("k").wait_forever().acquire()).await.unwrap();
    assert!(started.elapsed() >= pause, "{:?}", started.elapsed());
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_frees_and_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (connect(&dir), connect(&dir));
    let guard = a.key("k").acquire().await.unwrap();
    let waiting = tokio::spawn({
        let a = Arc::clone(&a);
        async move { a.key("k").wait_forever().acquire().await }
    });
    a.close().await.unwrap();
    assert_eq!(within(LONG, "not ended", waiting).await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(guard.validity(), Validity::Lost);
    b.key("k").try_acquire().await.unwrap().expect("free after the close").release().await.unwrap();
    assert_eq!(a.key("k").try_acquire().await.unwrap_err().kind(), ErrorKind::Closed);
    a.close().await.unwrap();
}

#[test]
fn a_runtime_that_goes_away_frees_what_it_held() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let guard = runtime.block_on(async { connect(&dir).key("k").acquire().await.unwrap() });
    runtime.shutdown_timeout(LONG);
    assert_eq!(guard.validity(), Validity::Lost);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let next = connect(&dir).key("k").try_acquire().await.unwrap();
        next.expect("free although the guard is still there").release().await.unwrap();
    });
    drop(guard);
}

#[tokio::test]
async fn declares_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let lock = connect(&dir);
    lock.require(&Requirements::new().scope(Scope::Machine).durable_fencing().cooldown()).unwrap();
    for missing in [
        Requirements::new().lease(),
        Requirements::new().force_release(),
        Requirements::new().scope(Scope::Network),
    ] {
        assert_eq!(lock.require(&missing).unwrap_err().kind(), ErrorKind::Unsupported);
    }
    let lease = lock.key("k").ttl(LONG).acquire().await.unwrap_err();
    assert_eq!(lease.kind(), ErrorKind::Unsupported);
}

#[test]
fn without_a_runtime_there_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(leasehold_file::connect(dir.path()).unwrap_err().kind(), ErrorKind::NoRuntime);
}

/// A file store that counts its releases.
#[derive(Debug)]
struct Counting {
    store: FileBackend,
    releases: Arc<AtomicUsize>,
}

impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl Backend for Counting {
    fn capabilities(&self) -> &Capabilities {
        self.store.capabilities()
    }

    fn timing(&self) -> Timing {
        self.store.timing()
    }

    fn attach(&self, events: Events) {
        self.store.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        self.store.acquire(requests).await
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        self.store.wait(request, stop).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.store.renew(holds).await
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.releases.fetch_add(holds.len(), Ordering::Relaxed);
        self.store.release(holds).await
    }

    async fn close(&self) {
        self.store.close().await;
    }

    fn abort(&self) {
        self.store.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_refused_requests_leave_nothing_to_release() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let (store, releases) = (FileConfig::new(&dir).backend().unwrap(), Arc::default());
    let lock = Engine::start(Counting { store, releases: Arc::clone(&releases) }).unwrap();
    lock.key("damaged").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(releases.swap(0, Ordering::Relaxed), 1, "they are counted");
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "token") {
            std::fs::write(path, "{").unwrap();
        }
    }
    for i in 0..500 {
        let error = lock.key("damaged").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{i}: {error}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
    std::fs::write(&dir, "a file now").unwrap();
    for i in 0..500 {
        let error = lock.key(format!("k{i}").as_str()).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{i}: {error}");
    }
    // Close finishes all pending releases.
    lock.close().await.unwrap();
    assert_eq!(releases.load(Ordering::Relaxed), 0);
}
