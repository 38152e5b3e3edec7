//! Beside other locks, during a migration: the pages `docs/cookbook/migrate-from-*.md`.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockExt as _, LockGuard, RunError};
use leasehold_engine::Engine;
use leasehold_postgres::{PgConfig, RawBigint, SqlxNames};
use leasehold_postgres_advisory::AdvisoryConfig;
use sqlx::PgPool;

use crate::sql;

/// From sqlx's `PgAdvisoryLock`.
pub const SQLX_PAGE: &str = include_str!("../../../docs/cookbook/migrate-from-sqlx.md");
/// From `pg_advisory_lock` by hand.
pub const NUMBERS_PAGE: &str = include_str!("../../../docs/cookbook/migrate-from-pg-advisory-lock.md");
/// From `ShedLock`.
pub const SHEDLOCK_PAGE: &str = include_str!("../../../docs/cookbook/migrate-from-shedlock.md");

const TAKE: &str = sql(SHEDLOCK_PAGE, "take");
const GIVE_BACK: &str = sql(SHEDLOCK_PAGE, "give back");

/// Locks that exclude those of sqlx's `PgAdvisoryLock::new` with the same text.
///
/// # Errors
///
/// As [`AdvisoryConfig::connect`].
///
/// # Cancel safety
///
/// A dropped call closes what it has opened.
pub async fn beside_sqlx(server: PgConfig) -> Result<Engine, Error> {
    AdvisoryConfig::new(server).hasher(Arc::new(SqlxNames)).connect().await
}

/// Locks that exclude `pg_advisory_lock` with the key's number.
///
/// # Errors
///
/// As [`AdvisoryConfig::connect`].
///
/// # Cancel safety
///
/// A dropped call closes what it has opened.
pub async fn beside_numbers(server: PgConfig) -> Result<Engine, Error> {
    AdvisoryConfig::new(server).hasher(Arc::new(RawBigint)).connect().await
}

/// A job that programs with `ShedLock` run too.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // What both need to know.
pub struct ShedLockJob<'a> {
    /// The name of its lock there, and the key here.
    pub name: &'a str,
    /// `lockAtMostFor` there, the maximum hold here.
    pub at_most: Duration,
}

/// Why it is not known that the job was run under both locks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShedLockError {
    /// Our lock: the job has not begun, was stopped, or was done without a confirmed release.
    #[error("the lock of the job failed")]
    Lock(#[source] RunError<()>),
    /// Theirs: the row was not taken and the job has not begun, or was not given back and stays until its time.
    #[error("the row of ShedLock was not changed")]
    Row(#[from] sqlx::Error),
}

/// Runs `work` under both locks; `None` when either is held.
///
/// # Errors
///
/// [`ShedLockError`].
///
/// # Cancel safety
///
/// Dropping the future drops `work` where it is, releases our lock in the background, and leaves the row until its
/// time.
pub async fn run_beside_shedlock<T>(
    lock: &dyn Lock,
    pool: &PgPool,
    job: &ShedLockJob<'_>,
    work: impl AsyncFnOnce(&LockGuard) -> T,
) -> Result<Option<T>, ShedLockError> {
    let request = lock.key(job.name).wait(Duration::ZERO).max_hold(job.at_most);
    let both = request.try_run(async |guard| -> sqlx::Result<Option<T>> {
        // Of this run alone, so that nobody gives back what a later run has.
        let run = guard.holder().to_string();
        let take = sqlx::query(TAKE).bind(job.name).bind(job.at_most.as_secs_f64()).bind(&run);
        if take.execute(pool).await?.rows_affected() == 0 {
            return Ok(None);
        }
        let value = work(guard).await;
        sqlx::query(GIVE_BACK).bind(job.name).bind(&run).execute(pool).await?;
        Ok(Some(value))
    });
    let done = both.await.map_err(|error| ShedLockError::Lock(error.map(drop)))?;
    Ok(done.transpose()?.flatten())
}
