//! Renders five documents for a hundred requests, and prints the processor time that was spent and saved:
//! `docs/cookbook/render-once.md`. Start it in two terminals:
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p cookbook --example render_once
//! ```
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::fmt;
use std::hash::{DefaultHasher, Hasher as _};
use std::time::{Duration, SystemTime};

use cookbook::render_once::{PAGE, Rendered, render_once};
use futures_util::future::join_all;
use leasehold_api::Lock;
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use sqlx::PgPool;

const DOCUMENTS: i64 = 5;
const REQUESTS: i64 = 100;
const AT_ONCE: i64 = 4;

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL, such as postgres://user@localhost/db")?;
    let pool = PgPool::connect(&url).await?;
    let exists: bool =
        sqlx::query_scalar("SELECT to_regclass('rendering') IS NOT NULL").fetch_one(&pool).await?;
    if !exists {
        sqlx::raw_sql(cookbook::sql(PAGE, "schema")).execute(&pool).await?;
    }
    let lock = AdvisoryConfig::new(PgConfig::from_url(&url)?.install_schema(true)).connect().await?;
    // The documents get a new version every minute, which is the same in all processes.
    let version = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs() / 60;
    println!("{}", requests(&pool, &lock, i64::try_from(version)?).await?);
    lock.close().await?;
    Ok(())
}

/// The outcomes of all requests.
#[derive(Debug, Default)]
pub struct Totals {
    /// Number of requests that rendered the document themselves.
    pub made: u32,
    /// Number of requests that got a stored result.
    pub stored: u32,
    /// Number of requests that were refused, because another request was rendering the document.
    pub busy: u32,
    /// The processor time of rendering.
    pub spent: Duration,
    /// The processor time that was saved, because a stored result was used.
    pub saved: Duration,
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { made, stored, busy, spent, saved } = self;
        write!(
            f,
            "{made} rendered in {spent:.1?} of processor time, {busy} told that another is rendering, {stored} stored \
             results: {saved:.1?} of processor time saved"
        )
    }
}

/// Runs all requests, some of them at once.
pub async fn requests(pool: &PgPool, lock: &dyn Lock, version: i64) -> Result<Totals, Box<dyn Error>> {
    let mut totals = Totals::default();
    for first in (0..REQUESTS).step_by(usize::try_from(AT_ONCE)?) {
        let document = format!("document {}", (first / AT_ONCE) % DOCUMENTS);
        let ask = || render_once(pool, lock, &document, version, render);
        for outcome in join_all((0..AT_ONCE).map(|_| ask())).await {
            match outcome? {
                Rendered::Made(made) => {
                    totals.made += 1;
                    totals.spent += made.cpu;
                }
                Rendered::Stored(stored) => {
                    totals.stored += 1;
                    totals.saved += stored.cpu;
                }
                _ => totals.busy += 1,
            }
        }
    }
    Ok(totals)
}

/// Uses processor time, in place of real rendering.
fn render() -> Vec<u8> {
    let mut hasher = DefaultHasher::new();
    for number in 0..2_000_000_u64 {
        hasher.write_u64(number);
    }
    hasher.finish().to_string().into_bytes()
}
