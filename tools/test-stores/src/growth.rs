//! Checks that no statement of a table store touches more pages if its table is large (`docs/hazards.md` H50).

use leasehold_postgres::table::{Dialect, SETTINGS};
use leasehold_postgres::{Identifier, schema};
use sqlx::PgConnection;
use test_servers::fresh_database;
use test_servers::growth::{Probe, assert_no_growth};
use test_servers::sql::run;

use crate::statements::rendered;

const FEW: u32 = 1_000;

/// Number of rows of each of the four kinds.
const MANY: u32 = 1_000_000;

/// Fails if a statement of the store, or one of `more`, touches more pages of a large table than of a small one. `rows` inserts a
/// given number of rows of each kind into an empty table in a schema: released keys and expired keys (both too young to be
/// purged), held keys, and keys old enough to be purged.
pub async fn assert_no_growth_of(
    dialect: &Dialect,
    more: &[(&'static str, &str)],
    table: &str,
    rows: impl Fn(&str, u32) -> String,
) {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off").await;
    for (schema, count) in [("small", FEW), ("large", MANY)] {
        fill(&mut conn, schema, table, rows(schema, count)).await;
    }
    run(&mut conn, SETTINGS).await;
    // Otherwise a scan starts where the previous one ended, and finds its rows by chance.
    run(&mut conn, "SET synchronize_seqscans = off").await;
    let [small, large] = ["small", "large"].map(|schema| probes(dialect, more, schema));
    assert_no_growth(&mut conn, &small, &large).await;
}

async fn fill(conn: &mut PgConnection, schema: &str, table: &str, rows: String) {
    schema::install(conn, &Identifier::new(schema).unwrap()).await.unwrap();
    let name = format!("{schema}.{table}");
    // Creates the index after the rows, because that takes a fraction of the time.
    let bare = format!(
        "ALTER TABLE {name} SET (fillfactor = 100, autovacuum_enabled = false), DROP CONSTRAINT {table}_pkey"
    );
    run(&mut *conn, bare).await;
    run(&mut *conn, rows).await;
    run(&mut *conn, format!("ALTER TABLE {name} ADD PRIMARY KEY (key)")).await;
    run(&mut *conn, format!("VACUUM ANALYZE {name}")).await;
}

/// Returns all statements with their values, rendered for `schema`.
fn probes(dialect: &Dialect, more: &[(&'static str, &str)], schema: &str) -> Vec<Probe> {
    let probe = |(name, text): (&'static str, String)| Probe::new(name, text, &values_of(name));
    rendered(dialect, more, schema).into_iter().map(probe).collect()
}

/// Returns the parameters with which a statement is measured, as SQL.
fn values_of(statement: &str) -> Vec<&'static str> {
    const KEYS: &str = "ARRAY['held-1', 'held-2', 'held-900']";
    const FREE: &str = "ARRAY['free-1', 'free-500', 'new']";
    const SHARED: &str = "ARRAY['shared-1', 'shared-2', 'shared-900']";
    const HOLDERS: &str = "ARRAY['holder-1', 'holder-2', 'holder-900']";
    const THREE: &str = "ARRAY[NULL, NULL, NULL]::bigint[]";
    match statement {
        "grant_one" => vec!["'free-1'", "'me'", "0", "NULL", "NULL", "'owner'"],
        "retake_one" => vec!["'free-1'", "'me'", "0", "NULL", "'owner'"],
        "grant_free" => vec![FREE, "ARRAY['a', 'b', 'c']", "0", "NULL", "NULL", "'owner'"],
        "grant" | "grant skipping" => {
            let labels = "ARRAY[NULL, NULL, NULL]::text[]";
            vec![FREE, "ARRAY['a', 'b', 'c']", "ARRAY[1, 1, 1]", THREE, labels, "'owner'", "1"]
        }
        "renew_early" | "renew" | "renew skipping" => vec![KEYS, HOLDERS, "1000000"],
        "confirm" => vec![KEYS, HOLDERS],
        "release" | "release_unlocked" => vec![KEYS, HOLDERS, "ARRAY['holder-2']"],
        "release_unawaited" | "release_one" => vec!["'held-1'", "'holder-1'", "true"],
        "force" | "ask" | "served" => vec!["'held-1'", "'holder-1'"],
        "give_out" => vec!["'held-1'", "'holder-1'", "1000000"],
        "adopt" => vec!["'held-1'", "'holder-1'", "1", "'me'", "1000000", "'owner'"],
        "relabel" => vec!["'held-1'", "'holder-1'", "'label'"],
        "mark" | "mark skipping" => vec![KEYS, "1000000"],
        // A start after which the scan finds no row for a long time.
        "list" => vec!["'free'", "'z'", "false", "1000"],
        "inspect" => vec!["'free-77'", "E'free-77\\x01'", "true", "1"],
        "purge" => vec!["3600000000", "'free'", "1000"],
        "fence" | "fence part" => vec!["'held-1'", "'holder-1'", "1"],
        // Each of these keys has one held part and one free part.
        "join" => vec!["'shared-1'", "'me'", "0", "NULL", "'owner'", "0"],
        "join_many" => vec![SHARED, "ARRAY['a', 'b', 'c']", "0", "NULL", "'owner'", "0"],
        "extend" => vec!["'shared-1'", "'holder-1'", "1000000", "0"],
        "enter_shared" => vec!["'free-2'", "'me'", "0", "NULL", "'owner'", "0", "0"],
        "enter_permits" => vec!["'free-3'", "'me'", "0", "NULL", "'owner'", "3"],
        "look" => vec!["'shared-1'", "1000000"],
        "convert" | "convert skipping" => vec!["'shared-2'", "'me'", "0", "NULL", "'owner'", "false", "NULL"],
        "mark_writer" => vec![SHARED, "1000000"],
        "renew_early part" | "renew part" | "renew part skipping" => vec![SHARED, HOLDERS, "1000000"],
        "confirm part" => vec![SHARED, HOLDERS],
        "release part" | "release_unlocked part" => vec![SHARED, HOLDERS, "ARRAY[]::text[]"],
        "release_unawaited part" | "release_one part" => vec!["'shared-1'", "'holder-1'", "true"],
        "force part" | "ask part" => vec!["'shared-1'", "'holder-1'"],
        "relabel part" => vec!["'shared-1'", "'holder-1'", "'label'"],
        "idle" => vec!["3600000000", "'shared'", "1000"],
        "purge parts" => vec!["3600000000", "'shared'", "1000", "'shared-10'"],
        other => panic!("{other} is a statement that is not measured yet: give it values here"),
    }
}
