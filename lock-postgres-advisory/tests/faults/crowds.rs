//! Many waiters, and a waiter whose connection is dead: the cost of waiting for the holders.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::*;
use leasehold_api::{ErrorKind, Lock as _, LockExt as _};
use leasehold_engine::Engine;
use test_servers::{Cluster, Proxy, Signal};

// docs/hazards.md H07: a connection that only reads never learns that its path is dead. So the client must stop
// waiting for it and must stop sending requests to end it.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_whose_session_does_not_answer_any_more_is_given_up() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let config = seldom(&proxy.url(database.url())).statement_timeout(ms(3_000));
    let lock = numbers(config).waiting(1).connect().await.unwrap();
    let mut holder = database.connect().await;
    run(&mut holder, "SELECT pg_advisory_lock(7)").await;
    let sessions = proxy.traffic().open;
    let mut waiting = std::pin::pin!(lock.key("7").wait(ms(6_000)).acquire());
    let pid = tokio::select! {
        outcome = &mut waiting => panic!("it does not wait: {outcome:?}"),
        pid = async {
            until_queued(cluster, database.name(), 1).await;
            let locks = cluster.advisory_locks(database.name()).await;
            locks.iter().find(|lock| !lock.granted).unwrap().pid
        } => pid,
    };
    cluster.kill_backend(pid, Signal::STOP);
    let outcome = waiting.await.unwrap_err();
    assert_eq!(outcome.kind(), ErrorKind::Timeout, "{outcome}");
    // Before the client gives the session up, it sends ten requests per second.
    until("it is given up", async || {
        let before = proxy.traffic().round_trips;
        tokio::time::sleep(ms(1_000)).await;
        proxy.traffic().round_trips == before
    })
    .await;
    cluster.kill_backend(pid, Signal::CONT);
    until("nobody is queued", async || queued(cluster, database.name()).await == 0).await;
    until("its connection is closed", async || proxy.traffic().open == sessions).await;
    // A session for waiting is available again.
    let released = async {
        until_queued(cluster, database.name(), 1).await;
        run(&mut holder, "SELECT pg_advisory_unlock(7)").await;
    };
    let (guard, ()) = tokio::join!(take(&lock, "7"), released);
    guard.release().await.unwrap();
    lock.close().await.unwrap();
}

// Pollers that start together set their marks in one statement. With a statement each, confirmations would queue
// behind them and come too late.
#[tokio::test(flavor = "multi_thread")]
async fn marks_of_many_waiters_are_a_few_statements() {
    const KEYS: usize = 64;
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let mut guards = Vec::new();
    for n in 0..KEYS {
        guards.push(take(&holder, &n.to_string()).await);
    }
    let proxy = Proxy::start(cluster.address()).await;
    let config = numbers(seldom(&proxy.url(database.url()))).waiting(1);
    let lock = Arc::new(config.connect().await.unwrap());
    proxy.delay(ms(30));
    let before = proxy.traffic().round_trips;
    let waiters: Vec<_> = (0..KEYS).map(|n| waiter(&lock, &n.to_string())).collect();
    until("all but one poll", async || marks(cluster, database.name()).await == KEYS - 1).await;
    let taken = proxy.traffic().round_trips - before;
    // The count includes opening the session that waits in the queue.
    assert!(taken < KEYS as u64 * 3 / 4, "{taken} round trips");
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    until("no mark is left", async || marks(cluster, database.name()).await == 0).await;
    proxy.delay(ms(0));
    lock.close().await.unwrap();
}

/// Acquires the key, holds it and releases it in a loop.
async fn hog(lock: Arc<Engine>, grants: Arc<AtomicU64>, enough: Arc<AtomicBool>) {
    while !enough.load(Ordering::Acquire) {
        let guard = take(&lock, "7").await;
        grants.fetch_add(1, Ordering::AcqRel);
        tokio::time::sleep(ms(20)).await;
        guard.release().await.unwrap();
    }
}

// C12: a waiter that has to poll is served despite clients that loop, although its connection is slower than theirs.
#[tokio::test(flavor = "multi_thread")]
async fn those_who_take_a_key_in_a_loop_leave_it_to_one_that_polls() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let near = Arc::new(session(database.url()).await);
    let mut observer = database.connect().await;
    run(&mut observer, "SELECT pg_advisory_lock(1)").await;
    let proxy = Proxy::start(cluster.address()).await;
    let far = Arc::new(numbers(server(&proxy.url(database.url()))).waiting(1).connect().await.unwrap());
    let queued = waiter(&far, "1");
    until_queued(cluster, database.name(), 1).await;

    let (grants, enough) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let hogs =
        [(); 2].map(|()| tokio::spawn(hog(Arc::clone(&near), Arc::clone(&grants), Arc::clone(&enough))));
    proxy.delay(ms(5));
    let before = grants.load(Ordering::Acquire);
    let guard = take(&far, "7").await;
    let overtaken = grants.load(Ordering::Acquire) - before;
    assert!(overtaken < 40, "{overtaken} came before it");
    enough.store(true, Ordering::Release);
    guard.release().await.unwrap();
    for hog in hogs {
        hog.await.unwrap();
    }
    run(&mut observer, "SELECT pg_advisory_unlock(1)").await;
    queued.await.unwrap().unwrap().release().await.unwrap();
}
