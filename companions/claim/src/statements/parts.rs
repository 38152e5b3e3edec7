//! The SQL parts from which statements on the claimed table are built. The table has the alias `t` in all of them.

use std::sync::OnceLock;

use leasehold_table_schema::sql::literal;

use super::expression::{column, hashed, list, next};
use super::with::With;
use crate::spec::ids::IdType;
use crate::spec::states::{State, StateType};
use crate::spec::{ClaimSpec, Inner, Tracking, side_epochs, state_function};

/// The current time, for values to write and for the second check of a row that was found.
pub(crate) const NOW: &str = "pg_catalog.clock_timestamp()";

/// The time at which the server received the statement, for conditions that find rows. An index scan cannot use a clock
/// that moves during the statement.
pub(crate) const RECEIVED: &str = "pg_catalog.statement_timestamp()";

/// Checks the transaction's isolation level and reads its held rows from a setting, which the transaction and its
/// savepoints roll back.
const GUARD: &str = "\
SELECT CASE
WHEN pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN 'isolation'
ELSE 'fine' END AS verdict, COALESCE(pg_catalog.current_setting('leasehold.held', true), '') AS held";

/// How a claim protects its rows from other workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A lease, which the claim writes together with the attempt.
    Leased,
    /// The row locks of an open transaction. Nothing is written before the end of the claim.
    Held,
}

/// The SQL parts of one spec.
#[derive(Debug)]
pub(crate) struct SqlParts {
    pub(crate) spec: ClaimSpec,
    pub(crate) mode: Mode,
    pub(crate) table: String,
    /// The column of the id, qualified with `t`.
    pub(crate) id: String,
    pub(crate) queue: Option<String>,
    pub(crate) side: Option<SideTableSql>,
    pub(crate) lease: Option<LeaseSql>,
    state: String,
    home: String,
    /// The SQL function, made by the migration, that returns the effective state of a row: a row with an ended lease
    /// counts as free. `None` unless leases expire on read.
    function: Option<String>,
    /// Whether the column `ready_at` is NOT NULL. Unset until the server has been queried.
    pub(crate) ready_is_given: OnceLock<bool>,
}

/// SQL for the side table, which has the leases of a claimed table without lease columns.
#[derive(Debug)]
pub(crate) struct SideTableSql {
    pub(crate) table: String,
    /// An SQL expression for the claimed table's name with its schema, as in the side table's column `tab`.
    pub(crate) tab: String,
}

/// SQL for owner, epoch and end of the lease of `t`: columns of `t`, or of its row `x` in the side table.
#[derive(Debug)]
pub(crate) struct LeaseSql {
    pub(crate) owner: String,
    pub(crate) epoch: String,
    pub(crate) until: String,
}

impl SqlParts {
    /// Builds the SQL parts for claims under leases.
    pub(crate) fn leased(spec: &ClaimSpec) -> Self {
        Self::new(spec, Mode::Leased)
    }

    /// Builds the SQL parts for claims that an open transaction holds.
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

    /// Begins a statement that finds rows to take. For held claims, its first step is `GUARD`.
    pub(crate) fn begin(&self) -> With {
        match self.mode {
            Mode::Leased => With::new(),
            Mode::Held => With::new().step("guard", GUARD),
        }
    }

    /// Builds ` AND` the isolation level is right and the transaction does not hold `t` yet. Empty under leases.
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

    /// Builds an SQL expression for a text that identifies the row `t` in this database. It is a hash, because ids can
    /// contain any character. The queue's length is part of it, so queue and id cannot be confused.
    pub(crate) fn mark(&self) -> String {
        let queue = match &self.queue {
            Some(queue) => format!("pg_catalog.length({queue}) || ':' || {queue}"),
            None => "''".to_owned(),
        };
        let table = self.inner().table.oid_sql();
        hashed(&format!("pg_catalog.concat({table}, '|', {queue}, '|', {}::text)", self.id))
    }

    /// Builds a FROM list: the keys in the two parameters as `w`, joined with their rows `t`.
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

    /// Builds the condition that the key of `t` is among the keys in the two parameters.
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

    /// Builds the condition that `t` is the same row as `other`, which has the columns `id` and `queue`.
    pub(crate) fn same_row(&self, other: &str) -> String {
        match &self.queue {
            Some(queue) => format!("{} = {other}.id AND {queue} = {other}.queue", self.id),
            None => format!("{} = {other}.id", self.id),
        }
    }

    /// Builds a SELECT list with the key of `t`, for later steps of the statement.
    pub(crate) fn key(&self) -> String {
        match &self.queue {
            Some(queue) => format!("{} AS id, {queue} AS queue", self.id),
            None => format!("{} AS id", self.id),
        }
    }

    /// Builds a SELECT list with the key of `t` as text, for the reply.
    pub(crate) fn key_text(&self) -> String {
        let queue = self.queue.as_ref().map_or("NULL::text".to_owned(), |queue| format!("{queue}::text"));
        format!("{}::text AS id, {queue} AS queue", self.id)
    }

    /// Builds a SELECT list with the key of `other`, which has the columns `id` and `queue`, for the reply.
    pub(crate) fn key_of(&self, other: &str) -> String {
        let queue = self.queue.as_ref().map_or("NULL".to_owned(), |_| format!("{other}.queue"));
        format!("{other}.id::text AS id, {queue}::text AS queue")
    }

    /// Builds the list of an `ORDER BY` in which every statement locks rows.
    pub(crate) fn lock_order(&self) -> String {
        match &self.queue {
            Some(queue) => format!("{queue}, {}", self.id),
            None => self.id.clone(),
        }
    }

    /// Casts a parameter with a list of ids to the type of the id's column.
    pub(crate) fn ids(&self, parameter: &str) -> String {
        match self.inner().id_type {
            IdType::Text => format!("{parameter}::text[]"),
            other => format!("({parameter}::text[])::{}[]", other.sql()),
        }
    }

    /// Casts a parameter with a list of owners to the type of the owner's column.
    pub(crate) fn owners(&self, parameter: &str) -> String {
        match self.mode {
            Mode::Leased => format!("({parameter}::text[])::{}[]", self.owner_type()),
            // Owners of held claims are compared as text with the setting, never with a column.
            Mode::Held => format!("{parameter}::text[]"),
        }
    }

    pub(crate) fn owner_type(&self) -> &'static str {
        if self.inner().owner_sequence.is_some() && self.mode == Mode::Leased { "bigint" } else { "uuid" }
    }

    /// Builds the condition that the side-table row `x` belongs to the row `other` (columns `id` and `queue`).
    pub(crate) fn side_of(&self, side: &SideTableSql, other: &str) -> String {
        let queue = self.queue.as_ref().map_or("''".to_owned(), |_| format!("{other}.queue::text"));
        format!("x.tab = {} AND x.queue = {queue} AND x.id = {other}.id::text", side.tab)
    }

    /// Builds the condition that the side-table row `x` belongs to the row `alias` of the claimed table.
    pub(crate) fn side_row(&self, side: &SideTableSql, alias: &str) -> String {
        let queue = self.inner().queue.as_ref().map(|queue| column(alias, queue));
        let queue = queue.map_or("''".to_owned(), |queue| format!("{queue}::text"));
        format!(
            "x.tab = {} AND x.queue = {queue} AND x.id = {}::text",
            side.tab,
            column(alias, &self.inner().id)
        )
    }

    /// Builds the join condition from a side-table row `x` to its row `t`, in a form that can use the index of the id.
    pub(crate) fn of_side(&self) -> String {
        let queue =
            self.queue.as_ref().map_or("x.queue = ''".to_owned(), |queue| format!("{queue} = x.queue"));
        format!("{} = x.id::{} AND {queue}", self.id, self.inner().id_type.sql())
    }

    /// Builds the condition that the row `alias` has a lease, ended or not.
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

    /// Builds the condition that `t` has a lease in the side table. False without a side table.
    pub(crate) fn is_leased(&self) -> String {
        let exists = |side: &SideTableSql| {
            format!("EXISTS (SELECT FROM {} x WHERE {})", side.table, self.side_row(side, "t"))
        };
        self.side.as_ref().map_or("false".to_owned(), exists)
    }

    /// Builds the condition of [`taken`](Self::taken). If leases expire on read, ended leases do not count.
    pub(crate) fn held_by_live_lease(&self, alias: &str) -> String {
        let taken = self.taken(alias);
        match (&self.function, &self.inner().tracking) {
            (Some(_), Tracking::Columns { until, .. }) => {
                format!("{taken} AND {} > {NOW}", column(alias, until))
            }
            _ => taken,
        }
    }

    /// Builds the condition that the state of `t` is in `from`. With expiry on read, an ended lease counts as put back.
    pub(crate) fn counts_as(&self, from: &[State]) -> String {
        let (states, state, wanted) = (&self.inner().states, &self.state, list(from));
        match (&self.inner().tracking, &self.function) {
            (Tracking::Columns { until, .. }, Some(function)) => {
                // The first half of the condition can use an index, the second half decides.
                let mut stored = from.to_vec();
                stored.extend(states.taken.iter().filter(|_| from.contains(states.home())).cloned());
                let until = column("t", until);
                format!("{state} IN ({}) AND {function}({state}, {until}) IN ({wanted})", list(&stored))
            }
            _ => format!("{state} IN ({wanted})"),
        }
    }

    /// Builds the condition that the state of `t` is one of `from` and the row has no lease.
    pub(crate) fn free(&self, from: &[State]) -> String {
        let state = self.counts_as(from);
        match (&self.inner().tracking, &self.function, &self.side) {
            (Tracking::Columns { owner, .. }, None, _) if self.inner().states.taken.is_none() => {
                format!("{state} AND {} IS NULL", column("t", owner))
            }
            // A scalar subquery instead of a join, because the planner would judge a join by an old size of the side
            // table. The subquery is one probe of the primary key per row.
            (_, _, Some(side)) => format!(
                "{state} AND (SELECT x.epoch FROM {} x WHERE {}) IS NULL",
                side.table,
                self.side_row(side, "t")
            ),
            _ => state,
        }
    }

    /// Builds the SQL text of the state in which the claim found the row. An ended lease counts as put back.
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

    /// Builds the condition that `t` is free, has attempts left and is due. Preconditions are not checked.
    pub(crate) fn open(&self, from: &[State]) -> String {
        let there = self.outstanding(from);
        match &self.inner().ready_at {
            Some(ready) => format!("{there} AND {}", self.is_due(&column("t", ready))),
            None => there,
        }
    }

    /// Builds the condition of [`open`](Self::open) without the time: also for rows that are due later.
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

    /// Builds the condition that the time `ready` has come. It can bound an index scan if the column is never NULL.
    pub(crate) fn is_due(&self, ready: &str) -> String {
        match self.ready_is_given.get() {
            Some(true) => format!("{ready} <= {RECEIVED}"),
            _ => format!("({ready} IS NULL OR {ready} <= {RECEIVED})"),
        }
    }

    /// Returns whether the order begins with `ready_at` and the column is never NULL.
    pub(crate) fn is_ordered_by_time(&self) -> bool {
        let first = self.inner().order.first().map(|by| &by.column);
        first.is_some() && first == self.inner().ready_at.as_ref() && self.ready_is_given.get() == Some(&true)
    }

    /// Builds ` WHERE` and `ORDER BY` for rows that were given up in this state (failed or exhausted), for the index
    /// that contains only such rows. The state is listed twice, because with one value the planner would drop the
    /// column from the order, and then read the table by its primary key.
    pub(crate) fn given_up_in(&self, state: &State, and: &str) -> String {
        let (column, twice) = (&self.state, list(&[state.clone(), state.clone()]));
        format!(" WHERE {column} IN ({twice}){and} ORDER BY {column}, {}", self.lock_order())
    }

    /// Casts the SQL expression `text` to the type of the state's column.
    pub(crate) fn as_state(&self, text: &str) -> String {
        match &self.inner().states.kind {
            StateType::Text => text.to_owned(),
            StateType::Enum(name) => format!("({text})::{}", name.quoted()),
            StateType::Boolean => format!("({text})::boolean"),
        }
    }

    /// Builds a FROM list with the claimed table, joined with the side table if one exists.
    pub(crate) fn with_lease(&self) -> String {
        let side = self.side.as_ref();
        let joined = side.map(|side| format!(" JOIN {} x ON {}", side.table, self.side_row(side, "t")));
        format!("{} t{}", self.table, joined.unwrap_or_default())
    }

    /// Builds the statement that updates the rows which `due` selects. With `lets_go`, it also deletes their leases
    /// from the side table. If `set` is empty, it then only deletes the leases.
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

    /// Builds an SQL expression for the end of a lease of `t` that starts now. The lease lasts for the milliseconds in
    /// `parameter`, unless the row has a timeout.
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

    /// Builds an SQL expression for the epoch of the next claim of `t`.
    pub(crate) fn next_epoch(&self) -> String {
        match (&self.inner().epoch_sequence, &self.inner().tracking) {
            (Some(sequence), _) => next(sequence),
            (None, Tracking::Side(side)) => next(&side_epochs(side)),
            (None, Tracking::Columns { epoch, .. }) => format!("COALESCE({}, 0) + 1", column("t", epoch)),
            (None, Tracking::None) => "0".to_owned(),
        }
    }

    /// Builds the assignments of an UPDATE that clear the lease.
    pub(crate) fn clear_lease(&self) -> Vec<String> {
        let mut set = Vec::new();
        if let Tracking::Columns { owner, until, .. } = &self.inner().tracking {
            set.push(format!("{} = NULL", owner.quoted()));
            set.push(format!("{} = NULL", until.quoted()));
        }
        set.extend(self.inner().taken_at.iter().map(|at| format!("{} = NULL", at.quoted())));
        set
    }

    /// Builds the assignment of the state to a row that is put back or becomes exhausted. `None` if the state stays.
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
                // A held claim has not yet subtracted the current attempt.
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

    /// Returns whether putting a row back assigns its state: always for held claims, and under leases if the state can
    /// differ from the first claimable one.
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

    /// Builds the condition that `t` has no attempts left. False if attempts have no limit.
    pub(crate) fn used_up(&self) -> String {
        match &self.inner().attempts {
            Some(attempts) => format!("COALESCE({} <= 0, false)", column("t", attempts)),
            None => "false".to_owned(),
        }
    }
}
