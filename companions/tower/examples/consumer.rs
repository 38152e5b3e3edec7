//! A consumer of a channel. Events of one credit holder are booked one after the other. Events of several holders are
//! booked side by side.
//!
//! ```text
//! cargo run -p leasehold-tower --features postgres --example consumer
//! cargo run -p leasehold-tower --features postgres --example consumer -- postgres://localhost/ledger
//! ```
//!
//! Without a URL the lock layer guards a ledger in memory. With one, the transaction layer books each event in a
//! transaction that begins with the same lock.

use std::collections::HashMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold_api::Lock;
use leasehold_postgres_advisory::XactLocks;
use leasehold_tower::{LockLayer, Message, MessageTemplate, Refused, SharedTx, TxLayer};
use serde::Serialize;
use sqlx::PgPool;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

/// The key of an event, with the name of its field as the producer writes it.
const KEY: &str = "ledger:{{event.credit_holder_id}}";

/// The maximum wait of an event for its lock.
const WAIT: Duration = Duration::from_secs(60);

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
    /// The event goes to the dead letters, because it can never be handled, or a person must check its effects.
    Dead(String),
}

/// The balance of each credit holder. A holder starts with 100.
pub type Balances = Arc<Mutex<HashMap<u64, i64>>>;

/// The transport of both layers. Its function makes an outcome of a refused event.
pub type Events<E> = Message<fn(Refused) -> Result<Outcome, E>>;

/// Handles all events, each in a task, by a service with one of the layers around it.
pub async fn consume<S>(mut events: Receiver<Spend>, service: S) -> Result<Vec<Outcome>, Box<dyn Error>>
where
    S: Service<Spend, Response = Outcome, Error: Error + Send, Future: Send> + Clone + Send + 'static,
{
    let mut tasks = JoinSet::new();
    while let Some(event) = events.recv().await {
        tasks.spawn(service.clone().oneshot(event));
    }
    tasks.join_all().await.into_iter().map(|outcome| Ok(outcome?)).collect()
}

fn refused<E>(why: Refused) -> Result<Outcome, E> {
    Ok(if why.retry_after().is_some() { Outcome::Again } else { Outcome::Dead(why.to_string()) })
}

/// Returns the layer that calls [`book`] under the lock of its credit holder.
pub fn lock_layer<E>(lock: Arc<dyn Lock>) -> Result<LockLayer<MessageTemplate, Events<E>>, Box<dyn Error>> {
    Ok(LockLayer::with(lock, MessageTemplate::parse(KEY)?, Message(refused as _)).wait(WAIT))
}

/// Spends from the balances in memory.
pub async fn book(event: Spend, balances: Balances) -> Outcome {
    let balances = || balances.lock().unwrap_or_else(PoisonError::into_inner);
    let holder = event.credit_holder_id.unwrap_or_default();
    let balance = balances().get(&holder).copied().unwrap_or(100);
    // Without the lock, another event would read the same balance here.
    tokio::task::yield_now().await;
    if balance < event.amount {
        return Outcome::NotEnough;
    }
    balances().insert(holder, balance - event.amount);
    Outcome::Booked
}

/// Returns the layer that calls [`book_in`] in a transaction that begins with the same lock.
pub fn transaction_layer<E>(pool: PgPool) -> Result<TxLayer<MessageTemplate, Events<E>>, Box<dyn Error>> {
    let locks = XactLocks::new("leasehold".parse()?);
    Ok(TxLayer::with(locks, pool, MessageTemplate::parse(KEY)?, Message(refused as _))?.wait(WAIT))
}

/// Spends in the transaction, which the layer commits afterwards.
pub async fn book_in(event: Spend, tx: &mut SharedTx) -> Result<Outcome, sqlx::Error> {
    let holder = event.credit_holder_id.unwrap_or_default().cast_signed();
    let spent = "SELECT coalesce(sum(amount), 0)::bigint FROM spent WHERE holder = $1";
    let spent: i64 = sqlx::query_scalar(spent).bind(holder).fetch_one(&mut **tx).await?;
    // Without the lock, another event would read the same sum here.
    if 100 - spent < event.amount {
        return Ok(Outcome::NotEnough);
    }
    let insert = sqlx::query("INSERT INTO spent VALUES ($1, $2)").bind(holder).bind(event.amount);
    insert.execute(&mut **tx).await?;
    Ok(Outcome::Booked)
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
    let mut outcomes = run(std::env::args().nth(1)).await?;
    outcomes.sort();
    for outcome in outcomes {
        println!("{outcome:?}");
    }
    Ok(())
}

/// Handles [`events`]: without a URL in memory, with one in transactions.
pub async fn run(url: Option<String>) -> Result<Vec<Outcome>, Box<dyn Error>> {
    match url {
        None => {
            let layer = lock_layer(Arc::new(leasehold_memory::connect()?))?;
            let balances = Balances::default();
            let service = service_fn(move |event| {
                let balances = Arc::clone(&balances);
                async move { Ok::<_, std::convert::Infallible>(book(event, balances).await) }
            });
            consume(events(), layer.layer(service)).await
        }
        Some(url) => {
            let pool = PgPool::connect(&url).await?;
            let table = "CREATE TABLE IF NOT EXISTS spent (holder bigint, amount bigint)";
            sqlx::query(table).execute(&pool).await?;
            let layer = transaction_layer(pool)?;
            let service = service_fn(async |(event, mut tx)| book_in(event, &mut tx).await);
            consume(events(), layer.layer(service)).await
        }
    }
}
