//! Ending claims in the transaction that holds them.

use std::time::Duration;

use sqlx::PgConnection;

use super::PgHeld;
use super::pick::noted;
use super::shape::{self, Shape};
use super::statement::{Statement, column};
use crate::error::ClaimError;
use crate::id::{RowId, RowKey};
use crate::spec::{Retention, Tracking};
use crate::state::State;
use crate::store::{ClaimRef, Outcome, Settled};

const SETTLE: &str = "settle a claim";

/// What an outcome means for the row.
struct Ending<'a> {
    state: &'a State,
    /// Whether the attempt counts.
    counts: bool,
    /// Whether it can be taken again unless that was the last attempt.
    returns: bool,
    /// What is noted; an earlier note stays where there is none.
    message: Option<String>,
    pause: Duration,
}

impl PgHeld {
    pub(super) async fn settle_rows(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
        outcome: &Outcome,
    ) -> Result<Settled, ClaimError> {
        let ending = self.ending(outcome)?;
        if let Outcome::To(to) = outcome {
            self.check_edges(connection, claim, to).await?;
        }
        let statement = self.settlement(claim, outcome, &ending)?;
        let rows = self.run().rows(connection, statement, SETTLE).await.map_err(|error| match error {
            // The place is taken, rather than the row there twice.
            ClaimError::Duplicate { constraint, source } => {
                ClaimError::Constraint { constraint, doing: "let a claimed row go on", source }
            }
            other => other,
        })?;
        if rows.len() != claim.rows.len() {
            return Err(self.why_not(connection, claim).await?);
        }
        let mut exhausted = Vec::new();
        for row in &rows {
            if ending.returns && column::<Option<bool>>(row, 2, SETTLE)?.unwrap_or(false) {
                let (id, queue): (String, Option<String>) =
                    (column(row, 0, SETTLE)?, column(row, 1, SETTLE)?);
                let id = RowId::parse(self.spec.inner.id_type, &id)?;
                exhausted.push(RowKey { queue: queue.map(Into::into), id });
            }
        }
        exhausted.sort();
        Ok(Settled { exhausted })
    }

    fn ending<'a>(&'a self, outcome: &'a Outcome) -> Result<Ending<'a>, ClaimError> {
        let states = self.spec.states();
        let (home, lacks) = (states.home(), |what: &str| {
            Err(ClaimError::unsupported(format!(
                "the spec of table {} has no {what}; add one",
                self.spec.table()
            )))
        });
        let plain =
            |state, counts, returns| Ending { state, counts, returns, message: None, pause: Duration::ZERO };
        Ok(match outcome {
            Outcome::Done => plain(&states.done, true, false),
            Outcome::Failed(message) => match &states.failed {
                Some(failed) => Ending { message: Some(message.clone()), ..plain(failed, true, false) },
                None => return lacks("state for work that has failed"),
            },
            Outcome::Retry { after, .. } | Outcome::Snooze(after)
                if !after.is_zero() && self.spec.inner.ready_at.is_none() =>
            {
                return lacks("column for the time before which a row is left alone");
            }
            Outcome::Retry { error, after } => {
                Ending { message: error.clone(), pause: *after, ..plain(home, true, true) }
            }
            Outcome::PutBack => plain(home, false, false),
            Outcome::Snooze(pause) => Ending { pause: *pause, ..plain(home, false, false) },
            Outcome::To(state) => plain(state, true, false),
        })
    }

    /// One row for each that was settled; none unless all of the claim can be.
    fn settlement(
        &self,
        claim: &ClaimRef,
        outcome: &Outcome,
        ending: &Ending<'_>,
    ) -> Result<Statement, ClaimError> {
        let (inner, Shape { table, same_key, mark, .. }) = (&*self.spec.inner, &*self.shape);
        let mut statement = Statement::default();
        let keys = Shape::keys(&mut statement, &self.spec, claim.rows.iter().map(|(key, _)| key))?;
        let epochs = statement.bind(claim.rows.iter().map(|(_, epoch)| *epoch).collect::<Vec<_>>())?;
        let owner = claim.owner.to_string();
        let count = statement.bind(i64::try_from(claim.rows.len()).unwrap_or(i64::MAX))?;
        // Each key with its epoch: the lists are of one length and order.
        let keys = keys.replace(
            ") AS c(id, queue)",
            &format!(", pg_catalog.unnest({epochs}::bigint[])) AS c(id, queue, epoch)"),
        );
        statement.push(&format!(
            "WITH held AS MATERIALIZED (SELECT c.id, c.queue, c.epoch FROM {keys} JOIN {table} t ON {same_key} \
             WHERE {takeable} AND pg_catalog.strpos(pg_catalog.current_setting('leasehold.held', true), {noted}) > 0), \
             ended AS (",
            takeable = shape::any_state(inner, "t", &inner.states.takeable),
            noted = noted(mark, &owner),
        ));
        let whole = format!("FROM held) = {count}");
        let done = *ending.state == inner.states.done;
        if done && inner.retention == Retention::DeleteOnSettle {
            statement.push(&format!(
                "DELETE FROM {table} t USING held c WHERE {same_key} AND (SELECT pg_catalog.count(*) {whole}"
            ));
        } else {
            let changes = self.changes(&mut statement, outcome, ending)?;
            statement.push(&format!(
                "UPDATE {table} t SET {} FROM held c WHERE {same_key} AND (SELECT pg_catalog.count(*) {whole}",
                changes.join(", ")
            ));
        }
        let left = match &inner.attempts {
            Some(attempts) => format!("t.{} <= 0", attempts.quoted()),
            None => "false".to_owned(),
        };
        let queue = match &inner.queue {
            Some(queue) => format!("t.{}::text", queue.quoted()),
            None => "NULL::text".to_owned(),
        };
        // What has ended is not held any more.
        statement.push(&format!(
            " RETURNING t.{id}::text AS id, {queue} AS queue, {left} AS used_up) \
             SELECT e.id, e.queue, e.used_up, pg_catalog.set_config('leasehold.held', pg_catalog.regexp_replace( \
             pg_catalog.current_setting('leasehold.held', true), ' [0-9a-f]+={owner}', '', 'g'), true) FROM ended e",
            id = inner.id.quoted()
        ));
        Ok(statement)
    }

    fn changes(
        &self,
        statement: &mut Statement,
        outcome: &Outcome,
        ending: &Ending<'_>,
    ) -> Result<Vec<String>, ClaimError> {
        let inner = &*self.spec.inner;
        let mut state = shape::typed_state(inner, ending.state);
        if let (true, Some(attempts), Some(exhausted)) =
            (ending.returns, &inner.attempts, &inner.states.exhausted)
        {
            let exhausted = shape::typed_state(inner, exhausted);
            state = format!("CASE WHEN t.{} <= 1 THEN {exhausted} ELSE {state} END", attempts.quoted());
        }
        let mut changes = vec![format!("{} = {state}", inner.state.quoted())];
        if let (Some(attempts), true) = (&inner.attempts, ending.counts) {
            let attempts = attempts.quoted();
            // Not GREATEST alone, which makes zero of NULL.
            changes.push(format!(
                "{attempts} = CASE WHEN t.{attempts} > 0 THEN t.{attempts} - 1 ELSE t.{attempts} END"
            ));
        }
        if let (Some(error), Some(message)) = (&inner.error, &ending.message) {
            let message = message.replace('\0', "\u{fffd}");
            changes.push(format!("{} = {}", error.quoted(), statement.bind(message)?));
        }
        let settled =
            Some(ending.state) == inner.states.failed.as_ref() || *ending.state == inner.states.done;
        if let (Some(at), true) = (&inner.settled_at, settled) {
            changes.push(format!("{} = pg_catalog.clock_timestamp()", at.quoted()));
        }
        if let (Some(ready), Outcome::Retry { .. } | Outcome::Snooze(_), false) =
            (&inner.ready_at, outcome, ending.pause.is_zero())
        {
            let pause = statement.bind(ending.pause.as_secs_f64())?;
            changes.push(format!(
                "{} = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => {pause}::float8)",
                ready.quoted()
            ));
        }
        if let Tracking::Columns { owner, epoch, until } = &inner.tracking {
            let (owner, epoch, until) = (owner.quoted(), epoch.quoted(), until.quoted());
            changes.push(format!(
                "{owner} = NULL, {until} = NULL, {epoch} = GREATEST(c.epoch, COALESCE(t.{epoch}, 0) + 1)"
            ));
        }
        Ok(changes)
    }

    /// As the table of transitions says, each row from the state it would have while it is taken.
    async fn check_edges(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
        to: &State,
    ) -> Result<(), ClaimError> {
        let states = self.spec.states();
        for (_, found, _) in self.look(connection, claim).await? {
            let from = states.while_taken(&found);
            let known = states.all().contains(&to) && states.taken.as_ref() != Some(to);
            if !known || !states.allows(from, to) {
                return Err(ClaimError::IllegalTransition { from: from.clone(), to: to.clone() });
            }
        }
        Ok(())
    }

    /// Why the claim is not this transaction's.
    async fn why_not(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
    ) -> Result<ClaimError, ClaimError> {
        let there = self.look(connection, claim).await?;
        let find = |key: &RowKey| there.iter().find(|(there, ..)| there == key);
        let takeable = &self.spec.states().takeable;
        // The row that says most: one that is gone or was changed, else the first.
        let worst = claim
            .rows
            .iter()
            .find(|(key, _)| find(key).is_none_or(|(_, state, _)| !takeable.contains(state)));
        let Some((key, epoch)) = worst.or(claim.rows.first()) else {
            return Ok(ClaimError::spec("the claim has no rows"));
        };
        let (state, current_epoch) = match find(key) {
            Some((_, state, epoch)) => (Some(state.clone()), *epoch),
            None => (None, None),
        };
        Ok(ClaimError::Superseded { row: key.clone(), epoch: *epoch, current_epoch, state })
    }

    /// The rows of the claim that are there, with state and epoch.
    async fn look(
        &self,
        connection: &mut PgConnection,
        claim: &ClaimRef,
    ) -> Result<Vec<(RowKey, State, Option<i64>)>, ClaimError> {
        let (inner, Shape { table, same_key, row, .. }) = (&*self.spec.inner, &*self.shape);
        let mut statement = Statement::default();
        let keys = Shape::keys(&mut statement, &self.spec, claim.rows.iter().map(|(key, _)| key))?;
        let epoch = match &inner.tracking {
            Tracking::Columns { epoch, .. } => format!("t.{}::bigint", epoch.quoted()),
            Tracking::None | Tracking::Side(_) => "NULL::bigint".to_owned(),
        };
        statement.push(&format!(
            "SELECT r.id, r.queue, COALESCE(r.found, 'NULL'), r.epoch \
             FROM (SELECT {row}, {epoch} AS epoch FROM {keys} JOIN {table} t ON {same_key}) r"
        ));
        let rows = self.run().rows(connection, statement, SETTLE).await?;
        rows.iter()
            .map(|row| {
                Ok((
                    self.key(row, 0)?,
                    State::new(column::<String>(row, 2, SETTLE)?),
                    column(row, 3, SETTLE)?,
                ))
            })
            .collect()
    }
}
