//! Puts the lock around the one route that reads, decides and writes.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::{MethodRouter, get, post};
use leasehold::Lock;
use leasehold::idempotency::{IdempotencyLayer, PgIdempotency};
use leasehold_tower::{BodyTemplate, LockLayer, OnLost, Template, TemplateError, TxLayer};
use sqlx::PgPool;

use crate::handlers::{
    Transactions, balance, spend, spend_fenced, spend_in_own_tx, spend_in_shared_tx, spend_once, top_up,
};
use crate::mode::Mode;
use crate::service::Error;
use crate::store::Store;

/// The routes of the accounts with one of the guards.
pub(crate) struct Guarded {
    pub(crate) mode: Mode,
    pub(crate) routes: Router,
    layer: Layer,
}

/// The layer around the route, if the guard has one. It counts the requests that wait for a lock or hold one.
enum Layer {
    None,
    Lock(LockLayer<BodyTemplate>),
    Tx(TxLayer<BodyTemplate>),
    Key(IdempotencyLayer<PgIdempotency>),
}

/// How a lock layer locks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Maximum wait of a request for its lock.
    pub(crate) wait: Duration,
    /// TTL of the leases, or `None` for the store's.
    pub(crate) ttl: Option<Duration>,
    pub(crate) on_lost: OnLost,
}

impl Terms {
    pub(crate) fn new(wait: Duration) -> Self {
        Self { wait, ttl: None, on_lost: OnLost::default() }
    }

    fn layer(self, lock: &Arc<dyn Lock>) -> Result<LockLayer<BodyTemplate>, Error> {
        let layer = LockLayer::new(Arc::clone(lock), key()?).wait(self.wait).on_lost(self.on_lost);
        let layer = match self.ttl {
            Some(ttl) => layer.ttl(ttl),
            None => layer,
        };
        Ok(layer.check()?)
    }
}

/// Returns the template of a request's key. `|int` maps `42` and `042` to one key, because the handler reads them as
/// one account. The form is read before the lock is acquired, because a slow sender must not block other requests.
fn key() -> Result<BodyTemplate, TemplateError> {
    Ok(Template::parse("ledger:{path.holder|int}")?.buffer_body(1024))
}

impl Guarded {
    pub(crate) fn by_nothing(store: &Store) -> Self {
        Self::new(Mode::None, store, post(spend).with_state(store.clone()), Layer::None)
    }

    pub(crate) fn by_lock(
        mode: Mode,
        store: &Store,
        lock: &Arc<dyn Lock>,
        terms: Terms,
    ) -> Result<Self, Error> {
        let layer = terms.layer(lock)?;
        let spending = post(spend).route_layer(layer.clone());
        Ok(Self::new(mode, store, spending.with_state(store.clone()), Layer::Lock(layer)))
    }

    pub(crate) fn by_fence(
        store: &Store,
        pool: &PgPool,
        lock: &Arc<dyn Lock>,
        terms: Terms,
    ) -> Result<Self, Error> {
        // Runs the handler to its end, because its commit fails after a loss.
        let layer = Terms { on_lost: OnLost::Tell, ..terms }.layer(lock)?;
        let spending = post(spend_fenced).route_layer(layer.clone());
        Ok(Self::new(Mode::Fence, store, spending.with_state(pool.clone()), Layer::Lock(layer)))
    }

    pub(crate) fn by_key(store: &Store, pool: &PgPool) -> Self {
        // There is one customer. A real service returns the authenticated user.
        let layer = IdempotencyLayer::new(PgIdempotency::new(pool.clone()), |_| Some("customer".to_owned()));
        let spending = post(spend_once).route_layer(layer.clone());
        Self::new(Mode::Key, store, spending, Layer::Key(layer))
    }

    pub(crate) fn by_own_tx(store: &Store, transactions: Transactions) -> Self {
        let spending = post(spend_in_own_tx).with_state(transactions);
        Self::new(Mode::Tx, store, spending, Layer::None)
    }

    pub(crate) fn by_layer_tx(store: &Store, transactions: Transactions) -> Result<Self, Error> {
        let Transactions { locks, pool, wait } = transactions;
        let layer = TxLayer::new(locks, pool, key()?)?.wait(wait);
        let spending = post(spend_in_shared_tx).route_layer(layer.clone());
        Ok(Self::new(Mode::LayerTx, store, spending, Layer::Tx(layer)))
    }

    fn new(mode: Mode, store: &Store, spending: MethodRouter, layer: Layer) -> Self {
        let routes = Router::new()
            .route("/accounts/{holder}", get(balance))
            .route("/accounts/{holder}/top-up", post(top_up))
            .with_state(store.clone())
            .route("/accounts/{holder}/spend", spending);
        Self { mode, routes, layer }
    }

    /// Returns the number of requests that wait for the lock. `None` if no layer counts them.
    pub(crate) fn waiting(&self) -> Option<usize> {
        match &self.layer {
            Layer::None | Layer::Key(_) => None,
            Layer::Lock(layer) => Some(layer.stats().waiting),
            Layer::Tx(layer) => Some(layer.stats().waiting),
        }
    }

    /// Resolves when no request of these routes holds a lock, including requests whose clients have left.
    pub(crate) async fn idle(&self) {
        match &self.layer {
            Layer::None => {}
            Layer::Lock(layer) => layer.idle().await,
            Layer::Tx(layer) => layer.idle().await,
            Layer::Key(layer) => layer.idle().await,
        }
    }
}
