//! Plain lock tables used unchanged, and their twins in memory.

#![allow(clippy::unwrap_used)] // Applies to the shared test code too.

mod clock;

use std::sync::Arc;

use leasehold_plain_tables::{
    ClaimError, Column, IdType, MemoryMutexes, MemoryTimeouts, MutexTable, Mutexes, Queued, RowKey, Table,
    TimeoutTable, Timeouts,
};
use sqlx::Connection as _;
use test_servers::sql::{pool, run, text, until};
use test_servers::{Cluster, Database, PgBouncer, PgBouncerOptions, fresh_database};
use uuid::Uuid;

const MUTEX: &str = "CREATE TABLE mutex (id int PRIMARY KEY, acquired boolean NOT NULL DEFAULT false);
    INSERT INTO mutex VALUES (1), (2)";

/// Both tables with every column, in queues.
const FULL: &str = "CREATE TABLE latch (id int, queue_id text DEFAULT 'default', acquired boolean, owner uuid, epoch bigint,
        retries_left int CHECK (retries_left >= 0), PRIMARY KEY (queue_id, id));
    CREATE TABLE task (id int, queue_id text DEFAULT 'default', started timestamptz, timeout int, epoch bigint,
        retries_left int CHECK (retries_left >= 0), PRIMARY KEY (queue_id, id))";

fn column(name: &str) -> Column {
    Column::new(name).unwrap()
}

fn mutexes() -> MutexTable {
    MutexTable::new(Table::new("mutex").unwrap(), column("id"), IdType::Int, column("acquired"))
}

fn latches() -> MutexTable<Queued> {
    MutexTable::new(Table::new("latch").unwrap(), column("id"), IdType::Int, column("acquired"))
        .queue(column("queue_id"))
        .owner(column("owner"))
        .epoch(column("epoch"))
        .attempts(column("retries_left"))
}

fn tasks() -> TimeoutTable<Queued> {
    TimeoutTable::new(
        Table::new("task").unwrap(),
        column("id"),
        IdType::Int,
        column("started"),
        column("timeout"),
    )
    .queue(column("queue_id"))
    .epoch(column("epoch"))
    .attempts(column("retries_left"))
}

async fn database(sql: &str) -> (Database, sqlx::PgPool, sqlx::PgConnection) {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, sql).await;
    let pool = pool(db.url(), 8).await;
    (db, pool, observer)
}

/// Exactly one of many concurrent callers gets the lock. Releasing a free lock returns `false`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_boolean_mutex_has_one_holder_and_a_second_release_is_no_error() {
    let (_db, pool, mut observer) = database(MUTEX).await;
    let locks = mutexes();
    for _ in 0..3 {
        let tries: Vec<_> = (0..100)
            .map(|_| {
                let (locks, pool) = (locks.clone(), pool.clone());
                tokio::spawn(async move { locks.acquire(&pool, 1).await.unwrap() })
            })
            .collect();
        let mut granted = 0;
        for one in tries {
            granted += u32::from(one.await.unwrap());
        }
        assert_eq!(granted, 1);
        assert!(locks.release(&pool, 1).await.unwrap());
        assert!(!locks.release(&pool, 1).await.unwrap(), "it was free");
    }
    assert!(locks.acquire(&pool, 2).await.unwrap(), "another lock");
    // A missing row is an error, and NULL means free.
    for error in [locks.acquire(&pool, 9).await.unwrap_err(), locks.release(&pool, 9).await.unwrap_err()] {
        assert!(matches!(error, ClaimError::NotFound { .. }), "{error}");
    }
    assert!(locks.create(&pool, 9).await.unwrap());
    assert!(!locks.create(&pool, 9).await.unwrap());
    assert!(locks.acquire(&pool, 9).await.unwrap());
    run(
        &mut observer,
        "ALTER TABLE mutex ALTER acquired DROP NOT NULL; UPDATE mutex SET acquired = NULL WHERE id = 9",
    )
    .await;
    assert!(!locks.release(&pool, 9).await.unwrap());
    assert!(locks.acquire(&pool, 9).await.unwrap());
}

/// In the caller's transaction, the lock exists only with the transaction. Committed, it outlives its holder.
#[tokio::test]
async fn a_committed_latch_stays_locked_after_its_holder_died() {
    let (db, pool, mut observer) = database(MUTEX).await;
    let locks = mutexes();
    let mut holder = db.connect().await;
    let mut tx = holder.begin().await.unwrap();
    assert!(locks.acquire(&mut *tx, 1).await.unwrap());
    assert!(!locks.acquire(&pool, 1).await.unwrap(), "somebody is at it, and nobody waits");
    tx.rollback().await.unwrap();
    assert!(locks.acquire(&mut holder, 1).await.unwrap());
    let pid = text(&mut holder, "SELECT pg_backend_pid()").await;
    run(&mut observer, &format!("SELECT pg_terminate_backend({pid})")).await;
    until(&mut observer, &format!("NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})")).await;
    assert!(!locks.acquire(&pool, 1).await.unwrap(), "a latch");
    let error = Mutexes::break_lock(&locks.on(pool), &RowKey::new(1), Uuid::new_v4()).await.unwrap_err();
    assert!(matches!(error, ClaimError::Unsupported(_)), "{error}");
}

/// Checks owners, epochs, attempts and queues of a mutex, in Postgres and in memory.
async fn a_mutex(locks: &dyn Mutexes) {
    let (one, other) = (RowKey::queued("q1", 1), RowKey::queued("q2", 1));
    // The same id in two queues is two locks.
    let grant = locks.grant(&one).await.unwrap().unwrap();
    assert!(locks.grant(&other).await.unwrap().is_some());
    assert_eq!((grant.epoch, grant.attempts_left), (Some(1), Some(2)));
    assert!(locks.grant(&one).await.unwrap().is_none());
    // Only the owner releases it, once.
    let mut wrong = grant.clone();
    wrong.owner = Some(Uuid::new_v4());
    match locks.give_back(&wrong).await.unwrap_err() {
        ClaimError::Superseded { current_epoch, .. } => assert_eq!(current_epoch, Some(1)),
        error => panic!("{error}"),
    }
    assert!(!locks.break_lock(&one, Uuid::new_v4()).await.unwrap());
    assert!(locks.break_lock(&one, grant.owner.unwrap()).await.unwrap());
    assert!(!locks.give_back(&grant).await.unwrap(), "it is free");
    let second = locks.grant(&one).await.unwrap().unwrap();
    assert_eq!((second.epoch, second.attempts_left), (Some(2), Some(1)));
    assert_ne!(second.owner, grant.owner);
    assert!(matches!(locks.give_back(&grant).await.unwrap_err(), ClaimError::Superseded { .. }));
    assert!(locks.give_back(&second).await.unwrap());
    // A lock with 3 attempts has exactly 3.
    let third = locks.grant(&one).await.unwrap().unwrap();
    assert_eq!(third.attempts_left, Some(0));
    assert!(locks.grant(&one).await.unwrap().is_none(), "taken, for now");
    assert!(locks.give_back(&third).await.unwrap());
    for _ in 0..2 {
        match locks.grant(&one).await.unwrap_err() {
            ClaimError::Exhausted { row } => assert_eq!(row, one),
            error => panic!("{error}"),
        }
    }
    assert_eq!(locks.top_up(&one, 2).await.unwrap(), 2);
    assert_eq!(locks.grant(&one).await.unwrap().unwrap().attempts_left, Some(1));
    for error in [
        locks.grant(&RowKey::queued("q3", 1)).await.unwrap_err(),
        locks.top_up(&RowKey::queued("q1", 9), 1).await.unwrap_err(),
    ] {
        assert!(matches!(error, ClaimError::NotFound { .. }), "{error}");
    }
    // A batch stays within its queue and limit, is ordered, and skips taken locks.
    for id in [3, 10, 2] {
        assert!(locks.create(&RowKey::queued("q1", id)).await.unwrap());
    }
    let q1 = || Some(Arc::from("q1"));
    let batch = locks.capture(q1(), 2).await.unwrap();
    let keys = |batch: &[leasehold_plain_tables::PlainGrant]| {
        batch.iter().map(|row| row.key.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(keys(&batch), ["2 in queue q1", "3 in queue q1"]);
    assert_ne!(batch[0].owner, batch[1].owner);
    assert_eq!(keys(&locks.capture(q1(), 9).await.unwrap()), ["10 in queue q1"]);
    assert!(locks.capture(q1(), 9).await.unwrap().is_empty());
    assert!(matches!(locks.capture(q1(), 0).await.unwrap_err(), ClaimError::InvalidSpec(_)));
}

#[tokio::test]
async fn a_mutex_in_postgres_has_owner_attempts_and_queues() {
    let (_db, pool, mut observer) = database(FULL).await;
    run(&mut observer, "INSERT INTO latch (id, queue_id, retries_left) VALUES (1, 'q1', 3), (1, 'q2', NULL)")
        .await;
    a_mutex(&latches().on(pool.clone())).await;
    let error = latches().acquire(&pool, ("q1", 1)).await.unwrap_err();
    assert!(matches!(error, ClaimError::Unsupported(_)), "{error}");
    let error = Mutexes::grant(&latches().on(pool), &RowKey::new(1)).await.unwrap_err();
    assert!(matches!(error, ClaimError::InvalidSpec(_)), "{error}");
}

#[tokio::test]
async fn a_mutex_in_memory_has_owner_attempts_and_queues() {
    let locks = MemoryMutexes::new();
    locks.set_attempts(RowKey::queued("q1", 1), Some(3));
    locks.set_attempts(RowKey::queued("q2", 1), None);
    a_mutex(&locks).await;
}

/// Checks windows, attempts and queues of a timeout, in Postgres and in memory. `window` changes the window of the
/// lock in `q1`, `pass` lets it end.
async fn a_timeout(locks: &dyn Timeouts, window: impl AsyncFn(u64), pass: impl AsyncFn()) {
    let (one, other) = (RowKey::queued("q1", 1), RowKey::queued("q2", 1));
    let first = locks.grant(&one).await.unwrap().unwrap();
    assert!(locks.grant(&other).await.unwrap().is_some());
    assert!(locks.grant(&one).await.unwrap().is_none(), "once in each window");
    locks.extend(&first).await.unwrap();
    locks.settle(&first).await.unwrap();
    pass().await;
    // Its window has ended, but no other client was granted the lock.
    locks.settle(&first).await.unwrap();
    let second = locks.grant(&one).await.unwrap().unwrap();
    assert!(second.epoch > first.epoch);
    // The late run gets an error and changes nothing.
    for error in [locks.extend(&first).await.unwrap_err(), locks.settle(&first).await.unwrap_err()] {
        match error {
            ClaimError::Superseded { current_epoch, .. } => assert_eq!(current_epoch, second.epoch),
            error => panic!("{error}"),
        }
    }
    locks.extend(&second).await.unwrap();
    // The window was changed in the table only.
    assert!(locks.grant(&one).await.unwrap().is_none());
    window(0).await;
    assert_eq!(locks.grant(&one).await.unwrap().unwrap().attempts_left, Some(0));
    for _ in 0..2 {
        assert!(matches!(locks.grant(&one).await.unwrap_err(), ClaimError::Exhausted { .. }));
    }
    assert!(locks.capture(Some(Arc::from("q1")), 9).await.unwrap().is_empty(), "used up");
    assert_eq!(locks.top_up(&one, 1).await.unwrap(), 1);
    window(3_600).await;
    assert!(locks.capture(Some(Arc::from("q1")), 9).await.unwrap().is_empty(), "not ended");
    window(0).await;
    assert_eq!(locks.capture(Some(Arc::from("q1")), 9).await.unwrap().len(), 1);
    assert!(locks.capture(Some(Arc::from("q2")), 9).await.unwrap().is_empty());
    assert!(matches!(locks.grant(&RowKey::queued("q1", 7)).await.unwrap_err(), ClaimError::NotFound { .. }));
}

#[tokio::test]
async fn a_timeout_in_postgres_has_windows_attempts_and_queues() {
    let (db, pool, mut observer) = database(FULL).await;
    run(&mut observer, "INSERT INTO task (id, queue_id, timeout, retries_left) VALUES (1, 'q1', 3600, 3), (1, 'q2', 3600, NULL)").await;
    let window = async |seconds| {
        let sql = format!("UPDATE task SET timeout = {seconds} WHERE queue_id = 'q1'");
        run(&mut db.connect().await, &sql).await;
    };
    let pass = async || {
        let sql = "UPDATE task SET started = started - interval '1 hour' WHERE queue_id = 'q1'";
        run(&mut db.connect().await, sql).await;
    };
    a_timeout(&tasks().on(pool), window, pass).await;
}

#[tokio::test(start_paused = true)]
async fn a_timeout_in_memory_has_windows_attempts_and_queues() {
    let locks = MemoryTimeouts::new();
    let hour = std::time::Duration::from_secs(3_600);
    locks.set(RowKey::queued("q1", 1), hour, Some(3));
    locks.set(RowKey::queued("q2", 1), hour * 100, None);
    let window = async |seconds| {
        // Keeps the attempts, as the table does.
        let left = Timeouts::top_up(&locks, &RowKey::queued("q1", 1), 0).await.unwrap();
        locks.set(RowKey::queued("q1", 1), std::time::Duration::from_secs(seconds), Some(left));
    };
    let pass = async || tokio::time::advance(hour).await;
    a_timeout(&locks, window, pass).await;
}

/// One run per window for all callers together. By the server's clock, the lock is free from the exact end of the
/// window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_is_granted_once_in_each_window_by_the_servers_clock() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE job (id text PRIMARY KEY, at timestamptz, timeout numeric);
        INSERT INTO job VALUES ('daily', NULL, 86400), ('none', NULL, NULL)",
    )
    .await;
    let jobs = TimeoutTable::new(
        Table::new("job").unwrap(),
        column("id"),
        IdType::Text,
        column("at"),
        column("timeout"),
    );
    for _ in 0..3 {
        let tries: Vec<_> = (0..50)
            .map(|_| {
                let (jobs, pool) = (jobs.clone(), pool.clone());
                tokio::spawn(async move { jobs.acquire(&pool, "daily").await.unwrap() })
            })
            .collect();
        let mut granted = 0;
        for one in tries {
            granted += u32::from(one.await.unwrap());
        }
        assert_eq!(granted, 1);
        run(&mut observer, "UPDATE job SET at = at - interval '1 day'").await;
    }
    // The clock advances inside a transaction, and a moment before the end the lock is still taken.
    run(&mut observer, "UPDATE job SET at = clock_timestamp() - interval '86400 s' + interval '30 s'").await;
    assert!(!jobs.acquire(&pool, "daily").await.unwrap());
    let mut tx = pool.begin().await.unwrap();
    run(&mut *tx, "SELECT 1").await;
    let ends = "UPDATE job SET timeout = 0.2, at = clock_timestamp() WHERE id = 'daily'";
    run(&mut observer, ends).await;
    until(&mut observer, "SELECT at + interval '0.2 s' <= clock_timestamp() FROM job WHERE id = 'daily'")
        .await;
    assert!(jobs.acquire(&mut *tx, "daily").await.unwrap());
    tx.commit().await.unwrap();
    // Invalid rows are reported and not granted.
    let error = jobs.acquire(&pool, "none").await.unwrap_err();
    assert!(error.to_string().contains("no seconds"), "{error}");
    run(&mut observer, "ALTER TABLE job ALTER at TYPE timestamp; UPDATE job SET at = NULL").await;
    let error = jobs.acquire(&pool, "daily").await.unwrap_err();
    assert!(error.to_string().contains("no timestamptz"), "{error}");
    assert!(jobs.capture(&pool, (), 5).await.unwrap().is_empty());
}

/// Uses a time in whole seconds since 1970 unchanged. By the server's clock, the lock is free from the exact end of
/// the window. A late run changes nothing.
#[tokio::test]
async fn a_time_in_seconds_since_1970_is_used_unchanged() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE job (id text PRIMARY KEY, at bigint, timeout int, epoch bigint);
        INSERT INTO job VALUES ('hourly', NULL, 3600), ('far', 9223372036854775807, 2147483647), ('none', NULL, NULL)",
    )
    .await;
    let id = column("id");
    let jobs =
        TimeoutTable::new(Table::new("job").unwrap(), id, IdType::Text, column("at"), column("timeout"));
    let jobs = jobs.unix_time().epoch(column("epoch"));
    let findings = jobs.check(&pool).await.unwrap();
    assert!(matches!(&findings[..], [one] if one.message().contains("1 locks were granted in the future")));
    const NOW: &str = "EXTRACT(EPOCH FROM clock_timestamp())";
    for _ in 0..2 {
        let before = text(&mut observer, &format!("SELECT {NOW}")).await;
        let first = jobs.grant(&pool, "hourly").await.unwrap().unwrap();
        // The window begins at the next whole second, because it must not be shorter than its seconds.
        let counts = format!("SELECT at BETWEEN {before} AND {NOW} + 1 FROM job WHERE id = 'hourly'");
        assert_eq!(text(&mut observer, &counts).await, "true");
        assert!(!jobs.acquire(&pool, "hourly").await.unwrap());
        assert!(jobs.capture(&pool, (), 5).await.unwrap().is_empty());
        // At the exact end of the window, single grants and batches succeed.
        let ended = format!("UPDATE job SET at = floor({NOW}) - 3600 WHERE id = 'hourly'");
        run(&mut observer, &ended).await;
        let second = jobs.capture(&pool, (), 5).await.unwrap().remove(0);
        assert!(matches!(jobs.extend(&pool, &first).await.unwrap_err(), ClaimError::Superseded { .. }));
        jobs.extend(&pool, &second).await.unwrap();
        assert!(!jobs.acquire(&pool, "hourly").await.unwrap(), "its window has begun anew");
        // Less than a second before the end, they do not succeed.
        run(&mut observer, &format!("UPDATE job SET at = floor({NOW}) - 3599 WHERE id = 'hourly'")).await;
        let was_free = jobs.acquire(&pool, "hourly").await.unwrap();
        let ends = format!("SELECT at + 3600 <= {NOW} FROM job WHERE id = 'hourly'");
        if text(&mut observer, &ends).await == "false" {
            assert!(!was_free, "before its end");
            until(&mut observer, &ends).await;
            assert!(jobs.acquire(&pool, "hourly").await.unwrap(), "at its end");
        }
        run(&mut observer, "UPDATE job SET at = NULL WHERE id = 'hourly'").await;
    }
    assert!(!jobs.acquire(&pool, "far").await.unwrap(), "no sum is too large");
    let error = jobs.acquire(&pool, "none").await.unwrap_err();
    assert!(error.to_string().contains("no seconds"), "{error}");
    // A type that ends in 2038 is reported on use.
    run(&mut observer, "DELETE FROM job WHERE id = 'far'; ALTER TABLE job ALTER at TYPE int").await;
    let error = jobs.acquire(&pool, "hourly").await.unwrap_err();
    assert!(error.to_string().contains("no bigint"), "{error}");
    assert!(jobs.capture(&pool, (), 5).await.unwrap().is_empty());
}

/// Unreachable times and invalid seconds: each row is checked separately, and none fails the search for others.
#[tokio::test]
async fn no_value_of_one_row_stops_a_capture_of_the_others() {
    let (_db, pool, mut observer) = database(
        "CREATE TABLE job (id text PRIMARY KEY, at timestamptz, timeout double precision, since bigint)",
    )
    .await;
    let id = column("id");
    let at = TimeoutTable::new(
        Table::new("job").unwrap(),
        id.clone(),
        IdType::Text,
        column("at"),
        column("timeout"),
    );
    let since =
        TimeoutTable::new(Table::new("job").unwrap(), id, IdType::Text, column("since"), column("timeout"));
    let ways = [
        (at, "at", ["'-infinity'", "'4713-01-02 BC'"], ["'infinity'", "'294276-12-31'"]),
        (
            since.unix_time(),
            "since",
            ["-9223372036854775808", "-9223372036854775807"],
            ["9223372036854775807", "9223372036854775806"],
        ),
    ];
    for (jobs, column, past, never) in ways {
        let all = past.map(|time| (time, true)).into_iter().chain(never.map(|time| (time, false)));
        for (time, is_free) in all {
            for seconds in ["60", "0", "'-infinity'", "'infinity'", "'nan'", "1e300", "-1e300"] {
                let fill = format!(
                    "DELETE FROM job; INSERT INTO job (id, {column}, timeout) VALUES ('a', NULL, 60), ('b', {time}, {seconds}),
                     ('c', NULL, 60)"
                );
                run(&mut observer, &fill).await;
                let captured = jobs
                    .capture(&pool, (), 9)
                    .await
                    .unwrap_or_else(|error| panic!("{time} {seconds}: {error}"));
                let expected = if is_free { 3 } else { 2 };
                assert_eq!(captured.len(), expected, "{time} {seconds}: {captured:?}");
            }
        }
    }
}

/// One table name means one table per tenant, by the connection's search path.
#[tokio::test]
async fn tenants_have_locks_of_their_own() {
    let (_db, pool, mut observer) = database("CREATE SCHEMA t1; CREATE SCHEMA t2").await;
    for tenant in ["t1", "t2"] {
        run(&mut observer, &format!("SET search_path = {tenant}; {MUTEX}")).await;
    }
    let mut connection = pool.acquire().await.unwrap();
    for expected in [true, false] {
        for tenant in ["t1", "t2"] {
            run(&mut *connection, &format!("SET search_path = {tenant}")).await;
            assert_eq!(mutexes().acquire(&mut *connection, 1).await.unwrap(), expected, "{tenant}");
        }
    }
    connection.close().await.unwrap();
}

/// Captures are ordered, disjoint and within the limit under every plan.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn captures_are_ordered_disjoint_and_within_the_limit() {
    let (db, pool, mut observer) = database(FULL).await;
    run(
        &mut observer,
        "INSERT INTO latch (id, queue_id) SELECT n, 'q' || n % 2 FROM generate_series(1, 400) n; ANALYZE latch",
    )
    .await;
    for plan in ["hashjoin", "mergejoin", "sort", "material", "indexscan", "seqscan"] {
        let mut connection = db.connect().await;
        run(&mut connection, &format!("SET enable_memoize = off; SET enable_{plan} = off; BEGIN")).await;
        assert_eq!(latches().capture(&mut connection, "q1", 3).await.unwrap().len(), 3, "{plan}");
        let taken = text(&mut connection, "SELECT count(*) FROM latch WHERE acquired").await;
        assert_eq!(taken, "3", "{plan}");
        run(&mut connection, "ROLLBACK").await;
    }
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (locks, pool) = (latches(), pool.clone());
            tokio::spawn(async move {
                let mut mine = Vec::new();
                loop {
                    let batch = locks.capture(&pool, "q1", 7).await.unwrap();
                    assert!(batch.len() <= 7 && batch.is_sorted_by_key(|grant| grant.key.clone()));
                    if batch.is_empty() {
                        return mine;
                    }
                    mine.extend(batch.into_iter().map(|grant| grant.key));
                }
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    // A capture might find only locked rows. It takes the remaining ones in the next call.
    all.extend(latches().capture(&pool, "q1", 400).await.unwrap().into_iter().map(|grant| grant.key));
    let before = all.len();
    all.sort();
    all.dedup();
    assert_eq!((all.len(), before), (200, 200));
    assert_eq!(
        text(&mut observer, "SELECT count(*) FROM latch WHERE acquired AND queue_id = 'q0'").await,
        "0"
    );
}

/// Works behind a pooler in transaction mode, inside a transaction.
#[tokio::test]
async fn in_a_transaction_behind_a_pooler() {
    let (db, _, _) = database(MUTEX).await;
    let bouncer = PgBouncer::start(Cluster::shared(), &PgBouncerOptions::new().round_robin());
    let pool = pool(&bouncer.url(db.name()), 3).await;
    let (mut one, mut two) = (pool.begin().await.unwrap(), pool.begin().await.unwrap());
    assert!(mutexes().acquire(&mut *one, 1).await.unwrap());
    assert!(!mutexes().acquire(&mut *two, 1).await.unwrap());
    two.commit().await.unwrap();
    one.commit().await.unwrap();
    for granted in [false, true] {
        let mut tx = pool.begin().await.unwrap();
        assert_eq!(mutexes().acquire(&mut *tx, 1).await.unwrap(), granted);
        assert!(mutexes().release(&mut *tx, 1).await.unwrap());
        tx.commit().await.unwrap();
    }
}
