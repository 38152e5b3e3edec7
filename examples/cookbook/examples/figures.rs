//! Measures what the pages of the cookbook cite: a constraint against a lock, and three locks of a ledger. Prints
//! transactions per second.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cookbook::ledger::{self, Locking, spend};
use cookbook::{sql, unique_name};
use futures_util::future::join_all;
use leasehold_api::key;
use leasehold_postgres::Identifier;
use leasehold_postgres_advisory::XactLocks;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use test_servers::{Database, fresh_database};

const CONNECTIONS: u32 = 16;
const TIME: Duration = Duration::from_secs(4);
const WAIT: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() {
    println!("names per second, {CONNECTIONS} connections");
    names(1_000, None).await;
    for owners in [1_000, 1] {
        names(owners, Some(locks())).await;
    }
    println!("spends per second, {CONNECTIONS} connections");
    for holders in [1, 10, 1_000] {
        for lock in [Locking::Table, Locking::ParentRow, Locking::Key(locks())] {
            spends(holders, &lock).await;
        }
    }
}

fn locks() -> XactLocks {
    XactLocks::new(Identifier::new("leasehold").unwrap())
}

async fn database(schema: &'static str) -> (Database, PgPool) {
    let database = fresh_database().await;
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).min_connections(CONNECTIONS);
    let pool = pool.connect(database.url()).await.unwrap();
    sqlx::raw_sql(schema).execute(&pool).await.unwrap();
    (database, pool)
}

/// How often `work` is done in a second by as many tasks as there are connections.
async fn rate(work: impl AsyncFn(u64)) -> u64 {
    let (count, begun) = (AtomicU64::new(0), Instant::now());
    let worker = async || {
        while begun.elapsed() < TIME {
            work(count.fetch_add(1, Ordering::Relaxed)).await;
        }
    };
    join_all((0..CONNECTIONS).map(|_| worker())).await;
    count.into_inner() / begun.elapsed().as_secs()
}

/// New names, kept apart by the constraint, or by a lock per owner and a look.
async fn names(owners: u64, lock: Option<XactLocks>) {
    let (_database, pool) = database(sql(unique_name::PAGE, "schema")).await;
    sqlx::query("INSERT INTO owner SELECT generate_series(0, 999)").execute(&pool).await.unwrap();
    let look = sql(unique_name::PAGE, "wrong: look");
    let per_second = rate(async |number| {
        let owner = i64::try_from(number % owners).unwrap();
        let name = format!("name {number}");
        let Some(locks) = &lock else {
            unique_name::create(&mut *pool.acquire().await.unwrap(), owner, &name).await.unwrap();
            return;
        };
        let mut tx = locks.begin(&pool, &key!["names", owner].unwrap(), WAIT).await.unwrap();
        let taken = sqlx::query_scalar::<_, bool>(look).bind(owner).bind(&name);
        assert!(!taken.fetch_one(&mut *tx).await.unwrap());
        unique_name::create(&mut tx, owner, &name).await.unwrap();
        tx.commit().await.unwrap();
    })
    .await;
    let how = if lock.is_some() { "lock per owner" } else { "constraint" };
    println!("  {how}, {owners} owners: {per_second}");
}

async fn spends(holders: u64, lock: &Locking) {
    let (_database, pool) = database(sql(ledger::PAGE, "schema")).await;
    let fill = "INSERT INTO holder SELECT generate_series(0, 999);
        INSERT INTO entry (holder_id, amount) SELECT id, 1000000000 FROM holder";
    sqlx::raw_sql(fill).execute(&pool).await.unwrap();
    let per_second = rate(async |number| {
        // Neighbouring numbers are far apart, so that tasks meet as if holders were drawn at random.
        let holder = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32) % holders;
        assert!(spend(&pool, lock, i64::try_from(holder).unwrap(), 1).await.unwrap());
    })
    .await;
    let how = match lock {
        Locking::Table => "table",
        Locking::ParentRow => "parent row",
        _ => "advisory",
    };
    println!("  {how}, {holders} holders: {per_second}");
}
