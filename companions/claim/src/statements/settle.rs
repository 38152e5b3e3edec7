//! Builds the statements that end claims.

use leasehold_table_schema::sql::literal;

use super::expression::{checked, column, list};
use super::parts::{Mode, NOW, SqlParts};
use super::payload::notify_returned;
use super::with::With;
use crate::error::ClaimError;
use crate::spec::ids::OwnerToken;
use crate::spec::states::State;
use crate::spec::{Retention, Tracking};
use crate::store::Outcome;

/// The change that a statement writes at the end of claims. Claims with the same ending are written together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The row gets this state. With `noted`, also a message.
    At {
        state: State,
        noted: bool,
    },
    Deleted,
    Retry {
        later: bool,
        noted: bool,
    },
    PutBack {
        later: bool,
    },
}

impl Ending {
    /// Returns the ending that writes this outcome, or an error if the spec lacks a state or column for it.
    pub(crate) fn of(parts: &SqlParts, outcome: &Outcome) -> Result<Self, ClaimError> {
        let inner = parts.inner();
        let states = &inner.states;
        let at = |state: &State, noted| {
            if *state == states.done && inner.retention == Retention::DeleteOnSettle {
                Self::Deleted
            } else {
                Self::At { state: state.clone(), noted }
            }
        };
        match outcome {
            Outcome::Done => Ok(at(&states.done, false)),
            Outcome::Failed(_) => {
                let failed = states
                    .failed
                    .as_ref()
                    .ok_or_else(|| lacks(parts, "has no state for rows that failed; name one, or retry"))?;
                Ok(at(failed, inner.error.is_some()))
            }
            Outcome::Retry { after: pause, .. } | Outcome::Snooze(pause)
                if !pause.is_zero() && inner.ready_at.is_none() =>
            {
                Err(lacks(parts, "has no column for the time of a retry; name `ready_at`"))
            }
            Outcome::Retry { error, after } => {
                Ok(Self::Retry { later: !after.is_zero(), noted: error.is_some() && inner.error.is_some() })
            }
            Outcome::PutBack => Ok(Self::PutBack { later: false }),
            Outcome::Snooze(pause) => Ok(Self::PutBack { later: !pause.is_zero() }),
            Outcome::To(to) => {
                let froms = states.taken.as_ref().map_or(states.takeable.as_slice(), std::slice::from_ref);
                let is_known = states.all().contains(&to) && states.taken.as_ref() != Some(to);
                if is_known && froms.iter().any(|from| states.allows(from, to)) {
                    return Ok(at(to, false));
                }
                let from = froms.first().unwrap_or_else(|| states.home()).clone();
                Err(ClaimError::IllegalTransition { from, to: to.clone() })
            }
        }
    }
}

fn lacks(parts: &SqlParts, what: &str) -> ClaimError {
    ClaimError::unsupported(format!("the spec of table {} {what}", parts.inner().table))
}

/// Builds the assignment of the claim that settled a row. `NULL` if no claim did. `None` if no column records it.
pub(crate) fn settled_by(parts: &SqlParts, by: &str) -> Option<String> {
    parts.inner().settled_by.as_ref().map(|column| format!("{} = {by}", column.quoted()))
}

/// Builds the assignments of an UPDATE that writes an ending. `error` and `delay` are the SQL for the message and the
/// pause.
fn assignments(parts: &SqlParts, ending: &Ending, by: &str, error: &str, delay: &str) -> String {
    let inner = parts.inner();
    let mut set = parts.clear_lease();
    set.extend(settled_by(parts, by));
    let counts = !matches!(ending, Ending::PutBack { .. });
    set.extend(counted(parts, counts));
    if let (Mode::Held, Tracking::Columns { epoch, .. }) = (parts.mode, &inner.tracking) {
        // Raises the epoch, so an earlier leaseholder of the row is superseded.
        set.push(format!("{0} = GREATEST(l.epoch, COALESCE(t.{0}, 0) + 1)", epoch.quoted()));
    }
    let note = |noted: bool, set: &mut Vec<String>| {
        set.extend(
            inner.error.iter().filter(|_| noted).map(|column| format!("{} = {error}", column.quoted())),
        );
    };
    let put_off = |later: bool, set: &mut Vec<String>| {
        let at = inner.ready_at.iter().filter(|_| later);
        set.extend(
            at.map(|at| format!("{} = {NOW} + ({delay})::float8 * interval '1 millisecond'", at.quoted())),
        );
    };
    match ending {
        Ending::At { state, noted } => {
            set.push(format!("{} = {}", inner.state.quoted(), literal(state.as_str())));
            note(*noted, &mut set);
            if *state == inner.states.done || Some(state) == inner.states.failed.as_ref() {
                set.extend(inner.settled_at.iter().map(|at| format!("{} = {NOW}", at.quoted())));
            }
        }
        Ending::Retry { later, noted } => {
            set.extend(parts.back());
            note(*noted, &mut set);
            put_off(*later, &mut set);
        }
        Ending::PutBack { later } => {
            put_off(*later, &mut set);
            if parts.is_moved() {
                set.push(format!("{} = {}", inner.state.quoted(), parts.home()));
            }
        }
        Ending::Deleted => {}
    }
    set.join(", ")
}

/// Builds the assignment of the attempts left. `counts` states whether the attempt counts. `None` if the number stays.
fn counted(parts: &SqlParts, counts: bool) -> Option<String> {
    let left = parts.inner().attempts.as_ref()?;
    let (name, now) = (left.quoted(), column("t", left));
    match (parts.mode, counts) {
        // The number is right: a lease has subtracted the attempt when the row was taken, and a held claim has not.
        (Mode::Leased, true) | (Mode::Held, false) => None,
        (Mode::Leased, false) => Some(format!("{name} = {now} + 1")),
        // Does not use GREATEST, because it turns NULL into zero.
        (Mode::Held, true) => Some(format!("{name} = CASE WHEN {now} > 0 THEN {now} - 1 ELSE {now} END")),
    }
}

/// Builds the condition, with a leading ` AND`, that the spec allows this ending in the row's current state. Empty if
/// it always does.
fn allowed(parts: &SqlParts, ending: &Ending) -> String {
    let states = &parts.inner().states;
    match ending {
        Ending::At { state, .. } if states.taken.is_none() => {
            let froms: Vec<State> =
                states.takeable.iter().filter(|from| states.allows(from, state)).cloned().collect();
            if froms.len() == states.takeable.len() {
                String::new()
            } else {
                format!(" AND {} IN ({})", parts.state(), list(&froms))
            }
        }
        _ => String::new(),
    }
}

/// Builds an SQL expression for whether the ending exhausts the row.
fn used(parts: &SqlParts, ending: &Ending) -> String {
    if matches!(ending, Ending::Retry { .. }) { parts.used_up() } else { "false".to_owned() }
}

/// Builds a further column of the reply, which notifies workers of other processes at the commit. Empty if the rows are
/// not claimable at once.
fn told(parts: &SqlParts, ending: &Ending) -> String {
    match ending {
        Ending::Retry { later: false, .. } | Ending::PutBack { later: false } => {
            format!(", {} AS told", notify_returned(&parts.spec))
        }
        _ => String::new(),
    }
}

/// Builds the statement that ends a claim of one row with lease columns, the most common case.
pub(crate) fn one(parts: &SqlParts, ending: &Ending) -> String {
    let Tracking::Columns { owner, epoch, .. } = &parts.inner().tracking else { return String::new() };
    let queue = parts.queue.as_ref().map_or(String::new(), |queue| format!(" AND {queue} = $3::text"));
    let row = format!(
        "{} = $2::text::{}{queue} AND {} = $4::text::{} AND {} = $5::bigint AND {}{}",
        parts.id,
        parts.inner().id_type.sql(),
        column("t", owner),
        parts.owner_type(),
        column("t", epoch),
        parts.taken("t"),
        allowed(parts, ending)
    );
    let told = told(parts, ending);
    let returning =
        format!("RETURNING $1::bigint AS claim, {}, {} AS used{told}", parts.key_text(), used(parts, ending));
    match ending {
        Ending::Deleted => format!("DELETE FROM {} t WHERE {row} {returning}", parts.table),
        _ => {
            let set = assignments(parts, ending, "$4::text", "$6::text", "$7::bigint");
            format!("UPDATE {} AS t SET {set} WHERE {row} {returning}", parts.table)
        }
    }
}

/// Builds the step `want`, which lists the rows of the claims in the parameters.
pub(crate) fn want(parts: &SqlParts, ends: bool) -> String {
    let (more, names) = if ends {
        (", pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::bigint[])", ", error, delay")
    } else {
        ("", "")
    };
    format!(
        "SELECT * FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest({}), \
         pg_catalog.unnest($3::text[]), pg_catalog.unnest({}), pg_catalog.unnest($5::bigint[]){more}) \
         WITH ORDINALITY AS w(claim, id, queue, owner, epoch{names}, n)",
        parts.ids("$2"),
        parts.owners("$4"),
    )
}

/// Builds three pieces of SQL: the join of `t` (and of its side-table row `x`) with the rows `w` of the claims, the
/// condition that the row still belongs to the claim, and the tables to lock.
pub(crate) fn owned(parts: &SqlParts) -> (String, String, &'static str) {
    let same = parts.same_row("w");
    if parts.mode == Mode::Held {
        let noted = format!("pg_catalog.concat(' ', {}, '=', w.owner)", parts.mark());
        let held =
            format!("pg_catalog.strpos(pg_catalog.current_setting('leasehold.held', true), {noted}) > 0");
        let state = parts.counts_as(&parts.inner().states.takeable);
        return (format!("{} t ON {same}", parts.table), format!("{state} AND {held}"), "t");
    }
    match (&parts.inner().tracking, &parts.side) {
        (Tracking::Columns { owner, epoch, .. }, _) => (
            format!("{} t ON {same}", parts.table),
            format!(
                "{} = w.owner AND {} = w.epoch AND {}",
                column("t", owner),
                column("t", epoch),
                parts.taken("t")
            ),
            "t",
        ),
        (_, Some(side)) => {
            let row = parts.side_row(side, "t");
            // Compares the state only with the states of taken rows, because the side table has only taken rows.
            let states = &parts.inner().states;
            let stored = states.taken.as_ref().map_or(states.takeable.as_slice(), std::slice::from_ref);
            (
                format!("{} t ON {same} LEFT JOIN {} x ON {row}", parts.table, side.table),
                format!(
                    "x.owner = w.owner AND x.epoch = w.epoch AND {} IN ({})",
                    parts.state(),
                    list(stored)
                ),
                "t, x",
            )
        }
        _ => (String::new(), String::new(), "t"),
    }
}

/// Query for the claims of which all rows were found and locked.
const WHOLE: &str = "SELECT claim FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a \
     JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b USING (claim, n)";

/// Query that removes a claim that has ended from the setting with the transaction's held rows.
const FORGET: &str = "SELECT e.*, pg_catalog.set_config('leasehold.held', pg_catalog.regexp_replace( \
     pg_catalog.current_setting('leasehold.held', true), ' [0-9a-f]+=' || ($4::text[])[1], '', 'g'), true) FROM ended e";

/// Condition: all rows of the claim of `l` were found. Not a join, because the planner would expect few rows and
/// compare each row with each claim.
const IS_WHOLE: &str = "(l.claim IN (SELECT claim FROM whole)) IS TRUE";

/// Builds the statement that ends claims of several rows. It locks the rows in the common order, and only ends claims
/// of which all rows are found. With `is_batch`, it skips rows that other transactions have locked, because one claim
/// must not delay the others. `by` is the owner to record instead of the claim's own.
pub(crate) fn many(parts: &SqlParts, ending: &Ending, is_batch: bool, by: Option<OwnerToken>) -> String {
    // Uses the weaker lock unless rows are deleted. A concurrent insert of a foreign key to the row allows settling it,
    // but not deleting it.
    let strength = if matches!(ending, Ending::Deleted) { "UPDATE" } else { "NO KEY UPDATE" };
    let skip = if is_batch { " SKIP LOCKED" } else { "" };
    let (join, mine, lock) = owned(parts);
    let join = join.replace("LEFT JOIN", "JOIN");
    let used = used(parts, ending);
    let locked = format!(
        "SELECT w.claim, {}, {used} AS used, w.owner, w.epoch{} FROM want w JOIN {join} WHERE {} \
         ORDER BY {} FOR {strength} OF {lock}{skip}",
        parts.key(),
        if matches!(ending, Ending::Deleted) { "" } else { ", w.error, w.delay" },
        checked(&format!("{mine}{}", allowed(parts, ending))),
        parts.lock_order(),
    );
    let with = With::new().step("want", &want(parts, true)).step("locked", &locked).step("whole", WHOLE);
    let by = by.map_or("l.owner::text".to_owned(), |owner| literal(&owner.to_string()));
    let set = assignments(parts, ending, &by, "l.error", "l.delay");
    let from = format!("locked l WHERE {} AND {IS_WHOLE}", parts.same_row("l"));
    let change = match (ending, set.is_empty()) {
        (Ending::Deleted, _) => Some(format!("DELETE FROM {} t USING {from}", parts.table)),
        (_, false) => Some(format!("UPDATE {} AS t SET {set} FROM {from}", parts.table)),
        (_, true) => None,
    };
    let told = told(parts, ending);
    let answer = format!("RETURNING l.claim, {}, {used} AS used{told}", parts.key_text());
    if parts.mode == Mode::Held {
        // Removes the claim from the transaction's held rows in the same statement.
        let ended = format!("{} {answer}", change.unwrap_or_default());
        return with.change("ended", &ended).end(FORGET);
    }
    let Some(side) = &parts.side else {
        return with.end(&format!("{} {answer}", change.unwrap_or_default()));
    };
    let freed = format!(
        "DELETE FROM {} x USING locked l WHERE {} AND {IS_WHOLE}",
        side.table,
        parts.side_of(side, "l")
    );
    match change {
        Some(change) => with.change("freed", &freed).end(&format!("{change} {answer}")),
        None => {
            let key = parts.key_of("l");
            with.end(&format!("{freed} RETURNING l.claim, {key}, l.used AS used{told}"))
        }
    }
}

/// Builds the statement that reads the current owner, epoch and state of the rows of claims.
pub(crate) fn probe(parts: &SqlParts) -> String {
    let (join, mine, _) = owned(parts);
    // For held claims, does not read leases in a side table.
    let lease = parts.lease.as_ref().filter(|_| parts.mode == Mode::Leased || parts.side.is_none());
    let epoch = lease.map_or("NULL", |lease| &lease.epoch);
    With::new().step("want", &want(parts, false)).end(&format!(
        "SELECT w.claim, {}, w.epoch AS wanted, \
         COALESCE({mine}, false) AS mine, {epoch}::bigint AS epoch, {}::text AS state \
         FROM want w LEFT JOIN {join}",
        parts.key_of("w"),
        parts.state(),
    ))
}
