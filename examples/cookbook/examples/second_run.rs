//! A run dies after half of its writes to another database, and the next run corrects them: see
//! `docs/cookbook/second-run.md`. Both databases are schemas of `DATABASE_URL`, recreated on each run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p cookbook --example second_run
//! ```
#![allow(clippy::print_stdout)]

use std::collections::HashMap;
use std::error::Error;
use std::time::Duration;

use cookbook::second_run::{PAGE, open, put};
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore as _, Claimed, ClaimedRow, Outcome, PgClaims, States, Table, Take,
};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    second_run(&url).await?.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Runs the example. Returns its events, line by line.
pub async fn second_run(url: &str) -> Result<Vec<String>> {
    let (work, elsewhere) = (schema(url, "second_run").await?, schema(url, "second_run_elsewhere").await?);
    sqlx::raw_sql(cookbook::sql(PAGE, "schema")).execute(&elsewhere).await?;
    let claims = PgClaims::new(work.clone(), create(&work).await?);
    sqlx::query(r#"INSERT INTO report (lines) VALUES ('["a", "b", "c", "d"]')"#).execute(&work).await?;

    let first = take(&claims, Duration::from_millis(50)).await?;
    let mut told = vec![write(&claims, &elsewhere, &first, 2).await?];
    // The first run seems to have died. The work changes before the row is taken again.
    sqlx::query(r#"UPDATE report SET lines = '["b", "c", "x"]'"#).execute(&work).await?;
    while claims.sweep(1).await?.returned.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let second = take(&claims, Take::DEFAULT_LEASE).await?;
    told.push(write(&claims, &elsewhere, &second, usize::MAX).await?);

    // But the first run was only slow. It continues with its third line, starts again, and then wants to end.
    let (key, epoch) = identity(&claims, row(&first)?);
    told.push(format!("late line written: {}", put(&elsewhere, &key, epoch, "c").await?));
    told.push(format!("late run opened: {}", open(&elsewhere, &key, epoch).await?));
    let late = claims.settle_one(&first.claim, Outcome::Done).await;
    told.push(format!("late run refused: {}", matches!(late, Err(ClaimError::Superseded { .. }))));
    claims.settle_one(&second.claim, Outcome::Done).await?;
    told.push(format!("in the end: {}", lines(&elsewhere).await?));
    work.close().await;
    elsewhere.close().await;
    Ok(told)
}

/// Runs the work of a claim, up to `most` lines.
async fn write(claims: &PgClaims, elsewhere: &PgPool, claimed: &Claimed, most: usize) -> Result<String> {
    let row = row(claimed)?;
    let (key, epoch) = identity(claims, row);
    let mut work: HashMap<String, Vec<String>> = row.work()?;
    let wanted = work.remove("lines").unwrap_or_default();
    if !open(elsewhere, &key, epoch).await? {
        return Err("overtaken by a later run".into());
    }
    for name in wanted.iter().take(most) {
        if !put(elsewhere, &key, epoch, name).await? {
            return Err("overtaken by a later run".into());
        }
    }
    Ok(format!("run {epoch} of [{}]: {}", wanted.join(" "), lines(elsewhere).await?))
}

/// Returns the key and the epoch, by which the other database knows a run.
fn identity(claims: &PgClaims, row: &ClaimedRow) -> (String, i64) {
    (row.dedupe_key(claims.spec()), row.epoch)
}

fn row(claimed: &Claimed) -> Result<&ClaimedRow> {
    claimed.rows.first().ok_or_else(|| "a claim without a row".into())
}

async fn take(claims: &PgClaims, lease: Duration) -> Result<Claimed> {
    let taken = claims.take(&Take::up_to(1).lease(lease)).await?;
    taken.claims.into_iter().next().ok_or_else(|| "no row to take".into())
}

async fn lines(elsewhere: &PgPool) -> Result<String> {
    let lines = "SELECT coalesce(string_agg(name, ' ' ORDER BY name), 'nothing') FROM line";
    Ok(sqlx::query_scalar(lines).fetch_one(elsewhere).await?)
}

/// Creates the table of the work. Returns its spec.
async fn create(pool: &PgPool) -> Result<ClaimSpec> {
    let spec = ClaimSpec::builder(Table::new("report")?)
        .state("state", States::text(["new"], "done").taken("working"))
        .lease_columns("owner", "epoch", "lease_until")
        .work(["lines"])
        .build()?;
    sqlx::raw_sql(sqlx::AssertSqlSafe(spec.create_sql())).execute(pool).await?;
    Ok(spec)
}

/// Creates an empty schema. Returns a pool that uses it.
async fn schema(url: &str, name: &str) -> Result<PgPool> {
    let options = url.parse::<PgConnectOptions>()?.options([("search_path", name)]);
    let pool = PgPoolOptions::new().connect_with(options).await?;
    let sql = format!("DROP SCHEMA IF EXISTS {name} CASCADE; CREATE SCHEMA {name}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&pool).await?;
    Ok(pool)
}
