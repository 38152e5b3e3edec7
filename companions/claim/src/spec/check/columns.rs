//! Checks that the columns exist, that claims can write them, and that their types fit.

use leasehold_table_schema::sql::literal;
use leasehold_table_schema::{Column, ColumnFacts};

use super::TableCheck;
use crate::spec::columns::{BOOLEAN, SETTLED_BY, SpecColumn, TEXTS, TIME, Use};
use crate::spec::states::StateType;

/// The number of characters of a UUID, the longest owner.
const LONGEST_OWNER: i64 = 36;

impl TableCheck<'_> {
    pub(super) fn columns(&mut self) {
        let (spec, facts) = (self.spec, self.facts);
        self.state();
        let table = spec.table().quoted();
        for want in spec.inner.parts(None) {
            let (column, name) = (want.column, want.column.quoted());
            let Some(fact) = facts.column(column) else {
                let fix = if want.made.is_some() {
                    "run the migration"
                } else {
                    "add it, or name another in the spec"
                };
                self.error(format!("there is no column {column} for {}; {fix}", want.what));
                continue;
            };
            if !want.types.is_empty() && !want.types.contains(&fact.base.as_str()) {
                self.error(wrong_type(&table, &want, fact));
            } else if want.how != Use::Reads && fact.is_generated {
                self.error(format!(
                    "column {column} is computed by the server, and claims have to write it; name another column"
                ));
            } else if want.how == Use::Empties && fact.is_required {
                self.error(format!(
                    "column {column} may not be NULL, but is NULL while no worker has claimed the row: \
                     ALTER TABLE {table} ALTER COLUMN {name} DROP NOT NULL"
                ));
            } else if want.what == SETTLED_BY && fact.longest.is_some_and(|longest| longest < LONGEST_OWNER) {
                self.error(format!(
                    "column {column} has too little room for an owner of {LONGEST_OWNER} characters: \
                     ALTER TABLE {table} ALTER COLUMN {name} TYPE text"
                ));
            }
        }
        self.nulls();
        if let Some(column) = spec.inner.attempts.as_ref()
            && facts.column(column).is_some_and(|fact| fact.is_zero)
        {
            let name = column.quoted();
            self.warning(format!(
                "column {column} for attempts is 0 by default, so that a new row is exhausted before it was ever taken: \
                 ALTER TABLE {table} ALTER COLUMN {name} SET DEFAULT 3, and requeue the rows that are there"
            ));
        }
    }
}

fn wrong_type(table: &str, want: &SpecColumn<'_>, fact: &ColumnFacts) -> String {
    let (column, name, what) = (want.column, want.column.quoted(), want.what);
    let wanted = want.types.join(" or ");
    if want.types == TIME && fact.base == "timestamp without time zone" {
        return format!(
            "column {column} for {what} is a timestamp without time zone, which means another moment in each \
             session; convert it, with the zone that it was written in: ALTER TABLE {table} ALTER COLUMN {name} \
             TYPE timestamptz USING {name} AT TIME ZONE 'UTC'"
        );
    }
    let hint = match what {
        "the owner" if fact.base == "bigint" => {
            "; name an owner_sequence in the spec if owners are to be numbers, else change the type of the column"
        }
        "the owner" => "; with an owner_sequence owners are numbers, without one UUIDs",
        "the id" => "; name the type of the id in the spec",
        "the order" => "; name the type in order_by",
        _ => "; change its type, or name another column",
    };
    format!("column {column} for {what} is of type {}, not {wanted}{hint}", fact.kind)
}

impl TableCheck<'_> {
    fn state(&mut self) {
        let (spec, facts) = (self.spec, self.facts);
        let (inner, table) = (&spec.inner, spec.table().quoted());
        let (column, name) = (&inner.state, inner.state.quoted());
        let home = literal(inner.states.home().as_str());
        let kind = match &inner.states.kind {
            StateType::Text => "text".to_owned(),
            StateType::Boolean => "boolean".to_owned(),
            StateType::Enum(name) => name.quoted(),
        };
        let Some(fact) = facts.column(column) else {
            self.error(format!(
                "there is no column {column} for the state; add it, with a default that says what the rows that are \
                 there mean: ALTER TABLE {table} ADD COLUMN {name} {kind} NOT NULL DEFAULT {home}"
            ));
            return;
        };
        let fits = match &inner.states.kind {
            StateType::Text => TEXTS.contains(&fact.base.as_str()),
            StateType::Boolean => BOOLEAN.contains(&fact.base.as_str()),
            StateType::Enum(_) => fact.is_enum,
        };
        if !fits {
            let hint = match (fact.is_enum, fact.base.as_str()) {
                (true, _) => format!("describe its states with States::enumeration of type {}", fact.kind),
                (_, "boolean") => "describe its states with States::boolean".to_owned(),
                (_, "text" | "character varying") => "describe its states with States::text".to_owned(),
                _ => format!("change its type to {kind}"),
            };
            self.error(format!("column {column} of the state is of type {}; {hint}", fact.kind));
        }
        if fact.is_generated {
            self.error(format!(
                "column {column} of the state is computed by the server, and claims have to write it; name another"
            ));
        }
        if let Some(longest) = fact.longest {
            let too_long = |state: &&crate::State| {
                state.as_str().chars().count() > usize::try_from(longest).unwrap_or(0)
            };
            for state in inner.states.all().into_iter().filter(too_long) {
                self.error(format!(
                    "column {column} has room for {longest} characters, too few for the state {state}: \
                     ALTER TABLE {table} ALTER COLUMN {name} TYPE text"
                ));
            }
        }
        if !fact.is_required {
            self.warning(format!(
                "column {column} of the state may be NULL, and rows without a state are never taken; give it a default, \
                 fill the rows, then forbid it: ALTER TABLE {table} ALTER COLUMN {name} SET DEFAULT {home}, then \
                 UPDATE {table} SET {name} = {home} WHERE {name} IS NULL, then ALTER TABLE {table} ALTER COLUMN {name} SET NOT NULL"
            ));
        }
    }

    /// Warns of columns in which NULL has a meaning that is easily overlooked.
    fn nulls(&mut self) {
        let (spec, facts) = (self.spec, self.facts);
        let (inner, table) = (&spec.inner, spec.table().quoted());
        let open = |column: &Column| facts.column(column).is_some_and(|fact| !fact.is_required);
        for by in inner.order.iter().filter(|by| open(&by.column)) {
            let name = by.column.quoted();
            self.warning(format!(
                "column {} of the order may be NULL, and such rows come {}; fill it, then \
                 ALTER TABLE {table} ALTER COLUMN {name} SET NOT NULL",
                by.column,
                if by.descending { "before all others" } else { "after all others" }
            ));
        }
        if let Some(column) = inner.attempts.as_ref().filter(|column| open(column)) {
            self.warning(format!(
                "column {column} may be NULL, and such a row may be tried for ever; where that is not meant, \
                 ALTER TABLE {table} ALTER COLUMN {name} SET DEFAULT 3, fill the rows, and SET NOT NULL",
                name = column.quoted()
            ));
        }
        if let Some(column) = inner.queue.as_ref().filter(|column| open(column)) {
            self.error(format!(
                "column {column} of the queue may be NULL, and a row without a queue cannot be named; run the migration"
            ));
        }
    }
}
