use std::io;

use leasehold_api::ErrorKind;

use super::*;

fn of(code: Code, message: &str) -> Failure {
    Failure::of_status(Status::new(code, message), "h:2379".into())
}

#[test]
fn every_refusal_of_a_server_has_a_class_and_a_kind() {
    use Code::{
        Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, NotFound,
        OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable, Unimplemented,
        Unknown,
    };
    // The messages of etcd 3.4 to 3.7, each with its class, whether it was possibly carried out, and the kind for
    // callers.
    for (code, message, class, sent, kind) in [
        (Unavailable, "etcdserver: no leader", Class::NoLeader, false, ErrorKind::Unavailable),
        (ResourceExhausted, "etcdserver: too many requests", Class::Busy, false, ErrorKind::Unavailable),
        (
            Unavailable,
            "etcdserver: rpc not supported for learner",
            Class::Learner,
            false,
            ErrorKind::Unavailable,
        ),
        (Unavailable, "etcdserver: request timed out", Class::Ended, true, ErrorKind::OutcomeUnknown),
        (Unavailable, "etcdserver: leader changed", Class::Ended, true, ErrorKind::OutcomeUnknown),
        (Unavailable, "etcdserver: server stopped", Class::Ended, true, ErrorKind::OutcomeUnknown),
        (Unavailable, "error trying to connect", Class::Lost, true, ErrorKind::OutcomeUnknown),
        (Unknown, "raft proposal dropped", Class::Lost, true, ErrorKind::OutcomeUnknown),
        (Internal, "h2 protocol error", Class::Lost, true, ErrorKind::OutcomeUnknown),
        (Cancelled, "operation was canceled", Class::Lost, true, ErrorKind::OutcomeUnknown),
        (DeadlineExceeded, "context deadline exceeded", Class::Lost, true, ErrorKind::OutcomeUnknown),
        (
            ResourceExhausted,
            "etcdserver: mvcc: database space exceeded",
            Class::NoSpace,
            true,
            ErrorKind::NeedsOperator,
        ),
        (DataLoss, "etcdserver: corrupt cluster", Class::Corrupt, true, ErrorKind::Corrupt),
        (
            PermissionDenied,
            "etcdserver: permission denied",
            Class::Denied,
            false,
            ErrorKind::PermissionDenied,
        ),
        (
            InvalidArgument,
            "etcdserver: authentication failed, invalid user ID or password",
            Class::WrongPassword,
            false,
            ErrorKind::PermissionDenied,
        ),
        (
            InvalidArgument,
            "etcdserver: user name is empty",
            Class::NoUser,
            false,
            ErrorKind::PermissionDenied,
        ),
        (
            Unauthenticated,
            "etcdserver: invalid auth token",
            Class::EndedToken,
            false,
            ErrorKind::PermissionDenied,
        ),
        (
            InvalidArgument,
            "etcdserver: revision of auth store is old",
            Class::EndedToken,
            false,
            ErrorKind::PermissionDenied,
        ),
        (
            FailedPrecondition,
            "etcdserver: authentication is not enabled",
            Class::AuthOff,
            false,
            ErrorKind::Unavailable,
        ),
        (
            NotFound,
            "etcdserver: requested lease not found",
            Class::LeaseNotFound,
            false,
            ErrorKind::Unavailable,
        ),
        (
            FailedPrecondition,
            "etcdserver: lease already exists",
            Class::LeaseExists,
            false,
            ErrorKind::Unavailable,
        ),
        (
            OutOfRange,
            "etcdserver: mvcc: required revision has been compacted",
            Class::Compacted,
            false,
            ErrorKind::Unavailable,
        ),
        (
            InvalidArgument,
            "etcdserver: too many operations in txn request",
            Class::TooLarge,
            false,
            ErrorKind::Unsupported,
        ),
        (InvalidArgument, "etcdserver: request is too large", Class::TooLarge, false, ErrorKind::Unsupported),
        (
            InvalidArgument,
            "etcdserver: duplicate key given in txn request",
            Class::Invalid,
            false,
            ErrorKind::Unavailable,
        ),
        (Unimplemented, "unknown service etcdserverpb.KV", Class::NotEtcd, true, ErrorKind::Unsupported),
    ] {
        let failure = of(code, message);
        assert_eq!((failure.class(), failure.sent()), (class, sent), "{message}");
        let key = LockKey::new("k").unwrap();
        let error = failure.of_store(&"etcd://h/p".into()).error(Some(&key));
        assert_eq!(
            (error.kind(), error.key(), error.store()),
            (kind, Some(&key), Some("etcd://h/p")),
            "{message}"
        );
        let source = StdError::source(&error).unwrap().to_string();
        assert_eq!(source, format!("h:2379: {message}"), "the source names the member");
    }
}

#[test]
fn a_connection_that_was_not_made_has_sent_nothing() {
    let refused = || ConnectError(Box::new(io::Error::from(io::ErrorKind::ConnectionRefused)));
    let failure = Failure::of_status(Status::from_error(Box::new(refused())), "h:1".into());
    assert_eq!((failure.class(), failure.sent()), (Class::Unreachable, false));
    assert_eq!(failure.error(None).kind(), ErrorKind::Unavailable);
    let certificate = ConnectError(Box::new(io::Error::other("invalid peer certificate: UnknownIssuer")));
    let failure = Failure::of_status(Status::from_error(Box::new(certificate)), "h:1".into());
    assert_eq!((failure.class(), failure.sent()), (Class::Tls, false));
    assert!(failure.error(None).message().contains("etcds://"));
    let reset = io::Error::from(io::ErrorKind::ConnectionReset);
    let failure = Failure::of_status(Status::from_error(Box::new(reset)), "h:1".into());
    assert_eq!((failure.class(), failure.sent()), (Class::Lost, true));
}

#[test]
fn an_error_names_no_password_and_keeps_the_error_of_the_program() {
    let failure = Failure::of_credentials(Error::new(ErrorKind::Unavailable, "the vault is sealed"));
    let error = failure.error(None);
    assert_eq!((error.kind(), failure.sent()), (ErrorKind::Unavailable, false));
    assert!(StdError::source(&error).unwrap().to_string().contains("the vault is sealed"));
}

#[test]
fn the_more_telling_failure_is_kept() {
    let failure = |class| Failure::unsent(class);
    let kept = |now, before| failure(now).or_more_telling(Some(failure(before))).class();
    assert_eq!(kept(Class::Unreachable, Class::NoLeader), Class::NoLeader);
    assert_eq!(kept(Class::NoLeader, Class::Unreachable), Class::NoLeader);
    assert_eq!(kept(Class::Late, Class::Lost), Class::Late, "of two that tell the same, the last");
    assert_eq!(failure(Class::Busy).or_more_telling(None).class(), Class::Busy);
}
