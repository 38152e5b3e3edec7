//! The client of the row store, with its capabilities and timing.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AdminCapabilities, Capabilities, Error, ErrorKind, Fairness, Fencing, Scope};
use leasehold_engine::{Confirm, Timing, Waiting};
use leasehold_postgres::table::{TableBackend, TableSettings};

use crate::config::{CONFIRMS, RowConfig};
use crate::sql::MUTEXES;

/// How long callers of one client pass a hold to each other.
const HANDOVER_FOR: Duration = Duration::from_millis(10);

/// The maximum number of permits of a key. Each is a row, which a new semaphore inserts, and a refused request reads.
const MAX_PERMITS: u32 = 1000;

/// One client of the row store.
pub type RowBackend = TableBackend;

impl RowConfig {
    /// Connects, for an engine that the caller builds.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if a setting is out of range.
    /// [`Unavailable`](ErrorKind::Unavailable), [`PermissionDenied`](ErrorKind::PermissionDenied) or
    /// [`SchemaMissing`](ErrorKind::SchemaMissing) if the server cannot be used.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes the sessions it has opened.
    pub async fn backend(&self) -> Result<RowBackend, Error> {
        let (min, max) = (Duration::from_millis(50), Duration::from_secs(60));
        if !(min..=max).contains(&self.confirm) {
            let message = format!("holders look every {min:?} to {max:?}; choose an interval between them");
            return Err(Error::new(ErrorKind::InvalidOption, message).with_store(self.postgres.to_string()));
        }
        let settings = TableSettings {
            capabilities: capabilities(self),
            timing: timing(self),
            poll: self.poll,
            connections: self.connections,
            purge_after: self.purge_after,
            extension: None,
        };
        let connected = TableBackend::connect(&self.postgres, &MUTEXES, settings).await;
        connected.map_err(|error| error.with_store(Arc::from(self.postgres.to_string())))
    }
}

fn capabilities(config: &RowConfig) -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Unordered;
    // A notification reports a loss immediately. If the notification is lost, the next check detects the
    // loss. Without answers, the loss counts after five intervals.
    has.loss_detection = config.confirm * CONFIRMS;
    has.undo = Duration::from_secs(5);
    // Three intervals and a second, because a poll is jittered by a quarter, and a client that released
    // leaves the key to others for one and a half intervals.
    has.handover = config.poll * 3 + Duration::from_secs(1);
    // Never, on purpose: the row stays locked after a crash.
    has.crash_release = None;
    has.cooldown = true;
    has.modes.shared = true;
    has.modes.max_permits = MAX_PERMITS;
    has.relabel = true;
    has.admin = AdminCapabilities::all();
    has
}

fn timing(config: &RowConfig) -> Timing {
    let mut timing = Timing::default();
    timing.waiting = Waiting::Poll { every: config.poll };
    timing.handover_for = if config.handover { HANDOVER_FOR } else { Duration::ZERO };
    timing.confirm = Some(Confirm::new(config.confirm, config.confirm * CONFIRMS).sticky());
    timing
}
