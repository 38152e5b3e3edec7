//! Locks in the caller's transaction, on a real server.

use std::time::Instant;

use crate::common::*;
use leasehold_api::ErrorKind;
use leasehold_postgres::{Djb2Xor, Identifier, RawBigint, RawPair};
use leasehold_postgres_advisory::{LockWait, XactLocks};
use sqlx::Connection as _;
use sqlx::postgres::PgPoolOptions;
use test_servers::fresh_database;

#[tokio::test]
async fn both_scopes_of_a_key_exclude_each_other() {
    let db = fresh_database().await;
    let (mut a, mut other) = (db.connect().await, db.connect().await);
    let mut tx = a.begin().await.unwrap();
    let proof = locks().lock_in(&mut tx, &key("k"), LONG).await.unwrap();
    assert!(!free(&mut other, proof.number()).await);
    tx.commit().await.unwrap();
    assert!(free(&mut other, proof.number()).await, "a commit frees it");

    run(&mut other, &format!("SELECT pg_advisory_lock({})", proof.number())).await;
    let mut tx = a.begin().await.unwrap();
    assert_eq!(locks().try_lock_in(&mut tx, &key("k")).await.unwrap(), None);
    assert_eq!(locks().lock_with(&mut tx, &key("k"), LockWait::Skip).await.unwrap(), None);
    for wait in [LockWait::NoWait, LockWait::Block(ms(0)), LockWait::Block(ms(1))] {
        let error = locks().lock_with(&mut tx, &key("k"), wait).await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Timeout, Some(&key("k"))), "{wait:?}");
    }
    run(&mut other, &format!("SELECT pg_advisory_unlock({})", proof.number())).await;
    assert_eq!(locks().try_lock_in(&mut tx, &key("k")).await.unwrap(), Some(proof));
}

#[tokio::test]
async fn every_end_of_a_transaction_frees() {
    let db = fresh_database().await;
    let mut other = db.connect().await;
    for end in ["rollback", "failure", "disconnect"] {
        let mut a = db.connect().await;
        run(&mut a, "BEGIN").await;
        let proof = locks().lock_in(&mut a, &key("k"), LONG).await.unwrap();
        proof.check(&mut a).await.unwrap();
        match end {
            "rollback" => run(&mut a, "ROLLBACK").await,
            "failure" => {
                sqlx::raw_sql("SELECT 1 / 0").execute(&mut a).await.unwrap_err();
                // Fails too, but its reply shows that the server has handled the first failure.
                sqlx::raw_sql("SELECT 1").execute(&mut a).await.unwrap_err();
                assert!(free(&mut other, proof.number()).await, "before anybody rolls back");
            }
            _ => a.close().await.unwrap(),
        }
        // The server notices a closed connection only after a moment.
        let mut tx = other.begin().await.unwrap();
        locks().lock_in(&mut tx, &key("k"), LONG).await.unwrap();
        tx.rollback().await.unwrap();
        assert!(free(&mut other, proof.number()).await, "{end}");
    }
}

// docs/hazards.md H05.
#[tokio::test]
async fn rolling_back_past_the_lock_releases_it_and_check_says_so() {
    let db = fresh_database().await;
    let (mut a, mut other) = (db.connect().await, db.connect().await);
    let mut tx = a.begin().await.unwrap();
    let outer = locks().lock_in(&mut tx, &key("outer"), LONG).await.unwrap();
    let mut point = tx.begin().await.unwrap();
    let inner = locks().lock_in(&mut point, &key("inner"), LONG).await.unwrap();
    point.rollback().await.unwrap();
    assert!(free(&mut other, inner.number()).await);
    let error = inner.check(&mut tx).await.unwrap_err();
    assert_eq!((error.kind(), error.key()), (ErrorKind::Lost, Some(&key("inner"))));
    outer.check(&mut tx).await.unwrap();
    assert!(!free(&mut other, outer.number()).await);

    // The same if the lock was granted after a wait.
    run(&mut other, &format!("SELECT pg_advisory_lock({})", inner.number())).await;
    let mut point = tx.begin().await.unwrap();
    let locks = locks();
    let (wanted, number) = (key("inner"), inner.number());
    let mut observer = db.connect().await;
    let wait = locks.lock_in(&mut point, &wanted, LONG);
    let release = async {
        until_waiting(&mut observer, 1).await;
        run(&mut other, &format!("SELECT pg_advisory_unlock({number})")).await;
    };
    tokio::join!(wait, release).0.unwrap();
    point.rollback().await.unwrap();
    assert!(free(&mut other, number).await);
}

#[tokio::test]
async fn a_waiter_sees_what_the_holder_committed() {
    let db = fresh_database().await;
    let (mut a, mut b, mut observer) = (db.connect().await, db.connect().await, db.connect().await);
    run(&mut a, "CREATE TABLE work (n int)").await;
    let locks = locks();
    let mut tx = a.begin().await.unwrap();
    locks.lock_in(&mut tx, &key("k"), LONG).await.unwrap();
    run(&mut *tx, "INSERT INTO work VALUES (1)").await;
    let waiter = async {
        let mut tx = b.begin().await.unwrap();
        assert_eq!(text(&mut *tx, "SELECT count(*) FROM work").await, "0");
        locks.lock_in(&mut tx, &key("k"), LONG).await.unwrap();
        text(&mut *tx, "SELECT count(*) FROM work").await
    };
    let holder = async {
        until_waiting(&mut observer, 1).await;
        tx.commit().await.unwrap();
    };
    assert_eq!(tokio::join!(waiter, holder).0, "1");
}

#[tokio::test]
async fn a_timeout_leaves_the_work_so_far() {
    let db = fresh_database().await;
    let (mut a, mut other) = (db.connect().await, db.connect().await);
    run(&mut a, "CREATE TABLE work (n int)").await;
    let mut holding = other.begin().await.unwrap();
    let proof = locks().lock_in(&mut holding, &key("k"), LONG).await.unwrap();

    let mut tx = a.begin().await.unwrap();
    run(&mut *tx, "INSERT INTO work VALUES (1)").await;
    let start = Instant::now();
    let error = locks().lock_in(&mut tx, &key("k"), ms(120)).await.unwrap_err();
    assert!(start.elapsed() >= ms(120), "early: {:?}", start.elapsed());
    assert_eq!((error.kind(), error.key()), (ErrorKind::Timeout, Some(&key("k"))));
    holding.commit().await.unwrap();
    assert!(free(&mut other, proof.number()).await, "nothing of the wait is left at the server");
    run(&mut *tx, "INSERT INTO work VALUES (2)").await;
    tx.commit().await.unwrap();
    assert_eq!(text(&mut other, "SELECT count(*) FROM work").await, "2");
}

#[tokio::test]
async fn every_path_leaves_the_settings_as_they_were() {
    const SETTINGS: &str =
        "SELECT current_setting('lock_timeout') || ' ' || current_setting('statement_timeout')
        || ' ' || current_setting('client_connection_check_interval')";
    let db = fresh_database().await;
    let (mut a, mut other, mut observer) = (db.connect().await, db.connect().await, db.connect().await);
    let (locks, k) = (locks(), key("k"));
    run(&mut a, "SET lock_timeout = '7s'; SET statement_timeout = '61s'").await;
    let mut tx = a.begin().await.unwrap();
    run(&mut *tx, "SET LOCAL lock_timeout = '1234ms'; SET LOCAL client_connection_check_interval = '9s'")
        .await;
    let before = "1234ms 61s 9s";

    locks.lock_in(&mut tx, &key("free"), LONG).await.unwrap();
    assert_eq!(text(&mut *tx, SETTINGS).await, before, "granted at once");
    let mut holding = other.begin().await.unwrap();
    locks.lock_in(&mut holding, &k, LONG).await.unwrap();
    for wait in [LockWait::Skip, LockWait::NoWait, LockWait::Block(ms(20))] {
        assert_eq!(locks.lock_with(&mut tx, &k, wait).await.is_ok(), wait == LockWait::Skip);
        assert_eq!(text(&mut *tx, SETTINGS).await, before, "{wait:?}");
        let all = locks.lock_all_in(&mut tx, &[key("a"), k.clone()], wait).await;
        assert_eq!(all.is_ok(), wait == LockWait::Skip);
        assert_eq!(text(&mut *tx, SETTINGS).await, before, "all, {wait:?}");
    }
    let release = async {
        until_waiting(&mut observer, 1).await;
        holding.rollback().await.unwrap();
    };
    tokio::join!(locks.lock_in(&mut tx, &k, LONG), release).0.unwrap();
    assert_eq!(text(&mut *tx, SETTINGS).await, before, "granted after a wait");
    tx.commit().await.unwrap();
    assert_eq!(text(&mut a, SETTINGS).await, "7s 61s 0", "the session's own");
}

// Refused because a snapshot from before the wait would show old data.
#[tokio::test]
async fn higher_isolation_and_no_transaction_are_refused() {
    const LOCKS: &str = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
        WHERE l.locktype = 'advisory' AND d.datname = current_database()";
    let db = fresh_database().await;
    let (mut a, mut other) = (db.connect().await, db.connect().await);
    let keys = [key("k")];
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        run(&mut a, &format!("BEGIN ISOLATION LEVEL {level}")).await;
        for error in [
            locks().lock_in(&mut a, &keys[0], LONG).await.unwrap_err(),
            locks().lock_all_in(&mut a, &keys, LockWait::NoWait).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
            assert!(error.message().contains("READ COMMITTED"), "{error}");
        }
        assert_eq!(text(&mut a, LOCKS).await, "0");
        run(&mut a, "ROLLBACK").await;
    }
    for error in [
        locks().lock_in(&mut a, &keys[0], LONG).await.unwrap_err(),
        locks().lock_all_in(&mut a, &keys, LockWait::Block(LONG)).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.message().contains("not in a transaction"), "{error}");
    }
    assert_eq!(text(&mut other, LOCKS).await, "0");
}

// A hundred concurrent requests each spend 10 of a balance of 100.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_ledger_is_never_overdrawn() {
    let db = fresh_database().await;
    let pool = PgPoolOptions::new().max_connections(20).connect(db.url()).await.unwrap();
    sqlx::raw_sql("CREATE TABLE entry (holder text, amount int); INSERT INTO entry VALUES ('foo', 100)")
        .execute(&pool)
        .await
        .unwrap();
    let spends = (0..100).map(|_| {
        let pool = pool.clone();
        tokio::spawn(async move {
            let mut tx = locks().begin(&pool, &key("ledger:foo"), LONG).await.unwrap();
            let sql = "SELECT sum(amount) FROM entry WHERE holder = 'foo'";
            let balance: i64 = sqlx::query_scalar(sql).fetch_one(&mut *tx).await.unwrap();
            if balance < 10 {
                return false; // Dropped, as a handler that returns early does.
            }
            sqlx::query("INSERT INTO entry VALUES ('foo', -10)").execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
            true
        })
    });
    let mut done = 0;
    for spend in spends.collect::<Vec<_>>() {
        done += u32::from(spend.await.unwrap());
    }
    assert_eq!(done, 10);
    let balance: i64 = sqlx::query_scalar("SELECT sum(amount) FROM entry").fetch_one(&pool).await.unwrap();
    assert_eq!(balance, 0);
}

#[tokio::test]
async fn other_keys_and_tables_go_on() {
    let db = fresh_database().await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    run(&mut a, "CREATE TABLE entry (n int)").await;
    let (mut foo, mut bar) = (a.begin().await.unwrap(), b.begin().await.unwrap());
    locks().lock_with(&mut foo, &key("ledger:foo"), LockWait::NoWait).await.unwrap();
    locks().lock_with(&mut bar, &key("ledger:bar"), LockWait::NoWait).await.unwrap();
    assert_eq!(locks().try_lock_in(&mut bar, &key("ledger:foo")).await.unwrap(), None);
    run(&mut *foo, "INSERT INTO entry VALUES (1)").await;
    run(&mut *bar, "INSERT INTO entry VALUES (2)").await;
    // The same key of another schema is another lock.
    let elsewhere = XactLocks::new(Identifier::new("elsewhere").unwrap());
    assert!(elsewhere.try_lock_in(&mut bar, &key("ledger:foo")).await.unwrap().is_some());
}

#[tokio::test]
async fn several_keys_are_all_or_nothing_and_in_one_order() {
    let db = fresh_database().await;
    let (mut a, mut b, mut other) = (db.connect().await, db.connect().await, db.connect().await);
    let (locks, keys) = (locks(), ["a", "b", "c", "a"].map(key));
    let mut tx = a.begin().await.unwrap();
    let proofs = locks.lock_all_in(&mut tx, &keys, LockWait::NoWait).await.unwrap().unwrap();
    assert_eq!(proofs.iter().map(|proof| proof.key().clone()).collect::<Vec<_>>(), keys);
    assert_eq!(proofs[0], proofs[3]);
    for proof in &proofs {
        proof.check(&mut tx).await.unwrap();
        assert!(!free(&mut other, proof.number()).await, "{proof}");
    }
    assert_eq!(locks.lock_all_in(&mut tx, &[], LockWait::NoWait).await.unwrap(), Some(Vec::new()));
    tx.rollback().await.unwrap();

    // If one key is held, none is taken, and the error names it.
    let mut holding = b.begin().await.unwrap();
    let held = locks.lock_in(&mut holding, &keys[1], LONG).await.unwrap();
    let mut tx = a.begin().await.unwrap();
    assert_eq!(locks.lock_all_in(&mut tx, &keys, LockWait::Skip).await.unwrap(), None);
    for wait in [LockWait::NoWait, LockWait::Block(ms(30))] {
        let error = locks.lock_all_in(&mut tx, &keys, wait).await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Timeout, Some(held.key())), "{wait:?}");
        for proof in proofs.iter().filter(|proof| **proof != held) {
            assert!(free(&mut other, proof.number()).await, "{proof}");
        }
    }
    drop((tx, holding));

    // The smallest number is locked first, in any order of the keys. A call that waits for it holds no other key, so
    // two calls cannot deadlock.
    let mut falling = proofs.clone();
    falling.sort_by_key(|proof| std::cmp::Reverse(proof.number()));
    let (largest, smallest) = (&falling[0], &falling[falling.len() - 1]);
    let falling_keys: Vec<_> = falling.iter().map(|proof| proof.key().clone()).collect();
    let mut holding = b.begin().await.unwrap();
    locks.lock_in(&mut holding, smallest.key(), LONG).await.unwrap();
    let mut tx = a.begin().await.unwrap();
    let look = async {
        until_waiting(&mut other, 1).await;
        assert!(free(&mut other, largest.number()).await);
        holding.commit().await.unwrap();
    };
    let granted = tokio::join!(locks.lock_all_in(&mut tx, &falling_keys, LockWait::Block(LONG)), look).0;
    assert_eq!(granted.unwrap(), Some(falling.clone()));
}

#[tokio::test]
async fn nothing_in_a_key_or_schema_reaches_the_server_as_sql() {
    let db = fresh_database().await;
    let (mut a, mut other) = (db.connect().await, db.connect().await);
    run(&mut a, "CREATE TABLE victim (n int)").await;
    let evil = [
        "'; DROP TABLE victim; --",
        "$leasehold$; DROP TABLE victim; --",
        "\\'; DROP TABLE victim; --",
        "}'",
    ];
    for text in evil {
        let locks = XactLocks::new(Identifier::new(text).unwrap());
        let mut tx = a.begin().await.unwrap();
        let proof = locks.lock_in(&mut tx, &key(text), LONG).await.unwrap();
        assert!(!free(&mut other, proof.number()).await);
        locks.lock_all_in(&mut tx, &[key(text), key("x")], LockWait::NoWait).await.unwrap().unwrap();
        assert_eq!(locks.token(&mut tx).await.unwrap_err().kind(), ErrorKind::SchemaMissing, "{text}");
        tx.rollback().await.unwrap();
        let mut tx = a.begin().await.unwrap();
        let error = locks.clone().numbers(RawBigint).lock_in(&mut tx, &key(text), LONG).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey);
    }
    assert_eq!(text(&mut other, "SELECT count(*) FROM victim").await, "0");
}

#[tokio::test]
async fn all_numbers_of_both_spaces_work() {
    let db = fresh_database().await;
    let (mut a, mut b, mut other) = (db.connect().await, db.connect().await, db.connect().await);
    let raw = locks().numbers(RawBigint);
    let texts = [i64::MIN, -1, 0, 1 << 32, i64::MAX].map(|number| key(&number.to_string()));
    let mut tx = a.begin().await.unwrap();
    for text in &texts {
        let proof = raw.lock_in(&mut tx, text, LONG).await.unwrap();
        proof.check(&mut tx).await.unwrap();
        assert!(!free(&mut other, proof.number()).await, "{text}");
    }
    // The pair (0, 0) is not the bigint 0 (docs/hazards.md H24).
    let pairs = locks().numbers(RawPair);
    let edges = ["0,0", "-2147483648,2147483647", "1,-1"].map(key);
    for text in &edges {
        let mut holding = b.begin().await.unwrap();
        let proof = pairs.lock_in(&mut holding, text, LONG).await.unwrap();
        proof.check(&mut holding).await.unwrap();
        let error = pairs.lock_in(&mut tx, text, ms(1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{text}");
        let taken = text.as_str();
        assert_eq!(self::text(&mut other, &format!("SELECT pg_try_advisory_lock({taken})")).await, "false");
        holding.commit().await.unwrap();
    }
    pairs.lock_all_in(&mut tx, &edges, LockWait::NoWait).await.unwrap().unwrap();
    raw.lock_all_in(&mut tx, &texts, LockWait::NoWait).await.unwrap().unwrap();
    tx.commit().await.unwrap();

    let djb2 = locks().numbers(Djb2Xor::Forward);
    let mut tx = a.begin().await.unwrap();
    assert_eq!(djb2.lock_in(&mut tx, &key("ledger:foo"), LONG).await.unwrap().number(), 2_913_060_036);
    assert!(!free(&mut other, 2_913_060_036).await);
}
