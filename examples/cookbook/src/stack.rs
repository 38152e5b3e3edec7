//! A service with all layers: `docs/cookbook/stack.md`.

use std::sync::Arc;
use std::time::Duration;

use axum::error_handling::HandleErrorLayer;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::post;
use axum::{BoxError, Router};
use leasehold_api::{Lock, key};
use leasehold_idempotency::{IdemTx, IdempotencyError, IdempotencyLayer, PgIdempotency};
use leasehold_postgres_advisory::XactLocks;
use leasehold_tower::{LockLayer, Template, TemplateError};
use sqlx::{PgConnection, PgPool};
use tower::ServiceBuilder;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::timeout::TimeoutLayer;

use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/stack.md");

const SPEND: &str = sql(PAGE, "spend");

/// Time that a client waits for a response.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum wait of a request for its lock. It is shorter than the client's patience.
const WAIT: Duration = Duration::from_secs(5);
/// Number of keys that one run of the purge removes.
const PURGED: u64 = 10_000;
const HOUR: Duration = Duration::from_secs(3600);

/// The reason why the service does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// The tables of the keys cannot be installed.
    #[error("the tables of idempotency keys cannot be used")]
    Keys(#[from] IdempotencyError),
    /// The settings of the lock layer are invalid.
    #[error("the lock layer cannot be used")]
    Lock(#[from] leasehold_api::Error),
    /// The key's template is invalid.
    #[error("the template of the key is wrong")]
    Template(#[from] TemplateError),
}

/// The routes, and the layers to await when the service stops.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stack {
    /// The routes of two ways to spend.
    pub router: Router,
    /// The lock around a request.
    pub lock: LockLayer<Template>,
    /// The idempotency keys.
    pub keys: IdempotencyLayer<PgIdempotency>,
}

/// The sender of the request.
#[derive(Clone, Debug)]
struct User(String);

/// Creates the service from its database and its lock. `at_once` is the number of requests that can be in their
/// transactions at once. It must be smaller than the number of connections in the pool.
///
/// # Errors
///
/// [`StackError`].
///
/// # Cancel safety
///
/// If dropped, installed tables stay.
pub async fn stack(
    pool: PgPool,
    lock: Arc<dyn Lock>,
    locks: XactLocks,
    at_once: usize,
) -> Result<Stack, StackError> {
    let store = PgIdempotency::new(pool);
    store.migrate().await?;
    let lock = LockLayer::new(lock, Template::parse("ledger:{path.holder|int}")?).wait(WAIT).check()?;
    let keys = IdempotencyLayer::new(store, |request| Some(request.extensions.get::<User>()?.0.clone()));
    let outermost = ServiceBuilder::new()
        .layer(from_fn(authenticate))
        .layer(HandleErrorLayer::new(async |_: BoxError| StatusCode::GATEWAY_TIMEOUT))
        .layer(TimeoutLayer::new(PATIENCE));
    let limit = GlobalConcurrencyLimitLayer::new(at_once);
    let locked = ServiceBuilder::new().layer(lock.clone()).layer(limit.clone()).layer(keys.clone());
    let in_tx = ServiceBuilder::new().layer(limit).layer(keys.clone());
    let router = Router::new()
        .route("/ledger/{holder}/spend", post(spend).route_layer(locked))
        .route("/ledger/{holder}/spend-in-tx", post(spend_in_tx).route_layer(in_tx).with_state(locks))
        .route_layer(outermost);
    Ok(Stack { router, lock, keys })
}

async fn spend(Path(holder): Path<i64>, mut tx: IdemTx) -> Result<StatusCode, StatusCode> {
    take_ten(&mut tx, holder).await
}

async fn spend_in_tx(
    State(locks): State<XactLocks>,
    Path(holder): Path<i64>,
    mut tx: IdemTx,
) -> Result<StatusCode, StatusCode> {
    let key = key!["ledger", holder].map_err(failed)?;
    locks.lock_in(&mut tx, &key, WAIT).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    take_ten(&mut tx, holder).await
}

async fn take_ten(tx: &mut PgConnection, holder: i64) -> Result<StatusCode, StatusCode> {
    let spent = sqlx::query(SPEND).bind(holder).execute(tx).await.map_err(failed)?;
    // Returns a refusal as a response and not as an error, because responses are stored. A repetition then gets the
    // same refusal.
    Ok(if spent.rows_affected() == 1 { StatusCode::OK } else { StatusCode::PAYMENT_REQUIRED })
}

fn failed(error: impl std::error::Error) -> StatusCode {
    tracing::error!(%error, "a spend failed");
    StatusCode::INTERNAL_SERVER_ERROR
}

/// Takes the user from a header, which it trusts, in place of the authentication of a real service.
async fn authenticate(mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let user = request.headers().get("x-user").and_then(|user| user.to_str().ok());
    let user = User(user.ok_or(StatusCode::UNAUTHORIZED)?.to_owned());
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

/// Removes expired keys, because the store does not remove them on its own.
///
/// # Cancel safety
///
/// Safe, because it is meant to be aborted.
pub async fn purge_each_hour(store: PgIdempotency) {
    loop {
        if let Err(error) = store.purge(PURGED).await {
            tracing::warn!(%error, "expired idempotency keys were not removed");
        }
        tokio::time::sleep(HOUR).await;
    }
}
