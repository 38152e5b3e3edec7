//! Checks the output of the examples.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // Programs, of which the tests use parts.
#[path = "../examples/consumer.rs"]
mod consumer;
#[allow(dead_code, unreachable_pub)]
#[path = "../examples/serve.rs"]
mod serve;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use consumer::Outcome::{Booked, Dead, NotEnough};
use consumer::{Balances, Outcome, Spend};
use http::{Request, StatusCode};
use leasehold_tower::{LayerStats, SharedTx};
use test_bounds::within;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::task::JoinSet;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

/// Time limit that only a broken program reaches.
const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn of_five_requests_at_once_three_find_enough() {
    let app = serve::app(Arc::new(leasehold_memory::connect().unwrap()), Arc::default()).unwrap();
    let mut requests = JoinSet::new();
    for _ in 0..5 {
        let request = Request::post("/account/42/spend").body(Body::empty()).unwrap();
        requests.spawn(app.clone().oneshot(request));
    }
    let mut statuses: Vec<_> =
        requests.join_all().await.into_iter().map(|answer| answer.unwrap().status()).collect();
    statuses.sort();
    let (spent, refused) = (StatusCode::OK, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(statuses, [spent, spent, spent, refused, refused]);
}

/// The steps of handlers, in their order. The handlers of holder 1 wait at a gate before their end.
#[derive(Clone)]
struct Steps {
    log: UnboundedSender<String>,
    gate: Arc<Semaphore>,
}

impl Steps {
    fn new() -> (Self, UnboundedReceiver<String>) {
        let (log, steps) = unbounded_channel();
        (Self { log, gate: Arc::new(Semaphore::new(0)) }, steps)
    }

    fn opened() -> Self {
        let steps = Self::new().0;
        steps.gate.add_permits(Semaphore::MAX_PERMITS / 2);
        steps
    }

    /// Runs the work of an event. `spent` is the sum that the handler finds for holder 1.
    async fn around<T>(self, event: Spend, spent: i64, work: impl Future<Output = T>) -> T {
        let amount = event.amount;
        if event.credit_holder_id != Some(1) {
            let done = work.await;
            let _ = self.log.send(format!("{amount} of another holder is done"));
            return done;
        }
        let _ = self.log.send(format!("{amount} begins at {spent}"));
        let done = work.await;
        let _ = self.log.send(format!("{amount} is at the gate"));
        self.gate.acquire().await.unwrap().forget();
        let _ = self.log.send(format!("{amount} ends"));
        done
    }
}

/// Returns the handler of the example for balances in memory, with its steps.
fn in_memory(
    steps: Steps,
    balances: Balances,
) -> impl Service<Spend, Response = Outcome, Error = Infallible, Future: Send> + Clone {
    service_fn(move |event: Spend| {
        let (steps, balances) = (steps.clone(), Arc::clone(&balances));
        async move {
            let spent = 100 - balances.lock().unwrap().get(&1).copied().unwrap_or(100);
            Ok(steps.around(event.clone(), spent, consumer::book(event, balances)).await)
        }
    })
}

/// Returns the handler of the example for transactions, with its steps.
fn in_transactions(
    steps: Steps,
) -> impl Service<(Spend, SharedTx), Response = Outcome, Error = sqlx::Error, Future: Send> + Clone {
    service_fn(move |(event, mut tx): (Spend, SharedTx)| {
        let steps = steps.clone();
        async move {
            let spent = sqlx::query_scalar(SPENT).fetch_one(&mut *tx).await?;
            steps.around(event.clone(), spent, consumer::book_in(event, &mut tx)).await
        }
    })
}

const SPENT: &str = "SELECT coalesce(sum(amount), 0)::bigint FROM spent WHERE holder = 1";

async fn database() -> (test_servers::Database, sqlx::PgPool) {
    let database = test_servers::fresh_database().await;
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    sqlx::query("CREATE TABLE spent (holder bigint, amount bigint)").execute(&pool).await.unwrap();
    (database, pool)
}

/// Sends a second event of a holder while the handler of the first is at the gate. The second must begin after the end
/// of the first, although later events of another holder are done before. `is_invisible` checks the first at the gate.
async fn overlap(
    events: Sender<Spend>,
    stats: impl Fn() -> LayerStats,
    steps: Steps,
    mut log: UnboundedReceiver<String>,
    is_invisible: impl AsyncFnOnce(),
) {
    let of = |holder, amount| Spend { credit_holder_id: Some(holder), amount };
    let mut next = async || within(LONG, "no step", log.recv()).await.unwrap();
    events.send(of(1, 60)).await.unwrap();
    assert_eq!(next().await, "60 begins at 0");
    assert_eq!(next().await, "60 is at the gate");
    is_invisible().await;
    events.send(of(1, 50)).await.unwrap();
    let both = async {
        while stats().waiting + stats().in_flight < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    within(LONG, "never two at once", both).await;
    for amount in 1..=5 {
        events.send(of(2, amount)).await.unwrap();
        assert_eq!(next().await, format!("{amount} of another holder is done"));
    }
    drop(events);
    steps.gate.add_permits(1);
    assert_eq!(next().await, "60 ends");
    assert_eq!(next().await, "50 begins at 60");
    steps.gate.add_permits(1);
    assert_eq!(next().await, "50 is at the gate");
    assert_eq!(next().await, "50 ends");
}

#[tokio::test]
async fn a_second_event_of_a_holder_begins_after_the_first_has_ended() {
    let (steps, log) = Steps::new();
    let layer = consumer::lock_layer(Arc::new(leasehold_memory::connect().unwrap())).unwrap();
    let service = layer.layer(in_memory(steps.clone(), Balances::default()));
    let (events, receiver) = channel(1);
    let overlap = overlap(events, || layer.stats(), steps, log, async || ());
    let (outcomes, ()) = tokio::join!(consumer::consume(receiver, service), overlap);
    assert_eq!(outcomes.unwrap(), [Booked, Booked, Booked, Booked, Booked, Booked, NotEnough]);
}

#[tokio::test]
async fn a_second_event_of_a_holder_begins_after_the_first_is_committed() {
    let (steps, log) = Steps::new();
    let (_database, pool) = database().await;
    let layer = consumer::transaction_layer(pool.clone()).unwrap();
    let service = layer.layer(in_transactions(steps.clone()));
    let (events, receiver) = channel(1);
    let is_invisible = async || {
        let spent: i64 = sqlx::query_scalar(SPENT).fetch_one(&pool).await.unwrap();
        assert_eq!(spent, 0, "the first is written and not committed");
    };
    let overlap = overlap(events, || layer.stats(), steps, log, is_invisible);
    let (outcomes, ()) = tokio::join!(consumer::consume(receiver, service), overlap);
    assert_eq!(outcomes.unwrap(), [Booked, Booked, Booked, Booked, Booked, Booked, NotEnough]);
}

/// Of five events of one holder three find enough, and of two of another one.
fn assert_outcomes(mut outcomes: Vec<Outcome>) {
    outcomes.sort();
    let dead = Dead("`event.credit_holder_id` is missing".to_owned());
    assert_eq!(outcomes, [Booked, Booked, Booked, Booked, NotEnough, NotEnough, NotEnough, dead]);
}

#[tokio::test]
async fn a_channels_events_of_one_holder_are_booked_one_after_the_other() {
    let layer = consumer::lock_layer(Arc::new(leasehold_memory::connect().unwrap())).unwrap();
    let balances = Balances::default();
    let service = layer.layer(in_memory(Steps::opened(), Arc::clone(&balances)));
    assert_outcomes(consumer::consume(consumer::events(), service).await.unwrap());
    assert_eq!(*balances.lock().unwrap(), [(1, 10), (2, 40)].into());
}

#[tokio::test]
async fn the_program_books_in_memory_and_with_a_url_in_transactions() {
    assert_outcomes(consumer::run(None).await.unwrap());
    let database = test_servers::fresh_database().await;
    assert_outcomes(consumer::run(Some(database.url().to_owned())).await.unwrap());
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    let spent: i64 = sqlx::query_scalar(SPENT).fetch_one(&pool).await.unwrap();
    assert_eq!(spent, 90);
}

#[tokio::test]
async fn a_channels_events_are_transactions_that_begin_with_the_lock() {
    let (_database, pool) = database().await;
    let service = consumer::transaction_layer(pool.clone()).unwrap().layer(in_transactions(Steps::opened()));
    assert_outcomes(consumer::consume(consumer::events(), service).await.unwrap());
    let spent: Vec<(i64, i64)> =
        sqlx::query_as("SELECT holder, sum(amount)::bigint FROM spent GROUP BY holder ORDER BY holder")
            .fetch_all(&pool)
            .await
            .unwrap();
    assert_eq!(spent, [(1, 90), (2, 60)]);
}
