//! Puts back rows whose leases have ended, for all processes. It sleeps until the first lease ends, so an idle table
//! costs next to nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::shared::ClaimerCore;
use crate::error::ClaimError;
use crate::store::{Swept, Upkeep};

/// The largest number of rows in one sweep.
const LIMIT: u32 = 1000;

/// The longest random delay before a sweep, so processes do not all sweep when the same lease ends.
const SPREAD: Duration = Duration::from_millis(250);

/// The number of times that the pause doubles after consecutive fruitless sweeps.
const GROWTH: u32 = 3;

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let (least, longest) = (shared.config.sweep_pause(), shared.config.sweep_every);
    let mut pause = least.min(longest);
    let mut fruitless = 0_u32;
    while shared.rest(pause).await {
        let looked = look(&shared).await;
        fruitless = match &looked {
            Ok(Upkeep { swept, next: Some(Duration::ZERO) }) if is_empty(swept) => {
                fruitless.saturating_add(1)
            }
            Ok(_) => 0,
            Err(_) => fruitless.saturating_add(1),
        };
        pause = match looked {
            // No lease is running, so the next sweep is about a lease later: new claims last for that long.
            Ok(Upkeep { next: None, .. }) => longest.mul_f64(1.0 - fastrand::f64() / 5.0),
            Ok(Upkeep { next: Some(next), .. }) if !next.is_zero() => next + SPREAD.mul_f64(fastrand::f64()),
            // Sweeps again after a short but growing pause. More might be left to sweep, or rows are locked, or the
            // table refuses a row until that is fixed.
            Ok(_) | Err(_) => least.mul_f64(1.0 - fastrand::f64() / 2.0) * 2_u32.pow(fruitless.min(GROWTH)),
        };
        pause = pause.min(longest);
        if let Err(error) = looked {
            shared.report(&error);
        }
    }
}

async fn look(shared: &ClaimerCore) -> Result<Upkeep, ClaimError> {
    loop {
        let Ok(upkeep) = timeout(shared.config.call_limit(), shared.store.upkeep(LIMIT)).await else {
            // Retries after the pause, because the call got no answer.
            return Ok(Upkeep { next: Some(Duration::ZERO), ..Upkeep::default() });
        };
        let upkeep = upkeep?;
        let swept = &upkeep.swept;
        shared.metrics.swept(swept);
        if !swept.returned.is_empty() {
            tracing::info!(store = %shared.store, rows = swept.returned.len(), "leases have ended");
            shared.wake_now();
        }
        shared.report_exhausted(&swept.exhausted);
        if swept.returned.len() + swept.exhausted.len() < LIMIT as usize || shared.stop.is_cancelled() {
            return Ok(upkeep);
        }
    }
}

fn is_empty(swept: &Swept) -> bool {
    swept.returned.is_empty() && swept.exhausted.is_empty()
}
