//! The layer combined with lock layers. In every order, a lock lasts until the protected work is committed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request};
use axum::http::{Response, StatusCode};
use axum::routing::{MethodRouter, post};
use leasehold_api::{Lock, LockExt as _, LockKey, LossReason, key};
use leasehold_idempotency::{IdemTx, IdempotencyLayer, Isolation, PgIdempotency};
use leasehold_memory::MemoryStore;
use leasehold_postgres_advisory::XactLocks;
use leasehold_tower::{LockLayer, Message, OnGone, Refused, Template, TxLayer};
use test_bounds::Bound;
use test_servers::{Cluster, Database, Proxy, fresh_database};
use tokio::sync::Semaphore;
use tower::{Layer as _, ServiceBuilder, ServiceExt as _, service_fn};

use crate::common::{PATIENT, Pg, effect, on, pool};

type Keys = IdempotencyLayer<PgIdempotency>;
type Locks = LockLayer<Template>;

struct Stack {
    world: Pg,
    store: MemoryStore,
    lock: Locks,
    keys: Keys,
}

async fn stack() -> Stack {
    stack_on(fresh_database().await).await
}

async fn stack_on(database: Database) -> Stack {
    let world = on(database, 12).await;
    world.run("CREATE TABLE entry (holder bigint NOT NULL, amount int NOT NULL)").await;
    let store = MemoryStore::new();
    let lock: Arc<dyn Lock> = Arc::new(store.client().unwrap());
    let lock = LockLayer::new(lock, Template::parse("ledger:{path.holder|int}").unwrap()).wait(PATIENT);
    let keys = IdempotencyLayer::new(world.store.clone(), |_| Some("user".to_owned()));
    Stack { world, store, lock: lock.check().unwrap(), keys }
}

fn app(method: MethodRouter) -> Router {
    Router::new().route("/{holder}", method)
}

const BALANCE: &str = "SELECT coalesce(sum(amount), 0)::bigint FROM entry WHERE holder = $1";

async fn spend(Path(holder): Path<i64>, mut tx: IdemTx) -> Result<StatusCode, StatusCode> {
    let failed = |_| StatusCode::INTERNAL_SERVER_ERROR;
    let balance: i64 = sqlx::query_scalar(BALANCE).bind(holder).fetch_one(&mut *tx).await.map_err(failed)?;
    if balance < 10 {
        return Ok(StatusCode::PAYMENT_REQUIRED);
    }
    let spend = sqlx::query("INSERT INTO entry VALUES ($1, -10)").bind(holder);
    spend.execute(&mut *tx).await.map_err(failed)?;
    Ok(StatusCode::OK)
}

async fn send(app: &Router, key: &str) -> Response<Body> {
    let request = Request::post("/42").header("idempotency-key", key).body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(to_bytes(response.into_body(), 1 << 20).await.unwrap().to_vec()).unwrap()
}

/// Returns the status, and whether the response is a replay.
fn told_of(response: &Response<Body>) -> (StatusCode, bool) {
    (response.status(), response.headers().contains_key("idempotent-replayed"))
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let bound = Bound::new(PATIENT);
    while !is_so().await {
        bound.check(what);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Commits wait at a gate until it opens.
const GATE: &str = "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711, 1); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON entry DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION gate()";
const COMMITTING: &str = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE locktype = 'advisory' AND NOT granted AND classid = 4711 AND d.datname = current_database()";

#[tokio::test]
async fn a_lock_on_either_side_of_the_keys_lasts_until_the_commit() {
    for keys_outside in [true, false] {
        let it = stack().await;
        let method = post(spend);
        let app = app(if keys_outside {
            method.route_layer(it.lock.clone()).route_layer(it.keys.clone())
        } else {
            method.route_layer(it.keys.clone()).route_layer(it.lock.clone())
        });
        it.world.run(format!("INSERT INTO entry VALUES (42, 10); {GATE}")).await;
        let mut gate = it.world.database.connect().await;
        sqlx::query("SELECT pg_advisory_lock(4711, 1)").execute(&mut gate).await.unwrap();
        let both = ["first", "second"].map(|key| {
            let app = app.clone();
            tokio::spawn(async move { send(&app, key).await.status().as_u16() })
        });
        until("one commits and the other waits for its lock", async || {
            it.world.number(COMMITTING).await >= 1 && it.lock.stats().waiting == 1
        })
        .await;
        assert_eq!(it.world.number(COMMITTING).await, 1, "keys outside: {keys_outside}");
        sqlx::query("SELECT pg_advisory_unlock(4711, 1)").execute(&mut gate).await.unwrap();
        let mut told =
            futures_util::future::join_all(both).await.into_iter().map(Result::unwrap).collect::<Vec<_>>();
        told.sort_unstable();
        assert_eq!(told, [200, 402], "keys outside: {keys_outside}");
        assert_eq!(it.world.number("SELECT sum(amount) FROM entry").await, 0);
        assert_eq!(it.lock.stats().in_flight, 0);
    }
}

#[tokio::test]
async fn a_lock_that_a_handler_takes_for_a_message_lasts_until_the_commit_of_its_key() {
    let it = stack().await;
    it.world.run(GATE).await;
    let lock: Arc<dyn Lock> = Arc::new(it.store.client().unwrap());
    let refused = |why: Refused| Err::<(), _>(why.to_string());
    let messages = LockLayer::with(Arc::clone(&lock), |(): &()| key!["message"], Message(refused));
    let handler = messages.layer(service_fn(async |()| Ok::<_, String>(())));
    let post = post(async move |mut tx: IdemTx| {
        sqlx::query("INSERT INTO entry VALUES (42, 10)").execute(&mut *tx).await.unwrap();
        handler.oneshot(()).await.unwrap();
    });
    let app = app(post.route_layer(it.keys.clone()));
    let mut gate = it.world.database.connect().await;
    sqlx::query("SELECT pg_advisory_lock(4711, 1)").execute(&mut gate).await.unwrap();
    let sent = tokio::spawn(async move { send(&app, "first").await.status() });
    until("it commits", async || it.world.number(COMMITTING).await == 1).await;
    let message = key!["message"].unwrap();
    assert!(lock.key(&message).try_acquire().await.unwrap().is_none(), "the commit is to come");
    sqlx::query("SELECT pg_advisory_unlock(4711, 1)").execute(&mut gate).await.unwrap();
    assert_eq!(sent.await.unwrap(), 200);
    assert!(lock.key(&message).try_acquire().await.unwrap().is_some());
}

/// The connection breaks while the commit waits at its gate, so the layer does not learn of its end.
#[tokio::test]
async fn a_lock_lasts_until_the_outcome_of_the_commit_is_known() {
    for keys_outside in [true, false] {
        let it = stack_on(Cluster::shared().fresh_database().await).await;
        let proxy = Proxy::start(Cluster::shared().address()).await;
        let through = PgIdempotency::new(pool(&proxy.url(it.world.database.url()), 4).await);
        let keys = IdempotencyLayer::new(through, |_| Some("user".to_owned()));
        let method = post(spend);
        let app = app(if keys_outside {
            method.route_layer(it.lock.clone()).route_layer(keys.clone())
        } else {
            method.route_layer(keys.clone()).route_layer(it.lock.clone())
        });
        it.world.run(format!("INSERT INTO entry VALUES (42, 10); {GATE}")).await;
        let mut gate = it.world.database.connect().await;
        sqlx::query("SELECT pg_advisory_lock(4711, 1)").execute(&mut gate).await.unwrap();
        let first = tokio::spawn({
            let app = app.clone();
            async move { told_of(&send(&app, "first").await) }
        });
        until("it commits", async || it.world.number(COMMITTING).await == 1).await;
        proxy.reset();
        let before = proxy.traffic().round_trips;
        let second = tokio::spawn(async move {
            loop {
                let status = send(&app, "second").await.status();
                // The pool might return a broken connection.
                if status != 503 {
                    return status;
                }
            }
        });
        // The layer polls the outcome, and the lock stays.
        until("it was asked for the commit", async || proxy.traffic().round_trips > before + 20).await;
        assert_eq!((it.world.number(COMMITTING).await, it.lock.stats().in_flight), (1, 1));
        sqlx::query("SELECT pg_advisory_unlock(4711, 1)").execute(&mut gate).await.unwrap();
        assert_eq!(first.await.unwrap(), (StatusCode::OK, true), "as a replay; keys outside: {keys_outside}");
        assert_eq!(second.await.unwrap(), 402);
        assert_eq!(it.world.number("SELECT sum(amount) FROM entry").await, 0);
    }
}

#[tokio::test]
async fn a_lost_answer_to_the_commit_is_resolved_by_the_layer() {
    let it = stack_on(Cluster::shared().fresh_database().await).await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let through = PgIdempotency::new(pool(&proxy.url(it.world.database.url()), 4).await);
    let keys = IdempotencyLayer::new(through, |_| Some("user".to_owned()));
    let app = app(post(spend).route_layer(keys));
    it.world.run("INSERT INTO entry VALUES (42, 100)").await;
    proxy.drop_next_reply_with("COMMIT");
    assert_eq!(told_of(&send(&app, "a").await), (StatusCode::OK, true));
    // A session terminated at its commit has not committed, and the client is asked to retry.
    it.world.run(GATE).await;
    let mut gate = it.world.database.connect().await;
    sqlx::query("SELECT pg_advisory_lock(4711, 1)").execute(&mut gate).await.unwrap();
    let answer = tokio::spawn(async move { send(&app, "b").await });
    until("it commits", async || it.world.number(COMMITTING).await == 1).await;
    let end = COMMITTING.replace("count(*)", "pg_terminate_backend(pid)::int::bigint");
    assert_eq!(it.world.number(&end).await, 1);
    let response = answer.await.unwrap();
    assert_eq!(
        (response.status(), response.headers().contains_key("retry-after")),
        (StatusCode::SERVICE_UNAVAILABLE, true)
    );
    assert_eq!(it.world.number("SELECT sum(amount) FROM entry").await, 90);
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_spends_at_once_never_overdraw_in_any_order_of_the_layers() {
    let it = stack().await;
    // A slow commit gives the next request the chance to start too early.
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(0.01); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON entry DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION slow()";
    it.world.run(slow).await;
    let orders = [
        ("keys, lock", post(spend).route_layer(it.lock.clone()).route_layer(it.keys.clone())),
        ("lock, keys", post(spend).route_layer(it.keys.clone()).route_layer(it.lock.clone())),
        (
            "keys, lock, by a builder",
            post(spend).route_layer(ServiceBuilder::new().layer(it.keys.clone()).layer(it.lock.clone())),
        ),
        (
            "lock, keys, by a builder",
            post(spend).route_layer(ServiceBuilder::new().layer(it.lock.clone()).layer(it.keys.clone())),
        ),
    ];
    for (order, method) in orders {
        let app = app(method);
        it.world.run("TRUNCATE entry; INSERT INTO entry VALUES (42, 100)").await;
        let all = (0..30).map(|n| {
            let (app, key) = (app.clone(), format!("{order} {n}"));
            tokio::spawn(async move { send(&app, &format!("\"{key}\"")).await.status().as_u16() })
        });
        let told = futures_util::future::join_all(all.collect::<Vec<_>>()).await;
        let told: Vec<_> = told.into_iter().map(Result::unwrap).collect();
        let of = |wanted| told.iter().filter(|&&status| status == wanted).count();
        assert_eq!((of(200), of(402)), (10, 20), "{order}: {told:?}");
        assert_eq!(it.world.number("SELECT sum(amount) FROM entry").await, 0, "{order}");
    }
}

#[tokio::test]
async fn two_layers_that_commit_are_refused_and_so_is_a_lock_inside_of_a_snapshot() {
    let it = stack().await;
    let locks = XactLocks::new("leasehold".parse().unwrap());
    let transaction = || {
        let template = Template::parse("ledger:{path.holder|int}").unwrap();
        TxLayer::new(locks.clone(), it.world.pool.clone(), template).unwrap()
    };
    let calls = Arc::new(AtomicU64::new(0));
    let handler = || {
        let calls = Arc::clone(&calls);
        post(async move || {
            calls.fetch_add(1, Ordering::SeqCst);
        })
    };
    let snapshot = |isolation| {
        let store = it.world.store.clone().isolation(isolation);
        IdempotencyLayer::new(store, |_| Some("user".to_owned()))
    };
    for (what, method) in [
        ("keys, transaction", handler().route_layer(transaction()).route_layer(it.keys.clone())),
        ("transaction, keys", handler().route_layer(it.keys.clone()).route_layer(transaction())),
        ("keys, keys", handler().route_layer(it.keys.clone()).route_layer(it.keys.clone())),
        (
            "snapshot, lock",
            handler().route_layer(it.lock.clone()).route_layer(snapshot(Isolation::RepeatableRead)),
        ),
        (
            "snapshot, lock",
            handler().route_layer(it.lock.clone()).route_layer(snapshot(Isolation::Serializable)),
        ),
    ] {
        let response = send(&app(method), "k").await;
        assert_eq!(response.status(), 500, "{what}");
        assert!(text(response).await.contains(":open-transaction"), "{what}");
    }
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    // A lock outside a snapshot is acquired before it.
    let method = handler().route_layer(snapshot(Isolation::Serializable)).route_layer(it.lock.clone());
    assert_eq!(send(&app(method), "k").await.status(), 200);
}

/// A handler that spends, and then waits at a gate before its response.
fn slow(gate: &Arc<Semaphore>, calls: &Arc<AtomicU64>) -> MethodRouter {
    let (gate, calls) = (Arc::clone(gate), Arc::clone(calls));
    post(async move |mut tx: IdemTx| {
        calls.fetch_add(1, Ordering::SeqCst);
        effect(&mut tx).await;
        gate.acquire().await.unwrap().forget();
        "spent"
    })
}

struct Slow {
    gate: Arc<Semaphore>,
    calls: Arc<AtomicU64>,
}

impl Slow {
    fn new() -> Self {
        Self { gate: Arc::new(Semaphore::new(0)), calls: Arc::new(AtomicU64::new(0)) }
    }

    fn method(&self) -> MethodRouter {
        slow(&self.gate, &self.calls)
    }

    /// Sends a request whose client leaves once the handler runs.
    async fn leaves(&self, app: &Router, key: &str) {
        let before = self.calls.load(Ordering::SeqCst);
        let mut request = Box::pin(send(app, key));
        until("the handler runs", async || {
            assert!(futures_util::poll!(&mut request).is_pending());
            self.calls.load(Ordering::SeqCst) > before
        })
        .await;
    }
}

#[tokio::test]
async fn a_client_less_patient_than_the_handler_gets_its_response() {
    for with_lock in [None, Some(true), Some(false)] {
        let it = stack().await;
        let slow = Slow::new();
        let method = match with_lock {
            None => slow.method().route_layer(it.keys.clone()),
            Some(true) => slow.method().route_layer(it.keys.clone()).route_layer(it.lock.clone().fail_fast()),
            Some(false) => slow.method().route_layer(it.lock.clone()).route_layer(it.keys.clone()),
        };
        let app = app(method);
        slow.leaves(&app, "k").await;
        // Repetitions get *in flight*, and none of them runs.
        let told = send(&app, "k").await.status();
        assert_eq!(told, if with_lock == Some(true) { 503 } else { 409 }, "{with_lock:?}");
        slow.gate.add_permits(1);
        it.lock.idle().await;
        it.keys.idle().await;
        let response = send(&app, "k").await;
        assert_eq!(response.headers()["idempotent-replayed"], "true", "{with_lock:?}");
        assert_eq!(text(response).await, "spent");
        assert_eq!((slow.calls.load(Ordering::SeqCst), it.world.effects().await), (1, 1), "{with_lock:?}");
    }
}

#[tokio::test]
async fn by_choice_a_handler_whose_client_has_gone_is_dropped_and_a_bound_does_the_same() {
    let it = stack().await;
    for keys in
        [it.keys.clone().on_gone(OnGone::Cancel), it.keys.clone().finish_within(Duration::from_millis(1))]
    {
        let slow = Slow::new();
        let app = app(slow.method().route_layer(keys.clone()));
        slow.leaves(&app, "k").await;
        keys.idle().await;
        assert_eq!(it.world.effects().await, 0);
        slow.gate.add_permits(1);
        until("the key is new again", async || {
            let response = send(&app, "k").await;
            response.status() == 200 && !response.headers().contains_key("idempotent-replayed")
        })
        .await;
        it.world.run("TRUNCATE effect; DELETE FROM leasehold.idempotency").await;
    }
}

/// Otherwise the handler would commit beside the next holder.
#[tokio::test]
async fn a_handler_whose_lock_is_lost_does_not_go_on_in_the_background() {
    for keys_outside in [true, false] {
        let it = stack().await;
        let slow = Slow::new();
        let app = app(if keys_outside {
            slow.method().route_layer(it.lock.clone()).route_layer(it.keys.clone())
        } else {
            slow.method().route_layer(it.keys.clone()).route_layer(it.lock.clone())
        });
        let answer = tokio::spawn(async move { send(&app, "k").await });
        until("the handler runs", async || slow.calls.load(Ordering::SeqCst) == 1).await;
        let held: LockKey = key!["ledger", 42].unwrap();
        assert!(it.store.lose(&held, LossReason::ForcedRelease));
        assert_eq!(answer.await.unwrap().status(), 503, "keys outside: {keys_outside}");
        slow.gate.add_permits(1);
        it.keys.idle().await;
        it.lock.idle().await;
        assert_eq!(it.world.effects().await, 0, "keys outside: {keys_outside}");
        assert_eq!(it.world.number("SELECT count(*) FROM leasehold.idempotency").await, 0);
    }
}

#[tokio::test]
async fn a_lock_in_the_transaction_of_the_key_ends_with_it() {
    let it = stack().await;
    let locks = XactLocks::new("leasehold".parse().unwrap());
    let app = app(post(async move |holder: Path<i64>, mut tx: IdemTx| {
        let key = key!["ledger", holder.0].map_err(|_| StatusCode::BAD_REQUEST)?;
        let lock = locks.lock_in(&mut tx, &key, PATIENT).await;
        drop(lock.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?);
        spend(holder, tx).await
    })
    .route_layer(it.keys.clone()));
    it.world.run("INSERT INTO entry VALUES (42, 100)").await;
    let all = (0..12).map(|n| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, &n.to_string()).await.status().as_u16() })
    });
    let told = futures_util::future::join_all(all.collect::<Vec<_>>()).await;
    let spent = told.into_iter().filter(|told| matches!(told, Ok(200))).count();
    assert_eq!((spent, it.world.number("SELECT sum(amount) FROM entry").await), (10, 0));
}

/// The handler panics, in each order.
#[tokio::test]
async fn a_panic_releases_the_lock_and_rolls_back() {
    for keys_outside in [true, false] {
        let it = stack().await;
        let method = post(async |mut tx: IdemTx| -> StatusCode {
            effect(&mut tx).await;
            std::panic::resume_unwind(Box::new("a handler of a test panics"))
        });
        let app = app(if keys_outside {
            method.route_layer(it.lock.clone()).route_layer(it.keys.clone())
        } else {
            method.route_layer(it.keys.clone()).route_layer(it.lock.clone())
        });
        assert!(tokio::spawn(async move { send(&app, "k").await }).await.unwrap_err().is_panic());
        it.keys.idle().await;
        it.lock.idle().await;
        assert_eq!(it.world.effects().await, 0);
    }
}

/// The client leaves at each poll. The effect happens at most once, and no lock stays.
#[tokio::test]
async fn a_request_that_is_dropped_at_any_poll_has_one_effect_and_leaves_no_lock() {
    for keys_outside in [true, false] {
        let it = stack().await;
        let method = post(async |mut tx: IdemTx| effect(&mut tx).await);
        let app = app(if keys_outside {
            method.route_layer(it.lock.clone()).route_layer(it.keys.clone())
        } else {
            method.route_layer(it.keys.clone()).route_layer(it.lock.clone())
        });
        for polls in 0..60 {
            let mut request = Box::pin(send(&app, "k"));
            for _ in 0..polls {
                if futures_util::poll!(&mut request).is_ready() {
                    break;
                }
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
        }
        it.keys.idle().await;
        it.lock.idle().await;
        until("it is done", async || send(&app, "k").await.status() == 200).await;
        assert_eq!(it.world.effects().await, 1, "keys outside: {keys_outside}");
        assert_eq!(it.lock.stats().in_flight, 0);
    }
}
