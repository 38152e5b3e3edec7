//! Rows of a table in memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use leasehold_table_schema::Column;
use serde_json::{Map, Value};

use super::time::{self, Micros};
use crate::error::ClaimError;
use crate::spec::ids::{IdType, OwnerToken, RowId, RowKey};
use crate::spec::states::{State, StateType};
use crate::spec::{Inner, Tracking};

/// A row of [`MemoryClaims`](crate::MemoryClaims): either a row to insert, or a copy of an inserted row.
///
/// ```
/// use leasehold_claim::MemoryRow;
///
/// let row = MemoryRow::new(1).with_group("order 7").with_attempts(3).with_column("document", "a.pdf".into());
/// assert_eq!(row.attempts_left(), Some(3));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryRow {
    pub(super) key: RowKey,
    /// The state. `None` only before the insert.
    pub(super) state: Option<State>,
    pub(super) group: Value,
    pub(super) kind: Option<Arc<str>>,
    pub(super) attempts: Option<i32>,
    pub(super) owner: Option<OwnerToken>,
    pub(super) epoch: i64,
    pub(super) until: Option<Micros>,
    pub(super) taken_at: Option<Micros>,
    pub(super) settled_at: Option<Micros>,
    pub(super) settled_by: Option<String>,
    pub(super) ready_at: Option<Micros>,
    pub(super) timeout: Option<i32>,
    pub(super) error: Option<String>,
    /// Values of the columns that the spec uses only for order or work.
    pub(super) columns: BTreeMap<String, Value>,
}

impl MemoryRow {
    /// Builds a row with this id, without a group and with unlimited attempts. On insert it gets the state of rows that
    /// were put back, unless [`with_state`](Self::with_state) sets another.
    pub fn new(id: impl Into<RowId>) -> Self {
        Self {
            key: RowKey::new(id),
            state: None,
            group: Value::Null,
            kind: None,
            attempts: None,
            owner: None,
            epoch: 0,
            until: None,
            taken_at: None,
            settled_at: None,
            settled_by: None,
            ready_at: None,
            timeout: None,
            error: None,
            columns: BTreeMap::new(),
        }
    }

    /// Sets the queue. Required if the spec has queues.
    #[must_use]
    pub fn with_queue(mut self, queue: impl Into<Arc<str>>) -> Self {
        self.key.queue = Some(queue.into());
        self
    }

    /// Sets the state.
    #[must_use]
    pub fn with_state(mut self, state: impl Into<State>) -> Self {
        self.state = Some(state.into());
        self
    }

    /// Sets the group.
    #[must_use]
    pub fn with_group(mut self, group: impl Into<Value>) -> Self {
        self.group = group.into();
        self
    }

    /// Sets the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: impl Into<Arc<str>>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Sets the number of attempts left.
    #[must_use]
    pub fn with_attempts(mut self, left: i32) -> Self {
        self.attempts = Some(left);
        self
    }

    /// Sets the time before which the row is not taken.
    #[must_use]
    pub fn with_ready_at(mut self, time: SystemTime) -> Self {
        self.ready_at = Some(time::micros(time));
        self
    }

    /// Sets the row's own lease, in seconds.
    #[must_use]
    pub fn with_timeout_seconds(mut self, seconds: i32) -> Self {
        self.timeout = Some(seconds);
        self
    }

    /// Sets a column that the spec uses only for order or work.
    #[must_use]
    pub fn with_column(mut self, name: impl Into<String>, value: Value) -> Self {
        self.columns.insert(name.into(), value);
        self
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &RowKey {
        &self.key
    }

    /// Returns the state, or `None` before the insert if none was set.
    #[must_use]
    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// Returns the group as text.
    #[must_use]
    pub fn group(&self) -> Option<Arc<str>> {
        match &self.group {
            Value::Null => None,
            Value::String(text) => Some(text.as_str().into()),
            other => Some(other.to_string().into()),
        }
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        self.kind.as_deref()
    }

    /// Returns the number of attempts left, or `None` without a limit.
    #[must_use]
    pub fn attempts_left(&self) -> Option<i32> {
        self.attempts
    }

    /// Returns the owner.
    #[must_use]
    pub fn owner(&self) -> Option<OwnerToken> {
        self.owner
    }

    /// Returns the epoch, or 0 without one.
    #[must_use]
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Returns the end of the lease.
    #[must_use]
    pub fn lease_until(&self) -> Option<SystemTime> {
        self.until.map(time::time)
    }

    /// Returns the time at which the row was taken.
    #[must_use]
    pub fn taken_at(&self) -> Option<SystemTime> {
        self.taken_at.map(time::time)
    }

    /// Returns the time at which the row was settled.
    #[must_use]
    pub fn settled_at(&self) -> Option<SystemTime> {
        self.settled_at.map(time::time)
    }

    /// Returns the owner of the claim that settled the row last, if the spec has a column for it.
    #[must_use]
    pub fn settled_by(&self) -> Option<&str> {
        self.settled_by.as_deref()
    }

    /// Returns the time before which the row is not taken.
    #[must_use]
    pub fn ready_at(&self) -> Option<SystemTime> {
        self.ready_at.map(time::time)
    }

    /// Returns the message of the last failure.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Returns a column that the spec uses only for order or work.
    #[must_use]
    pub fn column(&self, name: &str) -> Option<&Value> {
        self.columns.get(name)
    }

    /// Builds a row from an object with a value for each column name.
    pub(super) fn from_columns(spec: &Inner, columns: Map<String, Value>) -> Result<Self, ClaimError> {
        let name = spec.id.as_str();
        let id =
            columns.get(name).ok_or_else(|| ClaimError::spec(format!("the row has no column {name}")))?;
        let mut row = Self::new(read_id(spec.id_type, id)?);
        for (name, value) in columns.into_iter().filter(|(name, _)| *name != spec.id.as_str()) {
            row.set(spec, &name, value)?;
        }
        Ok(row)
    }

    /// Returns the value of any column, in the form that the server has in JSON.
    pub(super) fn get(&self, spec: &Inner, column: &Column) -> Value {
        let name = column.as_str();
        match Meaning::of(spec, name) {
            Meaning::Id => id_value(&self.key.id),
            Meaning::Queue => text_value(self.key.queue.as_deref()),
            Meaning::State => state_value(spec, self.state.as_ref()),
            Meaning::Group => self.group.clone(),
            Meaning::Kind => text_value(self.kind.as_deref()),
            Meaning::Attempts => self.attempts.into(),
            Meaning::Owner => match self.owner {
                Some(OwnerToken::Number(owner)) => owner.into(),
                owner => text_value(owner.map(|owner| owner.to_string()).as_deref()),
            },
            Meaning::Epoch => self.epoch.into(),
            Meaning::Until => time_value(self.until),
            Meaning::TakenAt => time_value(self.taken_at),
            Meaning::SettledAt => time_value(self.settled_at),
            Meaning::SettledBy => text_value(self.settled_by.as_deref()),
            Meaning::ReadyAt => time_value(self.ready_at),
            Meaning::Timeout => self.timeout.into(),
            Meaning::Error => text_value(self.error.as_deref()),
            Meaning::None => self.columns.get(name).cloned().unwrap_or_default(),
        }
    }

    /// Sets any column except the id.
    pub(super) fn set(&mut self, spec: &Inner, name: &str, value: Value) -> Result<(), ClaimError> {
        let wrong = |value: &Value| ClaimError::spec(format!("{value} is no value for the column {name}"));
        match Meaning::of(spec, name) {
            Meaning::Id => {
                return Err(ClaimError::spec("the id of a row does not change; delete and insert it"));
            }
            Meaning::Queue => self.key.queue = text_of(&value).map_err(|()| wrong(&value))?.map(Arc::from),
            Meaning::State => self.state = Some(read_state(&value).ok_or_else(|| wrong(&value))?),
            Meaning::Group => self.group = value,
            Meaning::Kind => self.kind = text_of(&value).map_err(|()| wrong(&value))?.map(Arc::from),
            Meaning::Attempts => self.attempts = small(&value).map_err(|()| wrong(&value))?,
            Meaning::Owner => self.owner = read_owner(&value).map_err(|()| wrong(&value))?,
            Meaning::Epoch => {
                self.epoch = if value.is_null() { 0 } else { value.as_i64().ok_or_else(|| wrong(&value))? };
            }
            Meaning::Until => self.until = read_time(&value).map_err(|()| wrong(&value))?,
            Meaning::TakenAt => self.taken_at = read_time(&value).map_err(|()| wrong(&value))?,
            Meaning::SettledAt => self.settled_at = read_time(&value).map_err(|()| wrong(&value))?,
            Meaning::SettledBy => {
                self.settled_by = text_of(&value).map_err(|()| wrong(&value))?.map(str::to_owned);
            }
            Meaning::ReadyAt => self.ready_at = read_time(&value).map_err(|()| wrong(&value))?,
            Meaning::Timeout => self.timeout = small(&value).map_err(|()| wrong(&value))?,
            Meaning::Error => self.error = text_of(&value).map_err(|()| wrong(&value))?.map(str::to_owned),
            Meaning::None => {
                self.columns.insert(name.to_owned(), value);
            }
        }
        Ok(())
    }

    /// Checks the values of the row as constraints of the table would.
    pub(super) fn check(&mut self, spec: &Inner) -> Result<(), ClaimError> {
        if self.key.id.kind() != spec.id_type {
            return Err(ClaimError::spec(format!(
                "the id {} is not of the type that the spec names",
                self.key.id
            )));
        }
        if spec.queue.is_some() != self.key.queue.is_some() {
            let message =
                if spec.queue.is_some() { "has no queue" } else { "has a queue, and the spec none" };
            return Err(ClaimError::spec(format!("the row {} {message}", self.key)));
        }
        let state = self.state.get_or_insert_with(|| spec.states.home().clone());
        if !spec.states.all().contains(&&*state) {
            return Err(ClaimError::spec(format!(
                "the table has no state {state}; add it to the spec's `others`"
            )));
        }
        Ok(())
    }
}

/// The meaning of a column according to the spec.
enum Meaning {
    Id,
    Queue,
    State,
    Group,
    Kind,
    Attempts,
    Owner,
    Epoch,
    Until,
    TakenAt,
    SettledAt,
    SettledBy,
    ReadyAt,
    Timeout,
    Error,
    None,
}

impl Meaning {
    fn of(spec: &Inner, name: &str) -> Self {
        let is = |column: &Option<Column>| column.as_ref().is_some_and(|column| column.as_str() == name);
        if let Tracking::Columns { owner, epoch, until } = &spec.tracking {
            for (column, meaning) in [(owner, Self::Owner), (epoch, Self::Epoch), (until, Self::Until)] {
                if column.as_str() == name {
                    return meaning;
                }
            }
        }
        match name {
            name if name == spec.id.as_str() => Self::Id,
            name if name == spec.state.as_str() => Self::State,
            _ if is(&spec.queue) => Self::Queue,
            _ if is(&spec.group) => Self::Group,
            _ if is(&spec.kind) => Self::Kind,
            _ if is(&spec.attempts) => Self::Attempts,
            _ if is(&spec.taken_at) => Self::TakenAt,
            _ if is(&spec.settled_at) => Self::SettledAt,
            _ if is(&spec.settled_by) => Self::SettledBy,
            _ if is(&spec.ready_at) => Self::ReadyAt,
            _ if is(&spec.timeout) => Self::Timeout,
            _ if is(&spec.error) => Self::Error,
            _ => Self::None,
        }
    }
}

fn id_value(id: &RowId) -> Value {
    match id {
        RowId::Int(id) => (*id).into(),
        id => Value::String(id.to_string()),
    }
}

fn text_value(text: Option<&str>) -> Value {
    text.map_or(Value::Null, |text| Value::String(text.to_owned()))
}

fn time_value(time: Option<Micros>) -> Value {
    time.map_or(Value::Null, |time| Value::String(time::text(time)))
}

fn state_value(spec: &Inner, state: Option<&State>) -> Value {
    match (state, &spec.states.kind) {
        (Some(state), StateType::Boolean) => Value::Bool(state.as_str() == "true"),
        (state, _) => text_value(state.map(State::as_str)),
    }
}

fn read_id(kind: IdType, value: &Value) -> Result<RowId, ClaimError> {
    match value {
        Value::String(text) => RowId::parse(kind, text),
        value => RowId::parse(kind, &value.to_string()),
    }
}

fn read_state(value: &Value) -> Option<State> {
    match value {
        Value::String(name) => Some(State::new(name.as_str())),
        Value::Bool(state) => Some(State::new(if *state { "true" } else { "false" })),
        _ => None,
    }
}

fn read_owner(value: &Value) -> Result<Option<OwnerToken>, ()> {
    match value {
        Value::Null => Ok(None),
        Value::String(owner) => owner.parse().map(|owner| Some(OwnerToken::Uuid(owner))).map_err(drop),
        value => value.as_i64().map(|owner| Some(OwnerToken::Number(owner))).ok_or(()),
    }
}

pub(super) fn read_time(value: &Value) -> Result<Option<Micros>, ()> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => time::parse(text).map(Some).ok_or(()),
        _ => Err(()),
    }
}

fn small(value: &Value) -> Result<Option<i32>, ()> {
    match value {
        Value::Null => Ok(None),
        value => value.as_i64().and_then(|value| i32::try_from(value).ok()).map(Some).ok_or(()),
    }
}

fn text_of(value: &Value) -> Result<Option<&str>, ()> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text)),
        _ => Err(()),
    }
}
