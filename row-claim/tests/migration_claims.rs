//! The indexes of a migration are those that claims use.
#![allow(clippy::unwrap_used)] // Of tests, which are to fail here.

mod spec_common;

use std::time::Duration;

use leasehold_claim::sqlx::postgres::PgPoolOptions;
use leasehold_claim::{ClaimStore as _, PgClaims, Take};
use spec_common::*;
use tokio::time::{Instant, sleep};

/// row 46
#[tokio::test]
async fn row_46_claims_and_sweeps_go_through_the_indexes_of_the_migration() {
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
        // Counters are written when a session ends, also those of what came before.
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
