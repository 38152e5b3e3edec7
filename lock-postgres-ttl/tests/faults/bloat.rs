//! Bloat after many updates and its removal (docs/monitoring.md, "Bloat", and docs/configuration.md, "Sizing").

use std::time::Duration;

use leasehold_api::{LockExt as _, Validity};
use sqlx::raw_sql;
use test_servers::sql::{number, run};
use test_servers::{Cluster, ClusterOptions};

use crate::support::{config_of, connection, installed};

const SIZE: &str = "SELECT pg_relation_size('leasehold.lease')";

/// Follows docs/monitoring.md while a lease is held. A plain `VACUUM` does not shrink the table, because live rows
/// are at the end of the file.
#[tokio::test]
async fn a_table_that_grew_under_an_old_snapshot_shrinks_again() {
    let database = installed().await;
    let lock = config_of(database.url()).ttl(Duration::from_secs(30)).connect().await.unwrap();
    let guard = lock.key("held").acquire().await.unwrap();
    let (mut old, mut user) = (connection(&database).await, connection(&database).await);
    run(&mut old, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await;
    let churn = "DO $$ BEGIN FOR i IN 1..20000 LOOP UPDATE leasehold.lease SET ttl_us = ttl_us; COMMIT; END LOOP; END $$";
    run(&mut user, churn).await;
    let grown = number(&mut user, SIZE).await;
    assert!(grown > 2_000_000, "{grown}");
    run(&mut old, "ROLLBACK").await;
    run(&mut user, "VACUUM (TRUNCATE) leasehold.lease").await;
    assert!(number(&mut user, SIZE).await > grown / 2, "the space is used again, and not given back");

    // A short limit, because statements queue behind a `VACUUM` that waits for the table.
    run(&mut user, "SET lock_timeout = '100ms'").await;
    let mut tries = 0;
    while raw_sql("VACUUM (FULL, ANALYZE) leasehold.lease").execute(&mut user).await.is_err() {
        tries += 1;
        assert!(tries < 1_000, "never");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let shrunk = number(&mut user, SIZE).await;
    assert!(shrunk <= 16_384, "{shrunk}");
    guard.renew().await.unwrap();
    assert_eq!(guard.validity(), Validity::Valid);
    guard.release().await.unwrap();
}

/// The numbers of the section "Sizing".
#[tokio::test]
async fn a_lease_costs_two_transaction_ids_and_one_for_each_renewal() {
    let cluster = Cluster::start(ClusterOptions::new().setting("autovacuum", "off"));
    let database = cluster.fresh_database().await;
    let lock = config_of(database.url()).connect().await.unwrap();
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
    let mut user = database.connect().await;
    let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
    let before = number(&mut user, next).await;
    for _ in 0..100 {
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
    }
    let cycles = number(&mut user, next).await;
    assert_eq!(cycles - before, 200);
    let guard = lock.key("k").acquire().await.unwrap();
    for _ in 0..10 {
        guard.renew().await.unwrap();
    }
    assert_eq!(number(&mut user, next).await - cycles, 11);
    guard.release().await.unwrap();
}
