//! The settings of the row store.

use std::time::Duration;

use leasehold_api::Error;
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;

/// The default average poll interval of waiters. Notifications make the usual hand-over immediate.
pub const DEFAULT_POLL: Duration = Duration::from_millis(500);

/// The default interval at which holders check whether an operator has released their rows.
pub const DEFAULT_CONFIRM: Duration = Duration::from_secs(2);

/// Number of intervals without a successful check after which a holder counts its rows as lost.
pub(crate) const CONFIRMS: u32 = 5;

/// Connects with the defaults of [`RowConfig`].
///
/// # Errors
///
/// See [`RowConfig::connect`]. Also [`InvalidOption`](leasehold_api::ErrorKind::InvalidOption) if `url` is not the URL
/// of a Postgres database.
///
/// # Cancel safety
///
/// If dropped, the call closes the sessions it has opened.
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
    pub(crate) handover: bool,
}

impl RowConfig {
    /// Creates the default settings: two connections, [`DEFAULT_POLL`], [`DEFAULT_CONFIRM`], rows removed a day after
    /// their release.
    #[must_use]
    pub const fn new(postgres: PgConfig) -> Self {
        Self {
            postgres,
            poll: DEFAULT_POLL,
            confirm: DEFAULT_CONFIRM,
            connections: 2,
            purge_after: Some(Duration::from_secs(24 * 3600)),
            handover: true,
        }
    }

    /// Sets the average poll interval of waiters, 10 ms to 60 s.
    #[must_use]
    pub const fn poll(mut self, every: Duration) -> Self {
        self.poll = every;
        self
    }

    /// Sets the interval at which holders check whether an operator has released their rows, 50 ms to 60 s. After five
    /// intervals without an answer the holder counts its rows as lost permanently. The rows stay locked until an
    /// operator releases them, even if the server can be reached again.
    #[must_use]
    pub const fn confirm(mut self, every: Duration) -> Self {
        self.confirm = every;
        self
    }

    /// Sets the number of connections, at least one. All locks share them. The second is opened when the first is busy.
    #[must_use]
    pub const fn connections(mut self, connections: u8) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the age since their release at which rows are removed, at least an hour. With `None` the store removes
    /// none. Fencing tokens keep growing after a removal. Locked rows are never removed.
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
