//! Grants of keys that several holders have at once, and exclusive grants of such keys.
//!
//! ```text
//!   shared, permit:  join --> look --> enter            the key is free, or a shared key needs a further part
//!                                 `--> open, again      the parts of another mode are all free
//!   exclusive:       the statements for one holder --> look --> convert
//! ```

use std::time::Duration;

use leasehold_api::{Error, HolderId, Mode};
use leasehold_engine::{Contended, Request};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::super::common::Common;
use super::super::db::{Statement, StatementFailure, locked_error};
use super::super::parts::{self, PartStatements};
use super::super::values::{HolderText, micros};
use super::marks::Mark;
use super::{Drawn, FEW, GrantReply, GrantResult, Grants, duration, failed, name, ttl, unreadable};

/// How often the statements of one request are sent in a round, if the key changes during them.
const TRIES: u32 = 4;

/// The number of parts over which requests are spread that have collided with another one.
const SPREAD: i32 = 64;

/// Returns the holders among requests for parts whose request was possibly granted already.
pub(super) fn repeated(common: &Common, requests: &[&Request]) -> Vec<HolderId> {
    let of_parts = requests.iter().filter(|request| request.mode != Mode::Exclusive);
    let repeated = of_parts.filter(|request| common.registry.may_have(&name(request)));
    repeated.map(|request| request.holder).collect()
}

impl Grants<'_, '_> {
    /// Grants each request in its mode, or returns why not.
    pub(super) async fn grant_by_mode(&mut self, requests: &[&Request]) -> Result<Vec<GrantResult>, Error> {
        let common = self.common;
        let Some(statements) = &common.statements.parts else {
            return self.grant_exclusively(requests).await;
        };
        let is_single =
            |request: &Request| request.mode == Mode::Exclusive && !common.in_parts.contains(&request.key);
        let single: Vec<usize> = (0..requests.len()).filter(|at| is_single(requests[*at])).collect();
        let mut results: Vec<Option<GrantResult>> = requests.iter().map(|_| None).collect();
        let asked: Vec<&Request> = single.iter().map(|at| requests[*at]).collect();
        for (at, result) in single.into_iter().zip(self.grant_exclusively(&asked).await?) {
            results[at] = match result {
                Ok(GrantReply::InParts) => None,
                result => Some(result),
            };
        }
        self.join_many(statements, requests, &mut results).await?;
        let mut replies = Vec::with_capacity(requests.len());
        let mut locked_in_a_row = 0;
        for (request, result) in requests.iter().zip(results) {
            replies.push(match result {
                Some(result) => result,
                None if locked_in_a_row >= FEW => {
                    Ok(GrantReply::Refused(locked_error().with_key(&request.key)))
                }
                None => {
                    let tried = self.try_beside(statements, request).await;
                    let is_locked = matches!(tried, Err(StatementFailure::Locked { .. }));
                    locked_in_a_row = if is_locked { locked_in_a_row + 1 } else { 0 };
                    reply_of(tried, request)?
                }
            });
        }
        Ok(replies)
    }

    /// Grants the open requests for parts that are like the first one, in one statement. The others stay open.
    async fn join_many(
        &mut self,
        statements: &PartStatements,
        requests: &[&Request],
        results: &mut [Option<GrantResult>],
    ) -> Result<(), Error> {
        let is_open = |at: &usize| {
            let request = requests[*at];
            results[*at].is_none()
                && request.mode != Mode::Exclusive
                && !self.repeated.contains(&request.holder)
        };
        let mut places: Vec<usize> = (0..requests.len()).filter(is_open).collect();
        let Some(first) = places.first().map(|at| requests[*at]) else { return Ok(()) };
        let Some(of) = parts::of(first.mode) else { return Ok(()) };
        places.retain(|at| {
            let request = requests[*at];
            (request.mode, request.ttl, &request.label) == (first.mode, first.ttl, &first.label)
        });
        if places.len() < 2 {
            return Ok(());
        }
        let (schema, owner) = (&self.common.config.schema, self.owner);
        let asked: Vec<&Request> = places.iter().map(|at| requests[*at]).collect();
        let bind = |query: Statement| {
            let query = query.bind(super::keys(&asked)).bind(super::holders(&asked)).bind(ttl(first));
            query.bind(first.label.as_deref()).bind(owner).bind(of)
        };
        let rows = match self.db.rows_drawing_token("acquire", &statements.join_many, schema, &bind).await {
            Ok(rows) => rows,
            // Nothing was done, so the requests are sent one by one.
            Err(StatementFailure::Locked { .. } | StatementFailure::BadValue(_)) => return Ok(()),
            Err(failure) => {
                for (at, result) in places.into_iter().zip(failed(failure, &asked)?) {
                    results[at] = Some(result);
                }
                return Ok(());
            }
        };
        for row in &rows {
            let joined = joined_place(row).and_then(|place| Ok((place, drawn(row, 1, first.mode)?)));
            match joined {
                Ok((Some(place), drawn)) => {
                    if let Some(result) = places.get(place).and_then(|at| results.get_mut(*at)) {
                        *result = Some(Ok(GrantReply::Granted(drawn)));
                    }
                }
                Ok((None, _)) => {}
                Err(failure) => {
                    let errors = failed(failure, &asked)?;
                    for (at, result) in places.iter().zip(errors) {
                        results[*at] = Some(result);
                    }
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Grants one request that the statements for a single holder leave open, or returns why not.
    async fn try_beside(
        &mut self,
        statements: &PartStatements,
        request: &Request,
    ) -> Result<GrantReply, StatementFailure> {
        let common = self.common;
        let of = parts::of(request.mode);
        let mut skipped_parts = 0;
        let mut unjoined = 0;
        for _ in 0..TRIES {
            let joined = match of {
                Some(of) => self.join(statements, request, of).await?,
                None => None,
            };
            if let Some(drawn) = joined {
                return Ok(GrantReply::Granted(drawn));
            }
            let drawn = match self.look(statements, request).await?.next(of) {
                Next::Refuse(GrantReply::Refused(error)) => {
                    return Ok(GrantReply::Refused(error.with_key(&request.key)));
                }
                Next::Refuse(reply) => return Ok(reply),
                Next::Single => return Ok(GrantReply::Passed),
                Next::Again => {
                    unjoined += 1;
                    None
                }
                next @ (Next::Open | Next::Convert) => {
                    let opens = matches!(next, Next::Open);
                    let skips = common.is_any_pinned([&request.key]);
                    let drawn = self.convert(statements, request, opens, skips).await?;
                    // Counts as held, because a long transaction has locked the gate or a part.
                    if skips && drawn.is_none() {
                        return Ok(GrantReply::Contended(Contended::new()));
                    }
                    drawn.filter(|_| !opens)
                }
                Next::Enter(of) => {
                    let entered = self.enter(statements, request, of, skipped_parts).await?;
                    skipped_parts = fastrand::i32(0..SPREAD);
                    entered
                }
            };
            if let Some(drawn) = drawn {
                return Ok(GrantReply::Granted(drawn));
            }
        }
        // Counts as held, because other transactions have locked all free parts each time, for example as a fence does.
        Ok(if unjoined == TRIES { GrantReply::Contended(Contended::new()) } else { GrantReply::Passed })
    }

    /// Takes a free part, or the part that an earlier copy of the request has taken.
    async fn join(
        &mut self,
        statements: &PartStatements,
        request: &Request,
        of: i32,
    ) -> Result<Option<Drawn>, StatementFailure> {
        if self.repeated.contains(&request.holder) {
            let bind = |query: Statement| {
                query.bind(request.key.as_str()).bind(HolderText(request.holder)).bind(ttl(request)).bind(of)
            };
            if let Some(row) = self.db.row("acquire", &statements.extend, &bind).await? {
                return drawn(&row, 0, request.mode).map(Some);
            }
        }
        let (schema, owner) = (&self.common.config.schema, self.owner);
        let bind = |query| bind_part(query, request, owner).bind(of);
        let row = self.db.row_drawing_token("acquire", &statements.join, schema, &bind).await?;
        row.map(|row| drawn(&row, 0, request.mode)).transpose()
    }

    async fn enter(
        &mut self,
        statements: &PartStatements,
        request: &Request,
        of: i32,
        skipped_parts: i32,
    ) -> Result<Option<Drawn>, StatementFailure> {
        let text = if of == 0 { &statements.enter_shared } else { &statements.enter_permits };
        let (schema, owner) = (&self.common.config.schema, self.owner);
        let bind = |query| {
            let query = bind_part(query, request, owner).bind(of);
            if of == 0 { query.bind(skipped_parts) } else { query }
        };
        let row = self.db.row_drawing_token("acquire", text, schema, &bind).await?;
        if row.is_some() {
            self.common.in_parts.add(&request.key);
        }
        row.map(|row| drawn(&row, 0, request.mode)).transpose()
    }

    /// Grants a key without held parts to one holder, or opens it for another mode. A part that another transaction has
    /// locked for long, as a fence does, is skipped, and its key counts as held. Otherwise every request for a part of the
    /// key would wait for the gate.
    async fn convert(
        &mut self,
        statements: &PartStatements,
        request: &Request,
        opens: bool,
        skips: bool,
    ) -> Result<Option<Drawn>, StatementFailure> {
        let (schema, owner) = (&self.common.config.schema, self.owner);
        let bind = |query: Statement| {
            if opens {
                return parts::bind_opening(query, request.key.as_str());
            }
            bind_part(query, request, owner).bind(false).bind(request.cooldown.map(micros))
        };
        let text = statements.convert.text(skips);
        let row = self.db.row_drawing_token("acquire", text, schema, &bind).await;
        if matches!(row, Err(StatementFailure::Locked { row: true })) {
            self.common.pin(&request.key);
        }
        match row? {
            Some(row) => {
                self.common.in_parts.remove(&request.key);
                Drawn::read(&row, 0, false).map(Some)
            }
            None => Ok(None),
        }
    }

    async fn look(
        &mut self,
        statements: &PartStatements,
        request: &Request,
    ) -> Result<Seen, StatementFailure> {
        let poll = micros(self.common.poll);
        let bind = |query: Statement| query.bind(request.key.as_str()).bind(poll);
        let row = self.db.row("acquire", &statements.look, &bind).await?;
        let seen = row.as_ref().map(Seen::read).transpose().map_err(unreadable)?.unwrap_or_default();
        let hint = &self.common.in_parts;
        if seen.of.is_some() {
            hint.add(&request.key);
        } else {
            hint.remove(&request.key);
        }
        Ok(seen)
    }
}

/// Returns the reply to a request from its outcome, or `Err` if the connection is unusable.
fn reply_of(tried: Result<GrantReply, StatementFailure>, request: &Request) -> Result<GrantResult, Error> {
    match tried {
        Ok(reply) => Ok(Ok(reply)),
        // Counts as held, because a long transaction has locked the gate or a part.
        Err(StatementFailure::Locked { row: true }) => Ok(Ok(GrantReply::Contended(Contended::new()))),
        Err(failure) => {
            let mut results = failed(failure, &[request])?;
            Ok(results.pop().unwrap_or(Ok(GrantReply::Passed)))
        }
    }
}

/// Binds the first five values of a statement that grants a key.
fn bind_part(query: Statement, request: &Request, owner: &str) -> Statement {
    let query = query.bind(request.key.as_str()).bind(HolderText(request.holder)).bind(ttl(request));
    query.bind(request.label.as_deref()).bind(owner)
}

fn joined_place(row: &PgRow) -> Result<Option<usize>, StatementFailure> {
    let place: i64 = row.try_get(0).map_err(unreadable)?;
    Ok(usize::try_from(place).ok().and_then(|place| place.checked_sub(1)))
}

/// Reads the grant of a part from the columns that begin at `at`.
fn drawn(row: &PgRow, at: usize, mode: Mode) -> Result<Drawn, StatementFailure> {
    let part: i32 = row.try_get(at + 1).map_err(unreadable)?;
    let of = parts::of(mode).unwrap_or_default();
    Ok(Drawn { permit: parts::mode(of, part).1, ..Drawn::read(row, at, false)? })
}

/// The state of a key.
#[derive(Default)]
struct Seen {
    /// The parameter `of` of the key's parts. `None` if it has none in use.
    of: Option<i32>,
    /// Whether the key is held, by one holder if it has no parts in use.
    is_live: bool,
    live_for: Option<Duration>,
    cooling_for: Option<Duration>,
    /// The mark in the gate that lasts long enough.
    mark: Option<Mark>,
    /// Whether a writer keeps new parts out.
    is_kept_out: bool,
    parts: i64,
    held: i64,
    first_ends: Option<Duration>,
    last_ends: Option<Duration>,
}

/// The next step of a request.
enum Next {
    Refuse(GrantReply),
    /// The statements for a single holder decide.
    Single,
    /// The key has changed.
    Again,
    /// Opens the key, whose parts of another mode are all free.
    Open,
    /// Grants the key, whose parts are all free, to one holder.
    Convert,
    Enter(i32),
}

impl Seen {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let time = |at: usize| -> Result<Option<Duration>, sqlx::Error> {
            let micros: Option<i64> = row.try_get(at)?;
            Ok(micros.map(duration))
        };
        let gate: Option<&str> = row.try_get(0)?;
        Ok(Self {
            of: gate.map(of_gate),
            is_live: row.try_get(1)?,
            live_for: time(2)?,
            cooling_for: time(3)?,
            mark: match (row.try_get(4)?, row.try_get(5)?) {
                (true, true) => Some(Mark::Writer),
                (true, false) => Some(Mark::OfParts),
                (false, _) => None,
            },
            is_kept_out: row.try_get(6)?,
            parts: row.try_get(7)?,
            held: row.try_get(8)?,
            first_ends: time(9)?,
            last_ends: time(10)?,
        })
    }

    /// Decides about a request for a part, or about an exclusive one without `wanted`.
    fn next(&self, wanted: Option<i32>) -> Next {
        match (self.of, wanted) {
            (None, None) => Next::Single,
            (None, Some(_)) if self.is_live => self.refuse(
                self.live_for.map(|live| live.max(self.cooling_for.unwrap_or_default())),
                Mark::Waiter,
            ),
            (None, Some(_)) if self.cooling_for.is_some() => {
                let mut contended = Contended::new();
                (contended.cooling_for, contended.retry_after) = (self.cooling_for, self.cooling_for);
                Next::Refuse(GrantReply::Contended(contended))
            }
            (None, Some(wanted)) => Next::Enter(wanted),
            (Some(_), None) if self.held == 0 => Next::Convert,
            (Some(_), None) => self.refuse(self.last_ends, Mark::Writer),
            (Some(_), Some(_)) if self.is_kept_out => self.refuse(None, Mark::OfParts),
            (Some(0), Some(0)) => Next::Enter(0),
            // An operator has removed permits. A new semaphore has them all.
            (Some(of), Some(wanted)) if of == wanted && self.held == 0 && self.parts < i64::from(of) => {
                Next::Open
            }
            (Some(of), Some(wanted)) if of == wanted && self.held < self.parts => Next::Again,
            (Some(of), Some(wanted)) if of == wanted => self.refuse(self.first_ends, Mark::OfParts),
            (Some(_), Some(_)) if self.held == 0 => Next::Open,
            (Some(of), Some(wanted)) => match (u32::try_from(of), u32::try_from(wanted)) {
                (Ok(of @ 1..), Ok(wanted @ 1..)) => {
                    Next::Refuse(GrantReply::Refused(Error::mode_mismatch(of, wanted)))
                }
                _ => self.refuse(self.last_ends, Mark::OfParts),
            },
        }
    }

    /// Refuses a request, which then leaves a mark unless there is one.
    fn refuse(&self, retry_after: Option<Duration>, mark: Mark) -> Next {
        let mut contended = Contended::new();
        (contended.cooling_for, contended.retry_after) = (self.cooling_for, retry_after);
        let is_marked = if mark == Mark::Writer { self.mark == Some(mark) } else { self.mark.is_some() };
        Next::Refuse(if is_marked {
            GrantReply::Contended(contended)
        } else {
            GrantReply::Unmarked(contended, mark)
        })
    }
}

/// Returns the parameter `of` that a gate names. Negative if an operator has written another text.
fn of_gate(holder: &str) -> i32 {
    match holder.strip_prefix('#') {
        Some(of) => of.parse().ok().filter(|of| *of > 0).unwrap_or(-2),
        None if holder == "*" => 0,
        None => -2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shows(next: &Next) -> &'static str {
        match next {
            Next::Refuse(GrantReply::Refused(_)) => "mismatch",
            Next::Refuse(GrantReply::Unmarked(_, Mark::Waiter)) => "waits",
            Next::Refuse(GrantReply::Unmarked(_, Mark::OfParts)) => "waits for parts",
            Next::Refuse(GrantReply::Unmarked(_, Mark::Writer)) => "waits as writer",
            Next::Refuse(_) => "refused",
            Next::Single => "single",
            Next::Again => "again",
            Next::Open => "open",
            Next::Convert => "convert",
            Next::Enter(_) => "enter",
        }
    }

    #[test]
    fn each_state_has_its_step_for_each_mode() {
        let in_parts = |of, parts, held| Seen { of: Some(of), is_live: true, parts, held, ..Seen::default() };
        let live = Seen { is_live: true, ..Seen::default() };
        let cooling = Seen { cooling_for: Some(Duration::from_secs(1)), ..Seen::default() };
        let kept_out = Seen { is_kept_out: true, ..in_parts(0, 1, 0) };
        // Exclusive, shared, one of 3 permits, one of 4.
        for (seen, steps) in [
            (Seen::default(), ["single", "enter", "enter", "enter"]),
            (live, ["single", "waits", "waits", "waits"]),
            (cooling, ["single", "refused", "refused", "refused"]),
            (in_parts(0, 2, 1), ["waits as writer", "enter", "waits for parts", "waits for parts"]),
            (in_parts(0, 2, 0), ["convert", "enter", "open", "open"]),
            (in_parts(3, 3, 2), ["waits as writer", "waits for parts", "again", "mismatch"]),
            (in_parts(3, 3, 3), ["waits as writer", "waits for parts", "waits for parts", "mismatch"]),
            (in_parts(3, 2, 2), ["waits as writer", "waits for parts", "waits for parts", "mismatch"]),
            (in_parts(3, 3, 0), ["convert", "open", "again", "open"]),
            (in_parts(3, 2, 0), ["convert", "open", "open", "open"]),
            (kept_out, ["convert", "waits for parts", "waits for parts", "waits for parts"]),
        ] {
            let got = [None, Some(0), Some(3), Some(4)].map(|wanted| shows(&seen.next(wanted)));
            assert_eq!(got, steps, "of {:?}, {} of {} held", seen.of, seen.held, seen.parts);
        }
    }

    #[test]
    fn a_mark_that_lasts_is_left_once() {
        let marked = |mark| Seen { of: Some(0), parts: 1, held: 1, mark: Some(mark), ..Seen::default() };
        assert_eq!(shows(&marked(Mark::OfParts).next(None)), "waits as writer");
        assert_eq!(shows(&marked(Mark::Writer).next(None)), "refused");
        assert_eq!(shows(&marked(Mark::OfParts).next(Some(2))), "refused");
    }

    #[test]
    fn a_gate_names_its_mode() {
        assert_eq!(["*", "#8", "#0", "#x", "*8"].map(of_gate), [0, 8, -2, -2, -2]);
    }
}
