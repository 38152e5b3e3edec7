//! No statement of a store touches more pages when its table is large (docs/hazards.md H50). A constant of `sql.rs`
//! that is not measured here does not compile, and neither does a field of `Dialect`.
#![allow(clippy::unwrap_used, missing_docs)]

#[deny(dead_code)]
#[path = "../src/sql.rs"]
mod sql;

use leasehold_postgres::table::{Dialect, SETTINGS};
use leasehold_postgres::{Identifier, schema};
use sqlx::PgConnection;
use test_servers::fresh_database;
use test_servers::growth::{Probe, assert_no_growth, values_of_table_statement};
use test_servers::sql::run;

const FEW: u32 = 1_000;

/// Of each kind of row, of which there are four.
const MANY: u32 = 1_000_000;

/// Keys that were released, that expired, that are held, and old ones in which nobody is interested any more; the first
/// two are younger than what is purged.
async fn fill(conn: &mut PgConnection, name: &str, count: u32) {
    schema::install(conn, &Identifier::new(name).unwrap()).await.unwrap();
    let kinds = [
        ("ended", "now() - interval '1 minute'", "false"),
        ("free", "now() + interval '1 hour'", "true"),
        ("held", "now() + interval '1 hour'", "false"),
        ("old", "now() - interval '30 days'", "true"),
    ];
    // An index that is made of all keys at once takes a fraction of the time.
    run(&mut *conn, format!("ALTER TABLE {name}.lease SET (fillfactor = 100, autovacuum_enabled = false), DROP CONSTRAINT lease_pkey")).await;
    for (kind, expires, released) in kinds {
        run(&mut *conn, format!("INSERT INTO {name}.lease (key, holder, token, acquired_at, ttl_us, expires_at, released)
            SELECT '{kind}-' || i, 'holder-' || i, i, now() - interval '31 days', 1000000, {expires}, {released}
            FROM generate_series(1, {count}) i")).await;
    }
    run(&mut *conn, format!("ALTER TABLE {name}.lease ADD PRIMARY KEY (key)")).await;
    run(&mut *conn, format!("VACUUM ANALYZE {name}.lease")).await;
}

/// Each statement in the schema `name`, by its name.
fn statements(name: &str) -> Vec<Probe> {
    let Dialect {
        kind: _,
        stores: _,
        free,
        among,
        grant_one,
        retake_one,
        grant_free,
        grant,
        renew_early,
        renew,
        confirm,
        release_unawaited,
        release_one,
        release,
        release_unlocked,
        mark,
        force,
        list,
        purge,
    } = sql::LEASES;
    let with_free = grant.replace("{free}", free).replace("{among}", among);
    let all = [
        ("grant_one", grant_one.to_owned()),
        ("retake_one", retake_one.to_owned()),
        ("grant_free", grant_free.to_owned()),
        ("grant", grant.replace("{free}", "").replace("{among}", "")),
        ("grant skipping", with_free),
        ("renew_early", renew_early.unwrap().to_owned()),
        ("renew", renew.replace("{skip}", "")),
        ("renew skipping", renew.replace("{skip}", " SKIP LOCKED")),
        ("confirm", confirm.to_owned()),
        ("release_unawaited", release_unawaited.to_owned()),
        ("release_one", release_one.to_owned()),
        ("release", release.to_owned()),
        ("release_unlocked", release_unlocked.to_owned()),
        ("mark", mark.replace("{skip}", "")),
        ("mark skipping", mark.replace("{skip}", " SKIP LOCKED")),
        ("force", force.to_owned()),
        ("list", list.to_owned()),
        ("inspect", list.to_owned()),
        ("purge", purge.to_owned()),
        ("fence", sql::FENCE.to_owned()),
    ];
    let render = |(statement, text): (&str, String)| {
        let token = format!("'{name}.token'::regclass");
        let text = text.replace("{schema}", name).replace("{token}", &token).replace("{channel}", "'growth'");
        Probe::new(statement, text, &values_of_table_statement(statement))
    };
    all.into_iter().map(render).collect()
}

#[tokio::test]
async fn no_statement_touches_more_of_a_large_table() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off").await;
    fill(&mut conn, "small", FEW).await;
    fill(&mut conn, "large", MANY).await;
    run(&mut conn, SETTINGS).await;
    // Else a scan begins where the last one has ended, and finds what it looks for by chance.
    run(&mut conn, "SET synchronize_seqscans = off").await;
    assert_no_growth(&mut conn, &statements("small"), &statements("large")).await;
}
