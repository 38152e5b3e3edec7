//! What can go wrong with claims.

use std::sync::Arc;

use leasehold_postgres::{sqlstate, store_error};
use leasehold_table_schema::{TableError, server_message};
use sqlx::postgres::PgDatabaseError;

use crate::spec::ids::RowKey;
use crate::spec::states::State;

/// Why a claim, or what was to be done with it, failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The description of the table cannot be used, or does not fit the table. The text says which part, and
    /// what to change.
    #[error("{0}")]
    InvalidSpec(String),

    /// The row is not this claim's any more: its lease ended and somebody else has it or has had it, or it
    /// was changed by hand. Nothing was written; drop what was done, or make it undone.
    #[error(
        "row {row} was taken from this claim (epoch {epoch}{}): drop what was done for it",
        describe(*current_epoch, state.as_ref())
    )]
    #[non_exhaustive]
    Superseded {
        /// A row that the claim has lost.
        row: RowKey,
        /// The epoch under which it was claimed.
        epoch: i64,
        /// The epoch that the row has now; `None` if the row is gone, or does not keep one.
        current_epoch: Option<i64>,
        /// The state that the row is in now; `None` if the row is gone.
        state: Option<State>,
    },

    /// There is no such row.
    #[error("there is no row {row}; it was deleted, or never was there")]
    NotFound {
        /// The row that is missing.
        row: RowKey,
    },

    /// Somebody else has the row, or another row that it depends on, locked at this moment. Nothing was
    /// changed; go on with the next, and come back.
    #[error("{what} is locked by somebody else; go on with the next row and come back")]
    #[non_exhaustive]
    Busy {
        /// What is locked.
        what: String,
    },

    /// The row is there already, according to a unique constraint or index.
    #[error("it is there already: unique constraint {constraint}")]
    #[non_exhaustive]
    Duplicate {
        /// The constraint or index that says so.
        constraint: Arc<str>,
        /// What the server said.
        source: sqlx::Error,
    },

    /// A constraint of the table does not allow what was to be written, for example because another row took
    /// the place that this row would return to. Nothing was written.
    #[error(
        "constraint {constraint} of the table does not allow to {doing}; change the row or the constraint"
    )]
    #[non_exhaustive]
    Constraint {
        /// The constraint that was violated.
        constraint: Arc<str>,
        /// What was to be done.
        doing: &'static str,
        /// What the server said.
        source: sqlx::Error,
    },

    /// The table does not allow to write the row for another reason than a constraint, for example because a trigger
    /// raised an error. Nothing was written.
    #[error(
        "the table does not allow to {doing}: {}; change the row, or what refuses it",
        server_message(source)
    )]
    #[non_exhaustive]
    Refused {
        /// What was to be done.
        doing: &'static str,
        /// What the server said.
        source: sqlx::Error,
    },

    /// One row could not be written, and is left as it is. Others were gone on with.
    #[error("row {row} is left alone: {source}")]
    #[non_exhaustive]
    Row {
        /// Which row.
        row: RowKey,
        /// Why.
        source: Arc<ClaimError>,
    },

    /// The table of transitions does not have this edge. Nothing was written.
    #[error("a row may not go from {from} to {to}; the allowed transitions are part of the spec")]
    #[non_exhaustive]
    IllegalTransition {
        /// The state that the row is in.
        from: State,
        /// The state that it was to be in.
        to: State,
    },

    /// The row has no attempts left, so that it is not granted. Only locks of plain tables fail with this error, and get further
    /// attempts by `top_up`. Exhausted rows of claims are [listed](crate::ClaimStore::exhausted) and
    /// [requeued](crate::ClaimStore::requeue).
    #[error("row {row} has no attempts left; give it further attempts to have it tried again")]
    Exhausted {
        /// The row without attempts.
        row: RowKey,
    },

    /// A text is not what it has to be: cut off, for example, or written by a later version.
    #[error("this is no text of {what}: {why}; pass it on as it was written")]
    #[non_exhaustive]
    Malformed {
        /// What it has to be the text of.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },

    /// The spec does not have what was asked for; the text says what to add to it.
    #[error("{0}")]
    Unsupported(String),

    /// The store failed.
    #[error(transparent)]
    Store(#[from] leasehold_api::Error),
}

impl From<TableError> for ClaimError {
    fn from(error: TableError) -> Self {
        match error {
            TableError::Statement { doing, source, .. } => Self::of(source, doing),
            TableError::Store(error) => Self::Store(error),
            other => Self::InvalidSpec(other.to_string()),
        }
    }
}

impl ClaimError {
    pub(crate) fn spec(message: impl Into<String>) -> Self {
        Self::InvalidSpec(message.into())
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::Unsupported(message.into())
    }

    #[doc(hidden)] // For `leasehold-plain-tables`, which is released together with this package.
    #[must_use]
    pub fn superseded(row: RowKey, epoch: i64, current_epoch: Option<i64>, state: Option<State>) -> Self {
        Self::Superseded { row, epoch, current_epoch, state }
    }

    /// From the driver's error, while trying to `doing` ("settle a claim").
    pub fn of(error: sqlx::Error, doing: &'static str) -> Self {
        let constraint = error.as_database_error().and_then(|answer| answer.constraint()).map(Arc::from);
        match (sqlstate(&error).as_deref(), constraint) {
            (Some("23505"), Some(constraint)) => Self::Duplicate { constraint, source: error },
            (Some("23502" | "23503" | "23514" | "23P01"), Some(constraint)) => {
                Self::Constraint { constraint, doing, source: error }
            }
            (Some("55P03"), _) => Self::Busy { what: "the row".to_owned() },
            _ if refuses_row(&error) => Self::Refused { doing, source: error },
            _ => Self::Store(store_error(error, doing)),
        }
    }

    /// Whether the same call may succeed later without anybody changing the call or the table.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// Whether a statement that writes rows gets this answer because of one of them: from a constraint, a trigger, a domain or a
/// generated column. What is left out says something of the session, the server or the statement as a whole. A trigger
/// may raise a code of its own.
pub(crate) fn refuses_row(error: &sqlx::Error) -> bool {
    let Some(state) = sqlstate(error) else { return false };
    match state.as_str() {
        // Values that cannot be read: the statement's own, unless a function was at it.
        "22P02" | "22007" => {
            let answer =
                error.as_database_error().and_then(|answer| answer.try_downcast_ref::<PgDatabaseError>());
            answer.is_some_and(|answer| answer.r#where().is_some())
        }
        // A sequence is used up.
        "2200H" => false,
        state => !matches!(
            state.get(..2),
            None | Some(
                "00" | "01"
                    | "02"
                    | "03"
                    | "08"
                    | "0A"
                    | "0L"
                    | "0P"
                    | "25"
                    | "26"
                    | "28"
                    | "2D"
                    | "34"
                    | "3B"
                    | "3D"
                    | "3F"
                    | "40"
                    | "42"
                    | "53"
                    | "54"
                    | "55"
                    | "57"
                    | "58"
                    | "72"
                    | "F0"
                    | "HV"
                    | "XX"
            )
        ),
    }
}

fn describe(current: Option<i64>, state: Option<&State>) -> String {
    match (current, state) {
        (_, None) => ", the row is gone".to_owned(),
        (Some(epoch), Some(state)) => format!(", now {epoch}, state {state}"),
        (None, Some(state)) => format!(", state {state}"),
    }
}
