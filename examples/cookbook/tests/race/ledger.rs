use cookbook::ledger::{Locking, PAGE, SpendError, spend};
use cookbook::sql;
use futures_util::future::join_all;
use leasehold_api::{ErrorKind, LockKey, key};
use leasehold_postgres::Identifier;
use leasehold_postgres_advisory::XactLocks;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use test_bounds::within;
use test_servers::Database;

use crate::support::*;

fn locks() -> XactLocks {
    XactLocks::new(Identifier::new("leasehold").unwrap())
}

fn all() -> [Locking; 3] {
    [Locking::Table, Locking::ParentRow, Locking::Key(locks())]
}

fn of_holder(id: i64) -> LockKey {
    key!["ledger", id].unwrap()
}

/// Creates holders 1 and 2 with this balance each.
async fn holders(balance: i64) -> (Database, PgPool) {
    let db = database(sql(PAGE, "schema")).await;
    let fill = format!(
        "INSERT INTO holder VALUES (1), (2); INSERT INTO entry (holder_id, amount) VALUES (1, {balance}), (2, {balance})"
    );
    run(&mut db.connect().await, &fill).await;
    let pool =
        PgPoolOptions::new().max_connections(10).acquire_timeout(LONG).connect(db.url()).await.unwrap();
    (db, pool)
}

async fn balance(connection: &mut PgConnection) -> i64 {
    sqlx::query_scalar(sql(PAGE, "balance")).bind(1_i64).fetch_one(connection).await.unwrap()
}

async fn take_ten(connection: &mut PgConnection) {
    sqlx::query(sql(PAGE, "spend")).bind(1_i64).bind(10_i64).execute(connection).await.unwrap();
}

/// Acquires the lock in an open transaction.
async fn hold(connection: &mut PgConnection, lock: &Locking) {
    run(&mut *connection, "BEGIN ISOLATION LEVEL READ COMMITTED").await;
    match lock {
        Locking::Table => run(connection, sql(PAGE, "lock table")).await,
        Locking::ParentRow => {
            sqlx::query(sql(PAGE, "lock holder")).bind(1_i64).execute(connection).await.unwrap();
        }
        Locking::Key(locks) => drop(locks.lock_in(connection, &of_holder(1), LONG).await.unwrap()),
        _ => unreachable!(),
    }
}

#[tokio::test]
async fn ten_of_a_hundred_spends_succeed_with_each_kind_of_lock() {
    for lock in all() {
        let (db, pool) = holders(100).await;
        let spends = join_all((0..100).map(|_| spend(&pool, &lock, 1, 10)));
        let spent = within(LONG, "not ended", spends).await;
        let succeeded = spent.into_iter().filter(|spent| *spent.as_ref().unwrap()).count();
        assert_eq!((succeeded, balance(&mut db.connect().await).await), (10, 0), "{lock:?}");
    }
}

#[tokio::test]
async fn the_table_lock_lets_readers_pass() {
    let (db, pool) = holders(100).await;
    let (mut a, mut reader, mut writer) = (db.connect().await, db.connect().await, db.connect().await);
    let writer_pid = pid(&mut writer).await;
    hold(&mut a, &Locking::Table).await;
    // Would wait for the transaction above, which is ended only afterwards.
    assert_eq!(within(LONG, "not ended", balance(&mut reader)).await, 100);
    let other = "INSERT INTO entry (holder_id, amount) VALUES (2, 1)";
    while_blocked(&db, writer_pid, run(&mut writer, other), run(&mut a, "COMMIT")).await;
    assert!(spend(&pool, &Locking::Table, 1, 100).await.unwrap());
}

#[tokio::test]
async fn other_holders_go_on() {
    for lock in [Locking::ParentRow, Locking::Key(locks())] {
        let (db, pool) = holders(100).await;
        let mut a = db.connect().await;
        hold(&mut a, &lock).await;
        // Would wait for the transaction above, which is ended only afterwards.
        let other = within(LONG, "not ended", spend(&pool, &lock, 2, 10)).await;
        assert!(other.unwrap(), "{lock:?}");
        let deposit = "INSERT INTO entry (holder_id, amount) VALUES (1, 5)";
        within(LONG, "not ended", run(&mut db.connect().await, deposit)).await;
        run(&mut a, "ROLLBACK").await;
    }
}

#[tokio::test]
async fn a_parent_row_can_be_locked_instead() {
    let (db, _pool) = holders(10).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    hold(&mut a, &Locking::ParentRow).await;
    assert_eq!(balance(&mut a).await, 10);
    take_ten(&mut a).await;
    let second = async {
        hold(&mut b, &Locking::ParentRow).await;
        balance(&mut b).await
    };
    assert_eq!(
        while_blocked(&db, b_pid, second, run(&mut a, "COMMIT")).await.0,
        0,
        "it sees the first spend"
    );
}

#[tokio::test]
async fn every_way_out_releases_the_lock() {
    for lock in all() {
        let (db, pool) = holders(10).await;
        assert!(!spend(&pool, &lock, 1, 11).await.unwrap(), "too little");
        let error = spend(&pool, &lock, 9, -1).await.unwrap_err();
        assert!(matches!(&error, SpendError::Database(error) if state(error) == "23503"), "{error:?}");
        // Drops the spend while it waits for the lock or holds it.
        let mut a = db.connect().await;
        hold(&mut a, &lock).await;
        let mut dropped = Box::pin(spend(&pool, &lock, 1, 1));
        assert!(futures_util::poll!(&mut dropped).is_pending());
        drop(dropped);
        run(&mut a, "COMMIT").await;
        let spent = within(LONG, "not ended", spend(&pool, &lock, 1, 10)).await;
        assert!(spent.unwrap(), "{lock:?}");
    }
    // In code by hand, an early return leaves a session lock on the pool's connection.
    let (db, _pool) = holders(0).await;
    let one = PgPoolOptions::new().max_connections(1).connect(db.url()).await.unwrap();
    let by_hand = async {
        let mut connection = one.acquire().await.unwrap();
        run(&mut *connection, "SELECT pg_advisory_lock(1)").await;
        if balance(&mut connection).await < 10 {
            return;
        }
        run(&mut *connection, "SELECT pg_advisory_unlock(1)").await;
    };
    by_hand.await;
    assert_eq!(text(&mut db.connect().await, "SELECT pg_try_advisory_lock(1)").await, "false");
}

const READ_COMMITTED: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
const REPEATABLE_READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ";
const ADVISORY: &str = "SELECT pg_advisory_xact_lock(1)";
const PARENT_ROW: &str = "SELECT FROM holder WHERE id = 1 FOR NO KEY UPDATE";

/// Runs two transactions that read the balance of ten and then spend ten. The second spends after the first commit.
/// Returns the final balance.
async fn balance_after(begin: &str, lock: Option<&str>) -> i64 {
    let (db, _pool) = holders(10).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    let look = async |session: &mut PgConnection| {
        run(&mut *session, begin).await;
        if let Some(lock) = lock {
            run(&mut *session, lock).await;
        }
        balance(session).await
    };
    assert_eq!(look(&mut a).await, 10);
    let finish = async |session: &mut PgConnection| {
        take_ten(session).await;
        run(&mut *session, "COMMIT").await;
    };
    let seen = if lock.is_some() {
        while_blocked(&db, b_pid, look(&mut b), finish(&mut a)).await.0
    } else {
        let seen = look(&mut b).await;
        finish(&mut a).await;
        seen
    };
    if seen >= 10 {
        finish(&mut b).await;
    }
    balance(&mut db.connect().await).await
}

#[tokio::test]
async fn wrong_without_a_lock_the_account_is_overdrawn() {
    assert_eq!(balance_after(READ_COMMITTED, None).await, -10);
    assert_eq!(balance_after(READ_COMMITTED, Some(ADVISORY)).await, 0);
    assert_eq!(balance_after(READ_COMMITTED, Some(PARENT_ROW)).await, 0);
}

#[tokio::test]
async fn wrong_at_repeatable_read_the_account_is_overdrawn() {
    assert_eq!(balance_after(REPEATABLE_READ, Some(ADVISORY)).await, -10);
    assert_eq!(balance_after(REPEATABLE_READ, Some(PARENT_ROW)).await, -10, "the row itself did not change");
    // `lock_in` refuses this isolation level.
    let (db, _pool) = holders(10).await;
    let mut a = db.connect().await;
    run(&mut a, REPEATABLE_READ).await;
    let error = locks().lock_in(&mut a, &of_holder(1), LONG).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}

#[tokio::test]
async fn wrong_lock_and_read_in_one_statement_sees_the_old_balance() {
    let (db, _pool) = holders(10).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    let locked = async |session: &mut PgConnection| {
        run(&mut *session, "BEGIN ISOLATION LEVEL READ COMMITTED").await;
        let query = sqlx::query_scalar::<_, i64>(sql(PAGE, "wrong: lock and read"));
        query.bind(1_i64).fetch_one(session).await.unwrap()
    };
    assert_eq!(locked(&mut a).await, 10);
    let spend = async {
        take_ten(&mut a).await;
        run(&mut a, "COMMIT").await;
    };
    let (seen, ()) = while_blocked(&db, b_pid, locked(&mut b), spend).await;
    assert_eq!(seen, 10, "after the lock was granted, the balance from before");
    assert_eq!(balance(&mut b).await, 0, "the next statement sees what is");
}
