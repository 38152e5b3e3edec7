//! The lock and the handler in one transaction, on a real server.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Gate, LONG, begin, send, text, until};
use crate::ledger::{number, run, until_number};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use http::{Request, StatusCode};
use leasehold_api::{ErrorKind, Lock, key};
use leasehold_postgres::{Identifier, PgConfig};
use leasehold_postgres_advisory::{AdvisoryConfig, XactLocks};
use leasehold_postgres_ttl::{LeaseFence, TtlConfig};
use leasehold_tower::{Held, LockLayer, OnLost, SharedTx, Template, TxLayer};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;
use test_servers::{Database, fresh_database};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tower::{Layer as _, ServiceExt as _};

const COUNT: &str = "SELECT count(*) FROM work";
const AT_SERVER: &str = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE locktype = 'advisory' AND NOT granted AND d.datname = current_database()";

struct Setup {
    database: Database,
    pool: PgPool,
    layer: TxLayer<Template>,
}

fn locks() -> XactLocks {
    XactLocks::new(Identifier::new("leasehold").unwrap())
}

async fn setup(connections: u32) -> Setup {
    let database = fresh_database().await;
    run(&mut database.connect().await, "CREATE TABLE work (id bigserial, text text)").await;
    let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(LONG);
    let pool = pool.connect(database.url()).await.unwrap();
    let template = Template::parse("w:{query.k}").unwrap();
    let layer = TxLayer::new(locks(), pool.clone(), template).unwrap().wait(LONG);
    Setup { database, pool, layer }
}

impl Setup {
    fn app<H, A>(&self, handler: H) -> Router
    where
        H: axum::handler::Handler<A, PgPool>,
        A: 'static,
    {
        Router::new().route("/", post(handler).route_layer(self.layer.clone())).with_state(self.pool.clone())
    }

    async fn count(&self) -> i64 {
        number(&self.database, COUNT).await
    }

    /// Returns whether the key is free for other processes too.
    async fn is_free(&self, name: &str) -> bool {
        let mut connection = self.database.connect().await;
        run(&mut connection, "BEGIN").await;
        locks().try_lock_in(&mut connection, &key!["w", name].unwrap()).await.unwrap().is_some()
    }
}

fn request(name: &str) -> Request<Body> {
    Request::post(format!("/?k={name}")).body(Body::empty()).unwrap()
}

async fn write(tx: &mut SharedTx) {
    sqlx::query("INSERT INTO work (text) VALUES ('x')").execute(&mut **tx).await.unwrap();
}

#[tokio::test]
async fn the_handlers_status_decides_between_commit_and_rollback() {
    let it = setup(4).await;
    for (status, committed) in
        [(200, true), (204, true), (303, true), (400, false), (402, false), (409, false), (500, false)]
    {
        let before = it.count().await;
        let app = it.app(async move |mut tx: SharedTx| {
            assert_eq!(tx.key().as_str(), "w:a");
            write(&mut tx).await;
            (StatusCode::from_u16(status).unwrap(), "the handler's")
        });
        let response = send(&app, request("a")).await;
        assert_eq!(response.status(), status);
        assert_eq!(text(response).await, "the handler's");
        assert_eq!(it.count().await - before, i64::from(committed), "{status}");
        assert!(it.is_free("a").await);
    }
    assert_eq!(it.layer.stats().in_flight, 0);
}

#[tokio::test]
async fn a_commit_that_fails_is_the_one_answer_that_is_replaced() {
    let it = setup(4).await;
    let sql = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE 'refused'; END $$;
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON work DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION refuse()";
    run(&mut it.database.connect().await, sql).await;
    let app = it.app(async |mut tx: SharedTx| write(&mut tx).await);
    let response = send(&app, request("a")).await;
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("commit-failed"));

    // Also if the handler ignores an error, after which the server would turn a commit into a rollback.
    let app = it.app(async |mut tx: SharedTx| {
        sqlx::query("SELECT 1 / 0").execute(&mut *tx).await.unwrap_err();
        "fine"
    });
    let response = send(&app, request("a")).await;
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("commit-failed"));
    assert_eq!(it.count().await, 0);
    assert!(it.is_free("a").await);
    assert_eq!(it.layer.stats().release_failed, 2);
}

#[tokio::test]
async fn a_commit_whose_session_ends_is_told_as_unknown() {
    let it = setup(4).await;
    let mut gate = it.database.connect().await;
    let sql = "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711, 1); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON work DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION gate(); SELECT pg_advisory_lock(4711, 1)";
    run(&mut gate, sql).await;
    let app = it.app(async |mut tx: SharedTx| write(&mut tx).await);
    let answer = tokio::spawn(async move { send(&app, request("a")).await });
    let committing = "FROM pg_locks JOIN pg_database d ON d.oid = database
        WHERE classid = 4711 AND NOT granted AND d.datname = current_database()";
    until_number(&it.database, &format!("SELECT count(*) {committing}"), 1).await;
    run(&mut gate, &format!("SELECT pg_terminate_backend(pid) {committing}")).await;
    let response = answer.await.unwrap();
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("commit-unknown"));
    assert_eq!(it.layer.stats().in_flight, 0);
}

#[tokio::test]
async fn a_handler_that_leaves_its_transaction_to_a_task_is_rolled_back() {
    let it = setup(4).await;
    let (sent, mut kept) = tokio::sync::mpsc::unbounded_channel();
    let app = it.app(async move |mut tx: SharedTx| {
        write(&mut tx).await;
        sent.send(tx).unwrap();
    });
    let response = send(&app, request("a")).await;
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("commit-failed"));
    assert!(!it.is_free("a").await, "the transaction is still open");
    drop(kept.recv().await.unwrap());
    let app = it.app(async |_: SharedTx| ());
    assert_eq!(send(&app, request("a")).await.status(), 200);
    assert_eq!(it.count().await, 0);
}

/// The limit drops a handler that never resolves, together with its statement.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_awaits_indefinitely_loses_its_transaction() {
    let mut it = setup(4).await;
    it.layer = it.layer.clone().max_hold(Duration::from_millis(300));
    for statement in ["SELECT 1", "SELECT pg_sleep(3600)"] {
        let app = it.app(async move |mut tx: SharedTx| {
            write(&mut tx).await;
            sqlx::raw_sql(statement).execute(&mut *tx).await.unwrap();
            std::future::pending::<()>().await;
        });
        let response = send(&app, request("a")).await;
        assert_eq!(response.status(), 500);
        assert!(text(response).await.contains("held-too-long"));
        let app = it.app(async |_: SharedTx| ());
        assert_eq!(send(&app, request("a")).await.status(), 200);
    }
    assert_eq!(it.count().await, 0);
    it.layer.idle().await;
}

/// A handler that blocks its thread cannot be dropped, but other requests of its key proceed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_blocks_its_thread_loses_its_transaction() {
    let mut it = setup(6).await;
    it.layer = it.layer.clone().max_hold(Duration::from_millis(300));
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Arc::new(std::sync::Mutex::new(Some(blocked)));
    let (told, begun) = tokio::sync::oneshot::channel();
    let told = Arc::new(std::sync::Mutex::new(Some(told)));
    let app = it.app(async move |mut tx: SharedTx| {
        write(&mut tx).await;
        told.lock().unwrap().take().unwrap().send(()).unwrap();
        let blocked = blocked.lock().unwrap().take().unwrap();
        let _ = blocked.recv();
    });
    let first = tokio::spawn(async move { send(&app, request("a")).await });
    within(LONG, "the handler begins", begun).await.unwrap();
    let app = it.app(async |_: SharedTx| ());
    assert_eq!(within(LONG, "the second", send(&app, request("a"))).await.status(), 200);
    release.send(()).unwrap();
    let response = within(LONG, "the first", first).await.unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(it.count().await, 0);
}

#[tokio::test]
async fn without_a_layer_and_twice_there_is_no_transaction() {
    let it = setup(4).await;
    let app = Router::new().route("/", post(async |_: SharedTx| ()));
    assert_eq!(send(&app, request("a")).await.status(), 500);
    let app = it.app(async |_: SharedTx, _: SharedTx| ());
    assert_eq!(send(&app, request("a")).await.status(), 500);
    assert!(it.is_free("a").await);
}

#[tokio::test]
async fn a_panic_rolls_back_and_releases_the_lock() {
    let it = setup(4).await;
    let app = it.app(async |mut tx: SharedTx| -> StatusCode {
        write(&mut tx).await;
        std::panic::resume_unwind(Box::new("a handler of a test panics"))
    });
    assert!(tokio::spawn(async move { send(&app, request("a")).await }).await.unwrap_err().is_panic());
    it.layer.idle().await;
    let app = it.app(async |_: SharedTx| ());
    assert_eq!(send(&app, request("a")).await.status(), 200);
    assert_eq!(it.count().await, 0);
}

#[tokio::test]
async fn the_transaction_of_a_client_that_left_is_committed() {
    let it = setup(4).await;
    let gate = Gate::new();
    let stopping = gate.clone();
    let app = it.app(async move |mut tx: SharedTx| {
        write(&mut tx).await;
        stopping.service::<()>().oneshot(Request::new(())).await.unwrap();
    });
    let mut answer = Box::pin(app.oneshot(request("a")));
    let mut reached = Box::pin(gate.reached());
    tokio::select! {
        _ = &mut answer => panic!("it is to wait"),
        () = &mut reached => {}
    }
    drop(answer);
    assert_eq!((it.count().await, it.layer.stats().in_flight), (0, 1));
    gate.open();
    it.layer.idle().await;
    assert_eq!(it.count().await, 1);
    assert!(it.is_free("a").await);
}

/// Handlers that use the pool beside their transaction would starve if transactions took all connections.
#[tokio::test]
async fn a_small_pool_does_not_starve_handlers_that_use_it_too() {
    let it = setup(5).await;
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let app = it.app(async move |State(pool): State<PgPool>, mut tx: SharedTx| {
        write(&mut tx).await;
        opened.acquire().await.unwrap().forget();
        sqlx::query("SELECT 1").execute(&pool).await.unwrap();
    });
    for names in [&["a"][..], &["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]] {
        let mut at_once = JoinSet::new();
        for n in 0..12 {
            let (app, name) = (app.clone(), names[n % names.len()]);
            at_once.spawn(async move { send(&app, request(name)).await.status() });
        }
        // The maximum number of handlers are in their transactions, and the pool has a connection left.
        let most = names.len().min(4);
        until("all others wait", || {
            let stats = it.layer.stats();
            (stats.in_flight, stats.waiting) == (most, 12 - most)
        })
        .await;
        it.count().await;
        drop(within(LONG, "the pool is used up", it.pool.acquire()).await.unwrap());
        gate.add_permits(12);
        assert!(at_once.join_all().await.iter().all(|&status| status == StatusCode::OK), "{names:?}");
    }
    assert_eq!(it.count().await, 24);
}

#[tokio::test]
async fn those_who_wait_leave_the_pool_to_others() {
    let it = setup(6).await;
    let mut other = it.database.connect().await;
    run(&mut other, "BEGIN").await;
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        locks().lock_in(&mut other, &key!["w", name].unwrap(), LONG).await.unwrap();
    }
    let app = it.app(async |_: SharedTx| ());
    let mut waiting = JoinSet::new();
    for n in 0..40 {
        let (app, name) = (app.clone(), names[n % names.len()]);
        waiting.spawn(async move { send(&app, request(name)).await.status() });
    }
    until("all wait", || it.layer.stats().waiting == 40).await;
    // Two requests can wait at the server.
    until_number(&it.database, AT_SERVER, 2).await;
    let free: Vec<_> = futures_util::future::join_all((0..4).map(|_| it.pool.acquire())).await;
    assert!(free.iter().all(Result::is_ok), "the rest of the pool is there for others");
    drop(free);
    run(&mut other, "COMMIT").await;
    assert!(waiting.join_all().await.iter().all(|&status| status == StatusCode::OK));
}

/// Keys held for long must not block free keys, however small the pool is.
#[tokio::test]
async fn keys_that_others_hold_do_not_keep_the_free_ones_waiting() {
    let it = setup(4).await;
    let mut other = it.database.connect().await;
    run(&mut other, "BEGIN").await;
    // More held keys than the layer has transactions.
    let held = ["a", "b", "c", "d", "e"];
    for name in held {
        locks().lock_in(&mut other, &key!["w", name].unwrap(), LONG).await.unwrap();
    }
    let app = it.app(async |_: SharedTx| ());
    let mut waiting = JoinSet::new();
    for name in held {
        let app = app.clone();
        waiting.spawn(async move { send(&app, request(name)).await.status() });
    }
    until("all wait", || it.layer.stats().waiting == held.len()).await;
    until_number(&it.database, AT_SERVER, 1).await;
    let free = within(LONG / 2, "it waits for keys of others", send(&app, request("free"))).await;
    assert_eq!(free.status(), StatusCode::OK);
    assert_eq!(it.layer.stats().waiting, held.len());
    run(&mut other, "COMMIT").await;
    assert!(waiting.join_all().await.iter().all(|&status| status == StatusCode::OK));
}

#[tokio::test]
async fn a_refused_request_is_answered_with_a_problem() {
    let it = setup(4).await;
    let gate = Gate::new();
    let stopping = gate.clone();
    let handler = async move |_: SharedTx| {
        stopping.service::<()>().oneshot(Request::new(())).await.unwrap();
    };
    let kind = async |app: &Router, name| {
        let response = send(app, request(name)).await;
        let (status, retry) = (response.status().as_u16(), response.headers().contains_key("retry-after"));
        let problem: serde_json::Value = serde_json::from_str(&text(response).await).unwrap();
        (status, problem["type"].as_str().unwrap().rsplit(':').next().unwrap().to_owned(), retry)
    };
    let mut other = it.database.connect().await;
    run(&mut other, "BEGIN").await;
    locks().lock_in(&mut other, &key!["w", "a"].unwrap(), LONG).await.unwrap();
    let layer = it.layer.clone().wait(Duration::ZERO);
    let of = |layer: &TxLayer<Template>| {
        Router::new().route("/", post(handler.clone()).route_layer(layer.clone()))
    };
    assert_eq!(kind(&of(&layer), "a").await, (503, "contended".into(), true));
    assert_eq!(
        kind(&of(&layer.clone().contended(StatusCode::LOCKED)), "a").await,
        (423, "contended".into(), true)
    );
    assert_eq!(kind(&of(&layer), "").await, (400, "no-key".into(), false));
    run(&mut other, "COMMIT").await;

    // In this process.
    let (running, app) = (of(&it.layer.clone().max_waiters(1)), of(&layer));
    let mut first = Box::pin(running.clone().oneshot(request("b")));
    let mut reached = Box::pin(gate.reached());
    tokio::select! {
        _ = &mut first => panic!("it is to wait"),
        () = &mut reached => {}
    }
    assert_eq!(kind(&app, "b").await, (503, "contended".into(), true));
    let mut second = Box::pin(running.clone().oneshot(request("b")));
    begin(&mut second).await;
    assert_eq!(kind(&running, "b").await, (503, "too-many-waiters".into(), true));
    gate.open();
    gate.open();
    assert_eq!(first.await.unwrap().status(), 200);
    assert_eq!(second.await.unwrap().status(), 200);

    it.pool.close().await;
    assert_eq!(kind(&app, "c").await, (503, "lock-unavailable".into(), true));
    let stats = layer.stats();
    assert_eq!(
        (stats.granted, stats.contended, stats.no_key, stats.unavailable, stats.too_many),
        (2, 3, 1, 1, 1)
    );
}

#[tokio::test]
async fn a_handler_commits_twice_under_one_lock() {
    let it = setup(8).await;
    let config = PgConfig::from_url(it.database.url()).unwrap().install_schema(true);
    let lock: Arc<dyn Lock> = Arc::new(AdvisoryConfig::new(config).connect().await.unwrap());
    let layer = LockLayer::new(lock, Template::parse("k").unwrap()).wait(LONG);
    let handler = async |State(pool): State<PgPool>, body: String| {
        for _ in 0..2 {
            // Each insert is a separate transaction, visible at once.
            sqlx::query("INSERT INTO work (text) VALUES ($1)").bind(&body).execute(&pool).await.unwrap();
        }
    };
    let app = Router::new().route("/", post(handler)).with_state(it.pool.clone());
    let service = layer.layer(app);
    let mut at_once = JoinSet::new();
    for n in 0..20 {
        let (service, body) = (service.clone(), Body::from(n.to_string()));
        at_once.spawn(async move { send(&service, Request::post("/").body(body).unwrap()).await.status() });
    }
    assert!(at_once.join_all().await.iter().all(|&status| status == StatusCode::OK));
    let sql = "SELECT count(*) FROM work a JOIN work b ON b.id = a.id + 1 AND b.text = a.text";
    assert_eq!(number(&it.database, sql).await, 20, "nobody came in between the two");
}

#[tokio::test]
async fn a_handler_fences_its_transaction_by_its_lease() {
    let it = setup(4).await;
    let config = PgConfig::from_url(it.database.url()).unwrap().install_schema(true);
    let lock: Arc<dyn Lock> = Arc::new(TtlConfig::new(config).connect().await.unwrap());
    let by = Arc::clone(&lock);
    // The handler continues after the loss, so only the fence stops it.
    let layer = LockLayer::new(Arc::clone(&lock), Template::parse("k").unwrap()).on_lost(OnLost::Tell);
    let handler = async move |State(pool): State<PgPool>, held: Held, body: String| {
        let mut tx = pool.begin().await.unwrap();
        sqlx::query("INSERT INTO work (text) VALUES ('x')").execute(&mut *tx).await.unwrap();
        if body == "lost" {
            assert!(by.admin().unwrap().force_release(held.key(), held.holder()).await.unwrap());
        }
        match held.extension::<LeaseFence>().unwrap().fence(&mut tx).await {
            Ok(()) => tx.commit().await.unwrap(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Lost);
                return StatusCode::CONFLICT;
            }
        }
        StatusCode::OK
    };
    let app = Router::new().route("/", post(handler).route_layer(layer.clone())).with_state(it.pool.clone());
    for (body, status, count) in [("held", 200, 1), ("lost", 409, 1)] {
        let request = Request::post("/").body(Body::from(body)).unwrap();
        assert_eq!(send(&app, request).await.status(), status);
        assert_eq!(it.count().await, count);
    }
    assert_eq!(layer.stats().lost, 1);
}

#[tokio::test]
async fn a_key_that_has_no_number_is_the_client_s_fault() {
    let it = setup(4).await;
    let locks = locks().numbers(leasehold_postgres::RawBigint);
    let layer = TxLayer::new(locks, it.pool.clone(), Template::parse("{query.k}").unwrap()).unwrap();
    let app = Router::new().route("/", post(async |_: SharedTx| ()).route_layer(layer.clone()));
    assert_eq!(send(&app, request("4711")).await.status(), 200);
    assert_eq!(send(&app, request("x")).await.status(), 400);
    assert_eq!((layer.stats().no_key, layer.stats().unavailable), (1, 0));
}

/// If the `begin` of a savepoint is dropped, the driver rolls back the whole transaction. Later writes are committed
/// without the lock, and earlier ones are lost.
#[tokio::test]
async fn a_transaction_that_ended_under_its_handler_is_no_success() {
    let it = setup(4).await;
    let app = it.app(async |mut tx: SharedTx| {
        write(&mut tx).await;
        run(&mut *tx, "ROLLBACK").await;
        write(&mut tx).await;
    });
    let response = send(&app, request("a")).await;
    assert_eq!(it.count().await, 1, "half of it");
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("commit-unknown"));
    assert!(it.is_free("a").await);
    assert_eq!(it.layer.stats().release_failed, 1);

    // Savepoints that are awaited work.
    let app = it.app(async |mut tx: SharedTx| {
        let savepoint = sqlx::Connection::begin(&mut *tx).await.unwrap();
        savepoint.rollback().await.unwrap();
        write(&mut tx).await;
    });
    assert_eq!(send(&app, request("a")).await.status(), 200);
    assert_eq!(it.count().await, 2);
}
