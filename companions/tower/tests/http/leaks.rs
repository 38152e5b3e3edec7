//! Ten thousand requests of every outcome leave no lock, no connection and no task, on every store.

use std::convert::Infallible;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::common::{LONG, OfPath, until};
use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use leasehold_api::{BoxFuture, ListQuery, Lock, LockExt as _};
use leasehold_memory::MemoryStore;
use leasehold_postgres::{Identifier, PgConfig};
use leasehold_postgres_advisory::{AdvisoryConfig, XactLocks};
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;
use leasehold_tower::{LockLayer, OnGone, SharedTx, TxLayer, Until};
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;
use test_servers::{Cluster, Database};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tower::{Layer as _, ServiceExt as _, service_fn};

const REQUESTS: usize = 10_000;
const KEYS: usize = 40;

type Body = Full<Bytes>;

/// Drops its future after this number of polls.
struct Dropped<F> {
    future: Option<Pin<Box<F>>>,
    polls: usize,
}

impl<F: Future> Future for Dropped<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls == 0 {
            self.future = None;
        }
        self.polls = self.polls.saturating_sub(1);
        match &mut self.future {
            Some(future) => future.as_mut().poll(cx).map(Some),
            None => Poll::Ready(None),
        }
    }
}

/// The handler, whose outcome depends on the query.
async fn handle(kind: &str) -> Response<Body> {
    let status = match kind {
        "bad" => StatusCode::BAD_REQUEST,
        "slow" => {
            tokio::time::sleep(Duration::from_micros(300)).await;
            StatusCode::OK
        }
        // `resume_unwind`, because it logs nothing.
        "panic" => std::panic::resume_unwind(Box::new("a handler of a test panics")),
        _ => StatusCode::OK,
    };
    let mut response = Response::new(Body::from("body"));
    *response.status_mut() = status;
    response
}

type Send = Arc<dyn Fn(usize, Request<Body>) -> BoxFuture<'static, StatusCode> + std::marker::Send + Sync>;

/// Sends requests with all outcomes in random order. Returns how many were answered, panicked and dropped.
async fn mixed(send: Send) -> [usize; 3] {
    let next = Arc::new(AtomicUsize::new(0));
    let counts = Arc::new([const { AtomicUsize::new(0) }; 3]);
    let mut workers = JoinSet::new();
    for _ in 0..64 {
        let (send, next, counts) = (Arc::clone(&send), Arc::clone(&next), Arc::clone(&counts));
        workers.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= REQUESTS {
                    return;
                }
                let kind = ["ok", "bad", "slow", "panic", "ok"][fastrand::usize(..5)];
                let request = Request::get(format!("/{}?{kind}", n % KEYS)).body(Body::default()).unwrap();
                let polls = if n % 3 == 0 { fastrand::usize(0..6) } else { usize::MAX };
                let dropped = Dropped { future: Some(Box::pin(send(n, request))), polls };
                let outcome = match AssertUnwindSafe(dropped).catch_unwind().await {
                    Ok(Some(_)) => 0,
                    Err(_) => 1,
                    Ok(None) => 2,
                };
                counts[outcome].fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    workers.join_all().await;
    counts.each_ref().map(|count| count.load(Ordering::Relaxed))
}

/// Runs the requests on `lock` with every policy, and closes the lock at the end.
async fn leaves_nothing(lock: Arc<dyn Lock>) {
    let tasks = Handle::current().metrics().num_alive_tasks();
    let of_path: OfPath = crate::common::of_path;
    // A busy machine can be slow with releases.
    let layer = || LockLayer::new(Arc::clone(&lock), of_path).wait(LONG).release_within(LONG);
    let layers = [layer(), layer().on_gone(OnGone::Cancel), layer().until(Until::BodyEnd)];
    let handler = service_fn(async |request: Request<Body>| {
        Ok::<_, Infallible>(handle(request.uri().query().unwrap()).await)
    });
    let services = layers.clone().map(|layer| layer.layer(handler));
    let [answered, panicked, given_up] = mixed(Arc::new(move |n, request| {
        let service = services[n % 3].clone();
        Box::pin(async move {
            let response = service.oneshot(request).await.unwrap_or_else(|never| match never {});
            let status = response.status();
            // Every other response body is not read.
            if n.is_multiple_of(2) {
                response.into_body().collect().await.unwrap();
            }
            status
        })
    }))
    .await;
    assert_eq!(answered + panicked + given_up, REQUESTS);
    assert!(answered > 1000 && panicked > 100 && given_up > 100, "{answered} {panicked} {given_up}");
    for layer in &layers {
        within(LONG, "not ended", layer.idle()).await;
        let stats = layer.stats();
        assert_eq!((stats.waiting, stats.in_flight, stats.lost, stats.release_failed), (0, 0, 0, 0));
        assert_eq!((stats.unavailable, stats.contended), (0, 0));
    }
    for n in 0..KEYS {
        lock.key(n.to_string()).wait(LONG).acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!(lock.admin().unwrap().list(&ListQuery::new()).await.unwrap(), []);
    drop(layers);
    lock.close().await.unwrap();
    drop(lock);
    until("the tasks have ended", || Handle::current().metrics().num_alive_tasks() <= tasks).await;
}

async fn no_connection_is_left(database: &Database) {
    // The server ends a session a moment after its client.
    let look = async {
        while !Cluster::shared().backends(database.name()).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    within(LONG, "a connection is left", look).await;
    assert_eq!(Cluster::shared().advisory_locks(database.name()).await.len(), 0);
}

async fn server() -> (Database, PgConfig) {
    let database = Cluster::shared().fresh_database().await;
    let config = PgConfig::from_url(database.url()).unwrap().install_schema(true);
    (database, config)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_leave_nothing_in_memory() {
    leaves_nothing(Arc::new(MemoryStore::new().client().unwrap())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_leave_nothing_in_files() {
    let directory = tempfile::tempdir().unwrap();
    leaves_nothing(Arc::new(leasehold_file::connect(directory.path()).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_leave_no_advisory_locks() {
    let (database, config) = server().await;
    leaves_nothing(Arc::new(AdvisoryConfig::new(config).connect().await.unwrap())).await;
    no_connection_is_left(&database).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_leave_no_mutex_rows() {
    let (database, config) = server().await;
    leaves_nothing(Arc::new(RowConfig::new(config).connect().await.unwrap())).await;
    no_connection_is_left(&database).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_leave_no_leases() {
    let (database, config) = server().await;
    leaves_nothing(Arc::new(TtlConfig::new(config).connect().await.unwrap())).await;
    no_connection_is_left(&database).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_leave_no_transactions() {
    let (database, _) = server().await;
    let pool = PgPoolOptions::new().max_connections(8).acquire_timeout(LONG);
    let pool = pool.connect(database.url()).await.unwrap();
    let locks = XactLocks::new(Identifier::new("leasehold").unwrap());
    let of_path: OfPath = crate::common::of_path;
    let layer = TxLayer::new(locks, pool.clone(), of_path).unwrap().wait(LONG);
    let service = layer.layer(service_fn(async |request: Request<Body>| {
        let mut tx = SharedTx::of(request.extensions()).unwrap();
        sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
        Ok::<_, Infallible>(handle(request.uri().query().unwrap()).await)
    }));
    let [answered, panicked, given_up] = mixed(Arc::new(move |_, request| {
        Box::pin(
            service
                .clone()
                .oneshot(request)
                .map(|response| response.unwrap_or_else(|never| match never {}).status()),
        )
    }))
    .await;
    assert_eq!(answered + panicked + given_up, REQUESTS);
    within(LONG, "not ended", layer.idle()).await;
    assert_eq!((layer.stats().waiting, layer.stats().unavailable), (0, 0));
    assert!(pool.size() <= 8);
    // No connection of the pool is in a transaction.
    let connections: Vec<_> = futures_util::future::join_all((0..8).map(|_| pool.acquire())).await;
    for connection in connections {
        let sql = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'";
        let held: i64 = sqlx::query_scalar(sql).fetch_one(&mut *connection.unwrap()).await.unwrap();
        assert_eq!(held, 0);
    }
    within(LONG, "not ended", pool.close()).await;
    no_connection_is_left(&database).await;
}
