//! Deletes rows whose retention is over, if the spec has one.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::shared::ClaimerCore;
use crate::error::ClaimError;
use crate::spec::Retention;

/// The largest number of rows that one statement deletes. A pause follows each, because others use the server too.
const BATCH: u32 = 500;
const PAUSE: Duration = Duration::from_millis(100);

/// The shortest and the longest interval of purges. In between, it is a tenth of the retention.
const OFTEN: Duration = Duration::from_secs(60);
const SELDOM: Duration = Duration::from_secs(3600);

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let Retention::KeepFor(keep) = shared.store.spec().inner.retention else { return };
    let every = (keep / 10).clamp(OFTEN, SELDOM);
    // Waits for half to all of the interval, at random, so processes do not purge together.
    while shared.rest(every.mul_f64(1.0 - fastrand::f64() / 2.0)).await {
        if let Err(error) = purge(&shared).await {
            shared.report(&error);
        }
    }
}

async fn purge(shared: &ClaimerCore) -> Result<(), ClaimError> {
    loop {
        let Ok(deleted) = timeout(shared.config.call_limit(), shared.store.purge(BATCH)).await else {
            return Ok(());
        };
        let deleted = deleted?;
        shared.metrics.purged(deleted);
        if deleted < u64::from(BATCH) || !shared.rest(PAUSE).await {
            return Ok(());
        }
    }
}
