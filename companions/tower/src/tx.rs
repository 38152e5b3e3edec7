//! The lock and the handler in one transaction.

mod begin;
mod carry;
mod shared;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;
use leasehold_api::{BoxFuture, Error, ErrorKind};
use leasehold_postgres_advisory::{XactGuard, XactLocks};
use sqlx::PgPool;
use tokio::time::timeout;
use tower_layer::Layer;
use tower_service::Service;
use tracing::{debug, error, warn};

use crate::commit::{CommitSlot, OpenCommit};
use crate::finish::Finish;
use crate::http::Http;
use crate::key::{KeyError, KeyFor};
use crate::service::call;
use crate::stats::{AdmissionOutcome, InFlightRequest, LayerCounters, LayerStats};
use crate::transport::{RETRY_AFTER, Refused, Transport};
use begin::{BegunTx, TxQueue};
use carry::{CarryTx, Commits};
use shared::Tx;
pub use shared::{SharedTx, SharedTxError};

/// Puts a transaction that begins with a lock around a service. The handler works in it through [`SharedTx`]. Work and
/// lock end in the same instant.
///
/// - **HTTP**, with [`new`](Self::new): the layer commits after a 2xx or 3xx response and rolls back otherwise.
/// - **Messages** of any type, with [`with`](Self::with) and [`Message`](crate::Message): the service inside is called
///   with `(message, SharedTx)`. The layer commits after `Ok` and rolls back after `Err`.
///
/// If the commit fails, the layer replaces the response, because the handler's response would be untrue: by
/// [`NotCommitted`](Refused::NotCommitted) (nothing was done) or [`CommitUnknown`](Refused::CommitUnknown) (check before
/// trying again). For HTTP that is status 500 with a problem of `type` `...:commit-failed` or `...:commit-unknown`.
///
/// - If the client leaves, the handler completes and its transaction is committed. Inside a lock layer for HTTP, the
///   setting of that layer applies.
/// - A lock layer inside passes its lock to the transaction, which releases it after the commit. Another `TxLayer`
///   inside refuses its requests, and so does this one inside a layer that commits its own transaction ([`OpenCommit`]).
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
pub struct TxLayer<K, T = Http> {
    shared: Arc<TxLayerSettings<K, T>>,
}

struct TxLayerSettings<K, T> {
    key: Arc<K>,
    queue: TxQueue,
    wait: Duration,
    max_waiters: usize,
    transport: T,
    counters: Arc<LayerCounters>,
}

impl<K> TxLayer<K> {
    /// Creates a layer for HTTP with transactions of `pool`. `key` finds the key of a request.
    ///
    /// By default a request waits at most 5 seconds for connection and lock together.
    ///
    /// # Errors
    ///
    /// [`NoRuntime`](ErrorKind::NoRuntime) outside a tokio runtime.
    pub fn new(locks: XactLocks, pool: PgPool, key: K) -> Result<Self, Error> {
        Self::with(locks, pool, key, Http::default())
    }

    /// Sets the status for a request that did not get the lock, as
    /// [`LockLayer::contended`](crate::LockLayer::contended).
    #[must_use]
    pub fn contended(self, status: StatusCode) -> Self {
        self.set(|shared| shared.transport.set_contended(status))
    }
}

impl<K, T: Clone> TxLayer<K, T> {
    /// Creates a layer for the responses of `transport`, which is [`Http`] or [`Message`](crate::Message). `key` finds
    /// the key of a message, as [`MessageTemplate`](crate::MessageTemplate) does.
    ///
    /// By default a request waits at most 5 seconds for connection and lock together.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with(locks: XactLocks, pool: PgPool, key: K, transport: T) -> Result<Self, Error> {
        let shared = TxLayerSettings {
            key: Arc::new(key),
            queue: TxQueue::new(locks, pool)?,
            wait: Duration::from_secs(5),
            max_waiters: 1024,
            transport,
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
    /// dropped, its transaction rolled back, and the request refused as [`HeldTooLong`](Refused::HeldTooLong), for HTTP
    /// with status 500 and the problem `...:held-too-long`.
    ///
    /// A handler that blocks its thread cannot be dropped. After one more second, another connection of the pool
    /// terminates its session, which releases the lock and makes its commit fail. This needs another free thread of
    /// the runtime.
    #[must_use]
    pub fn max_hold(self, longest: Duration) -> Self {
        self.set(|shared| shared.queue.bound(longest))
    }

    /// Limits the waiting requests, as [`LockLayer::max_waiters`](crate::LockLayer::max_waiters).
    #[must_use]
    pub fn max_waiters(self, limit: usize) -> Self {
        self.set(|shared| shared.max_waiters = limit)
    }

    fn set(mut self, change: impl FnOnce(&mut TxLayerSettings<K, T>)) -> Self {
        change(Arc::make_mut(&mut self.shared));
        self
    }
}

impl<K, T> TxLayer<K, T> {
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
}

impl<K, T> Clone for TxLayer<K, T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<K, T: Clone> Clone for TxLayerSettings<K, T> {
    fn clone(&self) -> Self {
        Self {
            key: Arc::clone(&self.key),
            queue: self.queue.clone(),
            wait: self.wait,
            max_waiters: self.max_waiters,
            transport: self.transport.clone(),
            counters: Arc::clone(&self.counters),
        }
    }
}

impl<K, T> fmt::Debug for TxLayer<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxLayer").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl<S, K, T> Layer<S> for TxLayer<K, T> {
    type Service = InTx<S, K, T>;

    fn layer(&self, inner: S) -> Self::Service {
        InTx { inner, shared: Arc::clone(&self.shared) }
    }
}

/// A service in a transaction with a lock, made by a [`TxLayer`]. It is always ready, like [`Locked`](crate::Locked).
pub struct InTx<S, K, T = Http> {
    inner: S,
    shared: Arc<TxLayerSettings<K, T>>,
}

impl<S, K, T, Req> Service<Req> for InTx<S, K, T>
where
    S: Service<T::Carried> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
    K: KeyFor<Req>,
    T: CarryTx<Req> + Commits<S::Response> + Transport<Req, S::Response, S::Error>,
    Req: Send + 'static,
{
    type Response = T::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<T::Response, S::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        Box::pin(serve(Arc::clone(&self.shared), self.inner.clone(), request))
    }
}

async fn serve<S, K, T, Req>(
    shared: Arc<TxLayerSettings<K, T>>,
    inner: S,
    request: Req,
) -> Result<T::Response, S::Error>
where
    S: Service<T::Carried> + Send + 'static,
    S::Future: Send,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
    K: KeyFor<Req>,
    T: CarryTx<Req> + Commits<S::Response> + Transport<Req, S::Response, S::Error>,
    Req: Send + 'static,
{
    let refuse = |why| shared.transport.refuse(why);
    let (request, key) = shared.key.key_for(request).await;
    let key = match key {
        Ok(key) => key,
        Err(error) => {
            shared.counters.count(AdmissionOutcome::NoKey);
            error.log();
            return refuse(Refused::NoKey(error));
        }
    };
    if CommitSlot::of(shared.transport.extensions(&request)).is_some() {
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
    // If a lock layer is outside, this layer's setting is ignored, because the handler also needs the outer lock.
    let is_locked = shared.transport.held(&request).is_some();
    let (request, open) = shared.transport.carry(request, &tx).await;
    let work: BoxFuture<'static, _> = Box::pin(async move {
        let answer = shared.run(inner, request, tx, &open, &in_flight).await;
        open.end().await;
        // Drops in this order, because all keys must be free when no request is in flight.
        drop(admission);
        drop(in_flight);
        answer
    });
    if is_locked { work.await } else { Finish::new(work).await }
}

impl<K, T> TxLayerSettings<K, T> {
    /// Calls the handler, and commits or rolls back.
    async fn run<S, Req>(
        &self,
        inner: S,
        request: T::Carried,
        tx: Tx,
        open: &OpenCommit,
        in_flight: &InFlightRequest,
    ) -> Result<T::Response, S::Error>
    where
        S: Service<T::Carried>,
        T: CarryTx<Req> + Commits<S::Response> + Transport<Req, S::Response, S::Error>,
    {
        let transport = &self.transport;
        let called = open.scope(call(inner, request));
        let handled = match self.queue.longest {
            Some(longest) => timeout(longest, called).await.ok(),
            None => Some(called.await),
        };
        let guard = tx.into_guard();
        let Some(handled) = handled else {
            error!(longest = ?self.queue.longest, "a handler had its transaction for too long and was dropped");
            roll_back(guard).await;
            return transport.refuse(Refused::HeldTooLong);
        };
        let response = match handled {
            Ok(response) if transport.commits(&response) => response,
            other => {
                roll_back(guard).await;
                return other.map(|response| transport.pass(response, None).0);
            }
        };
        if let Some(reason) = open.lost() {
            roll_back(guard).await;
            return transport.refuse(Refused::Lost(reason));
        }
        let Some(guard) = guard else {
            error!(
                "the handler has returned, but something it has left behind keeps its `SharedTx`: rolled back"
            );
            let kept = "the handler has kept its `SharedTx`; drop it before the handler returns";
            return transport.refuse(Refused::NotCommitted(Error::new(ErrorKind::InvalidOption, kept)));
        };
        match guard.commit().await {
            Ok(()) => Ok(transport.pass(response, None).0),
            Err(error) => {
                in_flight.stats().count_release_failed();
                error!(%error, "a commit failed, and the handler's answer with it");
                transport.refuse(match error.kind() {
                    ErrorKind::OutcomeUnknown => Refused::CommitUnknown(error),
                    _ => Refused::NotCommitted(error),
                })
            }
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

impl<S: Clone, K, T> Clone for InTx<S, K, T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, K, T> fmt::Debug for InTx<S, K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InTx").field("inner", &self.inner).finish_non_exhaustive()
    }
}
