//! Errors of settings, and the errors that callers get for a failed call.

use std::borrow::Cow;

use leasehold_api::{Error, ErrorKind, LockKey};

use crate::cluster::{Class, Failure};

/// Returns the error of a setting that cannot be used. The message must not repeat a password.
pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Returns the error that a caller gets for `failure`. It names the store and the next step, and has the server's reply
/// as its source.
pub(crate) fn of_failure(failure: &Failure, key: Option<&LockKey>) -> Error {
    let (kind, message) = kind_and_message(failure.class(), failure.sent());
    let mut error = Error::new(kind, message);
    if let Some(store) = failure.store() {
        error = error.with_store(store);
    }
    if let Some(cause) = failure.cause() {
        error = error.with_source(cause);
    }
    match key {
        Some(key) => error.with_key(key),
        None => error,
    }
}

fn kind_and_message(class: Class, sent: bool) -> (ErrorKind, &'static str) {
    match class {
        Class::NoSpace => (
            ErrorKind::NeedsOperator,
            "etcd has reached its space quota (alarm NOSPACE); compact, defragment, then disarm the alarm with `etcdctl alarm disarm`",
        ),
        Class::Corrupt => (
            ErrorKind::Corrupt,
            "etcd reports that the data of its members differs (alarm CORRUPT); replace the damaged member or restore a backup",
        ),
        Class::Denied => (
            ErrorKind::PermissionDenied,
            "etcd refuses this user; grant its role the right readwrite on the store's prefix",
        ),
        Class::WrongPassword => (
            ErrorKind::PermissionDenied,
            "etcd refuses this user or its password; check both, and that the user exists",
        ),
        Class::NoUser => (
            ErrorKind::PermissionDenied,
            "etcd requires a user; add user and password to the URL or to the settings",
        ),
        Class::EndedToken => (
            ErrorKind::PermissionDenied,
            "etcd refuses a new login token of this user; check the setting --auth-token, which has to be equal on all members",
        ),
        Class::NoCredentials => {
            (ErrorKind::Unavailable, "the program's callback returned no user and password for etcd")
        }
        Class::NotEtcd => (
            ErrorKind::Unsupported,
            "the server does not speak etcd's API v3 over HTTP/2: an etcd of version 2, a proxy for HTTP/1, or another program; name the client URL of an etcd 3.4 or newer",
        ),
        Class::Tls => (
            ErrorKind::Unavailable,
            "no TLS connection to etcd: check the certificates, and that the members speak TLS (etcds:// for members with TLS, etcd:// for members without)",
        ),
        Class::OtherCluster => (
            ErrorKind::Unavailable,
            "a member belongs to another cluster than at the start: two clusters behind one URL, or a backup that was restored with a new cluster id; correct the members, then connect again",
        ),
        Class::TooLarge => (
            ErrorKind::Unsupported,
            "etcd refuses the request as too large; raise --max-txn-ops or --max-request-bytes to its default",
        ),
        Class::Learner => (
            ErrorKind::Unavailable,
            "the member of etcd is a learner, which serves no clients; name the voting members",
        ),
        Class::NoLeader => {
            (ErrorKind::Unavailable, "the etcd cluster has no leader; see whether most of its members run")
        }
        Class::Busy => (ErrorKind::Unavailable, "etcd has too many requests; the call can be repeated"),
        Class::Unreachable if !sent => (
            ErrorKind::Unavailable,
            "no member of the etcd cluster could be reached; check that etcd runs and that its client URLs are the members named",
        ),
        Class::Lost if !sent => (
            ErrorKind::Unavailable,
            "the members of etcd close the connection without a reply; check whether they speak TLS (then the scheme is etcds://), and whether they require a client certificate",
        ),
        Class::LeaseNotFound | Class::LeaseExists | Class::Compacted | Class::Invalid if !sent => {
            (ErrorKind::Unavailable, "etcd refused the request; the call can be repeated")
        }
        _ if sent => (
            ErrorKind::OutcomeUnknown,
            "etcd did not reply to a request in time, or the connection was lost; the request was possibly carried out",
        ),
        _ => (
            ErrorKind::Unavailable,
            "etcd did not reply; see whether most of its members run, then try again",
        ),
    }
}
