//! Errors of idempotency keys.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{outcome_unknown, sqlstate, store_error};
use leasehold_table_schema::server_message;

/// The reason why beginning a key or recording its request failed.
///
/// After each of these errors it is safe to begin again with the same key and fingerprint once the cause is removed.
/// Committed work is replayed, uncommitted work is done again.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum IdempotencyError {
    /// The scope or key is invalid. The text gives the reason.
    #[error("{0}")]
    InvalidIdent(String),

    /// Another transaction conflicted (40001, 40P01). Nothing was done. Run the whole transaction again.
    #[error("another transaction came in between, nothing was done: run the transaction again")]
    Retry {
        /// The server's error.
        source: sqlx::Error,
    },

    /// The server refused the commit because a constraint or trigger checked at the commit failed. Nothing was done.
    /// The same request fails again until the rows or the request change.
    #[error(
        "the server refused to commit the effects, nothing was done: {}; change the request or the rows that it refers to, or check the constraint before, by SET CONSTRAINTS ALL IMMEDIATE",
        server_message(source)
    )]
    Refused {
        /// The server's error.
        source: sqlx::Error,
    },

    /// A statement under the key failed and its error was caught, so the server had aborted the transaction (25P02).
    /// Nothing was done. The same code fails again.
    #[error(
        "a statement under the key failed and its error was caught, so that the server had ended the transaction, nothing was done: return the error, or begin a savepoint before a statement that may fail, or say ON CONFLICT"
    )]
    Aborted {
        /// The server's error.
        source: sqlx::Error,
    },

    /// This transaction has begun the key before and not finished it. Call `finish` once, on the value that the first
    /// begin returned.
    #[error("this transaction has begun the key before; finish it where it was begun")]
    Unfinished,

    /// The number of keys in flight in this process has reached
    /// [`max_in_flight`](crate::PgIdempotency::max_in_flight). Nothing was done. Try again later.
    #[error("{limit} keys are in flight in this process, which is its limit; try again later")]
    Overloaded {
        /// The limit.
        limit: usize,
    },

    /// The response exceeds [`max_body`](crate::PgIdempotency::max_body). The effects are rolled back.
    #[error(
        "the response to be stored has {size} bytes, {limit} are allowed; store a reference to it instead"
    )]
    TooLarge {
        /// Size of body and headers, in bytes.
        size: usize,
        /// The limit, in bytes.
        limit: usize,
    },

    /// The key's row, or a phase's value, is not in the format of this version. Another version or a manual statement
    /// wrote it. Nothing was done.
    #[error(
        "the record of this key cannot be read: {0}; check which other program writes to the table, or purge the record"
    )]
    Unreadable(String),

    /// The store failed. [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) means that the commit was not confirmed. Begin
    /// again with the same key: a replay shows that it was committed.
    #[error(transparent)]
    Store(#[from] Error),
}

const COMMIT_LOST: &str = "the commit was not confirmed; begin again with the same key: a replay says that it was carried out, a fresh key that it was not";

impl IdempotencyError {
    /// Converts an error of the driver. `doing` names the failed action ("begin the key").
    pub(crate) fn of(error: sqlx::Error, doing: &str) -> Self {
        match sqlstate(&error).as_deref() {
            Some("40001" | "40P01") => Self::Retry { source: error },
            Some("25P02") => Self::Aborted { source: error },
            // Replaces the server's advice, because the command that the store's error names does not install these
            // tables.
            Some("42P01" | "3F000" | "42703") => Error::new(
                ErrorKind::SchemaMissing,
                format!("could not {doing}: the tables of idempotency keys are missing or of another version; run PgIdempotency::migrate, or the SQL of PgIdempotency::schema_sql"),
            )
            .with_source(leasehold_postgres::DriverError::new(error))
            .into(),
            _ => store_error(error, doing).into(),
        }
    }

    /// Converts the error of a commit. The commit might have been carried out.
    pub(crate) fn of_commit(error: sqlx::Error) -> Self {
        if outcome_unknown(&error) {
            return Error::new(ErrorKind::OutcomeUnknown, COMMIT_LOST)
                .with_source(leasehold_postgres::DriverError::new(error))
                .into();
        }
        match sqlstate(&error) {
            Some(state) if is_refusal(&state) => Self::Refused { source: error },
            _ => Self::of(error, "commit"),
        }
    }

    pub(crate) fn commit_silent() -> Self {
        Error::new(ErrorKind::OutcomeUnknown, COMMIT_LOST).into()
    }

    pub(crate) fn silent(doing: &str, limit: Duration) -> Self {
        Error::new(
            ErrorKind::Unavailable,
            format!("could not {doing}: no answer from the server within {limit:?}; try again"),
        )
        .into()
    }

    /// Returns whether the same call might succeed later without a change of the call or of the store's setup.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Retry { .. } | Self::Overloaded { .. } => true,
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// Returns whether the server refused the commit because of the transaction's statements: constraints, data or errors
/// of deferred triggers.
fn is_refusal(state: &str) -> bool {
    ["22", "23", "27", "2F", "38", "39", "44", "P0"].iter().any(|class| state.starts_with(class))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_worth_a_retry() {
        assert!(IdempotencyError::Retry { source: sqlx::Error::PoolTimedOut }.is_retryable());
        assert!(IdempotencyError::Overloaded { limit: 1 }.is_retryable());
        assert!(IdempotencyError::of(sqlx::Error::PoolTimedOut, "begin").is_retryable());
        assert!(IdempotencyError::commit_silent().is_retryable(), "by the same key, it is safe");
        assert!(!IdempotencyError::Unfinished.is_retryable());
        assert!(!IdempotencyError::Refused { source: sqlx::Error::PoolTimedOut }.is_retryable());
        assert!(!IdempotencyError::Aborted { source: sqlx::Error::PoolTimedOut }.is_retryable());
        assert!(!IdempotencyError::TooLarge { size: 2, limit: 1 }.is_retryable());
    }

    #[test]
    fn a_commit_that_broke_is_in_doubt_and_one_that_was_refused_is_not() {
        let kind = |error| match IdempotencyError::of_commit(error) {
            IdempotencyError::Store(error) => error.kind(),
            other => panic!("{other}"),
        };
        let reset = sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into());
        assert_eq!(kind(reset), ErrorKind::OutcomeUnknown);
        assert_eq!(kind(sqlx::Error::PoolTimedOut), ErrorKind::Unavailable);
    }
}
