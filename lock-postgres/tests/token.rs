//! Tokens grow across crash, restart and promotion (C8, and H12, H13 and H30 in `docs/hazards.md`). A plain sequence
//! beside them repeats numbers, which shows that each fault takes effect.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::time::Duration;

use leasehold_api::ErrorKind;
use leasehold_postgres::token::mark_incarnation;
use leasehold_postgres::{Identifier, schema};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, raw_sql};
use test_bounds::within;
use test_servers::sql::number;
use test_servers::{Cluster, ClusterOptions, Database, Signal, Standby, StopMode, fresh_database};

const JUMP: i64 = 1 << 32;

fn name() -> Identifier {
    Identifier::new("leasehold").unwrap()
}

async fn draw(conn: &mut PgConnection) -> i64 {
    number(&mut *conn, "SELECT nextval('leasehold.token')").await
}

async fn plain(conn: &mut PgConnection) -> i64 {
    number(&mut *conn, "SELECT nextval('public.plain')").await
}

async fn last(conn: &mut PgConnection) -> i64 {
    number(&mut *conn, "SELECT last_value FROM leasehold.token").await
}

async fn mark(conn: &mut PgConnection) {
    mark_incarnation(conn, &name()).await.unwrap_or_else(|error| panic!("{error} {error:?}"));
}

/// Starts a server that writes to disk as late as possible.
fn lazy() -> Cluster {
    Cluster::start(
        ClusterOptions::new()
            .setting("wal_writer_delay", "10s")
            .setting("wal_writer_flush_after", "0")
            .setting("autovacuum", "off")
            .setting("checkpoint_timeout", "1h"),
    )
}

/// Creates a database with the schema, but without a marker.
async fn fresh() -> (Database, PgConnection) {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    schema::install(&mut conn, &name()).await.unwrap();
    (database, conn)
}

async fn installed(database: &Database) -> PgConnection {
    let mut conn = database.connect().await;
    schema::install(&mut conn, &name()).await.unwrap();
    raw_sql("CREATE SEQUENCE public.plain").execute(&mut conn).await.unwrap();
    mark(&mut conn).await;
    raw_sql("CHECKPOINT").execute(&mut conn).await.unwrap();
    conn
}

/// Connects to a server that might still be recovering.
async fn reconnected(url: &str) -> PgConnection {
    let connect = async {
        loop {
            match PgConnection::connect(url).await {
                Ok(conn) => return conn,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    within(Duration::from_secs(60), "the server does not come back", connect).await
}

/// Draws in a transaction that never ends, as `begin` and fenced work do. The caller knows these numbers, but they
/// are not on disk.
async fn told(conn: &mut PgConnection) -> (i64, i64) {
    raw_sql("BEGIN").execute(&mut *conn).await.unwrap();
    let mut largest = (0, 0);
    for _ in 0..20 {
        largest = (draw(conn).await, plain(conn).await);
    }
    largest
}

#[tokio::test]
async fn tokens_grow_when_a_backend_is_killed() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    let mut conn = installed(&database).await;
    let mut victim = database.connect().await;
    let pid = number(&mut victim, "SELECT pg_backend_pid()::bigint").await;
    let (ours, theirs) = told(&mut conn).await;
    cluster.kill_backend(i32::try_from(pid).unwrap(), Signal::KILL);
    // Waits for the end of this session, because the crash ends every session.
    while raw_sql("SELECT 1").execute(&mut conn).await.is_ok() {}

    let mut after = reconnected(database.url()).await;
    assert!(plain(&mut after).await <= theirs, "a plain sequence repeats");
    mark(&mut after).await;
    assert!(draw(&mut after).await > ours);
    let jumped = last(&mut after).await;
    mark(&mut after).await;
    assert_eq!(last(&mut after).await, jumped, "once per incident");
}

/// Two servers that lost contact have both jumped from the same number.
#[tokio::test]
async fn tokens_grow_when_the_jump_itself_is_lost() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    let mut conn = installed(&database).await;
    let standby = Standby::of(&cluster).await;
    standby.wait_for_replay(&cluster).await;
    standby.cut().await;
    let mut victim = database.connect().await;
    let pid = number(&mut victim, "SELECT pg_backend_pid()::bigint").await;
    cluster.kill_backend(i32::try_from(pid).unwrap(), Signal::KILL);
    while raw_sql("SELECT 1").execute(&mut conn).await.is_ok() {}
    let mut again = reconnected(database.url()).await;
    mark(&mut again).await;
    let (ours, _) = told(&mut again).await;
    standby.promote().await;

    let mut after = reconnected(&standby.url(database.name())).await;
    mark(&mut after).await;
    let drawn = draw(&mut after).await;
    assert!(drawn > ours, "{drawn} after {ours}");
}

/// A copied database contains the marker, and gets the name of the original.
#[tokio::test]
async fn a_marker_of_a_copied_database_does_not_count() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    drop(installed(&database).await);
    let (name, copy) = (database.name(), format!("{}_copy", database.name()));
    cluster.run_sql("postgres", format!("CREATE DATABASE {copy} TEMPLATE {name}")).await;
    let mut conn = database.connect().await;
    let (ours, _) = told(&mut conn).await;
    drop(conn);
    cluster.run_sql("postgres", format!("DROP DATABASE {name} WITH (FORCE)")).await;
    cluster.run_sql("postgres", format!("ALTER DATABASE {copy} RENAME TO {name}")).await;
    let mut after = reconnected(database.url()).await;
    mark(&mut after).await;
    let drawn = draw(&mut after).await;
    assert!(drawn > ours, "{drawn} after {ours}");
}

#[tokio::test]
async fn tokens_grow_when_the_server_is_killed() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    let mut conn = installed(&database).await;
    let (ours, theirs) = told(&mut conn).await;
    cluster.kill_postmaster().await;
    cluster.start_again().await;

    let mut after = reconnected(database.url()).await;
    assert!(plain(&mut after).await <= theirs, "a plain sequence repeats");
    mark(&mut after).await;
    assert!(draw(&mut after).await > ours);
}

/// The jump is durable before the marker is visible, so a crash right afterwards does not undo it.
#[tokio::test]
async fn tokens_grow_through_crash_after_crash() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    let asynchronous = format!("ALTER DATABASE {} SET synchronous_commit = off", database.name());
    drop(installed(&database).await);
    cluster.run_sql("postgres", asynchronous).await;
    let mut largest = 0;
    for _ in 0..4 {
        let mut conn = reconnected(database.url()).await;
        mark(&mut conn).await;
        let (ours, _) = told(&mut conn).await;
        assert!(ours - 20 >= largest, "{ours} after {largest}");
        largest = ours;
        cluster.kill_postmaster().await;
        cluster.start_again().await;
    }
}

/// The marker survives but the latest numbers do not: storage that keeps unlogged tables over a crash, restored files
/// of a stopped server, or a machine set back.
#[tokio::test]
async fn a_marker_that_outlived_its_server_does_not_count() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    let mut conn = installed(&database).await;
    let ours = draw(&mut conn).await;
    conn.close().await.unwrap();
    cluster.restart(StopMode::Fast).await;
    let mut after = reconnected(database.url()).await;
    assert_eq!(number(&mut after, "SELECT count(*) FROM leasehold.incarnation").await, 1, "it survives");
    raw_sql(AssertSqlSafe(format!("SELECT setval('leasehold.token', {})", ours - 1)))
        .execute(&mut after)
        .await
        .unwrap();
    mark(&mut after).await;
    assert!(draw(&mut after).await > ours);
    let jumped = last(&mut after).await;
    mark(&mut after).await;
    assert_eq!(last(&mut after).await, jumped, "once for each start");
}

#[tokio::test]
async fn tokens_grow_when_a_standby_that_lags_is_promoted() {
    let cluster = lazy();
    let database = cluster.fresh_database().await;
    let mut conn = installed(&database).await;
    let standby = Standby::of(&cluster).await;
    standby.wait_for_replay(&cluster).await;
    standby.cut().await;
    let (mut ours, mut theirs) = (0, 0);
    for _ in 0..100 {
        (ours, theirs) = (draw(&mut conn).await, plain(&mut conn).await);
    }
    standby.promote().await;

    let mut after = reconnected(&standby.url(database.name())).await;
    assert!(plain(&mut after).await <= theirs, "a plain sequence repeats");
    mark(&mut after).await;
    assert!(draw(&mut after).await > ours);
}

/// Moves the sequence ahead of the clock. Jumps then have a fixed length, which shows their number.
async fn ahead_of_the_clock(conn: &mut PgConnection) -> i64 {
    let sql = "SET default_transaction_read_only = off; SELECT setval('leasehold.token', 5000000000000000)";
    raw_sql(sql).execute(&mut *conn).await.unwrap();
    last(conn).await
}

#[tokio::test]
async fn many_sessions_jump_once() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    for setting in ["default_transaction_isolation = serializable", "default_transaction_read_only = on"] {
        let sql = format!("ALTER DATABASE {} SET {setting}", database.name());
        raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.unwrap();
    }
    schema::install(&mut conn, &name()).await.unwrap();
    let before = ahead_of_the_clock(&mut conn).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut conn = database.connect().await;
        tasks.spawn(async move { mark_incarnation(&mut conn, &name()).await });
    }
    for result in tasks.join_all().await {
        result.unwrap();
    }
    assert_eq!(last(&mut conn).await, before + JUMP);
    assert_eq!(number(&mut conn, "SELECT count(*) FROM leasehold.incarnation").await, 1);
}

/// Any session can take any advisory lock, also the one that older versions of this library used here.
#[tokio::test]
async fn an_advisory_lock_of_somebody_else_keeps_no_session_from_its_tokens() {
    let (database, mut conn) = fresh().await;
    let mut other = database.connect().await;
    raw_sql("SELECT pg_advisory_lock(1818583411, 2)").execute(&mut other).await.unwrap();
    let before = ahead_of_the_clock(&mut conn).await;
    mark(&mut conn).await;
    assert_eq!(last(&mut conn).await, before + JUMP);
}

/// Another session is jumping: it has inserted the marker and can still fail.
#[tokio::test]
async fn a_jump_waits_for_the_end_of_another_and_is_made_if_that_has_failed() {
    let (database, mut conn) = fresh().await;
    mark(&mut conn).await;
    for (end, jumps) in [("COMMIT", 0), ("ROLLBACK", 1)] {
        let before = ahead_of_the_clock(&mut conn).await;
        let copy = "CREATE TABLE public.copy AS SELECT * FROM leasehold.incarnation; DELETE FROM leasehold.incarnation";
        raw_sql(copy).execute(&mut conn).await.unwrap();
        raw_sql("BEGIN; INSERT INTO leasehold.incarnation SELECT * FROM public.copy")
            .execute(&mut conn)
            .await
            .unwrap();
        let mut other = database.connect().await;
        let pid = number(&mut other, "SELECT pg_backend_pid()::bigint").await;
        let marking = tokio::spawn(async move { mark_incarnation(&mut other, &name()).await });
        let waits = format!("SELECT cardinality(pg_blocking_pids({pid}))::bigint");
        let waiting = async {
            while number(&mut conn, &waits).await == 0 {
                tokio::task::yield_now().await;
            }
        };
        within(Duration::from_secs(60), "it does not wait", waiting).await;
        raw_sql(end).execute(&mut conn).await.unwrap();
        marking.await.unwrap().unwrap();
        assert_eq!(last(&mut conn).await, before + jumps * JUMP, "{end}");
        raw_sql("DROP TABLE public.copy").execute(&mut conn).await.unwrap();
    }
}

/// A dump contains the marker, which must not count on another server or for another sequence.
#[tokio::test]
async fn a_marker_of_another_server_or_sequence_does_not_count() {
    let (_database, mut conn) = fresh().await;
    mark(&mut conn).await;
    ahead_of_the_clock(&mut conn).await;
    for foreign in ["system = system + 1", "sequence = 1"] {
        let before = last(&mut conn).await;
        let sql =
            format!("SET default_transaction_read_only = off; UPDATE leasehold.incarnation SET {foreign}");
        raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.unwrap();
        mark(&mut conn).await;
        assert_eq!(last(&mut conn).await, before + JUMP, "{foreign}");
        raw_sql("DELETE FROM leasehold.incarnation WHERE sequence = 1").execute(&mut conn).await.unwrap();
    }
}

#[tokio::test]
async fn a_sequence_that_is_used_up_is_an_error_and_never_begins_again() {
    let (_database, mut conn) = fresh().await;
    let most = (1_i64 << 53) - 1;
    raw_sql(AssertSqlSafe(format!("SELECT setval('leasehold.token', {})", most - 5)))
        .execute(&mut conn)
        .await
        .unwrap();
    let error = mark_incarnation(&mut conn, &name()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capacity, "{error}");
    assert_eq!(last(&mut conn).await, most - 5);
    for n in 1..=5 {
        assert_eq!(draw(&mut conn).await, most - 5 + n);
    }
    raw_sql("SELECT nextval('leasehold.token')").execute(&mut conn).await.unwrap_err();
}

#[tokio::test]
async fn a_dropped_call_can_be_repeated() {
    let (_database, mut conn) = fresh().await;
    ahead_of_the_clock(&mut conn).await;
    let mut polls = 0;
    loop {
        raw_sql("DELETE FROM leasehold.incarnation").execute(&mut conn).await.unwrap();
        let before = last(&mut conn).await;
        let completed = {
            let name = name();
            let mut marking = std::pin::pin!(mark_incarnation(&mut conn, &name));
            let mut left = polls;
            let polled = std::future::poll_fn(|cx| match left {
                0 => std::task::Poll::Ready(None),
                _ => {
                    left -= 1;
                    marking.as_mut().poll(cx).map(Some)
                }
            });
            polled.await.is_some()
        };
        mark(&mut conn).await;
        assert!(last(&mut conn).await >= before + JUMP, "dropped after {polls} polls");
        if completed {
            break;
        }
        polls += 1;
    }
}
