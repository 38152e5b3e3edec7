//! Claims use the indexes of a migration, and existing rows can have other attempts than new ones.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use crate::common::*;
use leasehold_claim::sqlx::postgres::PgPoolOptions;
use leasehold_claim::{ClaimStore as _, PgClaims, Take};
use tokio::time::{Instant, sleep};

/// Existing rows get other attempts than rows inserted during or after the migration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn existing_rows_get_other_attempts_than_new_ones() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "INSERT INTO request (document) SELECT 'old' FROM generate_series(1, 5000)").await;
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
    let writer = tokio::spawn({
        let (pool, stop, written) = (pool.clone(), Arc::clone(&stop), Arc::clone(&written));
        async move {
            while !stop.load(Ordering::SeqCst) {
                run(&pool, "INSERT INTO request (document) VALUES ('live')").await;
                written.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let goes_on = async || {
        let (before, until) = (written.load(Ordering::SeqCst), Instant::now() + LONG);
        while written.load(Ordering::SeqCst) <= before {
            assert!(Instant::now() < until, "the writer goes on");
            sleep(Duration::from_millis(1)).await;
        }
    };
    goes_on().await;
    // The statement from the documentation of the migration.
    run(&pool, "ALTER TABLE request ADD COLUMN attempts_left integer NOT NULL DEFAULT 1, ALTER COLUMN attempts_left SET DEFAULT 5")
        .await;
    let spec = full("request").max_attempts(5).build().unwrap();
    spec.migration().apply(&pool).await.unwrap();
    goes_on().await;
    stop.store(true, Ordering::SeqCst);
    writer.await.expect("no insert failed meanwhile");
    let told = "SELECT string_agg(DISTINCT document || ' ' || attempts_left, ', ') FROM request";
    assert_eq!(text(&pool, told).await, "live 1, live 5, old 1");
    let apart = "SELECT (max(id) FILTER (WHERE attempts_left = 1) < min(id) FILTER (WHERE attempts_left = 5))::text FROM request";
    assert_eq!(
        text(&pool, apart).await,
        "true",
        "of one writer, the first were there and the others are new"
    );
    assert!(spec.check(&pool).await.unwrap().is_empty());
    let claims = PgClaims::new(pool.clone(), spec);
    let first = claims.take(&Take::up_to(1)).await.unwrap().claims.remove(0);
    assert_eq!(first.rows[0].attempts_left, Some(0), "its last");
}

#[tokio::test]
async fn claims_and_sweeps_use_the_indexes_of_the_migration() {
    for (builder, take, index) in [
        (full("request"), Take::up_to(5), "pick"),
        (full("request").expire_on_read(), Take::up_to(5), "pick"),
        (full("request").queue("queue_id"), Take::up_to(5).queue("default"), "pick_"),
        (full("request").queue("queue_id"), Take::up_to(5), "pick_all"),
    ] {
        let (db, pool) = database().await;
        legacy_table(&pool).await;
        let spec = builder.build().unwrap();
        spec.migration().apply(&pool).await.unwrap();
        run(&pool, "INSERT INTO request (status) SELECT CASE WHEN n % 100 = 0 THEN 'new' ELSE 'complete' END FROM generate_series(1, 50000) n; ANALYZE request")
            .await;
        pool.close().await;
        let (mut observer, until) = (db.connect().await, Instant::now() + LONG);
        // Waits for the end of other sessions, because a session writes its counters at its end.
        let others = "SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() \
                      AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        while text(&mut observer, others).await != "0" {
            assert!(Instant::now() < until, "sessions end");
            sleep(Duration::from_millis(20)).await;
        }
        run(&mut observer, "SELECT pg_stat_reset()").await;
        let pool = PgPoolOptions::new().connect(db.url()).await.unwrap();
        let claims = PgClaims::new(pool.clone(), spec);
        assert_eq!(claims.take(&take).await.unwrap().claims.len(), 5);
        claims.sweep(10).await.unwrap();
        pool.close().await;
        for wanted in [index, "taken"] {
            let scans = format!(
                "SELECT (coalesce(sum(idx_scan), 0) > 0)::text FROM pg_stat_user_indexes WHERE indexrelname LIKE 'request_claim_{wanted}%'"
            );
            while text(&mut observer, &scans).await != "true" {
                assert!(Instant::now() < until, "{wanted} is used");
                sleep(Duration::from_millis(20)).await;
            }
        }
        let whole = "SELECT seq_scan::text FROM pg_stat_user_tables WHERE relname = 'request'";
        assert_eq!(text(&mut observer, whole).await, "0", "{index}: nobody reads the whole table");
    }
}
