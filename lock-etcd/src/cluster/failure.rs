//! The reasons for which a call has no reply.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use leasehold_api::{Error, LockKey};
use tonic::{Code, ConnectError, Status};

use crate::error;

/// The class of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// The client could not connect.
    Unreachable,
    /// No TLS connection could be made.
    Tls,
    /// The member replied by another protocol than etcd's.
    NotEtcd,
    /// Another cluster has sent the reply.
    OtherCluster,
    /// The member knows no leader.
    NoLeader,
    /// The member is a learner, which serves no clients.
    Learner,
    /// The member has too many requests.
    Busy,
    /// The member ended the call without a result: by its own time limit, a change of the leader, or its stop.
    Ended,
    /// The connection was lost, or its end is not understood.
    Lost,
    /// No reply came in time.
    Late,
    /// The quota is reached.
    NoSpace,
    /// The data of the members differs.
    Corrupt,
    /// The user has no right to a key.
    Denied,
    /// The user does not exist, or has another password.
    WrongPassword,
    /// The cluster requires a user.
    NoUser,
    /// The token has ended.
    EndedToken,
    /// The program's callback has returned an error.
    NoCredentials,
    /// The cluster has authentication turned off.
    AuthOff,
    /// The lease has ended.
    LeaseNotFound,
    /// The lease exists already.
    LeaseExists,
    /// The revision was compacted.
    Compacted,
    /// The request has too many operations or bytes.
    TooLarge,
    /// The member refuses the request.
    Invalid,
}

/// The reason for which a call has no reply.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    class: Class,
    sent: bool,
    cause: Cause,
    store: Option<Arc<str>>,
}

#[derive(Clone, Debug)]
enum Cause {
    None,
    Reply(Reply),
    Program(Error),
}

/// The status that a call ended with, and the member.
#[derive(Clone, Debug)]
struct Reply {
    member: Arc<str>,
    status: Status,
}

impl Failure {
    /// Makes the failure of a request that was not sent.
    pub(crate) const fn unsent(class: Class) -> Self {
        Self { class, sent: false, cause: Cause::None, store: None }
    }

    /// Makes the failure of a request that was possibly carried out.
    pub(crate) const fn maybe_sent(class: Class) -> Self {
        Self { class, sent: true, cause: Cause::None, store: None }
    }

    pub(super) fn of_status(status: Status, member: Arc<str>) -> Self {
        let class = Class::of(&status);
        Self {
            class,
            sent: class.may_have_been_carried_out(),
            cause: Cause::Reply(Reply { member, status }),
            store: None,
        }
    }

    pub(super) const fn of_credentials(error: Error) -> Self {
        Self { class: Class::NoCredentials, sent: false, cause: Cause::Program(error), store: None }
    }

    pub(crate) fn of_store(mut self, store: &Arc<str>) -> Self {
        self.store = Some(Arc::clone(store));
        self
    }

    pub(super) fn into_unsent(mut self) -> Self {
        self.sent = false;
        self
    }

    /// Notes whether another copy of the request was possibly carried out.
    pub(super) fn or_sent(mut self, sent: bool) -> Self {
        self.sent |= sent;
        self
    }

    pub(crate) const fn class(&self) -> Class {
        self.class
    }

    /// Returns whether the request was possibly carried out, or still can be.
    pub(crate) const fn sent(&self) -> bool {
        self.sent
    }

    /// Returns the error for callers, with the next step.
    pub(crate) fn error(&self, key: Option<&LockKey>) -> Error {
        error::of_failure(self, key)
    }

    /// Returns the name of the store, without a password.
    pub(crate) fn store(&self) -> Option<Arc<str>> {
        self.store.clone()
    }

    /// Returns the cause: the status of the server, or the error of the program's callback.
    pub(crate) fn cause(&self) -> Option<Box<dyn StdError + Send + Sync>> {
        match &self.cause {
            Cause::None => None,
            Cause::Reply(reply) => Some(Box::new(reply.clone())),
            Cause::Program(error) => Some(Box::new(error.clone())),
        }
    }

    /// Returns whether the space quota is used up. The request was possibly carried out nevertheless, because a server
    /// checks its quota again during the request.
    pub(crate) fn is_no_space(&self) -> bool {
        self.class == Class::NoSpace
    }

    /// Returns whether the user lacks a right, or the cluster refuses the user.
    pub(crate) const fn is_denied(&self) -> bool {
        matches!(self.class, Class::Denied | Class::NoUser | Class::WrongPassword | Class::EndedToken)
    }

    /// Returns whether the request names a lease that has ended. The server has then carried out no part of the request.
    pub(crate) fn lease_not_found(&self) -> bool {
        self.class == Class::LeaseNotFound
    }

    /// Returns whether the lease exists already, because an earlier copy of the request has granted it.
    pub(crate) fn lease_exists(&self) -> bool {
        self.class == Class::LeaseExists
    }

    /// Returns whether another cluster has sent the reply.
    pub(crate) fn is_other_cluster(&self) -> bool {
        self.class == Class::OtherCluster
    }

    /// Returns whether a new token can help.
    pub(super) const fn wants_token(&self) -> bool {
        matches!(self.class, Class::EndedToken | Class::NoUser)
    }

    /// Returns whether another member, or the same one later, might carry out the call.
    pub(super) const fn may_pass(&self) -> bool {
        self.class.rank().is_some()
    }

    /// Returns whether the member itself has replied.
    pub(super) const fn is_reply(&self) -> bool {
        !matches!(self.class, Class::Unreachable | Class::Tls | Class::Lost | Class::Late)
    }

    /// Returns the failure that is more helpful to callers. `other` is an earlier failure of the same call.
    pub(super) fn or_more_telling(self, other: Option<Self>) -> Self {
        match other {
            Some(other) if other.class.rank() > self.class.rank() => other,
            _ => self,
        }
    }
}

impl Class {
    fn of(status: &Status) -> Self {
        if let Some(class) = of_connection(status) {
            return class;
        }
        let says = |text| status.message().contains(text);
        match status.code() {
            _ if says("database space exceeded") => Self::NoSpace,
            _ if says("no leader") => Self::NoLeader,
            _ if says("too many requests") => Self::Busy,
            _ if says("for learner") => Self::Learner,
            _ if says("invalid auth token") || says("revision of auth store is old") => Self::EndedToken,
            _ if says("user name is empty") => Self::NoUser,
            _ if says("authentication failed") || says("no password user") => Self::WrongPassword,
            _ if says("authentication is not enabled") => Self::AuthOff,
            _ if says("lease not found") => Self::LeaseNotFound,
            _ if says("lease already exists") => Self::LeaseExists,
            _ if says("has been compacted") => Self::Compacted,
            _ if says("corrupt") => Self::Corrupt,
            _ if says("too many operations") || says("request is too large") => Self::TooLarge,
            Code::PermissionDenied => Self::Denied,
            Code::Unauthenticated => Self::EndedToken,
            Code::Unimplemented => Self::NotEtcd,
            Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange | Code::NotFound => {
                Self::Invalid
            }
            Code::Unavailable if says("etcdserver: ") => Self::Ended,
            _ => Self::Lost,
        }
    }

    /// Returns whether a request with this failure was possibly carried out.
    ///
    /// A server finds all other failures before it carries out any part of a request. Three of these classes need a
    /// reason:
    /// - `NoSpace`: a server that reaches its quota by this request carries it out, and then replies with this failure.
    /// - `Corrupt`: this is not known for each version of the server.
    /// - `NotEtcd`: a proxy can fail after it has passed the request on.
    const fn may_have_been_carried_out(self) -> bool {
        matches!(
            self,
            Self::Ended
                | Self::Lost
                | Self::Late
                | Self::NoSpace
                | Self::Corrupt
                | Self::NotEtcd
                | Self::OtherCluster
        )
    }

    /// Returns how helpful the failure is to callers, if another member might not have it. `None` for a failure that all
    /// members have.
    const fn rank(self) -> Option<u8> {
        match self {
            Self::Unreachable => Some(0),
            Self::Lost | Self::Late => Some(1),
            Self::Ended | Self::Busy => Some(2),
            Self::NoLeader | Self::Learner => Some(3),
            Self::Tls | Self::NotEtcd => Some(4),
            Self::OtherCluster => Some(5),
            _ => None,
        }
    }
}

/// Returns the class of a failed connection.
fn of_connection(status: &Status) -> Option<Class> {
    let mut is_connect = false;
    let mut source = status.source();
    while let Some(error) = source {
        is_connect |= error.is::<ConnectError>();
        let text = error.to_string();
        // Compares texts, because the libraries below distinguish these failures only by them.
        if text.contains("frame with invalid size") {
            return Some(Class::NotEtcd);
        }
        if is_connect && TLS.iter().any(|part| text.contains(part)) {
            return Some(Class::Tls);
        }
        source = error.source();
    }
    is_connect.then_some(Class::Unreachable)
}

/// Parts of the messages of rustls.
const TLS: [&str; 4] = ["certificate", "corrupt message", "fatal alert", "tls handshake"];

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.member, self.status.message())
    }
}

impl StdError for Reply {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.status.source()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::None => write!(f, "{:?}", self.class),
            Cause::Reply(reply) => reply.fmt(f),
            Cause::Program(error) => error.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests;
