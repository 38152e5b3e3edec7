//! Converts the driver's errors into leasehold errors: the cause, and the next step.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;

use leasehold_api::{Error, ErrorKind};
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

use ErrorKind::{
    Capacity, Deadlock, InvalidOption, OutcomeUnknown, PermissionDenied, SchemaMissing, Unavailable,
};

/// The message if another transaction has locked a row or a table of the schema. For an advisory lock, the
/// server's same code means *contended* and is not an error.
pub(crate) const LOCKED: &str =
    "another transaction keeps a row of ours, or its table, locked; look for it in pg_locks, or try again";

/// Kinds and advice for the server's codes (SQLSTATE). The first entry whose code is a prefix counts.
const STATES: &[(&str, ErrorKind, &str)] = &[
    ("28", PermissionDenied, "the server refuses this user; check user, password and pg_hba.conf"),
    ("3D000", InvalidOption, "there is no such database; name one that exists, or create it"),
    ("53100", Capacity, "the server's disk is full; free space on it"),
    (
        "53200",
        Capacity,
        "the server is out of memory or its lock table is full; raise max_locks_per_transaction, or keep many locks in the row or lease store",
    ),
    (
        "53300",
        Capacity,
        "the server has no connection left; close some, or raise max_connections or the role's limit",
    ),
    ("53", Capacity, "the server is short of a resource; try again later"),
    ("40P01", Deadlock, "holders waited for each other in a circle; release everything and start again"),
    (
        "40003",
        OutcomeUnknown,
        "the server does not know whether it was carried out; look before doing it again",
    ),
    ("40", Unavailable, "another transaction came in between; start again"),
    (
        "42501",
        PermissionDenied,
        "the role lacks a privilege: grant it (of our own objects `leasehold schema print --grant-to ROLE` shows them all); or row-level security is on for the table and no policy lets this role write the row: our own tables are to have none",
    ),
    (
        "42P10",
        ErrorKind::Corrupt,
        "a table has no primary key or unique index where one is needed; if it is one of ours, `leasehold check` names it: put it back",
    ),
    ("42P01", SchemaMissing, "a table is not there; if it is one of ours, run `leasehold schema apply`"),
    ("3F000", SchemaMissing, "the schema is not there; run `leasehold schema apply`"),
    ("42703", SchemaMissing, "the tables are of another version; run `leasehold schema apply`"),
    // Missing objects of the leasehold schema are handled in `state_error`.
    ("42704", InvalidOption, "a role, an object or a setting is not there; correct its name, or create it"),
    ("42883", SchemaMissing, "a function is not there; check the server's version (13 or later)"),
    ("57P04", InvalidOption, "the database was dropped; name one that exists"),
    ("57P01", Unavailable, "the session was ended by the server's operator; try again"),
    ("57P02", Unavailable, "the server crashed and is recovering; try again"),
    ("57P03", Unavailable, "the server does not take connections yet; try again"),
    ("57P05", Unavailable, "the session was idle for too long; raise idle_session_timeout for this role"),
    ("57014", Unavailable, "the statement was cancelled or exceeded statement_timeout; try again"),
    ("55P03", Unavailable, LOCKED),
    ("25006", Unavailable, "the server is a standby or read-only; connect to the primary"),
    ("25P02", Unavailable, "the transaction has failed before; roll it back and start again"),
    (
        "25P03",
        Unavailable,
        "the transaction was idle for too long; raise idle_in_transaction_session_timeout for this role",
    ),
    (
        "26000",
        InvalidOption,
        "a pooler in transaction mode is in between; connect to the server directly or say so in the configuration",
    ),
    (
        "42P05",
        InvalidOption,
        "a pooler is in between, in transaction mode, or in session mode without server_reset_query = DISCARD ALL; connect to the server directly or say so in the configuration",
    ),
    ("2200H", Capacity, "the sequence of fencing tokens is used up; install a new schema"),
    ("08P01", Unavailable, "server or pooler broke the protocol; see its log, then try again"),
    ("08", Unavailable, "the connection failed; try again"),
    ("58", Unavailable, "the server's machine failed it; see its log"),
    ("XX001", ErrorKind::Corrupt, "the server found damaged data; see its log before anything else"),
    ("XX002", ErrorKind::Corrupt, "the server found a damaged index; see its log before anything else"),
];

/// The tables and the sequence that this library installs in its schema.
const OUR_OBJECTS: [&str; 9] = [
    "version",
    "token",
    "incarnation",
    "mutex",
    "lease",
    "mutex_part",
    "lease_part",
    "advisory_name",
    "upkeep",
];

/// PgBouncer's permanent refusals, by message, because all of PgBouncer's own refusals share one code.
const OF_POOLERS: [(&str, &str); 4] = [
    ("no such database", "the pooler knows no such database; name one that is in its configuration"),
    ("no such user", "the pooler knows no such user; name one that is in its configuration"),
    (
        "unsupported startup parameter",
        "the pooler refuses options of the connection: leave `options` out of the URL and unset PGOPTIONS, also an empty one, or have the pooler ignore them (ignore_startup_parameters)",
    ),
    (
        "not allowed in statement pooling mode",
        "a pooler in statement mode is in between, behind which nothing can be locked; connect to the server directly",
    ),
];

/// Converts the error of a statement or connection that was to `doing` ("take the lock").
///
/// Kind and advice follow from the server's code if it sent one. The driver's error is kept as the source, except a
/// configuration error, which can repeat a password.
#[must_use]
pub fn store_error(error: sqlx::Error, doing: &str) -> Error {
    let told = explained(&error, doing);
    with_driver(told, error)
}

fn with_driver(told: Error, error: sqlx::Error) -> Error {
    match error {
        sqlx::Error::Configuration(_) => told,
        error => told.with_source(DriverError(error)),
    }
}

fn explained(error: &sqlx::Error, doing: &str) -> Error {
    use sqlx::Error as E;
    let (kind, what) = match error {
        E::Database(answer) => {
            let told = state_error(&answer.code().unwrap_or_default(), answer.message(), doing);
            return match foreign_function(&**answer) {
                Some(function) => failed_elsewhere(told.kind(), &**answer, doing, function),
                None => told,
            };
        }
        E::Configuration(_) => {
            let message =
                format!("could not {doing}: the settings of the connection cannot be used; check URL and options");
            return Error::new(InvalidOption, message);
        }
        E::Io(io) => (Unavailable, format!("{io}; {}", advice_of(io.kind()))),
        E::Tls(_) => (
            InvalidOption,
            "no encrypted connection came about; check sslmode, certificates and the tls- feature of this library"
                .to_owned(),
        ),
        E::Protocol(_) => (
            Unavailable,
            "what came back is not understood; check that it is a Postgres server, and its log".to_owned(),
        ),
        E::PoolTimedOut => {
            (Unavailable, "the pool had no connection in time; enlarge it, or try again".to_owned())
        }
        E::PoolClosed => (ErrorKind::Closed, "the pool was closed; connect again".to_owned()),
        E::WorkerCrashed => (Unavailable, "the driver's worker is gone; connect again".to_owned()),
        E::RowNotFound | E::ColumnNotFound(_) | E::ColumnIndexOutOfBounds { .. } | E::TypeNotFound { .. } => (
            SchemaMissing,
            "the answer does not have the expected form; check the schema's version with `leasehold check`".to_owned(),
        ),
        E::ColumnDecode { .. } | E::Decode(_) => {
            (ErrorKind::Corrupt, "a value is not what this library writes; see who else writes there".to_owned())
        }
        E::InvalidArgument(_) | E::Encode(_) => {
            (InvalidOption, "the server cannot be given one of the values".to_owned())
        }
        _ => (Unavailable, "the driver failed".to_owned()),
    };
    Error::new(kind, format!("could not {doing}: {what}"))
}

/// Converts the error of a session that is not open yet, which was to `doing` ("connect").
///
/// An error is transient only if its cause can pass without a change: a network failure, or a server that is starting,
/// stopping or short of a resource.
#[must_use]
pub fn connect_error(error: sqlx::Error, doing: &str) -> Error {
    connect_error_at(error, doing, true)
}

/// Works like [`connect_error`]. If `has_socket` is false, a missing file can only be a certificate or a key,
/// which no retry helps.
pub(crate) fn connect_error_at(error: sqlx::Error, doing: &str, has_socket: bool) -> Error {
    use std::io::ErrorKind::{InvalidData, NotFound};
    let told = explained(&error, doing);
    let says_again = match &error {
        // Reports a refused login: the driver cannot decode the server's message, which is mostly a refusal
        // in another encoding.
        sqlx::Error::Protocol(words) if words.contains("UTF-8") => {
            let advice = "check user and password, and see the server's log for what it said";
            let words = without_lines(words).trim_end_matches('.');
            let message = format!("could not {doing}: {words}; {advice}");
            return with_driver(Error::new(PermissionDenied, message), error);
        }
        // The driver reads the end of the connection as this byte. A load balancer whose server is away closes at once,
        // and so does a server that stops.
        sqlx::Error::Protocol(words) if words.contains("SSLRequest: 0x00") => {
            let message = format!(
                "could not {doing}: the connection was closed before the first reply; check that the server behind this address runs"
            );
            return with_driver(Error::new(Unavailable, message), error);
        }
        sqlx::Error::Protocol(words) => {
            let words = without_lines(words);
            let advice = "check that it is a Postgres server, and which way to log in it asks for";
            return with_driver(
                Error::new(InvalidOption, format!("could not {doing}: {words}; {advice}")),
                error,
            );
        }
        // Final: the certificate is untrusted, or a certificate or key file is missing.
        sqlx::Error::Io(io) => io.kind() == InvalidData || (io.kind() == NotFound && !has_socket),
        sqlx::Error::Database(answer) => {
            let state = answer.code().unwrap_or_default();
            !WHILE_CONNECTING.iter().any(|passing| state.starts_with(passing))
        }
        _ => false,
    };
    if says_again && told.kind().is_transient() {
        return with_driver(Error::new(InvalidOption, told.message().to_owned()), error);
    }
    with_driver(told, error)
}

/// Returns the driver's message without its reference to lines of the driver's source code.
fn without_lines(words: &str) -> &str {
    words.split(" (sqlx_").next().unwrap_or(words)
}

/// Codes of transient refusals while a session is opened: the connection, a resource, a database or server that accepts
/// no connections now, or a login timeout.
const WHILE_CONNECTING: [&str; 5] = ["08", "53", "55000", "57P0", "57014"];

/// Returns the function of another program in which the server failed, called by a trigger or an event
/// trigger. `None` if it failed elsewhere. The name has the types of its arguments, as the server writes it.
fn foreign_function(answer: &dyn DatabaseError) -> Option<&str> {
    let context = answer.try_downcast_ref::<PgDatabaseError>()?.r#where()?;
    // Reads the first line, because the server names the innermost function first.
    let (function, _) = context.strip_prefix("PL/pgSQL function ")?.split_once(" line ")?;
    let is_ours = function == "inline_code_block" || function.ends_with("idempotency_finished()");
    (!is_ours).then_some(function)
}

/// Creates the error of a function of another program. Its kind never blames the leasehold schema.
fn failed_elsewhere(kind: ErrorKind, answer: &dyn DatabaseError, doing: &str, function: &str) -> Error {
    let kind = if matches!(kind, SchemaMissing | ErrorKind::Corrupt) { Unavailable } else { kind };
    let (message, state) = (answer.message(), answer.code().unwrap_or_default());
    Error::new(
        kind,
        format!(
            "could not {doing}: {message} ({state}): it was raised in the function {function}, which is not leasehold's and is called by a trigger or an event trigger; correct or disable that one, then try again"
        ),
    )
}

/// The driver's error as a source. For an answer of the server, the text is only its message: the driver would add a
/// line number of the server's source code.
#[derive(Debug)]
pub struct DriverError(sqlx::Error);

impl DriverError {
    /// Wraps the source of an error not made by [`store_error`].
    #[must_use]
    pub const fn new(error: sqlx::Error) -> Self {
        Self(error)
    }

    /// Returns the wrapped error, with the server's code, detail and hint.
    #[must_use]
    pub const fn get(&self) -> &sqlx::Error {
        &self.0
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            sqlx::Error::Database(answer) => f.write_str(answer.message()),
            other => other.fmt(f),
        }
    }
}

impl StdError for DriverError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0 {
            // Has no source, because it would repeat the message, with the line number.
            sqlx::Error::Database(_) => None,
            other => other.source(),
        }
    }
}

/// Returns the checks to suggest if a connection fails or breaks.
fn advice_of(kind: std::io::ErrorKind) -> &'static str {
    match kind {
        // rustls reports an untrusted certificate as `InvalidData`.
        std::io::ErrorKind::InvalidData => {
            "check sslmode and sslrootcert against the server's certificate and the host's name in it"
        }
        std::io::ErrorKind::NotFound => {
            "check the paths in host (a directory of sockets), sslrootcert, sslcert and sslkey, and that the server runs"
        }
        _ => "check that the server runs and that host, port and network are right, then try again",
    }
}

/// Creates the error for the server's code `state` (five characters) and its `message`, while trying to `doing`.
#[must_use]
pub fn state_error(state: &str, message: &str, doing: &str) -> Error {
    // Compares only the messages of poolers, because other messages can repeat a key with any text.
    let refused = OF_POOLERS.iter().find(|(part, _)| state == "08P01" && message.contains(part));
    if let Some((_, advice)) = refused {
        return Error::new(InvalidOption, format!("could not {doing}: {message} ({state}): {advice}"));
    }
    let row = STATES.iter().find(|(code, ..)| state.starts_with(code));
    let (kind, advice) = match row {
        Some(("42704", ..)) if is_of_ours(message) => {
            (SchemaMissing, "one of our own objects is not there; run `leasehold schema apply`")
        }
        Some((_, kind, advice)) => (*kind, *advice),
        None => (Unavailable, "see the server's log"),
    };
    Error::new(kind, format!("could not {doing}: {message} ({state}): {advice}"))
}

/// Returns whether the message names an object of the schema: `relation "leasehold.mutex" does not exist`.
fn is_of_ours(message: &str) -> bool {
    let names = message.split('"').skip(1).step_by(2);
    names.into_iter().any(|name| OUR_OBJECTS.contains(&name.rsplit('.').next().unwrap_or(name)))
}

/// Returns the server's code if the error came from the server.
#[must_use]
pub fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(Cow::into_owned)
}

/// Returns whether the failure ended the session: the server ended it, or the connection is broken or out of step.
/// After any other error the session can still be used.
#[must_use]
pub fn ends_session(error: &sqlx::Error) -> bool {
    let Some(database) = error.as_database_error() else { return true };
    let severity = database.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::severity);
    severity.is_none_or(|severity| matches!(severity, PgSeverity::Fatal | PgSeverity::Panic))
}

/// Returns whether the failed statement might have been executed, because the connection broke during the round trip.
/// If so, query or undo before repeating it.
#[must_use]
pub fn outcome_unknown(error: &sqlx::Error) -> bool {
    match error {
        // False, because the statement was never sent.
        sqlx::Error::Io(io) if io.kind() == std::io::ErrorKind::ConnectionRefused => false,
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        // True for codes that mean an unknown outcome, a failed connection (except two refusals to open one),
        // or the end of the session, possibly after the commit.
        sqlx::Error::Database(_) => sqlstate(error).is_some_and(|state| match state.as_str() {
            "40003" | "57P01" | "57P02" | "57P05" => true,
            "08001" | "08004" => false,
            other => other.starts_with("08"),
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn codes_have_kinds() {
        for (state, kind) in [
            ("28P01", PermissionDenied),
            ("28000", PermissionDenied),
            ("3D000", InvalidOption),
            ("53300", Capacity),
            ("53200", Capacity),
            ("53100", Capacity),
            ("53400", Capacity),
            ("40P01", Deadlock),
            ("40001", Unavailable),
            ("40003", OutcomeUnknown),
            ("42501", PermissionDenied),
            ("42P01", SchemaMissing),
            ("42P10", ErrorKind::Corrupt),
            ("42704", InvalidOption),
            ("3F000", SchemaMissing),
            ("57P01", Unavailable),
            ("57P02", Unavailable),
            ("57P03", Unavailable),
            ("57014", Unavailable),
            ("55P03", Unavailable),
            ("25006", Unavailable),
            ("08006", Unavailable),
            ("08P01", Unavailable),
            ("26000", InvalidOption),
            ("42P05", InvalidOption),
            ("ZZZZZ", Unavailable),
            ("", Unavailable),
        ] {
            let error = state_error(state, "because", "take the lock");
            assert_eq!(error.kind(), kind, "{state}");
            let text = error.message();
            assert!(text.starts_with("could not take the lock: because"), "{text}");
        }
        let other = state_error("22P02", "unsupported startup parameter", "renew");
        assert_eq!(other.kind(), Unavailable, "a key that is spelled so");
        let refused = state_error("08P01", "unsupported startup parameter: options", "connect");
        assert_eq!(refused.kind(), InvalidOption, "trying again is of no use");
        assert!(refused.message().contains("PGOPTIONS"), "{refused}");
        let refused =
            state_error("08P01", "transaction blocks not allowed in statement pooling mode", "look");
        assert!(refused.kind() == InvalidOption && refused.message().contains("statement mode"), "{refused}");
        // Checks that the message names both causes, because the server has one code for both.
        let refused = state_error("42501", "because", "take the lock").to_string();
        assert!(refused.contains("--grant-to ROLE") && refused.contains("row-level security"), "{refused}");
    }

    #[test]
    fn the_schema_is_applied_for_objects_of_ours_alone() {
        let ours = state_error("42704", "type \"locks.mutex\" does not exist", "look");
        assert!(ours.kind() == SchemaMissing && ours.message().contains("schema apply"), "{ours}");
        for message in
            ["unrecognized configuration parameter \"lock_tmeout\"", "role \"mutexes\" does not exist"]
        {
            let other = state_error("42704", message, "look");
            assert!(other.kind() == InvalidOption && !other.message().contains("schema apply"), "{other}");
        }
    }

    #[test]
    fn the_general_row_of_a_class_comes_last() {
        for (at, (code, ..)) in STATES.iter().enumerate() {
            let hidden = STATES[..at].iter().find(|(before, ..)| code.starts_with(before));
            assert!(hidden.is_none(), "{code} is never reached because of {hidden:?}");
        }
    }

    #[test]
    fn no_password_from_a_configuration() {
        let error = store_error(sqlx::Error::Configuration("postgres://a:hunter2@b".into()), "connect");
        assert_eq!(error.kind(), InvalidOption);
        assert!(error.source().is_none());
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }

    #[test]
    fn keeps_the_source_of_all_others() {
        for (error, kind) in [
            (sqlx::Error::Io(io::ErrorKind::ConnectionReset.into()), Unavailable),
            (sqlx::Error::PoolTimedOut, Unavailable),
            (sqlx::Error::PoolClosed, ErrorKind::Closed),
            (sqlx::Error::Protocol("x".into()), Unavailable),
            (sqlx::Error::Tls("x".into()), InvalidOption),
            (sqlx::Error::RowNotFound, SchemaMissing),
        ] {
            let error = store_error(error, "connect");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.source().is_some(), "{error}");
        }
    }

    #[test]
    fn says_where_to_look_when_no_connection_comes_about() {
        for (kind, advice) in [
            (io::ErrorKind::InvalidData, "sslrootcert against the server's certificate"),
            (io::ErrorKind::NotFound, "check the paths"),
            (io::ErrorKind::ConnectionRefused, "check that the server runs"),
        ] {
            let error = store_error(sqlx::Error::Io(io::Error::new(kind, "because")), "connect");
            assert!(error.message().starts_with("could not connect: because; check "), "{error}");
            assert!(error.message().contains(advice), "{error}");
        }
    }

    #[test]
    fn a_broken_connection_leaves_the_outcome_open() {
        let io = |kind: io::ErrorKind| sqlx::Error::Io(kind.into());
        assert!(outcome_unknown(&io(io::ErrorKind::UnexpectedEof)));
        assert!(outcome_unknown(&io(io::ErrorKind::ConnectionReset)));
        assert!(!outcome_unknown(&io(io::ErrorKind::ConnectionRefused)));
        assert!(outcome_unknown(&sqlx::Error::Protocol("x".into())));
        assert!(!outcome_unknown(&sqlx::Error::PoolTimedOut));
    }
}
