//! The errors of this store, and what an error of the driver says of a session.

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{sqlstate, store_error};

const ELSEWHERE: &str = "the statement reached another server process than the one that keeps the locks, so that they are given up: a pooler is in between; connect to the server directly";

/// The answer came from another process of the server: statements of one connection are spread.
pub(crate) fn elsewhere() -> sqlx::Error {
    sqlx::Error::Protocol(ELSEWHERE.into())
}

/// Why a session ended.
pub(crate) fn ended(failure: sqlx::Error, doing: &str) -> Error {
    match &failure {
        sqlx::Error::Protocol(text) if text == ELSEWHERE => Error::new(ErrorKind::Unavailable, ELSEWHERE),
        _ => store_error(failure, doing),
    }
}

/// The statement was ended from outside or by its time limit.
pub(crate) fn is_cancelled(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some("57014")
}

/// The server did not answer the release of a hold.
pub(crate) fn unanswered() -> Error {
    let message = "the server did not answer the release, so its session was given up, with all that it held";
    Error::new(ErrorKind::OutcomeUnknown, message)
}

/// A session ended while a request was under way.
pub(crate) fn interrupted() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "the session with the server ended while the request was under way; if it was carried out, it is undone",
    )
}

/// A session ended before a request was sent on it.
pub(crate) fn not_sent() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "the session with the server ended before the request was sent; nothing is held, try again",
    )
}
