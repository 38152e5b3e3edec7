//! Servers whose functions of advisory locks do not lock (`docs/hazards.md` H59).

use crate::common::*;
use leasehold_api::{ErrorKind, LockExt as _};
use test_servers::{Cluster, Database, PgBouncer, Proxy};

/// The functions that take a lock, with the definitions that replace them.
const FUNCTIONS: [(&str, &str); 4] = [
    ("pg_try_advisory_lock", "boolean LANGUAGE sql AS 'SELECT true'"),
    ("pg_advisory_lock", "void LANGUAGE plpgsql AS 'BEGIN END'"),
    ("pg_try_advisory_xact_lock", "boolean LANGUAGE sql AS 'SELECT true'"),
    ("pg_advisory_xact_lock", "void LANGUAGE plpgsql AS 'BEGIN END'"),
];

const ARGUMENTS: [&str; 2] = ["bigint", "integer, integer"];

/// Replaces a function in this database by a function that always succeeds. Renames the old one, because the server
/// calls its own functions by their number.
async fn pretend(database: &Database, function: &str, arguments: &str, answers: &str) {
    let sql = format!(
        "ALTER FUNCTION pg_catalog.{function}({arguments}) RENAME TO honest_{function};
         CREATE FUNCTION pg_catalog.{function}({arguments}) RETURNS {answers}"
    );
    Cluster::shared().run_sql(database.name(), sql).await;
}

async fn assert_refused(url: &str) {
    for outcome in [numbers(server(url)).connect().await, in_transactions(server(url)).connect().await] {
        let error = outcome.unwrap_err();
        assert_error(&error, ErrorKind::Unsupported, "no advisory locks that exclude");
        assert!(!error.is_retryable(), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_lock_functions_always_succeed_is_refused() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    for (function, answers) in FUNCTIONS {
        for arguments in ARGUMENTS {
            pretend(&database, function, arguments, answers).await;
        }
    }
    for arguments in ARGUMENTS {
        pretend(&database, "pg_advisory_unlock", arguments, "boolean LANGUAGE sql AS 'SELECT true'").await;
    }
    assert_refused(database.url()).await;
    // Also behind a pooler, where the client tries only transaction locks.
    let pooler = PgBouncer::transaction_mode(cluster);
    let error = in_transactions(server(&pooler.url(database.name()))).connect().await.unwrap_err();
    assert_error(&error, ErrorKind::Unsupported, "no advisory locks that exclude");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_function_that_only_pretends_is_enough_to_be_refused() {
    for (function, answers) in FUNCTIONS {
        for arguments in ARGUMENTS {
            let database = Cluster::shared().fresh_database().await;
            pretend(&database, function, arguments, answers).await;
            let outcome = numbers(server(database.url())).connect().await;
            let Err(error) = outcome else { panic!("{function}({arguments}) does nothing") };
            assert_error(&error, ErrorKind::Unsupported, "no advisory locks that exclude");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_lock_functions_is_refused_in_the_same_words() {
    let database = Cluster::shared().fresh_database().await;
    let sql = "ALTER FUNCTION pg_catalog.pg_try_advisory_lock(bigint) RENAME TO removed";
    Cluster::shared().run_sql(database.name(), sql).await;
    assert_refused(database.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn to_try_a_lock_takes_no_further_round_trip_and_leaves_none() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    session(database.url()).await;
    let proxy = Proxy::start(cluster.address()).await;
    let trips = async |pooler: &str| {
        let before = proxy.traffic().round_trips;
        let url = proxy.url(database.url());
        let pooler = match pooler {
            "detect" => leasehold_postgres::Pooler::Detect,
            _ => leasehold_postgres::Pooler::Known,
        };
        let lock = numbers(server(&url).install_schema(false).pooler(pooler)).connect().await.unwrap();
        let trips = proxy.traffic().round_trips - before;
        assert_eq!(cluster.advisory_locks(database.name()).await, []);
        drop(lock);
        trips
    };
    // Opening a second session takes two round trips, and comparing the two processes without a lock takes ten.
    // Without the comparison, one statement reads the process.
    let (detects, knows) = (trips("detect").await, trips("known").await);
    assert!(detects - knows < 2 + 10, "{detects} instead of {knows}");
}

/// The functions are replaced before the client has prepared the statements that release.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_believes_the_servers_answer_that_it_held_nothing() {
    let database = Cluster::shared().fresh_database().await;
    let lock = std::sync::Arc::new(session(database.url()).await);
    let holder = session(database.url()).await;
    let held = take(&holder, "3").await;
    let waiting = waiter(&lock, "3");
    until_queued(Cluster::shared(), database.name(), 1).await;
    held.release().await.unwrap();
    let waited = waiting.await.unwrap().unwrap();
    let free = take(&lock, "1").await;
    pretend(&database, "pg_advisory_unlock", "bigint", "boolean LANGUAGE sql AS 'SELECT false'").await;
    for guard in [free, waited] {
        let key = guard.key().clone();
        let error = guard.release().await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Lost, Some(&key)), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_lock_outlives_committed_and_failed_transactions_of_its_session() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    // All locks of the client are in one session.
    let lock = numbers(server(database.url())).connections(1).connect().await.unwrap();
    let guard = take(&lock, "1").await;
    let session = pid_of(cluster, database.name(), 1).await;
    guard.confirm().await.unwrap();
    // The next grant waits for the sequence of tokens, and is cancelled there.
    let mut other = database.connect().await;
    run(&mut other, "BEGIN; ALTER SEQUENCE leasehold.token INCREMENT BY 1").await;
    let failed = lock.key("2").wait(LONG).give_up_on_failure().acquire();
    let cancel = async {
        let waits = format!("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = {session}");
        let mut observer = database.connect().await;
        until_true(&mut observer, &waits).await;
        run(&mut other, &format!("SELECT pg_cancel_backend({session}); ROLLBACK")).await;
    };
    tokio::join!(failed, cancel).0.unwrap_err();
    guard.confirm().await.unwrap();
    assert_eq!(pid_of(cluster, database.name(), 1).await, session);
    assert_eq!(held(cluster, database.name()).await, [1]);
    guard.release().await.unwrap();
    assert_eq!(held(cluster, database.name()).await, [0i64; 0]);
}
