//! Checks constraints that claims need, and constraints that would block them.

use leasehold_table_schema::sql::{literal, quote, regclass};
use leasehold_table_schema::{Column, Table, TableFacts, server_message};

use super::TableCheck;
use crate::error::ClaimError;
use crate::spec::states::State;
use crate::spec::{ClaimSpec, Tracking};

const TAKEN: &str = "be claimed";

/// An owner.
const UUID: &str = "'00000000-0000-0000-0000-000000000001'";

impl TableCheck<'_> {
    /// Checks that the table's unique key identifies one row for the spec.
    pub(super) fn identity(&mut self) {
        let (spec, facts) = (self.spec, self.facts);
        let (inner, table) = (&spec.inner, spec.table().quoted());
        let is_unique = inner.queue.as_ref().is_some_and(|queue| facts.is_unique(&[queue, &inner.id]))
            || facts.is_unique(&[&inner.id]);
        if facts.column(&inner.id).is_none() || is_unique {
            return;
        }
        if let Some(wider) = facts.wider_key(&inner.id, 1) {
            return self.wide(&wider);
        }
        let (what, columns) = match &inner.queue {
            Some(queue) => ("queue and id", format!("{}, {}", queue.quoted(), inner.id.quoted())),
            None => ("the id", inner.id.quoted()),
        };
        self.error(format!(
            "nothing makes {what} unique, so that one claim could settle several rows; run the migration, or \
             CREATE UNIQUE INDEX CONCURRENTLY ON {table} ({columns})"
        ));
    }

    /// Reports a unique key that has more columns than the spec names.
    fn wide(&mut self, key: &[String]) {
        let (spec, facts) = (self.spec, self.facts);
        let (table, id, key) = (spec.table(), &spec.inner.id, key.join(", "));
        if facts.is_partitioned() {
            // Only a warning, because the server allows no narrower unique index on such a partitioned table.
            return self.warning(format!(
                "rows of the partitioned table {table} are unique by {key} alone, so that one claim could settle several \
                 rows of the same {id}; see that no {id} comes twice: GENERATED ALWAYS AS IDENTITY, or UUIDs"
            ));
        }
        self.error(format!(
            "rows of table {table} are identified by {key}, and claims know a row by {}; name the other column of a key of \
             two as the queue (text, or a generated column that is its text), or give the table a unique column of its own",
            if spec.inner.queue.is_some() { "queue and id" } else { "its id" }
        ));
    }

    /// Checks that the state's column can hold each state of the spec.
    pub(super) async fn states(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let Some(fact) = facts.column(&spec.inner.state) else { return Ok(()) };
        for state in spec.inner.states.all() {
            let sql = format!("SELECT ({}::{})::pg_catalog.text", literal(state.as_str()), fact.kind);
            if let Err(error) = self.reader.attempt(&sql).await? {
                let said = server_message(&error);
                let fix = if fact.is_enum {
                    format!("ALTER TYPE {} ADD VALUE {}", fact.kind, literal(state.as_str()))
                } else {
                    "change the type, or the spec".to_owned()
                };
                self.error(format!(
                    "column {} cannot hold the state {state} ({said}); {fix}",
                    spec.inner.state
                ));
            }
        }
        Ok(())
    }
}

/// The values that claims write into a row at one step of its life (for example when it is taken).
struct WrittenRow<'a> {
    doing: &'static str,
    state: Option<&'a State>,
    /// The columns that this step writes, each with the SQL of its value. The server evaluates the table's constraints
    /// with them.
    values: Vec<(&'a Column, &'static str)>,
}

fn moments(spec: &ClaimSpec) -> Vec<WrittenRow<'_>> {
    let (inner, states) = (&spec.inner, &spec.inner.states);
    let owner = if inner.owner_sequence.is_some() { "1" } else { UUID };
    let now = "pg_catalog.clock_timestamp()";
    let moment = |doing, state, is_taken: bool| {
        let mut values = Vec::new();
        if let Tracking::Columns { owner: by, epoch, until } = &inner.tracking {
            values.extend([(by, if is_taken { owner } else { "NULL" }), (epoch, "1")]);
            values.push((until, if is_taken { now } else { "NULL" }));
        }
        if let Some(column) = &inner.taken_at {
            values.push((column, if is_taken { now } else { "NULL" }));
        }
        if let Some(column) = &inner.attempts {
            values.push((column, "0"));
        }
        if let Some(column) = inner.settled_by.as_ref().filter(|_| !is_taken) {
            values.push((column, UUID));
        }
        WrittenRow { doing, state, values }
    };
    let mut all = vec![moment(TAKEN, states.taken.as_ref(), true)];
    all.push(moment("be put back", Some(states.home()), false));
    let mut done = moment("be settled", Some(&states.done), false);
    done.values.extend(inner.settled_at.as_ref().map(|column| (column, now)));
    all.push(done);
    if states.failed.is_some() {
        let mut failed = moment("be settled as failed", states.failed.as_ref(), false);
        failed.values.extend(inner.settled_at.as_ref().map(|column| (column, now)));
        failed.values.extend(inner.error.as_ref().map(|column| (column, "'x'")));
        all.push(failed);
    }
    if states.exhausted.is_some() {
        all.push(moment("become exhausted", states.exhausted.as_ref(), false));
    }
    all
}

impl TableCheck<'_> {
    /// Checks whether a CHECK constraint refuses values that claims write.
    pub(super) async fn checks(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let table = spec.table();
        let sql = format!(
            "SELECT conname::text, pg_catalog.pg_get_expr(conbin, conrelid), \
             pg_catalog.array_to_string(conkey, ',') FROM pg_catalog.pg_constraint \
             WHERE conrelid = {} AND contype = 'c' AND conkey IS NOT NULL ORDER BY conname",
            regclass(table)
        );
        for check in self.reader.rows(&sql).await? {
            for moment in moments(spec) {
                let Some(trial) = Trial::of(spec, facts, &moment, &check.list(2)) else { continue };
                let answer = self.reader.attempt(&trial.sql(table, check.text(1))).await?;
                let refuses = answer.is_ok_and(|rows| rows.first().is_some_and(|row| row.is(0)));
                if !refuses {
                    continue;
                }
                let (name, state) = (check.text(0), moment.state);
                let with = state.map_or(String::new(), |state| format!(" with the state {state}"));
                let message = format!(
                    "constraint {name} does not let a row {}{with}: CHECK ({}); widen it, or change the spec",
                    moment.doing,
                    check.text(1)
                );
                if trial.is_certain {
                    self.error(message);
                } else {
                    self.warning(message);
                }
            }
        }
        Ok(())
    }
}

/// A CHECK expression that the server evaluates with the values that claims write.
struct Trial {
    columns: Vec<String>,
    /// Whether claims write all columns of the expression. Otherwise rows of the table supply the other values.
    is_certain: bool,
}

impl Trial {
    /// Builds the trial of the expression on the columns `keys`. `None` if it does not depend on values that claims
    /// write.
    fn of(spec: &ClaimSpec, facts: &TableFacts, moment: &WrittenRow<'_>, keys: &[i64]) -> Option<Self> {
        let (mut columns, mut is_certain, mut is_concerned) = (Vec::new(), true, false);
        for key in keys {
            let fact = facts.columns.iter().find(|fact| fact.number == *key)?;
            let quoted = quote(&fact.name);
            let state = moment.state.filter(|_| fact.name == spec.inner.state.as_str());
            let value = moment.values.iter().find(|(column, _)| column.as_str() == fact.name);
            let value = state
                .map(|state| literal(state.as_str()))
                .or_else(|| value.map(|(_, sql)| (*sql).to_owned()));
            is_concerned |= value.is_some();
            is_certain &= value.is_some();
            columns.push(match value {
                Some(value) => format!("({value})::{} AS {quoted}", fact.kind),
                None => format!("r.{quoted}"),
            });
        }
        is_concerned.then_some(Self { columns, is_certain })
    }

    /// Builds the query whether `expression` is false with these values, for all sampled rows of the table.
    fn sql(&self, table: &Table, expression: &str) -> String {
        let (columns, name) = (self.columns.join(", "), quote(table.name()));
        let from = if self.is_certain {
            String::new()
        } else {
            format!(" FROM (SELECT * FROM {} LIMIT 200) AS r", table.quoted())
        };
        format!(
            "SELECT pg_catalog.bool_and(NOT COALESCE(({expression}), true))::pg_catalog.text FROM (SELECT {columns}{from}) AS {name}"
        )
    }
}

impl TableCheck<'_> {
    /// Checks whether a unique index prevents a row from changing its state while another row is in the new one.
    pub(super) async fn collisions(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let (inner, states) = (&spec.inner, &spec.inner.states);
        let number = facts.number(&inner.state);
        let id = facts.number(&inner.id);
        for index in facts.indexes.iter().filter(|index| index.is_unique && !index.keys.contains(&id)) {
            let is_key = index.keys.contains(&number);
            let is_in_predicate = index.predicate.is_some() && index.depends.contains(&number);
            if !is_key && !is_in_predicate {
                continue;
            }
            let mut moves = Vec::new();
            let taken = states.taken.as_ref();
            moves.push((TAKEN, Some(states.home()), taken));
            moves.push(("be put back or swept", taken, Some(states.home())));
            let from = taken.or(Some(states.home()));
            moves.push(("be settled", from, Some(&states.done)));
            moves.push(("be settled as failed", from, states.failed.as_ref()));
            moves.push(("become exhausted", from, states.exhausted.as_ref()));
            for (doing, from, to) in moves {
                let (Some(from), Some(to)) = (from, to) else { continue };
                let enters = match &index.predicate {
                    None => true,
                    Some(predicate) => {
                        let after = self.holds(predicate, to).await?;
                        let before = self.holds(predicate, from).await?;
                        after != Some(false) && (is_key || before != Some(true) || after.is_none())
                    }
                };
                if enters && from != to {
                    let what = format!(
                        "unique index {} may not let a row {doing} (from {from} to {to}) while another row is in its place",
                        index.name
                    );
                    let mend = format!("put {from} into the index as well, or leave the state out of it");
                    if doing == TAKEN {
                        self.error(format!("{what}; no row could be taken while that row is next: {mend}"));
                    } else {
                        self.warning(format!("{what}; such a claim fails and the row waits: {mend}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether an index predicate holds for rows in `state`. `None` if it depends on another column, or the
    /// value is unknown.
    pub(super) async fn holds(&mut self, predicate: &str, state: &State) -> Result<Option<bool>, ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let Some(fact) = facts.column(&spec.inner.state) else { return Ok(None) };
        let name = spec.inner.state.quoted();
        // Evaluates the predicate with the state only. If the predicate uses another column, the server refuses the
        // query.
        let sql = format!(
            "SELECT ({predicate})::pg_catalog.text FROM (SELECT {}::{} AS {name}) AS {}",
            literal(state.as_str()),
            fact.kind,
            quote(spec.table().name())
        );
        let answer = self.reader.attempt(&sql).await?;
        let value =
            answer.ok().and_then(|rows| rows.first().and_then(|row| row.option(0).map(str::to_owned)));
        Ok(value.map(|text| matches!(text.as_str(), "true" | "t")))
    }
}
