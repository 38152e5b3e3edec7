use cookbook::second_run::{PAGE, open, put};
use cookbook::sql;
use sqlx::PgPool;
use test_servers::Database;
use test_servers::sql::pool;

use crate::support::*;

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses a part.
#[path = "../../examples/second_run.rs"]
mod example;

const KEY: &str = "6:report/7";

async fn elsewhere() -> (Database, PgPool) {
    let db = database(sql(PAGE, "schema")).await;
    let pool = pool(db.url(), 4).await;
    (db, pool)
}

async fn lines(on: &PgPool) -> String {
    text(on, "SELECT coalesce(string_agg(name, ' ' ORDER BY name), 'nothing') FROM line").await
}

/// As the program tells it, with a claim that is lost and one that overtakes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_leaves_what_one_whole_run_would_and_a_late_first_run_changes_nothing() {
    let db = database("").await;
    let told = [
        "run 1 of [a b c d]: a b",
        "run 3 of [b c x]: b c x",
        "late line written: false",
        "late run opened: false",
        "late run refused: true",
        "in the end: b c x",
    ];
    // Each time from the start.
    for _ in 0..2 {
        assert_eq!(example::second_run(db.url()).await.unwrap(), told);
    }
}

#[tokio::test]
async fn a_run_can_be_opened_again_and_repeat_its_lines() {
    let (_db, pool) = elsewhere().await;
    for _ in 0..2 {
        assert!(open(&pool, KEY, 5).await.unwrap());
        for _ in 0..2 {
            assert!(put(&pool, KEY, 5, "a").await.unwrap());
        }
        assert_eq!(lines(&pool).await, "a");
    }
    assert!(!open(&pool, KEY, 4).await.unwrap());
    assert!(!put(&pool, KEY, 4, "b").await.unwrap() && !put(&pool, KEY, 6, "b").await.unwrap());
    assert!(open(&pool, "another", 1).await.unwrap());
    assert_eq!(lines(&pool).await, "a", "the run of another key removes nothing of this one");
}

/// The first run has written a line and not committed it when the second is opened. That waits, and then sees it.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_opened_during_a_late_write_removes_it() {
    let (db, pool) = elsewhere().await;
    assert!(open(&pool, KEY, 1).await.unwrap());
    let mut late = db.connect().await;
    run(&mut late, "BEGIN").await;
    let put = sqlx::query(sql(PAGE, "put")).bind(KEY).bind(1_i64).bind("late");
    assert_eq!(put.execute(&mut late).await.unwrap().rows_affected(), 1);
    let mut second = db.connect().await;
    let second_pid = pid(&mut second).await;
    let opening = async {
        run(&mut second, "BEGIN").await;
        let open = sqlx::query(sql(PAGE, "open")).bind(KEY).bind(2_i64);
        assert_eq!(open.execute(&mut second).await.unwrap().rows_affected(), 1);
        let undo = sqlx::query(sql(PAGE, "undo")).bind(KEY);
        assert_eq!(undo.execute(&mut second).await.unwrap().rows_affected(), 1);
        run(&mut second, "COMMIT").await;
    };
    while_blocked(&db, second_pid, opening, run(&mut late, "COMMIT")).await;
    assert_eq!(lines(&pool).await, "nothing");
}

/// The second run is being opened when the first writes. That waits, and is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_during_the_opening_of_a_later_run_is_refused() {
    let (db, pool) = elsewhere().await;
    assert!(open(&pool, KEY, 1).await.unwrap());
    let mut second = db.connect().await;
    run(&mut second, "BEGIN").await;
    sqlx::query(sql(PAGE, "open")).bind(KEY).bind(2_i64).execute(&mut second).await.unwrap();
    let mut late = db.connect().await;
    let late_pid = pid(&mut late).await;
    let put = sqlx::query(sql(PAGE, "put")).bind(KEY).bind(1_i64).bind("late");
    let put = async { put.execute(&mut late).await.unwrap().rows_affected() };
    let (written, ()) = while_blocked(&db, late_pid, put, run(&mut second, "COMMIT")).await;
    assert_eq!((written, lines(&pool).await), (0, "nothing".to_owned()));
}

#[tokio::test]
async fn wrong_repeated_writes_leave_what_is_no_longer_wanted() {
    let (_db, pool) = elsewhere().await;
    assert!(open(&pool, KEY, 1).await.unwrap());
    for (_run, name) in [(1, "a"), (1, "b"), (2, "b"), (2, "c"), (2, "x"), (1, "d")] {
        sqlx::query(sql(PAGE, "wrong: put again")).bind(KEY).bind(name).execute(&pool).await.unwrap();
    }
    assert_eq!(lines(&pool).await, "a b c d x", "not `b c x`");
}

#[tokio::test]
async fn wrong_a_write_without_a_lock_stays() {
    let (db, pool) = elsewhere().await;
    assert!(open(&pool, KEY, 1).await.unwrap());
    let mut late = db.connect().await;
    run(&mut late, "BEGIN").await;
    let put = sqlx::query(sql(PAGE, "wrong: put without a lock")).bind(KEY).bind(1_i64).bind("late");
    put.execute(&mut late).await.unwrap();
    assert!(open(&pool, KEY, 2).await.unwrap(), "it does not wait");
    run(&mut late, "COMMIT").await;
    assert_eq!(lines(&pool).await, "late");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_one_statement_misses_the_write_that_it_waits_for() {
    let (db, pool) = elsewhere().await;
    assert!(open(&pool, KEY, 1).await.unwrap());
    let mut late = db.connect().await;
    run(&mut late, "BEGIN").await;
    sqlx::query(sql(PAGE, "put")).bind(KEY).bind(1_i64).bind("late").execute(&mut late).await.unwrap();
    let mut second = db.connect().await;
    let second_pid = pid(&mut second).await;
    let both = sqlx::query(sql(PAGE, "wrong: open and undo")).bind(KEY).bind(2_i64);
    let both = async { both.execute(&mut second).await.unwrap().rows_affected() };
    let (removed, ()) = while_blocked(&db, second_pid, both, run(&mut late, "COMMIT")).await;
    assert_eq!((removed, lines(&pool).await), (0, "late".to_owned()));
}
