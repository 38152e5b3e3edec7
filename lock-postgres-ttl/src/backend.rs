//! The client of the lease store, with its capabilities and timing.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{
    AdminCapabilities, Capabilities, Error, ErrorKind, Fairness, Fencing, LeaseBounds, Scope,
};
use leasehold_engine::{Timing, Waiting};
use leasehold_postgres::table::{TableBackend, TableSettings};

use crate::config::{MAX_TTL, MIN_TTL, TtlConfig};
use crate::fence::extension;
use crate::sql::LEASES;

/// Interval at which the engine checks that leases still exist. Renewals detect a loss as well.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// How long callers of one client pass a hold to each other.
const HANDOVER_FOR: Duration = Duration::from_millis(10);

/// The maximum number of permits of a key. Each is a row, which a new semaphore inserts, and a refused request reads.
const MAX_PERMITS: u32 = 1000;

/// One client of the lease store.
pub type TtlBackend = TableBackend;

impl TtlConfig {
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
    pub async fn backend(&self) -> Result<TtlBackend, Error> {
        if !(MIN_TTL..=MAX_TTL).contains(&self.ttl) {
            let message = format!("a default TTL must be between {MIN_TTL:?} and {MAX_TTL:?}");
            return Err(Error::new(ErrorKind::InvalidOption, message).with_store(self.postgres.to_string()));
        }
        let settings = TableSettings {
            capabilities: capabilities(self),
            timing: timing(self),
            poll: self.poll,
            connections: self.connections,
            purge_after: self.purge_after,
            extension: Some(extension(&self.postgres)),
        };
        let connected = TableBackend::connect(&self.postgres, &LEASES, settings).await;
        connected.map_err(|error| error.with_store(Arc::from(self.postgres.to_string())))
    }
}

fn capabilities(config: &TtlConfig) -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.lease = Some(LeaseBounds::new(Some(config.ttl), MIN_TTL, MAX_TTL));
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Unordered;
    // A notification reports a loss immediately. If the notification is lost, the next check detects the
    // loss.
    has.loss_detection = CHECK_EVERY * 2;
    has.undo = Duration::from_secs(5);
    // Three intervals and a second, because a poll is jittered by a quarter, and a client that released
    // leaves the key to others for one and a half intervals.
    has.handover = config.poll * 3 + Duration::from_secs(1);
    has.crash_release = Some(config.ttl + Duration::from_secs(1));
    has.cooldown = true;
    has.modes.shared = true;
    has.modes.max_permits = MAX_PERMITS;
    has.relabel = true;
    has.portable = true;
    has.admin = AdminCapabilities::all();
    has
}

fn timing(config: &TtlConfig) -> Timing {
    let mut timing = Timing::default();
    timing.waiting = Waiting::Poll { every: config.poll };
    timing.handover_for = if config.handover { HANDOVER_FOR } else { Duration::ZERO };
    timing.look = Some(CHECK_EVERY);
    timing
}
