//! How to connect.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AdminCapabilities, Capabilities, Error, ErrorKind, Fairness, Fencing, Scope};
use leasehold_engine::{Confirm, Engine, Timing, Waiting};
use leasehold_postgres::PgConfig;
use leasehold_postgres::table::{TableBackend, TableSettings};

use crate::sql::MUTEXES;

/// How often waiters ask, on average. Notifications make the usual hand-over immediate.
pub const DEFAULT_POLL: Duration = Duration::from_millis(500);

/// How often holders look whether an operator has opened their rows.
pub const DEFAULT_CONFIRM: Duration = Duration::from_secs(2);

/// A holder that could not look for so many intervals counts its rows as lost.
const CONFIRMS: u32 = 5;

/// One client of the mutex store.
pub type RowBackend = TableBackend;

/// Connects with the defaults of [`RowConfig`].
///
/// # Errors
///
/// As [`RowConfig::connect`], and [`InvalidOption`](ErrorKind::InvalidOption) when `url` is not the URL of
/// a Postgres database.
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
    postgres: PgConfig,
    poll: Duration,
    confirm: Duration,
    connections: u8,
    purge_after: Option<Duration>,
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

    /// How often holders look whether an operator has opened their rows, 50 ms to 60 s. After five
    /// intervals without an answer they count as lost for good; the rows stay shut, also when the server can be
    /// reached again, until an operator opens them.
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
    /// As [`backend`](Self::backend), and [`Closed`](ErrorKind::Closed) outside of a tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn connect(&self) -> Result<Engine, Error> {
        Engine::start(self.backend().await?)
    }

    /// Connects for an engine that is built by hand.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for settings out of bounds;
    /// [`Unavailable`](ErrorKind::Unavailable), [`PermissionDenied`](ErrorKind::PermissionDenied) and
    /// [`SchemaMissing`](ErrorKind::SchemaMissing) when the server cannot be used.
    ///
    /// # Cancel safety
    ///
    /// A dropped call closes what it has opened.
    pub async fn backend(&self) -> Result<RowBackend, Error> {
        let (min, max) = (Duration::from_millis(50), Duration::from_secs(60));
        if !(min..=max).contains(&self.confirm) {
            let message = format!("holders look every {min:?} to {max:?}; choose an interval between them");
            return Err(Error::new(ErrorKind::InvalidOption, message).with_store(self.postgres.to_string()));
        }
        let settings = TableSettings {
            capabilities: self.capabilities(),
            timing: self.timing(),
            poll: self.poll,
            connections: self.connections,
            // The engine's own confirmation does it.
            purge_after: self.purge_after,
            extension: None,
        };
        let connected = TableBackend::connect(&self.postgres, &MUTEXES, settings).await;
        connected.map_err(|error| error.with_store(Arc::from(self.postgres.to_string())))
    }

    fn capabilities(&self) -> Capabilities {
        let mut has = Capabilities::new(Scope::Network);
        has.fencing = Fencing::Durable;
        has.fairness = Fairness::Unordered;
        // Told immediately by a notification, by the next look if that is lost, by silence after five.
        has.loss_detection = self.confirm * CONFIRMS;
        has.undo = Duration::from_secs(5);
        // A poll is jittered by a quarter, and a process that released yields to others for one and a half.
        has.handover = self.poll * 3 + Duration::from_secs(1);
        // On purpose: the latch stays shut.
        has.crash_release = None;
        has.cooldown = true;
        has.admin = AdminCapabilities::all();
        has
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = Waiting::Poll { every: self.poll };
        timing.confirm = Some(Confirm::new(self.confirm, self.confirm * CONFIRMS).sticky());
        timing
    }
}
