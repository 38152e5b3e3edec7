//! A service that runs the requests of one account one after the other.
//!
//! ```text
//! cargo run -p leasehold-tower --features axum --example serve
//! curl -X POST localhost:3000/account/42/spend
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use leasehold_api::Lock;
use leasehold_tower::{LockLayer, Template};

/// The balance of each account. A real service has a database instead.
type Balances = Arc<Mutex<HashMap<i64, i64>>>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // With `leasehold_postgres_ttl` instead, instances on several machines exclude each other too.
    let lock: Arc<dyn Lock> = Arc::new(leasehold_memory::connect()?);
    let app = app(Arc::clone(&lock), Balances::default())?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    let stopped = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(stopped).await?;
    Ok(lock.close().await?)
}

/// Returns the service.
pub fn app(lock: Arc<dyn Lock>, balances: Balances) -> Result<Router, Box<dyn Error>> {
    let layer = LockLayer::new(lock, Template::parse("account:{path.id|int}")?).check()?;
    Ok(Router::new().route("/account/{id}/spend", post(spend).route_layer(layer)).with_state(balances))
}

/// Spends 10 of the initial 30 of an account.
async fn spend(Path(id): Path<i64>, State(balances): State<Balances>) -> (StatusCode, String) {
    let map = || balances.lock().unwrap_or_else(PoisonError::into_inner);
    let balance = map().get(&id).copied().unwrap_or(30);
    // Lets other requests run here. Without the lock, another request would read the same balance.
    tokio::task::yield_now().await;
    if balance < 10 {
        return (StatusCode::PAYMENT_REQUIRED, format!("{balance} left\n"));
    }
    map().insert(id, balance - 10);
    (StatusCode::OK, format!("{} left\n", balance - 10))
}
