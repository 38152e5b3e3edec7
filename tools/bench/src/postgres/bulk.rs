//! Measures many keys in one call, against as many single calls on one connection.

use std::sync::Arc;
use std::time::Instant;

use bench::report::{Row, Series, row};
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::{Connection as _, PgConnection};

use crate::postgres::contender::LEASES;

const KEYS: usize = 64;
const ROUNDS: usize = 31;

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    let config = || PgConfig::from_url(url).unwrap();
    let advisory = AdvisoryConfig::new(config()).connections(1).connect().await.unwrap();
    one("advisory", Arc::new(advisory), url, 45.0, rows).await;
    let lease = TtlConfig::new(config()).connections(1).connect().await.unwrap();
    one("lease row", Arc::new(lease), url, 28.0, rows).await;
}

async fn one(store: &str, lock: Arc<dyn Lock>, url: &str, goal: f64, rows: &mut Vec<Row>) {
    println!("{KEYS} keys in one call, {store}");
    let options = AcquireOptions::new();
    let keys: Vec<_> = (0..KEYS).map(|index| LockKey::new(format!("bulk:{index}")).unwrap()).collect();
    let mut connection = PgConnection::connect(url).await.unwrap();
    let [mut together, mut single, mut by_hand] =
        ["one call", "single calls", "single statements by hand"].map(Series::new);
    // The first round prepares statements and creates rows.
    for round in 0..=bench::or_smoke(ROUNDS, 2) {
        let begun = Instant::now();
        lock.acquire_all(&keys, &options).await.unwrap().release().await.unwrap();
        let in_one = begun.elapsed();
        let begun = Instant::now();
        for key in &keys {
            lock.acquire(key, &options).await.unwrap().release().await.unwrap();
        }
        let one_by_one = begun.elapsed();
        let begun = Instant::now();
        for (index, key) in keys.iter().enumerate() {
            by_hand_one(&mut connection, store, key, index).await;
        }
        let bare = begun.elapsed();
        if round > 0 {
            for (series, took) in [(&mut together, in_one), (&mut single, one_by_one), (&mut by_hand, bare)] {
                series.rounds.push(KEYS as f64 / took.as_secs_f64());
            }
        }
    }
    let work = format!("{KEYS} keys in one call, {store}, locks/s");
    rows.push(row(&work, &together, &single, goal));
    rows.push(row(&work, &together, &by_hand, None));
    lock.close().await.unwrap();
    connection.close().await.unwrap();
}

/// Acquires and releases one key by two prepared statements.
async fn by_hand_one(connection: &mut PgConnection, store: &str, key: &LockKey, index: usize) {
    if store == "advisory" {
        for statement in ["SELECT pg_try_advisory_lock($1)", "SELECT pg_advisory_unlock($1)"] {
            // Far from the numbers of other sections.
            let number = 5_000_000_000 + i64::try_from(index).unwrap();
            sqlx::query(statement).bind(number).execute(&mut *connection).await.unwrap();
        }
    } else {
        for statement in [LEASES.acquire, LEASES.release] {
            sqlx::query(statement).bind(key.as_str()).bind("me").execute(&mut *connection).await.unwrap();
        }
    }
}
