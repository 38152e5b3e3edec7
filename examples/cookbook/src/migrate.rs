//! Locks that exclude another library's locks during a migration: the pages `docs/cookbook/migrate-from-*.md`.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, Lock, LockExt as _, LockGuard, RunError};
use leasehold_engine::Engine;
use leasehold_postgres::{PgConfig, RawBigint, SqlxNames};
use leasehold_postgres_advisory::AdvisoryConfig;
use sqlx::PgPool;

use crate::sql;

/// The page for sqlx's `PgAdvisoryLock`.
pub const SQLX_PAGE: &str = include_str!("../../../docs/cookbook/migrate-from-sqlx.md");
/// The page for `pg_advisory_lock` by hand.
pub const NUMBERS_PAGE: &str = include_str!("../../../docs/cookbook/migrate-from-pg-advisory-lock.md");
/// The page for `ShedLock`.
pub const SHEDLOCK_PAGE: &str = include_str!("../../../docs/cookbook/migrate-from-shedlock.md");

const TAKE: &str = sql(SHEDLOCK_PAGE, "take");
const GIVE_BACK: &str = sql(SHEDLOCK_PAGE, "give back");

/// Connects locks that exclude sqlx's `PgAdvisoryLock::new` with the same text.
///
/// # Errors
///
/// As [`AdvisoryConfig::connect`].
///
/// # Cancel safety
///
/// If dropped, its connections are closed.
pub async fn beside_sqlx(server: PgConfig) -> Result<Engine, Error> {
    AdvisoryConfig::new(server).hasher(Arc::new(SqlxNames)).connect().await
}

/// Connects locks that exclude `pg_advisory_lock` with the key's number.
///
/// # Errors
///
/// As [`AdvisoryConfig::connect`].
///
/// # Cancel safety
///
/// If dropped, its connections are closed.
pub async fn beside_numbers(server: PgConfig) -> Result<Engine, Error> {
    AdvisoryConfig::new(server).hasher(Arc::new(RawBigint)).connect().await
}

/// A job that programs with `ShedLock` run too.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because these are the settings that both locks need.
pub struct ShedLockJob<'a> {
    /// The lock's name in `ShedLock`, and the key here.
    pub name: &'a str,
    /// `lockAtMostFor` in `ShedLock`, and the maximum hold here.
    pub at_most: Duration,
}

/// The reason why the job might not have run under both locks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShedLockError {
    /// Our lock failed. The job did not start, was stopped, or ran but its release is unconfirmed.
    #[error("the lock of the job failed")]
    Lock(#[source] RunError<()>),
    /// The row of `ShedLock` failed. Either acquiring the row failed and the job did not start, or releasing it failed
    /// and the row stays until its time.
    #[error("the row of ShedLock was not changed")]
    Row(#[from] sqlx::Error),
}

/// Runs `work` under both locks. Returns `None` if either is held.
///
/// # Errors
///
/// [`ShedLockError`].
///
/// # Cancel safety
///
/// If dropped, `work` is dropped too and our lock is released in the background. The row stays until its time.
pub async fn run_beside_shedlock<T>(
    lock: &dyn Lock,
    pool: &PgPool,
    job: &ShedLockJob<'_>,
    work: impl AsyncFnOnce(&LockGuard) -> T,
) -> Result<Option<T>, ShedLockError> {
    let request = lock.key(job.name).wait(Duration::ZERO).max_hold(job.at_most);
    let both = request.try_run(async |guard| -> sqlx::Result<Option<T>> {
        // Unique per run, because a run must not release the row of a later run.
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
