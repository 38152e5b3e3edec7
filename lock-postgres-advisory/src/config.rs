//! The settings of both scopes.

use std::sync::Arc;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::Engine;
use leasehold_postgres::{Fnv1a64, KeyNumber, PgConfig};

use crate::backend::AdvisoryBackend;
use crate::common::Common;
use crate::wait_session::LockScope;

/// Advisory locks of session scope: many on one connection.
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
}

impl AdvisoryConfig {
    /// Locks on this server, with numbers by [`Fnv1a64`].
    #[must_use]
    pub fn new(server: PgConfig) -> Self {
        Self { server, hasher: Arc::new(Fnv1a64), connections: 1, waiting: 4 }
    }

    /// How keys become numbers; everybody who shares locks must use the same.
    #[must_use]
    pub fn hasher(mut self, hasher: Arc<dyn KeyNumber>) -> Self {
        self.hasher = hasher;
        self
    }

    /// How many connections keep the locks that nobody else wanted: 1 or 2. Default: 1.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// How many more connections may wait in the server's queue, and keep what they waited for; up to
    /// 64. Default: 4. Waiters beyond that ask every 100 ms, and come after those in the queue.
    #[must_use]
    pub fn waiting(mut self, connections: usize) -> Self {
        self.waiting = connections;
        self
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`backend`](Self::backend).
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }

    /// Connects, for an engine that is built by hand.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for settings that cannot be used;
    /// [`Unsupported`](ErrorKind::Unsupported) behind a pooler in transaction mode;
    /// [`SchemaMissing`](ErrorKind::SchemaMissing), [`PermissionDenied`](ErrorKind::PermissionDenied) and
    /// [`Unavailable`](ErrorKind::Unavailable) as the server answers.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn backend(&self) -> Result<AdvisoryBackend, Error> {
        self.server.check()?;
        within("connections", self.connections, 2)?;
        within("waiting connections", self.waiting, 64)?;
        let common = Common::new(self.server.clone(), Arc::clone(&self.hasher), self.connections);
        AdvisoryBackend::open(common, LockScope::Session, self.waiting).await
    }
}

/// Advisory locks of transaction scope as a lock like the others: one connection for each that is held
/// or waited for. It works behind poolers in transaction mode; without one,
/// [`AdvisoryConfig`] needs far fewer connections.
#[derive(Clone, Debug)]
pub struct XactConfig {
    pub(crate) server: PgConfig,
    hasher: Arc<dyn KeyNumber>,
    sessions: usize,
}

impl XactConfig {
    /// Locks on this server, with numbers by [`Fnv1a64`].
    #[must_use]
    pub fn new(server: PgConfig) -> Self {
        Self { server, hasher: Arc::new(Fnv1a64), sessions: 16 }
    }

    /// How keys become numbers; everybody who shares locks must use the same.
    #[must_use]
    pub fn hasher(mut self, hasher: Arc<dyn KeyNumber>) -> Self {
        self.hasher = hasher;
        self
    }

    /// How many locks may be held and waited for at once, a connection each; up to 1,024. Default: 16.
    #[must_use]
    pub fn sessions(mut self, sessions: usize) -> Self {
        self.sessions = sessions;
        self
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`backend`](Self::backend).
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }

    /// Connects, for an engine that is built by hand.
    ///
    /// # Errors
    ///
    /// As [`AdvisoryConfig::backend`], but a pooler in transaction mode is welcome.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
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
