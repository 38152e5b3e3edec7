//! No statement of either scope touches more pages when the table of names is large (docs/hazards.md H50). A constant
//! of `sql.rs`, `admin/sql.rs` or `xact/sql.rs`, or a field of `Statements`, that is not measured here does not
//! compile. Statements that touch no table of the store are listed separately.
#![allow(clippy::unwrap_used, missing_docs)]

#[deny(dead_code)]
#[path = "../src/admin/sql.rs"]
mod admin_sql;
#[allow(dead_code, unused_imports)]
#[path = "../src/derived.rs"]
mod derived;
#[deny(dead_code)]
#[path = "../src/sql.rs"]
mod sql;
#[deny(dead_code)]
#[path = "../src/xact/sql.rs"]
mod xact_sql;

/// The path at which `sql.rs` finds `admin_sql` in its own crate.
mod admin {
    pub(crate) use super::admin_sql as sql;
}

use std::time::Duration;

use leasehold_postgres::{Identifier, KeySpace, schema, sql::render, token};
use sqlx::PgConnection;
use test_servers::fresh_database;
use test_servers::growth::{Probe, assert_no_growth};
use test_servers::sql::run;

const FEW: u32 = 1_000;
const MANY: u32 = 1_000_000;

/// Installs the schema `name` and writes `count` names, half of them old.
async fn fill(conn: &mut PgConnection, name: &str, count: u32) {
    let schema = Identifier::new(name).unwrap();
    schema::install(conn, &schema).await.unwrap();
    token::mark_incarnation(conn, &schema).await.unwrap();
    run(&mut *conn, format!("ALTER TABLE {name}.advisory_name SET (fillfactor = 100, autovacuum_enabled = false);
        INSERT INTO {name}.advisory_name (space, number, key, pid, holder, token, granted_at)
        SELECT 1, i, 'key-' || i, 1, 'holder', i, now() - (i % 2) * interval '60 days' FROM generate_series(1, {count}) i")).await;
    run(&mut *conn, format!("VACUUM ANALYZE {name}.advisory_name")).await;
}

/// Returns each statement for the schema `name`.
fn statements(name: &str) -> Vec<Probe> {
    let schema = Identifier::new(name).unwrap();
    let all = sql::Statements::new(&schema, KeySpace::Big);
    let modes = [sql::LockMode::Exclusive, sql::LockMode::Shared];
    let waits = modes.map(|mode| all.wait(5, mode, Some(1)));
    let waits_in_transaction = modes.map(|mode| all.wait(5, mode, None));
    let sql::Statements {
        try_one,
        unlock_one,
        many,
        many_in_modes,
        clean_up,
        probe: _,
        wait: _,
        try_in_transaction,
        wait_in_transaction: _,
        mark,
        unmark,
        name: write,
        name_shared,
        forget,
        claim_upkeep,
        note_upkeep,
        list,
        permits,
    } = all;
    let sql::permits::PermitStatements {
        claim,
        check,
        undo,
        take,
        release,
        clean_up: clean_up_permits,
        is_unclaimed,
        wait_for_turn: _,
        close_gate: _,
        open_gate: _,
        end_turn: _,
        clean_turn,
    } = permits;
    let drawn = render(&xact_sql::TOKEN.replace("{marked}", &token::marked()), &schema);
    let (pid, three) = ("pg_backend_pid()", "ARRAY[1, 500, 900]");
    let (texts, some) = ("ARRAY['a', 'b', 'c']", "ARRAY[false, false, true]");
    [
        ("try_one", try_one.exclusive, vec!["5", pid]),
        ("try_one, shared", try_one.shared, vec!["6", pid]),
        ("unlock_one", unlock_one.exclusive, vec!["5", pid, "'growth'"]),
        ("unlock_one, shared", unlock_one.shared, vec!["6", pid, "'growth'"]),
        ("many", many, vec![three, some, pid, "'growth'"]),
        ("many_in_modes", many_in_modes, vec![three, some, pid, "'growth'", some]),
        ("clean_up", clean_up, vec![three, pid, some]),
        ("wait", behind_the_block(&waits[0]), vec![]),
        ("wait, shared", behind_the_block(&waits[1]), vec![]),
        ("try_in_transaction", try_in_transaction.exclusive, vec!["5"]),
        ("try_in_transaction, shared", try_in_transaction.shared, vec!["6"]),
        ("wait_in_transaction", behind_the_block(&waits_in_transaction[0]), vec![]),
        ("wait_in_transaction, shared", behind_the_block(&waits_in_transaction[1]), vec![]),
        ("mark", mark, vec![three, pid, some, some]),
        ("unmark", unmark, vec![three, pid, some, some]),
        ("claim", claim, vec!["7", pid, "258", "1023", "false"]),
        ("check", check, vec!["7", pid, "0", "2", "0"]),
        ("take", take, vec![three, pid, "true", "1023"]),
        ("release", release, vec!["7", pid, "'growth'", "1", "258", "false"]),
        ("undo", undo, vec!["7", pid, "258"]),
        ("clean_up of permits", clean_up_permits, vec!["7", pid, "0", three, "false"]),
        ("is_unclaimed", is_unclaimed, vec!["7", pid]),
        ("clean_turn", clean_turn, vec![three, pid, some]),
        (
            "name",
            write,
            vec!["1", three, texts, three, texts, three, three, "ARRAY[NULL, NULL, NULL]::text[]"],
        ),
        ("name_shared", name_shared, vec!["1", three, texts, texts, texts]),
        ("forget", forget, vec!["1", "300", "200"]),
        ("claim_upkeep", claim_upkeep, vec!["'advisory_name'"]),
        ("note_upkeep", note_upkeep, vec!["'advisory_name'", "'1 300'", "1000000"]),
        ("list", std::sync::Arc::clone(&list), vec!["NULL", "NULL", "2", "NULL", "NULL"]),
        ("list of one", list, vec!["1", "500", "2", "1024", "2047"]),
        ("token of a transaction", drawn, vec![]),
    ]
    .into_iter()
    .map(|(statement, text, values)| Probe::new(statement, &*text, &values))
    .collect()
}

/// Returns the statement behind the block that waits for a lock. Asserts that the block names no table.
fn behind_the_block(text: &str) -> std::sync::Arc<str> {
    let (block, statement) = text.rsplit_once("$leasehold$;").unwrap();
    assert!(!block.contains("{schema}") && !block.contains("advisory_name"), "{block}");
    statement.into()
}

/// The statements that are not measured read sessions, locks and settings, and no table.
#[test]
fn what_is_not_measured_names_no_table() {
    let process = sql::Process { pid: 1, started: 1 };
    let all = sql::Statements::new(&Identifier::new("growth").unwrap(), KeySpace::Big);
    let texts = [
        sql::PROCESS.to_owned(),
        sql::CAPACITY.to_owned(),
        sql::CONFIRM.to_owned(),
        sql::SHARED_SETTINGS.to_owned(),
        sql::WAIT_SETTINGS.to_owned(),
        sql::BESIDE.to_owned(),
        sql::COMMIT.to_owned(),
        sql::ROLLBACK.to_owned(),
        sql::begin(Duration::from_secs(1)).to_string(),
        sql::cancel(process, 1, 1),
        sql::terminate(process, 1, &[1]),
        sql::waits([1].into_iter()),
        all.probe(&[(1, true)]),
        all.wait_for_turn(derived::Turn::of(1, false), 1),
        all.permits.end_turn(derived::Turn::of(1, false), 1),
        admin_sql::END_SESSION.to_owned(),
        xact_sql::checks(),
        xact_sql::attempt(1, KeySpace::Big, xact_sql::XactMode::Exclusive),
        xact_sql::attempt(1, KeySpace::Big, xact_sql::XactMode::Shared),
        xact_sql::begin(1, KeySpace::Big),
        xact_sql::wait(&[1], KeySpace::Big, xact_sql::XactMode::Exclusive, 1),
        xact_sql::wait(&[1], KeySpace::Big, xact_sql::XactMode::Shared, 1),
        xact_sql::held(1, KeySpace::Big, xact_sql::XactMode::Exclusive),
        xact_sql::held(1, KeySpace::Big, xact_sql::XactMode::Shared),
        xact_sql::ALIVE.to_owned(),
        xact_sql::OPEN.to_owned(),
        xact_sql::ROLLBACK.to_owned(),
    ];
    assert_ne!(sql::UNMARKED, 0);
    for text in texts {
        assert!(!text.contains("{schema}") && !text.contains("advisory_name"), "{text}");
    }
}

#[tokio::test]
async fn no_statement_touches_more_of_a_large_dictionary() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off").await;
    fill(&mut conn, "small", FEW).await;
    fill(&mut conn, "large", MANY).await;
    // The settings of the store's own sessions.
    let settings = sql::BESIDE.replace("SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;", "");
    run(&mut conn, settings.replace("SET LOCAL", "SET")).await;
    // Another session holds numbers with and without names.
    let mut holder = database.connect().await;
    run(&mut holder, "SELECT pg_advisory_lock(i) FROM generate_series(990, 1010) i").await;
    run(&mut conn, "SET statement_timeout = 0; SET synchronize_seqscans = off").await;
    assert_no_growth(&mut conn, &statements("small"), &statements("large")).await;
}
