//! Requests that certainly hold nothing at the server are refused and not released. Requests with an unknown outcome
//! are released.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::*;
use futures_util::future::join_all;
use leasehold_api::{Error, ErrorKind, HolderId, Lock as _, LockExt as _};
use leasehold_engine::{Attempt, Backend, CancellationToken, Engine, Request};
use leasehold_postgres::{Identifier, PgConfig, RawBigint, schema};
use leasehold_postgres_advisory::{AdvisoryBackend, XactConfig};
use sqlx::{Connection as _, PgConnection};
use test_servers::{Cluster, ClusterOptions, Proxy, StopMode};
use test_stores::counting::Counting;

/// An engine, and the number of holds that it has released.
type Counted = (Engine, Arc<AtomicUsize>);

fn counted(backend: AdvisoryBackend) -> Counted {
    let released = Arc::new(AtomicUsize::new(0));
    let counting =
        Counting { backend: Arc::new(backend), released: Arc::clone(&released), tells_nothing_apart: false };
    (Engine::start(counting).unwrap(), released)
}

/// Returns a counted engine for each scope, with numbers as keys.
async fn both_counted(config: PgConfig) -> [Counted; 2] {
    let transaction = XactConfig::new(config.clone()).hasher(Arc::new(RawBigint)).sessions(200);
    [numbers(config).backend().await.unwrap(), transaction.backend().await.unwrap()].map(counted)
}

/// Makes a hundred attempts, half of them waits. Asserts that each fails with `kind` and that no hold is released.
async fn a_hundred_are_refused((lock, released): &Counted, kind: ErrorKind) {
    until("the engine is idle", async || lock.active_keys() == 0).await;
    let before = released.load(Ordering::SeqCst);
    let attempts = (0..100).map(async |n: i32| {
        let key = n.to_string();
        match n % 2 {
            0 => lock.key(key).try_acquire().await.map(drop),
            _ => lock.key(key).wait(LONG).give_up_on_failure().acquire().await.map(drop),
        }
    });
    for outcome in join_all(attempts).await {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), kind, "{lock}: {error}");
    }
    // A key with an attempt to undo still counts as active.
    until("the engine is idle", async || lock.active_keys() == 0).await;
    assert_eq!(released.load(Ordering::SeqCst) - before, 0, "{lock}: what was refused is released");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_released_for_a_role_without_permission() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    session(database.url()).await.close().await.unwrap();
    let role = Identifier::new(format!("mute_{}", &database.name()[5..25])).unwrap();
    let grants = schema::grants(&Identifier::new("leasehold").unwrap(), &role, schema::Stores::Advisory);
    cluster.run_sql(database.name(), format!("CREATE ROLE {role} LOGIN; {grants}")).await;
    let url = database.url().replace("//postgres@", &format!("//{role}@"));
    let clients = both_counted(server(&url).install_schema(false)).await;
    // Opens the sessions and prepares their statements.
    for (lock, _) in &clients {
        take(lock, "1").await.release().await.unwrap();
    }
    cluster.run_sql(database.name(), format!("REVOKE ALL ON SEQUENCE leasehold.token FROM {role}")).await;
    for client in &clients {
        a_hundred_are_refused(client, ErrorKind::PermissionDenied).await;
        assert_eq!(held(cluster, database.name()).await, [0; 0], "what was refused is held");
    }
    cluster.run_sql(database.name(), format!("GRANT ALL ON SEQUENCE leasehold.token TO {role}")).await;
    for (lock, _) in &clients {
        take(lock, "1").await.release().await.unwrap();
    }
}

// The statement of a wait fails after the lock is granted. The session releases the lock and serves the next wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_refused_in_the_queue_leaves_nothing() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let holder = session(database.url()).await;
    let role = Identifier::new(format!("mute_{}", &database.name()[5..25])).unwrap();
    let grants = schema::grants(&Identifier::new("leasehold").unwrap(), &role, schema::Stores::Advisory);
    cluster.run_sql(database.name(), format!("CREATE ROLE {role} LOGIN; {grants}")).await;
    let url = database.url().replace("//postgres@", &format!("//{role}@"));
    for (lock, released) in both_counted(server(&url).install_schema(false)).await {
        let lock = Arc::new(lock);
        let kept = take(&holder, "7").await;
        let waiting = waiter(&lock, "7");
        until_queued(cluster, database.name(), 1).await;
        let queued = cluster.advisory_locks(database.name()).await;
        let pid = queued.iter().find(|lock| !lock.granted).unwrap().pid;
        cluster.run_sql(database.name(), format!("REVOKE ALL ON SEQUENCE leasehold.token FROM {role}")).await;
        kept.release().await.unwrap();
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{lock}: {error}");
        until("the engine is idle", async || lock.active_keys() == 0).await;
        assert_eq!(released.load(Ordering::SeqCst), 0, "{lock}: what was refused is released");
        assert_eq!(held(cluster, database.name()).await, [0; 0], "{lock}: what was refused is held");
        cluster.run_sql(database.name(), format!("GRANT ALL ON SEQUENCE leasehold.token TO {role}")).await;
        // The next wait uses the same session.
        let kept = take(&holder, "7").await;
        let waiting = waiter(&lock, "7");
        until_queued(cluster, database.name(), 1).await;
        let queued = cluster.advisory_locks(database.name()).await;
        assert_eq!(queued.iter().find(|lock| !lock.granted).unwrap().pid, pid, "{lock}");
        kept.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_released_while_the_server_is_down() {
    let cluster = Cluster::start(ClusterOptions::new());
    let clients = both_counted(server(&cluster.url("postgres"))).await;
    for (lock, _) in &clients {
        take(lock, "1").await.release().await.unwrap();
    }
    cluster.stop(StopMode::Fast).await;
    for client in &clients {
        // Before the client notices the end of its session, it can send a request there without a reply.
        until("no session can be opened", async || {
            let error = client.0.key("1").try_acquire().await.unwrap_err();
            error.message().contains("connect")
        })
        .await;
        a_hundred_are_refused(client, ErrorKind::Unavailable).await;
    }
    cluster.start_again().await;
    for (lock, _) in &clients {
        until("usable again", async || lock.key("1000").try_acquire().await.is_ok()).await;
        // The client keeps no refused key reserved.
        for n in 0..100 {
            take(lock, &n.to_string()).await.release().await.unwrap();
        }
    }
}

/// Returns the kind of the backend's refusal.
fn refusal(answer: Result<Attempt, Error>) -> ErrorKind {
    match answer {
        Ok(Attempt::Refused(error)) => error.kind(),
        other => panic!("{other:?} is no refusal"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_turned_down_before_the_server_is_asked_is_refused() {
    let database = Cluster::shared().fresh_database().await;
    let config = server(database.url());
    let request = |name: &str, serial| Request::new(key(name), HolderId::from_parts(7, serial));
    let session = numbers(config.clone()).backend().await.unwrap();
    let transaction =
        XactConfig::new(config).hasher(Arc::new(RawBigint)).sessions(1).backend().await.unwrap();
    for backend in [&session, &transaction] {
        let both = async |request: Request| {
            let tried = backend.acquire(vec![request.clone()]).await.pop().unwrap();
            let waited = backend.wait(request, CancellationToken::new()).await;
            [refusal(tried), refusal(waited)]
        };
        assert_eq!(both(request("no number", 1)).await, [ErrorKind::InvalidKey; 2], "{backend}");
        let granted = backend.acquire(vec![request("7", 2)]).await.pop().unwrap();
        assert!(matches!(granted, Ok(Attempt::Granted(_))), "{granted:?}");
        assert!(backend.release(vec![request("7", 2).hold()]).await.pop().unwrap().unwrap().was_held);
        backend.close().await;
        assert_eq!(both(request("7", 3)).await, [ErrorKind::Closed; 2], "{backend}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_without_a_session_left_is_refused() {
    let database = Cluster::shared().fresh_database().await;
    let config = XactConfig::new(server(database.url())).hasher(Arc::new(RawBigint)).sessions(1);
    let backend = config.backend().await.unwrap();
    let request = |name: &str, serial| Request::new(key(name), HolderId::from_parts(7, serial));
    let granted = backend.acquire(vec![request("7", 1)]).await.pop().unwrap();
    assert!(matches!(granted, Ok(Attempt::Granted(_))), "{granted:?}");
    let refused = backend.acquire(vec![request("8", 2)]).await.pop().unwrap();
    assert_eq!(refusal(refused), ErrorKind::Capacity);
    assert!(backend.release(vec![request("7", 1).hold()]).await.pop().unwrap().unwrap().was_held);
    let granted = backend.acquire(vec![request("8", 3)]).await.pop().unwrap();
    assert!(matches!(granted, Ok(Attempt::Granted(_))), "{granted:?}");
    backend.close().await;
}

// The opposite case: a request that was sent without a reply might hold the key.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_sent_and_not_answered_is_released() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let clients = both_counted(seldom(&proxy.url(database.url()))).await;
    let mut observer = PgConnection::connect(database.url()).await.unwrap();
    for (lock, released) in clients {
        run(&mut observer, "DELETE FROM leasehold.advisory_name").await;
        let first = take(&lock, "7").await;
        // Waits for the name, because the session that writes it then sends nothing more.
        until_true(&mut observer, "EXISTS (SELECT FROM leasehold.advisory_name)").await;
        first.release().await.unwrap();
        let before = released.load(Ordering::SeqCst);
        // Drops the reply to the attempt, and not a notification.
        proxy.drop_next_reply_with("SELECT 1");
        let error = lock.key("7").try_acquire().await.map(drop).unwrap_err();
        assert!(error.is_retryable(), "{error}");
        until("it is released", async || released.load(Ordering::SeqCst) > before).await;
    }
}
