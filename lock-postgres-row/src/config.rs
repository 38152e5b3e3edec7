//! How to connect.

use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;

/// How often waiters ask, on average. Notifications make the usual hand-over immediate.
pub const DEFAULT_POLL: Duration = Duration::from_millis(500);

/// How often holders look whether an operator has opened their rows.
pub const DEFAULT_CONFIRM: Duration = Duration::from_secs(2);

/// A holder that could not look for so many intervals counts its rows as lost.
pub(crate) const CONFIRMS: u32 = 5;

/// Connects with the defaults of [`RowConfig`].
///
/// # Errors
///
/// As [`RowConfig::connect`], and [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) when `url` is
/// not the URL of a Postgres database.
///
/// # Cancel safety
///
/// A dropped call closes what it has opened.
pub async fn connect(url: &str) -> Result<Engine, Error> {
    RowConfig::new(PgConfig::from_url(url)?).connect().await
}

/// The settings of one client.
#[derive(Clone, Debug)]
pub struct RowConfig {
    pub(crate) postgres: PgConfig,
    pub(crate) poll: Duration,
    pub(crate) confirm: Duration,
    pub(crate) connections: u8,
    pub(crate) purge_after: Option<Duration>,
}

impl RowConfig {
    /// The defaults: two connections, [`DEFAULT_POLL`], [`DEFAULT_CONFIRM`], rows removed a day after they
    /// were opened.
    #[must_use]
    pub const fn new(postgres: PgConfig) -> Self {
        Self {
            postgres,
            poll: DEFAULT_POLL,
            confirm: DEFAULT_CONFIRM,
            connections: 2,
            purge_after: Some(Duration::from_secs(24 * 3600)),
        }
    }

    /// How often waiters ask, on average: 10 ms to 60 s.
    #[must_use]
    pub const fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// How often holders look whether an operator has opened their rows, 50 ms to 60 s. After five intervals
    /// without an answer they count as lost for good; the rows stay shut, also when the server can be reached
    /// again, until an operator opens them.
    #[must_use]
    pub const fn confirm(mut self, every: Duration) -> Self {
        self.confirm = every;
        self
    }

    /// How many connections to keep, at least one. All locks share them; the second is opened when the
    /// first is busy.
    #[must_use]
    pub const fn connections(mut self, connections: u8) -> Self {
        self.connections = connections;
        self
    }

    /// How long after they were opened rows are removed, an hour at least; `None` leaves it to you. Fencing
    /// tokens grow on all the same. Rows that are shut are never removed.
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
