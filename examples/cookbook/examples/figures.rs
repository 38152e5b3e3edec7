//! Measures the figures cited on the cookbook's pages: a constraint against a lock, and three locks of a ledger.
//! Prints the best and the median transactions per second of several rounds. All contenders take turns in a round,
//! because other load of the machine must affect all of them. Starts a server, or uses `DATABASE_URL`.
//!
//! ```text
//! cargo run --profile tests -p cookbook --example figures
//! ```
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
const ROUNDS: usize = 9;
const TIME: Duration = Duration::from_secs(1);
const WAIT: Duration = Duration::from_secs(30);

/// A contender and its number of owners or holders.
#[derive(Clone, Debug)]
enum Case {
    Constraint(u64),
    LockAndLook(u64),
    Ledger(&'static str, Locking, u64),
}

#[tokio::main]
async fn main() {
    let mut cases = vec![Case::Constraint(1_000), Case::LockAndLook(1_000), Case::LockAndLook(1)];
    for holders in [1, 10, 1_000] {
        cases.push(Case::Ledger("table lock", Locking::Table, holders));
        cases.push(Case::Ledger("parent row", Locking::ParentRow, holders));
        cases.push(Case::Ledger("advisory lock", Locking::Key(locks()), holders));
    }
    let (_names, names) = database(sql(unique_name::PAGE, "schema")).await;
    sqlx::query("INSERT INTO owner SELECT generate_series(0, 999)").execute(&names).await.unwrap();
    let (_ledger, ledger) = database(sql(ledger::PAGE, "schema")).await;
    let fill = "INSERT INTO holder SELECT generate_series(0, 999)";
    sqlx::query(fill).execute(&ledger).await.unwrap();

    let numbers = AtomicU64::new(0);
    let mut rates = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, rates) in cases.iter().zip(&mut rates) {
            // Resets the entries, because a balance is a sum and later rounds would sum over more entries.
            let refill =
                "TRUNCATE entry; INSERT INTO entry (holder_id, amount) SELECT id, 1000000000 FROM holder";
            sqlx::raw_sql(refill).execute(&ledger).await.unwrap();
            rates.push(rate(&numbers, async |number| once(case, &names, &ledger, number).await).await);
        }
    }
    println!("{CONNECTIONS} connections, {ROUNDS} rounds; per second: best, median");
    for (case, mut rates) in cases.into_iter().zip(rates) {
        rates.sort_unstable();
        let (best, median) = (rates[ROUNDS - 1], rates[ROUNDS / 2]);
        match case {
            Case::Constraint(owners) => println!("constraint, {owners} owners: {best}, {median}"),
            Case::LockAndLook(owners) => println!("lock and look, {owners} owners: {best}, {median}"),
            Case::Ledger(lock, _, holders) => println!("{lock}, {holders} holders: {best}, {median}"),
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

/// Returns how often `work` runs per second, with one task per connection.
async fn rate(numbers: &AtomicU64, work: impl AsyncFn(u64)) -> u64 {
    let (count, begun) = (AtomicU64::new(0), Instant::now());
    let worker = async || {
        while begun.elapsed() < TIME {
            work(numbers.fetch_add(1, Ordering::Relaxed)).await;
            count.fetch_add(1, Ordering::Relaxed);
        }
    };
    join_all((0..CONNECTIONS).map(|_| worker())).await;
    count.into_inner() * 1_000 / u64::try_from(begun.elapsed().as_millis()).unwrap()
}

async fn once(case: &Case, names: &PgPool, ledger: &PgPool, number: u64) {
    // Scatters neighbouring numbers, so tasks meet as if their owners were random.
    let one_of = |count: u64| {
        let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
        i64::try_from(mixed % count).unwrap()
    };
    match case {
        Case::Constraint(owners) => {
            let mut connection = names.acquire().await.unwrap();
            let name = format!("name {number}");
            unique_name::create(&mut connection, one_of(*owners), &name).await.unwrap();
        }
        Case::LockAndLook(owners) => {
            let (owner, name) = (one_of(*owners), format!("name {number}"));
            let mut tx = locks().begin(names, &key!["names", owner].unwrap(), WAIT).await.unwrap();
            let taken = sqlx::query_scalar::<_, bool>(sql(unique_name::PAGE, "wrong: look"));
            assert!(!taken.bind(owner).bind(&name).fetch_one(&mut *tx).await.unwrap());
            unique_name::create(&mut tx, owner, &name).await.unwrap();
            tx.commit().await.unwrap();
        }
        Case::Ledger(_, lock, holders) => {
            assert!(spend(ledger, lock, one_of(*holders), 1).await.unwrap());
        }
    }
}
