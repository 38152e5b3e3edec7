use std::sync::atomic::{AtomicBool, Ordering};

use cookbook::quota::{PAGE, change, mark, recompute, reconcile_one};
use cookbook::sql;
use futures_util::future::join_all;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;
use test_servers::Database;

use crate::support::*;

const FLAGS: &str = "SELECT string_agg(id || CASE WHEN over_quota THEN '!' ELSE '' END, ' ' ORDER BY id)
    FROM project WHERE archived_at IS NULL";
const ARCHIVE_FIRST: &str = "UPDATE project SET archived_at = clock_timestamp() WHERE id = 1";

/// Creates owner 1 with a quota and this many projects.
async fn owner(quota: i32, projects: i32) -> (Database, PgPool) {
    let db = database(sql(PAGE, "schema")).await;
    let pool = PgPool::connect(db.url()).await.unwrap();
    let fill = format!(
        "INSERT INTO owner VALUES (1, {quota});
         INSERT INTO project (owner_id) SELECT 1 FROM generate_series(1, {projects})"
    );
    run(&mut db.connect().await, &fill).await;
    (db, pool)
}

async fn lock(connection: &mut sqlx::PgConnection) {
    sqlx::query(sql(PAGE, "lock owner")).bind(1_i64).execute(connection).await.unwrap();
}

#[tokio::test]
async fn recomputing_converges_from_any_state_and_then_writes_nothing() {
    let (db, _pool) = owner(2, 4).await;
    let mut a = db.connect().await;
    for state in 0..16 {
        let set = format!("UPDATE project SET over_quota = {state} & (1 << (id - 1)::int) <> 0");
        run(&mut a, &set).await;
        recompute(&mut a, 1).await.unwrap();
        assert_eq!(text(&mut a, FLAGS).await, "1 2 3! 4!", "from {state:04b}");
        assert_eq!(recompute(&mut a, 1).await.unwrap(), 0, "a second time there is nothing to mend");
    }
    run(&mut a, "UPDATE owner SET quota = 3").await;
    assert_eq!(recompute(&mut a, 1).await.unwrap(), 1);
    run(&mut a, ARCHIVE_FIRST).await;
    assert_eq!(recompute(&mut a, 1).await.unwrap(), 1);
    assert_eq!(text(&mut a, FLAGS).await, "2 3 4");
}

#[tokio::test]
async fn concurrent_changes_end_with_the_right_flags() {
    let (db, pool) = owner(5, 10).await;
    let mut a = db.connect().await;
    let archives = (1..=8_i64).map(|id| {
        let pool = &pool;
        change(pool, 1, async move |tx| {
            let archive = "UPDATE project SET archived_at = clock_timestamp() WHERE id = $1";
            sqlx::query(archive).bind(id).execute(tx).await.map(|_| ())
        })
    });
    let creations = (0..6).map(|_| {
        change(&pool, 1, async |tx| {
            sqlx::query("INSERT INTO project (owner_id) VALUES (1)").execute(tx).await.map(|_| ())
        })
    });
    let (archived, created) =
        within(LONG, "not ended", async { tokio::join!(join_all(archives), join_all(creations)) }).await;
    assert!(archived.iter().chain(&created).all(Result::is_ok), "{archived:?} {created:?}");
    let right = "SELECT count(*) || ' ' || count(*) FILTER (WHERE over_quota = (place > 5)) FROM (
        SELECT over_quota, row_number() OVER (ORDER BY created_at, id) AS place
        FROM project WHERE archived_at IS NULL) AS ranked";
    assert_eq!(text(&mut a, right).await, "8 8", "each flag is right");
}

#[tokio::test]
async fn a_change_starts_once_it_has_locked_the_owner() {
    let (db, _pool) = owner(1, 2).await;
    let pool = PgPoolOptions::new().max_connections(1).connect(db.url()).await.unwrap();
    let pool_pid = pid(&mut pool.acquire().await.unwrap()).await;
    let mut a = db.connect().await;
    run(&mut a, "BEGIN").await;
    lock(&mut a).await;
    let has_owner = AtomicBool::new(true);
    let waits = change(&pool, 1, async |tx| {
        assert!(!has_owner.load(Ordering::Relaxed), "two have the owner");
        attempt(&mut *tx, ARCHIVE_FIRST).await
    });
    let ends = async {
        has_owner.store(false, Ordering::Relaxed);
        run(&mut a, "COMMIT").await;
    };
    assert_eq!(while_blocked(&db, pool_pid, waits, ends).await.0.unwrap(), 1);
    assert_eq!(text(&mut a, FLAGS).await, "2");
}

#[tokio::test]
async fn wrong_without_the_lock_the_stale_run_writes_last() {
    for locks in [false, true] {
        let (db, _pool) = owner(1, 2).await;
        let (mut a, mut b) = (db.connect().await, db.connect().await);
        let b_pid = pid(&mut b).await;
        // The first session sees two projects and flags the second.
        run(&mut a, "BEGIN").await;
        if locks {
            lock(&mut a).await;
        }
        assert_eq!(recompute(&mut a, 1).await.unwrap(), 1);
        // The second session archives the first project.
        run(&mut b, "BEGIN").await;
        if locks {
            while_blocked(&db, b_pid, lock(&mut b), run(&mut a, "COMMIT")).await;
        }
        run(&mut b, ARCHIVE_FIRST).await;
        let corrected = recompute(&mut b, 1).await.unwrap();
        run(&mut b, "COMMIT").await;
        if !locks {
            run(&mut a, "COMMIT").await;
        }
        let (flags, mended) = if locks { ("2", 1) } else { ("2!", 0) };
        assert_eq!((text(&mut a, FLAGS).await.as_str(), corrected), (flags, mended), "locks: {locks}");
    }
}

#[tokio::test]
async fn wrong_a_lock_after_the_change_deadlocks() {
    let (db, _pool) = owner(1, 2).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    run(&mut a, "UPDATE project SET over_quota = true WHERE id = 1").await;
    run(&mut a, "BEGIN; UPDATE project SET created_at = created_at WHERE id = 1").await;
    run(&mut b, "BEGIN").await;
    lock(&mut b).await;
    let both = async {
        let done = sqlx::query(sql(PAGE, "lock owner")).bind(1_i64).execute(&mut a).await.err();
        // The session that got the error rolls back, which unblocks the other.
        run(&mut a, "ROLLBACK").await;
        done
    };
    let mends = async {
        let done = recompute(&mut b, 1).await.err();
        run(&mut b, "ROLLBACK").await;
        done
    };
    let (b_error, a_error) = while_blocked(&db, b_pid, mends, both).await;
    let errors: Vec<_> = a_error.iter().chain(&b_error).map(state).collect();
    assert_eq!(errors, ["40P01"], "one of the two is the victim");
}

#[tokio::test]
async fn wrong_for_update_blocks_inserts() {
    let (db, _pool) = owner(1, 0).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    run(&mut a, "BEGIN; SELECT FROM owner WHERE id = 1 FOR UPDATE").await;
    let insert = "INSERT INTO project (owner_id) VALUES (1)";
    while_blocked(&db, b_pid, run(&mut b, insert), run(&mut a, "ROLLBACK")).await;

    run(&mut a, "BEGIN").await;
    lock(&mut a).await;
    // Must not wait for the transaction above, which ends only afterwards.
    within(LONG, "not ended", run(&mut b, insert)).await;
    run(&mut a, "ROLLBACK").await;
}

#[tokio::test]
async fn wrong_resetting_all_flags_shows_an_interim_state() {
    let (db, _pool) = owner(1, 2).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    recompute(&mut a, 1).await.unwrap();
    run(&mut a, "UPDATE project SET over_quota = false WHERE owner_id = 1").await;
    assert_eq!(text(&mut b, FLAGS).await, "1 2", "everybody sees that nobody is over the quota");
    recompute(&mut a, 1).await.unwrap();
    assert_eq!(text(&mut b, FLAGS).await, "1 2!");
    // One statement leaves no intermediate state, and a correct row is not written.
    assert_eq!(recompute(&mut a, 1).await.unwrap(), 0);
}

#[tokio::test]
async fn a_burst_is_one_computation() {
    let (db, pool) = owner(1, 2).await;
    let mut a = db.connect().await;
    for _ in 0..30 {
        mark(&mut a, 1).await.unwrap();
    }
    let done = reconcile_one(&pool).await.unwrap().unwrap();
    assert_eq!((done.owner, done.marks, done.corrected), (1, 30, 1));
    assert_eq!(reconcile_one(&pool).await.unwrap(), None);
    assert_eq!(text(&mut a, FLAGS).await, "1 2!");
}

#[tokio::test]
async fn a_mark_set_during_a_computation_stays() {
    let (db, pool) = owner(1, 2).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    mark(&mut a, 1).await.unwrap();
    run(&mut a, "BEGIN").await;
    let owner: i64 = sqlx::query_scalar(sql(PAGE, "pick")).fetch_one(&mut a).await.unwrap();
    let taken = sqlx::query(sql(PAGE, "take marks")).bind(owner).execute(&mut a).await.unwrap();
    assert_eq!(taken.rows_affected(), 1);
    recompute(&mut a, owner).await.unwrap();
    // A change by a path that ignores the owner's lock.
    run(&mut b, "UPDATE project SET archived_at = clock_timestamp() WHERE id = 1").await;
    mark(&mut b, 1).await.unwrap();
    // Must not wait for the transaction above, which ends only afterwards.
    let busy = within(LONG, "not ended", reconcile_one(&pool)).await;
    assert_eq!(busy.unwrap(), None, "this owner is being reconciled");
    run(&mut a, "COMMIT").await;
    assert_eq!(text(&mut a, FLAGS).await, "2!", "as it was computed");
    let done = reconcile_one(&pool).await.unwrap().unwrap();
    assert_eq!((done.marks, done.corrected), (1, 1));
    assert_eq!(text(&mut a, FLAGS).await, "2");

    // A dead reconciler leaves the marks.
    mark(&mut a, 1).await.unwrap();
    run(&mut a, "BEGIN").await;
    sqlx::query(sql(PAGE, "take marks")).bind(1_i64).execute(&mut a).await.unwrap();
    drop(a);
    let again = async {
        loop {
            match reconcile_one(&pool).await.unwrap() {
                Some(done) if done.marks > 0 => return done,
                _ => tokio::task::yield_now().await,
            }
        }
    };
    assert_eq!(within(LONG, "not ended", again).await.marks, 1);
}

#[tokio::test]
async fn reconcilers_share_the_owners() {
    let (db, pool) = owner(1, 2).await;
    let mut a = db.connect().await;
    run(
        &mut a,
        "INSERT INTO owner SELECT i, 1 FROM generate_series(2, 20) i;
         INSERT INTO dirty_log (owner_id) SELECT id FROM owner, generate_series(1, 10)",
    )
    .await;
    let reconcilers = (0..4).map(|_| async {
        let mut done = Vec::new();
        while let Some(one) = reconcile_one(&pool).await.unwrap() {
            done.push(one);
        }
        done
    });
    let all = within(LONG, "not ended", join_all(reconcilers)).await;
    let mut owners: Vec<_> = all.concat().into_iter().filter(|one| one.marks > 0).collect();
    owners.sort_by_key(|one| one.owner);
    assert_eq!(owners.len(), 20, "each owner once: {owners:?}");
    assert!(owners.iter().all(|one| one.marks == 10), "{owners:?}");
}

#[tokio::test]
async fn wrong_a_row_per_owner_loses_a_mark() {
    let (db, _pool) = owner(1, 2).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let mark = sql(PAGE, "wrong: mark");
    run(&mut a, sql(PAGE, "wrong: schema")).await;
    sqlx::query(mark).bind(1_i64).execute(&mut a).await.unwrap();
    run(&mut a, "BEGIN").await;
    assert_eq!(text(&mut a, "SELECT owner_id FROM dirty").await, "1");
    recompute(&mut a, 1).await.unwrap();
    run(&mut b, "UPDATE project SET archived_at = clock_timestamp() WHERE id = 1").await;
    let marked = sqlx::query(mark).bind(1_i64).execute(&mut b).await.unwrap();
    assert_eq!(marked.rows_affected(), 0, "it is marked already");
    run(&mut a, "DELETE FROM dirty WHERE owner_id = 1; COMMIT").await;
    assert_eq!(text(&mut a, "SELECT count(*) FROM dirty").await, "0", "nobody knows of the change");
    assert_eq!(text(&mut a, FLAGS).await, "2!", "and the flag stays wrong");
}

#[tokio::test]
async fn wrong_picking_marks_deadlocks() {
    let (db, _pool) = owner(1, 0).await;
    let (mut a, mut b, mut c) = (db.connect().await, db.connect().await, db.connect().await);
    let (a_pid, b_pid) = (pid(&mut a).await, pid(&mut b).await);
    for _ in 0..3 {
        mark(&mut a, 1).await.unwrap();
    }
    let pick = async |session: &mut sqlx::PgConnection| {
        run(&mut *session, "BEGIN; SET LOCAL enable_seqscan = on; SET LOCAL enable_indexscan = off").await;
        run(&mut *session, "SET LOCAL enable_bitmapscan = off").await;
        let done = sqlx::query(sql(PAGE, "wrong: pick a mark")).execute(&mut *session).await.err();
        run(&mut *session, "ROLLBACK").await;
        done
    };
    // Mark 2 is locked, so the first session picks mark 1 and waits. The other session picks mark 3 and waits for
    // mark 1. When mark 2 is free, the first session wants mark 3.
    run(&mut c, "BEGIN; SELECT FROM dirty_log WHERE id = 2 FOR UPDATE").await;
    let (one, (other, ())) = while_blocked(&db, a_pid, pick(&mut a), async {
        while_blocked(&db, b_pid, pick(&mut b), run(&mut c, "ROLLBACK")).await
    })
    .await;
    let errors: Vec<_> = one.iter().chain(&other).map(state).collect();
    assert_eq!(errors, ["40P01"], "one of the two is the victim");
}
