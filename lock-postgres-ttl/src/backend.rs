//! One client of the store, and what it declares.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AdminCapabilities, Capabilities, Error, Fairness, Fencing, LeaseBounds, Scope};
use leasehold_engine::{Timing, Waiting};
use leasehold_postgres::table::{TableBackend, TableSettings};

use crate::config::{MAX_TTL, MIN_TTL, TtlConfig};
use crate::fence::extension;
use crate::sql::LEASES;

/// How often to look whether leases are still there, which renewals find out as well.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// One client of the lease store.
pub type TtlBackend = TableBackend;

/// Connects a client with these settings, which were checked.
pub(crate) async fn open(config: &TtlConfig) -> Result<TtlBackend, Error> {
    let settings = TableSettings {
        capabilities: capabilities(config),
        timing: timing(config),
        poll: config.poll,
        connections: config.connections,
        purge_after: config.purge_after,
        extension: Some(extension(&config.postgres)),
    };
    let connected = TableBackend::connect(&config.postgres, &LEASES, settings).await;
    connected.map_err(|error| error.with_store(Arc::from(config.postgres.to_string())))
}

fn capabilities(config: &TtlConfig) -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.lease = Some(LeaseBounds::new(Some(config.ttl), MIN_TTL, MAX_TTL));
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Unordered;
    // Told immediately by a notification, by the next look if that is lost.
    has.loss_detection = CHECK_EVERY * 2;
    has.undo = Duration::from_secs(5);
    // A poll is jittered by a quarter, and a process that released yields to others for one and a half.
    has.handover = config.poll * 3 + Duration::from_secs(1);
    has.crash_release = Some(config.ttl + Duration::from_secs(1));
    has.cooldown = true;
    has.admin = AdminCapabilities::all();
    has
}

fn timing(config: &TtlConfig) -> Timing {
    let mut timing = Timing::default();
    timing.waiting = Waiting::Poll { every: config.poll };
    timing.look = Some(CHECK_EVERY);
    timing
}
