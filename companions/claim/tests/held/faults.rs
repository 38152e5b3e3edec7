//! Faults during held claims, and locks on single rows.

use std::time::{Duration, Instant};

use crate::common::*;
use leasehold_api::ErrorKind;
use leasehold_claim::{ClaimError, LockWait, Outcome, PgHeld, RowKey, Take};
use sqlx::Connection as _;
use test_bounds::within;
use test_servers::{Cluster, PgBouncer, PgBouncerOptions, Proxy, fresh_database};
use tokio::io::{AsyncBufReadExt as _, BufReader};

fn kind(error: &ClaimError) -> ErrorKind {
    match error {
        ClaimError::Store(error) => error.kind(),
        other => panic!("{other}"),
    }
}

/// Waits until the server has no session of this process any more.
async fn until_gone(observer: &mut sqlx::PgConnection, pid: &str) {
    until(observer, &format!("NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})")).await;
}

/// Child process of the next test: takes a row, writes, reports that, and waits to be killed.
#[tokio::test]
async fn child_that_is_killed() {
    let Ok(url) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    let held = PgHeld::new(pool(&url, 1).await, requests().build().unwrap());
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    run(hold.connection(), "INSERT INTO request (id) VALUES (99)").await;
    let claimed = hold.taken().claims[0].clone();
    hold.settle(&claimed.claim, &Outcome::Done).await.unwrap();
    let pid = text(hold.connection(), "SELECT pg_backend_pid()").await;
    println!("\nheld {pid} {} {}", claimed.epoch().unwrap(), claimed.rows[0].dedupe_key(held.spec()));
    std::future::pending::<()>().await;
}

/// Its worker is killed. Once the server has ended the session, the very next call takes the row, unchanged and with all
/// attempts. The second run has the same key for external effects, and a greater epoch.
#[tokio::test]
async fn the_row_of_a_killed_worker_is_free_again_with_a_greater_epoch() {
    let db = fresh_database().await;
    let (held, mut observer) = request(&db, requests().build().unwrap()).await;
    run(&mut observer, "INSERT INTO request (id) VALUES (1)").await;
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "faults::child_that_is_killed", "--nocapture"])
        .env("LEASEHOLD_TEST_CHILD", db.url())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = async {
        loop {
            let line = lines.next_line().await.unwrap().expect("the child has ended");
            if let Some(said) = line.strip_prefix("held ") {
                return said.to_owned();
            }
        }
    };
    let said = within(LONG, "not ended", said).await;
    let [pid, epoch, key] = said.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    assert!(held.begin(&Take::up_to(1)).await.unwrap().is_none());
    child.start_kill().unwrap();
    child.wait().await.unwrap();
    until_gone(&mut observer, pid).await;
    let hold = held.begin(&Take::up_to(1)).await.unwrap().expect("the row is free");
    let row = &hold.taken().claims[0].rows[0];
    assert_eq!((row.found.as_str(), row.attempts_left), ("new", Some(2)), "the attempt was rolled back too");
    assert_eq!(row.dedupe_key(held.spec()), key);
    assert!(row.epoch > epoch.parse::<i64>().unwrap());
    assert_eq!(text(&mut observer, "SELECT count(*) FROM request").await, "1", "the work was rolled back");
}

/// The same if the server ends the session. The worker gets an error, and its work is rolled back.
#[tokio::test]
async fn the_rows_of_a_terminated_session_are_free_again() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    for settle_first in [true, false] {
        let mut hold = held.begin(&Take::up_to(5)).await.unwrap().unwrap();
        let claim = hold.taken().claims[0].claim.clone();
        let pid = text(hold.connection(), "SELECT pg_backend_pid()").await;
        if settle_first {
            hold.settle(&claim, &Outcome::Done).await.unwrap();
        }
        run(&mut observer, &format!("SELECT pg_terminate_backend({pid})")).await;
        until_gone(&mut observer, &pid).await;
        let again = held.begin(&Take::up_to(5)).await.unwrap().expect("the rows are free");
        assert_eq!(again.taken().claims.len(), 5);
        again.rollback().await.unwrap();
        if settle_first {
            // The error can be `OutcomeUnknown`, because the commit's answer might have been lost.
            let error = hold.commit().await.unwrap_err();
            assert!(matches!(kind(&error), ErrorKind::OutcomeUnknown | ErrorKind::Unavailable), "{error}");
        } else {
            let error = hold.settle(&claim, &Outcome::Done).await.unwrap_err();
            assert_eq!(kind(&error), ErrorKind::Unavailable, "{error}");
            assert_eq!(kind(&hold.commit().await.unwrap_err()), ErrorKind::Unavailable);
        }
    }
    assert_eq!(text(&mut observer, "SELECT count(*) FROM payment WHERE processed").await, "0");
}

/// The commit of a transaction that the server ended for idling returns an error.
#[tokio::test]
async fn an_idle_transaction_that_was_ended_is_not_committed() {
    let db = fresh_database().await;
    let (held, mut observer) = payment(&db).await;
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    let pid = text(hold.connection(), "SELECT pg_backend_pid()").await;
    run(hold.connection(), "SET idle_in_transaction_session_timeout = '20ms'").await;
    until_gone(&mut observer, &pid).await;
    hold.settle(&claim, &Outcome::Done).await.unwrap_err();
    hold.commit().await.unwrap_err();
    assert_eq!(text(&mut observer, "SELECT count(*) FROM payment WHERE processed").await, "0");
    assert_eq!(held.begin(&Take::up_to(5)).await.unwrap().unwrap().taken().claims.len(), 5);
}

/// If the answer to the commit is lost, the error is `OutcomeUnknown`, and the row is settled once.
#[tokio::test]
async fn a_commit_without_an_answer_is_unknown() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, PAYMENT).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let held = PgHeld::new(pool(&proxy.url(db.url()), 2).await, payments());
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    hold.settle(&claim, &Outcome::Done).await.unwrap();
    proxy.drop_next_reply();
    assert_eq!(kind(&hold.commit().await.unwrap_err()), ErrorKind::OutcomeUnknown);
    until(&mut observer, "SELECT processed FROM payment WHERE id = 1").await;
    proxy.restore();
    assert_eq!(ids(held.begin(&Take::up_to(1)).await.unwrap().unwrap().taken()), ["2"]);
}

/// A statement without an answer times out, and the hold cannot be used afterwards.
#[tokio::test]
async fn every_wait_for_the_server_has_an_end() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, PAYMENT).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let held = PgHeld::new(pool(&proxy.url(db.url()), 2).await, payments()).timeout(ms(200));
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    proxy.stall();
    assert_eq!(kind(&hold.settle(&claim, &Outcome::Done).await.unwrap_err()), ErrorKind::Unavailable);
    for outcome in [Outcome::Done, Outcome::PutBack] {
        let error = hold.settle(&claim, &outcome).await.unwrap_err();
        assert!(error.to_string().contains("given up"), "{error}");
    }
    assert!(hold.commit().await.unwrap_err().to_string().contains("given up"));
    proxy.cut();
    proxy.restore();
    until(&mut observer, "SELECT count(*) = 5 FROM (SELECT FROM payment FOR UPDATE SKIP LOCKED) r").await;
    let hold = held.clone().timeout(LONG).begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(hold.taken().claims.len(), 5);
}

/// A take or a hold that is dropped at any await leaves no transaction on its connection.
#[tokio::test]
async fn whatever_is_dropped_rolls_back() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, PAYMENT).await;
    let held = PgHeld::new(pool(db.url(), 1).await, payments());
    for polls in 0..60 {
        let take = Take::up_to(2);
        let mut taking = Box::pin(held.begin(&take));
        let mut dropped = true;
        for _ in 0..polls {
            if let std::task::Poll::Ready(hold) = futures_util::poll!(&mut taking) {
                drop(hold);
                dropped = false;
                break;
            }
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        drop(taking);
        // The pool's only connection must not have an open transaction.
        let mut connection = pool_of(&held).await;
        let clean = "SELECT now() = statement_timestamp()";
        assert_eq!(text(&mut *connection, clean).await, "true", "{polls} {dropped}");
    }
    let hold = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(hold.taken().claims.len(), 5);
    drop(hold);
    assert_eq!(held.begin(&Take::up_to(9)).await.unwrap().unwrap().taken().claims.len(), 5);
}

async fn pool_of(held: &PgHeld) -> sqlx::pool::PoolConnection<sqlx::Postgres> {
    within(LONG, "not ended", held.pool().acquire()).await.unwrap()
}

/// Behind a pooler in transaction mode, where the next transaction is on another connection.
#[tokio::test]
async fn behind_a_pooler_in_transaction_mode() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, REQUEST).await;
    run(&mut observer, "INSERT INTO request (id, entity) SELECT n, n % 5 FROM generate_series(1, 50) n")
        .await;
    let bouncer = PgBouncer::start(Cluster::shared(), &PgBouncerOptions::new().round_robin());
    let pool = pool(&bouncer.url(db.name()), 3).await;
    for spec in [
        requests(),
        requests().grouped(),
        requests().waits("update", "create", leasehold_claim::Unmet::Run, leasehold_claim::Unmet::Run),
    ] {
        run(&mut observer, "UPDATE request SET status = 'new', attempts = 3").await;
        let held = PgHeld::new(pool.clone(), spec.build().unwrap()).behind_pooler();
        let mut pass = passes(&held, Take::up_to(3));
        while let Step::Hold(mut hold) = pass.next().await {
            // A concurrent transaction, so the pooler assigns other server connections.
            held.begin(&Take::up_to(1)).await.unwrap();
            hold.settle_all().await;
            hold.commit().await;
        }
        until(&mut observer, "SELECT count(*) = 50 FROM (SELECT FROM request FOR UPDATE SKIP LOCKED) r")
            .await;
        while let Some(mut hold) = held.begin(&Take::up_to(50)).await.unwrap() {
            for claimed in hold.taken().claims.clone() {
                hold.settle(&claimed.claim, &Outcome::Done).await.unwrap();
            }
            hold.commit().await.unwrap();
        }
        assert_eq!(text(&mut observer, "SELECT count(*) FROM request WHERE status = 'complete'").await, "50");
    }
}

/// A row lock can wait, fail at once, or skip. It blocks other writers. A failed wait leaves the transaction unchanged.
#[tokio::test]
async fn one_row_is_locked_by_its_id_waiting_failing_or_skipping() {
    let db = fresh_database().await;
    let (held, mut observer) = request(&db, requests().build().unwrap()).await;
    run(&mut observer, "INSERT INTO request (id, queue, body) VALUES (1, 'it''s', '[1]'), (1, 'b', NULL)")
        .await;
    let key = RowKey::queued("it's", 1);
    let (mut one, mut two) = (db.connect().await, db.connect().await);
    run(&mut one, "BEGIN").await;
    let row = held.lock_row(&mut one, &key, LockWait::NoWait).await.unwrap().unwrap();
    assert_eq!((row.found.as_str(), row.work["body"].to_string()), ("new", "[1]".to_owned()));
    // The lock blocks another writer, and a claim skips the row.
    run(&mut two, "SET lock_timeout = '1234ms'; SET statement_timeout = '23456ms'").await;
    let update = "UPDATE request SET body = '[2]' WHERE queue = 'it''s'";
    let error = sqlx::query("SELECT FROM request WHERE queue = 'it''s' FOR UPDATE NOWAIT")
        .execute(&mut two)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("could not obtain lock"), "{error}");
    assert_eq!(ids(held.begin(&Take::up_to(9)).await.unwrap().unwrap().taken()), ["1"]);
    run(&mut two, "BEGIN").await;
    run(&mut two, "INSERT INTO request (id) VALUES (50)").await;
    assert!(held.lock_row(&mut two, &key, LockWait::Skip).await.unwrap().is_none());
    for wait in [LockWait::NoWait, LockWait::Block(Duration::ZERO), LockWait::Block(ms(30))] {
        let began = Instant::now();
        let error = held.lock_row(&mut two, &key, wait).await.unwrap_err();
        assert!(matches!(error, ClaimError::Busy { .. }), "{wait:?}: {error}");
        assert!(wait != LockWait::Block(ms(30)) || began.elapsed() >= ms(30));
        // The transaction is usable, with its work and its time limits.
        let limits = "SELECT current_setting('lock_timeout') || ' ' || current_setting('statement_timeout')";
        assert_eq!(text(&mut two, limits).await, "1234ms 23456ms");
        assert_eq!(text(&mut two, "SELECT count(*) FROM request WHERE id = 50").await, "1");
    }
    let other = held.lock_row(&mut two, &RowKey::queued("b", 1), LockWait::NoWait).await.unwrap();
    assert!(other.is_some(), "the same id in another queue");
    for wait in [LockWait::NoWait, LockWait::Skip, LockWait::Block(LONG)] {
        let error = held.lock_row(&mut two, &RowKey::queued("b", 77), wait).await.unwrap_err();
        assert!(matches!(error, ClaimError::NotFound { .. }), "{error}");
    }
    // The wait ends with the holder's transaction, and the row has the holder's changes.
    let waited = async {
        let row = held.lock_row(&mut two, &key, LockWait::Block(LONG)).await.unwrap().unwrap();
        assert_eq!(row.work["body"].to_string(), "[2]");
    };
    let lets_go = async {
        until(&mut observer, "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()").await;
        run(&mut one, update).await;
        run(&mut one, "COMMIT").await;
    };
    tokio::join!(waited, lets_go);
    let waiting = format!(
        "{}::int = 1",
        "SELECT (SELECT count(*) FROM (SELECT FROM request WHERE id = 1 FOR UPDATE SKIP LOCKED) r) + 1"
    );
    assert_eq!(text(&mut observer, &waiting).await, "true", "both are locked");
    run(&mut two, "COMMIT").await;
    assert_eq!(text(&mut observer, "SELECT count(*) FROM request WHERE id = 50").await, "1");
    two.close().await.unwrap();
}
