//! The errors of this store, and the classification of driver errors.

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{sqlstate, store_error};

const ELSEWHERE: &str = "the statement reached another server process than the one that keeps the locks, so that they are given up: a pooler is in between; connect to the server directly";

/// Creates the error for a reply from another server process than the session's: a pooler spreads statements
/// over connections.
pub(crate) fn elsewhere() -> sqlx::Error {
    sqlx::Error::Protocol(ELSEWHERE.into())
}

/// Creates the error that reports why a session ended.
pub(crate) fn ended(failure: sqlx::Error, doing: &str) -> Error {
    match &failure {
        sqlx::Error::Protocol(text) if text == ELSEWHERE => Error::new(ErrorKind::Unavailable, ELSEWHERE),
        _ => store_error(failure, doing),
    }
}

/// Returns whether the statement was cancelled by another session or a time limit.
pub(crate) fn is_cancelled(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some("57014")
}

/// Creates the error for a release without an answer.
pub(crate) fn unanswered() -> Error {
    let message = "the server did not answer the release, so its session was given up, with all that it held";
    Error::new(ErrorKind::OutcomeUnknown, message)
}

/// Creates the error for a session that ended during a request.
pub(crate) fn interrupted() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the session with the server ended while the request was under way; if it was carried out, it is undone",
    )
}

/// Creates the error for a session that ended before a request was sent.
pub(crate) fn not_sent() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "the session with the server ended before the request was sent; nothing is held, try again",
    )
}
