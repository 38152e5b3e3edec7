//! Faults of the transaction scope: cancellation, deadlocks, limits, poolers, standbys.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Instant;

use crate::common::*;
use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{Identifier, schema};
use leasehold_postgres_advisory::{LockWait, XactGuard, XactLocks};
use sqlx::postgres::PgPool;
use sqlx::{Connection as _, PgConnection};
use test_bounds::{Bound, within};
use test_servers::{Cluster, ClusterOptions, PgBouncer, PgBouncerOptions, Standby, fresh_database};

// C4: a wait of zero is still one attempt, even if the pool has to check the connection first.
#[tokio::test]
async fn no_time_to_wait_is_one_attempt() {
    let db = fresh_database().await;
    schema::install(&mut db.connect().await, &Identifier::new("leasehold").unwrap()).await.unwrap();
    let pool = pool(db.url(), 2).await;
    let guard = at_once(&pool, "k").await.unwrap();
    let error = at_once(&pool, "k").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    guard.commit().await.unwrap();
    let guard = at_once(&pool, "k").await.unwrap();
    // The pool itself would wait up to `LONG` for a connection.
    let other = pool.acquire().await.unwrap();
    let error = within(LONG / 2, "not refused", locks().begin(&pool, &key("l"), ms(0))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    drop(other);
    guard.commit().await.unwrap();
    pool.close().await;
}

/// Begins with a wait of zero. Retries if the pool found no connection within a second, because a busy machine can
/// need longer to open one.
async fn at_once(pool: &PgPool, name: &str) -> Result<XactGuard, Error> {
    let bound = Bound::new(LONG);
    loop {
        match locks().begin(pool, &key(name), ms(0)).await {
            Err(error) if error.kind() == ErrorKind::Unavailable => bound.check(&error),
            outcome => return outcome,
        }
    }
}

/// Polls `wait` until the server has it in its queue, then drops it.
async fn dropped_in_the_queue(wait: impl Future, observer: &mut PgConnection) {
    let mut wait = pin!(wait);
    let mut queued = pin!(until_waiting(observer, 1));
    std::future::poll_fn(|cx| {
        assert!(wait.as_mut().poll(cx).is_pending(), "it was to wait");
        queued.as_mut().poll(cx)
    })
    .await;
}

#[tokio::test]
async fn a_deadlock_is_told_and_the_transaction_goes_on() {
    let db = fresh_database().await;
    let (mut a, mut b, mut observer) = (db.connect().await, db.connect().await, db.connect().await);
    run(&mut a, "CREATE TABLE work (n int)").await;
    // The session whose `deadlock_timeout` ends first fails.
    run(&mut a, "SET deadlock_timeout = '50ms'").await;
    run(&mut b, "SET deadlock_timeout = '30s'").await;
    let (locks, x, y) = (locks(), key("x"), key("y"));
    let (mut one, mut two) = (a.begin().await.unwrap(), b.begin().await.unwrap());
    run(&mut *one, "INSERT INTO work VALUES (1)").await;
    locks.lock_in(&mut one, &x, LONG).await.unwrap();
    locks.lock_in(&mut two, &y, LONG).await.unwrap();
    let first = async {
        until_waiting(&mut observer, 1).await;
        let error = locks.lock_in(&mut one, &y, LONG).await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Deadlock, Some(&y)));
        assert!(error.message().contains("40P01"), "{error}");
        // The transaction keeps its earlier work and its earlier lock.
        run(&mut *one, "INSERT INTO work VALUES (2)").await;
        one.commit().await.unwrap();
    };
    tokio::join!(first, async { locks.lock_in(&mut two, &x, LONG).await.unwrap() });
    assert_eq!(text(&mut *two, "SELECT count(*) FROM work").await, "2");
}

#[tokio::test]
async fn a_wait_that_is_dropped_leaves_a_transaction_that_can_commit() {
    let db = fresh_database().await;
    let (mut a, mut b, mut observer) = (db.connect().await, db.connect().await, db.connect().await);
    run(&mut a, "CREATE TABLE work (n int)").await;
    let (locks, k) = (locks(), key("k"));
    for granted in [false, true] {
        let mut holding = b.begin().await.unwrap();
        let proof = locks.lock_in(&mut holding, &k, LONG).await.unwrap();
        let mut tx = a.begin().await.unwrap();
        run(&mut *tx, "INSERT INTO work VALUES (1)").await;
        let wait = if granted { LONG } else { ms(300) };
        dropped_in_the_queue(locks.lock_in(&mut tx, &k, wait), &mut observer).await;
        if granted {
            holding.commit().await.unwrap();
            run(&mut *tx, "INSERT INTO work VALUES (2)").await;
            assert!(!free(&mut observer, proof.number()).await, "granted to the end of the transaction");
            tx.commit().await.unwrap();
        } else {
            run(&mut *tx, "INSERT INTO work VALUES (2)").await;
            assert_eq!(text(&mut *tx, "SELECT current_setting('lock_timeout')").await, "0");
            tx.commit().await.unwrap();
            holding.commit().await.unwrap();
        }
        assert!(free(&mut observer, proof.number()).await);
    }
    assert_eq!(text(&mut observer, "SELECT count(*) FROM work").await, "4");
}

#[tokio::test]
async fn begin_that_is_dropped_leaves_queue_and_pool() {
    let db = fresh_database().await;
    let (mut b, mut observer) = (db.connect().await, db.connect().await);
    let pool = pool(db.url(), 1).await;
    let (locks, k) = (locks(), key("k"));
    let mut holding = b.begin().await.unwrap();
    locks.lock_in(&mut holding, &k, LONG).await.unwrap();
    let start = Instant::now();
    dropped_in_the_queue(locks.begin(&pool, &k, LONG * 10), &mut observer).await;
    // The server ends the wait long before its own limit.
    until_waiting(&mut observer, 0).await;
    assert!(start.elapsed() < LONG);
    locks.begin(&pool, &key("another"), LONG).await.unwrap().commit().await.unwrap();
    holding.commit().await.unwrap();

    // Dropped at every poll, nothing stays held or open, and the pool has its connection back.
    let proof = locks.begin(&pool, &k, LONG).await.unwrap().proof().clone();
    for polls in 0..12 {
        let mut left = polls;
        let mut begin = Box::pin(locks.begin(&pool, &k, LONG));
        let done = std::future::poll_fn(|cx| {
            if left == 0 {
                return Poll::Ready(false);
            }
            left -= 1;
            begin.as_mut().poll(cx).map(|guard| drop(guard.unwrap())).map(|()| true)
        })
        .await;
        drop(begin);
        let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
        assert_eq!(
            text(&mut *guard, "SELECT current_setting('transaction_isolation')").await,
            "read committed"
        );
        guard.rollback().await.unwrap();
        let mut plain = pool.acquire().await.unwrap();
        assert_eq!(
            text(&mut *plain, "SELECT now() = statement_timestamp()").await,
            "true",
            "open: {polls} {done}"
        );
        drop(plain);
    }
    assert!(free(&mut observer, proof.number()).await);
}

#[tokio::test]
async fn a_guard_is_a_transaction_that_ends_truthfully() {
    let db = fresh_database().await;
    let (pool, mut other) = (pool(db.url(), 1).await, db.connect().await);
    run(&mut other, "CREATE TABLE work (n int)").await;
    let (locks, k) = (locks(), key("k"));
    let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
    let number = guard.proof().number();
    assert_eq!(guard.key(), &k);
    run(&mut *guard, "INSERT INTO work VALUES (1)").await;
    // A nested transaction is a savepoint.
    let mut nested = guard.begin().await.unwrap();
    run(&mut *nested, "INSERT INTO work VALUES (2)").await;
    nested.rollback().await.unwrap();
    assert!(!free(&mut other, number).await);

    // The budget also covers the wait for the pool's only connection.
    let start = Instant::now();
    let error = locks.begin(&pool, &key("x"), ms(100)).await.unwrap_err();
    assert_eq!((error.kind(), error.key()), (ErrorKind::Unavailable, Some(&key("x"))));
    assert!(start.elapsed() < LONG);
    guard.commit().await.unwrap();
    assert!(free(&mut other, number).await);
    assert_eq!(text(&mut other, "SELECT count(*) FROM work").await, "1");

    // The driver's own commit would return `Ok`.
    let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
    run(&mut *guard, "INSERT INTO work VALUES (3)").await;
    sqlx::raw_sql("SELECT 1 / 0").execute(&mut *guard).await.unwrap_err();
    let error = guard.commit().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(text(&mut other, "SELECT count(*) FROM work").await, "1");

    // The key is held by another session. Each way to begin fails or skips and leaves the connection usable.
    let mut holding = other.begin().await.unwrap();
    locks.lock_in(&mut holding, &k, LONG).await.unwrap();
    assert!(locks.begin_with(&pool, &k, LockWait::Skip).await.unwrap().is_none());
    // The budget includes the wait for a connection of the pool, so a busy machine needs more than a moment.
    for wait in [LockWait::NoWait, LockWait::Block(ms(5_000))] {
        let error = locks.begin_with(&pool, &k, wait).await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Timeout, Some(&k)), "{wait:?}");
    }
    holding.commit().await.unwrap();
    drop(locks.begin(&pool, &k, LONG).await.unwrap());
    let again = locks.begin(&pool, &k, LONG).await.unwrap();
    again.rollback().await.unwrap();
    assert!(free(&mut other, number).await);
}

// docs/hazards.md H16: limits of the role or database neither shorten nor end waits for the lock.
#[tokio::test]
async fn limits_and_defaults_of_role_and_database_do_not_matter() {
    let db = fresh_database().await;
    let (mut setup, mut b) = (db.connect().await, db.connect().await);
    let name = db.name();
    run(&mut setup, "CREATE TABLE work (n int)").await;
    for setting in ["lock_timeout = '200ms'", "statement_timeout = '200ms'"] {
        run(&mut setup, &format!("ALTER ROLE CURRENT_USER IN DATABASE {name} SET {setting}")).await;
    }
    for setting in ["default_transaction_isolation = 'serializable'", "default_transaction_read_only = on"] {
        run(&mut b, &format!("ALTER DATABASE {name} SET {setting}")).await;
    }
    let (locks, k) = (locks(), key("k"));
    let mut holding = b.begin().await.unwrap();
    locks.lock_in(&mut holding, &k, LONG).await.unwrap();
    let pool = pool(db.url(), 1).await;
    let start = Instant::now();
    let error = locks.begin(&pool, &k, ms(600)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(start.elapsed() >= ms(590), "ended after {:?}", start.elapsed());
    holding.commit().await.unwrap();

    let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
    assert_eq!(text(&mut *guard, "SELECT current_setting('transaction_isolation')").await, "read committed");
    let limits = "SELECT current_setting('lock_timeout') || ' ' || current_setting('statement_timeout')";
    assert_eq!(text(&mut *guard, limits).await, "200ms 200ms");
    let error = sqlx::query("INSERT INTO work VALUES (1)").execute(&mut *guard).await.unwrap_err();
    assert_eq!(leasehold_postgres::sqlstate(&error).as_deref(), Some("25006"), "the default is respected");
    drop(guard);

    let mut plain = pool.begin().await.unwrap();
    let error = locks.lock_in(&mut plain, &k, LONG).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "SERIALIZABLE by default: {error}");
}

#[tokio::test]
async fn operators_can_end_a_wait_and_a_holder() {
    let db = fresh_database().await;
    let (mut a, mut b, mut observer) = (db.connect().await, db.connect().await, db.connect().await);
    let (locks, k) = (locks(), key("k"));
    let waiting = text(&mut a, "SELECT pg_backend_pid()").await;
    let holder = text(&mut b, "SELECT pg_backend_pid()").await;
    run(&mut b, "BEGIN").await;
    locks.lock_in(&mut b, &k, LONG).await.unwrap();
    let mut tx = a.begin().await.unwrap();
    run(&mut *tx, "CREATE TABLE work (n int)").await;
    let cancel = async {
        until_waiting(&mut observer, 1).await;
        run(&mut observer, &format!("SELECT pg_cancel_backend({waiting})")).await;
    };
    let error = tokio::join!(locks.lock_in(&mut tx, &k, LONG), cancel).0.unwrap_err();
    assert_eq!((error.kind(), error.key()), (ErrorKind::Unavailable, Some(&k)), "{error}");
    run(&mut *tx, "INSERT INTO work VALUES (1)").await;

    let end = async {
        until_waiting(&mut observer, 1).await;
        run(&mut observer, &format!("SELECT pg_terminate_backend({holder})")).await;
    };
    tokio::join!(locks.lock_in(&mut tx, &k, LONG), end).0.unwrap();
    tx.commit().await.unwrap();
    let error = locks.lock_in(&mut b, &k, LONG).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

// docs/hazards.md H06.
#[tokio::test]
async fn a_prepared_transaction_keeps_the_lock() {
    let db = Cluster::shared().fresh_database().await;
    let (mut a, mut other) = (db.connect().await, db.connect().await);
    run(&mut a, "BEGIN").await;
    let proof = locks().lock_in(&mut a, &key("k"), LONG).await.unwrap();
    run(&mut a, &format!("PREPARE TRANSACTION '{}'", db.name())).await;
    assert_eq!(proof.check(&mut a).await.unwrap_err().kind(), ErrorKind::Lost, "not this session's any more");
    a.close().await.unwrap();
    assert!(!free(&mut other, proof.number()).await);
    run(&mut other, &format!("COMMIT PREPARED '{}'", db.name())).await;
    assert!(free(&mut other, proof.number()).await);
}

#[tokio::test]
async fn a_pooler_in_transaction_mode_is_fine() {
    let cluster = Cluster::shared();
    let db = cluster.fresh_database().await;
    let bouncer = PgBouncer::start(cluster, &PgBouncerOptions::new().round_robin().pool_size(3));
    let clients = pool(&bouncer.url(db.name()), 6).await;
    let mut other = db.connect().await;
    run(&mut other, "CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)").await;
    let work = (0..6).map(|_| {
        let clients = clients.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                let mut guard = locks().begin(&clients, &key("k"), LONG).await.unwrap();
                let n = text(&mut *guard, "SELECT n FROM counter").await;
                run(&mut *guard, &format!("UPDATE counter SET n = {n} + 1")).await;
                guard.commit().await.unwrap();
            }
        })
    });
    for work in work.collect::<Vec<_>>() {
        work.await.unwrap();
    }
    assert_eq!(text(&mut other, "SELECT n FROM counter").await, "60");
    // The next client of a server connection finds the settings unchanged.
    let settings = "SELECT current_setting('lock_timeout') || ' ' || current_setting('statement_timeout')";
    for _ in 0..6 {
        let mut plain = clients.acquire().await.unwrap();
        assert_eq!(text(&mut *plain, settings).await, "0 0");
    }
    let mut tx = clients.begin().await.unwrap();
    let proof = locks().lock_in(&mut tx, &key("k"), LONG).await.unwrap();
    assert!(!free(&mut other, proof.number()).await);
    tx.commit().await.unwrap();
    assert!(free(&mut other, proof.number()).await);
}

// docs/hazards.md H10, H19.
#[tokio::test]
async fn a_standby_and_a_full_lock_table_are_errors_of_their_own() {
    let options =
        ClusterOptions::new().setting("max_locks_per_transaction", "10").setting("max_connections", "10");
    let primary = Cluster::start(options);
    let standby = Standby::of(&primary).await;
    let mut reader = PgConnection::connect(&standby.url("postgres")).await.unwrap();
    let mut tx = reader.begin().await.unwrap();
    let keys = [key("k")];
    for error in [
        locks().lock_in(&mut tx, &keys[0], LONG).await.unwrap_err(),
        locks().lock_all_in(&mut tx, &keys, LockWait::NoWait).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("standby"), "{error}");
    }

    // Opened before the lock table is full, because a new session would find no room.
    let mut poor = PgConnection::connect(&primary.admin_url()).await.unwrap();
    run(&mut poor, "BEGIN; SELECT pg_try_advisory_xact_lock(0); ROLLBACK").await;
    let mut hoarder = PgConnection::connect(&primary.admin_url()).await.unwrap();
    let hoard = "SELECT pg_advisory_lock(n) FROM generate_series(1, 100000) AS n";
    sqlx::raw_sql(hoard).execute(&mut hoarder).await.unwrap_err();
    let mut tx = poor.begin().await.unwrap();
    let error = locks().lock_in(&mut tx, &keys[0], LONG).await.unwrap_err();
    assert_eq!((error.kind(), error.key()), (ErrorKind::Capacity, Some(&keys[0])), "{error}");
    assert!(error.message().contains("max_locks_per_transaction"), "{error}");
}

#[tokio::test]
async fn tokens_grow_and_need_a_schema_that_was_looked_after() {
    let db = Cluster::shared().fresh_database().await;
    let (mut a, pool) = (db.connect().await, pool(db.url(), 2).await);
    let name = Identifier::new("it's a \"schema\"").unwrap();
    let locks = XactLocks::new(name.clone());
    let k = key("k");
    let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
    assert_eq!(locks.token(&mut guard).await.unwrap_err().kind(), ErrorKind::SchemaMissing);
    drop(guard);
    schema::install(&mut a, &name).await.unwrap();
    run(&mut a, &format!("TRUNCATE {}.incarnation", name.quoted())).await;
    let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
    let error = locks.token(&mut guard).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("prepare_tokens"), "{error}");
    drop(guard);
    locks.prepare_tokens(&mut a).await.unwrap();
    let mut last = None;
    for end in ["commit", "rollback", "commit"] {
        let mut guard = locks.begin(&pool, &k, LONG).await.unwrap();
        let token = locks.token(&mut guard).await.unwrap();
        assert!(Some(token) > last, "{token:?} after {last:?}");
        last = Some(token);
        match end {
            "commit" => guard.commit().await.unwrap(),
            _ => guard.rollback().await.unwrap(),
        }
    }
}

/// All waits are one entry in `pg_stat_statements`, for every key and limit, because otherwise they would push out
/// other entries.
#[tokio::test]
async fn waits_are_one_statement_to_the_server() {
    let counted = ClusterOptions::new().setting("shared_preload_libraries", "pg_stat_statements");
    let cluster = Cluster::start(counted);
    let database = cluster.fresh_database().await;
    let (mut holder, mut waiter) = (database.connect().await, database.connect().await);
    run(&mut holder, "CREATE EXTENSION pg_stat_statements").await;
    run(&mut holder, "BEGIN").await;
    for n in 0..10 {
        locks().lock_in(&mut holder, &key(&format!("k{n}")), LONG).await.unwrap();
    }
    let statements = "SELECT count(*) FROM public.pg_stat_statements WHERE query LIKE '%leasehold%'";
    let mut counts = Vec::new();
    for n in 0..10 {
        run(&mut waiter, "BEGIN").await;
        let error = locks().lock_in(&mut waiter, &key(&format!("k{n}")), ms(20 + n)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        run(&mut waiter, "ROLLBACK").await;
        counts.push(text(&mut database.connect().await, statements).await);
    }
    assert_eq!(counts.first(), counts.last(), "{counts:?}");
}

/// A marker of an earlier start of the server does not count, even if the table still has it.
#[tokio::test]
async fn a_token_wants_the_marker_of_this_start() {
    let database = Cluster::shared().fresh_database().await;
    let mut conn = database.connect().await;
    schema::install(&mut conn, &Identifier::new("leasehold").unwrap()).await.unwrap();
    locks().prepare_tokens(&mut conn).await.unwrap();
    locks().token(&mut conn).await.unwrap();
    run(&mut conn, "UPDATE leasehold.incarnation SET system = system + 1").await;
    let error = locks().token(&mut conn).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    locks().prepare_tokens(&mut conn).await.unwrap();
    locks().token(&mut conn).await.unwrap();
}
