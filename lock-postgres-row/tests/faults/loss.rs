//! Lost replies, stalled commits, holders that are cut off, and clients that close during calls.

use std::time::{Duration, SystemTime};

use crate::LONG;
use leasehold_api::{ErrorKind, HolderId, Lock as _, LockExt as _, LockKey, Validity};
use leasehold_engine::{Attempt, Backend as _, HoldRef, Request, token};
use leasehold_postgres::Liveness;
use leasehold_postgres_row::{PgConfig, RowBackend, RowConfig};
use sqlx::{Connection, Executor, PgConnection};
use test_bounds::{Bound, within};
use test_servers::{Cluster, ClusterOptions, Database, Proxy, fresh_database};

fn config_of(url: &str) -> RowConfig {
    RowConfig::new(PgConfig::from_url(url).unwrap().install_schema(true))
}

fn request(name: &str, serial: u64) -> Request {
    Request::new(LockKey::new(name).unwrap(), HolderId::from_parts(0xfeed, serial))
}

/// Returns a request that starts a window of an hour.
fn windowed(name: &str, serial: u64) -> Request {
    let mut request = request(name, serial);
    request.cooldown = Some(Duration::from_secs(3_600));
    request
}

async fn is_cooling(user: &mut PgConnection, name: &str) -> bool {
    let cooling = sqlx::query_scalar("SELECT cooldown_us IS NOT NULL FROM leasehold.mutex WHERE key = $1");
    cooling.bind(name).fetch_one(user).await.unwrap()
}

async fn granted(backend: &RowBackend, request: Request) -> HoldRef {
    let hold = request.hold();
    assert!(matches!(backend.acquire(vec![request]).await.remove(0).unwrap(), Attempt::Granted(_)));
    hold
}

async fn is_shut(user: &mut PgConnection, name: &str) -> bool {
    let shut =
        sqlx::query_scalar("SELECT coalesce(bool_or(acquired), false) FROM leasehold.mutex WHERE key = $1");
    shut.bind(name).fetch_one(user).await.unwrap()
}

async fn until_shut(user: &mut PgConnection, name: &str) {
    let end = Bound::new(Duration::from_secs(60));
    while !is_shut(user, name).await {
        end.check(format_args!("{name} was not acquired"));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Stalls all commits, because no standby of that name confirms them and no statement limit ends the wait.
async fn stall_commits(cluster: &Cluster) {
    set_standbys(cluster, "nobody").await;
    let mut user = PgConnection::connect(&cluster.url("postgres")).await.unwrap();
    // Waits until a commit stalls, because the setting applies only after the checkpointer has read it.
    loop {
        let mut probe = PgConnection::connect(&cluster.url("postgres")).await.unwrap();
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut probe).await.unwrap();
        tokio::select! {
            _ = probe.execute("SELECT pg_logical_emit_message(true, 'probe', '')") => {}
            () = until_commit_waits(&mut user, pid) => {
                cluster.run_sql("postgres", format!("SELECT pg_terminate_backend({pid})")).await;
                return;
            }
        }
    }
}

async fn until_commit_waits(user: &mut PgConnection, pid: i32) {
    loop {
        let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep')";
        if sqlx::query_scalar(waits).bind(pid).fetch_one(&mut *user).await.unwrap() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn set_standbys(cluster: &Cluster, names: &str) {
    cluster.run_sql("postgres", format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'")).await;
    cluster.run_sql("postgres", "SELECT pg_reload_conf()").await;
}

#[tokio::test]
async fn a_commit_that_is_stalled_leaves_no_ghost() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    config_of(database.url()).connect().await.unwrap();
    // Also with a login that acts as another role, which cannot see details of the login's sessions.
    let roles =
        "CREATE ROLE acts; CREATE ROLE logs_in LOGIN IN ROLE acts; ALTER ROLE logs_in SET role = 'acts';
        GRANT USAGE ON SCHEMA leasehold TO acts;
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO acts;
        GRANT ALL ON ALL SEQUENCES IN SCHEMA leasehold TO acts";
    cluster.run_sql(database.name(), roles).await;
    for login in ["postgres", "logs_in"] {
        stalled(&cluster, &database, login).await;
    }
}

async fn stalled(cluster: &Cluster, database: &Database, login: &str) {
    let options: sqlx::postgres::PgConnectOptions = database.url().parse().unwrap();
    let liveness = Liveness::new(Duration::from_millis(300), Duration::from_secs(1), Duration::from_secs(2));
    let postgres = PgConfig::from_options(options.username(login))
        .connect_timeout(Duration::from_secs(60))
        .liveness(liveness);
    let backend = RowConfig::new(postgres.statement_timeout(Duration::from_secs(2))).backend().await.unwrap();
    stall_commits(cluster).await;
    let request = windowed("k", 1);
    let mut hold = request.hold();
    hold.unused = true;
    let error = backend.acquire(vec![request]).await.remove(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    // The row is missing, or its release is a stalled commit, so the outcome is open.
    let error = backend.release(vec![hold]).await.remove(0).unwrap_err();
    assert!(error.kind().is_transient(), "{error}");
    // Longer than the limit of a statement.
    tokio::time::sleep(Duration::from_secs(4)).await;
    set_standbys(cluster, "").await;
    let bound = backend.capabilities().undo;
    let lock = config_of(database.url()).connect().await.unwrap();
    let guard = lock.key("k").wait(bound).acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// An abandoned session keeps its rows locked while its commit stalls, which blocks later releases. The client ends
/// that session.
#[tokio::test]
async fn a_release_whose_commit_stalls_is_ended() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let postgres = PgConfig::from_url(database.url()).unwrap().install_schema(true);
    let postgres = postgres.statement_timeout(Duration::from_secs(2));
    let backend = RowConfig::new(postgres).backend().await.unwrap();
    let hold = granted(&backend, request("k", 1)).await;
    let mut user = PgConnection::connect(database.url()).await.unwrap();
    stall_commits(&cluster).await;
    backend.release(vec![hold]).await.remove(0).unwrap_err();
    let begun = Bound::new(Duration::from_secs(60));
    while is_shut(&mut user, "k").await {
        begun.check("the session that released is still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A wait during stalled commits must not end with `Timeout`, because no other client held the key. If `close`
/// returns `Ok`, the row is released.
#[tokio::test]
async fn who_waits_while_commits_stall_is_told_of_no_holder() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let postgres = PgConfig::from_url(database.url()).unwrap().install_schema(true);
    let postgres = postgres.statement_timeout(Duration::from_secs(2));
    let lock = RowConfig::new(postgres).connect().await.unwrap();
    let mut user = PgConnection::connect(database.url()).await.unwrap();
    stall_commits(&cluster).await;
    let error = lock.key("k").wait(Duration::from_secs(7)).acquire().await.unwrap_err();
    assert!([ErrorKind::Unavailable, ErrorKind::OutcomeUnknown].contains(&error.kind()), "{error}");
    let closed = lock.close().await;
    set_standbys(&cluster, "").await;
    if closed.is_ok() {
        assert!(!is_shut(&mut user, "k").await, "closing said that nothing is left");
    }
}

/// Returns a client behind a proxy with prepared statements, and a direct connection.
async fn behind_a_proxy() -> (Database, Proxy, RowBackend, PgConnection) {
    let database = fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let backend = config_of(&proxy.url(database.url())).connections(1).backend().await.unwrap();
    let warm = granted(&backend, request("warm", 100)).await;
    backend.release(vec![warm]).await.remove(0).unwrap();
    let user = database.connect().await;
    (database, proxy, backend, user)
}

/// Closes the client, and lets replies through again during the close.
async fn close_before_the_answers(backend: &RowBackend, proxy: &Proxy) {
    tokio::join!(backend.close(), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.restore();
    });
}

#[tokio::test]
async fn closing_undoes_a_grant_that_is_under_way() {
    let (_database, proxy, backend, mut user) = behind_a_proxy().await;
    let backend = std::sync::Arc::new(backend);
    proxy.stall_replies();
    let asking = tokio::spawn({
        let backend = std::sync::Arc::clone(&backend);
        async move { backend.acquire(vec![request("k", 1)]).await }
    });
    until_shut(&mut user, "k").await;
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    close_before_the_answers(&backend, &proxy).await;
    assert!(!is_shut(&mut user, "k").await);
}

#[tokio::test]
async fn closing_takes_back_a_grant_that_is_heard_of_too_late_to_release_it() {
    let (_database, proxy, backend, mut user) = behind_a_proxy().await;
    proxy.stall_replies();
    let (answers, ..) = tokio::join!(backend.acquire(vec![windowed("k", 1)]), async {
        until_shut(&mut user, "k").await;
        close_before_the_answers(&backend, &proxy).await;
    });
    assert_eq!(answers.into_iter().next().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert!(!is_shut(&mut user, "k").await);
    assert!(!is_cooling(&mut user, "k").await, "nothing ran in that window");
}

#[tokio::test]
async fn closing_leaves_the_window_of_what_was_used() {
    let (_database, _proxy, backend, mut user) = behind_a_proxy().await;
    granted(&backend, windowed("k", 1)).await;
    backend.close().await;
    assert!(!is_shut(&mut user, "k").await);
    assert!(is_cooling(&mut user, "k").await, "a second run in one window");
}

#[tokio::test]
async fn a_holder_that_was_cut_off_leaves_its_row_shut() {
    let database = fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let behind = config_of(&proxy.url(database.url())).confirm(Duration::from_millis(200));
    let (cut_off, direct) =
        (behind.connect().await.unwrap(), config_of(database.url()).connect().await.unwrap());
    let guard = cut_off.key("k").acquire().await.unwrap();
    let (key, holder) = (guard.key().clone(), guard.holder());
    let mut user = database.connect().await;
    proxy.stall();
    within(LONG, "not lost", guard.lost()).await;
    proxy.restore();
    // The connections work again, so the client has sent every call that it could send for the hold.
    cut_off.key("other").wait(LONG).acquire().await.unwrap().release().await.unwrap();
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(is_shut(&mut user, "k").await);
    assert!(direct.key("k").try_acquire().await.unwrap().is_none());
    cut_off.close().await.unwrap();
    assert!(is_shut(&mut user, "k").await, "also when its client goes in good order");
    assert!(direct.admin().unwrap().force_release(&key, holder).await.unwrap());
    let guard = direct.key("k").try_acquire().await.unwrap().unwrap();
    assert_eq!(guard.validity(), Validity::Valid);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_release_frees_also_what_counts_as_lost() {
    let database = fresh_database().await;
    let confirm = Duration::from_millis(50);
    let backend = config_of(database.url()).confirm(confirm).backend().await.unwrap();
    let hold = granted(&backend, request("k", 1)).await;
    assert!(format!("{backend:?}").contains("held: 1"), "{backend:?}");
    // Without confirmations, the hold counts as lost.
    tokio::time::sleep(backend.capabilities().loss_detection).await;
    assert!(format!("{backend:?}").contains("held: 0"), "{backend:?}");
    let mut user = database.connect().await;
    assert!(is_shut(&mut user, "k").await);
    assert!(backend.release(vec![hold]).await.remove(0).unwrap().was_held);
    assert!(!is_shut(&mut user, "k").await);
}

/// Asserts that grants get tokens if they wait for a transaction that deletes the rows of `names`.
async fn has_tokens_beside_a_purge(names: &[&str]) {
    let database = fresh_database().await;
    let backend = config_of(database.url()).backend().await.unwrap();
    for (name, serial) in names.iter().zip(100..) {
        let hold = granted(&backend, request(name, serial)).await;
        backend.release(vec![hold]).await.remove(0).unwrap();
    }
    let (mut user, mut watcher) = (database.connect().await, database.connect().await);
    let waits = "SELECT count(*) > 0 FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let mut tx = user.begin().await.unwrap();
    tx.execute("DELETE FROM leasehold.mutex").await.unwrap();
    let asked = names.iter().zip(1..).map(|(name, serial)| request(name, serial)).collect();
    let (answers, ()) = tokio::join!(backend.acquire(asked), async {
        let end = Bound::new(Duration::from_secs(60));
        while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut watcher).await.unwrap() {
            end.check("no grant waits for the row");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tx.commit().await.unwrap();
    });
    for answer in answers {
        let Attempt::Granted(granted) = answer.unwrap() else { panic!("it is free") };
        assert!(granted.token > token::from_store_number(0));
    }
}

#[tokio::test]
async fn a_grant_beside_a_purge_has_a_token_alone() {
    has_tokens_beside_a_purge(&["k"]).await;
}

#[tokio::test]
async fn a_grant_beside_a_purge_has_a_token_in_a_batch() {
    has_tokens_beside_a_purge(&["a", "b", "c"]).await;
}

#[tokio::test]
async fn a_locked_table_is_an_error_and_not_a_held_key() {
    let database = fresh_database().await;
    let backend = config_of(database.url()).backend().await.unwrap();
    assert!(backend.to_string().starts_with("mutex rows of postgres "), "{backend}");
    let mut user = database.connect().await;
    let mut tx = user.begin().await.unwrap();
    tx.execute("LOCK TABLE leasehold.mutex IN SHARE MODE").await.unwrap();
    let Ok(Attempt::Refused(error)) = backend.acquire(vec![request("k", 1)]).await.remove(0) else {
        panic!("the statement was rolled back");
    };
    assert_eq!((error.kind(), error.key()), (ErrorKind::Unavailable, Some(&request("k", 1).key)), "{error}");
    tx.commit().await.unwrap();
    granted(&backend, request("k", 1)).await;
}

/// Returns a client with one session that has already held and released `name`.
async fn with_an_open_row(name: &str) -> (Database, RowBackend) {
    let database = fresh_database().await;
    let backend = config_of(database.url()).connections(1).backend().await.unwrap();
    let hold = granted(&backend, request(name, 1)).await;
    assert!(backend.release(vec![hold]).await.remove(0).unwrap().was_held);
    (database, backend)
}

/// Waits until a session waits for a lock.
async fn until_blocked(watcher: &mut PgConnection) {
    let waits = "SELECT count(*) > 0 FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let end = Bound::new(Duration::from_secs(60));
    while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut *watcher).await.unwrap() {
        end.check("nobody waits");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_cooldown_begins_when_the_row_is_had_and_not_when_it_is_waited_for() {
    let (database, backend) = with_an_open_row("k").await;
    let (mut user, mut watcher) = (database.connect().await, database.connect().await);
    let mut tx = user.begin().await.unwrap();
    tx.execute("SELECT FROM leasehold.mutex WHERE key = 'k' FOR UPDATE").await.unwrap();
    let mut asked = request("k", 2);
    asked.cooldown = Some(Duration::from_secs(60));
    let asking = backend.acquire(vec![asked]);
    let let_go = async {
        until_blocked(&mut watcher).await;
        let now = SystemTime::now();
        tx.commit().await.unwrap();
        now.duration_since(SystemTime::UNIX_EPOCH).unwrap()
    };
    let (answer, let_go) = tokio::join!(asking, let_go);
    assert!(matches!(answer.into_iter().next().unwrap().unwrap(), Attempt::Granted(_)));
    let since =
        "SELECT (extract(epoch FROM acquired_at) * 1000000)::bigint FROM leasehold.mutex WHERE key = 'k'";
    let since: i64 = sqlx::query_scalar(since).fetch_one(&mut watcher).await.unwrap();
    assert!(u128::try_from(since).unwrap() >= let_go.as_micros(), "{since} is before {let_go:?}");
}

#[tokio::test]
async fn a_token_that_was_drawn_before_the_row_changed_is_drawn_anew() {
    let (database, backend) = with_an_open_row("k").await;
    let (mut user, mut watcher) = (database.connect().await, database.connect().await);
    let mut tx = user.begin().await.unwrap();
    tx.execute("UPDATE leasehold.mutex SET label = 'seen' WHERE key = 'k'").await.unwrap();
    let asking = backend.acquire(vec![request("k", 2)]);
    let drawn = async {
        until_blocked(&mut watcher).await;
        // Another client has held and released the row since.
        let drawn = sqlx::query_scalar(
            "UPDATE leasehold.mutex SET token = nextval('leasehold.token') WHERE key = 'k' RETURNING token",
        );
        let drawn: i64 = drawn.fetch_one(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        drawn
    };
    let (answer, drawn) = tokio::join!(asking, drawn);
    assert!(matches!(answer.into_iter().next().unwrap().unwrap(), Attempt::Granted(_)));
    let token = sqlx::query_scalar("SELECT token FROM leasehold.mutex WHERE key = 'k'");
    let token: i64 = token.fetch_one(&mut watcher).await.unwrap();
    assert!(token > drawn, "{token} after {drawn}");
}
