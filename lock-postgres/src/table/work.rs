//! Runs a batch of jobs on a session.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fnv::FnvHashSet;
use leasehold_api::{Error, HolderId, LockKey};
use leasehold_engine::{Events, Request};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _, raw_sql};
use tokio::time::timeout;

use super::common::Common;
use super::db::{Db, Pooled};
use super::grants::Requester;
use super::job::{PendingCall, TableJob};
use super::registry::{HoldId, Process, ReleaseRequest};
use super::{adoption, grants, holds, maintenance, sql};
use crate::error::store_error;
use crate::job_queue::Job as _;
use crate::schema::Access;
use crate::session::{SessionId, Work};
use crate::{schema, token};

/// The work of one session.
pub(super) struct TableWork {
    pub(super) common: Arc<Common>,
    /// The statements for work behind a pooler. Set if a pooler was found.
    pooled: Option<Pooled>,
    /// Whether this session listens for notifications.
    listens: bool,
    requester: Requester,
}

impl TableWork {
    pub(super) fn new(common: &Arc<Common>) -> Self {
        let requester = Requester { owner: "".into(), doubt_period: common.doubt_period(None) };
        Self { common: Arc::clone(common), pooled: None, listens: false, requester }
    }

    async fn open(&mut self, connection: &mut PgConnection, session: SessionId) -> Result<(), Error> {
        let common = Arc::clone(&self.common);
        let failed = |error| store_error(error, "set up the session");
        let stores = common.statements.stores;
        let may_only_read = match session.epoch {
            1 => common.config.prepare(connection, stores).await?,
            _ => schema::access(connection, &common.config.schema, stores).await?,
        } == Access::ReadOnly;
        common.may_only_read.store(may_only_read, Ordering::Relaxed);
        if !may_only_read {
            token::mark_incarnation(connection, &common.config.schema).await?;
        }
        self.pooled = None;
        if session.pooled {
            let limit = common.config.statement_timeout.as_millis().to_string();
            let begin = sql::BEGIN_POOLED.replace("{timeout}", &limit);
            let look = token::look(&common.config.schema);
            let begin_marked = format!("{begin}; {look}").into();
            self.pooled = Some(Pooled { begin: begin.into(), begin_marked });
        } else {
            connection.execute(raw_sql(sql::SETTINGS)).await.map_err(failed)?;
        }
        let row = connection.fetch_one(raw_sql(sql::SESSION)).await.map_err(failed)?;
        let mut owner = common.process.clone();
        let _ = write!(owner, " from {}", row.try_get::<String, _>(0).map_err(failed)?);
        // Reads the start time as optional, because a session under another role than its login role might
        // not see it.
        let (pid, started): (i32, Option<i64>) =
            (row.try_get(1).map_err(failed)?, row.try_get(2).map_err(failed)?);
        let session = started.filter(|_| !session.pooled).map(|started| Process { pid, started });
        let doubt_period = common.doubt_period(session);
        self.requester = Requester { owner: owner.into(), doubt_period };
        self.listen(connection).await
    }

    /// Listens for notifications, unless another session does. All waiters check again, because earlier
    /// notifications were missed.
    async fn listen(&mut self, connection: &mut PgConnection) -> Result<(), Error> {
        let taken = || self.common.listening.swap(true, Ordering::AcqRel);
        if self.pooled.is_some() || self.listens || taken() {
            return Ok(());
        }
        self.listens = true;
        let listen = AssertSqlSafe(sql::LISTEN.replace("{channel}", &self.common.channel));
        let limit = self.common.limit();
        let listened = timeout(limit, connection.execute(raw_sql(listen))).await;
        let listened = listened.unwrap_or_else(|elapsed| Err(sqlx::Error::Io(elapsed.into())));
        listened.map_err(|error| store_error(error, "listen for notifications"))?;
        self.common.events(Events::resync);
        Ok(())
    }

    /// Stops listening. Another session takes over with its next job.
    fn listens_no_more(&mut self) {
        if std::mem::take(&mut self.listens) {
            self.common.listening.store(false, Ordering::Release);
        }
    }

    async fn carry_out(&mut self, connection: &mut PgConnection, jobs: Vec<TableJob>) -> Result<(), Error> {
        let mut batch = Batch::of(jobs);
        let outcome = self.carry_out_batch(connection, &mut batch).await;
        if let Err(error) = &outcome {
            // Fails the jobs that were not started. Running jobs are dropped, which means an unknown outcome.
            batch.fail(error);
        }
        outcome
    }

    async fn carry_out_batch(
        &mut self,
        connection: &mut PgConnection,
        batch: &mut Batch,
    ) -> Result<(), Error> {
        if !self.common.listening.load(Ordering::Acquire) {
            self.listen(connection).await?;
        }
        let common = Arc::clone(&self.common);
        let mut db = Db { connection, pooled: self.pooled.as_ref(), limit: common.limit() };
        batch.carry_out(&mut db, &common, &self.requester).await
    }
}

/// Jobs of one round trip, by kind.
#[derive(Default)]
struct Batch {
    acquires: Vec<PendingCall<Request, leasehold_engine::Attempt>>,
    renewals: Vec<PendingCall<(HoldId, i64), leasehold_engine::Renewed>>,
    releases: Vec<PendingCall<ReleaseRequest, leasehold_engine::ReleaseReply>>,
    confirms: Vec<PendingCall<HoldId, bool>>,
    others: Vec<TableJob>,
}

impl Batch {
    fn of(jobs: Vec<TableJob>) -> Self {
        let mut batch = Self::default();
        // Skips jobs whose caller is gone: an acquire would be lost, and an abandoned renewal was repeated by
        // its caller.
        for job in jobs.into_iter().filter(|job| !job.can_skip()) {
            match job {
                TableJob::Acquire(call) => batch.acquires.push(call),
                TableJob::Renew(call) => batch.renewals.push(call),
                TableJob::Release(call) => batch.releases.push(call),
                TableJob::Confirm(call) => batch.confirms.push(call),
                other => batch.others.push(other),
            }
        }
        batch
    }

    /// Runs renewals first, because they have a deadline, and releases before the grants they permit, but after the
    /// grants they undo.
    async fn carry_out(
        &mut self,
        db: &mut Db<'_>,
        common: &Common,
        requester: &Requester,
    ) -> Result<(), Error> {
        if common.is_closing() {
            self.acquires.drain(..).for_each(|call| call.refuse(&Error::closed(), |request| request));
        }
        let late = self.take_late_releases();
        if !self.renewals.is_empty() {
            holds::renew(db, common, std::mem::take(&mut self.renewals)).await?;
        }
        if !self.releases.is_empty() {
            holds::release(db, common, std::mem::take(&mut self.releases)).await?;
        }
        if !self.acquires.is_empty() {
            grants::grant(db, common, requester, std::mem::take(&mut self.acquires)).await?;
        }
        if !late.is_empty() {
            holds::release(db, common, late).await?;
        }
        if !self.confirms.is_empty() {
            holds::confirm(db, common, std::mem::take(&mut self.confirms)).await?;
        }
        self.others.reverse();
        let mut locked_in_a_row = 0;
        while let Some(job) = self.others.pop() {
            if job.can_skip() {
                continue;
            }
            match job {
                TableJob::Served(call) => holds::served(db, common, call).await?,
                TableJob::List(call) => maintenance::list(db, common, call).await?,
                TableJob::Relabel(call) => maintenance::relabel(db, common, call).await?,
                TableJob::GiveOut(call) => maintenance::give_out(db, common, call).await?,
                TableJob::Adopt(call) => {
                    adoption::adopt(db, common, requester, call, &mut locked_in_a_row).await?;
                }
                TableJob::Force(call) => maintenance::force(db, common, call).await?,
                TableJob::Ask(call) => maintenance::ask(db, common, call).await?,
                TableJob::Purge(call) => maintenance::purge(db, common, call).await?,
                TableJob::ClaimUpkeep(call) => maintenance::claim_upkeep(db, common, call).await?,
                TableJob::NoteUpkeep(call) => maintenance::note_upkeep(db, common, call).await?,
                TableJob::End(call) => maintenance::end(db, call).await?,
                TableJob::Acquire(_) | TableJob::Renew(_) | TableJob::Release(_) | TableJob::Confirm(_) => {}
            }
        }
        Ok(())
    }

    /// Removes and returns the releases that undo an acquire of the same batch.
    fn take_late_releases(&mut self) -> Vec<PendingCall<ReleaseRequest, leasehold_engine::ReleaseReply>> {
        if self.acquires.is_empty() || self.releases.is_empty() {
            return Vec::new();
        }
        let asked = self.acquires.iter().flat_map(|call| &call.items);
        let asked: FnvHashSet<HolderId> = asked.map(|request| request.holder).collect();
        let is_late = |call: &mut PendingCall<ReleaseRequest, _>| {
            call.items.iter().any(|item| asked.contains(&item.hold.holder))
        };
        self.releases.extract_if(.., is_late).collect()
    }

    fn fail(self, error: &Error) {
        self.renewals.into_iter().for_each(|call| call.fail(error));
        self.releases.into_iter().for_each(|call| call.fail(error));
        self.acquires.into_iter().for_each(|call| call.refuse(error, |request| request));
        self.confirms.into_iter().for_each(|call| call.fail(error));
        self.others.into_iter().for_each(|job| job.fail(error.clone()));
    }
}

impl Work for TableWork {
    type Job = TableJob;

    async fn opened(&mut self, connection: &mut PgConnection, session: SessionId) -> Result<(), Error> {
        self.open(connection, session).await
    }

    async fn run(&mut self, connection: &mut PgConnection, jobs: Vec<TableJob>) -> Result<(), Error> {
        self.carry_out(connection, jobs).await
    }

    fn limit(&self, _: &[TableJob], _: Duration) -> Option<Duration> {
        // No limit for the batch, because each statement has a separate limit.
        None
    }

    fn keep(&mut self, unused: Duration) -> bool {
        // A session that was unused for three poll intervals has no waiters, because they poll once in each
        // interval.
        let is_spare = unused >= self.common.poll * 3 && self.common.config.closes_when_idle(unused);
        if !is_spare || self.common.registry.is_used() {
            return true;
        }
        self.requester.doubt_period.session = None;
        self.listens_no_more();
        false
    }

    fn notified(&mut self, _: &str, payload: &str) {
        match Notice::parse(payload) {
            Some(Notice::Freed(key)) => self.common.events(|events| events.wake(&key)),
            Some(Notice::Awaited(key)) => self.common.events(|events| events.awaited(&key)),
            Some(Notice::Broken(holder, key)) => {
                self.common.events(|events| events.wake(&key));
                self.common.registry.suspect(key, holder);
            }
            None => {}
        }
    }

    fn ended(&mut self, _: &Error) {
        if let Some(session) = self.requester.doubt_period.session.take() {
            self.common.registry.give_up(session);
        }
        self.listens_no_more();
    }
}

/// A notification. Its text is `f` and the released key, `w` and the key for which a client waits, or `b`, the id of the
/// holder whose hold was ended by force or has a request to release, a space and the key.
#[derive(Debug, PartialEq, Eq)]
enum Notice {
    Freed(LockKey),
    Awaited(LockKey),
    Broken(HolderId, LockKey),
}

impl Notice {
    /// Parses a notification, or returns `None`. Any role can send one, so the content is only a hint.
    fn parse(payload: &str) -> Option<Self> {
        match payload.split_at_checked(1)? {
            ("f", key) => LockKey::new(key).ok().map(Self::Freed),
            ("w", key) => LockKey::new(key).ok().map(Self::Awaited),
            ("b", rest) => {
                let (holder, key) = rest.split_once(' ')?;
                Some(Self::Broken(holder.parse().ok()?, LockKey::new(key).ok()?))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_statements_send_and_nothing_else() {
        let (holder, key) = (HolderId::from_parts(7, 1), LockKey::new("a b\u{e9}").unwrap());
        assert_eq!(Notice::parse("fa b\u{e9}"), Some(Notice::Freed(key.clone())));
        assert_eq!(Notice::parse("wa b\u{e9}"), Some(Notice::Awaited(key.clone())));
        assert_eq!(Notice::parse(&format!("b{holder} a b\u{e9}")), Some(Notice::Broken(holder, key)));
        for foreign in ["", "f", "w", "\u{e9}", "b", "bx y", "hello", "b0-1 a"] {
            assert_eq!(Notice::parse(foreign), None, "{foreign:?}");
        }
    }
}
