//! Sessions, servers and clients that die, on a real server.
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::common::*;
use leasehold_api::{ErrorKind, HolderId, ListQuery, Lock as _, LockExt as _, LossReason, Validity};
use leasehold_engine::{Attempt, Backend as _, Renewed, Request};
use leasehold_postgres::{Liveness, RawBigint};
use leasehold_postgres_advisory::XactConfig;
use test_bounds::{Bound, within};
use test_servers::{Cluster, ClusterOptions, Proxy, Signal, StopMode};

// docs/hazards.md H18: the client sees the end of the session itself, long before the next confirmation.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_holders_session_is_noticed_at_once() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = numbers(seldom(database.url())).connect().await.unwrap();
    let in_transaction =
        XactConfig::new(seldom(database.url())).hasher(Arc::new(RawBigint)).connect().await.unwrap();
    for (lock, number) in [(&lock, 7), (&in_transaction, 8)] {
        let name = number.to_string();
        let guard = take(lock, &name).await;
        assert_eq!(guard.validity(), Validity::Valid);
        end(cluster, pid_of(cluster, database.name(), number).await).await;
        assert_eq!(lost_within(&guard, LONG).await, LossReason::SessionLost);
        let token = guard.token();
        let error = guard.release().await.unwrap_err();
        assert_eq!((error.kind(), error.loss()), (ErrorKind::Lost, Some(LossReason::SessionLost)));
        let next = take(lock, &name).await;
        assert!(next.token() > token, "{next:?} after {token:?}");
        next.release().await.unwrap();
    }
}

// docs/hazards.md H18: the session of a waiter, the session of a lock granted by waiting, and the session that
// listens.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_any_other_session_is_survived() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let lock = Arc::new(numbers(seldom(database.url())).connect().await.unwrap());
    let mine = take(&lock, "1").await;
    let listening = pid_of(cluster, database.name(), 1).await;

    // The session of a waiter ends. A waiter that gives up on failure gets the reason, and nothing is held.
    let held_by_other = take(&holder, "7").await;
    let waiting = giving_up(&lock, "7");
    until_queued(cluster, database.name(), 1).await;
    let locks = cluster.advisory_locks(database.name()).await;
    end(cluster, locks.iter().find(|lock| !lock.granted).unwrap().pid).await;
    let error = within(LONG, "not ended", waiting).await.unwrap().unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, "ended by the server's operator");
    assert_eq!(queued(cluster, database.name()).await, 0);
    assert_eq!(mine.validity(), Validity::Valid, "its neighbour on the other session");

    // A waiter that does not give up joins the queue again.
    let waiting = waiter(&lock, "7");
    until_queued(cluster, database.name(), 1).await;
    let locks = cluster.advisory_locks(database.name()).await;
    let first = locks.iter().find(|lock| !lock.granted).unwrap().pid;
    end(cluster, first).await;
    until("in the queue again", async || {
        let locks = cluster.advisory_locks(database.name()).await;
        locks.iter().any(|lock| !lock.granted && lock.pid != first)
    })
    .await;

    // The session of a lock granted by waiting ends.
    held_by_other.release().await.unwrap();
    let waited = waiting.await.unwrap().unwrap();
    let pid = pid_of(cluster, database.name(), 7).await;
    assert_ne!(pid, listening, "a waiter has a session of its own");
    end(cluster, pid).await;
    assert_eq!(lost_within(&waited, LONG).await, LossReason::SessionLost);
    assert_eq!(mine.validity(), Validity::Valid);

    // The session that listens ends while a waiter has a separate session, and the wait goes on.
    let held_by_other = take(&holder, "7").await;
    let waiting = waiter(&lock, "7");
    until_queued(cluster, database.name(), 1).await;
    end(cluster, listening).await;
    assert_eq!(lost_within(&mine, LONG).await, LossReason::SessionLost);
    held_by_other.release().await.unwrap();
    let guard = within(LONG, "not ended", waiting).await.unwrap().unwrap();
    assert!(is_held(&holder, "7").await);
    guard.release().await.unwrap();
    take(&lock, "1").await.release().await.unwrap();
    assert_eq!(held(cluster, database.name()).await, [0; 0]);
}

// docs/hazards.md H18: an old guard stays lost, and its release does not free the successor.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_reconnect_brings_nothing_back() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = session(database.url()).await;
    for lock in both(database.url()).await {
        let old = take(&lock, "7").await;
        end(cluster, pid_of(cluster, database.name(), 7).await).await;
        lost_within(&old, LONG).await;
        // The same client acquires the key on its new session.
        let next = take(&lock, "7").await;
        assert_eq!(old.validity(), Validity::Lost);
        assert_eq!(old.release().await.unwrap_err().kind(), ErrorKind::Lost);
        // The engine releases the lost guard at the store in the background. This later release is answered after
        // that.
        take(&lock, "8").await.release().await.unwrap();
        assert!(is_held(&other, "7").await, "the release of a lost guard freed its successor");
        assert_eq!(next.validity(), Validity::Valid);
        next.release().await.unwrap();
    }
}

// C2: checks the store without an engine, which would know that the old hold was lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_release_does_not_free_the_successor() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let session = numbers(server(database.url())).backend().await.unwrap();
    let in_transaction =
        XactConfig::new(server(database.url())).hasher(Arc::new(RawBigint)).backend().await.unwrap();
    for (backend, number) in [(&session, 7), (&in_transaction, 8)] {
        let request = |serial| Request::new(key(&number.to_string()), HolderId::from_parts(7, serial));
        let (old, new) = (request(1), request(2));
        let granted = |answers: Vec<Result<Attempt, _>>| matches!(answers[..], [Ok(Attempt::Granted(_))]);
        assert!(granted(backend.acquire(vec![old.clone()]).await));
        end(cluster, pid_of(cluster, database.name(), number).await).await;
        until("the successor has it", async || granted(backend.acquire(vec![new.clone()]).await)).await;
        for _ in 0..2 {
            let freed = backend.release(vec![old.hold()]).await.pop().unwrap().unwrap();
            assert!(!freed.was_held);
            let renewed = backend.renew(vec![old.hold()]).await.pop().unwrap().unwrap();
            assert_eq!(renewed, Renewed::Gone(LossReason::SessionLost));
        }
        assert_eq!(held(cluster, database.name()).await, [number]);
        // A repeated request is the same grant, released by one release.
        assert!(granted(backend.acquire(vec![new.clone()]).await));
        assert!(backend.release(vec![new.hold()]).await.pop().unwrap().unwrap().was_held);
        assert_eq!(held(cluster, database.name()).await, [0; 0]);
    }
    session.close().await;
    in_transaction.close().await;
}

// docs/hazards.md H13.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_told_to_holders_and_waiters_and_tokens_grow() {
    let cluster = Cluster::start(ClusterOptions::new());
    let url = cluster.url("postgres");
    let holder = Arc::new(session(&url).await);
    let waiting_client = Arc::new(numbers(seldom(&url)).connect().await.unwrap());
    let in_transaction = transaction(&url).await;
    let mut last = None;
    for crash in ["backend", "postmaster"] {
        let mine = take(&holder, "7").await;
        let other = take(&in_transaction, "8").await;
        assert!(mine.token() > last && other.token() > last, "{mine:?}, {other:?} after {last:?}");
        last = mine.token().max(other.token());
        let waiting = giving_up(&waiting_client, "7");
        until_queued(&cluster, "postgres", 1).await;
        match crash {
            // Any server process will do, because its crash restarts the whole server.
            "backend" => cluster.kill_backend(pid_of(&cluster, "postgres", 8).await, Signal::KILL),
            _ => cluster.kill_postmaster().await,
        }
        assert_eq!(lost_within(&mine, LONG).await, LossReason::SessionLost, "{crash}");
        assert_eq!(lost_within(&other, LONG).await, LossReason::SessionLost, "{crash}");
        if let Ok(guard) = within(LONG, "not ended", waiting).await.unwrap() {
            panic!("{guard:?} was granted in a crash of the {crash}");
        }
        if crash == "postmaster" {
            let error = refused_after_a_loss(&holder, "7").await;
            assert_error(&error, ErrorKind::Unavailable, "");
            cluster.start_again().await;
        }
        // Until it has recovered, the server refuses connections with a retryable error.
        for lock in [&*holder, &in_transaction] {
            until("usable again", async || match lock.key("7").try_acquire().await {
                Ok(Some(guard)) => {
                    assert!(guard.token() > last, "{guard:?} after {last:?}, {crash}");
                    guard.release().await.unwrap();
                    true
                }
                // An earlier attempt with unknown outcome is still being undone.
                Ok(None) => false,
                Err(error) => {
                    assert!(error.is_retryable(), "{error}");
                    false
                }
            })
            .await;
        }
    }
    cluster.stop(StopMode::Fast).await;
}

// docs/hazards.md H07: the connection is dead without an error. The client knows of the loss before the server frees
// the lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_path_is_lost_to_the_holder_first() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = session(database.url()).await;
    let proxy = Proxy::start(cluster.address()).await;
    // The hold is in doubt for long enough to be observed.
    let liveness = Liveness::new(ms(300), ms(10_000), ms(15_000));
    for lock in both_with(quick(&proxy.url(database.url())).liveness(liveness)).await {
        let guard = take(&lock, "7").await;
        proxy.stall();
        until("in doubt", async || guard.validity() != Validity::Valid).await;
        assert_eq!(guard.validity(), Validity::InDoubt, "in doubt before it is lost");
        lost_within(&guard, liveness.lost_after + LONG / 4).await;
        assert_eq!(guard.validity(), Validity::Lost);
        assert!(is_held(&other, "7").await, "the server still keeps others out: its probes are answered");
        let error = within(LONG, "not ended", lock.key("9").wait(ms(500)).acquire()).await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        proxy.restore();
        drop(guard);
        // The proxy forwards the stalled data and the client closes the old session, so the server frees the lock.
        let next = take(&other, "7").await;
        next.release().await.unwrap();
        take(&lock, "7").await.release().await.unwrap();
        within(LONG, "not ended", lock.close()).await.unwrap();
    }
}

// The server would keep the old session for ten minutes, but the client's next session ends it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_session_on_a_dead_path_kept_is_free_once_there_is_another() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let other = session(database.url()).await;
    let dying = Proxy::start(cluster.address()).await;
    let path = Proxy::start(format!("127.0.0.1:{}", dying.port())).await;
    // Confirms rarely, because the release would wait behind an unanswered confirmation.
    let liveness = Liveness::new(ms(2_000), ms(6_000), ms(600_000));
    let lock = numbers(quick(&path.url(database.url())).liveness(liveness)).connect().await.unwrap();
    let kept = take(&lock, "7").await;
    let freed = lock.keys((10..30).map(|n| n.to_string())).wait(LONG).acquire().await.unwrap();
    // The server frees all keys but one, and the reply is lost. That one key identifies the old session.
    dying.stall_replies();
    let cut = async {
        until("they are freed", async || held(cluster, database.name()).await == [7]).await;
        dying.stall();
        path.retarget(cluster.address());
        lost_within(&kept, LONG).await;
        take(&other, "7").await.release().await.unwrap();
    };
    let (released, ()) = tokio::join!(freed.release(), cut);
    assert_eq!(released.unwrap_err().kind(), ErrorKind::OutcomeUnknown);
    lock.close().await.unwrap();
}

/// The child process: acquires a key, waiting if necessary, and holds it until it is killed.
#[test]
fn child() {
    // Does nothing unless a test below started this process.
    let Ok(task) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    let (url, key) = task.split_once(' ').unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let lock = numbers(quick(url)).connect().await.unwrap();
        let _guard = lock.key(key).wait_forever().acquire().await.unwrap();
        std::future::pending::<()>().await;
    });
}

/// A child process, killed when the test ends or fails.
struct Process(Child);

impl Process {
    fn start(url: &str, key: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "loss::child", "--nocapture"])
            .env("LEASEHOLD_TEST_CHILD", format!("{url} {key}"));
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

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

// docs/hazards.md H07, H09.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_neither_holds_nor_waits() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = session(database.url()).await;
    let bound = LIVENESS.server_gives_up + LONG / 4;
    let mine = take(&lock, "7").await;
    let mut waiting = Process::start(database.url(), "7");
    until_queued(cluster, database.name(), 1).await;
    let waiter_pid =
        cluster.advisory_locks(database.name()).await.iter().find(|lock| !lock.granted).unwrap().pid;
    waiting.0.kill().unwrap();
    waiting.0.wait().unwrap();
    let killed = Bound::new(bound);
    // The lock is still held, so only the server's check of the client removes the waiter from the queue.
    until_queued(cluster, database.name(), 0).await;
    killed.check("the dead waiter is in the queue");
    until("its sessions end", async || {
        cluster.backends(database.name()).await.iter().all(|backend| backend.pid != waiter_pid)
    })
    .await;
    mine.release().await.unwrap();
    assert!(!is_held(&lock, "7").await, "a dead waiter was granted");

    let mut holding = Process::start(database.url(), "7");
    until("the child holds", async || held(cluster, database.name()).await == [7]).await;
    holding.0.kill().unwrap();
    let killed = Bound::new(bound);
    take(&lock, "7").await.release().await.unwrap();
    killed.check("held by the dead");
}

// docs/hazards.md H08: a stopped process keeps its lock, because its machine answers for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_keeps_its_lock() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let lock = session(database.url()).await;
    let holding = Process::start(database.url(), "7");
    until("the child holds", async || held(cluster, database.name()).await == [7]).await;
    holding.signal("-STOP");
    // Longer than the server waits for an unreachable client.
    let error = lock.key("7").wait(LIVENESS.server_gives_up + ms(2_000)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    drop(holding);
    take(&lock, "7").await.release().await.unwrap();
}

// The session existed when the release started, so the outcome is unknown, and a loss is not proven.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_a_frozen_server_does_not_answer_is_no_loss() {
    let cluster = Cluster::start(ClusterOptions::new());
    let lock = numbers(quick(&cluster.url("postgres"))).connect().await.unwrap();
    let guard = take(&lock, "1").await;
    cluster.pause();
    let error = guard.release().await.unwrap_err();
    cluster.resume();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    until("free again", async || match lock.key("1").try_acquire().await {
        Ok(Some(guard)) => guard.release().await.is_ok(),
        _ => false,
    })
    .await;
}

// Every call ends within its bound while the server is frozen, and works again afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_holds_nobody_up() {
    let cluster = Cluster::start(ClusterOptions::new());
    let locks = both_with(quick(&cluster.url("postgres"))).await;
    let mut guards = Vec::new();
    for (lock, keys) in locks.iter().zip([["1", "2"], ["3", "4"]]) {
        guards.push([take(lock, keys[0]).await, take(lock, keys[1]).await]);
    }
    cluster.pause();
    let everything = ListQuery::new();
    let calls = locks.iter().zip(guards).map(async |(lock, [kept, released])| {
        let (tried, acquired, released, looked) = tokio::join!(
            lock.key("11").try_acquire(),
            lock.key("12").wait(ms(1_000)).acquire(),
            released.release(),
            lock.admin().unwrap().list(&everything),
        );
        assert!(tried.unwrap_err().is_retryable());
        assert!(acquired.unwrap_err().is_retryable());
        // The client gives up either the release or the session first, depending on timing.
        let released = released.unwrap_err().kind();
        assert!(released.is_transient() || released == ErrorKind::Lost, "{released:?}");
        assert!(looked.unwrap_err().is_retryable());
        lost_within(&kept, LONG).await;
    });
    within(LONG / 2, "not ended", futures_util::future::join_all(calls)).await;
    cluster.resume();
    for lock in &locks {
        until("usable again", async || match lock.key("7").try_acquire().await {
            Ok(Some(guard)) => guard.release().await.is_ok(),
            _ => false,
        })
        .await;
    }
    for lock in &locks {
        for key in ["1", "2", "3", "4"] {
            // Repeats it, because the short limits can pass on a busy machine.
            until("taken and released", async || take(lock, key).await.release().await.is_ok()).await;
        }
        let _ = lock.close().await;
    }
    until("nothing is held", async || held(&cluster, "postgres").await.is_empty()).await;
}
