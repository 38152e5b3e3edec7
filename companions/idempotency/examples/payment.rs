//! Carries out a payment once, although the client sends it twice because the first response was lost.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-idempotency --example payment
//! ```

use std::error::Error;

use leasehold_idempotency::sqlx::postgres::PgPoolOptions;
use leasehold_idempotency::sqlx::{PgPool, query, query_scalar, raw_sql};
use leasehold_idempotency::{Ident, PgIdempotency, RequestOutcome, Stored, fingerprint};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The example drops and creates its schema on each run.
const TABLE: &str = "
    DROP SCHEMA IF EXISTS leasehold_payment CASCADE;
    CREATE SCHEMA leasehold_payment;
    CREATE TABLE leasehold_payment.payment (amount bigint NOT NULL)";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    for line in run(&url).await? {
        println!("{line}");
    }
    Ok(())
}

/// Pays and returns a line per request.
pub async fn run(url: &str) -> Result<Vec<String>> {
    let pool: PgPool = PgPoolOptions::new().max_connections(2).connect(url).await?;
    raw_sql(TABLE).execute(&pool).await?;
    // Uses the example's schema, because each run must begin without keys.
    let payments = PgIdempotency::new(pool.clone()).schema("leasehold_payment".parse()?);
    payments.migrate().await?;

    let mut answers = Vec::new();
    for (key, amount) in [("order-1", 10), ("order-1", 10), ("order-1", 99), ("order-2", 20)] {
        answers.push(format!("{key}, {amount}: {}", pay(&payments, key, amount).await?));
    }
    let total: i64 =
        query_scalar("SELECT sum(amount)::bigint FROM leasehold_payment.payment").fetch_one(&pool).await?;
    answers.push(format!("{total} were paid"));
    Ok(answers)
}

/// Carries out a payment under the key, or repeats its result. Returns the response to the client.
async fn pay(payments: &PgIdempotency, key: &str, amount: i64) -> Result<String> {
    // The scope comes from the login, not from the request.
    let ident = Ident::new("ann", key)?;
    let request = fingerprint([b"POST /pay".as_slice(), &amount.to_be_bytes()]);
    let outcome = payments
        .run(&ident, &request, async |tx| {
            // Runs in the transaction that also stores key and response.
            query("INSERT INTO leasehold_payment.payment VALUES ($1)")
                .bind(amount)
                .execute(&mut **tx)
                .await?;
            Ok::<_, Box<dyn Error + Send + Sync>>(Stored::done(200, format!("paid {amount}")))
        })
        .await?;
    let text = |stored: &Stored| String::from_utf8_lossy(stored.body()).into_owned();
    Ok(match outcome {
        RequestOutcome::Done(stored) => text(&stored),
        RequestOutcome::Replayed(stored) => format!("{} before", text(&stored)),
        RequestOutcome::Mismatch => "refused, the key belongs to another payment".to_owned(),
        other => format!("{other:?}"),
    })
}
