//! One client of the store, and what it declares.

use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AdminCapabilities, Capabilities, Error, Fairness, Fencing, Scope};
use leasehold_engine::{Confirm, Timing, Waiting};
use leasehold_postgres::table::{TableBackend, TableSettings};

use crate::config::{CONFIRMS, RowConfig};
use crate::sql::MUTEXES;

/// One client of the mutex store.
pub type RowBackend = TableBackend;

/// Connects a client with these settings, which were checked.
pub(crate) async fn open(config: &RowConfig) -> Result<RowBackend, Error> {
    let settings = TableSettings {
        capabilities: capabilities(config),
        timing: timing(config),
        poll: config.poll,
        connections: config.connections,
        purge_after: config.purge_after,
        extension: None,
    };
    let connected = TableBackend::connect(&config.postgres, &MUTEXES, settings).await;
    connected.map_err(|error| error.with_store(Arc::from(config.postgres.to_string())))
}

fn capabilities(config: &RowConfig) -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.fencing = Fencing::Durable;
    has.fairness = Fairness::Unordered;
    // Told immediately by a notification, by the next look if that is lost, by silence after five.
    has.loss_detection = config.confirm * CONFIRMS;
    has.undo = Duration::from_secs(5);
    // A poll is jittered by a quarter, and a process that released yields to others for one and a half.
    has.handover = config.poll * 3 + Duration::from_secs(1);
    // On purpose: the latch stays shut.
    has.crash_release = None;
    has.cooldown = true;
    has.admin = AdminCapabilities::all();
    has
}

fn timing(config: &RowConfig) -> Timing {
    let mut timing = Timing::default();
    timing.waiting = Waiting::Poll { every: config.poll };
    timing.confirm = Some(Confirm::new(config.confirm, config.confirm * CONFIRMS).sticky());
    timing
}
