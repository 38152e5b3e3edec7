//! Rules of shared holds and permits, in both table stores.

use std::time::Duration;

use leasehold_api::{LossReason, Mode};
use leasehold_engine::{Attempt, Backend, Renewed, Request};
use leasehold_postgres::table::{Dialect, TableBackend};
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, schema};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use test_bounds::Bound;
use test_servers::sql::run;
use test_servers::{Database, fresh_database};

use crate::statements::rendered;

/// The number of readers that enter a key at once.
const READERS: i32 = 4;

/// Makes a request for an exclusive hold of a key by the holder with this number.
type MakeRequest = fn(&str, u64) -> Request;

fn wanting(request: MakeRequest, key: &str, serial: u64, mode: Mode) -> Request {
    let mut request = request(key, serial);
    request.mode = mode;
    request
}

async fn attempt(backend: &TableBackend, request: Request) -> Attempt {
    backend.acquire(vec![request]).await.remove(0).unwrap()
}

async fn number(conn: &mut PgConnection, sql: String) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(conn).await.unwrap()
}

/// Returns the statement that inserts rows that look held indefinitely, as gates do. Their keys end with a number from 1
/// to `count`.
fn held_rows(table: &str, key: &str, holder: &str, count: u32) -> String {
    let (columns, values) = if table == "lease" {
        ("ttl_us, expires_at, released", "0, 'infinity', false")
    } else {
        ("acquired", "true")
    };
    format!(
        "INSERT INTO leasehold.{table} (key, holder, token, acquired_at, {columns})
        SELECT '{key}' || n, '{holder}', 1, now() - interval '3 days', {values} FROM generate_series(1, {count}) n"
    )
}

/// Returns the statement that inserts free parts of one key, which ended long ago.
fn old_parts(table: &str, key: &str, of: i32, count: u32) -> String {
    let (columns, values) = if table == "lease" {
        ("ttl_us, expires_at, released", "0, now() - interval '3 days', true")
    } else {
        ("acquired, released_at", "false, now() - interval '3 days'")
    };
    format!(
        "INSERT INTO leasehold.{table}_part (key, part, of, holder, token, acquired_at, {columns})
        SELECT '{key}', n - 1, {of}, 'x', 1, now() - interval '3 days', {values}
        FROM generate_series(1, {count}) n"
    )
}

/// Returns the statement with which an operator opens all keys of the table.
fn opening(table: &str) -> String {
    let opened = if table == "lease" { "released = true" } else { "acquired = false" };
    format!("UPDATE leasehold.{table} SET {opened}")
}

/// Fails unless readers that enter a key at once, and skip different numbers of parts, each get a part.
pub async fn readers_that_enter_at_once_and_skip_different_parts_each_get_one(dialect: &Dialect) {
    let database = fresh_database().await;
    let mut operator = database.connect().await;
    schema::install(&mut operator, &Identifier::known(DEFAULT_SCHEMA)).await.unwrap();
    let table = dialect.kind;
    run(&mut operator, held_rows(table, "k", "*", 1)).await;
    let texts = rendered(dialect, &[], DEFAULT_SCHEMA);
    let (_, enter) = texts.into_iter().find(|(name, _)| *name == "enter_shared").unwrap();
    let mut tx = operator.begin().await.unwrap();
    tx.execute(AssertSqlSafe(format!("SELECT FROM leasehold.{table} FOR UPDATE"))).await.unwrap();
    let mut entering = Vec::new();
    for reader in 0..READERS {
        let (mut conn, enter) = (database.connect().await, enter.clone());
        entering.push(tokio::spawn(async move {
            let query = sqlx::query(AssertSqlSafe(enter)).bind("k1").bind(format!("reader-{reader}"));
            let query = query.bind(30_000_000_i64).bind(None::<&str>).bind("test").bind(0_i32).bind(reader);
            query.fetch_all(&mut conn).await.unwrap().len()
        }));
    }
    let mut watcher = database.connect().await;
    let waiting = "SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let end = Bound::new(Duration::from_secs(60));
    while number(&mut watcher, waiting.to_owned()).await < i64::from(READERS) {
        end.check("not all readers wait for the gate");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tx.commit().await.unwrap();
    for reader in entering {
        assert_eq!(reader.await.unwrap(), 1);
    }
}

/// Fails unless a permit ends if an operator opens its key and a reader gets it before the permit is confirmed.
pub async fn a_permit_beside_readers_ends(
    backend: &TableBackend,
    database: &Database,
    table: &str,
    request: MakeRequest,
) {
    let permit = wanting(request, "k", 1, Mode::Permit { of: 2 });
    let reader = wanting(request, "k", 2, Mode::Shared);
    let (permit_hold, reader_hold) = (permit.hold(), reader.hold());
    assert!(matches!(attempt(backend, permit).await, Attempt::Granted(_)));
    run(&mut database.connect().await, opening(table)).await;
    assert!(matches!(attempt(backend, reader).await, Attempt::Granted(_)));
    let holds = vec![permit_hold, reader_hold];
    for answers in [backend.look(holds.clone()).await, backend.renew(holds).await] {
        let answers: Vec<Renewed> = answers.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers, [Renewed::Gone(LossReason::Gone), Renewed::Extended]);
    }
}

/// Fails unless a row whose holder only resembles the holder of a gate blocks requests of every mode.
pub async fn a_row_that_an_operator_holds_is_no_gate(
    backend: &TableBackend,
    database: &Database,
    table: &str,
    request: MakeRequest,
) {
    let mut operator = database.connect().await;
    for (key, holder) in [("a", "#ticket 7"), ("b", "*closed*"), ("c", "#0")] {
        run(&mut operator, held_rows(table, key, holder, 1)).await;
        for (serial, mode) in (1..).zip([Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }]) {
            let wanted = wanting(request, &format!("{key}1"), serial, mode);
            let attempt = attempt(backend, wanted).await;
            assert!(matches!(attempt, Attempt::Contended(_)), "{mode:?} beside {holder:?}: {attempt:?}");
        }
    }
}

/// Fails unless a permit is granted of a key whose free parts all belong to another number of permits.
pub async fn a_semaphore_with_the_parts_of_another_one_gets_its_own(
    backend: &TableBackend,
    database: &Database,
    table: &str,
    request: MakeRequest,
) {
    let mut operator = database.connect().await;
    run(&mut operator, held_rows(table, "k", "#1", 1)).await;
    run(&mut operator, old_parts(table, "k1", 2, 2)).await;
    match attempt(backend, wanting(request, "k1", 1, Mode::Permit { of: 1 })).await {
        Attempt::Granted(granted) => assert_eq!(granted.permit, Some(0)),
        other => panic!("{other:?}"),
    }
    let parts = format!("SELECT count(*) FROM leasehold.{table}_part WHERE of >= 0");
    assert_eq!(number(&mut operator, parts).await, 1);
}

/// Fails unless a batch of readers waits for a few locked keys only.
pub async fn readers_of_locked_keys_do_not_all_wait(
    backend: &TableBackend,
    database: &Database,
    table: &str,
    request: MakeRequest,
) {
    let mut operator = database.connect().await;
    run(&mut operator, held_rows(table, "k", "x", 6)).await;
    run(&mut operator, opening(table)).await;
    let mut tx = operator.begin().await.unwrap();
    tx.execute(AssertSqlSafe(format!("SELECT FROM leasehold.{table} FOR UPDATE"))).await.unwrap();
    let requests =
        (1..7).map(|serial| wanting(request, &format!("k{serial}"), serial, Mode::Shared)).collect();
    let mut refused = 0;
    for answer in backend.acquire(requests).await {
        match answer.unwrap() {
            Attempt::Contended(_) => {}
            Attempt::Refused(_) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(refused, 2);
    tx.rollback().await.unwrap();
}

/// Fails unless one call opens all idle keys and removes all old parts, although a job does so for a limited number.
pub async fn a_purge_ends_behind_the_last_idle_key_and_the_last_old_part(
    backend: &TableBackend,
    database: &Database,
    table: &str,
) {
    let mut operator = database.connect().await;
    run(&mut operator, held_rows(table, "k", "*", 70)).await;
    run(&mut operator, old_parts(table, "gone", -1, 2_500)).await;
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 2_500);
    let gates = format!("SELECT count(*) FROM leasehold.{table} WHERE holder = '*'");
    assert_eq!(number(&mut operator, gates).await, 0);
    let parts = format!("SELECT count(*) FROM leasehold.{table}_part");
    assert_eq!(number(&mut operator, parts).await, 0);
}
