//! Checks the output of the examples.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

#[allow(dead_code, unreachable_pub)] // A program, of which tests use parts.
#[path = "../examples/capture.rs"]
mod capture;
#[allow(dead_code, unreachable_pub)]
#[path = "../examples/processed.rs"]
mod processed;
#[allow(dead_code, unreachable_pub)]
#[path = "../examples/spreadsheet/main.rs"]
mod spreadsheet;

use leasehold_claim::sqlx::query_scalar;
use test_servers::{Database, fresh_database};
use tokio::process::Command;

const ROLE: &str = "LEASEHOLD_EXAMPLE_ROLE";

/// The processes of `spreadsheet` run this program again, with this as its only test.
#[tokio::test]
async fn another_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    spreadsheet::process(&role, &std::env::var("DATABASE_URL").unwrap()).await.unwrap();
}

fn another(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "another_process", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// Returns one value of the database as text.
async fn text(db: &Database, sql: &'static str) -> String {
    query_scalar(sql).fetch_one(&mut db.connect().await).await.unwrap()
}

#[tokio::test]
async fn work_recorded_without_a_worker_is_done_by_a_later_one() {
    let db = fresh_database().await;
    let mut told = spreadsheet::hand_over(db.url(), another).await.unwrap();
    let mut done = told.split_off(10);
    let recorded = [
        "recorded create 1 as row 1",
        "recorded update 1 as row 2",
        "recorded update 1 as row 3",
        "recorded create 2 as row 4",
        "recorded update 2 as row 5",
        "recorded update 2 as row 6",
        "recorded create 3 as row 7",
        "recorded update 3 as row 8",
        "recorded update 3 as row 9",
        "refused create 1: it exists already",
    ];
    assert_eq!(told, recorded);
    // The worker can do the sheets in any order, but updates come after the creation.
    for (create, update) in
        [("1 as row 1", "1 as row 2+3"), ("2 as row 4", "2 as row 5+6"), ("3 as row 7", "3 as row 8+9")]
    {
        let at =
            |what: String| done.iter().position(|line| *line == what).unwrap_or_else(|| panic!("{done:#?}"));
        assert!(at(format!("did create {create}")) < at(format!("did update {update}")), "{done:#?}");
    }
    done.dedup();
    assert_eq!(done.len(), 6);
    assert_eq!(
        text(&db, "SELECT string_agg(DISTINCT status, ' ') FROM leasehold_spreadsheet.request").await,
        "complete"
    );
}

#[tokio::test]
async fn two_processes_share_rows_step_by_step_under_leases() {
    let db = fresh_database().await;
    let told = spreadsheet::replay(db.url(), another).await.unwrap();
    let schedule = [
        "recorded create 10 as row 1",
        "recorded update 10 as row 2",
        "recorded update 10 as row 3",
        "recorded create 20 as row 4",
        "recorded update 10 as row 5",
        "A took create 10 as row 1",
        "B took create 20 as row 4",
        "B settled create 20 as row 4",
        "B took nothing",
        "B took nothing",
        "A settled create 10 as row 1",
        "B took update 10 as row 2+3+5",
        "A took nothing",
        "B settled update 10 as row 2+3+5",
        "A took nothing",
    ];
    assert_eq!(told, schedule);
    // Each row was claimed once, and the group was settled in one transaction.
    let rows = "SELECT string_agg(id || ' ' || status || ' ' || epoch, ', ' ORDER BY id) FROM leasehold_spreadsheet.request";
    assert_eq!(text(&db, rows).await, "1 complete 1, 2 complete 1, 3 complete 1, 4 complete 1, 5 complete 1");
    let transactions =
        "SELECT count(DISTINCT xmin::text)::text FROM leasehold_spreadsheet.request WHERE id IN (2, 3, 5)";
    assert_eq!(text(&db, transactions).await, "1");
}

/// With held claims, a created sheet is updated during the creation of another. Updates that wait for that creation are
/// refused at once and rolled back.
#[tokio::test]
async fn two_processes_share_rows_step_by_step_in_open_transactions() {
    let db = fresh_database().await;
    let told = spreadsheet::replay_held(db.url(), another).await.unwrap();
    let schedule = [
        "recorded create 10 as row 1",
        "recorded update 10 as row 2",
        "recorded update 10 as row 3",
        "recorded create 20 as row 4",
        "recorded update 20 as row 5",
        "A took create 10 as row 1",
        "B was refused row 1 at once, and rolled back",
        "B took update 20 as row 5",
        "B settled update 20 as row 5",
        "B took nothing",
        "B took nothing: what is left waits for another, rolled back",
        "A settled create 10 as row 1",
        "B took update 10 as row 2+3",
        "A took nothing",
        "B settled update 10 as row 2+3",
        "A took nothing",
    ];
    assert_eq!(told, schedule);
    // Rolled back claims count no attempt, and the group is one transaction.
    let rows = "SELECT string_agg(id || ' ' || status || ' ' || attempts_left, ', ' ORDER BY id) FROM leasehold_spreadsheet.request";
    assert_eq!(text(&db, rows).await, "1 complete 2, 2 complete 2, 3 complete 2, 4 complete 3, 5 complete 2");
    let transactions =
        "SELECT count(DISTINCT xmin::text)::text FROM leasehold_spreadsheet.request WHERE id IN (2, 3)";
    assert_eq!(text(&db, transactions).await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_payment_is_booked_once_and_no_column_is_added() {
    let db = fresh_database().await;
    let books = processed::run(db.url()).await.unwrap();
    let expected = processed::Books {
        payments: 200,
        processed: 200,
        bookings: 200,
        booked_payments: 200,
        booked_by_the_dead: 0,
    };
    assert_eq!(books, expected);
    let columns = "SELECT string_agg(column_name, ' ' ORDER BY ordinal_position) FROM information_schema.columns \
        WHERE table_schema = 'leasehold_processed' AND table_name = 'payment'";
    assert_eq!(text(&db, columns).await, "id amount processed");
    let tables = "SELECT string_agg(table_name, ' ' ORDER BY table_name) FROM information_schema.tables \
        WHERE table_schema = 'leasehold_processed'";
    assert_eq!(text(&db, tables).await, "booking payment");
}

#[tokio::test]
async fn a_capture_takes_at_most_the_limit_and_only_its_holder_sets_a_status() {
    let db = fresh_database().await;
    let example = capture::Example::set_up(db.url()).await.unwrap();
    let told = [
        "A captures [1, 2]",
        "B captures [3, 4]",
        "B sets 1 to done: refused, it has not captured it",
        "A sets 1 to failed",
        "A sets 2 to exhausted: refused, in_progress to exhausted",
        "A sets 2 to done",
        "B sets 3 to retired",
        "B captures of those that failed [1]",
        "B sets 1 to done",
        "B sets 4 to done",
    ];
    assert_eq!(example.two_capture().await.unwrap(), told);
    let tasks = "SELECT string_agg(id || ' ' || status || ' ' || retries_left, ', ' ORDER BY id) FROM leasehold_capture.task";
    assert_eq!(text(&db, tasks).await, "1 done 3, 2 done 4, 3 retired 4, 4 done 4, 5 done 5");
}

#[tokio::test]
async fn a_task_past_its_timeout_is_swept_once_and_its_late_holder_refused() {
    let db = fresh_database().await;
    let example = capture::Example::set_up(db.url()).await.unwrap();
    let told = [
        "A captures [1]",
        "two sweeps return 1",
        "B captures [1]",
        "A sets 1 to done: refused, another worker has claimed it since",
        "B sets 1 to done",
    ];
    assert_eq!(example.one_is_too_late().await.unwrap(), told);
}

#[tokio::test]
async fn after_three_captures_a_task_is_exhausted_until_topped_up() {
    let db = fresh_database().await;
    let example = capture::Example::set_up(db.url()).await.unwrap();
    let told = [
        "A captures [6]",
        "A captures [6]",
        "A captures [6]",
        "A captures []",
        "6 is exhausted",
        "1 topped up",
        "A captures [6]",
    ];
    assert_eq!(example.until_exhausted().await.unwrap(), told);
}
