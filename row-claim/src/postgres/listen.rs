//! Hearing of new work.

use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind};
use sqlx::PgConnection;
use sqlx::postgres::{PgListener, PgNotification, PgPoolOptions};
use tokio::time::timeout;

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::NotifyTrigger;
use crate::sql::ending::{RETURNED, notify_returned};
use crate::sql::query::{Query, failed};
use crate::store::Wake;

const LISTEN: &str = "listen for new work";

/// What notifications begin with that a listener sends itself.
const ECHO: &str = "leasehold echo ";

/// How long a listener waits for one at most.
const PROOF: Duration = Duration::from_secs(2);

const POLLING: &str =
    "polling often until new work is announced; where a pooler is in between, say `behind_pooler`";

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
        let channel = self.spec().channel();
        let begin = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.ignore_pool_close_event(true);
            // Whoever connects again has to look, too.
            listener.eager_reconnect(false);
            listener.listen(channel).await?;
            Ok(listener)
        };
        let begun = timeout(self.server().limit, begin).await.map_err(|_| silent(self.server().limit))?;
        let listener = begun.map_err(|error| failed(error, LISTEN))?;
        let mut wake = PgWake { listener, announces: false };
        if let Some(trigger) = NotifyTrigger::of(self.spec()) {
            match timeout(PROOF, self.hears_itself(&trigger, &mut wake)).await {
                Ok(heard) => heard?,
                Err(_) => tracing::warn!(store = %self, "no notification came within {PROOF:?}; {POLLING}"),
            }
        }
        Ok(Box::new(wake))
    }

    /// Where inserts are announced, it sends a notification of its own, as they do: through the pool, which may lead
    /// through a pooler that cannot listen. Answers when that was heard, or new work, or when neither will be.
    async fn hears_itself(&self, trigger: &NotifyTrigger, wake: &mut PgWake) -> Result<(), ClaimError> {
        let echo = format!("{ECHO}{:016x}", fastrand::u64(..));
        let sql = format!("SELECT pg_catalog.pg_notify($1::text, $2::text) WHERE {}", trigger.announces());
        let query = Query::new(sql).bind(self.spec().channel())?.bind(&echo)?;
        match self.server().rows(&query).await {
            Ok(rows) if rows.is_empty() => return Ok(()),
            Ok(_) => {}
            Err(fault) => {
                let error = fault.error("see whether notifications come");
                tracing::warn!(store = %self, %error, "no notification was sent; {POLLING}");
                return Ok(());
            }
        }
        while !wake.announces {
            let heard = wake.next().await?;
            wake.announces = heard.payload() == echo || is_new_work(heard.payload());
        }
        Ok(())
    }

    /// Wakes workers when the transaction that `connection` has open is committed: call it after the insert. A
    /// rollback wakes nobody. Needed only where the migration makes no trigger for it
    /// ([`notify_on_insert`](crate::ClaimSpecBuilder::notify_on_insert)). Commits that wake are carried out one after the
    /// other by the server, so leave it out where many are made; polls find the work too.
    ///
    /// # Errors
    ///
    /// What the server answers.
    ///
    /// # Cancel safety
    ///
    /// After a dropped call the transaction can only be rolled back.
    pub async fn notify(&self, connection: &mut PgConnection) -> Result<(), ClaimError> {
        let query = Query::new("SELECT pg_catalog.pg_notify($1::text, '')").bind(self.spec().channel())?;
        let rows = query.rows(connection, !self.server().pooled).await;
        rows.map(|_| ()).map_err(|error| failed(error, "announce new work"))
    }

    /// Wakes workers for rows that came back. They are back whether or not it succeeds, and polls find them.
    pub(super) async fn announce_returned(&self) {
        let sql = format!("SELECT {}", notify_returned(self.spec().channel()));
        if let Err(fault) = self.server().rows(&Query::new(sql)).await {
            let error = fault.error("announce rows that came back");
            tracing::warn!(store = %self, %error, "other processes find them by their polls");
        }
    }
}

/// Whether a notification says that there is new work.
fn is_new_work(payload: &str) -> bool {
    payload != RETURNED && !payload.starts_with(ECHO)
}

#[derive(Debug)]
struct PgWake {
    listener: PgListener,
    announces: bool,
}

impl PgWake {
    async fn next(&mut self) -> Result<PgNotification, ClaimError> {
        let next = self.listener.try_recv().await.map_err(|error| failed(error, LISTEN))?;
        // The driver would connect again, and nobody would look for what came meanwhile.
        next.ok_or_else(|| {
            let message = "the connection that listened for new work has ended; listen again, and look then";
            Error::new(ErrorKind::Unavailable, message).into()
        })
    }
}

#[async_trait]
impl Wake for PgWake {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        let mut is_news = false;
        while !is_news {
            let mut next = Some(self.next().await?);
            while let Some(heard) = next {
                self.announces |= is_new_work(heard.payload());
                is_news |= !heard.payload().starts_with(ECHO);
                next = self.listener.next_buffered();
            }
        }
        Ok(())
    }

    fn announces(&self) -> bool {
        self.announces
    }
}

fn silent(limit: Duration) -> ClaimError {
    let message = format!("could not {LISTEN}: no answer from the server within {limit:?}; try again");
    Error::new(ErrorKind::Unavailable, message).into()
}
