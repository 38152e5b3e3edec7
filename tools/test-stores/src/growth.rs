//! Checks that no statement of a table store touches more pages if its table is large (`docs/hazards.md` H50). A new field
//! of `Dialect` does not compile until it is listed here.

use leasehold_postgres::table::{Dialect, SETTINGS};
use leasehold_postgres::{Identifier, schema};
use sqlx::PgConnection;
use test_servers::fresh_database;
use test_servers::growth::{Probe, assert_no_growth};
use test_servers::sql::run;

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
    let [small, large] = ["small", "large"].map(|schema| statements(dialect, more, schema));
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

/// Returns all statements, rendered for `schema`.
fn statements(dialect: &Dialect, more: &[(&'static str, &str)], schema: &str) -> Vec<Probe> {
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
        relabel,
        give_out,
        adopt,
        release_unawaited,
        release_one,
        release,
        release_unlocked,
        mark,
        served,
        force,
        ask,
        list,
        purge,
    } = dialect;
    let all = [
        ("grant_one", (*grant_one).to_owned()),
        ("retake_one", (*retake_one).to_owned()),
        ("grant_free", (*grant_free).to_owned()),
        ("grant", grant.replace("{free}", "").replace("{among}", "")),
        ("grant skipping", grant.replace("{free}", free).replace("{among}", among)),
        ("renew", renew.replace("{skip}", "")),
        ("renew skipping", renew.replace("{skip}", " SKIP LOCKED")),
        ("confirm", (*confirm).to_owned()),
        ("relabel", (*relabel).to_owned()),
        ("release_unawaited", (*release_unawaited).to_owned()),
        ("release_one", (*release_one).to_owned()),
        ("release", (*release).to_owned()),
        ("release_unlocked", (*release_unlocked).to_owned()),
        ("mark", mark.replace("{skip}", "")),
        ("mark skipping", mark.replace("{skip}", " SKIP LOCKED")),
        ("served", (*served).to_owned()),
        ("force", (*force).to_owned()),
        ("ask", (*ask).to_owned()),
        ("list", (*list).to_owned()),
        ("inspect", (*list).to_owned()),
        ("purge", (*purge).to_owned()),
    ];
    let some = [("renew_early", renew_early), ("give_out", give_out), ("adopt", adopt)];
    let some = some.into_iter().filter_map(|(statement, text)| Some((statement, (*text)?.to_owned())));
    let more = more.iter().map(|(statement, text)| (*statement, (*text).to_owned()));
    let render = |(statement, text): (&'static str, String)| {
        let token = format!("'{schema}.token'::regclass");
        let text =
            text.replace("{schema}", schema).replace("{token}", &token).replace("{channel}", "'growth'");
        Probe::new(statement, text, &values_of(statement))
    };
    all.into_iter().chain(some).chain(more).map(render).collect()
}

/// Returns the parameters with which a statement is measured, as SQL.
fn values_of(statement: &str) -> Vec<&'static str> {
    const KEYS: &str = "ARRAY['held-1', 'held-2', 'held-900']";
    const FREE: &str = "ARRAY['free-1', 'free-500', 'new']";
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
        "fence" => vec!["'held-1'", "'holder-1'", "1"],
        other => panic!("{other} is a statement that is not measured yet: give it values here"),
    }
}
