//! The statements that end claims.

use leasehold_table_schema::sql::literal;

use super::expression::{checked, column, list};
use super::parts::{Mode, NOW, Words};
use super::payload::notify_returned;
use crate::error::ClaimError;
use crate::spec::states::State;
use crate::spec::{Retention, Tracking};
use crate::store::Outcome;

/// Outcomes that one statement can write together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// To this state, with a message or without.
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
    /// How claims with this outcome end.
    pub(crate) fn of(words: &Words, outcome: &Outcome) -> Result<Self, ClaimError> {
        let inner = words.inner();
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
                    .ok_or_else(|| lacks(words, "has no state for rows that failed; name one, or retry"))?;
                Ok(at(failed, inner.error.is_some()))
            }
            Outcome::Retry { after: pause, .. } | Outcome::Snooze(pause)
                if !pause.is_zero() && inner.ready_at.is_none() =>
            {
                Err(lacks(words, "has no column for the time of a retry; name `ready_at`"))
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

fn lacks(words: &Words, what: &str) -> ClaimError {
    ClaimError::unsupported(format!("the spec of table {} {what}", words.inner().table))
}

/// The assignments of an ending; `error` and `delay` are its values.
fn assignments(words: &Words, ending: &Ending, error: &str, delay: &str) -> String {
    let inner = words.inner();
    let mut set = words.let_go();
    let counts = !matches!(ending, Ending::PutBack { .. });
    set.extend(counted(words, counts));
    if let (Mode::Held, Tracking::Columns { epoch, .. }) = (words.mode, &inner.tracking) {
        // Whoever has had a lease on the row is told that it is not his any more.
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
            set.extend(words.back());
            note(*noted, &mut set);
            put_off(*later, &mut set);
        }
        Ending::PutBack { later } => {
            put_off(*later, &mut set);
            if words.is_moved() {
                set.push(format!("{} = {}", inner.state.quoted(), words.home()));
            }
        }
        Ending::Deleted => {}
    }
    set.join(", ")
}

/// The attempts that are left of a row of which an attempt counts, or does not, as an assignment.
fn counted(words: &Words, counts: bool) -> Option<String> {
    let left = words.inner().attempts.as_ref()?;
    let (name, now) = (left.quoted(), column("t", left));
    match (words.mode, counts) {
        // It was counted when the row was taken.
        (Mode::Leased, true) | (Mode::Held, false) => None,
        (Mode::Leased, false) => Some(format!("{name} = {now} + 1")),
        // Not GREATEST, which makes zero of NULL.
        (Mode::Held, true) => Some(format!("{name} = CASE WHEN {now} > 0 THEN {now} - 1 ELSE {now} END")),
    }
}

/// Whether the ending may be written to a row, beyond its being taken.
fn allowed(words: &Words, ending: &Ending) -> String {
    let states = &words.inner().states;
    match ending {
        Ending::At { state, .. } if states.taken.is_none() => {
            let froms: Vec<State> =
                states.takeable.iter().filter(|from| states.allows(from, state)).cloned().collect();
            if froms.len() == states.takeable.len() {
                String::new()
            } else {
                format!(" AND {} IN ({})", words.state(), list(&froms))
            }
        }
        _ => String::new(),
    }
}

/// Whether an ending may use up a row.
fn used(words: &Words, ending: &Ending) -> String {
    if matches!(ending, Ending::Retry { .. }) { words.used_up() } else { "false".to_owned() }
}

/// A further answer for rows that come back at once, which wakes workers of other processes with the commit.
fn told(words: &Words, ending: &Ending) -> String {
    match ending {
        Ending::Retry { later: false, .. } | Ending::PutBack { later: false } => {
            format!(", {} AS told", notify_returned(&words.spec))
        }
        _ => String::new(),
    }
}

/// One row of a claim with one row, for the commonest case.
pub(crate) fn one(words: &Words, ending: &Ending) -> String {
    let Tracking::Columns { owner, epoch, .. } = &words.inner().tracking else { return String::new() };
    let queue = words.queue.as_ref().map_or(String::new(), |queue| format!(" AND {queue} = $3::text"));
    let row = format!(
        "{} = $2::text::{}{queue} AND {} = $4::text::{} AND {} = $5::bigint AND {}{}",
        words.id,
        words.inner().id_type.sql(),
        column("t", owner),
        words.owner_type(),
        column("t", epoch),
        words.taken("t"),
        allowed(words, ending)
    );
    let told = told(words, ending);
    let returning =
        format!("RETURNING $1::bigint AS claim, {}, {} AS used{told}", words.key_text(), used(words, ending));
    match ending {
        Ending::Deleted => format!("DELETE FROM {} t WHERE {row} {returning}", words.table),
        _ => {
            let set = assignments(words, ending, "$6::text", "$7::bigint");
            format!("UPDATE {} AS t SET {set} WHERE {row} {returning}", words.table)
        }
    }
}

/// The rows of claims as parameters.
pub(crate) fn want(words: &Words, ends: bool) -> String {
    let (more, names) = if ends {
        (", pg_catalog.unnest($6::text[]), pg_catalog.unnest($7::bigint[])", ", error, delay")
    } else {
        ("", "")
    };
    format!(
        "want AS MATERIALIZED (SELECT * FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest({}), \
         pg_catalog.unnest($3::text[]), pg_catalog.unnest({}), pg_catalog.unnest($5::bigint[]){more}) \
         WITH ORDINALITY AS w(claim, id, queue, owner, epoch{names}, n))",
        words.ids("$2"),
        words.owners("$4"),
    )
}

/// `t`, and `x` where the lease is kept elsewhere, joined to the rows `w` that are wanted. With the
/// condition that the row is the claim's, and what is to be locked.
pub(crate) fn owned(words: &Words) -> (String, String, &'static str) {
    let same = words.same_row("w");
    if words.mode == Mode::Held {
        let noted = format!("pg_catalog.concat(' ', {}, '=', w.owner)", words.mark());
        let held =
            format!("pg_catalog.strpos(pg_catalog.current_setting('leasehold.held', true), {noted}) > 0");
        let state = words.counts_as(&words.inner().states.takeable);
        return (format!("{} t ON {same}", words.table), format!("{state} AND {held}"), "t");
    }
    match (&words.inner().tracking, &words.side) {
        (Tracking::Columns { owner, epoch, .. }, _) => (
            format!("{} t ON {same}", words.table),
            format!(
                "{} = w.owner AND {} = w.epoch AND {}",
                column("t", owner),
                column("t", epoch),
                words.taken("t")
            ),
            "t",
        ),
        (_, Some(side)) => {
            let row = words.side_row(side, "t");
            // What is taken is in the side table: the state need not be asked for that.
            let states = &words.inner().states;
            let stored = states.taken.as_ref().map_or(states.takeable.as_slice(), std::slice::from_ref);
            (
                format!("{} t ON {same} LEFT JOIN {} x ON {row}", words.table, side.table),
                format!(
                    "x.owner = w.owner AND x.epoch = w.epoch AND {} IN ({})",
                    words.state(),
                    list(stored)
                ),
                "t, x",
            )
        }
        _ => (String::new(), String::new(), "t"),
    }
}

/// All rows of the claim were found. Not a join, which the planner takes for a small one and does by comparing
/// each row with each claim.
const IS_WHOLE: &str = "(l.claim IN (SELECT claim FROM whole)) IS TRUE";

/// Several rows, in the order in which everybody locks rows, and only claims of which all rows are there. Those
/// of several claims are not waited for while others have them locked: one must not hold up the rest.
pub(crate) fn many(words: &Words, ending: &Ending, is_batch: bool) -> String {
    // A row that others refer to can be settled, but not deleted, while they insert the reference.
    let strength = if matches!(ending, Ending::Deleted) { "UPDATE" } else { "NO KEY UPDATE" };
    let skip = if is_batch { " SKIP LOCKED" } else { "" };
    let (join, mine, lock) = owned(words);
    let join = join.replace("LEFT JOIN", "JOIN");
    let used = used(words, ending);
    let locked = format!(
        "{}, locked AS MATERIALIZED (SELECT w.claim, {}, {used} AS used, w.owner, w.epoch{} FROM want w JOIN {join} WHERE {} \
         ORDER BY {} FOR {strength} OF {lock}{skip}), \
         whole AS MATERIALIZED (SELECT claim FROM (SELECT claim, pg_catalog.count(*) AS n FROM want GROUP BY claim) a \
         JOIN (SELECT claim, pg_catalog.count(*) AS n FROM locked GROUP BY claim) b USING (claim, n))",
        want(words, true),
        words.key(),
        if matches!(ending, Ending::Deleted) { "" } else { ", w.error, w.delay" },
        checked(&format!("{mine}{}", allowed(words, ending))),
        words.lock_order(),
    );
    let set = assignments(words, ending, "l.error", "l.delay");
    let from = format!("locked l WHERE {} AND {IS_WHOLE}", words.same_row("l"));
    let change = match (ending, set.is_empty()) {
        (Ending::Deleted, _) => Some(format!("DELETE FROM {} t USING {from}", words.table)),
        (_, false) => Some(format!("UPDATE {} AS t SET {set} FROM {from}", words.table)),
        (_, true) => None,
    };
    let told = told(words, ending);
    let answer = format!("RETURNING l.claim, {}, {used} AS used{told}", words.key_text());
    if words.mode == Mode::Held {
        // What has ended is not held any more.
        let ended = change.unwrap_or_default();
        return format!(
            "WITH {locked}, ended AS ({ended} {answer}) \
             SELECT e.*, pg_catalog.set_config('leasehold.held', pg_catalog.regexp_replace( \
             pg_catalog.current_setting('leasehold.held', true), ' [0-9a-f]+=' || ($4::text[])[1], '', 'g'), true) FROM ended e"
        );
    }
    let Some(side) = &words.side else {
        return format!("WITH {locked} {} {answer}", change.unwrap_or_default());
    };
    let freed = format!(
        "DELETE FROM {} x USING locked l WHERE {} AND {IS_WHOLE}",
        side.table,
        words.side_of(side, "l")
    );
    match change {
        Some(change) => format!("WITH {locked}, freed AS ({freed}) {change} {answer}"),
        None => {
            let key = words.key_of("l");
            format!("WITH {locked} {freed} RETURNING l.claim, {key}, l.used AS used{told}")
        }
    }
}

/// What is there of the rows that are wanted.
pub(crate) fn probe(words: &Words) -> String {
    let (join, mine, _) = owned(words);
    // Held claims of rows whose leases are in a side table do not look there.
    let lease = words.lease.as_ref().filter(|_| words.mode == Mode::Leased || words.side.is_none());
    let epoch = lease.map_or("NULL", |lease| &lease.epoch);
    format!(
        "WITH {} SELECT w.claim, {}, w.epoch AS wanted, \
         COALESCE({mine}, false) AS mine, {epoch}::bigint AS epoch, {}::text AS state \
         FROM want w LEFT JOIN {join}",
        want(words, false),
        words.key_of("w"),
        words.state(),
    )
}
