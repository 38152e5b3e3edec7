//! Common parts of the tests of specs and migrations.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub)] // A failed `unwrap` fails the test.

use std::time::Duration;

use leasehold_claim::sqlx::PgPool;
use leasehold_claim::{ClaimSpec, ClaimSpecBuilder, Finding, IdType, States, Table};
use test_servers::sql::pool;
pub use test_servers::sql::{refused, run, text, texts, try_run};
use test_servers::{Database, fresh_database};

pub const LONG: Duration = Duration::from_secs(120);

pub async fn database() -> (Database, PgPool) {
    let db = fresh_database().await;
    let pool = pool(db.url(), 20).await;
    (db, pool)
}

/// Returns the kinds and names of the constraints, except NOT NULL, which is a constraint since PostgreSQL 18.
pub async fn constraints(pool: &PgPool, table: &str) -> Vec<String> {
    let sql = format!(
        "SELECT contype::text || ' ' || conname FROM pg_constraint
         WHERE conrelid = '{table}'::regclass AND contype <> 'n' ORDER BY 1"
    );
    texts(pool, &sql).await
}

pub async fn indexes(pool: &PgPool, table: &str) -> Vec<String> {
    let sql = format!(
        "SELECT pg_get_indexdef(indexrelid) || CASE WHEN indisvalid THEN '' ELSE ' INVALID' END FROM pg_index \
         WHERE indrelid = '{table}'::regclass ORDER BY 1"
    );
    texts(pool, &sql).await
}

pub fn states() -> States {
    States::text(["new"], "complete").taken("in-progress").failed("error")
}

/// Returns a spec with everything that a migration adds.
pub fn full(table: &str) -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new(table).unwrap())
        .id("id", IdType::Int)
        .state("status", states())
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .taken_at("taken_at")
        .settled_at("settled_at")
        .ready_at("ready_at")
        .timeout_seconds("timeout")
        .error("error")
        .work(["document"])
}

pub async fn legacy_table(pool: &PgPool) {
    run(
        pool,
        "CREATE TABLE request (id bigserial PRIMARY KEY, status text NOT NULL DEFAULT 'new', document text)",
    )
    .await;
}

/// Returns whether one of `findings` has this kind and contains all of `words`.
pub fn has(findings: &[Finding], kind: fn(String) -> Finding, words: &[&str]) -> bool {
    let is = |row: &&Finding| kind(row.message().to_owned()) == **row;
    findings.iter().filter(is).any(|row| words.iter().all(|word| row.message().contains(word)))
}

#[track_caller]
pub fn assert_finding(findings: &[Finding], kind: fn(String) -> Finding, words: &[&str]) {
    assert!(has(findings, kind, words), "no {:?} in {findings:#?}", kind(words.join(" .. ")));
}
