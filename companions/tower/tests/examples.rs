//! Checks the output of the examples.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // Programs, of which the tests use parts.
#[path = "../examples/consumer.rs"]
mod consumer;
#[allow(dead_code, unreachable_pub)]
#[path = "../examples/serve.rs"]
mod serve;

use std::sync::Arc;

use axum::body::Body;
use consumer::Outcome::{Booked, Dead, NotEnough};
use http::{Request, StatusCode};
use tokio::task::JoinSet;
use tower::ServiceExt as _;

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

/// Of five events of one holder three find enough, and of two of another one.
fn assert_outcomes(mut outcomes: Vec<consumer::Outcome>) {
    outcomes.sort();
    let dead = Dead("`event.credit_holder_id` is missing".to_owned());
    assert_eq!(outcomes, [Booked, Booked, Booked, Booked, NotEnough, NotEnough, NotEnough, dead]);
}

#[tokio::test]
async fn a_channels_events_of_one_holder_are_booked_one_after_the_other() {
    let lock = Arc::new(leasehold_memory::connect().unwrap());
    let balances = consumer::Balances::default();
    assert_outcomes(consumer::consume(consumer::events(), lock, Arc::clone(&balances)).await.unwrap());
    assert_eq!(*balances.lock().unwrap(), [(1, 10), (2, 40)].into());
}

#[tokio::test]
async fn a_channels_events_are_transactions_that_begin_with_the_lock() {
    let database = test_servers::fresh_database().await;
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    sqlx::query("CREATE TABLE spent (holder bigint, amount bigint)").execute(&pool).await.unwrap();
    assert_outcomes(consumer::consume_in_transactions(consumer::events(), pool.clone()).await.unwrap());
    let spent: Vec<(i64, i64)> =
        sqlx::query_as("SELECT holder, sum(amount)::bigint FROM spent GROUP BY holder ORDER BY holder")
            .fetch_all(&pool)
            .await
            .unwrap();
    assert_eq!(spent, [(1, 90), (2, 60)]);
}
