//! A table on a real server, for the tests of the claimer.
#![allow(unreachable_pub, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use leasehold_claim::sqlx::{PgPool, query, raw_sql};
use leasehold_claim::{Claim, ClaimSpec, ClaimSpecBuilder, IdType, RowId, States, Table};
pub use test_servers::sql::{number, pool};
use tokio::time::sleep;

use crate::common::within;

const TABLE: &str = "
    CREATE TABLE request (
        id bigserial PRIMARY KEY,
        status text NOT NULL DEFAULT 'new'
            CHECK (status IN ('new', 'in-progress', 'complete', 'error', 'exhausted')),
        entity text,
        owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz,
        attempts_left integer, error text
    );
    CREATE INDEX request_new ON request (id) WHERE status = 'new';
    CREATE INDEX request_taken ON request (lease_until) WHERE status = 'in-progress';
    CREATE INDEX request_entity ON request (entity) WHERE status = 'in-progress';
    CREATE TABLE effect (request bigint NOT NULL, epoch bigint NOT NULL);";

pub fn spec() -> ClaimSpecBuilder {
    let states =
        States::text(["new"], "complete").taken("in-progress").failed("error").exhausted("exhausted");
    ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Int)
        .state("status", states)
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .error("error")
}

pub async fn prepare(url: &str) -> PgPool {
    let pool = pool(url, 4).await;
    raw_sql(TABLE).execute(&pool).await.unwrap();
    pool
}

pub async fn insert(pool: &PgPool, count: i64) {
    let rows = query("INSERT INTO request (entity) SELECT NULL FROM generate_series(1, $1)").bind(count);
    rows.execute(pool).await.unwrap();
}

pub async fn until_number(what: &str, pool: &PgPool, sql: &'static str, wanted: i64) {
    within(what, async {
        while number(pool, sql).await != wanted {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

pub fn id(claim: &Claim) -> i64 {
    match claim.row().key.id {
        RowId::Int(id) => id,
        ref other => panic!("{other} is no number"),
    }
}

pub const COMPLETE: &str = "SELECT count(*) FROM request WHERE status = 'complete'";
