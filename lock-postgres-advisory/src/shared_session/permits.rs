//! Permits of keys on a shared session.
//!
//! The session itself records its permits, because the server would grant it each one again. The first permit of a key
//! takes three statements (claim, check, take), each further one takes one, and from time to time a check.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, HolderId};
use leasehold_engine::ReleaseReply;
use leasehold_postgres::{ends_session, store_error};
use sqlx::{AssertSqlSafe, PgConnection, Row as _};
use tokio::time::Instant;

use crate::derived::PermitNumbers;
use crate::error::{elsewhere, ended, interrupted, not_sent, unanswered};
use crate::registry::Location;
use crate::reply::ReplySender;
use crate::shared_session::SharedSession;
use crate::shared_session::job::PermitRequest;
use crate::try_outcome::{PermitGrant, TryOutcome, token_of};

const DOING: &str = "ask for a permit";
const CLEANING: &str = "release a permit that a failed statement left";

/// How often further permits of a key check for a writer that polls. They share its gate, so no probe of the gate shows it.
/// The check reads the server's whole lock table.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// The permits of one key that the session has. There is at least one.
pub(super) struct KeyPermits {
    of: u32,
    /// Time of the last check that found no writer.
    checked_at: Instant,
    holders: BTreeMap<u32, HolderId>,
}

impl SharedSession {
    /// Carries out a request for a permit. An error ends the session.
    pub(super) async fn take_permit(
        &mut self,
        connection: &mut PgConnection,
        request: PermitRequest,
    ) -> Result<(), Error> {
        let PermitRequest { number, holder, .. } = request;
        let location = Location::Shared(self.index);
        // Checks the request again, because the session might have ended since it was queued.
        if !self.is_here(number, holder) {
            let _ = request.answer.send(Ok(TryOutcome::Refused(not_sent())));
            return Ok(());
        }
        self.under_way = vec![number];
        let tried = self.try_permit(&mut *connection, &request).await;
        let outcome = match tried {
            Ok(TryOutcome::Granted(grant)) => {
                let PermitGrant { permit, token } = grant;
                if !self.common.registry.granted_permit(number, holder, location, token, permit) {
                    let _ = request.answer.send(Err(interrupted()));
                    return self.release_unwanted(connection, number, permit).await;
                }
                self.common.watch_capacity(self.common.registry.len() as u64);
                TryOutcome::Granted(grant)
            }
            Ok(other) => other,
            Err(failure) if ends_session(&failure) => {
                let error = ended(failure, "keep the session");
                let _ = request.answer.send(Err(error.clone()));
                return Err(error);
            }
            Err(failure) => {
                if let Err(error) = self.clean_up_permits(connection, number).await {
                    let _ = request.answer.send(Err(error.clone()));
                    return Err(error);
                }
                TryOutcome::Refused(store_error(failure, DOING))
            }
        };
        self.under_way.clear();
        if !matches!(outcome, TryOutcome::Granted(_)) {
            self.common.registry.forget(number, holder);
        }
        let _ = request.answer.send(Ok(outcome));
        Ok(())
    }

    async fn try_permit(
        &mut self,
        connection: &mut PgConnection,
        request: &PermitRequest,
    ) -> Result<TryOutcome<PermitGrant>, sqlx::Error> {
        let (number, of) = (request.number, request.of);
        let (is_first, is_due) = match self.permits.get(&number) {
            // The release of these permits has failed, because the client itself excludes another N.
            Some(held) if held.of != of => return Ok(TryOutcome::Contended),
            Some(held) => (false, held.checked_at.elapsed() >= CHECK_EVERY),
            // A writer of this client polls for the key.
            None if self.marks.closes_gate(number) => return Ok(TryOutcome::Contended),
            None => (true, true),
        };
        if is_first && !self.claim(&mut *connection, request).await? {
            return Ok(TryOutcome::Contended);
        }
        if is_due {
            let mut excluded = self.check_claim(&mut *connection, request).await?;
            // Checks again, because a probe of another client looks like a reader for an instant.
            if matches!(excluded, Some(TryOutcome::Contended)) {
                excluded = self.check_claim(&mut *connection, request).await?;
            }
            if let Some(excluded) = excluded {
                if is_first {
                    self.undo_claim(connection, number, of).await?;
                }
                return Ok(excluded);
            }
            if let Some(held) = self.permits.get_mut(&number) {
                held.checked_at = Instant::now();
            }
        }
        // The claim has checked for waiters.
        let has_turn = is_first || request.turn.is_some();
        let taken = self.take_free(&mut *connection, number, of, has_turn).await?;
        match taken {
            Some(grant) => {
                let empty = || KeyPermits { of, checked_at: Instant::now(), holders: BTreeMap::new() };
                let held = self.permits.entry(number).or_insert_with(empty);
                held.holders.insert(grant.permit, request.holder);
                Ok(TryOutcome::Granted(grant))
            }
            None => {
                if is_first {
                    self.undo_claim(connection, number, of).await?;
                }
                Ok(TryOutcome::Contended)
            }
        }
    }

    /// Shares the numbers of the key. Returns whether the server has granted all.
    async fn claim(
        &self,
        connection: &mut PgConnection,
        request: &PermitRequest,
    ) -> Result<bool, sqlx::Error> {
        let numbers = PermitNumbers::of(request.number);
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.claim)));
        let query = query.bind(request.number).bind(self.process.pid).bind(numbers.total(request.of));
        let query = query.bind(numbers.turn()).bind(request.turn.is_some());
        let code: i32 = self.bounded(query.fetch_one(connection)).await?.try_get(0)?;
        if code < 0 { Err(elsewhere()) } else { Ok(code > 0) }
    }

    /// Returns the reply to the request if another session excludes it.
    async fn check_claim(
        &self,
        connection: &mut PgConnection,
        request: &PermitRequest,
    ) -> Result<Option<TryOutcome<PermitGrant>>, sqlx::Error> {
        let (number, of) = (request.number, request.of);
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.check)));
        let query = query.bind(number).bind(self.process.pid).bind(PermitNumbers::of(number).first());
        // No process has the number 0.
        let query = query.bind(i64::from(of)).bind(request.turn.unwrap_or(0));
        let row = self.bounded(query.fetch_one(connection)).await?;
        let (is_here, in_use, is_excluded): (bool, Option<i64>, bool) =
            (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        if !is_here {
            return Err(elsewhere());
        }
        let in_use = in_use.and_then(|in_use| u32::try_from(in_use).ok());
        let mismatch = in_use.map(|in_use| TryOutcome::Refused(Error::mode_mismatch(in_use, of)));
        Ok(mismatch.or_else(|| is_excluded.then_some(TryOutcome::Contended)))
    }

    async fn undo_claim(
        &self,
        connection: &mut PgConnection,
        number: i64,
        of: u32,
    ) -> Result<(), sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.undo)));
        let query = query.bind(number).bind(self.process.pid).bind(PermitNumbers::of(number).total(of));
        let is_undone: bool = self.bounded(query.fetch_one(connection)).await?.try_get(0)?;
        if is_undone { Ok(()) } else { Err(elsewhere()) }
    }

    /// Takes a permit that no session has. Leaves out the permits of this session, which the server would grant again.
    async fn take_free(
        &self,
        connection: &mut PgConnection,
        number: i64,
        of: u32,
        has_turn: bool,
    ) -> Result<Option<PermitGrant>, sqlx::Error> {
        let numbers = PermitNumbers::of(number);
        let held = self.permits.get(&number);
        let is_own = |permit: &u32| held.is_some_and(|held| held.holders.contains_key(permit));
        let wanted: Vec<u32> = (0..of).filter(|permit| !is_own(permit)).collect();
        let bound: Vec<i64> = wanted.iter().map(|permit| numbers.permit(*permit)).collect();
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.take)));
        let query = query.bind(bound).bind(self.process.pid).bind(has_turn).bind(numbers.turn());
        let row = self.bounded(query.fetch_one(connection)).await?;
        let (passed, place, drawn): (Option<bool>, Option<i64>, Option<i64>) =
            (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        if passed.is_none() {
            return Err(elsewhere());
        }
        let Some(place) = place else { return Ok(None) };
        let permit = usize::try_from(place - 1).ok().and_then(|place| wanted.get(place)).copied();
        let token = token_of(drawn.unwrap_or(0), 0)?;
        match (permit, token) {
            (Some(permit), Some(token)) => Ok(Some(PermitGrant { permit, token })),
            _ => Err(sqlx::Error::Protocol("the permit cannot be read".into())),
        }
    }

    /// Releases the permit of `holder`. An error ends the session.
    pub(super) async fn release_permit(
        &mut self,
        connection: &mut PgConnection,
        number: i64,
        holder: HolderId,
        answer: ReplySender<ReleaseReply>,
    ) -> Result<(), Error> {
        let held = self.permits.get(&number).filter(|_| self.is_here(number, holder));
        let permit = held.and_then(|held| {
            held.holders.iter().find(|(_, other)| **other == holder).map(|(permit, _)| *permit)
        });
        let Some(permit) = permit else {
            self.common.registry.forget(number, holder);
            let _ = answer.send(Ok(ReleaseReply::new(false)));
            return Ok(());
        };
        let reply = match self.unlock_permit(&mut *connection, number, permit).await {
            // The server did not have it, so the record of the key is wrong.
            Ok(reply) if !reply.was_held => self.clean_up_permits(connection, number).await.map(|()| reply),
            Ok(reply) => Ok(reply),
            Err(failure) if ends_session(&failure) => {
                let is_silent =
                    matches!(&failure, sqlx::Error::Io(io) if io.kind() == io::ErrorKind::TimedOut);
                let reply = if is_silent { Err(unanswered()) } else { Ok(ReleaseReply::new(false)) };
                let _ = answer.send(reply);
                return Err(ended(failure, "keep the session"));
            }
            // It was held until now, whether the failed statement or this one releases it.
            Err(_) => self.clean_up_permits(connection, number).await.map(|()| ReleaseReply::new(true)),
        };
        match reply {
            Ok(reply) => {
                self.common.registry.forget(number, holder);
                let _ = answer.send(Ok(reply));
                Ok(())
            }
            Err(error) => {
                let _ = answer.send(Ok(ReleaseReply::new(false)));
                Err(error)
            }
        }
    }

    /// Releases a permit at the server and removes it from the record.
    async fn unlock_permit(
        &mut self,
        connection: &mut PgConnection,
        number: i64,
        permit: u32,
    ) -> Result<ReleaseReply, sqlx::Error> {
        let Some(held) = self.permits.get_mut(&number) else { return Ok(ReleaseReply::new(false)) };
        let (numbers, of) = (PermitNumbers::of(number), held.of);
        held.holders.remove(&permit);
        let is_last = held.holders.is_empty();
        if is_last {
            self.permits.remove(&number);
        }
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.release)));
        let query = query.bind(number).bind(self.process.pid).bind(&*self.common.channel);
        let query = query.bind(numbers.permit(permit)).bind(numbers.total(of)).bind(is_last);
        let code: i32 = self.bounded(query.fetch_one(connection)).await?.try_get(0)?;
        if code < 0 { Err(elsewhere()) } else { Ok(ReleaseReply::new(code > 0).waiters(code > 1)) }
    }

    /// Releases a permit whose request is gone.
    async fn release_unwanted(
        &mut self,
        connection: &mut PgConnection,
        number: i64,
        permit: u32,
    ) -> Result<(), Error> {
        let unlocked = self.unlock_permit(connection, number, permit).await;
        unlocked.map(drop).map_err(|failure| ended(failure, CLEANING))
    }

    /// Releases all locks of the key that the record does not have.
    async fn clean_up_permits(&self, connection: &mut PgConnection, number: i64) -> Result<(), Error> {
        let numbers = PermitNumbers::of(number);
        let held = self.permits.get(&number);
        let kept: Vec<i64> = held
            .into_iter()
            .flat_map(|held| held.holders.keys())
            .map(|permit| numbers.permit(*permit))
            .collect();
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.clean_up)));
        let query = query.bind(number).bind(self.process.pid).bind(numbers.first()).bind(kept);
        let done = self.bounded(query.bind(held.is_some()).fetch_one(connection)).await;
        match done.and_then(|row| row.try_get(0)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ended(elsewhere(), CLEANING)),
            Err(error) => Err(store_error(error, CLEANING)),
        }
    }

    /// Replies whether no session waits for the number.
    pub(super) async fn is_unclaimed(
        &self,
        connection: &mut PgConnection,
        number: i64,
        answer: ReplySender<bool>,
    ) -> Result<(), Error> {
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.common.statements.permits.is_unclaimed)));
        let row = self.bounded(query.bind(number).bind(self.process.pid).fetch_one(connection)).await;
        let read = row.and_then(|row| Ok((row.try_get::<bool, _>(0)?, row.try_get::<bool, _>(1)?)));
        match read {
            Ok((true, is_unclaimed)) => {
                let _ = answer.send(Ok(is_unclaimed));
                Ok(())
            }
            Ok((false, _)) => Err(ended(elsewhere(), "look for a waiting writer")),
            Err(error) => {
                let ends = ends_session(&error);
                let error = store_error(error, "look for a waiting writer");
                let _ = answer.send(Err(error.clone()));
                if ends { Err(error) } else { Ok(()) }
            }
        }
    }
}
