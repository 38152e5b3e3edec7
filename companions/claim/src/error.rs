//! Errors of claims.

use std::sync::Arc;

use leasehold_postgres::{sqlstate, store_error};
use leasehold_table_schema::{TableError, server_message};
use sqlx::postgres::PgDatabaseError;

use crate::spec::ids::RowKey;
use crate::spec::states::State;

/// The reason why a claim, or a call on it, failed.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The description of the table is invalid, or does not fit the table. The text names the part and the fix.
    #[error("{0}")]
    InvalidSpec(String),

    /// The claim has lost the row. Either its lease ended and another worker claimed it, or it was changed by hand.
    /// Nothing was written. Discard or undo the work.
    #[error(
        "row {row} was taken from this claim (epoch {epoch}{}): drop what was done for it",
        describe(*current_epoch, state.as_ref())
    )]
    #[non_exhaustive]
    Superseded {
        /// The row that the claim has lost.
        row: RowKey,
        /// The epoch of the row when it was claimed.
        epoch: i64,
        /// The current epoch of the row. `None` for a missing row, and for a row without an epoch.
        current_epoch: Option<i64>,
        /// The current state of the row. `None` if the row does not exist.
        state: Option<State>,
    },

    /// The row does not exist.
    #[error("row {row} does not exist; it was deleted, or was never inserted")]
    NotFound {
        /// The row that is missing.
        row: RowKey,
    },

    /// Another transaction has locked the row, or a row that it depends on. Nothing was changed. Go on with the next
    /// row and come back.
    #[error("{what} is locked by another transaction; go on with the next row and come back")]
    #[non_exhaustive]
    Busy {
        /// The locked row or transaction, for the message.
        what: String,
    },

    /// The row already exists, according to a unique constraint or index.
    #[error("the row exists already: unique constraint {constraint}")]
    #[non_exhaustive]
    Duplicate {
        /// The name of the violated constraint or index.
        constraint: Arc<str>,
        /// The error of the server.
        source: sqlx::Error,
    },

    /// A constraint of the table does not allow the write, for example because another row now has the unique value
    /// that this row would get back. Nothing was written.
    #[error(
        "constraint {constraint} of the table does not allow to {doing}; change the row or the constraint"
    )]
    #[non_exhaustive]
    Constraint {
        /// The constraint that was violated.
        constraint: Arc<str>,
        /// The refused operation, for the message.
        doing: &'static str,
        /// The error of the server.
        source: sqlx::Error,
    },

    /// The table refuses to write the row for another reason than a constraint, for example because a trigger raised an
    /// error. Nothing was written.
    #[error(
        "the table does not allow to {doing}: {}; change the row, or what refuses it",
        server_message(source)
    )]
    #[non_exhaustive]
    Refused {
        /// The refused operation, for the message.
        doing: &'static str,
        /// The error of the server.
        source: sqlx::Error,
    },

    /// One row could not be written and is left as it is. The call went on with the other rows.
    #[error("row {row} is left alone: {source}")]
    #[non_exhaustive]
    Row {
        /// The key of the row that could not be written.
        row: RowKey,
        /// The reason.
        source: Arc<ClaimError>,
    },

    /// The spec does not allow this transition. Nothing was written.
    #[error("a row may not go from {from} to {to}; the allowed transitions are part of the spec")]
    #[non_exhaustive]
    IllegalTransition {
        /// The current state of the row.
        from: State,
        /// The requested state.
        to: State,
    },

    /// The row is not granted, because its attempts are used up. Only locks of plain tables return this error, and
    /// `top_up` gives them further attempts. Exhausted rows of claims are [listed](crate::ClaimStore::exhausted) and
    /// [requeued](crate::ClaimStore::requeue).
    #[error("row {row} has no attempts left; give it further attempts to have it tried again")]
    Exhausted {
        /// The row without attempts.
        row: RowKey,
    },

    /// A text cannot be parsed, for example because it was cut off or written by a later version.
    #[error("this is no text of {what}: {why}; pass it on as it was written")]
    #[non_exhaustive]
    Malformed {
        /// The expected kind of text, for the message.
        what: &'static str,
        /// The mistake in the text.
        why: String,
    },

    /// The spec lacks a part that the call needs. The text names the part to add.
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

    #[doc(hidden)] // Public for `leasehold-plain-tables`, which is released together with this package.
    #[must_use]
    pub fn superseded(row: RowKey, epoch: i64, current_epoch: Option<i64>, state: Option<State>) -> Self {
        Self::Superseded { row, epoch, current_epoch, state }
    }

    /// Converts the driver's error. `doing` is the attempted operation ("settle a claim").
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

    /// Returns whether the same call might succeed later without a change to the call or the table.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// Returns whether a write failed because of one row: by a constraint, a trigger, a domain or a generated column.
/// Excludes the codes about the session, the server or the whole statement, and counts every other code, because a
/// trigger can raise a code of its author's choice.
pub(crate) fn refuses_row(error: &sqlx::Error) -> bool {
    let Some(state) = sqlstate(error) else { return false };
    match state.as_str() {
        // An unreadable value comes from the statement itself, unless the error names a function as its context.
        "22P02" | "22007" => {
            let answer =
                error.as_database_error().and_then(|answer| answer.try_downcast_ref::<PgDatabaseError>());
            answer.is_some_and(|answer| answer.r#where().is_some())
        }
        // A used-up sequence is not the fault of one row.
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
