//! Uses an existing table: payments with an id and a column `processed boolean`.
//!
//! Four workers take payments, book them, and mark them as processed, in one transaction per batch. A payment is
//! booked once even if a worker dies before the commit. Nothing is added to the table, because the row lock protects a
//! payment. Everything is in a separate schema, which is recreated on each run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-claim --example processed
//! ```

use std::error::Error;
use std::time::Duration;

use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use leasehold_claim::sqlx::{PgConnection, PgPool, query, query_as, raw_sql};
use leasehold_claim::{ClaimSpec, ClaimedRow, Outcome, PgHeld, RowId, States, Table, Take};
use tokio::task::JoinSet;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const SCHEMA: &str = "leasehold_processed";

const TABLES: &str = "
    DROP SCHEMA IF EXISTS leasehold_processed CASCADE;
    CREATE SCHEMA leasehold_processed;
    CREATE TABLE payment (id bigint PRIMARY KEY, amount bigint NOT NULL, processed boolean NOT NULL DEFAULT false);
    CREATE INDEX payment_open ON payment (id) WHERE NOT processed;
    CREATE TABLE booking (payment_id bigint NOT NULL, amount bigint NOT NULL, worker text NOT NULL);
    INSERT INTO payment (id, amount) SELECT n, 10 * n FROM generate_series(1, 200) n";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    let books = run(&url).await?;
    println!("{books:#?}");
    Ok(())
}

/// The counts in the database at the end.
#[derive(Debug, PartialEq, Eq)]
pub struct Books {
    /// The number of payments.
    pub payments: i64,
    /// The number of payments marked as processed.
    pub processed: i64,
    /// The number of bookings of all workers.
    pub bookings: i64,
    /// The number of payments with a booking.
    pub booked_payments: i64,
    /// The number of bookings by the worker that died before its commit.
    pub booked_by_the_dead: i64,
}

/// Makes the tables, and has four workers process all payments.
pub async fn run(url: &str) -> Result<Books> {
    let options = url.parse::<PgConnectOptions>()?.options([("search_path", SCHEMA)]);
    let pool = PgPoolOptions::new().max_connections(6).connect_with(options).await?;
    raw_sql(TABLES).execute(&pool).await?;

    let spec = ClaimSpec::builder(Table::new("payment")?)
        .state("processed", States::boolean())
        .work(["amount"])
        .build()?;
    spec.ensure(&pool).await?;
    let held = PgHeld::new(pool.clone(), spec);

    die_in_between(&held).await?;
    let mut workers = JoinSet::new();
    for number in 1..=4 {
        let held = held.clone();
        workers.spawn(async move { work(&held, &format!("worker {number}")).await });
    }
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    books(&pool).await
}

/// Takes payments, ten at a time, until none are left.
async fn work(held: &PgHeld, worker: &str) -> Result<()> {
    let take = Take::up_to(10);
    loop {
        match held.begin(&take).await? {
            Some(mut hold) => {
                for claimed in hold.taken().claims.clone() {
                    book(hold.connection(), &claimed.rows[0], worker).await?;
                    hold.settle(&claimed.claim, &Outcome::Done).await?;
                }
                hold.commit().await?;
            }
            // Other workers have claimed the remaining payments. They might die, so this is not the end.
            None if held.pending(&take).await? => tokio::time::sleep(Duration::from_millis(10)).await,
            None => return Ok(()),
        }
    }
}

/// Books payments and then stops without a commit, so every change is rolled back.
async fn die_in_between(held: &PgHeld) -> Result<()> {
    let mut hold = held.begin(&Take::up_to(10)).await?.ok_or("there are payments")?;
    for claimed in hold.taken().claims.clone() {
        book(hold.connection(), &claimed.rows[0], "dead").await?;
        hold.settle(&claimed.claim, &Outcome::Done).await?;
    }
    drop(hold);
    Ok(())
}

/// Books a payment in the same transaction as the claim and its end.
async fn book(connection: &mut PgConnection, payment: &ClaimedRow, worker: &str) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Payment {
        amount: i64,
    }
    let RowId::Int(id) = payment.key.id else { return Err("payments have numbers".into()) };
    query("INSERT INTO booking (payment_id, amount, worker) VALUES ($1, $2, $3)")
        .bind(id)
        .bind(payment.work::<Payment>()?.amount)
        .bind(worker)
        .execute(connection)
        .await?;
    Ok(())
}

async fn books(pool: &PgPool) -> Result<Books> {
    let (payments, processed) =
        query_as("SELECT count(*), count(*) FILTER (WHERE processed) FROM payment").fetch_one(pool).await?;
    let (bookings, booked_payments, booked_by_the_dead) = query_as(
        "SELECT count(*), count(DISTINCT payment_id), count(*) FILTER (WHERE worker = 'dead') FROM booking",
    )
    .fetch_one(pool)
    .await?;
    Ok(Books { payments, processed, bookings, booked_payments, booked_by_the_dead })
}
