//! The request handlers. `spend` is the same with and without a lock around it.

use std::num::NonZeroU32;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Form, Json};
use leasehold::idempotency::IdemTx;
use leasehold::postgres_advisory::XactLocks;
use leasehold::postgres_ttl::LeaseFence;
use leasehold::{Error, ErrorKind, key};
use leasehold_tower::{Held, SharedTx};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::domain::{self, Entries as _, SpendError, Unavailable};
use crate::store::Store;
use crate::trace::Trace;

#[derive(Deserialize)]
pub(crate) struct Amount {
    amount: NonZeroU32,
}

#[derive(Serialize)]
pub(crate) struct Balance {
    holder: i64,
    balance: i64,
}

/// Handles `POST /accounts/{holder}/spend`, either without a lock or with a lock layer around it. `trace` records the
/// request for the page.
pub(crate) async fn spend(
    State(store): State<Store>,
    Path(holder): Path<i64>,
    trace: Trace,
    Form(Amount { amount }): Form<Amount>,
) -> Result<Json<Balance>, Refusal> {
    let mut entries = store.entries().await?;
    let balance = domain::spend(&mut trace.over(&mut entries), holder, amount).await?;
    Ok(Json(Balance { holder, balance }))
}

/// Handles `POST /accounts/{holder}/spend` with the lock layer around it, in a transaction that is committed only while
/// the lease is held.
pub(crate) async fn spend_fenced(
    State(pool): State<PgPool>,
    held: Held,
    Path(holder): Path<i64>,
    trace: Trace,
    Form(Amount { amount }): Form<Amount>,
) -> Result<Json<Balance>, Refusal> {
    let fence = held.extension::<LeaseFence>();
    let fence = fence.ok_or_else(|| Error::unsupported("leases in Postgres to fence a transaction with"))?;
    let mut tx = pool.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
    let balance = domain::spend(&mut trace.over(&mut *tx), holder, amount).await?;
    // Last, because the next holder waits for a fenced transaction. The server compares the token with its present one.
    fence.fence(&mut tx).await?;
    tx.commit().await?;
    Ok(Json(Balance { holder, balance }))
}

/// Handles `POST /accounts/{holder}/spend` in the transaction of an `IdempotencyLayer`, which commits entry, key and
/// response.
pub(crate) async fn spend_once(
    mut tx: IdemTx,
    Path(holder): Path<i64>,
    trace: Trace,
    Form(Amount { amount }): Form<Amount>,
) -> Result<Json<Balance>, Refusal> {
    let balance = domain::spend(&mut trace.over(&mut *tx), holder, amount).await?;
    Ok(Json(Balance { holder, balance }))
}

/// The state of [`spend_in_own_tx`], which acquires the lock in a separate transaction.
#[derive(Clone, Debug)]
pub(crate) struct Transactions {
    pub(crate) locks: XactLocks,
    pub(crate) pool: PgPool,
    pub(crate) wait: Duration,
}

/// Handles `POST /accounts/{holder}/spend` in a transaction that begins with the lock. No layer is around it.
pub(crate) async fn spend_in_own_tx(
    State(transactions): State<Transactions>,
    Path(holder): Path<i64>,
    trace: Trace,
    Form(Amount { amount }): Form<Amount>,
) -> Result<Json<Balance>, Refusal> {
    let Transactions { locks, pool, wait } = transactions;
    let mut tx = locks.begin(&pool, &key!["ledger", holder]?, wait).await?;
    // If this returns early, the transaction is dropped, which rolls back and releases the lock.
    let balance = domain::spend(&mut trace.over(&mut *tx), holder, amount).await?;
    tx.commit().await?;
    Ok(Json(Balance { holder, balance }))
}

/// Handles `POST /accounts/{holder}/spend` in the transaction of a `TxLayer`, which commits if this returns `Ok`.
pub(crate) async fn spend_in_shared_tx(
    mut tx: SharedTx,
    Path(holder): Path<i64>,
    trace: Trace,
    Form(Amount { amount }): Form<Amount>,
) -> Result<Json<Balance>, Refusal> {
    let balance = domain::spend(&mut trace.over(&mut *tx), holder, amount).await?;
    Ok(Json(Balance { holder, balance }))
}

/// Handles `POST /accounts/{holder}/top-up`. Needs no lock, because a top-up is independent of the balance.
pub(crate) async fn top_up(
    State(store): State<Store>,
    Path(holder): Path<i64>,
    Form(Amount { amount }): Form<Amount>,
) -> Result<StatusCode, Refusal> {
    store.entries().await?.append(holder, amount.get().into()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Handles `GET /accounts/{holder}`.
pub(crate) async fn balance(
    State(store): State<Store>,
    Path(holder): Path<i64>,
) -> Result<Json<Balance>, Refusal> {
    let balance = store.entries().await?.balance(holder).await?;
    Ok(Json(Balance { holder, balance }))
}

/// The reason why a request was not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(transparent)]
    Spend(#[from] SpendError),
    #[error(transparent)]
    Lock(#[from] Error),
}

impl From<Unavailable> for Refusal {
    fn from(error: Unavailable) -> Self {
        Self::Spend(error.into())
    }
}

impl From<sqlx::Error> for Refusal {
    fn from(error: sqlx::Error) -> Self {
        Unavailable::from(error).into()
    }
}

#[derive(Serialize)]
struct Problem {
    error: String,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match &self {
            Self::Spend(SpendError::Short { .. }) => {
                let problem = Problem { error: self.to_string() };
                (StatusCode::PAYMENT_REQUIRED, Json(problem)).into_response()
            }
            Self::Lock(error) if error.kind() == ErrorKind::Timeout => {
                let problem = Problem { error: "another request holds the lock; try again".to_owned() };
                (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], Json(problem)).into_response()
            }
            Self::Lock(error) if error.kind() == ErrorKind::Lost => {
                let problem = Problem {
                    error: "this request lost its lock, and nothing was spent; try again".to_owned(),
                };
                (StatusCode::CONFLICT, Json(problem)).into_response()
            }
            Self::Spend(SpendError::Store(_)) | Self::Lock(_) => {
                tracing::error!(error = &self as &dyn std::error::Error, "a request failed");
                let problem =
                    Problem { error: "the ledger is out of order; look before trying again".to_owned() };
                (StatusCode::INTERNAL_SERVER_ERROR, Json(problem)).into_response()
            }
        }
    }
}
