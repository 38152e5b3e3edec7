//! The error of locks, with its kind and whether a retry can help.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::key::LockKey;
use crate::validity::LossReason;

/// The error of every operation on a lock.
///
/// [`kind`](Error::kind) is the failure, [`operation`](Error::operation) the call that failed, and
/// [`is_retryable`](Error::is_retryable) whether the same call can succeed later. The message adds advice. Key
/// and store are named if known. Messages never contain a password, and the source chain is kept. Clones share
/// one value, so every request of a failed batch gets the whole error.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::time::Duration;
/// use leasehold_api::{ErrorKind, LockExt};
/// let lock = leasehold_memory::connect()?;
/// let held = lock.key("ledger:42").acquire().await?;
/// let error = lock.key("ledger:42").wait(Duration::ZERO).acquire().await.unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Timeout);
/// assert!(error.is_retryable());
/// assert_eq!(error.key(), Some(held.key()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    operation: Option<Operation>,
    key: Option<LockKey>,
    store: Option<Arc<str>>,
    loss: Option<LossReason>,
    retry_after: Option<Duration>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The call that an [`Error`] belongs to.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Acquiring, with or without waiting.
    Acquire,
    /// Renewing a lease.
    Renew,
    /// Confirming a grant.
    Confirm,
    /// Changing the label of a grant.
    Relabel,
    /// Giving a hold out for another process.
    GiveOut,
    /// Adopting a hold that was given out.
    Adopt,
    /// Running a body under a lock.
    Run,
    /// Releasing.
    Release,
    /// Closing the lock.
    Close,
}

impl Operation {
    /// Returns a short name in words, for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Renew => "renew",
            Self::Confirm => "confirm",
            Self::Relabel => "relabel",
            Self::GiveOut => "give out",
            Self::Adopt => "adopt",
            Self::Run => "run",
            Self::Release => "release",
            Self::Close => "close",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The kind of an [`Error`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The key is empty, too long or contains NUL.
    InvalidKey,
    /// An option, URL or setting has a value that cannot be used.
    InvalidOption,
    /// The wait budget ended while another caller held or awaited the lock. The caller holds nothing, and the
    /// engine undoes the rest of its request within [`Capabilities::undo`](crate::Capabilities::undo).
    Timeout,
    /// A cooldown of an earlier grant lasts, for [`Error::retry_after`].
    NotDue,
    /// The grant has ended, for the reason in [`Error::loss`].
    Lost,
    /// It is unknown whether the request was carried out. The engine undoes or repeats it in the background.
    OutcomeUnknown,
    /// The store broke a cycle of waiting holders by refusing this request.
    Deadlock,
    /// The key is in use with another number of permits than this call names. It passes when the last of those
    /// permits is released, but a wait would not bring that about.
    ModeMismatch,
    /// The store lacks a requested feature. The lock never substitutes a weaker one.
    Unsupported,
    /// The store cannot hold more locks.
    Capacity,
    /// The store refuses work until an operator has acted, for example has made space and ended an alarm.
    NeedsOperator,
    /// The schema of the store is missing or has another version.
    SchemaMissing,
    /// The store refuses this user.
    PermissionDenied,
    /// The store cannot be reached, is too slow, or cannot answer at present.
    Unavailable,
    /// The data of the store is damaged, or another program wrote it.
    Corrupt,
    /// The lock was closed, or the runtime that drove it has ended.
    Closed,
    /// There is no tokio runtime to run the lock on.
    NoRuntime,
}

impl ErrorKind {
    /// Returns whether a failure of this kind can pass without a change of the call or of the store's setup.
    /// [`Error::is_retryable`] returns whether repeating a particular call helps.
    #[must_use]
    pub const fn is_transient(self) -> bool {
        matches!(
            self,
            Self::Timeout
                | Self::NotDue
                | Self::OutcomeUnknown
                | Self::Deadlock
                | Self::Capacity
                | Self::Unavailable
        )
    }

    /// Returns whether a program that never gives up, such as a candidate for leadership, should repeat the same
    /// call after a pause: the failure can pass by itself, by a new attempt, or by a repair of the store (its
    /// setup, rights or data). False for a mistake in the call, a missing feature, and a lock that is closed or has
    /// no runtime, because these stay.
    ///
    /// ```
    /// use leasehold_api::ErrorKind;
    /// assert!(ErrorKind::PermissionDenied.can_recover());
    /// assert!(!ErrorKind::Closed.can_recover());
    /// ```
    #[must_use]
    pub const fn can_recover(self) -> bool {
        !matches!(
            self,
            Self::InvalidKey | Self::InvalidOption | Self::Unsupported | Self::Closed | Self::NoRuntime
        )
    }

    /// Returns a short name in words, for logs and metrics.
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
            Self::ModeMismatch => "mode mismatch",
            Self::Unsupported => "unsupported",
            Self::Capacity => "capacity",
            Self::NeedsOperator => "needs operator",
            Self::SchemaMissing => "schema missing",
            Self::PermissionDenied => "permission denied",
            Self::Unavailable => "unavailable",
            Self::Corrupt => "corrupt",
            Self::Closed => "closed",
            Self::NoRuntime => "no runtime",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Error {
    /// Makes an error of `kind`. The message is a sentence for people with the failure and the next step. Key,
    /// store and source are added by the methods below.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            operation: None,
            key: None,
            store: None,
            loss: None,
            retry_after: None,
            source: None,
        }))
    }

    /// Makes the error of a grant that was lost for `reason`.
    #[must_use]
    pub fn lost(reason: LossReason) -> Self {
        let mut error = Self::new(
            ErrorKind::Lost,
            "the lock was lost before this call; stop the work it protects and acquire it anew",
        );
        error.inner().loss = Some(reason);
        error
    }

    /// Makes the error of a cooldown that lasts for another `retry_after`.
    #[must_use]
    pub fn not_due(retry_after: Duration) -> Self {
        let mut error = Self::new(ErrorKind::NotDue, "another grant asked for a pause that has not passed");
        error.inner().retry_after = Some(retry_after);
        error
    }

    /// Makes the error of a call for one of `wanted` permits of a key that is in use with `in_use` permits.
    #[must_use]
    pub fn mode_mismatch(in_use: u32, wanted: u32) -> Self {
        let message = format!(
            "the key is in use with {in_use} permits, but this call names {wanted}; all callers name the same number, so use another key, or wait until the last of the {in_use} is released"
        );
        Self::new(ErrorKind::ModeMismatch, message)
    }

    /// Makes the error of a closed lock.
    #[must_use]
    pub fn closed() -> Self {
        Self::new(ErrorKind::Closed, "the lock was closed, or its runtime has ended; connect again")
    }

    // Returns the fields, to be changed. Copies them only if a clone of this error shares them.
    fn inner(&mut self) -> &mut Inner {
        Arc::make_mut(&mut self.0)
    }

    /// Makes the error of a store that lacks a feature, which `what` names.
    #[must_use]
    pub fn unsupported(what: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::Unsupported,
            format!("this store has no {what}; its capabilities say what it has"),
        )
    }

    /// Adds the key, unless the error names one.
    #[must_use]
    pub fn with_key(mut self, key: &LockKey) -> Self {
        if self.0.key.is_none() {
            self.inner().key = Some(key.clone());
        }
        self
    }

    /// Replaces the key, for wrappers whose keys differ from the store's.
    #[must_use]
    pub fn replace_key(mut self, key: &LockKey) -> Self {
        self.inner().key = Some(key.clone());
        self
    }

    /// Adds the store's name, unless the error names one. The name must not contain a password.
    #[must_use]
    pub fn with_store(mut self, store: impl Into<Arc<str>>) -> Self {
        if self.0.store.is_none() {
            self.inner().store = Some(store.into());
        }
        self
    }

    /// Adds the failed call, unless the error names one.
    #[must_use]
    pub fn with_operation(mut self, operation: Operation) -> Self {
        if self.0.operation.is_none() {
            self.inner().operation = Some(operation);
        }
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.inner().source = Some(Arc::from(source.into()));
        self
    }

    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns whether repeating the same unchanged call can succeed and does no harm.
    ///
    /// False for a release, a hold given out, and a body that has started ([`Operation::Release`],
    /// [`Operation::GiveOut`], [`Operation::Run`]), because the guard is gone and the work under it may be done. True for
    /// a loss ([`ErrorKind::Lost`]) while several keys were being acquired, because no body has run yet.
    ///
    /// ```
    /// use leasehold_api::{Error, ErrorKind, Operation};
    /// let error = Error::new(ErrorKind::Unavailable, "the store is down");
    /// assert!(error.clone().with_operation(Operation::Acquire).is_retryable());
    /// assert!(!error.with_operation(Operation::Release).is_retryable());
    /// ```
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self.0.operation {
            Some(Operation::Release | Operation::GiveOut | Operation::Run) => false,
            Some(Operation::Acquire) if self.0.kind == ErrorKind::Lost => true,
            _ => self.0.kind.is_transient(),
        }
    }

    /// Returns the failed call, if known.
    #[must_use]
    pub fn operation(&self) -> Option<Operation> {
        self.0.operation
    }

    /// Returns the key, if the failure concerns one key.
    #[must_use]
    pub fn key(&self) -> Option<&LockKey> {
        self.0.key.as_ref()
    }

    /// Returns the store, if known.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// Returns the reason of the loss, for [`ErrorKind::Lost`].
    ///
    /// ```
    /// use leasehold_api::{Error, LossReason};
    /// assert_eq!(Error::lost(LossReason::Expired).loss(), Some(LossReason::Expired));
    /// ```
    #[must_use]
    pub fn loss(&self) -> Option<LossReason> {
        self.0.loss
    }

    /// Returns the time until the next possible grant, for [`ErrorKind::NotDue`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use leasehold_api::{Error, ErrorKind};
    /// let error = Error::not_due(Duration::from_secs(5));
    /// assert_eq!(error.kind(), ErrorKind::NotDue);
    /// assert_eq!(error.retry_after(), Some(Duration::from_secs(5)));
    /// ```
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// Returns the message, without key, store and source.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        write!(f, "{}", inner.kind)?;
        if let Some(operation) = inner.operation {
            write!(f, ": {operation}")?;
        }
        if let Some(key) = &inner.key {
            write!(f, "{} key \"{key}\"", if inner.operation.is_some() { "" } else { ":" })?;
        }
        if let Some(store) = &inner.store {
            write!(f, " on {store}")?;
        }
        if let Some(loss) = inner.loss {
            write!(f, ": {loss}")?;
        }
        write!(f, ": {}", inner.message)?;
        if let Some(retry_after) = inner.retry_after {
            write!(f, " (retry after {retry_after:.1?})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        f.debug_struct("Error")
            .field("kind", &inner.kind)
            .field("operation", &inner.operation)
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
mod tests;
