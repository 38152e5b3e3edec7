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

/// Queries the three tables with their columns, defaults and constraints, and the values of the status.
const TABLES: &str = "
    SELECT string_agg(c.oid::regclass || ' ' || columns || coalesce(', ' || constraints, ''), '; ' ORDER BY n.nspname)
        || '; ' || (SELECT string_agg(enumlabel, ' ' ORDER BY enumsortorder) FROM pg_enum)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace,
        LATERAL (SELECT string_agg(concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod),
            'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), CASE WHEN a.attnotnull THEN 'NOT NULL' END), ', ' ORDER BY a.attnum)
            FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) x(columns),
        LATERAL (SELECT string_agg(rule, ', ' ORDER BY rule DESC) FROM (
            SELECT 'UNIQUE ' || substring(pg_get_indexdef(indexrelid) FROM '\\(.*') FROM pg_index WHERE indrelid = c.oid AND indisunique
            UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = c.oid AND contype NOT IN ('n', 'u')
        ) z(rule)) y(constraints)
    WHERE n.nspname LIKE 'leasehold_%' AND c.relkind = 'r' AND c.relname <> 'task_claim'";

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
        r#"sweep ["a"]"#,
        r#"other: capture(9) ["a"]"#,
        "one: set_status(a, done) refused, another worker has captured it since",
        "other: set_status(a, failed) ok",
        "one: set_status(b, done) ok",
        r#"other: capture(9) ["a", "b"]"#,
    ];
    assert_eq!(three_tables::plain(db.url()).await.unwrap(), expected);
    let mut a = db.connect().await;
    // Each table as the example creates it. The migration has made the ids of the state machine unique.
    let tables = "leasehold_mutex.task_state id text, acquired boolean, UNIQUE (id); \
        leasehold_timeout.task id text, ts bigint, timeout bigint, UNIQUE (id); \
        leasehold_transition.task id text, status leasehold_transition.task_status, UNIQUE (id); done in_progress failed";
    assert_eq!(text(&mut a, TABLES).await, tables);
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
    // As the example creates them. The migration has added NOT NULL and CHECK to the state machine.
    let more = "retries_left integer DEFAULT 0, queue_id text DEFAULT 'default'::text";
    let tables = format!(
        "leasehold_mutex.task_state id text, acquired boolean, {more}, UNIQUE (queue_id, id); \
         leasehold_timeout.task id text, ts bigint, timeout bigint, {more}, UNIQUE (queue_id, id); \
         leasehold_transition.task id text, status leasehold_transition.task_status, {more} NOT NULL, \
         UNIQUE (queue_id, id), CHECK ((retries_left >= 0)); done in_progress failed"
    );
    assert_eq!(text(&mut a, TABLES).await, tables);
}
