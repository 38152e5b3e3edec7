//! Returns rows whose lease has ended, whosever they were.

use std::sync::Arc;

use tokio::time::{sleep, timeout};

use super::shared::Shared;
use crate::error::ClaimError;

/// The most rows of one sweep.
const LIMIT: u32 = 1000;

pub(crate) async fn run(shared: Arc<Shared>) {
    let every = shared.config.sweep_every;
    let mut failures = 0_u32;
    loop {
        // Up to half of it sooner: any number of workers sweep, and not all at once.
        let pause = every.mul_f64(1.0 - fastrand::f64() / 2.0) * 2_u32.pow(failures.min(4));
        tokio::select! {
            () = shared.stop.cancelled() => return,
            () = sleep(pause) => {}
        }
        match sweep(&shared).await {
            Ok(()) => failures = 0,
            Err(error) => {
                shared.report(&error);
                failures = failures.saturating_add(1);
            }
        }
    }
}

async fn sweep(shared: &Shared) -> Result<(), ClaimError> {
    loop {
        let Ok(swept) = timeout(shared.config.call_limit(), shared.store.sweep(LIMIT)).await else {
            // What does not answer is asked again after the pause.
            return Ok(());
        };
        let swept = swept?;
        if !swept.returned.is_empty() {
            tracing::info!(store = %shared.store, rows = swept.returned.len(), "leases have ended");
            shared.wake_now();
        }
        shared.report_exhausted(&swept.exhausted);
        if swept.returned.len() + swept.exhausted.len() < LIMIT as usize || shared.stop.is_cancelled() {
            return Ok(());
        }
    }
}
