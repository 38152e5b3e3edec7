//! The parts of which statements on the claimed table are made. The table is `t` in all of them.

use std::sync::OnceLock;

use crate::id::IdType;
use crate::name::{Column, Table, literal};
use crate::spec::migration_tools::{side_epochs, state_function};
use crate::spec::{ClaimSpec, Inner, Precondition, Tracking, Unmet};
use crate::state::{State, StateType};

/// The time now: for what is written, and where a row that was found is looked at again.
pub(super) const NOW: &str = "pg_catalog.clock_timestamp()";

/// When the server received the statement: for what rows are found by, because an index cannot be searched by a clock
/// that goes on meanwhile.
pub(super) const ASKED: &str = "pg_catalog.statement_timestamp()";

/// The parts for one spec.
#[derive(Debug)]
pub(crate) struct Words {
    pub(super) spec: ClaimSpec,
    pub(super) table: String,
    /// `t.id`, as a number, UUID or text.
    pub(super) id: String,
    pub(super) queue: Option<String>,
    pub(super) side: Option<SideWords>,
    state: String,
    home: String,
    /// The function of the migration by which a lease expires.
    function: Option<String>,
    /// Whether the time before which a row is not taken is never NULL, once that is known.
    pub(super) ready_is_given: OnceLock<bool>,
}

/// The parts for the table in which leases are kept.
#[derive(Debug)]
pub(super) struct SideWords {
    pub(super) table: String,
    /// What the claimed table is called in it.
    pub(super) tab: String,
}

impl Words {
    pub(crate) fn new(spec: &ClaimSpec) -> Self {
        let inner = &spec.inner;
        let side = match &inner.tracking {
            Tracking::Side(side) => {
                Some(SideWords { table: side.quoted(), tab: literal(&inner.table.quoted()) })
            }
            Tracking::None | Tracking::Columns { .. } => None,
        };
        let function = inner.on_read.then(|| state_function(spec).quoted());
        Self {
            table: inner.table.quoted(),
            id: column("t", &inner.id),
            queue: inner.queue.as_ref().map(|queue| column("t", queue)),
            side,
            state: column("t", &inner.state),
            home: literal(inner.states.home().as_str()),
            function,
            ready_is_given: OnceLock::new(),
            spec: spec.clone(),
        }
    }

    pub(super) fn inner(&self) -> &Inner {
        &self.spec.inner
    }

    /// `t` is the row of `other`, which has `id` and `queue`.
    pub(super) fn same_row(&self, other: &str) -> String {
        match &self.queue {
            Some(queue) => format!("{} = {other}.id AND {queue} = {other}.queue", self.id),
            None => format!("{} = {other}.id", self.id),
        }
    }

    /// What later parts of a statement find a row of `t` by.
    pub(super) fn key(&self) -> String {
        match &self.queue {
            Some(queue) => format!("{} AS id, {queue} AS queue", self.id),
            None => format!("{} AS id", self.id),
        }
    }

    /// The key as it is answered.
    pub(super) fn key_text(&self) -> String {
        let queue = self.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
        format!("{}::text AS id, {queue} AS queue", self.id)
    }

    /// The order in which everybody locks rows.
    pub(super) fn lock_order(&self) -> String {
        match &self.queue {
            Some(queue) => format!("{queue}, {}", self.id),
            None => self.id.clone(),
        }
    }

    /// A parameter with ids, in the column's type.
    pub(super) fn ids(&self, parameter: &str) -> String {
        match self.inner().id_type {
            IdType::Text => format!("{parameter}::text[]"),
            other => format!("({parameter}::text[])::{}[]", other.sql()),
        }
    }

    /// A parameter with owners, in the column's type.
    pub(super) fn owners(&self, parameter: &str) -> String {
        let kind = self.owner_type();
        format!("({parameter}::text[])::{kind}[]")
    }

    pub(super) fn owner_type(&self) -> &'static str {
        if self.inner().owner_sequence.is_some() { "bigint" } else { "uuid" }
    }

    /// The row of the side table, `x`, of the row of `t`.
    pub(super) fn side_row(&self, side: &SideWords, alias: &str) -> String {
        let queue = self.inner().queue.as_ref().map(|queue| column(alias, queue));
        let queue = queue.map_or("''".to_owned(), |queue| format!("{queue}::text"));
        format!(
            "x.tab = {} AND x.queue = {queue} AND x.id = {}::text",
            side.tab,
            column(alias, &self.inner().id)
        )
    }

    /// Somebody has the row of `alias`, under a lease that may have ended.
    pub(crate) fn taken(&self, alias: &str) -> String {
        let states = &self.inner().states;
        let state = column(alias, &self.inner().state);
        match (&states.taken, &self.inner().tracking, &self.side) {
            (Some(taken), ..) => format!("{state} = {}", literal(taken.as_str())),
            (None, Tracking::Columns { owner, .. }, _) => {
                format!("{state} IN ({}) AND {} IS NOT NULL", list(&states.takeable), column(alias, owner))
            }
            (None, _, Some(side)) => format!(
                "{state} IN ({}) AND EXISTS (SELECT FROM {} x WHERE {})",
                list(&states.takeable),
                side.table,
                self.side_row(side, alias)
            ),
            (None, ..) => "false".to_owned(),
        }
    }

    /// As [`taken`](Self::taken), but for leases that count as ended when they are read.
    pub(crate) fn in_the_way(&self, alias: &str) -> String {
        let taken = self.taken(alias);
        match (&self.function, &self.inner().tracking) {
            (Some(_), Tracking::Columns { until, .. }) => {
                format!("{taken} AND {} > {NOW}", column(alias, until))
            }
            _ => taken,
        }
    }

    /// The state of `t` is one of `from`, and nobody has the row.
    pub(super) fn free(&self, from: &[State]) -> String {
        let (states, state) = (&self.inner().states, &self.state);
        let wanted = list(from);
        match (&self.inner().tracking, &self.function, &self.side) {
            (Tracking::Columns { until, .. }, Some(function), _) => {
                // The first half is for the index, the second decides.
                let mut stored = from.to_vec();
                stored.extend(states.taken.iter().filter(|_| from.contains(states.home())).cloned());
                format!(
                    "{state} IN ({}) AND {function}({state}, {}) IN ({wanted})",
                    list(&stored),
                    column("t", until)
                )
            }
            (Tracking::Columns { owner, .. }, None, _) if states.taken.is_none() => {
                format!("{state} IN ({wanted}) AND {} IS NULL", column("t", owner))
            }
            // As a value and not as a join, which the server would plan by the size that the other table once
            // had: this is one probe of the primary key for each row that is looked at.
            (_, _, Some(side)) => format!(
                "{state} IN ({wanted}) AND (SELECT x.epoch FROM {} x WHERE {}) IS NULL",
                side.table,
                self.side_row(side, "t")
            ),
            _ => format!("{state} IN ({wanted})"),
        }
    }

    /// The state in which a free row counts as being found, as text.
    pub(super) fn found(&self) -> String {
        match (&self.inner().states.taken, &self.function) {
            (Some(taken), Some(_)) => format!(
                "CASE WHEN {} = {} THEN {} ELSE {}::text END",
                self.state,
                literal(taken.as_str()),
                self.home,
                self.state
            ),
            _ => format!("{}::text", self.state),
        }
    }

    /// A free row that may be taken now but for what it waits for.
    pub(super) fn open(&self, from: &[State]) -> String {
        let inner = self.inner();
        let mut parts = vec![self.free(from)];
        if let Some(attempts) = &inner.attempts {
            let attempts = column("t", attempts);
            parts.push(format!("({attempts} IS NULL OR {attempts} > 0)"));
        }
        if let Some(ready) = &inner.ready_at {
            parts.push(self.is_due(&column("t", ready)));
        }
        if let Some(queue) = &self.queue {
            parts.push(format!("{queue} IS NOT NULL"));
        }
        if let Some(filter) = &inner.filter {
            parts.push(format!("({})", filter.as_str()));
        }
        parts.join(" AND ")
    }

    /// The time before which a row is not taken has come. Where each row has one, that is a bound for an index.
    fn is_due(&self, ready: &str) -> String {
        match self.ready_is_given.get() {
            Some(true) => format!("{ready} <= {ASKED}"),
            _ => format!("({ready} IS NULL OR {ready} <= {ASKED})"),
        }
    }

    /// A row that may be taken now.
    pub(super) fn ready(&self, from: &[State]) -> String {
        let mut ready = self.open(from);
        for one in &self.inner().preconditions {
            if let Some((kind, on)) = self.precondition(one) {
                ready += &format!(
                    " AND ({kind} IS DISTINCT FROM {} OR ({}))",
                    literal(&one.kind),
                    self.is_met(one, &on)
                );
            }
        }
        ready
    }

    /// A row that may be taken now, or as soon as those who are at what it waits for have done it.
    pub(super) fn sooner_or_later(&self, from: &[State]) -> String {
        let mut ready = self.open(from);
        for one in &self.inner().preconditions {
            if let Some((kind, on)) = self.precondition(one) {
                ready += &format!(
                    " AND ({kind} IS DISTINCT FROM {} OR ({}) OR EXISTS ({on} AND ({})))",
                    literal(&one.kind),
                    self.is_met(one, &on),
                    self.in_motion("s")
                );
            }
        }
        format!("{ready} AND {} IS NOT TRUE", self.blocked())
    }

    /// Somebody has the row of `alias`, or could take it now.
    fn in_motion(&self, alias: &str) -> String {
        let inner = self.inner();
        let mut there = format!("{} IN ({})", column(alias, &inner.state), list(&inner.states.takeable));
        if let Some(attempts) = &inner.attempts {
            let attempts = column(alias, attempts);
            there += &format!(" AND ({attempts} IS NULL OR {attempts} > 0)");
        }
        if let Some(ready) = &inner.ready_at {
            there += &format!(" AND {}", self.is_due(&column(alias, ready)));
        }
        format!("({}) OR ({there})", self.taken(alias))
    }

    /// The row waits for one that has failed, or is not there, and is not to run for that.
    pub(super) fn blocked(&self) -> String {
        let mut any = Vec::new();
        for one in &self.inner().preconditions {
            let Some((kind, on)) = self.precondition(one) else { continue };
            let mut reasons = Vec::new();
            if one.failed == Unmet::Block {
                reasons.push(format!("EXISTS ({on} AND ({}))", self.given_up("s")));
            }
            if one.missing == Unmet::Block {
                reasons.push(format!("NOT EXISTS ({on})"));
            }
            if !reasons.is_empty() {
                any.push(format!("({kind} = {} AND ({}))", literal(&one.kind), reasons.join(" OR ")));
            }
        }
        if any.is_empty() { "false".to_owned() } else { format!("({})", any.join(" OR ")) }
    }

    fn is_met(&self, one: &Precondition, on: &str) -> String {
        let done = format!(
            "{} IS DISTINCT FROM {}",
            column("s", &self.inner().state),
            literal(self.inner().states.done.as_str())
        );
        let mut met = match one.failed {
            Unmet::Block => format!("NOT EXISTS ({on} AND {done})"),
            Unmet::Run => {
                format!("NOT EXISTS ({on} AND {done} AND ({}) IS NOT TRUE)", self.given_up("s"))
            }
        };
        if one.missing == Unmet::Block {
            met += &format!(" AND EXISTS ({on})");
        }
        met
    }

    /// The column of the kind, and the beginning of a query for the rows `s` that `t` waits for.
    fn precondition(&self, one: &Precondition) -> Option<(String, String)> {
        let (group, kind) = (self.inner().group.as_ref()?, self.inner().kind.as_ref()?);
        let on = format!(
            "SELECT FROM {} s WHERE {} = {} AND {} = {}",
            self.table,
            column("s", group),
            column("t", group),
            column("s", kind),
            literal(&one.on)
        );
        Some((column("t", kind), on))
    }

    /// The row of `alias` has failed, or is exhausted.
    pub(crate) fn given_up(&self, alias: &str) -> String {
        let failed =
            self.inner().states.failed.as_ref().map(|failed| {
                format!("{} = {}", column(alias, &self.inner().state), literal(failed.as_str()))
            });
        let exhausted = self.exhausted(alias);
        let either: Vec<String> = failed.into_iter().chain(exhausted).collect();
        if either.is_empty() { "false".to_owned() } else { either.join(" OR ") }
    }

    /// The row of `alias` has no attempt left and nobody has it; `None` where nothing can be exhausted.
    pub(super) fn exhausted(&self, alias: &str) -> Option<String> {
        let states = &self.inner().states;
        let state = column(alias, &self.inner().state);
        let named = states.exhausted.as_ref().map(|name| format!("{state} = {}", literal(name.as_str())));
        let used = self.inner().attempts.as_ref().map(|attempts| {
            let free = if states.taken.is_some() {
                String::new()
            } else {
                format!(" AND ({}) IS NOT TRUE", self.taken(alias))
            };
            format!("({state} IN ({}) AND {} <= 0{free})", list(&states.takeable), column(alias, attempts))
        });
        let either: Vec<String> = named.into_iter().chain(used).collect();
        (!either.is_empty()).then(|| format!("({})", either.join(" OR ")))
    }

    /// Gives `text`, an expression of text, the type of the state's column.
    pub(super) fn as_state(&self, text: &str) -> String {
        match &self.inner().states.kind {
            StateType::Text => text.to_owned(),
            StateType::Enum(name) => format!("({text})::{}", name.quoted()),
            StateType::Boolean => format!("({text})::boolean"),
        }
    }

    /// The end of a lease of `t` that begins now, of the milliseconds in `parameter` unless the row says.
    pub(super) fn until(&self, parameter: &str) -> String {
        let asked = format!("{parameter}::float8 * interval '1 millisecond'");
        match &self.inner().timeout {
            Some(own) => {
                let own = column("t", own);
                format!(
                    "{NOW} + CASE WHEN {own} > 0 THEN {own}::float8 * interval '1 second' ELSE {asked} END"
                )
            }
            None => format!("{NOW} + {asked}"),
        }
    }

    /// The next epoch of `t`, where the table keeps it.
    pub(super) fn next_epoch(&self) -> String {
        match (&self.inner().epoch_sequence, &self.inner().tracking) {
            (Some(sequence), _) => next(sequence),
            (None, Tracking::Side(side)) => next(&side_epochs(side)),
            (None, Tracking::Columns { epoch, .. }) => format!("COALESCE({}, 0) + 1", column("t", epoch)),
            (None, Tracking::None) => "0".to_owned(),
        }
    }

    /// What is written when nobody has the row any more.
    pub(super) fn let_go(&self) -> Vec<String> {
        let mut set = Vec::new();
        if let Tracking::Columns { owner, until, .. } = &self.inner().tracking {
            set.push(format!("{} = NULL", owner.quoted()));
            set.push(format!("{} = NULL", until.quoted()));
        }
        set.extend(self.inner().taken_at.iter().map(|at| format!("{} = NULL", at.quoted())));
        set
    }

    /// Where a row goes that is to be tried again, if it can, as an assignment. `None` where it stays.
    pub(super) fn back(&self) -> Option<String> {
        let inner = self.inner();
        let state = inner.state.quoted();
        match (&inner.states.exhausted, &inner.attempts) {
            (Some(exhausted), Some(attempts)) => {
                let back = if inner.states.taken.is_some() || inner.states.takeable.len() > 1 {
                    self.home.clone()
                } else {
                    format!("{}::text", self.state)
                };
                let either = format!(
                    "CASE WHEN {} <= 0 THEN {} ELSE {back} END",
                    column("t", attempts),
                    literal(exhausted.as_str())
                );
                Some(format!("{state} = {}", self.as_state(&either)))
            }
            _ => self.is_moved().then(|| format!("{state} = {}", self.home)),
        }
    }

    /// Whether a row that was taken is in another state than home.
    pub(super) fn is_moved(&self) -> bool {
        self.inner().states.taken.is_some() || self.inner().states.takeable.len() > 1
    }

    pub(super) fn home(&self) -> &str {
        &self.home
    }

    pub(super) fn state(&self) -> &str {
        &self.state
    }

    /// Whether the last attempt of `t` is used up.
    pub(super) fn used_up(&self) -> String {
        match &self.inner().attempts {
            Some(attempts) => format!("COALESCE({} <= 0, false)", column("t", attempts)),
            None => "false".to_owned(),
        }
    }
}

/// A condition on rows that are found by their key. The planner does not look into it: it would choose by how
/// many rows were in a state when it last counted, and then compare each row in that state with each that is
/// wanted.
pub(super) fn checked(condition: &str) -> String {
    format!("CASE WHEN {condition} THEN true ELSE false END")
}

/// The column of the table called `alias`.
pub(super) fn column(alias: &str, column: &Column) -> String {
    format!("{alias}.{}", column.quoted())
}

/// States to stand behind `IN`: unmarked literals take the column's own type, and partial indexes match.
pub(super) fn list(states: &[State]) -> String {
    let literals: Vec<String> = states.iter().map(|state| literal(state.as_str())).collect();
    literals.join(", ")
}

pub(super) fn next(sequence: &Table) -> String {
    format!("pg_catalog.nextval({})", literal(&sequence.quoted()))
}
