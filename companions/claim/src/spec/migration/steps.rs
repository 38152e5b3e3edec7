//! The statements of a migration, in order.

use leasehold_table_schema::sql::{derived, dollar_tag, hash, literal, regclass};
use leasehold_table_schema::{Column, MigrationStep, RowIdentity};

use super::names::{side_epochs, state_function, state_list};
use super::notify::NotifyTrigger;
use crate::spec::states::{State, StateType};
use crate::spec::{ClaimSpec, Inner, Retention, Tracking};

/// Options that the caller of a migration has set.
#[derive(Clone, Debug, Default)]
pub(super) struct Choices {
    pub(super) attempts: Option<u32>,
    pub(super) keeps_unique_id: bool,
}

/// Lists every statement that `spec` needs, in order.
pub(super) fn steps(spec: &ClaimSpec, choices: &Choices) -> Vec<MigrationStep> {
    let inner = &*spec.inner;
    let writer = Writer::new(spec, choices);
    let identity = RowIdentity::new(spec.table(), &inner.id, inner.queue.as_ref())
        .keep_unique_id(choices.keeps_unique_id);
    let mut steps = vec![identity.whole_key_step()];
    steps.extend(writer.states());
    steps.extend(writer.sequences_before());
    steps.extend(writer.columns());
    steps.extend(identity.queue_steps());
    steps.extend(writer.constraints());
    steps.extend(identity.unique_steps());
    steps.extend(writer.index_steps());
    steps.extend(writer.function());
    steps.extend(writer.side_table());
    steps.extend(NotifyTrigger::of(spec).iter().flat_map(NotifyTrigger::steps));
    steps
}

/// An index that claims need. `definition` begins at the bracket of the columns.
pub(super) struct Index {
    pub(super) what: &'static str,
    pub(super) name: String,
    pub(super) definition: String,
}

pub(super) struct Writer<'a> {
    pub(super) spec: &'a ClaimSpec,
    pub(super) inner: &'a Inner,
    choices: &'a Choices,
    table: String,
}

impl<'a> Writer<'a> {
    pub(super) fn new(spec: &'a ClaimSpec, choices: &'a Choices) -> Self {
        Self { spec, inner: &spec.inner, choices, table: spec.table().quoted() }
    }
}

impl Writer<'_> {
    /// Builds the steps that add the labels of an enum. For a text column, a constraint that lists the states comes
    /// after the columns instead.
    fn states(&self) -> Vec<MigrationStep> {
        let StateType::Enum(name) = &self.inner.states.kind else { return Vec::new() };
        let states = self.inner.states.all();
        let label = |state: &&State| {
            let sql =
                format!("ALTER TYPE {} ADD VALUE IF NOT EXISTS {}", name.quoted(), literal(state.as_str()));
            let needed = format!(
                "SELECT NOT EXISTS (SELECT FROM pg_catalog.pg_enum WHERE enumtypid = {}::pg_catalog.regtype \
                 AND enumlabel = {})",
                literal(&name.quoted()),
                literal(state.as_str())
            );
            let mut step = MigrationStep::new("Each state is a label of the enum.", sql);
            step.needed = Some(needed);
            step
        };
        states.iter().map(label).collect()
    }

    pub(super) fn sequences_before(&self) -> Vec<MigrationStep> {
        let mut steps = Vec::new();
        if let Some(owners) = &self.inner.owner_sequence {
            steps.push(MigrationStep::sequence("Owners of claims are numbers of a sequence.", owners, None));
        }
        steps
    }

    fn columns(&self) -> Vec<MigrationStep> {
        let parts = self.inner.parts(self.choices.attempts).into_iter();
        let columns: Vec<(&Column, String)> =
            parts.filter_map(|part| Some((part.column, part.made?))).collect();
        if columns.is_empty() {
            return Vec::new();
        }
        let names: Vec<String> = columns.iter().map(|(column, _)| literal(column.as_str())).collect();
        let adds: Vec<String> = columns
            .iter()
            .map(|(column, kind)| format!("ADD COLUMN IF NOT EXISTS {} {kind}", column.quoted()))
            .collect();
        let missing = format!(
            "(SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute WHERE attrelid = {} AND NOT attisdropped \
             AND attname IN ({})) < {}",
            regclass(self.spec.table()),
            names.join(", "),
            names.len()
        );
        let add = format!("ALTER TABLE {}\n      {}", self.table, adds.join(",\n      "));
        vec![MigrationStep::only_if(
            "Columns for claims. Each default is the same for all existing rows, so that no row is rewritten.",
            &missing,
            &add,
        )]
    }

    fn constraints(&self) -> Vec<MigrationStep> {
        let (table, mut steps) = (self.spec.table(), Vec::new());
        if let Some((name, states)) = self.closed_states() {
            let what = "Only the states of the spec are allowed. An existing narrower constraint is widened.";
            steps.extend(MigrationStep::closed_set(what, table, &self.inner.state, &name, &states));
        }
        if let Some((name, condition)) = self.attempts_left() {
            steps.extend(MigrationStep::check("Attempts are never negative.", table, &name, &condition));
        }
        steps
    }

    /// Returns the name of the constraint on a text column of the state, and the allowed states.
    pub(super) fn closed_states(&self) -> Option<(String, Vec<&str>)> {
        let name = derived(&[self.spec.table().name(), self.inner.state.as_str(), "states"]);
        let states = self.inner.states.all().into_iter().map(State::as_str).collect();
        (self.inner.states.kind == StateType::Text).then_some((name, states))
    }

    /// Returns the name and the condition of the constraint on the attempts left.
    pub(super) fn attempts_left(&self) -> Option<(String, String)> {
        let attempts = self.inner.attempts.as_ref()?;
        let name = derived(&[self.spec.table().name(), attempts.as_str(), "not_negative"]);
        Some((name, format!("{} >= 0", attempts.quoted())))
    }

    fn index_steps(&self) -> Vec<MigrationStep> {
        let table = self.spec.table();
        let steps =
            |index: Index| MigrationStep::index(index.what, table, &index.name, false, &index.definition);
        self.indexes().into_iter().flat_map(steps).collect()
    }

    /// Lists the indexes of the table, without the unique index.
    pub(super) fn indexes(&self) -> Vec<Index> {
        let (inner, table) = (self.inner, self.spec.table());
        let mut indexes = Vec::new();
        let mut add = |what: &'static str, kind: &str, definition: String| {
            // The index name contains a hash of the definition, so two versions of a spec have separate indexes.
            let name = derived(&[table.name(), "claim", kind, &hash(&definition)[..8]]);
            indexes.push(Index { what, name, definition });
        };
        let mut order: Vec<String> = inner
            .order
            .iter()
            .map(|by| format!("{}{}", by.column.quoted(), if by.descending { " DESC" } else { "" }))
            .collect();
        if !inner.order.iter().any(|by| by.column == inner.id) {
            order.push(inner.id.quoted());
        }
        let offered = if inner.on_read {
            inner.states.takeable.iter().chain(&inner.states.taken).collect::<Vec<_>>()
        } else {
            inner.states.takeable.iter().collect()
        };
        let state = inner.state.quoted();
        let wanted = format!("WHERE {state} IN ({})", state_list(offered));
        let pick = "Index of claimable rows, in the order in which they are taken.";
        match &inner.queue {
            Some(queue) => {
                let queue = queue.quoted();
                let within: Vec<&String> = order.iter().filter(|column| **column != queue).collect();
                let within: Vec<&str> = within.into_iter().map(String::as_str).collect();
                add(pick, "pick", format!("({queue}, {}) {wanted}", within.join(", ")));
                add(
                    "Index of claimable rows of all queues, in order.",
                    "pick_all",
                    format!("({}, {queue}) {wanted}", within.join(", ")),
                );
            }
            None => add(pick, "pick", format!("({}) {wanted}", order.join(", "))),
        }
        if let Some(taken) = self.taken_rows() {
            let what = "Index of taken rows. It omits the end of the lease, because each renewal would otherwise write to \
                        every index of the table.";
            add(what, "taken", format!("({}) WHERE {taken}", inner.id.quoted()));
        }
        if let Some(group) = &inner.group {
            let group = group.quoted();
            if let (Some(kind), false) = (&inner.kind, inner.preconditions.is_empty()) {
                add("Index for the preconditions of rows.", "kind", format!("({group}, {})", kind.quoted()));
            }
            if inner.grouped {
                let definition = format!("({group}, {}) {wanted}", order.join(", "));
                add("Index of the claimable rows of each group, in order.", "group", definition);
                if let Some(taken) = self.taken_rows() {
                    add("Index of groups with taken rows.", "busy", format!("({group}) WHERE {taken}"));
                }
            }
        }
        if let Some(limit) = &inner.limit {
            let tenant = limit.column.quoted();
            let within: Vec<&str> =
                order.iter().filter(|column| **column != tenant).map(String::as_str).collect();
            // Skipped if the limit is per queue, because the index for picking within a queue serves both.
            if inner.queue.as_ref() != Some(&limit.column) {
                let what = "Index of the claimable rows of each limited value, in order.";
                add(what, "limit", format!("({tenant}, {}) {wanted}", within.join(", ")));
            }
            if let Some(taken) = self.taken_rows() {
                add(
                    "Index to count the taken rows of each limited value.",
                    "at_work",
                    format!("({tenant}) WHERE {taken}"),
                );
            }
        }
        if let Some(attempts) = &inner.attempts {
            let home = state_list(&inner.states.takeable);
            let definition =
                format!("({}) WHERE {} <= 0 AND {state} IN ({home})", inner.id.quoted(), attempts.quoted());
            add("Index of claimable rows without attempts left.", "spent", definition);
        }
        let given_up: Vec<&State> = inner.states.failed.iter().chain(&inner.states.exhausted).collect();
        if !given_up.is_empty() {
            let queue = inner.queue.iter().map(|queue| format!("{}, ", queue.quoted())).collect::<String>();
            let definition = format!(
                "({state}, {queue}{}) WHERE {state} IN ({})",
                inner.id.quoted(),
                state_list(given_up)
            );
            add("Index of rows that have failed or are exhausted.", "given_up", definition);
        }
        if let (Retention::KeepFor(_), Some(settled)) = (inner.retention, &inner.settled_at) {
            let settled = settled.quoted();
            let definition = format!("({settled}) WHERE {settled} IS NOT NULL");
            add("Index of settled rows by time, for the purge.", "settled", definition);
        }
        indexes
    }

    /// Builds the predicate of the index of taken rows. `None` if the table has no lease columns.
    fn taken_rows(&self) -> Option<String> {
        let Tracking::Columns { owner, .. } = &self.inner.tracking else { return None };
        Some(match &self.inner.states.taken {
            Some(taken) => format!("{} IN ({})", self.inner.state.quoted(), literal(taken.as_str())),
            None => format!("{} IS NOT NULL", owner.quoted()),
        })
    }

    pub(super) fn function(&self) -> Vec<MigrationStep> {
        let Tracking::Columns { epoch, .. } = &self.inner.tracking else { return Vec::new() };
        let what = "Function for the effective state of a row, for claims and views.";
        let function = StateFunction::of(self.spec);
        let mut steps = vec![MigrationStep::only_if(what, &function.is_missing, &function.create)];
        if let Some(epochs) = &self.inner.epoch_sequence {
            let from = Some((self.spec.table(), epoch));
            steps.push(MigrationStep::sequence("Epochs are numbers of a sequence.", epochs, from));
        }
        steps
    }

    fn side_table(&self) -> Vec<MigrationStep> {
        let mut steps = self.side_table_alone();
        if let (Tracking::Side(side), Some(index)) = (&self.inner.tracking, self.side_index()) {
            steps.extend(MigrationStep::index(index.what, side, &index.name, false, &index.definition));
        }
        steps
    }

    /// Makes the side table, and a sequence of epochs if the table has no column for them. Leaves out the index.
    pub(super) fn side_table_alone(&self) -> Vec<MigrationStep> {
        let Tracking::Side(side) = &self.inner.tracking else {
            return match (&self.inner.tracking, &self.inner.epoch_sequence) {
                (Tracking::None, Some(epochs)) => {
                    vec![MigrationStep::sequence("Epochs are numbers of a sequence.", epochs, None)]
                }
                _ => Vec::new(),
            };
        };
        let create = format!(
            "CREATE TABLE IF NOT EXISTS {} (\n  tab text NOT NULL,\n  queue text NOT NULL DEFAULT '',\n  \
             id text NOT NULL,\n  owner {},\n  epoch bigint NOT NULL,\n  lease_until timestamptz NOT NULL,\n  \
             taken_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),\n  PRIMARY KEY (tab, queue, id)\n) USING heap",
            side.quoted(),
            self.inner.owner_sql()
        );
        let what = "Side table of leases, with one row for each taken row.";
        let epochs = side_epochs(side);
        vec![
            MigrationStep::new(what, create),
            MigrationStep::sequence(
                "Epochs are numbers of a sequence.",
                self.inner.epoch_sequence.as_ref().unwrap_or(&epochs),
                None,
            ),
        ]
    }

    /// Returns the index of the side table.
    pub(super) fn side_index(&self) -> Option<Index> {
        let Tracking::Side(side) = &self.inner.tracking else { return None };
        let name = derived(&[side.name(), "until"]);
        Some(Index {
            what: "Index of leases by their end.",
            name,
            definition: "(tab, lease_until)".to_owned(),
        })
    }
}

/// The function for the effective state of a row. It is declared volatile, because a lease can end during a statement,
/// and the server inlines a function only if its declaration is true.
pub(super) struct StateFunction {
    /// An SQL expression that is true if the function is missing or belongs to another spec.
    pub(super) is_missing: String,
    create: String,
}

impl StateFunction {
    pub(super) fn of(spec: &ClaimSpec) -> Self {
        let (inner, name) = (&*spec.inner, state_function(spec));
        let kind = inner.state_sql();
        let now = "pg_catalog.clock_timestamp()";
        let (equals, ended, runs) =
            ("OPERATOR(pg_catalog.=)", "OPERATOR(pg_catalog.<=)", "OPERATOR(pg_catalog.>)");
        let typed = |state: &State| format!("{}::{kind}", literal(state.as_str()));
        let body = match &inner.states.taken {
            Some(taken) => format!(
                "SELECT CASE WHEN $1 {equals} {} AND $2 {ended} {now} THEN {} ELSE $1 END",
                typed(taken),
                typed(inner.states.home())
            ),
            None => {
                let home: Vec<String> = inner
                    .states
                    .takeable
                    .iter()
                    .map(|state| format!("$1 {equals} {}", typed(state)))
                    .collect();
                format!("SELECT CASE WHEN $2 {runs} {now} AND ({}) THEN NULL ELSE $1 END", home.join(" OR "))
            }
        };
        let arguments = format!("({kind}, pg_catalog.timestamptz)");
        let is_missing = format!(
            "NOT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure({}) AND prosrc = {} \
             AND provolatile = 'v')",
            literal(&format!("{}{arguments}", name.quoted())),
            literal(&body)
        );
        let tag = dollar_tag(&body);
        let create = format!(
            "CREATE OR REPLACE FUNCTION {}{arguments} RETURNS {kind}\n      \
             LANGUAGE sql VOLATILE PARALLEL SAFE AS {tag}{body}{tag}",
            name.quoted()
        );
        Self { is_missing, create }
    }
}

/// Suggests autovacuum settings for a table in which many rows change.
pub(super) fn suggestion(spec: &ClaimSpec) -> String {
    format!(
        "ALTER TABLE {} SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.02, \
         autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)",
        spec.table().quoted()
    )
}
