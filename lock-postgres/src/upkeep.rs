//! Chooses the client that removes old rows. All clients of a schema share one purge run per table, whose position is
//! stored in the schema. The work therefore grows with the table and not with the number of clients, and another client
//! resumes a run that a client abandoned.

use std::time::Duration;

use leasehold_api::Error;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::config::PgConfig;

/// Claims the task `$1` for a minute if it is due and unclaimed. Returns the run's position (empty at the start) and
/// its age in microseconds. A due time more than a day ahead counts as due, because another clock wrote it.
pub const TAKE: &str = "\
UPDATE {schema}.upkeep u SET
    next_at = clock_timestamp() + interval '1 minute',
    begun_at = CASE WHEN u.after <> '' AND isfinite(u.begun_at) THEN u.begun_at ELSE clock_timestamp() END
WHERE u.task = $1::text
    AND (u.next_at <= clock_timestamp() OR u.next_at > clock_timestamp() + interval '1 day')
RETURNING u.after, (extract(epoch FROM clock_timestamp() - u.begun_at) * 1000000)::bigint";

/// Stores position `$2` for the run of task `$1` and extends the claim by a minute. An empty position ends the run, and
/// the next one is due in `$3` microseconds.
pub const NOTE: &str = "\
UPDATE {schema}.upkeep u SET
    after = $2::text,
    next_at = clock_timestamp() + CASE WHEN $2::text = '' THEN $3::bigint * interval '1 microsecond'
        ELSE interval '1 minute' END
WHERE u.task = $1::text";

/// The longest run that is not logged as a warning. A longer one means that rows arrive faster than they are
/// removed or the server is busy.
const LONG: Duration = Duration::from_secs(3600);

/// Number of failures in a row after which one is logged as a warning.
const FAILURES: u32 = 3;

/// A claimed task and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because the fields are the columns that `TAKE` returns.
pub struct Progress {
    /// Position to resume from, empty at the start.
    pub after: String,
    /// Age of the run, over all clients.
    pub running: Duration,
}

impl Progress {
    /// Reads a row of [`TAKE`].
    ///
    /// # Errors
    ///
    /// An error if the row has other columns.
    pub fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let running: i64 = row.try_get(1)?;
        let running = Duration::from_micros(u64::try_from(running).unwrap_or(0));
        Ok(Self { after: row.try_get(0)?, running })
    }
}

/// The new position of a run.
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because the fields are the parameters of `NOTE`.
pub struct Note {
    /// Last row checked, empty at the end of the run.
    pub after: String,
    /// Time until the next run is due, used if this run is over.
    pub pause: Duration,
}

impl Note {
    /// Returns the pause as a parameter of [`NOTE`].
    #[must_use]
    pub fn pause_micros(&self) -> i64 {
        i64::try_from(self.pause.as_micros()).unwrap_or(i64::MAX)
    }
}

/// Logs a warning if old rows are no longer removed.
#[derive(Debug)]
pub struct Watch {
    table: &'static str,
    failures: u32,
    told: bool,
}

impl Watch {
    /// Creates the watch of one table.
    #[must_use]
    pub const fn new(table: &'static str) -> Self {
        Self { table, failures: 0, told: false }
    }

    /// Notes the outcome of one part of a run. Logs a failure, as a warning if it is every third in a row.
    pub fn ended(&mut self, store: &PgConfig, outcome: &Result<(), Error>) {
        let Err(error) = outcome else {
            self.failures = 0;
            return;
        };
        self.failures += 1;
        let (table, failures) = (self.table, self.failures);
        if failures % FAILURES == 0 {
            tracing::warn!(%store, table, failures, %error, "old rows are not removed, and the table grows; see `Old rows` in docs/configuration.md");
        } else {
            tracing::debug!(%store, table, %error, "cannot remove old rows; it is tried again later");
        }
    }

    /// Warns once per purge when it has run longer than an hour, counted over all clients. Returns whether it
    /// warned now.
    pub fn warn_if_overdue(&mut self, store: &PgConfig, running: Duration) -> bool {
        let is_long = running > LONG;
        let is_news = is_long && !self.told;
        if is_news {
            tracing::warn!(%store, table = self.table, ?running, "removing old rows cannot keep up with the rows that come; see `Old rows` in docs/configuration.md");
        }
        self.told = is_long;
        is_news
    }
}
