//! Measures a request of a cold key while a thousand requests wait in the layer for a hot key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use bench::report::{Row, Series, micros, quantile};
use leasehold_api::{Lock, LockExt as _, key};
use tokio::task::JoinSet;
use tower::ServiceExt as _;

use crate::companions::client::Client;
use crate::companions::rounds::Worker as _;
use crate::companions::server::Server;

const WAITERS: usize = 1000;
const HOT: usize = 0;
const COLD: std::ops::Range<usize> = 1..1000;
const ROUNDS: usize = 10;
const ROUND: Duration = Duration::from_millis(250);

pub(crate) async fn measure(store: &str, lock: &Arc<dyn Lock>, rows: &mut Vec<Row>) {
    println!("a cold key's request, {store}: median of each round in microseconds");
    let server = Server::start(lock).await;
    let mut client = Client::connect(server.address, "layer", COLD).await;
    let named = |name: &str| Series { name: name.to_owned(), rounds: Vec::new() };
    let mut alone = named("alone");
    let mut held = named("hot key held");
    let mut handed = named("hot key passed to the next request");
    median(&mut client).await;
    for _ in 0..bench::or_smoke(ROUNDS, 1) {
        alone.rounds.push(median(&mut client).await);

        let guard = lock.key(key!["ledger", HOT].unwrap()).acquire().await.unwrap();
        let waiters = wait_for_hot(&server, "layer", WAITERS).await;
        held.rounds.push(median(&mut client).await);
        assert_eq!(server.layer.stats().waiting, WAITERS);
        leave(&server, waiters).await;
        guard.release().await.unwrap();

        // One of them is in the handler at any time.
        let waiters = wait_for_hot(&server, "busy", WAITERS - 1).await;
        handed.rounds.push(median(&mut client).await);
        leave(&server, waiters).await;
    }
    for series in [&alone, &held, &handed] {
        let rounds: Vec<_> = series.rounds.iter().map(|median| format!("{median:.0}")).collect();
        println!("    {:28} {}", series.name, rounds.join(" "));
    }
    rows.push(row(&format!("cold key, {store}, {WAITERS} wait for a held one"), &held, &alone, Some(1.2)));
    rows.push(row(&format!("cold key, {store}, {WAITERS} work in turn, 5 ms each"), &handed, &alone, None));
    server.stop().await;
}

/// Returns the median time of one round's requests, sent one after the other.
async fn median(client: &mut Client) -> f64 {
    let deadline = Instant::now() + bench::or_smoke(ROUND, Duration::from_millis(20));
    let mut took = Vec::new();
    while Instant::now() < deadline {
        let begun = Instant::now();
        client.cycle().await;
        took.push(micros(begun.elapsed()));
    }
    quantile(&took, 0.5)
}

/// Starts a thousand clients of the hot key, each of which repeats its request. Returns once that many wait.
async fn wait_for_hot(server: &Server, route: &str, waiting: usize) -> JoinSet<()> {
    let mut waiters = JoinSet::new();
    for _ in 0..WAITERS {
        let (router, path) = (server.router.clone(), format!("/{route}/{HOT}"));
        waiters.spawn(async move {
            loop {
                let request = Request::post(&path).body(Body::empty()).unwrap();
                let answer = router.clone().oneshot(request).await.unwrap();
                assert_eq!(answer.status(), StatusCode::OK);
            }
        });
    }
    until(|| server.layer.stats().waiting >= waiting).await;
    waiters
}

async fn leave(server: &Server, mut waiters: JoinSet<()>) {
    waiters.abort_all();
    while let Some(ended) = waiters.join_next().await {
        assert!(ended.is_err_and(|error| error.is_cancelled()), "a request of the hot key failed");
    }
    until(|| server.layer.stats().waiting == 0).await;
    server.layer.idle().await;
}

async fn until(is_reached: impl Fn() -> bool) {
    while !is_reached() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn row(work: &str, beside: &Series, alone: &Series, goal: Option<f64>) -> Row {
    let ratio = beside.ratio(alone);
    Row {
        work: work.to_owned(),
        measured: format!("p50 {:.0} us", beside.median()),
        floor: format!("alone, p50 {:.0} us", alone.median()),
        ratio: format!("{ratio:.2}"),
        goal: goal.map(|goal| format!("at most {goal}")).unwrap_or_default(),
        met: goal.map(|goal| ratio <= goal),
        ..Row::default()
    }
}
