//! A consumer of a channel. Events of one credit holder are booked one after the other. Events of several holders are
//! booked side by side.
//!
//! ```text
//! cargo run -p leasehold-tower --features postgres --example consumer
//! cargo run -p leasehold-tower --features postgres --example consumer -- postgres://localhost/ledger
//! ```
//!
//! Without a URL the lock layer guards a ledger in memory. With one, each event is a transaction that begins with the
//! same lock.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_api::Lock;
use leasehold_postgres_advisory::XactLocks;
use leasehold_tower::{LockLayer, Message, MessageTemplate, Refused};
use serde::Serialize;
use sqlx::PgPool;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

/// The key of an event, with the name of its field as the producer writes it.
const KEY: &str = "ledger:{{event.credit_holder_id}}";

/// A request to spend.
#[derive(Clone, Debug, Serialize)]
pub struct Spend {
    /// Missing in an event that its producer got wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credit_holder_id: Option<u64>,
    /// The amount to spend.
    pub amount: i64,
}

/// The outcome of an event.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The amount is spent.
    Booked,
    /// The balance is too low.
    NotEnough,
    /// The event goes back into the channel: the lock was busy, or the store was away.
    Again,
    /// The event goes to the dead letters, because it can never be handled.
    Dead(String),
}

/// The balance of each credit holder. A holder starts with 100.
pub type Balances = Arc<Mutex<HashMap<u64, i64>>>;

/// Handles all events, each in a task, under the lock of its credit holder.
pub async fn consume(
    mut events: Receiver<Spend>,
    lock: Arc<dyn Lock>,
    balances: Balances,
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    let refused = |why: Refused| match why.retry_after() {
        Some(_) => Ok(Outcome::Again),
        None => Ok(Outcome::Dead(why.to_string())),
    };
    let layer = LockLayer::with(lock, MessageTemplate::parse(KEY)?, Message(refused));
    let book = service_fn(move |event: Spend| book(event, Arc::clone(&balances)));
    let service = ServiceBuilder::new().layer(layer.wait(Duration::from_secs(60))).service(book);
    let mut tasks = JoinSet::new();
    while let Some(event) = events.recv().await {
        tasks.spawn(service.clone().oneshot(event));
    }
    tasks.join_all().await.into_iter().map(|outcome| Ok(outcome?)).collect()
}

async fn book(event: Spend, balances: Balances) -> Result<Outcome, std::convert::Infallible> {
    let balances = || balances.lock().unwrap_or_else(PoisonError::into_inner);
    let holder = event.credit_holder_id.unwrap_or_default();
    let balance = balances().get(&holder).copied().unwrap_or(100);
    // Without the lock, another event would read the same balance here.
    tokio::task::yield_now().await;
    if balance < event.amount {
        return Ok(Outcome::NotEnough);
    }
    balances().insert(holder, balance - event.amount);
    Ok(Outcome::Booked)
}

/// Handles all events, each in a transaction that begins with the lock of its credit holder.
pub async fn consume_in_transactions(
    mut events: Receiver<Spend>,
    pool: PgPool,
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    let locks = XactLocks::new("leasehold".parse()?);
    let template = MessageTemplate::parse(KEY)?;
    let mut tasks = JoinSet::new();
    while let Some(event) = events.recv().await {
        let (locks, template, pool) = (locks.clone(), template.clone(), pool.clone());
        tasks.spawn(async move {
            let key = match template.key(&event) {
                Ok(key) => key,
                Err(error) => return Ok(Outcome::Dead(error.to_string())),
            };
            let mut tx = match locks.begin(&pool, &key, Duration::from_secs(60)).await {
                Ok(tx) => tx,
                Err(error) if error.is_retryable() => return Ok(Outcome::Again),
                Err(error) => return Err(Box::<dyn Error + Send + Sync>::from(error)),
            };
            let spend = "INSERT INTO spent SELECT $1, $2
                WHERE 100 - coalesce((SELECT sum(amount) FROM spent WHERE holder = $1), 0) >= $2";
            let holder = event.credit_holder_id.unwrap_or_default().cast_signed();
            let done = sqlx::query(spend).bind(holder).bind(event.amount).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(if done.rows_affected() == 1 { Outcome::Booked } else { Outcome::NotEnough })
        });
    }
    tasks
        .join_all()
        .await
        .into_iter()
        .map(|outcome| outcome.map_err(|error| error as Box<dyn Error>))
        .collect()
}

/// Five events of one holder, two of another, and one without a holder.
pub fn events() -> Receiver<Spend> {
    let of = |credit_holder_id, amount| Spend { credit_holder_id, amount };
    let all = [of(Some(1), 30), of(Some(2), 60), of(None, 1)];
    let all = [&all[..1], &all, &all[..2], &all[..1], &all[..1]].concat();
    let (sender, receiver) = tokio::sync::mpsc::channel(all.len());
    for event in all {
        drop(sender.try_send(event));
    }
    receiver
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut outcomes = match std::env::args().nth(1) {
        None => consume(events(), Arc::new(leasehold_memory::connect()?), Balances::default()).await?,
        Some(url) => {
            let pool = PgPool::connect(&url).await?;
            sqlx::query("CREATE TABLE IF NOT EXISTS spent (holder bigint, amount bigint)")
                .execute(&pool)
                .await?;
            consume_in_transactions(events(), pool).await?
        }
    };
    outcomes.sort();
    for outcome in outcomes {
        println!("{outcome:?}");
    }
    Ok(())
}
