use std::time::Duration;

use cookbook::migrate::{
    NUMBERS_PAGE, SHEDLOCK_PAGE, ShedLockJob, beside_numbers, beside_sqlx, run_beside_shedlock,
};
use cookbook::sql;
use leasehold_api::LockExt as _;
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::postgres::PgAdvisoryLock;
use sqlx::{Either, PgConnection, PgPool};
use test_servers::Database;

use crate::support::*;

fn server(db: &Database) -> PgConfig {
    PgConfig::from_url(db.url()).unwrap().install_schema(true)
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_sqlx_and_leasehold_exclude_each_other() {
    let db = database("").await;
    let new = beside_sqlx(server(&db)).await.unwrap();
    let old = PgAdvisoryLock::new("nightly report");

    let guard = new.key("nightly report").acquire().await.unwrap();
    let Either::Right(connection) = old.try_acquire(db.connect().await).await.unwrap() else {
        panic!("both")
    };
    guard.release().await.unwrap();

    let Either::Left(held) = old.try_acquire(connection).await.unwrap() else { panic!("it is free") };
    assert!(new.key("nightly report").try_acquire().await.unwrap().is_none());
    held.release_now().await.unwrap();
    let guard = new.key("nightly report").try_acquire().await.unwrap();
    guard.expect("it is free").release().await.unwrap();
}

async fn by_hand(connection: &mut PgConnection) -> bool {
    text(connection, "SELECT pg_try_advisory_lock(42)").await == "true"
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_numbers_by_hand_and_leasehold_exclude_each_other() {
    let db = database("").await;
    let new = beside_numbers(server(&db)).await.unwrap();
    let mut old = db.connect().await;
    let guard = new.key("42").acquire().await.unwrap();
    assert!(!by_hand(&mut old).await);
    guard.release().await.unwrap();
    assert!(by_hand(&mut old).await);
    assert!(new.key("42").try_acquire().await.unwrap().is_none());
    assert_eq!(text(&mut old, "SELECT pg_advisory_unlock(42)").await, "true");
    new.key("42").try_acquire().await.unwrap().expect("it is free").release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_hashtext_has_the_same_number() {
    let db = database("").await;
    let new = beside_numbers(server(&db)).await.unwrap();
    let mut old = db.connect().await;
    let number: i64 =
        sqlx::query_scalar(sql(NUMBERS_PAGE, "number")).bind("report").fetch_one(&mut old).await.unwrap();
    run(&mut old, "BEGIN; SELECT pg_advisory_xact_lock(hashtext('report'))").await;
    assert!(new.key(number.to_string()).try_acquire().await.unwrap().is_none());
    run(&mut old, "COMMIT").await;
    new.key(number.to_string()).try_acquire().await.unwrap().expect("it is free").release().await.unwrap();
}

#[tokio::test]
async fn wrong_two_tasks_on_one_session_both_hold_the_lock() {
    let db = database("").await;
    let (mut shared, mut other) = (db.connect().await, db.connect().await);
    assert!(by_hand(&mut shared).await);
    assert!(by_hand(&mut shared).await, "the second task is let in as well");
    assert_eq!(text(&mut shared, "SELECT pg_advisory_unlock(42)").await, "true");
    assert!(!by_hand(&mut other).await, "and one unlock does not free it");
}

const MINUTE: Duration = Duration::from_secs(60);
const REPORT: ShedLockJob<'_> = ShedLockJob { name: "report", at_most: MINUTE };

/// Runs the old program's statement under its name. Returns whether it took the row.
async fn old_takes(connection: &mut PgConnection, seconds: f64) -> bool {
    let take = sqlx::query(sql(SHEDLOCK_PAGE, "take")).bind("report").bind(seconds).bind("old host");
    take.execute(connection).await.unwrap().rows_affected() == 1
}

async fn shedlock() -> (Database, PgPool, leasehold_engine::Engine) {
    let db = database(sql(SHEDLOCK_PAGE, "schema")).await;
    let pool = PgPool::connect(db.url()).await.unwrap();
    let lock = TtlConfig::new(server(&db)).connect().await.unwrap();
    (db, pool, lock)
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_shedlock_keeps_the_new_program_out() {
    let (db, pool, lock) = shedlock().await;
    let mut old = db.connect().await;
    assert!(old_takes(&mut old, 3600.0).await);
    let never = async |_: &_| panic!("the old program runs");
    assert_eq!(run_beside_shedlock(&lock, &pool, &REPORT, never).await.unwrap(), None);
    let give_back = sqlx::query(sql(SHEDLOCK_PAGE, "give back")).bind("report");
    assert_eq!(give_back.bind("old host").execute(&mut old).await.unwrap().rows_affected(), 1);
    assert_eq!(run_beside_shedlock(&lock, &pool, &REPORT, async |_| 7).await.unwrap(), Some(7));
    assert!(old_takes(&mut old, 3600.0).await, "and it was given back");
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_the_new_program_keeps_shedlock_out() {
    let (db, pool, lock) = shedlock().await;
    let ran = run_beside_shedlock(&lock, &pool, &REPORT, async |_| {
        let second = run_beside_shedlock(&lock, &pool, &REPORT, async |_| ()).await.unwrap();
        (old_takes(&mut db.connect().await, 3600.0).await, second)
    });
    assert_eq!(ran.await.unwrap(), Some((false, None)));
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_a_shedlock_row_of_a_dead_run_ends_by_itself() {
    let (db, pool, lock) = shedlock().await;
    let mut old = db.connect().await;
    assert!(old_takes(&mut old, -1.0).await, "a row whose time is over");
    assert_eq!(run_beside_shedlock(&lock, &pool, &REPORT, async |_| 7).await.unwrap(), Some(7));
    // A late run must not release the row of another run.
    assert!(old_takes(&mut old, 3600.0).await);
    let late = sqlx::query(sql(SHEDLOCK_PAGE, "give back")).bind("report").bind("somebody else");
    assert_eq!(late.execute(&mut old).await.unwrap().rows_affected(), 0);
}
