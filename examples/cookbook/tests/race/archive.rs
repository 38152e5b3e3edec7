use cookbook::archive::{PAGE, archive, find, move_to_archive};
use cookbook::sql;
use sqlx::PgConnection;

use crate::support::*;

const NEW: &str = "INSERT INTO project (owner_id, name) VALUES (1, 'site')";

#[tokio::test]
async fn a_name_can_be_archived_any_number_of_times_and_is_free_again() {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    for id in 1..=3 {
        run(&mut a, NEW).await;
        assert_eq!(state(&attempt(&mut a, NEW).await.unwrap_err()), "23505", "one active one");
        let id = find(&mut a, 1, "SITE").await.unwrap().unwrap_or_else(|| panic!("no {id}"));
        assert!(archive(&mut a, 1, id).await.unwrap());
        assert!(!archive(&mut a, 1, id).await.unwrap(), "once");
        assert_eq!(find(&mut a, 1, "site").await.unwrap(), None);
    }
    assert_eq!(text(&mut a, "SELECT count(*) FROM project WHERE archived_at IS NOT NULL").await, "3");

    let db = database(sql(PAGE, "schema of two tables")).await;
    let mut a = db.connect().await;
    for id in 1..=3 {
        run(&mut a, NEW).await;
        run(
            &mut a,
            &format!("UPDATE project SET id = DEFAULT; ALTER TABLE project ALTER id RESTART {}", id + 1),
        )
        .await;
        let id: i64 = text(&mut a, "SELECT id FROM project").await.parse().unwrap();
        assert!(move_to_archive(&mut a, 1, id).await.unwrap());
    }
    assert_eq!(text(&mut a, "SELECT count(*) FROM project_archive WHERE name = 'site'").await, "3");
    assert_eq!(text(&mut a, "SELECT count(*) FROM project").await, "0");
}

#[tokio::test]
async fn of_two_moves_at_once_one_succeeds() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    run(&mut a, NEW).await;
    run(&mut a, "BEGIN").await;
    assert!(move_to_archive(&mut a, 1, 1).await.unwrap());
    let (second, ()) = while_blocked(&db, b_pid, move_to_archive(&mut b, 1, 1), run(&mut a, "COMMIT")).await;
    assert!(!second.unwrap());
    assert_eq!(text(&mut a, "SELECT count(*) FROM project_archive").await, "1");

    // At a higher isolation level the second move is an error, and nothing is moved twice.
    run(&mut a, NEW).await;
    run(&mut a, "BEGIN").await;
    run(&mut b, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM project").await;
    assert!(move_to_archive(&mut a, 1, 2).await.unwrap());
    let (second, ()) = while_blocked(&db, b_pid, move_to_archive(&mut b, 1, 2), run(&mut a, "COMMIT")).await;
    assert_eq!(state(&second.unwrap_err()), "40001");
}

#[tokio::test]
async fn a_rename_during_the_move_is_archived() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    run(&mut a, NEW).await;
    run(&mut a, "BEGIN; UPDATE project SET name = 'renamed'").await;
    let (moved, ()) = while_blocked(&db, b_pid, move_to_archive(&mut b, 1, 1), run(&mut a, "COMMIT")).await;
    assert!(moved.unwrap());
    assert_eq!(text(&mut a, "SELECT name FROM project_archive").await, "renamed");
}

#[tokio::test]
async fn wrong_copy_then_delete_loses_a_rename() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    run(&mut a, NEW).await;
    run(&mut a, "BEGIN").await;
    sqlx::query(sql(PAGE, "wrong: copy")).bind(1_i64).bind(1_i64).execute(&mut a).await.unwrap();
    run(&mut b, "UPDATE project SET name = 'renamed'").await;
    sqlx::query(sql(PAGE, "wrong: then delete")).bind(1_i64).bind(1_i64).execute(&mut a).await.unwrap();
    run(&mut a, "COMMIT").await;
    assert_eq!(text(&mut a, "SELECT count(*) FROM project").await, "0");
    assert_eq!(text(&mut a, "SELECT name FROM project_archive").await, "site", "the rename is gone");
}

#[tokio::test]
async fn wrong_a_move_deletes_children_that_cascade() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let mut a = db.connect().await;
    run(&mut a, "CREATE TABLE page (project_id bigint REFERENCES project ON DELETE CASCADE)").await;
    run(&mut a, NEW).await;
    run(&mut a, "INSERT INTO page VALUES (1)").await;
    assert!(move_to_archive(&mut a, 1, 1).await.unwrap());
    assert_eq!(text(&mut a, "SELECT count(*) FROM page").await, "0", "the child went with the move");

    // Without the cascade, the move is refused. With one table, nothing can refuse it.
    run(&mut a, "DROP TABLE page; CREATE TABLE page (project_id bigint REFERENCES project)").await;
    run(&mut a, NEW).await;
    run(&mut a, "INSERT INTO page VALUES (2)").await;
    assert_eq!(state(&move_to_archive(&mut a, 1, 2).await.unwrap_err()), "23503");
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(&mut a, "CREATE TABLE page (project_id bigint REFERENCES project ON DELETE CASCADE)").await;
    run(&mut a, NEW).await;
    run(&mut a, "INSERT INTO page VALUES (1)").await;
    assert!(archive(&mut a, 1, 1).await.unwrap());
    assert_eq!(text(&mut a, "SELECT count(*) FROM page").await, "1");
}

/// Creates a database with this many archived rows and 100 active ones.
async fn filled(archived: u32) -> (test_servers::Database, PgConnection) {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(
        &mut a,
        // Not logged, because plans do not depend on that and filling is faster.
        format!(
            "ALTER TABLE project SET UNLOGGED;
             INSERT INTO project (owner_id, name, archived_at)
                 SELECT i % 10, 'site ' || i % 100, now() FROM generate_series(1, {archived}) i;
             INSERT INTO project (owner_id, name) SELECT i % 10, 'site ' || i FROM generate_series(1, 100) i;
             ANALYZE project;
             SET plan_cache_mode = force_generic_plan"
        ),
    )
    .await;
    (db, a)
}

/// Returns the plan of a prepared statement, with the pages that its execution touched.
async fn plan(a: &mut PgConnection, types: &str, statement: &str, values: &str) -> String {
    run(&mut *a, &format!("PREPARE find ({types}) AS {statement}")).await;
    let explain =
        format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) EXECUTE find ({values})");
    let rows: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(explain)).fetch_all(a).await.unwrap();
    rows.join("\n")
}

/// The pages that the plan's only scan has touched.
fn pages(plan: &str) -> u32 {
    let buffers = plan.lines().find(|line| line.contains("Buffers: shared ")).unwrap();
    let counts =
        buffers.split(' ').filter_map(|word| word.strip_prefix("hit=").or(word.strip_prefix("read=")));
    counts.map(|count| count.parse::<u32>().unwrap()).sum()
}

#[tokio::test]
async fn lookups_read_only_the_index_of_active_rows() {
    let (_db, mut a) = filled(1_000_000).await;
    let plan = plan(&mut a, "bigint, text", sql(PAGE, "find"), "3, 'SITE 13'").await;
    assert!(plan.contains("using project_active_name_key"), "{plan}");
    assert_eq!(plan.matches("Scan").count(), 1, "nothing else is read: {plan}");
    assert!(plan.contains("rows=1"), "it finds the row: {plan}");
    // Root and leaf of the index, and the row's page.
    assert!((1..=4).contains(&pages(&plan)), "{plan}");
    let size = "SELECT pg_relation_size('project_active_name_key') * 1000 < pg_relation_size('project')";
    assert_eq!(text(&mut a, size).await, "true");
    assert_eq!(find(&mut a, 3, "site 13").await.unwrap(), Some(1_000_013));
}

#[tokio::test]
async fn wrong_a_parameter_reads_the_whole_table() {
    let (_db, mut a) = filled(100_000).await;
    let plan = plan(&mut a, "bigint, text, boolean", sql(PAGE, "wrong: find"), "3, 'SITE 13', true").await;
    assert!(plan.contains("Seq Scan on project"), "{plan}");
    assert!(!plan.contains("project_active_name_key"), "{plan}");
}
