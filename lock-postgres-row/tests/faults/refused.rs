//! Requests that never reached the table, or whose statement was rolled back. Nothing is released for them, and each
//! error has its cause.

use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HolderId, Lock as _, LockAdmin as _, LockExt as _, LockKey};
use leasehold_engine::{Attempt, Backend as _, Engine, HoldRef, Request};
use leasehold_postgres::{Identifier, schema};
use leasehold_postgres_row::{PgConfig, RowBackend, RowConfig};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Executor as _, raw_sql};
use test_bounds::Bound;
use test_servers::{Cluster, ClusterOptions, Database, StopMode, fresh_database};
use test_stores::counting::Counting;

const REQUESTS: usize = 100;

fn key(name: impl fmt::Display) -> LockKey {
    LockKey::new(name.to_string()).unwrap()
}

fn requests() -> Vec<Request> {
    (0..3).map(|n| Request::new(key(n), HolderId::from_parts(0xfeed, n))).collect()
}

/// Tries many keys, each of which fails with `kind`. Returns how many holds are released before the client has
/// closed.
async fn releases_after(backend: &Arc<RowBackend>, kind: ErrorKind, tells_nothing_apart: bool) -> usize {
    let released = Arc::default();
    let counting =
        Counting { backend: Arc::clone(backend), released: Arc::clone(&released), tells_nothing_apart };
    let engine = Arc::new(Engine::start(counting).unwrap());
    let ask = |n| {
        let engine = Arc::clone(&engine);
        tokio::spawn(async move { engine.key(key(n)).try_acquire().await })
    };
    let asked: Vec<_> = (0..REQUESTS).map(ask).collect();
    for answer in asked {
        let error = answer.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.source().is_some(), "{error:?}");
    }
    engine.close().await.unwrap();
    // The store has noted no request with a lost reply.
    assert!(format!("{backend:?}").contains("in_doubt: 0"), "{backend:?}");
    released.load(Ordering::SeqCst)
}

/// Returns a client with one session whose role has only the privileges of a user of the store.
async fn client_of_a_role(database: &Database) -> (Arc<RowBackend>, String) {
    let role = format!("{}_app", database.name());
    let mut admin = database.connect().await;
    let leasehold = Identifier::new("leasehold").unwrap();
    schema::install(&mut admin, &leasehold).await.unwrap();
    let grants = schema::grants(&leasehold, &Identifier::new(role.clone()).unwrap(), schema::Stores::Row);
    let setup = format!("CREATE ROLE {role} LOGIN; {grants}");
    raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
    let options: PgConnectOptions = database.url().parse().unwrap();
    let postgres = PgConfig::from_options(options.username(&role)).connect_timeout(Duration::from_secs(60));
    (Arc::new(RowConfig::new(postgres).connections(1).backend().await.unwrap()), role)
}

/// Waits until the client notices that it cannot open a session.
async fn until_it_fails_with(backend: &RowBackend, kind: ErrorKind) {
    let end = Bound::new(Duration::from_secs(60));
    // Inspects, because that leaves nothing to release.
    while backend.inspect(&key("k")).await.map_err(|error| error.kind()) != Err(kind) {
        end.check(format_args!("it has not failed with {kind}"));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Ends the role's sessions and lets it open no others, as on a server without free connections.
async fn refuse_connections(database: &Database, role: &str) {
    let mut admin = database.connect().await;
    admin.execute(AssertSqlSafe(format!("ALTER ROLE {role} CONNECTION LIMIT 0"))).await.unwrap();
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1";
    sqlx::query(end).bind(role).execute(&mut admin).await.unwrap();
}

#[tokio::test]
async fn without_a_privilege_nothing_is_released() {
    let database = fresh_database().await;
    let (backend, role) = client_of_a_role(&database).await;
    let revoke = format!("REVOKE INSERT ON leasehold.mutex FROM {role}");
    database.connect().await.execute(AssertSqlSafe(revoke)).await.unwrap();
    assert_eq!(releases_after(&backend, ErrorKind::PermissionDenied, false).await, 0);
}

#[tokio::test]
async fn mutant_a_store_that_cannot_tell_releases_each_of_them() {
    let database = fresh_database().await;
    let (backend, role) = client_of_a_role(&database).await;
    let revoke = format!("REVOKE INSERT ON leasehold.mutex FROM {role}");
    database.connect().await.execute(AssertSqlSafe(revoke)).await.unwrap();
    assert!(releases_after(&backend, ErrorKind::PermissionDenied, true).await >= REQUESTS);
}

#[tokio::test]
async fn without_a_schema_nothing_is_released() {
    let database = fresh_database().await;
    let (backend, _) = client_of_a_role(&database).await;
    database.connect().await.execute("DROP SCHEMA leasehold CASCADE").await.unwrap();
    assert_eq!(releases_after(&backend, ErrorKind::SchemaMissing, false).await, 0);
}

#[tokio::test]
async fn without_a_server_nothing_is_released() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let (backend, _) = client_of_a_role(&database).await;
    cluster.stop(StopMode::Fast).await;
    until_it_fails_with(&backend, ErrorKind::Unavailable).await;
    assert_eq!(releases_after(&backend, ErrorKind::Unavailable, false).await, 0);
}

#[tokio::test]
async fn without_a_connection_nothing_is_released() {
    let database = fresh_database().await;
    let (backend, role) = client_of_a_role(&database).await;
    refuse_connections(&database, &role).await;
    // The server refuses with SQLSTATE 53300.
    until_it_fails_with(&backend, ErrorKind::Capacity).await;
    assert_eq!(releases_after(&backend, ErrorKind::Capacity, false).await, 0);
}

#[tokio::test]
async fn all_that_failed_together_tell_the_cause() {
    let database = fresh_database().await;
    let (backend, role) = client_of_a_role(&database).await;
    database.connect().await.execute("DROP SCHEMA leasehold CASCADE").await.unwrap();
    // Requests batched in one statement.
    let holds: Vec<HoldRef> = requests().iter().map(Request::hold).collect();
    let mut errors = refused(backend.acquire(requests()).await);
    errors.extend(backend.renew(holds.clone()).await.into_iter().map(Result::unwrap_err));
    errors.extend(backend.release(holds.clone()).await.into_iter().map(Result::unwrap_err));
    // Requests in the queue of a client without a session.
    refuse_connections(&database, &role).await;
    until_it_fails_with(&backend, ErrorKind::Capacity).await;
    let (asked, also_asked, renewed, freed) = tokio::join!(
        backend.acquire(requests()),
        backend.acquire(requests()),
        backend.renew(holds.clone()),
        backend.release(holds)
    );
    errors.extend(refused(asked.into_iter().chain(also_asked).collect()));
    errors.extend(renewed.into_iter().map(Result::unwrap_err));
    errors.extend(freed.into_iter().map(Result::unwrap_err));
    assert_eq!(errors.len(), 21);
    for error in errors {
        let source = error.source().unwrap_or_else(|| panic!("{error:?}"));
        assert!(source.is::<leasehold_postgres::DriverError>(), "{source:?}");
    }
}

fn refused(answers: Vec<Result<Attempt, Error>>) -> Vec<Error> {
    let error = |answer| match answer {
        Ok(Attempt::Refused(error)) => error,
        other => panic!("{other:?}"),
    };
    answers.into_iter().map(error).collect()
}
