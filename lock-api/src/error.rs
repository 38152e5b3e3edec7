//! What can go wrong, and whether trying again can help.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::key::LockKey;
use crate::validity::LossReason;

/// The error of every operation on a lock.
///
/// [`kind`](Error::kind) says what happened, [`can_retry`](Error::can_retry) whether the same call may
/// succeed later, and the message what to do next. Key and store are named where they are known.
/// Messages never contain a password; the source chain is kept.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    key: Option<LockKey>,
    store: Option<Arc<str>>,
    loss: Option<LossReason>,
    again_in: Option<Duration>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What kind of failure an [`Error`] is.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The key is empty, too long or contains NUL.
    InvalidKey,
    /// An option, URL or setting has a value that cannot be used.
    InvalidOption,
    /// The wait budget ended before the lock was granted. Nothing is held, and what a slow store still
    /// has of the request is undone within [`Capabilities::undo`](crate::Capabilities::undo).
    Timeout,
    /// A cooldown that another grant asked for has not passed; [`Error::again_in`] says how long it lasts.
    NotDue,
    /// The grant is not held any more; [`Error::loss`] says why.
    Lost,
    /// The request may or may not have been carried out. The engine goes on to make it safe.
    OutcomeUnknown,
    /// The store broke a cycle of waiting holders by refusing this request.
    Deadlock,
    /// The store does not have what was asked for. It is never replaced by something weaker.
    Unsupported,
    /// The store cannot hold more locks.
    Capacity,
    /// The store has not been set up, or by another version.
    SchemaMissing,
    /// The store refuses this user.
    PermissionDenied,
    /// The store cannot be reached, is too slow, or is not able to answer now.
    Unavailable,
    /// What the store keeps is damaged or was written by something else.
    Corrupt,
    /// The lock was closed, or the runtime that drove it has ended.
    Closed,
}

impl ErrorKind {
    /// Whether the same call may succeed later without anybody changing the call or the store's setup.
    #[must_use]
    pub const fn can_retry(self) -> bool {
        matches!(
            self,
            Self::Timeout
                | Self::NotDue
                | Self::Lost
                | Self::OutcomeUnknown
                | Self::Deadlock
                | Self::Capacity
                | Self::Unavailable
        )
    }

    /// A short name in words, for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidKey => "invalid key",
            Self::InvalidOption => "invalid option",
            Self::Timeout => "timeout",
            Self::NotDue => "not due",
            Self::Lost => "lost",
            Self::OutcomeUnknown => "outcome unknown",
            Self::Deadlock => "deadlock",
            Self::Unsupported => "unsupported",
            Self::Capacity => "capacity",
            Self::SchemaMissing => "schema missing",
            Self::PermissionDenied => "permission denied",
            Self::Unavailable => "unavailable",
            Self::Corrupt => "corrupt",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Error {
    /// An error of `kind`. The message is a sentence for people: what happened and what to do next,
    /// without the key, the store and the source, which are added by the methods below.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            key: None,
            store: None,
            loss: None,
            again_in: None,
            source: None,
        }))
    }

    /// The grant is gone for `reason`.
    #[must_use]
    pub fn lost(reason: LossReason) -> Self {
        let mut error = Self::new(
            ErrorKind::Lost,
            "the lock was lost before this call; stop the work it protects and acquire it anew",
        );
        error.0.loss = Some(reason);
        error
    }

    /// The cooldown of an earlier grant lasts for another `again_in`.
    #[must_use]
    pub fn not_due(again_in: Duration) -> Self {
        let mut error = Self::new(ErrorKind::NotDue, "another grant asked for a pause that has not passed");
        error.0.again_in = Some(again_in);
        error
    }

    /// The lock was closed.
    #[must_use]
    pub fn closed() -> Self {
        Self::new(ErrorKind::Closed, "the lock was closed, or its runtime has ended; connect again")
    }

    /// The store does not have `what`.
    #[must_use]
    pub fn unsupported(what: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::Unsupported,
            format!("this store has no {what}; its capabilities say what it has"),
        )
    }

    /// Adds the key, unless one is named already.
    #[must_use]
    pub fn with_key(mut self, key: &LockKey) -> Self {
        self.0.key.get_or_insert_with(|| key.clone());
        self
    }

    /// Replaces the key, for wrappers that show their callers another name than the store's.
    #[must_use]
    pub fn replace_key(mut self, key: &LockKey) -> Self {
        self.0.key = Some(key.clone());
        self
    }

    /// Adds the store's name, unless one is named already. It must not contain a password.
    #[must_use]
    pub fn with_store(mut self, store: impl Into<Arc<str>>) -> Self {
        self.0.store.get_or_insert_with(|| store.into());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// What kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later; see [`ErrorKind::can_retry`].
    #[must_use]
    pub fn can_retry(&self) -> bool {
        self.0.kind.can_retry()
    }

    /// The key, where the failure concerns one.
    #[must_use]
    pub fn key(&self) -> Option<&LockKey> {
        self.0.key.as_ref()
    }

    /// The store, where it is known.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// Why the grant was lost, for [`ErrorKind::Lost`].
    #[must_use]
    pub fn loss(&self) -> Option<LossReason> {
        self.0.loss
    }

    /// How long until a grant can be had, for [`ErrorKind::NotDue`].
    #[must_use]
    pub fn again_in(&self) -> Option<Duration> {
        self.0.again_in
    }

    /// The sentence for people, without key, store and source.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        write!(f, "{}", inner.kind)?;
        if let Some(key) = &inner.key {
            write!(f, ": key \"{key}\"")?;
        }
        if let Some(store) = &inner.store {
            write!(f, " on {store}")?;
        }
        if let Some(loss) = inner.loss {
            write!(f, ": {loss}")?;
        }
        write!(f, ": {}", inner.message)?;
        if let Some(again_in) = inner.again_in {
            write!(f, " (again in {again_in:.1?})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        f.debug_struct("Error")
            .field("kind", &inner.kind)
            .field("key", &inner.key)
            .field("store", &inner.store)
            .field("loss", &inner.loss)
            .field("message", &inner.message)
            .field("source", &inner.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as _)
    }
}

impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_key_store_and_reason() {
        let key = LockKey::new("ledger:42").unwrap();
        let error = Error::lost(LossReason::Expired).with_key(&key).with_store("memory:ledger");
        let text = error.to_string();
        for part in ["lost", "ledger:42", "memory:ledger", "expired", "acquire it anew"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn first_key_and_store_stay() {
        let [a, b] = ["a", "b"].map(|k| LockKey::new(k).unwrap());
        let error = Error::closed().with_key(&a).with_key(&b).with_store("x").with_store("y");
        assert_eq!(error.key(), Some(&a));
        assert_eq!(error.store(), Some("x"));
    }

    #[test]
    fn keeps_its_source() {
        let error =
            Error::new(ErrorKind::Unavailable, "no answer").with_source(std::io::Error::other("cable"));
        assert_eq!(error.source().unwrap().to_string(), "cable");
    }
}
