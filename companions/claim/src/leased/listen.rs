//! Listens for new work.

use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind};
use leasehold_table_schema::sql::literal;
use sqlx::postgres::{PgListener, PgNotification, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _, raw_sql};
use tokio::time::{Instant, sleep_until, timeout};

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::NotifyTrigger;
use crate::statements::payload::{ECHO, Heard, inserted, notify_returned};
use crate::statements::query::{Query, failed, get};
use crate::store::Wake;

const LISTEN: &str = "listen for new work";

/// How long a new listener waits for its own test notification.
const PROOF: Duration = Duration::from_secs(2);

/// The shortest time between two checks whether the session still listens. The actual time is once to twice this long,
/// at random, so listeners of many processes do not check together.
const CHECK: Duration = Duration::from_secs(15);

/// The time limit of the session's reply to a check.
const ANSWER: Duration = Duration::from_secs(10);

const POLLING: &str =
    "polling often until new work is announced; where a pooler is in between, say `behind_pooler`";

impl PgClaims {
    /// Wakes workers when the open transaction of `connection` commits. Call it after the insert. A rollback wakes no
    /// worker. Only needed if the migration makes no trigger for it
    /// ([`notify_on_insert`](crate::ClaimSpecBuilder::notify_on_insert)). The server runs commits with notifications
    /// one after the other, so leave the call out for frequent inserts. Polls find the work too.
    ///
    /// # Errors
    ///
    /// The errors of the server.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the transaction can only be rolled back.
    pub async fn notify(&self, connection: &mut PgConnection) -> Result<(), ClaimError> {
        let sql = format!("SELECT pg_catalog.pg_notify($1::text, {})", inserted(self.spec().table()));
        let query = Query::new(sql).bind(self.spec().channel())?;
        let rows = query.rows(connection, !self.server().pooled).await;
        rows.map(|_| ()).map_err(|error| failed(error, "announce new work"))
    }

    /// Notifies workers of rows that were put back. An error is only logged, because polls find the rows.
    pub(super) async fn announce_returned(&self) {
        let sql = format!("SELECT {}", notify_returned(self.spec()));
        if let Err(fault) = self.server().rows(&Query::new(sql)).await {
            let error = fault.error("announce rows that came back");
            tracing::warn!(store = %self, %error, "other processes find them by their polls");
        }
    }
}

#[derive(Debug)]
pub(super) struct PgWake {
    listener: PgListener,
    channel: String,
    /// The schema of the table, by which notifications are filtered. `None` if it could not be read.
    schema: Option<String>,
    announces: bool,
    /// The time of the next check whether the session still listens.
    check: Instant,
    /// The time limit of the session's reply to that check.
    limit: Duration,
}

impl PgWake {
    /// Starts to listen for work on the table of `claims`.
    pub(super) async fn begin(claims: &PgClaims) -> Result<Self, ClaimError> {
        let server = claims.server();
        if server.pooled {
            return Err(ClaimError::unsupported(
                "behind a pooler in transaction mode no notification arrives; polls find new work",
            ));
        }
        // Opens a separate connection, because a connection that listens would be missing in the pool indefinitely.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(server.limit)
            .connect_lazy_with((*server.pool.connect_options()).clone());
        let channel = claims.spec().channel();
        let begin = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.ignore_pool_close_event(true);
            // Turns off silent reconnects, because notifications are lost in the gap and the caller must then check for
            // work.
            listener.eager_reconnect(false);
            listener.listen(channel).await?;
            Ok(listener)
        };
        let limit = server.limit;
        let begun = timeout(limit, begin).await.map_err(|_| silent(limit))?;
        let listener = begun.map_err(|error| failed(error, LISTEN))?;
        let mut wake = Self {
            listener,
            channel: channel.to_owned(),
            schema: claims.spec().table().schema().map(str::to_owned),
            announces: false,
            check: next_check(),
            limit: limit.min(ANSWER),
        };
        match timeout(PROOF, wake.verify_delivery(claims)).await {
            Ok(verified) => verified?,
            Err(_) => tracing::warn!(store = %claims, "no notification came within {PROOF:?}; {POLLING}"),
        }
        if wake.schema.is_none() {
            // The schema is still unknown, because the pool was busy. If this connection does not find the table
            // either, the listener accepts notifications of all schemas.
            wake.schema = wake.read_schema(claims).await;
        }
        Ok(wake)
    }

    /// Reads the table's schema on the listener's connection.
    async fn read_schema(&mut self, claims: &PgClaims) -> Option<String> {
        let sql = format!("SELECT {} AS schema", claims.spec().table().schema_sql());
        let query = sqlx::query(AssertSqlSafe(sql)).persistent(false);
        let row = timeout(PROOF, self.listener.fetch_one(query)).await;
        get(&row.ok()?.ok()?, "schema", LISTEN).ok()
    }

    /// Sends a test notification if inserts are announced. It goes through the pool, as inserts do, because the pool
    /// might lead through a pooler that cannot listen, or use another search path. Returns after that notification or
    /// one of new work, or if neither can come.
    async fn verify_delivery(&mut self, claims: &PgClaims) -> Result<(), ClaimError> {
        let echo = format!("{ECHO}{:016x}", fastrand::u64(..));
        let announces =
            NotifyTrigger::of(claims.spec()).map_or("false".to_owned(), |trigger| trigger.announces());
        let sql = format!(
            "SELECT {} AS schema, {announces} AS announces, \
             CASE WHEN {announces} THEN pg_catalog.pg_notify($1::text, $2::text) END AS echo",
            claims.spec().table().schema_sql()
        );
        let query = Query::new(sql).bind(claims.spec().channel())?.bind(&echo)?;
        match claims.server().rows(&query).await {
            Ok(rows) => {
                let first = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LISTEN))?;
                self.schema = get(first, "schema", LISTEN)?;
                if !get::<bool>(first, "announces", LISTEN)? {
                    return Ok(());
                }
            }
            Err(fault) => {
                let error = fault.error("see whether notifications come");
                tracing::warn!(store = %claims, %error, "no notification was sent; {POLLING}");
                return Ok(());
            }
        }
        while !self.announces {
            let heard = self.next().await?;
            self.announces = heard.payload() == echo || self.heard(&heard) == Heard::Inserted;
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<PgNotification, ClaimError> {
        let next = self.listener.try_recv().await.map_err(|error| failed(error, LISTEN))?;
        // Ends the listener instead of letting the driver reconnect, because notifications in the gap would be lost and
        // nothing would check for that work.
        next.ok_or_else(|| {
            let message = "the connection that listened for new work has ended; listen again, and look then";
            Error::new(ErrorKind::Unavailable, message).into()
        })
    }

    /// Returns the next notification. Checks the session from time to time, because a dead connection looks like an
    /// idle one.
    async fn next_or_silence(&mut self) -> Result<PgNotification, ClaimError> {
        loop {
            let check = self.check;
            tokio::select! {
                biased;
                next = self.next() => return next,
                () = sleep_until(check) => {}
            }
            self.ask().await?;
            if let Some(buffered) = self.listener.next_buffered() {
                return Ok(buffered);
            }
        }
    }

    /// Checks whether the session still listens, with a query. That is cheaper than a test notification, which is
    /// written to the WAL and reaches every listener of the table.
    async fn ask(&mut self) -> Result<(), ClaimError> {
        let sql = format!(
            "SELECT {} IN (SELECT pg_catalog.pg_listening_channels()) AS listens",
            literal(&self.channel)
        );
        let answer = timeout(self.limit, self.listener.fetch_one(raw_sql(AssertSqlSafe(sql)))).await;
        let row: PgRow = answer.map_err(|_| dead(self.limit))?.map_err(|error| failed(error, LISTEN))?;
        // Checks only if this session has received an announcement. Behind a pooler it never does, and `announces` is
        // false.
        if self.announces && !row.try_get_unchecked::<&str, _>("listens").is_ok_and(|listens| listens == "t")
        {
            let message = "the session that listened for new work does not listen any more; listen again, and look then";
            return Err(Error::new(ErrorKind::Unavailable, message).into());
        }
        self.check = next_check();
        Ok(())
    }

    fn heard(&self, notification: &PgNotification) -> Heard {
        Heard::of(notification.payload(), self.schema.as_deref())
    }
}

#[async_trait]
impl Wake for PgWake {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        let mut is_news = false;
        while !is_news {
            let mut next = Some(self.next_or_silence().await?);
            while let Some(notification) = next {
                let heard = self.heard(&notification);
                self.announces |= heard == Heard::Inserted;
                is_news |= heard != Heard::Nothing;
                next = self.listener.next_buffered();
            }
        }
        Ok(())
    }

    fn announces(&self) -> bool {
        self.announces
    }
}

fn next_check() -> Instant {
    Instant::now() + CHECK.mul_f64(1.0 + fastrand::f64())
}

fn silent(limit: Duration) -> ClaimError {
    let message = format!("could not {LISTEN}: no answer from the server within {limit:?}; try again");
    Error::new(ErrorKind::Unavailable, message).into()
}

fn dead(limit: Duration) -> ClaimError {
    let message = format!(
        "the connection that listened for new work has not answered within {limit:?}: the network forgot it, or the \
         server stands still; new work is found by polls until another one listens"
    );
    Error::new(ErrorKind::Unavailable, message).into()
}
