//! Uses two existing tables as locks: one with a boolean for each file, one with a time and a timeout for each report.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-plain-tables --example import
//! ```

use std::error::Error;

use leasehold_plain_tables::{Column, IdType, MutexTable, Table, TimeoutTable};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The example drops and creates its schema on each run.
const TABLES: &str = "
    DROP SCHEMA IF EXISTS leasehold_import CASCADE;
    CREATE SCHEMA leasehold_import;
    CREATE TABLE file (id int PRIMARY KEY, is_imported_now boolean NOT NULL DEFAULT false);
    CREATE TABLE report (id int PRIMARY KEY, started timestamptz, timeout int NOT NULL DEFAULT 3600);
    INSERT INTO file VALUES (1), (2);
    INSERT INTO report VALUES (1)";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    for line in run(&url).await? {
        println!("{line}");
    }
    Ok(())
}

/// Runs the steps and returns a line per step.
pub async fn run(url: &str) -> Result<Vec<String>> {
    let options = url.parse::<PgConnectOptions>()?.options([("search_path", "leasehold_import")]);
    let pool: PgPool = PgPoolOptions::new().max_connections(2).connect_with(options).await?;
    sqlx::raw_sql(TABLES).execute(&pool).await?;
    let said = |granted| if granted { "granted" } else { "refused" };
    let mut steps = Vec::new();

    // A file is locked until its release.
    let files = MutexTable::new(
        Table::new("file")?,
        Column::new("id")?,
        IdType::Int,
        Column::new("is_imported_now")?,
    );
    steps.push(format!("import of file 1: {}", said(files.acquire(&pool, 1).await?)));
    steps.push(format!("the same again: {}", said(files.acquire(&pool, 1).await?)));
    steps.push(format!("import of file 2: {}", said(files.acquire(&pool, 2).await?)));
    files.release(&pool, 1).await?;
    steps.push(format!("file 1 after its release: {}", said(files.acquire(&pool, 1).await?)));

    // A report is locked for one hour, by the server's clock.
    let reports = TimeoutTable::new(
        Table::new("report")?,
        Column::new("id")?,
        IdType::Int,
        Column::new("started")?,
        Column::new("timeout")?,
    );
    steps.push(format!("report 1: {}", said(reports.acquire(&pool, 1).await?)));
    steps.push(format!("within the hour: {}", said(reports.acquire(&pool, 1).await?)));
    sqlx::raw_sql("UPDATE report SET started = started - interval '1 hour'").execute(&pool).await?;
    steps.push(format!("an hour later: {}", said(reports.acquire(&pool, 1).await?)));
    Ok(steps)
}
