//! Hearing of new work.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind};
use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{PgConnection, Row as _};
use tokio::time::timeout;

use super::PgClaims;
use crate::error::ClaimError;
use crate::sql::ending::{RETURNED, notify_returned};
use crate::sql::query::{Query, failed};
use crate::store::Wake;

const LISTEN: &str = "listen for new work";

impl PgClaims {
    pub(super) async fn begin_to_listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        if self.server().pooled {
            return Err(ClaimError::unsupported(
                "behind a pooler in transaction mode nobody is told of new work; polls find it",
            ));
        }
        // A connection of its own: one of the pool's would be missing there for ever.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(self.server().limit)
            .connect_lazy_with((*self.server().pool.connect_options()).clone());
        let channel = self.spec_ref().channel();
        let begin = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.ignore_pool_close_event(true);
            // Connecting again is ours, so that it has a bound.
            listener.eager_reconnect(false);
            listener.listen(channel).await?;
            Ok(listener)
        };
        match timeout(self.server().limit, begin).await {
            Ok(Ok(listener)) => {
                Ok(Box::new(PgWake { listener, limit: self.server().limit, is_lost: false, heard: false }))
            }
            Ok(Err(error)) => Err(failed(error, LISTEN)),
            Err(_) => Err(silent(self.server().limit)),
        }
    }

    pub(super) async fn notify_on(&self, connection: &mut PgConnection) -> Result<(), ClaimError> {
        let query =
            Query::new("SELECT pg_catalog.pg_notify($1::text, '')").bind(self.spec_ref().channel())?;
        let rows = query.rows(connection, !self.server().pooled).await;
        rows.map(|_| ()).map_err(|error| failed(error, "announce new work"))
    }

    /// Wakes workers for rows that came back. They are back whether or not it succeeds, and polls find them.
    pub(super) async fn announce_returned(&self) {
        let sql = format!("SELECT {}", notify_returned(self.spec_ref().channel()));
        if let Err(fault) = self.server().rows(&Query::new(sql)).await {
            let error = fault.error("announce rows that came back");
            tracing::warn!(store = %self, %error, "other processes find them by their polls");
        }
    }
}

struct PgWake {
    listener: PgListener,
    limit: Duration,
    /// The connection has ended, and with it what came in since.
    is_lost: bool,
    /// Whether new work was among what it was last woken for.
    heard: bool,
}

#[async_trait]
impl Wake for PgWake {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        if !self.is_lost {
            let mut next = self.listener.try_recv().await.map_err(|error| failed(error, LISTEN))?;
            if next.is_some() {
                self.heard = false;
                while let Some(notification) = next {
                    self.heard |= notification.payload() != RETURNED;
                    next = self.listener.next_buffered();
                }
                return Ok(());
            }
            self.is_lost = true;
        }
        self.heard = false;
        // Connects, listens to the same channel again, and asks: only then is it certain that it listens.
        let again = sqlx::query("SELECT 1").fetch_one(&mut self.listener);
        let answer = match timeout(self.limit, again).await {
            Ok(answer) => answer.map_err(|error| failed(error, LISTEN))?,
            Err(_) => return Err(silent(self.limit)),
        };
        let _: i32 = answer.try_get(0).map_err(|error| failed(error, LISTEN))?;
        while self.listener.next_buffered().is_some() {}
        self.is_lost = false;
        Ok(())
    }

    fn heard(&self) -> bool {
        self.heard
    }
}

impl fmt::Debug for PgWake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgWake").field("is_lost", &self.is_lost).finish_non_exhaustive()
    }
}

fn silent(limit: Duration) -> ClaimError {
    let message = format!("could not {LISTEN}: no answer from the server within {limit:?}; try again");
    Error::new(ErrorKind::Unavailable, message).into()
}
