//! Transactions committed outside a lock layer. The lock lasts until the commit.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Gate, LONG, answering, begin, get, key, layer, memory, send, text, until};
use crate::ledger::{number, run, until_number};
use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use http::{Extensions, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use leasehold_api::{Lock, LockExt as _, LossReason};
use leasehold_postgres::Identifier;
use leasehold_postgres_advisory::XactLocks;
use leasehold_tower::{LockLayer, OpenCommit, Reads, SharedTx, Template, TxLayer, Until};
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;
use test_servers::{Database, fresh_database};
use tokio::sync::Semaphore;
use tower::{Layer as _, ServiceExt as _, service_fn};

type Body = Full<Bytes>;

async fn is_free(lock: &Arc<dyn Lock>, name: &str) -> bool {
    lock.key(key(name)).try_acquire().await.unwrap().is_some()
}

/// Waits until the key is free after a release in the background.
async fn becomes_free(lock: &Arc<dyn Lock>, name: &str) {
    drop(lock.key(key(name)).wait(LONG).acquire().await.unwrap());
}

#[tokio::test]
async fn a_lock_inside_of_an_open_transaction_is_released_when_that_has_ended() {
    let (_, lock) = memory();
    let service = layer(&lock).layer(answering(StatusCode::OK));
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    assert_eq!(send(&service, request).await.status(), 200);
    assert!(!is_free(&lock, "a").await, "the commit is to come");
    assert_eq!(open.lost(), None);
    open.end().await;
    assert!(is_free(&lock, "a").await);
}

#[tokio::test]
async fn a_lock_that_a_handler_takes_in_its_task_lasts_until_the_commit_too() {
    let (_, lock) = memory();
    let service = layer(&lock).layer(answering(StatusCode::OK));
    // The request of the handler's own call has none of the extensions.
    let open = OpenCommit::around(&mut Extensions::new(), Reads::Committed);
    assert_eq!(open.scope(send(&service, get("/a"))).await.status(), 200);
    assert!(!is_free(&lock, "a").await, "the commit is to come");
    // To wait for the same key once more would last until the commit, which comes after the wait.
    assert_eq!(open.scope(send(&service, get("/a"))).await.status(), 500);
    assert_eq!(open.scope(send(&service, get("/b"))).await.status(), 200);
    assert_eq!(send(&service, get("/c")).await.status(), 200);
    assert!(!is_free(&lock, "b").await && is_free(&lock, "c").await);
    open.end().await;
    assert!(is_free(&lock, "a").await && is_free(&lock, "b").await);
}

#[tokio::test]
async fn several_locks_inside_last_until_the_outermost_transaction_has_ended() {
    let (_, lock) = memory();
    let inner = layer(&lock).layer(answering(StatusCode::OK));
    // A custom layer that commits, with a lock around it.
    let committing = service_fn(move |mut request: Request<Body>| {
        let inner = inner.clone();
        async move {
            let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
            let response = inner.oneshot(request).await;
            open.end().await;
            response
        }
    });
    let by_method = |request: &Request<Body>| leasehold_api::key![request.method().as_str()];
    let service = LockLayer::new(Arc::clone(&lock), by_method).layer(committing);
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    send(&service, request).await;
    assert!(!is_free(&lock, "a").await && !is_free(&lock, "GET").await);
    open.end().await;
    assert!(is_free(&lock, "a").await && is_free(&lock, "GET").await);
}

#[tokio::test]
async fn a_lock_inside_of_a_snapshot_is_refused() {
    let (_, lock) = memory();
    let gate = Gate::new();
    let it = layer(&lock);
    let service = it.layer(gate.service());
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Snapshot);
    let response = send(&service, request).await;
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("urn:leasehold:problem:open-transaction"));
    assert!(!gate.has_begun() && is_free(&lock, "a").await);
    assert_eq!(it.stats().nested, 1);
    open.end().await;
}

#[tokio::test]
async fn a_transaction_that_is_dropped_releases_and_copies_of_the_request_keep_nothing() {
    let (_, lock) = memory();
    let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
    let keeping = Arc::clone(&kept);
    let service = layer(&lock).layer(service_fn(move |request: Request<Body>| {
        keeping.lock().unwrap().push(request.extensions().clone());
        async { Ok::<_, Infallible>(Response::new(Body::from("x"))) }
    }));
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    send(&service, request).await;
    assert!(!is_free(&lock, "a").await);
    drop(open);
    becomes_free(&lock, "a").await;
    assert!(!OpenCommit::is_around(&kept.lock().unwrap()[0]));
}

/// A timeout between the two layers does the same.
#[tokio::test]
async fn a_handler_that_ends_after_the_transaction_releases_by_itself() {
    let (_, lock) = memory();
    let gate = Gate::new();
    let it = layer(&lock);
    let service = it.layer(gate.service());
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    let mut answer = Box::pin(service.oneshot(request));
    begin(&mut answer).await;
    gate.reached().await;
    drop(answer);
    open.end().await;
    assert!(!is_free(&lock, "a").await, "the handler goes on");
    gate.open();
    it.idle().await;
    assert!(is_free(&lock, "a").await);
}

#[tokio::test]
async fn a_lock_of_a_body_lasts_for_both_the_body_and_the_transaction() {
    let (_, lock) = memory();
    let service = layer(&lock).until(Until::BodyEnd).layer(answering(StatusCode::OK));
    // Reads before the commit, as a layer that stores the response does.
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    send(&service, request).await.into_body().collect().await.unwrap();
    assert!(!is_free(&lock, "a").await, "the commit is to come");
    open.end().await;
    assert!(is_free(&lock, "a").await);
    // Reads after the commit.
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    let response = send(&service, request).await;
    open.end().await;
    assert!(!is_free(&lock, "a").await, "the body is to come");
    response.into_body().collect().await.unwrap();
    becomes_free(&lock, "a").await;
}

#[tokio::test]
async fn a_lock_that_is_lost_before_the_commit_is_told() {
    let (store, lock) = memory();
    let service = layer(&lock).layer(answering(StatusCode::OK));
    let mut request = get("/a");
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    send(&service, request).await;
    assert!(store.lose(&key("a"), LossReason::ForcedRelease));
    until("the loss is told", || open.lost().is_some()).await;
    open.end().await;
}

const GATED: &str = "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711, 1); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON work DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION gate()";
const COMMITTING: &str = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE locktype = 'advisory' AND NOT granted AND classid = 4711 AND d.datname = current_database()";

async fn transactions() -> (Database, TxLayer<Template>) {
    let database = fresh_database().await;
    run(&mut database.connect().await, "CREATE TABLE work (id bigserial, text text)").await;
    let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(LONG);
    let pool = pool.connect(database.url()).await.unwrap();
    let locks = XactLocks::new(Identifier::new("leasehold").unwrap());
    (database, TxLayer::new(locks, pool, Template::parse("tenant").unwrap()).unwrap().wait(LONG))
}

async fn work(mut tx: SharedTx) {
    sqlx::query("INSERT INTO work (text) VALUES ('x')").execute(&mut *tx).await.unwrap();
}

fn posted() -> Request<axum::body::Body> {
    Request::post("/").body(axum::body::Body::empty()).unwrap()
}

#[tokio::test]
async fn a_lock_inside_of_a_transaction_layer_lasts_until_the_commit() {
    let (database, transaction) = transactions().await;
    let (_, lock) = memory();
    let inner = LockLayer::new(Arc::clone(&lock), Template::parse("a").unwrap());
    let app = Router::new().route("/", post(work).route_layer(inner.clone()).route_layer(transaction));
    let mut gate = database.connect().await;
    run(&mut gate, GATED).await;
    run(&mut gate, "SELECT pg_advisory_lock(4711, 1)").await;
    let answer = tokio::spawn(async move { send(&app, posted()).await.status() });
    until_number(&database, COMMITTING, 1).await;
    assert!(!is_free(&lock, "a").await, "what it protects is not committed");
    assert_eq!(inner.stats().in_flight, 1);
    run(&mut gate, "SELECT pg_advisory_unlock(4711, 1)").await;
    assert_eq!(answer.await.unwrap(), 200);
    assert!(is_free(&lock, "a").await);
    assert_eq!(number(&database, "SELECT count(*) FROM work").await, 1);
}

#[tokio::test]
async fn what_was_done_under_a_lock_that_is_lost_before_the_commit_is_rolled_back() {
    let (database, transaction) = transactions().await;
    let (store, lock) = memory();
    let inner = LockLayer::new(Arc::clone(&lock), Template::parse("a").unwrap());
    let stop = Arc::new(Semaphore::new(0));
    let (stopped, go) = (Arc::clone(&stop), Arc::new(Semaphore::new(0)));
    let going = Arc::clone(&go);
    // Stops between the two layers, after the handler's response and before the commit.
    let between =
        axum::middleware::from_fn(move |request: axum::extract::Request, next: axum::middleware::Next| {
            let (stopped, going) = (Arc::clone(&stopped), Arc::clone(&going));
            async move {
                let response = next.run(request).await;
                stopped.add_permits(1);
                going.acquire().await.unwrap().forget();
                response
            }
        });
    let method = post(work).route_layer(inner).route_layer(between).route_layer(transaction);
    let app = Router::new().route("/", method);
    let answer = tokio::spawn(async move { send(&app, posted()).await });
    within(LONG, "no answer of the handler", stop.acquire()).await.unwrap().forget();
    assert!(store.lose(&key("a"), LossReason::ForcedRelease));
    // The holder's client must learn of the loss.
    becomes_free(&lock, "a").await;
    go.add_permits(1);
    let response = answer.await.unwrap();
    assert_eq!(response.status(), 503);
    assert!(text(response).await.contains("lock-lost"));
    assert_eq!(number(&database, "SELECT count(*) FROM work").await, 0);
}

#[tokio::test]
async fn a_transaction_layer_inside_of_another_transaction_is_refused() {
    let (database, transaction) = transactions().await;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let handler = post(async move || {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let app = Router::new().route("/", handler.route_layer(transaction.clone()));
    let mut request = posted();
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    let response = send(&app, request).await;
    assert_eq!(response.status(), 500);
    assert!(text(response).await.contains("open-transaction"));
    open.end().await;
    // Two layers with separate transactions.
    let twice =
        Router::new().route("/", post(work).route_layer(transaction.clone()).route_layer(transaction));
    assert_eq!(send(&twice, posted()).await.status(), 500);
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    assert_eq!(number(&database, "SELECT count(*) FROM work").await, 0);
}

/// Otherwise the handler would commit beside the next holder of the outer lock.
#[tokio::test]
async fn a_layer_inside_of_a_lock_that_is_lost_does_not_go_on() {
    let (store, lock) = memory();
    let (database, transaction) = transactions().await;
    let outer = || LockLayer::new(Arc::clone(&lock), Template::parse("outer").unwrap());
    let inner = LockLayer::new(Arc::clone(&lock), Template::parse("inner").unwrap());
    let gate = Gate::new();
    let handler = || {
        let gate = gate.clone();
        post(async move || {
            gate.service::<()>().oneshot(Request::new(())).await.unwrap();
        })
    };
    for method in [
        handler().route_layer(inner.clone()).route_layer(outer()),
        handler().route_layer(transaction.clone()).route_layer(outer()),
    ] {
        let app = Router::new().route("/", method);
        let answer = tokio::spawn(async move { send(&app, posted()).await.status() });
        gate.reached().await;
        assert!(store.lose(&key("outer"), LossReason::ForcedRelease));
        assert_eq!(answer.await.unwrap(), 503);
        gate.open();
        inner.idle().await;
        transaction.idle().await;
        assert_eq!(gate.ended(), 0, "it was dropped");
        // The unused permit.
        gate.pass().await;
    }
    drop(database);
}
