//! Putting a hand-off together.

use std::marker::PhantomData;

use super::{HandOff, KindName, RequestState};
use crate::error::ClaimError;
use crate::id::IdType;
use crate::name::{Column, Sql, Table};
use crate::spec::{ClaimSpec, Retention, Unmet};
use crate::state::{State, States};

/// The type of a column of yours.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ColumnType {
    /// `boolean`.
    Boolean,
    /// `integer`.
    Integer,
    /// `bigint`.
    Bigint,
    /// `double precision`.
    Double,
    /// `numeric`.
    Numeric,
    /// `text`.
    Text,
    /// `uuid`.
    Uuid,
    /// `date`.
    Date,
    /// `timestamptz`.
    Timestamptz,
    /// `jsonb`.
    Jsonb,
    /// `bytea`; as JSON a text of the form `\x00ff`.
    Bytea,
    /// Any other, with defaults and constraints if need be, written as SQL: `text[] DEFAULT '{}'`.
    Trusted(Sql),
}

impl ColumnType {
    fn sql(&self) -> &str {
        match self {
            Self::Boolean => "boolean",
            Self::Integer => "integer",
            Self::Bigint => "bigint",
            Self::Double => "double precision",
            Self::Numeric => "numeric",
            Self::Text => "text",
            Self::Uuid => "uuid",
            Self::Date => "date",
            Self::Timestamptz => "timestamptz",
            Self::Jsonb => "jsonb",
            Self::Bytea => "bytea",
            Self::Trusted(sql) => sql.as_str(),
        }
    }
}

/// A column of the application.
#[derive(Clone, Debug)]
pub(crate) struct Business {
    pub(super) column: Column,
    kind: ColumnType,
    required: bool,
}

impl Business {
    pub(super) fn definition(&self) -> String {
        format!("{}{}", self.kind.sql(), if self.required { " NOT NULL" } else { "" })
    }
}

/// A hand-off that is being put together. Setters never fail: [`build`](Self::build) names the first mistake.
#[derive(Debug)]
#[must_use = "call `build`"]
pub struct HandOffBuilder<K: KindName> {
    table: Table,
    entity: Result<(Column, IdType), ClaimError>,
    columns: Vec<Result<Business, ClaimError>>,
    attempts: Option<u32>,
    failed: Unmet,
    missing: Unmet,
    retention: Retention,
    epochs: Option<Table>,
    kinds: PhantomData<fn(K)>,
}

impl<K: KindName> HandOffBuilder<K> {
    pub(super) fn new(table: Table) -> Self {
        Self {
            table,
            entity: Ok((Column::known("entity_id"), IdType::Int)),
            columns: Vec::new(),
            attempts: None,
            failed: Unmet::Block,
            missing: Unmet::Block,
            retention: Retention::KeepAll,
            epochs: None,
            kinds: PhantomData,
        }
    }

    /// The column that says which entity a row is about. By default `entity_id`, a number.
    pub fn entity(mut self, column: &str, kind: IdType) -> Self {
        self.entity = Column::new(column).map(|column| (column, kind));
        self
    }

    /// A column of yours that may be empty.
    pub fn column(self, column: &str, kind: ColumnType) -> Self {
        self.business(column, kind, false)
    }

    /// A column of yours that may not be empty.
    pub fn required(self, column: &str, kind: ColumnType) -> Self {
        self.business(column, kind, true)
    }

    fn business(mut self, column: &str, kind: ColumnType, required: bool) -> Self {
        self.columns.push(Column::new(column).map(|column| Business { column, kind, required }));
        self
    }

    /// A row is tried at most `count` times. Without it, there is no limit.
    pub fn attempts(mut self, count: u32) -> Self {
        self.attempts = Some(count);
        self
    }

    /// What becomes of rows that wait for one that has `failed`, or is `missing`. By default they are blocked.
    pub fn unmet(mut self, failed: Unmet, missing: Unmet) -> Self {
        (self.failed, self.missing) = (failed, missing);
        self
    }

    /// How long settled rows stay; by default for ever.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Epochs are numbers of `sequence`, see [`ClaimSpecBuilder`](crate::ClaimSpecBuilder::epoch_sequence).
    pub fn epoch_sequence(mut self, sequence: Table) -> Self {
        self.epochs = Some(sequence);
        self
    }

    /// The hand-off.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) naming the first mistake: a name that cannot be one, a column
    /// that the table has already, no kinds.
    pub fn build(self) -> Result<HandOff<K>, ClaimError> {
        let (table, entity) = (self.table, self.entity?);
        let columns = self.columns.into_iter().collect::<Result<Vec<_>, _>>()?;
        let wrong = |message: String| Err(ClaimError::spec(format!("hand-off {table}: {message}")));
        if K::ALL.is_empty() {
            return wrong("name at least one kind".to_owned());
        }
        for (at, kind) in K::ALL.iter().enumerate() {
            let name = kind.name();
            if name.contains('\0') || K::ALL[..at].iter().any(|other| other.name() == name) {
                return wrong(format!("the kind {name:?} is there twice, or contains NUL"));
            }
        }
        let mut taken = vec![
            "id",
            "status",
            "kind",
            "created_at",
            "owner",
            "epoch",
            "lease_until",
            "taken_at",
            "settled_at",
            "ready_at",
            "error",
            "attempts_left",
        ];
        for column in std::iter::once(&entity.0).chain(columns.iter().map(|own| &own.column)) {
            if taken.contains(&column.as_str()) {
                return wrong(format!("the table has a column {column} already; choose another name"));
            }
            taken.push(column.as_str());
        }
        let work = columns.iter().map(|own| own.column.as_str());
        let mut spec = ClaimSpec::builder(table)
            .id("id", IdType::Int)
            .state("status", states())
            .kind("kind")
            .group(entity.0.as_str())
            .grouped()
            .lease_columns("owner", "epoch", "lease_until")
            .taken_at("taken_at")
            .settled_at("settled_at")
            .ready_at("ready_at")
            .error("error")
            .work(std::iter::once(entity.0.as_str()).chain(work))
            .retention(self.retention);
        for kind in K::ALL {
            if let Some(on) = kind.waits_for() {
                spec = spec.waits(kind.name(), on.name(), self.failed, self.missing);
            }
        }
        if self.attempts.is_some() {
            spec = spec.attempts("attempts_left");
        }
        if let Some(epochs) = self.epochs {
            spec = spec.epoch_sequence(epochs);
        }
        Ok(HandOff { spec: spec.build()?, entity, columns, attempts: self.attempts, kinds: PhantomData })
    }
}

fn states() -> States {
    States::text([State::of(RequestState::New)], State::of(RequestState::Complete))
        .taken(State::of(RequestState::InProgress))
        .failed(State::of(RequestState::Error))
}
