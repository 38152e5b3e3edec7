//! A table through which one process hands work to another: recorders insert, workers claim.

mod builder;
mod kind;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, query_scalar};

pub use self::builder::{ColumnType, HandOffBuilder};
pub use self::kind::{KindName, RequestKind, RequestState};
use crate::error::ClaimError;
use crate::id::{IdType, RowId};
use crate::name::{Column, Table, literal};
use crate::spec::migration_tools::{Step, closed_set, derived, index, quote};
use crate::spec::{ClaimSpec, Migration};

const RECORD: &str = "record a change";

/// A hand-off table: what is to be done with which entity, in the order in which it was recorded.
///
/// Its rows have a number drawn from a sequence, a state of a closed set (`new`, `in-progress`, `complete`,
/// `error`), a kind of a closed set, the entity that they are about and columns of yours. Kinds that exist
/// once per entity are kept so by the database. All outstanding rows of an entity are one claim.
///
/// ```
/// use leasehold_claim::{ColumnType, HandOff, IdType, RequestKind, Table};
///
/// let requests = HandOff::<RequestKind>::builder(Table::new("request")?)
///     .entity("entity_id", IdType::Int)
///     .column("document", ColumnType::Jsonb)
///     .attempts(3)
///     .build()?;
/// println!("{}", requests.migration());
/// # assert_eq!(requests.spec().table().name(), "request");
/// # Ok::<(), leasehold_claim::ClaimError>(())
/// ```
pub struct HandOff<K: KindName = RequestKind> {
    pub(super) spec: ClaimSpec,
    pub(super) entity: (Column, IdType),
    pub(super) columns: Vec<builder::Business>,
    pub(super) attempts: Option<u32>,
    pub(super) kinds: PhantomData<fn(K)>,
}

impl<K: KindName> HandOff<K> {
    /// Begins the description of `table`.
    pub fn builder(table: Table) -> HandOffBuilder<K> {
        HandOffBuilder::new(table)
    }

    /// How its rows are claimed.
    #[must_use]
    pub fn spec(&self) -> &ClaimSpec {
        &self.spec
    }

    /// The SQL that makes the table, and brings one that is there up to date. It may be run again.
    #[must_use]
    pub fn migration(&self) -> Migration {
        let migration = self.spec.migration().after(self.table());
        match self.attempts {
            Some(count) => migration.attempts(count),
            None => migration,
        }
    }

    /// Makes the table, or brings it up to date.
    ///
    /// # Errors
    ///
    /// As [`Migration::apply`].
    ///
    /// # Cancel safety
    ///
    /// As [`Migration::apply`].
    pub async fn create(&self, pool: &PgPool) -> Result<(), ClaimError> {
        self.migration().apply(pool).await
    }

    /// Records that there is work of `kind` for `entity`, and wakes workers: both take effect when the
    /// transaction that `connection` is in commits, or at once where there is none. `work` is an object with
    /// the columns of yours; those that it does not name get their default. Answers the row's number.
    ///
    /// # Errors
    ///
    /// [`Duplicate`](ClaimError::Duplicate) when the entity has a row of a kind that exists once; the
    /// transaction can go on. [`InvalidSpec`](ClaimError::InvalidSpec) when `work` is no object or names a
    /// column that the table does not have, or `entity` is of another type. Else what the server answers.
    ///
    /// # Cancel safety
    ///
    /// Outside of a transaction it may have been recorded. Inside of one, the driver's state of `connection`
    /// is unknown: drop the transaction.
    pub async fn record(
        &self,
        connection: &mut PgConnection,
        kind: K,
        entity: impl Into<RowId>,
        work: &impl Serialize,
    ) -> Result<i64, ClaimError> {
        let entity = entity.into();
        if entity.kind() != self.entity.1 {
            return Err(ClaimError::spec(format!(
                "the entity {entity} is no {}, as column {} of table {} is",
                self.entity.1.sql(),
                self.entity.0,
                self.spec.table()
            )));
        }
        let work = serde_json::to_value(work)
            .map_err(|error| ClaimError::spec(format!("the work cannot be written as JSON: {error}")))?;
        let sql = self.insert(kind, &work)?;
        // One statement, so that also without a transaction both happen or none.
        let made = query_scalar::<_, i64>(AssertSqlSafe(sql))
            .bind(kind.name())
            .bind(entity.to_string())
            .bind(work.to_string())
            .fetch_optional(connection)
            .await
            .map_err(|error| ClaimError::of(error, RECORD))?;
        made.ok_or_else(|| ClaimError::Duplicate {
            constraint: Arc::from(self.once(kind)),
            // The server would fail the caller's transaction if it were to say so itself.
            source: sqlx::Error::RowNotFound,
        })
    }

    fn insert(&self, kind: K, work: &Value) -> Result<String, ClaimError> {
        let table = self.spec.table();
        let Value::Object(work) = work else {
            return Err(ClaimError::spec(format!(
                "the work for table {table} is no object; its fields are the columns of the table"
            )));
        };
        let unknown = work.keys().find(|key| !self.columns.iter().any(|own| own.column.as_str() == *key));
        if let Some(key) = unknown {
            return Err(ClaimError::spec(format!(
                "the work has a field {key:?}, but table {table} no such column; add it to the hand-off"
            )));
        }
        let given = self.columns.iter().filter(|own| work.contains_key(own.column.as_str()));
        let given: Vec<String> = given.map(|own| own.column.quoted()).collect();
        let (into, from): (String, String) = (
            given.iter().map(|column| format!(", {column}")).collect(),
            given.iter().map(|column| format!(", r.{column}")).collect(),
        );
        let (quoted, entity) = (table.quoted(), self.entity.0.quoted());
        let conflict = if kind.is_once_per_entity() {
            format!("ON CONFLICT ({entity}) WHERE kind = {} DO NOTHING ", literal(kind.name()))
        } else {
            String::new()
        };
        Ok(format!(
            "WITH made AS (INSERT INTO {quoted} (kind, {entity}{into}) \
             SELECT $1::pg_catalog.text, ($2::pg_catalog.text)::{}{from} \
             FROM pg_catalog.jsonb_populate_record(NULL::{quoted}, ($3::pg_catalog.text)::pg_catalog.jsonb) AS r \
             {conflict}RETURNING id), \
             woken AS MATERIALIZED (SELECT id, pg_catalog.pg_notify({}, '') FROM made) SELECT id FROM woken",
            self.entity.1.sql(),
            literal(self.spec.channel())
        ))
    }

    /// The index that keeps `kind` once per entity.
    fn once(&self, kind: K) -> String {
        derived(&[self.spec.table().name(), "one", kind.name()])
    }

    /// The statements that make the table, before the migration of its spec.
    fn table(&self) -> Vec<Step> {
        let table = self.spec.table();
        let first = K::ALL.first().map_or("", |kind| kind.name());
        let own: String = self
            .columns
            .iter()
            .map(|own| format!("  {} {},\n", own.column.quoted(), own.definition()))
            .collect();
        let create = format!(
            "CREATE TABLE IF NOT EXISTS {} (\n  id bigint GENERATED ALWAYS AS IDENTITY,\n  \
             status text NOT NULL DEFAULT 'new',\n  kind text NOT NULL DEFAULT {},\n  {} {} NOT NULL,\n{own}  \
             created_at timestamptz NOT NULL DEFAULT pg_catalog.now(),\n  CONSTRAINT {} PRIMARY KEY (id)\n) USING heap",
            table.quoted(),
            literal(first),
            self.entity.0.quoted(),
            self.entity.1.sql(),
            quote(&derived(&[table.name(), "pkey"])),
        );
        let missing = format!("pg_catalog.to_regclass({}) IS NULL", literal(&table.quoted()));
        let mut steps = vec![Step::only_if(
            "Work that recorders hand to workers, in order of its numbers.",
            &missing,
            &create,
        )];
        let names: Vec<&str> = K::ALL.iter().map(|kind| kind.name()).collect();
        let name = derived(&[table.name(), "kind", "kinds"]);
        let kind = Column::known("kind");
        steps.extend(closed_set("The kinds of work are a closed set.", table, &kind, &name, &names));
        for kind in K::ALL.iter().filter(|kind| kind.is_once_per_entity()) {
            let definition = format!("({}) WHERE kind = {}", self.entity.0.quoted(), literal(kind.name()));
            let what = "An entity has at most one row of this kind.";
            steps.extend(index(what, table, &self.once(*kind), true, &definition));
        }
        steps
    }
}

impl<K: KindName> Clone for HandOff<K> {
    fn clone(&self) -> Self {
        Self {
            spec: self.spec.clone(),
            entity: self.entity.clone(),
            columns: self.columns.clone(),
            attempts: self.attempts,
            kinds: PhantomData,
        }
    }
}

impl<K: KindName> fmt::Debug for HandOff<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandOff")
            .field("spec", &self.spec)
            .field("columns", &self.columns)
            .finish_non_exhaustive()
    }
}

impl<K: KindName> fmt::Display for HandOff<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hand-off through {}", self.spec.table())
    }
}
