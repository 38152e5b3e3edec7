//! The routes for observation: the page, its figures, the switch between locks, and the load.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tower_service::Service as _;

use crate::domain::Unavailable;
use crate::lanes;
use crate::mode::Mode;
use crate::service::{Error, GRACE, Service};
use crate::store::Account;
use crate::tally::Tallied;

const PAGE: &str = include_str!("page.html");
/// The content security policy: the page is a single file and requests only this service.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";

pub(crate) fn routes(service: Arc<Service>) -> Router {
    Router::new()
        .route("/", get(async || ([(header::CONTENT_SECURITY_POLICY, POLICY)], Html(PAGE))))
        .route("/figures", get(figures))
        .route("/lock", post(switch))
        .route("/load", post(load))
        .merge(lanes::routes())
        .fallback(accounts)
        .with_state(service)
}

/// Forwards all other requests to the account routes of the current guard.
async fn accounts(State(service): State<Arc<Service>>, request: Request) -> Response {
    let current = service.current.read().await;
    let is_spend = request.method() == Method::POST && request.uri().path().ends_with("/spend");
    let response = current.routes.clone().call(request).await.into_response();
    if is_spend {
        service.tally.count(response.status());
    }
    response
}

#[derive(Serialize)]
struct Figures {
    store: &'static str,
    lock: Mode,
    /// The values accepted by `POST /lock`.
    locks: Vec<Mode>,
    load: bool,
    /// Number of requests that wait for the lock of their account.
    waiting: usize,
    #[serde(flatten)]
    tallied: Tallied,
    double_spends: i64,
    accounts: Vec<Account>,
}

async fn figures(State(service): State<Arc<Service>>) -> Result<Json<Figures>, Refusal> {
    let current = Arc::clone(&*service.current.read().await);
    let accounts = service.parts.store.accounts().await?;
    let waiting = match current.waiting() {
        Some(waiting) => waiting,
        None => service.parts.store.waiting().await?,
    };
    Ok(Json(Figures {
        store: service.parts.store.name(),
        lock: current.mode,
        locks: service.parts.guards.iter().map(|guarded| guarded.mode).collect(),
        load: service.load.is_running(),
        waiting,
        tallied: service.tally.read(),
        double_spends: accounts.iter().map(|account| account.double_spends).sum(),
        accounts,
    }))
}

#[derive(Deserialize)]
struct Switch {
    lock: Mode,
}

async fn switch(
    State(service): State<Arc<Service>>,
    Json(Switch { lock }): Json<Switch>,
) -> Result<StatusCode, Refusal> {
    // Switches in a task, because the switch must complete even if the client leaves.
    let switched = tokio::spawn(async move { service.switch(lock).await }).await;
    switched.unwrap_or(Err(Refusal::Panicked)).map(|()| StatusCode::NO_CONTENT)
}

impl Service {
    /// Guards spending by `mode` and resets the accounts. Waits until no request runs, because requests before and
    /// after the switch use different locks.
    async fn switch(&self, mode: Mode) -> Result<(), Refusal> {
        let next = self.parts.guarded_by(mode).ok_or(Refusal::NotThere(mode))?;
        let alone = async {
            let current = self.current.write().await;
            current.idle().await;
            current
        };
        let mut current = timeout(GRACE, alone).await.map_err(|_| Refusal::Busy)?;
        self.parts.store.start_over().await?;
        self.tally.reset();
        *current = next;
        Ok(())
    }
}

#[derive(Deserialize)]
struct Run {
    run: bool,
}

async fn load(State(service): State<Arc<Service>>, Json(Run { run }): Json<Run>) -> StatusCode {
    if run {
        service.load.start();
    } else {
        service.load.stop().await;
    }
    StatusCode::NO_CONTENT
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("this service has no lock {0}; see `locks` of GET /figures")]
    NotThere(Mode),
    #[error("requests still run; try again")]
    Busy,
    #[error("the ledger cannot be read or written")]
    Store(#[from] Unavailable),
    #[error("the instances of the page do not start")]
    Lanes(#[from] Error),
    #[error("there is no such round; it was too long ago")]
    NoRound,
    #[error("the switch has failed")]
    Panicked,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self {
            Self::NotThere(_) => StatusCode::BAD_REQUEST,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::NoRound => StatusCode::NOT_FOUND,
            Self::Store(_) | Self::Lanes(_) | Self::Panicked => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status.is_server_error() {
            tracing::error!(error = &self as &dyn std::error::Error, "the page was not served");
        }
        (status, self.to_string()).into_response()
    }
}
