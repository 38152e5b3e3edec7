//! Measures one renewal of 5,000 holds.

use std::time::{Duration, Instant};

use bench::report::{Row, millis, quantile};
use leasehold_api::{HolderId, LockKey};
use leasehold_engine::{Attempt, Backend, HoldRef, Renewed, Request};
use leasehold_etcd::EtcdConfig;
use test_servers::{Counter, Etcd};

const HELD: u64 = 5_000;
const ROUNDS: usize = 7;
const LIMIT_MS: f64 = 20.0;
const MOST_REQUESTS: f64 = 3.0;

pub(crate) async fn measure(etcd: &Etcd, rows: &mut Vec<Row>) {
    let held = bench::or_smoke(HELD, 100);
    println!("one renewal of {held} holds");
    let backend = EtcdConfig::from_url(&etcd.url(&Etcd::fresh_prefix())).unwrap().backend().await.unwrap();
    let request = |index| {
        let key = LockKey::new(format!("renewed:{index}")).unwrap();
        let mut request = Request::new(key, HolderId::from_parts(1, index + 1));
        request.ttl = Some(Duration::from_secs(60));
        request
    };
    let requests: Vec<Request> = (0..held).map(request).collect();
    let holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
    let answers = backend.acquire(requests).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Attempt::Granted(_)))));
    let rounds = bench::or_smoke(ROUNDS, 2);
    let mut took = Vec::new();
    let before = requests_of(etcd).await;
    for _ in 0..rounds {
        let begun = Instant::now();
        let answers = backend.renew(holds.clone()).await;
        took.push(millis(begun.elapsed()));
        assert!(
            answers.iter().all(|answer| matches!(answer, Ok(Renewed::Extended | Renewed::ExtendedFrom(_))))
        );
    }
    // The reads of the counters are no calls of these kinds.
    let requests = (requests_of(etcd).await - before) as f64 / rounds as f64;
    let [median, most] = [0.5, 1.0].map(|share| quantile(&took, share));
    rows.push(Row {
        work: format!("one renewal of {held} holds"),
        measured: format!("p50 {median:.1} ms, most {most:.1} ms, {requests:.1} requests"),
        goal: format!("at most {MOST_REQUESTS} requests, under {LIMIT_MS} ms"),
        met: Some(median < LIMIT_MS && requests <= MOST_REQUESTS),
        ..Row::default()
    });
    backend.close().await;
}

/// Returns the number of calls to all members of the kinds that a renewal can make.
async fn requests_of(etcd: &Etcd) -> u64 {
    let mut sum = 0;
    for member in 0..etcd.members() {
        for counter in [Counter::Transactions, Counter::Reads, Counter::LeaseGrants, Counter::KeepAlives] {
            sum += etcd.counter(member, counter).await;
        }
    }
    sum
}
