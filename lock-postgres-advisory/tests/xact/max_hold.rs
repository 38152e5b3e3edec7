//! Transactions with a lock whose program hangs. The maximum hold lets others in.

use std::sync::mpsc;

use crate::common::*;
use leasehold_postgres::OpenTransaction;
use test_servers::fresh_database;
use tokio::time::timeout;

/// The caller's future never returns. Another session ends the caller's transaction, and with it the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_borrowed_connection_whose_caller_awaits_for_ever_loses_its_lock() {
    let db = fresh_database().await;
    let (pool, mut mine, mut other) = (pool(db.url(), 4).await, db.connect().await, db.connect().await);
    run(&mut mine, "CREATE TABLE work (n int)").await;
    let bounded = locks().max_hold(ms(200), pool);
    for many in [false, true] {
        run(&mut mine, "BEGIN; INSERT INTO work VALUES (1)").await;
        if many {
            let wait = leasehold_postgres_advisory::LockWait::NoWait;
            bounded.lock_all_in(&mut mine, &[key("a"), key("b")], wait).await.unwrap();
        } else {
            bounded.lock_in(&mut mine, &key("a"), LONG).await.unwrap();
        }
        run(&mut other, "BEGIN").await;
        locks().lock_in(&mut other, &key("a"), LONG).await.unwrap();
        assert_eq!(text(&mut other, "SELECT count(*) FROM work").await, "0", "its work is undone");
        run(&mut other, "ROLLBACK").await;
        assert!(sqlx::raw_sql("SELECT 1").execute(&mut mine).await.is_err(), "its session has ended");
        mine = db.connect().await;
    }
}

/// A task with its own transaction writes and then blocks its thread. Its write does not count.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_task_that_blocks_its_thread_loses_its_lock() {
    let db = fresh_database().await;
    let (pool, mut other) = (pool(db.url(), 4).await, db.connect().await);
    run(&mut other, "CREATE TABLE work (n int)").await;
    let bounded = locks().max_hold(ms(200), pool.clone());
    let (release, blocked) = mpsc::channel::<()>();
    let (told, begun) = tokio::sync::oneshot::channel();
    let task = tokio::spawn(async move {
        let mut guard = bounded.begin(&pool, &key("a"), LONG).await.unwrap();
        let written = sqlx::raw_sql("INSERT INTO work VALUES (1)").execute(&mut *guard).await;
        told.send(written.map(|written| written.rows_affected())).unwrap();
        let _ = blocked.recv();
        guard.commit().await
    });
    assert_eq!(timeout(LONG, begun).await.unwrap().unwrap().unwrap(), 1);
    run(&mut other, "BEGIN").await;
    locks().lock_in(&mut other, &key("a"), LONG).await.unwrap();
    assert_eq!(text(&mut other, "SELECT count(*) FROM work").await, "0", "its work is undone");
    release.send(()).unwrap();
    assert!(timeout(LONG, task).await.unwrap().unwrap().is_err());
    assert_eq!(text(&mut other, "SELECT count(*) FROM work").await, "0", "nothing is committed");
}

/// A later transaction of the same session is not ended.
#[tokio::test]
async fn a_transaction_that_has_ended_is_not_ended_again() {
    let db = fresh_database().await;
    let (pool, mut mine) = (pool(db.url(), 4).await, db.connect().await);
    run(&mut mine, "BEGIN").await;
    let open = OpenTransaction::of(&mut mine, LONG).await.unwrap();
    assert_eq!(OpenTransaction::of(&mut mine, LONG).await.unwrap(), open);
    run(&mut mine, "COMMIT").await;
    assert!(!open.end(&pool, LONG).await.unwrap());
    run(&mut mine, "BEGIN").await;
    assert!(!open.end(&pool, LONG).await.unwrap());
    let later = OpenTransaction::of(&mut mine, LONG).await.unwrap();
    run(&mut mine, "SELECT 1").await;
    assert!(later.end(&pool, LONG).await.unwrap());
    assert!(sqlx::raw_sql("SELECT 1").execute(&mut mine).await.is_err());
    assert!(!later.end(&pool, LONG).await.unwrap());
}
