//! The lock and the handler in one transaction.

mod begin;
mod shared;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use leasehold_api::{BoxFuture, Error, ErrorKind};
use leasehold_postgres_advisory::{XactGuard, XactLocks};
use sqlx::PgPool;
use tokio::time::timeout;
use tower_layer::Layer;
use tower_service::Service;
use tracing::{debug, error, warn};

use crate::BoxError;
use crate::body::LockBody;
use crate::commit::{OpenCommit, Reads};
use crate::finish::Finish;
use crate::held::Held;
use crate::http::Http;
use crate::key::{KeyError, KeyFor};
use crate::problem::Problem;
use crate::service::call;
use crate::stats::{AdmissionOutcome, InFlightRequest, LayerCounters, LayerStats};
use crate::transport::{RETRY_AFTER, Refused, Transport};
use begin::{BegunTx, TxQueue};
use shared::Tx;
pub use shared::{SharedTx, SharedTxError};

/// Puts a transaction that begins with a lock around an HTTP service. The handler works in it through [`SharedTx`].
/// The layer commits it after a 2xx or 3xx response and rolls it back otherwise. Work and lock end in the same
/// instant.
///
/// If the commit fails, the layer replaces the response by status 500, because the handler's response would be
/// untrue. The problem's `type` is `...:commit-failed` (nothing was done) or `...:commit-unknown` (check before
/// trying again).
///
/// - If the client leaves, the handler completes and its transaction is committed. Inside a lock layer, the setting
///   of that layer applies.
/// - A lock layer inside passes its lock to the transaction, which releases it after the commit. Another `TxLayer`
///   inside gets status 500, and so does this one inside a layer that commits its own transaction ([`OpenCommit`]).
/// - Inside, use only the transaction. A handler that takes another connection of the same pool competes with the
///   other handlers. One connection is kept free for such handlers, so they proceed one after the other.
/// - Requests of one key queue in the process before the first takes a connection. The layer's transactions never
///   take the pool's last connection, and at most half of the pool waits for locks.
/// - Each layer counts separately, together with its clones. Routes that share a pool must share a layer, because
///   several layers can take the last connection.
/// - Locks and limits are as in [`leasehold_postgres_advisory::xact`]: READ COMMITTED, savepoints, and an
///   `idle_in_transaction_session_timeout` that ends lock and transaction.
/// - Not for gRPC, because its status comes after the body.
///
#[cfg_attr(feature = "axum", doc = "```no_run")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::{Router, extract::Path, http::StatusCode, routing::post};
/// use leasehold_postgres_advisory::XactLocks;
/// use leasehold_tower::{SharedTx, Template, TxLayer};
///
/// async fn spend(Path(holder): Path<i64>, mut tx: SharedTx) -> StatusCode {
///     let insert = sqlx::query("INSERT INTO entry VALUES ($1, -10)").bind(holder);
///     match insert.execute(&mut *tx).await {
///         Ok(_) => StatusCode::OK,
///         Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
///     }
/// }
///
/// fn app(pool: sqlx::PgPool) -> Result<Router, Box<dyn std::error::Error>> {
///     let locks = XactLocks::new("leasehold".parse()?);
///     let layer = TxLayer::new(locks, pool, Template::parse("ledger:{path.holder|int}")?)?;
///     Ok(Router::new().route("/ledger/{holder}", post(spend).route_layer(layer)))
/// }
/// ```
pub struct TxLayer<K> {
    shared: Arc<TxLayerSettings<K>>,
}

struct TxLayerSettings<K> {
    key: Arc<K>,
    queue: TxQueue,
    wait: Duration,
    max_waiters: usize,
    http: Http,
    counters: Arc<LayerCounters>,
}

impl<K> TxLayer<K> {
    /// Creates a layer with transactions of `pool`. `key` finds the key of a request.
    ///
    /// By default a request waits at most 5 seconds for connection and lock together.
    ///
    /// # Errors
    ///
    /// [`NoRuntime`](ErrorKind::NoRuntime) outside a tokio runtime.
    pub fn new(locks: XactLocks, pool: PgPool, key: K) -> Result<Self, Error> {
        let shared = TxLayerSettings {
            key: Arc::new(key),
            queue: TxQueue::new(locks, pool)?,
            wait: Duration::from_secs(5),
            max_waiters: 1024,
            http: Http::default(),
            counters: LayerCounters::new(&"postgres+advisory-xact"),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Sets the maximum wait for connection and lock together. Zero means one attempt.
    #[must_use]
    pub fn wait(self, budget: Duration) -> Self {
        self.set(|shared| shared.wait = budget)
    }

    /// Sets the maximum time of a handler's transaction: unlimited by default. A handler that awaits longer is
    /// dropped, its transaction rolled back, and the request gets status 500 with the problem `...:held-too-long`.
    ///
    /// A handler that blocks its thread cannot be dropped. After one more second, another connection of the pool
    /// terminates its session, which releases the lock and makes its commit fail. This needs another free thread of
    /// the runtime.
    #[must_use]
    pub fn max_hold(self, longest: Duration) -> Self {
        self.set(|shared| shared.queue.bound(longest))
    }

    /// Sets the status for a request that did not get the lock, as
    /// [`LockLayer::contended`](crate::LockLayer::contended).
    #[must_use]
    pub fn contended(self, status: StatusCode) -> Self {
        self.set(|shared| shared.http.set_contended(status))
    }

    /// Limits the waiting requests, as [`LockLayer::max_waiters`](crate::LockLayer::max_waiters).
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        self.set(|shared| shared.max_waiters = limit)
    }

    /// Returns the counters of the layer's requests.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        self.shared.counters.snapshot()
    }

    /// Resolves when no request is in flight, as [`LockLayer::idle`](crate::LockLayer::idle). Await it before closing
    /// the pool.
    ///
    /// # Cancel safety
    ///
    /// Safe, because it only waits.
    pub async fn idle(&self) {
        self.shared.counters.idle().await;
    }

    fn set(mut self, change: impl FnOnce(&mut TxLayerSettings<K>)) -> Self {
        change(Arc::make_mut(&mut self.shared));
        self
    }
}

impl<K> Clone for TxLayer<K> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<K> Clone for TxLayerSettings<K> {
    fn clone(&self) -> Self {
        Self {
            key: Arc::clone(&self.key),
            queue: self.queue.clone(),
            wait: self.wait,
            max_waiters: self.max_waiters,
            http: self.http,
            counters: Arc::clone(&self.counters),
        }
    }
}

impl<K> fmt::Debug for TxLayer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxLayer").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<S, K> Layer<S> for TxLayer<K> {
    type Service = InTx<S, K>;

    fn layer(&self, inner: S) -> Self::Service {
        InTx { inner, shared: Arc::clone(&self.shared) }
    }
}

/// A service in a transaction with a lock, made by a [`TxLayer`]. It is always ready, like [`Locked`](crate::Locked).
pub struct InTx<S, K> {
    inner: S,
    shared: Arc<TxLayerSettings<K>>,
}

impl<S, K, B, R> Service<Request<B>> for InTx<S, K>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    K: KeyFor<Request<B>>,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<LockBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(serve(Arc::clone(&self.shared), self.inner.clone(), request))
    }
}

async fn serve<S, K, B, R>(
    shared: Arc<TxLayerSettings<K>>,
    inner: S,
    request: Request<B>,
) -> Result<Response<LockBody<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
    K: KeyFor<Request<B>>,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let refuse = |why| -> Result<Response<LockBody<R>>, S::Error> {
        <Http as Transport<Request<B>, Response<R>, S::Error>>::refuse(&shared.http, why)
    };
    let (mut request, key) = shared.key.key_for(request).await;
    let key = match key {
        Ok(key) => key,
        Err(error) => {
            shared.counters.count(AdmissionOutcome::NoKey);
            error.log();
            return refuse(Refused::NoKey(error));
        }
    };
    if OpenCommit::is_around(request.extensions()) {
        shared.counters.count(AdmissionOutcome::Nested);
        error!(
            %key,
            "a TxLayer is inside of a layer that commits a transaction of its own: the two would not be committed together; take one of them, and under an idempotency key lock with XactLocks::lock_in"
        );
        return refuse(Refused::OpenTransaction);
    }
    let Some(waiting) = shared.counters.wait(shared.max_waiters) else {
        shared.counters.count(AdmissionOutcome::TooMany);
        warn!(%key, "more than {} requests wait for the lock", shared.max_waiters);
        return refuse(Refused::TooMany { retry_after: RETRY_AFTER });
    };
    let BegunTx { tx, admission } = match shared.queue.begin(&key, shared.wait).await {
        Ok(begun) => begun,
        Err(error) if error.kind() == ErrorKind::Timeout => {
            waiting.refused(AdmissionOutcome::Contended);
            debug!(%key, %error, "contended");
            return refuse(Refused::Contended { retry_after: RETRY_AFTER });
        }
        Err(error) if error.kind() == ErrorKind::InvalidKey => {
            waiting.refused(AdmissionOutcome::NoKey);
            let error = KeyError::from(error);
            error.log();
            return refuse(Refused::NoKey(error));
        }
        Err(error) => {
            waiting.refused(AdmissionOutcome::Unavailable);
            error!(%error, "the transaction with the lock cannot be begun");
            return refuse(Refused::Store(error));
        }
    };
    let in_flight = waiting.granted();
    let tx = Tx::new(tx);
    request.extensions_mut().insert(tx.slot());
    // Lets lock layers inside pass their locks to the transaction, because the locks must last until the commit.
    let open = OpenCommit::around(request.extensions_mut(), Reads::Committed);
    let longest = shared.queue.longest;
    // If a lock layer is outside, this layer's setting is ignored, because the handler also needs the outer lock.
    let is_locked = request.extensions().get::<Held>().is_some();
    let work: BoxFuture<'static, _> = Box::pin(async move {
        let answer = run(inner, request, tx, &open, &shared.http, &in_flight, longest).await;
        open.end().await;
        // Drops in this order, because all keys must be free when no request is in flight.
        drop(admission);
        drop(in_flight);
        answer
    });
    if is_locked { work.await } else { Finish::new(work).await }
}

async fn run<S, B, R>(
    inner: S,
    request: Request<B>,
    tx: Tx,
    open: &OpenCommit,
    http: &Http,
    in_flight: &InFlightRequest,
    longest: Option<Duration>,
) -> Result<Response<LockBody<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    let called = call(inner, request);
    let handled = match longest {
        Some(longest) => timeout(longest, called).await.ok(),
        None => Some(called.await),
    };
    let guard = tx.into_guard();
    let Some(handled) = handled else {
        error!(?longest, "a handler had its transaction for too long and was dropped");
        roll_back(guard).await;
        return Ok(failed("held-too-long", "the service took too long; nothing was done"));
    };
    let is_final =
        |response: &Response<R>| response.status().is_success() || response.status().is_redirection();
    let lost = open.lost();
    let response = match handled {
        Ok(response) if is_final(&response) && lost.is_none() => response,
        other => {
            roll_back(guard).await;
            return match lost {
                Some(reason) if other.as_ref().is_ok_and(is_final) => {
                    <Http as Transport<Request<B>, Response<R>, S::Error>>::refuse(
                        http,
                        Refused::Lost(reason),
                    )
                }
                _ => other.map(|response| response.map(|body| LockBody::inner(body, None))),
            };
        }
    };
    let Some(guard) = guard else {
        error!(
            "the handler has returned, but something it has left behind keeps its `SharedTx`: rolled back"
        );
        return Ok(failed("commit-failed", "the service did not finish its work; nothing was done"));
    };
    match guard.commit().await {
        Ok(()) => Ok(response.map(|body| LockBody::inner(body, None))),
        Err(error) => {
            in_flight.stats().count_release_failed();
            error!(%error, "a commit failed, and the handler's answer with it");
            Ok(match error.kind() {
                ErrorKind::OutcomeUnknown => failed(
                    "commit-unknown",
                    "it is not known whether the work was done; look before trying again",
                ),
                _ => failed("commit-failed", "the work could not be committed; nothing was done"),
            })
        }
    }
}

async fn roll_back(guard: Option<XactGuard>) {
    if let Some(guard) = guard
        && let Err(error) = guard.rollback().await
    {
        warn!(%error, "a transaction was not rolled back in order; its connection ends it");
    }
}

fn failed<R>(kind: &'static str, detail: &str) -> Response<LockBody<R>> {
    Problem { kind, ..Problem::internal(detail) }.response().map(LockBody::refusal)
}

impl<S: Clone, K> Clone for InTx<S, K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, K> fmt::Debug for InTx<S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InTx").field("inner", &self.inner).finish_non_exhaustive()
    }
}
