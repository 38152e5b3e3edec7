//! Listens for notifications of new work. They are only hints, because polls find the work later without them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use tokio::time::timeout;

use super::backoff::Backoff;
use super::shared::ClaimerCore;
use crate::error::ClaimError;

/// The pauses between tries to listen.
const PAUSES: Backoff = Backoff::exponential(Duration::from_millis(400)).at_most(Duration::from_secs(60));

pub(crate) async fn run(shared: Arc<ClaimerCore>) {
    let mut failures = 0;
    loop {
        let error = tokio::select! {
            () = shared.stop.cancelled() => return,
            error = listen(&shared, &mut failures) => error,
        };
        // While not listening: wakes the feeder once for missed work, and then relies on polls.
        shared.announced.store(false, Ordering::Release);
        shared.wake_now();
        if matches!(error, ClaimError::Unsupported(_)) {
            tracing::debug!(store = %shared.store, %error, "not listening; polling instead");
        } else {
            shared.report(&error);
        }
        failures += 1;
        if !shared.rest(PAUSES.after(failures)).await {
            return;
        }
    }
}

/// Listens until an error, which it returns.
async fn listen(shared: &ClaimerCore, failures: &mut u32) -> ClaimError {
    let mut wake = match timeout(shared.config.call_limit(), shared.store.listen()).await {
        Ok(Ok(wake)) => wake,
        Ok(Err(error)) => return error,
        Err(_) => {
            let message = "the store did not begin to listen in time; it is tried again";
            return Error::new(ErrorKind::Unavailable, message).into();
        }
    };
    *failures = 0;
    loop {
        shared.announced.store(wake.announces(), Ordering::Release);
        // Wakes the feeder after the start of listening and at each notification, because earlier notifications were
        // missed.
        shared.wake_now();
        if let Err(error) = wake.woken().await {
            return error;
        }
    }
}
