//! The parts of which statements on the claimed table are made. The table is `t` in all of them.

use std::sync::OnceLock;

use leasehold_table_schema::sql::literal;

use super::expression::{column, hashed, list, next};
use super::with::With;
use crate::spec::ids::IdType;
use crate::spec::states::{State, StateType};
use crate::spec::{ClaimSpec, Inner, Tracking, side_epochs, state_function};

/// The time now: for what is written, and where a row that was found is looked at again.
pub(crate) const NOW: &str = "pg_catalog.clock_timestamp()";

/// When the server received the statement: for what rows are found by, because an index cannot be searched by a clock
/// that goes on meanwhile.
pub(crate) const RECEIVED: &str = "pg_catalog.statement_timestamp()";

/// What the transaction is fit for, and which rows it holds already: a setting that goes with the transaction, and with its
/// savepoints.
const GUARD: &str = "\
SELECT CASE
WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN 'isolation'
ELSE 'fine' END AS verdict, COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held";

/// What keeps a claim's rows from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A lease, which is written when they are taken, together with the attempt.
    Leased,
    /// The locks of an open transaction: nothing is written before they are settled.
    Held,
}

/// The parts for one spec.
#[derive(Debug)]
pub(crate) struct SqlParts {
    pub(crate) spec: ClaimSpec,
    pub(crate) mode: Mode,
    pub(crate) table: String,
    /// `t.id`, as a number, UUID or text.
    pub(crate) id: String,
    pub(crate) queue: Option<String>,
    pub(crate) side: Option<SideTableSql>,
    pub(crate) lease: Option<LeaseSql>,
    state: String,
    home: String,
    /// The function of the migration by which a lease expires.
    function: Option<String>,
    /// Whether the time before which a row is not taken is never NULL, once that is known.
    pub(crate) ready_is_given: OnceLock<bool>,
}

/// The parts for the table in which leases are kept.
#[derive(Debug)]
pub(crate) struct SideTableSql {
    pub(crate) table: String,
    /// What the claimed table is called in it, with its schema: an expression.
    pub(crate) tab: String,
}

/// Who has `t`, under which epoch and until when: columns of its own, or of `x`, its row of the side table.
#[derive(Debug)]
pub(crate) struct LeaseSql {
    pub(crate) owner: String,
    pub(crate) epoch: String,
    pub(crate) until: String,
}

impl SqlParts {
    /// For claims under leases.
    pub(crate) fn leased(spec: &ClaimSpec) -> Self {
        Self::new(spec, Mode::Leased)
    }

    /// For claims that a transaction holds.
    pub(crate) fn held(spec: &ClaimSpec) -> Self {
        Self::new(spec, Mode::Held)
    }

    fn new(spec: &ClaimSpec, mode: Mode) -> Self {
        let inner = &spec.inner;
        let of = |owner: String, epoch: String, until: String| Some(LeaseSql { owner, epoch, until });
        let (side, lease) = match &inner.tracking {
            Tracking::None => (None, None),
            Tracking::Columns { owner, epoch, until } => {
                (None, of(column("t", owner), column("t", epoch), column("t", until)))
            }
            Tracking::Side(side) => (
                Some(SideTableSql { table: side.quoted(), tab: inner.table.full_name_sql() }),
                of("x.owner".to_owned(), "x.epoch".to_owned(), "x.lease_until".to_owned()),
            ),
        };
        let function = inner.on_read.then(|| state_function(spec).quoted());
        Self {
            table: inner.table.quoted(),
            id: column("t", &inner.id),
            queue: inner.queue.as_ref().map(|queue| column("t", queue)),
            side,
            lease,
            state: column("t", &inner.state),
            home: literal(inner.states.home().as_str()),
            function,
            ready_is_given: OnceLock::new(),
            spec: spec.clone(),
            mode,
        }
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.spec.inner
    }

    /// Begins a statement that finds rows to take.
    pub(crate) fn begin(&self) -> With {
        match self.mode {
            Mode::Leased => With::new(),
            Mode::Held => With::new().step("guard", GUARD),
        }
    }

    /// ` AND` the transaction is fit for it, and does not hold `t` already.
    pub(crate) fn unheld(&self) -> String {
        match self.mode {
            Mode::Leased => String::new(),
            Mode::Held => format!(
                " AND (SELECT verdict FROM guard) = 'fine' AND ((SELECT held FROM guard) = '' \
                 OR pg_catalog.strpos((SELECT held FROM guard), {}) = 0)",
                self.mark()
            ),
        }
    }

    /// Text that `t` alone has in this database. A hash, because ids may contain anything; lengths keep queue and id
    /// apart.
    pub(crate) fn mark(&self) -> String {
        let queue = match &self.queue {
            Some(queue) => format!("pg_catalog.length({queue}) || ':' || {queue}"),
            None => "''".to_owned(),
        };
        let table = self.inner().table.oid_sql();
        hashed(&format!("pg_catalog.concat({table}, '|', {queue}, '|', {}::text)", self.id))
    }

    /// Rows of `t` by their keys, which are parameters and called `w`.
    pub(crate) fn listed(&self, ids: &str, queues: &str) -> String {
        let queue = self.queue.as_ref().map_or(String::new(), |queue| format!(" AND {queue} = w.queue"));
        format!(
            "ROWS FROM (pg_catalog.unnest({}), pg_catalog.unnest({queues}::text[])) AS w(id, queue) \
             JOIN {} t ON {} = w.id{queue}",
            self.ids(ids),
            self.table,
            self.id,
        )
    }

    /// `t` is one of those whose keys these parameters are.
    pub(crate) fn among(&self, ids: &str, queues: &str) -> String {
        let (own, columns) = match &self.queue {
            Some(queue) => (format!("({}, {queue})", self.id), "id, queue"),
            None => (self.id.clone(), "id"),
        };
        format!(
            "{own} IN (SELECT {columns} FROM ROWS FROM (pg_catalog.unnest({}), pg_catalog.unnest({queues}::text[])) AS w(id, queue))",
            self.ids(ids)
        )
    }

    /// `t` is the row of `other`, which has `id` and `queue`.
    pub(crate) fn same_row(&self, other: &str) -> String {
        match &self.queue {
            Some(queue) => format!("{} = {other}.id AND {queue} = {other}.queue", self.id),
            None => format!("{} = {other}.id", self.id),
        }
    }

    /// What later parts of a statement find a row of `t` by.
    pub(crate) fn key(&self) -> String {
        match &self.queue {
            Some(queue) => format!("{} AS id, {queue} AS queue", self.id),
            None => format!("{} AS id", self.id),
        }
    }

    /// The key as it is answered.
    pub(crate) fn key_text(&self) -> String {
        let queue = self.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
        format!("{}::text AS id, {queue} AS queue", self.id)
    }

    /// The same of `other`, which has `id` and `queue`.
    pub(crate) fn key_of(&self, other: &str) -> String {
        let queue = self.queue.as_ref().map_or("NULL".to_owned(), |_| format!("{other}.queue"));
        format!("{other}.id::text AS id, {queue}::text AS queue")
    }

    /// The order in which everybody locks rows.
    pub(crate) fn lock_order(&self) -> String {
        match &self.queue {
            Some(queue) => format!("{queue}, {}", self.id),
            None => self.id.clone(),
        }
    }

    /// A parameter with ids, in the column's type.
    pub(crate) fn ids(&self, parameter: &str) -> String {
        match self.inner().id_type {
            IdType::Text => format!("{parameter}::text[]"),
            other => format!("({parameter}::text[])::{}[]", other.sql()),
        }
    }

    /// A parameter with owners, in the column's type.
    pub(crate) fn owners(&self, parameter: &str) -> String {
        match self.mode {
            Mode::Leased => format!("({parameter}::text[])::{}[]", self.owner_type()),
            // They are compared with a note, and never with a column.
            Mode::Held => format!("{parameter}::text[]"),
        }
    }

    pub(crate) fn owner_type(&self) -> &'static str {
        if self.inner().owner_sequence.is_some() && self.mode == Mode::Leased { "bigint" } else { "uuid" }
    }

    /// The row of the side table, `x`, of the row of `other`, which has `id` and `queue`.
    pub(crate) fn side_of(&self, side: &SideTableSql, other: &str) -> String {
        let queue = self.queue.as_ref().map_or("''".to_owned(), |_| format!("{other}.queue::text"));
        format!("x.tab = {} AND x.queue = {queue} AND x.id = {other}.id::text", side.tab)
    }

    /// The same of the row of the claimed table.
    pub(crate) fn side_row(&self, side: &SideTableSql, alias: &str) -> String {
        let queue = self.inner().queue.as_ref().map(|queue| column(alias, queue));
        let queue = queue.map_or("''".to_owned(), |queue| format!("{queue}::text"));
        format!(
            "x.tab = {} AND x.queue = {queue} AND x.id = {}::text",
            side.tab,
            column(alias, &self.inner().id)
        )
    }

    /// From the lease, `x`, to the row, whose id has an index as it is.
    pub(crate) fn of_side(&self) -> String {
        let queue =
            self.queue.as_ref().map_or("x.queue = ''".to_owned(), |queue| format!("{queue} = x.queue"));
        format!("{} = x.id::{} AND {queue}", self.id, self.inner().id_type.sql())
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

    /// Somebody has `t` under a lease that is kept in another table.
    pub(crate) fn is_leased(&self) -> String {
        let exists = |side: &SideTableSql| {
            format!("EXISTS (SELECT FROM {} x WHERE {})", side.table, self.side_row(side, "t"))
        };
        self.side.as_ref().map_or("false".to_owned(), exists)
    }

    /// As [`taken`](Self::taken), but for leases that count as ended when they are read.
    pub(crate) fn held_by_live_lease(&self, alias: &str) -> String {
        let taken = self.taken(alias);
        match (&self.function, &self.inner().tracking) {
            (Some(_), Tracking::Columns { until, .. }) => {
                format!("{taken} AND {} > {NOW}", column(alias, until))
            }
            _ => taken,
        }
    }

    /// The state of `t` is, or counts as, one of `from`.
    pub(crate) fn counts_as(&self, from: &[State]) -> String {
        let (states, state, wanted) = (&self.inner().states, &self.state, list(from));
        match (&self.inner().tracking, &self.function) {
            (Tracking::Columns { until, .. }, Some(function)) => {
                // The first half is for the index, the second decides.
                let mut stored = from.to_vec();
                stored.extend(states.taken.iter().filter(|_| from.contains(states.home())).cloned());
                let until = column("t", until);
                format!("{state} IN ({}) AND {function}({state}, {until}) IN ({wanted})", list(&stored))
            }
            _ => format!("{state} IN ({wanted})"),
        }
    }

    /// The state of `t` is one of `from`, and nobody has the row under a lease.
    pub(crate) fn free(&self, from: &[State]) -> String {
        let state = self.counts_as(from);
        match (&self.inner().tracking, &self.function, &self.side) {
            (Tracking::Columns { owner, .. }, None, _) if self.inner().states.taken.is_none() => {
                format!("{state} AND {} IS NULL", column("t", owner))
            }
            // As a value and not as a join, which the server would plan by the size that the other table once
            // had: this is one probe of the primary key for each row that is looked at.
            (_, _, Some(side)) => format!(
                "{state} AND (SELECT x.epoch FROM {} x WHERE {}) IS NULL",
                side.table,
                self.side_row(side, "t")
            ),
            _ => state,
        }
    }

    /// The state in which a free row counts as being found, as text.
    pub(crate) fn found(&self) -> String {
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
    pub(crate) fn open(&self, from: &[State]) -> String {
        let there = self.outstanding(from);
        match &self.inner().ready_at {
            Some(ready) => format!("{there} AND {}", self.is_due(&column("t", ready))),
            None => there,
        }
    }

    /// The same, or later.
    pub(crate) fn outstanding(&self, from: &[State]) -> String {
        let inner = self.inner();
        let mut conditions = vec![self.free(from)];
        if let Some(attempts) = &inner.attempts {
            let attempts = column("t", attempts);
            conditions.push(format!("({attempts} IS NULL OR {attempts} > 0)"));
        }
        if let Some(queue) = &self.queue {
            conditions.push(format!("{queue} IS NOT NULL"));
        }
        if let Some(filter) = &inner.filter {
            conditions.push(format!("({})", filter.as_str()));
        }
        conditions.join(" AND ")
    }

    /// The time before which a row is not taken has come. Where each row has one, that is a bound for an index.
    pub(crate) fn is_due(&self, ready: &str) -> String {
        match self.ready_is_given.get() {
            Some(true) => format!("{ready} <= {RECEIVED}"),
            _ => format!("({ready} IS NULL OR {ready} <= {RECEIVED})"),
        }
    }

    /// Rows are in the order of that time first, and each has one.
    pub(crate) fn is_ordered_by_time(&self) -> bool {
        let first = self.inner().order.first().map(|by| &by.column);
        first.is_some() && first == self.inner().ready_at.as_ref() && self.ready_is_given.get() == Some(&true)
    }

    /// ` WHERE` `t` is in this state, which is that of rows that were given up, and their order: that of the index that has
    /// them alone. The name stands there twice because the planner would take an order by what is equal to one value for an
    /// order by the rest, and then read the table in the order of its key.
    pub(crate) fn given_up_in(&self, state: &State, and: &str) -> String {
        let (column, twice) = (&self.state, list(&[state.clone(), state.clone()]));
        format!(" WHERE {column} IN ({twice}){and} ORDER BY {column}, {}", self.lock_order())
    }

    /// Gives `text`, an expression of text, the type of the state's column.
    pub(crate) fn as_state(&self, text: &str) -> String {
        match &self.inner().states.kind {
            StateType::Text => text.to_owned(),
            StateType::Enum(name) => format!("({text})::{}", name.quoted()),
            StateType::Boolean => format!("({text})::boolean"),
        }
    }

    /// The claimed table, with the side table where there is one.
    pub(crate) fn with_lease(&self) -> String {
        let side = self.side.as_ref();
        let joined = side.map(|side| format!(" JOIN {} x ON {}", side.table, self.side_row(side, "t")));
        format!("{} t{}", self.table, joined.unwrap_or_default())
    }

    /// Changes the rows that `due` selects; where `lets_go`, their leases in a side table go, perhaps they alone.
    pub(crate) fn change(&self, due: &str, lets_go: bool, set: &[String], answer: &str) -> String {
        let mut with = With::new().step("due", due);
        if let Some(side) = self.side.as_ref().filter(|_| lets_go) {
            let freed = format!("DELETE FROM {} x USING due WHERE {}", side.table, self.side_of(side, "due"));
            if set.is_empty() {
                return with.end(&freed);
            }
            with = with.change("freed", &freed);
        }
        let (table, set, same) = (&self.table, set.join(", "), self.same_row("due"));
        with.end(&format!("UPDATE {table} AS t SET {set} FROM due WHERE {same} RETURNING {answer}"))
    }

    /// The end of a lease of `t` that begins now, of the milliseconds in `parameter` unless the row says.
    pub(crate) fn until(&self, parameter: &str) -> String {
        let given = format!("{parameter}::float8 * interval '1 millisecond'");
        match &self.inner().timeout {
            Some(own) => {
                let own = column("t", own);
                format!(
                    "{NOW} + CASE WHEN {own} > 0 THEN {own}::float8 * interval '1 second' ELSE {given} END"
                )
            }
            None => format!("{NOW} + {given}"),
        }
    }

    /// The next epoch of `t`, where the table keeps it.
    pub(crate) fn next_epoch(&self) -> String {
        match (&self.inner().epoch_sequence, &self.inner().tracking) {
            (Some(sequence), _) => next(sequence),
            (None, Tracking::Side(side)) => next(&side_epochs(side)),
            (None, Tracking::Columns { epoch, .. }) => format!("COALESCE({}, 0) + 1", column("t", epoch)),
            (None, Tracking::None) => "0".to_owned(),
        }
    }

    /// What is written when nobody has the row any more.
    pub(crate) fn clear_lease(&self) -> Vec<String> {
        let mut set = Vec::new();
        if let Tracking::Columns { owner, until, .. } = &self.inner().tracking {
            set.push(format!("{} = NULL", owner.quoted()));
            set.push(format!("{} = NULL", until.quoted()));
        }
        set.extend(self.inner().taken_at.iter().map(|at| format!("{} = NULL", at.quoted())));
        set
    }

    /// Where a row goes that is to be tried again, if it can, as an assignment. `None` where it stays.
    pub(crate) fn back(&self) -> Option<String> {
        let inner = self.inner();
        let state = inner.state.quoted();
        match (&inner.states.exhausted, &inner.attempts) {
            (Some(exhausted), Some(attempts)) => {
                let back = if inner.states.taken.is_some() || inner.states.takeable.len() > 1 {
                    self.home.clone()
                } else {
                    format!("{}::text", self.state)
                };
                // Where nothing was written before, the attempt that ends is still among those that are left.
                let spent = if self.mode == Mode::Held { 1 } else { 0 };
                let either = format!(
                    "CASE WHEN {} <= {spent} THEN {} ELSE {back} END",
                    column("t", attempts),
                    literal(exhausted.as_str())
                );
                Some(format!("{state} = {}", self.as_state(&either)))
            }
            _ => self.is_moved().then(|| format!("{state} = {}", self.home)),
        }
    }

    /// Whether a row that was taken may be in another state than home, or has to be written for another reason.
    pub(crate) fn is_moved(&self) -> bool {
        self.mode == Mode::Held
            || self.inner().states.taken.is_some()
            || self.inner().states.takeable.len() > 1
    }

    pub(crate) fn home(&self) -> &str {
        &self.home
    }

    pub(crate) fn state(&self) -> &str {
        &self.state
    }

    /// Whether the last attempt of `t` is used up.
    pub(crate) fn used_up(&self) -> String {
        match &self.inner().attempts {
            Some(attempts) => format!("COALESCE({} <= 0, false)", column("t", attempts)),
            None => "false".to_owned(),
        }
    }
}
