//! A server on which some statements do nothing (`docs/hazards.md` H59).

use std::time::Duration;

use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;
use leasehold_postgres_row::RowConfig;
use test_stores::exclusion::{exclude_without, exclude_without_notifications};

use crate::LONG;

async fn connect(url: String) -> Engine {
    let server = PgConfig::from_url(&url).unwrap().install_schema(true).connect_timeout(LONG);
    RowConfig::new(server).poll(Duration::from_millis(20)).connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_exclude_where_rows_are_not_locked() {
    exclude_without(&["FOR NO KEY UPDATE", "FOR UPDATE", "SKIP LOCKED"], "leasehold.mutex", connect).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_exclude_where_locked_rows_are_not_skipped() {
    exclude_without(&["SKIP LOCKED"], "leasehold.mutex", connect).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_exclude_and_are_handed_on_where_nobody_hears_a_notification() {
    exclude_without_notifications(connect).await;
}
