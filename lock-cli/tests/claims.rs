//! `leasehold claims` on tables of an application, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;

use leasehold::postgres::sqlx::{AssertSqlSafe, PgConnection, raw_sql};
use serde_json::Value;
use support::finish;
use test_servers::Database;

const REQUESTS: &str = "
CREATE TABLE request (
    id bigint PRIMARY KEY, entity_id text, status text NOT NULL, attempts_left int, error text,
    owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz, taken_at timestamptz);
INSERT INTO request VALUES
    (1, 'a', 'new', 3, NULL, NULL, 0, NULL, NULL),
    (2, 'b', 'in-progress', 2, NULL, '00000000-0000-0000-0000-00000000000b', 7,
     clock_timestamp() + interval '1 hour', clock_timestamp() - interval '2 minutes'),
    (3, E'c\\033[31m', 'in-progress', 0, NULL, '00000000-0000-0000-0000-00000000000c', 2,
     clock_timestamp() - interval '1 hour', clock_timestamp() - interval '2 hours'),
    (4, 'd', 'exhausted', 0, 'no such file', NULL, 3, NULL, NULL),
    (5, 'e', 'new', 0, 'too late', NULL, 3, NULL, NULL),
    (6, 'f', 'complete', 0, NULL, NULL, 1, NULL, NULL);";

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// A truncated list is marked as such, and a complete list has no mark.
#[test]
fn a_list_that_is_cut_says_so() {
    let (_runtime, database, _connection) = database(REQUESTS);
    for (limit, taken, more) in [(1, 1, true), (2, 2, false), (1000, 2, false)] {
        let found = json(&database, &format!("request --limit {limit} --json"));
        assert_eq!((ids(&found["taken"]).len(), &found["more"]), (taken, &more.into()), "{limit}: {found}");
        let (_, _, stderr) = finish(&mut tool(&database, &format!("request --limit {limit}")));
        assert_eq!(stderr.contains("--limit"), more, "{limit}: {stderr}");
    }
    let (code, _, stderr) = finish(&mut tool(&database, "request --limit 0"));
    assert!(code == 64 && stderr.contains("--limit"), "{code}: {stderr}");
}

fn database(sql: &str) -> (tokio::runtime::Runtime, Database, PgConnection) {
    let runtime = runtime();
    let (database, connection) = runtime.block_on(async {
        let database = test_servers::fresh_database().await;
        let mut connection = database.connect().await;
        raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
        (database, connection)
    });
    (runtime, database, connection)
}

fn tool(database: &Database, arguments: &str) -> Command {
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", database.url()).arg("claims").args(arguments.split_whitespace());
    command
}

fn json(database: &Database, arguments: &str) -> Value {
    let (code, stdout, stderr) = finish(&mut tool(database, arguments));
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}"))
}

fn ids(rows: &Value) -> Vec<&str> {
    rows.as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap()).collect()
}

#[test]
fn taken_rows_are_listed_with_owner_epoch_and_age_and_exhausted_ones_apart() {
    let (_runtime, database, _connection) = database(REQUESTS);
    let found = json(&database, "request --json");
    assert_eq!(found["keeps_leases"], true);
    assert_eq!(ids(&found["taken"]), ["3", "2"], "the longest first");
    let (ended, held) = (&found["taken"][0], &found["taken"][1]);
    assert_eq!(ended["expires_in_ms"], 0, "{ended}");
    assert_eq!(held["owner"], "00000000-0000-0000-0000-00000000000b");
    assert_eq!((&held["epoch"], &held["attempts_left"], &held["group"]), (&7.into(), &2.into(), &"b".into()));
    assert!((120_000..180_000).contains(&held["held_for_ms"].as_u64().unwrap()), "{held}");
    assert!((3_500_000..=3_600_000).contains(&held["expires_in_ms"].as_u64().unwrap()), "{held}");
    assert_eq!(ids(&found["exhausted"]), ["4", "5"], "a settled row without attempts is not exhausted");

    let (code, stdout, stderr) = finish(&mut tool(&database, "public.request"));
    assert_eq!(code, 0, "{stderr}");
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines[0], "taken:", "{stdout}");
    assert!(lines[1].starts_with("ID") && lines[1].contains("EXPIRES IN"), "{stdout}");
    assert!(lines[2].contains("ended") && lines[3].contains("2m "), "{stdout}");
    assert!(!stdout.contains('\x1b') && stdout.contains("no such file"), "{stdout:?}");
}

#[test]
fn a_lease_without_end_is_listed() {
    let (_runtime, database, _connection) = database(&format!(
        "{REQUESTS} UPDATE request SET lease_until = 'infinity', taken_at = '-infinity' WHERE id = 2"
    ));
    let found = json(&database, "request --json");
    assert_eq!(ids(&found["taken"]), ["2", "3"], "{found}");
}

#[test]
fn columns_and_states_can_be_named() {
    let (_runtime, database, _connection) = database(
        r#"CREATE SCHEMA "App";
        CREATE TABLE "App"."Job" (
            "No" int PRIMARY KEY, processed boolean NOT NULL DEFAULT false, tries int, worker bigint, till timestamptz);
        INSERT INTO "App"."Job" VALUES
            (1, false, 1, 42, clock_timestamp() + interval '1 minute'), (2, false, 0, NULL, NULL), (3, true, 0, NULL, NULL);"#,
    );
    let named = "App.Job --id No --state processed --attempts tries --owner worker --until till --json";
    let found = json(&database, named);
    assert_eq!((ids(&found["taken"]), ids(&found["exhausted"])), (vec!["1"], vec!["2"]));
    assert_eq!(found["taken"][0]["owner"], "42");
    let (code, _, stderr) = finish(&mut tool(&database, "App.Job --id Nr"));
    assert!(
        code == 64 && stderr.contains("no column Nr") && stderr.contains("processed"),
        "{code}: {stderr}"
    );
}

#[test]
fn a_side_table_is_read_instead_of_columns() {
    let (_runtime, database, _connection) = database(
        "CREATE TABLE plain (id text PRIMARY KEY, queue text NOT NULL DEFAULT 'no queue of ours', processed boolean NOT NULL DEFAULT false);
        CREATE TABLE side (tab text, queue text, id text, owner uuid, epoch bigint, lease_until timestamptz,
                           taken_at timestamptz, PRIMARY KEY (tab, queue, id));
        INSERT INTO plain VALUES ('x'), ('y');
        INSERT INTO side VALUES ('\"plain\"', '', 'y', '00000000-0000-0000-0000-00000000000d', 9,
                                 clock_timestamp() + interval '1 minute', clock_timestamp());",
    );
    assert_eq!(json(&database, "plain --json")["keeps_leases"], false);
    let found = json(&database, "plain --side-table side --json");
    assert_eq!((ids(&found["taken"]), &found["taken"][0]["epoch"]), (vec!["y"], &9.into()));
}

/// Other sessions cannot see the rows claimed by an open transaction, but can see the transaction.
#[test]
fn a_held_claim_shows_as_its_transaction() {
    let (runtime, database, mut connection) = database(REQUESTS);
    assert_eq!(json(&database, "request --json")["transactions"], serde_json::json!([]));
    let hold = "SET application_name = 'worker 7'; BEGIN; SELECT 1 FROM request WHERE id = 1 FOR UPDATE";
    runtime.block_on(raw_sql(hold).execute(&mut connection)).unwrap();
    let found = json(&database, "request --json");
    let open = &found["transactions"][0];
    assert_eq!(
        (&open["application"], &open["activity"]),
        (&"worker 7".into(), &"idle in transaction".into())
    );
    let (_, stdout, _) = finish(&mut tool(&database, "request"));
    assert!(stdout.contains("open transactions") && stdout.contains("worker 7"), "{stdout}");
}

#[test]
fn bad_input_is_named() {
    let (_runtime, database, _connection) = database("SELECT 1");
    for (arguments, text) in
        [("nowhere", "there is no table nowhere"), ("a.b.c", "no table"), (".x", "cannot be a name")]
    {
        let (code, stdout, stderr) = finish(&mut tool(&database, arguments));
        assert!(code == 64 && stderr.contains(text) && stdout.is_empty(), "{arguments}: {code}: {stderr}");
    }
    let mut elsewhere = support::tool();
    elsewhere.args(["claims", "request", "--url", "memory:"]);
    let (code, _, stderr) = finish(&mut elsewhere);
    assert!(code == 64 && stderr.contains("postgres"), "{code}: {stderr}");
    let mut nowhere = support::tool();
    nowhere.args(["claims", "request"]);
    let (code, _, stderr) = finish(&mut nowhere);
    assert!(code == 64 && stderr.contains("LEASEHOLD_URL"), "{code}: {stderr}");
}

#[test]
fn a_prepared_transaction_shows_by_its_name() {
    let (runtime, database, mut connection) = database(REQUESTS);
    let name = format!("'it''s {}'", database.name());
    let prepare = format!("BEGIN; SELECT 1 FROM request WHERE id = 1 FOR UPDATE; PREPARE TRANSACTION {name}");
    runtime.block_on(raw_sql(AssertSqlSafe(prepare)).execute(&mut connection)).unwrap();
    let found = json(&database, "request --json");
    let open = found["transactions"].as_array().unwrap();
    let expected = format!("it's {}", database.name());
    assert_eq!((open.len(), &open[0]["prepared"]), (1, &expected.as_str().into()), "{found}");
    assert!(open[0]["pid"].is_null() && open[0]["open_for_ms"].is_u64(), "{found}");
    let (_, stdout, _) = finish(&mut tool(&database, "request"));
    assert!(stdout.contains(&format!("prepared as {expected}")), "{stdout}");
    let rollback = format!("ROLLBACK PREPARED {name}");
    runtime.block_on(raw_sql(AssertSqlSafe(rollback)).execute(&mut connection)).unwrap();
}
