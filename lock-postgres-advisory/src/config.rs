//! The settings of both scopes.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::Engine;
use leasehold_postgres::{Fnv1a64, KeyNumber, PgConfig};

use crate::backend::AdvisoryBackend;
use crate::common::Common;
use crate::wait_session::LockScope;

/// Advisory locks of session scope, many on one connection.
///
/// ```no_run
/// use leasehold_api::LockExt;
/// use leasehold_postgres::PgConfig;
/// use leasehold_postgres_advisory::AdvisoryConfig;
///
/// # async fn example() -> Result<(), leasehold_api::Error> {
/// let lock = AdvisoryConfig::new(PgConfig::from_url("postgres://app@db/app")?).connect().await?;
/// let guard = lock.key("ledger:42").acquire().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AdvisoryConfig {
    pub(crate) server: PgConfig,
    hasher: Arc<dyn KeyNumber>,
    connections: usize,
    waiting: usize,
    handover: bool,
}

impl AdvisoryConfig {
    /// Creates the default settings for this server, with numbers by [`Fnv1a64`].
    #[must_use]
    pub fn new(server: PgConfig) -> Self {
        Self { server, hasher: Arc::new(Fnv1a64), connections: 1, waiting: 4, handover: true }
    }

    /// Sets the mapping from keys to numbers, which must be the same in all programs that share locks.
    #[must_use]
    pub fn hasher(mut self, hasher: Arc<dyn KeyNumber>) -> Self {
        self.hasher = hasher;
        self
    }

    /// Sets the number of connections for uncontended locks: 1 or 2. Default: 1.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the number of further connections that can wait in the server's queue and hold the lock they waited for, up
    /// to 64. Default: 4. Waiters beyond that poll every 100 ms, after the queued waiters.
    #[must_use]
    pub fn waiting(mut self, connections: usize) -> Self {
        self.waiting = connections;
        self
    }

    /// Sets whether callers of this client pass a hold to each other for a short time, without the server. By default
    /// they do.
    #[must_use]
    pub fn handover(mut self, on: bool) -> Self {
        self.handover = on;
        self
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// See [`backend`](Self::backend).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }

    /// Connects, for an engine that the caller builds.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if a setting is out of range.
    /// [`Unsupported`](ErrorKind::Unsupported) behind a pooler in transaction mode.
    /// [`SchemaMissing`](ErrorKind::SchemaMissing), [`PermissionDenied`](ErrorKind::PermissionDenied) or
    /// [`Unavailable`](ErrorKind::Unavailable) if the server cannot be used.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn backend(&self) -> Result<AdvisoryBackend, Error> {
        self.server.check()?;
        within("connections", self.connections, 2)?;
        within("waiting connections", self.waiting, 64)?;
        let common = Common::new(self.server.clone(), Arc::clone(&self.hasher), self.connections);
        let backend = AdvisoryBackend::open(common, LockScope::Session, self.waiting).await?;
        Ok(backend.handover(self.handover))
    }
}

/// Advisory locks of transaction scope behind the common lock interface, with one connection per held or awaited lock.
/// It works behind poolers in transaction mode. Without a pooler, [`AdvisoryConfig`] needs far fewer connections.
///
/// It has shared locks, but no permits. A waiter for a permit would need a turn that ends before its permit, and locks of a
/// transaction end together.
#[derive(Clone, Debug)]
pub struct XactConfig {
    pub(crate) server: PgConfig,
    hasher: Arc<dyn KeyNumber>,
    sessions: usize,
}

impl XactConfig {
    /// Creates the default settings for this server, with numbers by [`Fnv1a64`].
    #[must_use]
    pub fn new(server: PgConfig) -> Self {
        Self { server, hasher: Arc::new(Fnv1a64), sessions: 16 }
    }

    /// Sets the mapping from keys to numbers, which must be the same in all programs that share locks.
    #[must_use]
    pub fn hasher(mut self, hasher: Arc<dyn KeyNumber>) -> Self {
        self.hasher = hasher;
        self
    }

    /// Sets the maximum number of locks held or awaited at once, with a connection each, up to 1,024. Default: 16.
    #[must_use]
    pub fn sessions(mut self, sessions: usize) -> Self {
        self.sessions = sessions;
        self
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// See [`backend`](Self::backend).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }

    /// Connects, for an engine that the caller builds.
    ///
    /// # Errors
    ///
    /// See [`AdvisoryConfig::backend`], but a pooler in transaction mode is accepted.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn backend(&self) -> Result<AdvisoryBackend, Error> {
        self.server.check()?;
        within("sessions", self.sessions, 1024)?;
        let common = Common::new(self.server.clone(), Arc::clone(&self.hasher), 1);
        AdvisoryBackend::open(common, LockScope::Transaction, self.sessions).await
    }
}

fn within(what: &str, given: usize, most: usize) -> Result<(), Error> {
    if (1..=most).contains(&given) {
        return Ok(());
    }
    let message = format!("{given} {what} are out of bounds; choose 1 to {most}");
    Err(Error::new(ErrorKind::InvalidOption, message))
}
