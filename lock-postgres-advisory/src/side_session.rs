//! The session without locks: it writes names, lists locks and checks waits. It is opened on demand. Its statements
//! cannot delay or end a session that holds locks.

pub(crate) mod job;

use std::collections::HashMap;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::session::{SessionId, Work};
use leasehold_postgres::store_error;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::common::Common;
use crate::error::interrupted;
use crate::reply::{ReplySender, ask};
use crate::side_session::job::{SideJob, WaitStatus};
use crate::sql::{self, Statements};

/// The work of the side session.
pub(crate) struct SideSession {
    pub(crate) statements: Statements,
    /// Time limit of one job.
    pub(crate) limit: Duration,
    /// How long the session stays open without a job.
    pub(crate) spare: Duration,
}

impl Work for SideSession {
    type Job = SideJob;

    async fn opened(&mut self, _: &mut PgConnection, _: SessionId) -> Result<(), Error> {
        Ok(())
    }

    async fn run(&mut self, connection: &mut PgConnection, jobs: Vec<SideJob>) -> Result<(), Error> {
        let (mut waits, mut calls, mut probes) = (Vec::new(), Vec::new(), Vec::new());
        for job in jobs {
            match job {
                SideJob::Probe { number, reads, answer } => probes.push((number, reads, answer)),
                SideJob::WaitStatus { pid, answer } => waits.push((pid, answer)),
                SideJob::Statements(call) => calls.push(call),
            }
        }
        // Answers probes first, because callers wait for them to be granted a lock.
        if !probes.is_empty() {
            self.bounded(answer_probes(connection, &self.statements, probes)).await??;
        }
        if !waits.is_empty() {
            self.bounded(answer_wait_statuses(connection, waits)).await??;
        }
        for call in calls {
            self.bounded(call(Ok(&mut *connection))).await?;
        }
        Ok(())
    }

    fn limit(&self, _: &[SideJob], _: Duration) -> Option<Duration> {
        // No limit for the batch, because each job has a separate limit.
        None
    }

    fn keep(&mut self, unused: Duration) -> bool {
        unused < self.spare
    }
}

impl SideSession {
    async fn bounded<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        let silent = |_| Error::new(ErrorKind::Unavailable, "the server did not answer in time");
        timeout(self.limit, work).await.map_err(silent)
    }
}

/// Replies to all `probes` with one statement.
async fn answer_probes(
    connection: &mut PgConnection,
    statements: &Statements,
    probes: Vec<(i64, bool, ReplySender<bool>)>,
) -> Result<(), Error> {
    let asked: Vec<_> = probes.iter().map(|(number, reads, _)| (*number, *reads)).collect();
    let text = statements.probe(&asked);
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(text))).await;
    let read = |row: &PgRow| Ok((row.try_get(0)?, row.try_get(1)?));
    match rows.and_then(|rows| rows.iter().map(read).collect::<Result<HashMap<i64, bool>, _>>()) {
        Ok(found) => {
            for (number, _, answer) in probes {
                drop(answer.send(Ok(found.get(&number).copied().unwrap_or(false))));
            }
            Ok(())
        }
        Err(error) => {
            let is_refused = error.as_database_error().is_some();
            let error = store_error(error, "look for a waiting writer");
            probes.into_iter().for_each(|(_, _, answer)| drop(answer.send(Err(error.clone()))));
            if is_refused { Ok(()) } else { Err(error) }
        }
    }
}

/// Replies to all `waits` with one statement.
async fn answer_wait_statuses(
    connection: &mut PgConnection,
    waits: Vec<(i32, ReplySender<WaitStatus>)>,
) -> Result<(), Error> {
    let text = sql::waits(waits.iter().map(|(pid, _)| *pid));
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(text))).await;
    let read = |row: &PgRow| {
        let seen = match (row.try_get(1)?, row.try_get(2)?) {
            (true, _) => WaitStatus::BlocksOthers,
            (false, true) => WaitStatus::Waiting,
            (false, false) => WaitStatus::WaitingAlone,
        };
        Ok((row.try_get(0)?, seen))
    };
    match rows.and_then(|rows| rows.iter().map(read).collect::<Result<HashMap<i32, WaitStatus>, _>>()) {
        Ok(found) => waits.into_iter().for_each(|(pid, answer)| {
            drop(answer.send(Ok(found.get(&pid).copied().unwrap_or(WaitStatus::NotFound))));
        }),
        Err(error) => {
            let is_refused = error.as_database_error().is_some();
            let error = store_error(error, "look at a wait");
            waits.into_iter().for_each(|(_, answer)| drop(answer.send(Err(error.clone()))));
            return if is_refused { Ok(()) } else { Err(error) };
        }
    }
    Ok(())
}

impl Common {
    /// Returns how the server process `pid` waits for an advisory lock.
    pub(crate) async fn wait_status(&self, pid: i32) -> Result<WaitStatus, Error> {
        ask(&self.side_session, |answer| SideJob::WaitStatus { pid, answer }).await
    }

    /// Runs statements in a separate transaction.
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        doing: &'static str,
        statements: impl for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>
        + Send
        + 'static,
    ) -> Result<T, Error> {
        let (done, answered) = oneshot::channel();
        self.side_session.push(SideJob::Statements(Box::new(move |connection| {
            async move {
                let outcome = async {
                    let failed = |error| store_error(error, doing);
                    let mut transaction = connection?.begin().await.map_err(failed)?;
                    transaction.execute(sql::BESIDE).await.map_err(failed)?;
                    let value = statements(&mut transaction).await.map_err(failed)?;
                    transaction.commit().await.map_err(failed)?;
                    Ok(value)
                };
                let _ = done.send(outcome.await);
            }
            .boxed()
        })));
        match answered.await {
            Ok(outcome) => outcome,
            Err(_) => {
                self.open()?;
                Err(interrupted())
            }
        }
    }
}
