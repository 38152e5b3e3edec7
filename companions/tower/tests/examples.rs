//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/serve.rs"]
mod serve;

use std::sync::Arc;

use axum::body::Body;
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
