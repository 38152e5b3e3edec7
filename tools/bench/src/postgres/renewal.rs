//! Measures a thousand leases in one renewal.

use std::time::{Duration, Instant};

use bench::report::{Row, Series, micros, times};
use leasehold_api::{HolderId, LockKey};
use leasehold_engine::{Attempt, Backend, HoldRef, Renewed, Request};
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::{TtlBackend, TtlConfig};
use sqlx::{Connection as _, PgConnection};
use test_servers::Proxy;

use crate::postgres::contender::LEASES;

const LEASES_HELD: u64 = 1000;
const ROUNDS: usize = 3;
/// Renewals per round, because one is short.
const BEATS: usize = 5;
const LIMIT_MS: f64 = 5.0;

pub(crate) async fn measure(address: String, url: &str, rows: &mut Vec<Row>) {
    let backend = backend(url).await;
    let holds = hold_all(&backend, 1).await;
    let mut by_hand = PgConnection::connect(url).await.unwrap();
    for index in 0..LEASES_HELD {
        sqlx::query(LEASES.acquire).bind(name(2, index)).bind("me").execute(&mut by_hand).await.unwrap();
    }
    let mut ours = Series { name: "one renewal".to_owned(), rounds: Vec::new() };
    let [mut floor, mut bare] = ["one by one", "one bare UPDATE"].map(Series::new);
    let names: Vec<String> = (0..LEASES_HELD).map(|index| name(2, index)).collect();
    for _ in 0..bench::or_smoke(ROUNDS, 1) {
        for _ in 0..BEATS {
            let begun = Instant::now();
            renew(&backend, &holds).await;
            ours.rounds.push(micros(begun.elapsed()) / 1000.0);
            let begun = Instant::now();
            let query = sqlx::query(RENEW_ALL).bind(&names).bind("me");
            assert_eq!(query.execute(&mut by_hand).await.unwrap().rows_affected(), LEASES_HELD);
            bare.rounds.push(micros(begun.elapsed()) / 1000.0);
        }
        let begun = Instant::now();
        for index in 0..LEASES_HELD {
            let query = sqlx::query(RENEW_ONE).bind(name(2, index)).bind("me");
            assert_eq!(query.execute(&mut by_hand).await.unwrap().rows_affected(), 1);
        }
        floor.rounds.push(micros(begun.elapsed()) / 1000.0);
    }
    backend.close().await;
    let trips = count_trips(address, url).await;
    println!("renewing {LEASES_HELD} leases, ms: {:.1?}; one by one {:.0?}", ours.rounds, floor.rounds);
    let took = ours.median();
    rows.push(Row {
        work: format!("{LEASES_HELD} leases renewed in one call"),
        measured: format!("{took:.1} ms, {trips} statement(s)"),
        floor: format!("one by one {:.0} ms", floor.median()),
        ratio: format!("{:.0}x quicker", floor.median() / took),
        goal: format!("1 statement, under {LIMIT_MS} ms"),
        met: Some(took < LIMIT_MS && trips == 1),
        ..Row::default()
    });
    rows.push(times(&format!("{LEASES_HELD} leases renewed in one call"), &ours, &bare, 1.5));
}

const RENEW_ONE: &str = "UPDATE hand.lease SET expires_at = now() + interval '30 s'
    WHERE key = $1 AND holder = $2 AND expires_at > now()";

const RENEW_ALL: &str = "UPDATE hand.lease SET expires_at = now() + interval '30 s'
    WHERE key = ANY ($1) AND holder = $2 AND expires_at > now()";

/// Returns the number of statements per renewal, as seen on the wire once they are prepared.
async fn count_trips(address: String, url: &str) -> u64 {
    let proxy = Proxy::start(address).await;
    let backend = backend(&proxy.url(url)).await;
    let holds = hold_all(&backend, 3).await;
    renew(&backend, &holds).await;
    let before = proxy.traffic().round_trips;
    renew(&backend, &holds).await;
    let trips = proxy.traffic().round_trips - before;
    backend.close().await;
    trips
}

/// Uses one connection, so the statements are prepared after the first renewal.
async fn backend(url: &str) -> TtlBackend {
    TtlConfig::new(PgConfig::from_url(url).unwrap()).connections(1).backend().await.unwrap()
}

async fn hold_all(backend: &TtlBackend, series: u64) -> Vec<HoldRef> {
    let request = |index| {
        let key = LockKey::new(name(series, index)).unwrap();
        let mut request = Request::new(key, HolderId::from_parts(series.into(), index + 1));
        request.ttl = Some(Duration::from_secs(60));
        request
    };
    let requests: Vec<_> = (0..LEASES_HELD).map(request).collect();
    let holds = requests.iter().map(Request::hold).collect();
    let answers = backend.acquire(requests).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Attempt::Granted(_)))));
    holds
}

async fn renew(backend: &TtlBackend, holds: &[HoldRef]) {
    let answers = backend.renew(holds.to_vec()).await;
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Renewed::Extended))));
}

fn name(series: u64, index: u64) -> String {
    format!("renewed:{series}:{index}")
}
