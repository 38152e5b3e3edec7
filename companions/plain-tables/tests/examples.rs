//! Checks the output of the examples.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/import.rs"]
mod import;
#[allow(dead_code, unreachable_pub)]
#[path = "../examples/three_tables.rs"]
mod three_tables;

use test_servers::sql::text;

#[tokio::test]
async fn plain_tables_are_locks_as_they_are() {
    let db = test_servers::fresh_database().await;
    let expected = [
        "import of file 1: granted",
        "the same again: refused",
        "import of file 2: granted",
        "file 1 after its release: granted",
        "report 1: granted",
        "within the hour: refused",
        "an hour later: granted",
    ];
    assert_eq!(import::run(db.url()).await.unwrap(), expected);
}

/// Queries the columns of the three tables.
const COLUMNS: &str = "SELECT string_agg(concat_ws(' ', table_schema || '.' || table_name, columns), '; ' ORDER BY table_schema)
    FROM (SELECT table_schema, table_name, string_agg(column_name || ' ' || udt_name, ', ' ORDER BY ordinal_position) AS columns
        FROM information_schema.columns WHERE table_schema LIKE 'leasehold_%' AND table_name <> 'task_claim' GROUP BY 1, 2) AS t";

#[tokio::test]
async fn acquire_release_capture_and_set_status_on_three_plain_tables() {
    let db = test_servers::fresh_database().await;
    let expected = [
        "mutex: acquire(a) true",
        "mutex: acquire(a) false",
        "mutex: release(a) true",
        "mutex: release(a) false",
        "mutex: acquire(a) true",
        "timeout: acquire(a) true",
        "timeout: acquire(a) false",
        "timeout: acquire(a) true",
        r#"one: capture(2) ["a", "b"]"#,
        r#"other: capture(2) ["c"]"#,
        "other: set_status(a, done) refused, it has not captured it",
        "one: set_status(a, failed) ok",
        "one: set_status(b, done) ok",
        r#"other: capture(9) ["a", "b"]"#,
    ];
    assert_eq!(three_tables::plain(db.url()).await.unwrap(), expected);
    let mut a = db.connect().await;
    let columns = "leasehold_mutex.task_state id text, acquired bool; \
        leasehold_timeout.task id text, ts int8, timeout int8; leasehold_transition.task id text, status task_status";
    assert_eq!(text(&mut a, COLUMNS).await, columns);
    let states = "SELECT string_agg(id || ' ' || status, ', ' ORDER BY id) FROM leasehold_transition.task";
    assert_eq!(text(&mut a, states).await, "a in_progress, b in_progress, c in_progress");
}

#[tokio::test]
async fn the_three_tables_with_retries_and_queues() {
    let db = test_servers::fresh_database().await;
    let expected = [
        "mutex: acquire(default, a) true",
        "mutex: release(default, a) true",
        "mutex: acquire(default, a) true",
        "mutex: release(default, a) true",
        "mutex: acquire(default, a) no retries left",
        r#"mutex: capture(mail, 9) ["a", "b"]"#,
        "mutex: acquire(default, a), topped up true",
        "timeout: acquire(mail, a) true",
        "timeout: acquire(default, a) true",
        "timeout: acquire(mail, a) no retries left",
        "timeout: acquire(default, a) true",
        r#"capture(mail, 9) ["a"]"#,
        "set_status(mail, a, failed) ok",
        "capture(mail, 9) []",
        r#"capture(default, 9) ["a"]"#,
    ];
    assert_eq!(three_tables::with_retries_and_queues(db.url()).await.unwrap(), expected);
    let mut a = db.connect().await;
    let left =
        "SELECT string_agg(queue_id || ' ' || id || ' ' || retries_left, ', ' ORDER BY queue_id, id) FROM ";
    assert_eq!(
        text(&mut a, format!("{left} leasehold_mutex.task_state")).await,
        "default a 0, default c 1, mail a 0, mail b 0"
    );
    assert_eq!(text(&mut a, format!("{left} leasehold_timeout.task")).await, "default a 0, mail a 0");
    assert_eq!(
        text(&mut a, format!("{left} leasehold_transition.task")).await,
        "default a 1, mail a 0, mail b 0"
    );
    let columns = "leasehold_mutex.task_state id text, acquired bool, retries_left int4, queue_id text; \
        leasehold_timeout.task id text, ts int8, timeout int8, retries_left int4, queue_id text; \
        leasehold_transition.task id text, status task_status, retries_left int4, queue_id text";
    assert_eq!(text(&mut a, COLUMNS).await, columns);
}
