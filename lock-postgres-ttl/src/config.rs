//! How to connect.

use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;

/// The TTL of grants whose caller names none: 30 s, renewed every 10 s.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The shortest TTL: renewal at a third of it must survive a busy network.
pub const MIN_TTL: Duration = Duration::from_millis(100);

/// The longest TTL: a day. Longer ones would leave a dead holder's key shut for that long.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 3600);

/// How often waiters ask, on average. Notifications make the usual hand-over immediate.
pub const DEFAULT_POLL: Duration = Duration::from_millis(500);

/// Connects with the defaults of [`TtlConfig`].
///
/// # Errors
///
/// As [`TtlConfig::connect`], and [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) when `url` is
/// not the URL of a Postgres database.
///
/// # Cancel safety
///
/// A dropped call closes what it has opened.
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
}

impl TtlConfig {
    /// The defaults: leases of [`DEFAULT_TTL`], two connections, [`DEFAULT_POLL`], rows removed a day
    /// after their end.
    #[must_use]
    pub const fn new(postgres: PgConfig) -> Self {
        Self {
            postgres,
            ttl: DEFAULT_TTL,
            poll: DEFAULT_POLL,
            connections: 2,
            purge_after: Some(Duration::from_secs(24 * 3600)),
        }
    }

    /// The TTL of grants whose caller names none, [`MIN_TTL`] to [`MAX_TTL`].
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How often waiters ask, on average: 10 ms to 60 s.
    #[must_use]
    pub const fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// How many connections to keep, at least one. All locks share them; the second is opened when the
    /// first is busy.
    #[must_use]
    pub const fn connections(mut self, connections: u8) -> Self {
        self.connections = connections;
        self
    }

    /// How long after their end rows are removed, an hour at least; `None` leaves it to you. Fencing
    /// tokens grow on all the same.
    #[must_use]
    pub const fn purge_after(mut self, age: Option<Duration>) -> Self {
        self.purge_after = age;
        self
    }

    /// Connects and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`backend`](Self::backend), and [`NoRuntime`](leasehold_api::ErrorKind::NoRuntime) outside of a
    /// tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }
}
