use cookbook::delete::{DeleteError, PAGE, Step, request, step, work_once};
use cookbook::sql;
use sqlx::PgPool;
use test_bounds::within;
use test_servers::Database;

use crate::support::*;

const COUNTS: &str = "SELECT (SELECT count(*) FROM item) || ' ' || (SELECT count(*) FROM folder) || ' '
    || (SELECT count(*) FROM project) || ' ' || (SELECT count(*) FROM cascade_job)";

/// Creates project 1 of owner 7, with three folders of two items.
async fn project() -> (Database, PgPool) {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(&mut a, sql(PAGE, "refuse children")).await;
    run(
        &mut a,
        "INSERT INTO project VALUES (1, 7);
         INSERT INTO folder (project_id) SELECT 1 FROM generate_series(1, 3);
         INSERT INTO item (project_id, folder_id) SELECT 1, i FROM generate_series(1, 3) i, generate_series(1, 2)",
    )
    .await;
    let pool = PgPool::connect(db.url()).await.unwrap();
    (db, pool)
}

/// Runs steps until the worker is idle.
async fn work_off(pool: &PgPool) {
    let work_off = async { while work_once(pool, 2).await.unwrap() != Step::Idle {} };
    within(LONG, "it never ends", work_off).await;
}

/// Returns the numbers of log rows, jobs and tombstones.
async fn requested(db: &Database) -> String {
    let counts =
        "SELECT (SELECT count(*) FROM delete_log) || ' ' || (SELECT count(*) FROM cascade_job) || ' '
        || (SELECT count(*) FROM project WHERE deleting_at IS NOT NULL)";
    text(&mut db.connect().await, counts).await
}

#[tokio::test]
async fn a_failing_queue_leaves_everything_unchanged() {
    let (db, pool) = project().await;
    run(&mut db.connect().await, "ALTER TABLE cascade_job ADD CHECK (false)").await;
    let error = request(&pool, 1, 7).await.unwrap_err();
    let DeleteError::Database(error) = error else { panic!("{error:?}") };
    assert_eq!(state(&error), "23514");
    assert_eq!(requested(&db).await, "0 0 0");
    assert_eq!(text(&mut db.connect().await, COUNTS).await, "6 3 1 0");
}

#[tokio::test]
async fn a_repeated_request_is_two_log_rows_and_one_job() {
    let (db, pool) = project().await;
    request(&pool, 1, 7).await.unwrap();
    let since = "SELECT deleting_at FROM project";
    let first = text(&mut db.connect().await, since).await;
    request(&pool, 1, 7).await.unwrap();
    assert_eq!(requested(&db).await, "2 1 1");
    assert_eq!(text(&mut db.connect().await, since).await, first, "the tombstone stays as it was");
    let index =
        "SELECT count(*) FROM pg_index WHERE indexrelid = 'delete_log_project'::regclass AND NOT indisunique";
    assert_eq!(text(&mut db.connect().await, index).await, "1");
    work_off(&pool).await;
    assert!(
        matches!(request(&pool, 1, 7).await, Err(DeleteError::NotFound)),
        "gone, and nothing is recorded"
    );
    assert_eq!(requested(&db).await, "2 0 0");
}

#[tokio::test]
async fn a_refused_request_destroys_nothing() {
    let (db, pool) = project().await;
    assert!(matches!(request(&pool, 1, 8).await, Err(DeleteError::NotTheOwner)));
    assert!(matches!(request(&pool, 2, 7).await, Err(DeleteError::NotFound)));
    run(&mut db.connect().await, "UPDATE project SET on_hold = true").await;
    assert!(matches!(request(&pool, 1, 7).await, Err(DeleteError::OnHold)));
    assert_eq!(requested(&db).await, "0 0 0");
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Idle);
    assert_eq!(text(&mut db.connect().await, COUNTS).await, "6 3 1 0");

    // The validated state cannot change, because a new hold waits for the request's transaction.
    run(&mut db.connect().await, "UPDATE project SET on_hold = false").await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    run(&mut a, "BEGIN").await;
    sqlx::query(sql(PAGE, "validate")).bind(1_i64).execute(&mut a).await.unwrap();
    let hold = attempt(&mut b, "UPDATE project SET on_hold = true WHERE deleting_at IS NULL");
    let delete = async {
        sqlx::query(sql(PAGE, "tombstone")).bind(1_i64).execute(&mut a).await.unwrap();
        run(&mut a, "COMMIT").await;
    };
    assert_eq!(while_blocked(&db, b_pid, hold, delete).await.0.unwrap(), 0, "too late to hold it");
}

#[tokio::test]
async fn a_deletion_killed_in_any_step_is_completed_by_the_next_worker() {
    // With two rows per step: three steps for items, two for folders, one for the root.
    let expected = ["6 3 1 1", "4 3 1 1", "2 3 1 1", "0 3 1 1", "0 1 1 1", "0 0 1 1"];
    for (killed_in, before) in expected.into_iter().enumerate() {
        let (db, pool) = project().await;
        request(&pool, 1, 7).await.unwrap();
        for _ in 0..killed_in {
            assert!(matches!(work_once(&pool, 2).await.unwrap(), Step::Deleted(1..=2)));
        }
        let mut worker = db.connect().await;
        let mut observer = db.connect().await;
        run(&mut worker, "BEGIN").await;
        let worker_pid = pid(&mut worker).await;
        let done = step(&mut worker, 2).await.unwrap();
        assert_eq!(done == Step::Finished(1), killed_in == 5, "{done:?}");
        assert_eq!(work_once(&pool, 2).await.unwrap(), Step::Idle, "another worker leaves the job alone");
        run(&mut observer, &format!("SELECT pg_terminate_backend({worker_pid})")).await;
        let gone = async {
            let query = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {worker_pid}");
            while text(&mut observer, &query).await != "0" {
                tokio::task::yield_now().await;
            }
        };
        within(LONG, "not ended", gone).await;
        assert_eq!(text(&mut observer, COUNTS).await, before, "killed in step {killed_in}");
        assert_eq!(requested(&db).await, "1 1 1", "tombstone and job are there");
        work_off(&pool).await;
        assert_eq!(text(&mut observer, COUNTS).await, "0 0 0 0");
    }
}

#[tokio::test]
async fn a_job_alone_removes_the_root_last() {
    let (db, pool) = project().await;
    let mut a = db.connect().await;
    run(&mut a, "INSERT INTO cascade_job (project_id) VALUES (1)").await;
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Deleted(6));
    assert_eq!(text(&mut a, "SELECT deleting_at IS NOT NULL FROM project").await, "true");
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Deleted(3));
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Finished(1));
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Idle);
    // A job whose project is already deleted ends too.
    run(&mut a, "INSERT INTO cascade_job (project_id) VALUES (1)").await;
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Finished(1));
    assert_eq!(text(&mut a, COUNTS).await, "0 0 0 0");
}

#[tokio::test]
async fn a_tombstone_and_a_new_child_wait_for_each_other() {
    let (db, _pool) = project().await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    let tombstone = "UPDATE project SET deleting_at = clock_timestamp() WHERE id = 1";
    let child = "INSERT INTO item (project_id, folder_id) VALUES (1, 1)";
    // If the child comes first, the tombstone waits, and the worker sees the child later.
    run(&mut a, "BEGIN").await;
    run(&mut a, child).await;
    while_blocked(&db, b_pid, run(&mut b, tombstone), run(&mut a, "COMMIT")).await;
    run(&mut a, "UPDATE project SET deleting_at = NULL").await;
    // If the tombstone comes first, the child waits and is refused.
    run(&mut a, "BEGIN").await;
    run(&mut a, tombstone).await;
    let (refused, ()) = while_blocked(&db, b_pid, attempt(&mut b, child), run(&mut a, "COMMIT")).await;
    assert_eq!(state(&refused.unwrap_err()), "23514");
    let moved = attempt(&mut b, "INSERT INTO folder (project_id) VALUES (1)").await;
    assert_eq!(state(&moved.unwrap_err()), "23514");
    // At a higher isolation level the insert is an error, so no child is missed.
    run(&mut a, "UPDATE project SET deleting_at = NULL").await;
    run(&mut b, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM project").await;
    run(&mut a, tombstone).await;
    assert_eq!(state(&attempt(&mut b, child).await.unwrap_err()), "40001");
}

#[tokio::test]
async fn wrong_with_the_foreign_key_alone_a_child_slips_in() {
    let (db, pool) = project().await;
    let mut a = db.connect().await;
    run(&mut a, "DROP TRIGGER refuse_when_deleting ON folder; DROP TRIGGER refuse_when_deleting ON item")
        .await;
    request(&pool, 1, 7).await.unwrap();
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Deleted(6));
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Deleted(3));
    // The worker deletes the root while a child's insert, begun earlier, commits.
    run(&mut a, "BEGIN; INSERT INTO folder (project_id) VALUES (1)").await;
    let mut b = db.connect().await;
    let b_pid = pid(&mut b).await;
    run(&mut b, "BEGIN").await;
    let (root, ()) = while_blocked(&db, b_pid, step(&mut b, 100), run(&mut a, "COMMIT")).await;
    assert_eq!(state(&root.unwrap_err()), "23503", "there is a child after the tombstone");
    run(&mut b, "ROLLBACK").await;
    // The worker does not fail, and its next step deletes the child.
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Deleted(1));
    assert_eq!(work_once(&pool, 100).await.unwrap(), Step::Finished(1));
}

#[tokio::test]
async fn wrong_deleting_the_root_first_is_refused() {
    let (db, _pool) = project().await;
    let error = attempt(&mut db.connect().await, "DELETE FROM project WHERE id = 1").await.unwrap_err();
    assert_eq!(state(&error), "23503");
}
