//! Two sessions with the same key, at each isolation level.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Pg, effect, private, world};
use crate::suite::{fresh, ident, replay, request};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use leasehold_idempotency::{Begin, IdempotencyError, Isolation, OpenKey, PgIdempotency, Stored};
use sqlx::postgres::{PgConnection, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, raw_sql};
use test_servers::Cluster;

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

async fn begin(world: &Pg, level: &str) -> PgConnection {
    let mut connection = world.database.connect().await;
    connection.execute(AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"))).await.unwrap();
    // Takes the snapshot, if the level has one for the whole transaction.
    connection.execute("SELECT 1").await.unwrap();
    connection
}

async fn begin_in(
    connection: &mut PgConnection,
    store: &PgIdempotency,
) -> Result<Begin<OpenKey>, IdempotencyError> {
    store.begin_in(connection, &ident("a"), &request("x")).await
}

async fn commit(mut connection: PgConnection) -> Result<(), sqlx::Error> {
    connection.execute("COMMIT").await.map(drop)
}

#[tokio::test]
async fn a_key_begun_elsewhere_is_in_flight_and_nobody_waits_for_it() {
    let world = world(8).await;
    for level in LEVELS {
        let first = fresh(world.store.begin(&ident("a"), &request("x")).await);
        // The second call returns while the first transaction is open, so it did not wait.
        let mut second = begin(&world, level).await;
        let told = begin_in(&mut second, &world.store).await;
        assert!(matches!(told, Ok(Begin::InFlight { .. })), "{level}: {told:?}");
        let third = world.elsewhere().begin(&ident("a"), &request("x")).await;
        assert!(matches!(third, Ok(Begin::InFlight { .. })), "{level}: {third:?}");
        // The transaction stays usable.
        effect(&mut second).await;
        commit(second).await.unwrap();
        first.rollback().await.unwrap();
    }
    assert_eq!(world.effects().await, 3);
}

#[tokio::test]
async fn what_was_committed_after_the_snapshot_is_a_retry_and_then_a_replay() {
    for level in &LEVELS[1..] {
        let world = world(8).await;
        let mut second = begin(&world, level).await;
        let first = fresh(world.store.begin(&ident("a"), &request("x")).await);
        first.finish(Stored::done(200, "first")).await.unwrap();
        let told = begin_in(&mut second, &world.store).await;
        assert!(matches!(&told, Err(IdempotencyError::Retry { .. })), "{level}: {told:?}");
        assert!(told.unwrap_err().is_retryable());
        second.execute("ROLLBACK").await.unwrap();
        second.execute(AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"))).await.unwrap();
        assert_eq!(replay(begin_in(&mut second, &world.store).await).body(), "first");
    }
}

/// The begin statement has its snapshot, finds nothing, and gets the lock because the first transaction has just
/// committed. It must look up again. A policy on the expired row pauses the statement between snapshot and lock.
#[tokio::test]
async fn what_was_committed_between_snapshot_and_lock_is_looked_up_again() {
    let world = private(8).await;
    fresh(world.store.begin(&ident("a"), &request("x")).await)
        .finish(Stored::done(200, "old"))
        .await
        .unwrap();
    let role = format!("held_{}", world.database.name());
    world
        .run(format!(
            "UPDATE leasehold.idempotency SET expires_at = clock_timestamp();
            CREATE ROLE {role};
            -- As cheap as it says, it is asked before anything else.
            CREATE FUNCTION held() RETURNS boolean LANGUAGE plpgsql COST 0.0001 AS
                $$ BEGIN PERFORM pg_advisory_xact_lock_shared(99); RETURN true; END $$;
            ALTER TABLE leasehold.idempotency ENABLE ROW LEVEL SECURITY;
            CREATE POLICY held ON leasehold.idempotency USING (held()) WITH CHECK (true);"
        ))
        .await;
    let grants = PgIdempotency::grants_sql(&"leasehold".parse().unwrap(), &role.parse().unwrap());
    world.run(grants).await;
    let mut gate = world.database.connect().await;
    gate.execute("SELECT pg_advisory_lock(99)").await.unwrap();

    let first = fresh(world.store.begin(&ident("a"), &request("x")).await);
    let mut second = begin(&world, "READ COMMITTED").await;
    second.execute(AssertSqlSafe(format!("SET LOCAL ROLE {role}"))).await.unwrap();
    let store = world.elsewhere();
    let second = tokio::spawn(async move { begin_in(&mut second, &store).await });
    world.until_it_waits(&second).await;
    first.finish(Stored::done(200, "new")).await.unwrap();
    gate.execute("SELECT pg_advisory_unlock(99)").await.unwrap();
    assert_eq!(replay(second.await.unwrap()).body(), "new");
    world
        .run(format!("DROP POLICY held ON leasehold.idempotency; DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
}

#[tokio::test]
async fn a_forgotten_finish_cannot_be_committed() {
    for level in LEVELS {
        let world = world(8).await;
        let mut open = begin(&world, level).await;
        let key = fresh(begin_in(&mut open, &world.store).await);
        effect(&mut open).await;
        let refused = open.execute("COMMIT").await.unwrap_err();
        // Waits, because the server reports the error before it releases the locks.
        open.execute("SELECT 1").await.unwrap();
        let refused = refused.as_database_error().unwrap();
        assert_eq!(
            (refused.code().as_deref(), refused.constraint()),
            (Some("23514"), Some("idempotency_finished"))
        );
        drop(key);
        assert_eq!(world.effects().await, 0, "{level}");
        // The same in an owned transaction whose handler sends a COMMIT.
        let mut own = fresh(world.store.begin(&ident("a"), &request("x")).await);
        effect(&mut own).await;
        assert!(own.execute(raw_sql("COMMIT")).await.is_err());
        assert!(own.finish(Stored::done(200, "")).await.is_err());
        assert_eq!(world.effects().await, 0, "{level}");
        drop(fresh(world.store.begin(&ident("a"), &request("x")).await));
    }
}

#[tokio::test]
async fn several_keys_in_one_transaction_of_the_caller() {
    for level in LEVELS {
        let world = world(8).await;
        let mut open = begin(&world, level).await;
        effect(&mut open).await;
        let a = fresh(begin_in(&mut open, &world.store).await);
        assert!(matches!(begin_in(&mut open, &world.store).await, Err(IdempotencyError::Unfinished)));
        effect(&mut open).await;
        a.finish(&mut open, &Stored::done(200, "a")).await.unwrap();
        assert_eq!(replay(begin_in(&mut open, &world.store).await).body(), "a", "its own, finished");
        let b = fresh(world.store.begin_in(&mut open, &ident("b"), &request("x")).await);
        effect(&mut open).await;
        b.finish(&mut open, &Stored::rejected(402, "b")).await.unwrap();
        let _ = open.execute("SELECT 1").await.unwrap();
        commit(open).await.unwrap();
        assert_eq!(world.effects().await, 2, "{level}: before and under `a`, not under `b`");
        assert!(replay(world.store.begin(&ident("b"), &request("x")).await).is_rejected());
    }
}

#[tokio::test]
async fn a_savepoint_that_is_rolled_back_takes_the_key_along() {
    let world = world(8).await;
    let mut connection = world.database.connect().await;
    let mut transaction = connection.begin().await.unwrap();
    let mut inner = transaction.begin().await.unwrap();
    let key = fresh(begin_in(&mut inner, &world.store).await);
    inner.rollback().await.unwrap();
    let lost = key.finish(&mut transaction, &Stored::done(200, "")).await.unwrap_err();
    assert!(
        matches!(&lost, IdempotencyError::Store(error) if error.kind() == leasehold_api::ErrorKind::Lost),
        "{lost}"
    );
    let again = fresh(begin_in(&mut transaction, &world.store).await);
    again.finish(&mut transaction, &Stored::done(200, "again")).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(replay(world.store.begin(&ident("a"), &request("x")).await).body(), "again");
}

/// Two hundred callers of one key use a pool of two while the first caller works. The others return without a
/// connection, and another client has the second one.
#[tokio::test]
async fn two_hundred_callers_of_one_key_leave_the_pool_free() {
    let world = world(2).await;
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let pool = PgPoolOptions::new().max_connections(2).before_acquire(move |_, _| {
        count.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Ok(true) })
    });
    let pool = pool.connect(world.database.url()).await.unwrap();
    let store = PgIdempotency::new(pool.clone());
    let first = fresh(store.begin(&ident("a"), &request("x")).await);
    let before = taken.load(Ordering::SeqCst);
    let (key, asked) = (ident("a"), request("x"));
    let told = join_all((0..199).map(|_| store.begin(&key, &asked))).await;
    assert!(told.iter().all(|told| matches!(told, Ok(Begin::InFlight { .. }))), "{told:?}");
    assert_eq!(taken.load(Ordering::SeqCst), before, "nobody has asked for a connection");
    let mut other = fresh(store.begin(&ident("b"), &request("x")).await);
    effect(&mut other).await;
    // Both connections are taken. The first caller of a third key waits, and its second caller returns at once.
    let third = ident("c");
    let mut waiting = Box::pin(store.begin(&third, &asked));
    assert!(futures_util::poll!(&mut waiting).is_pending());
    let told = store.begin(&third, &asked).now_or_never();
    assert!(matches!(told, Some(Ok(Begin::InFlight { .. }))), "{told:?}");
    other.finish(Stored::done(200, "b")).await.unwrap();
    drop(fresh(waiting.await));
    first.finish(Stored::done(200, "a")).await.unwrap();
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn two_replays_at_once_in_two_processes_are_both_replays() {
    let world = world(8).await;
    fresh(world.store.begin(&ident("a"), &request("x")).await).finish(Stored::done(200, "x")).await.unwrap();
    let stores = [(); 4].map(|()| world.elsewhere());
    let (key, asked) = (ident("a"), request("x"));
    for _ in 0..25 {
        for told in join_all(stores.iter().map(|store| store.begin(&key, &asked))).await {
            assert_eq!(replay(told).body(), "x");
        }
    }
}

#[tokio::test]
async fn a_purge_waits_for_nobody() {
    let world = world(8).await;
    for key in ["a", "b", "c"] {
        fresh(world.store.begin(&ident(key), &request("x")).await)
            .finish(Stored::done(200, ""))
            .await
            .unwrap();
    }
    world.run("UPDATE leasehold.idempotency SET expires_at = clock_timestamp()").await;
    // One key is in use again, another one's row is locked by hand.
    let anew = fresh(world.store.begin(&ident("a"), &request("y")).await);
    let mut by_hand = world.database.connect().await;
    by_hand.execute("BEGIN; SELECT FROM leasehold.idempotency WHERE key = 'b' FOR UPDATE").await.unwrap();
    assert_eq!(world.store.purge(100).await.unwrap(), 1);
    anew.finish(Stored::done(200, "anew")).await.unwrap();
    commit(by_hand).await.unwrap();
    assert_eq!(world.store.purge(100).await.unwrap(), 1);
    assert_eq!(replay(world.store.begin(&ident("a"), &request("y")).await).body(), "anew");
}

/// Deleted rows stay in the index while an open transaction might see them.
#[tokio::test]
async fn a_purge_passes_what_it_has_deleted_once() {
    let world = world(1).await;
    let mut report = begin(&world, "REPEATABLE READ").await;
    world
        .run(
            "INSERT INTO leasehold.idempotency (scope, key, fingerprint, outcome, expires_at) SELECT 's', n::text, \
            sha256(n::text::bytea), 'done', clock_timestamp() - n * interval '1 second' FROM generate_series(1, 5000) n",
        )
        .await;
    let read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'idempotency_expires'";
    world.run("ANALYZE leasehold.idempotency; SELECT pg_stat_force_next_flush()").await;
    let before = world.number(read).await;
    assert_eq!(world.store.purge(6000).await.unwrap(), 5000);
    world.run("SELECT pg_stat_force_next_flush()").await;
    let read = world.number(read).await - before;
    assert!((5000..10_000).contains(&read), "{read} entries of the index");
    report.execute("COMMIT").await.unwrap();
}

#[tokio::test]
async fn what_took_longer_than_the_retention_is_remembered_when_it_is_done() {
    let world = world(4).await;
    let mut first = fresh(world.store.begin(&ident("a"), &request("x")).await);
    effect(&mut first).await;
    // Moves the start two days into the past, with a retention of one day.
    let back = "UPDATE leasehold.idempotency SET created_at = created_at - interval '2 days', \
        expires_at = expires_at - interval '2 days'";
    assert_eq!(first.execute(back).await.unwrap().rows_affected(), 1);
    first.finish(Stored::done(200, "first")).await.unwrap();
    assert_eq!(world.store.purge(10).await.unwrap(), 0);
    assert_eq!(replay(world.store.begin(&ident("a"), &request("x")).await).body(), "first");
    let left = "SELECT extract(epoch FROM expires_at - clock_timestamp())::bigint FROM leasehold.idempotency";
    assert!((80_000..=86_400).contains(&world.number(left).await), "a day from now, not more");
}

/// The server searches temporary tables before the search path, unless the path names their schema.
#[tokio::test]
async fn a_temporary_table_does_not_hide_a_forgotten_finish() {
    let world = world(4).await;
    let mut open = begin(&world, "READ COMMITTED").await;
    open.execute("CREATE TEMPORARY TABLE idempotency (LIKE leasehold.idempotency)").await.unwrap();
    drop(fresh(begin_in(&mut open, &world.store).await));
    let refused = open.execute("COMMIT").await.unwrap_err();
    assert_eq!(refused.as_database_error().unwrap().constraint(), Some("idempotency_finished"));
}

/// A waiter for the key's lock gets it as soon as the effects are rolled back.
#[tokio::test]
async fn a_rejection_that_another_process_came_before_is_a_retry() {
    let world = private(8).await;
    for level in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let store = world.elsewhere().isolation(level);
        let mut first = fresh(store.begin(&ident("a"), &request("x")).await);
        effect(&mut first).await;
        let held = Cluster::shared().advisory_locks(world.database.name()).await;
        let [held] = &held[..] else { panic!("{held:?}") };
        let mut other = world.database.connect().await;
        let take = format!(
            "BEGIN; SELECT pg_advisory_xact_lock({}::bigint << 32 | {}::bigint)",
            held.class_id, held.object_id
        );
        let waiting = tokio::spawn(async move {
            other.execute(AssertSqlSafe(take)).await.unwrap();
            other
        });
        world.until_it_waits(&waiting).await;
        let error = first.finish(Stored::rejected(402, "no")).await.unwrap_err();
        assert!(matches!(error, IdempotencyError::Retry { .. }), "{level:?}: {error}");
        // Commits instead of closing, because the server releases the key only once it notices the close.
        commit(waiting.await.unwrap()).await.unwrap();
        assert_eq!(world.effects().await, 0, "{level:?}");
        assert_eq!(world.number("SELECT count(*) FROM leasehold.idempotency").await, 0, "{level:?}");
    }
}

/// The driver ends the outer transaction if a nested begin fails, and continues without a transaction. Later
/// statements are committed without the key. `finish` must report that.
#[tokio::test]
async fn a_transaction_that_the_driver_has_ended_is_not_finished_and_the_error_says_so() {
    let world = world(4).await;
    let mut first = fresh(world.store.begin(&ident("a"), &request("x")).await);
    first.execute("SELECT 1 / 0").await.unwrap_err();
    assert!(first.begin().await.is_err());
    effect(&mut first).await;
    let lost = first.finish(Stored::done(200, "")).await.unwrap_err();
    assert!(
        matches!(&lost, IdempotencyError::Store(error) if error.kind() == leasehold_api::ErrorKind::Lost),
        "{lost}"
    );
    assert!(lost.to_string().contains("committed without the key"), "{lost}");
    assert!(!lost.is_retryable());
}

/// Infinite times from foreign statements. Servers before PostgreSQL 17 refuse to subtract them.
#[tokio::test]
async fn infinite_times_are_purged_or_kept_and_stop_nothing() {
    let world = world(4).await;
    for table in ["idempotency", "journey"] {
        world
            .run(format!(
                "INSERT INTO leasehold.{table} (scope, key, fingerprint, outcome, expires_at) SELECT 's', t || n, sha256('x'), 'done', t::timestamptz
                 FROM generate_series(1, 700) n, unnest(ARRAY['-infinity', '1969-01-01', '4000-01-01 BC']) t
                 UNION ALL SELECT 's', 'never', sha256('x'), 'done', 'infinity'"
            ))
            .await;
    }
    assert_eq!(world.store.purge(10_000).await.unwrap(), 2100);
    assert_eq!(world.number("SELECT count(*) FROM leasehold.idempotency").await, 1);
    let set = [
        ("created_at", "-infinity"),
        ("created_at", "infinity"),
        ("expires_at", "-infinity"),
        ("expires_at", "infinity"),
    ];
    for (column, time) in set {
        let key = ident(&format!("{column} {time}"));
        let mut first = fresh(world.store.begin(&key, &request("x")).await);
        let sql = format!(
            "UPDATE leasehold.idempotency SET expires_at = now() - interval '1 hour' WHERE key = '{column} {time}';
             UPDATE leasehold.idempotency SET {column} = '{time}' WHERE key = '{column} {time}'"
        );
        first.execute(raw_sql(AssertSqlSafe(sql))).await.unwrap();
        first
            .finish(Stored::done(200, "first"))
            .await
            .unwrap_or_else(|error| panic!("{column} {time}: {error}"));
        assert_eq!(replay(world.store.begin(&key, &request("x")).await).body(), "first", "{column} {time}");
    }
}
