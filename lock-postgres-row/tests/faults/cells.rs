//! Guarantees (`docs/coverage.md`) of the row store: crashes, fail-over, a stopped holder, connections.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::LONG;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _, LockKey, Validity, WindowOutcome};
use leasehold_postgres::Pooler;
use leasehold_postgres_row::{PgConfig, RowConfig};
use test_bounds::within;
use test_servers::{Cluster, ClusterOptions, Proxy, Standby, StopMode};

/// Confirmation interval, shorter than in production to shorten the tests. A hold is lost after a second.
const CONFIRM: Duration = Duration::from_millis(200);

const HOUR: Duration = Duration::from_secs(3_600);

fn config_of(url: &str) -> RowConfig {
    RowConfig::new(PgConfig::from_url(url).unwrap().install_schema(true))
}

// Row f of docs/coverage.md.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_opens_nothing_and_tokens_grow() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    // A hold is lost only after 15 s without a reply, because a slow machine can need several seconds.
    let config = config_of(database.url()).confirm(Duration::from_secs(3));
    let (lock, other) = (config.connect().await.unwrap(), config.connect().await.unwrap());
    let guard = lock.key("k").acquire().await.unwrap();
    assert_eq!(
        lock.key("hourly").at_most_once_per(HOUR).run(async |_| ()).await.unwrap(),
        WindowOutcome::Due(())
    );
    cluster.kill_postmaster().await;
    cluster.start_again().await;
    let end = Instant::now() + LONG;
    let refused = loop {
        match other.key("k").try_acquire().await {
            Ok(answer) => break answer.is_none(),
            // The client's connections ended with the server.
            Err(error) => assert!(error.is_retryable() && Instant::now() < end, "{error}"),
        }
    };
    assert!(refused, "the crash has opened the row");
    // The holder confirms in time and keeps the key.
    let end = Instant::now() + LONG;
    while guard.validity() != Validity::Valid {
        assert!(guard.validity() == Validity::InDoubt && Instant::now() < end, "{guard:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let token = guard.token();
    // A release sent on a connection that ended with the server is repeated in the background.
    if let Err(error) = guard.release().await {
        assert_ne!(error.kind(), ErrorKind::Lost, "{error}");
    }
    let next = other.key("k").wait(LONG).acquire().await.unwrap();
    assert!(next.token() > token, "{:?} after {token:?}", next.token());
    next.release().await.unwrap();
    let again = other.key("hourly").at_most_once_per(HOUR).run(async |_| ()).await.unwrap();
    assert!(matches!(again, WindowOutcome::NotDue { .. }), "the crash has ended the cooldown: {again:?}");
    cluster.stop(StopMode::Fast).await;
}

// Row g, docs/hazards.md H12.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_the_promoted_standby_lacks_is_open_there() {
    let primary = Cluster::start(ClusterOptions::new());
    let database = primary.fresh_database().await;
    let proxy = Proxy::start(primary.address()).await;
    let lock = config_of(&proxy.url(database.url())).confirm(CONFIRM).connect().await.unwrap();
    let standby = Standby::of(&primary).await;
    standby.wait_for_replay(&primary).await;
    standby.cut().await;
    // More tokens than the server logs ahead of use.
    for _ in 0..100 {
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
    }
    let guard = lock.key("k").acquire().await.unwrap();
    standby.promote().await;
    // Leads all clients to the new primary, as a fail-over does.
    proxy.retarget(standby.cluster().address());
    proxy.reset();
    let there = config_of(&standby.url(database.name())).connect().await.unwrap();
    let successor = there.key("k").try_acquire().await.unwrap().expect("the standby has never heard of it");
    assert!(successor.token() > guard.token(), "{:?} after {:?}", successor.token(), guard.token());
    let bound = lock.capabilities().loss_detection;
    within(bound, "the old holder is not told", guard.lost()).await;
    assert!(guard.release().await.is_err());
    assert!(lock.key("k").try_acquire().await.unwrap().is_none(), "the late release freed the successor");
    assert_eq!(successor.validity(), Validity::Valid);
    successor.release().await.unwrap();
}

/// The child process: holds a row and prints the guard's validity after a line on its input. Started by the test
/// below.
#[test]
fn child() {
    let Ok(url) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let lock = config_of(&url).confirm(CONFIRM).connect().await.unwrap();
        let guard = lock.key("k").acquire().await.unwrap();
        println!("holds");
        let told = tokio::task::spawn_blocking(|| std::io::stdin().lines().next().unwrap().unwrap());
        told.await.unwrap();
        println!("reads {:?}", guard.validity());
        guard.lost().await;
        println!("released {}", guard.release().await.is_ok());
        // The client closes in good order.
        lock.close().await.unwrap();
        println!("closed");
    });
}

/// A child process, killed when the test ends or fails.
struct Process(Child);

impl Process {
    fn signal(&self, signal: &str) {
        let done = Command::new("kill").args([signal, &self.0.id().to_string()]).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// Row e of docs/coverage.md.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_stopped_reads_lost_and_its_row_stays_shut() {
    let database = Cluster::shared().fresh_database().await;
    let other = config_of(database.url()).connect().await.unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cells::child", "--nocapture"]).env("LEASEHOLD_TEST_CHILD", database.url());
    let mut child = Process(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let mut says = |what: &str| said.by_ref().map(Result::unwrap).find(|line| line.contains(what)).unwrap();
    says("holds");
    child.signal("-STOP");
    tokio::time::sleep(CONFIRM * 5 + Duration::from_millis(200)).await;
    assert!(other.key("k").try_acquire().await.unwrap().is_none());
    child.0.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    child.signal("-CONT");
    // At the first query, before the client has exchanged anything with the server.
    assert_eq!(says("reads"), "reads Lost");
    assert_eq!(says("released"), "released false");
    says("closed");
    assert!(other.key("k").try_acquire().await.unwrap().is_none(), "it was opened by a holder that lost it");
    let key = LockKey::new("k").unwrap();
    let admin = other.admin().unwrap();
    let info = admin.inspect(&key).await.unwrap();
    assert!(admin.force_release(&key, info.holder().unwrap().holder.unwrap()).await.unwrap());
    other.key("k").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

// Row u of docs/coverage.md.
#[tokio::test(flavor = "multi_thread")]
async fn two_connections_serve_any_number_of_holds_and_waiters() {
    const KEYS: usize = 200;
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    // Not `Detect` or `None`, because both open another connection for a moment to detect a pooler.
    let postgres = PgConfig::from_url(database.url()).unwrap().install_schema(true).pooler(Pooler::Known);
    // A hold is lost only after 15 s without a reply, because a slow machine can need several seconds.
    let config = RowConfig::new(postgres).confirm(Duration::from_secs(3));
    let lock = Arc::new(config.connect().await.unwrap());
    for _ in 0..2 {
        let tasks: Vec<_> = (0..KEYS * 2)
            .map(|n| {
                let lock = Arc::clone(&lock);
                tokio::spawn(async move {
                    let guard =
                        lock.key(format!("k{}", n % KEYS).as_str()).wait(LONG).acquire().await.unwrap();
                    guard.confirm().await.unwrap();
                    guard.release().await.unwrap();
                })
            })
            .collect();
        while !tasks.iter().all(tokio::task::JoinHandle::is_finished) {
            let connections = cluster.backends(database.name()).await;
            assert!((1..=2).contains(&connections.len()), "{connections:?}");
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
}
