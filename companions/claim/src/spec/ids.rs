//! Keys of rows and owners of claims.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::error::ClaimError;

/// The type of the column that identifies a row.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IdType {
    /// `smallint`, `integer` or `bigint`.
    Int,
    /// `uuid`.
    Uuid,
    /// `text` or `varchar`.
    Text,
}

impl IdType {
    /// Returns the server's name for the widest column type of this kind.
    #[doc(hidden)]
    pub const fn sql(self) -> &'static str {
        match self {
            Self::Int => "bigint",
            Self::Uuid => "uuid",
            Self::Text => "text",
        }
    }
}

/// The value that identifies a row.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowId {
    /// The id in a `smallint`, `integer` or `bigint` column.
    Int(i64),
    /// The id in a `uuid` column.
    Uuid(Uuid),
    /// The id in a `text` or `varchar` column.
    Text(Arc<str>),
}

impl RowId {
    /// Parses the server's text form of an id of type `kind`.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if `text` is not of that type, because the column has another.
    pub fn parse(kind: IdType, text: &str) -> Result<Self, ClaimError> {
        let parsed = match kind {
            IdType::Int => text.parse().ok().map(Self::Int),
            IdType::Uuid => text.parse().ok().map(Self::Uuid),
            IdType::Text => Some(Self::Text(text.into())),
        };
        parsed.ok_or_else(|| {
            ClaimError::spec(format!("the id {text:?} is no {}; name the type of the id column", kind.sql()))
        })
    }

    /// Returns the type of the id.
    #[must_use]
    pub const fn kind(&self) -> IdType {
        match self {
            Self::Int(_) => IdType::Int,
            Self::Uuid(_) => IdType::Uuid,
            Self::Text(_) => IdType::Text,
        }
    }
}

impl RowId {
    /// Returns the text of a text id.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Int(_) | Self::Uuid(_) => None,
        }
    }
}

impl fmt::Display for RowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(id) => id.fmt(f),
            Self::Uuid(id) => id.fmt(f),
            Self::Text(id) => id.fmt(f),
        }
    }
}

impl From<i64> for RowId {
    fn from(id: i64) -> Self {
        Self::Int(id)
    }
}

impl From<i32> for RowId {
    fn from(id: i32) -> Self {
        Self::Int(id.into())
    }
}

impl From<Uuid> for RowId {
    fn from(id: Uuid) -> Self {
        Self::Uuid(id)
    }
}

impl From<&str> for RowId {
    fn from(id: &str) -> Self {
        Self::Text(id.into())
    }
}

impl From<String> for RowId {
    fn from(id: String) -> Self {
        Self::Text(id.into())
    }
}

/// The key of a row: its id, and its queue if the table has queues, because the same id can be in two queues.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(clippy::exhaustive_structs)] // Exhaustive, because these fields are what identifies a row.
pub struct RowKey {
    /// The queue, or `None` if the table has no queues.
    pub queue: Option<Arc<str>>,
    /// The id within the queue.
    pub id: RowId,
}

impl RowKey {
    /// Builds the key of row `id` in a table without queues.
    pub fn new(id: impl Into<RowId>) -> Self {
        Self { queue: None, id: id.into() }
    }

    /// Builds the key of row `id` in `queue`.
    pub fn queued(queue: impl Into<Arc<str>>, id: impl Into<RowId>) -> Self {
        Self { queue: Some(queue.into()), id: id.into() }
    }
}

impl fmt::Display for RowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.queue {
            Some(queue) => write!(f, "{} in queue {queue}", self.id),
            None => self.id.fmt(f),
        }
    }
}

/// The owner of a claim. Each claim gets a new one, so two claims of one process have different owners.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OwnerToken {
    /// A random owner, in a `uuid` column.
    Uuid(Uuid),
    /// The next number of a sequence of the database, in a `bigint` column.
    Number(i64),
}

impl fmt::Display for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(owner) => owner.fmt(f),
            Self::Number(owner) => owner.fmt(f),
        }
    }
}
