//! Which client removes old rows. All clients of a schema share one walk over each table: it is in the schema
//! how far it has come, so that the work grows with the table and not with the number of clients, and goes on
//! where a client that ended has stopped.

use std::time::Duration;

use leasehold_api::Error;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::config::PgConfig;

/// Claims the task `$1` for a minute, if nobody else has it and it is due. Answers how far the walk has come
/// (empty: it begins) and since when it is under way, in microseconds. A time far ahead was written under
/// another clock.
pub const TAKE: &str = "\
UPDATE {schema}.upkeep u SET
    next_at = clock_timestamp() + interval '1 minute',
    begun_at = CASE WHEN u.after <> '' AND isfinite(u.begun_at) THEN u.begun_at ELSE clock_timestamp() END
WHERE u.task = $1::text
    AND (u.next_at <= clock_timestamp() OR u.next_at > clock_timestamp() + interval '1 day')
RETURNING u.after, (extract(epoch FROM clock_timestamp() - u.begun_at) * 1000000)::bigint";

/// Notes that the walk of task `$1` has come to `$2`, and keeps the claim for another minute. If that is
/// empty, the walk is over, and the next one is due in `$3` microseconds.
pub const NOTE: &str = "\
UPDATE {schema}.upkeep u SET
    after = $2::text,
    next_at = clock_timestamp() + CASE WHEN $2::text = '' THEN $3::bigint * interval '1 microsecond'
        ELSE interval '1 minute' END
WHERE u.task = $1::text";

/// A walk that takes longer than this is told of: rows come faster than they are removed, or the server is
/// busy.
const LONG: Duration = Duration::from_secs(3600);

/// So many failures in a row are told of.
const FAILURES: u32 = 3;

/// A task that was claimed, and how far it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // What TAKE answers.
pub struct Progress {
    /// Where the walk goes on; empty at its beginning.
    pub after: String,
    /// How long ago it began, over all clients.
    pub running: Duration,
}

impl Progress {
    /// From a row of [`TAKE`].
    ///
    /// # Errors
    ///
    /// When it is not such a row.
    pub fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let running: i64 = row.try_get(1)?;
        let running = Duration::from_micros(u64::try_from(running).unwrap_or(0));
        Ok(Self { after: row.try_get(0)?, running })
    }
}

/// How far a walk has come.
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_structs)] // What NOTE takes.
pub struct Note {
    /// The last row that was looked at; empty when the walk is over.
    pub after: String,
    /// When the next walk is due, if this one is over.
    pub pause: Duration,
}

impl Note {
    /// The pause as the statement takes it.
    #[must_use]
    pub fn pause_micros(&self) -> i64 {
        i64::try_from(self.pause.as_micros()).unwrap_or(i64::MAX)
    }
}

/// Tells the log when old rows are not removed any more.
#[derive(Debug)]
pub struct Watch {
    table: &'static str,
    failures: u32,
    told: bool,
}

impl Watch {
    /// For one table.
    #[must_use]
    pub const fn new(table: &'static str) -> Self {
        Self { table, failures: 0, told: false }
    }

    /// A part of a walk is over.
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
