//! Claims under leases, on a table in Postgres. `statements` builds the SQL.

mod groups;
mod listen;
mod look;
mod refused_rows;
mod server;
mod settle;
mod take;
mod upkeep;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind};
use sqlx::PgPool;
use sqlx::postgres::PgRow;
use tokio::sync::OnceCell;

use self::listen::PgWake;
use self::look::{read_stats, taken_row};
use self::refused_rows::{BEYOND, each_once};
use self::server::Server;
use self::take::TakeFault;
use crate::error::ClaimError;
use crate::metrics::record_depth;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::spec::{ClaimSpec, Retention};
use crate::statements::order::{LOOK, RowOrder};
use crate::statements::parts::SqlParts;
use crate::statements::pick::TakeRequest;
use crate::statements::query::{Query, failed, get, millis};
use crate::statements::renew::renew;
use crate::statements::row::key_of;
use crate::statements::settle::Ending;
use crate::statements::settled::{ClaimParameters, nowhere, storable};
use crate::statements::{lists, purge, requeue, stats, sweep};
use crate::store::{
    ClaimRef, ClaimStore, Outcome, Renewal, Sealed, Settled, Stats, Swept, Take, Taken, TakenRow, Upkeep,
    Wake, check_lease,
};

const RENEW: &str = "renew claims";
const SWEEP: &str = "return rows whose lease has ended";
const PURGE: &str = "delete settled rows";
const REQUEUE: &str = "requeue rows";
const CANCEL: &str = "cancel rows";

/// The default time limit of a call.
const ANSWER: Duration = Duration::from_secs(10);

/// Claims on a table in Postgres, under leases. Cheap to clone. Clones share their knowledge of the table.
///
/// Each call is one statement in its own transaction (three for claims of groups), on a connection of the pool. The
/// isolation level of the pool's sessions does not matter.
#[derive(Clone)]
pub struct PgClaims {
    server: Server,
    sql: Arc<LeasedSql>,
}

/// A cache of SQL built from the spec and the table's columns.
struct LeasedSql {
    spec: ClaimSpec,
    parts: SqlParts,
    order: OnceCell<RowOrder>,
    texts: Mutex<HashMap<String, Arc<str>>>,
}

impl PgClaims {
    /// Builds a store for `spec` on connections of `pool`. Sends nothing yet.
    #[must_use]
    pub fn new(pool: PgPool, spec: ClaimSpec) -> Self {
        let sql = LeasedSql {
            parts: SqlParts::leased(&spec),
            spec,
            order: OnceCell::new(),
            texts: Mutex::default(),
        };
        Self { server: Server::new(pool, ANSWER), sql: Arc::new(sql) }
    }

    /// Adapts the store to a pooler that gives each transaction another session, such as PgBouncer in transaction
    /// mode. No statement is prepared, and each call is a transaction. Listening is then impossible.
    #[must_use]
    pub fn behind_pooler(mut self) -> Self {
        self.server.pooled = true;
        self
    }

    /// Sets the time limit of each call, including the wait for a connection. The default is 10 seconds. The
    /// connection of a call that ran out of time is closed.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.server.limit = limit;
        self
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.server.pool
    }

    /// Returns the spec of the claimed table.
    #[must_use]
    pub fn spec(&self) -> &ClaimSpec {
        &self.sql.spec
    }

    /// Returns the time limit of a call.
    pub(crate) fn limit(&self) -> Duration {
        self.server.limit
    }

    /// Returns whether statements are prepared, which is not possible behind a pooler.
    pub(crate) fn prepares(&self) -> bool {
        !self.server.pooled
    }

    fn parts(&self) -> &SqlParts {
        &self.sql.parts
    }

    fn server(&self) -> &Server {
        &self.server
    }

    /// Returns the SQL that was remembered under `name`. Builds it on first use.
    fn remembered(&self, name: String, make: impl FnOnce() -> String) -> Arc<str> {
        let mut texts = self.sql.texts.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(texts.entry(name).or_insert_with(|| make().into()))
    }
}

impl Sealed for PgClaims {}

#[async_trait]
impl ClaimStore for PgClaims {
    fn spec(&self) -> &ClaimSpec {
        &self.sql.spec
    }

    async fn take(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.spec().needs_lease()?;
        take.check(self.parts().inner())?;
        match self.try_take(take, false).await {
            Err(trouble) if trouble.is_of_row() => self.take_narrowed(take, trouble).await,
            answer => answer.map_err(TakeFault::into_error),
        }
    }

    async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        self.spec().needs_lease()?;
        self.is_any_pending(take).await
    }

    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError> {
        self.spec().needs_lease()?;
        check_lease(lease)?;
        let mut renewals = vec![Renewal::Renewed; claims.len()];
        let mut wanted = ClaimParameters::default();
        for (at, claim) in claims.iter().enumerate() {
            match claim.rows.first().filter(|_| !claim.fits(self.parts().inner())) {
                // Reports the claim as lost, because it is of another table.
                Some((row, _)) => {
                    renewals[at] = Renewal::Lost { row: row.clone(), current_epoch: None, state: None };
                }
                None => wanted.add(at, claim, None),
            }
        }
        if wanted.is_empty() {
            return Ok(renewals);
        }
        let sql = self.remembered("renew".to_owned(), || renew(self.parts()));
        let query = wanted.bind(sql, false)?.bind(millis(lease))?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(RENEW))?;
        // The statement returns only rows that were not renewed.
        for row in &rows {
            let claim: i64 = get(row, "claim", RENEW)?;
            let Some(renewal) = usize::try_from(claim).ok().and_then(|at| renewals.get_mut(at)) else {
                continue;
            };
            if get(row, "mine", RENEW)? {
                if *renewal == Renewal::Renewed {
                    *renewal = Renewal::Busy;
                }
            } else if !matches!(renewal, Renewal::Lost { .. }) {
                let state: Option<String> = get(row, "state", RENEW)?;
                *renewal = Renewal::Lost {
                    row: key_of(self.parts(), row, RENEW)?,
                    current_epoch: get(row, "epoch", RENEW)?,
                    state: state.map(State::new),
                };
            }
        }
        Ok(renewals)
    }

    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        self.spec().needs_lease()?;
        let mut answers: Vec<Option<Result<Settled, ClaimError>>> = Vec::new();
        answers.resize_with(settlements.len(), || None);
        // Groups the claims by the kind of their end, because claims with the same end are written in one statement.
        // The order of the call stays.
        let mut alike: Vec<(Ending, Vec<usize>)> = Vec::new();
        for (at, (claim, outcome)) in settlements.iter().enumerate() {
            match Ending::of(self.parts(), outcome) {
                Err(error) => answers[at] = Some(Err(error)),
                Ok(_) if claim.rows.is_empty() => {
                    answers[at] = Some(Ok(Settled { exhausted: Vec::new() }));
                }
                Ok(_) if !claim.fits(self.parts().inner()) => answers[at] = Some(Err(nowhere(claim))),
                Ok(ending) => match alike.iter_mut().find(|(known, _)| *known == ending) {
                    Some((_, members)) => members.push(at),
                    None => alike.push((ending, vec![at])),
                },
            }
        }
        for (ending, members) in alike {
            for (at, answer) in self.settle_alike(&ending, settlements, members).await? {
                answers[at] = Some(answer);
            }
        }
        let unanswered =
            || Error::new(ErrorKind::Corrupt, "the server's answer is not understood; look at the rows");
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(unanswered().into()))).collect())
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.spec().needs_lease()?;
        let mut swept = Swept::default();
        if limit == 0 {
            return Ok(swept);
        }
        let parts = self.parts();
        let sql = self.remembered("sweep".to_owned(), || sweep::sweep(parts));
        match self.server().rows(&Query::new(sql).bind(i64::from(limit))?).await {
            Ok(rows) => self.add_swept(&mut swept, &rows)?,
            Err(fault) if fault.is_of_row() => {
                let (all, some) = (sweep::ended(parts), sweep::sweep_keys(parts));
                self.skip_refused(SWEEP, limit, all, some, |rows| self.add_swept(&mut swept, rows)).await?;
            }
            Err(fault) => return Err(fault.error(SWEEP)),
        }
        let left = i64::from(limit) - (swept.returned.len() + swept.exhausted.len()) as i64;
        if left > 0
            && let Some(sql) = sweep::use_up(parts)
        {
            let sql = self.remembered("use up".to_owned(), || sql);
            match self.server().rows(&Query::new(sql).bind(left)?).await {
                Ok(rows) => self.add_swept(&mut swept, &rows)?,
                // Logs the error and returns the swept rows, because the caller must learn of the rows that were put
                // back before.
                Err(fault) if swept != Swept::default() => {
                    tracing::warn!(error = %fault.error(SWEEP), "rows without attempts were not looked for");
                }
                Err(fault) => return Err(fault.error(SWEEP)),
            }
        }
        Ok(swept)
    }

    /// Puts back rows with ended leases. If no lease has ended, sends one statement only.
    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        let next = self.next_end().await?;
        if next.is_none_or(|next| !next.is_zero()) {
            return Ok(Upkeep { next, ..Upkeep::default() });
        }
        let swept = self.in_turn().sweep(limit).await?;
        if !swept.returned.is_empty() {
            self.announce_returned().await;
        }
        Ok(Upkeep { swept, next })
    }

    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        self.spec().needs_lease()?;
        let sql = self.remembered("taken".to_owned(), || lists::taken(self.parts()));
        let rows = self.server().rows(&Query::new(sql).bind(i64::from(limit))?).await;
        let rows = rows.map_err(|fault| fault.error(LOOK))?;
        rows.iter().map(|row| taken_row(self.parts(), row)).collect()
    }

    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.spec().needs_attempts()?;
        self.keys(LOOK, limit.into(), lists::exhausted(self.parts())).await
    }

    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        if self.parts().inner().preconditions.is_empty() {
            return Ok(Vec::new());
        }
        self.keys(LOOK, limit.into(), lists::blocked(self.parts())).await
    }

    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError> {
        let order = self.order().await?;
        let request = TakeRequest::new(self.parts(), take)?;
        let query = request.bind(stats::stats(self.parts(), order, &request), take.limit)?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(LOOK))?;
        let row = rows.first().ok_or_else(|| failed(sqlx::Error::RowNotFound, LOOK))?;
        let stats = read_stats(row)?;
        record_depth(self, take, &stats);
        Ok(stats)
    }

    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        let failed = self.spec().needs_failed()?;
        let sql = self.remembered("cancel".to_owned(), || requeue::cancel(self.parts(), failed));
        let (message, keys) = (storable(message), each_once(rows));
        let make = |part: &[RowKey]| Query::new(Arc::clone(&sql)).bind(message.clone())?.keys(part);
        self.count_written(CANCEL, &keys, i64::MAX, make).await
    }

    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        let attempts = self.spec().attempts_to_add(attempts)?;
        let count = self.requeue_keys(&each_once(rows), attempts, i64::MAX).await?;
        self.announce_requeued(count).await
    }

    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError> {
        let attempts = self.spec().attempts_to_add(attempts)?;
        self.spec().is_given_up(from)?;
        let parts = self.parts();
        let sql = requeue::requeue(parts, &requeue::in_state(parts, from, limit));
        let count = match self.server().rows(&Query::new(sql).bind(attempts)?).await {
            Ok(rows) => rows.len() as u64,
            Err(fault) if fault.is_of_row() => {
                let all = requeue::keys_in_state(parts, from);
                let keys = self.keys(REQUEUE, i64::from(limit) + BEYOND, all).await?;
                self.requeue_keys(&keys, attempts, limit.into()).await?
            }
            Err(fault) => return Err(fault.error(REQUEUE)),
        };
        self.announce_requeued(count).await
    }

    async fn purge(&self, limit: u32) -> Result<u64, ClaimError> {
        let (claims, parts) = (self.in_turn(), self.parts());
        if parts.inner().retention == Retention::KeepAll {
            return Err(ClaimError::unsupported(format!(
                "the spec of table {} keeps settled rows for ever; name another retention to purge them",
                self.spec().table()
            )));
        }
        let oldest = || purge::oldest(parts, &parts.key());
        let sql = self.remembered("purge".to_owned(), || purge::purge(parts, &oldest()));
        match claims.server().rows(&Query::new(sql).bind(i64::from(limit))?).await {
            Ok(rows) => Ok(rows.len() as u64),
            // The table refuses to delete a row, for example because of a foreign key from a row that is still needed.
            // Deletes the others.
            Err(fault) if fault.is_of_row() => {
                let all = purge::oldest(parts, &parts.key_text());
                let some = purge::purge(parts, &purge::picked_by_key(parts));
                let mut deleted = 0;
                let note = |rows: &[PgRow]| {
                    deleted += rows.len() as u64;
                    Ok(())
                };
                claims.skip_refused(PURGE, limit, all, some, note).await.map(|()| deleted)
            }
            Err(fault) => Err(fault.error(PURGE)),
        }
    }

    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        Ok(Box::new(PgWake::begin(self).await?))
    }
}

impl fmt::Debug for PgClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgClaims").field("spec", &self.sql.spec).finish_non_exhaustive()
    }
}

impl fmt::Display for PgClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sql.spec.fmt(f)
    }
}
