//! The settings of the lease store.

use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;

/// The default TTL of a grant: 30 s, renewed every 10 s.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The shortest TTL, because a renewal after a third of it must survive a busy network.
pub const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest TTL, a day, because a dead holder's key stays locked for up to its TTL.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 3600);

/// The default average poll interval of waiters. Notifications make the usual hand-over immediate.
pub const DEFAULT_POLL: Duration = Duration::from_millis(500);

/// Connects with the defaults of [`TtlConfig`].
///
/// # Errors
///
/// See [`TtlConfig::connect`]. Also [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) if `url` is not the URL
/// of a Postgres database.
///
/// # Cancel safety
///
/// If dropped, the call closes the sessions it has opened.
pub async fn connect(url: &str) -> Result<Engine, Error> {
    TtlConfig::new(PgConfig::from_url(url)?).connect().await
}

/// The settings of one client.
#[derive(Clone, Debug)]
pub struct TtlConfig {
    pub(crate) postgres: PgConfig,
    pub(crate) ttl: Duration,
    pub(crate) poll: Duration,
    pub(crate) connections: u8,
    pub(crate) purge_after: Option<Duration>,
    pub(crate) handover: bool,
}

impl TtlConfig {
    /// Creates the default settings: leases of [`DEFAULT_TTL`], two connections, [`DEFAULT_POLL`], rows removed a day
    /// after their end.
    #[must_use]
    pub const fn new(postgres: PgConfig) -> Self {
        Self {
            postgres,
            ttl: DEFAULT_TTL,
            poll: DEFAULT_POLL,
            connections: 2,
            purge_after: Some(Duration::from_secs(24 * 3600)),
            handover: true,
        }
    }

    /// Sets the TTL of grants without an explicit one, [`MIN_TTL`] to [`MAX_TTL`].
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Sets the average poll interval of waiters, 10 ms to 60 s.
    #[must_use]
    pub const fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Sets the number of connections, at least one. All locks share them. The second is opened when the first is busy.
    #[must_use]
    pub const fn connections(mut self, connections: u8) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the age since their end at which rows are removed, at least an hour. With `None` the store removes none.
    /// Fencing tokens keep growing after a removal.
    #[must_use]
    pub const fn purge_after(mut self, age: Option<Duration>) -> Self {
        self.purge_after = age;
        self
    }

    /// Sets whether callers of this client pass a hold to each other for a short time, without the server. By default
    /// they do.
    #[must_use]
    pub const fn handover(mut self, on: bool) -> Self {
        self.handover = on;
        self
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// See [`backend`](Self::backend). Also [`NoRuntime`](leasehold_api::ErrorKind::NoRuntime) outside of a tokio
    /// runtime.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }
}
