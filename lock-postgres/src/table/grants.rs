//! Grants: batches, waiters' marks, and rows locked by other transactions.

mod beside;
mod marks;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, HolderId, Mode};
use leasehold_engine::token::{self, Reserved};
use leasehold_engine::{Attempt, Contended, Granted, Request};
use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::time::Instant;

use self::marks::Mark;
use super::common::Common;
use super::db::{Db, Statement, StatementFailure, locked_error};
use super::holds;
use super::job::{PendingCall, hand_out};
use super::registry::{DoubtPeriod, HoldId};
use super::values::{HolderText, micros};
use crate::error::store_error;

/// Maximum number of keys in one statement.
const MOST_KEYS: usize = 512;

/// Number of locked rows, found one after another, after which the remaining keys are not tried. Each costs
/// the whole `lock_timeout`.
pub(super) const FEW: usize = 4;

/// How often a request is sent at most, if its row changes during the statement.
const ROUNDS: u32 = 4;

/// The reply of a statement to one request.
enum GrantReply {
    Granted(Drawn),
    Contended(Contended),
    /// The key is held, and its row has no waiter's mark (a note that a client waits) that lasts long enough.
    Unmarked(Contended, Mark),
    /// The key has parts in use, about which the statement does not decide.
    InParts,
    /// The key was free but not granted, because another client was quicker or has locked the row.
    Passed,
    /// The statement failed, and was rolled back by the server or never sent.
    Refused(Error),
}

/// The numbers of one grant: the number in its row, further numbers for hand-overs, and the number of its permit.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    number: i64,
    further: Vec<i64>,
    permit: Option<u32>,
}

impl Drawn {
    /// Reads the numbers of a grant from the columns that begin at `at`.
    pub(super) fn read(row: &PgRow, at: usize, draws_more: bool) -> Result<Self, StatementFailure> {
        let number = row.try_get(at).map_err(unreadable)?;
        let further = if draws_more { row.try_get(at + 1).map_err(unreadable)? } else { Vec::new() };
        Ok(Self { number, further, permit: None })
    }
}

/// The reply, or `Err` if it is unknown whether the key was granted.
type GrantResult = Result<GrantReply, Error>;

/// Requests all keys of `calls` and replies. If a caller is gone, its grant is released immediately.
pub(super) async fn grant(
    db: &mut Db<'_>,
    common: &Common,
    requester: &Requester,
    calls: Vec<PendingCall<Request, Attempt>>,
) -> Result<(), Error> {
    let requests: Vec<&Request> = calls.iter().flat_map(|call| &call.items).collect();
    let named = requests.iter().map(|request| name(request)).collect();
    let repeated = beside::repeated(common, &requests);
    let in_flight = common.registry.in_flight(named, requester.doubt_period);
    let asked = Instant::now();
    let mut grants = Grants { db, common, owner: &requester.owner, repeated };
    let answers = grants.grant_in_rounds(&requests).await?;
    for (request, answer) in requests.iter().zip(&answers) {
        if matches!(answer, Ok(Attempt::Granted(_))) {
            common.registry.granted(name(request), asked);
            if request.mode == Mode::Exclusive {
                common.known_rows.insert(&request.key);
            }
        }
    }
    in_flight.answered();
    deliver(db, common, calls, answers, |request| request).await
}

/// Replies to the callers, and releases the grants that no caller gets.
pub(super) async fn deliver<Q>(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<PendingCall<Q, Attempt>>,
    mut answers: Vec<Result<Attempt, Error>>,
    request_of: fn(&Q) -> &Request,
) -> Result<(), Error> {
    let mut unheard = Vec::new();
    if common.is_closing() {
        // Releases the grants here, because after a close no caller could release them.
        for (item, answer) in calls.iter().flat_map(|call| &call.items).zip(&mut answers) {
            if matches!(answer, Ok(Attempt::Granted(_))) {
                *answer = Err(Error::closed());
                unheard.push(name(request_of(item)));
            }
        }
    }
    hand_out(calls, answers, |item, answer| {
        if matches!(answer, Ok(Attempt::Granted(_))) {
            unheard.push(name(request_of(item)));
        }
    });
    if !unheard.is_empty() {
        common.registry.add_unconfirmed(unheard.iter().cloned(), DoubtPeriod::default());
        holds::undo(db, common, &unheard).await?;
    }
    Ok(())
}

/// Returns the reply to a request with the numbers of its grant.
pub(super) fn granted(common: &Common, request: &Request, drawn: &Drawn) -> Result<Attempt, Error> {
    let number = drawn.number;
    let token = u64::try_from(number).ok().filter(|number| *number > 0);
    let token = token.and_then(token::from_store_number).ok_or_else(|| {
        Error::new(ErrorKind::Capacity, "this schema has drawn every fencing token there is; use a new one")
    })?;
    let further = drawn.further.iter().filter_map(|number| u64::try_from(*number).ok());
    let reserved = Reserved::rest_of(token).and_numbers(further);
    let mut granted = Granted::with_token(Some(token)).reserved(reserved);
    granted.permit = drawn.permit;
    let in_part = request.mode != Mode::Exclusive;
    granted.extension =
        common.extension.as_ref().map(|make| make(&request.key, request.holder, number, in_part));
    Ok(Attempt::Granted(granted))
}

/// The session that sends the requests.
pub(super) struct Requester {
    /// Description of the client for operators.
    pub(super) owner: Arc<str>,
    pub(super) doubt_period: DoubtPeriod,
}

pub(super) fn name(request: &Request) -> HoldId {
    HoldId::new(request.key.clone(), request.holder, request.mode)
}

struct Grants<'g, 'c> {
    db: &'g mut Db<'c>,
    common: &'g Common,
    owner: &'g str,
    /// The holders whose request for a part was possibly granted already.
    repeated: Vec<HolderId>,
}

impl Grants<'_, '_> {
    /// Requests all keys. If a row changed during the statement, requests its key again, up to [`ROUNDS`] times.
    async fn grant_in_rounds(&mut self, requests: &[&Request]) -> Result<Vec<Result<Attempt, Error>>, Error> {
        let mut answers: Vec<Option<Result<Attempt, Error>>> = requests.iter().map(|_| None).collect();
        let mut open: Vec<usize> = (0..requests.len()).collect();
        let mut round = 0;
        while !open.is_empty() {
            round += 1;
            let (now, later) = each_key_once(open, requests);
            open = later;
            let asked: Vec<&Request> = now.iter().map(|at| requests[*at]).collect();
            let results = self.grant_by_mode(&asked).await?;
            let mut unmarked = Vec::new();
            for (at, result) in now.into_iter().zip(results) {
                let request = requests[at];
                if matches!(result, Ok(GrantReply::Contended(_) | GrantReply::Unmarked(..))) {
                    self.common.contention.add(&request.key);
                }
                answers[at] = Some(match result {
                    Ok(GrantReply::Granted(drawn)) => granted(self.common, request, &drawn),
                    Ok(GrantReply::Unmarked(contended, mark)) if request.waits && round < ROUNDS => {
                        unmarked.push((at, mark));
                        Ok(Attempt::Contended(contended))
                    }
                    Ok(GrantReply::Contended(contended) | GrantReply::Unmarked(contended, _)) => {
                        Ok(Attempt::Contended(contended))
                    }
                    Ok(GrantReply::Refused(error)) => Ok(Attempt::Refused(error)),
                    Ok(GrantReply::Passed | GrantReply::InParts) if round < ROUNDS => {
                        open.push(at);
                        continue;
                    }
                    Ok(GrantReply::Passed | GrantReply::InParts) => Ok(Attempt::Contended(Contended::new())),
                    Err(error) => Err(error),
                });
            }
            if !unmarked.is_empty() {
                open.extend(self.mark_and_find_released(requests, unmarked).await?);
            }
        }
        let missing = || {
            Err(Error::new(ErrorKind::OutcomeUnknown, "the server answered fewer requests than it was sent"))
        };
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect())
    }

    /// Grants keys with free rows, which is nearly always all of them. Requests the rest by the statement that inserts
    /// rows and returns why a key was not granted.
    async fn grant_exclusively(&mut self, requests: &[&Request]) -> Result<Vec<GrantResult>, Error> {
        let mut skips = self.common.is_any_pinned(requests.iter().map(|r| &r.key));
        let mut drawn = Vec::new();
        if !skips {
            match self.grant_free_rows(requests).await {
                Ok(granted) => drawn = granted,
                Err(StatementFailure::Locked { .. } | StatementFailure::BadValue(_)) => skips = true,
                Err(failure) => return failed(failure, requests),
            }
        }
        drawn.resize(requests.len(), None);
        let rest = requests.iter().zip(&drawn).filter(|(_, drawn)| drawn.is_none());
        let rest: Vec<&Request> = rest.map(|(request, _)| *request).collect();
        let mut results = self.grant_or_explain(&rest, skips).await?.into_iter();
        let result = |drawn: Option<Drawn>| match drawn {
            Some(drawn) => Ok(GrantReply::Granted(drawn)),
            None => results.next().unwrap_or(Ok(GrantReply::Passed)),
        };
        Ok(drawn.into_iter().map(result).collect())
    }

    /// Grants keys with free rows in one statement. Returns the numbers at the position of each granted request.
    async fn grant_free_rows(
        &mut self,
        requests: &[&Request],
    ) -> Result<Vec<Option<Drawn>>, StatementFailure> {
        let [first, others @ ..] = requests else { return Ok(Vec::new()) };
        if others.is_empty() {
            return Ok(vec![self.grant_one(first).await?]);
        }
        let like_the_first =
            |r: &&Request| r.ttl == first.ttl && r.cooldown == first.cooldown && r.label == first.label;
        if !others.iter().all(like_the_first) {
            return Ok(Vec::new());
        }
        let draws_more = requests.iter().any(|request| request.reserve > 0);
        let text = self.common.statements.grant_free.text(draws_more);
        let (schema, owner) = (&self.common.config.schema, self.owner);
        let bind = |query: Statement| {
            let query = query.bind(keys(requests)).bind(holders(requests)).bind(ttl(first));
            query.bind(first.cooldown.map(micros)).bind(first.label.as_deref()).bind(owner)
        };
        let rows = self.db.rows_drawing_token("acquire", text, schema, &bind).await?;
        let mut drawn = vec![None; requests.len()];
        for row in &rows {
            let place: i64 = row.try_get(0).map_err(unreadable)?;
            let place = usize::try_from(place).ok().and_then(|n| n.checked_sub(1));
            if let Some(drawn) = place.and_then(|place| drawn.get_mut(place)) {
                *drawn = Some(Drawn::read(row, 1, draws_more)?);
            }
        }
        Ok(drawn)
    }

    /// Grants each key or returns why not. Uses one statement, or one per request if another transaction has locked a
    /// row or a value cannot be stored.
    async fn grant_or_explain(
        &mut self,
        requests: &[&Request],
        skips: bool,
    ) -> Result<Vec<GrantResult>, Error> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let mut asked = self.grant_or_explain_batch(requests, skips).await;
        if !skips && matches!(asked, Err(StatementFailure::Locked { .. } | StatementFailure::BadValue(_))) {
            asked = self.grant_or_explain_batch(requests, true).await;
        }
        match asked {
            Ok(outcomes) => Ok(outcomes.into_iter().map(Ok).collect()),
            Err(StatementFailure::Locked { row: true } | StatementFailure::BadValue(_))
                if requests.len() > 1 =>
            {
                self.grant_or_explain_singly(requests).await
            }
            Err(StatementFailure::Locked { row: true }) => {
                Ok(vec![Ok(GrantReply::Contended(Contended::new()))])
            }
            Err(failure) => failed(failure, requests),
        }
    }

    /// Works like [`grant_or_explain`](Self::grant_or_explain), with one statement per request.
    async fn grant_or_explain_singly(&mut self, requests: &[&Request]) -> Result<Vec<GrantResult>, Error> {
        let mut results = Vec::with_capacity(requests.len());
        let mut locked_in_a_row = 0;
        for request in requests {
            if locked_in_a_row >= FEW {
                results.push(Ok(GrantReply::Refused(locked_error().with_key(&request.key))));
                continue;
            }
            let asked = self.grant_or_explain_batch(&[request], true).await;
            locked_in_a_row =
                if matches!(asked, Err(StatementFailure::Locked { .. })) { locked_in_a_row + 1 } else { 0 };
            match asked {
                Ok(outcomes) => results.push(Ok(outcomes.into_iter().next().unwrap_or(GrantReply::Passed))),
                // Counts as held, because a long transaction is inserting this row.
                Err(StatementFailure::Locked { row: true }) => {
                    results.push(Ok(GrantReply::Contended(Contended::new())));
                }
                Err(failure) => results.extend(failed(failure, &[request])?),
            }
        }
        Ok(results)
    }

    /// Grants each key or returns why not, in one statement. With `skips` it leaves out rows that another
    /// transaction has locked, and pins their keys: later statements skip these rows for a while.
    async fn grant_or_explain_batch(
        &mut self,
        requests: &[&Request],
        skips: bool,
    ) -> Result<Vec<GrantReply>, StatementFailure> {
        let text = self.common.statements.grant.text(skips);
        let poll = micros(self.common.poll);
        let owner = self.owner;
        let rows = self
            .db
            .rows_drawing_token("acquire", text, &self.common.config.schema, &|query| {
                query
                    .bind(keys(requests))
                    .bind(holders(requests))
                    .bind(requests.iter().map(|r| ttl(r)).collect::<Vec<_>>())
                    .bind(requests.iter().map(|r| r.cooldown.map(micros)).collect::<Vec<_>>())
                    .bind(requests.iter().map(|r| r.label.as_deref()).collect::<Vec<_>>())
                    .bind(owner)
                    .bind(poll)
            })
            .await;
        let mut outcomes = read(&rows?).map_err(unreadable)?;
        let outcome = |request: &&Request| match outcomes.remove(request.key.as_str()) {
            Some(GrantReply::Passed) | None if skips => {
                self.common.pin(&request.key);
                GrantReply::Contended(Contended::new())
            }
            outcome => outcome.unwrap_or(GrantReply::Passed),
        };
        Ok(requests.iter().map(outcome).collect())
    }

    /// Grants one key if its row is free or missing. Returns its numbers, or `None` if it was not granted.
    async fn grant_one(&mut self, request: &Request) -> Result<Option<Drawn>, StatementFailure> {
        let (ttl, owner) = (ttl(request), self.owner);
        let statements = &self.common.statements;
        // Uses `retake_one` only without a cooldown: it could read the clock before it waited for the row,
        // which would shorten a cooldown.
        let retakes = request.cooldown.is_none() && self.common.known_rows.might_contain(&request.key);
        let draws_more = request.reserve > 0;
        let text = if retakes { &statements.retake_one } else { &statements.grant_one }.text(draws_more);
        let row = self
            .db
            .row_drawing_token("acquire", text, &self.common.config.schema, &|query| {
                let query = query.bind(request.key.as_str()).bind(HolderText(request.holder)).bind(ttl);
                let query = if retakes { query } else { query.bind(request.cooldown.map(micros)) };
                query.bind(request.label.as_deref()).bind(owner)
            })
            .await;
        row?.map(|row| Drawn::read(&row, 0, draws_more)).transpose()
    }
}

fn keys<'r>(requests: &[&'r Request]) -> Vec<&'r str> {
    requests.iter().map(|r| r.key.as_str()).collect()
}

fn holders(requests: &[&Request]) -> Vec<HolderText> {
    requests.iter().map(|r| HolderText(r.holder)).collect()
}

/// Returns the positions for the next statement, each key once and in order, and the positions left for a later one.
fn each_key_once(mut open: Vec<usize>, requests: &[&Request]) -> (Vec<usize>, Vec<usize>) {
    open.sort_by(|a, b| requests[*a].key.cmp(&requests[*b].key).then(a.cmp(b)));
    let mut now: Vec<usize> = Vec::new();
    let mut later = Vec::new();
    for at in open {
        let repeats = now.last().is_some_and(|last| requests[*last].key == requests[at].key);
        if repeats || now.len() == MOST_KEYS { later.push(at) } else { now.push(at) }
    }
    (now, later)
}

/// Reads the outcomes by key.
fn read(rows: &[PgRow]) -> Result<HashMap<String, GrantReply>, sqlx::Error> {
    let mut outcomes = HashMap::with_capacity(rows.len());
    for row in rows {
        let key: String = row.try_get(0)?;
        let outcome = match row.try_get(1)? {
            Some(number) => GrantReply::Granted(Drawn { number, further: Vec::new(), permit: None }),
            None => refusal(row)?,
        };
        // Keeps the grant: it has two rows, and the row with the earlier state does not count.
        if matches!(outcome, GrantReply::Granted(_)) || !outcomes.contains_key(&key) {
            outcomes.insert(key, outcome);
        }
    }
    Ok(outcomes)
}

fn refusal(row: &PgRow) -> Result<GrantReply, sqlx::Error> {
    let live: bool = row.try_get(2)?;
    let expires: Option<i64> = row.try_get(3)?;
    let cooling: Option<i64> = row.try_get(4)?;
    let (marked, in_parts): (bool, bool) = (row.try_get(5)?, row.try_get(6)?);
    if in_parts {
        return Ok(GrantReply::InParts);
    }
    let mut contended = Contended::new();
    contended.cooling_for = cooling.map(duration);
    contended.retry_after = if live {
        expires.map(|e| duration(e).max(contended.cooling_for.unwrap_or_default()))
    } else {
        contended.cooling_for
    };
    Ok(match (live, cooling) {
        (true, _) if !marked => GrantReply::Unmarked(contended, Mark::Waiter),
        (true, _) | (false, Some(_)) => GrantReply::Contended(contended),
        (false, None) => GrantReply::Passed,
    })
}

/// Returns a result for each request of a failed statement, or `Err` if the connection is unusable.
fn failed(failure: StatementFailure, requests: &[&Request]) -> Result<Vec<GrantResult>, Error> {
    let result: fn(Error) -> GrantResult = match &failure {
        StatementFailure::ConnectionUnusable(_) | StatementFailure::OutcomeUnknown(_) => Err,
        StatementFailure::Locked { .. } | StatementFailure::BadValue(_) | StatementFailure::Refused(_) => {
            |e| Ok(GrantReply::Refused(e))
        }
    };
    let errors = failure.for_each(requests.len())?.into_iter().zip(requests);
    Ok(errors.map(|(error, request)| result(error.with_key(&request.key))).collect())
}

/// Wraps an error of decoding a row. The statement was executed, so the outcome is unknown.
fn unreadable(error: sqlx::Error) -> StatementFailure {
    StatementFailure::OutcomeUnknown(store_error(error, "acquire"))
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn ttl(request: &Request) -> i64 {
    request.ttl.map_or(0, micros)
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_api::LockKey;

    #[test]
    fn a_statement_has_each_key_once_and_in_order() {
        let request = |(serial, key): (u64, &&str)| {
            Request::new(LockKey::new(key).unwrap(), HolderId::from_parts(1, serial))
        };
        let requests: Vec<_> = (0..).zip(&["b", "a", "b", "c", "a", "b"]).map(request).collect();
        let requests: Vec<_> = requests.iter().collect();
        let (now, later) = each_key_once((0..6).collect(), &requests);
        assert_eq!((now, later.clone()), (vec![1, 0, 3], vec![4, 2, 5]));
        let (now, later) = each_key_once(later, &requests);
        assert_eq!((now, later), (vec![4, 2], vec![5]));
    }
}
